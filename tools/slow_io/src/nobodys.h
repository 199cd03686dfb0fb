/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Requests whose bios nobody was seen to submit: md and bcache make bios that do not pass submit_bio() and lead to no
 * other one, a multipath makes requests, and some are older than the run. The disk has had them all the same. So an
 * entry is made for the last bio of such a request when the request ends: then it completes as any other one does.
 */
#ifndef __NOBODYS_H__
#define __NOBODYS_H__

#include "join.h"
#include "only.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

u64 commands; /* what a program or a driver asks a disk itself, beside all I/O */
bool starts_unseen = true; /* main.rs: until all hooks are attached, and after the run */

struct begun { /* a request, a part of which has completed: as it was before that */
	u64 allocated, sector;
	u64 bytes;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, u64); /* address of the request */
	__type(value, struct begun);
} begun SEC(".maps");

static __always_inline bool is_of_another(struct io *io, struct issue *issue)
{
	return io->by.is_nobodys && (io->way.rq != issue->rq || io->way.started != issue->started ||
				     io->way.allocated != issue->allocated);
}

/* Whether the block layer makes a request of this bio: then that counts, whoever has submitted the bio. */
static __always_inline bool is_of_a_request(u64 bio)
{
	return !BPF_CORE_READ((struct bio *)bio, bi_bdev, bd_disk, fops, submit_bio);
}

static __always_inline bool is_command(struct request *rq)
{
	u32 operation = BPF_CORE_READ(rq, cmd_flags) & REQ_OP_MASK;

	return operation == bpf_core_enum_value(enum req_op, REQ_OP_DRV_IN) ||
	       operation == bpf_core_enum_value(enum req_op, REQ_OP_DRV_OUT);
}

/* The request as it was before any of it has completed. */
static __always_inline struct begun whole_request(struct request *rq, bool completes)
{
	struct begun now = { BPF_CORE_READ(rq, start_time_ns), BPF_CORE_READ(rq, __sector),
			     BPF_CORE_READ(rq, __data_len) };
	struct begun *found = bpf_map_lookup_elem(&begun, &rq);

	if (found && found->allocated == now.allocated)
		now = *found;
	if (completes)
		bpf_map_delete_elem(&begun, &rq);
	else
		bpf_map_update_elem(&begun, &rq, &now, BPF_ANY);
	return now;
}

/* What such a request is, in the words of a bio; its disk is the one that its last bio is for, or a partition. */
static __always_inline void describe_request(struct bio *last, struct begun *whole, struct submission *by)
{
	struct block_device *device = BPF_CORE_READ(last, bi_bdev);

	by->dev = BPF_CORE_READ(device, bd_dev);
	by->diskseq = BPF_CORE_READ(device, bd_disk, diskseq);
	by->operation = BPF_CORE_READ(last, bi_opf);
	by->bytes = whole->bytes;
	by->sector = whole->sector - BPF_CORE_READ(device, bd_start_sect);
	if (!by->bytes && (by->operation & REQ_OP_MASK) <= REQ_OP_FLUSH)
		by->sector = -1;
	by->requests = by->is_nobodys = 1;
}

/* Adds a request, or a part of it, that completes. Returns whether it is no I/O, but a command. */
__noinline int add_request(struct issue *issue)
{
	struct io io = {};
	struct request *rq;
	struct begun whole;
	u64 last, disk;

	if (!issue || starts_unseen)
		return 0;
	rq = (void *)issue->rq;
	disk = only_disk ? BPF_CORE_READ(rq, q, disk, diskseq) : 0; /* a controller's own queue has none */
	if (only_disk && !may_be_of_disk(disk))
		return 0;
	if (is_command(rq))
		return issue->completes && (!only_disk || is_known(disk));
	if (!BPF_CORE_READ(rq, bio))
		return 0; /* a flush of the block layer's own; or of a multipath, it has completed with its data */
	whole = whole_request(rq, issue->completes);
	if (!issue->completes)
		return 0;
	last = (u64)BPF_CORE_READ(rq, biotail);
	describe_request((void *)last, &whole, &io.by);
	if (only_disk && !is_of_disk(last, &io.by))
		return 0;
	take_times(&io.way, issue);
	io.way.is_clones = NOBODYS;
	io.submitted = issue->allocated ?: issue->time;
	/* An entry at this address is of an earlier one, whose completion was not seen. */
	if (!bpf_map_delete_elem(&ios, &last))
		__sync_fetch_and_add(&dropped, 1);
	if (!io.submitted)
		__sync_fetch_and_add(&unmatched, 1); /* since when it was there, nobody knows */
	else if (bpf_map_update_elem(&ios, &last, &io, BPF_NOEXIST))
		__sync_fetch_and_add(&dropped, 1); /* the map is full */
	return 0;
}

#endif /* __NOBODYS_H__ */
