/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which bios end with a call of bio_endio(). A bio too large for the disk goes out in parts, which
 * are bios too, and each has a call for itself. The whole ends with its last part: in the call for
 * that one, without a call of its own.
 *
 * Include it below what it needs of a stage:
 * - the map `starts`: the key is a bio's address, the value begins with a u64, noted here;
 * - ended(bio, end): a bio has ended at that time. It need not be in `starts`.
 */
#ifndef __BIO_ENDS_H__
#define __BIO_ENDS_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define CHAIN 64 /* bios: a part, its whole, of which that is a part, ... */

/* The address of the function bio_chain_endio(), which common::load looks up. A bio that calls it
 * at its end is a part: bio_endio() goes on with the whole. block/bio.c */
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

/* Whether the bio goes on after this call. Other parts of it may still be on their way: bio_endio()
 * counts them down. Or its checksums are verified first: bio_endio() is called again after that. */
static __always_inline bool bio_goes_on(struct bio *bio)
{
	if (BPF_CORE_READ(bio, __bi_remaining.counter) > 1)
		return true;
	return bpf_core_field_exists(bio->bi_integrity) && BPF_CORE_READ(bio, bi_integrity);
}

/* Notes in `starts` that a part of the bio has ended. */
static __always_inline void note_part(struct bio *bio, u64 now)
{
	u64 *noted = bpf_map_lookup_elem(&starts, &bio);

	if (noted)
		*noted = now;
}

/* Calls ended() for all bios that end with this call of bio_endio(). Not for a part that nobody has
 * submitted: the block layer made it, and its whole is what counts. */
static __always_inline void bio_ends(struct bio *bio)
{
	u64 now = bpf_ktime_get_ns();
	bool goes_on = false;

	for (int i = 0; i < CHAIN && bio; i++) {
		struct bio *whole = bio_whole(bio);

		goes_on = goes_on || bio_goes_on(bio);
		if (goes_on)
			note_part(bio, now);
		else if (!whole || bpf_map_lookup_elem(&starts, &bio))
			ended(bio, now);
		bio = whole;
	}
}

/* A second look. Two parts that end at once, on two CPUs, may each take the other for the last. But
 * when the owner lets go of the whole, all of them have ended. */
SEC("fentry/bio_uninit")
int BPF_PROG(bio_uninit_entry, struct bio *bio)
{
	u64 *noted = bpf_map_lookup_elem(&starts, &bio);

	if (noted && *noted)
		ended(bio, *noted);
	return 0;
}

#endif /* __BIO_ENDS_H__ */
