// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 address_of_bio_chain_endio; /* set by main.rs */
const volatile s64 min; /* ns, set by main.rs: a bio that takes at least so long is slow */
u64 completed, dropped, unmatched; /* all CPUs share them: simple, but slow on many */

struct times { /* of a request, in ns; 0: not yet, or not known */
	u64 allocated, issued, completed;
};

struct start { /* a bio; the record that user space gets, too */
	u64 time, end; /* ns */
	u64 sector; /* of dev; 512 bytes each */
	u64 dev; /* the disk or partition */
	u64 bytes;
	char comm[16]; /* the task that submitted it */
	struct times request; /* of several, the one that completed last */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the I/O */
	__type(value, struct start);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the request */
	__type(value, struct times);
} requests SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	u64 io = (u64)bio;
	struct bvec_iter iter = BPF_CORE_READ(bio, bi_iter);
	struct start start = {
		.time = bpf_ktime_get_ns(),
		.sector = iter.bi_size ? iter.bi_sector : -1, /* a flush carries no data */
		.dev = BPF_CORE_READ(bio, bi_bdev, bd_dev),
		.bytes = iter.bi_size,
	};

	bpf_get_current_comm(start.comm, sizeof(start.comm));
	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither I/O is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(rq_start, struct request *rq)
{
	u64 key = (u64)rq;
	struct times times = { BPF_CORE_READ(rq, start_time_ns), bpf_ktime_get_ns() };
	struct times *before = bpf_map_lookup_elem(&requests, &key);

	if (!before || before->allocated != times.allocated || before->completed)
		bpf_map_update_elem(&requests, &key, &times, BPF_ANY);
	return 0; /* else it is started again: the first time counts */
}

/* Of a part, the bio that it was cut off from; NULL of any other bio. */
static __always_inline struct bio *whole_of(struct bio *bio)
{
	bool is_part = (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;
	return is_part ? BPF_CORE_READ(bio, bi_private) : NULL;
}

/* Copies a request's times to one of its bios. Not static: the verifier checks it on its own, once. */
__noinline int note(u64 bio, struct times *times)
{
	struct start *start = bpf_map_lookup_elem(&starts, &bio);

	for (int i = 0; i < 64 && !start && (bio = (u64)whole_of((void *)bio)); i++)
		start = bpf_map_lookup_elem(&starts, &bio);
	if (start && times)
		start->request = *times;
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 key = (u64)rq, bio = (u64)BPF_CORE_READ(rq, bio), last = (u64)BPF_CORE_READ(rq, biotail);
	struct times *found = bpf_map_lookup_elem(&requests, &key);

	/* Not for a start that was not seen, the flush after a write, a disk without statistics. */
	if (!found || found->allocated != rq->start_time_ns || found->completed || !rq->part)
		return 0;
	struct times times = *found;
	times.completed = bpf_ktime_get_ns();
	if (nr_bytes >= rq->__data_len)
		found->completed = times.completed; /* the next one at this address is another request */
	for (int i = 0; i < 1024 && bio; i++) { /* several, where bios were merged */
		note(bio, &times);
		bio = bio == last ? 0 : (u64)BPF_CORE_READ((struct bio *)bio, bi_next);
	}
	return 0;
}

static __noinline int completes(struct bio *bio, bool is_part)
{
	u64 io = (u64)bio;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (!found) {
		__sync_fetch_and_add(&unmatched, !is_part); /* parts never pass submit_bio() */
		return 0;
	}
	struct start start = *found;
	start.end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the I/O */
	__sync_fetch_and_add(&completed, 1);
	/* Here the record is complete. */
	return 0;
}

/* The last part of a bio to complete also completes the whole, which may be a part itself. */
SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	for (int i = 0; i < 64 && bio && !bio_stays_in_flight(bio); i++) {
		struct bio *whole = whole_of(bio);

		completes(bio, whole);
		bio = whole;
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
