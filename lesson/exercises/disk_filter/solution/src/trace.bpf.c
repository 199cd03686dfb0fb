// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile dev_t disk; /* set by main.rs before loading */
u64 completed, split, dropped, unmatched;

struct start {
	u64 time; /* ns */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the bio */
	__type(value, struct start);
} starts SEC(".maps");

/* The disk or partition that the bio is submitted to. */
static dev_t bio_dev(struct bio *bio)
{
	return BPF_CORE_READ(bio, bi_bdev, bd_dev);
}

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	if (bio_dev(bio) != disk)
		return 0;
	u64 io = (u64)bio;
	struct start start = { .time = bpf_ktime_get_ns() };

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither bio is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	bpf_printk("submit_bio(bio=0x%llx) called: %llu", io, start.time);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	u64 io = (u64)bio;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (!found) {
		__sync_fetch_and_add(&unmatched, bio_dev(bio) == disk);
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the bio */
	if (bio_stays_in_flight(bio)) { /* the rest of a split bio: its time would be too short */
		__sync_fetch_and_add(&split, 1);
		return 0;
	}
	__sync_fetch_and_add(&completed, 1);
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", io, end);
	bpf_printk("submit_bio() -> bio_endio() time duration: %lld ns", end - start.time);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
