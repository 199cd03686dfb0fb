// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 completed, dropped, unmatched; /* all CPUs share them: simple, but slow on many */
u64 started, queued; /* requests with a time of allocation, and their ns until the driver got them */
u64 not_noted;

struct start {
	u64 time; /* ns */
	u64 allocated; /* ns; with its address, this identifies a request */
	u64 sector; /* of dev; 512 bytes each */
	u64 dev; /* the disk */
	s64 stack_id; /* a key of stacks, or a negative error */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the I/O */
	__type(value, struct start);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* addresses, as deep as the kernel walks */
} stacks SEC(".maps");

struct max_latency { /* the slowest I/O that has completed on this CPU */
	u64 io, end;
	struct start start;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(io_start, struct request *rq)
{
	u64 io = (u64)rq;
	struct start start = {
		.time = bpf_ktime_get_ns(),
		.allocated = BPF_CORE_READ(rq, start_time_ns),
		.sector = BPF_CORE_READ(rq, __sector), /* all ones for a flush */
		.stack_id = bpf_get_stackid(ctx, &stacks, 0),
	};

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		struct start *before = bpf_map_lookup_elem(&starts, &io);
		if (before && before->allocated == start.allocated)
			return 0; /* started again: the first time counts */
		/* The map is full, or the address has a start already: then neither I/O is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}

	u64 before_driver = start.time - start.allocated;
	if (!BPF_CORE_READ(rq, part)) { /* nobody keeps statistics of it */
		__sync_fetch_and_add(&not_noted, 1);
		return 0;
	}
	__sync_fetch_and_add(&started, 1);
	__sync_fetch_and_add(&queued, before_driver);
	bpf_printk("blk_mq_start_request(rq=0x%llx) queued: %llu ns", io, before_driver);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(io_end, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 io = (u64)rq;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (nr_bytes < rq->__data_len)
		return 0; /* a part of it: the rest is started again */
	if (!found || found->allocated != rq->start_time_ns) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	struct start start = *found;
	start.dev = rq->q->disk->major << 20 | rq->q->disk->first_minor;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the I/O */
	__sync_fetch_and_add(&completed, 1);
	struct max_latency *slowest = bpf_map_lookup_elem(&max, &(u32){ 0 });
	if (slowest && (s64)(end - start.time) > (s64)(slowest->end - slowest->start.time))
		*slowest = (struct max_latency){ io, end, start };
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
