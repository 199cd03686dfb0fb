//! Compiles `src/tool.bpf.c` with clang, and writes its skeleton: Rust types for its programs and maps.

use std::{env, error::Error, path::Path};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=src");
    let skeleton = Path::new(&env::var("OUT_DIR")?).join("tool.skel.rs");
    libbpf_cargo::SkeletonBuilder::new()
        .source("src/tool.bpf.c")
        // The last two are for a complete vmlinux.h of kernels from 6.19 on: its structs have members
        // without a name that are structs with one.
        .clang_args(["-Wall", "-Werror", "-fms-extensions", "-Wno-microsoft-anon-tag"])
        .build_and_generate(&skeleton)?;
    Ok(())
}
