//! Control groups (v2) by their numbers, which are the inode numbers of their directories.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use walkdir::WalkDir;

/// The names that have been looked up, as /proc/PID/cgroup writes them; none for a number whose cgroup was gone.
#[derive(Default)]
pub struct Cgroups(HashMap<u64, Option<String>>);

impl Cgroups {
    /// The name of one. Looked up when its first bio comes: later, the cgroup may be gone.
    pub fn name(&mut self, number: u64) -> Option<&str> {
        if !self.0.contains_key(&number) {
            self.look();
        }
        self.0.entry(number).or_default().as_deref()
    }

    fn look(&mut self) {
        let Ok(root) = root() else { return };
        let directories = WalkDir::new(&root).into_iter().flatten();
        for directory in directories.filter(|entry| entry.file_type().is_dir()) {
            let (Ok(file), Ok(path)) = (directory.metadata(), directory.path().strip_prefix(&root))
            else {
                continue;
            };
            let name = common::printable(&format!("/{}", path.display()));
            self.0.insert(file.ino(), Some(name));
        }
    }
}

/// The number of a cgroup by its directory, or by its name: `/system.slice`, `system.slice`.
pub fn number(path: &str) -> Result<u64, String> {
    let root = root()?;
    let inside = path.strip_prefix(&*root.to_string_lossy()).unwrap_or(path);
    // The directory that is meant, also where `..` or a link leads out of the cgroups.
    let directory = root.join(inside.trim_matches('/')).canonicalize().ok();
    let directory = directory.filter(|directory| directory.starts_with(&root));
    let file = directory.and_then(|it| fs::metadata(it).ok()).filter(fs::Metadata::is_dir);
    file.map(|file| file.ino()).ok_or_else(|| {
        format!(
            "there is no such cgroup in {}; `systemd-cgls` shows those that there are",
            root.display()
        )
    })
}

/// Where the cgroups of v2 are mounted.
fn root() -> Result<PathBuf, String> {
    let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| error.to_string())?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
    let path = found.map(|fields| Path::new(fields[1]).to_owned());
    path.ok_or("cgroups of v2 are not mounted: mount -t cgroup2 none /sys/fs/cgroup".into())
}
