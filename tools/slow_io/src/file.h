/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --file: whose data a slow bio carries, found from the bio itself when it completes. */
#ifndef __FILE_H__
#define __FILE_H__

#include "parts.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

const volatile bool with_file;

/* Functions that bio_endio() calls for direct I/O, in the order of main.rs, or -1: of file systems; and of disks. */
enum direct { IOMAP, DIO, DIO_AIO, DISK, DISK_AIO, DISK_SYNC, DIRECTS };
const volatile u64 directs[DIRECTS] = { -1, -1, -1, -1, -1, -1 };

#define NAME 256 /* bytes of a name, the 0 at its end included */
#define NAMES 1024
#define LEVELS 24

struct event {
	struct completed bio;
	u64 inode; /* its number; 0: the bio is of no file, or nobody knows of which */
	u32 links; /* how many names the file has; 0: it was deleted */
	u32 bytes; /* of `names`; 0: the path is not known */
	char names[NAMES + NAME]; /* of the file, of its directory, and so on up to the file system's root */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32); /* program */
	__type(value, struct event);
} being_sent SEC(".maps");

/* A page may be a part of a folio, whose first page has what they share. Of the others, the lowest bit is set of the
 * first page's address; or, on newer kernels, of a mask that leads there. */
static __always_inline struct folio *folio_of(struct page *page)
{
	u64 head;

	if (!bpf_core_field_exists(page->compound_info)) {
		head = BPF_CORE_READ((struct page___old *)page, compound_head);
		return (void *)(head & 1 ? head - 1 : (u64)page);
	}
	head = BPF_CORE_READ(page, compound_info);
	if (!(head & 1))
		return (void *)page;
	head--;
	return (void *)(head >> 32 == -1U && !(-head & (-head - 1)) ? (u64)page & head : head);
}

static __always_inline bool is_submitted_to(struct block_device *disk, const struct submission *by)
{
	return BPF_CORE_READ(disk, bd_dev) == by->dev && BPF_CORE_READ(disk, bd_disk, diskseq) == by->diskseq;
}

/*
 * The inode of a bio's first page, if it is one of the page cache. The kernel fills a folio that is locked and has no
 * data yet, and writes one that is marked for it; it stays so until the bio has completed, and nobody frees the inode.
 * Other pages have other things in these members. So the inode has to lead back to them, and to the disk.
 */
static __always_inline struct inode *inode_of_page(struct bio *bio, const struct submission *by)
{
	struct folio *folio = folio_of(BPF_CORE_READ(bio, bi_io_vec, bv_page));
	struct address_space *mapping = BPF_CORE_READ(folio, mapping);
	u32 operation = by->operation & REQ_OP_MASK;
	struct block_device *disk = BPF_CORE_READ(bio, bi_bdev);
	struct super_block *super;
	struct inode *inode;
	u64 flags = 0;

	bpf_probe_read_kernel(&flags, sizeof(flags), folio); /* their type changes with the kernel */
#define IS(flag) (flags >> bpf_core_enum_value(enum pageflags, flag) & 1)
	if (!by->bytes || operation > REQ_OP_WRITE || BPF_CORE_READ(bio, bi_flags) & BIO_PAGE_PINNED ||
	    (operation == REQ_OP_READ ? !IS(PG_locked) || IS(PG_uptodate) : !IS(PG_writeback)))
		return NULL;
#undef IS
	inode = BPF_CORE_READ(mapping, host);
	super = BPF_CORE_READ(inode, i_sb);
	if (BPF_CORE_READ(disk, bd_holder) != super)
		disk = BPF_CORE_READ(super, s_bdev);
	return BPF_CORE_READ(inode, i_mapping) == mapping && is_submitted_to(disk, by) ? inode : NULL;
}

