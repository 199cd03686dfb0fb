/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Reads that are asked for more than once. io_uring first asks without waiting. What it does not get,
 * it asks for again with the same kiocb, and by then the first call has started the disk I/O: what
 * counts is what the first call found.
 */
#ifndef __RETRY_H__
#define __RETRY_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

struct read {
	u64 file, offset, bytes; /* asked for */
	u64 already; /* bytes that were read before, past the page cache */
	u64 first, pages; /* the same range, in pages of the file */
	u64 hit, miss, readahead; /* pages */
	u64 is_rest; /* of a read whose pages have been counted */
	u64 calls_back; /* io_uring asks again when the page has its data */
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the kiocb */
	__type(value, struct read);
} unfinished SEC(".maps");

static __always_inline bool was_refused(long ret)
{
	return ret == -EAGAIN || ret == -EIOCBQUEUED;
}

/* Takes over what an earlier call for the same read has found. */
static __always_inline void recall_unfinished(u64 iocb, int flags, struct read *read)
{
	struct read *before = bpf_map_lookup_elem(&unfinished, &iocb);

	if (!before || before->file != read->file || before->offset != read->offset ||
	    before->bytes != read->bytes)
		return;
	/* With IOCB_NOWAIT alone, the application asks anew. */
	if ((flags & (IOCB_NOWAIT | IOCB_WAITQ)) == IOCB_NOWAIT && !before->calls_back)
		return;
	/* So it does with IOSQE_ASYNC, where only the rest of a read is asked for again. */
	if (BPF_CORE_READ((struct io_kiocb *)iocb, flags) & IOSQE_ASYNC && !before->is_rest)
		return;
	read->hit = before->hit;
	read->miss = before->miss;
	read->is_rest = before->is_rest;
}

const volatile u64 address_of_io_complete_rw; /* io_uring's callback; main.rs sets it */

/* Remembers what io_uring will ask for again. */
static __always_inline void note_unfinished(u64 iocb, void *callback, const struct read *read, long ret)
{
	struct read rest = *read;

	if ((u64)callback != address_of_io_complete_rw)
		return;
	rest.calls_back = ret == -EIOCBQUEUED;
	if (ret > 0) {
		rest.offset += ret - read->already;
		rest.bytes -= ret - read->already;
		rest.hit = rest.miss = 0;
		rest.is_rest = true;
	}
	if (rest.bytes && (ret > 0 || was_refused(ret)))
		bpf_map_update_elem(&unfinished, &iocb, &rest, BPF_ANY);
	else
		bpf_map_delete_elem(&unfinished, &iocb);
}

#endif /* __RETRY_H__ */
