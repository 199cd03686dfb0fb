//! `cargo vm bench`: what each program adds to a read, what it takes to start, and how bpftrace and
//! bcc compare.
//!
//! The guest has one CPU, and its clock advances by 1 ns for each instruction: a time is a number of
//! instructions, and the same in every run. The package `bench` measures there, row by row.

// The package `bench` needs clang and libbpf to build, which this program installs: it shares the
// source of these types with it, not the crate.
#[path = "../../bench/src/plan.rs"]
mod plan;
mod report;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use host::fail::{MACHINE, fail};
use host::say;
use serde::{Deserialize, Serialize};

use crate::cache::Cache;
use crate::cleanup::OWN_FILE;
use crate::kernels::Table;
use crate::setup;
use crate::test::follow;
use crate::workspace;
use plan::{Load, Outcome, Plan, Row};
use report::Results;

/// The results, for people.
const RESULTS: &str = "bench/RESULTS.md";
/// A picture of them.
const CHART: &str = "bench/added.svg";
/// What each program may cost.
const BUDGETS: &str = "bench/budgets.toml";
/// A budget is exceeded by more than this, and by more than the one instruction of rounding.
const TOLERANCE: f64 = 1.03;
/// KiB by which memory may exceed its budget. Starts of one program differ by 200, for up to 6.1 the
/// kernel counts a thread's pages in batches of 64 (SPLIT_RSS_COUNTING, mm/memory.c).
const MEMORY_ROOM: u64 = 600;
/// The budgets of memory are from a system with this line in /etc/os-release.
const BLESSED_ON: &str = "VERSION_CODENAME=bookworm";
/// KiB that another system's libraries may cost besides. Debian 13's cost each program 400.
const OTHER_LIBRARIES: u64 = 400;
/// How long a row may take.
const ROW_LIMIT: Duration = Duration::from_secs(1800);

/// What to measure, and what to do with it.
#[derive(Args)]
pub struct Bench {
    /// Kernel line, or a directory with an unpacked kernel [default: 6.1]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|DIR")]
    kernel: Option<String>,
    /// Print one line of JSON for each row instead of the tables
    #[arg(long)]
    json: bool,
    /// Reads in a run
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1000..))]
    ios: u32,
    /// Let fio do the direct reads
    #[arg(long)]
    fio: bool,
    /// Only check the budgets, with few reads, as cargo vm test does
    #[arg(long, conflicts_with_all = ["bless", "native", "fio", "from", "json"])]
    check: bool,
    /// Write bench/budgets.toml: what was measured becomes the budget
    #[arg(long)]
    bless: bool,
    /// Take the results from a file that --json has written, and measure nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["native", "fio"])]
    from: Option<PathBuf>,
    /// Measure wall time on this machine's own kernel (as root)
    #[arg(long, requires = "loads_here", conflicts_with_all = ["bless", "kernel"])]
    native: bool,
    /// Confirm that --native may load BPF programs into this machine's kernel
    #[arg(long = "yes-load-bpf-here", requires = "native")]
    loads_here: bool,
    /// Measure only the rows whose names contain this (and `nothing`)
    filter: Option<String>,
}

/// What a row may cost; what is not in the file is not limited.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Budget {
    direct: Option<u64>,
    cached_4k: Option<u64>,
    cached_1m: Option<u64>,
    memory_kib: Option<u64>,
}

