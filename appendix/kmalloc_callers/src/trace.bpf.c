// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

u64 dropped;

struct calls {
	u64 calls;
	u64 asked, given; /* bytes */
};

/* Allocated as a whole when it is made: adding an entry does not call kmalloc(). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64); /* the address that kmalloc() returns to */
	__type(value, struct calls);
} sites SEC(".maps");

static const struct calls none;

static __always_inline int count(u64 site, u64 asked, u64 given)
{
	struct calls *calls = bpf_map_lookup_elem(&sites, &site);

	if (!calls) {
		/* Another CPU may add it first: then this fails, and the next look-up finds it. */
		bpf_map_update_elem(&sites, &site, &none, BPF_NOEXIST);
		calls = bpf_map_lookup_elem(&sites, &site);
	}
	if (!calls) {
		__sync_fetch_and_add(&dropped, 1);
		return 0;
	}
	__sync_fetch_and_add(&calls->calls, 1);
	__sync_fetch_and_add(&calls->asked, asked);
	__sync_fetch_and_add(&calls->given, given);
	return 0;
}

SEC("tp_btf/kmalloc")
int BPF_PROG(kmalloc_btf, u64 site, void *ptr, u64 asked, u64 given)
{
	return count(site, asked, given);
}

/* From 7.0 on, a task may be preempted in a tp_btf program, but not in that of a classic tracepoint. */
SEC("tp/kmem/kmalloc")
int kmalloc_classic(struct trace_event_raw_kmalloc *event)
{
	return count(event->call_site, event->bytes_req, event->bytes_alloc);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
