//! What every command of `cargo lesson` begins with: resolved once, and passed on.

use std::path::Path;

use anyhow::Result;
use vm::{arch::Arch, run::Run};
use workshop::fail::{USAGE, fail};

use crate::{exercise::Exercise, state::SavedState};

/// Not yet: a judge said no, or the attempt does not compile.
pub const NOT_YET: u8 = 1;

/// The exercises, and where the learner is.
pub struct Lesson {
    /// The guest's architecture, where the user names one.
    arch: Option<Arch>,
    /// All exercises.
    pub exercises: Vec<Exercise>,
    /// What was saved of the learner's progress.
    pub state: SavedState,
}

impl Lesson {
    /// Reads the exercises, and the progress.
    pub fn open(arch: Option<Arch>) -> Result<Lesson> {
        let workspace = workshop::root()?;
        let exercises = Exercise::all(&workspace)?;
        Ok(Lesson { arch, exercises, state: SavedState::open(&workspace)? })
    }

    /// The workspace.
    pub fn workspace(&self) -> &Path {
        &self.state.workspace
    }

    /// What runs guests: not every command needs them.
    pub fn run(&self) -> Result<Run> {
        Run::new(self.arch)
    }

    /// The exercise that the user names, or else the one that was started last.
    pub fn chosen(&self, id: Option<&str>) -> Result<Exercise> {
        match id {
            Some(id) => self.named(id),
            None => self.current(),
        }
    }

    /// The exercise that was started last.
    fn current(&self) -> Result<Exercise> {
        let id = self.state.progress.current.as_deref();
        let found = self.exercises.iter().find(|exercise| Some(exercise.id.as_str()) == id);
        found.cloned().ok_or_else(|| fail(USAGE, "no exercise is started yet: cargo lesson start"))
    }

    /// The exercise of this id: `04`, `4`, `histogram`.
    pub fn named(&self, id: &str) -> Result<Exercise> {
        let found = self.exercises.iter().find(|e| e.id == id || e.id == format!("{id:0>2}"));
        found.cloned().ok_or_else(|| {
            let ids: Vec<&str> = self.exercises.iter().map(|e| e.id.as_str()).collect();
            fail(USAGE, format!("there is no exercise {id}; there are {}", ids.join(", ")))
        })
    }
}
