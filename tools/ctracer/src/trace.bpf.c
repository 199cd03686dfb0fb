// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Each program serves all functions: its cookie says which one was called, and which registers hold
 * pointers to the struct. */
#include "vmlinux.h"
#include "process.h"
#include "started.h"
#include <bpf/bpf_tracing.h>

#define BPF_MAP_TYPE_RINGBUF 27
#define BPF_RB_NO_WAKEUP 1
#define PLACES 65536 /* of a table: a power of two */
#define PROBES 8 /* so many places are tried, one after the other */
#define REGISTERS 6 /* of arguments */
#define OBJECTS 3 /* of a call, at most so many are recorded */
#define COMPARISONS 4
#define ENDS 6
#define MAX_ERRNO 4095
/* In a cookie: what the function does to the life of its first object, three sets of bits of a state.
 * The rules are in lives.rs, which also has the names of the bits; here they are carried out. */
#define EFFECT(cookie) ((u32)((cookie) >> 48))
#define BEGINS_IF(effect) ((effect)&31) /* in such a life, the call is the first of another one */
#define AT_CALL(effect) ((effect) >> 5 & 31) /* what the call sets */
#define AT_RETURN(effect) ((effect) >> 10 & 31) /* what the return sets */
#define ENDS_LIFE(cookie) ((cookie) >> 58) /* AT_RETURN() is not 0: the function completes or frees */
#define FREED 16 /* in a state: any call is the first of another life */
#define TOO_EARLY (1UL << 47) /* the object may still say when the one before it was made */
#ifdef __TARGET_ARCH_x86
#define RETURN_ADDRESS 8 /* bytes on the stack, which the return has removed */
#else
#define RETURN_ADDRESS 0
#endif

const volatile u64 object_size; /* bytes of the struct */
const volatile bool by_address; /* the cookie is in the map `functions`, by the function's address */
const volatile u32 pid, pid_namespace, dev, sample; /* 0: no such filter */
const volatile u64 started; /* see started.h */
/* A field compared with a number, by --filter. */
struct comparison {
	u64 mask, value;
	u32 offset, size, is_signed;
	u32 holds_if; /* the field is 1: less, 2: equal, 4: greater */
};
const volatile struct comparison filter[COMPARISONS];
const volatile u32 comparisons;
const volatile u64 ends[ENDS]; /* cookies of functions that end a life, see sees_end() */
const volatile u16 of_others; /* what remains of an effect for the other objects of a call */
const volatile u16 end_missed; /* the bits of a life whose end only sees_end() has seen */
const volatile bool by_life; /* the rules of this type tell the first event of a life */
const volatile u32 made_at; /* where an object says when it was made; 0: it does not */
u64 recording; /* 0: before the trace begins, and after its end */

struct event {
	u64 time, address, value, stack;
	u32 function, cpu, tgid, tid;
	u32 what, object; /* what: 0 a call, 1 a return, 2 an end that only sees_end() has seen */
	u64 readable, registers[REGISTERS]; /* of the arguments, at a call */
	char comm[16];
	u8 bytes[];
};

/* A function to trace, where its address has to be looked up. */
struct function {
	u64 address, cookie;
};

/* A call that has not returned. */
struct call {
	u64 key; /* the stack pointer, and in the lowest bits a number, see remember(); 0: none */
	u64 cookie, objects[OBJECTS]; /* those that the filters let through */
	u64 ends; /* the object whose life ends with this call, where a filter wants to know */
};

/* What the filters know about an object: about its life, for the next one may have the same address. */
struct life {
	u64 object, state; /* the bits of the rules, and those of the filters */
	u64 made, before; /* when it was made, and the one before at this address; 0: not known */
};
enum { DECIDED = 32, WANTED = 64, MATCHED = 128 };

struct counts {
	u64 entries, returns, lost, objects_lost, filtered, null, unmatched, outside, decided;
	u64 ending; /* the object whose end the probe on this CPU has seen last; 0: none */
};

/* A hash table in an array, see place(): in a map of type HASH, each look costs some 250 instructions. */
#define TABLE(name, entry)                                                                                   \
	struct {                                                                                             \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                            \
		__uint(max_entries, PLACES);                                                                 \
		__type(key, u32);                                                                            \
		__type(value, entry);                                                                        \
	} name SEC(".maps")

