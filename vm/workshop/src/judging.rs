//! What a run of the guest tests is told.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// The variable that holds a [`Judging`], as JSON.
const VARIABLE: &str = "VM_TESTS";

/// What a run of the guest tests is told, in a variable of its environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Judging {
    /// The workspace.
    pub workspace: PathBuf,
    /// The directory with the programs that are tested.
    pub programs: PathBuf,
    /// Run only these of the tests that are left.
    pub partition: Partition,
    /// Run only these of all tests, and those that every kernel gets.
    pub share: Partition,
    /// Leave out the tests that are enough on one kernel.
    pub without_once: bool,
    /// Run these tests, in this order up to the first that fails, and no others: for an attempt.
    pub judges: Vec<String>,
    /// What takes the place of a program: a learner's attempt, or a wrong program.
    pub subject: Option<Subject>,
}

/// One of many parts: 0 of 2 is every second one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    /// Which one.
    pub number: usize,
    /// Of how many.
    pub of: usize,
}

/// A program in the place of another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// The name of the program whose place it takes.
    pub name: String,
    /// Its file.
    pub file: PathBuf,
    /// Whether a learner waits for the verdict: then tests run a part of their loads, and judge no
    /// other program.
    pub is_attempt: bool,
}

impl Partition {
    /// All of them.
    pub const ALL: Partition = Partition { number: 0, of: 1 };
}

impl Judging {
    /// All tests, of the programs that lie in this directory.
    pub fn all(workspace: impl Into<PathBuf>, programs: impl Into<PathBuf>) -> Judging {
        Judging {
            workspace: workspace.into(),
            programs: programs.into(),
            partition: Partition::ALL,
            share: Partition::ALL,
            without_once: false,
            judges: Vec::new(),
            subject: None,
        }
    }

    /// All tests of this test program, of the programs that it was built with.
    pub fn by(tests: &Path, workspace: &Path) -> Judging {
        // deps/guest-0123 lies beside the programs.
        Judging::all(workspace, tests.ancestors().nth(2).unwrap_or(workspace))
    }

    /// A variable for the environment of the test program.
    pub fn to_env(&self) -> Result<(&'static str, String)> {
        Ok((VARIABLE, serde_json::to_string(self)?))
    }

    /// What this process was told.
    pub fn from_env() -> Result<Judging> {
        match env::var(VARIABLE) {
            Ok(json) => serde_json::from_str(&json).context(VARIABLE),
            Err(_) => Ok(Judging::all(".", "target/debug")),
        }
    }
}
