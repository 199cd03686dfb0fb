// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 completed, split, dropped, unmatched; /* all CPUs share them: simple, but slow on many */

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	bpf_printk("submit_bio(bio=0x%llx) called: %llu", (u64)bio, bpf_ktime_get_ns());
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	/* Here: look the start up, and delete it. */
	if (bio_stays_in_flight(bio)) { /* a bio of several parts: stage 10 */
		__sync_fetch_and_add(&split, 1);
		return 0;
	}
	/* Here: count the bio, and print a third line. */
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", (u64)bio, bpf_ktime_get_ns());
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
