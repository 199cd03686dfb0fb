//! `cargo vm test`: the host's tests and the guest tests, side by side.
//!
//! Cargo builds all test programs; each is asked which of its tests match the filter, and only
//! those run: the host's here, the guest tests in one or two boots per kernel.

mod report;
mod table;
mod timings;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use workshop::events::Verdict;
use workshop::fail::{Fail, MACHINE, USAGE, fail};
use workshop::judging::{Judging, Partition};
use workshop::{lock, say};

use crate::cargo::follow::{at_once, follow, workers};
use crate::cargo::{GUEST, artifacts, build_all, build_guest_tests};
use crate::commands::bench;
use crate::machine::qemu::Disk;
use crate::run::{For, Run, named};
use crate::session::cleanup::OWN_FILE;
use report::TestReport;

/// What to test, and where.
#[derive(Args)]
pub struct Options {
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|all|DIR", help = super::LINES)]
    kernel: Option<String>,
    /// More kernel lines, which divide the guest tests among them; the tests under load run on each.
    /// Without --kernel, these are all that runs
    #[arg(long, value_name = "LINES", conflicts_with_all = ["filter", "bless"])]
    share: Option<String>,
    /// Divide the tests by so many: the remaining shares have their turn on other days
    #[arg(long, value_name = "N", requires = "share", value_parser = clap::value_parser!(u16).range(1..))]
    shares: Option<u16>,
    /// Write vm/tested.json and the table of docs/kernels.md, which a plain run only compares
    #[arg(long, conflicts_with = "filter")]
    bless: bool,
    /// Build what is tested, and run nothing
    #[arg(long, conflicts_with_all = ["bless", "timings"])]
    no_run: bool,
    /// Write to this file, as JSON, what each test, boot and build took, in ms
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// Run only the tests whose names contain this
    filter: Option<String>,
}

/// The kernels of a run.
struct Kernels {
    /// Their names: first those that run all tests, then those that divide them.
    names: Vec<String>,
    /// How many of them run all.
    whole: usize,
    /// How many share the tests of the others.
    shares: usize,
    /// The default kernel: all that does not depend on one is tested there.
    default: String,
}

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
/// The options that add them.
pub const DISK_OPTIONS: [&str; 6] = ["--disk", "virtio", "--disk", "nvme", "--disk", "scsi"];

/// Runs the tests and prints the sum in the last line. Returns the exit code.
pub fn main(run: &Run, options: &Options) -> Result<i32> {
    let start = Instant::now();
    let names = wanted_kernels(run, options)?;
    run.need_packages(For::Test)?;
    let kernels = Kernels::choose(run, options, names)?;
    let filter = options.filter.as_deref();
    let programs = Programs::build(run, filter, &kernels);
    if options.no_run {
        return programs.map(|_| 0);
    }
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
        Ok(programs) => run_all(run, &programs, &kernels, filter, options.bless),
        Err(error) => {
            let mut sum = TestReport::default();
            sum.broken(format!("{error:#}"));
            sum
        }
    };

    let times = [build, start.elapsed()].map(|time| time.as_millis() as u64);
    [sum.timings.build, sum.timings.all] = times;
    if let Some(file) = &options.timings {
        let json = workshop::json::to_lines(&sum.timings)?;
        if let Err(error) = std::fs::write(file, json) {
            sum.broken(format!("--timings: {error:#}"));
        }
    }
    // Where nobody reads the output any more, the exit code remains.
    let _ = writeln!(std::io::stdout(), "{}{}", sum.timings.closing(), sum.closing());
    Ok(i32::from(!sum.failed.is_empty()))
}

/// The kernels that run all tests, as the options name them.
fn wanted_kernels(run: &Run, options: &Options) -> Result<Vec<String>> {
    let kernel = named(options.kernel.as_deref());
    let names = match (kernel, &options.share) {
        (None, Some(_)) => Vec::new(),
        _ => run.table.names(kernel)?,
    };
    if options.bless && names.iter().any(|kernel| run.table.line(kernel).is_err()) {
        return Err(fail(
            USAGE,
            "--bless writes what the tests say of a line of vm/kernels.toml: name lines, no other kernel",
        ));
    }
    Ok(names)
}

impl Kernels {
    /// These kernels, and those of `--share` that are available.
    fn choose(run: &Run, options: &Options, mut names: Vec<String>) -> Result<Kernels> {
        let (whole, mut shares) = (names.len(), 1);
        if let Some(lines) = &options.share {
            let lines = run.table.names(Some(lines))?;
            names.extend(lines.into_iter().filter(|name| is_available(run, name)));
            shares = usize::from(options.shares.unwrap_or(1)).max(names.len() - whole);
        }
        if names.is_empty() {
            let message = "there is no kernel left that could share the tests, see above";
            return Err(fail(MACHINE, message));
        }
        Ok(Kernels { names, whole, shares, default: run.table.default_name() })
    }
}

