//! `cargo vm test`: the host's tests and the guest tests, side by side.
//!
//! Cargo builds all test programs; each is asked which of its tests match the filter, and only
//! those run: the host's here, the guest tests in one or two boots per kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use host::fail::{USAGE, fail};
use host::judging::{Judging, Part};
use host::say;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use crate::bench;
use crate::cache::Cache;
use crate::cleanup::OWN_FILE;
use crate::kernels::Table;
use crate::qemu::Disk;
use crate::setup;
use crate::workspace;

/// The test that programs cost no more than `bench/budgets.toml` says.
const BENCH: &str = "bench_budgets";
/// The package of the guest tests, and its test target.
const GUEST: &str = "guest";
/// How long one guest test may take where the machine is quick.
const SHORTEST_LIMIT: Duration = Duration::from_secs(600);
/// How long it may take in boots of this machine: a slow machine is given more time.
const LIMIT_IN_BOOTS: u32 = 40;
/// How long a test program may take until it begins with the first test: for a guest that is a
/// boot, and perhaps fetching its kernel.
const START_LIMIT: Duration = Duration::from_secs(1800);
/// How long a launcher may take to end after a signal, before it is killed.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The disks that the guest tests find beside the data disk.
pub const DISKS: [Disk; 3] = [Disk::Virtio, Disk::Nvme, Disk::Scsi];

/// Runs the tests whose names contain `filter`, on the given kernel or on `all`, and prints
/// the sum in the last line. The kernels in `share` divide the guest tests among them. `bless` writes
/// the table of docs/kernels.md. Returns the exit code.
pub fn main(
    kernel: Option<&str>,
    share: Option<&str>,
    filter: Option<&str>,
    bless: bool,
) -> Result<i32> {
    if bless && (kernel != Some("all") || filter.is_some()) {
        return Err(fail(
            USAGE,
            "--bless writes a table of all kernels: it needs --kernel all and no filter",
        ));
    }
    let (table, cache) = (Table::load()?, Cache::open()?);
    let mut kernels = table.names(kernel, &cache)?;
    let whole = kernels.len();
    if share.is_some() {
        kernels.extend(table.names(share, &cache)?);
    }
    setup::packages(true)?;
    let root = workspace::root()?;

    let default = table.default_name(&cache);
    let sum = match Programs::build(&root, filter, &kernels, default) {
        Ok(programs) if programs.is_empty() => {
            let filter = filter.unwrap_or_default();
            let message = format!(
                "no test has {filter:?} in its name. `cargo test --workspace -- --list` lists the \
                 host's tests, tests/guest holds the guest tests"
            );
            return Err(fail(USAGE, message));
        }
        Ok(programs) => run(&root, &programs, kernels.split_at(whole), filter, bless),
        Err(error) => {
            let mut sum = Report::default();
            sum.broken(format!("{error:#}"));
            sum
        }
    };

    let mut text = String::new();
    if !sum.failed.is_empty() {
        text = format!("\nfailed:\n    {}\n", sum.failed.join("\n    "));
    }
    // Where nobody reads the output any more, the exit code remains.
    let (passed, failed) = (sum.passed, sum.failed.len());
    let _ = writeln!(std::io::stdout(), "{text}{passed} passed, {failed} failed");
    Ok(if failed == 0 { 0 } else { 1 })
}

/// A program with tests that run on the host.
struct HostTests {
    file: PathBuf,
    /// The directory of its package, where cargo would start it.
    dir: PathBuf,
}

/// The test programs that have tests to run.
struct Programs {
    host: Vec<HostTests>,
    guest: Option<PathBuf>,
    /// The default kernel: all that does not depend on one is tested there.
    default: String,
    /// Whether to measure there what the programs cost.
    bench: bool,
}

impl Programs {
    /// Builds all of them, and keeps those that have tests whose names contain `filter`. Where
    /// the guest tests are among them, builds the programs that these test, too.
    fn build(
        root: &Path,
        filter: Option<&str>,
        kernels: &[String],
        default: String,
    ) -> Result<Programs> {
        let bench = kernels.contains(&default) && filter.is_none_or(|f| BENCH.contains(f));
        let mut programs = Programs { host: Vec::new(), guest: None, default, bench };
        for artifact in workspace::artifacts(root, &["test", "--workspace", "--no-run"])? {
            let Some(file) = artifact.executable.filter(|_| artifact.profile.test) else {
                continue;
            };
            let file = file.into_std_path_buf();
            let manifest = artifact.manifest_path.into_std_path_buf();
            let dir = manifest.parent().unwrap_or(root).to_owned();
            if !has_tests(&file, &dir, filter)? {
                continue;
            }
            if artifact.target.name == GUEST {
                programs.guest = Some(file);
            } else {
                programs.host.push(HostTests { file, dir });
            }
        }
        if programs.guest.is_some() {
            workspace::build_all(root)?;
        }
        Ok(programs)
    }

