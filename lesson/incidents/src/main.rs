//! In the guest: makes an incident, lets the learner look for it, and shows the way. `cargo lesson incident` and
//! `cargo lesson answer` start it.

mod app;
mod machine;
mod scene;
mod solve;
mod ticket;

use std::{fs, io::Read, os::unix::process::CommandExt, path::Path, process::Command};

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, ValueEnum};

use incidents::{
    NOT_YET,
    plan::{Fault, IncidentPlan},
};

use crate::{machine::is_verbose, scene::Scene};

/// Not all incidents are solved.
const WRONG: i32 = 1;
/// This machine cannot make this incident.
const CANNOT: i32 = 3;
/// Slow requests that an incident has at least, in 10 s.
const ENOUGH: u64 = 10;

#[derive(Parser)]
enum Cli {
    /// Makes the incident of a seed, and starts a shell
    Begin(Seeded),
    /// Shows the way to the right answer
    Walkthrough(Seeded),
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
        Cli::Walkthrough(Seeded { seed, level }) => {
            ticket::walkthrough(&IncidentPlan::from_seed(seed, level), &mut std::io::stdout())
        }
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

/// By service: its slow requests while nothing is wrong, of how many.
type Usual = [Option<(u64, u64)>; 3];

/// Makes an incident. How many requests a second its service had before, if it shows now, and only now; else why not.
fn make(plan: &IncidentPlan, usual: &mut Usual) -> Result<Result<u64, String>> {
    let known = &mut usual[plan.service as usize];
    if known.is_none() {
        eprintln!("It is made as it should be, and looked at for a while.");
        *known = Some(Scene::make(plan, false)?.measure(plan.service)?);
        scene::end();
    }
    let (without, all) = known.unwrap_or_default();
    eprintln!("It is made with what is wrong, and looked at again.");
    let scene = Scene::make(plan, true)?;
    let (with, all_with) = scene.measure(plan.service)?;
    let measured = format!(
        "{without} of {all} requests are slow without what is wrong, {with} of {all_with} with it"
    );
    if is_verbose() {
        eprintln!("{plan:?}: {measured}");
    }
    // A service that waits makes fewer requests.
    if with >= ENOUGH && without * all_with * 4 <= with * all {
        return Ok(Ok(all / scene::PERIOD.as_secs()));
    }
    scene::end();
    Ok(Err(measured))
}

/// Makes an incident; where its fault does not show at first, again, with the fault as bad as it gets.
fn make_until_it_shows(mut plan: IncidentPlan, usual: &mut Usual) -> Result<u64> {
    let mut why = String::new();
    for _ in 0..3 {
        match make(&plan, usual)? {
            Ok(rate) => return Ok(rate),
            Err(measured) => why = measured,
        }
        plan.strength = 99;
        *usual = Usual::default();
    }
    bail!(
        "this machine cannot make the incident of this seed ({why}): too much else runs on it, or it is \
         too quick; choose another one with --seed"
    )
}

fn begin(seed: u64, level: u8) -> Result<()> {
    let plan = IncidentPlan::from_seed(seed, level);
    // A shell that is there before would see the disks without the fault, and could keep them from going.
    fs::write(NOT_YET, "The incident is being made: this shell begins with its ticket.\n")?;
    let made = make_until_it_shows(plan, &mut Usual::default());
    let shown = made.map(|rate| ticket::show(&plan, level, rate));
    fs::remove_file(NOT_YET)?;
    shown.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        std::process::exit(CANNOT);
    })?;
    // An hour without a command ends it.
    let error = Command::new("bash").env("TMOUT", "3600").exec();
    Err(error).context("cannot start bash")
}

/// Makes an incident, finds out what is wrong, and goes the way that a learner is shown.
fn solve(plan: IncidentPlan, usual: &mut Usual) -> Result<()> {
    make_until_it_shows(plan, usual)?;
    let (found, right) = (solve::solve(plan.service)?, plan.answer());
    ensure!(found == right, "found {found:?}, right is {right:?}");
    let mut text = Vec::new();
    let result = ticket::walkthrough(&plan, &mut text);
    if is_verbose() {
        eprintln!("{}", String::from_utf8_lossy(&text));
    }
    result
}

fn prove(faults: &[Fault], seeds: usize, level: u8) -> Result<()> {
    let (mut tried, mut wrong, mut usual) = (0, 0, Usual::default());
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
