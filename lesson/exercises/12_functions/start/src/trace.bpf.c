// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set by main.rs: the number of functions */
	__type(key, u32); /* the function's cookie */
	__type(value, u64); /* its calls on this CPU */
} calls SEC(".maps");

/* One program for all functions: the cookie tells it which one is called. */
SEC("kprobe")
int function_entry(struct pt_regs *ctx)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
