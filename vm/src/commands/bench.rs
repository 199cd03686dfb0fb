//! `cargo vm bench`: what each program adds to a read, what it takes to start, and how bpftrace and
//! bcc compare.
//!
//! The guest has one CPU, and its clock advances by 1 ns for each instruction: a time is a number of
//! instructions, and the same in every run. The package `bench-measure` measures there, row by row.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bench::budgets::{self, BUDGETS};
use bench::plan::{BenchOutcome, BenchPlan, CACHED, DIRECT, EMPTY, GROWTH, Load, Row, questions};
use bench::report::{CHART, Measurement, RESULTS, Results, Store};
use clap::Args;
use workshop::fail::{MACHINE, fail};
use workshop::say;

use crate::cargo::artifacts;
use crate::cargo::follow::follow;
use crate::fetch::rootfs::{self, Rootfs};
use crate::run::{For, Run, named};
use crate::session::cleanup::OWN_FILE;

/// How long a row may take.
const ROW_LIMIT: Duration = Duration::from_secs(1800);

/// What to measure, and what to do with it.
#[derive(Args)]
pub struct Options {
    /// Kernel line, or a directory with an unpacked kernel [default: 6.1; arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|DIR")]
    kernel: Option<String>,
    /// Reads in a run
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1000..))]
    ios: u32,
    /// Let fio do the direct reads
    #[arg(long)]
    fio: bool,
    /// Only check the budgets, with few reads, as cargo vm test does
    #[arg(long, conflicts_with_all = ["bless", "native", "fio"])]
    check: bool,
    /// Write bench/budgets.toml: what was measured becomes the budget
    #[arg(long)]
    bless: bool,
    /// Measure how the cost grows with disks and threads
    #[arg(long, conflicts_with_all = ["bless", "check", "native", "fio"])]
    growth: bool,
    /// Write bench/RESULTS.md, though there is a filter
    #[arg(long, conflicts_with_all = ["check", "native", "fio"])]
    write: bool,
    /// Measure wall time on this machine's own kernel (as root)
    #[arg(long, requires = "loads_here", conflicts_with_all = ["bless", "kernel"])]
    native: bool,
    /// Confirm that --native may load BPF programs into this machine's kernel
    #[arg(long = "yes-load-bpf-here", requires = "native")]
    loads_here: bool,
    /// Measure only the rows whose names contain one of these (and `nothing`)
    filter: Vec<String>,
}

/// Runs the command. Returns the exit code: 1 where a budget is exceeded.
pub fn main(run: &Run, options: &Options) -> Result<i32> {
    let default = run.table.default_name();
    let kernel = named(options.kernel.as_deref()).unwrap_or(&default);
    if options.native && !rustix::process::geteuid().is_root() {
        let message =
            "only root may load BPF programs and null_blk: start cargo vm bench with sudo";
        return Err(fail(MACHINE, message));
    }
    run.need_packages(For::Test)?;
    let has_budgets = run.arch.has_budgets();
    if !has_budgets && !options.native {
        say!("{BUDGETS} is for x86-64: nothing is compared, and {RESULTS} stays");
    }
    if options.check {
        return if has_budgets { Ok(exit_code(&short(run, kernel)?)) } else { Ok(0) };
    }
    let (rows, bench) = wanted_rows(run, options)?;
    let peers = Peers::prepare(run, options, kernel, &rows)?;
    let record = Record::new(run, options, kernel, peers.versions)?;
    let (root, headers) = (peers.root, peers.headers);
    let runs = if options.native { 11 } else { 2 };
    let plan =
        BenchPlan { rows, ios: options.ios, runs, warm: true, fio: options.fio, root, headers };
    let place = if options.native { Place::Here } else { Place::Guest(kernel) };
    let outcomes = measure(command(run, &bench, &plan, &place)?, |outcomes| {
        outcomes.last().iter().for_each(|outcome| say!("{}", outcome.name));
        record.keep(outcomes, false)
    })?;
    let results = Results::new(&outcomes, options.native)?;
    workshop::outln!("{}", results.tables());
    if options.native {
        workshop::outln!("{}", this_machine()?);
    }
    if options.native || options.fio {
        return Ok(0);
    }
    record.keep(&outcomes, options.is_complete())?;
    if record.title.is_some() {
        say!("{RESULTS} and {CHART} are written");
    }
    judge(run, options, kernel, &results)
}

