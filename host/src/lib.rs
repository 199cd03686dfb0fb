//! What `cargo vm`, `cargo lesson` and the guest tests share.

pub mod cargo;
pub mod events;
pub mod fail;
pub mod judging;
pub mod room;

/// The directories of the stages, relative to the workspace's root: `stage00_tracex3` first.
pub fn stages(root: &std::path::Path) -> std::io::Result<Vec<String>> {
    let mut stages = Vec::new();
    for entry in root.read_dir()? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        stages.extend(name.starts_with("stage").then_some(name));
    }
    stages.sort();
    Ok(stages)
}
