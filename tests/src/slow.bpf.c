// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 begun, ended;

/* Runs for so long that it is running on some CPU at almost any moment, while requests are issued. */
SEC("tp_btf/block_rq_issue")
int BPF_PROG(block_rq_issue)
{
	__sync_fetch_and_add(&begun, 1);
	for (int i = 0; i < 20000; i++)
		bpf_ktime_get_ns();
	__sync_fetch_and_add(&ended, 1);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
