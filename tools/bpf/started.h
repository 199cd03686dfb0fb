/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which of the processes that have one number after another. */
#ifndef __STARTED_H__
#define __STARTED_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define TICK 10000000 /* ns: /proc/PID/stat has the start of a process in these (USER_HZ) */

/* Whether the current process was started in the TICK that begins at this time of CLOCK_BOOTTIME. Its number may
 * be another process's later, which was started later. exec() in a thread keeps the start of the process. */
static __always_inline bool was_started_at(u64 time)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, group_leader, start_boottime) - time < TICK;
}

#endif /* __STARTED_H__ */
