//! `cargo vm test`: the host's tests, then the guest's tests in one boot per kernel.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::process::Signal;

use crate::cache::Cache;
use crate::cleanup::OWN_FILE;
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Count {
    passed: u32,
    failed: u32,
    /// The names of those that failed.
    names: Vec<String>,
    /// Programs that reported to the end.
    results: u32,
    /// The release of the kernel that they ran on: `6.1.0-50-amd64`.
    release: Option<String>,
    /// For each stage, how many of its tests passed, and how many there are.
    stages: BTreeMap<String, (u32, u32)>,
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
        } else if let Some(release) = line.strip_prefix("kernel ") {
            self.release = Some(release.to_owned());
        } else if let Some((name, result)) =
            line.strip_prefix("test ").and_then(|test| test.rsplit_once(" ... "))
        {
            let name = name.trim();
            if result == "FAILED" {
                self.names.push(format!("{name} ({place})"));
            }
            if let Some(stage) = stage_of(name) {
                let (passed, all) = self.stages.entry(stage.to_owned()).or_default();
                *passed += u32::from(result == "ok");
                *all += 1;
            }
        }
    }

    /// A failure that no test reported.
    fn broken(&mut self, what: String) {
        self.failed += 1;
        self.names.push(what);
    }

    fn add(&mut self, other: &Count) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.names.extend_from_slice(&other.names);
        self.results += other.results;
        self.release = self.release.take().or_else(|| other.release.clone());
        for (stage, (passed, all)) in &other.stages {
            let sum = self.stages.entry(stage.clone()).or_default();
            *sum = (sum.0 + passed, sum.1 + all);
        }
    }
}

/// `stage08` of the test `stage08_threads`; none of `stages_are_short`.
fn stage_of(test: &str) -> Option<&str> {
    let (stage, _) = test.split_once('_')?;
    let number = stage.strip_prefix("stage")?;
    number.parse::<u8>().ok().map(|_| stage)
}

/// Runs the tests whose names hold `filter`, on the given kernel or on `all`, and prints
/// the sum in the last line. Returns the exit code.
pub fn main(kernel: Option<&str>, filter: Option<&str>) -> Result<i32> {
    setup::packages(true)?;
    let root = workspace::root()?;
    let table = Table::load()?;
    let kernels = table.names(kernel, &Cache::open()?)?;

    let mut sum = host(&root, filter)?;
    match build(&root) {
        Ok(guest) => {
            let counts = in_guests(&root, &guest, &kernels, filter);
            counts.iter().for_each(|count| sum.add(count));
            if (kernel, filter, sum.failed) == (Some("all"), None, 0)
                && let Err(error) = check_table(&root.join("README.md"), &counts)
            {
                sum.broken(format!("{error:#}"));
            }
        }
        Err(error) => sum.broken(format!("{error:#}")),
    }

    let mut text = String::new();
    if !sum.names.is_empty() {
        text = format!("\nfailed:\n    {}\n", sum.names.join("\n    "));
    }
    let mut stdout = std::io::stdout();
    // Where nobody reads any more, the exit code still tells.
    let _ = writeln!(stdout, "{text}{} passed, {} failed", sum.passed, sum.failed);
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
    let status = follow(command, "host", "", &mut count)?;
    if !status.success() && count.failed == 0 {
        count.broken(format!("cargo test on the host ended with {status}"));
    }
    Ok(count)
}

/// The guest tests and the programs that they test.
fn build(root: &Path) -> Result<PathBuf> {
    workspace::build_all(root)?;
    let args = ["test", "--package", GUEST.0, "--test", GUEST.1, "--no-run"];
    workspace::build(root, &args, GUEST.1)
}

/// One boot for each kernel; where there are more CPUs than kernels, two, which share the tests.
/// As many at once as there are CPUs, for an emulated guest keeps one busy, and as there is memory
/// for. A kernel that does not boot fails its own tests and no other's.
fn in_guests(root: &Path, guest: &Path, kernels: &[String], filter: Option<&str>) -> Vec<Count> {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let parts = if cpus > kernels.len() && filter.is_none() { 2 } else { 1 };
    let boots: Vec<(usize, usize)> =
        (0..kernels.len()).flat_map(|kernel| (0..parts).map(move |part| (kernel, part))).collect();
    let left = Mutex::new(boots.iter());
    let counts = Mutex::new(kernels.iter().map(|_| Count::default()).collect::<Vec<_>>());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..cpus.min(in_memory()).min(boots.len()) {
            scope.spawn(|| {
                while let Some(&(number, part)) = next() {
                    let kernel = &kernels[number];
                    let boot = Boot {
                        kernel,
                        part: format!("{part}/{parts}"),
                        prefix: match (boots.len(), parts) {
                            (1, _) => String::new(),
                            (_, 1) => format!("{kernel}: "),
                            _ => format!("{kernel} ({}/{parts}): ", part + 1),
                        },
                    };
                    let count = boot.run(root, guest, filter).unwrap_or_else(|error| {
                        let mut count = Count::default();
                        count.broken(format!("the guest tests on {kernel}: {error:#}"));
                        count
                    });
                    counts.lock().unwrap_or_else(PoisonError::into_inner)[number].add(&count);
                }
            });
        }
    });
    counts.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// How many guests of 2 GiB this machine has the memory for.
fn in_memory() -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    guests_in(&text)
}

fn guests_in(meminfo: &str) -> usize {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kb = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kb.map_or(usize::MAX, |kb| kb >> 21).max(1)
}

