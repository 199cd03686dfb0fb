// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, dropped, unmatched;

struct in_flight {
	u64 end, start; /* ns; end: of the last part so far */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* the address */
	__type(value, struct in_flight);
} starts SEC(".maps");

SEC("fentry/submit_bio")
int BPF_PROG(submit_bio_entry, struct bio *io)
{
	struct in_flight started = { .start = bpf_ktime_get_ns() };
	bool stale = bpf_map_lookup_elem(&starts, &io); /* a start whose end was not seen */

	if (bpf_map_update_elem(&starts, &io, &started, BPF_ANY) || stale)
		__sync_fetch_and_add(&dropped, 1);
	if (!quiet)
		bpf_printk("submit_bio(bio=0x%llx) called: %llu", (u64)io, started.start);
	return 0;
}

static __noinline void ended(struct bio *io, u64 end)
{
	struct in_flight *started = bpf_map_lookup_elem(&starts, &io);

	if (!started) {
		__sync_fetch_and_add(&unmatched, 1);
		return;
	}
	u64 latency = end - started->start;
	bpf_map_delete_elem(&starts, &io);
	__sync_fetch_and_add(&completed, 1);
	if (quiet)
		return;
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", (u64)io, end);
	bpf_printk("submit_bio() -> bio_endio() time duration: %llu ns", latency);
}

#include "bio_ends.h" /* bio_ends(), and one more hook, for bios that were split */
SEC("fentry/bio_endio")
int BPF_PROG(bio_endio_entry, struct bio *io)
{
	bio_ends(io);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
