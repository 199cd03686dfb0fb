//! The files that `cargo truth` writes.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::FlockOperation;
use truth::TruthReport;

/// The page.
pub const MARKDOWN: &str = "truth/TRUTH.md";
/// The page's picture.
pub const PICTURE: &str = "truth/truth.svg";
/// All cells.
pub const JSON: &str = "truth/truth.json";
/// The part of the Markdown that is written by hand ends with this line.
const GENERATED: &str = "<!-- cargo truth writes what follows -->\n";

/// Writes the page and the picture of the cells that were judged before.
pub fn render(workspace: &Path) -> Result<()> {
    change(workspace, |_| ())
}

/// Changes the results as they are now, and writes all files.
pub fn change(workspace: &Path, change: impl FnOnce(&mut TruthReport)) -> Result<()> {
    let _lock = lock(workspace)?;
    let mut report = read_unlocked(workspace)?;
    change(&mut report);
    write(workspace, &report)
}

/// The cells that were judged before.
pub fn read(workspace: &Path) -> Result<TruthReport> {
    let _lock = lock(workspace)?;
    read_unlocked(workspace)
}

/// Keeps other runs of the command from reading and writing the results until it is dropped.
fn lock(workspace: &Path) -> Result<File> {
    let directory = workspace.join("truth");
    let lock = File::open(&directory).with_context(|| directory.display().to_string())?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).context("truth")?;
    Ok(lock)
}

fn read_unlocked(workspace: &Path) -> Result<TruthReport> {
    match fs::read_to_string(workspace.join(JSON)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(TruthReport::default()),
        text => serde_json::from_str(&text.context(JSON)?).context(JSON),
    }
}

fn write(workspace: &Path, report: &TruthReport) -> Result<()> {
    let file = workspace.join(MARKDOWN);
    let text = fs::read_to_string(&file).with_context(|| MARKDOWN)?;
    let (head, _) =
        text.split_once(GENERATED).with_context(|| format!("{MARKDOWN}: no {GENERATED}"))?;
    workshop::write(&file, &format!("{head}{GENERATED}{}", report.markdown()?))?;
    workshop::write(&workspace.join(PICTURE), &report.picture()?)?;
    workshop::write(&workspace.join(JSON), &workshop::json::to_lines(report)?)
}
