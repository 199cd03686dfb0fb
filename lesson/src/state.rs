//! The learner's attempts and progress: `mine/`, `mine.old/` and `.lesson/progress.toml`, all ignored
//! by git. Nothing here ever deletes or overwrites an attempt, or changes a file that git tracks.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use walkdir::WalkDir;
use workshop::{
    attempts,
    cargo::Cargo,
    fail::{USAGE, fail},
};

use crate::exercise::{Exercise, HINTS};

/// The directory of everything but the attempts, relative to the workspace.
pub const STATE: &str = ".lesson";

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Known {
    /// An attempt has passed all judges.
    pub done: bool,
    /// How many steps an attempt has passed, before all are done.
    pub steps: usize,
    /// How many hints were shown, of the step that is open.
    pub hints: usize,
    /// When it was started first.
    pub started: Option<u64>,
}

/// The class that gets this learner's verdicts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    pub address: String,
    pub name: String,
    /// Another learner may have chosen the same name.
    pub key: u32,
}

/// The incident that runs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RunningIncident {
    /// What it is made of.
    pub seed: u64,
    /// How hard it is.
    pub level: u8,
    /// How many answers were judged.
    #[serde(default)]
    pub answers: usize,
    /// Whether the last of them was right: those that come after it are not counted.
    #[serde(default)]
    pub solved: bool,
}

/// What `progress.toml` holds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedProgress {
    /// The exercise that was started last.
    pub current: Option<String>,
    /// The class that gets the verdicts.
    pub class: Option<Joined>,
    pub incident: Option<RunningIncident>,
    pub exercises: BTreeMap<String, Known>,
}

/// A workspace with its attempts.
pub struct SavedState {
    pub workspace: PathBuf,
    /// The progress as it was read and changed.
    pub progress: SavedProgress,
}

impl SavedState {
    /// Reads the progress, if there is any yet.
    pub fn open(workspace: &Path) -> Result<SavedState> {
        Ok(SavedState { workspace: workspace.to_owned(), progress: SavedState::read(workspace)? })
    }

