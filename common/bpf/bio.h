/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a bio knows of itself, and where it says so on an older kernel. */
#ifndef __BIO_H__
#define __BIO_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* The disk or partition that a bio was submitted to. Only before the bio reaches the queue: on
 * 5.10 the number of the partition is 0 by the time it ends. */
static __always_inline dev_t bio_dev(struct bio *bio)
{
	struct bio___old *old = (void *)bio;
	struct disk_part_tbl___old *table;
	struct hd_struct___old *part;
	u8 number;

	if (!bpf_core_field_exists(old->bi_disk))
		return bio->bi_bdev->bd_dev;
	table = BPF_CORE_READ(old, bi_disk, part_tbl);
	number = BPF_CORE_READ(old, bi_partno);
	if (bpf_core_read(&part, sizeof(part), &table->part[number]))
		return 0;
	return BPF_CORE_READ(part, __dev.devt);
}

#define BIOS 8 /* in a chain: a part, its whole, of which that is a part, ... */

/* The address of the function bio_chain_endio(), which common::load looks up. A bio that has it to be
 * called at its end is a part: bio_endio() goes on with the whole. block/bio.c */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} bio_chain_endio SEC(".maps");

/* The bio that this one is a part of; NULL where it is none. */
static __always_inline struct bio *bio_whole(struct bio *bio)
{
	u64 at_the_end = (u64)BPF_CORE_READ(bio, bi_end_io);
	u64 *address = bpf_map_lookup_elem(&bio_chain_endio, &(u32){ 0 });

	if (!address || at_the_end != *address)
		return NULL;
	return BPF_CORE_READ(bio, bi_private);
}

/* Whether this call of bio_endio(), or that of a part, is not the bio's end yet. Parts may still be
 * on their way: bio_endio() counts them down. Or its checksums are verified first: it returns at
 * once, and is called again. */
static __always_inline bool bio_goes_on(struct bio *bio)
{
	if (BPF_CORE_READ(bio, __bi_remaining.counter) > 1)
		return true;
	return bpf_core_field_exists(bio->bi_integrity) && BPF_CORE_READ(bio, bi_integrity);
}

/* What a call of bio_endio() ends: the bio itself, and where it is a part, perhaps the whole, for
 * which there is no call then. Calls ended(bio, now, whether this is its end) for all of them.
 * False: it is the end of a bio, and `ended` knew none of them. */
static __always_inline bool bio_and_wholes(struct bio *bio, bool (*ended)(struct bio *, u64, bool))
{
	u64 now = bpf_ktime_get_ns();
	bool last = true, known = false;

	for (int i = 0; i < BIOS && bio; i++) {
		last = last && !bio_goes_on(bio);
		known |= ended(bio, now, last);
		bio = bio_whole(bio);
	}
	return known || !last;
}

#endif /* __BIO_H__ */