impl Options {
    /// Whether all rows are measured, as usual.
    fn is_complete(&self) -> bool {
        self.filter.is_empty() && !self.growth
    }
}

/// The rows to measure, those of the peers among them, and the file of the program that measures them.
fn wanted_rows(run: &Run, options: &Options) -> Result<(Vec<Row>, PathBuf)> {
    let (mut rows, bench) = rows(run)?;
    for question in questions()? {
        rows.iter_mut().filter(|row| row.name == question.ours).for_each(|row| question.ask(row));
        rows.extend(question.peers());
    }
    let is_named = |row: &Row| options.filter.iter().any(|name| row.name.contains(name));
    rows.retain(|row| options.filter.is_empty() || is_named(row) || row.argv.is_empty());
    if options.growth {
        rows.retain(|row| row.argv.is_empty() || GROWTH.contains(&row.name.as_str()));
        rows.iter_mut().for_each(|row| row.loads = Load::GROWTH.into());
    }
    Ok((rows, bench))
}

/// What the peers, bpftrace and bcc, need.
#[derive(Default)]
struct Peers {
    /// The root file system that has them.
    root: Option<PathBuf>,
    /// The kernel's headers.
    headers: Option<PathBuf>,
    /// Their versions, by package.
    versions: BTreeMap<String, String>,
}

impl Peers {
    /// Fetches it, where one of the rows is a peer's and can be measured.
    fn prepare(run: &Run, options: &Options, kernel: &str, rows: &[Row]) -> Result<Peers> {
        let mut peers = Peers::default();
        let packages: Vec<&String> = rows.iter().filter_map(|row| row.package.as_ref()).collect();
        if packages.is_empty() || !run.arch.has_peers() || options.native {
            return Ok(peers);
        }
        let sid = Rootfs::sid()?.get(&run.source, &run.cache)?;
        for package in packages {
            let version = rootfs::version(&sid, package).unwrap_or_default();
            peers.versions.insert(package.clone(), version);
        }
        peers.root = Some(sid);
        if let Ok(line) = run.table.line(kernel) {
            let release = run.table.kernel(kernel)?.release;
            peers.headers = rootfs::headers(line, &release, &run.source, &run.cache)?;
        }
        Ok(peers)
    }
}

/// What is kept of a measurement, in bench/.
struct Record<'a> {
    workspace: &'a Path,
    default: String,
    kernel: &'a str,
    /// Its title: the release, and how much was read. `None`: nothing is kept.
    title: Option<String>,
    versions: BTreeMap<String, String>,
}

impl<'a> Record<'a> {
    fn new(
        run: &'a Run,
        options: &Options,
        kernel: &'a str,
        versions: BTreeMap<String, String>,
    ) -> Result<Record<'a>> {
        let is_comparable = run.arch.has_budgets() && run.table.line(kernel).is_ok();
        let is_usual = !options.native && !options.fio;
        let is_wanted = options.is_complete() || options.growth || options.write;
        let title = match is_comparable && is_usual && is_wanted {
            true => {
                Some(format!("{}, {} reads a run", run.table.kernel(kernel)?.release, options.ios))
            }
            false => None,
        };
        let (workspace, default) = (run.workspace(), run.table.default_name());
        Ok(Record { workspace, default, kernel, title, versions })
    }

    /// Keeps these rows. `all`: there are no others.
    fn keep(&self, outcomes: &[BenchOutcome], all: bool) -> Result<()> {
        let Some(on) = self.title.clone() else { return Ok(()) };
        let new = Measurement { on, versions: self.versions.clone(), outcomes: outcomes.to_vec() };
        Store::keep(self.workspace, &self.default, self.kernel, new, all)
    }
}

