/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Bios and their requests: the maps of both, and the ways from one to the other. The hooks are the tools', and
 * call these functions; when a bio completes, bio_completes() is called, which each tool has for itself.
 */
#ifndef __JOIN_H__
#define __JOIN_H__

#include "above.h"
#include "bio.h"
#include "parts.h"

u64 dropped, unmatched;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the bio */
	__type(value, struct io);
} ios SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH); /* a disk uses the same few requests again and again */
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the request */
	__type(value, struct issue);
} issues SEC(".maps");

static __always_inline int bio_starts(u64 bio, struct io *io)
{
	io->submitted = bpf_ktime_get_ns(); /* last: what this program takes is no part of the latency */
	if (bpf_map_update_elem(&ios, &bio, io, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither bio is measured. */
		bool had_one = !bpf_map_delete_elem(&ios, &bio);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

/* The bio that somebody has submitted, of which this one is a part or a clone, or itself. */
static struct io *io_of(u64 bio)
{
	struct io *io = NULL;

	for (int i = 0; i < 8 && bio && !io; i++, bio = bio_above(bio))
		io = bpf_map_lookup_elem(&ios, &bio);
	return io;
}

/* Device mapper gives a clone to the disk below; or a bio goes from a partition to its disk: then there is none
 * above it. */
static __always_inline int bio_goes_down(u64 bio)
{
	struct io *io = io_of(bio_above(bio));

	if (io)
		io->remapped = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int rq_starts(u64 rq, u64 allocated)
{
	struct issue issue = { bpf_ktime_get_ns(), 0, allocated, 1 };
	struct issue *before = bpf_map_lookup_elem(&issues, &rq);

	if (!before)
		bpf_map_update_elem(&issues, &rq, &issue, BPF_ANY);
	else if (before->allocated == issue.allocated && !before->completes)
		before->starts++; /* requeued and started again: the first time counts */
	else
		*before = issue;
	return 0;
}

__noinline int note(u64 bio, struct issue *issue)
{
	struct io *io = io_of(bio);

	if (io && issue)
		take_times(io, issue);
	return 0;
}

/* Notes the times of a request that completes, all of it or a part, in each of its bios. */
static __always_inline int rq_ends(u64 rq, u64 allocated, bool noted, u64 bio, u64 last, bool all)
{
	struct issue *found = bpf_map_lookup_elem(&issues, &rq), issue = {};

	if (found && found->allocated == allocated && !found->completes) {
		found->completes = all;
		issue = *found;
	}
	issue.allocated = noted ? allocated : 0;
	issue.done = bpf_ktime_get_ns();
	for (int i = 0; i < 1024 && bio; i++) {
		note(bio, &issue);
		bio = bio == last ? 0 : (u64)BPF_CORE_READ((struct bio *)bio, bi_next);
	}
	return 0;
}

/* `status` 0: no error. `program`: 0 for fentry, 1 for the kprobe. */
__noinline int bio_completes(u64 bio, u32 status, u32 program);

/* A bio without an entry completes. If it is a clone, notes that in the bio above; whether it is neither a clone
 * nor a part. */
static __always_inline bool is_nobodys(u64 bio, bool in_parts, u64 now)
{
	u64 above = bio_above(bio);
	struct io *io = in_parts && above ? io_of(above) : NULL;

	if (io && io->below < io->done)
		io->below = now;
	return !above;
}

/* The last part of a bio to complete also completes the whole, which may be a part itself. */
static int bio_ends(u64 address, u32 program)
{
	struct bio *bio = (void *)address;
	u32 status = 0;

	for (int i = 0; i < 64 && bio && !bio_stays_in_flight(bio); i++) {
		bool is_part = (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;

		/* The whole gets the error of this part later, unless it has one. */
		status = BPF_CORE_READ(bio, bi_status) ?: status;
		bio_completes((u64)bio, status, program);
		bio = is_part ? BPF_CORE_READ(bio, bi_private) : NULL; /* the whole */
	}
	return 0;
}

/* The same in an fentry program. Most bios are neither parts nor checksummed: their fields are read here without
 * a helper call. */
static __always_inline int bio_ends_here(struct bio *bio)
{
	bool is_special = bio->__bi_remaining.counter > 1 ||
			  (bpf_core_field_exists(bio->bi_integrity) && bio->bi_integrity) ||
			  (u64)bio->bi_end_io == address_of_bio_chain_endio;

	return is_special ? bio_ends(number(bio), 0) : bio_completes(number(bio), bio->bi_status, 0);
}

#endif /* __JOIN_H__ */