    fn read(workspace: &Path) -> Result<SavedProgress> {
        let file = workspace.join(STATE).join("progress.toml");
        match fs::read_to_string(&file) {
            Ok(text) => toml::from_str(&text).with_context(|| {
                format!(
                    "{} is damaged: repair or remove it; your attempts are in mine/",
                    file.display()
                )
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(SavedProgress::default()),
            Err(error) => Err(error).with_context(|| file.display().to_string()),
        }
    }

    /// Changes the progress as it is now: a check takes a while, and meanwhile another terminal may have
    /// started something.
    pub fn change(&mut self, change: impl FnOnce(&mut SavedProgress)) -> Result<()> {
        self.progress = SavedState::read(&self.workspace)?;
        change(&mut self.progress);
        let directory = self.workspace.join(STATE);
        fs::create_dir_all(&directory).with_context(|| directory.display().to_string())?;
        workshop::write(&directory.join("progress.toml"), &toml::to_string(&self.progress)?)
    }

    pub fn known(&self, exercise: &Exercise) -> Known {
        self.progress.exercises.get(&exercise.id).cloned().unwrap_or_default()
    }

    pub fn note(&mut self, exercise: &Exercise, change: impl FnOnce(&mut Known)) -> Result<()> {
        self.change(|progress| change(progress.exercises.entry(exercise.id.clone()).or_default()))
    }

    pub fn has_attempt(&self, exercise: &Exercise) -> bool {
        self.workspace.join(exercise.directory()).symlink_metadata().is_ok()
    }

    /// An error that says what to do where there is no attempt, or nothing that can be built.
    pub fn need_attempt(&self, exercise: &Exercise) -> Result<()> {
        let (mine, id) = (exercise.directory(), &exercise.id);
        let shown = mine.display();
        if !self.has_attempt(exercise) {
            let message = format!("{shown} does not exist: `cargo lesson start {id}` makes it");
            return Err(fail(USAGE, message));
        }
        let missing = ["Cargo.toml", "src"]
            .into_iter()
            .find(|it| !self.workspace.join(&mine).join(it).exists());
        match missing {
            None => Ok(()),
            Some(missing) => {
                let message = format!(
                    "{shown} has no {missing}: `cargo lesson reset {id}` moves what is there to mine.old/ \
                     and starts over"
                );
                Err(fail(USAGE, message))
            }
        }
    }

    /// Makes the exercise the current one, with an attempt that begins with the sources of
    /// `exercise.start`. An attempt that exists stays as it is. Whether it is new.
    pub fn start(&mut self, exercise: &Exercise) -> Result<bool> {
        let is_new = !self.has_attempt(exercise);
        if is_new {
            let (from, to) = (exercise.start.display(), exercise.directory());
            self.copy(exercise)
                .with_context(|| format!("cannot copy {from} to {}", to.display()))?;
        } else {
            self.need_attempt(exercise)?;
        }
        // Also where the attempt is there: the workshop may have changed since.
        attempts::prepare(&Cargo::new(&self.workspace, true), &exercise.package())?;
        self.change(|progress| progress.current = Some(exercise.id.clone()))?;
        self.note(exercise, |known| known.started = known.started.or(Some(now())))?;
        Ok(is_new)
    }

    /// Makes an attempt with the sources of `exercise.start`, which appears only when it is complete.
    fn copy(&self, exercise: &Exercise) -> Result<()> {
        let place = self.workspace.join(exercise.directory());
        // In `mine`, which may be on another disk than the workshop; but not where cargo looks for packages.
        let beside = place.parent().context("no parent")?.join(".cargo");
        fs::create_dir_all(&beside)?;
        let new = tempfile::tempdir_in(beside)?;
        let package = new.path().join("package");
        fs::create_dir_all(package.join("src"))?;
        for entry in fs::read_dir(self.workspace.join(&exercise.start).join("src"))? {
            let entry = entry?;
            fs::copy(entry.path(), package.join("src").join(entry.file_name()))?;
        }
        fs::write(package.join("build.rs"), BUILD)?;
        fs::write(package.join("Cargo.toml"), manifest(&exercise.id, &exercise.title))?;
        Ok(fs::rename(package, place)?)
    }

    /// Moves the attempt to `mine.old/`, and starts a new one. Returns where the old one is now.
    pub fn reset(&mut self, exercise: &Exercise) -> Result<PathBuf> {
        let old = self.workspace.join("mine.old");
        fs::create_dir_all(&old).with_context(|| old.display().to_string())?;
        let mut names = (1..).map(|n| format!("{}-{n}", exercise.id));
        let name = names.find(|name| !old.join(name).exists()).context("no name is left")?;
        let kept = Path::new("mine.old").join(&name);
        move_to(&self.workspace.join(exercise.directory()), &old.join(&name))
            .with_context(|| format!("cannot move the attempt to {}", kept.display()))?;
        self.note(exercise, |known| (known.steps, known.hints) = (0, 0))?;
        self.start(exercise)?;
        Ok(kept)
    }

    /// The number of the first step that is not done, from 0; of an exercise that is done, the last one's.
    pub fn open_step(&self, exercise: &Exercise) -> usize {
        let Known { done, steps, .. } = self.known(exercise);
        let last = exercise.steps.len() - 1;
        if done { last } else { steps.min(last) }
    }

    /// Notes that a step has passed: the next one begins without hints, and the last one ends the exercise.
    pub fn pass(&mut self, exercise: &Exercise, step: usize) -> Result<()> {
        let is_last = step + 1 == exercise.steps.len();
        self.note(exercise, |known| match is_last {
            true => known.done = true,
            false => (known.steps, known.hints) = (step + 1, 0),
        })
    }

    /// The next hint of the step that is open, and its number; `None` after the last one.
    pub fn hint<'e>(&mut self, exercise: &'e Exercise) -> Result<Option<(usize, &'e str)>> {
        let given = self.known(exercise).hints;
        if given >= HINTS {
            return Ok(None);
        }
        self.note(exercise, |known| known.hints += 1)?;
        let hints = &exercise.steps[self.open_step(exercise)].hints;
        Ok(hints.get(given).map(|hint| (given + 1, hint.as_str())))
    }
}

/// Moves a directory, also to another disk: there it appears when it is complete.
fn move_to(from: &Path, to: &Path) -> Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == ErrorKind::CrossesDevices => {}
        moved => return Ok(moved?),
    }
    let new = tempfile::tempdir_in(to.parent().context("no parent")?)?;
    let copy = new.path().join("copy");
    for entry in WalkDir::new(from) {
        let entry = entry?;
        let place = copy.join(entry.path().strip_prefix(from)?);
        match entry.file_type() {
            kind if kind.is_dir() => fs::create_dir(place)?,
            kind if kind.is_symlink() => symlink(fs::read_link(entry.path())?, place)?,
            _ => drop(fs::copy(entry.path(), place)?),
        }
    }
    fs::rename(copy, to)?;
    Ok(fs::remove_dir_all(from)?)
}

