//! In the guest: makes an incident, lets the learner look for it, and shows the way. `cargo lesson incident`, `answer`
//! and `cured` start it.

mod app;
mod cure;
mod machine;
mod scene;
mod solve;
mod ticket;
mod way;

use std::{
    fs,
    io::{Read, Write},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::Command,
    thread,
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};

use incidents::{
    NOT_YET, RECORD, WAY,
    measured::{self, Activity, Record},
    plan::{Fault, IncidentPlan, Model, SaidAnswer, Service},
    why,
};

use crate::{
    machine::is_verbose,
    scene::{PERIOD, Scene},
    way::Walked,
};

/// Not all incidents are solved, or this one is not cured.
const WRONG: i32 = 1;
/// This machine cannot make this incident.
const CANNOT: i32 = 3;
/// Slow requests that an incident has at least, in 10 s.
const ENOUGH: u64 = 10;

#[derive(Parser)]
enum Cli {
    /// Makes the incident of a seed, and starts a shell
    Begin(Seeded),
    /// Judges an answer, part by part
    Judge {
        #[command(flatten)]
        seeded: Seeded,
        #[command(flatten)]
        said: SaidAnswer,
    },
    /// Shows the way to the right answer
    Walkthrough(Seeded),
    /// Measures the service again, and says whether it is cured
    Cured(Seeded),
    /// Makes incidents, and looks whether our own tools find what is wrong
    Prove {
        /// These faults [default: all]
        #[arg(long = "fault")]
        faults: Vec<Fault>,
        /// The fault of this number only, counted again from the first after the last
        #[arg(long, conflicts_with = "faults")]
        number: Option<usize>,
        /// So many seeds of each
        #[arg(long, default_value_t = 1)]
        seeds: usize,
        /// The level
        #[arg(long, default_value_t = 2)]
        level: u8,
    },
}

#[derive(clap::Args, Clone, Copy)]
struct Seeded {
    /// What the incident is made of
    #[arg(long)]
    seed: u64,
    /// How hard it is
    #[arg(long, default_value_t = 2)]
    level: u8,
}

fn main() {
    if let Err(error) = run() {
        eprintln!("{error:#}");
        std::process::exit(1);
    }
}

fn run() -> Result<()> {
    let own = std::env::current_exe().context("this program's file")?;
    let name = own.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if name != env!("CARGO_PKG_NAME") {
        let mut orders = String::new();
        std::io::stdin().read_to_string(&mut orders)?;
        return app::run(&name, &serde_json::from_str(&orders)?);
    }
    let cli = Cli::parse();
    // Its faults are made of this machine's disks and settings.
    if !Path::new("/run/bpf-vm").exists() {
        bail!("this runs in the virtual machine only: cargo lesson incident");
    }
    match cli {
        Cli::Begin(Seeded { seed, level }) => begin(seed, level),
        Cli::Judge { seeded, said } => judge(&seeded.plan(), &said),
        Cli::Walkthrough(_) => {
            print!("{}", fs::read_to_string(WAY).with_context(|| format!("cannot read {WAY}"))?);
            Ok(())
        }
        Cli::Cured(seeded) => cured(&seeded.plan()),
        Cli::Prove { faults, number, seeds, level } => {
            let all = Fault::value_variants();
            let faults = match number {
                Some(number) => vec![all[number % all.len()]],
                None if faults.is_empty() => all.to_vec(),
                None => faults,
            };
            prove(&faults, seeds, level)
        }
    }
}

impl Seeded {
    fn plan(&self) -> IncidentPlan {
        IncidentPlan::from_seed(self.seed, self.level)
    }
}

/// What was measured while nothing was wrong, and for whom: a proof uses it again.
type Usual = Option<(Service, Model, Activity)>;

/// Makes an incident. What was measured, if it shows now, and only now; else why not.
fn make(plan: &IncidentPlan, usual: &mut Usual) -> Result<Result<Record, String>> {
    let is_same = |(service, sheet, _): &&_| (*service, *sheet) == (plan.service, plan.sheet);
    let usual = match usual.as_ref().filter(is_same) {
        Some((.., activity)) => activity.clone(),
        None => {
            eprintln!("It is made as it should be, and looked at for a while.");
            Scene::make(plan, false)?;
            thread::sleep(PERIOD / 2);
            let activity = scene::measure()?;
            scene::end();
            *usual = Some((plan.service, plan.sheet, activity.clone()));
            activity
        }
    };
    eprintln!("It is made with what is wrong, and looked at again.");
    Scene::make(plan, true)?;
    thread::sleep(PERIOD / 2);
    let fault = scene::measure()?;
    let of = |activity: &Activity| {
        let activity = activity.of(plan.service);
        (activity.slow(), activity.requests())
    };
    let ((without, all), (with, all_with)) = (of(&usual), of(&fault));
    let measured = format!(
        "{without} of {all} requests are slow without what is wrong, {with} of {all_with} with it"
    );
    if is_verbose() {
        eprintln!("{plan:?}: {measured}");
    }
    // A service that waits makes fewer requests.
    if with >= ENOUGH && without * all_with * 4 <= with * all {
        let settings = way::settings(plan)?;
        return Ok(Ok(Record { usual, fault, settings, ..Record::default() }));
    }
    scene::end();
    Ok(Err(measured))
}

