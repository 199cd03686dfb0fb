// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define TASK_RUNNING 0

const volatile u32 process; /* main.rs sets it before loading */
u64 dropped;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32); /* tid */
	__type(value, u64); /* ns: of queued, since when; of waited, how long */
} queued SEC(".maps"), waited SEC(".maps");

static __always_inline void begin(u32 tid, u64 now)
{
	if (bpf_map_update_elem(&queued, &tid, &now, BPF_ANY))
		__sync_fetch_and_add(&dropped, 1);
}

static __always_inline int wake(struct task_struct *task)
{
	u32 tid = task->pid;

	/* A thread that is about to sleep may be woken when it waits, or runs, already. */
	if (task->tgid == process && !bpf_map_lookup_elem(&queued, &tid))
		begin(tid, bpf_ktime_get_ns());
	return 0;
}

SEC("tp_btf/sched_wakeup")
int BPF_PROG(wakes, struct task_struct *task)
{
	return wake(task);
}

SEC("tp_btf/sched_wakeup_new")
int BPF_PROG(is_born, struct task_struct *task)
{
	return wake(task);
}

SEC("tp_btf/sched_switch")
int BPF_PROG(switches, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int state)
{
	u64 now = bpf_ktime_get_ns(), none = 0, *since, *sum;
	u32 tid = prev->pid;

	if (prev->tgid == process) {
		if (preempt || state == TASK_RUNNING)
			begin(tid, now); /* it gives up the CPU, and goes back to the queue */
		else
			bpf_map_delete_elem(&queued, &tid); /* it was woken before it slept */
	}
	tid = next->pid;
	since = bpf_map_lookup_elem(&queued, &tid);
	if (!since)
		return 0;
	bpf_map_update_elem(&waited, &tid, &none, BPF_NOEXIST);
	sum = bpf_map_lookup_elem(&waited, &tid);
	if (sum)
		__sync_fetch_and_add(sum, now - *since);
	else
		__sync_fetch_and_add(&dropped, 1);
	bpf_map_delete_elem(&queued, &tid);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