    fn is_empty(&self) -> bool {
        self.host.is_empty() && self.guest.is_none() && !self.bench
    }
}

/// Asks a test program whether it has tests whose names contain `filter`.
fn has_tests(file: &Path, dir: &Path, filter: Option<&str>) -> Result<bool> {
    let output = Command::new(file)
        .arg("--list")
        .args(filter)
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", file.display()))?;
    ensure!(output.status.success(), "{} --list ended with {}", file.display(), output.status);
    Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.ends_with(": test")))
}

/// Something to run beside others.
enum Job<'a> {
    /// The host's tests.
    Host,
    /// The guest tests on a kernel, and which part of them.
    Guest { guest: &'a Path, number: usize, part: Part },
    /// What the programs cost, on the default kernel.
    Bench(&'a str),
}

/// Runs as many jobs at once as there are CPUs, for an emulated guest keeps one busy, and as there
/// is memory for. A kernel that does not boot fails its own tests and no other's.
fn run(
    root: &Path,
    programs: &Programs,
    (whole, share): (&[String], &[String]),
    filter: Option<&str>,
    bless: bool,
) -> Report {
    let kernels = [whole, share].concat();
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    // Two boots share a kernel's tests: with larger jobs, all would wait for the last one.
    let parts = if filter.is_none() { 2 } else { 1 };
    let judge = whole.iter().position(|kernel| *kernel == programs.default).unwrap_or(0);
    let mut jobs = Vec::new();
    if !programs.host.is_empty() {
        jobs.push(Job::Host);
    }
    if let Some(guest) = &programs.guest {
        // The longest first.
        let order = (judge..=judge).chain((0..whole.len()).filter(|number| *number != judge));
        for number in order {
            let part = |part| Part { number: part, of: parts };
            jobs.extend((0..parts).map(|n| Job::Guest { guest, number, part: part(n) }));
        }
        let (first, of) = (whole.len(), share.len());
        let one = |number| Job::Guest { guest, number: first + number, part: Part { number, of } };
        jobs.extend((0..of).map(one));
    }
    jobs.extend(programs.bench.then_some(Job::Bench(&programs.default)));

    let known = match workspace::programs(root) {
        Ok(programs) => {
            let names = programs.into_iter().map(|program| program.package);
            names.collect::<BTreeSet<_>>().into_iter().collect()
        }
        Err(_) => Vec::new(),
    };
    let alone = jobs.len() == 1;
    let workers = cpus.min(in_memory()).min(jobs.len());
    let left = Mutex::new(jobs.iter());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let host = Mutex::new(Report::default());
    let guests: Vec<_> = kernels.iter().map(|_| Mutex::new(Report::default())).collect();
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(job) = next() {
                    let (mut report, place, what) = match *job {
                        Job::Host => (Report::new("host", alone), &host, "the host's tests"),
                        Job::Bench(kernel) => {
                            (Report::new(&format!("{kernel} (bench)"), alone), &host, "the bench")
                        }
                        Job::Guest { number, part, .. } => {
                            let kernel = &kernels[number];
                            let label = match part.of {
                                1 => kernel.clone(),
                                of => format!("{kernel} ({}/{of})", part.number + 1),
                            };
                            (Report::new(&label, alone), &guests[number], "the guest tests")
                        }
                    };
                    report.known.clone_from(&known);
                    let done = match *job {
                        Job::Host => {
                            programs.host.iter().try_for_each(|p| p.run(filter, alone, &mut report))
                        }
                        Job::Bench(kernel) => run_bench(root, kernel, &mut report),
                        Job::Guest { guest, number, part } => {
                            let mut judging = Judging::by(guest, root);
                            judging.without_once = filter.is_none() && number != judge;
                            if number < whole.len() {
                                judging.part = part;
                            } else {
                                judging.share = part;
                            }
                            run_guest(guest, &kernels[number], &judging, filter, &mut report)
                        }
                    };
                    if let Err(error) = done {
                        report.broken(format!("{what}: {error:#}"));
                    }
                    place.lock().unwrap_or_else(PoisonError::into_inner).add(report);
                }
            });
        }
    });

    let take = |report: Mutex<Report>| report.into_inner().unwrap_or_else(PoisonError::into_inner);
    let guests: Vec<Report> = guests.into_iter().map(take).collect();
    let mut sum = Report { label: String::new(), ..take(host) };
    guests.iter().for_each(|report| sum.add(report.clone()));
    // Where something failed, or a kernel did not boot, the table is not known.
    let of_all = |table: Table| table.lines.iter().all(|line| kernels.contains(&line.name));
    let complete = share.is_empty() && filter.is_none() && sum.failed.is_empty();
    let all = complete && Table::load().is_ok_and(of_all);
    if all && let Err(error) = table(root, &known, &guests, bless) {
        sum.broken(format!("{error:#}"));
    }
    sum
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

