// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set by main.rs: the number of functions */
	__type(key, u32); /* the function's cookie */
	__type(value, u64); /* its calls on this CPU */
} calls SEC(".maps"), returns SEC(".maps");

static void add(void *map, u32 function)
{
	u64 *count = bpf_map_lookup_elem(map, &function);

	if (count)
		*count += 1; /* on this CPU, the kernel runs no second one meanwhile: it skips it */
}

/* One program for all functions: the cookie tells it which one is called. */
SEC("kprobe")
int function_entry(struct pt_regs *ctx)
{
	add(&calls, bpf_get_attach_cookie(ctx));
	return 0;
}

SEC("kretprobe")
int function_return(struct pt_regs *ctx)
{
	add(&returns, bpf_get_attach_cookie(ctx));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
