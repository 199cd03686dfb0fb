/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --before, the flight recorder: the last bios of each CPU, whether they were slow or not. */
#ifndef __RECENT_H__
#define __RECENT_H__

#include "parts.h"
#include <bpf/bpf_helpers.h>

#define RECENT 1024 /* a power of two */
const volatile bool record;

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1); /* 2 * RECENT where they are recorded: set by main.rs */
	__type(key, u32); /* from 0 and from RECENT on, for there are two programs */
	__type(value, struct completed);
} recent SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, u32);
	__type(value, u32); /* how many bios this program has recorded on this CPU */
} recorded SEC(".maps");

static __always_inline void keep(struct completed *completed, u32 program)
{
	u32 *count = bpf_map_lookup_elem(&recorded, &program);

	if (!count)
		return;
	u32 place = program * RECENT + (*count)++ % RECENT;
	struct completed *kept = bpf_map_lookup_elem(&recent, &place);
	if (kept)
		*kept = *completed;
}

#endif /* __RECENT_H__ */