/// Makes an incident; where its fault does not show at first, again, with the fault as bad as it gets.
fn make_until_it_shows(mut plan: IncidentPlan, usual: &mut Usual) -> Result<Record> {
    let mut why = String::new();
    for _ in 0..3 {
        match make(&plan, usual)? {
            Ok(record) => return Ok(record),
            Err(measured) => why = measured,
        }
        plan.strength = 99;
        *usual = None;
    }
    bail!(
        "this machine cannot make the incident of this seed ({why}): too much else runs on it, or it is \
         too quick; choose another one with --seed"
    )
}

/// Goes the way while the fault is there, and keeps it, with what was measured: whoever removes the fault first still
/// sees how it was.
fn record(plan: &IncidentPlan, record: &mut Record) -> Result<Walked> {
    let walked = way::walk(plan, &record.usual, &record.fault)?;
    record.parts.clone_from(&walked.parts);
    for (file, text) in [(WAY, walked.text.clone()), (RECORD, serde_json::to_string(record)?)] {
        let _ = fs::remove_file(file);
        let mut file =
            fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file)?;
        file.write_all(text.as_bytes())?;
    }
    Ok(walked)
}

/// What was recorded of the incident that runs.
fn recorded() -> Result<Record> {
    let text = fs::read_to_string(RECORD).with_context(|| format!("cannot read {RECORD}"))?;
    serde_json::from_str(&text).with_context(|| format!("{RECORD} is not what was written there"))
}

fn begin(seed: u64, level: u8) -> Result<()> {
    let plan = IncidentPlan::from_seed(seed, level);
    // A shell that is there before would see the disks without the fault, and could keep them from going.
    fs::write(NOT_YET, "The incident is being made: this shell begins with its ticket.\n")?;
    let made = make_until_it_shows(plan, &mut None).and_then(|mut made| {
        record(&plan, &mut made)?;
        Ok(made)
    });
    let shown = made.map(|record| ticket::show(&plan, level, record.usual.rate(plan.service)));
    fs::remove_file(NOT_YET)?;
    shown.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        std::process::exit(CANNOT);
    })?;
    // An hour without a command ends it.
    let error = Command::new("bash").env("TMOUT", "3600").exec();
    Err(error).context("cannot start bash")
}

/// Prints each part of an answer, and why it is wrong.
fn judge(plan: &IncidentPlan, said: &SaidAnswer) -> Result<()> {
    for (part, reason) in why::judged(plan, &recorded()?, said) {
        let mark = if part.is_right { "✓" } else { "✗" };
        let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
        println!("  {mark} {:<8} {}{reason}", part.part, part.said);
    }
    Ok(())
}

/// Prints what the service does now, beside what was usual, and what it did with the fault.
fn cured(plan: &IncidentPlan) -> Result<()> {
    let (text, is_cured) = measured::cured(&recorded()?, &scene::measure()?, plan.service);
    println!("{text}");
    std::process::exit(if is_cured { 0 } else { WRONG });
}

/// Makes an incident, finds out what is wrong, goes the way that a learner is shown, and removes the cause.
fn solve(plan: IncidentPlan, usual: &mut Usual) -> Result<()> {
    let mut made = make_until_it_shows(plan, usual)?;
    let (found, right) = (solve::solve(plan.service, plan.sheet.ms)?, plan.answer());
    ensure!(found == right, "found {found:?}, right is {right:?}");
    let walked = record(&plan, &mut made)?;
    if is_verbose() {
        eprintln!("{}", walked.text);
    }
    ensure!(walked.disagreements.is_empty(), "{}", walked.disagreements.join("\n"));
    cure::apply(&plan)?;
    // What already waits is still slow, a setting may take some seconds, and a page cache fills page by page.
    let mut text = String::new();
    for _ in 0..5 {
        thread::sleep(PERIOD / 2);
        let (now, is_cured) = measured::cured(&recorded()?, &scene::measure()?, plan.service);
        if is_verbose() {
            eprintln!("{now}");
        }
        if is_cured {
            return Ok(());
        }
        text = now;
    }
    bail!("its cure does not cure it:\n{text}")
}

fn prove(faults: &[Fault], seeds: usize, level: u8) -> Result<()> {
    let (mut tried, mut wrong, mut usual) = (0, 0, None);
    for fault in faults {
        let of_fault = (0..).filter(|&seed| IncidentPlan::from_seed(seed, level).fault == *fault);
        for seed in of_fault.take(seeds) {
            let result = solve(IncidentPlan::from_seed(seed, level), &mut usual);
            scene::end();
            tried += 1;
            match result {
                Ok(()) => println!("✓ {fault:?}, seed {seed}"),
                Err(error) => {
                    wrong += 1;
                    println!("✗ {fault:?}, seed {seed}: {error:#}");
                }
            }
        }
    }
    println!("{} of {tried} incidents are solved", tried - wrong);
    std::process::exit(if wrong == 0 { 0 } else { WRONG });
}
