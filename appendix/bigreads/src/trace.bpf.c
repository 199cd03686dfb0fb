// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u64 min_bytes;
u64 reads, lost;

struct event {
	u64 time; /* ns */
	u64 bytes;
	u32 pid;
	u32 mode; /* the type of the file, as in stat(2) */
	char comm[16];
	char file[256]; /* NAME_MAX is 255 */
} event_type; /* never used: it puts the type into the skeleton, for main.rs */

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20); /* bytes */
} events SEC(".maps");

static __always_inline int read_returns(struct file *file, ssize_t ret)
{
	struct event *event;

	if (ret < 0 || ret < min_bytes)
		return 0;
	__sync_fetch_and_add(&reads, 1);
	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event) {
		__sync_fetch_and_add(&lost, 1);
		return 0;
	}
	event->time = bpf_ktime_get_ns();
	event->bytes = ret;
	event->pid = bpf_get_current_pid_tgid() >> 32;
	event->mode = BPF_CORE_READ(file, f_inode, i_mode);
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	event->file[0] = '\0';
	bpf_probe_read_kernel_str(event->file, sizeof(event->file),
				  BPF_CORE_READ(file, f_path.dentry, d_name.name));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

SEC("fexit/vfs_read")
int BPF_PROG(vfs_read_exit, struct file *file, char *buf, size_t count, loff_t *pos, ssize_t ret)
{
	return read_returns(file, ret);
}

/* From 7.0 on: see stage 08. The return has no arguments; the entry leaves one for it in the cookie. */
extern bool bpf_session_is_return(void *ctx) __ksym __weak;
extern u64 *bpf_session_cookie(void *ctx) __ksym __weak;
SEC("kprobe.session/vfs_read")
int BPF_KPROBE(vfs_read_session, struct file *file)
{
	u64 *cookie = bpf_session_cookie(ctx);

	if (bpf_session_is_return(ctx))
		return read_returns((void *)*cookie, PT_REGS_RC(ctx));
	*cookie = (u64)file;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
