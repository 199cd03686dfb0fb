// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#include "vmlinux.h"
#include "join.h"
#include "reads.h"
#include "requests.h"
#include "second.h"
#include "series.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

const volatile bool with_parts;

/* The default, these two. */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_done, struct request *rq, int error, unsigned int nr_bytes)
{
	return request_completes(rq, nr_bytes);
}

SEC("tp_btf/block_rq_requeue")
int BPF_PROG(rq_requeued, struct request *rq)
{
	return request_is_requeued(rq);
}

/* --bios and --parts, from here to rq_end_probe(). An operation that few disks have has no histogram of
 * its own: their number has to stay small. */
static __always_inline u32 operation_of(u32 opf, u32 bytes)
{
	switch (opf & REQ_OP_MASK) {
	case REQ_OP_READ:
		return READ;
	case REQ_OP_WRITE: /* without data, it is a flush */
		return bytes ? WRITE : FLUSH;
	case REQ_OP_FLUSH:
		return FLUSH;
	case REQ_OP_DISCARD:
		return DISCARD;
	}
	return OTHER;
}

SEC("kprobe/submit_bio")
int BPF_KPROBE(bio_start, struct bio *bio)
{
	struct io io = {};

	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		struct bio *cast = bpf_core_cast(bio, struct bio);

		io.by.diskseq = cast->bi_bdev->bd_disk->diskseq;
		io.by.operation = operation_of(cast->bi_opf, cast->bi_iter.bi_size);
	} else {
		u32 opf = BPF_CORE_READ(bio, bi_opf);
		bool is_write = (opf & REQ_OP_MASK) == REQ_OP_WRITE; /* else its size tells nothing */

		io.by.diskseq = BPF_CORE_READ(bio, bi_bdev, bd_disk, diskseq);
		io.by.operation = operation_of(opf, is_write ? BPF_CORE_READ(bio, bi_iter.bi_size) : 0);
	}
	return bio_starts((u64)bio, &io);
}

SEC("kprobe/bio_chain")
int BPF_KPROBE(bio_chained, struct bio *part, struct bio *whole)
{
	u64 address = (u64)whole;
	struct io *io = bpf_map_lookup_elem(&ios, &address);
	struct series series = {};

	if (io) { /* it was submitted: the block layer splits it, and makes another request of this part */
		series.diskseq = io->by.diskseq;
		series.operation = io->by.operation;
		add_part_made(&series);
	}
	return bio_is_chained((u64)whole);
}

/* Whose a request is, does not matter here. */
static __always_inline int rq_is_nobodys(struct issue *issue)
{
	return 0;
}

static __always_inline bool is_of_another(struct io *io, struct issue *issue)
{
	return false;
}

__noinline int bio_completes(u64 bio, u32 status, u32 program)
{
	u64 now = bpf_ktime_get_ns();
	struct io *io = bpf_map_lookup_elem(&ios, &bio);
	struct series series = {};
	struct times times;

	if (!io) {
		bool is_unmatched = is_nobodys(bio, with_parts, now);

		if (is_unmatched && program == first)
			__sync_fetch_and_add(&unmatched, 1);
		return 0;
	}
	times = times_of(io, now);
	if (with_parts)
		divide_io(bio, io, &times);
	series.diskseq = io->by.diskseq;
	series.operation = io->by.operation;
	if (bpf_map_delete_elem(&ios, &bio))
		return 0; /* only the call that deletes the entry completes the bio */
	if (status == BLK_STS_AGAIN)
		__sync_fetch_and_add(&refused, 1);
	else
		add_to_series(&series, &times, with_parts);
	return 0;
}

SEC("fentry/bio_endio")
int BPF_PROG(bio_end, struct bio *bio)
{
	u64 address = number(bio);

	bio_ends_here(address, bio, 0, first_has_seen(BIO, address));
	return 0;
}

/* Only where the kernel preempts: there, the one above is skipped for some completions in tasks. */
SEC("kprobe/bio_endio")
int BPF_KPROBE(bio_end_probe, struct bio *bio)
{
	if (!bpf_ksym_exists(bpf_rdonly_cast))
		return bio_ends((u64)bio, 1);
	if (bio_ends_here((u64)bio, bpf_core_cast(bio, struct bio), 1, false))
		tell_second(BIO, (u64)bio);
	return 0;
}

/* --parts: as in `slow_io`. */
SEC("tp_btf/block_bio_remap")
int BPF_PROG(bio_remap, struct bio *bio)
{
	return bio_goes_down(number(bio));
}

SEC("tp_btf/block_rq_requeue")
int BPF_PROG(rq_given_back, struct request *rq)
{
	struct stamps stamps = stamps_here(rq);

	return rq_is_requeued((u64)rq, &stamps);
}

SEC("tp_btf/block_rq_complete")
int BPF_PROG(rq_end, struct request *rq, int error, unsigned int nr_bytes)
{
	struct stamps stamps = stamps_here(rq);

	if (first_has_seen(REQUEST, (u64)rq))
		return 0;
	return rq_ends((u64)rq, &stamps, number(rq->bio), number(rq->biotail), nr_bytes >= rq->__data_len);
}

SEC("kprobe/blk_update_request")
int BPF_KPROBE(rq_end_probe, struct request *rq, int error, unsigned int nr_bytes)
{
	if (bpf_ksym_exists(bpf_rdonly_cast)) {
		struct request *cast = bpf_core_cast(rq, struct request);
		struct stamps stamps = stamps_here(cast);

		rq_ends((u64)rq, &stamps, number(cast->bio), number(cast->biotail),
			nr_bytes >= cast->__data_len);
	} else {
		struct stamps stamps = stamps_of(rq);

		rq_ends((u64)rq, &stamps, (u64)BPF_CORE_READ(rq, bio), (u64)BPF_CORE_READ(rq, biotail),
			nr_bytes >= BPF_CORE_READ(rq, __data_len));
	}
	tell_second(REQUEST, (u64)rq);
	return 0;
}

/* The page cache, from here on: as in stage 08. */
SEC("tp/filemap/mm_filemap_add_to_page_cache")
int page_added(struct trace_event_raw_mm_filemap_op_page_cache *added)
{
	pages_added(added);
	return 0;
}

SEC("fentry/filemap_read")
int BPF_PROG(filemap_read_entry, struct kiocb *iocb, struct iov_iter *iter)
{
	return read_begins(iocb, iter);
}

SEC("fexit/filemap_read")
int BPF_PROG(filemap_read_exit, struct kiocb *iocb, struct iov_iter *iter, ssize_t already, ssize_t ret)
{
	return read_ends(iocb, ret);
}

SEC("kprobe.session/filemap_read")
int BPF_KPROBE(filemap_read_session, struct kiocb *iocb, struct iov_iter *iter)
{
	u64 *cookie = bpf_session_cookie(ctx); /* carries the argument to the return, which has none */

	if (bpf_session_is_return(ctx))
		return read_ends(bpf_core_cast((void *)*cookie, struct kiocb), PT_REGS_RC(ctx));
	*cookie = (u64)iocb;
	return read_begins(bpf_core_cast(iocb, struct kiocb), bpf_core_cast(iter, struct iov_iter));
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
