/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A bio's times, and the parts of its latency between them. */
#ifndef __PARTS_H__
#define __PARTS_H__

#include "vmlinux.h"

/* In the order of time; but MAPPER is what device mapper takes before WAIT and after END. */
enum part { WAIT, QUEUE, DEVICE, END, MAPPER, PARTS };
#define UNKNOWN (~0ULL) /* this part cannot be told from the next one, which includes it */

struct io { /* a bio. Times in ns, 0: never */
	u64 submitted;
	u64 remapped; /* when device mapper gave its clone to the disk below */
	u64 allocated, issued, done; /* of its request; of several, the one that completed last */
	u64 below; /* when that clone completed */
	u64 ended;
	u64 parts[PARTS]; /* ns; their sum is ended - submitted */
	u64 sector; /* of dev; 512 bytes each */
	u32 dev, operation, bytes;
	u32 process, requests, starts; /* starts of the last request: it may be requeued */
	s32 stack_id; /* a key of stacks, or a negative error */
	u32 status; /* 0: no error */
	char comm[16];
};

struct issue { /* of a request */
	u64 time, done; /* when the driver got it, and completed it or a part of it */
	u64 allocated; /* with its address, this identifies a request */
	u32 starts, completes; /* 1: all of it has completed */
};

static __always_inline void take_times(struct io *io, struct issue *issue)
{
	if (!issue->time && io->issued)
		return; /* the other program has noted them, or this is a flush around it */
	io->allocated = issue->allocated;
	io->issued = issue->time;
	io->done = issue->done;
	io->starts = issue->starts;
	io->requests += issue->completes;
}

/* A merged bio joins a request that is older than it, and clocks of two CPUs may differ a little: so each
 * time is put between its neighbours. A time of 0 becomes `from`. */
static __always_inline u64 between(u64 from, u64 time, u64 to)
{
	return time < from ? from : time > to ? to : time;
}

static __always_inline void divide(struct io *io)
{
	u64 from = between(io->submitted, io->remapped, io->ended);
	u64 to = io->remapped && io->below >= io->done ? between(from, io->below, io->ended) : io->ended;
	u64 done = between(from, io->done, to);
	u64 allocated = between(from, io->allocated, done), issued = between(allocated, io->issued, done);

	for (int i = 0; i < PARTS; i++)
		io->parts[i] = UNKNOWN;
	if (!io->done)
		return; /* no request that belongs to it was seen */
	if (io->allocated) /* nobody noted it where the disk keeps no statistics */
		io->parts[WAIT] = allocated - from;
	if (io->issued) /* a flush has its request started in the name of another one */
		io->parts[QUEUE] = issued - allocated;
	io->parts[DEVICE] = done - issued;
	io->parts[END] = to - done;
	if (io->remapped)
		io->parts[MAPPER] = from - io->submitted + (io->ended - to);
}

#endif /* __PARTS_H__ */