/* The name of an inode with one link, or NULL where the kernel does not have it in memory. */
static __always_inline struct dentry *name_of(struct inode *inode)
{
	struct hlist_node *node = BPF_CORE_READ(inode, i_dentry.first);
	struct dentry *dentry;

	for (int i = 0; i < 8 && node; i++, node = BPF_CORE_READ(node, next)) {
		if (bpf_core_field_exists(((struct dentry___old *)0)->d_u))
			dentry = (void *)node - bpf_core_field_offset(struct dentry___old, d_u.d_alias);
		else
			dentry = (void *)node - bpf_core_field_offset(struct dentry, d_alias);
		if (BPF_CORE_READ(dentry, d_hash.pprev)) /* not one that was deleted */
			return dentry;
	}
	return NULL;
}

/* Copies the names from the file up to the root, unless one of them changes meanwhile. */
static __always_inline void copy_names(struct dentry *file, struct event *event)
{
	struct dentry *root = BPF_CORE_READ(file, d_sb, s_root), *dentry = file;
	u32 bytes = 0, changes = 0, sequence;
	int levels;

	for (levels = 0; levels < LEVELS && dentry != root; levels++) {
		sequence = BPF_CORE_READ(dentry, d_seq.seqcount.sequence); /* odd: it is being changed */
		long length = bytes > NAMES || sequence & 1
				      ? -1
				      : bpf_probe_read_kernel_str(event->names + bytes, NAME,
								  BPF_CORE_READ(dentry, d_name.name));
		if (length <= 0)
			return;
		bytes += length;
		changes += sequence;
		dentry = BPF_CORE_READ(dentry, d_parent);
	}
	if (dentry != root)
		return;
	for (dentry = file; levels > 0; levels--) {
		changes -= BPF_CORE_READ(dentry, d_seq.seqcount.sequence);
		dentry = BPF_CORE_READ(dentry, d_parent);
	}
	if (!changes)
		event->bytes = bytes;
}

/* Not inlined: the verifier checks it once. */
__noinline int find_file(u64 address, struct event *event)
{
	struct bio *bio = (void *)address;
	u64 end = (u64)BPF_CORE_READ(bio, bi_end_io);
	void *direct = BPF_CORE_READ(bio, bi_private);
	struct dentry *name = NULL;
	struct file *file = NULL;
	struct inode *inode;

	if (!event)
		return 0;
	event->inode = event->links = event->bytes = 0;
	if (end == directs[IOMAP])
		file = BPF_CORE_READ((struct iomap_dio *)direct, iocb, ki_filp);
	else if (end == directs[DIO] || end == directs[DIO_AIO])
		file = BPF_CORE_READ((struct dio *)direct, iocb, ki_filp);
	else
		for (int i = DISK; i < DIRECTS; i++)
			if (end == directs[i] && event->bio.by.operation & 1)
				return 0; /* a disk's write may be of pages that a program has mapped */
	inode = file ? BPF_CORE_READ(file, f_inode) : inode_of_page(bio, &event->bio.by);
	if (!inode || (BPF_CORE_READ(inode, i_mode) & S_IFMT) != S_IFREG)
		return 0;
	event->inode = BPF_CORE_READ(inode, i_ino);
	event->links = BPF_CORE_READ(inode, i_nlink);
	/* The name by which it was opened; or, where that is not known or gone, the only one that it has. */
	if (file)
		name = BPF_CORE_READ(file, f_path.dentry);
	if (!name || BPF_CORE_READ(name, d_inode) != inode || !BPF_CORE_READ(name, d_hash.pprev))
		name = event->links == 1 ? name_of(inode) : NULL;
	if (name && event->links)
		copy_names(name, event);
	return 0;
}

/* Sends a bio to user space, with its file where that is asked for. Returns 0, or an error where there is no room. */
static __always_inline long send(void *events, u64 bio, struct completed *completed, u32 program)
{
	struct event *event = with_file ? bpf_map_lookup_elem(&being_sent, &program) : NULL;
	u32 bytes;

	if (!event)
		return bpf_ringbuf_output(events, completed, sizeof(*completed), 0);
	event->bio = *completed;
	find_file(bio, event);
	bytes = event->bytes;
	barrier_var(bytes); /* or the compiler drops the test, which the verifier needs */
	if (bytes > sizeof(event->names))
		bytes = 0;
	return bpf_ringbuf_output(events, event, sizeof(*event) - sizeof(event->names) + bytes, 0);
}

#endif /* __FILE_H__ */
