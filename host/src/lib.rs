//! What `cargo vm`, `cargo lesson` and the guest tests share.

pub mod cargo;
pub mod events;
pub mod fail;
pub mod judging;
pub mod room;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

/// The workspace that this was built in.
pub fn workspace() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    workspace.canonicalize().unwrap_or(workspace)
}

/// The directories of the stages, relative to the workspace: `stage00_tracex3` first.
pub fn stages(workspace: &Path) -> std::io::Result<Vec<String>> {
    let mut stages = Vec::new();
    for entry in workspace.read_dir()? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_stage = name.starts_with("stage") && entry.path().is_dir();
        stages.extend(is_stage.then_some(name));
    }
    stages.sort();
    Ok(stages)
}

/// The directories of the tools, relative to the workspace: `tools/cachetop` first.
pub fn tools(workspace: &Path) -> std::io::Result<Vec<String>> {
    let entries = workspace.join("tools").read_dir()?;
    let tools = entries.map(|entry| Ok(format!("tools/{}", entry?.file_name().to_string_lossy())));
    let mut tools = tools.collect::<std::io::Result<Vec<_>>>()?;
    tools.retain(|tool| workspace.join(tool).join("Cargo.toml").exists());
    tools.sort();
    Ok(tools)
}

/// The package of a stage or a tool, by its directory: `stage04` of `stage04_max_latency`, `slow_io` of
/// `tools/slow_io`. `None` for any other directory.
pub fn package_in(directory: &str) -> Option<&str> {
    let stage = directory.split('_').next().filter(|name| name.starts_with("stage"));
    stage.or(directory.strip_prefix("tools/"))
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