/// Whether to give a kernel a share of the tests. Of an extra line the archive may have no kernel any more:
/// then the others share its tests, too.
fn is_available(run: &Run, name: &str) -> bool {
    let is_extra = run.table.line(name).is_ok_and(|line| line.is_extra);
    let gone = run.table.kernel(name).err().filter(|error| {
        is_extra && error.downcast_ref::<Fail>().is_some_and(|failure| failure.code == MACHINE)
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
    /// Whether to measure on the default kernel what the programs cost.
    bench: bool,
    /// The packages of the workshop's programs.
    known: Vec<String>,
}

impl Programs {
    /// Builds all of them, and keeps those that have tests whose names contain `filter`: the guest
    /// tests only, where no kernel runs all of them. Where the guest tests are among them, builds the
    /// programs that these test, too.
    fn build(run: &Run, filter: Option<&str>, kernels: &Kernels) -> Result<Programs> {
        let bench = kernels.whole > 0
            && kernels.names.contains(&kernels.default)
            && run.arch.has_budgets()
            && filter.is_none_or(|f| BENCH.contains(f));
        let known = run.programs()?.iter().filter(|program| !program.is_attempt);
        let known = known.map(|program| program.package.clone()).collect::<BTreeSet<_>>();
        let known = known.into_iter().collect();
        let mut programs = Programs { host: Vec::new(), guest: None, bench, known };
        let guests = run.guests()?;
        for artifact in artifacts(&run.cargo, &["test", "--workspace", "--no-run"])? {
            let Some(file) = artifact.executable.filter(|_| artifact.profile.test) else {
                continue;
            };
            let file = file.into_std_path_buf();
            let manifest = artifact.manifest_path.into_std_path_buf();
            let dir = manifest.parent().unwrap_or(run.workspace()).to_owned();
            if kernels.whole == 0 && artifact.target.name != GUEST {
                continue;
            }
            if !has_tests(&file, &dir, filter)? {
                continue;
            }
            if artifact.target.name == GUEST && run.arch.is_foreign() {
                programs.guest = Some(build_guest_tests(guests)?);
            } else if artifact.target.name == GUEST {
                programs.guest = Some(file);
            } else {
                programs.host.push(HostTests { file, dir });
            }
        }
        if programs.guest.is_some() {
            build_all(guests)?;
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
    /// The guest tests on a kernel, and which of them.
    Guest { guest: &'a Path, number: usize, partition: Partition },
    /// What the programs cost, on the default kernel.
    Bench(&'a str),
}

/// A run of the tests.
struct Testing<'a> {
    run: &'a Run,
    programs: &'a Programs,
    kernels: &'a Kernels,
    filter: Option<&'a str>,
    /// In how many boots the tests of a kernel run.
    boots: usize,
    /// The kernel that also runs the tests that are enough on one.
    judge: Option<usize>,
}

/// Runs as many jobs at once as there are CPUs, for an emulated guest keeps one busy, and as there
/// is memory for. A kernel that does not boot fails its own tests and no other's.
fn run_all(
    run: &Run,
    programs: &Programs,
    kernels: &Kernels,
    filter: Option<&str>,
    bless: bool,
) -> TestReport {
    let judge = kernels.names[..kernels.whole].iter().position(|kernel| *kernel == kernels.default);
    let judge = judge.or((kernels.whole > 0).then_some(0));
    // Two boots divide a kernel's tests: with larger jobs, all would wait for the last one.
    let boots = if filter.is_none() { 2 } else { 1 };
    let testing = Testing { run, programs, kernels, filter, boots, judge };
    let (mut sum, guests) = testing.reports(&testing.jobs());
    guests.iter().for_each(|report| sum.add(report));
    testing.compare_with_table(&mut sum, &guests, bless);
    sum
}

impl Testing<'_> {
    /// What is to be run: the longest first, the short ones last. So no worker waits for long while another
    /// one ends.
    fn jobs(&self) -> Vec<Job<'_>> {
        let Kernels { names, whole, default, .. } = self.kernels;
        let mut jobs = Vec::new();
        if let Some(guest) = &self.programs.guest {
            let others = (0..*whole).filter(|number| Some(*number) != self.judge);
            for number in self.judge.into_iter().chain(others).chain(*whole..names.len()) {
                let partitions =
                    (0..self.boots).map(|part| Partition { number: part, of: self.boots });
                jobs.extend(partitions.map(|partition| Job::Guest { guest, number, partition }));
            }
        }
        if !self.programs.host.is_empty() {
            jobs.push(Job::Host);
        }
        jobs.extend(self.programs.bench.then_some(Job::Bench(default)));
        jobs
    }

    /// Runs the jobs. Returns what the host's tests and the bench say, and what each kernel's do.
    fn reports(&self, jobs: &[Job<'_>]) -> (TestReport, Vec<TestReport>) {
        let host = Mutex::new(TestReport::default());
        let guests: Vec<_> =
            self.kernels.names.iter().map(|_| Mutex::new(TestReport::default())).collect();
        at_once(workers(), jobs, |job| {
            let place = match *job {
                Job::Host | Job::Bench(_) => &host,
                Job::Guest { number, .. } => &guests[number],
            };
            let report = self.report(job, jobs.len() == 1);
            lock(place).add(&report);
            Ok(())
        });
        let take =
            |report: Mutex<TestReport>| report.into_inner().unwrap_or_else(PoisonError::into_inner);
        (take(host), guests.into_iter().map(take).collect())
    }

    /// Runs a job. `alone`: it is the only one.
    fn report(&self, job: &Job<'_>, alone: bool) -> TestReport {
        let new =
            |place: &str, part: &str| TestReport::new(place, part, alone, &self.programs.known);
        let (mut report, what);
        let done = match *job {
            Job::Host => {
                (report, what) = (new("host", ""), "the host's tests");
                let mut programs = self.programs.host.iter();
                programs.try_for_each(|it| it.run(self.filter, alone, &mut report))
            }
            Job::Bench(kernel) => {
                (report, what) = (new(kernel, " (bench)"), "the bench");
                run_bench(self.run, kernel, &mut report)
            }
            Job::Guest { guest, number, partition } => {
                let kernel = &self.kernels.names[number];
                let part = format!(" ({}/{})", partition.number + 1, partition.of);
                report = new(kernel, if partition.of == 1 { "" } else { &part });
                what = "the guest tests";
                let judging = self.judging(guest, number, partition);
                run_guest(self.run, guest, kernel, &judging, self.filter, &mut report)
            }
        };
        if let Err(error) = done {
            report.broken(format!("{what}: {error:#}"));
        }
        report
    }

    /// What the guest tests of this kernel are told.
    fn judging(&self, guest: &Path, number: usize, partition: Partition) -> Judging {
        let mut judging = Judging::by(guest, self.run.workspace());
        judging.without_once = self.filter.is_none() && Some(number) != self.judge;
        judging.partition = partition;
        if let Some(number) = number.checked_sub(self.kernels.whole) {
            // Each share's turn comes on another day.
            let of = self.kernels.shares;
            judging.share = Partition { number: (number + workshop::today() as usize) % of, of };
        }
        judging
    }

    /// Compares what the kernels' tests say with the table of kernels, or writes that. Where something
    /// failed, or a kernel did not boot, the table is not known.
    fn compare_with_table(&self, sum: &mut TestReport, guests: &[TestReport], bless: bool) {
        let Kernels { names, whole, .. } = self.kernels;
        let complete = *whole == names.len() && self.filter.is_none() && sum.failed.is_empty();
        let all = self.run.table.all().all(|line| names.contains(&line.name));
        if !complete || !(all || bless) {
            return;
        }
        let said: Vec<_> =
            names.iter().cloned().zip(guests.iter().map(TestReport::passed)).collect();
        if let Err(error) = table::take(self.run, &said, bless) {
            sum.broken(format!("{error:#}"));
        }
    }
}

impl HostTests {
    fn run(&self, filter: Option<&str>, alone: bool, report: &mut TestReport) -> Result<()> {
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
pub fn in_guest(run: &Run, launcher: &Path, program: &Path, kernel: &str) -> Command {
    let mut command = Command::new(launcher);
    command.args(["run", "--arch", run.arch.name(), "--kernel", kernel]);
    command.args(["--idle", "--cpus", "2"]).args(DISK_OPTIONS).arg(program);
    command
}

/// Boots a guest that runs some of the guest tests.
fn run_guest(
    run: &Run,
    guest: &Path,
    kernel: &str,
    judging: &Judging,
    filter: Option<&str>,
    report: &mut TestReport,
) -> Result<()> {
    say!("guest tests on {}", report.label);
    let mut command = in_guest(run, Path::new(OWN_FILE), guest, kernel);
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
    let is_extra = run.table.line(kernel).is_ok_and(|line| line.is_extra);
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
fn run_bench(run: &Run, kernel: &str, report: &mut TestReport) -> Result<()> {
    say!("what the programs cost, on {kernel}");
    let exceeded = bench::short(run, kernel)?;
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
