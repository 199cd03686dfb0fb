//! What every stage's `build.rs` does.

use std::{env, path::PathBuf};

use libbpf_cargo::SkeletonBuilder;

/// Compiles `source` (BPF C, in the stage's `src/`, named `NAME.bpf.c`) with clang for the machine
/// that cargo builds for, and writes its Rust skeleton to `$OUT_DIR/NAME.skel.rs`.
///
/// Ends the build with clang's own message where the program does not compile, and with what to
/// install where there is no clang.
pub fn skeleton(source: &str) {
    let headers = concat!(env!("CARGO_MANIFEST_DIR"), "/../bpf");
    println!("cargo:rerun-if-changed={source}\ncargo:rerun-if-changed={headers}");
    let variable = |name| env::var(name).unwrap_or_else(|_| fail(&format!("cargo sets no {name}")));
    let name = source.rsplit('/').next().unwrap_or(source).trim_end_matches(".bpf.c");
    let skeleton = PathBuf::from(variable("OUT_DIR")).join(format!("{name}.skel.rs"));
    let arch = match variable("CARGO_CFG_TARGET_ARCH").as_str() {
        "x86_64" => "-D__TARGET_ARCH_x86",
        "aarch64" => "-D__TARGET_ARCH_arm64",
        other => fail(&format!("no {other} here: x86_64 and aarch64 have a vmlinux.h")),
    };
    let built = SkeletonBuilder::new()
        .source(source)
        .clang_args(["-I", headers, "-Wall", "-Werror", arch])
        .build_and_generate(&skeleton);
    if let Err(error) = built {
        fail(&format!(
            "{source} was not built: {error:#}\nIs clang here? `cargo vm setup` installs what is missing."
        ));
    }
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(1)
}
