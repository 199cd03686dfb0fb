// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched;

struct in_flight {
	u64 start, end;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct bio *);
	__type(value, struct in_flight);
} starts SEC(".maps");

SEC("fentry/submit_bio")
int BPF_PROG(submit_bio_entry, struct bio *bio)
{
	struct in_flight started = { .start = bpf_ktime_get_ns() };

	if (bpf_map_update_elem(&starts, &bio, &started, BPF_NOEXIST)) {
		bpf_map_update_elem(&starts, &bio, &started, BPF_ANY);
		__sync_fetch_and_add(&dropped, 1);
	}
	if (!quiet)
		bpf_printk("submit_bio(bio=0x%llx) called: %llu", (u64)bio, started.start);
	return 0;
}

static __noinline bool bio_ended(struct bio *bio, u64 end, bool last)
{
	struct in_flight *started = bpf_map_lookup_elem(&starts, &bio);

	if (!started)
		return false;
	if (end)
		started->end = end;
	if (!last || !started->end)
		return true;
	u64 latency = started->end - started->start;
	if (!quiet) {
		bpf_printk("bio_endio (bio=0x%llx) called: %llu", (u64)bio, started->end);
		bpf_printk("submit_bio() -> bio_endio() time duration: %llu ns", latency);
	}
	bpf_map_delete_elem(&starts, &bio);
	__sync_fetch_and_add(&completed, 1);
	return true;
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_endio_entry, struct bio *bio)
{
	if (!bio_and_wholes(bio, bio_ended))
		__sync_fetch_and_add(&unmatched, 1);
	return 0;
}

/* Two parts that end at once may each take the other for the last. This comes after both. */
SEC("fentry/bio_uninit")
int BPF_PROG(bio_uninit_entry, struct bio *bio)
{
	bio_ended(bio, 0, true);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
