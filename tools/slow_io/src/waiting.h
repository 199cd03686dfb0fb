/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What has not completed, and how far each I/O has come. No program runs for it before user space looks: an iterator
 * then reads `ios`, and whoever reads /sys/block/DISK/inflight runs a program that visits the disk's requests.
 */
#ifndef __WAITING_H__
#define __WAITING_H__

#include "join.h"
#include "process.h"
#include <bpf/bpf_tracing.h>

const volatile u64 slow; /* ns: an I/O that takes as long or longer is shown */
const volatile u32 pid_namespace; /* its inode number; 0: the first one */
const volatile u32 looker; /* the process whose look it is */

enum stage { NO_REQUEST, IN_QUEUE, WITH_DRIVER };

struct found { /* an I/O that a request serves, or that a suspended disk of device mapper holds */
	u64 bio; /* the one at the top: its address */
	u64 submitted; /* of its entry in `ios`; 0: it has none */
	u64 diskseq, sector, waiter; /* who waits for it: an address, often of the task or of its stack */
	u32 dev, operation, bytes;
	u32 below; /* the disk that has the request */
	enum stage stage;
	u32 unused;
	u64 rq, allocated, started; /* of the request; 0: never, or not noted */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes */
} reached SEC(".maps");

u64 unplaced; /* I/Os for which it had no room */

struct walk { /* how far a look at a disk has come */
	u64 queue, tags, bio, last;
	struct found found;
};

/* Sends what is known of the I/O that this bio is a part of. */
__noinline int send_found(u64 bio, struct walk *walk)
{
	u64 address = bio;
	struct io *io = io_and_top(bio, &address);
	struct bio *top = (void *)address;
	struct found *found;

	if (!walk)
		return 0;
	found = &walk->found;
	found->bio = address;
	found->submitted = io ? io->submitted : 0;
	found->diskseq = BPF_CORE_READ(top, bi_bdev, bd_disk, diskseq);
	found->dev = BPF_CORE_READ(top, bi_bdev, bd_dev);
	/* On its way from a partition, it has got the sector of the disk. */
	found->sector = BPF_CORE_READ(top, bi_iter.bi_sector) - BPF_CORE_READ(top, bi_bdev, bd_start_sect);
	found->bytes = BPF_CORE_READ(top, bi_iter.bi_size);
	found->operation = BPF_CORE_READ(top, bi_opf);
	found->waiter = (u64)BPF_CORE_READ(top, bi_private);
	if (bpf_ringbuf_output(&reached, found, sizeof(*found), 0))
		__sync_fetch_and_add(&unplaced, 1);
	return 0;
}

static long next_bio(u32 n, struct walk *walk)
{
	u64 bio = walk->bio;

	send_found(bio, walk);
	walk->bio = bio == walk->last ? 0 : (u64)BPF_CORE_READ((struct bio *)bio, bi_next);
	return !walk->bio;
}

static long next_request(u32 n, struct walk *walk)
{
	struct blk_mq_tags *tags = (void *)walk->tags;
	struct request **all = BPF_CORE_READ(tags, static_rqs), *rq = NULL;
	struct stamps stamps;

	bpf_probe_read_kernel(&rq, sizeof(rq), all + n);
	/* A free one has the fields of the I/O that it served last; and disks may share their requests. */
	if (!rq || !BPF_CORE_READ(rq, ref.counter) || (u64)BPF_CORE_READ(rq, q) != walk->queue)
		return 0;
	walk->bio = (u64)BPF_CORE_READ(rq, bio);
	if (!walk->bio)
		return 0;
	walk->last = (u64)BPF_CORE_READ(rq, biotail);
	walk->found.rq = (u64)rq;
	stamps = stamps_of(rq);
	walk->found.stage = stamps.is_idle ? IN_QUEUE : WITH_DRIVER;
	walk->found.allocated = stamps.is_noted ? stamps.allocated : 0;
	walk->found.started = stamps.started;
	bpf_loop(1024, next_bio, walk, 0);
	return 0;
}

/* A queue of the hardware, by its number: from an array, or from a tree of one level or two. */
static struct blk_mq_hw_ctx *hardware_queue(struct request_queue *queue, u32 n)
{
	struct blk_mq_hw_ctx *hardware = NULL;
	struct xa_node *node;
	u64 entry;

	if (bpf_core_field_exists(queue->queue_hw_ctx)) {
		bpf_probe_read_kernel(&hardware, sizeof(hardware), BPF_CORE_READ(queue, queue_hw_ctx) + n);
		return hardware;
	}
	entry = (u64)BPF_CORE_READ(queue, hctx_table.xa_head);
	for (int level = 0; level < 2 && (entry & 3) == 2; level++) {
		u8 shift;

		node = (void *)(entry - 2);
		shift = BPF_CORE_READ(node, shift);
		entry = 0;
		bpf_probe_read_kernel(&entry, sizeof(entry),
				      (void *)node + bpf_core_field_offset(struct xa_node, slots) +
					      (n >> (shift & 31) & 63) * sizeof(void *));
	}
	return entry & 3 ? NULL : (void *)entry;
}

