// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Each program serves all functions: its cookie says which one was called, and which registers hold
 * pointers to the struct. */
#include "vmlinux.h"
#include "process.h"
#include <bpf/bpf_tracing.h>

#define BPF_MAP_TYPE_RINGBUF 27
#define BPF_RB_NO_WAKEUP 1
#define LEVELS 8
#define OBJECTS 3 /* of a call, at most so many are recorded */
#define MAX_ERRNO 4095
#define BEGINS (1UL << 31) /* in a cookie: the function initialises its object */
#define FREES (1UL << 30) /* it frees it */
#ifdef __TARGET_ARCH_x86
#define RETURN_ADDRESS 8 /* bytes on the stack, which the return has removed */
#else
#define RETURN_ADDRESS 0
#endif

const volatile u64 object_size; /* bytes of the struct */
const volatile bool by_address; /* the cookie is in the map `functions`, by the function's address */
const volatile u32 pid, pid_namespace, dev, sample; /* 0: no such filter */
u64 recording; /* 0: before the trace begins, and after its end */

struct event {
	u64 time, address, value, stack;
	u32 function, cpu, tgid, tid;
	u32 is_return, object;
	u64 readable;
	char comm[16];
	u8 bytes[];
};

struct call {
	u64 cookie, objects[OBJECTS];
};

struct counts {
	u64 runs, entries, returns, lost, objects_lost, filtered, null, unmatched, outside, decided;
};

#define MAP(name, kind, entries, key_type, value_type)                                                       \
	struct {                                                                                             \
		__uint(type, BPF_MAP_TYPE_##kind);                                                           \
		__uint(max_entries, entries);                                                                \
		__type(key, key_type);                                                                       \
		__type(value, value_type);                                                                   \
	} name SEC(".maps")

MAP(functions, HASH, 16384, u64, u64); /* address to cookie */
MAP(calls, HASH, 65536, u64, struct call); /* not returned yet; see place_of_call() */
MAP(followed, LRU_HASH, 65536, u64, u64); /* objects that the filters let through (1) or not (0) */
MAP(counters, PERCPU_ARRAY, 1, u32, struct counts);
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 16 << 20);
} events SEC(".maps");

static __always_inline bool is_wanted(u64 object, u64 cookie, struct counts *counts)
{
	u64 wanted, *known;

	if (!pid && !dev && sample <= 1)
		return true;
	if (cookie & BEGINS)
		bpf_map_delete_elem(&followed, &object);
	known = bpf_map_lookup_elem(&followed, &object);
	if (known)
		return *known;
	if (pid && process_in(pid_namespace) != pid)
		return false;
	if (dev && BPF_CORE_READ((struct bio *)object, bi_bdev, bd_dev) != dev)
		return false;
	wanted = sample <= 1 || counts->decided++ % sample == 0;
	bpf_map_update_elem(&followed, &object, &wanted, BPF_ANY);
	return wanted;
}

/* Writes one event for each object of the call; false where the ring buffer has no room for any. */
static __always_inline bool record(const struct call *call, u64 stack, u32 is_return, u64 value,
				   struct counts *counts)
{
	u64 time = bpf_ktime_get_ns(), task = bpf_get_current_pid_tgid();
	bool written = false;

	for (u32 i = 0; i < OBJECTS; i++) {
		if (!call->objects[i])
			continue;
		struct event *event = bpf_ringbuf_reserve(&events, sizeof(*event) + object_size, 0);
		if (!event) {
			counts->objects_lost += written;
			break;
		}
		*event = (struct event){ time,
					 call->objects[i],
					 value,
					 stack,
					 call->cookie & 0xffffff,
					 bpf_get_smp_processor_id(),
					 task >> 32,
					 task,
					 is_return,
					 i };
		bpf_get_current_comm(event->comm, sizeof(event->comm));
		event->readable = !bpf_probe_read_kernel(event->bytes, object_size, (void *)event->address);
		bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
		written = true;
	}
	return written;
}

static __always_inline u64 cookie_of(struct pt_regs *ctx)
{
	u64 address, *cookie;

	if (!by_address)
		return bpf_get_attach_cookie(ctx);
	address = bpf_get_func_ip(ctx);
	cookie = bpf_map_lookup_elem(&functions, &address);
	return cookie ? *cookie : 0;
}

