// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 completed, total; /* requests with a time of allocation, and the ns from there to their completion */
u64 not_noted;

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, u64); /* the longest time on this CPU, ns */
} max SEC(".maps");

SEC("tp_btf/block_rq_complete")
int BPF_PROG(io_end, struct request *rq, int error, unsigned int nr_bytes)
{
	u64 *longest = bpf_map_lookup_elem(&max, &(u32){ 0 });

	if (nr_bytes < rq->__data_len)
		return 0; /* a part of it: the rest is started again */
	if (!rq->part) { /* nobody keeps statistics of it: the field is old, or 0 */
		__sync_fetch_and_add(&not_noted, 1);
		return 0;
	}
	u64 latency = bpf_ktime_get_ns() - rq->start_time_ns;
	__sync_fetch_and_add(&completed, 1);
	__sync_fetch_and_add(&total, latency);
	if (longest && latency > *longest)
		*longest = latency;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
