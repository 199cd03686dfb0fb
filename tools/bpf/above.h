/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* From a bio that a disk gets to the bio above it. `slow_io` explains it. */
#ifndef __ABOVE_H__
#define __ABOVE_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Functions that bio_endio() calls, by which a bio is known; set by main.rs, or -1 where there are none. */
const volatile u64 address_of_bio_chain_endio = -1, address_of_crypt_endio = -1;

/* What device mapper has put into its structs, to know them: drivers/md/dm-core.h. */
#define DM_TIO_MAGIC 28714
#define DM_IO_MAGIC 19577

/* An address as a number: what is negated is no pointer any more to the verifier. It accepts none as an
 * argument of a global function, which it verifies once instead of for each call. */
static __always_inline u64 number(void *pointer)
{
	asm volatile("%0 = -%0\n%0 = -%0" : "+r"(pointer));
	return (u64)pointer;
}

/* The bio from which the block layer has split this one off, or 0. */
__noinline u64 bio_whole(u64 address)
{
	struct bio *bio = (void *)address;

	if ((u64)BPF_CORE_READ(bio, bi_end_io) != address_of_bio_chain_endio)
		return 0;
	return (u64)BPF_CORE_READ(bio, bi_private);
}

/* The bio of which device mapper (or dm-crypt, of device mapper's) has made this one, or 0. Some targets let
 * bio_endio() call a function of their own, so a clone is known by the struct that it lies in. */
__noinline u64 bio_cloned(u64 address)
{
	struct bio *bio = (void *)address;
	struct dm_crypt_io *crypt = BPF_CORE_READ(bio, bi_private);
	struct dm_target_io *target;
	struct dm_io *io;

	if ((u64)BPF_CORE_READ(bio, bi_end_io) == address_of_crypt_endio &&
	    bpf_core_type_exists(struct dm_crypt_io))
		return (u64)BPF_CORE_READ(crypt, base_bio);
	if (!bpf_core_type_exists(struct dm_target_io))
		return 0;
	target = (void *)bio - bpf_core_field_offset(struct dm_target_io, clone);
	io = BPF_CORE_READ(target, io);
	if (BPF_CORE_READ(target, magic) != DM_TIO_MAGIC || BPF_CORE_READ(io, magic) != DM_IO_MAGIC)
		return 0;
	return (u64)BPF_CORE_READ(io, orig_bio);
}

/* The bio above this one, or 0 where it is neither a part nor a clone. */
static __always_inline u64 bio_above(u64 bio)
{
	return bio_whole(bio) ?: bio_cloned(bio);
}

#endif /* __ABOVE_H__ */
