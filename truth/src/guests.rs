//! Guests that judge cells.

use std::time::Duration;

use anyhow::{Result, bail};
use truth::{Cell, PLAN, TruthPlan, Verdict};
use vm::cargo::follow::follow;
use vm::commands::test::in_guest;
use vm::run::Run;
use workshop::events::GuestMessage;
use workshop::judging::Judging;
use workshop::say;

use crate::prepared::Prepared;
use crate::schedule::Job;

/// How long a cell may take.
const LIMIT: Duration = Duration::from_secs(1200);
/// How long a cell of a tool of yours may take, whose start takes at most 400 s.
const LIMIT_OF_YOURS: Duration = Duration::from_secs(600);
/// After so many guests that died one after the other, a tool is not run again.
const DEATHS: usize = 3;

/// Boots a guest that judges the cells, and hands over each. Where the guest dies, what ran in it is the first
/// cell without a verdict: the others are judged in another guest.
pub fn judge_all(
    run: &Run,
    prepared: &Prepared,
    job: &Job,
    on_cell: impl Fn(&str, Cell) -> Result<()>,
) -> Result<()> {
    let (mut plan, mut deaths, mut release) = (job.plan.clone(), 0, String::new());
    while !plan.cells.is_empty() {
        let mut judged = 0;
        let ended = judge(run, prepared, job.kernel, &plan, |of, cell| {
            judged += 1;
            release = of.to_owned();
            on_cell(of, cell)
        });
        plan.cells.drain(..judged.min(plan.cells.len()));
        let Err(error) = ended else { return Ok(()) };
        let died = error.downcast::<Died>()?;
        let Some((_, name)) = plan.cells.first().cloned() else { return Err(died.into()) };
        deaths = if judged == 0 { deaths + 1 } else { 1 };
        release.clone_from(&died.release);
        let is_yours = plan.yours.iter().any(|tool| tool.name == name);
        let how = format!("the guest died while it ran: {}", died.how);
        let verdict = |how| match is_yours {
            true => Verdict::Broke { how },
            // Of a package that many use, the emulation is the likelier reason.
            false => Verdict::NotRun { why: how },
        };
        let lost = |(case, tool): (String, String), how: String| {
            let verdict = verdict(how);
            Cell { case, tool, verdict, skipped: 0, runs: 1, exit: None, silent: false }
        };
        on_cell(&release, lost(plan.cells.remove(0), how))?;
        if deaths == DEATHS {
            for cell in std::mem::take(&mut plan.cells) {
                let how = format!("not run: {DEATHS} guests died before, one after the other");
                on_cell(&release, lost(cell, how))?;
            }
        }
    }
    Ok(())
}

/// A guest that had begun to judge, and died.
#[derive(Debug)]
struct Died {
    release: String,
    how: String,
}

impl std::fmt::Display for Died {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the guest died: {}", self.how)
    }
}

impl std::error::Error for Died {}

/// Boots a guest that judges the cells, and hands over each.
fn judge(
    run: &Run,
    prepared: &Prepared,
    kernel: &str,
    plan: &TruthPlan,
    mut on_cell: impl FnMut(&str, Cell) -> Result<()>,
) -> Result<()> {
    let Prepared { launcher, tests, .. } = prepared;
    let mut command = in_guest(run, launcher, tests, kernel);
    command.current_dir(run.workspace());
    command.envs([Judging::by(tests, run.workspace()).to_env()?]);
    command.env(PLAN, serde_json::to_string(plan)?);
    let (mut taken, mut release) = (Ok(()), String::new());
    let limit = if plan.yours.is_empty() { LIMIT } else { LIMIT_OF_YOURS };
    let (success, how) = follow(command, limit, |line| {
        match serde_json::from_str(line) {
            Ok(cell) if taken.is_ok() => taken = on_cell(&release, cell),
            Ok(_) => {}
            Err(_) => match GuestMessage::parse(line) {
                Some(GuestMessage::Kernel(of)) if release.is_empty() => release = of,
                message => {
                    let text = message.map_or_else(|| line.to_owned(), |it| it.to_string());
                    match plan.shows {
                        true => workshop::outln!("{text}"),
                        false => say!("{kernel}, {text}"),
                    }
                }
            },
        }
        limit
    })?;
    taken?;
    match success {
        true => Ok(()),
        false if release.is_empty() => bail!("{kernel}: the guest ended with {how}"),
        false => Err(Died { release, how }.into()),
    }
}