/* Remembers a call by its stack pointer. A function that ends by jumping to another one (a tail call)
 * shares the stack pointer with it: the lowest bits, which are 0 in a stack pointer, tell them apart.
 * Returns the key, or 0 where the map is full. */
static __always_inline u64 remember(u64 stack, const struct call *call)
{
	u64 key = stack;

	for (u32 level = 0; level < LEVELS; level++) {
		key = stack | level;
		if (!bpf_map_update_elem(&calls, &key, call, BPF_NOEXIST))
			return key;
	}
	/* Calls whose return was missed, or the map is full. */
	return bpf_map_update_elem(&calls, &key, call, BPF_EXIST) ? 0 : key;
}

/* Finds the call that returns: of those that share the stack pointer, the last one began last. */
static __always_inline u64 recall(u64 stack, u64 cookie)
{
	u64 found = 0;

	for (u32 level = 0; level < LEVELS; level++) {
		u64 key = stack | level;
		struct call *call = bpf_map_lookup_elem(&calls, &key);
		if (!call)
			break;
		if (call->cookie == cookie)
			found = key;
	}
	return found;
}

static __always_inline u64 call_begins(struct pt_regs *ctx, struct counts *counts)
{
	u64 registers[8] = { 0,
			     PT_REGS_PARM1(ctx),
			     PT_REGS_PARM2(ctx),
			     PT_REGS_PARM3(ctx),
			     PT_REGS_PARM4(ctx),
			     PT_REGS_PARM5(ctx),
			     PT_REGS_PARM6(ctx) };
	struct call call = { .cookie = cookie_of(ctx) };
	bool any = false, wanted = false;
	u64 key;

	for (u32 i = 0; i < OBJECTS; i++) {
		u64 object = registers[call.cookie >> (32 + 4 * i) & 7];
		if ((s64)object >= -MAX_ERRNO)
			continue; /* NULL, or an error in place of a pointer */
		call.objects[i] = object;
		any = true;
		wanted |= is_wanted(object, call.cookie, counts);
	}
	if (!wanted) {
		counts->filtered += any;
		counts->null += !any;
		return 0;
	}
	key = remember(PT_REGS_SP(ctx), &call);
	if (key && record(&call, key, false, 0, counts)) {
		counts->entries++;
		return key;
	}
	counts->lost++;
	bpf_map_delete_elem(&calls, &key);
	return 0;
}

static __always_inline void call_returns(struct pt_regs *ctx, u64 key, struct counts *counts)
{
	struct call *call = bpf_map_lookup_elem(&calls, &key);

	if (!call)
		counts->unmatched++;
	else if (record(call, key, true, PT_REGS_RC(ctx), counts))
		counts->returns++;
	else
		counts->lost++;
	if (call && call->cookie & FREES)
		bpf_map_delete_elem(&followed, &call->objects[0]);
	bpf_map_delete_elem(&calls, &key);
}

/* The counters of this CPU, where the trace has begun. */
static __always_inline struct counts *recording_counts(void)
{
	u32 zero = 0;
	struct counts *counts = bpf_map_lookup_elem(&counters, &zero);

	if (!counts)
		return NULL;
	counts->runs++;
	counts->outside += !recording;
	return recording ? counts : NULL;
}

SEC("kprobe")
int enter(struct pt_regs *ctx)
{
	struct counts *counts = recording_counts();

	if (counts)
		call_begins(ctx, counts);
	return 0;
}

SEC("kretprobe")
int leave(struct pt_regs *ctx)
{
	struct counts *counts = recording_counts();

	if (counts)
		call_returns(ctx, recall(PT_REGS_SP(ctx) - RETURN_ADDRESS, cookie_of(ctx)), counts);
	return 0;
}

/* Entry and return in one program. The kernel keeps a word for each call from the one to the other. */
extern bool bpf_session_is_return(void *ctx) __ksym __weak;
extern u64 *bpf_session_cookie(void *ctx) __ksym __weak;
SEC("kprobe.session")
int session(struct pt_regs *ctx)
{
	struct counts *counts = recording_counts();
	u64 *key = bpf_session_cookie(ctx);

	if (!bpf_session_is_return(ctx))
		*key = counts ? call_begins(ctx, counts) : 0;
	else if (counts)
		call_returns(ctx, *key, counts);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
