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

u64 dropped, unmatched, refused;

#define BLK_STS_AGAIN 12 /* what was to end at once, or not at all, would have had to wait */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the bio */
	__type(value, struct io);
} ios SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH); /* clones end in ways that no hook sees */
	__uint(max_entries, 16384);
	__type(key, u64); /* address of a clone: its way; of a bio with clones: the last one's to complete */
	__type(value, struct way);
} ways SEC(".maps");

struct requeued { /* a request that the driver has given back */
	u64 allocated; /* with its address, this identifies a request */
	u64 had; /* ns that the driver had it, from each start to its end */
	u64 starts;
};

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the request */
	__type(value, struct requeued);
} requeued SEC(".maps");

bool any_requeued; /* until then, there is nothing to look up */

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

/* The bio that somebody has submitted, of which this one is a part or a clone, or itself. `top`: its address; without
 * an entry, that of the last one above. */
static __always_inline struct io *io_and_top(u64 bio, u64 *top)
{
	struct io *io = NULL;

	for (int i = 0; i < 8 && bio && !io; i++, bio = bio_above(bio)) {
		*top = bio;
		io = bpf_map_lookup_elem(&ios, &bio);
	}
	return io;
}

static struct io *io_of(u64 bio)
{
	u64 top;

	return io_and_top(bio, &top);
}

/* From a part to what it is a part of: a bio that somebody has submitted, or a clone. */
static u64 whole_of(u64 bio)
{
	for (int i = 0; i < 8 && !bpf_map_lookup_elem(&ios, &bio); i++) {
		u64 whole = bio_whole(bio);

		if (!whole)
			break;
		bio = whole;
	}
	return bio;
}

/* The way of a clone of this bio, if it has been seen: not that of an earlier one at its address. */
static struct way *way_of(u64 clone, struct io *io)
{
	struct way *way = bpf_map_lookup_elem(&ways, &clone);

	return way && way->of == io->submitted ? way : NULL;
}

/* The same; a new one where nobody saw the clone go down: its target submits it in a way of its own. */
static struct way *way_or_new(u64 clone, struct io *io)
{
	struct way new = { .of = io->submitted, .is_clones = 1 }, *way = way_of(clone, io);

	if (way)
		return way;
	bpf_map_update_elem(&ways, &clone, &new, BPF_ANY);
	return bpf_map_lookup_elem(&ways, &clone);
}

/* Device mapper or md gives a clone to the disk below; or a bio goes from a partition to its disk: then there is none
 * above it. */
static __always_inline int bio_goes_down(u64 bio)
{
	struct io *io = io_of(bio_above(bio));
	struct way way = { .remapped = bpf_ktime_get_ns(), .is_clones = 1 };

	if (!io || is_submitted_later(bio))
		return 0;
	way.of = io->submitted;
	bpf_map_update_elem(&ways, &bio, &way, BPF_ANY);
	return 0;
}

/* What the kernel has noted in a request. */
struct stamps {
	u64 allocated, started; /* 0: never */
	bool is_noted; /* else `allocated` may be an earlier request's: without statistics, nobody notes it */
	bool is_idle; /* MQ_RQ_IDLE: no driver has it. Stamps do not say that: two starts of a plug may have one time */
};

/* Those of a request whose fields can be read without a helper call. */
static __always_inline struct stamps stamps_here(struct request *rq)
{
	return (struct stamps){ rq->start_time_ns, rq->io_start_time_ns, rq->part, rq->state == MQ_RQ_IDLE };
}

/* The driver gives a request back, because the disk is busy, or after an error: the block layer starts it again. */
static __always_inline int rq_is_requeued(u64 rq, struct stamps *stamps)
{
	struct requeued new = { stamps->allocated }, *found = bpf_map_lookup_elem(&requeued, &rq);

	if (found && found->allocated == stamps->allocated)
		new = *found;
	if (!stamps->started || stamps->is_idle)
		return 0; /* not started since */
	new.had += bpf_ktime_get_ns() - stamps->started;
	new.starts++;
	bpf_map_update_elem(&requeued, &rq, &new, BPF_ANY);
	any_requeued = true;
	return 0;
}

