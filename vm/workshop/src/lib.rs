//! What `cargo vm`, `cargo lesson` and the guest tests share.

pub mod attempts;
pub mod cargo;
pub mod events;
pub mod fail;
pub mod json;
pub mod judging;
pub mod output;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::UNIX_EPOCH,
};

use anyhow::{Context, Result};
pub use common_base::printable_lines as printable;

/// The workspace that this program works in: the root of a clone. An error outside of any, and where the
/// program was built from another clone.
pub fn root() -> Result<PathBuf> {
    Ok(common_base::root::find()?)
}

/// As [`root`], for tests: it panics where there is none.
pub fn workspace() -> PathBuf {
    root().unwrap_or_else(|error| panic!("{error:#}"))
}

/// What a mutex guards, also where a thread that held it has panicked: that one has said so.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of this day: what takes turns by the day counts on it.
pub fn today() -> u64 {
    UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() / (24 * 60 * 60))
}

/// The directories of the stages, relative to the workspace: `stage00_tracex3` first.
pub fn stages(workspace: &Path) -> std::io::Result<Vec<String>> {
    let names = workspace.read_dir()?.map(|entry| Ok(entry?.file_name().to_string_lossy().into()));
    let mut stages = names.collect::<std::io::Result<Vec<String>>>()?;
    stages.retain(|name| name.starts_with("stage") && workspace.join(name).is_dir());
    stages.sort();
    Ok(stages)
}

/// The directories of the tools, relative to the workspace: `tools/cachetop` first.
pub fn tools(workspace: &Path) -> std::io::Result<Vec<String>> {
    let entries = workspace.join("tools").read_dir()?;
    let tools = entries.map(|entry| Ok(format!("tools/{}", entry?.file_name().to_string_lossy())));
    let mut tools = tools.collect::<std::io::Result<Vec<_>>>()?;
    let is_program = |tool: &String| {
        let manifest = fs::read_to_string(workspace.join(tool).join("Cargo.toml"));
        manifest.is_ok_and(|text| text.contains("\n[package.metadata.workshop]"))
    };
    tools.retain(is_program);
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
