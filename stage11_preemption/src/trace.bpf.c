// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 address_of_bio_chain_endio; /* set by main.rs */
const volatile u32 counts_unmatched; /* the program that runs first: 1 where io_end_probe is loaded */
u64 completed, dropped, unmatched; /* all CPUs share them: simple, but slow on many */

struct start {
	u64 time; /* ns */
	u64 sector; /* of dev; 512 bytes each */
	u64 dev; /* the disk or partition */
	s64 stack_id; /* a key of stacks, or a negative error */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the I/O */
	__type(value, struct start);
} starts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* addresses, as deep as the kernel walks */
} stacks SEC(".maps");

struct max_latency { /* the slowest I/O that has completed on this CPU */
	u64 io, end;
	struct start start;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2); /* one for each program, which may interrupt the other one */
	__type(key, u32);
	__type(value, struct max_latency);
} max SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	u64 io = (u64)bio;
	u64 sector = BPF_CORE_READ(bio, bi_iter.bi_sector);
	struct start start = {
		.time = bpf_ktime_get_ns(),
		.sector = sector || BPF_CORE_READ(bio, bi_iter.bi_size) ? sector : -1, /* a flush has none */
		.dev = BPF_CORE_READ(bio, bi_bdev, bd_dev),
		.stack_id = bpf_get_stackid(ctx, &stacks, 0),
	};

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither I/O is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

static __noinline int completes(struct bio *bio, bool is_part, u32 program)
{
	u64 io = (u64)bio;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (!found) {
		__sync_fetch_and_add(&unmatched, !is_part && program == counts_unmatched);
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the I/O */
	__sync_fetch_and_add(&completed, 1);
	struct max_latency *slowest = bpf_map_lookup_elem(&max, &program);
	if (slowest && (s64)(end - start.time) > (s64)(slowest->end - slowest->start.time))
		*slowest = (struct max_latency){ io, end, start };
	return 0;
}

/* The last part of a bio to complete also completes the whole, which may be a part itself. */
static int bio_ends(struct bio *bio, u32 program)
{
	for (int i = 0; i < 64 && bio && !bio_stays_in_flight(bio); i++) {
		bool is_part = (u64)BPF_CORE_READ(bio, bi_end_io) == address_of_bio_chain_endio;

		completes(bio, is_part, program);
		bio = is_part ? BPF_CORE_READ(bio, bi_private) : NULL; /* the whole */
	}
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	return bio_ends(bio, 0);
}

/* Only where the kernel preempts: there, the program above is skipped for some completions in tasks. */
SEC("kprobe/bio_endio")
int BPF_KPROBE(io_end_probe, struct bio *bio)
{
	return bio_ends(bio, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
