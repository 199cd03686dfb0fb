// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "above.h"
#include "bio.h"
#include "reads.h"
#include "series.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool with_parts;
const volatile u32 first; /* 1 where the probes at the ends are loaded, too: they run first */
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

/* An operation that few disks have has no histogram of its own: their number has to stay small. */
static __always_inline u32 operation_of(struct bio *bio)
{
	switch (BPF_CORE_READ(bio, bi_opf) & REQ_OP_MASK) {
	case REQ_OP_READ:
		return READ;
	case REQ_OP_WRITE: /* without data, it is a flush */
		return BPF_CORE_READ(bio, bi_iter.bi_size) ? WRITE : FLUSH;
	case REQ_OP_FLUSH:
		return FLUSH;
	case REQ_OP_DISCARD:
		return DISCARD;
	}
	return OTHER;
}

SEC("kprobe/submit_bio")
int BPF_KPROBE(bio_start, struct bio *bio)
{
	u64 key = (u64)bio;
	struct io io = {
		.dev = BPF_CORE_READ(bio, bi_bdev, bd_dev),
		.operation = operation_of(bio),
	};

	io.submitted = bpf_ktime_get_ns(); /* last: what this program takes is no part of the latency */
	if (bpf_map_update_elem(&ios, &key, &io, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither bio is measured. */
		bool had_one = !bpf_map_delete_elem(&ios, &key);
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

static __always_inline int ends(u64 bio, struct io *io, u64 now, bool in_parts)
{
	if (bpf_map_delete_elem(&ios, &bio))
		return 0; /* only the call that deletes the entry completes the bio */
	io->ended = now > io->submitted ? now : io->submitted; /* clocks of two CPUs differ a little */
	if (in_parts)
		divide(io);
	add_to_series(io, in_parts);
	return 0;
}

__noinline int completes(u64 bio, u32 program)
{
	u64 now = bpf_ktime_get_ns();
	struct io *found = bpf_map_lookup_elem(&ios, &bio);

	if (!found) {
		u64 above = bio_above(bio);

		found = with_parts && above ? io_of(above) : NULL;
		if (found && found->below < found->done)
			found->below = now;
		__sync_fetch_and_add(&unmatched, !above && program == first);
		return 0;
	}
	if (with_parts) {
		struct io io = *found;

		return ends(bio, &io, now, true);
	}
	/* Only --parts needs the rest, and copying costs. */
	struct io io = { .submitted = found->submitted, .dev = found->dev, .operation = found->operation };
	return ends(bio, &io, now, false);
}

/* The last part of a bio to complete also completes the whole, which may be a part itself. */
static int bio_ends(u64 address, u32 program)
{
	struct bio *bio = (void *)address;

	for (int i = 0; i < 64 && bio && !bio_stays_in_flight(bio); i++) {
		bool is_part = (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;

		completes((u64)bio, program);
		bio = is_part ? BPF_CORE_READ(bio, bi_private) : NULL; /* the whole */
	}
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_end, struct bio *bio)
{
	/* Most bios are neither parts nor checksummed: their fields are read here without a helper call. */
	bool is_special = bio->__bi_remaining.counter > 1 ||
			  (bpf_core_field_exists(bio->bi_integrity) && bio->bi_integrity) ||
			  (u64)bio->bi_end_io == address_of_bio_chain_endio;

	return is_special ? bio_ends(number(bio), 0) : completes(number(bio), 0);
}

/* Only where the kernel preempts: there, the one above is skipped for some completions in tasks. */
SEC("kprobe/bio_endio")
int BPF_KPROBE(bio_end_probe, struct bio *bio)
{
	return bio_ends((u64)bio, 1);
}

/* --parts, from here to rq_end_probe(): as in `slow_io`. */
SEC("tp_btf/block_bio_remap")
int BPF_PROG(bio_remap, struct bio *bio)
{
	struct io *io = io_of(bio_above(number(bio))); /* NULL: it goes from a partition to its disk */

	if (io)
		io->remapped = bpf_ktime_get_ns();
	return 0;
}

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(rq_start, struct request *rq)
{
	u64 key = (u64)rq;
	struct issue issue = { bpf_ktime_get_ns(), 0, BPF_CORE_READ(rq, start_time_ns), 1 };
	struct issue *before = bpf_map_lookup_elem(&issues, &key);

	if (!before)
		bpf_map_update_elem(&issues, &key, &issue, BPF_ANY);
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

static __always_inline int rq_ends(u64 rq, u64 allocated, bool noted, u64 bio, u64 last, bool completes)
{
	struct issue *found = bpf_map_lookup_elem(&issues, &rq), issue = {};

	if (found && found->allocated == allocated && !found->completes) {
		found->completes = completes;
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

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	return rq_ends((u64)rq, rq->start_time_ns, rq->part, number(rq->bio), number(rq->biotail),
		       nr_bytes >= rq->__data_len);
}

SEC("kprobe/blk_update_request")
int BPF_KPROBE(rq_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	return rq_ends((u64)rq, BPF_CORE_READ(rq, start_time_ns), BPF_CORE_READ(rq, part),
		       (u64)BPF_CORE_READ(rq, bio), (u64)BPF_CORE_READ(rq, biotail),
		       nr_bytes >= BPF_CORE_READ(rq, __data_len));
}

/* The page cache, from here on: as in stage 08. */
SEC("tp/filemap/mm_filemap_add_to_page_cache")
int page_added(struct trace_event_raw_mm_filemap_op_page_cache *added)
{
	pages_added(added);
	return 0;
}

SEC("fentry/filemap_read")
int BPF_PROG(filemap_read_entry, struct kiocb *iocb, struct iov_iter *iter)
{
	return read_begins(iocb, iter);
}

SEC("fexit/filemap_read")
int BPF_PROG(filemap_read_exit, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	return read_ends(iocb, ret);
}

SEC("kprobe.session/filemap_read")
int BPF_KPROBE(filemap_read_session, struct kiocb *iocb, struct iov_iter *iter)
{
	u64 *cookie = bpf_session_cookie(ctx); /* carries the argument to the return, which has none */

	if (bpf_session_is_return(ctx))
		return read_ends(bpf_core_cast((void *)*cookie, struct kiocb), PT_REGS_RC(ctx));
	*cookie = (u64)iocb;
	return read_begins(bpf_core_cast(iocb, struct kiocb), bpf_core_cast(iter, struct iov_iter));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
