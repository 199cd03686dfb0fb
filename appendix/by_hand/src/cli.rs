//! What the four programs have in common for the user: options, signals, messages, exit codes.

use std::{
    fs,
    io::{self, Write},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser};
use common_base::{PARSE_ONLY, cgroup_lacks, closed_stdout, duration, unmounted};

use crate::{
    message::{Unsupported, Usage, say},
    tracefs,
};

/// The end of `--help`.
pub const AFTER_HELP: &str = "\
Ctrl-C and SIGTERM end the program as --duration does: it prints its results.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 this machine cannot run it.";

/// Holds the release of the running kernel.
const RELEASE: &str = "/proc/sys/kernel/osrelease";

/// How much memory a program takes, in bytes.
const NEEDS: u64 = 8 << 20;

/// The options of all programs.
#[derive(Args, Debug)]
pub struct Common {
    /// How long to trace: 10s, 2m, 500ms [default: until Ctrl-C]
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    pub duration: Option<Duration>,
    /// Show the verifier's log of each program
    #[arg(short, long)]
    pub verbose: bool,
}

/// The name of a system call, as tracefs writes it.
pub fn syscall(text: &str) -> Result<String, String> {
    if tracefs::is_name(text) {
        Ok(text.to_owned())
    } else {
        Err("a system call's name has letters, digits and underscores: openat".into())
    }
}

/// A run: when it is to end.
pub struct Run {
    name: &'static str,
    stop: Arc<AtomicBool>,
    duration: Option<Duration>,
    end: Option<Instant>,
}

impl Run {
    /// Says on stderr that the programs are attached; `--duration` counts from here.
    pub fn begins(&mut self) {
        let name = self.name;
        match self.duration {
            Some(time) => {
                say(&format!("{name}: tracing for {}\n", humantime::format_duration(time)));
            }
            None => say(&format!("{name}: tracing until Ctrl-C\n")),
        }
        self.end = self.duration.and_then(|duration| Instant::now().checked_add(duration));
    }

    /// Whether the time has passed, or Ctrl-C, SIGTERM or SIGHUP has come.
    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::SeqCst) || self.end.is_some_and(|end| Instant::now() >= end)
    }
}

/// The `main` of a program: reads the command line, checks the machine, runs, and turns an error into
/// one message and an exit code.
pub fn main<Cli: Parser + AsRef<Common>>(
    name: &'static str,
    run: impl FnOnce(&Cli, &mut Run) -> Result<()>,
) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help is an "error" too, on stdout. Nobody may be reading.
            error.print().ok();
            return ExitCode::from(if error.use_stderr() { 2 } else { 0 });
        }
    };
    if std::env::var_os(PARSE_ONLY).is_some() {
        return ExitCode::SUCCESS;
    }
    match start(name, &cli, run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if reader_is_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{name}: {error:#}\n"));
            let unsupported = error.downcast_ref::<Unsupported>().is_some();
            let usage = error.downcast_ref::<Usage>().is_some();
            ExitCode::from(if unsupported { 3 } else { 1 + u8::from(usage) })
        }
    }
}

fn start<Cli: AsRef<Common>>(
    name: &'static str,
    cli: &Cli,
    run: impl FnOnce(&Cli, &mut Run) -> Result<()>,
) -> Result<()> {
    if let Some(closed) = closed_stdout() {
        bail!(closed);
    }
    if let Some(lack) = unmounted() {
        return Err(Unsupported(lack.into()).into());
    }
    if let Some(lack) = cgroup_lacks(NEEDS) {
        return Err(Unsupported(lack).into());
    }
    check_release(fs::read_to_string(RELEASE).context(RELEASE)?.trim())?;
    // SAFETY: asks for a number.
    if unsafe { libc::geteuid() } != 0 {
        let message = "only root may load BPF programs: start it with sudo, or in the VM with \
                       cargo vm run";
        return Err(Unsupported(message.into()).into());
    }
    tracefs::tracefs()?;
    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    ctrlc::set_handler(move || handler.store(true, Ordering::SeqCst))
        .context("no handler for Ctrl-C could be installed")?;
    let duration = cli.as_ref().duration;
    run(cli, &mut Run { name, stop, duration, end: None })?;
    io::stdout().flush().context("stdout")
}

/// Fails where the kernel of this release is older than 6.1.
fn check_release(release: &str) -> Result<(), Unsupported> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < (6, 1) => Err(Unsupported(format!(
            "this kernel ({release}) is older than 6.1, the oldest one that the workshop supports: \
             boot a newer one, or start the program in the VM with cargo vm run"
        ))),
        _ => Ok(()),
    }
}

/// Whether writing failed because stdout's reader has gone away (`| head`).
fn reader_is_gone(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_unit() {
        assert_eq!(duration("1m 500ms"), Ok(Duration::from_millis(60_500)));
        for wrong in ["", "10", "-5s", "0s", "9999999y"] {
            assert!(duration(wrong).unwrap_err().contains("10s"), "{wrong}");
        }
    }

    #[test]
    fn the_oldest_kernel_is_6_1() {
        for supported in ["6.1.0-50-amd64", "6.1", "6.12.107+deb13-amd64", "7.0-rc1", "10.0.0"] {
            assert!(check_release(supported).is_ok(), "{supported}");
        }
        for old in ["5.10.0-32-amd64", "5.19", "6.0.12-generic", "4.4.0"] {
            let Unsupported(message) = check_release(old).unwrap_err();
            let beginning = format!("this kernel ({old}) is older than 6.1, ");
            assert!(message.starts_with(&beginning), "{message}");
        }
    }
}
