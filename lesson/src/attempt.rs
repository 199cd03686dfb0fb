//! What a learner does with an attempt, but for judging it: start, look, take a hint, start over.

use std::{
    io::{BufRead, IsTerminal, Write},
    process::Command,
};

use anyhow::{Context, Result};
use textwrap::indent;
use workshop::fail::{USAGE, fail};

use crate::{
    class::{self, ClassOutcome},
    exercise::{Exercise, HINTS, Step},
    lesson::{Lesson, NOT_YET},
    next::StageProgress,
    verdicts::wrapped,
};

/// Shows where the learner is, and what to do next.
pub fn status(lesson: &Lesson) -> Result<()> {
    let Lesson { exercises, state, .. } = lesson;
    let progress = StageProgress::at(state, exercises)?;
    let own = exercises.iter().position(Exercise::is_own);
    for (number, exercise) in exercises.iter().enumerate() {
        if own == Some(number) {
            workshop::outln!("\nOn your own:");
        }
        let mark = match (state.known(exercise).done, state.has_attempt(exercise)) {
            (true, _) => "✓",
            (false, true) => "…",
            (false, false) => " ",
        };
        let is_current = state.progress.current.as_deref() == Some(exercise.id.as_str());
        let arrow = if is_current { ">" } else { " " };
        let after = match progress.waits_for(exercise) {
            Some(stage) if mark == " " => format!(" (after stage {stage})"),
            _ => String::new(),
        };
        workshop::outln!("{arrow} {mark} {:<10} {}{after}", exercise.id, exercise.title);
    }
    let current = exercises.iter().find(|e| state.progress.current.as_ref() == Some(&e.id));
    match current.filter(|exercise| state.has_attempt(exercise)) {
        Some(exercise) if !state.known(exercise).done => workshop::outln!(
            "\nEdit {}/src, then run `cargo lesson check`. Stuck? `cargo lesson hint`",
            exercise.directory().display()
        ),
        _ if exercises.iter().all(|exercise| state.known(exercise).done) => {
            workshop::outln!("\nAll exercises are done. `cargo lesson start ID` returns to one.");
        }
        Some(exercise) => {
            workshop::outln!("\n{}", progress.after(exercise));
        }
        None => workshop::outln!(
            "\n`cargo lesson start` begins the next exercise, `start ID` any other."
        ),
    }
    Ok(())
}

/// Begins an exercise, or returns to it.
pub fn start(lesson: &mut Lesson, id: Option<String>) -> Result<()> {
    let none_left =
        || fail(USAGE, "all exercises are done; `cargo lesson start ID` returns to one");
    let exercise = match &id {
        Some(id) => lesson.named(id)?,
        None => {
            let progress = StageProgress::at(&lesson.state, &lesson.exercises)?;
            progress.first().ok_or_else(none_left)?.clone()
        }
    };
    let state = &mut lesson.state;
    let (id, mine) = (&exercise.id, exercise.directory());
    let mine = mine.display();
    match state.start(&exercise)? {
        true => workshop::outln!("{mine} is a copy of {}.", exercise.start.display()),
        false => workshop::outln!(
            "{mine} is your earlier attempt, as you left it. `cargo lesson reset {id}` starts over."
        ),
    }
    let step = state.open_step(&exercise);
    workshop::outln!("\nRead: {}", exercise.steps[step].read);
    workshop::outln!("\nExercise {id}: {}\n\n{}\n", exercise.title, task(&exercise, step));
    let kernel = exercise.kernel.as_ref().map(|kernel| format!("--kernel {kernel} "));
    let run = format!("cargo vm run {}{}", kernel.unwrap_or_default(), exercise.package());
    workshop::outln!("Edit {mine}/src. `{run}` runs your program,");
    workshop::outln!("`cargo lesson check` judges it, `cargo lesson hint` helps.");
    class::report(state, Some(&exercise), ClassOutcome::Here);
    Ok(())
}

/// The task of a step, under its title where there are several.
pub fn task(exercise: &Exercise, step: usize) -> String {
    let Step { title, task, .. } = &exercise.steps[step];
    let number = format!("Step {} of {}", step + 1, exercise.steps.len());
    let titled = (!title.is_empty()).then(|| format!("{number}: {title}\n\n"));
    titled.unwrap_or_default() + &indent(task.trim_end(), "  ")
}

/// Shows the next hint.
pub fn hint(lesson: &mut Lesson, id: Option<&str>) -> Result<()> {
    let exercise = lesson.chosen(id)?;
    match lesson.state.hint(&exercise)? {
        Some((number, hint)) => {
            // Prose is one line, code several.
            let hint = if hint.contains('\n') { hint.to_owned() } else { wrapped(hint, 90) };
            let step = lesson.state.open_step(&exercise);
            let of = format!("Hint {number} of {HINTS}, {}", exercise.place(Some(step)));
            workshop::outln!("{of}:\n\n{}", indent(hint.trim_end(), "  "));
        }
        None => {
            let anyhow = if lesson.state.known(&exercise).done { "" } else { " --anyhow" };
            let named = id.map(|_| format!(" {}", exercise.id)).unwrap_or_default();
            workshop::outln!(
                "There are no more hints. `cargo lesson solution{named}{anyhow}` shows the answer."
            );
        }
    }
    Ok(())
}

/// Shows what differs between the attempt and the answer.
pub fn solution(lesson: &Lesson, id: Option<&str>, anyhow: bool) -> Result<()> {
    let exercise = lesson.chosen(id)?;
    if !anyhow && !lesson.state.known(&exercise).done {
        let named = id.map(|_| format!(" {}", exercise.id)).unwrap_or_default();
        let message = format!(
            "your attempt has not passed yet; `cargo lesson solution{named} --anyhow` shows the answer \
             nevertheless"
        );
        return Err(fail(NOT_YET.into(), message));
    }
    let (mine, answer) = (exercise.directory().join("src"), exercise.solution.join("src"));
    if !lesson.workspace().join(&mine).exists() {
        let (mine, answer) = (mine.display(), answer.display());
        workshop::outln!("The answer is {answer}. {mine} is not there to be compared with it.");
        return Ok(());
    }
    workshop::outln!("diff -u {} {}", mine.display(), answer.display());
    let mut diff = Command::new("diff");
    diff.arg("-ru").args([mine, answer]).current_dir(lesson.workspace());
    diff.status().context("cannot start diff")?;
    Ok(())
}

/// Starts the exercise over, and keeps the attempt.
pub fn reset(lesson: &mut Lesson, id: Option<&str>, yes: bool) -> Result<()> {
    let exercise = lesson.chosen(id)?;
    let mine = exercise.directory();
    if !yes && !confirmed(&format!("Start {} over?", mine.display()))? {
        workshop::outln!("Nothing was changed.");
        return Ok(());
    }
    let state = &mut lesson.state;
    if state.has_attempt(&exercise) {
        let kept = state.reset(&exercise)?;
        workshop::outln!("Your attempt is in {} now.", kept.display());
    } else {
        state.start(&exercise)?;
    }
    workshop::outln!("{} starts from {} again.", mine.display(), exercise.start.display());
    Ok(())
}

/// Asks on the terminal; without one, nobody can agree.
fn confirmed(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(fail(USAGE, "reset asks on a terminal; --yes answers without one"));
    }
    workshop::out!("{question} The old one is kept in mine.old/. [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}
