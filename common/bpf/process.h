/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which process runs now, by the number that a PID namespace knows it by. */
#ifndef __PROCESS_H__
#define __PROCESS_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define NAMESPACES 33 /* MAX_PID_NS_LEVEL, and the first one: they lie in one another */

/* The current process in the PID namespace with this inode number; 0 where it cannot be seen from
 * there. bpf_get_ns_current_pid_tgid() knows a process in its own namespace only, not from the
 * host that holds its container. */
static __always_inline u32 process_in(u32 namespace)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct pid *pid = BPF_CORE_READ(task, group_leader, thread_pid);
	u32 level = BPF_CORE_READ(pid, level);

	for (u32 i = 0; i < NAMESPACES && i <= level; i++) {
		struct upid upid = {};

		bpf_core_read(&upid, sizeof(upid), &pid->numbers[i]);
		if (BPF_CORE_READ(upid.ns, ns.inum) == namespace)
			return upid.nr;
	}
	return 0;
}

#endif /* __PROCESS_H__ */
