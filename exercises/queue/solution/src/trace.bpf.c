// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
const volatile u32 first; /* 1 where io_end_probe is loaded, too: it runs first */
u64 completed, dropped, unmatched;
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
	u64 io, end;
	struct start start;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2); /* one for each program, which may interrupt the other one */
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

/* 0 for some commands of a driver, which have no disk. */
static dev_t rq_dev(struct request *rq)
{
	struct gendisk *disk = BPF_CORE_READ(rq, q, disk);

	return disk ? BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor) : 0;
}

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(io_start, struct request *rq)
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
			return 0; /* requeued and started again: the first time counts */
		/* The map is full, or the address has a start already: then neither request is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	if (!quiet)
		bpf_printk("blk_mq_start_request(rq=0x%llx) called: %llu", io, start.time);

	u64 before_driver = start.time - start.allocated;
	if (!BPF_CORE_READ(rq, part)) { /* nobody keeps statistics of it */
		__sync_fetch_and_add(&not_noted, 1);
		return 0;
	}
	__sync_fetch_and_add(&started, 1);
	__sync_fetch_and_add(&queued, before_driver);
	if (!quiet)
		bpf_printk("blk_mq_start_request(rq=0x%llx) queued: %llu ns", io, before_driver);
	return 0;
}

static __noinline int completes(struct request *rq, u32 nr_bytes, u32 program)
{
	u64 io = (u64)rq;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (nr_bytes < BPF_CORE_READ(rq, __data_len))
		return 0; /* a part of it: the rest is started again */
	if (!found || found->allocated != BPF_CORE_READ(rq, start_time_ns)) {
		__sync_fetch_and_add(&unmatched, program == first);
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the request */
	__sync_fetch_and_add(&completed, 1);
	struct max_latency *slowest = bpf_map_lookup_elem(&max, &program);
	if (slowest && (s64)(end - start.time) > (s64)(slowest->end - slowest->start.time)) {
		slowest->io = io;
		slowest->start = start;
		slowest->start.dev = rq_dev(rq);
		slowest->end = end;
	}
	if (quiet)
		return 0;
	bpf_printk("block_rq_complete (rq=0x%llx) called: %llu", io, end);
	bpf_printk("blk_mq_start_request() -> block_rq_complete() time duration: %llu ns", end - start.time);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(io_end, struct request *rq, int error, unsigned int nr_bytes)
{
	return completes(rq, nr_bytes, 0);
}

/* Only where the kernel preempts: there, the program above is skipped for some completions in tasks. */
SEC("kprobe/blk_update_request")
int BPF_KPROBE(io_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	return completes(rq, nr_bytes, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
