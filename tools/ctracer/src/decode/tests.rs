//! The types stand in a C file that clang compiles to BTF; the bytes are made by hand.

use std::{env, fs, process::Command};

use serde_json::Value;

use super::*;
use crate::value::plain;

const SOURCE: &str = r#"
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long u64;
typedef struct { int counter; } atomic_t;
enum req_op { REQ_OP_READ = 0, REQ_OP_WRITE = 1, REQ_OP_DISCARD = 3, REQ_OP_LAST = 36 };
enum req_flag_bits { __REQ_SYNC = 11, __REQ_META = 12, __REQ_IDLE = 15, __REQ_NR_BITS = 16 };
enum state { IDLE = 0, RUNNING = 1, DONE = -1 };
enum mask { LEFT = 1, RIGHT = 4 };
struct bvec_iter { u64 bi_sector; u32 bi_size; u32 bi_idx; } __attribute__((packed));
struct bio {
	struct bio *bi_next;
	u32 bi_opf;
	unsigned short bi_flags;
	unsigned short bi_ioprio;
	struct bvec_iter bi_iter;
	atomic_t __bi_remaining;
	u8 bi_status;
	union { u64 cookie; u64 other; struct { u32 low; u32 high; }; };
	void *inlined[0];
};
typedef int callback(int);
struct mixed {
	signed char small;
	_Bool yes;
	u8 three : 3, five : 5;
	int minus : 4;
	enum state state;
	enum mask mask;
	char name[8];
	short list[2];
	u8 raw[40];
	const volatile atomic_t pair[2];
	struct { struct bvec_iter deep; } nest;
	void (*done)(struct bio *);
	callback *other;
};
struct bio *a;
struct mixed *b;
enum req_op c;
enum req_flag_bits d;
enum { BIO_CLONED = 1, BIO_CHAIN = 4 } flags;
"#;

/// The layout of one of the structs above.
pub fn layout(type_name: &str) -> Layout {
    Layout::new(&btf(), type_name, KALLSYMS).unwrap()
}

const KALLSYMS: &str = "0000000000000000 t hidden\nffffffff81000000 T bio_endio\n\
    ffffffffc0500010 t clone_endio\t[dm_mod]\nffffffff81000010 D data\n";

fn btf() -> Btf<'static> {
    let directory = tempfile::tempdir().unwrap();
    let (source, object) = (directory.path().join("types.c"), directory.path().join("types.o"));
    fs::write(&source, SOURCE).unwrap();
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let arguments = ["-g", "-target", "bpf", "-fno-eliminate-unused-debug-types", "-c", "-o"];
    let compiled = Command::new(clang).args(arguments).arg(&object).arg(&source).status();
    assert!(compiled.unwrap().success());
    Btf::open(object.to_str().unwrap(), None).unwrap()
}

