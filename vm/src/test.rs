//! `cargo vm test`: the host's tests, then the guest's tests in one boot per kernel.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::process::Signal;

use crate::ending::OWN_FILE;
use crate::kernels::Table;
use crate::qemu::Disk;
use crate::say;
use crate::setup;
use crate::workspace;

/// How long all guest tests of one kernel may take.
const TIME_LIMIT: &str = "20m";
/// The package of the guest tests, and its test target.
const GUEST: (&str, &str) = ("guest_tests", "guest");

/// The disks that the guest tests find beside the data disk.
pub const DISKS: [Disk; 3] = [Disk::Virtio, Disk::Nvme, Disk::Scsi];

/// What the guest tests find in their environment: where the programs are that they test,
/// and the workspace.
pub fn environment(guest: &Path, root: &Path) -> Vec<(&'static str, PathBuf)> {
    // deps/guest-0123 lies beside the programs.
    let target = guest.ancestors().nth(2).unwrap_or(root);
    vec![("VM_TARGET_DIR", target.to_owned()), ("VM_WORKSPACE", root.to_owned())]
}

/// What test programs reported.
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u32,
    failed: u32,
    /// The names of those that failed.
    names: Vec<String>,
    /// Programs that reported to the end.
    results: u32,
}

impl Count {
    /// Takes in a line of a test program's output.
    fn line(&mut self, line: &str, place: &str) {
        if let Some(result) = line.strip_prefix("test result: ") {
            let number = |what: &str| -> u32 {
                let before = result.split(what).next().unwrap_or_default();
                before.trim().rsplit([' ', '.']).next().and_then(|n| n.parse().ok()).unwrap_or(0)
            };
            self.passed += number("passed;");
            self.failed += number("failed;");
            self.results += 1;
        } else if let Some(name) =
            line.strip_prefix("test ").and_then(|l| l.strip_suffix(" ... FAILED"))
        {
            self.names.push(format!("{} ({place})", name.trim()));
        }
    }

    /// A failure that no test reported.
    fn broken(&mut self, what: String) {
        self.failed += 1;
        self.names.push(what);
    }

    fn add(&mut self, other: Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.names.extend(other.names);
    }
}

/// Runs the tests whose names hold `filter`, on the given kernel or on `all`, and prints
/// the sum in the last line. Returns the exit code.
pub fn main(kernel: Option<&str>, filter: Option<&str>) -> Result<i32> {
    setup::packages(true)?;
    let root = workspace::root()?;
    let table = Table::load()?;
    let kernels: Vec<String> = match kernel {
        Some("all") => table.lines.iter().map(|line| line.name.clone()).collect(),
        Some(name) => vec![name.to_owned()],
        None => vec![table.default.clone()],
    };

    let mut sum = host(&root, filter)?;
    match build(&root) {
        Ok(guest) => {
            for kernel in kernels {
                sum.add(in_guest(&root, &guest, &kernel, filter)?);
            }
        }
        Err(error) => sum.broken(format!("{error:#}")),
    }

    if !sum.names.is_empty() {
        println!("\nfailed:");
        for name in &sum.names {
            println!("    {name}");
        }
    }
    println!("{} passed, {} failed", sum.passed, sum.failed);
    Ok(if sum.failed == 0 { 0 } else { 1 })
}

/// The tests that need no guest of their own.
fn host(root: &Path, filter: Option<&str>) -> Result<Count> {
    let mut command = workspace::cargo(root);
    command
        .args(["test", "--workspace", "--exclude", GUEST.0, "--no-fail-fast"])
        .args(workspace::quiet())
        .args(filter);
    // --quiet would hide the tests' names too.
    command.args(["--", "--format=pretty"]);
    let mut count = Count::default();
    let status = follow(command, "host", &mut count)?;
    if !status.success() && count.failed == 0 {
        count.broken(format!("cargo test on the host ended with {status}"));
    }
    Ok(count)
}

/// The guest tests and the programs that they test.
fn build(root: &Path) -> Result<PathBuf> {
    let built =
        workspace::cargo(root).args(["build", "--workspace"]).args(workspace::quiet()).status()?;
    anyhow::ensure!(built.success(), "cargo could not build the programs to test");
    let args = ["test", "--package", GUEST.0, "--test", GUEST.1, "--no-run"];
    workspace::build(root, &args, GUEST.1)
}

/// One boot: all guest tests on one kernel.
fn in_guest(root: &Path, guest: &Path, kernel: &str, filter: Option<&str>) -> Result<Count> {
    say!("guest tests on {kernel}");
    let disks = DISKS.iter().filter_map(Disk::to_possible_value);
    let disks = disks.flat_map(|disk| ["--disk".to_owned(), disk.get_name().to_owned()]);
    let mut command = Command::new(OWN_FILE);
    command
        .args(["run", "--kernel", kernel, "--timeout", TIME_LIMIT, "--idle", "--cpus", "2"])
        .args(disks)
        .arg(guest)
        .args(filter)
        .current_dir(root);
    command.envs(environment(guest, root));
    let mut count = Count::default();
    let status = follow(command, kernel, &mut count)?;
    if count.results == 0 {
        count.broken(format!("the guest tests on {kernel} did not come to an end ({status})"));
    } else if !status.success() && count.failed == 0 {
        count.broken(format!("the guest tests on {kernel} ended with {status}"));
    }
    Ok(count)
}

/// Runs a command, passing its standard output on and counting in it.
fn follow(mut command: Command, place: &str, count: &mut Count) -> Result<ExitStatus> {
    // SAFETY: one system call, async-signal-safe, no memory of the parent touched.
    unsafe {
        command
            .pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the tests")?;
    let mut stdout = std::io::stdout();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n') {
            let line = line.context("cannot read the tests' output")?;
            let line = String::from_utf8_lossy(&line);
            count.line(line.trim_end(), place);
            writeln!(stdout, "{line}").context("cannot write the tests' output")?;
        }
    }
    child.wait().context("cannot wait for the tests")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_summed_and_failures_named() {
        let mut count = Count::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test c ... FAILED",
            "test d - should panic ... FAILED",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s",
            "test result: ok. 40 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out",
        ] {
            count.line(line, "6.1");
        }
        let names = vec!["c (6.1)".to_owned(), "d - should panic (6.1)".to_owned()];
        assert_eq!(count, Count { passed: 41, failed: 2, names, results: 2 });
    }
}
