//! `cargo vm test`: the host's tests and the guest tests, side by side.
//!
//! Cargo builds all test programs; each is asked which of its tests match the filter, and only
//! those run: the host's here, the guest tests in one or two boots per kernel.

mod report;
mod timings;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use host::events::Verdict;
use host::fail::{Fail, MACHINE, USAGE, fail};
use host::judging::{Judging, Part};
use host::say;

use crate::arch;
use crate::bench;
use crate::cleanup::OWN_FILE;
use crate::follow::follow;
use crate::guest::qemu::Disk;
use crate::setup::cache::Cache;
use crate::setup::kernels::{Table, is_locked};
use crate::setup::packages;
use crate::workspace::{self, GUEST};
use report::Report;

/// The test that programs cost no more than `bench/budgets.toml` says.
const BENCH: &str = "bench_budgets";
/// How long one guest test may take where the machine is quick.
const SHORTEST_LIMIT: Duration = Duration::from_secs(600);
/// How long it may take in boots of this machine: a slow machine is given more time.
const LIMIT_IN_BOOTS: u32 = 40;
/// How long a test program may take until it begins with the first test: for a guest that is a
/// boot, and perhaps fetching its kernel.
const START_LIMIT: Duration = Duration::from_secs(1800);

/// The disks that the guest tests find beside the data disk.
pub const DISKS: [Disk; 3] = [Disk::Virtio, Disk::Nvme, Disk::Scsi];

/// Runs the tests whose names contain `filter`, on the given kernel or on `all`, and prints
/// the sum in the last line. The kernels in `share` divide the guest tests among them, or by the number
/// beside them, if it is larger; without a kernel beside them, nothing else runs. `bless` writes the table of
/// docs/kernels.md, and `timings` names a file for where the time went. Returns the exit code.
pub fn main(
    kernel: Option<&str>,
    share: Option<(&str, usize)>,
    filter: Option<&str>,
    bless: bool,
    timings: Option<&Path>,
) -> Result<i32> {
    let start = Instant::now();
    if bless && filter.is_some() {
        return Err(fail(
            USAGE,
            "--bless writes what all tests said of a kernel: leave out the filter",
        ));
    }
    let (table, cache) = (Table::load()?, Cache::open()?);
    let mut kernels = match (kernel, share) {
        (None, Some(_)) => Vec::new(),
        _ => table.names(kernel, &cache)?,
    };
    if bless && kernels.iter().any(|kernel| table.line(kernel).is_err()) {
        return Err(fail(
            USAGE,
            "--bless writes a column for each line of vm/kernels.toml: name lines, no other kernel",
        ));
    }
    packages::need(true)?;
    let whole = kernels.len();
    let mut shares = 1;
    if let Some((lines, least)) = share {
        let names = table.names(Some(lines), &cache)?;
        kernels.extend(names.into_iter().filter(|name| is_to_be_had(&table, name, &cache)));
        shares = least.max(kernels.len() - whole);
    }
    if kernels.is_empty() {
        return Err(fail(MACHINE, "there is no kernel left that could share the tests, see above"));
    }
    let root = workspace::root()?;
    workspace::for_guests(&root, &cache)?;

    let default = table.default_name(&cache);
    let programs = Programs::build(&root, filter, kernels.split_at(whole), default);
    let build = start.elapsed();
    let mut sum = match programs {
        Ok(programs) if programs.is_empty() => {
            let filter = filter.unwrap_or_default();
            let message = format!(
                "no test has {filter:?} in its name. `cargo test --workspace -- --list` lists the \
                 host's tests, tests/guest holds the guest tests"
            );
            return Err(fail(USAGE, message));
        }
        Ok(programs) => run(&root, &programs, kernels.split_at(whole), shares, filter, bless),
        Err(error) => {
            let mut sum = Report::default();
            sum.broken(format!("{error:#}"));
            sum
        }
    };

    sum.timings.run(build, start.elapsed());
    if let Some(file) = timings
        && let Err(error) = sum.timings.write(file)
    {
        sum.broken(format!("--timings: {error:#}"));
    }
    // Where nobody reads the output any more, the exit code remains.
    let _ = writeln!(std::io::stdout(), "{}", sum.closing());
    Ok(i32::from(!sum.failed.is_empty()))
}

