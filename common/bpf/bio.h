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

#define bio_op(bio) (BPF_CORE_READ(bio, bi_opf) & 0xff)
#define REQ_OP_READ 0
#define REQ_OP_WRITE 1

/* The sector that a bio begins at, as the device that it was submitted to counts them; -1 where it
 * has none: a write of nothing is a flush. */
static __always_inline sector_t bio_sector(struct bio *bio)
{
	if (!bio->bi_iter.bi_size && bio_op(bio) == REQ_OP_WRITE)
		return -1;
	return bio->bi_iter.bi_sector;
}

#endif /* __BIO_H__ */
