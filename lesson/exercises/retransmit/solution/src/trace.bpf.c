// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#define AF_INET 2

u64 dropped;

struct connection {
	u8 from[16], to[16]; /* of IPv4, the first 4 bytes */
	u16 from_port, to_port;
	u32 is_ipv4;
} connection_type; /* never used: it puts the type into the skeleton, for main.rs */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct connection);
	__type(value, u64); /* segments sent again */
} connections SEC(".maps");

static __always_inline int count(struct sock_common *common, u64 number)
{
	struct connection key = {
		.from_port = common->skc_num,
		.to_port = bpf_ntohs(common->skc_dport),
		.is_ipv4 = common->skc_family == AF_INET,
	};
	u64 none = 0, *segments;

	if (key.is_ipv4) {
		*(u32 *)key.from = common->skc_rcv_saddr;
		*(u32 *)key.to = common->skc_daddr;
	} else {
		bpf_probe_read_kernel(key.from, sizeof(key.from), &common->skc_v6_rcv_saddr);
		bpf_probe_read_kernel(key.to, sizeof(key.to), &common->skc_v6_daddr);
	}
	bpf_map_update_elem(&connections, &key, &none, BPF_NOEXIST);
	segments = bpf_map_lookup_elem(&connections, &key);
	if (segments)
		__sync_fetch_and_add(segments, number);
	else
		__sync_fetch_and_add(&dropped, 1);
	return 0;
}

SEC("tp_btf/tcp_retransmit_skb")
int BPF_PROG(sends_again, struct sock *sk, struct sk_buff *skb)
{
	/* Up to 6.16, the kernel calls this only for what it has sent, and there is no third argument. */
	if (bpf_core_field_exists(struct trace_event_raw_tcp_retransmit_skb, err) && (int)ctx[2])
		return 0;
	return count(&sk->__sk_common, ((struct tcp_skb_cb *)skb->cb)->tcp_gso_segs);
}

/* The answer to who wants to connect: the connection is none yet, and has no buffers. */
SEC("tp_btf/tcp_retransmit_synack")
int BPF_PROG(answers_again, struct sock *listener, struct request_sock *request)
{
	return count(&request->__req_common, 1);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