/// Makes the results the budgets where that is asked for, else compares them where they can be. Returns
/// the exit code.
fn judge(run: &Run, options: &Options, kernel: &str, results: &Results) -> Result<i32> {
    let is_judged = kernel == run.table.default_name() && run.arch.has_budgets();
    if options.bless {
        ensure!(
            options.is_complete() && is_judged,
            "--bless needs all rows, on the default kernel of x86-64: leave out the filter and --kernel"
        );
        let programs = run.programs()?;
        let is_ours = |row: &str| programs.iter().any(|p| row.split(' ').next() == Some(&p.name));
        let text = budgets::write(results, is_ours)?;
        fs::write(run.workspace().join(BUDGETS), text).context(BUDGETS)?;
        say!("{BUDGETS} is written");
        return Ok(0);
    }
    if !is_judged || options.growth {
        return Ok(0);
    }
    Ok(exit_code(&budgets::exceeded(results, &budgets::read(run.workspace())?)))
}

/// Reports the budgets that are exceeded. Returns the exit code.
fn exit_code(exceeded: &[String]) -> i32 {
    exceeded.iter().for_each(|line| say!("{line}"));
    i32::from(!exceeded.is_empty())
}

/// The short form, for `cargo vm test`: few reads beside the first form of each program. Returns
/// the budgets that are exceeded.
pub fn short(run: &Run, kernel: &str) -> Result<Vec<String>> {
    let budgets = budgets::read(run.workspace())?;
    let (mut rows, bench) = rows(run)?;
    rows.retain(|row| row.name == "nothing" || budgets.contains_key(&row.name));
    let mut programs = Vec::new();
    rows.retain(|row| {
        let program = row.argv.first().cloned();
        let first = !programs.contains(&program);
        programs.push(program);
        first
    });
    rows.iter_mut().for_each(|row| row.loads.retain(|&load| load != Load::Cached1m));
    let plan =
        BenchPlan { rows, ios: 4000, runs: 2, warm: false, fio: false, root: None, headers: None };
    let outcomes = measure(command(run, &bench, &plan, &Place::Guest(kernel))?, |_| Ok(()))?;
    ensure!(
        outcomes.len() == plan.rows.len(),
        "only {} of {} rows were measured",
        outcomes.len(),
        plan.rows.len()
    );
    if let Some(broken) = outcomes.iter().find(|outcome| outcome.note.is_some()) {
        let note = broken.note.as_deref().unwrap_or_default();
        return Ok(vec![format!("{}: {note}", broken.name)]);
    }
    Ok(budgets::exceeded(&Results::new(&outcomes, false)?, &budgets))
}

/// What --native has measured: kernel, CPU, and whether that is a virtual machine's.
fn this_machine() -> Result<String> {
    let cpus = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let of = |key: &str| cpus.lines().find_map(|line| line.strip_prefix(key)?.split_once(": "));
    let model = of("model name").map_or("a CPU without a name", |(_, model)| model);
    let is_virtual = of("flags").is_some_and(|(_, flags)| flags.contains(" hypervisor"));
    let where_to = if is_virtual { "a virtual machine, not real hardware" } else { "this machine" };
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    Ok(format!("Measured on {where_to}: {release}, {model}"))
}

/// Where to measure.
enum Place<'a> {
    Guest(&'a str),
    Here,
}

/// What measures there.
fn command(run: &Run, bench: &Path, plan: &BenchPlan, place: &Place<'_>) -> Result<Command> {
    let json = serde_json::to_string(plan)?;
    let mut command = match place {
        Place::Here => Command::new(bench),
        Place::Guest(kernel) => {
            let mut command = Command::new(OWN_FILE);
            command
                .args(["run", "--arch", run.arch.name(), "--icount", "--idle"])
                .args(["--kernel", kernel, "--memory", "1G"])
                .arg(bench);
            command
        }
    };
    command.arg(json).current_dir(run.workspace());
    Ok(command)
}

