//! What `cargo vm`, `cargo lesson` and the guest tests share.

pub mod cargo;
pub mod events;
pub mod fail;
pub mod judging;
pub mod room;

use std::{fs, io::Write, path::Path};

use anyhow::{Context, Result};

/// The directories of the stages, relative to the workspace's root: `stage00_tracex3` first.
pub fn stages(root: &Path) -> std::io::Result<Vec<String>> {
    let mut stages = Vec::new();
    for entry in root.read_dir()? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_stage = name.starts_with("stage") && entry.path().is_dir();
        stages.extend(is_stage.then_some(name));
    }
    stages.sort();
    Ok(stages)
}

/// Writes a file whose content has changed, at once: another cargo may be reading it.
pub fn write(file: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(file).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let write = || -> Result<()> {
        let mut new = tempfile::NamedTempFile::new_in(file.parent().context("no directory")?)?;
        new.write_all(text.as_bytes())?;
        new.persist(file)?;
        Ok(())
    };
    write().with_context(|| format!("cannot write {}", file.display()))
}
