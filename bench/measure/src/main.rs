//! Measures what a read costs while a tracer runs: `measure PLAN` takes a [`bench::plan::BenchPlan`] as JSON and
//! prints a [`bench::plan::BenchOutcome`] for each row, one a line. `cargo vm bench` starts it, in the guest.
//!
//! `measure --floor KIND` attaches a pair of empty programs until Ctrl-C.

mod load;
mod tracer;
mod floor {
    include!(concat!(env!("OUT_DIR"), "/floor.skel.rs"));
}

use std::fs;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::mpsc::channel;

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use bench::plan::{BenchOutcome, BenchPlan, Load, MOUNTS, Measured, Row};
use tracer::Tracer;

/// In memory: a tracer's output, and its executable, which the guest would read over 9p.
const MEMORY: &str = "/dev/shm";
/// Reads before the first that are measured.
const WARM_UP: u32 = 5000;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["--floor", kind] => empty_programs(kind),
        [plan] => serde_json::from_str(plan).context("the plan").and_then(|plan| measure(&plan)),
        _ => {
            eprintln!("usage: measure PLAN | measure --floor KIND; cargo vm bench starts it");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("measure: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Attaches empty programs, and waits for Ctrl-C.
fn empty_programs(kind: &str) -> Result<()> {
    let (stop, stopped) = channel();
    // Nobody waits any more where this fails.
    ctrlc::set_handler(move || stop.send(()).unwrap_or_default())?;
    let mut object = MaybeUninit::uninit();
    let mut open = floor::FloorSkelBuilder::default().open(&mut object)?;
    let names: [&str; 2] = match kind {
        "kprobe" => ["kprobe_end", "kprobe_start"],
        "fentry" => ["fentry_end", "fentry_start"],
        "mixed" => ["fentry_end", "kprobe_start"],
        "filemap" => ["read_end", "read_start"],
        other => bail!("there are no empty programs {other}"),
    };
    for mut program in open.open_object_mut().progs_mut() {
        let wanted = names.iter().any(|name| program.name() == *name);
        program.set_autoload(wanted);
    }
    let mut skel = open.load()?;
    let mut links = Vec::new();
    for name in names {
        let object = libbpf_rs::skel::Skel::object_mut(&mut skel);
        let mut programs = object.progs_mut();
        let program = programs.find(|program| program.name() == name).context("no such program")?;
        links.push(program.attach()?);
    }
    Ok(stopped.recv()?)
}

fn measure(plan: &BenchPlan) -> Result<()> {
    let loads = || plan.rows.iter().flat_map(|row| &row.loads);
    let disks = loads().map(|load| load.disks()).max().unwrap_or(1);
    load::create_disks(disks, loads().any(|load| load.threads() > 1))?;
    if let Some(root) = &plan.root {
        let mut sh = Command::new("sh");
        let done = sh.args(["-ec", MOUNTS, "sh"]).arg(root).args(&plan.headers).status()?;
        ensure!(done.success(), "{} could not be prepared: {done}", root.display());
    }
    let dir = PathBuf::from(MEMORY).join(format!("bench-{}", std::process::id()));
    fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
    let done = plan.rows.iter().try_for_each(|row| {
        let outcome = measure_row(plan, row, &dir).unwrap_or_else(|error| BenchOutcome {
            name: row.name.clone(),
            measured: Vec::new(),
            started: None,
            note: Some(format!("{error:#}")),
        });
        println!("{}", serde_json::to_string(&outcome)?);
        Ok(())
    });
    let _ = fs::remove_dir_all(&dir);
    load::remove_disks();
    done
}

fn measure_row(plan: &BenchPlan, row: &Row, dir: &Path) -> Result<BenchOutcome> {
    let mut outcome =
        BenchOutcome { name: row.name.clone(), measured: Vec::new(), started: None, note: None };
    if row.argv.is_empty() {
        for &load in &row.loads {
            outcome.measured.push(runs(plan, row, load, None)?);
        }
        return Ok(outcome);
    }
    let mut other = Command::new("sleep").arg("1000000").spawn().context("cannot start sleep")?;
    let result = beside_tracer(plan, row, dir, other.id(), &mut outcome);
    other.kill()?;
    other.wait()?;
    result.map(|()| outcome)
}

fn beside_tracer(
    plan: &BenchPlan,
    row: &Row,
    dir: &Path,
    other: u32,
    outcome: &mut BenchOutcome,
) -> Result<()> {
    let mut argv: Vec<String> = row.argv.clone();
    for argument in &mut argv {
        *argument = argument
            .replace("{reader}", &std::process::id().to_string())
            .replace("{other}", &other.to_string());
    }
    if row.package.is_none() {
        let file = Path::new(&row.argv[0]);
        let copy = dir.join(file.file_name().context("no file name")?);
        if !copy.exists() {
            fs::copy(file, &copy).with_context(|| format!("cannot copy {}", file.display()))?;
        }
        argv[0] = copy.to_string_lossy().into_owned();
    } else if let Some(root) = &plan.root {
        argv.splice(..0, ["chroot".into(), root.display().to_string()]);
    } else if !installed(&argv[0]) {
        let package = row.package.as_deref().unwrap_or_default();
        outcome.note = Some(format!("not installed (package {package})"));
        return Ok(());
    }
    // What compiles C takes a minute to start.
    if plan.warm && row.package.as_deref() != Some("bpfcc-tools") {
        Tracer::start(&argv, dir)?.end()?;
    }
    let mut tracer = Tracer::start(&argv, dir)?;
    let mut done = 0;
    for &load in &row.loads {
        let measured = runs(plan, row, load, Some(&mut tracer))?;
        done += u64::from(ios(plan, row))
            * measured.runs.len() as u64
            * u64::from(load != Load::Cached1m);
        outcome.measured.push(measured);
    }
    let (started, text, lines) = tracer.end()?;
    outcome.started = Some(started);
    if row.lines && lines < done {
        outcome.note = Some(format!("printed {lines} lines for {done} reads"));
    } else if row.package.is_none()
        && let Some(seen) = seen(&text)
        && seen < done
        && !text.contains("Filtered")
    {
        outcome.note = Some(format!("saw {seen} of {done} I/Os"));
    }
    Ok(())
}

/// How many direct reads, or reads of 4 KiB from the page cache, a run of a row has.
fn ios(plan: &BenchPlan, row: &Row) -> u32 {
    row.most.map_or(plan.ios, |most| plan.ios.min(most))
}

fn runs(
    plan: &BenchPlan,
    row: &Row,
    load: Load,
    mut tracer: Option<&mut Tracer>,
) -> Result<Measured> {
    let mut reader = match load.threads() {
        1 => Some(load::Reader::open(load, plan.fio)?),
        _ => None,
    };
    let mut run = |reads: u32| {
        let (reads, mut run) = match &mut reader {
            Some(reader) => (reader.ios(reads), reader.run(reader.ios(reads))?),
            None => (reads, load::by_threads(load, reads)?),
        };
        if let Some(tracer) = &mut tracer {
            run.later = tracer.catch_up()?.as_nanos() as f64 / f64::from(reads);
        }
        anyhow::Ok(run)
    };
    run(WARM_UP.min(ios(plan, row)))?;
    let runs = (0..plan.runs).map(|_| run(ios(plan, row)));
    Ok(Measured { load, runs: runs.collect::<Result<_>>()? })
}

fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    program.starts_with('/') && Path::new(program).is_file()
        || std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// How many I/Os a program of the workshop says it has seen.
fn seen(text: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (number, what) = line.trim().split_once(' ')?;
        let counts = ["bios completed", "requests completed", "reads through the page cache"];
        counts.iter().any(|count| what.starts_with(count)).then(|| number.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_has_seen() {
        let text = "a: 5 bios\n      97 bios completed\n       0 in flight\n";
        assert_eq!(seen(text), Some(97));
        assert_eq!(seen("No I/O was seen: 0 bios completed."), None);
    }
}
