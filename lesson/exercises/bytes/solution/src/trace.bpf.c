// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 not_counted;

struct process {
	u64 bytes;
	char name[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32); /* tgid */
	__type(value, struct process);
} processes SEC(".maps");

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	u32 tgid = bpf_get_current_pid_tgid() >> 32;
	u64 bytes = BPF_CORE_READ(bio, bi_iter.bi_size);
	struct process new = {}, *process = bpf_map_lookup_elem(&processes, &tgid);

	if ((BPF_CORE_READ(bio, bi_opf) & REQ_OP_MASK) > REQ_OP_WRITE)
		return 0; /* a discard transfers nothing */
	if (!process) {
		bpf_get_current_comm(new.name, sizeof(new.name));
		bpf_map_update_elem(&processes, &tgid, &new, BPF_NOEXIST); /* another CPU may be quicker */
		process = bpf_map_lookup_elem(&processes, &tgid);
	}
	if (process)
		__sync_fetch_and_add(&process->bytes, bytes);
	else
		__sync_fetch_and_add(&not_counted, bytes);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
