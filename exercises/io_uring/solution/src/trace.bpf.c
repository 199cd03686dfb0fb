// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

static const u32 page_shift = 12; /* a page has 4 KiB */
const volatile u64 address_of_io_complete_rw; /* io_uring's callback; main.rs sets it */
u64 completed, total, hit, readahead, refused, dropped, unmatched;

struct read {
	u64 inode, dev; /* the file */
	u64 offset, bytes; /* what is asked for */
	u64 added, readahead; /* pages that this read added to the page cache: those asked for, and others */
	u64 is_rest; /* of a read that has been counted */
	u64 calls_back; /* io_uring asks again when the page has its data */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* the thread that reads */
	__type(value, struct read);
} reads SEC(".maps");

/* Reads that io_uring will ask for again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the kiocb */
	__type(value, struct read);
} unfinished SEC(".maps");

/* Whether this call asks again for what an earlier one with the same kiocb did not get. */
static __always_inline bool is_again(struct kiocb *iocb, struct read *before, struct read *read)
{
	if (before->inode != read->inode || before->dev != read->dev || before->offset != read->offset ||
	    before->bytes != read->bytes)
		return false;
	/* With IOCB_NOWAIT alone, the application asks anew. */
	if ((iocb->ki_flags & (IOCB_NOWAIT | IOCB_WAITQ)) == IOCB_NOWAIT && !before->calls_back)
		return false;
	/* So it does with IOSQE_ASYNC, where only the rest of a read is asked for again. */
	return !(BPF_CORE_READ((struct io_kiocb *)iocb, flags) & IOSQE_ASYNC) || before->is_rest;
}

SEC("fentry/filemap_read")
int BPF_PROG(read_begins, struct kiocb *iocb, struct iov_iter *iter)
{
	u64 thread = bpf_get_current_pid_tgid(), io = (u64)iocb;
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct read read = { inode->i_ino, inode->i_sb->s_dev, iocb->ki_pos, iter->count };
	struct read *before = bpf_map_lookup_elem(&unfinished, &io);

	if (before && is_again(iocb, before, &read)) {
		read.added = before->added;
		read.is_rest = before->is_rest;
	}
	if (bpf_map_update_elem(&reads, &thread, &read, BPF_ANY))
		__sync_fetch_and_add(&dropped, 1);
	return 0;
}

SEC("tp/filemap/mm_filemap_add_to_page_cache")
int page_added(struct trace_event_raw_mm_filemap_op_page_cache *record)
{
	u64 thread = bpf_get_current_pid_tgid(), added = 0;
	struct read *read = bpf_map_lookup_elem(&reads, &thread);

	if (!read || record->i_ino != read->inode || record->s_dev != read->dev)
		return 0;
	/* Two ranges of pages, each up to and without the second number: what they have in common. */
	u64 from = record->index, pages = 1 << record->order, to = from + pages;
	u64 first = read->offset >> page_shift, end = ((read->offset + read->bytes - 1) >> page_shift) + 1;
	if (from < end && first < to)
		added = (to < end ? to : end) - (from > first ? from : first);
	read->added += added;
	read->readahead += pages - added;
	return 0;
}

SEC("fexit/filemap_read")
int BPF_PROG(read_ends, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	u64 thread = bpf_get_current_pid_tgid(), io = (u64)iocb, pages = 0, missed, others;
	bool was_refused = ret == -EAGAIN || ret == -EIOCBQUEUED;
	u64 bytes = ret > already ? ret - already : 0, offset = iocb->ki_pos - bytes; /* what it read */
	struct read *read = bpf_map_lookup_elem(&reads, &thread);

	if (!read || read->offset != offset) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	if (bytes) /* a page that the read before got a part of has been counted */
		pages = ((iocb->ki_pos - 1) >> page_shift) -
			((offset + (read->is_rest << page_shift) - read->is_rest) >> page_shift) + 1;
	missed = read->added < pages ? read->added : pages;
	others = read->added - missed;
	if ((u64)iocb->ki_complete == address_of_io_complete_rw &&
	    (was_refused || (bytes && bytes < read->bytes))) {
		struct read rest = *read;

		rest.offset += bytes;
		rest.bytes -= bytes;
		rest.added = others;
		rest.is_rest |= bytes > 0;
		rest.calls_back = ret == -EIOCBQUEUED;
		bpf_map_update_elem(&unfinished, &io, &rest, BPF_ANY);
		others = 0;
	} else {
		bpf_map_delete_elem(&unfinished, &io);
	}
	__sync_fetch_and_add(&refused, was_refused);
	__sync_fetch_and_add(&completed, !was_refused && !read->is_rest); /* a rest is no read of its own */
	__sync_fetch_and_add(&total, pages);
	__sync_fetch_and_add(&hit, pages - missed);
	__sync_fetch_and_add(&readahead, read->readahead + others);
	bpf_printk("read(inode=%llu dev=%llu:%llu offset=%llu bytes=%llu) = %ld: "
		   "hit %llu miss %llu readahead %llu",
		   read->inode, read->dev >> 20, read->dev & 0xfffff, offset, read->bytes, ret,
		   pages - missed, missed, read->readahead + others);
	bpf_map_delete_elem(&reads, &thread);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
