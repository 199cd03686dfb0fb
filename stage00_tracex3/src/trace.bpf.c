// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

/* 64 slots for 0 to 63 ns, then 32 for every doubling: a slot is at most 3.1 % wide. */
#define SLOTS (64 + 58 * 32)

struct histogram {
	u64 max; /* ns */
	u64 slots[SLOTS];
};

/* A request on its way, from the driver's hands to its end. */
struct in_flight {
	u64 start, made; /* ns; made: by which it is told from others at the same address */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct in_flight);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct histogram);
} latencies SEC(".maps");

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

SEC("tp_btf/block_rq_issue")
int BPF_PROG(block_rq_issue, struct request *rq)
{
	u64 key = (u64)rq;
	struct in_flight issued = { .start = bpf_ktime_get_ns(), .made = rq->start_time_ns };
	struct in_flight *before = bpf_map_lookup_elem(&starts, &key);

	/* Issued again, for the rest of it, or as the device was busy or failed: the first start
	 * counts. Another request at this address: the end of the one before was not seen. */
	if (before && before->made == issued.made)
		return 0;
	if (bpf_map_update_elem(&starts, &key, &issued, BPF_ANY) || before)
		__sync_fetch_and_add(&dropped, 1);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(block_rq_complete, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 key = (u64)rq, end = bpf_ktime_get_ns(), latency;
	struct in_flight *started = bpf_map_lookup_elem(&starts, &key);
	struct histogram *histogram;
	u32 zero = 0, slot;

	if (!started) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	if (nr_bytes < rq->__data_len) /* a part: __data_len is still what was left before */
		return 0;
	latency = end - started->start;
	bpf_map_delete_elem(&starts, &key);

	histogram = bpf_map_lookup_elem(&latencies, &zero);
	slot = slot_of(latency);
	if (!histogram || slot >= SLOTS)
		return 0; /* cannot be; the verifier wants to see it checked */
	/* Atomic: 5.10 lets an interrupt run this program in the midst of itself. */
	__sync_fetch_and_add(&histogram->slots[slot], 1);
	if (latency > histogram->max)
		histogram->max = latency;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
