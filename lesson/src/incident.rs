//! `cargo lesson incident`, `answer` and `cured`: something is wrong with a machine, and the learner finds out what.

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Error, Result};
use clap::Args;
use incidents::{
    TICKET,
    plan::{IncidentPlan, PARTS, SaidAnswer},
};
use vm::{
    cargo::build_all,
    commands::{launch::GuestProgram, shell, test::DISKS},
    run::{For, GuestOptions, Run},
};
use workshop::{
    cargo::executable,
    fail::{USAGE, fail},
};

use crate::{
    class::{self, ClassOutcome},
    lesson::{Lesson, NOT_YET},
    state::{RunningIncident, now},
};

/// How to make one.
#[derive(Args)]
pub struct IncidentOptions {
    /// The incident: the same number makes the same one [default: any]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    seed: Option<u64>,
    /// 1 tells where the time is lost, 2 does not, 3 adds something odd that is harmless
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=3), allow_hyphen_values = true)]
    level: u8,
    /// Kernel line: 6.1, 6.12, 6.18, 7.2 [default: 6.1; arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE")]
    kernel: Option<String>,
}

/// What a learner says it is.
#[derive(Args)]
pub struct AnswerOptions {
    #[command(flatten)]
    answer: SaidAnswer,
    /// Show the way to the right answer, also where this one is wrong
    #[arg(long)]
    anyhow: bool,
}

impl RunningIncident {
    /// Takes one more answer, of which so many parts are right, of those that it has. Returns what it comes to.
    fn judge(&mut self, right: usize, said: usize) -> String {
        let was_solved = self.solved;
        self.answers += usize::from(!was_solved);
        self.solved |= right == PARTS;
        let answers = self.answers;
        let left = match PARTS - said {
            0 => String::new(),
            left => format!("; {left} were left out"),
        };
        match (right == PARTS, was_solved) {
            (true, _) if answers == 1 => "Solved with the first answer.".to_owned(),
            (true, _) => format!("Solved with answer {answers}."),
            (false, true) => {
                format!("{right} of {said} parts are right{left}; answer {answers} was.")
            }
            (false, false) => {
                format!("{right} of {said} parts are right, in answer {answers}{left}.")
            }
        }
    }
}

/// The program that makes incidents, for guests, with what it is to do about this one.
fn program(
    run: &Run,
    what: &str,
    made: RunningIncident,
    more: Vec<String>,
) -> Result<GuestProgram> {
    let cargo = run.guests()?.quiet();
    let file = executable(&cargo.artifacts(&["build", "--package=incidents"])?, "incidents")?;
    let [seed, level] = [made.seed.to_string(), made.level.to_string()];
    let args = [what, "--seed", &seed, "--level", &level].map(OsString::from);
    let args = args.into_iter().chain(more.into_iter().map(OsString::from));
    Ok(GuestProgram::other([file.into()].into_iter().chain(args).collect()))
}

/// The incident that runs, once its ticket is there.
fn running(run: &Run, made: Option<RunningIncident>) -> Result<RunningIncident> {
    let made = made.ok_or_else(no_incident)?;
    let is_open = ["test", "-e", TICKET].map(OsString::from).to_vec();
    match shell::join(run, None, &GuestProgram::other(is_open))?.ok_or_else(no_incident)? {
        0 => Ok(made),
        _ => Err(fail(USAGE, "the incident is still being made: wait for its ticket")),
    }
}

fn no_incident() -> Error {
    fail(USAGE, "no incident runs: cargo lesson incident")
}

/// Measures the service again, and says whether it is cured.
pub fn cured(lesson: &mut Lesson) -> Result<ExitCode> {
    let run = &lesson.run()?;
    let made = running(run, lesson.state.progress.incident)?;
    workshop::outln!("The service is measured for 10 s.");
    let program = program(run, "cured", made, Vec::new())?;
    let status = shell::join(run, None, &program)?.ok_or_else(no_incident)?;
    Ok(ExitCode::from(status as u8))
}

/// Makes one, and opens a shell there. The status is that of the shell.
pub fn begin(lesson: &mut Lesson, options: &IncidentOptions) -> Result<ExitCode> {
    let (run, state) = (&lesson.run()?, &mut lesson.state);
    if shell::is_running(run, None)? {
        return Err(fail(USAGE, "another guest runs: leave its shell first (`exit`)"));
    }
    // The machine is made with dmsetup, and looked at with top.
    run.need_packages(For::Judge)?;
    let seed = options.seed.unwrap_or_else(|| now() % 100_000);
    let made = RunningIncident { seed, level: options.level, answers: 0, solved: false };
    build_all(run.guests()?)?;
    let program = program(run, "begin", made, Vec::new())?;
    let mut guest = GuestOptions::with_kernel(options.kernel.clone());
    guest.disks = DISKS.to_vec();
    state.change(|progress| progress.incident = Some(made))?;
    class::report(
        state,
        None,
        ClassOutcome::Incident { seed, level: made.level, answers: 0, right: 0 },
    );
    workshop::outln!(
        "Incident {seed}, level {}. Its disks are made, twice: with what is wrong, and without.",
        made.level
    );
    let status = shell::begin(run, &guest, &program);
    state.change(|progress| progress.incident = None)?;
    let status = status?;
    Ok(ExitCode::from(status as u8))
}

/// Judges an answer, and shows the way to the right one in the incident's guest.
pub fn answer(lesson: &mut Lesson, said: &AnswerOptions) -> Result<ExitCode> {
    let (run, state) = (&lesson.run()?, &mut lesson.state);
    let mut made = running(run, state.progress.incident)?;
    let RunningIncident { seed, level, solved: was_solved, .. } = made;
    let parts = said.answer.judged(&IncidentPlan::from_seed(seed, level));
    let judge = program(run, "judge", made, said.answer.options())?;
    shell::join(run, None, &judge)?.ok_or_else(no_incident)?;
    let right = parts.iter().filter(|part| part.is_right).count();
    let is_right = right == PARTS;
    workshop::outln!("{}", made.judge(right, parts.len()));
    state.change(|progress| progress.incident = Some(made))?;
    if !was_solved {
        let answers = made.answers;
        class::report(state, None, ClassOutcome::Incident { seed, level, answers, right });
    }
    if is_right || said.anyhow {
        let way = program(run, "walkthrough", made, Vec::new())?;
        shell::join(run, None, &way)?.ok_or_else(no_incident)?;
    }
    Ok(if is_right { ExitCode::SUCCESS } else { ExitCode::from(NOT_YET) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_after_the_right_answer_is_not_counted() {
        let mut made = RunningIncident { seed: 1, level: 2, answers: 0, solved: false };
        let said = [(4, 5), (1, 1), (5, 5), (2, 5), (5, 5)];
        let said = said.map(|(right, said)| made.judge(right, said));
        let expected = [
            "4 of 5 parts are right, in answer 1.",
            "1 of 1 parts are right, in answer 2; 4 were left out.",
            "Solved with answer 3.",
            "2 of 5 parts are right; answer 3 was.",
            "Solved with answer 3.",
        ];
        assert_eq!((made.answers, said), (3, expected.map(str::to_owned)));
    }
}