/// Whether to give a kernel a share of the tests. Of an extra line the archive may have no kernel any more:
/// then the others share its tests, too.
fn is_to_be_had(table: &Table, name: &str, cache: &Cache) -> bool {
    let Some(line) = table.line(name).ok().filter(|line| line.extra) else { return true };
    let gone = line.get(cache).err().filter(|error| {
        error.downcast_ref::<Fail>().is_some_and(|failure| failure.code == MACHINE)
    });
    if let Some(error) = &gone {
        say!("{name} is left out: {error:#}");
    }
    gone.is_none()
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
    /// The packages of the workshop's programs.
    known: Vec<String>,
}

impl Programs {
    /// Builds all of them, and keeps those that have tests whose names contain `filter`: the guest
    /// tests only, where no kernel runs all of them. Where the guest tests are among them, builds the
    /// programs that these test, too.
    fn build(
        root: &Path,
        filter: Option<&str>,
        (whole, share): (&[String], &[String]),
        default: String,
    ) -> Result<Programs> {
        let bench = !whole.is_empty()
            && whole.iter().chain(share).any(|kernel| *kernel == default)
            && arch::guest().has_budgets()
            && filter.is_none_or(|f| BENCH.contains(f));
        let known = workspace::programs(root)?.into_iter().map(|program| program.package);
        let known = known.collect::<BTreeSet<_>>().into_iter().collect();
        let mut programs = Programs { host: Vec::new(), guest: None, default, bench, known };
        for artifact in workspace::artifacts_here(root, &["test", "--workspace", "--no-run"])? {
            let Some(file) = artifact.executable.filter(|_| artifact.profile.test) else {
                continue;
            };
            let file = file.into_std_path_buf();
            let manifest = artifact.manifest_path.into_std_path_buf();
            let dir = manifest.parent().unwrap_or(root).to_owned();
            if whole.is_empty() && artifact.target.name != GUEST {
                continue;
            }
            if !has_tests(&file, &dir, filter)? {
                continue;
            }
            if artifact.target.name == GUEST && arch::is_foreign() {
                programs.guest = Some(workspace::build_guest_tests(root)?);
            } else if artifact.target.name == GUEST {
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
    shares: usize,
    filter: Option<&str>,
    bless: bool,
) -> Report {
    let kernels = [whole, share].concat();
    // Two boots share a kernel's tests: with larger jobs, all would wait for the last one.
    let parts = if filter.is_none() { 2 } else { 1 };
    // It runs those tests, too, that are enough on one kernel.
    let judge = whole.iter().position(|kernel| *kernel == programs.default);
    let judge = judge.or((!whole.is_empty()).then_some(0));
    let mut jobs = Vec::new();
    if let Some(guest) = &programs.guest {
        // The longest first.
        let others = (0..whole.len()).filter(|number| Some(*number) != judge);
        let order = judge.into_iter().chain(others);
        for number in order.chain(whole.len()..kernels.len()) {
            let part = |part| Part { number: part, of: parts };
            jobs.extend((0..parts).map(|n| Job::Guest { guest, number, part: part(n) }));
        }
    }
    // The short ones last: no worker then waits for long while another one ends.
    if !programs.host.is_empty() {
        jobs.push(Job::Host);
    }
    jobs.extend(programs.bench.then_some(Job::Bench(&programs.default)));

    let alone = jobs.len() == 1;
    let host = Mutex::new(Report::default());
    let guests: Vec<_> = kernels.iter().map(|_| Mutex::new(Report::default())).collect();
    at_once(workers(), &jobs, |job| {
        let report = |place: &str, part: &str| Report::new(place, part, alone, &programs.known);
        let (mut report, place, what) = match *job {
            Job::Host => (report("host", ""), &host, "the host's tests"),
            Job::Bench(kernel) => (report(kernel, " (bench)"), &host, "the bench"),
            Job::Guest { number, part, .. } => {
                let part = match part.of {
                    1 => String::new(),
                    of => format!(" ({}/{of})", part.number + 1),
                };
                (report(&kernels[number], &part), &guests[number], "the guest tests")
            }
        };
        let done = match *job {
            Job::Host => programs.host.iter().try_for_each(|p| p.run(filter, alone, &mut report)),
            Job::Bench(kernel) => run_bench(root, kernel, &mut report),
            Job::Guest { guest, number, part } => {
                let mut judging = Judging::by(guest, root);
                judging.without_once = filter.is_none() && Some(number) != judge;
                judging.part = part;
                if let Some(number) = number.checked_sub(whole.len()) {
                    judging.share = Part { number, of: shares };
                }
                run_guest(guest, &kernels[number], &judging, filter, &mut report)
            }
        };
        if let Err(error) = done {
            report.broken(format!("{what}: {error:#}"));
        }
        place.lock().unwrap_or_else(PoisonError::into_inner).add(&report);
        Ok(())
    });

    let take = |report: Mutex<Report>| report.into_inner().unwrap_or_else(PoisonError::into_inner);
    let guests: Vec<Report> = guests.into_iter().map(take).collect();
    let mut sum = take(host);
    guests.iter().for_each(|report| sum.add(report));
    // Where something failed, or a kernel did not boot, the table is not known.
    let of_all = |table: Table| table.all().all(|line| kernels.contains(&line.name));
    let complete = share.is_empty() && filter.is_none() && sum.failed.is_empty();
    let all = Table::load().is_ok_and(of_all);
    if complete
        && (all || bless)
        && let Err(error) = report::table(root, &programs.known, &guests, bless, all)
    {
        sum.broken(format!("{error:#}"));
    }
    sum
}

/// Runs the jobs, at most `workers` at once. After an error, no other job begins. Returns the errors.
pub fn at_once<J: Sync>(
    workers: usize,
    jobs: &[J],
    work: impl Fn(&J) -> Result<()> + Sync,
) -> Vec<anyhow::Error> {
    let (left, failed) = (Mutex::new(jobs.iter()), Mutex::new(Vec::new()));
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..workers.min(jobs.len()) {
            scope.spawn(|| {
                while let Some(job) = next() {
                    if let Err(error) = work(job) {
                        failed.lock().unwrap_or_else(PoisonError::into_inner).push(error);
                        left.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
                    }
                }
            });
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// How many guests to run at once: an emulated one keeps a CPU busy.
pub fn workers() -> usize {
    thread::available_parallelism().map_or(1, usize::from).min(in_memory())
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
        command.env("CARGO_MANIFEST_DIR", &self.dir).env_remove("VM_ARCH");
        if !alone {
            // The guests have the other CPUs.
            command.arg("--test-threads=1");
        }
        let failed = report.failed.len();
        let mut last = Instant::now();
        let (success, how) = follow(command, START_LIMIT, |line| {
            report.host_line(line, (!alone).then(|| last.elapsed()));
            last = Instant::now();
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

/// The command that boots a guest with the tests' disks and runs the guest tests' program there: its
/// arguments and variables are still to be added.
pub fn in_guest(program: &Path, kernel: &str) -> Command {
    let disks = DISKS.iter().filter_map(Disk::to_possible_value);
    let disks = disks.flat_map(|disk| ["--disk".to_owned(), disk.get_name().to_owned()]);
    let mut command = Command::new(OWN_FILE);
    command.args(["run", "--arch", arch::guest().name(), "--kernel", kernel]);
    command.args(is_locked().then_some("--locked"));
    command.args(["--idle", "--cpus", "2"]).args(disks).arg(program);
    command
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
    let mut command = in_guest(guest, kernel);
    command.args(["--format", "json"]).args(filter).current_dir(&judging.workspace);
    command.envs([judging.to_env()?]);
    let start = Instant::now();
    let mut limit = START_LIMIT;
    let mut boot = None;
    let (success, how) = follow(command, limit, |line| {
        if report.guest_line(line) {
            boot = Some(start.elapsed());
            limit = SHORTEST_LIMIT.max(start.elapsed() * LIMIT_IN_BOOTS);
        }
        report.flush();
        limit
    })?;
    if let Some(boot) = boot {
        report.guest_took(boot, start.elapsed());
    }
    let is_extra = Table::load()?.line(kernel).is_ok_and(|line| line.extra);
    if boot.is_none() && is_extra && how == format!("exit status: {MACHINE}") {
        let why = "the archive has no kernel of this line any more, see above";
        report.result("the guest tests", Verdict::NotJudged(why.to_owned()));
        report.flush();
    } else {
        report.end_of_guest(&how, success);
    }
    Ok(())
}

/// Measures what the programs cost: one test.
fn run_bench(root: &Path, kernel: &str, report: &mut Report) -> Result<()> {
    say!("what the programs cost, on {kernel}");
    let exceeded = bench::short(root, kernel)?;
    report.result(
        BENCH,
        match exceeded.is_empty() {
            true => Verdict::Passed,
            false => Verdict::Failed(exceeded.join("\n")),
        },
    );
    report.flush();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_need_memory() {
        let guests = |kb: &str| guests_in(&format!("MemTotal: 1 kB\nMemAvailable:  {kb} kB\n"));
        assert_eq!((guests("1000000"), guests("4194303"), guests("9000000")), (1, 1, 4));
    }
}
