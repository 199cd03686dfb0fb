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

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u32);
} small SEC(".maps");

SEC("fentry/bio_endio")
int BPF_PROG(reads_too_much, struct bio *bio)
{
	u32 key = 0;
	u64 *found = bpf_map_lookup_elem(&small, &key);

	if (found)
		bpf_printk("%llu", *found);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
