/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The kernel's types, cut down to those that tool.bpf.c and libbpf's headers use. README.md says
 * how to make the complete file, and how to cut it down.
 */
#ifndef __VMLINUX_H__
#define __VMLINUX_H__

typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef __u32 u32;
typedef __u64 u64;
typedef _Bool bool;

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_RINGBUF = 27,
};

enum { BPF_ANY };

/* libbpf corrects each access to what the running kernel's BTF says: a struct may leave out members. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct task_struct {
	int pid; /* of the thread */
	int tgid; /* of the process */
	char comm[16];
};

#pragma clang attribute pop

#endif