TABLE(functions, struct function);
TABLE(calls, struct call);
TABLE(lives, struct life);
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct counts);
} counters SEC(".maps");
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 16 << 20);
} events SEC(".maps");

/* The counters of this CPU. */
static __always_inline struct counts *own_counts(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&counters, &zero);
}

/* Where a table has an entry: here, or at one of the next places. attach.rs has the same. */
static __always_inline u32 place(u64 key, u32 probe)
{
	return ((u32)(key * 0x9e3779b97f4a7c15 >> 48) + probe) % PLACES;
}

static __always_inline bool is_of_process(void)
{
	return process_in(pid_namespace) == pid && was_started_at(started);
}

/* Decides about a life, at its first event. Where the rules of a type do not tell which one that is,
 * a process may come later. No life begins with its end: it began before the trace did. */
static __always_inline u64 decide(u32 effect)
{
	struct counts *counts = own_counts();

	if (AT_RETURN(effect) || (pid && !is_of_process()))
		return by_life ? DECIDED : 0;
	return !counts || counts->decided++ % sample ? DECIDED : DECIDED | WANTED;
}

/* Whether all comparisons of --filter hold. */
static __always_inline bool matches(u64 object)
{
	for (u32 i = 0; i < COMPARISONS && i < comparisons; i++) {
		u32 size = filter[i].size, unused = 64 - 8 * size;
		u64 value = 0, other = filter[i].value;
		bool is_less;

		if (size > sizeof(value) ||
		    bpf_probe_read_kernel(&value, size, (void *)object + filter[i].offset))
			return false;
		if (filter[i].is_signed)
			value = (s64)(value << unused) >> unused;
		value &= filter[i].mask;
		is_less = filter[i].is_signed ? (s64)value < (s64)other : value < other;
		if (!(filter[i].holds_if >> (is_less ? 0 : value == other ? 1 : 2) & 1))
			return false;
	}
	return true;
}

/* What is known about an object. Where nothing is, it takes a free place, or that of another one; NULL
 * where another CPU takes the same at this moment. */
static __always_inline struct life *life_of(u64 object)
{
	struct life *life, *free = NULL;
	u64 before;

	for (u32 i = 0; i < PROBES; i++) {
		u32 at = place(object, i);
		life = bpf_map_lookup_elem(&lives, &at);
		if (!life || life->object == object)
			return life;
		if (!free || (free->object && (!life->object || life->state & FREED)))
			free = life;
	}
	if (!free)
		return NULL;
	before = free->object;
	if (__sync_val_compare_and_swap(&free->object, before, object) != before)
		return NULL;
	free->state = free->made = free->before = 0;
	return free;
}

/* Whether --pid, --sample and --filter let an object through that is passed to a function. */
__noinline u32 is_followed(u64 object, u64 cookie, u32 first)
{
	u32 effect = EFFECT(cookie) & (first ? 0xffff : of_others);
	struct life *life = life_of(object);
	u64 state, made = 0;

	if (!life)
		return false;
	if (made_at && !(cookie & TOO_EARLY))
		bpf_probe_read_kernel(&made, sizeof(made), (void *)object + made_at);
	state = life->state;
	if (state & BEGINS_IF(effect) || (made && life->made && made != life->made)) {
		state = 0;
		life->before = life->made;
		life->made = 0;
	}
	if (made != life->before && !life->made)
		life->made = made;
	if (!(state & DECIDED))
		state |= decide(effect);
	state |= AT_CALL(effect);
	/* Fields are set and changed in the course of a life: from the first match on, all of it. */
	if (!by_life)
		state &= ~MATCHED;
	if (state & WANTED && !(state & MATCHED) && matches(object))
		state |= MATCHED;
	life->state = state;
	return (state & (WANTED | MATCHED)) == (WANTED | MATCHED);
}

/* The device of a bio. A function that initialises it gets that as an argument. */
static __always_inline u32 device_of(u64 object, u64 given, bool is_given)
{
	struct block_device *device = (void *)given;

	if (!is_given)
		bpf_core_read(&device, sizeof(device), &((struct bio *)object)->bi_bdev);
	return BPF_CORE_READ(device, bd_dev);
}

