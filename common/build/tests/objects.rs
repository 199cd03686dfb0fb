//! What the compilers make of the programs: only instructions of BPF CPU v2, and map values without
//! holes. For every clang that is installed.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use common_build::{build, cpu};
use libbpf_rs::btf::{
    Btf, BtfKind, BtfType, HasSize,
    types::{Array, Composite, DataSec, Enum, Int, MemberAttr, Struct},
};
use object::{Object, ObjectSection, SectionKind};

/// The compilers that the programs are for: the oldest, that of Debian 13, the newest of Debian's
/// archive, and the machine's own.
const CLANGS: [&str; 4] = ["clang", "clang-14", "clang-19", "clang-22"];

fn installed() -> Vec<&'static str> {
    let runs = |clang: &&str| {
        let mut command = Command::new(clang);
        command.arg("--version").stdout(Stdio::null()).status().is_ok_and(|ended| ended.success())
    };
    let (installed, missing): (Vec<_>, Vec<_>) = CLANGS.iter().copied().partition(runs);
    println!("compilers: {}; not installed: {}", installed.join(", "), missing.join(", "));
    assert!(!installed.is_empty(), "no clang is installed: run cargo vm setup");
    installed
}

/// One test, since building everything with every compiler takes the time.
#[test]
fn objects_suit_every_kernel() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    for clang in installed() {
        let out = tempfile::tempdir().unwrap();
        let mut programs = 0;
        let places = [root.clone(), root.join("tools"), root.join("appendix")];
        let entries = places.iter().flat_map(|place| place.read_dir().unwrap());
        for package in entries.map(|entry| entry.unwrap().path()) {
            let source = package.join("src/trace.bpf.c");
            if source.exists() {
                build(clang, &source, std::env::consts::ARCH, out.path()).unwrap();
                let name = package.file_name().unwrap().to_string_lossy();
                let what = format!("{name}, {clang}");
                let object = out.path().join("trace.bpf.o");
                if cpu(&source) == "v2" {
                    has_old_instructions_only(&what, &object);
                }
                has_no_holes(&what, &object, &fs::read_to_string(&source).unwrap());
                programs += 1;
            }
        }
        assert!(programs >= 10, "{programs} programs");
    }
}

/// An instruction, as in the kernel's Documentation/bpf/standardization/instruction-set.rst.
struct Instruction {
    opcode: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    fn parse(bytes: &[u8]) -> Instruction {
        Instruction {
            opcode: bytes[0],
            offset: i16::from_le_bytes([bytes[2], bytes[3]]),
            immediate: i32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        }
    }

    /// Why CPU v2 does not have it; `None`: it has.
    fn newer_than_v2(&self) -> Option<String> {
        const LDX: u8 = 1;
        const STX: u8 = 3;
        const ALU: u8 = 4;
        const JMP32: u8 = 6;
        const ALU64: u8 = 7;
        const ATOMIC: u8 = 0xc0;
        const MEMSX: u8 = 0x80;
        let (class, mode, operation) = (self.opcode & 7, self.opcode & 0xe0, self.opcode & 0xf0);
        let is_move_or_divide = [0x30, 0x90, 0xb0].contains(&operation);
        let what = match class {
            STX if mode == ATOMIC && self.immediate != 0 => "an atomic other than add",
            JMP32 => "a 32-bit jump",
            LDX if mode == MEMSX => "a sign-extending load",
            ALU | ALU64 if is_move_or_divide && self.offset != 0 => "signed arithmetic",
            ALU64 if operation == 0xd0 => "bswap",
            _ => return None,
        };
        Some(format!("{what} (opcode {:#x}, immediate {:#x})", self.opcode, self.immediate))
    }
}

/// The instructions that CPU v2 does not have.
fn newer_than_v2(code: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    let mut instructions = code.chunks_exact(8).map(Instruction::parse);
    while let Some(instruction) = instructions.next() {
        if instruction.opcode == 0x18 {
            instructions.next(); // the second half of a 64-bit constant
        }
        found.extend(instruction.newer_than_v2());
    }
    found
}

fn has_old_instructions_only(what: &str, path: &Path) {
    let bytes = fs::read(path).unwrap();
    let object = object::File::parse(&*bytes).unwrap();
    let mut code = 0;
    for section in object.sections().filter(|section| section.kind() == SectionKind::Text) {
        let data = section.data().unwrap();
        code += data.len();
        let newer = newer_than_v2(data);
        assert!(newer.is_empty(), "{what}, {}: {}", section.name().unwrap(), newer.join(", "));
    }
    assert!(code > 0, "{what}: no code");
}

