//! The exercises: `lesson/exercises/ID_name/exercise.toml`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::Deserialize;

/// The most steps that `cargo lesson hint` has.
pub const HINTS: usize = 3;

/// An exercise, as its file describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exercise {
    /// `04`, or a name: the part of the directory's name before the first `_`, where the file names none.
    #[serde(default)]
    pub id: String,
    /// What the program will do, in a few words.
    pub title: String,
    /// The directory that an attempt starts from: `stage03_latency_map`.
    pub start: PathBuf,
    /// The directory with the answer: `stage04_max_latency`.
    pub solution: PathBuf,
    /// The numbers of the stages that teach what it needs, in their order. One with a number needs those
    /// before it.
    #[serde(default)]
    pub after: Vec<String>,
    /// Whether it is offered before the others beside the stages: what it builds is needed most often.
    #[serde(default)]
    pub first: bool,
    /// The kernel line that its judges need, where it is not the default one.
    pub kernel: Option<String>,
    /// What to do, one after the other.
    #[serde(rename = "step")]
    pub steps: Vec<Step>,
}

/// One thing to understand and to try. Most exercises have one.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// What the program will do then, in a few words, where there are several.
    #[serde(default)]
    pub title: String,
    pub task: String,
    /// The sections that teach it.
    pub read: String,
    /// From a nudge to the lines.
    pub hints: [String; HINTS],
    /// What an attempt must pass, in this order.
    #[serde(rename = "judge")]
    pub judges: Vec<Judge>,
}

/// A guest test that judges an attempt.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Judge {
    pub test: String,
    /// What a good attempt does, to be read behind a check mark.
    pub title: String,
    /// How it is judged, and what is expected.
    pub expected: String,
}

