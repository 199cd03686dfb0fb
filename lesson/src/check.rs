//! `cargo lesson check`: judges an attempt.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use clap::Args;
use vm::{
    commands::background::BackgroundGuest,
    run::{For, Run},
};
use workshop::{
    events::{Ended, Verdict},
    judging::Subject,
    printable, say,
};

use crate::{
    attempt::task,
    class::{self, ClassOutcome},
    exercise::{Exercise, Judge},
    explain,
    judges::{self, Judges},
    lesson::{Lesson, NOT_YET},
    next::StageProgress,
    state::{STATE, SavedState},
    verdicts::{events_last, shown, wrapped},
};

/// What to judge.
#[derive(Args)]
pub struct Check {
    /// The exercise, which becomes the current one [default: the one that was started last]
    id: Option<String>,
    /// Check again whenever you save a file, until all judges agree
    #[arg(long)]
    watch: bool,
    /// Kernel line: 6.1, 6.1-rt, 6.12, 6.18, 7.2, 7.3 [default: the exercise's; else 6.1, arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE")]
    kernel: Option<String>,
}

impl Check {
    /// Judges the attempt; where it is watched, again whenever a file is saved.
    pub fn run(&self, lesson: &mut Lesson) -> Result<ExitCode> {
        let exercise = lesson.chosen(self.id.as_deref())?;
        lesson.state.need_attempt(&exercise)?;
        if self.id.is_some() {
            lesson.state.start(&exercise)?;
        }
        let run = lesson.run()?;
        self.until_done(&run, lesson, &exercise)
    }

    fn until_done(&self, run: &Run, lesson: &mut Lesson, exercise: &Exercise) -> Result<ExitCode> {
        let workspace = run.workspace();
        loop {
            let before = saved(workspace, exercise);
            // One that is done is judged whole.
            let is_whole = lesson.state.known(exercise).done;
            let step = (!is_whole).then(|| lesson.state.open_step(exercise));
            let passed = self.once(run, &mut lesson.state, exercise, step)?;
            let done = passed && lesson.state.known(exercise).done;
            if done {
                workshop::outln!("\nDone. `cargo lesson solution` compares yours with ours.\n");
                workshop::outln!(
                    "{}",
                    StageProgress::at(&lesson.state, &lesson.exercises)?.after(exercise)
                );
            } else if passed {
                let next = lesson.state.open_step(exercise);
                workshop::outln!("\nThis step is done. Read: {}", exercise.steps[next].read);
                workshop::outln!("\n{}", task(exercise, next));
            }
            if done || !self.watch {
                return Ok(if passed { ExitCode::SUCCESS } else { ExitCode::from(NOT_YET) });
            }
            workshop::outln!("\nWaiting for you to save a file (Ctrl-C ends)\n");
            while saved(workspace, exercise) == before {
                thread::sleep(Duration::from_millis(200));
            }
            workshop::outln!("building …\n");
        }
    }

    /// Judges the attempt as it is now, by the judges of a step or by all. Whether all of them agree.
    fn once(
        &self,
        run: &Run,
        state: &mut SavedState,
        exercise: &Exercise,
        step: Option<usize>,
    ) -> Result<bool> {
        let Some(program) = self.built(run, state, exercise)? else { return Ok(false) };
        let judges = Judges::build(run, [])?;
        let named = self.kernel.as_ref().filter(|kernel| !kernel.is_empty());
        let kernel = named.or(exercise.kernel.as_ref());
        let guest = BackgroundGuest::new(run, kernel.map(String::as_str));
        guest.start()?;
        let asked = match step {
            Some(step) => exercise.steps[step].judges.iter().collect(),
            None => exercise.judges(),
        };
        let (number, place) = (asked.len(), exercise.place(step));
        let s = if number == 1 { "" } else { "s" };
        workshop::outln!("{place}, {number} judge{s}, {}", guest.kernel());
        let log = run.workspace().join(STATE).join("log");
        fs::write(&log, "")?;
        let mut said = Vec::new();
        for judge in &asked {
            // One at a time: a verdict is shown when its judge has ended, which shows that it is its own.
            let ended = match said.iter().any(|verdict| matches!(verdict, Verdict::Failed(_))) {
                true => Ended::not_run(&judge.test),
                false => {
                    let subject = Subject {
                        name: exercise.judged_as(),
                        file: program.clone(),
                        is_attempt: true,
                    };
                    let test = judge.test.as_str();
                    let ended = judges.run(&guest, subject, &[test])?.ended.remove(test);
                    ended.with_context(|| format!("{test} has said nothing"))?
                }
            };
            workshop::outln!("{}", printable(&shown(judge, &ended)));
            if let Verdict::Failed(why) = &ended.verdict {
                fs::write(&log, printable(&events_last(why))).ok();
            }
            said.push(ended.verdict);
        }
        if said.iter().all(|verdict| *verdict == Verdict::Passed) {
            state.pass(exercise, step.unwrap_or(exercise.steps.len() - 1))?;
            let is_done = state.known(exercise).done;
            let outcome = if is_done { ClassOutcome::Passed } else { ClassOutcome::Here };
            class::report(state, Some(exercise), outcome);
            return Ok(true);
        }
        self.refuse(state, exercise, &asked, &said);
        Ok(false)
    }

    /// Builds the attempt, before anything else: an error of the compiler needs neither judges nor a guest.
    /// `None`: it does not compile, and that was said.
    fn built(&self, run: &Run, state: &SavedState, exercise: &Exercise) -> Result<Option<PathBuf>> {
        run.need_packages(For::Run)?;
        if judges::is_first(run) {
            say!("building your program, the first time with all that it needs: a minute or two");
        }
        let cargo = run.guests()?.quiet();
        let said = match judges::build_attempt(&cargo, &exercise.package())? {
            Ok(program) => return Ok(Some(program)),
            Err(said) => said,
        };
        vm::commands::end_if_interrupted();
        workshop::outln!("{said}");
        if let Some(meaning) = explain::missing_field(&said) {
            workshop::outln!("\nWhat this means:\n{}", wrapped(meaning, 90));
        }
        workshop::outln!("\nYour program does not compile yet.");
        class::report(state, Some(exercise), ClassOutcome::Broken);
        Ok(None)
    }

    /// Says what to do where not all judges agree.
    fn refuse(&self, state: &SavedState, exercise: &Exercise, asked: &[&Judge], said: &[Verdict]) {
        if !said.iter().any(|verdict| matches!(verdict, Verdict::Failed(_) | Verdict::NotRun)) {
            workshop::outln!(
                "\nNo judge refuses your program, but not every judge works on this kernel. \
                 `cargo lesson check --kernel LINE` checks on another one."
            );
            return;
        }
        let no = asked.iter().zip(said).find_map(|(judge, verdict)| match verdict {
            Verdict::Failed(_) => Some(judge.test.clone()),
            _ => None,
        });
        if let Some(judge) = no {
            class::report(state, Some(exercise), ClassOutcome::Refused { judge });
        }
        workshop::outln!("\nAll that the judge said: {STATE}/log");
        let read = &exercise.steps[state.open_step(exercise)].read;
        workshop::outln!("Read: {read}   Stuck? cargo lesson hint");
    }
}

/// When the files of the attempt were last saved.
fn saved(workspace: &Path, exercise: &Exercise) -> Vec<(PathBuf, SystemTime)> {
    let package = workspace.join(exercise.directory());
    let directories = [package.join("src"), package];
    let entries = directories.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let times =
        entries.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.modified().ok()?)));
    let mut times: Vec<_> = times.filter(|(path, _)| path.is_file()).collect();
    times.sort();
    times
}
