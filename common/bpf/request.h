/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What a request knows of itself, and where it says so on an older kernel. */
#ifndef __REQUEST_H__
#define __REQUEST_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* The disk of a request, never the partition: at this layer sectors are counted from the start of the
 * disk. 0 for a command of the driver's own, which may have no disk. */
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

#endif /* __REQUEST_H__ */
