// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define SLOTS 23 /* a request has less than 4 GiB: 2 to the power of 22 KiB */

const volatile u32 first; /* 1 where io_end_probe is loaded, too: it runs first */
u64 completed, commands, dropped, unmatched;

struct start {
	u64 allocated; /* ns; with its address, this identifies a request */
	u64 bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the request */
	__type(value, struct start);
} starts SEC(".maps");

struct which {
	dev_t dev;
	u32 kind; /* 0: read, 1: write, 2: discard */
};

struct sizes {
	u64 ios, sectors;
	u64 slots[SLOTS]; /* slot 0: below 2 KiB, 1: 2 to 3 KiB, 2: 4 to 7 KiB, ... */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct which);
	__type(value, struct sizes);
} histograms SEC(".maps");

static const struct sizes none;

/* 0 for some commands of a driver, which have no disk. */
static __always_inline dev_t rq_dev(struct request *rq)
{
	struct gendisk *disk = rq->q->disk;

	return disk ? disk->major << 20 | disk->first_minor : 0;
}

static __always_inline u32 slot_of(u64 bytes)
{
	u64 kib = bytes >> 10;
	u32 slot = 0;

	for (u32 step = 16; step; step /= 2)
		if (kib >> (slot + step))
			slot += step;
	return slot;
}

/* The driver gets the request. Later, its size may change: what has been transferred is subtracted. */
SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(io_start, struct request *rq)
{
	u64 io = (u64)rq;
	struct start start = { BPF_CORE_READ(rq, start_time_ns), BPF_CORE_READ(rq, __data_len) };

	if (!start.bytes)
		return 0; /* a flush, or a command without data */
	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		struct start *before = bpf_map_lookup_elem(&starts, &io);

		if (before && before->allocated == start.allocated)
			return 0; /* requeued and started again: the first time counts */
		/* The map is full, or the address has a start already: then neither request is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

static __always_inline int completes(struct request *rq, u32 nr_bytes, u32 program)
{
	u64 io = (u64)rq;
	u32 op = rq->cmd_flags & REQ_OP_MASK;
	struct which which = { rq_dev(rq), op == REQ_OP_DISCARD ? 2 : op & 1 };
	struct start *found;
	struct sizes *sizes;
	u64 bytes;
	u32 slot;

	if (!nr_bytes || nr_bytes < rq->__data_len)
		return 0; /* no data, or a part of it: the rest is started again */
	found = bpf_map_lookup_elem(&starts, &io);
	if (!found || found->allocated != rq->start_time_ns) {
		__sync_fetch_and_add(&unmatched, program == first);
		return 0;
	}
	bytes = found->bytes;
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the request */
	if (op >= REQ_OP_DRIVER) {
		__sync_fetch_and_add(&commands, 1);
		return 0;
	}
	sizes = bpf_map_lookup_elem(&histograms, &which);
	if (!sizes) {
		bpf_map_update_elem(&histograms, &which, &none, BPF_NOEXIST);
		sizes = bpf_map_lookup_elem(&histograms, &which);
	}
	slot = slot_of(bytes);
	if (!sizes || slot >= SLOTS) {
		__sync_fetch_and_add(&dropped, 1);
		return 0;
	}
	__sync_fetch_and_add(&completed, 1);
	__sync_fetch_and_add(&sizes->ios, 1);
	__sync_fetch_and_add(&sizes->sectors, bytes >> 9);
	__sync_fetch_and_add(&sizes->slots[slot], 1);
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(io_end, struct request *rq, int error, unsigned int nr_bytes)
{
	return completes(rq, nr_bytes, 0);
}

/* Only where the kernel preempts: there, the program above is skipped for some completions in tasks. To
 * read the argument as cheaply as there, it needs bpf_core_cast(): from 6.2 on. */
SEC("kprobe/blk_update_request")
int BPF_KPROBE(io_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	return completes(bpf_core_cast(rq, struct request), nr_bytes, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
