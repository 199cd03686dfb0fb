// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

/* include/linux/sched.h. Kernel threads without work sleep with TASK_NOLOAD. */
#define TASK_UNINTERRUPTIBLE 0x2
#define TASK_NOLOAD 0x400

const volatile u64 min_ns; /* main.rs sets it before the program is loaded */
u64 dropped, lost; /* main.rs reads them at the end */

struct event {
	u64 ns;
	u32 pid;
	u32 tid;
	char comm[16];
} event_type; /* never used: it puts the type into the skeleton, for main.rs */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32); /* tid */
	__type(value, u64); /* when it went to sleep, in ns */
} sleeping SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes */
} events SEC(".maps");

/* The kernel calls this with interrupts off: nothing can come between, and no call is skipped. */
SEC("tp_btf/sched_switch")
int BPF_PROG(thread_switch, bool preempt, struct task_struct *prev, struct task_struct *next,
	     unsigned int state)
{
	u64 now = bpf_ktime_get_ns(), *since, ns;
	struct event *event;
	u32 tid = prev->pid;

	/* A preempted thread is still runnable: whatever its state is, it does not sleep. */
	if (!preempt && (state & TASK_UNINTERRUPTIBLE) && !(state & TASK_NOLOAD)) {
		if (bpf_map_update_elem(&sleeping, &tid, &now, BPF_ANY))
			__sync_fetch_and_add(&dropped, 1);
	}
	tid = next->pid;
	since = bpf_map_lookup_elem(&sleeping, &tid);
	if (!since)
		return 0;
	ns = now - *since;
	bpf_map_delete_elem(&sleeping, &tid);
	if (ns < min_ns)
		return 0;
	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		__sync_fetch_and_add(&lost, 1);
		return 0;
	}
	event->ns = ns;
	event->pid = next->tgid;
	event->tid = tid;
	__builtin_memcpy(event->comm, next->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
