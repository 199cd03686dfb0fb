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

#endif /* __BIO_H__ */
