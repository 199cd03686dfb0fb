/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef __RECORD_H__
#define __RECORD_H__

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

/* On 5.10 an interrupt may run a program in the middle of itself: each takes a record of its own. */
#define RECORDS 4 /* a task, a softirq, an interrupt, an NMI */

/* The first record of this CPU that no interrupted program is writing to. A record begins with a
 * u64 that is 1 meanwhile. `map` is a per-CPU array. */
static __always_inline void *take_record(void *map)
{
#pragma clang loop unroll(full)
	for (int i = 0; i < RECORDS; i++) {
		volatile u64 *busy = bpf_map_lookup_elem(map, &(u32){ i });

		if (busy && !*busy) {
			*busy = 1;
			return (void *)busy;
		}
	}
	return NULL;
}

static __always_inline void release_record(void *record)
{
	if (record)
		*(volatile u64 *)record = 0;
}

#endif /* __RECORD_H__ */
