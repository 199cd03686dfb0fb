// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 address_of_bio_chain_endio; /* set by main.rs */
const volatile s64 min; /* ns, set by main.rs: a bio that takes at least so long is slow */
u64 completed, dropped, unmatched, lost, requeued; /* all CPUs share them: simple, but slow on many */

struct start { /* the record that user space gets, too */
	u64 time, end; /* ns */
	u64 sector; /* of dev; 512 bytes each */
	u64 dev; /* the disk or partition */
	u64 bytes;
	char comm[16]; /* the task that submitted it */
	struct times { /* ns; 0: no request was seen, or none with times */
		u64 allocated, issued, completed;
	} request; /* of several, the one that completed last */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the I/O */
	__type(value, struct start);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes */
} events SEC(".maps");

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

/* Notes a request's times with one of its bios. Not static: the verifier checks it once, on its own. */
__noinline int note(u64 io, struct times *times)
{
	for (int i = 0; i < 64; i++) { /* from a part of a bio to the whole */
		struct start *start = bpf_map_lookup_elem(&starts, &io);

		if (start && times)
			start->request = *times;
		if (start || (u64)BPF_CORE_READ((struct bio *)io, bi_end_io) != address_of_bio_chain_endio)
			return 0;
		io = (u64)BPF_CORE_READ((struct bio *)io, bi_private);
	}
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	struct times times = { rq->start_time_ns, rq->io_start_time_ns, bpf_ktime_get_ns() };
	u64 io = (u64)BPF_CORE_READ(rq, bio), last = (u64)rq->biotail; /* io: a number, for note() */

	if (!rq->part || !nr_bytes)
		return 0; /* a disk without statistics: the times may be old; or the flush after a write */
	for (int i = 0; i < 1024 && io; i++) { /* several, where bios were merged */
		note(io, &times);
		io = io == last ? 0 : (u64)BPF_CORE_READ((struct bio *)io, bi_next);
	}
	return 0;
}

SEC("tp_btf/block_rq_requeue")
int BPF_PROG(rq_again, struct request *rq)
{
	__sync_fetch_and_add(&requeued, 1); /* the driver will get it once more */
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
	if ((s64)(start.end - start.time) >= min && bpf_ringbuf_output(&events, &start, sizeof(start), 0))
		__sync_fetch_and_add(&lost, 1); /* there was no room */
	return 0;
}

/* The last part of a bio to complete also completes the whole, which may be a part itself. */
static int bio_ends(struct bio *bio)
{
	for (int i = 0; i < 64 && bio && !bio_stays_in_flight(bio); i++) {
		bool is_part = (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;

		completes(bio, is_part);
		bio = is_part ? BPF_CORE_READ(bio, bi_private) : NULL; /* the whole */
	}
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	return bio_ends(bio);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
