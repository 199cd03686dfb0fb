/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Reads through the page cache, as in stage 08; added up for each CPU. */
#ifndef __READS_H__
#define __READS_H__

#include "pagecache.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u32 page_shift; /* 12: a page has 4 KiB */
u64 reads_not_judged, reads_dropped, reads_unmatched;

struct pages {
	u64 hit, missed, readahead;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); /* a value for each CPU: set by main.rs */
	__type(key, u32);
	__type(value, struct pages);
} pages SEC(".maps");

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
} reads SEC(".maps");

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
	if (bpf_map_update_elem(&reads, &reader, &read, BPF_NOEXIST)) {
		bool had_one = !bpf_map_delete_elem(&reads, &reader);
		__sync_fetch_and_add(&reads_dropped, 1 + had_one);
	}
	return 0;
}

static __always_inline int read_ends(struct kiocb *iocb, long ret)
{
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct reader reader = { bpf_get_current_pid_tgid(), inode->i_ino, inode->i_sb->s_dev };
	struct read *read = bpf_map_lookup_elem(&reads, &reader);
	u32 cpu = bpf_get_smp_processor_id();
	struct pages *sum = bpf_map_lookup_elem(&pages, &cpu);

	if (iocb->ki_complete || (read && ret == -EAGAIN)) {
		__sync_fetch_and_add(&reads_not_judged, 1);
	} else if (!read || !sum || iocb->ki_pos - read->offset > read->bytes) {
		__sync_fetch_and_add(&reads_unmatched, 1); /* its entry was not seen, */
		__sync_fetch_and_add(&reads_dropped, !!read); /* nor the return of the read before it */
	} else {
		__sync_fetch_and_add(&sum->hit, read->hit);
		__sync_fetch_and_add(&sum->missed, read->pages - read->hit);
		__sync_fetch_and_add(&sum->readahead, read->readahead);
	}
	bpf_map_delete_elem(&reads, &reader);
	return 0;
}

static __always_inline void pages_added(struct trace_event_raw_mm_filemap_op_page_cache *added)
{
	struct reader reader = { bpf_get_current_pid_tgid(), added->i_ino, added->s_dev };
	struct read *read = bpf_map_lookup_elem(&reads, &reader);
	u64 count = 1 << (added->order & 31);

	if (read)
		read->readahead += count - overlap(added->index, count, read->first, read->pages);
}

#endif /* __READS_H__ */
