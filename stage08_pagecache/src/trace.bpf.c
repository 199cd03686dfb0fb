// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

static const u32 page_shift = 12; /* a page has 4 KiB */
u64 completed, total, hit, readahead, not_judged, dropped, unmatched;

struct read {
	u64 inode, dev; /* the file */
	u64 offset, bytes, end; /* what is asked for; `end`: where a read that gets all it can stops */
	u64 added, readahead; /* pages that this read added to the page cache: those asked for, and others */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* the thread that reads */
	__type(value, struct read);
} reads SEC(".maps");

/* README: "Reads that are not judged". */
static bool can_judge(struct read *read, struct kiocb *iocb, ssize_t already, u64 bytes)
{
	bool has_all = !bytes || iocb->ki_pos == read->end;

	return !iocb->ki_complete && !already && iocb->ki_pos - bytes == read->offset && has_all;
}

SEC("fentry/filemap_read")
int BPF_PROG(read_begins, struct kiocb *iocb, struct iov_iter *iter)
{
	u64 thread = bpf_get_current_pid_tgid();
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct read read = { inode->i_ino, inode->i_sb->s_dev, iocb->ki_pos, iter->count };

	read.end = read.offset + read.bytes < inode->i_size ? read.offset + read.bytes : inode->i_size;
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
	u64 thread = bpf_get_current_pid_tgid(), bytes = ret > 0 ? ret : 0;
	struct read *read = bpf_map_lookup_elem(&reads, &thread);

	if (!read) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	if (!can_judge(read, iocb, already, bytes)) {
		__sync_fetch_and_add(&not_judged, 1);
		bpf_map_delete_elem(&reads, &thread);
		return 0;
	}
	u64 pages = bytes ? ((iocb->ki_pos - 1) >> page_shift) - (read->offset >> page_shift) + 1 : 0;
	u64 missed = read->added < pages ? read->added : pages;
	__sync_fetch_and_add(&completed, 1);
	__sync_fetch_and_add(&total, pages);
	__sync_fetch_and_add(&hit, pages - missed);
	__sync_fetch_and_add(&readahead, read->readahead + read->added - missed);
	bpf_printk("read(inode=%llu dev=%llu:%llu offset=%llu bytes=%llu) = %ld: "
		   "hit %llu miss %llu readahead %llu",
		   read->inode, read->dev >> 20, read->dev & 0xfffff, read->offset, read->bytes, ret,
		   pages - missed, missed, read->readahead + read->added - missed);
	bpf_map_delete_elem(&reads, &thread);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
