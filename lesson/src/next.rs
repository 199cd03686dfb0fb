//! What comes after an exercise, and which exercises may come.

use anyhow::Result;
use workshop::stages;

use crate::{exercise::Exercise, state::SavedState};

/// Which stages are read, as far as the exercises that are done can say.
pub struct StageProgress<'e> {
    exercises: &'e [Exercise],
    stages: Vec<String>,
    done: Vec<String>,
}

impl<'e> StageProgress<'e> {
    pub fn at(state: &SavedState, exercises: &'e [Exercise]) -> Result<StageProgress<'e>> {
        let done = exercises.iter().filter(|exercise| state.known(exercise).done);
        let done = done.map(|exercise| exercise.id.clone()).collect();
        Ok(StageProgress { exercises, stages: stages(&state.workspace)?, done })
    }

    fn is_done(&self, exercise: &Exercise) -> bool {
        self.done.contains(&exercise.id)
    }

    /// Whether the stage of this number is read: its exercise is done, or that of a later stage. One that
    /// has no exercise behind it is read when all others are.
    fn is_read(&self, number: &str) -> bool {
        let numbered = || self.exercises.iter().filter(|exercise| exercise.has_number());
        let mut from = numbered().filter(|exercise| exercise.id.as_str() >= number).peekable();
        match from.peek() {
            Some(_) => from.any(|exercise| self.is_done(exercise)),
            None => numbered().all(|exercise| self.is_done(exercise)),
        }
    }

    /// The last stage that this exercise needs and that is not read: `05`.
    pub fn waits_for<'x>(&self, exercise: &'x Exercise) -> Option<&'x str> {
        exercise.after.iter().rev().map(String::as_str).find(|number| !self.is_read(number))
    }

    /// The exercise to begin next: the first one that is not done, and whose stages are read.
    pub fn first(&self) -> Option<&'e Exercise> {
        let mut left = self.exercises.iter().filter(|exercise| !self.is_done(exercise));
        left.find(|exercise| self.waits_for(exercise).is_none())
    }

    /// What to do once `exercise` is done.
    pub fn after(&self, exercise: &Exercise) -> String {
        let solution = exercise.solution.to_string_lossy();
        let Some(at) = self.stages.iter().position(|stage| *stage == solution) else {
            // An exercise beside the stages.
            return match self.first() {
                Some(next) => format!("Next: {}", begins(next)),
                None => {
                    "All exercises are done. `cargo lesson start ID` returns to one.".to_owned()
                }
            };
        };
        let mut lines = vec![format!(
            "Next: \"The answer\" in {}/README.md, and what follows.",
            self.stages[at]
        )];
        if let Some(stage) = self.stages.get(at + 1) {
            let number = stage_number(stage);
            let next = self.exercises.iter().find(|exercise| exercise.id == number);
            let then = next.map(|next| format!(" It has an exercise: {}", begins(next)));
            let then = then.unwrap_or_default();
            lines.push(format!("Then read stage {number}: {stage}/README.md.{then}"));
        }
        let number = stage_number(&self.stages[at]);
        let beside = self.exercises.iter().filter(|other| {
            let needs_it = other.after.iter().any(|needed| needed == number);
            needs_it && !self.is_done(other) && self.waits_for(other).is_none()
        });
        lines.extend(beside.map(|other| format!("Beside the stages: {}", begins(other))));
        lines.join("\n")
    }
}

/// `08` of `stage08_pagecache`.
fn stage_number(stage: &str) -> &str {
    let name = stage.split('_').next().unwrap_or(stage);
    name.strip_prefix("stage").unwrap_or(name)
}

fn begins(exercise: &Exercise) -> String {
    format!("`cargo lesson start {}`, {}.", exercise.id, exercise.title)
}

#[cfg(test)]
mod tests {
    use super::*;
    use workshop::workspace;

    /// Asks with these exercises done.
    fn with<T>(done: &[&str], ask: impl FnOnce(&StageProgress, &[Exercise]) -> T) -> T {
        let workspace = workspace();
        let (exercises, stages) = (Exercise::all(&workspace).unwrap(), stages(&workspace).unwrap());
        let done = done.iter().map(|&id| id.to_owned()).collect();
        ask(&StageProgress { exercises: &exercises, stages, done }, &exercises)
    }

    fn after_id(id: &str, done: &[&str]) -> String {
        with(&[done, &[id]].concat(), |progress, exercises| {
            progress.after(exercises.iter().find(|exercise| exercise.id == id).unwrap())
        })
    }

    #[test]
    fn an_exercise_leads_to_its_answer_to_the_next_stage_and_to_what_fits_beside_it() {
        let answer = "Next: \"The answer\" in stage02_bio_endio/README.md, and what follows.\n";
        assert!(after_id("02", &["01"]).starts_with(answer));
        let begun = ["01", "02", "03", "04"];
        for (id, done, says, not) in [
            (
                "02",
                &["01"][..],
                "Then read stage 03: stage03_latency_map/README.md. It has an exercise: \
                                 `cargo lesson start 03`, ",
                "Beside",
            ),
            ("03", &["01", "02"], "start 04", "Beside"),
            // The commonest pattern comes first.
            (
                "05",
                &begun,
                "Beside the stages: `cargo lesson start histogram`, a histogram for each disk.\n\
                 Beside the stages: `cargo lesson start bytes`, ",
                "io_uring",
            ),
            ("07", &["06"], "Beside the stages: `cargo lesson start queue`, ", "start 09"),
            (
                "12",
                &["11"],
                "Then read stage 13: stage13_ring_buffer/README.md. It has an exercise: ",
                "queue",
            ),
            ("12", &["11"], "Beside the stages: `cargo lesson start returns`, ", "queue"),
            ("12", &["returns"], "stage 13", "start returns"),
            // Of those beside the stages, each leads back to them.
            ("disk", &["01", "02"], "Next: `cargo lesson start 03`, ", "Beside"),
        ] {
            let text = after_id(id, done);
            assert!(text.contains(says) && !text.contains(not), "{id}: {text}");
        }
        let exercises = Exercise::all(&workspace()).unwrap();
        let all: Vec<&str> = exercises.iter().map(|exercise| &*exercise.id).collect();
        assert!(after_id("disk", &all).starts_with("All exercises are done."));
    }

    #[test]
    fn an_exercise_is_offered_when_its_stages_are_read() {
        for (id, done, expected) in [
            ("bytes", &["01", "02", "03", "04"][..], Some("05")),
            ("bytes", &["05"], None),
            ("io_uring", &["07"], Some("08")),
            ("io_uring", &["08"], None),
            // Who has done that of a later stage has read this one.
            ("io_uring", &["09"], None),
            ("returns", &["11"], Some("12")),
            ("returns", &["12"], None),
        ] {
            with(done, |progress, exercises| {
                let exercise = exercises.iter().find(|exercise| exercise.id == id).unwrap();
                assert_eq!(progress.waits_for(exercise), expected, "{id}");
            });
        }
    }
}
