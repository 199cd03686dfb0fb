/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * How long requests take, from a time that the block layer has noted in each of them: no hook where they start,
 * and no map of those in flight. It is what /sys/block/DISK/stat adds up, and iostat calls await.
 *
 * Each CPU has histograms of its own, which only the programs on this CPU write: the kernel runs a program of
 * a tracepoint once at a time on a CPU. So no counter here is atomic. User space reads all of them in place.
 */
#ifndef __REQUESTS_H__
#define __REQUESTS_H__

#include "buckets.h"
#include "series.h"
#include <bpf/bpf_helpers.h>

/* A function that completes a request whose data was written between two flushes: set by main.rs. */
const volatile u64 address_of_mq_flush_data_end_io = -1;

struct requests {
	u64 of; /* diskseq << 3 | operation; 0: nobody uses this place */
	u64 sum, started; /* ns; when the latest one was allocated */
	u64 buckets[BUCKETS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SERIES); /* times the CPUs: set by main.rs */
	__type(key, u32); /* CPU * SERIES + place */
	__type(value, struct requests);
} requests SEC(".maps");

struct others { /* requests that are in no histogram, and what else is known of some */
	u64 no_statistics, passthrough, without_place, partial, requeued, shared_start;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); /* a value for each CPU: set by main.rs */
	__type(key, u32);
	__type(value, struct others);
} others SEC(".maps");

/* The kernel's groups, by which stat counts: what is neither a discard nor a flush is a write where its number
 * is odd. */
static __always_inline u64 group_of(u32 operation)
{
	if (operation == REQ_OP_DISCARD)
		return DISCARD;
	if (operation == REQ_OP_FLUSH)
		return FLUSH;
	return operation & 1 ? WRITE : READ;
}

/* The place of a disk and operation among those of this CPU, or the first free one, which is taken; -1 where
 * there is none. */
__noinline u32 place_of(u64 of, u32 cpu)
{
	for (u32 i = 0; i < SERIES; i++) {
		u32 place = cpu * SERIES + (of + i) % SERIES;
		struct requests *sums = bpf_map_lookup_elem(&requests, &place);

		if (!sums)
			break;
		if (!sums->of)
			sums->of = of;
		if (sums->of == of)
			return place;
	}
	return -1;
}

static __always_inline int request_completes(struct request *rq, u32 bytes)
{
	u32 cpu = bpf_get_smp_processor_id(), operation = rq->cmd_flags & REQ_OP_MASK;
	struct others *other = bpf_map_lookup_elem(&others, &cpu);
	struct requests *sums;
	u32 place, bucket;
	u64 of, start, now, latency;

	if (!other)
		return 0;
	if (bytes < rq->__data_len) {
		other->partial++; /* the rest is still to come, and its end is the request's */
		return 0;
	}
	if ((u64)rq->end_io == address_of_mq_flush_data_end_io)
		return 0; /* it completes once more, after the flush */
	if (!rq->part && operation != REQ_OP_FLUSH) {
		if (operation >= REQ_OP_DRIVER)
			other->passthrough++;
		else
			other->no_statistics++;
		return 0;
	}
	if (rq->part && !bytes && !rq->bio && operation != REQ_OP_FLUSH)
		return 0; /* of dm-multipath: it has completed with its data */
	of = rq->q->disk->diskseq << 3 | group_of(operation);
	place = cpu * SERIES + of % SERIES;
	sums = bpf_map_lookup_elem(&requests, &place);
	if (!sums || sums->of != of) {
		place = place_of(of, cpu);
		sums = bpf_map_lookup_elem(&requests, &place);
	}
	if (!sums) {
		other->without_place++;
		return 0;
	}
	start = rq->start_time_ns;
	if (start == sums->started)
		other->shared_start++; /* from 6.9 on, the kernel takes one time for all requests of a plug */
	sums->started = start;
	now = bpf_ktime_get_ns(); /* last: soon after, the kernel takes the time, too */
	latency = now > start ? now - start : 0;
	bucket = bucket_of(latency);
	barrier_var(bucket); /* or the compiler drops the test, which the verifier needs */
	if (bucket < BUCKETS)
		sums->buckets[bucket]++;
	sums->sum += latency;
	return 0;
}

static __always_inline int request_is_requeued(void)
{
	u32 cpu = bpf_get_smp_processor_id();
	struct others *other = bpf_map_lookup_elem(&others, &cpu);

	if (other)
		other->requeued++;
	return 0;
}

#endif /* __REQUESTS_H__ */
