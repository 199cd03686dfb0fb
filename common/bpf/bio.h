/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a bio says about itself. */
#ifndef __BIO_H__
#define __BIO_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>

/* The disk or partition that the bio is submitted to. Before 5.12, a bio named a disk and the number
 * of a partition on it. */
static __always_inline dev_t bio_dev(struct bio *bio)
{
	struct bio___old *old = (void *)bio;
	struct disk_part_tbl___old *table;
	struct hd_struct___old *part;
	u8 number;

	if (!bpf_core_field_exists(old->bi_disk))
		return BPF_CORE_READ(bio, bi_bdev, bd_dev);
	table = BPF_CORE_READ(old, bi_disk, part_tbl);
	number = BPF_CORE_READ(old, bi_partno);
	bpf_core_read(&part, sizeof(part), &table->part[number]);
	return BPF_CORE_READ(part, __dev.devt);
}

/* The first sector, counted from the start of that device; -1 for a flush, which carries no data. */
static __always_inline sector_t bio_sector(struct bio *bio)
{
	struct bvec_iter iter = BPF_CORE_READ(bio, bi_iter);
	return iter.bi_size ? iter.bi_sector : -1;
}

/* A way to READ the argument of an fentry program, cheaper than BPF_CORE_READ. */
#define DIRECT(bio, field) ((bio)->field)

/* Whether the bio stays in flight after this call of bio_endio(): some of its parts have not
 * completed, or checksums of what it read are verified first. A later call completes it. */
#define bio_goes_on(READ, bio)                                                                               \
	(READ(bio, __bi_remaining.counter) > 1 ||                                                            \
	 (bpf_core_field_exists((bio)->bi_integrity) && READ(bio, bi_integrity) &&                           \
	  (READ(bio, bi_opf) & REQ_OP_MASK) == REQ_OP_READ && !READ(bio, bi_status)))

/* The bio that this one is a part of, or NULL. The last part to complete completes the whole, too. */
const volatile u64 address_of_bio_chain_endio; /* what a part calls then; set by Session::load() */
#define bio_whole(READ, b)                                                                                   \
	((u64)READ(b, bi_end_io) == address_of_bio_chain_endio ? (struct bio *)READ(b, bi_private) : NULL)

#endif /* __BIO_H__ */
