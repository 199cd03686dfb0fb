/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A bio's times, and the parts of its latency between them. */
#ifndef __PARTS_H__
#define __PARTS_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>

/* In the order of time; but MAPPER is what device mapper takes before WAIT and after END. */
enum part { WAIT, QUEUE, DEVICE, END, MAPPER, PARTS };
#define UNKNOWN (~0ULL) /* it cannot be told from the next part, or from MAPPER, which then includes it */

#define NOBODYS 2 /* of a bio that nobody was seen to submit: its time begins with its request */

/* One way from a bio, or from device mapper's clone of it, to a disk and back. Times in ns, 0: never seen. */
struct way {
	u64 of; /* when the bio of which this is a clone was submitted: an address alone identifies none */
	u64 remapped; /* when device mapper gave the clone to the disk below */
	u64 allocated, issued, done; /* of its request; of several, the one that completed last */
	u64 rq, started; /* the address of that request, and when it was started last */
	u64 below; /* when the clone completed */
	u32 starts; /* of that request: it may be requeued */
	u16 completes, is_clones; /* all of that request has completed; the way is a clone's, or NOBODYS */
};

struct submission {
	u64 sector; /* of dev; 512 bytes each */
	u64 diskseq; /* identifies the disk: dev may be another one's later */
	u64 cgroup; /* its number, or 0 */
	u32 dev, operation, bytes, process;
	s32 stack_id; /* a key of stacks, or a negative error */
	u32 requests; /* of it that have completed */
	u32 thread, is_nobodys; /* its number in the first PID namespace; 1: nobody was seen to submit it */
	char comm[16]; /* of the process */
};

struct io { /* a bio that somebody has submitted */
	u64 submitted; /* ns */
	struct way way;
	u32 has_clones; /* then the way that counts is in `ways` */
	u32 chained, ends[2]; /* parts that were split off, and calls of bio_endio(), by program */
	struct submission by;
};

struct issue { /* of a request that completes, all of it or a part */
	u64 rq, started; /* its address, and when the driver got it last, or 0 */
	u64 allocated, done;
	u64 time; /* so long before `done` as the driver had it, all starts together */
	u32 starts, completes; /* 1: all of it has completed */
};

struct times {
	u64 submitted, ended, parts[PARTS]; /* ns; the sum of the parts is ended - submitted */
	u32 starts; /* of the request whose times these are; 0: no request was seen */
	u32 status; /* 0: no error */
};

struct completed {
	struct submission by;
	struct times times;
};

static __always_inline void take_times(struct way *way, struct issue *issue)
{
	way->rq = issue->rq;
	way->started = issue->started;
	way->allocated = issue->allocated;
	way->issued = issue->time;
	way->done = issue->done;
	way->starts = issue->starts;
	way->completes = issue->completes;
}

/* Clocks of two CPUs may differ a little: so each time is put between its neighbours. A time of 0 becomes
 * `from`. */
static __always_inline u64 between(u64 from, u64 time, u64 to)
{
	return time < from ? from : time > to ? to : time;
}

/* Whether a request that is older than its bio was the bio's at once. From 6.9 on, a request that was allocated
 * in advance gets the time at which it is used. Before, a bio that gets such a request may have waited for a
 * cgroup since, as long as the scheduler had it for all that can be seen; and so may one that was merged. */
static __always_inline bool is_older_known(void)
{
	return bpf_core_field_exists(((struct blk_plug *)0)->cur_ktime);
}

static __always_inline void divide(const struct way *way, struct times *times)
{
	u64 from = times->submitted, to = times->ended, done, allocated, issued;
	bool is_seen = !way->is_clones || way->remapped; /* when it went down */

	for (int i = 0; i < PARTS; i++)
		times->parts[i] = UNKNOWN;
	times->starts = way->starts;
	if (way->is_clones)
		from = way->remapped ?: way->allocated ?: way->issued;
	if (!way->done || !from)
		return; /* no request that belongs to it was seen */
	from = between(times->submitted, from, times->ended);
	if (way->is_clones && way->below >= way->done)
		to = between(from, way->below, times->ended);
	done = between(from, way->done, to);
	allocated = between(from, way->allocated, done);
	issued = between(allocated, way->issued, done);
	/* Nobody noted when it was allocated where the disk keeps no statistics. */
	if (is_seen && way->allocated && (way->allocated >= from || is_older_known()))
		times->parts[WAIT] = allocated - from;
	/* A flush has its request started in the name of another one; and some kernels may note no start. */
	if (way->issued && (is_seen || way->allocated))
		times->parts[QUEUE] = issued - allocated;
	times->parts[DEVICE] = done - issued;
	times->parts[END] = to - done;
	if (way->is_clones == 1)
		times->parts[MAPPER] = from - times->submitted + (times->ended - to);
}

#endif /* __PARTS_H__ */
