//! What the book contains, and in which order: read from the workshop's own packages and links.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use crate::exercise::Exercise;

/// The title of the part with the stages.
pub const STAGES: &str = "The stages";

/// A page that the repository does not have: all differences between stages.
pub const DIFFERENCES: &str = "docs/differences.md";

/// A page of the book.
pub struct Chapter {
    /// Its Markdown, relative to the workspace. That of an exercise is made, not read.
    pub path: PathBuf,
    /// Its line in the table of contents, where that is not its title.
    pub label: Option<String>,
    /// Whether it belongs below the chapter before.
    pub is_nested: bool,
}

/// Chapters below one title.
pub struct Part {
    /// Empty: the chapters before the first part.
    pub title: &'static str,
    /// In the order in which they are read.
    pub chapters: Vec<Chapter>,
}

impl Part {
    fn new(title: &'static str, first: &str) -> Part {
        let mut part = Part { title, chapters: Vec::new() };
        part.push(first, false);
        part
    }

    /// Adds a page, whose line in the table of contents is its title.
    pub fn push(&mut self, path: impl Into<PathBuf>, is_nested: bool) {
        self.chapters.push(Chapter { path: path.into(), label: None, is_nested });
    }
}

/// The parts of the book. The last one is to receive the pages that the others lead to.
pub fn parts(root: &Path, exercises: &[Exercise]) -> Result<Vec<Part>> {
    let front = Part::new("", "README.md");
    let mut stages = Part { title: STAGES, chapters: Vec::new() };
    for stage in directories(root, Path::new(""))?.into_iter().filter(|it| is_program(root, it)) {
        let name = stage.to_string_lossy().trim_start_matches("stage").replacen('_', " ", 1);
        let path = stage.join("README.md");
        stages.chapters.push(Chapter { path, label: Some(name), is_nested: false });
    }
    let label = Some("All differences".to_owned());
    stages.chapters.push(Chapter { path: DIFFERENCES.into(), label, is_nested: false });
    let mut tasks = Part::new("Exercises", "docs/exercises.md");
    for exercise in exercises.iter().filter(|exercise| exercise.is_own()) {
        let path = exercise.place.join("README.md");
        let label = Some(format!("{}: {}", exercise.id, exercise.title));
        tasks.chapters.push(Chapter { path, label, is_nested: true });
    }
    let mut parts = vec![front, stages, tasks];
    for (title, place) in [("The tools", "tools"), ("The appendix", "appendix")] {
        let mut part = Part::new(title, &format!("{place}/README.md"));
        for directory in directories(root, Path::new(place))? {
            if is_program(root, &directory) && root.join(&directory).join("README.md").exists() {
                part.push(directory.join("README.md"), true);
            }
        }
        parts.push(part);
    }
    // Not before the stages: it is there to be looked up.
    parts.push(Part::new("More", "docs/glossary.md"));
    Ok(parts)
}

/// The directories in `place`, by their names.
fn directories(root: &Path, place: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(root.join(place)).with_context(|| place.display().to_string())?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(place.join(entry.file_name()));
        }
    }
    found.sort();
    Ok(found)
}

/// Whether a directory is a package that calls itself a program of the workshop.
fn is_program(root: &Path, place: &Path) -> bool {
    let Ok(text) = fs::read_to_string(root.join(place).join("Cargo.toml")) else { return false };
    text.contains("[package.metadata.workshop]")
}
