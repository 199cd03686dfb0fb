/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --cgroup: in whose name a bio is submitted. */
#ifndef __CGROUP_H__
#define __CGROUP_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

const volatile bool with_cgroup;
const volatile u64 only_cgroup; /* the number of one, for bios of it and of those below; 0: all */

/*
 * The cgroup to which the kernel charges the bio: what a kernel thread writes back belongs to the cgroup
 * that has written it to the page cache. Where the kernel charges the task that submits the bio, it is the
 * task's own: the charged one lies above it, where the controller `io` is not enabled as far down.
 */
static __always_inline struct cgroup *cgroup_of(struct bio *bio)
{
	struct css_set *set = BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), cgroups);
	struct cgroup *own = BPF_CORE_READ(set, dfl_cgrp), *charged;
	struct cgroup_subsys_state *css = NULL;
	struct blkcg *blkcg;

	if (!bpf_core_field_exists(bio->bi_blkg) ||
	    !bpf_core_enum_value_exists(enum cgroup_subsys_id, io_cgrp_id))
		return own; /* the kernel was built without that controller */
	blkcg = BPF_CORE_READ(bio, bi_blkg, blkcg);
	bpf_core_read(&css, sizeof(css),
		      &set->subsys[bpf_core_enum_value(enum cgroup_subsys_id, io_cgrp_id)]);
	if (!blkcg || (void *)css == (void *)blkcg + bpf_core_field_offset(struct blkcg, css))
		return own;
	charged = BPF_CORE_READ(blkcg, css.cgroup);
	return BPF_CORE_READ(charged, root) == BPF_CORE_READ(own, root) ? charged : own; /* not one of v1 */
}

static __always_inline u64 number_of(struct cgroup *cgroup)
{
	return BPF_CORE_READ(cgroup, kn, id);
}

/* Notes the cgroup's number. Returns whether its bios are asked for. */
__noinline int is_of_cgroup(u64 bio, u64 *number)
{
	struct cgroup *cgroup = cgroup_of((struct bio *)bio);

	if (!number)
		return 0;
	*number = number_of(cgroup);
	for (int i = 0; i < 64 && only_cgroup && cgroup; i++) {
		if (number_of(cgroup) == only_cgroup)
			return 1;
		cgroup = BPF_CORE_READ(cgroup, self.parent, cgroup);
	}
	return !only_cgroup;
}

#endif /* __CGROUP_H__ */