static long next_hardware_queue(u32 n, struct walk *walk)
{
	struct blk_mq_hw_ctx *hardware = hardware_queue((void *)walk->queue, n);
	struct blk_mq_tags *tags = BPF_CORE_READ(hardware, sched_tags) ?: BPF_CORE_READ(hardware, tags);

	if (!tags || (u64)tags == walk->tags)
		return 0; /* all share the same ones */
	walk->tags = (u64)tags;
	bpf_loop(BPF_CORE_READ(tags, nr_tags), next_request, walk, 0);
	return 0;
}

/* Finds what a suspended disk of device mapper holds back. What lies in a disk's private_data, the driver knows: that
 * it is device mapper's, these two pointers say. */
static void look_at_deferred(struct gendisk *disk, struct walk *walk)
{
	struct mapped_device *device = BPF_CORE_READ(disk, private_data);

	if (!bpf_core_type_exists(struct mapped_device) || BPF_CORE_READ(device, disk) != disk ||
	    (u64)BPF_CORE_READ(device, queue) != walk->queue)
		return;
	walk->bio = (u64)BPF_CORE_READ(device, deferred.head);
	walk->last = 0;
	walk->found.stage = NO_REQUEST;
	walk->found.allocated = walk->found.started = 0;
	if (walk->bio)
		bpf_loop(1024, next_bio, walk, 0);
}

/* A read of /sys/block/DISK/inflight. */
SEC("fentry/part_inflight_show")
int BPF_PROG(look_at_disk, struct device *device)
{
	struct block_device *part =
		(void *)number(device) - bpf_core_field_offset(struct block_device, bd_device);
	u32 process = pid_namespace ? process_in(pid_namespace) : bpf_get_current_pid_tgid() >> 32;
	struct gendisk *disk = BPF_CORE_READ(part, bd_disk);
	struct request_queue *queue = BPF_CORE_READ(disk, queue);
	struct walk walk = { .queue = (u64)queue, .found.below = BPF_CORE_READ(part, bd_dev) };

	if (process != looker)
		return 0;
	if (BPF_CORE_READ(queue, mq_ops))
		bpf_loop(BPF_CORE_READ(queue, nr_hw_queues), next_hardware_queue, &walk, 0);
	look_at_deferred(disk, &walk);
	return 0;
}

/* While a process is in bpf(2), the kernel skips kprobe programs on its CPU. It does not while the process reads an
 * iterator. */
SEC("iter/bpf_map_elem")
int each_io(struct bpf_iter__bpf_map_elem *ctx)
{
	u64 *bio = ctx->key;
	struct io *io = ctx->value;

	if (!bio || !io || bpf_ktime_get_ns() - io->submitted < slow)
		return 0;
	bpf_seq_write(ctx->meta->seq, bio, sizeof(*bio));
	bpf_seq_write(ctx->meta->seq, io, sizeof(*io));
	return 0;
}

struct waiter { /* a task that waits for I/O */
	u64 task, stack; /* addresses */
	u64 switches; /* the same number: it has waited all the time since */
	u32 process, thread;
	char comm[16]; /* of the process */
};

#define TASK_UNINTERRUPTIBLE 2

__noinline int waits_for_io(u64 address, struct waiter *waiter)
{
	struct task_struct *task = (void *)address;

	if (!waiter || !(BPF_CORE_READ(task, __state) & TASK_UNINTERRUPTIBLE) ||
	    !BPF_CORE_READ_BITFIELD_PROBED(task, in_iowait))
		return 0;
	waiter->task = address;
	waiter->stack = (u64)BPF_CORE_READ(task, stack);
	waiter->switches = BPF_CORE_READ(task, nvcsw) + BPF_CORE_READ(task, nivcsw);
	waiter->process = BPF_CORE_READ(task, tgid);
	waiter->thread = BPF_CORE_READ(task, pid);
	BPF_CORE_READ_STR_INTO(&waiter->comm, task, group_leader, comm);
	return 1;
}

SEC("iter/task")
int each_task(struct bpf_iter__task *ctx)
{
	struct waiter waiter = {};

	if (ctx->task && waits_for_io(number(ctx->task), &waiter))
		bpf_seq_write(ctx->meta->seq, &waiter, sizeof(waiter));
	return 0;
}

#endif /* __WAITING_H__ */
