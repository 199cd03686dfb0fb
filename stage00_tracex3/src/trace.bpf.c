// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

/* 64 slots for 0 to 63 ns, then 32 for every doubling: a slot is at most 3.1 % wide. */
#define SLOTS (64 + 58 * 32)

/* How many requests fell into each slot. A global variable, which user space reads in place: a kprobe
 * program that interrupts a system call which reads a map is skipped. */
u64 slots[SLOTS];

struct start {
	u64 time, allocated; /* ns; an address and `allocated` identify a request */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the request */
	__type(value, struct start);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64); /* the longest latency on this CPU, ns */
} max SEC(".maps");

u64 dropped, unmatched;

/* The largest shift that leaves 32 or more, found by halving; what it leaves is below 64. */
static __always_inline u32 slot_of(u64 ns)
{
	u32 shift = 0;

	for (u32 step = 32; step; step /= 2)
		if (ns >> (shift + step) >= 32)
			shift += step;
	return shift * 32 + (ns >> shift);
}

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(io_start, struct request *rq)
{
	u64 key = (u64)rq;
	struct start start = { bpf_ktime_get_ns(), BPF_CORE_READ(rq, start_time_ns) };

	if (bpf_map_update_elem(&starts, &key, &start, BPF_NOEXIST)) {
		struct start *before = bpf_map_lookup_elem(&starts, &key);

		if (before && before->allocated == start.allocated)
			return 0; /* requeued and started again: the first time counts */
		/* The map is full, or the address has a start already: then neither request is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &key);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(io_end, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 key = (u64)rq;
	s64 latency;
	struct start *found = bpf_map_lookup_elem(&starts, &key);
	u32 zero = 0, slot;
	u64 *longest;

	if (nr_bytes < rq->__data_len)
		return 0; /* a part of it: the rest is started again */
	if (!found || found->allocated != rq->start_time_ns) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	latency = bpf_ktime_get_ns() - found->time;
	if (latency < 0) /* the clock may step back a little between two CPUs */
		latency = 0;
	if (bpf_map_delete_elem(&starts, &key))
		return 0; /* only the call that deletes the entry completes the request */

	slot = slot_of(latency);
	longest = bpf_map_lookup_elem(&max, &zero);
	if (!longest || slot >= SLOTS)
		return 0; /* never so, but the verifier insists */
	__sync_fetch_and_add(&slots[slot], 1);
	if ((u64)latency > *longest)
		*longest = latency;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
