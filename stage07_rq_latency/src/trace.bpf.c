// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "request.h"
#include "record.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched;

struct in_flight {
	u64 start, end;
	sector_t sector, rest;
	dev_t dev;
	s64 stack_id;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct request *);
	__type(value, struct in_flight);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* as deep as the kernel walks */
} stacks SEC(".maps");

/* The slowest request that a CPU has seen, written as a whole. */
struct max_latency {
	u64 taken, bio;
	struct in_flight started;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RECORDS);
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

SEC("fentry/blk_mq_start_request")
int BPF_PROG(blk_mq_start_request_entry, struct request *rq)
{
	struct in_flight started = {
		.start = bpf_ktime_get_ns(),
		.sector = rq->__sector,
		.dev = rq_dev(rq),
		.stack_id = bpf_get_stackid(ctx, &stacks, 0),
	};
	struct in_flight *before = bpf_map_lookup_elem(&starts, &rq);

	/* Issued again: for the rest, the first start counts; as a whole, this one. */
	if (before && before->rest && before->rest == started.sector)
		return 0;
	if (before && before->sector != started.sector)
		__sync_fetch_and_add(&dropped, 1);
	if (bpf_map_update_elem(&starts, &rq, &started, BPF_ANY))
		__sync_fetch_and_add(&dropped, 1);
	if (!quiet)
		bpf_printk("blk_mq_start_request(rq=0x%llx) called: %llu", (u64)rq, started.start);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(block_rq_complete, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 end = bpf_ktime_get_ns();
	sector_t rest = rq->__sector + nr_bytes / 512;
	bool last = nr_bytes >= rq->__data_len;
	struct in_flight *started = bpf_map_lookup_elem(&starts, &rq);

	if (!started) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	started->end = end;
	started->rest = rest;
	if (!last)
		return 0;
	u64 latency = started->end - started->start;
	if (!quiet) {
		bpf_printk("block_rq_complete (rq=0x%llx) called: %llu", (u64)rq, started->end);
		bpf_printk("blk_mq_start_request() -> block_rq_complete() time duration: %llu ns",
			   latency);
	}
	struct max_latency *slowest = take_record(&max);
	if (slowest && latency > slowest->started.end - slowest->started.start) {
		slowest->bio = (u64)rq;
		slowest->started = *started;
	}
	release_record(slowest);
	bpf_map_delete_elem(&starts, &rq);
	__sync_fetch_and_add(&completed, 1);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
