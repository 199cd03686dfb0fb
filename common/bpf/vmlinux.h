/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The kernel's types, as far as the stages read them; x86-64 and arm64.
 *
 * A struct here names only the members that a program uses. Where a member really lies, the
 * running kernel's BTF says, and libbpf corrects every access when it loads the program
 * (preserve_access_index, "CO-RE"). So one file serves all kernels, and `bpftool btf dump file
 * /sys/kernel/btf/vmlinux format c` prints the whole one. A name that ends in ___old is a
 * flavour: libbpf drops the suffix, so that an older shape of the same struct can stand here too.
 */
#ifndef __VMLINUX_H__
#define __VMLINUX_H__

typedef unsigned char __u8;
typedef signed char __s8;
typedef unsigned short __u16;
typedef short __s16;
typedef unsigned int __u32;
typedef int __s32;
typedef unsigned long long __u64;
typedef long long __s64;
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __s32 s32;
typedef __u64 u64;
typedef __s64 s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u16 __sum16;
typedef __u32 __wsum;
typedef u64 sector_t; /* 512 bytes, whatever the disk's own block size */
typedef u32 dev_t; /* major << 20 | minor */
typedef unsigned long size_t;
typedef long ssize_t;
typedef long long loff_t;
typedef _Bool bool;

enum { false, true };
#define NULL ((void *)0)

/* The values of <linux/bpf.h>, which are the same for all kernels. */
enum { BPF_ANY, BPF_NOEXIST, BPF_EXIST };
enum { BPF_F_MMAPABLE = 1 << 10 }; /* a map that user space reads in place */

enum bpf_map_type {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_HASH = 5,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_STACK_TRACE = 7,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_HASH_OF_MAPS = 13,
	BPF_MAP_TYPE_QUEUE = 22,
	BPF_MAP_TYPE_RINGBUF = 27,
};

/* For bpf_core_enum_value(): the running kernel's number, or whether it has one. */
enum pageflags { PG_locked, PG_writeback, PG_uptodate = 3, PG_head = 6 };
enum cgroup_subsys_id { io_cgrp_id = 3 };
enum r1bio_state { R1BIO_Returned = 5 };
enum r10bio_state { R10BIO_Returned = 5 };

/* The errors that the programs look for; a function returns them as negative numbers. */
#define EAGAIN 11
#define EIOCBQUEUED 529

/* The type of a file, of inode.i_mode. */
#define S_IFMT 0170000
#define S_IFBLK 0060000
#define S_IFREG 0100000

/* The lowest 8 bits of bi_opf. */
enum req_op {
	REQ_OP_READ,
	REQ_OP_WRITE,
	REQ_OP_FLUSH,
	REQ_OP_DISCARD,
	REQ_OP_DRIVER = 32, /* from here on, commands of the driver's own */
	REQ_OP_DRV_IN = 34,
	REQ_OP_DRV_OUT,
};
#define REQ_OP_MASK 0xff

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* What BPF_KPROBE() reads a function's arguments from. */
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
};

struct user_pt_regs {
	u64 regs[31], sp, pc, pstate;
};

/* include/linux/kobject.h, device.h: a directory of /sys. */
struct kobject {
	const char *name;
};

struct device {
	struct kobject kobj;
	struct device *parent;
};

/* include/linux/blk_types.h: a disk or a partition. */
struct block_device {
	sector_t bd_start_sect; /* of a partition, its first one on the disk */
	dev_t bd_dev;
	struct device bd_device; /* its name is the one in /sys/class/block */
	struct gendisk *bd_disk; /* of a partition, the disk that it is on */
	void *bd_holder; /* whose it is alone; on newer kernels, of a file system its super_block */
};

/* include/linux/bvec.h: how far a bio has come. */
struct bvec_iter {
	sector_t bi_sector;
	unsigned int bi_size; /* bytes left */
};

/* include/linux/bvec.h: a piece of a bio's data, in one page or in some that follow each other. */
struct bio_vec {
	struct page *bv_page;
};

/* include/linux/types.h */
typedef struct {
	int counter;
} atomic_t;

struct hlist_node {
	struct hlist_node *next;
};

struct hlist_head {
	struct hlist_node *first;
};

struct hlist_bl_node {
	struct hlist_bl_node **pprev; /* NULL where it is in no list */
};

