/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* When a bio is complete. Stage 10 explains it. */
#ifndef __BIO_H__
#define __BIO_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Whether the kernel will verify checksums of what the bio has read, and then call bio_endio() again. */
static __always_inline bool bio_is_verified_next(struct bio *bio)
{
	struct bio_integrity_payload *checksums = NULL;

	if (bpf_core_field_exists(bio->bi_integrity))
		checksums = BPF_CORE_READ(bio, bi_integrity);
	return checksums && BPF_CORE_READ(checksums, bip_flags) & BIP_BLOCK_INTEGRITY &&
	       (BPF_CORE_READ(bio, bi_opf) & REQ_OP_MASK) == REQ_OP_READ && !BPF_CORE_READ(bio, bi_status);
}

/* Whether this call of bio_endio() leaves the bio in flight: a later call completes it. */
static __always_inline bool bio_stays_in_flight(struct bio *bio)
{
	return BPF_CORE_READ(bio, __bi_remaining.counter) > 1 || bio_is_verified_next(bio);
}

#endif /* __BIO_H__ */
