/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A read of a file, from when it is asked for to its event line. */
#ifndef __READ_H__
#define __READ_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define EAGAIN 11
#define EIOCBQUEUED 529

struct read {
	struct file *file;
	u64 offset, bytes; /* as asked for */
	u64 first, pages; /* of the file */
	u64 hit, miss, readahead;
	bool rest; /* of a read whose pages have been counted */
};

/* io_uring asks without waiting. What it did not get, or not all of, it asks for again, by the same
 * iocb, and then finds what the first call has sent for. Here is what the first call found. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct kiocb *);
	__type(value, struct read);
} unfinished SEC(".maps");

static __always_inline bool was_refused(long ret)
{
	return ret == -EAGAIN || ret == -EIOCBQUEUED;
}

static __always_inline void recall_unfinished(struct kiocb *iocb, struct read *read)
{
	struct read *before = bpf_map_lookup_elem(&unfinished, &iocb);

	if (before && before->file == read->file && before->offset == read->offset &&
	    before->bytes == read->bytes) {
		read->hit = before->hit;
		read->miss = before->miss;
		read->rest = before->rest;
	}
}

static __always_inline void note_unfinished(struct kiocb *iocb, const struct read *read, long ret)
{
	struct read rest = *read;

	if (!iocb->ki_complete) /* the reader waits: this is all that it gets */
		return;
	if (ret > 0) {
		rest.offset += ret;
		rest.bytes -= ret;
		rest.hit = rest.miss = 0;
		rest.rest = true;
	}
	if (rest.bytes && (ret > 0 || was_refused(ret)))
		bpf_map_update_elem(&unfinished, &iocb, &rest, BPF_ANY);
	else
		bpf_map_delete_elem(&unfinished, &iocb);
}

/* The device that a file lies on; for a device file the device itself. */
static __always_inline dev_t file_dev(struct file *file)
{
	struct inode *inode = file->f_inode;

	return (inode->i_mode & 0170000) == 0060000 ? inode->i_rdev : inode->i_sb->s_dev;
}

/* Whether bpf_printk() takes more than three values: from 5.16 on. */
static __always_inline bool printk_takes_many(void)
{
	return bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_trace_vprintk);
}

/* The event line of a read; where bpf_printk() takes three values at most, three lines. */
static __always_inline void print_read(struct file *file, const struct read *read, long ret)
{
	u64 inode = file->f_inode->i_ino;
	u32 dev = file_dev(file);

	if (printk_takes_many()) {
		bpf_printk("read(inode=%lu dev=%u:%u offset=%llu bytes=%llu) = %ld: "
			   "hit %llu miss %llu readahead %llu",
			   inode, dev >> 20, dev & 0xfffff, read->offset, read->bytes, ret,
			   read->hit, read->miss, read->readahead);
	} else {
		bpf_printk("read(inode=%lu dev=%u:%u", inode, dev >> 20, dev & 0xfffff);
		bpf_printk("     offset=%llu bytes=%llu) = %ld:", read->offset, read->bytes, ret);
		bpf_printk("     hit %llu miss %llu readahead %llu", read->hit, read->miss,
			   read->readahead);
	}
}

#endif /* __READ_H__ */
