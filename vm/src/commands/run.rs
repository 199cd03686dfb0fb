//! `cargo vm run`, and the runner, through which cargo starts what it has built.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;
use common_base::duration;
use workshop::fail::{USAGE, fail};
use workshop::judging::Judging;
use workshop::say;

use crate::cargo::programs::{self, named_in, texts};
use crate::cargo::{build_all, build_guest_tests, is_built};
use crate::commands::launch::{self, GuestProgram};
use crate::commands::test::DISKS;
use crate::machine::qemu::Guest;
use crate::run::{For, GuestOptions, Run};

/// What to run, and how.
#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    guest: GuestOptions,
    /// Stop the guest after this time and exit with 125 (10s, 2m, 1h)
    #[arg(long, value_parser = duration)]
    timeout: Option<Duration>,
    /// Run no workload beside a stage
    #[arg(long)]
    pub idle: bool,
    /// Run the workload beside a command, too
    #[arg(long, conflicts_with = "idle")]
    workload: bool,
    /// Emulate one CPU whose clock advances by 1 ns for each instruction: exact costs
    #[arg(long, hide = true)]
    icount: bool,
    /// A program of the workspace (stage06, mine-04), or a command of the guest, with its arguments.
    /// Programs that a command's arguments name (bash -c 'stage06 | head') are built before
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

impl Options {
    fn guest(&self, run: &Run) -> Result<Guest> {
        let guest = run.guest(&self.guest)?;
        let cpus = if self.icount { 1 } else { guest.cpus };
        Ok(Guest { timeout: self.timeout, icount: self.icount, cpus, ..guest })
    }
}

/// Runs the command. Returns the program's status.
pub fn main(run: &Run, options: &Options) -> Result<i32> {
    let (program, args) = options.program.split_first().context("no program")?;
    let name = program.to_string_lossy();
    let is_path = name.contains('/');
    // A file that cargo has built, like the guest tests, comes from one of our own commands.
    let none = is_path && is_built(&name);
    let programs = if none { &[][..] } else { run.programs()? };
    let Some(program) = programs.iter().find(|program| program.is_called(&name)) else {
        if !is_path && (name.starts_with("stage") || name.starts_with("mine-")) {
            return Err(no_program(&name, programs));
        }
        return other(run, options, &named_in(programs, args));
    };
    // As with cargo, `run stage06 -- --quiet` is `run stage06 --quiet`.
    let args = args.strip_prefix(&[OsString::from("--")]).unwrap_or(args).to_vec();
    run.need_packages(For::Run)?;
    if launch::asks_for_help(&args) {
        // Printed here, by a program for this machine.
        return here(&program.build(&run.cargo)?, &args);
    }
    let guest = options.guest(run)?;
    let file = program.build(run.guests()?)?;
    let program =
        GuestProgram { workload: !options.idle, ..GuestProgram::built(file, args, Some(program)) };
    if let Some(status) = launch::check_usage(&program, run.arch)? {
        return Ok(status);
    }
    Ok(launch::run(run, &guest, &program)?.status)
}

/// Runs a command of the guest, beside which the workload runs only where that is asked for.
fn other(run: &Run, options: &Options, named: &[&programs::WorkshopProgram]) -> Result<i32> {
    run.need_packages(For::Run)?;
    if options.guest.rootfs.is_none() {
        run.need_typed(&texts(&options.program))?;
    }
    let guest = options.guest(run)?;
    // Or the guest would run what was built before the last edit.
    for program in named {
        program.build(run.guests()?)?;
    }
    if !named.is_empty() && !options.idle && !options.workload {
        say!("running this command alone, without the workload (--workload starts it)");
    }
    let program =
        GuestProgram { workload: options.workload, ..GuestProgram::other(options.program.clone()) };
    Ok(launch::run(run, &guest, &program)?.status)
}

/// Wrong usage: a name that a stage or an attempt could have, and none has.
fn no_program(name: &str, programs: &[programs::WorkshopProgram]) -> anyhow::Error {
    let is_attempt = name.starts_with("mine-");
    let programs = programs.iter().filter(|program| program.is_attempt == is_attempt);
    let names: Vec<&str> = programs.map(|program| program.name.as_str()).collect();
    let message = match (is_attempt, &*names) {
        (false, _) => format!("the programs of this workspace are {}", names.join(", ")),
        (true, []) => "you have no attempts yet: cargo lesson start".to_owned(),
        (true, _) => format!("your attempts are {}", names.join(", ")),
    };
    fail(USAGE, format!("there is no program {name}; {message}"))
}

/// Runs a program on the host, in place of this process.
fn here(file: &Path, args: &[OsString]) -> Result<i32> {
    use std::os::unix::process::CommandExt;
    let error = std::process::Command::new(file).args(args).exec();
    Err(error).with_context(|| format!("cannot start {}", file.display()))
}

/// Runs what cargo has built for this machine: a program, or the guest tests.
pub fn runner(run: &Run, argv: &[OsString]) -> Result<i32> {
    let (file, args) = argv.split_first().context("no program")?;
    let file = PathBuf::from(file);
    let file = file.canonicalize().with_context(|| file.display().to_string())?;
    let args = args.to_vec();
    if launch::asks_for_help(&args) {
        return here(&file, &args);
    }
    let is_test = file.parent().is_some_and(|dir| dir.ends_with("deps"));
    run.need_packages(if is_test { For::Test } else { For::Run })?;
    let mut options = GuestOptions::with_kernel(std::env::var("VM_KERNEL").ok());
    if is_test {
        options.disks = DISKS.to_vec();
        let guest = run.guest(&options)?;
        build_all(run.guests()?)?;
        let file = if run.arch.is_foreign() { build_guest_tests(run.guests()?)? } else { file };
        let env = vec![Judging::by(&file, run.workspace()).to_env()?];
        let program = GuestProgram { env, ..GuestProgram::built(file, args, None) };
        return Ok(launch::run(run, &guest, &program)?.status);
    }
    let name = file.file_name().unwrap_or_default();
    let known = run.programs()?.iter().find(|program| name == program.name.as_str());
    let file = match known {
        Some(program) if run.arch.is_foreign() => program.build(run.guests()?)?,
        _ => file,
    };
    let program =
        GuestProgram { workload: known.is_some(), ..GuestProgram::built(file, args, known) };
    if let Some(status) = launch::check_usage(&program, run.arch)? {
        return Ok(status);
    }
    Ok(launch::run(run, &run.guest(&options)?, &program)?.status)
}