/// Runs the command. Returns the exit code: 1 where a budget is exceeded.
pub fn main(options: &Bench) -> Result<i32> {
    let table = Table::load()?;
    let default = table.default_name(&Cache::open()?);
    let kernel = options.kernel.clone().filter(|k| !k.is_empty()).unwrap_or(default.clone());
    if options.native && !rustix::process::geteuid().is_root() {
        let message =
            "only root may load BPF programs and null_blk: start cargo vm bench with sudo";
        return Err(fail(MACHINE, message));
    }
    setup::packages(true)?;
    let root = workspace::root()?;
    if options.check {
        let exceeded = short(&root, &kernel)?;
        exceeded.iter().for_each(|line| say!("{line}"));
        return Ok(i32::from(!exceeded.is_empty()));
    }
    let outcomes = match &options.from {
        Some(file) => {
            let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
            let lines = text.lines().filter(|line| line.starts_with('{'));
            lines.map(serde_json::from_str).collect::<Result<Vec<Outcome>, _>>()?
        }
        None => {
            let (rows, bench) = rows(&root)?;
            let wanted = |row: &Row| {
                options.filter.as_ref().is_none_or(|part| row.name.contains(part))
                    || row.argv.is_empty()
            };
            let rows = rows.into_iter().filter(wanted).collect();
            let runs = if options.native { 11 } else { 2 };
            let plan = Plan { rows, ios: options.ios, runs, warm: true, fio: options.fio };
            let place = if options.native { Place::Here } else { Place::Guest(&kernel) };
            measure(&root, &bench, &plan, &place, |line, outcome| {
                if options.json {
                    println!("{line}");
                } else {
                    say!("{}", outcome.name);
                }
            })?
        }
    };
    let results = Results::new(&outcomes, options.native)?;
    if !options.json {
        println!("{}", results.tables());
    }
    if options.native || options.fio {
        return Ok(0);
    }
    let all = options.filter.is_none() && kernel == default;
    if all {
        report::write(&root.join(RESULTS), &results.tables())?;
        fs::write(root.join(CHART), results.chart()).context(CHART)?;
        say!("{RESULTS} and {CHART} are written");
    }
    let budgets = root.join(BUDGETS);
    if options.bless {
        ensure!(
            all,
            "--bless needs all rows, on the default kernel: leave out the filter and --kernel"
        );
        let programs = workspace::programs(&root)?;
        let is_ours = |row: &str| programs.iter().any(|p| row.split(' ').next() == Some(&p.name));
        fs::write(&budgets, write_budgets(&results, is_ours)?).context(BUDGETS)?;
        say!("{BUDGETS} is written");
        return Ok(0);
    }
    if kernel != default {
        return Ok(0);
    }
    let exceeded = exceeded(&results, &read_budgets(&root)?, memory_room());
    exceeded.iter().for_each(|line| say!("{line}"));
    Ok(i32::from(!exceeded.is_empty()))
}

/// The short form, for `cargo vm test`: few reads beside the first form of each program. Returns
/// the budgets that are exceeded.
pub fn short(root: &Path, kernel: &str) -> Result<Vec<String>> {
    let budgets = read_budgets(root)?;
    let (mut rows, bench) = rows(root)?;
    rows.retain(|row| row.name == "nothing" || budgets.contains_key(&row.name));
    let mut programs = Vec::new();
    rows.retain(|row| {
        let program = row.argv.first().cloned();
        let first = !programs.contains(&program);
        programs.push(program);
        first
    });
    rows.iter_mut().for_each(|row| row.loads.retain(|&load| load != Load::Cached1m));
    let plan = Plan { rows, ios: 4000, runs: 2, warm: false, fio: false };
    let outcomes = measure(root, &bench, &plan, &Place::Guest(kernel), |_, _| ())?;
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
    Ok(exceeded(&Results::new(&outcomes, false)?, &budgets, memory_room()))
}

/// Where to measure.
enum Place<'a> {
    Guest(&'a str),
    Here,
}

/// Measures, and hands over each row as soon as it is there.
fn measure(
    root: &Path,
    bench: &Path,
    plan: &Plan,
    place: &Place<'_>,
    mut on_row: impl FnMut(&str, &Outcome),
) -> Result<Vec<Outcome>> {
    let json = serde_json::to_string(plan)?;
    let mut command = match place {
        Place::Here => Command::new(bench),
        Place::Guest(kernel) => {
            let mut command = Command::new(OWN_FILE);
            command
                .args(["run", "--icount", "--idle", "--kernel", kernel, "--memory", "1G"])
                .arg(bench);
            command
        }
    };
    command.arg(json).current_dir(root);
    let mut outcomes = Vec::new();
    let (success, how) = follow(command, ROW_LIMIT, |line| {
        if let Ok(outcome) = serde_json::from_str::<Outcome>(line) {
            on_row(line, &outcome);
            outcomes.push(outcome);
        }
        ROW_LIMIT
    })?;
    ensure!(success, "the measurement ended with {how}, after {} rows", outcomes.len());
    Ok(outcomes)
}

