// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 completed, split, dropped, unmatched; /* all CPUs share them: simple, but slow on many */

struct start {
	u64 time; /* ns */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the I/O */
	__type(value, struct start);
} starts SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	u64 io = (u64)bio;
	struct start start = { .time = bpf_ktime_get_ns() };

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither I/O is measured. */
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
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the I/O */
	if (bio_stays_in_flight(bio)) { /* a bio of several parts: stage 10 */
		__sync_fetch_and_add(&split, 1);
		return 0;
	}
	__sync_fetch_and_add(&completed, 1);
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", io, end);
	bpf_printk("submit_bio() -> bio_endio() time duration: %lld ns", end - start.time);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
