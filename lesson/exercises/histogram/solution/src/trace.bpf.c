// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 completed, split, dropped, unmatched, no_slot; /* all CPUs share them: simple, but slow on many */

struct start {
	u64 time; /* ns */
	u64 sector; /* of dev; 512 bytes each */
	u64 dev; /* the disk or partition */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the I/O */
	__type(value, struct start);
} starts SEC(".maps");

struct slot {
	u32 dev, power; /* latencies from 2^power ns to below 2^(power + 1) */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct slot);
	__type(value, u64); /* bios */
} slots SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	u64 io = (u64)bio;
	u64 sector = BPF_CORE_READ(bio, bi_iter.bi_sector);
	struct start start = {
		.time = bpf_ktime_get_ns(),
		.sector = sector || BPF_CORE_READ(bio, bi_iter.bi_size) ? sector : -1, /* a flush has none */
		.dev = BPF_CORE_READ(bio, bi_bdev, bd_dev),
	};

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		/* The map is full, or the address has a start already: then neither I/O is measured. */
		bool had_one = !bpf_map_delete_elem(&starts, &io);
		__sync_fetch_and_add(&dropped, 1 + had_one);
	}
	return 0;
}

static __always_inline u32 power_of_two(u64 value)
{
	u32 power = 0;

	for (int bits = 32; bits; bits /= 2) {
		if (value >> bits) {
			value >>= bits;
			power += bits;
		}
	}
	return power;
}

static __always_inline void count(u32 dev, u64 ns)
{
	struct slot slot = { dev, power_of_two(ns) };
	u64 zero = 0, *bios = bpf_map_lookup_elem(&slots, &slot);

	if (!bios) {
		bpf_map_update_elem(&slots, &slot, &zero, BPF_NOEXIST); /* another CPU may be quicker */
		bios = bpf_map_lookup_elem(&slots, &slot);
	}
	if (bios)
		__sync_fetch_and_add(bios, 1);
	else
		__sync_fetch_and_add(&no_slot, 1);
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
	count(start.dev, end - start.time);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
