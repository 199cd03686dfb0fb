//! `cargo lesson`: exercises that a machine checks. The judges are the guest tests, with the
//! learner's program in the place of the stage.

mod attempt;
mod check;
mod claims;
mod class;
mod exercise;
mod experiments;
mod explain;
mod incident;
mod judges;
mod lesson;
mod mutants;
mod next;
mod prove;
mod state;
mod verdicts;

use std::{net::SocketAddr, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};
use vm::{
    arch::Arch,
    commands::background::{BackgroundGuest, Hidden},
    run::Run,
};
use workshop::say;

use crate::{check::Check, lesson::Lesson, prove::Prove};

/// Exercises that a machine checks. Without a command: where you are, and what to do next.
///
/// Exit codes: 0 done (of several steps: the one that is judged), 1 not yet, 2 wrong usage, 125 the virtual machine died.
#[derive(Parser)]
#[command(name = "cargo lesson", bin_name = "cargo lesson")]
struct Cli {
    /// The virtual machine's architecture [default: this machine's]
    #[arg(long, global = true, env = "VM_ARCH", value_enum)]
    arch: Option<Arch>,
    #[command(subcommand)]
    command: Option<Cmd>,
}

#[derive(Subcommand)]
enum Cmd {
    /// Begin an exercise, or return to it: copies its starting point to mine/ID
    Start {
        /// 04, or the name of an exercise [default: the first that is not done]
        id: Option<String>,
    },
    /// Judge your attempt, in the virtual machine
    Check(Check),
    /// Show the next of three hints
    Hint {
        /// The exercise [default: the one that was started last]
        id: Option<String>,
    },
    /// Show the differences between your attempt and the answer, once it is done
    Solution {
        /// The exercise [default: the one that was started last]
        id: Option<String>,
        /// Show them before it is done
        #[arg(long)]
        anyhow: bool,
    },
    /// Start over; the attempt is kept in mine.old/
    Reset {
        /// The exercise, which becomes the current one [default: the one that was started last]
        id: Option<String>,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// End the virtual machine that `check` keeps
    Stop,
    /// Find out what is wrong with a machine: disks, services, and a fault that a number determines
    Incident(incident::IncidentOptions),
    /// Say what is wrong, all of it or a part, and learn whether that is right
    Answer(incident::AnswerOptions),
    /// Measure the service of the incident again: have you removed the cause?
    Cured,
    /// Show on a page where everybody in a class is, until Ctrl-C
    Class {
        /// Where to listen; 0.0.0.0:3001 lets other machines reach it
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:3001")]
        listen: SocketAddr,
        /// A name of this machine that learners join, beside its host name; may be given several times
        #[arg(long, value_name = "NAME")]
        host: Vec<String>,
    },
    /// Report your verdicts to a class: exercise, judge, minutes, hints, incidents; never code
    Join {
        /// The address that the class listens on, such as 192.168.1.7:3001
        address: String,
        /// What the page calls you
        name: String,
    },
    /// Report nothing any more
    Leave,
    /// Prove that every exercise can be failed and passed, and every README's experiment too
    #[command(hide = true)]
    Prove(Prove),
    #[command(flatten)]
    Hidden(Hidden),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Cmd::Hidden(hidden)) = cli.command {
        vm::commands::main(!matches!(hidden, Hidden::Agent), || hidden.main(|| Run::new(cli.arch)));
    }
    // A reader that goes (`cargo lesson | head -1`) ends this program quietly, as it does others.
    // SAFETY: no other thread runs yet, and the default action needs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    match vm::commands::end_in_order().and_then(|()| run(cli)) {
        Ok(code) => code,
        Err(error) => {
            vm::commands::end_if_interrupted();
            say!("{error:#}");
            ExitCode::from(workshop::fail::code(&error) as u8)
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let mut lesson = Lesson::open(cli.arch)?;
    match cli.command {
        None => attempt::status(&lesson)?,
        Some(Cmd::Start { id }) => attempt::start(&mut lesson, id)?,
        Some(Cmd::Check(check)) => return check.run(&mut lesson),
        Some(Cmd::Hint { id }) => attempt::hint(&mut lesson, id.as_deref())?,
        Some(Cmd::Solution { id, anyhow }) => attempt::solution(&lesson, id.as_deref(), anyhow)?,
        Some(Cmd::Reset { id, yes }) => attempt::reset(&mut lesson, id.as_deref(), yes)?,
        Some(Cmd::Prove(options)) => return prove::prove(&lesson.run()?, &options),
        Some(Cmd::Stop) => match BackgroundGuest::new(&lesson.run()?, None).stop()? {
            true => workshop::outln!("The virtual machine has ended."),
            false => workshop::outln!("No virtual machine is running."),
        },
        Some(Cmd::Incident(options)) => return incident::begin(&mut lesson, &options),
        Some(Cmd::Answer(said)) => return incident::answer(&mut lesson, &said),
        Some(Cmd::Cured) => return incident::cured(&mut lesson),
        Some(Cmd::Class { listen, host }) => class::serve(&lesson.exercises, listen, &host)?,
        Some(Cmd::Join { address, name }) => class::join(&mut lesson, address, name)?,
        Some(Cmd::Leave) => match class::leave(&mut lesson.state)? {
            true => workshop::outln!("Nothing is reported any more."),
            false => workshop::outln!("You have joined no class."),
        },
        Some(Cmd::Hidden(_)) => {}
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
