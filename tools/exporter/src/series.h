/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A histogram for each disk and operation, and for each CPU, so that CPUs do not wait for each other.
 * User space reads all of them in place: a system call that reads a map would keep kprobe programs
 * from running on its CPU, and on a preemptible kernel a bio may be submitted in that time.
 */
#ifndef __SERIES_H__
#define __SERIES_H__

#include "buckets.h"
#include "parts.h"
#include <bpf/bpf_helpers.h>

#define SERIES 256

enum operation { READ, WRITE, FLUSH, DISCARD, OTHER };

struct series {
	u64 diskseq; /* 0: nobody uses this place */
	u32 operation, unused;
};

struct histogram {
	struct series of; /* set on the first CPU only */
	u64 sum, parts[PARTS]; /* ns */
	u64 in_no_part; /* of bios no part of which is known, ns */
	u64 parts_made; /* how many parts were split off them */
	u64 buckets[BUCKETS];
};

const volatile u32 cpus; /* that this machine may have */
u64 without_series; /* bios for which there was no place */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SERIES); /* times the CPUs: set by main.rs */
	__type(key, u32); /* place * cpus + CPU */
	__type(value, struct histogram);
} histograms SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SERIES);
	__type(key, struct series);
	__type(value, u32); /* its place in histograms */
} places SEC(".maps");

struct { /* the places that nobody uses: main.rs puts them in, at the start and when a disk goes */
	__uint(type, BPF_MAP_TYPE_QUEUE);
	__uint(max_entries, SERIES);
	__type(value, u32);
} unused SEC(".maps");

/* Takes a place for a disk and operation that were not used before. */
__noinline int take_place(u64 diskseq, u32 operation)
{
	struct series series = { diskseq, operation };
	struct histogram *first;
	u32 place, key;

	if (bpf_map_pop_elem(&unused, &place))
		return 0;
	key = place * cpus;
	first = bpf_map_lookup_elem(&histograms, &key);
	if (!first || bpf_map_update_elem(&places, &series, &place, BPF_NOEXIST)) {
		bpf_map_push_elem(&unused, &place, BPF_ANY); /* another CPU was faster */
		return 0;
	}
	first->of = series;
	return 0;
}

/* That of this CPU. */
static __always_inline struct histogram *histogram_of(const struct series *series)
{
	u32 *place = bpf_map_lookup_elem(&places, series), key;

	if (!place) {
		take_place(series->diskseq, series->operation);
		place = bpf_map_lookup_elem(&places, series);
	}
	key = place ? *place * cpus + bpf_get_smp_processor_id() : -1;
	return bpf_map_lookup_elem(&histograms, &key);
}

static __always_inline void add_part_made(const struct series *series)
{
	struct histogram *histogram = histogram_of(series);

	if (histogram)
		__sync_fetch_and_add(&histogram->parts_made, 1);
}

/* Atomic: on a preemptible kernel, two programs may run on one CPU at the same time. */
static __always_inline void add_to_series(const struct series *series, struct times *times, bool with_parts)
{
	u64 latency = times->ended - times->submitted;
	struct histogram *histogram = histogram_of(series);
	u32 bucket;

	if (!histogram) {
		__sync_fetch_and_add(&without_series, 1);
		return;
	}
	bucket = bucket_of(latency);
	barrier_var(bucket); /* or the compiler drops the test, which the verifier needs */
	if (bucket < BUCKETS)
		__sync_fetch_and_add(&histogram->buckets[bucket], 1);
	__sync_fetch_and_add(&histogram->sum, latency);
	for (int i = 0; i < PARTS && with_parts; i++)
		if (times->parts[i] != UNKNOWN)
			__sync_fetch_and_add(&histogram->parts[i], times->parts[i]);
	if (with_parts && times->parts[DEVICE] == UNKNOWN)
		__sync_fetch_and_add(&histogram->in_no_part, latency);
}

#endif /* __SERIES_H__ */