/// All rows, and the file of the program that measures them.
fn rows(root: &Path) -> Result<(Vec<Row>, PathBuf)> {
    let programs = workspace::programs(root)?;
    let mut files: BTreeMap<String, PathBuf> = BTreeMap::new();
    for artifact in workspace::artifacts(root, &["build", "--workspace"])? {
        if let Some(file) = artifact.executable {
            files.insert(artifact.target.name, file.into());
        }
    }
    let file =
        |name: &str| files.get(name).cloned().with_context(|| format!("cargo built no {name}"));
    let bench = file("bench")?;
    let every = [Load::Direct, Load::Cached4k, Load::Cached1m];
    let mut rows = vec![Row {
        name: "nothing".into(),
        package: None,
        argv: Vec::new(),
        loads: every.into(),
        most: None,
    }];
    for (kind, name, loads) in EMPTY {
        let argv = vec![bench.display().to_string(), "--floor".into(), kind.into()];
        rows.push(Row { name: name.into(), package: None, argv, loads: loads.into(), most: None });
    }
    for program in &programs {
        let file = file(&program.name)?;
        let help = Command::new(&file).arg("--help").output();
        let help = help.with_context(|| format!("cannot start {}", file.display()))?;
        let has_quiet = String::from_utf8_lossy(&help.stdout).contains("--quiet");
        let forms = program.bench.forms.clone();
        let forms = forms.unwrap_or_else(|| {
            if has_quiet { vec!["--quiet".into(), String::new()] } else { vec![String::new()] }
        });
        let loads = if program.bench.cached { CACHED } else { &every[..1] };
        for form in forms {
            let mut argv = vec![file.display().to_string()];
            argv.extend(form.split_whitespace().map(str::to_owned));
            rows.push(Row {
                name: row_name(&program.name, &form),
                package: None,
                argv,
                loads: loads.into(),
                most: program.bench.most_reads,
            });
        }
    }
    for (name, package, argv, loads) in PEERS {
        let argv = argv.iter().map(|&argument| argument.to_owned()).collect();
        rows.push(Row {
            name: (*name).into(),
            package: Some((*package).into()),
            argv,
            loads: loads.to_vec(),
            most: None,
        });
    }
    Ok((rows, bench))
}

/// `stage04 quiet` for `stage04 --quiet`: two hyphens may not stand in a comment of a README.
fn row_name(program: &str, form: &str) -> String {
    let words =
        form.split_whitespace().map(|word| word.trim_start_matches('-').trim_matches(['{', '}']));
    std::iter::once(program).chain(words).collect::<Vec<_>>().join(" ")
}

const CACHED: &[Load] = &[Load::Cached4k, Load::Cached1m];
const DIRECT: &[Load] = &[Load::Direct];

/// Pairs of programs that do nothing: name for `bench --floor`, of the row, what reads.
const EMPTY: [(&str, &str, &[Load]); 4] = [
    ("kprobe", "empty: kprobe submit_bio, kprobe bio_endio", DIRECT),
    ("fentry", "empty: fentry submit_bio, fentry bio_endio", DIRECT),
    ("mixed", "empty: kprobe submit_bio, fentry bio_endio", DIRECT),
    ("filemap", "empty: fentry filemap_read, fexit filemap_read", CACHED),
];

type Peer = (&'static str, &'static str, &'static [&'static str], &'static [Load]);

