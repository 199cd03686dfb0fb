// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

/* The hook of the kernel's own tracex3 until 2018. */
SEC("kprobe/blk_start_request")
int BPF_KPROBE(blk_start_request_entry)
{
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
