// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "record.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched;

struct start {
	u64 time; /* ns */
	u64 allocated; /* ns; with its address, this identifies a request */
	sector_t sector; /* of dev */
	dev_t dev;
	u32 unused; /* or there would be a hole, whose bytes the verifier does not know */
	s64 stack_id; /* a key of stacks, or a negative error */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the request */
	__type(value, struct start);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* addresses, as deep as the kernel walks */
} stacks SEC(".maps");

struct max_latency { /* the slowest request that has completed on this CPU */
	u64 busy, io, end;
	struct start start;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RECORDS);
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

/* Before 5.16 a request named its disk. Some commands of a driver have none: 0. */
static __always_inline dev_t rq_dev(struct request *rq)
{
	struct request___old *old = (void *)rq;
	struct gendisk *disk = bpf_core_field_exists(old->rq_disk) ? old->rq_disk : rq->q->disk;

	return disk ? disk->major << 20 | disk->first_minor : 0;
}

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(blk_mq_start_request_entry, struct request *rq)
{
	u64 io = (u64)rq;
	struct start start = {
		.time = bpf_ktime_get_ns(),
		.allocated = BPF_CORE_READ(rq, start_time_ns),
		.sector = BPF_CORE_READ(rq, __sector),
		.stack_id = bpf_get_stackid(ctx, &stacks, 0),
	};

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		struct start *before = bpf_map_lookup_elem(&starts, &io);
		if (before && before->allocated == start.allocated)
			return 0; /* requeued and issued again: the first time counts */
		/* The map is full, or the completion of an earlier request at this address was not seen. */
		if (bpf_map_update_elem(&starts, &io, &start, BPF_ANY) || before)
			__sync_fetch_and_add(&dropped, 1);
	}
	if (!quiet)
		bpf_printk("blk_mq_start_request(rq=0x%llx) called: %llu", io, start.time);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(block_rq_complete, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 io = (u64)rq;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (nr_bytes < rq->__data_len)
		return 0; /* a part of it: the rest is issued again */
	if (!found || found->allocated != rq->start_time_ns) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the request */
	__sync_fetch_and_add(&completed, 1);
	struct max_latency *slowest = take_record(&max);
	if (slowest && (s64)(end - start.time) > (s64)(slowest->end - slowest->start.time)) {
		slowest->io = io;
		slowest->start = start;
		slowest->start.dev = rq_dev(rq);
		slowest->end = end;
	}
	release_record(slowest);
	if (quiet)
		return 0;
	bpf_printk("block_rq_complete (rq=0x%llx) called: %llu", io, end);
	bpf_printk("blk_mq_start_request() -> block_rq_complete() time duration: %llu ns", end - start.time);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