/* Each tool has these two for itself. A request has ended whose bios lead to nobody who was seen to submit one; what
 * this returns, rq_ends() returns, too. */
static __always_inline int rq_is_nobodys(struct issue *issue);

/* Whether an entry is of such a request, and not of this one. */
static __always_inline bool is_of_another(struct io *io, struct issue *issue);

/* Returns whether it has found whose bio it is. */
__noinline int note(u64 bio, struct issue *issue)
{
	struct io *io = bpf_map_lookup_elem(&ios, &bio), *own = io;
	struct way *way;

	if (!issue)
		return 0;
	if (!io) {
		bio = whole_of(bio);
		io = io_of(bio);
		own = bpf_map_lookup_elem(&ios, &bio);
	}
	if (!io)
		return 0;
	if (is_of_another(io, issue)) { /* whose completion was not seen */
		if (own && !bpf_map_delete_elem(&ios, &bio))
			__sync_fetch_and_add(&dropped, 1);
		return 0;
	}
	way = own ? &own->way : way_or_new(bio, io);
	if (!way || (way->rq == issue->rq && way->started == issue->started &&
		     way->allocated == issue->allocated && way->completes))
		return 1; /* the other program has noted them, or this is a flush around it */
	io->by.requests += issue->completes;
	take_times(way, issue);
	return 1;
}

static __always_inline void take_stamps(struct issue *issue, struct stamps *stamps)
{
	struct requeued *before = any_requeued ? bpf_map_lookup_elem(&requeued, &issue->rq) : NULL;

	issue->done = bpf_ktime_get_ns();
	issue->allocated = stamps->is_noted ? stamps->allocated : 0;
	issue->started = issue->time = stamps->started;
	issue->starts = !!stamps->started;
	if (!before || before->allocated != stamps->allocated)
		return;
	if (stamps->is_idle) { /* not started since: it ends where it was requeued */
		issue->time = issue->done;
		issue->starts = 0;
	}
	issue->time -= before->had;
	issue->starts += before->starts;
	if (issue->completes)
		bpf_map_delete_elem(&requeued, &issue->rq);
}

/* Those of a request that the verifier knows as a number. */
static __always_inline struct stamps stamps_of(struct request *rq)
{
	return (struct stamps){ BPF_CORE_READ(rq, start_time_ns), BPF_CORE_READ(rq, io_start_time_ns),
				BPF_CORE_READ(rq, part), BPF_CORE_READ(rq, state) == MQ_RQ_IDLE };
}

/* Notes the times of this request in each of its bios. */
static __always_inline int rq_ends(u64 rq, struct stamps *stamps, u64 bio, u64 last, bool all)
{
	struct issue issue = { .rq = rq, .completes = all };
	int found = 0;

	take_stamps(&issue, stamps);
	for (int i = 0; i < 1024 && bio; i++) {
		found |= note(bio, &issue);
		bio = bio == last ? 0 : (u64)BPF_CORE_READ((struct bio *)bio, bi_next);
	}
	return found ? 0 : rq_is_nobodys(&issue);
}

/* `status` 0: no error. `program`: 0 for fentry, 1 for the kprobe. */
__noinline int bio_completes(u64 bio, u32 status, u32 program);

/* A clone completes: its way explains the bio above it, unless another clone completes later. */
__noinline int way_ends(u64 clone, u64 above, u64 now)
{
	struct io *io = io_of(above);
	struct way *way = io ? way_or_new(clone, io) : NULL;

	if (!way)
		return 0;
	if (!way->below) /* or its target calls bio_endio() once more, or it has a clone itself */
		way->below = now;
	above = whole_of(above);
	bpf_map_update_elem(&ways, &above, way, BPF_ANY);
	io->has_clones = 1;
	return 0;
}