/* include/linux/blk_types.h: one I/O, as a file system asks for it. */
struct bio {
	struct bio *bi_next; /* of a request's bios, the next one */
	struct block_device *bi_bdev;
	unsigned int bi_opf; /* the operation, in the lowest 8 bits, and flags */
	unsigned short bi_flags;
	u8 bi_status; /* 0: no error */
	struct bvec_iter bi_iter;
	atomic_t __bi_remaining; /* 1, and 1 more for each part that was split off and has not ended */
	struct bio_integrity_payload *bi_integrity; /* checksums of the data, or NULL */
	void *bi_end_io; /* the function that bio_endio() calls */
	void *bi_private; /* that function's: of a part, the whole */
	struct bio_vec *bi_io_vec; /* its data, from the first byte on, also where some has completed */
	struct blkcg_gq *bi_blkg; /* the cgroup to which the kernel charges it, at its disk */
};

#define BIO_PAGE_PINNED (1 << 0) /* its pages are a program's memory */

/* include/linux/blkdev.h: a whole disk, and what its driver does. */
struct block_device_operations {
	void *submit_bio; /* NULL where the block layer makes requests of its bios */
};

struct gendisk {
	int major;
	int first_minor;
	const struct block_device_operations *fops;
	struct request_queue *queue;
	u64 diskseq; /* no other disk has had this number since the machine was started */
	struct block_device *part0; /* the whole disk, beside its partitions */
	void *private_data; /* its driver's */
};

/* include/linux/xarray.h: a tree. What looks like a pointer is an entry, its two lowest bits say. */
struct xarray {
	void *xa_head;
};

struct xa_node {
	u8 shift; /* 0 where the slots hold entries, 6 more in every node above */
	void *slots[64];
};

struct request_queue {
	const void *mq_ops; /* NULL: the driver takes bios itself */
	struct blk_mq_hw_ctx **queue_hw_ctx; /* on newer kernels, an array */
	struct xarray hctx_table; /* on older ones */
	unsigned int nr_hw_queues;
	struct gendisk *disk;
};

/* include/linux/blkdev.h: the I/Os that a task has not handed on yet. */
struct blk_plug {
	u64 cur_ktime; /* from 6.9 on */
};

enum mq_rq_state { MQ_RQ_IDLE }; /* no driver has the request */

/* include/linux/blk-mq.h: one I/O, as a driver gets it: one bio, a part of one, or several. */
struct request {
	struct request_queue *q;
	unsigned int cmd_flags; /* the operation, in the lowest 8 bits, and flags */
	unsigned int __data_len; /* bytes left */
	sector_t __sector;
	struct bio *bio, *biotail; /* the first of those that it has not completed, and the last one */
	struct block_device *part; /* NULL where nobody keeps statistics of it */
	u64 start_time_ns; /* when it was made; without statistics 0, or what an earlier one has left here */
	u64 io_start_time_ns; /* when the driver got it, the last time; 0 where it never did */
	enum mq_rq_state state;
	atomic_t ref; /* 0: free */
	void *end_io; /* the function that completes it instead of the block layer, or NULL */
};

/* include/linux/blk-mq.h, block/blk-mq.h: a queue of the hardware, and its requests. */
struct blk_mq_hw_ctx {
	struct blk_mq_tags *tags;
	struct blk_mq_tags *sched_tags; /* where there is a scheduler: then bios get requests of these */
};

struct blk_mq_tags {
	unsigned int nr_tags;
	struct request **static_rqs; /* all there are, whether in use or free */
};

/* include/linux/bio-integrity.h: a bio's checksums. */
struct bio_integrity_payload {
	unsigned short bip_flags;
};

#define BIP_BLOCK_INTEGRITY (1 << 0) /* they are the block layer's, not the submitter's */

/* drivers/md/dm-core.h, dm-ioctl.c, include/linux/bio.h: a disk of device mapper. */
struct bio_list {
	struct bio *head;
};

struct hash_cell {
	char *name; /* by which dmsetup knows it */
};

struct mapped_device {
	struct request_queue *queue;
	struct gendisk *disk;
	struct bio_list deferred; /* what was submitted while it was suspended */
	void *interface_ptr; /* its struct hash_cell */
};

/* drivers/md/dm-core.h, dm-crypt.c: device mapper's clone of a bio, and dm-crypt's of that. */
struct dm_io {
	unsigned short magic;
	struct bio *orig_bio;
};

