/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --live: what is added up is read while it is added up. bpf(2) would read it, too, and keep kprobe programs from
 * running meanwhile (see waiting.h): so iterators do. They add up what all CPUs, and both programs, have. */
#ifndef __LIVE_H__
#define __LIVE_H__

#include "sums.h"
#include "who.h"

const volatile u32 cpus; /* how many there may be: 0 to cpus - 1 */

enum watched_kind { NO_DISK, A_DISK, OTHER_DISKS };

struct watched {
	struct disk_id id;
	enum watched_kind kind;
	u32 unused;
};

struct { /* main.rs adds what it adds to `disks` */
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set by main.rs */
	__type(key, u32);
	__type(value, struct watched);
} all_watched SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct disk);
} whole SEC(".maps");

/* `kept`: a mask of what was there before, 0 where that is of another disk. A mask, and not a condition: in a loop, the
 * verifier would follow both of its branches each time. */
__noinline int add_sums(struct sum *to, struct sum *from, u64 kept)
{
	if (!to || !from)
		return 0;
	to->sum = from->sum + (to->sum & kept);
	to->max &= kept;
	if (from->max > to->max)
		to->max = from->max;
	for (u32 slot = 0; slot < SLOTS; slot++)
		to->slots[slot] = from->slots[slot] + (to->slots[slot] & (u32)kept);
	return 0;
}

static void add_slow_ones(struct slow_ones *to, struct slow_ones *from)
{
	to->bios += from->bios;
	to->requests += from->requests;
	to->total += from->total;
	to->known |= from->known;
	for (int i = 0; i < PARTS; i++)
		to->parts[i] += from->parts[i];
}

static const struct slow_ones no_slow_ones;

__noinline int add_disk(struct disk *to, struct disk *from, u64 kept)
{
	if (!to || !from)
		return 0;
	for (int i = 0; i < PARTS; i++)
		add_sums(&to->parts[i], &from->parts[i], kept);
	add_sums(&to->total, &from->total, kept);
	if (!kept) {
		to->nobodys = 0;
		to->slow_ones = no_slow_ones;
	}
	to->nobodys += from->nobodys;
	add_slow_ones(&to->slow_ones, &from->slow_ones);
	return 0;
}

struct adding {
	struct disk *to;
	void *of_disk; /* NULL: other_disks */
	u64 kept; /* see add_sums(): 0 until something was added */
};

/* `n`: a CPU and one of two programs. */
static long add_one(u32 n, struct adding *adding)
{
	u32 cpu = n / 2, program = n % 2;
	struct disk *from;

	if (adding->of_disk)
		from = bpf_map_lookup_percpu_elem(adding->of_disk, &program, cpu);
	else
		from = bpf_map_lookup_percpu_elem(&other_disks, &program, cpu);
	/* Most CPUs have seen no bio of most disks. */
	if (!from || (!from->total.max && !from->total.slots[0]))
		return 0;
	add_disk(adding->to, from, adding->kept);
	adding->kept = -1;
	return 0;
}

SEC("iter/bpf_map_elem")
int each_disk(struct bpf_iter__bpf_map_elem *ctx)
{
	struct watched *element = ctx->value, watched;
	struct adding adding = {};
	u32 zero = 0;

	if (!element || !element->kind)
		return 0;
	watched = *element;
	adding.to = bpf_map_lookup_elem(&whole, &zero);
	if (watched.kind == A_DISK) {
		adding.of_disk = bpf_map_lookup_elem(&disks, &watched.id);
		if (!adding.of_disk)
			return 0;
	}
	if (!adding.to)
		return 0;
	bpf_loop(2 * cpus, add_one, &adding, 0);
	if (!adding.kept)
		return 0;
	bpf_seq_write(ctx->meta->seq, &watched, sizeof(watched));
	bpf_seq_write(ctx->meta->seq, adding.to, sizeof(*adding.to));
	return 0;
}

SEC("iter/bpf_map_elem")
int each_cause(struct bpf_iter__bpf_map_elem *ctx)
{
	struct cause *cause = ctx->key;
	struct cause_sum *of_cpu = ctx->value, sum = {};

	if (!cause || !of_cpu)
		return 0;
	for (u32 cpu = 0; cpu < cpus; cpu++, of_cpu++) {
		sum.bios += of_cpu->bios;
		sum.bytes += of_cpu->bytes;
		sum.sum += of_cpu->sum;
		sum.known |= of_cpu->known;
		if (of_cpu->max > sum.max)
			sum.max = of_cpu->max;
		for (int i = 0; i < PARTS; i++)
			sum.parts[i] += of_cpu->parts[i];
	}
	bpf_seq_write(ctx->meta->seq, cause, sizeof(*cause));
	bpf_seq_write(ctx->meta->seq, &sum, sizeof(sum));
	return 0;
}

#endif /* __LIVE_H__ */
