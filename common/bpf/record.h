/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * A record for the program that runs now, on this CPU, and for nobody else.
 *
 * No other CPU writes to this CPU's values of a per-CPU array, but what comes in between may: an
 * interrupt, or, in a preemptible kernel, another task can start a program while the one that had
 * the CPU has written half of a record. (bpf_spin_lock() would keep it out,
 * but not on 5.10, which does not let such programs have it.) So such a map has RECORDS keys. A program takes the first record that is not
 * taken, and releases it; what comes in between takes the next. User space looks at all of them.
 */
#ifndef __RECORD_H__
#define __RECORD_H__

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

#define RECORDS 4 /* task, softirq, interrupt, NMI */

/* The records of `map` begin with a u64 that says how many have taken them, and is written by
 * nothing else. A program adds 1. If there is more than 1 then, somebody else has the record: it takes
 * its 1 back, and tries the next. NULL: all are taken. */
static __always_inline void *take_record(void *map)
{
#pragma clang loop unroll(full)
	for (u32 i = 0; i < RECORDS; i++) {
		u32 key = i;
		volatile u64 *taken = bpf_map_lookup_elem(map, &key);

		if (!taken)
			continue;
		__sync_fetch_and_add(taken, 1);
		if (*taken == 1)
			return (void *)taken;
		__sync_fetch_and_add(taken, -1);
	}
	return NULL;
}

/* NULL is nothing to release. */
static __always_inline void release_record(void *record)
{
	barrier();
	if (record)
		__sync_fetch_and_add((u64 *)record, -1);
}

#endif /* __RECORD_H__ */
