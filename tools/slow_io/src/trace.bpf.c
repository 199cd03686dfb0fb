// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "join.h"
#include "process.h"
#include "recent.h"
#include "sums.h"
#include "who.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 slow; /* ns: a bio that takes as long or longer is an event */
const volatile u64 only_disk; /* its diskseq; 0: all */
const volatile u32 only_partition, only_process, pid_namespace; /* the partition's dev; 0: all */
const volatile bool with_stack;
const volatile u32 first; /* 1 where the probes at the ends are loaded, too: they run first */
u64 lost;

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 16384);
	__uint(key_size, sizeof(u32));
	__uint(value_size, 127 * sizeof(u64)); /* addresses, as deep as the kernel walks */
} stacks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4 << 20); /* bytes */
} events SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(bio_start, struct bio *bio)
{
	struct bvec_iter iter = BPF_CORE_READ(bio, bi_iter);
	struct block_device *device = BPF_CORE_READ(bio, bi_bdev);
	struct io io = {};
	struct submission *by = &io.by;

	by->sector = iter.bi_size ? iter.bi_sector : -1; /* a flush carries no data */
	by->dev = BPF_CORE_READ(device, bd_dev);
	by->diskseq = BPF_CORE_READ(device, bd_disk, diskseq);
	by->operation = BPF_CORE_READ(bio, bi_opf);
	by->bytes = iter.bi_size;
	by->process = pid_namespace ? process_in(pid_namespace) : bpf_get_current_pid_tgid() >> 32;
	if ((only_disk && by->diskseq != only_disk) || (only_partition && by->dev != only_partition) ||
	    (only_process && by->process != only_process)) {
		/* An entry at this address is of an earlier bio, whose completion was not seen. */
		__sync_fetch_and_add(&dropped, !bpf_map_delete_elem(&ios, &(u64){ (u64)bio }));
		return 0;
	}
	if (with_stack)
		by->stack_id = bpf_get_stackid(ctx, &stacks, 0);
	bpf_get_current_comm(by->comm, sizeof(by->comm));
	return bio_starts((u64)bio, &io);
}

SEC("tp_btf/block_bio_remap")
int BPF_PROG(bio_remap, struct bio *bio)
{
	return bio_goes_down(number(bio));
}

SEC("kprobe/blk_mq_start_request")
int BPF_KPROBE(rq_start, struct request *rq)
{
	return rq_starts((u64)rq, BPF_CORE_READ(rq, start_time_ns));
}

SEC("kprobe/bio_chain")
int BPF_KPROBE(bio_chained, struct bio *part, struct bio *whole)
{
	return bio_is_chained((u64)whole);
}

__noinline int bio_completes(u64 bio, u32 status, u32 program)
{
	u64 now = bpf_ktime_get_ns();
	struct io *io = bpf_map_lookup_elem(&ios, &bio);
	struct completed completed;

	if (!io) {
		bool is_unmatched = is_nobodys(bio, true, now) && !only_disk && !only_process;

		__sync_fetch_and_add(&unmatched, is_unmatched && program == first);
		return 0;
	}
	completed.times = times_of(io, now);
	completed.times.status = status;
	divide_io(bio, io, &completed.times);
	completed.by = io->by;
	if (bpf_map_delete_elem(&ios, &bio))
		return 0; /* only the call that deletes the entry completes the bio */
	if (status == BLK_STS_AGAIN) {
		__sync_fetch_and_add(&refused, 1);
		return 0;
	}
	add_to_disk(&completed, program);
	if (who)
		add_to_cause(&completed, program);
	if (record)
		keep(&completed, program);
	if (completed.times.ended - completed.times.submitted >= slow &&
	    bpf_ringbuf_output(&events, &completed, sizeof(completed), 0))
		__sync_fetch_and_add(&lost, 1);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_end, struct bio *bio)
{
	return bio_ends_here(bio);
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	return rq_ends((u64)rq, rq->start_time_ns, rq->part, number(rq->bio), number(rq->biotail),
		       nr_bytes >= rq->__data_len);
}

/* Only where the kernel preempts: there, the two above are skipped for some completions in tasks. */
SEC("kprobe/bio_endio")
int BPF_KPROBE(bio_end_probe, struct bio *bio)
{
	return bio_ends((u64)bio, 1);
}

SEC("kprobe/blk_update_request")
int BPF_KPROBE(rq_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	return rq_ends((u64)rq, BPF_CORE_READ(rq, start_time_ns), BPF_CORE_READ(rq, part),
		       (u64)BPF_CORE_READ(rq, bio), (u64)BPF_CORE_READ(rq, biotail),
		       nr_bytes >= BPF_CORE_READ(rq, __data_len));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
