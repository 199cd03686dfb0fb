// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "pagecache.h"
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
const volatile u32 page_shift; /* 12: a page has 4 KiB */
u64 completed, total, hit, readahead, not_judged, dropped, unmatched;

/* A thread may read two files at once: an encrypting file system reads the file below it. */
struct reader {
	u64 thread, inode, dev;
};

struct read {
	u64 offset, bytes; /* asked for */
	u64 first, pages, hit, readahead; /* the same range in pages, and what was found there */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct reader);
	__type(value, struct read);
} starts SEC(".maps");

static __always_inline int read_begins(struct kiocb *iocb, struct iov_iter *iter)
{
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct reader reader = { bpf_get_current_pid_tgid(), inode->i_ino, inode->i_sb->s_dev };
	struct read read = { .offset = iocb->ki_pos,
			     .bytes = iter->count,
			     .first = iocb->ki_pos >> page_shift,
			     .pages = pages_in(iocb->ki_pos, iter->count, inode->i_size, page_shift) };

	if (iocb->ki_complete)
		return 0; /* asynchronous: io_uring may ask again for what this call has brought in */
	read.hit = resident(inode, read.first, read.pages);
	if (bpf_map_update_elem(&starts, &reader, &read, BPF_NOEXIST)) {
		/* The map is full, or the return of an earlier read was not seen: neither is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &reader);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

static __always_inline int read_ends(struct kiocb *iocb, long ret)
{
	struct inode *inode = iocb->ki_filp->f_mapping->host, *file = iocb->ki_filp->f_inode;
	struct reader reader = { bpf_get_current_pid_tgid(), inode->i_ino, inode->i_sb->s_dev };
	struct read *read = bpf_map_lookup_elem(&starts, &reader);
	u32 dev = file->i_rdev ? file->i_rdev : file->i_sb->s_dev;

	if (iocb->ki_complete || (read && ret == -EAGAIN)) {
		__sync_fetch_and_add(&not_judged, 1);
	} else if (!read || iocb->ki_pos - read->offset > read->bytes) {
		__sync_fetch_and_add(&unmatched, 1); /* its entry was not seen, */
		__sync_fetch_and_add(&dropped, !!read); /* nor the return of the read before it */
	} else {
		__sync_fetch_and_add(&completed, 1);
		__sync_fetch_and_add(&total, read->pages);
		__sync_fetch_and_add(&hit, read->hit);
		__sync_fetch_and_add(&readahead, read->readahead);
		if (!quiet)
			bpf_printk("read(inode=%lu dev=%u:%u offset=%llu bytes=%llu) = %ld: "
				   "hit %llu miss %llu readahead %llu",
				   file->i_ino, dev >> 20, dev & 0xfffff, read->offset, read->bytes, ret,
				   read->hit, read->pages - read->hit, read->readahead);
	}
	bpf_map_delete_elem(&starts, &reader);
	return 0;
}

/* Not tp_btf: on a kernel that preempts, a classic tracepoint's program is never preempted. */
SEC("tp/filemap/mm_filemap_add_to_page_cache")
int page_added(struct trace_event_raw_mm_filemap_op_page_cache *added)
{
	struct reader reader = { bpf_get_current_pid_tgid(), added->i_ino, added->s_dev };
	struct read *read = bpf_map_lookup_elem(&starts, &reader);
	u64 pages = 1 << (added->order & 31);

	if (read)
		read->readahead += pages - overlap(added->index, pages, read->first, read->pages);
	return 0;
}

SEC("fentry/filemap_read")
int BPF_PROG(filemap_read_entry, struct kiocb *iocb, struct iov_iter *iter)
{
	return read_begins(iocb, iter);
}

SEC("fexit/filemap_read")
int BPF_PROG(filemap_read_exit, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	return read_ends(iocb, ret);
}

/* From 7.0 on instead of these two: one program for entry and return, which cannot be preempted. */
SEC("kprobe.session/filemap_read")
int BPF_KPROBE(filemap_read_session, struct kiocb *iocb, struct iov_iter *iter)
{
	u64 *cookie = bpf_session_cookie(ctx); /* carries the argument to the return, which has none */

	if (bpf_session_is_return(ctx))
		return read_ends(bpf_core_cast((void *)*cookie, struct kiocb), PT_REGS_RC(ctx));
	*cookie = (u64)iocb;
	return read_begins(bpf_core_cast(iocb, struct kiocb), bpf_core_cast(iter, struct iov_iter));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
