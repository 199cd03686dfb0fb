/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Which bios end with a call of bio_endio(). A bio too large for the disk goes out in parts, which
 * are bios too, and each has a call for itself. The whole ends with its last part: in the call for
 * that one, without a call of its own.
 *
 * Include it below what it needs of a stage:
 * - the map `starts`: the key is a bio's address, the value begins with a u64, noted here;
 * - ended(bio, end): a bio has ended at that time. It need not be in `starts`; then the time is 0;
 * - the counter `dropped`.
 */
#ifndef __BIO_ENDS_H__
#define __BIO_ENDS_H__

#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define CHAIN 8 /* bios that bio_ends() looks at: a part, its whole, of which that is a part, ... */

/* The address of the function bio_chain_endio(), which common::load looks up. A bio that calls it
 * at its end is a part: bio_endio() goes on with the whole. block/bio.c */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64);
} bio_chain_endio SEC(".maps");

/* Whether a bio is a part, by its bi_end_io; its bi_private is the whole then. */
static __always_inline bool is_part(void *end_io)
{
	u64 *address = bpf_map_lookup_elem(&bio_chain_endio, &(u32){ 0 });

	return address && (u64)end_io == *address;
}

/* Whether the bio goes on after this call. Other parts of it may still be on their way: bio_endio()
 * counts them down. Or what was read has checksums, which are verified first: bio_endio() is called
 * again after that. */
static __always_inline bool bio_goes_on(struct bio *bio)
{
	if (BPF_CORE_READ(bio, __bi_remaining.counter) > 1)
		return true;
	return bpf_core_field_exists(bio->bi_integrity) && BPF_CORE_READ(bio, bi_integrity) &&
	       bio_op(bio) == REQ_OP_READ && !BPF_CORE_READ(bio, bi_status);
}

/* Notes that a part of a bio has ended, and returns when the last one so far did; 0 where nobody has
 * submitted the bio. */
static __always_inline u64 note_part(struct bio *bio, u64 now)
{
	u64 *noted = bpf_map_lookup_elem(&starts, &bio);

	if (!noted)
		return 0;
	if (*noted < now) /* or another CPU was later, and is done already */
		*noted = now;
	return *noted;
}

/* Calls ended() for all bios that end with this call of bio_endio(). Not for a part that nobody has
 * submitted: the block layer made it, and its whole is what counts. */
static __always_inline void bio_ends(struct bio *bio)
{
	u64 now = bpf_ktime_get_ns();
	bool goes_on = false;

	for (int i = 0; i < CHAIN && bio; i++) {
		bool part = is_part(BPF_CORE_READ(bio, bi_end_io));
		u64 end = note_part(bio, now);

		goes_on = goes_on || bio_goes_on(bio);
		if (!goes_on && (end || !part))
			ended(bio, end);
		bio = part ? BPF_CORE_READ(bio, bi_private) : NULL;
	}
}

/* A second look, when a bio is let go of: by its owner, at any time after its end; a part by
 * bio_endio(), which then goes on with the whole. Two parts that ended at once, on two CPUs, may each
 * have taken the other for the last; and a chain may be longer than bio_ends() has looked. A bio of
 * which nothing at all was noted has ended unseen. */
SEC("fentry/bio_uninit")
int BPF_PROG(bio_uninit_entry, struct bio *bio)
{
	struct bio *whole = is_part(bio->bi_end_io) ? bio->bi_private : NULL;
	u64 *noted = bpf_map_lookup_elem(&starts, &bio);

	if (whole) {
		u64 now = bpf_ktime_get_ns();

		if (noted)
			ended(bio, now);
		note_part(whole, now);
	} else if (noted && *noted) {
		ended(bio, *noted);
	} else if (noted) {
		bpf_map_delete_elem(&starts, &bio);
		__sync_fetch_and_add(&dropped, 1);
	}
	return 0;
}

#endif /* __BIO_ENDS_H__ */
