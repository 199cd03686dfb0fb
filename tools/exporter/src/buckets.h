/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The buckets of the histograms. They are the same on every machine, so that histograms can be added. */
#ifndef __BUCKETS_H__
#define __BUCKETS_H__

#include "vmlinux.h"

/* One up to 1024 ns, two for every doubling up to 2^36 ns (69 s), and one for what took longer. */
#define BUCKETS 54

/* The bucket of a time. Its upper limit belongs to a bucket, its lower one does not: Prometheus has
 * `le`, less or equal. */
static __always_inline u32 bucket_of(u64 ns)
{
	u32 doublings = 0, half; /* of 1024 ns */

	if (ns <= 1024)
		return 0;
	if (ns > 1ULL << 36)
		return BUCKETS - 1;
	half = (ns - 1) >> 9;
	for (u32 step = 16; step; step /= 2)
		if (half >> step >= 2) {
			half >>= step;
			doublings += step;
		}
	return doublings * 2 + half - 1; /* of the highest bit, and of the one below */
}

#endif /* __BUCKETS_H__ */
