/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What is added up of all bios of a disk: for each part the sum, the maximum and a histogram. Of the slow ones
 * apart: one busy neighbour has more quick ones than a slow service has reads. */
#ifndef __SUMS_H__
#define __SUMS_H__

#include "only.h"
#include "parts.h"
#include <bpf/bpf_helpers.h>

/* 32 slots for 0 to 31 ns, then 16 for every doubling up to 2^40 ns, 18 minutes: each is 6 % wide. */
#define SLOTS (32 + 35 * 16)

struct sum { /* of bios whose completion one program has seen on one CPU: there is no other writer */
	u64 sum, max; /* ns */
	u32 slots[SLOTS]; /* how many bios fell into each */
};

struct disk {
	struct sum parts[PARTS], total;
	u64 nobodys; /* of the bios, those that nobody was seen to submit: their requests were */
	struct slow_ones { /* the same of those that took --min or longer, in ns */
		u64 bios, requests, total, parts[PARTS];
		u64 known; /* bit of enum part: whether any of them has it */
	} slow_ones;
};

struct disk_id {
	u64 diskseq;
	u32 dev, unused; /* the disk's, or its partition's */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32); /* program */
	__type(value, struct disk);
} other_disks SEC(".maps");

struct of_disk { /* the same without types: 6.1 takes no map of main.rs', which has none, for one that has */
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__uint(key_size, sizeof(u32));
	__uint(value_size, sizeof(struct disk));
};

struct { /* main.rs puts a map into it for each disk that there is */
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, 4096);
	__type(key, struct disk_id);
	__array(values, struct of_disk);
} disks SEC(".maps");

u64 of_others; /* bios of no disk in `disks`: main.rs looks for new ones when there are more */

__noinline int add(struct sum *sum, u64 ns)
{
	u32 shift = 0, slot;

	if (!sum)
		return 0;
	sum->sum += ns;
	if (ns > sum->max)
		sum->max = ns;
	if (ns >> 20) /* a millisecond or more: most parts are shorter */
		for (u32 step = 32; step > 8; step /= 2)
			if (ns >> (shift + step) >= 16)
				shift += step;
	for (u32 step = 8; step; step /= 2)
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

static __always_inline void add_slow(struct slow_ones *slow_ones, struct times *times, struct submission *by)
{
	slow_ones->bios++;
	slow_ones->requests += by->requests;
	slow_ones->total += times->ended - times->submitted;
	for (int i = 0; i < PARTS; i++) {
		if (times->parts[i] == UNKNOWN)
			continue;
		slow_ones->parts[i] += times->parts[i];
		slow_ones->known |= 1 << i;
	}
}

/* `slow_one`: of a bio that is a slow one; else NULL. */
static __always_inline void add_to_disk(struct disk_id *id, struct times *times, u32 program, bool is_nobodys,
					struct submission *slow_one)
{
	void *of_disk = bpf_map_lookup_elem(&disks, id);
	struct disk *disk;

	if (of_disk) {
		disk = bpf_map_lookup_elem(of_disk, &program);
	} else {
		struct disk_id first = { only_disk, id->dev };

		/* With --disk, this one came later, and has its name. */
		of_disk = only_disk ? bpf_map_lookup_elem(&disks, &first) : NULL;
		if (of_disk)
			disk = bpf_map_lookup_elem(of_disk, &program);
		else
			disk = bpf_map_lookup_elem(&other_disks, &program);
		__sync_fetch_and_add(&of_others, 1);
	}
	if (!disk)
		return;
	for (int i = 0; i < PARTS; i++)
		if (times->parts[i] != UNKNOWN)
			add(&disk->parts[i], times->parts[i]);
	add(&disk->total, times->ended - times->submitted);
	if (is_nobodys)
		disk->nobodys++;
	if (slow_one)
		add_slow(&disk->slow_ones, times, slow_one);
}

#endif /* __SUMS_H__ */