#[test]
fn newer_instructions_are_found() {
    let find = |source: &str, cpu: &str| -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| -> PathBuf { directory.path().join(name) };
        fs::write(path("x.c"), source).unwrap();
        let mut clang = Command::new(installed()[0]);
        clang
            .args(["-O2", "-target", "bpf", cpu, "-c"])
            .arg(path("x.c"))
            .arg("-o")
            .arg(path("x.o"));
        assert!(clang.status().unwrap().success());
        let bytes = fs::read(path("x.o")).unwrap();
        let object = object::File::parse(&*bytes).unwrap();
        newer_than_v2(object.section_by_name(".text").unwrap().data().unwrap())
    };
    let fetch = "long n; long f(void) { return __sync_fetch_and_add(&n, 1); }";
    assert!(find(fetch, "-mcpu=v3")[0].starts_with("an atomic other than add"));
    let jump = "int f(int a, int b) { if (a > b) return 7; return a * b; }";
    assert!(find(jump, "-mcpu=v3")[0].starts_with("a 32-bit jump"));
    assert!(find(jump, "-mcpu=v2").is_empty());
}

/// The bytes of a type.
fn size_of(kind: BtfType) -> usize {
    let kind = kind.skip_mods_and_typedefs();
    if let Ok(array) = Array::try_from(kind) {
        return array.capacity() * size_of(array.contained_type());
    }
    match kind.kind() {
        BtfKind::Ptr => 8,
        BtfKind::Int => Int::try_from(kind).unwrap().size(),
        BtfKind::Enum => Enum::try_from(kind).unwrap().size(),
        BtfKind::Struct | BtfKind::Union => Composite::try_from(kind).unwrap().size(),
        _ => panic!("a map value has a member of the type {kind:?}"),
    }
}

/// Where a type has bytes that belong to no member.
fn holes(btf: &Btf, kind: BtfType, name: &str) -> Vec<String> {
    let kind = kind.skip_mods_and_typedefs();
    if let Ok(array) = Array::try_from(kind) {
        return holes(btf, array.contained_type(), name);
    }
    let Ok(structure) = Struct::try_from(kind) else { return Vec::new() };
    let (mut end, mut found) = (0, Vec::new());
    for member in structure.iter() {
        let field = format!("{name}.{}", member.name.unwrap_or_default().to_string_lossy());
        let MemberAttr::Normal { offset } = member.attr else { panic!("{field}: a bit field") };
        let start = offset as usize / 8;
        if start != end {
            found.push(format!("{} bytes before {field}", start - end));
        }
        let kind: BtfType = btf.type_by_id(member.ty).unwrap();
        found.extend(holes(btf, kind, &field));
        end = start + size_of(kind);
    }
    if structure.size() != end {
        found.push(format!("{} bytes at the end of {name}", structure.size() - end));
    }
    found
}

/// The keys and values of an object's maps: `starts.value`, and its type.
fn keys_and_values<'a>(btf: &'a Btf<'a>) -> Vec<(String, BtfType<'a>)> {
    let maps = btf.type_by_name::<DataSec>(".maps").map(|maps| maps.iter().collect::<Vec<_>>());
    let mut found = Vec::new();
    for map in maps.unwrap_or_default() {
        let variable: BtfType = btf.type_by_id(map.ty).unwrap();
        let name = variable.name().unwrap().to_string_lossy();
        let definition: Struct = variable.next_type().unwrap().try_into().unwrap();
        for member in definition.iter() {
            let field = member.name.unwrap_or_default().to_string_lossy();
            if ["key", "value"].contains(&field.as_ref()) {
                let pointer: BtfType = btf.type_by_id(member.ty).unwrap();
                found.push((format!("{name}.{field}"), pointer.next_type().unwrap()));
            }
        }
    }
    found
}

/// A hole reaches the verifier uninitialised, and kernels before 6.1.100 reject the program.
fn has_no_holes(what: &str, path: &Path, source: &str) {
    let btf = Btf::from_path(path).unwrap();
    let types = keys_and_values(&btf);
    let declared = ["__type(key,", "__type(value,"].map(|kind| source.matches(kind).count());
    let declared: usize = declared.iter().sum();
    assert!(types.len() >= declared, "{what}: {} of {declared} keys and values", types.len());
    for (name, kind) in types {
        let holes = holes(&btf, kind, &name);
        assert!(holes.is_empty(), "{what}: {}", holes.join(", "));
    }
}

#[test]
fn holes_are_found() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("x.bpf.c");
    let text = r#"#include "vmlinux.h"
        #include <bpf/bpf_helpers.h>
        struct inner { u32 a; u64 b; };
        struct value { u64 a; struct inner c[2]; u32 d; };
        struct { __uint(type, BPF_MAP_TYPE_HASH); __uint(max_entries, 1);
                 __type(key, u32); __type(value, struct value); } m SEC(".maps");"#;
    fs::write(&source, text).unwrap();
    build(installed()[0], &source, std::env::consts::ARCH, directory.path()).unwrap();
    let btf = Btf::from_path(directory.path().join("x.bpf.o")).unwrap();
    let types = keys_and_values(&btf);
    let found: Vec<String> =
        types.into_iter().flat_map(|(name, kind)| holes(&btf, kind, &name)).collect();
    assert_eq!(found, ["4 bytes before m.value.c.b", "4 bytes at the end of m.value"]);
}
