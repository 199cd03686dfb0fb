/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Two programs at one end: the second one has nothing to do where the first one has done all. */
#ifndef __SECOND_H__
#define __SECOND_H__

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

const volatile u32 first; /* 1 where the probes at the ends are loaded, too: they run first */

enum kind { BIO, REQUEST, KINDS };

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, KINDS);
	__type(key, u32); /* enum kind */
	__type(value, u64); /* the address of which the first of two programs has seen the end, or 0 */
} seen SEC(".maps");

/* Where two programs see an end, the first one tells the second one, which comes next on this CPU. If another end comes
 * between them, or the task goes to another CPU, the second one looks for itself, and finds that all is done. */
static __always_inline void tell_second(u32 kind, u64 address)
{
	u64 *last = bpf_map_lookup_elem(&seen, &kind);

	if (last)
		*last = address;
}

/* Asked once: an address may be another bio's next. */
static __always_inline bool first_has_seen(u32 kind, u64 address)
{
	u64 *last = first ? bpf_map_lookup_elem(&seen, &kind) : NULL;

	if (!last || *last != address)
		return false;
	*last = 0;
	return true;
}

#endif /* __SECOND_H__ */
