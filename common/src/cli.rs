//! The command line, the end of a run, the exit codes.

use std::{
    fmt,
    io::{self, Write},
    process::ExitCode,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, FromArgMatches, Parser};

use crate::{stdout, trace_pipe};

/// The options that all stages have, and those of the stage's own.
#[derive(Parser, Debug)]
pub struct Cli<Own: Options = NoOptions> {
    /// How long to trace: 10s, 2m, 500ms [default: until Ctrl-C]
    #[arg(long, value_name = "TIME", value_parser = duration, allow_hyphen_values = true)]
    pub duration: Option<Duration>,
    /// Show what libbpf and the verifier say
    #[arg(short, long)]
    pub verbose: bool,
    /// What only this stage has.
    #[command(flatten)]
    pub own: Own,
}

/// The command line of a stage that can do without its event lines.
pub type QuietCli = Cli<Quiet>;

/// A stage's own options.
pub trait Options: Args {
    /// Whether event lines are wanted.
    fn quiet(&self) -> bool {
        false
    }

    /// How many entries the map `starts` has room for, where it is not to be as in the program.
    fn in_flight(&self) -> Option<u32> {
        None
    }
}

/// None but the common ones.
#[derive(Args, Debug)]
pub struct NoOptions {}

impl Options for NoOptions {}

/// `--quiet`.
#[derive(Args, Debug)]
pub struct Quiet {
    /// No event lines: the program is loaded without the code for them
    #[arg(short, long)]
    pub quiet: bool,
    /// The size of the map.
    #[command(flatten)]
    pub room: Room,
}

impl Options for Quiet {
    fn quiet(&self) -> bool {
        self.quiet
    }

    fn in_flight(&self) -> Option<u32> {
        self.room.in_flight
    }
}

/// `--in-flight`.
#[derive(Args, Debug)]
pub struct Room {
    /// How many may be on their way at once: for more, the map has no room, and they count as dropped
    /// [default: 16384]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    #[arg(allow_negative_numbers = true)]
    pub in_flight: Option<u32>,
}

/// This machine cannot run the stage; says what is missing and what to do. Exit code 3.
#[derive(Debug)]
pub struct Unsupported(pub String);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unsupported {}

/// Wrong usage.
const USAGE: u8 = 2;
/// This machine cannot run it.
const UNSUPPORTED: u8 = 3;

const AFTER_HELP: &str = "\
Ends on Ctrl-C and SIGTERM as after --duration, with its results.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 this machine cannot run it.";

/// The `main` of a stage: reads the command line, lets Ctrl-C, SIGTERM and SIGHUP end the run in
/// good order, runs, and turns an error into one message and an exit code.
///
/// `name` stands before messages, `about` is the first line of `--help`.
pub fn main<Own: Options>(
    name: &'static str,
    about: &'static str,
    run: fn(&Cli<Own>) -> Result<()>,
) -> ExitCode {
    let mut command =
        Cli::<Own>::command().name(name).about(about).after_help(AFTER_HELP).version("0.1.0");
    let parsed = command
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| Cli::<Own>::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" too, on stdout; a reader who went away is none.
            error.print().ok();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    NAME.get_or_init(|| name);
    let result = ctrlc::set_handler(|| STOPPED.store(true, Ordering::SeqCst))
        .context("no handler for Ctrl-C could be set")
        .and_then(|()| stdout::passed_on(|| run(&cli)));
    trace_pipe::close();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("{name}: {error:#}\n"));
            let unsupported = error.downcast_ref::<Unsupported>().is_some();
            if unsupported { ExitCode::from(UNSUPPORTED) } else { ExitCode::FAILURE }
        }
    }
}

static NAME: OnceLock<&str> = OnceLock::new();
static STOPPED: AtomicBool = AtomicBool::new(false);
static START: OnceLock<Instant> = OnceLock::new();

/// Whether the user has asked for the end (Ctrl-C, SIGTERM, SIGHUP).
pub fn stopped() -> bool {
    STOPPED.load(Ordering::SeqCst)
}

/// Asks for the end, as Ctrl-C does.
pub(crate) fn stop() {
    STOPPED.store(true, Ordering::SeqCst);
}

/// Says on stderr that the programs are at work; from here on, `--duration` runs.
pub(crate) fn say_tracing<Own: Options>(cli: &Cli<Own>) {
    START.get_or_init(Instant::now);
    let name = NAME.get().unwrap_or(&"stage");
    match cli.duration {
        Some(duration) => {
            say(&format!("{name}: tracing for {}\n", humantime::format_duration(duration)))
        }
        None => say(&format!("{name}: tracing; Ctrl-C ends it\n")),
    }
}

/// Writes to stderr. Where nobody reads it any more (`2>&1 | head`), `eprint!` panics.
pub(crate) fn say(text: &str) {
    io::stderr().write_all(text.as_bytes()).ok();
}

/// Whether the run is over: `--duration` since the programs were attached, or [`stopped`].
pub fn deadline<Own: Options>(cli: &Cli<Own>) -> bool {
    let start = START.get_or_init(Instant::now);
    stopped() || cli.duration.is_some_and(|duration| start.elapsed() >= duration)
}

/// Waits for the end of the run.
pub fn wait<Own: Options>(cli: &Cli<Own>) {
    while !deadline(cli) {
        thread::sleep(Duration::from_millis(50));
    }
}

/// The longest time that is taken: more is a slip of the keyboard.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

fn duration(text: &str) -> Result<Duration, String> {
    let hint = "give a number and a unit, like 10s, 500ms or 2m";
    let duration = humantime::parse_duration(text).map_err(|e| format!("{e}; {hint}"))?;
    match duration {
        Duration::ZERO => Err(format!("nothing can be seen in no time; {hint}")),
        d if d > LONGEST => {
            Err(format!("more than a year; without --duration it runs until Ctrl-C; {hint}"))
        }
        d => Ok(d),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_unit_and_an_end() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("1m 500ms"), Ok(Duration::from_millis(60_500)));
        for wrong in ["", "10", "-5s", "0s", "9999999y", "99999999999999999999999s", "ten"] {
            let error = duration(wrong).unwrap_err();
            assert!(error.contains("10s"), "{wrong}: {error}");
        }
    }

    #[test]
    fn the_command_lines_are_sound() {
        Cli::<NoOptions>::command().debug_assert();
        QuietCli::command().debug_assert();
        assert!(QuietCli::parse_from(["stage03", "-q"]).own.quiet());
        assert!(Cli::<NoOptions>::try_parse_from(["stage01", "-q"]).is_err());
    }
}
