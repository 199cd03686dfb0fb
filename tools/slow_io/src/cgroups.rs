//! Control groups (v2) by their numbers, which are the inode numbers of their directories.

use std::{
    collections::HashMap,
    ffi::OsString,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt},
    path::{Path, PathBuf},
    str::FromStr,
};

use anyhow::Result;
use libbpf_rs::{Map, MapCore, MapFlags};
use walkdir::WalkDir;

use crate::{
    named::{self, Fate},
    trace::types::level,
};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for level {}

/// The names that have been looked up, as /proc/PID/cgroup writes them; none for a number whose cgroup was gone.
pub struct Cgroups<'a> {
    names: HashMap<u64, Option<String>>,
    /// The path that --cgroup names, and the cgroups that had it.
    only: Option<(String, &'a Map<'a>)>,
}

impl<'a> Cgroups<'a> {
    pub fn new(only: Option<&OnlyCgroup>, generations: &'a Map<'a>) -> Cgroups<'a> {
        let only = only.filter(|only| only.depth() > 0);
        Cgroups { names: HashMap::new(), only: only.map(|only| (only.name(), generations)) }
    }

    /// The name of one. Looked up when its first bio comes: later, the cgroup may be gone.
    pub fn name(&mut self, number: u64) -> Option<&str> {
        if !self.names.contains_key(&number) {
            self.look();
        }
        let of_only = self.only.as_ref().and_then(|(name, generations)| {
            let found = generations.lookup(&number.to_ne_bytes(), MapFlags::ANY);
            found.ok().flatten().map(|_| name.clone())
        });
        self.names.entry(number).or_insert(of_only).as_deref()
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
            self.names.insert(file.ino(), Some(name));
        }
    }
}

/// A cgroup that --cgroup names: those above it, from the root of what is mounted, and itself.
#[derive(Clone, Debug)]
pub struct OnlyCgroup {
    root: PathBuf,
    /// The number of each, and the last part of its path.
    levels: Vec<(u64, OsString)>,
}

/// So many levels at most: cgroup.h goes up as far.
const DEEPEST: usize = 64;

impl FromStr for OnlyCgroup {
    type Err = String;

    /// By its directory, or by its name: `/system.slice`, `system.slice`.
    fn from_str(path: &str) -> Result<OnlyCgroup, String> {
        let root = root()?;
        let inside = path.strip_prefix(&*root.to_string_lossy()).unwrap_or(path);
        // The directory that is meant, also where `..` or a link leads out of the cgroups.
        let directory = root.join(inside.trim_matches('/')).canonicalize().ok();
        let below = directory.as_ref().and_then(|directory| directory.strip_prefix(&root).ok());
        let names = below.into_iter().flat_map(Path::iter).map(ToOwned::to_owned);
        let levels = [OsString::new()].into_iter().chain(names).map(|name| (0, name)).collect();
        let mut only = OnlyCgroup { root, levels };
        let numbers: Option<Vec<u64>> = only.numbers().into_iter().collect();
        let numbers = numbers.filter(|_| below.is_some()).ok_or_else(|| {
            format!(
                "there is no such cgroup in {}; `systemd-cgls` shows those that there are",
                only.root.display()
            )
        })?;
        only.levels.iter_mut().zip(numbers).for_each(|(level, number)| level.0 = number);
        Ok(only)
    }
}

impl OnlyCgroup {
    /// How many levels are followed; 0: it is the root, and all are shown.
    pub fn depth(&self) -> u32 {
        if self.levels.len() == 1 { 0 } else { self.levels.len().min(DEEPEST) as u32 }
    }

    /// Its path, as /proc/PID/cgroup writes it.
    fn name(&self) -> String {
        let names = self.levels.iter().skip(1).map(|(_, name)| format!("/{}", name.display()));
        common::printable(&names.collect::<String>())
    }

    /// The numbers that the levels have now; none of those that are gone.
    fn numbers(&self) -> Vec<Option<u64>> {
        let mut path = self.root.clone();
        let number = |(_, name): &(u64, OsString)| {
            path.push(name);
            fs::metadata(&path).ok().filter(fs::Metadata::is_dir).map(|file| file.ino())
        };
        self.levels.iter().map(number).collect()
    }

    /// Those that are followed, by their places in `levels`.
    fn followed<T>(&self, all: Vec<T>) -> impl Iterator<Item = (u32, T)> {
        let above = all.len() - self.depth() as usize;
        (0..).zip(all.into_iter().skip(above))
    }

    /// Tells the BPF program what there was when the command line was read.
    pub fn begin(&self, levels: &Map<'_>, generations: &Map<'_>) -> Result<()> {
        let numbers = self.levels.iter().map(|(number, _)| *number).collect();
        self.followed(numbers)
            .try_for_each(|(place, number)| self.tell(place, number, levels, generations))
    }

    /// Once the BPF program sees which cgroups are made: those that were made before that, since the command line
    /// was read. What is made meanwhile makes another look differ.
    pub fn catch_up(&self, levels: &Map<'_>, generations: &Map<'_>) -> Result<()> {
        loop {
            let mut differs = false;
            for (place, number) in self.followed(self.numbers()) {
                let Some(number) = number else { continue };
                let known = levels.lookup(&place.to_ne_bytes(), MapFlags::ANY)?.unwrap_or_default();
                if known[..8] != number.to_ne_bytes() {
                    self.tell(place, number, levels, generations)?;
                    differs = true;
                }
            }
            if !differs {
                return Ok(());
            }
        }
    }

    fn tell(&self, place: u32, number: u64, levels: &Map<'_>, generations: &Map<'_>) -> Result<()> {
        let above = self.levels.len() - self.depth() as usize;
        let mut level = level { number, ..level::default() };
        let name = self.levels[above + place as usize].1.as_bytes();
        named::copy(name, &mut level.name);
        // SAFETY: the struct is integers without padding.
        let bytes = unsafe { plain::as_bytes(&level) };
        levels.update(&place.to_ne_bytes(), bytes, MapFlags::ANY)?;
        if place + 1 == self.depth() {
            generations.update(&number.to_ne_bytes(), &place.to_ne_bytes(), MapFlags::ANY)?;
        }
        Ok(())
    }

    /// What became of it.
    pub fn fate(&self, made_again: u64) -> Fate {
        let now = self.numbers().pop().flatten();
        let was = self.levels.last().map(|(number, _)| *number);
        Fate {
            kind: "filter",
            filter: "cgroup",
            name: self.name(),
            replaced: made_again > 0 || now.is_some_and(|_| now != was),
            gone: now.is_none(),
        }
    }
}

/// Where the cgroups of v2 are mounted.
fn root() -> Result<PathBuf, String> {
    let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| error.to_string())?;
    let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let found = mounts.find(|fields| fields.get(2) == Some(&"cgroup2"));
    let path = found.map(|fields| Path::new(fields[1]).to_owned());
    path.ok_or("cgroups of v2 are not mounted: mount -t cgroup2 none /sys/fs/cgroup".into())
}