/// A guest that runs tests.
struct Boot<'a> {
    kernel: &'a str,
    /// Which of them: `0/2` is every second one.
    part: String,
    /// Stands before each line that they print.
    prefix: String,
}

impl Boot<'_> {
    fn run(&self, root: &Path, guest: &Path, filter: Option<&str>) -> Result<Count> {
        let Boot { kernel, part, prefix } = self;
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
        command.envs(environment(guest, root)).env("VM_TESTS_PART", part);
        let mut count = Count::default();
        let status = follow(command, kernel, prefix, &mut count)?;
        if count.results == 0 {
            count.broken(format!("the guest tests on {kernel} did not come to an end ({status})"));
        } else if !status.success() && count.failed == 0 {
            count.broken(format!("the guest tests on {kernel} ended with {status}"));
        }
        Ok(count)
    }
}

/// The lines of the README between which [`check_table`] looks for its table.
const TABLE: (&str, &str) =
    ("<!-- written by: cargo vm test --kernel all -->\n", "<!-- end of what it wrote -->");

/// Which stage runs on which kernel, as just tested, must be what the README says; else this
/// writes it there, and fails. Where a kernel did not come up, nothing is known.
fn check_table(readme: &Path, counts: &[Count]) -> Result<()> {
    if counts.iter().any(|count| count.release.is_none()) {
        return Ok(());
    }
    let text = fs::read_to_string(readme).with_context(|| readme.display().to_string())?;
    let (before, rest) = text.split_once(TABLE.0).context("README.md has no table of kernels")?;
    let (old, after) = rest.split_once(TABLE.1).context("README.md's table has no end")?;
    let new = table(counts);
    if old == new {
        return Ok(());
    }
    let whole = [before, TABLE.0, &new, TABLE.1, after].concat();
    fs::write(readme, whole).with_context(|| readme.display().to_string())?;
    let news: Vec<&str> = new.lines().filter(|&line| !old.lines().any(|o| o == line)).collect();
    anyhow::bail!(
        "README.md's table of kernels was not as tested; it is now: commit it. New in it:\n{}",
        news.join("\n")
    )
}

/// A line for each stage, a column for each kernel that came up.
fn table(counts: &[Count]) -> String {
    let tested: Vec<(&str, &Count)> =
        counts.iter().filter_map(|count| Some((count.release.as_deref()?, count))).collect();
    let stages: std::collections::BTreeSet<&String> =
        tested.iter().flat_map(|(_, count)| count.stages.keys()).collect();
    let mut table = String::from("| tests passed |");
    for (release, _) in &tested {
        write!(table, " {release} |").ok();
    }
    table += "\n|---|";
    table += &"---|".repeat(tested.len());
    for stage in stages {
        write!(table, "\n| {stage} |").ok();
        for (_, count) in &tested {
            match count.stages.get(stage) {
                Some((passed, all)) => write!(table, " {passed} of {all} |"),
                None => write!(table, " not tested |"),
            }
            .ok();
        }
    }
    table + "\n"
}

/// Runs a command, passing its standard output on, `prefix` before each line, and counting in it.
fn follow(
    mut command: Command,
    place: &str,
    prefix: &str,
    count: &mut Count,
) -> Result<ExitStatus> {
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
            // Where nobody reads any more, the tests go on: the exit code still tells.
            let _ = writeln!(stdout, "{prefix}{line}");
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
        assert_eq!((count.passed, count.failed, count.results), (41, 2, 2));
        assert_eq!(count.names, ["c (6.1)", "d - should panic (6.1)"]);
    }

    #[test]
    fn guests_need_memory() {
        let guests = |kb: &str| guests_in(&format!("MemTotal: 1 kB\nMemAvailable:  {kb} kB\n"));
        assert_eq!((guests("1000000"), guests("4194303"), guests("9000000")), (1, 1, 4));
    }

    #[test]
    fn the_table_follows_the_tests() {
        let mut counts = [Count::default(), Count::default(), Count::default()];
        for line in [
            "kernel 5.10.0-32-amd64",
            "test stages_are_short ... ok",
            "test stage08_a        ... ok",
            "test stage08_b        ... ok",
        ] {
            counts[0].line(line, "5.10");
        }
        // The one in the middle did not boot.
        for line in ["kernel 6.1.0-50-amd64", "test stage08_a ... FAILED", "test stage09_b ... ok"]
        {
            counts[2].line(line, "6.1");
        }
        let expected = "\
| tests passed | 5.10.0-32-amd64 | 6.1.0-50-amd64 |
|---|---|---|
| stage08 | 2 of 2 | 0 of 1 |
| stage09 | not tested | 1 of 1 |
";
        assert_eq!(table(&counts), expected);
        let dir = tempfile::tempdir().unwrap();
        let readme = dir.path().join("README.md");
        let old = format!("a\n{}old\n{}\nb\n", TABLE.0, TABLE.1);
        fs::write(&readme, &old).unwrap();
        check_table(&readme, &counts).unwrap();
        assert_eq!(fs::read_to_string(&readme).unwrap(), old);
        let counts = [counts[0].clone(), counts[2].clone()];
        assert!(check_table(&readme, &counts).unwrap_err().to_string().contains("commit it"));
        let written = fs::read_to_string(&readme).unwrap();
        assert_eq!(written, format!("a\n{}{expected}{}\nb\n", TABLE.0, TABLE.1));
        check_table(&readme, &counts).unwrap();
    }
}
