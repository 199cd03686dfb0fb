/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* --disk, --pid: whose bios are not left out. While the tool runs, a disk may be replaced by another one of its name,
 * which is followed; the number of a process may become another one's, which is not. */
#ifndef __ONLY_H__
#define __ONLY_H__

#include "parts.h"
#include "started.h"
#include <bpf/bpf_helpers.h>

/* By what name: that of /sys/class/block, or device mapper's. */
enum follow { NO_OTHER, OF_DISK, OF_PARTITION, OF_MAPPER };

/* Of the start of the run: the disk's diskseq (0: all), and the largest that any disk had. */
const volatile u64 only_disk, newest_disk;
const volatile u32 only_partition; /* its dev, or 0 */
const volatile u32 follow, mapper; /* enum follow; device mapper's major number */
#define WORDS 16
const volatile u64 only_name[WORDS]; /* with zeros behind it, as numbers: quicker to compare */
const volatile u32 only_process;
const volatile u64 only_started; /* see started.h */

u64 followed_disk; /* the diskseq of the last other one that had the name */

/* Whether it has the name of what --disk names. That of a disk never changes; mapper's does in `dmsetup rename`. */
__noinline int has_name(u64 bio)
{
	struct block_device *device = BPF_CORE_READ((struct bio *)bio, bi_bdev);
	struct gendisk *disk = BPF_CORE_READ(device, bd_disk);
	struct mapped_device *mapped;
	struct hash_cell *cell;
	u64 name[WORDS] = {};
	const char *its;

	if (follow == OF_MAPPER) {
		if (!bpf_core_type_exists(struct hash_cell) || BPF_CORE_READ(disk, major) != mapper)
			return 0;
		mapped = BPF_CORE_READ(disk, private_data);
		cell = BPF_CORE_READ(mapped, interface_ptr);
		its = BPF_CORE_READ(cell, name);
	} else {
		if (follow == OF_DISK)
			device = BPF_CORE_READ(disk, part0);
		its = BPF_CORE_READ(device, bd_device.kobj.name);
	}
	bpf_probe_read_kernel_str(name, sizeof(name), its);
	for (int i = 0; i < WORDS; i++)
		if (name[i] != only_name[i])
			return 0;
	return 1;
}

/* Whether --disk names this disk, as far as that is known already. */
static __always_inline bool is_known(u64 diskseq)
{
	return diskseq == only_disk || diskseq == followed_disk;
}

/* Whether its bios have to be looked at: it may have come since, with the name. */
static __always_inline bool may_be_of_disk(u64 diskseq)
{
	return is_known(diskseq) || (follow != NO_OTHER && diskseq > newest_disk);
}

static __always_inline bool is_of_disk(u64 bio, struct submission *by)
{
	bool is_first = by->diskseq == only_disk;

	if (follow == NO_OTHER)
		return is_first && (!only_partition || by->dev == only_partition);
	/* Two partitions of one disk may have a number one after the other. */
	if (follow != OF_PARTITION && (is_first || by->diskseq == followed_disk))
		return true;
	if ((!is_first && by->diskseq <= newest_disk) || !has_name(bio))
		return false;
	if (!is_first && by->diskseq != followed_disk)
		followed_disk = by->diskseq;
	return true;
}

static __always_inline bool is_of_process(struct submission *by)
{
	return by->process == only_process && was_started_at(only_started);
}

#endif /* __ONLY_H__ */
