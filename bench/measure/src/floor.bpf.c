// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Programs that do nothing: the least that a pair of hooks can cost. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

SEC("kprobe/submit_bio")
int BPF_KPROBE(kprobe_start)
{
	return 0;
}

SEC("kprobe/bio_endio")
int BPF_KPROBE(kprobe_end)
{
	return 0;
}

SEC("fentry/submit_bio")
int BPF_PROG(fentry_start)
{
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(fentry_end)
{
	return 0;
}

SEC("fentry/filemap_read")
int BPF_PROG(read_start)
{
	return 0;
}

SEC("fexit/filemap_read")
int BPF_PROG(read_end)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
