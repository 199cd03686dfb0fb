// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16);
	__type(key, u64);
	__type(value, u64);
} starts SEC(".maps");

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	u64 io = (u64)bio;
	u64 *found = bpf_map_lookup_elem(&starts, &io);
	u64 start;

	/* The lesson of stage 03: whether there is an entry must be checked first. */
	start = *found;
	bpf_printk("%llu", start);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
