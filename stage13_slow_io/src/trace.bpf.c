// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 address_of_bio_chain_endio; /* set by main.rs */
const volatile u64 min; /* ns: a bio that takes as long or longer is an event */
u64 completed, dropped, unmatched, lost;

struct times { /* of a request, in ns; 0: not known */
	u64 allocated, issued;
	u64 done; /* in `requests` only: 1 when all of it has completed */
};

struct io { /* a bio */
	u64 submitted, ended; /* ns */
	struct times request; /* of several, the one that completed last */
	u64 sector; /* of dev; 512 bytes each */
	u32 dev, bytes;
	char comm[16]; /* who submitted it */
};

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
	__type(value, struct times);
} requests SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes */
} events SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(bio_start, struct bio *bio)
{
	u64 key = (u64)bio;
	struct bvec_iter iter = BPF_CORE_READ(bio, bi_iter);
	struct io io = {
		.submitted = bpf_ktime_get_ns(),
		.sector = iter.bi_size ? iter.bi_sector : -1, /* a flush carries no data */
		.dev = BPF_CORE_READ(bio, bi_bdev, bd_dev),
		.bytes = iter.bi_size,
	};

	bpf_get_current_comm(io.comm, sizeof(io.comm));
	if (bpf_map_update_elem(&ios, &key, &io, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither bio is measured. */
		bool had_one = !bpf_map_delete_elem(&ios, &key);
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

	if (!before || before->allocated != times.allocated || before->done)
		bpf_map_update_elem(&requests, &key, &times, BPF_ANY);
	return 0; /* else it is started again: the first time counts */
}

static __always_inline bool is_part(struct bio *bio)
{
	return (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;
}

/* Notes the times in the bio that was submitted. Not static: the verifier checks it once. */
__noinline int note(u64 bio, struct times *times)
{
	struct io *io = bpf_map_lookup_elem(&ios, &bio);

	for (int i = 0; i < 8 && !io && is_part((void *)bio); i++) {
		bio = (u64)BPF_CORE_READ((struct bio *)bio, bi_private); /* the whole */
		io = bpf_map_lookup_elem(&ios, &bio);
	}
	if (io && times && (times->issued || !io->request.done)) /* of a flush behind it, none are known */
		io->request = *times;
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 key = (u64)rq, bio = (u64)BPF_CORE_READ(rq, bio), last = (u64)BPF_CORE_READ(rq, biotail);
	struct times times = {}, *found = bpf_map_lookup_elem(&requests, &key);

	if (found && found->allocated == rq->start_time_ns && !found->done) {
		times = *found;
		if (nr_bytes >= rq->__data_len)
			found->done = 1; /* all of it: what comes at this address is another request */
	}
	if (!rq->part)
		times.allocated = 0; /* without statistics, nobody notes it */
	times.done = bpf_ktime_get_ns();
	for (int i = 0; i < 1024 && bio; i++) { /* several, where bios were merged */
		note(bio, &times);
		bio = bio == last ? 0 : (u64)BPF_CORE_READ((struct bio *)bio, bi_next);
	}
	return 0;
}

static __noinline int completes(struct bio *bio)
{
	u64 key = (u64)bio;
	struct io *found = bpf_map_lookup_elem(&ios, &key);

	if (!found) {
		__sync_fetch_and_add(&unmatched, !is_part(bio)); /* parts never pass submit_bio() */
		return 0;
	}
	struct io io = *found;
	if (bpf_map_delete_elem(&ios, &key))
		return 0; /* only the call that deletes the entry completes the bio */
	__sync_fetch_and_add(&completed, 1);
	io.ended = bpf_ktime_get_ns();
	if ((s64)(io.ended - io.submitted) >= (s64)min && bpf_ringbuf_output(&events, &io, sizeof(io), 0))
		__sync_fetch_and_add(&lost, 1);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_end, struct bio *bio)
{
	for (int i = 0; i < 64 && bio && !bio_stays_in_flight(bio); i++) {
		completes(bio);
		bio = is_part(bio) ? BPF_CORE_READ(bio, bi_private) : NULL; /* the whole */
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