impl HostTests {
    fn run(&self, filter: Option<&str>, alone: bool, report: &mut Report) -> Result<()> {
        let mut command = Command::new(&self.file);
        command.args(["--format", "pretty"]).args(filter).current_dir(&self.dir);
        command.env("CARGO_MANIFEST_DIR", &self.dir);
        if !alone {
            // The guests have the other CPUs.
            command.arg("--test-threads=1");
        }
        let failed = report.failed.len();
        let (success, how) = follow(command, START_LIMIT, |line| {
            report.host_line(line);
            report.flush();
            START_LIMIT
        })?;
        if !success && report.failed.len() == failed {
            let name = self.file.file_name().unwrap_or_default().to_string_lossy();
            report.broken(format!("{name} ended: {how}"));
        }
        Ok(())
    }
}

/// Boots a guest that runs some of the guest tests.
fn run_guest(
    guest: &Path,
    kernel: &str,
    judging: &Judging,
    filter: Option<&str>,
    report: &mut Report,
) -> Result<()> {
    say!("guest tests on {}", report.label);
    let disks = DISKS.iter().filter_map(Disk::to_possible_value);
    let disks = disks.flat_map(|disk| ["--disk".to_owned(), disk.get_name().to_owned()]);
    let mut command = Command::new(OWN_FILE);
    command.args(["run", "--kernel", kernel, "--idle", "--cpus", "2"]).args(disks).arg(guest);
    command.args(["--format", "json"]).args(filter).current_dir(&judging.workspace);
    command.envs([judging.to_env()?]);
    let start = Instant::now();
    let mut limit = START_LIMIT;
    let (success, how) = follow(command, limit, |line| {
        if report.guest_line(line) {
            limit = SHORTEST_LIMIT.max(start.elapsed() * LIMIT_IN_BOOTS);
        }
        report.flush();
        limit
    })?;
    report.end_of_guest(&how, success);
    Ok(())
}

/// Measures what the programs cost: one test.
fn run_bench(root: &Path, kernel: &str, report: &mut Report) -> Result<()> {
    say!("what the programs cost, on {kernel}");
    let exceeded = bench::short(root, kernel)?;
    let result = if exceeded.is_empty() { "ok" } else { "failed" };
    report.result(BENCH, result, &exceeded.join("\n"));
    report.flush();
    Ok(())
}

/// Runs a command and hands over each line of its standard output. `on_line` returns how long
/// the next line may take to come; after that time the command is ended. Returns whether it
/// succeeded, and how it ended.
pub fn follow(
    mut command: Command,
    mut limit: Duration,
    mut on_line: impl FnMut(&str) -> Duration,
) -> Result<(bool, String)> {
    // SAFETY: one system call, async-signal-safe, no memory of the parent touched.
    unsafe {
        command
            .pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the tests")?;
    let output = child.stdout.take().context("the tests have no output")?;
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let mut stopped = None;
    let mut signals = [Signal::TERM, Signal::KILL].into_iter();
    loop {
        match lines.recv_timeout(limit) {
            Ok(line) => limit = on_line(String::from_utf8_lossy(&line).trim_end()),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let Some(signal) = signals.next() else { break };
                stopped.get_or_insert_with(|| {
                    let whole = Duration::from_secs(limit.as_secs());
                    format!("stopped: no result for {}", humantime::format_duration(whole))
                });
                let _ = kill_process(Pid::from_child(&child), signal);
                limit = END_LIMIT;
            }
        }
    }
    let status = child.wait().context("cannot wait for the tests")?;
    Ok((status.success() && stopped.is_none(), stopped.unwrap_or_else(|| status.to_string())))
}

