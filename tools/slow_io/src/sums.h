/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What is added up of all bios of a disk: for each part the sum, the maximum and a histogram. */
#ifndef __SUMS_H__
#define __SUMS_H__

#include "parts.h"
#include <bpf/bpf_helpers.h>

/* 32 slots for 0 to 31 ns, then 16 for every doubling up to 2^40 ns, 18 minutes: each is 6 % wide. */
#define SLOTS (32 + 35 * 16)

struct sum { /* of bios whose completion one program has seen on one CPU: there is no other writer */
	u64 sum, max; /* ns */
	u32 slots[SLOTS]; /* how many bios fell into each */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, u32); /* dev */
	__type(value, u32); /* 1, 2 ...: main.rs gives each disk one, 0 is for all others */
} places SEC(".maps");

struct disk {
	struct sum parts[PARTS], total;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* set by main.rs */
	__type(key, u32); /* place * 2 + program */
	__type(value, struct disk);
} disks SEC(".maps");

__noinline int add(struct sum *sum, u64 ns)
{
	u32 shift = 0, slot;

	if (!sum)
		return 0;
	sum->sum += ns;
	if (ns > sum->max)
		sum->max = ns;
	for (u32 step = 32; step; step /= 2)
		if (ns >> (shift + step) >= 16)
			shift += step;
	slot = shift * 16 + (ns >> shift);
	barrier_var(slot); /* or the compiler drops the test, which the verifier needs */
	if (slot < SLOTS)
		sum->slots[slot]++;
	else
		sum->slots[SLOTS - 1]++; /* it takes even longer */
	return 0;
}

static __always_inline void add_to_disk(struct io *io, u32 program)
{
	u32 *place = bpf_map_lookup_elem(&places, &io->dev);
	u32 key = (place ? *place : 0) * 2 + program;
	struct disk *disk = bpf_map_lookup_elem(&disks, &key);

	if (!disk)
		return;
	for (int i = 0; i < PARTS; i++)
		if (io->parts[i] != UNKNOWN)
			add(&disk->parts[i], io->parts[i]);
	add(&disk->total, io->ended - io->submitted);
}

#endif /* __SUMS_H__ */