/* Writes one event for each object of the call; false where the ring buffer has no room for any. */
static __always_inline bool record(const struct call *call, const u64 *registers, u32 is_return, u64 value,
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
					 call->key,
					 call->cookie & 0xffffff,
					 bpf_get_smp_processor_id(),
					 task >> 32,
					 task,
					 is_return,
					 i };
		for (u32 n = 0; n < REGISTERS && !is_return; n++)
			event->registers[n] = registers[n + 1];
		bpf_get_current_comm(event->comm, sizeof(event->comm));
		event->readable = !bpf_probe_read_kernel(event->bytes, object_size, (void *)event->address);
		bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
		written = true;
	}
	return written;
}

static __always_inline u64 cookie_of(struct pt_regs *ctx)
{
	if (!by_address)
		return bpf_get_attach_cookie(ctx);
	u64 address = bpf_get_func_ip(ctx);
	for (u32 i = 0; i < PROBES; i++) {
		u32 at = place(address, i);
		struct function *function = bpf_map_lookup_elem(&functions, &at);
		if (function && function->address == address)
			return function->cookie;
	}
	return 0;
}

/* Remembers a call by its stack pointer. A function that ends by jumping to another one (a tail call)
 * shares the stack pointer with it: the lowest bits, which are 0 in a stack pointer, number them.
 * Returns NULL where the table is full. */
static __always_inline struct call *remember(u64 stack, const struct call *new)
{
	struct call *found = NULL;
	u64 number = 0;

	for (u32 i = 0; i < PROBES; i++) {
		u32 at = place(stack, i);
		struct call *call = bpf_map_lookup_elem(&calls, &at);
		if (!call)
			break;
		u64 key = call->key;
		if (!key && !__sync_val_compare_and_swap(&call->key, 0, stack | number)) {
			found = call;
			break;
		}
		if ((key & ~7UL) != stack)
			continue;
		/* The same function again: its return was missed, as that of the last one if all places
		 * are taken. */
		found = call;
		if (call->cookie == new->cookie)
			break;
		number++;
	}
	if (!found)
		return NULL;
	found->cookie = new->cookie;
	__builtin_memcpy(found->objects, new->objects, sizeof(found->objects));
	found->ends = new->ends;
	return found;
}

/* Finds the call that returns. */
static __always_inline struct call *recall(u64 stack, u64 cookie)
{
	for (u32 i = 0; i < PROBES; i++) {
		u32 at = place(stack, i);
		struct call *call = bpf_map_lookup_elem(&calls, &at);
		if (call && (call->key & ~7UL) == stack && call->cookie == cookie)
			return call;
	}
	return NULL;
}

/* Its place is free for another one. */
static __always_inline void forget(struct call *call)
{
	__sync_lock_test_and_set(&call->key, 0);
}

static __always_inline struct call *call_begins(struct pt_regs *ctx, struct counts *counts)
{
	u64 registers[REGISTERS + 2] = { 0,
					 PT_REGS_PARM1(ctx),
					 PT_REGS_PARM2(ctx),
					 PT_REGS_PARM3(ctx),
					 PT_REGS_PARM4(ctx),
					 PT_REGS_PARM5(ctx),
					 PT_REGS_PARM6(ctx) };
	struct call call = { .cookie = cookie_of(ctx) };
	u64 device = registers[call.cookie >> 44 & 7];
	struct call *remembered;
	bool by_history = pid || sample > 1 || comparisons, any = false, wanted = false;

	if (ENDS_LIFE(call.cookie))
		counts->ending = registers[call.cookie >> 32 & 7];
	for (u32 i = 0; i < OBJECTS; i++) {
		u64 object = registers[call.cookie >> (32 + 4 * i) & 7];
		if ((s64)object >= -MAX_ERRNO)
			continue; /* NULL, or an error in place of a pointer */
		any = true;
		if (dev && device_of(object, device, !i && call.cookie >> 44 & 7) != dev)
			continue;
		if (by_history && !i && ENDS_LIFE(call.cookie))
			call.ends = object;
		if (by_history && !is_followed(object, call.cookie, !i))
			continue;
		call.objects[i] = object;
		wanted = true;
	}
	counts->null += !any;
	counts->filtered += any && !wanted;
	if (!wanted && !call.ends)
		return NULL;
	remembered = remember(PT_REGS_SP(ctx), &call);
	if (remembered && !wanted)
		return remembered; /* its return ends a life, and is not recorded either */
	if (remembered && record(remembered, registers, false, 0, counts)) {
		counts->entries++;
		return remembered;
	}
	counts->lost += wanted;
	if (remembered)
		forget(remembered);
	return NULL;
}

