//! What comes after an exercise.

use crate::exercise::Exercise;

/// What to do once `exercise` is done. `stages`: the directories of all stages, in order.
pub fn after(
    exercise: &Exercise,
    exercises: &[Exercise],
    stages: &[String],
    is_done: impl Fn(&Exercise) -> bool,
) -> String {
    let solution = exercise.solution.to_string_lossy();
    let Some(at) = stages.iter().position(|stage| *stage == solution) else {
        // An exercise beside the stages: the first one in the order of the stages that is left.
        return match exercises.iter().find(|exercise| !is_done(exercise)) {
            Some(next) => format!("Next: {}", begins(next)),
            None => "All exercises are done. `cargo lesson start ID` returns to one.".to_owned(),
        };
    };
    let from = |stage: &str| -> Vec<&Exercise> {
        let starts = exercises.iter().filter(|e| e.start.to_string_lossy() == stage);
        starts.filter(|exercise| !is_done(exercise)).collect()
    };
    let mut lines = Vec::new();
    let (next, others): (Vec<_>, Vec<_>) =
        from(&stages[at]).into_iter().partition(|exercise| exercise.has_number());
    lines.push(format!("Next: {}/README.md explains our answer.", stages[at]));
    match (next.first(), stages.get(at + 1)) {
        (Some(next), _) => lines.push(format!("Then {}", begins(next))),
        (None, Some(stage)) => {
            let number = stage_number(stage);
            lines.push(format!("Then go on to stage {number}: {stage}/README.md."));
            let next = from(stage).into_iter().find(|exercise| exercise.has_number());
            lines.extend(next.map(|next| format!("After it, {}", begins(next))));
        }
        (None, None) => {}
    }
    lines.extend(
        others.iter().map(|other| format!("An exercise beside the stages: {}", begins(other))),
    );
    lines.join("\n")
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
    use host::stages;

    use crate::workspace;

    fn after_id(id: &str, done: &[&str]) -> String {
        let root = workspace();
        let exercises = Exercise::all(&root).unwrap();
        let exercise = exercises.iter().find(|exercise| exercise.id == id).unwrap();
        let is_done = |exercise: &Exercise| exercise.id == id || done.contains(&&*exercise.id);
        after(exercise, &exercises, &stages(&root).unwrap(), is_done)
    }

    #[test]
    fn an_exercise_leads_to_the_next_of_its_stage() {
        let text = after_id("02", &["01"]);
        assert!(
            text.starts_with("Next: stage02_bio_endio/README.md explains our answer.\n"),
            "{text}"
        );
        assert!(text.contains("Then `cargo lesson start 03`, "), "{text}");
    }

    #[test]
    fn where_a_stage_has_no_next_exercise_the_next_stage_comes() {
        let text = after_id("07", &[]);
        assert!(text.contains("Then go on to stage 08: stage08_pagecache/README.md.\n"), "{text}");
        assert!(text.contains("After it, `cargo lesson start 09`, "), "{text}");
        let text = after_id("09", &[]);
        assert!(text.contains("Then go on to stage 10: stage10_"), "{text}");
        assert!(text.contains("beside the stages: `cargo lesson start inode`, "), "{text}");
        assert!(!after_id("09", &["inode"]).contains("inode"));
    }

    #[test]
    fn an_exercise_beside_the_stages_leads_back_to_them() {
        assert!(after_id("disk", &["01", "02"]).starts_with("Next: `cargo lesson start 03`, "));
        let exercises = Exercise::all(&workspace()).unwrap();
        let all: Vec<&str> = exercises.iter().map(|exercise| &*exercise.id).collect();
        assert!(after_id("disk", &all).starts_with("All exercises are done."));
    }
}