struct dm_target_io {
	unsigned short magic;
	struct dm_io *io;
	struct bio clone;
};

struct dm_crypt_io {
	struct bio *base_bio;
};

/* drivers/md/raid1.h, raid10.h, md.h: what a RAID keeps of a bio, and md's clone of it, for its statistics. */
struct r1bio {
	unsigned long state; /* bits of enum r1bio_state */
	struct bio *master_bio;
};

struct r10bio {
	unsigned long state;
	struct bio *master_bio;
};

struct md_io_acct {
	struct bio *orig_bio;
	struct bio bio_clone;
};

struct md_io_clone { /* from 6.6 on */
	struct bio *orig_bio;
	struct bio bio_clone;
};

/* include/linux/fs.h: the pages of a file that are in memory, the file, a file that is open. */
struct address_space {
	struct inode *host;
	struct xarray i_pages;
};

struct super_block {
	dev_t s_dev;
	struct block_device *s_bdev; /* NULL where it is on no disk, or on several */
	struct dentry *s_root;
};

struct inode {
	u16 i_mode;
	struct super_block *i_sb;
	struct address_space *i_mapping;
	unsigned long i_ino;
	unsigned int i_nlink; /* its names; 0: it was deleted, and is still open */
	struct hlist_head i_dentry; /* of its names, those that are in memory */
	dev_t i_rdev; /* of a device file */
	loff_t i_size;
};

struct qstr {
	const unsigned char *name;
};

struct seqcount {
	unsigned int sequence; /* odd: a change is under way */
};

struct seqcount_spinlock {
	struct seqcount seqcount;
};

struct dentry {
	struct seqcount_spinlock d_seq; /* of changes of what follows */
	struct hlist_bl_node d_hash; /* in no list: deleted */
	struct dentry *d_parent; /* of the root, itself */
	struct qstr d_name; /* the last part of the file's path */
	struct inode *d_inode;
	struct super_block *d_sb;
	struct hlist_node d_alias; /* in the list of its inode */
};

struct dentry___old {
	union {
		struct hlist_node d_alias;
	} d_u;
};

struct path {
	struct dentry *dentry;
};

struct file {
	struct path f_path;
	struct inode *f_inode;
	struct address_space *f_mapping;
};

/* include/linux/fs.h, include/linux/uio.h: a read or write under way: where, and how much is left. */
struct kiocb {
	struct file *ki_filp;
	loff_t ki_pos;
	int ki_flags;
	void *ki_complete; /* what is called at the end; NULL where the reader waits for it */
};

#define IOCB_NOWAIT (1 << 3) /* do not wait for the disk */
#define IOCB_WAITQ (1 << 19) /* call back when the page has its data; io_uring only */

/* include/linux/io_uring_types.h: a request of io_uring; one that reads begins with its kiocb. */
struct io_kiocb {
	u32 flags; /* the lowest are the IOSQE_ flags of the application, io_uring_enter(2) */
};

#define IOSQE_ASYNC (1 << 4) /* a worker asks, and does not ask without waiting first */

struct iov_iter {
	unsigned long count;
};

/* fs/iomap/direct-io.c, fs/direct-io.c: a read or write past the page cache, of a file. */
struct iomap_dio {
	struct kiocb *iocb;
};

struct dio {
	struct kiocb *iocb;
};

/* include/trace/events/filemap.h: what the tracepoint mm_filemap_add_to_page_cache records. */
struct trace_event_raw_mm_filemap_op_page_cache {
	unsigned long i_ino;
	unsigned long index; /* of the first page, in the file */
	dev_t s_dev;
	u8 order; /* 1 << order pages were added */
};

/* include/trace/events/sched.h: what the tracepoint sched_process_exec records. */
struct trace_event_raw_sched_process_exec {
	u32 __data_loc_filename; /* its offset in the record; in the upper 16 bits, its length */
};

/* include/trace/events/kmem.h: what the tracepoint kmalloc records. */
struct trace_event_raw_kmalloc {
	unsigned long call_site;
	size_t bytes_req; /* asked for */
	size_t bytes_alloc; /* given */
};

/* include/linux/mm_types.h: a power of two of pages; of one page only, where PG_head is not set. */
struct folio {
	struct address_space *mapping;
	unsigned long _flags_1; /* from 6.6 on, the power is in the lowest 8 bits */
};

struct folio___old {
	unsigned char _folio_order;
};

