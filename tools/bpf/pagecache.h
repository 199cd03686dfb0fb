/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which pages of a file are in the page cache: mincore() for a BPF program.
 *
 * The pages of a file hang in a tree, an xarray. Every node has 64 slots. A slot holds another node,
 * a folio (a power of two of pages), nothing, or the shadow of a page that was evicted. A folio that
 * takes several slots is stored in the first one; the others are its siblings and hold the number of
 * that slot. See lib/xarray.c and include/linux/xarray.h.
 */
#ifndef __PAGECACHE_H__
#define __PAGECACHE_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define SLOTS 64
#define LEVELS 11 /* 6 bits of a page's index each: 64 bits */

static __always_inline bool is_node(u64 entry)
{
	return (entry & 3) == 2 && entry > 4096;
}

static __always_inline u64 slot(struct xa_node *node, u64 index)
{
	u64 entry = 0;

	bpf_core_read(&entry, sizeof(entry), &node->slots[index % SLOTS]);
	if ((entry & 3) == 2 && entry >> 2 < SLOTS) /* a sibling */
		bpf_core_read(&entry, sizeof(entry), &node->slots[(entry >> 2) % SLOTS]);
	return entry;
}

/* Whether the folio has its data. It may be in the tree and still wait for the disk. */
static __always_inline bool is_uptodate(u64 entry)
{
	u64 flags = 0;

	if (!entry || entry & 3)
		return false;
	/* A folio begins with its flags, whose type changes with the kernel. */
	bpf_probe_read_kernel(&flags, sizeof(flags), (void *)entry);
	return flags >> bpf_core_enum_value(enum pageflags, PG_uptodate) & 1;
}

/* How many of the pages `first` to `last` are resident; all of them lie in one node. Not static: the
 * verifier checks such a function on its own, and does not follow it again for every call. */
__noinline u64 resident_in_node(u64 tree, u64 first, u64 last)
{
	struct xa_node *node = NULL;
	u64 entry = tree, pages = 0;
	u8 shift = 0;

	if (!is_node(tree)) /* the page at index 0 needs no node */
		return first == 0 && is_uptodate(tree);
	for (int level = 0; level < LEVELS; level++) {
		node = (void *)(entry - 2);
		bpf_core_read(&shift, sizeof(shift), &node->shift);
		if (level == 0 && first >> (shift & 63) >= SLOTS)
			return 0; /* the tree does not reach that far */
		if (!shift)
			break;
		entry = slot(node, first >> (shift & 63));
		if (!is_node(entry)) /* nothing, or one large folio */
			return is_uptodate(entry) ? last - first + 1 : 0;
	}
	for (int i = 0; i < SLOTS && first + i <= last; i++)
		pages += is_uptodate(slot(node, first + i));
	return pages;
}

/* The pages `next` to `last` are still to be looked at; of those before, `resident` are. */
struct range {
	u64 tree, next, last, resident;
};

/* Looks at the pages of one node, and leaves `next` at the first page of the one after it. */
static long count_node(u64 number, struct range *range)
{
	u64 first = range->next, last = first | (SLOTS - 1);

	last = last < range->last ? last : range->last;
	range->resident += resident_in_node(range->tree, first, last);
	range->next = last + 1;
	return 0;
}

/* How many of the `pages` pages of a file, from page `first` on, are resident. */
static __always_inline u64 resident(struct inode *inode, u64 first, u64 pages)
{
	u64 tree = (u64)BPF_CORE_READ(inode, i_mapping, i_pages.xa_head);
	struct range range = { .tree = tree, .next = first, .last = first + pages - 1 };

	if (pages)
		bpf_loop(range.last / SLOTS - first / SLOTS + 1, count_node, &range, 0);
	return range.resident;
}

/* How many pages of a file of `size` bytes hold the `bytes` bytes from `offset` on. */
static __always_inline u64 pages_in(u64 offset, u64 bytes, u64 size, u32 page_shift)
{
	u64 end = offset + bytes < size ? offset + bytes : size;

	return offset < end ? ((end - 1) >> page_shift) - (offset >> page_shift) + 1 : 0;
}

/* How many of the `pages` pages from `first` on are among the `pages2` pages from `first2` on. */
static __always_inline u64 overlap(u64 first, u64 pages, u64 first2, u64 pages2)
{
	u64 from = first > first2 ? first : first2;
	u64 to = first + pages < first2 + pages2 ? first + pages : first2 + pages2;

	return to > from ? to - from : 0;
}

#endif /* __PAGECACHE_H__ */