impl Exercise {
    /// All exercises: those with a number, those beside the stages, those on one's own.
    pub fn all(workspace: &Path) -> Result<Vec<Exercise>> {
        let directory = workspace.join("lesson/exercises");
        let entries = fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
        let mut exercises = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.join("exercise.toml").is_file() {
                exercises.push(Exercise::read(&path)?);
            }
        }
        exercises.sort_by_key(|exercise| {
            let beside = !exercise.has_number();
            (exercise.is_own(), beside, !exercise.first, exercise.id.clone())
        });
        Ok(exercises)
    }

    fn read(directory: &Path) -> Result<Exercise> {
        let file = directory.join("exercise.toml");
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let exercise: Exercise =
            toml::from_str(&text).with_context(|| file.display().to_string())?;
        let name = directory.file_name().unwrap_or_default().to_string_lossy();
        let id = match exercise.id.as_str() {
            "" => name.split('_').next().unwrap_or_default().to_owned(),
            named => named.to_owned(),
        };
        Ok(Exercise { id, ..exercise })
    }

    /// Under which name the judges start the attempt: that of the stage whose place it takes.
    pub fn judged_as(&self) -> String {
        let directory = self.solution.to_string_lossy();
        workshop::package_in(&directory).unwrap_or("exercise").to_owned()
    }

    /// Whether it belongs to the order of the stages: its answer is one.
    pub fn has_number(&self) -> bool {
        self.id.starts_with(|c: char| c.is_ascii_digit())
    }

    /// Whether it starts from nothing, and names no hook.
    pub fn is_own(&self) -> bool {
        let begins_and_ends_here = [&self.start, &self.solution];
        !self.has_number()
            && begins_and_ends_here.iter().all(|it| it.starts_with("lesson/exercises"))
    }

    /// The judges of all steps, each once.
    pub fn judges(&self) -> Vec<&Judge> {
        let mut judges: Vec<&Judge> = Vec::new();
        for judge in self.steps.iter().flat_map(|step| &step.judges) {
            if judges.iter().all(|known| known.test != judge.test) {
                judges.push(judge);
            }
        }
        judges
    }

    /// `exercise 03`, or `exercise 03, step 1 of 2` with the number of a step.
    pub fn place(&self, step: Option<usize>) -> String {
        let of = self.steps.len();
        let step = step.filter(|_| of > 1).map(|step| format!(", step {} of {of}", step + 1));
        format!("exercise {}{}", self.id, step.unwrap_or_default())
    }

    pub fn package(&self) -> String {
        format!("mine-{}", self.id)
    }

    /// The directory of an attempt, relative to the workspace.
    pub fn directory(&self) -> PathBuf {
        Path::new("mine").join(&self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use workshop::{stages, workspace};

    #[test]
    fn every_exercise_is_complete() {
        let workspace = workspace();
        let exercises = Exercise::all(&workspace).unwrap();
        let ids: Vec<&str> = exercises.iter().map(|exercise| exercise.id.as_str()).collect();
        let all = "01 02 03 04 05 06 07 08 09 10 11 12 13 14 histogram bytes disk inode io_uring queue \
                   returns without retransmit runqueue";
        assert_eq!(ids.join(" "), all);
        for exercise in exercises {
            for directory in [&exercise.start, &exercise.solution] {
                for file in ["src/main.rs", "src/trace.bpf.c"] {
                    let file = workspace.join(directory).join(file);
                    assert!(file.is_file(), "{}: no {}", exercise.id, file.display());
                }
            }
            let id = &exercise.id;
            assert!(!exercise.steps.is_empty() && exercise.after.is_sorted(), "{id}");
            for step in &exercise.steps {
                assert!(step.task.lines().count() <= 30, "{id}: a long task");
                assert!(step.hints.iter().all(|hint| !hint.trim().is_empty()), "{id}");
                assert!(!step.judges.is_empty(), "{id}");
                assert_eq!(
                    step.title.is_empty(),
                    exercise.steps.len() == 1,
                    "{id}: a step's title"
                );
            }
            // `"The idea" in stage05_sector/README.md`: a section that is there.
            let read: String = exercise.steps.iter().map(|step| &*step.read).collect();
            let pieces: Vec<&str> = read.split('"').skip(1).collect();
            for pair in pieces.chunks(2).filter(|pair| pair.len() == 2) {
                let Some(file) = pair[1].split_whitespace().nth(1) else { continue };
                let file = file.trim_end_matches([',', '.', ';', ':']);
                let page = fs::read_to_string(workspace.join(file)).expect(file);
                let is_there =
                    page.lines().any(|line| line.trim_start_matches('#').trim() == pair[0]);
                assert!(is_there, "{}: {file} has no section {:?}", exercise.id, pair[0]);
            }
        }
    }

    /// What a judge expects can be read at a glance: a load, then one thing in each item of a list. Of the exercises
    /// of stages 01 to 07, and of those beside them.
    #[test]
    fn what_a_judge_expects_is_a_list() {
        let mut long = 0;
        for exercise in Exercise::all(&workspace()).unwrap() {
            let last = exercise.after.last().map_or(&*exercise.id, String::as_str);
            for judge in exercise.judges().into_iter().filter(|_| last <= "07") {
                let text = judge.expected.trim();
                let words = |text: &str| text.split_whitespace().count();
                let mut items = text.split("\n- ");
                let load = words(items.next().unwrap_or_default());
                let items: Vec<usize> = items.map(words).collect();
                let place =
                    format!("exercise {}, {}: {load} words, {items:?}", exercise.id, judge.test);
                assert!(words(text) <= 30 || !items.is_empty(), "{place}: no list");
                assert!(load <= 110 && items.iter().all(|words| *words <= 35), "{place}: long");
                assert!(text.lines().all(|line| line.chars().count() <= 100), "{place}: columns");
                long += usize::from(!items.is_empty());
            }
        }
        assert!(long >= 20, "only {long} lists");
    }

    /// What every exercise's program keeps, by the guest test that judges it; and whose programs it says nothing
    /// about, and why.
    const LAWS: &[(&str, &[(&str, &str)])] = &[
        ("exercise_leaves_nothing", &[]),
        (
            "exercise_two_cpus",
            &[
                ("01 02", "they add nothing up"),
                ("runqueue", "a thread is in one queue: who adds to its sum is alone"),
            ],
        ),
        (
            "exercise_slowest",
            &[
                ("01 02 03 13 14", "they print a line for each, and no slowest one"),
                ("08 09 inode io_uring", "they measure no time"),
                ("12 returns bytes retransmit", "they count"),
                ("disk histogram queue runqueue", "all times are judged, by lines or sums"),
            ],
        ),
        (
            "exercise_accounts",
            &[
                (
                    "01 02 bytes",
                    "every bio is a line or a sum, and ftrace or the judge has them all",
                ),
                ("disk histogram", "their own judges have this load"),
                ("07 queue without", "they have requests"),
                ("08 09 inode io_uring 12 returns retransmit runqueue", "they have no bios"),
            ],
        ),
        (
            "exercise_order",
            &[
                ("01 02", "no figure goes with the lines"),
                (
                    "12 bytes returns retransmit runqueue without",
                    "no hook is the start of an I/O in flight",
                ),
            ],
        ),
        (
            "exercise_readers",
            &[
                ("01 02 03 04 05 06 07 10 11 13 14", "they read no file"),
                (
                    "12 bytes disk histogram queue returns retransmit runqueue without",
                    "nor do these",
                ),
            ],
        ),
        (
            "exercise_unseen",
            &[
                ("01 02 12 bytes returns retransmit runqueue", "nothing is in flight"),
                ("03 04 05 06 10 11 13 14 disk histogram", "exercise_accounts takes addresses"),
                ("08 09 inode io_uring", "a thread has one read at a time"),
                ("without", "no map has what is in flight"),
            ],
        ),
    ];

    /// The judges of an exercise ask about each law, or it is excused.
    #[test]
    fn every_exercise_keeps_the_laws() {
        let exercises = Exercise::all(&workspace()).unwrap();
        for (law, excused) in LAWS {
            let mut excused: Vec<&str> =
                excused.iter().flat_map(|(ids, _)| ids.split(' ')).collect();
            for exercise in &exercises {
                let is_judged = exercise.judges().iter().any(|judge| judge.test == *law);
                let place = excused.iter().position(|id| *id == exercise.id);
                let is_excused = place.map(|place| excused.remove(place)).is_some();
                assert!(is_judged != is_excused, "{}: {law} is judged, or excused", exercise.id);
            }
            assert!(excused.is_empty(), "{law}: no exercise {excused:?}, or twice");
        }
    }

    /// Every exercise is offered by the README of its own stage, or of the last one that it needs, where
    /// that README has the form of a lesson.
    #[test]
    fn the_stages_name_their_exercises() {
        let workspace = workspace();
        let stages = stages(&workspace).unwrap();
        for exercise in Exercise::all(&workspace).unwrap() {
            let id = &exercise.id;
            let number = if exercise.has_number() { Some(id) } else { exercise.after.last() };
            let number = number.unwrap_or_else(|| panic!("exercise {id} names no stage"));
            let is_it = |stage: &&String| stage.strip_prefix("stage").unwrap().starts_with(number);
            let stage = stages.iter().find(is_it).unwrap_or_else(|| panic!("no stage {number}"));
            let readme = fs::read_to_string(workspace.join(stage).join("README.md")).unwrap();
            let command = format!("cargo lesson start {id}");
            let offers = readme.contains(&command) || !readme.contains("\n## The idea\n");
            assert!(offers, "{stage}/README.md does not have {command}");
            // Each step has its turn, where its idea ends.
            let turns = readme.matches("\n## Your turn").count();
            let is_its = exercise.has_number();
            assert!(!is_its || turns == exercise.steps.len(), "{stage}/README.md: {turns} turns");
        }
    }
}