struct page {
	unsigned long compound_info; /* of those behind the first one, how to get there */
};

struct page___old {
	unsigned long compound_head;
};

/* include/linux/ns_common.h, pid_namespace.h, pid.h, sched.h: a process and its numbers. */
struct ns_common {
	unsigned int inum;
};

struct pid_namespace {
	struct ns_common ns;
};

struct upid {
	int nr;
	struct pid_namespace *ns;
};

struct pid {
	unsigned int level; /* of the namespace it lives in; 0 is the first one */
	struct upid numbers[1]; /* one for each namespace that sees it, from level 0 on */
};

struct cred {
	struct {
		u32 val;
	} uid;
};

/* include/linux/cgroup-defs.h, kernfs.h, block/blk-cgroup.h: a cgroup, and what a controller keeps of it; of a
 * task, its cgroup, and for each controller the nearest one above where that is enabled. */
struct kernfs_node {
	u64 id; /* of a directory in a file system of the kernel's: its inode number */
	const char *name;
};

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};

struct cgroup_root {
	int hierarchy_id; /* 0: the one of v2 */
};

struct cgroup {
	struct cgroup_subsys_state self;
	struct kernfs_node *kn;
	struct cgroup_root *root; /* of its hierarchy: v2 has one */
};

struct blkcg {
	struct cgroup_subsys_state css;
};

struct blkcg_gq {
	struct blkcg *blkcg;
};

struct css_set {
	struct cgroup_subsys_state *subsys[16]; /* 14 of them */
	struct cgroup *dfl_cgrp; /* the task's cgroup, of v2 */
};

struct task_struct {
	unsigned int __state; /* bits: 2 is TASK_UNINTERRUPTIBLE */
	void *stack; /* its lowest address */
	unsigned int in_iowait : 1; /* in io_schedule() */
	unsigned long nvcsw, nivcsw; /* how often it gave its CPU away, and lost it */
	int pid; /* of the thread: what user space calls its tid */
	int tgid; /* of the process: what user space calls its pid */
	struct task_struct *group_leader;
	u64 start_time; /* ns since boot, without times of suspension */
	u64 start_boottime; /* the same with them */
	char comm[16];
	struct pid *thread_pid;
	const struct cred *real_cred;
	struct css_set *cgroups;
};

/* include/linux/bpf.h, kernel/bpf/map_iter.c, task_iter.c: what an iterator gives its program. */
struct bpf_iter_meta {
	struct seq_file *seq; /* what user space reads */
};

struct bpf_iter__bpf_map_elem {
	struct bpf_iter_meta *meta;
	void *key, *value; /* NULL at the end */
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task; /* NULL at the end */
};

/* include/net/sock.h, include/linux/in6.h: a connection. Port numbers are of 16 bits. */
struct in6_addr {
	union {
		u8 u6_addr8[16];
	} in6_u;
};

struct sock_common {
	u16 skc_family;
	u16 skc_num; /* our port, in the order of this machine's bytes */
	__be16 skc_dport; /* the other side's, in the order of the network's */
	__be32 skc_rcv_saddr; /* IPv4 */
	__be32 skc_daddr;
	struct in6_addr skc_v6_rcv_saddr; /* IPv6 */
	struct in6_addr skc_v6_daddr;
};

struct sock {
	struct sock_common __sk_common;
};

/* A connection that is not accepted yet. */
struct request_sock {
	struct sock_common __req_common;
};

/* include/linux/skbuff.h, include/net/tcp.h: a buffer of one or more segments, and what TCP keeps in it. */
struct sk_buff {
	char cb[48]; /* of TCP, a struct tcp_skb_cb */
};

struct tcp_skb_cb {
	u16 tcp_gso_segs; /* how many segments */
};

/* include/trace/events/tcp.h: what the tracepoint tcp_retransmit_skb records. */
struct trace_event_raw_tcp_retransmit_skb {
	int err; /* from 6.17 on, which also records what could not be sent */
};

#pragma clang attribute pop

/* Functions of the kernel that a program may call: kfuncs. Each is weak, so that a program loads, too,
 * on a kernel without them if it does not call them there. These two are there from 7.0 on. */
extern bool bpf_session_is_return(void *ctx) __attribute__((section(".ksyms"), weak));
extern u64 *bpf_session_cookie(void *ctx) __attribute__((section(".ksyms"), weak));

#endif /* __VMLINUX_H__ */