/// What a program of the workshop did on a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Cell {
    passed: u32,
    /// The first of its tests that failed.
    failed: Option<String>,
    /// Why it cannot run there.
    unsupported: Option<String>,
}

/// What test programs reported.
#[derive(Clone, Debug, Default)]
struct Report {
    /// Where they run; stands before the lines that they print, unless they run alone.
    label: String,
    alone: bool,
    /// The programs of the workshop.
    known: Vec<String>,
    passed: u32,
    /// The tests that failed, and what failed beside.
    failed: Vec<String>,
    /// The release of the kernel that they ran on: `6.1.0-50-amd64`.
    release: Option<String>,
    programs: BTreeMap<String, Cell>,
    /// To be printed.
    lines: Vec<String>,
    /// How many tests the guest has not begun, once it has said how many there are.
    to_come: Option<u32>,
    running: Option<String>,
}

/// A line of libtest-mimic's JSON.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    event: String,
    name: Option<String>,
    test_count: Option<u32>,
    stdout: Option<String>,
}

impl Report {
    fn new(label: &str, alone: bool) -> Report {
        Report { label: label.to_owned(), alone, ..Report::default() }
    }

    /// Prints the lines that have accumulated. Where nobody reads them any more, the tests
    /// continue: the exit code remains.
    fn flush(&mut self) {
        let prefix = if self.alone { String::new() } else { format!("{}: ", self.label) };
        for line in self.lines.drain(..) {
            let _ = writeln!(std::io::stdout(), "{prefix}{line}");
        }
    }

    fn print(&mut self, line: &str) {
        self.lines.push(line.to_owned());
    }

    /// Takes in a line of a guest test program, and prints what it means. True where the tests
    /// begin.
    fn guest_line(&mut self, line: &str) -> bool {
        let Ok(event) = serde_json::from_str::<Event>(line) else {
            if let Some(release) = line.strip_prefix("kernel ") {
                self.release = Some(release.to_owned());
            } else if let Some((program, why)) =
                line.strip_prefix("unsupported ").and_then(|rest| rest.split_once(": "))
            {
                let cell = self.programs.entry(program.to_owned()).or_default();
                cell.unsupported = Some(why.to_owned());
            }
            if !line.is_empty() {
                self.print(line);
            }
            return false;
        };
        let name = event.name.unwrap_or_default();
        match (event.kind.as_str(), event.event.as_str()) {
            ("suite", "started") => {
                self.to_come = event.test_count;
                return true;
            }
            ("test", "started") => {
                self.to_come = self.to_come.map(|n| n.saturating_sub(1));
                self.running = Some(name);
            }
            ("test", result) => {
                self.running = None;
                let reason = event.stdout.unwrap_or_default();
                let reason = reason.trim_end();
                // As libtest-mimic puts it.
                let inner = reason.strip_prefix("Error: \"").and_then(|r| r.strip_suffix('"'));
                self.result(&name, result, inner.unwrap_or(reason));
            }
            _ => {}
        }
        false
    }

    /// Takes in a line of libtest's, and prints it unless it says nothing.
    fn host_line(&mut self, line: &str) {
        if let Some((name, result)) =
            line.strip_prefix("test ").and_then(|test| test.rsplit_once(" ... "))
        {
            let result = if result == "FAILED" { "failed" } else { result };
            return self.result(name.trim(), result, "");
        }
        let empty = ["", "successes:", "failures:"].contains(&line.trim())
            || line.starts_with("running ")
            || line.starts_with("test result: ");
        if !empty {
            self.print(line);
        }
    }

    /// Counts a test and prints what came out, with the reason where it failed.
    fn result(&mut self, name: &str, result: &str, reason: &str) {
        let program = self.known.iter().filter(|program| is_of(name, program));
        let program = program.max_by_key(|program| program.len()).cloned();
        let cell = program.map(|program| self.programs.entry(program).or_default());
        match result {
            "ok" => {
                self.passed += 1;
                cell.into_iter().for_each(|cell| cell.passed += 1);
                self.print(&format!("test {name} ... ok"));
            }
            "failed" => {
                if let Some(cell) = cell {
                    cell.failed.get_or_insert_with(|| name.to_owned());
                }
                self.print(&format!("test {name} ... FAILED"));
                reason.lines().for_each(|line| self.print(&format!("    {line}")));
                let first = reason.lines().next().unwrap_or_default();
                let colon = if first.is_empty() { "" } else { ": " };
                self.broken(format!("{name}{colon}{first}"));
            }
            other => self.print(&format!("test {name} ... {other}")),
        }
    }

