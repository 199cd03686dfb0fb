/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * How long requests take, and how long of that the driver had them, from two times that the block layer has noted
 * in each of them: no hook where they start, and no map of those in flight. The time of all is what
 * /sys/block/DISK/stat adds up, and iostat calls await.
 *
 * Each CPU has histograms of its own, which only the programs on this CPU write: the kernel runs a program of
 * a tracepoint once at a time on a CPU. So no counter here is atomic. User space reads all of them in place.
 */
#ifndef __REQUESTS_H__
#define __REQUESTS_H__

#include "buckets.h"
#include "join.h"
#include "series.h"
#include <bpf/bpf_helpers.h>

/* A function that completes a request whose data was written between two flushes: set by main.rs. */
const volatile u64 address_of_mq_flush_data_end_io = -1;

#define LINE 64 /* bytes of a cache line */

/* How many disks times operations each CPU has places for: a power of two, set by main.rs. */
const volatile u32 places_of_a_cpu = 64;

enum phase { ALL, IN_QUEUE, AT_DEVICE, UNDIVIDED, PHASES };

struct phase_times {
	u64 sum; /* ns */
	u64 buckets[BUCKETS];
};

struct requests {
	u64 of; /* diskseq << 3 | operation; 0: nobody uses this place */
	u64 allocated; /* ns; when the latest one was */
	struct phase_times phases[PHASES];
	u64 unused[2];
} __attribute__((aligned(LINE))); /* or the last line of a CPU is the next one's first */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); /* places_of_a_cpu times the CPUs: set by main.rs */
	__type(key, u32); /* CPU * places_of_a_cpu + place */
	__type(value, struct requests);
} requests SEC(".maps");

struct others { /* requests that are in no histogram, and what else is known of some */
	u64 no_statistics, passthrough, without_place, partial, requeued, shared_start;
	u64 unused[2];
} __attribute__((aligned(LINE)));

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
	for (u32 i = 0; i < places_of_a_cpu; i++) {
		u32 place = cpu * places_of_a_cpu + (of + i) % places_of_a_cpu;
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

/*
 * A driver may give a request back, and get it again: then the field has the last start only. What came before is
 * in the map `requeued`. It is asked only for requests whose address falls to a place of this table where one
 * was given back after this one was allocated: of a disk that gives none back, never.
 */
#define GIVEN_BACK 1024
#define A_SECOND 1000000000ULL /* longer than two CPUs can take to write here in the wrong order */

u64 given_back[GIVEN_BACK]; /* when the last one was, and a second: later requests are others */

static __always_inline u64 *given_back_of(struct request *rq)
{
	return &given_back[(number(rq) >> 6) % GIVEN_BACK];
}

/* How long the driver had a request that it has given back, from each start to its end. */
static __noinline u64 time_with_driver(struct request *rq)
{
	struct issue issue = { .rq = (u64)rq, .completes = 1 };
	struct stamps stamps = stamps_here(rq);

	take_stamps(&issue, &stamps);
	return issue.done - issue.time;
}

static __always_inline void add_to(struct phase_times *times, u64 ns)
{
	u32 bucket = bucket_of(ns);

	barrier_var(bucket); /* or the compiler drops the test, which the verifier needs */
	if (bucket < BUCKETS)
		times->buckets[bucket]++;
	times->sum += ns;
}

static __always_inline int request_completes(struct request *rq, u32 bytes)
{
	u32 cpu = bpf_get_smp_processor_id(), operation = rq->cmd_flags & REQ_OP_MASK;
	struct others *other = bpf_map_lookup_elem(&others, &cpu);
	struct requests *sums;
	u64 of, now, allocated, started, latency, device;
	u32 place;

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
	place = cpu * places_of_a_cpu + of % places_of_a_cpu;
	sums = bpf_map_lookup_elem(&requests, &place);
	if (!sums || sums->of != of) {
		place = place_of(of, cpu);
		sums = bpf_map_lookup_elem(&requests, &place);
	}
	if (!sums) {
		other->without_place++;
		return 0;
	}
	allocated = rq->start_time_ns;
	started = rq->io_start_time_ns;
	if (allocated == sums->allocated)
		other->shared_start++; /* from 6.9 on, the kernel takes one time for all requests of a plug */
	sums->allocated = allocated;
	now = bpf_ktime_get_ns(); /* last: soon after, the kernel takes the time, too */
	latency = now > allocated ? now - allocated : 0;
	add_to(&sums->phases[ALL], latency);
	if (!started) { /* nobody has noted when the driver got it */
		add_to(&sums->phases[UNDIVIDED], latency);
		return 0;
	}
	device = now > started ? now - started : 0;
	if (allocated < *given_back_of(rq))
		device = time_with_driver(rq);
	if (device > latency)
		device = latency; /* clocks of two CPUs may differ a little */
	add_to(&sums->phases[AT_DEVICE], device);
	add_to(&sums->phases[IN_QUEUE], latency - device);
	return 0;
}

static __always_inline int request_is_requeued(struct request *rq)
{
	struct stamps stamps = stamps_here(rq);
	u32 cpu = bpf_get_smp_processor_id();
	struct others *other = bpf_map_lookup_elem(&others, &cpu);

	if (other)
		other->requeued++;
	*given_back_of(rq) = bpf_ktime_get_ns() + A_SECOND;
	return rq_is_requeued((u64)rq, &stamps);
}

#endif /* __REQUESTS_H__ */