/// The bytes of a `struct bio`: a synchronous write of 4096 bytes to a sector.
pub fn bio(sector: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(0xffff_8881_0000_1000_u64.to_le_bytes());
    bytes.extend((1_u32 | 1 << 11 | 1 << 15).to_le_bytes());
    bytes.extend((1_u16 << 1 | 1 << 4 | 1 << 9).to_le_bytes());
    bytes.extend(0_u16.to_le_bytes());
    bytes.extend(sector.to_le_bytes());
    bytes.extend(4096_u32.to_le_bytes());
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(1_i32.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(0x5_0000_0007_u64.to_le_bytes());
    bytes
}

fn pairs(fields: &Pairs) -> Vec<(&str, String)> {
    fields.iter().map(|(name, value)| (name.as_str(), plain(value))).collect()
}

#[test]
fn a_bio_has_named_fields() {
    let layout = layout("bio");
    assert_eq!(layout.size, 48);
    let expected = [
        ("bi_next", "0xffff888100001000"),
        ("bi_opf", "REQ_OP_WRITE|REQ_SYNC|REQ_IDLE"),
        ("bi_flags", "BIO_CLONED|BIO_CHAIN|0x200"),
        ("bi_ioprio", "0"),
        ("bi_iter.bi_sector", "2048"),
        ("bi_iter.bi_size", "4096"),
        ("bi_iter.bi_idx", "0"),
        ("__bi_remaining", "1"),
        ("bi_status", "0"),
        ("cookie", "21474836487"),
        ("low", "7"),
        ("high", "5"),
    ];
    assert_eq!(
        pairs(&layout.fields(&bio(2048))),
        expected.map(|(name, value)| (name, value.to_owned()))
    );
}

#[test]
fn every_shape_is_read() {
    let layout = layout("mixed");
    let mut bytes = vec![0xfd, 1, 0b1011_0101, 0b1110];
    bytes.extend((-1_i32).to_le_bytes());
    bytes.extend(5_u32.to_le_bytes());
    bytes.extend(b"kworker\0");
    bytes.extend([1, 0, 0xfe, 0xff]);
    bytes.extend(0..40);
    bytes.extend(7_i32.to_le_bytes());
    bytes.extend((-8_i32).to_le_bytes());
    bytes.extend(u64::MAX.to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend(0xffff_ffff_c050_0010_u64.to_le_bytes());
    bytes.extend(0xffff_ffff_8100_0010_u64.to_le_bytes());
    assert_eq!(layout.size, bytes.len());
    let raw: String = (0..32).map(|byte| format!("{byte:02x}")).collect();
    let expected = [
        ("small", "-3"),
        ("yes", "true"),
        ("three", "5"),
        ("five", "22"),
        ("minus", "-2"),
        ("state", "DONE"),
        ("mask", "LEFT|RIGHT"),
        ("name", "kworker"),
        ("list[0]", "1"),
        ("list[1]", "-2"),
        ("raw[bytes 0..32]", raw.as_str()),
        ("raw[bytes 32..40]", "2021222324252627"),
        ("pair[0]", "7"),
        ("pair[1]", "-8"),
        ("nest.bi_sector", "18446744073709551615"),
        ("nest.bi_size", "0"),
        ("nest.bi_idx", "0"),
        ("done", "clone_endio"),
        ("other", "0xffffffff81000010"),
    ];
    let fields = layout.fields(&bytes);
    assert_eq!(pairs(&fields), expected.map(|(name, value)| (name, value.to_owned())));
    // What a text or an enum holds does not change what it is.
    bytes[12..20].copy_from_slice(b"12345\0\0\0");
    bytes[4..8].copy_from_slice(&7_u32.to_le_bytes());
    for ((name, before), (_, after)) in fields.iter().zip(layout.fields(&bytes)) {
        let (before, after) = (std::mem::discriminant(before), std::mem::discriminant(&after));
        assert_eq!(before, after, "{name}");
    }
    let json = |name: &str| {
        let found = layout.fields(&bytes).into_iter().find(|(found, _)| found == name);
        found.unwrap().1
    };
    assert_eq!((json("name"), json("state")), ("12345".into(), Value::from("7")));
    assert_eq!((json("small"), json("yes")), ((-3).into(), Value::from(true)));
    assert_eq!(json("nest.bi_sector"), u64::MAX);
}

#[test]
fn only_what_differs_is_a_change() {
    let layout = layout("bio");
    assert_eq!(layout.changes(&bio(2048), &bio(2048)), []);
    let change =
        Change { field: "bi_iter.bi_sector".to_owned(), before: 0.into(), after: 2048.into() };
    assert_eq!(layout.changes(&bio(0), &bio(2048)), [change]);
    let mixed = super::tests::layout("mixed");
    let (before, mut after) = (vec![0; mixed.size], vec![0; mixed.size]);
    after[2] = 0b0000_1000;
    let names: Vec<String> = mixed.changes(&before, &after).into_iter().map(|c| c.field).collect();
    assert_eq!(names, ["five"]);
}

#[test]
fn a_short_copy_has_the_fields_that_it_holds() {
    let layout = layout("bio");
    let fields = layout.fields(&bio(2048)[..24]);
    assert_eq!(fields.iter().next_back().unwrap().0, "bi_iter.bi_sector");
    assert_eq!(layout.fields(&[]), Pairs::new());
    assert_eq!(layout.changes(&[], &bio(0)), []);
}

#[test]
fn an_unknown_struct_is_an_error() {
    let error = Layout::new(&btf(), "nonesuch", "").err().unwrap();
    assert_eq!(error.to_string(), "BTF has no definition of struct nonesuch");
}

#[test]
#[ignore = "needs a kernel's BTF: BTF=/sys/kernel/btf/vmlinux"]
fn the_structs_of_a_kernel_have_layouts() {
    let btf = Btf::open(&env::var("BTF").unwrap(), None).unwrap();
    for name in ["bio", "request", "page", "inode", "buffer_head", "sk_buff", "task_struct"] {
        let layout = Layout::new(&btf, name, "").unwrap();
        let end = layout.fields.iter().map(|field| field.bytes().end).max().unwrap();
        assert!(end <= layout.size, "{name}: a field ends at byte {end} of {}", layout.size);
        println!("struct {name}, {} bytes", layout.size);
        for (field, value) in layout.fields(&vec![0x5a; layout.size]) {
            println!("  {field} = {value}");
        }
    }
}
