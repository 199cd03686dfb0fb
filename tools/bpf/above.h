/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* From a bio that a disk gets to the bio above it. `slow_io` explains it. */
#ifndef __ABOVE_H__
#define __ABOVE_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Functions that bio_endio() calls, by which a bio is known; set by main.rs, or -1 where there are none. */
const volatile u64 address_of_bio_chain_endio = -1, address_of_clone_endio = -1, address_of_crypt_endio = -1;

/* An address as a number: what is negated is no pointer any more to the verifier. It accepts none as an
 * argument of a global function, which it verifies once instead of for each call. */
static __always_inline u64 number(void *pointer)
{
	asm volatile("%0 = -%0\n%0 = -%0" : "+r"(pointer));
	return (u64)pointer;
}

/* The bio that this one is a part of (the block layer's), or a clone of (device mapper's, dm-crypt's);
 * 0 where it is neither. */
__noinline u64 bio_above(u64 address)
{
	struct bio *bio = (void *)address;
	u64 end_io = (u64)BPF_CORE_READ(bio, bi_end_io);
	void *private = BPF_CORE_READ(bio, bi_private);

	if (end_io == address_of_bio_chain_endio)
		return (u64) private;
	if (end_io == address_of_clone_endio && bpf_core_type_exists(struct dm_target_io)) {
		struct dm_target_io *target = (void *)bio - bpf_core_field_offset(struct dm_target_io, clone);
		return (u64)BPF_CORE_READ(target, io, orig_bio);
	}
	if (end_io == address_of_crypt_endio && bpf_core_type_exists(struct dm_crypt_io))
		return (u64)BPF_CORE_READ((struct dm_crypt_io *)private, base_bio);
	return 0;
}

#endif /* __ABOVE_H__ */