/// Seconds since 1970.
pub fn now() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}

pub const BUILD: &str = "\
//! Compiles `src/trace.bpf.c` and writes its Rust skeleton.

fn main() {
    common_build::skeleton(\"src/trace.bpf.c\");
}
";

/// The Cargo.toml of an attempt at the exercise of this id and title.
pub fn manifest(id: &str, title: &str) -> String {
    format!(
        r#"[package]
name = "mine-{id}"
version.workspace = true
edition.workspace = true
rust-version.workspace = true
publish.workspace = true
description = "My attempt at exercise {id}: {title}"

[package.metadata.workshop]
idea = "{title}"

[lints]
workspace = true

[dependencies]
anyhow.workspace = true
clap.workspace = true
common.workspace = true
libbpf-rs.workspace = true
plain.workspace = true
rustix.workspace = true
serde_json.workspace = true

[build-dependencies]
common-build.workspace = true
"#
    )
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use workshop::workspace;

    /// The state of an empty directory that has the exercises' sources.
    fn state() -> (tempfile::TempDir, SavedState, Vec<Exercise>) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("Cargo.toml"), "[workspace]\nmembers = []\n").unwrap();
        let exercises = Exercise::all(&workspace()).unwrap();
        for exercise in &exercises {
            let src = dir.path().join(&exercise.start).join("src");
            fs::create_dir_all(&src).unwrap();
            fs::write(src.join("main.rs"), format!("// from {}\n", exercise.start.display()))
                .unwrap();
        }
        let state = SavedState::open(dir.path()).unwrap();
        (dir, state, exercises)
    }

    #[test]
    fn no_step_loses_an_attempt() {
        let (dir, mut state, exercises) = state();
        let (two, three) = (&exercises[1], &exercises[2]);
        let read = |path: &str| fs::read_to_string(dir.path().join(path)).unwrap();
        assert!(state.start(two).unwrap());
        assert_eq!(read("mine/02/src/main.rs"), "// from stage01_submit_bio\n");
        assert!(read("mine/02/Cargo.toml").contains("name = \"mine-02\""));
        fs::write(dir.path().join("mine/02/src/main.rs"), "first").unwrap();
        // Another exercise, and back: by the same process and by a new one.
        state.start(three).unwrap();
        let mut state = SavedState::open(dir.path()).unwrap();
        assert_eq!(state.progress.current.as_deref(), Some("03"));
        assert!(!state.start(two).unwrap());
        assert_eq!(read("mine/02/src/main.rs"), "first");
        // Two resets keep two attempts.
        assert_eq!(state.reset(two).unwrap(), Path::new("mine.old/02-1"));
        fs::write(dir.path().join("mine/02/src/main.rs"), "second").unwrap();
        assert_eq!(state.reset(two).unwrap(), Path::new("mine.old/02-2"));
        assert_eq!(read("mine.old/02-1/src/main.rs"), "first");
        assert_eq!(read("mine.old/02-2/src/main.rs"), "second");
        assert_eq!(read("mine/02/src/main.rs"), "// from stage01_submit_bio\n");
        assert!(state.has_attempt(three));
    }

    #[test]
    fn two_terminals_keep_each_others_progress() {
        let (dir, mut checks, exercises) = state();
        let (two, five) = (&exercises[1], &exercises[4]);
        checks.start(two).unwrap();
        let mut other = SavedState::open(dir.path()).unwrap();
        other.start(five).unwrap();
        other.hint(five).unwrap();
        checks.note(two, |known| known.done = true).unwrap();
        let state = SavedState::open(dir.path()).unwrap();
        assert_eq!(state.progress.current.as_ref(), Some(&five.id));
        assert!(state.known(five).hints == 1 && state.known(two).done);
        // A package that is none any more is not as it was left.
        fs::remove_file(dir.path().join("mine/02/Cargo.toml")).unwrap();
        assert!(checks.start(two).unwrap_err().to_string().contains("cargo lesson reset 02"));
    }

    #[test]
    fn hints_come_one_by_one_and_stay_counted() {
        let (dir, mut state, exercises) = state();
        let exercise = &exercises[0];
        state.start(exercise).unwrap();
        for number in 1..=HINTS {
            let mut state = SavedState::open(dir.path()).unwrap();
            let hint = state.hint(exercise).unwrap();
            assert_eq!(hint, Some((number, exercise.steps[0].hints[number - 1].as_str())));
        }
        let mut state = SavedState::open(dir.path()).unwrap();
        assert_eq!(state.hint(exercise).unwrap(), None);
        // What is done stays done.
        state.note(exercise, |known| known.done = true).unwrap();
        state.reset(exercise).unwrap();
        let known = SavedState::open(dir.path()).unwrap().known(exercise);
        assert!(known.done && known.hints == 0 && known.started.is_some());
    }

    #[test]
    fn steps_are_passed_one_by_one() {
        let (dir, mut state, mut exercises) = state();
        let mut exercise = exercises.swap_remove(0);
        exercise.steps = vec![exercise.steps[0].clone(); 3];
        state.start(&exercise).unwrap();
        for step in 0..3 {
            let mut state = SavedState::open(dir.path()).unwrap();
            assert_eq!((state.open_step(&exercise), state.known(&exercise).done), (step, false));
            // Each has its own hints.
            assert_eq!(state.hint(&exercise).unwrap().map(|(number, _)| number), Some(1));
            state.pass(&exercise, step).unwrap();
        }
        let mut state = SavedState::open(dir.path()).unwrap();
        assert!(state.known(&exercise).done && state.open_step(&exercise) == 2);
        // Who starts over does so from the first step, and has done it nevertheless.
        state.reset(&exercise).unwrap();
        assert!(state.known(&exercise).done && state.known(&exercise).steps == 0);
    }

    #[test]
    fn damaged_progress_is_not_overwritten() {
        let (dir, mut state, exercises) = state();
        state.start(&exercises[0]).unwrap();
        let file = dir.path().join(STATE).join("progress.toml");
        fs::write(&file, "current = ").unwrap();
        let error = format!("{:#}", SavedState::open(dir.path()).err().unwrap());
        assert!(error.contains("is damaged"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "current = ");
    }

    /// Runs a shell's command in a directory: it has to succeed. Returns what it prints.
    fn shell(dir: &Path, command: &str) -> String {
        let mut bash = Command::new("bash");
        bash.args(["-c", &format!("exec 2>&1; set -e -o pipefail; {command}")]).current_dir(dir);
        let output = bash.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{command}: {said}");
        said
    }

    /// A repository with what this workspace has, but for what git ignores.
    fn clone() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let files = "git ls-files -z --cached --others --exclude-standard";
        let copy = format!(
            "{files} | tar -c --null --ignore-failed-read -T - | tar -x -C {}",
            dir.path().display()
        );
        shell(&workspace(), &copy);
        let commit = "git -c user.name=x -c user.email=x -c commit.gpgsign=false commit -q -m x";
        shell(dir.path(), &format!("git init -q; git add --all; {commit}"));
        dir
    }

    /// What is wrong with the workshop: cargo cannot use it, or git has something to report.
    fn assert_unharmed(workspace: &Path, after: &str) {
        shell(workspace, "cargo metadata --offline --locked --format-version 1 > /dev/null");
        assert_eq!(shell(workspace, "git status --porcelain"), "", "after {after}");
    }

    #[test]
    fn no_attempt_harms_the_workshop() {
        let dir = clone();
        let workspace = dir.path();
        assert_unharmed(workspace, "nothing");
        let exercises = Exercise::all(workspace).unwrap();
        let mut state = SavedState::open(workspace).unwrap();
        state.start(&exercises[1]).unwrap();
        state.start(&exercises[2]).unwrap();
        assert_unharmed(workspace, "two starts");
        // The attempts get the workshop's versions, from what is on this machine.
        let mine = "cargo metadata --offline --format-version 1 --manifest-path mine/Cargo.toml";
        shell(workspace, &format!("{mine} > /dev/null"));

        fs::write(workspace.join("mine/02/src/main.rs"), "fn main( {\n").unwrap();
        assert_unharmed(workspace, "an error in main.rs");
        fs::write(workspace.join("mine/02/Cargo.toml"), "[package\n").unwrap();
        assert_unharmed(workspace, "an error in Cargo.toml");
        let prepared = attempts::prepare(&Cargo::new(workspace, true), "mine-03").unwrap();
        assert!(prepared.fallback_reason.is_some_and(|why| why.contains("mine/02")));
        state.reset(&exercises[1]).unwrap();
        assert_unharmed(workspace, "a reset");
        fs::remove_dir_all(workspace.join("mine/02")).unwrap();
        fs::remove_dir_all(workspace.join("mine/03")).unwrap();
        assert_unharmed(workspace, "the removal of all attempts");
    }
}
