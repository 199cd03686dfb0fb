/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* From a bio that a disk gets to the bio above it. `slow_io` explains it. */
#ifndef __ABOVE_H__
#define __ABOVE_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/* Functions that bio_endio() calls, by which a bio is known; set by main.rs, or -1 where there are none. */
const volatile u64 address_of_bio_chain_endio = -1;

/* Those that modules have for their clones, in the order of common/src/addresses.rs. */
enum end { CRYPT, RAID1_READ, RAID1_WRITE, RAID10_READ, RAID10_WRITE, RAID5_READ, MD_ACCT, MD_CLONE, ENDS };
const volatile u64 ends[ENDS] = { -1, -1, -1, -1, -1, -1, -1, -1 };

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

	if ((u64)BPF_CORE_READ(bio, bi_end_io) == ends[CRYPT] && bpf_core_type_exists(struct dm_crypt_io))
		return (u64)BPF_CORE_READ(crypt, base_bio);
	if (!bpf_core_type_exists(struct dm_target_io))
		return 0;
	target = (void *)bio - bpf_core_field_offset(struct dm_target_io, clone);
	io = BPF_CORE_READ(target, io);
	if (BPF_CORE_READ(target, magic) != DM_TIO_MAGIC || BPF_CORE_READ(io, magic) != DM_IO_MAGIC)
		return 0;
	return (u64)BPF_CORE_READ(io, orig_bio);
}

#define IS_SET(state, type, bit)                                                                             \
	(bpf_core_enum_value_exists(enum type, bit) && (state) >> bpf_core_enum_value(enum type, bit) & 1)

/* A RAID 1 or 10 keeps of each bio a struct, to which the clones for its disks point. */
static __always_inline u64 bio_of_raid1(struct r1bio *of)
{
	u64 state;

	if (!bpf_core_type_exists(struct r1bio))
		return 0;
	state = BPF_CORE_READ(of, state);
	/* Written behind: the bio has completed already, and its address may be another one's. */
	return IS_SET(state, r1bio_state, R1BIO_Returned) ? 0 : (u64)BPF_CORE_READ(of, master_bio);
}

static __always_inline u64 bio_of_raid10(struct r10bio *of)
{
	u64 state;

	if (!bpf_core_type_exists(struct r10bio))
		return 0;
	state = BPF_CORE_READ(of, state);
	return IS_SET(state, r10bio_state, R10BIO_Returned) ? 0 : (u64)BPF_CORE_READ(of, master_bio);
}

/* The bio of which md (software RAID) has made this one, or 0. It makes one for its statistics, and of that the
 * clones for the disks. What a RAID 5 reads or writes in stripes serves several bios, and leads to none. */
__noinline u64 bio_of_md(u64 address)
{
	struct bio *bio = (void *)address;
	u64 end = (u64)BPF_CORE_READ(bio, bi_end_io);
	void *of = BPF_CORE_READ(bio, bi_private);

	if (end == ends[RAID1_READ] || end == ends[RAID1_WRITE])
		return bio_of_raid1(of);
	if (end == ends[RAID10_READ] || end == ends[RAID10_WRITE])
		return bio_of_raid10(of);
	if ((end == ends[MD_ACCT] || end == ends[RAID5_READ]) && bpf_core_type_exists(struct md_io_acct)) {
		of = (void *)bio - bpf_core_field_offset(struct md_io_acct, bio_clone); /* before 6.6 */
		return (u64)BPF_CORE_READ((struct md_io_acct *)of, orig_bio);
	}
	if (end == ends[MD_CLONE] && bpf_core_type_exists(struct md_io_clone)) {
		of = (void *)bio - bpf_core_field_offset(struct md_io_clone, bio_clone);
		return (u64)BPF_CORE_READ((struct md_io_clone *)of, orig_bio);
	}
	return end == ends[RAID5_READ] ? (u64)of : 0;
}

/* Whether md submits this clone some time after block_bio_remap: a thread of its own does, for writes. */
static __always_inline bool is_submitted_later(u64 address)
{
	u64 end = (u64)BPF_CORE_READ((struct bio *)address, bi_end_io);

	return end == ends[RAID1_WRITE] || end == ends[RAID10_WRITE];
}

/* The bio of which device mapper or md has made this one, or 0. */
static __always_inline u64 bio_original(u64 bio)
{
	return bio_cloned(bio) ?: bio_of_md(bio);
}

/* The bio above this one, or 0 where it is neither a part nor a clone. */
static __always_inline u64 bio_above(u64 bio)
{
	return bio_whole(bio) ?: bio_original(bio);
}

#endif /* __ABOVE_H__ */
