// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched, no_slot;

struct start {
	u64 time; /* ns */
	sector_t sector; /* of dev */
	dev_t dev;
	u32 punted; /* see bio_is_punted() */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the bio */
	__type(value, struct start);
} starts SEC(".maps");

struct slot {
	dev_t dev;
	u32 power; /* latencies from 2^power ns to below 2^(power + 1) */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, struct slot);
	__type(value, u64); /* bios */
} slots SEC(".maps");

/* Up to 6.3, submit_bio() hands such a bio to a worker, which calls submit_bio() again. */
static __always_inline bool bio_is_punted(struct bio *bio)
{
	return bpf_core_enum_value_exists(enum req_flag_bits, __REQ_CGROUP_PUNT) &&
	       BPF_CORE_READ(bio, bi_opf) >> bpf_core_enum_value(enum req_flag_bits, __REQ_CGROUP_PUNT) & 1;
}

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	u64 io = (u64)bio;
	struct start start = {
		.time = bpf_ktime_get_ns(),
		.sector = bio_sector(bio),
		.dev = bio_dev(bio),
		.punted = bio_is_punted(bio),
	};

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		struct start *before = bpf_map_lookup_elem(&starts, &io);
		if (before && before->punted && !start.punted)
			return 0; /* the worker's call: the first one counts */
		/* The map is full, or the completion of an earlier bio at this address was not seen. */
		if (bpf_map_update_elem(&starts, &io, &start, BPF_ANY) || before)
			__sync_fetch_and_add(&dropped, 1);
	}
	if (!quiet)
		bpf_printk("submit_bio(bio=0x%llx) called: %llu", io, start.time);
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

static __always_inline void count(dev_t dev, u64 ns)
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

static __noinline int completes(struct bio *bio, bool is_part)
{
	u64 io = (u64)bio;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (!found) {
		__sync_fetch_and_add(&unmatched, !is_part); /* parts are made below submit_bio() */
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the bio */
	__sync_fetch_and_add(&completed, 1);
	count(start.dev, end - start.time);
	if (quiet)
		return 0;
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", io, end);
	bpf_printk("submit_bio() -> bio_endio() time duration: %llu ns", end - start.time);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	struct bio *whole = bio_whole(DIRECT, bio);

	if (bio_goes_on(DIRECT, bio))
		return 0;
	completes(bio, whole);
	for (int i = 0; i < 64 && whole && !bio_goes_on(BPF_CORE_READ, whole); i++) {
		bio = whole;
		whole = bio_whole(BPF_CORE_READ, bio);
		completes(bio, whole);
	}
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
