// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile u32 process; /* main.rs sets it before loading */

char LICENSE[] SEC("license") = "Dual BSD/GPL";