/* A bio without an entry completes; whether it is neither a clone nor a part. */
static __always_inline bool is_nobodys(u64 bio, bool in_parts, u64 now)
{
	u64 above = bio_original(bio);

	if (above && in_parts)
		way_ends(bio, above, now);
	return !above && !bio_whole(bio);
}

/* When a bio was submitted and completed. Clocks of two CPUs may differ a little. */
static __always_inline struct times times_of(struct io *io, u64 now)
{
	return (struct times){ .submitted = io->submitted,
			       .ended = now > io->submitted ? now : io->submitted };
}

static const struct way no_way = { .is_clones = 1 };

/* Divides the time of a bio that completes. */
static __always_inline void divide_io(u64 bio, struct io *io, struct times *times)
{
	if (!io->has_clones)
		divide(&io->way, times);
	else
		divide(way_of(bio, io) ?: &no_way, times);
}

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, u64); /* address of a bio to which another one was chained before it was submitted */
	__type(value, u32);
} chained_before SEC(".maps");

/* Not each call is seen: in block/bio.c, the compiler has put bio_chain() into blk_next_bio(), which chains the bios
 * of a large discard or of zeroes before it submits them. Their parts in flight tell. */
static __always_inline int bio_is_chained(u64 whole)
{
	struct io *io = bpf_map_lookup_elem(&ios, &whole);

	if (!io || (!io->chained && BPF_CORE_READ((struct bio *)whole, __bi_remaining.counter) > 1))
		bpf_map_update_elem(&chained_before, &whole, &(u32){ 1 }, BPF_ANY);
	else if (!io->chained)
		bpf_map_delete_elem(&chained_before, &whole); /* of another bio, which had this address */
	if (io)
		__sync_fetch_and_add(&io->chained, 1);
	return 0;
}

/*
 * Two parts of a bio may complete on two CPUs at the same time: then __bi_remaining is 2 for both. So the parts are
 * counted, too, as they are chained to the bio and as they complete. That is exact where only the block layer has
 * split it: drivers that take bios themselves may call bio_endio() more than once for reasons of their own.
 */
__noinline int all_have_ended(u64 address, u32 program)
{
	struct bio *bio = (void *)address;
	struct io *io = bpf_map_lookup_elem(&ios, &address);

	if (!io || !io->chained || program > 1 || __sync_fetch_and_add(&io->ends[program], 1) != io->chained)
		return false;
	return !bpf_map_lookup_elem(&chained_before, &address) &&
	       !BPF_CORE_READ(bio, bi_bdev, bd_disk, fops, submit_bio);
}

/* The last part of a bio to complete also completes the whole, which may be a part itself. */
static int bio_ends(u64 address, u32 program)
{
	struct bio *bio = (void *)address;
	u32 status = 0;

	for (int i = 0; i < 64 && bio && !bio_is_verified_next(bio); i++) {
		bool is_part = (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;

		if (BPF_CORE_READ(bio, __bi_remaining.counter) > 1 && !all_have_ended((u64)bio, program))
			break;
		/* The whole gets the error of this part later, unless it has one. */
		status = BPF_CORE_READ(bio, bi_status) ?: status;
		bio_completes((u64)bio, status, program);
		bio = is_part ? BPF_CORE_READ(bio, bi_private) : NULL; /* the whole */
	}
	return 0;
}

/* The same of a bio whose fields can be read without a helper call. Most are neither parts nor checksummed. Returns
 * whether it is one of these: then whoever comes second has nothing to do. Calls for the others are counted by both. */
static __always_inline bool bio_ends_here(u64 address, struct bio *bio, u32 program, bool was_seen)
{
	bool is_special = bio->__bi_remaining.counter > 1 ||
			  (bpf_core_field_exists(bio->bi_integrity) && bio->bi_integrity) ||
			  (u64)bio->bi_end_io == address_of_bio_chain_endio;

	if (is_special)
		bio_ends(address, program);
	else if (!was_seen)
		bio_completes(address, bio->bi_status, program);
	return !is_special;
}

#endif /* __JOIN_H__ */