/// Other tracers that do the same: name, Debian package, command, what reads.
const PEERS: &[Peer] = &[
    (
        "bpftrace like stage00",
        "bpftrace",
        &[
            "bpftrace",
            "-e",
            "tracepoint:block:block_rq_issue { @s[args->dev, args->sector] = nsecs; } \
             tracepoint:block:block_rq_complete /@s[args->dev, args->sector]/ \
             { @ns = hist(nsecs - @s[args->dev, args->sector]); delete(@s[args->dev, args->sector]); }",
        ],
        DIRECT,
    ),
    (
        "bpftrace like stage03",
        "bpftrace",
        &[
            "bpftrace",
            "-e",
            r#"kprobe:submit_bio { @s[arg0] = nsecs; printf("submit_bio(bio=0x%lx) called: %lu\n", arg0, nsecs); }
               kprobe:bio_endio /@s[arg0]/ { $d = nsecs - @s[arg0]; delete(@s[arg0]);
                   printf("bio_endio (bio=0x%lx) called: %lu\n", arg0, nsecs);
                   printf("submit_bio() -> bio_endio() time duration: %lu ns\n", $d); }"#,
        ],
        DIRECT,
    ),
    (
        "bpftrace like stage04",
        "bpftrace",
        &[
            "bpftrace",
            "-e",
            "kprobe:submit_bio { @s[arg0] = nsecs; } \
             kprobe:bio_endio /@s[arg0]/ { @max = max(nsecs - @s[arg0]); delete(@s[arg0]); }",
        ],
        DIRECT,
    ),
    (
        "bpftrace like stage04, kfunc",
        "bpftrace",
        &[
            "bpftrace",
            "-e",
            "kfunc:submit_bio { @s[args->bio] = nsecs; } \
             kfunc:bio_endio /@s[args->bio]/ { @max = max(nsecs - @s[args->bio]); delete(@s[args->bio]); }",
        ],
        DIRECT,
    ),
    (
        "bpftrace like stage06",
        "bpftrace",
        &[
            "bpftrace",
            "-e",
            "kprobe:submit_bio { @s[arg0] = nsecs; @stack[arg0] = kstack; } \
             kprobe:bio_endio /@s[arg0]/ { @max = max(nsecs - @s[arg0]); delete(@s[arg0]); delete(@stack[arg0]); }",
        ],
        DIRECT,
    ),
    ("bcc biolatency", "bpfcc-tools", &["biolatency-bpfcc", "3600"], DIRECT),
    ("bcc biosnoop", "bpfcc-tools", &["biosnoop-bpfcc"], DIRECT),
    ("bcc cachestat", "bpfcc-tools", &["cachestat-bpfcc", "3600"], CACHED),
    ("libbpf-tools biolatency", "libbpf-tools", &["biolatency", "3600"], DIRECT),
    ("libbpf-tools biosnoop", "libbpf-tools", &["biosnoop"], DIRECT),
    ("libbpf-tools cachestat", "libbpf-tools", &["cachestat", "3600"], CACHED),
];

fn read_budgets(root: &Path) -> Result<BTreeMap<String, Budget>> {
    let text = fs::read_to_string(root.join(BUDGETS)).context(BUDGETS)?;
    toml::from_str(&text).context(BUDGETS)
}

fn write_budgets(results: &Results, is_ours: impl Fn(&str) -> bool) -> Result<String> {
    let rows = results.names().filter(|name| is_ours(name));
    let budgets: BTreeMap<&str, Budget> = rows.map(|name| (name, budget(results, name))).collect();
    Ok(format!(
        "# What each program may cost on the default kernel: instructions added to a read, and peak \
         memory.\n# Written by `cargo vm bench --bless`: what was measured. More than 3 % above this \
         fails `cargo vm bench`\n# and `cargo vm test`; of memory, more than {MEMORY_ROOM} KiB, and \
         {OTHER_LIBRARIES} more where the libraries are not those\n# of Debian 12.\n\n{}",
        toml::to_string(&budgets)?
    ))
}

/// What a row may cost: what it does cost, where the runs agree.
fn budget(results: &Results, name: &str) -> Budget {
    let now = costs(results, name);
    Budget {
        direct: now.direct.filter(|_| results.repeats(name, Load::Direct)),
        cached_4k: now.cached_4k.filter(|_| results.repeats(name, Load::Cached4k)),
        cached_1m: now.cached_1m.filter(|_| results.repeats(name, Load::Cached1m)),
        memory_kib: now.memory_kib,
    }
}

/// What a row costs, as its budget counts it.
fn costs(results: &Results, name: &str) -> Budget {
    let added = |load| results.added(name, load).map(|added| added.max(0.0).round() as u64);
    Budget {
        direct: added(Load::Direct),
        cached_4k: added(Load::Cached4k),
        cached_1m: added(Load::Cached1m),
        memory_kib: results.memory_kib(name),
    }
}

/// The KiB of memory that a program may have beyond its budget on this system.
fn memory_room() -> u64 {
    let system = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let blessed_here = system.lines().any(|line| line == BLESSED_ON);
    MEMORY_ROOM + if blessed_here { 0 } else { OTHER_LIBRARIES }
}

