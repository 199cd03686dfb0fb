/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a request knows of itself, and where it says so on an older kernel. */
#ifndef __REQUEST_H__
#define __REQUEST_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* The disk of a request; never the partition: below it, sectors are counted from the disk's start.
 * 0 for a command of the driver's own, which may have no disk. */
static __always_inline dev_t rq_dev(struct request *rq)
{
	struct request___old *old = (void *)rq;
	struct gendisk *disk;

	if (bpf_core_field_exists(old->rq_disk))
		disk = BPF_CORE_READ(old, rq_disk);
	else
		disk = BPF_CORE_READ(rq, q, disk);
	return BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor);
}

/* The sector where a request goes on after `nr_bytes` more of it have completed: the rest is issued
 * again. 0 where that was all. For block_rq_complete(). */
static __always_inline sector_t rq_rest(struct request *rq, unsigned int nr_bytes)
{
	if (nr_bytes >= rq->__data_len) /* which is still what was left before */
		return 0;
	return rq->__sector + nr_bytes / 512;
}

#endif /* __REQUEST_H__ */