    /// The guest has ended: what did not run is a failure.
    fn end_of_guest(&mut self, how: &str, success: bool) {
        match (self.running.take(), self.to_come.take()) {
            (_, None) => self.broken(format!("the guest tests did not begin ({how})")),
            (Some(test), Some(n)) => {
                self.broken(format!("{test}: the guest ended while it ran ({how})"));
                if n > 0 {
                    self.broken(format!("{n} more tests did not run"));
                }
            }
            (None, Some(n)) if n > 0 => {
                self.broken(format!("{n} tests did not run: the guest ended before ({how})"));
            }
            _ if !success && self.failed.is_empty() => {
                self.broken(format!("the guest tests ended with {how}"));
            }
            _ => {}
        }
    }

    /// Notes a failure, with the place.
    fn broken(&mut self, what: String) {
        let place = if self.label.is_empty() { String::new() } else { format!("{}: ", self.label) };
        self.failed.push(place + &what);
    }

    fn add(&mut self, other: Report) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.release = self.release.take().or(other.release);
        for (program, cell) in other.programs {
            let sum = self.programs.entry(program).or_default();
            sum.passed += cell.passed;
            sum.failed = sum.failed.take().or(cell.failed);
            sum.unsupported = sum.unsupported.take().or(cell.unsupported);
        }
    }
}

/// Whether a test is one of a program's: `stage08_threads` is one of stage08's.
fn is_of(test: &str, program: &str) -> bool {
    let rest = test.strip_prefix(&program.replace('-', "_"));
    rest.is_some_and(|rest| rest.starts_with('_'))
}

/// The page with the table of kernels.
const PAGE: &str = "docs/kernels.md";
/// Its line before the table begins with this, the one after it is this.
const TABLE: (&str, &str) =
    ("<!-- written by: cargo vm test --kernel all", "<!-- end of what it wrote -->");

/// Which program runs on which kernel, as just tested, must be what [`PAGE`] says; `bless` writes it
/// there.
fn table(root: &Path, programs: &[String], guests: &[Report], bless: bool) -> Result<()> {
    let new = render(programs, guests);
    let page = root.join(PAGE);
    let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
    let missing = || format!("{PAGE} has no table of kernels");
    let (before, rest) = text.split_once(TABLE.0).with_context(missing)?;
    let (mark, rest) = rest.split_once('\n').with_context(missing)?;
    let (old, after) =
        rest.split_once(TABLE.1).with_context(|| format!("the table of {PAGE} has no end"))?;
    if old == new {
        return Ok(());
    }
    if bless {
        let whole = [before, TABLE.0, mark, "\n", &new, TABLE.1, after].concat();
        fs::write(&page, whole).with_context(|| page.display().to_string())?;
        say!("{PAGE}: the table of kernels is written");
        return Ok(());
    }
    let news: Vec<&str> = new.lines().filter(|&line| !old.lines().any(|o| o == line)).collect();
    anyhow::bail!(
        "the table of kernels in {PAGE} differs from what was tested: `cargo vm test --kernel all \
         --bless` writes it. Tested:\n{}",
        news.join("\n")
    )
}

