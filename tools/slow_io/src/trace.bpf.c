// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "cgroup.h"
#include "file.h"
#include "join.h"
#include "live.h"
#include "nobodys.h"
#include "only.h"
#include "process.h"
#include "recent.h"
#include "second.h"
#include "sums.h"
#include "waiting.h"
#include "who.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool with_stack;
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

static __always_inline int bio_is_submitted(void *ctx, u64 bio, struct io *io)
{
	struct submission *by = &io->by;

	if (!by->bytes && (by->operation & REQ_OP_MASK) <= REQ_OP_FLUSH)
		by->sector = -1; /* a flush is of the whole disk; a command for a zone has its sector */
	by->process = pid_namespace ? process_in(pid_namespace) : bpf_get_current_pid_tgid() >> 32;
	if ((only_disk && !is_of_disk(bio, by)) || (only_process && !is_of_process(by)) ||
	    (with_cgroup && !is_of_cgroup(bio, &by->cgroup))) {
		/* An entry at this address is of an earlier bio, whose completion was not seen. */
		if (!bpf_map_delete_elem(&ios, &bio))
			__sync_fetch_and_add(&dropped, 1);
		return 0;
	}
	if (with_stack)
		by->stack_id = bpf_get_stackid(ctx, &stacks, 0);
	/* The process's name, not the thread's: the number is the process's, too. */
	__builtin_memcpy(by->comm, bpf_get_current_task_btf()->group_leader->comm, sizeof(by->comm));
	by->thread = bpf_get_current_pid_tgid();
	return bio_starts(bio, io);
}

static __always_inline void describe(struct bio *bio, struct submission *by)
{
	struct block_device *device = bio->bi_bdev;

	by->sector = bio->bi_iter.bi_sector;
	by->bytes = bio->bi_iter.bi_size;
	by->dev = device->bd_dev;
	by->diskseq = device->bd_disk->diskseq;
	by->operation = bio->bi_opf;
}

/* Of a start, one of two is loaded. The kprobe costs more, and is not skipped where the kernel preempts; and a stack
 * that begins in it has no frame of ours. */
SEC("kprobe/submit_bio")
int BPF_KPROBE(bio_start_probe, struct bio *bio)
{
	struct io io = {};

	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		describe(bpf_core_cast(bio, struct bio), &io.by);
	} else {
		struct bvec_iter iter = BPF_CORE_READ(bio, bi_iter);
		struct block_device *device = BPF_CORE_READ(bio, bi_bdev);

		io.by.sector = iter.bi_sector;
		io.by.bytes = iter.bi_size;
		io.by.dev = BPF_CORE_READ(device, bd_dev);
		io.by.diskseq = BPF_CORE_READ(device, bd_disk, diskseq);
		io.by.operation = BPF_CORE_READ(bio, bi_opf);
	}
	return bio_is_submitted(ctx, (u64)bio, &io);
}

SEC("fentry/submit_bio")
int BPF_PROG(bio_start, struct bio *bio)
{
	struct io io = {};

	describe(bio, &io.by);
	return bio_is_submitted(ctx, number(bio), &io);
}

/* Only with --cgroup PATH. */
SEC("tp_btf/cgroup_mkdir")
int BPF_PROG(cgroup_made, struct cgroup *cgroup)
{
	return cgroup_is_made(cgroup);
}

SEC("tp_btf/block_bio_remap")
int BPF_PROG(bio_remap, struct bio *bio)
{
	return bio_goes_down(number(bio));
}

SEC("tp_btf/block_rq_requeue")
int BPF_PROG(rq_requeued, struct request *rq)
{
	struct stamps stamps = stamps_here(rq);

	return rq_is_requeued((u64)rq, &stamps);
}

SEC("kprobe/bio_chain")
int BPF_KPROBE(bio_chained, struct bio *part, struct bio *whole)
{
	return bio_is_chained((u64)whole);
}

/* Where a process or a cgroup is asked for, a request of nobody's is of another one. */
static __always_inline int rq_is_nobodys(struct issue *issue)
{
	return only_process || only_depth ? 0 : add_request(issue);
}

__noinline int bio_completes(u64 bio, u32 status, u32 program)
{
	u64 now = bpf_ktime_get_ns();
	struct io *io = bpf_map_lookup_elem(&ios, &bio);
	struct completed completed;

	if (!io) {
		bool all = !only_disk && !only_process && !only_depth;
		bool is_unmatched = is_nobodys(bio, true, now) && all && !is_of_a_request(bio);

		if (is_unmatched && program == first)
			__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	completed.times = times_of(io, now);
	completed.times.status = status;
	divide_io(bio, io, &completed.times);
	bool is_slow = completed.times.ended - completed.times.submitted >= slow;
	bool is_kept = is_slow || who || record, is_nobodys = io->by.is_nobodys;
	struct disk_id disk = { io->by.diskseq, io->by.dev };

	if (is_kept)
		completed.by = io->by;
	if (bpf_map_delete_elem(&ios, &bio))
		return 0; /* only the call that deletes the entry completes the bio */
	if (status == BLK_STS_AGAIN) {
		__sync_fetch_and_add(&refused, 1);
		return 0;
	}
	add_to_disk(&disk, &completed.times, program, is_nobodys, is_slow ? &completed.by : NULL);
	if (!is_kept)
		return 0;
	if (who)
		add_to_cause(&completed, program);
	if (record)
		keep(&completed, program);
	if (is_slow && send(&events, bio, &completed, program))
		__sync_fetch_and_add(&lost, 1);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_end, struct bio *bio)
{
	u64 address = number(bio);

	bio_ends_here(address, bio, 0, first_has_seen(BIO, address));
	return 0;
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	struct stamps stamps = stamps_here(rq);

	if (first_has_seen(REQUEST, (u64)rq))
		return 0;
	if (rq_ends((u64)rq, &stamps, number(rq->bio), number(rq->biotail), nr_bytes >= rq->__data_len))
		__sync_fetch_and_add(&commands, 1);
	return 0;
}

/* Only where the kernel preempts: there, the two above are skipped for some completions in tasks. */
SEC("kprobe/bio_endio")
int BPF_KPROBE(bio_end_probe, struct bio *bio)
{
	if (!bpf_ksym_exists(bpf_rdonly_cast))
		return bio_ends((u64)bio, 1);
	if (bio_ends_here((u64)bio, bpf_core_cast(bio, struct bio), 1, false))
		tell_second(BIO, (u64)bio);
	return 0;
}

SEC("kprobe/blk_update_request")
int BPF_KPROBE(rq_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	int is_command;

	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		struct request *cast = bpf_core_cast(rq, struct request);
		struct stamps stamps = stamps_here(cast);

		is_command = rq_ends((u64)rq, &stamps, number(cast->bio), number(cast->biotail),
				     nr_bytes >= cast->__data_len);
	} else {
		struct stamps stamps = stamps_of(rq);

		is_command =
			rq_ends((u64)rq, &stamps, (u64)BPF_CORE_READ(rq, bio),
				(u64)BPF_CORE_READ(rq, biotail), nr_bytes >= BPF_CORE_READ(rq, __data_len));
	}
	if (!is_command) /* the program above counts them */
		tell_second(REQUEST, (u64)rq);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
