//! What every stage's `build.rs` does.

use std::{
    env,
    path::{Path, PathBuf},
};

use libbpf_cargo::SkeletonBuilder;

/// Compiles `source` (BPF C, in the stage's `src/`, named `NAME.bpf.c`) with clang for the machine
/// that cargo builds for, and writes its Rust skeleton to `$OUT_DIR/NAME.skel.rs`.
///
/// Ends the build with clang's own message where the program does not compile, and with what to
/// install where there is no clang.
pub fn skeleton(source: &str) {
    println!("cargo:rerun-if-changed={source}\ncargo:rerun-if-changed={HEADERS}");
    let variable = |name| env::var(name).unwrap_or_else(|_| fail(&format!("cargo sets no {name}")));
    let name = source.rsplit('/').next().unwrap_or(source).trim_end_matches(".bpf.c");
    let skeleton = PathBuf::from(variable("OUT_DIR")).join(format!("{name}.skel.rs"));
    if let Err(error) = build(Path::new(source), &variable("CARGO_CFG_TARGET_ARCH"), &skeleton) {
        fail(&error);
    }
}

const HEADERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bpf");

/// Compiles `source` for machines of the architecture `arch`, as rustc calls it, and writes its
/// Rust skeleton. An error is clang's own message.
fn build(source: &Path, arch: &str, skeleton: &Path) -> Result<(), String> {
    let arch = match arch {
        "x86_64" => "-D__TARGET_ARCH_x86",
        "aarch64" => "-D__TARGET_ARCH_arm64",
        other => return Err(format!("no {other} here: x86_64 and aarch64 have a vmlinux.h")),
    };
    let built = SkeletonBuilder::new()
        .source(source)
        .clang_args(["-I", HEADERS, "-Wall", "-Werror", arch])
        .build_and_generate(skeleton);
    built.map_err(|error| {
        let source = source.display();
        format!("{source} was not built: {error:#}\nIs clang here? `cargo vm setup` installs what is missing.")
    })
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On one machine, programs are built for that one only: a slip in what differs (registers,
    /// types) would show on the other one first.
    #[test]
    fn every_program_compiles_for_every_machine() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let out = tempfile::tempdir().unwrap();
        let mut programs = 0;
        for directory in root.read_dir().unwrap() {
            let source = directory.unwrap().path().join("src/trace.bpf.c");
            if !source.exists() {
                continue;
            }
            for arch in ["x86_64", "aarch64"] {
                build(&source, arch, &out.path().join("skel.rs")).unwrap();
            }
            programs += 1;
        }
        assert!(programs >= 10, "{programs} programs");
        let error = build(&root.join("Cargo.toml"), "mips", out.path()).unwrap_err();
        assert!(error.contains("no mips here"), "{error}");
    }
}
