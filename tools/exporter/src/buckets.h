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
	u64 half = ns ? (ns - 1) >> 9 : 0; /* of 1024 ns */
	u32 shift = 0, bucket;

	for (u32 step = 32; step; step /= 2)
		if (half >> (shift + step) >= 2)
			shift += step;
	bucket = half < 2 ? 0 : shift * 2 + (half >> shift) - 1;
	return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

#endif /* __BUCKETS_H__ */
