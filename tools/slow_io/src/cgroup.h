/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --cgroup: in whose name a bio is submitted. */
#ifndef __CGROUP_H__
#define __CGROUP_H__

#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

const volatile bool with_cgroup;
/* How many entries `levels` has, for bios of the last one and of those below; 0: all. */
const volatile u32 only_depth;
u64 made_again; /* how often a cgroup was made at the path of --cgroup */

struct level {
	u64 number; /* of the cgroup that was made there last */
	u64 name[32]; /* the last part of its path, with zeros behind it, as numbers: quicker to compare */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* set by main.rs */
	__type(key, u32); /* from one above, which is not followed, down to the one that --cgroup names */
	__type(value, struct level);
} levels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, u64); /* the number of a cgroup that is, or was, the last level */
	__type(value, u32);
} generations SEC(".maps");

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
	u32 last = only_depth - 1;
	struct level *wanted = only_depth ? bpf_map_lookup_elem(&levels, &last) : NULL;

	if (!number)
		return 0;
	*number = number_of(cgroup);
	for (int i = 0; i < 64 && only_depth && cgroup; i++) {
		u64 above = number_of(cgroup);

		if ((wanted && wanted->number == above) ||
		    (made_again && bpf_map_lookup_elem(&generations, &above)))
			return 1;
		cgroup = BPF_CORE_READ(cgroup, self.parent, cgroup);
	}
	return !only_depth;
}

/* A cgroup is known by its parent's number and by its name, which is right inside of a container, too: the path there
 * begins at another root. Called before any process can be in it, one call after the other. */
static __always_inline int cgroup_is_made(struct cgroup *cgroup)
{
	u64 number = number_of(cgroup), parent = BPF_CORE_READ(cgroup, self.parent, cgroup, kn, id);
	struct level level = { number }, *above = NULL, *made;
	u32 place = 0;

	while (place < 63 && ++place < only_depth) {
		u32 before = place - 1;

		above = bpf_map_lookup_elem(&levels, &before);
		if (above && above->number == parent)
			break;
	}
	made = bpf_map_lookup_elem(&levels, &place);
	if (!above || above->number != parent || !made || BPF_CORE_READ(cgroup, root, hierarchy_id))
		return 0;
	bpf_probe_read_kernel_str(level.name, sizeof(level.name), BPF_CORE_READ(cgroup, kn, name));
	for (int i = 0; i < 32; i++)
		if (level.name[i] != made->name[i])
			return 0;
	made->number = number;
	if (place + 1 == only_depth) {
		bpf_map_update_elem(&generations, &number, &place, BPF_ANY);
		made_again++;
	}
	return 0;
}

#endif /* __CGROUP_H__ */