/// A line for each program, a column for each kernel that was tested.
fn render(programs: &[String], guests: &[Report]) -> String {
    let release = |guest: &Report| guest.release.clone().unwrap_or_default();
    let mut table = String::from("| |");
    guests.iter().for_each(|guest| write!(table, " {} |", release(guest)).unwrap_or_default());
    table += "\n|---|";
    table += &"---|".repeat(guests.len());
    for program in programs {
        write!(table, "\n| {program} |").unwrap_or_default();
        for guest in guests {
            let text = match guest.programs.get(program) {
                Some(Cell { unsupported: Some(why), .. }) => why,
                Some(Cell { failed: Some(test), .. }) => test,
                Some(Cell { passed: 1.., .. }) => "✓",
                _ => "not tested",
            };
            write!(table, " {text} |").unwrap_or_default();
        }
    }
    table + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let known = ["stage08", "stage09", "bio-life"].map(str::to_owned).to_vec();
        Report { known, ..Report::new("6.1", true) }
    }

    fn of_guest(lines: &[&str]) -> Report {
        let mut report = report();
        lines.iter().for_each(|line| {
            report.guest_line(line);
        });
        report
    }

    const START: &str = r#"{ "type": "suite", "event": "started", "test_count": 4 }"#;
    const A: &str = r#"{ "type": "test", "event": "started", "name": "stage08_a" }"#;
    const A_OK: &str = r#"{ "type": "test", "name": "stage08_a", "event": "ok" }"#;
    const B: &str = r#"{ "type": "test", "event": "started", "name": "stage08_b" }"#;
    const B_FAILED: &str = r#"{ "type": "test", "name": "stage08_b", "event": "failed", "stdout": "Error: \"one\ntwo\"\n" }"#;

    #[test]
    fn failures_are_named_with_their_reasons() {
        let mut report = of_guest(&["kernel 6.1.0-50-amd64", START, A, A_OK, B, B_FAILED]);
        assert_eq!(report.release.as_deref(), Some("6.1.0-50-amd64"));
        assert_eq!(report.passed, 1);
        assert_eq!(report.failed, ["6.1: stage08_b: one"]);
        let shown = ["test stage08_b ... FAILED", "    one", "    two"];
        assert_eq!(report.lines[2..], shown);
        report.end_of_guest("exit status: 1", false);
        assert_eq!(
            report.failed[1],
            "6.1: 2 tests did not run: the guest ended before (exit status: 1)"
        );
    }

    #[test]
    fn a_guest_that_dies_loses_no_result() {
        let mut report = of_guest(&[START, A, A_OK, B]);
        report.end_of_guest("exit status: 125", false);
        assert_eq!(report.passed, 1);
        let lost = "6.1: stage08_b: the guest ended while it ran (exit status: 125)";
        assert_eq!(report.failed, [lost, "6.1: 2 more tests did not run"]);

        let mut report = of_guest(&[]);
        report.end_of_guest("exit status: 125", false);
        assert_eq!(report.failed, ["6.1: the guest tests did not begin (exit status: 125)"]);
    }

    #[test]
    fn the_hosts_tests_are_counted_by_their_lines() {
        let mut report = report();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test c ... FAILED",
            "test d - should panic ... FAILED",
            "test e ... ignored",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            report.host_line(line);
        }
        assert_eq!(report.passed, 1);
        assert_eq!(report.failed, ["6.1: c", "6.1: d - should panic"]);
    }

    #[test]
    fn a_test_program_without_output_is_ended() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo a; exec sleep 1000"]);
        let mut lines = 0;
        let ended = follow(command, START_LIMIT, |_| {
            lines += 1;
            Duration::from_millis(1500)
        });
        assert_eq!(ended.unwrap(), (false, "stopped: no result for 1s".to_owned()));
        assert_eq!(lines, 1);
    }

    #[test]
    fn guests_need_memory() {
        let guests = |kb: &str| guests_in(&format!("MemTotal: 1 kB\nMemAvailable:  {kb} kB\n"));
        assert_eq!((guests("1000000"), guests("4194303"), guests("9000000")), (1, 1, 4));
    }

    #[test]
    fn the_table_is_written_only_when_blessed() {
        let kernel = |release: &str, lines: &[&str]| Report {
            release: Some(release.to_owned()),
            ..of_guest(lines)
        };
        let guests = [
            kernel("6.1.0", &[A_OK, "unsupported bio-life: no fentry on this kernel"]),
            kernel("6.12", &[A_OK, &A_OK.replace("stage08_a", "bio_life_x")]),
            kernel("7.2", &[A_OK, B_FAILED]),
        ];
        let programs = report().known;
        let expected = "\
| | 6.1.0 | 6.12 | 7.2 |
|---|---|---|---|
| stage08 | ✓ | ✓ | stage08_b |
| stage09 | not tested | not tested | not tested |
| bio-life | no fentry on this kernel | ✓ | not tested |
";
        assert_eq!(render(&programs, &guests), expected);

        let dir = tempfile::tempdir().unwrap();
        let page = dir.path().join(PAGE);
        fs::create_dir(page.parent().unwrap()).unwrap();
        let mark = format!("{} --bless -->\n", TABLE.0);
        let old = format!("a\n{mark}old\n{}\nb\n", TABLE.1);
        fs::write(&page, &old).unwrap();
        let error = table(dir.path(), &programs, &guests, false).unwrap_err().to_string();
        assert!(error.contains("--bless` writes it"), "{error}");
        assert_eq!(fs::read_to_string(&page).unwrap(), old);
        table(dir.path(), &programs, &guests, true).unwrap();
        let written = fs::read_to_string(&page).unwrap();
        assert_eq!(written, format!("a\n{mark}{expected}{}\nb\n", TABLE.1));
        table(dir.path(), &programs, &guests, false).unwrap();
    }
}
