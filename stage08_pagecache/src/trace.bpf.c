// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "pagecache.h"
#include "read.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool quiet;
u64 completed, total, hit, readahead, refused, dropped, unmatched;

/* A thread may read two files at once: an encrypting file system reads the one below. */
struct reader {
	u64 thread;
	struct address_space *mapping;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct reader);
	__type(value, struct read);
} starts SEC(".maps");

/* Of which function, main.rs says: it has had two names. */
SEC("fentry")
int BPF_PROG(read_begins, struct kiocb *iocb, struct iov_iter *iter)
{
	struct file *file = iocb->ki_filp;
	struct address_space *mapping = file->f_mapping;
	struct reader reader = { bpf_get_current_pid_tgid(), mapping };
	struct read read = { .file = file, .offset = iocb->ki_pos, .bytes = iter->count };
	u64 size = mapping->host->i_size, end = read.offset + read.bytes;

	/* Past the end of the file there are no pages to ask for. */
	if (end > size)
		end = size;
	if (read.offset < end) {
		read.first = read.offset >> page_shift;
		read.pages = ((end - 1) >> page_shift) - read.first + 1;
		read.hit = resident(mapping, read.first, read.pages);
		read.miss = read.pages - read.hit;
	}
	recall_unfinished(iocb, &read);
	if (bpf_map_update_elem(&starts, &reader, &read, BPF_NOEXIST)) {
		bpf_map_update_elem(&starts, &reader, &read, BPF_ANY);
		__sync_fetch_and_add(&dropped, 1);
	}
	return 0;
}

SEC("tp_btf/mm_filemap_add_to_page_cache")
int BPF_PROG(page_added, struct folio *folio)
{
	struct reader reader = { bpf_get_current_pid_tgid(), folio_mapping(folio) };
	struct read *read = bpf_map_lookup_elem(&starts, &reader);

	if (read)
		read->readahead += folio_pages_beyond(folio, read->first, read->pages);
	return 0;
}

/* already: bytes read before this call. */
SEC("fexit")
int BPF_PROG(read_ends, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	struct file *file = iocb->ki_filp;
	struct reader reader = { bpf_get_current_pid_tgid(), file->f_mapping };
	struct read *read = bpf_map_lookup_elem(&starts, &reader);

	if (!read) {
		__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	if (was_refused(ret)) {
		__sync_fetch_and_add(&refused, 1);
	} else {
		__sync_fetch_and_add(&completed, !read->rest); /* a rest is no read of its own */
		__sync_fetch_and_add(&total, read->hit + read->miss);
		__sync_fetch_and_add(&hit, read->hit);
	}
	__sync_fetch_and_add(&readahead, read->readahead);
	if (!quiet)
		print_read(file, read, ret);
	note_unfinished(iocb, read, ret);
	bpf_map_delete_elem(&starts, &reader);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
