// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "bio.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile dev_t disk; /* set by main.rs before loading */
u64 completed, split, dropped, unmatched;

struct start {
	u64 time; /* ns */
	u64 punted; /* see bio_is_punted() */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* address of the bio */
	__type(value, struct start);
} starts SEC(".maps");

/* Up to 6.3, submit_bio() hands such a bio to a worker, which calls submit_bio() again. */
static __always_inline bool bio_is_punted(struct bio *bio)
{
	return bpf_core_enum_value_exists(enum req_flag_bits, __REQ_CGROUP_PUNT) &&
	       BPF_CORE_READ(bio, bi_opf) >> bpf_core_enum_value(enum req_flag_bits, __REQ_CGROUP_PUNT) & 1;
}

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	if (bio_dev(bio) != disk)
		return 0;
	u64 io = (u64)bio;
	struct start start = { .time = bpf_ktime_get_ns(), .punted = bio_is_punted(bio) };

	if (bpf_map_update_elem(&starts, &io, &start, BPF_NOEXIST)) {
		struct start *before = bpf_map_lookup_elem(&starts, &io);
		if (before && before->punted && !start.punted)
			return 0; /* the worker's call: the first one counts */
		/* The map is full, or the completion of an earlier bio at this address was not seen. */
		if (bpf_map_update_elem(&starts, &io, &start, BPF_ANY) || before)
			__sync_fetch_and_add(&dropped, 1);
	}
	bpf_printk("submit_bio(bio=0x%llx) called: %llu", io, start.time);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(io_end, struct bio *bio)
{
	u64 io = (u64)bio;
	struct start *found = bpf_map_lookup_elem(&starts, &io);

	if (!found) {
		__sync_fetch_and_add(&unmatched, bio_dev(bio) == disk);
		return 0;
	}
	struct start start = *found;
	u64 end = bpf_ktime_get_ns();
	if (bpf_map_delete_elem(&starts, &io))
		return 0; /* only the call that deletes the entry completes the bio */
	if (bio->__bi_remaining.counter > 1 || /* other parts of it are still in flight */
	    (bpf_core_field_exists(bio->bi_integrity) && bio->bi_integrity)) {
		__sync_fetch_and_add(&split, 1);
		return 0;
	}
	__sync_fetch_and_add(&completed, 1);
	bpf_printk("bio_endio (bio=0x%llx) called: %llu", io, end);
	bpf_printk("submit_bio() -> bio_endio() time duration: %llu ns", end - start.time);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
