/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What is in the page cache: mincore() for a BPF program.
 *
 * A file's pages hang in a tree, an xarray. Every node has 64 slots. A slot holds another node, a
 * page (from 5.16 on a folio: one page or a power of two of them), or nothing, or the shadow of a
 * page that was there. A folio that takes several slots stands in the first one; the others are
 * its siblings and say where that is. lib/xarray.c, include/linux/xarray.h.
 */
#ifndef __PAGECACHE_H__
#define __PAGECACHE_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define SLOTS 64
#define LEVELS 11 /* 6 bits of a page's index each: 64 bits */
#define BLOCK (SLOTS * SLOTS)
#define BLOCKS 130 /* 2 GiB, the most that one read() may ask for, and its ragged ends: at 4 KiB */

/* 12, or, on an arm64 kernel with pages of 16 or 64 KiB, 14 or 16. */
const volatile u32 page_shift;

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

/* Whether the page holds what the disk holds. It may be in the tree and still wait for the disk. */
static __always_inline bool uptodate(u64 entry)
{
	u64 flags = 0;

	if (!entry || entry & 3)
		return false;
	/* struct page and struct folio begin with the flags, whose type changes with the kernel */
	bpf_probe_read_kernel(&flags, sizeof(flags), (void *)entry);
	return flags >> bpf_core_enum_value(enum pageflags, PG_uptodate) & 1;
}

/* How many of the pages first to last are resident. All lie in one node: first / 64 == last / 64.
 * Not static: the verifier checks such a function once, not once for each call. */
__noinline u64 resident_in_node(u64 head, u64 first, u64 last)
{
	struct xa_node *node = NULL;
	u64 entry = head, pages = 0;
	u8 shift = 0;

	if (!is_node(head)) /* the page at index 0 needs no node */
		return first == 0 && uptodate(head);
	for (int level = 0; level < LEVELS; level++) {
		node = (void *)(entry - 2);
		bpf_core_read(&shift, sizeof(shift), &node->shift);
		if (level == 0 && first >> (shift & 63) >= SLOTS)
			return 0; /* the tree does not reach that far */
		if (!shift)
			break;
		entry = slot(node, first >> (shift & 63));
		if (!is_node(entry)) /* nothing, or one large folio */
			return uptodate(entry) ? last - first + 1 : 0;
	}
	for (int i = 0; i < SLOTS && first + i <= last; i++)
		pages += uptodate(slot(node, first + i));
	return pages;
}

/* The same where first / 4096 == last / 4096. */
__noinline u64 resident_in_block(u64 head, u64 first, u64 last)
{
	u64 pages = 0;

	for (int i = 0; i < SLOTS && first <= last; i++) {
		u64 end = first | (SLOTS - 1);

		pages += resident_in_node(head, first, end < last ? end : last);
		first = end + 1;
	}
	return pages;
}

/* How many of the `pages` from index `first` on are resident. */
static __always_inline u64 resident(struct address_space *mapping, u64 first, u64 pages)
{
	u64 head = (u64)BPF_CORE_READ(mapping, i_pages.xa_head);
	u64 last = first + pages - 1, sum = 0;

	for (int i = 0; i < BLOCKS && pages && first <= last; i++) {
		u64 end = first | (BLOCK - 1);

		sum += resident_in_block(head, first, end < last ? end : last);
		first = end + 1;
	}
	return sum;
}

/* The file whose page this is, and the page's index in it: 5.10 has no folios. */
static __always_inline struct address_space *folio_mapping(struct folio *folio)
{
	struct page___old *page = (void *)folio;

	if (bpf_core_type_exists(struct folio))
		return folio->mapping;
	return page->mapping;
}

static __always_inline u64 folio_index(struct folio *folio)
{
	struct page___old *page = (void *)folio;

	if (bpf_core_type_exists(struct folio))
		return folio->index;
	return page->index;
}

static __always_inline u64 folio_pages(struct folio *folio)
{
	struct folio___new *new = (void *)folio;
	u64 flags = 0;

	bpf_probe_read_kernel(&flags, sizeof(flags), folio);
	if (!bpf_core_type_exists(struct folio) ||
	    !(flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1))
		return 1;
	if (bpf_core_field_exists(new->_nr_pages))
		return new->_nr_pages;
	return folio->_folio_nr_pages;
}

/* How many of the folio's pages are not among the `pages` from index `first` on. */
static __always_inline u64 folio_pages_beyond(struct folio *folio, u64 first, u64 pages)
{
	u64 index = folio_index(folio), all = folio_pages(folio), inside = 0;
	u64 from = index > first ? index : first;
	u64 to = index + all < first + pages ? index + all : first + pages;

	if (to > from)
		inside = to - from;
	return all - inside;
}

#endif /* __PAGECACHE_H__ */