/// Measures, and hands over all rows as soon as there is another one.
fn measure(
    command: Command,
    mut on_row: impl FnMut(&[BenchOutcome]) -> Result<()>,
) -> Result<Vec<BenchOutcome>> {
    let (mut outcomes, mut kept) = (Vec::new(), Ok(()));
    let (success, how) = follow(command, ROW_LIMIT, |line| {
        if let Ok(outcome) = serde_json::from_str(line) {
            outcomes.push(outcome);
            if kept.is_ok() {
                kept = on_row(&outcomes);
            }
        }
        ROW_LIMIT
    })?;
    kept?;
    ensure!(success, "the measurement ended with {how}, after {} rows", outcomes.len());
    Ok(outcomes)
}

/// All rows, and the file of the program that measures them.
fn rows(run: &Run) -> Result<(Vec<Row>, PathBuf)> {
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for artifact in artifacts(run.guests()?, &["build", "--workspace"])? {
        if let Some(file) = artifact.executable {
            files.insert(artifact.target.name, file.into());
        }
    }
    let file =
        |name: &str| files.get(name).cloned().with_context(|| format!("cargo built no {name}"));
    let measure = file("measure")?;
    let every = [Load::Direct, Load::Cached4k, Load::Cached1m];
    let mut rows = vec![Row { name: "nothing".into(), loads: every.into(), ..Row::default() }];
    for (kind, name, loads) in EMPTY {
        let argv = vec![measure.display().to_string(), "--floor".into(), kind.into()];
        rows.push(Row { name: name.into(), argv, loads: loads.into(), ..Row::default() });
    }
    for program in run.programs()?.iter().filter(|program| !program.is_attempt) {
        let file = file(&program.name)?;
        let loads = if program.bench.cached { CACHED } else { DIRECT };
        for form in &program.bench.forms {
            let mut argv = vec![file.display().to_string()];
            argv.extend(form.split_whitespace().map(str::to_owned));
            rows.push(Row {
                name: row_name(&program.name, form),
                argv,
                loads: loads.into(),
                most: program.bench.most_reads,
                ..Row::default()
            });
        }
    }
    Ok((rows, measure))
}

/// `slow_io who` for `slow_io --who`: two hyphens may not stand in a comment of a README.
fn row_name(program: &str, form: &str) -> String {
    let words =
        form.split_whitespace().map(|word| word.trim_start_matches('-').trim_matches(['{', '}']));
    std::iter::once(program).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use bench::plan::Measured;

    use super::*;

    #[test]
    fn a_run_that_breaks_off_keeps_its_rows() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("bench")).unwrap();
        let workspace = ::workshop::workspace();
        for file in [RESULTS, "bench/results.json"] {
            fs::copy(workspace.join(file), dir.path().join(file)).unwrap();
        }
        let row = |name: &str, ns: f64| {
            let run = bench::plan::Run { elapsed: ns, thread: Some(ns), later: 0.0 };
            let measured = vec![Measured { load: Load::Direct, runs: vec![run] }];
            let outcome = BenchOutcome { name: name.into(), measured, started: None, note: None };
            serde_json::to_string(&outcome).unwrap()
        };
        let rows = [row("nothing", 1000.0), row("stage04", 4321.0)];
        let mut command = Command::new("sh");
        command.args(["-c", "printf '%s\\n' \"$@\"; exit 1", "sh"]).args(rows);
        let ended = measure(command, |outcomes| {
            let (on, versions) = ("6.1.0".to_owned(), BTreeMap::new());
            let new = Measurement { on, versions, outcomes: outcomes.to_vec() };
            Store::keep(dir.path(), "6.1", "6.1", new, false)
        });
        let error = ended.unwrap_err().to_string();
        assert_eq!(error, "the measurement ended with exit status: 1, after 2 rows");
        let text = fs::read_to_string(dir.path().join(RESULTS)).unwrap();
        let has = |row: &str| text.lines().any(|line| line.starts_with(row));
        assert!(has("| stage04 | 3,321 | 3,321 |") && has("| stage05 | "), "{text}");
    }
}
