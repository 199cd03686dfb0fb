// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

SEC("kprobe/submit_bio")
int BPF_KPROBE(io_start, struct bio *bio)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
