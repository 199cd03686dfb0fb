// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define AT_FDCWD -100 /* the current directory */

u64 executed, failed, lost;

struct event {
	u32 pid;
	s32 error; /* 0, or a negative error number */
	s32 directory; /* of a failure: the descriptor that a relative name begins at, or AT_FDCWD */
	char comm[16];
	char file[260]; /* more than is shown: main.rs sees whether to cut */
} event_type; /* never used: it puts the type into the skeleton, for main.rs */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes */
} events SEC(".maps");

/* Room for an event in the ring buffer, with everything but the file's name; NULL if it is full. */
static __always_inline struct event *new_event(int error)
{
	struct event *event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);

	__sync_fetch_and_add(error ? &failed : &executed, 1);
	if (!event) {
		__sync_fetch_and_add(&lost, 1);
		return NULL;
	}
	event->pid = bpf_get_current_pid_tgid() >> 32;
	event->error = error;
	event->directory = AT_FDCWD;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	event->file[0] = '\0';
	return event;
}

/* The kernel has replaced the program of the current process. */
SEC("tp/sched/sched_process_exec")
int process_exec(struct trace_event_raw_sched_process_exec *exec)
{
	struct event *event = new_event(0);

	if (!event)
		return 0;
	/* The offset of the name in the event is in the lower 16 bits, its length in the upper ones. */
	bpf_probe_read_kernel_str(event->file, sizeof(event->file),
				  (void *)exec + (exec->__data_loc_filename & 0xffff));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

static __always_inline int exec_returns(int directory, unsigned long file, long ret)
{
	struct event *event;

	if (!ret)
		return 0; /* process_exec() has reported it */
	event = new_event(ret);
	if (!event)
		return 0;
	event->directory = directory;
	bpf_probe_read_user_str(event->file, sizeof(event->file), (void *)file);
	bpf_ringbuf_submit(event, 0);
	return 0;
}

#ifdef __TARGET_ARCH_arm64
#define SYSCALL(name) "fexit/__arm64_sys_" name
#else
#define SYSCALL(name) "fexit/__x64_sys_" name
#endif

/* The function of a system call takes the registers of the process. */
SEC(SYSCALL("execve"))
int BPF_PROG(execve_exit, struct pt_regs *regs, long ret)
{
	return exec_returns(AT_FDCWD, PT_REGS_PARM1_CORE_SYSCALL(regs), ret);
}

SEC(SYSCALL("execveat"))
int BPF_PROG(execveat_exit, struct pt_regs *regs, long ret)
{
	return exec_returns(PT_REGS_PARM1_CORE_SYSCALL(regs), PT_REGS_PARM2_CORE_SYSCALL(regs), ret);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
