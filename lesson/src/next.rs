//! What comes after an exercise, and which exercises may come.

use anyhow::Result;
use host::stages;

use crate::{desk::Desk, exercise::Exercise};

/// Which stages are read, as far as the exercises that are done can say.
pub struct Progress<'e> {
    exercises: &'e [Exercise],
    /// The directories of all stages, in order.
    stages: Vec<String>,
    /// The ids of the exercises that are done.
    done: Vec<String>,
}

impl<'e> Progress<'e> {
    /// As it is known at this desk.
    pub fn at(desk: &Desk, exercises: &'e [Exercise]) -> Result<Progress<'e>> {
        let done = exercises.iter().filter(|exercise| desk.known(exercise).done);
        let done = done.map(|exercise| exercise.id.clone()).collect();
        Ok(Progress { exercises, stages: stages(&desk.workspace)?, done })
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
    use host::workspace;

    /// Asks with these exercises done.
    fn with<T>(done: &[&str], ask: impl FnOnce(&Progress, &[Exercise]) -> T) -> T {
        let workspace = workspace();
        let (exercises, stages) = (Exercise::all(&workspace).unwrap(), stages(&workspace).unwrap());
        let done = done.iter().map(|&id| id.to_owned()).collect();
        ask(&Progress { exercises: &exercises, stages, done }, &exercises)
    }

    fn after_id(id: &str, done: &[&str]) -> String {
        with(&[done, &[id]].concat(), |progress, exercises| {
            progress.after(exercises.iter().find(|exercise| exercise.id == id).unwrap())
        })
    }

    #[test]
    fn an_exercise_leads_to_its_answer_and_to_the_next_stage() {
        let text = after_id("02", &["01"]);
        let answer = "Next: \"The answer\" in stage02_bio_endio/README.md, and what follows.\n";
        assert!(text.starts_with(answer), "{text}");
        let then = "Then read stage 03: stage03_latency_map/README.md. It has an exercise: \
                    `cargo lesson start 03`, ";
        assert!(text.contains(then), "{text}");
    }

    #[test]
    fn a_stage_leads_to_the_next_and_to_what_fits_beside_it() {
        let text = after_id("12", &["11"]);
        let next = "Then read stage 13: stage13_slow_io/README.md. It has an exercise: ";
        assert!(text.contains(next), "{text}");
        assert!(text.contains("Beside the stages: `cargo lesson start returns`, "), "{text}");
        assert!(!after_id("12", &["returns"]).contains("start returns"));
        let text = after_id("07", &["06"]);
        assert!(text.contains("Beside the stages: `cargo lesson start queue`, "), "{text}");
        assert!(!text.contains("io_uring") && !text.contains("start 09"), "{text}");
    }

    #[test]
    fn an_exercise_is_offered_when_its_stages_are_read() {
        let waits = |id: &str, done: &[&str]| {
            with(done, |progress, exercises| {
                let exercise = exercises.iter().find(|exercise| exercise.id == id).unwrap();
                progress.waits_for(exercise).map(str::to_owned)
            })
        };
        assert_eq!(waits("bytes", &["01", "02", "03", "04"]).as_deref(), Some("05"));
        assert_eq!(waits("bytes", &["05"]), None);
        let text = after_id("05", &["01", "02", "03", "04"]);
        assert!(text.contains("start bytes") && text.contains("start histogram"), "{text}");
        assert!(!after_id("03", &["01", "02"]).contains("Beside"));
        assert_eq!(waits("io_uring", &["07"]).as_deref(), Some("08"));
        assert_eq!(waits("io_uring", &["08"]), None);
        // Who has done that of a later stage has read this one.
        assert_eq!(waits("io_uring", &["09"]), None);
        assert_eq!(waits("returns", &["11"]).as_deref(), Some("12"));
        assert_eq!(waits("returns", &["12"]), None);
    }

    #[test]
    fn an_exercise_beside_the_stages_leads_back_to_them() {
        assert!(after_id("disk", &["01", "02"]).starts_with("Next: `cargo lesson start 03`, "));
        let exercises = Exercise::all(&workspace()).unwrap();
        let all: Vec<&str> = exercises.iter().map(|exercise| &*exercise.id).collect();
        assert!(after_id("disk", &all).starts_with("All exercises are done."));
    }
}