/* A call that ends a life has returned: what comes next at this address may be another object. */
static __always_inline void ended(const struct call *call)
{
	struct life *life = life_of(call->ends);
	u32 effect = EFFECT(call->cookie), set = AT_CALL(effect);

	/* Another one has begun already where the state does not know of this call. */
	if (life && (life->state & set) == set)
		life->state |= AT_RETURN(effect);
}

static __always_inline void call_returns(struct pt_regs *ctx, struct call *call, struct counts *counts)
{
	if (!call || !(call->objects[0] | call->objects[1] | call->objects[2]))
		counts->unmatched++;
	else if (record(call, NULL, true, PT_REGS_RC(ctx), counts))
		counts->returns++;
	else
		counts->lost++;
	if (!call)
		return;
	if (call->ends)
		ended(call);
	forget(call);
}

/* The counters of this CPU, where the trace has begun. */
static __always_inline struct counts *recording_counts(void)
{
	struct counts *counts = own_counts();

	if (!counts)
		return NULL;
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

/* Entry and return in one program. The kernel keeps a word for each call from the one to the other: the
 * stack pointer, which may be another one at the return, or 0 where there is nothing to find. */
extern bool bpf_session_is_return(void *ctx) __ksym __weak;
extern u64 *bpf_session_cookie(void *ctx) __ksym __weak;
SEC("kprobe.session")
int session(struct pt_regs *ctx)
{
	struct counts *counts = recording_counts();
	u64 *key = bpf_session_cookie(ctx);

	if (!bpf_session_is_return(ctx))
		*key = counts && call_begins(ctx, counts) ? PT_REGS_SP(ctx) : 0;
	else if (counts)
		call_returns(ctx, *key ? recall(*key, cookie_of(ctx)) : NULL, counts);
	return 0;
}

/* The kernel skips a program that interrupts another one, as a completion does that comes while a task
 * is being traced. An fentry program at the same function runs nevertheless, after the other one: with
 * it, no end is missed. */
static __always_inline int sees_end(u64 *ctx, u32 number)
{
	struct counts *counts = own_counts();
	u64 cookie = ends[number], task = bpf_get_current_pid_tgid(), object = 0;
	struct event *event;

	if (!counts || !recording || bpf_get_func_arg(ctx, (cookie >> 32 & 7) - 1, &object))
		return 0;
	if (counts->ending == object) {
		counts->ending = 0;
		return 0;
	}
	if (!object || (dev && device_of(object, 0, false) != dev))
		return 0;
	if (pid || sample > 1 || comparisons) {
		bool wanted = is_followed(object, cookie, true);
		struct life *life = life_of(object);
		if (life)
			life->state |= end_missed;
		if (!wanted)
			return 0;
	}
	event = bpf_ringbuf_reserve(&events, sizeof(*event), 0);
	if (!event)
		return 0;
	*event = (struct event){ .time = bpf_ktime_get_ns(),
				 .address = object,
				 .function = cookie & 0xffffff,
				 .cpu = bpf_get_smp_processor_id(),
				 .tgid = task >> 32,
				 .tid = task,
				 .what = 2 };
	bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
	return 0;
}

#define SEES_END(number)                                                                                     \
	SEC("fentry")                                                                                        \
	int sees_end##number(u64 *ctx)                                                                       \
	{                                                                                                    \
		return sees_end(ctx, number);                                                                \
	}
SEES_END(0)
SEES_END(1)
SEES_END(2)
SEES_END(3)
SEES_END(4)
SEES_END(5)

char LICENSE[] SEC("license") = "Dual BSD/GPL";