/// The budgets that are exceeded: by more than 3 %, and those of memory by more than `room` KiB.
fn exceeded(results: &Results, budgets: &BTreeMap<String, Budget>, room: u64) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, budget) in budgets {
        let now = costs(results, name);
        for (what, now, budget, room) in [
            ("instructions added to a direct read", now.direct, budget.direct, 1),
            ("instructions added to a cached read of 4 KiB", now.cached_4k, budget.cached_4k, 1),
            ("instructions added to a cached read of 1 MiB", now.cached_1m, budget.cached_1m, 1),
            ("KiB of memory", now.memory_kib, budget.memory_kib, room),
        ] {
            if let (Some(now), Some(budget)) = (now, budget)
                && now as f64 > budget as f64 * TOLERANCE
                && now > budget + room
            {
                lines.push(format!(
                    "{name}: {now} {what}, the budget is {budget}. If the gain is worth that, \
                     cargo vm bench --bless makes it the budget"
                ));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use plan::{Measured, Run, Started};

    /// Results of two rows: nothing, and a program that adds `added`.
    pub(super) fn outcomes(added: f64, kib: u64) -> Vec<Outcome> {
        let measured = |elapsed: f64| {
            let run = |more| Run { elapsed: elapsed + more + 5.0, thread: Some(elapsed + more) };
            vec![Measured { load: Load::Direct, runs: vec![run(0.0), run(2.0)] }]
        };
        let started = Started {
            attach_ms: 300.0,
            attach_cpu_ms: 100.0,
            attached_kib: kib,
            exit_ms: 50.0,
            peak_kib: kib,
            programs: Vec::new(),
        };
        vec![
            Outcome {
                name: "nothing".into(),
                measured: measured(5000.0),
                started: None,
                note: None,
            },
            Outcome {
                name: "stage04 quiet".into(),
                measured: measured(5000.0 + added),
                started: Some(started),
                note: None,
            },
        ]
    }

    #[test]
    fn a_budget_may_be_exceeded_by_3_percent() {
        let of = |text| toml::from_str::<BTreeMap<String, Budget>>(text).unwrap();
        let check = |added, kib, room, budgets| {
            exceeded(&Results::new(&outcomes(added, kib), false).unwrap(), &of(budgets), room)
        };
        let budgets = "[\"stage04 quiet\"]\ndirect = 1000\nmemory_kib = 10000\n";
        assert!(check(1029.0, 10_299, 0, budgets).is_empty());
        assert!(
            check(1040.0, 10_000, 0, budgets)[0]
                .starts_with("stage04 quiet: 1040 instructions added to a direct")
        );
        let memory = "stage04 quiet: 10400 KiB of memory";
        assert!(check(1000.0, 10_400, 0, budgets)[0].starts_with(memory));
        assert!(check(1000.0, 10_600, 600, budgets).is_empty());
        assert!(!check(1000.0, 10_601, 600, budgets).is_empty());
        let nothing = "[\"stage04 quiet\"]\ndirect = 0\n";
        assert!(check(1.0, 9, 0, nothing).is_empty() && !check(2.0, 9, 0, nothing).is_empty());
    }

    #[test]
    fn what_is_blessed_is_the_budget() {
        let outcomes = outcomes(1234.0, 9);
        let results = Results::new(&outcomes, false).unwrap();
        let text = write_budgets(&results, |name| name.starts_with("stage")).unwrap();
        let read: BTreeMap<String, Budget> = toml::from_str(&text).unwrap();
        let budget = Budget { direct: Some(1234), memory_kib: Some(9), ..Budget::default() };
        assert_eq!(read, BTreeMap::from([("stage04 quiet".to_owned(), budget)]));
    }

    #[test]
    fn names_of_rows() {
        assert_eq!(row_name("stage09", "--quiet {other}"), "stage09 quiet other");
        assert_eq!(row_name("stage03", ""), "stage03");
    }

    #[test]
    fn the_budgets_file_is_readable() {
        let budgets = read_budgets(&workspace::root().unwrap()).unwrap();
        assert!(budgets.values().all(|budget| budget.memory_kib.is_some()), "{budgets:?}");
    }
}
