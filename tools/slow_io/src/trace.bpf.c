// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "above.h"
#include "bio.h"
#include "parts.h"
#include "process.h"
#include "recent.h"
#include "sums.h"
#include "who.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 slow; /* ns: a bio that takes as long or longer is an event */
const volatile u32 only_dev, only_process, pid_namespace; /* 0: all */
const volatile bool with_stack;
const volatile u32 first; /* 1 where the probes at the ends are loaded, too: they run first */
u64 completed, dropped, unmatched, lost;

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

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* addresses, as deep as the kernel walks */
} stacks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20); /* bytes */
} events SEC(".maps");

/* Whether a bio is for the disk that --disk names, or for a partition of it. */
static __always_inline bool is_wanted(struct bio *bio, u32 dev)
{
	struct gendisk *disk = BPF_CORE_READ(bio, bi_bdev, bd_disk);

	return dev == only_dev ||
	       (BPF_CORE_READ(disk, major) << 20 | BPF_CORE_READ(disk, first_minor)) == only_dev;
}

SEC("kprobe/submit_bio")
int BPF_KPROBE(bio_start, struct bio *bio)
{
	u64 key = (u64)bio;
	struct bvec_iter iter = BPF_CORE_READ(bio, bi_iter);
	struct io io = {
		.sector = iter.bi_size ? iter.bi_sector : -1, /* a flush carries no data */
		.dev = BPF_CORE_READ(bio, bi_bdev, bd_dev),
		.operation = BPF_CORE_READ(bio, bi_opf),
		.bytes = iter.bi_size,
		.process = pid_namespace ? process_in(pid_namespace) : bpf_get_current_pid_tgid() >> 32,
	};

	if ((only_dev && !is_wanted(bio, io.dev)) || (only_process && io.process != only_process)) {
		/* An entry at this address is of an earlier bio, whose completion was not seen. */
		__sync_fetch_and_add(&dropped, !bpf_map_delete_elem(&ios, &key));
		return 0;
	}
	if (with_stack)
		io.stack_id = bpf_get_stackid(ctx, &stacks, 0);
	bpf_get_current_comm(io.comm, sizeof(io.comm));
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

/* Notes the times of a request that completes, all of it or a part, in each of its bios. */
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

__noinline int completes(u64 bio, u32 status, u32 program)
{
	u64 now = bpf_ktime_get_ns();
	struct io *found = bpf_map_lookup_elem(&ios, &bio);

	if (!found) {
		u64 above = bio_above(bio);

		found = above ? io_of(above) : NULL;
		if (found && found->below < found->done)
			found->below = now;
		__sync_fetch_and_add(&unmatched, !above && !only_dev && !only_process && program == first);
		return 0;
	}
	struct io io = *found;
	if (bpf_map_delete_elem(&ios, &bio))
		return 0; /* only the call that deletes the entry completes the bio */
	__sync_fetch_and_add(&completed, 1);
	io.ended = now > io.submitted ? now : io.submitted; /* clocks of two CPUs differ a little */
	io.status = status;
	divide(&io);
	add_to_disk(&io, program);
	if (who)
		add_to_cause(&io, program);
	if (record)
		keep(&io, program);
	if (io.ended - io.submitted >= slow && bpf_ringbuf_output(&events, &io, sizeof(io), 0))
		__sync_fetch_and_add(&lost, 1);
	return 0;
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
		completes((u64)bio, status, program);
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

	return is_special ? bio_ends(number(bio), 0) : completes(number(bio), bio->bi_status, 0);
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	return rq_ends((u64)rq, rq->start_time_ns, rq->part, number(rq->bio), number(rq->biotail),
		       nr_bytes >= rq->__data_len);
}

/* Only where the kernel preempts: there, the two above are skipped for some completions in tasks. */
SEC("kprobe/bio_endio")
int BPF_KPROBE(bio_end_probe, struct bio *bio)
{
	return bio_ends((u64)bio, 1);
}

SEC("kprobe/blk_update_request")
int BPF_KPROBE(rq_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	return rq_ends((u64)rq, BPF_CORE_READ(rq, start_time_ns), BPF_CORE_READ(rq, part),
		       (u64)BPF_CORE_READ(rq, bio), (u64)BPF_CORE_READ(rq, biotail),
		       nr_bytes >= BPF_CORE_READ(rq, __data_len));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
