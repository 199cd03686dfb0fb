// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include "record.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched;

struct in_flight {
	u64 start, end;
	sector_t sector;
	dev_t dev;
	s64 stack_id;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct bio *);
	__type(value, struct in_flight);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* as deep as the kernel walks */
} stacks SEC(".maps");

/* The slowest bio that a CPU has seen, written as a whole. */
struct max_latency {
	u64 taken, bio;
	struct in_flight started;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RECORDS);
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

SEC("fentry/submit_bio")
int BPF_PROG(submit_bio_entry, struct bio *bio)
{
	struct in_flight started = {
		.start = bpf_ktime_get_ns(),
		.sector = bio->bi_iter.bi_sector,
		.dev = bio_dev(bio),
		.stack_id = bpf_get_stackid(ctx, &stacks, 0),
	};

	if (bpf_map_update_elem(&starts, &bio, &started, BPF_NOEXIST)) {
		bpf_map_update_elem(&starts, &bio, &started, BPF_ANY);
		__sync_fetch_and_add(&dropped, 1);
	}
	if (!quiet)
		bpf_printk("submit_bio(bio=0x%llx) called: %llu", (u64)bio, started.start);
	return 0;
}

static __noinline void bio_ended(struct bio *bio, struct in_flight *started)
{
	if (!quiet) {
		bpf_printk("bio_endio (bio=0x%llx) called: %llu", (u64)bio, started->end);
		bpf_printk("submit_bio() -> bio_endio() time duration: %llu ns",
			   started->end - started->start);
	}
	struct max_latency *slowest = take_record(&max);
	if (slowest && started->end - started->start > slowest->started.end - slowest->started.start) {
		slowest->bio = (u64)bio;
		slowest->started = *started;
	}
	release_record(slowest);
	bpf_map_delete_elem(&starts, &bio);
	__sync_fetch_and_add(&completed, 1);
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_endio_entry, struct bio *bio)
{
	u64 end = bpf_ktime_get_ns();
	bool last = true, seen = false;

	/* The end of a part may be that of the whole. */
	for (int i = 0; i < BIOS && bio; i++, bio = bio_whole(bio)) {
		struct in_flight *started = bpf_map_lookup_elem(&starts, &bio);

		last = last && !bio_goes_on(bio);
		if (!started)
			continue;
		seen = true;
		started->end = end;
		if (last)
			bio_ended(bio, started);
	}
	if (last && !seen)
		__sync_fetch_and_add(&unmatched, 1);
	return 0;
}

/* Where two parts end at once, each may take the other for the last. */
SEC("fentry/bio_uninit")
int BPF_PROG(bio_uninit_entry, struct bio *bio)
{
	struct in_flight *started = bpf_map_lookup_elem(&starts, &bio);

	if (started && started->end)
		bio_ended(bio, started);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
