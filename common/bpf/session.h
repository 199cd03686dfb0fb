/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* A kprobe.session program runs when a function is entered and again when it returns. */
#ifndef __SESSION_H__
#define __SESSION_H__

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>

/* Functions of the kernel. Before 7.0 they took no context; ___old is not part of the name. */
extern bool bpf_session_is_return(void *ctx) __ksym __weak;
extern bool bpf_session_is_return___old(void) __ksym __weak;
extern u64 *bpf_session_cookie(void *ctx) __ksym __weak;
extern u64 *bpf_session_cookie___old(void) __ksym __weak;

static __always_inline bool session_is_return(void *ctx)
{
	return bpf_ksym_exists(bpf_session_is_return) ? bpf_session_is_return(ctx) :
							bpf_session_is_return___old();
}

/* 8 bytes that the entry leaves for the return. */
static __always_inline u64 *session_cookie(void *ctx)
{
	return bpf_ksym_exists(bpf_session_cookie) ? bpf_session_cookie(ctx) :
						     bpf_session_cookie___old();
}

#endif /* __SESSION_H__ */
