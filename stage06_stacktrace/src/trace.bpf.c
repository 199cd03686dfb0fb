// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include "record.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched;

struct in_flight {
	u64 end, start; /* ns; end: of the last part so far */
	sector_t sector;
	dev_t dev;
	s64 stack_id;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* the address */
	__type(value, struct in_flight);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* as deep as the kernel walks */
} stacks SEC(".maps");

struct max_latency { /* the slowest I/O that a CPU has seen, written as a whole */
	u64 taken, io;
	struct in_flight started;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, RECORDS);
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

SEC("fentry/submit_bio")
int BPF_PROG(submit_bio_entry, struct bio *io)
{
	struct in_flight started = {
		.start = bpf_ktime_get_ns(),
		.sector = bio_sector(io),
		.dev = bio_dev(io),
		.stack_id = bpf_get_stackid(ctx, &stacks, 0),
	};
	bool stale = bpf_map_lookup_elem(&starts, &io); /* a start whose end was not seen */

	if (bpf_map_update_elem(&starts, &io, &started, BPF_ANY) || stale)
		__sync_fetch_and_add(&dropped, 1);
	if (!quiet)
		bpf_printk("submit_bio(bio=0x%llx) called: %llu", (u64)io, started.start);
	return 0;
}

static __noinline void ended(struct bio *io, u64 end)
{
	struct in_flight *started = bpf_map_lookup_elem(&starts, &io);

	if (!started) {
		__sync_fetch_and_add(&unmatched, 1);
		return;
	}
	started->end = end;
	u64 latency = end - started->start;
	struct max_latency *slowest = take_record(&max);
	if (slowest && latency > slowest->started.end - slowest->started.start) {
		slowest->io = (u64)io;
		slowest->started = *started;
	}
	release_record(slowest);
	bpf_map_delete_elem(&starts, &io);
	__sync_fetch_and_add(&completed, 1);
	if (quiet)
		return;
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", (u64)io, end);
	bpf_printk("submit_bio() -> bio_endio() time duration: %llu ns", latency);
}

#include "bio_ends.h" /* bio_ends(), and one more hook, for bios that were split */
SEC("fentry/bio_endio")
int BPF_PROG(bio_endio_entry, struct bio *io)
{
	bio_ends(io);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
