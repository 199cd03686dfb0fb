/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --who: what is added up of all bios that have the same submitter, disk and operation. */
#ifndef __WHO_H__
#define __WHO_H__

#include "parts.h"
#include <bpf/bpf_helpers.h>

const volatile bool who, who_by_stack;
u64 nobody; /* bios for which the map has no room */

struct cause {
	u64 diskseq;
	u32 process, dev, operation;
	s32 stack_id; /* 0 where stacks are not told apart */
	u32 program, is_nobodys; /* the writer: there is no other one on this CPU */
	char comm[16];
};

struct cause_sum {
	u64 bios, bytes, sum, max, parts[PARTS]; /* ns */
	u64 known; /* bit n: part n is known of one of the bios */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 1); /* set by main.rs */
	__type(key, struct cause);
	__type(value, struct cause_sum);
} causes SEC(".maps");

/* Not inlined: all functions that call each other share 512 bytes of stack. */
__noinline int add_to_cause(struct completed *completed, u32 program)
{
	if (!completed)
		return 0;

	struct submission *by = &completed->by;
	struct times *times = &completed->times;
	struct cause cause = { by->diskseq, by->process, by->dev, by->operation & REQ_OP_MASK, 0, program };
	struct cause_sum none = {}, *sum;
	u64 latency = times->ended - times->submitted;

	cause.is_nobodys = by->is_nobodys;
	if (who_by_stack && !by->is_nobodys)
		cause.stack_id = by->stack_id;
	__builtin_memcpy(cause.comm, by->comm, sizeof(cause.comm));
	bpf_map_update_elem(&causes, &cause, &none, BPF_NOEXIST);
	sum = bpf_map_lookup_elem(&causes, &cause);
	if (!sum) {
		__sync_fetch_and_add(&nobody, 1);
		return 0;
	}
	sum->bios++;
	sum->bytes += by->bytes;
	sum->sum += latency;
	if (latency > sum->max)
		sum->max = latency;
	for (int i = 0; i < PARTS; i++) {
		if (times->parts[i] == UNKNOWN)
			continue;
		sum->parts[i] += times->parts[i];
		sum->known |= 1 << i;
	}
	return 0;
}

#endif /* __WHO_H__ */
