// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "pagecache.h"
#include "process.h"
#include "retry.h"
#include <bpf/bpf_tracing.h>

const volatile u32 page_shift; /* 12: a page has 4 KiB */
const volatile u32 pid_namespace;
u64 refused, dropped, unmatched, uncounted;

/* A number is used again when its process has ended; the two together are not. */
struct process {
	u64 start_time; /* ns */
	u64 pid; /* 0: all processes that the namespace does not see */
};

struct counts {
	char comm[16];
	u64 user; /* outside of all containers */
	u64 reads;
	u64 hits, misses, readahead, dirtied; /* pages */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct process);
	__type(value, struct counts);
} processes SEC(".maps");

/* The counts of the current process; NULL where the map is full. */
static __always_inline struct counts *current_counts(void)
{
	struct task_struct *leader = bpf_get_current_task_btf()->group_leader;
	struct process process = { .pid = process_in(pid_namespace) };
	struct counts none = {}, *counts;

	if (process.pid)
		process.start_time = leader->start_time;
	counts = bpf_map_lookup_elem(&processes, &process);
	if (!counts) {
		bpf_map_update_elem(&processes, &process, &none, BPF_NOEXIST);
		counts = bpf_map_lookup_elem(&processes, &process);
	}
	if (!counts) {
		__sync_fetch_and_add(&uncounted, 1);
		return NULL;
	}
	/* Each time: execve() changes the name, setuid() the user. */
	if (process.pid) {
		BPF_CORE_READ_STR_INTO(&counts->comm, leader, comm);
		/* bpf_get_current_uid_gid() would be who has mounted it, in a read of an overlayfs. */
		counts->user = leader->real_cred->uid.val;
	}
	return counts;
}

/* From here to the end of filemap_read(): as in stage 08. */
struct reader {
	u64 thread, inode, dev;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct reader);
	__type(value, struct read);
} starts SEC(".maps");

static __always_inline int read_begins(struct kiocb *iocb, struct iov_iter *iter, u64 already)
{
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct reader reader = { bpf_get_current_pid_tgid(), inode->i_ino, inode->i_sb->s_dev };
	struct read read = {
		.file = (u64)iocb->ki_filp,
		.offset = iocb->ki_pos,
		.bytes = iter->count,
		.already = already,
		.first = iocb->ki_pos >> page_shift,
		.pages = pages_in(iocb->ki_pos, iter->count, inode->i_size, page_shift),
	};

	read.hit = resident(inode, read.first, read.pages);
	read.miss = read.pages - read.hit;
	recall_unfinished((u64)iocb, iocb->ki_flags, &read);
	if (bpf_map_update_elem(&starts, &reader, &read, BPF_NOEXIST)) {
		bpf_map_update_elem(&starts, &reader, &read, BPF_ANY);
		__sync_fetch_and_add(&dropped, 1);
	}
	return 0;
}

static __always_inline int read_ends(struct kiocb *iocb, long ret)
{
	struct inode *inode = iocb->ki_filp->f_mapping->host;
	struct reader reader = { bpf_get_current_pid_tgid(), inode->i_ino, inode->i_sb->s_dev };
	struct read *read = bpf_map_lookup_elem(&starts, &reader);
	struct counts *counts;

	if (!read) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	counts = current_counts();
	if (was_refused(ret)) {
		__sync_fetch_and_add(&refused, 1);
	} else if (counts) {
		__sync_fetch_and_add(&counts->reads, !read->is_rest); /* a rest is no read of its own */
		__sync_fetch_and_add(&counts->hits, read->hit);
		__sync_fetch_and_add(&counts->misses, read->miss);
	}
	if (counts)
		__sync_fetch_and_add(&counts->readahead, read->readahead);
	note_unfinished((u64)iocb, iocb->ki_complete, read, ret);
	bpf_map_delete_elem(&starts, &reader);
	return 0;
}

/* Not tp_btf: in a preemptible kernel, a classic tracepoint's program is never preempted. */
SEC("tp/filemap/mm_filemap_add_to_page_cache")
int page_added(struct trace_event_raw_mm_filemap_op_page_cache *added)
{
	struct reader reader = { bpf_get_current_pid_tgid(), added->i_ino, added->s_dev };
	struct read *read = bpf_map_lookup_elem(&starts, &reader);
	u64 pages = 1 << (added->order & 31);

	if (read)
		read->readahead += pages - overlap(added->index, pages, read->first, read->pages);
	return 0;
}

SEC("fentry/filemap_read")
int BPF_PROG(filemap_read_entry, struct kiocb *iocb, struct iov_iter *iter, ssize_t already)
{
	return read_begins(iocb, iter, already);
}

SEC("fexit/filemap_read")
int BPF_PROG(filemap_read_exit, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	return read_ends(iocb, ret);
}

SEC("kprobe.session/filemap_read")
int BPF_KPROBE(filemap_read_session, struct kiocb *iocb, struct iov_iter *iter, ssize_t already)
{
	u64 *cookie = bpf_session_cookie(ctx);

	if (bpf_session_is_return(ctx))
		return read_ends(bpf_core_cast((void *)*cookie, struct kiocb), PT_REGS_RC(ctx));
	*cookie = (u64)iocb;
	return read_begins(bpf_core_cast(iocb, struct kiocb), bpf_core_cast(iter, struct iov_iter), already);
}

/* How many pages a folio has. */
static __always_inline u64 pages_of(struct folio *folio)
{
	struct folio___old *old = (void *)folio;
	u64 flags = 0;

	/* A folio begins with its flags, whose type changes with the kernel. */
	bpf_probe_read_kernel(&flags, sizeof(flags), folio);
	if (!(flags >> bpf_core_enum_value(enum pageflags, PG_head) & 1))
		return 1;
	if (bpf_core_field_exists(old->_folio_order))
		return 1 << (BPF_CORE_READ(old, _folio_order) & 31);
	return 1 << (BPF_CORE_READ(folio, _flags_1) & 31);
}

/* The kernel calls this when a clean folio becomes dirty, and not when a dirty one is written to
 * again. A kprobe: in a preemptible kernel, fentry would lose some of the calls. */
SEC("kprobe/__folio_mark_dirty")
int BPF_KPROBE(folio_dirtied, struct folio *folio)
{
	struct counts *counts = current_counts();

	if (counts)
		__sync_fetch_and_add(&counts->dirtied, pages_of(folio));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
