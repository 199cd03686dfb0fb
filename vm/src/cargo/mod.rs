//! The Cargo workspace: where it is, and building in it, for this machine and for guests.

pub(crate) mod clangd;
pub mod follow;
pub(crate) mod programs;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use cargo_metadata::Artifact;
use workshop::cargo::Cargo;
use workshop::fail::{MACHINE, fail};
use workshop::say;

use crate::arch::Arch;
use crate::fetch::cache::find_tool;
use crate::fetch::rootfs;

/// The target of the guest tests.
pub const GUEST: &str = "guest";

/// Cargo in the workspace. It is quiet where nobody watches: a first build takes minutes and should be seen to work.
pub fn here() -> Result<Cargo> {
    Ok(Cargo::new(workshop::root()?, !std::io::stderr().is_terminal()))
}

/// Does a piece of work, and says what it is once it has taken two seconds; on a terminal cargo
/// shows its own progress.
pub fn announced<T>(cargo: &Cargo, what: String, work: impl FnOnce() -> T) -> T {
    let (done, wait) = channel::<()>();
    if cargo.quiet {
        thread::spawn(move || {
            if wait.recv_timeout(Duration::from_secs(2)) == Err(RecvTimeoutError::Timeout) {
                say!("{what}");
            }
        });
    }
    let result = work();
    drop(done);
    result
}

/// The target directory, where this program was built, and where cargo keeps a file of its own.
/// `None`: the program was copied elsewhere.
pub fn target_dir() -> Option<PathBuf> {
    // The directory, as cargo may have replaced the file.
    let own = std::env::current_exe().ok()?.parent()?.canonicalize().ok()?;
    own.ancestors().find(|dir| dir.join(".rustc_info.json").is_file()).map(Path::to_owned)
}

/// Whether a file is one that cargo has built here.
pub fn is_built(file: &str) -> bool {
    let file = Path::new(file).canonicalize();
    file.is_ok_and(|file| target_dir().is_some_and(|target| file.starts_with(target)))
}

/// Cargo that builds for guests with this root file system, which have another architecture than this
/// machine: with Rust's library for that, and linked with what is in there.
pub fn for_guests(cargo: &Cargo, arch: Arch, rootfs: &Path) -> Result<Cargo> {
    need_rust_target(cargo, arch)?;
    let compiler = rootfs::compiler(rootfs, arch)?.display().to_string();
    let lower = arch.rust_target().replace('-', "_");
    Ok(cargo.with(vec![
        ("CARGO_BUILD_TARGET".into(), arch.rust_target().into()),
        (format!("CARGO_TARGET_{}_LINKER", lower.to_uppercase()), compiler.clone()),
        (format!("CC_{lower}"), compiler),
        (format!("AR_{lower}"), rootfs::cross_tool(arch, "ar")),
    ]))
}

/// Adds Rust's library for the guest's architecture where it is missing.
fn need_rust_target(cargo: &Cargo, arch: Arch) -> Result<()> {
    let target = arch.rust_target();
    if has_rust_target(cargo, arch) {
        return Ok(());
    }
    if find_tool("rustup").is_none() {
        let message = format!(
            "Rust's library for {target} is not here, and no rustup that adds it: install the package \
             of your distribution that has it (Debian: libstd-rust-dev:{}), or Rust by rustup",
            arch.debian()
        );
        return Err(fail(MACHINE, message));
    }
    say!("running: rustup target add {target}");
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", target]).current_dir(&cargo.workspace).stdin(Stdio::null());
    // Our standard output belongs to the program that is run.
    let output = rustup.stderr(Stdio::inherit()).output().context("cannot start rustup")?;
    ensure!(
        output.status.success() && has_rust_target(cargo, arch),
        "rustup could not add {target}, see above"
    );
    Ok(())
}

/// Whether Rust can build for the guest's architecture.
pub fn has_rust_target(cargo: &Cargo, arch: Arch) -> bool {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    rustc.args(["--print", "target-libdir", "--target", arch.rust_target()]);
    let output = rustc.current_dir(&cargo.workspace).stdin(Stdio::null()).output();
    output.is_ok_and(|output| {
        let text = String::from_utf8_lossy(&output.stdout);
        output.status.success() && Path::new(text.trim()).is_dir()
    })
}

/// The directory with the programs that are built for guests. `None`: this program was copied elsewhere.
pub fn programs_of_guests(arch: Arch) -> Option<PathBuf> {
    // The stages are in the same directory as this program.
    let own = std::env::current_exe().ok()?.parent()?.to_owned();
    if !arch.is_foreign() {
        return Some(own);
    }
    Some(own.parent()?.join(arch.rust_target()).join(own.file_name()?))
}

/// Builds every program of the workspace.
pub fn build_all(cargo: &Cargo) -> Result<()> {
    artifacts(cargo, &["build", "--workspace"]).map(drop)
}

/// Builds the guest tests. Returns the executable.
pub fn build_guest_tests(cargo: &Cargo) -> Result<PathBuf> {
    build(cargo, &["test", "--package", "guest_tests", "--test", GUEST, "--no-run"], GUEST)
}

/// Runs a cargo command that builds and returns the executable of the target `name`.
/// `args` begins with cargo's subcommand.
pub fn build(cargo: &Cargo, args: &[&str], name: &str) -> Result<PathBuf> {
    workshop::cargo::executable(&artifacts(cargo, args)?, name)
}

/// Runs a cargo command that builds and returns what it has made. `args` begins with cargo's
/// subcommand.
pub fn artifacts(cargo: &Cargo, args: &[&str]) -> Result<Vec<Artifact>> {
    let what = format!("building: cargo {}", args.join(" "));
    announced(cargo, what, || cargo.artifacts(args))
}
