//! The BPF programs, prepared for clangd, the language server of editors.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::MetadataCommand;

use crate::arch::Arch;

/// The first line of `.clangd`.
const WRITTEN: &str = "# Written by `cargo vm setup`.";

/// Prepares the BPF programs for clangd, the language server of editors: links libbpf's headers, which are
/// in the crate libbpf-sys, below the target directory, and writes clangd's flags to `.clangd`. Builds use
/// headers of their own.
pub fn prepare(workspace: &Path, arch: Arch) -> Result<()> {
    let mut command = MetadataCommand::new();
    // Of the other platforms' crates, a build has fetched none.
    let options = ["--offline", "--filter-platform", arch.rust_target()].map(str::to_owned);
    command.current_dir(workspace).other_options(options);
    let metadata = command.exec().context("cargo metadata failed")?;
    let sys = metadata.packages.iter().find(|package| package.name == "libbpf-sys");
    let manifest = &sys.context("no crate libbpf-sys among the dependencies")?.manifest_path;
    let source = manifest.with_file_name("libbpf").join("src");
    let include = metadata.target_directory.as_std_path().join("bpf/include");
    fs::create_dir_all(&include).with_context(|| include.display().to_string())?;
    let headers = include.join("bpf");
    // Of another version; once, it was a directory with copies.
    fs::remove_file(&headers).or_else(|_| fs::remove_dir_all(&headers)).ok();
    symlink(&source, &headers).with_context(|| headers.display().to_string())?;
    // Those that the BPF programs are compiled with.
    let mut flags: Vec<String> =
        ["-xc", "-g", "-O2", "-target", "bpf", "-mcpu=v2", "-Wall"].map(str::to_owned).into();
    flags.push(format!("-D__TARGET_ARCH_{}", arch.bpf()));
    let places = [&workspace.join("common/bpf"), &workspace.join("tools/bpf"), &include];
    flags.extend(places.map(|place| format!("-I{}", place.display())));
    // A list of texts in JSON is one in YAML.
    let flags = serde_json::to_string(&flags)?;
    let file = workspace.join(".clangd");
    if fs::read_to_string(&file).is_ok_and(|old| !old.starts_with(WRITTEN)) {
        return Ok(()); // the user's own
    }
    fs::write(file, format!("{WRITTEN}\nCompileFlags:\n  Add: {flags}\n")).context(".clangd")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn clangd_finds_the_headers() {
        let workspace = workshop::workspace();
        prepare(&workspace, Arch::of_guest(None).unwrap()).unwrap();
        let text = fs::read_to_string(workspace.join(".clangd")).unwrap();
        let (_, flags) = text.split_once("CompileFlags:\n  Add: ").unwrap();
        let flags: Vec<String> = serde_json::from_str(flags).unwrap();
        let mut clang = Command::new("clang");
        clang
            .args(flags)
            .arg("-fsyntax-only")
            .arg(workspace.join("stage06_stacktrace/src/trace.bpf.c"));
        let output = clang.current_dir("/").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
