// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

static const u32 page_shift = 12; /* a page has 4 KiB */
const volatile u64 address_of_io_complete_rw; /* io_uring's callback; main.rs sets it */
u64 completed, total, hit, readahead, not_judged, refused, dropped, unmatched;

struct read {
	u64 inode, dev; /* the file */
	u64 offset, bytes; /* what is asked for, by the first call */
	u64 end; /* where that ends, or the file before that */
	u64 added, readahead; /* pages that this read added to the page cache: those asked for, and others */
	u64 got; /* bytes, so far */
	u64 is_counted; /* it has ended at the end of the file */
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

/* Whether this call asks again for what earlier ones with the same kiocb did not get. */
static __always_inline bool is_again(struct kiocb *iocb, struct read *before, struct read *read)
{
	if (before->inode != read->inode || before->dev != read->dev ||
	    before->offset + before->got != read->offset || before->bytes - before->got != read->bytes)
		return false;
	/* With IOCB_NOWAIT alone, the application asks anew. */
	if ((iocb->ki_flags & (IOCB_NOWAIT | IOCB_WAITQ)) == IOCB_NOWAIT && !before->calls_back)
		return false;
	/* So it does with IOSQE_ASYNC, where only the rest of a read is asked for again. */
	return !(BPF_CORE_READ((struct io_kiocb *)iocb, flags) & IOSQE_ASYNC) || before->got;
}

SEC("fentry/filemap_read")
int BPF_PROG(read_begins, struct kiocb *iocb, struct iov_iter *iter)
{
	u64 thread = bpf_get_current_pid_tgid(), io = (u64)iocb;
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct read read = { inode->i_ino, inode->i_sb->s_dev, iocb->ki_pos, iter->count };
	struct read *before = bpf_map_lookup_elem(&unfinished, &io);

	read.end = read.offset + read.bytes < inode->i_size ? read.offset + read.bytes : inode->i_size;
	if (before && is_again(iocb, before, &read)) {
		read = *before;
		if (read.got && !read.is_counted)
			__sync_fetch_and_add(&not_judged, -1); /* its rest is asked for */
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
	u64 first = read->offset >> page_shift, end = ((read->end - 1) >> page_shift) + 1;
	if (from < end && first < to)
		added = (to < end ? to : end) - (from > first ? from : first);
	read->added += added;
	read->readahead += pages - added;
	return 0;
}

SEC("fexit/filemap_read")
int BPF_PROG(read_ends, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	u64 thread = bpf_get_current_pid_tgid(), io = (u64)iocb, pages = 0, missed = 0, others = 0;
	u64 bytes = ret > already ? ret - already : 0, offset = iocb->ki_pos - bytes; /* what it read */
	bool was_refused = ret == -EAGAIN || ret == -EIOCBQUEUED;
	struct read *found = bpf_map_lookup_elem(&reads, &thread);

	if (!found || found->offset + found->got != offset) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	struct read read = *found;
	bpf_map_delete_elem(&reads, &thread);
	bpf_map_delete_elem(&unfinished, &io);
	if (read.is_counted)
		return 0; /* it asks what comes behind the end of the file */
	read.got += bytes;
	/* Which pages of a part it has added, is not known. If nobody asks for the rest, an error has ended it. */
	bool is_part = read.got && iocb->ki_pos != read.end;
	bool is_asked_again = (u64)iocb->ki_complete == address_of_io_complete_rw &&
			      (was_refused || (bytes && read.got < read.bytes));

	if (is_asked_again) {
		read.is_counted = bytes && !is_part;
		read.calls_back = ret == -EIOCBQUEUED;
		bpf_map_update_elem(&unfinished, &io, &read, BPF_ANY);
	}
	__sync_fetch_and_add(&not_judged, is_part);
	__sync_fetch_and_add(&refused, was_refused);
	if (is_part && !was_refused)
		return 0;
	if (!was_refused || !is_asked_again) {
		if (read.got)
			pages = ((iocb->ki_pos - 1) >> page_shift) - (read.offset >> page_shift) + 1;
		missed = read.added < pages ? read.added : pages;
		others = read.readahead + read.added - missed;
	}
	__sync_fetch_and_add(&completed, !was_refused);
	__sync_fetch_and_add(&total, pages);
	__sync_fetch_and_add(&hit, pages - missed);
	__sync_fetch_and_add(&readahead, others);
	bpf_printk("read(inode=%llu dev=%llu:%llu offset=%llu bytes=%llu) = %ld: "
		   "hit %llu miss %llu readahead %llu",
		   read.inode, read.dev >> 20, read.dev & 0xfffff, read.offset, read.bytes,
		   ret + (was_refused ? 0 : read.got - bytes), pages - missed, missed, others);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
