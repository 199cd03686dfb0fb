//! `cargo vm setup`: everything that the other commands need.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use workshop::say;

use crate::cargo::clangd;
use crate::commands::bundle;
use crate::fetch::{packages, table};
use crate::machine::initramfs;
use crate::run::{For, Run, named};

/// The package of the web book, which is no member of the workspace.
const BOOK: &str = "docs/book/Cargo.toml";

/// The kernels, and where they come from.
#[derive(Args)]
pub struct Options {
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|all|DIR", help = super::LINES)]
    kernel: Option<String>,
    /// Take the kernels from a file of `cargo vm bundle` instead of the network
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

/// Runs the command.
pub fn main(run: &Run, options: &Options) -> Result<()> {
    let purpose = purpose(options.from.is_some());
    // Everything that is used below is read, and made again where it is damaged.
    run.cache.forget_checks()?;
    run.need_packages(purpose)?;
    let names = match &options.from {
        Some(file) => bundle::install(run, file)?,
        None => run.table.names(named(options.kernel.as_deref()))?,
    };
    prepare(run, &names)?;
    packages::blank_disk(&run.cache)?;
    run.cache.drop_damaged()?;
    // A bundle has the book, but not the crates that make it.
    let manifests = ["Cargo.toml", BOOK];
    for manifest in &manifests[..if options.from.is_some() { 1 } else { 2 }] {
        let mut fetch = run.cargo.command();
        fetch.args(["fetch", "--manifest-path"]).arg(run.workspace().join(manifest));
        // No learner changes it, so a lock that is behind is our mistake: it must not be written anew.
        fetch.args((*manifest == BOOK).then_some("--locked"));
        let fetched = fetch.status().context("cannot start cargo")?;
        ensure!(fetched.success(), "cargo could not fetch the crates; its message is above");
    }
    clangd::prepare(run.workspace(), run.arch)
        .context("libbpf's headers could not be prepared for clangd")?;
    let missing = packages::missing(run.arch, &run.source, &run.cache, For::Test)?;
    if !missing.is_empty() && purpose < For::Test {
        say!("missing, only for `cargo vm test` and `cargo vm bench`: {}", missing.join(" "));
    }
    say!("{}", ready(&names, options.from.is_some(), missing.is_empty()));
    Ok(())
}

/// What the packages are for: a machine that takes its kernels from a bundle may have no network, and gets
/// only those that the lessons need.
fn purpose(from_bundle: bool) -> For {
    if from_bundle { For::Judge } else { For::Test }
}

/// What needs no network now, and what does.
fn ready(kernels: &[String], from_bundle: bool, for_tests: bool) -> String {
    let kernels = kernels.join(", ");
    let what = if for_tests { "run, tested and judged" } else { "run and judged" };
    let others = if from_bundle { "`cargo book` and `cargo truth`" } else { "`cargo truth`" };
    format!(
        "everything is ready. Without a network, {kernels} can be {what}; {others} and other kernels \
         need one"
    )
}

/// Prepares guests with these kernels.
pub fn prepare(run: &Run, kernels: &[String]) -> Result<()> {
    for name in kernels {
        let kernel = run.table.kernel(name)?;
        initramfs::get(&kernel, run.rootfs()?, &run.cache)?;
        say!("kernel {name}: {} is ready", kernel.release);
    }
    run.guests()?;
    packages::data_disk(&run.cache).map(|_| ())
}

/// Pins the newest kernels of these pinned lines, or of all.
pub fn repin(run: &Run, lines: &[String]) -> Result<()> {
    table::repin(run.workspace(), lines, &run.source, &run.cache)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;

    /// What only the guest tests need is no reason to ask for a network.
    #[test]
    fn a_bundle_needs_only_what_the_lessons_need() {
        let names = |purpose| packages::named_for(Arch::of_guest(None).unwrap(), purpose).unwrap();
        let (tests, bundle) = (names(purpose(false)), names(purpose(true)));
        for only_tests in ["bpftrace", "prometheus", "strace", "gpg"] {
            assert!(tests.iter().any(|name| name == only_tests), "{only_tests}");
            assert!(!bundle.iter().any(|name| name == only_tests), "{only_tests}");
        }
        for needed in ["fio", "dmsetup", "btrfs-progs", "clang", "busybox-static"] {
            assert!(bundle.iter().any(|name| name == needed), "{needed}");
        }
    }
}
