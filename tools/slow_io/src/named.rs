//! What a filter names: a disk, by which others of its name are followed; and what became of it.

use std::{
    fmt,
    fs::{self, Metadata},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
    str::FromStr,
};

use anyhow::Result;
use common::{BlockDevice, Device};
use serde::Serialize;

use crate::trace::types::rodata;

/// A disk or partition that --disk names.
#[derive(Clone, Debug)]
pub struct OnlyDisk {
    /// What it was at the start.
    first: BlockDevice,
    /// The largest diskseq that there was then: a disk with a larger one came later.
    newest: u64,
    follow: Follow,
    /// By which others are followed; where none are, as the user typed it.
    name: String,
}

/// By what name it is known: `enum follow` in only.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Follow {
    /// By that of some link, which may point to another disk at any time: no other one is followed.
    NoOther,
    Disk,
    Partition,
    Mapped,
}

impl FromStr for OnlyDisk {
    type Err = String;

    /// By its name, as in /sys/class/block, which needs no /dev; or by its file, as device mapper names it.
    fn from_str(text: &str) -> Result<OnlyDisk, String> {
        let devices = common::block_devices().map_err(|error| format!("{error:#}"))?;
        let newest = devices.iter().map(|device| device.diskseq).max().unwrap_or(0);
        // A slash in a name is a ! there: /dev/cciss/c0d0.
        let name = text.trim_start_matches("/dev/").trim_start_matches('/').replace('/', "!");
        let numbers = fs::read_to_string(Path::new("/sys/class/block").join(name).join("dev"));
        let by_name = numbers.ok().and_then(|numbers| numbers.trim().parse().ok());
        let by_file = || {
            let mut paths =
                ["", "/dev/mapper/"].iter().map(|directory| format!("{directory}{text}"));
            paths.find_map(|path| by_file(&path))
        };
        let number: Option<Device> = by_name.or_else(by_file);
        let found = devices.into_iter().find(|device| Some(device.device) == number);
        let first = found.ok_or("there is no such disk; `lsblk` shows those that there are")?;
        let (follow, name) = match (by_name, mapped(&first.name)) {
            (Some(_), _) if first.is_partition => (Follow::Partition, first.name.clone()),
            (Some(_), _) => (Follow::Disk, first.name.clone()),
            (None, Some(mapped)) => (Follow::Mapped, mapped),
            (None, None) => (Follow::NoOther, text.to_owned()),
        };
        Ok(OnlyDisk { first, newest, follow, name })
    }
}

/// The name that device mapper has given to this disk, if it is one of its own.
fn mapped(disk: &str) -> Option<String> {
    let name = fs::read_to_string(format!("/sys/class/block/{disk}/dm/name")).ok()?;
    Some(name.trim_end_matches('\n').to_owned())
}

/// The number of a block device's file. stat(2) puts 12 bits of the major one between two pieces of the minor.
fn by_file(path: &str) -> Option<Device> {
    let is_device = |file: &Metadata| file.file_type().is_block_device();
    let dev = fs::metadata(path).ok().filter(is_device)?.rdev();
    Some(Device(((dev >> 8 & 0xfff) << 20 | (dev >> 12 & 0xfff00) | (dev & 0xff)) as u32))
}

impl OnlyDisk {
    /// Whether this is the disk or partition that it was at the start.
    pub fn was(&self, diskseq: u64, dev: u32) -> bool {
        let first = &self.first;
        first.diskseq == diskseq && (!first.is_partition || first.device.0 == dev)
    }

    /// Tells it to the BPF programs.
    pub fn set(&self, constants: &mut rodata) {
        constants.only_disk = self.first.diskseq;
        constants.newest_disk = self.newest;
        constants.only_partition = if self.first.is_partition { self.first.device.0 } else { 0 };
        constants.mapper = self.first.device.0 >> 20;
        constants.follow = self.follow as u32;
        copy(self.name.as_bytes(), &mut constants.only_name);
    }

    /// What became of it; `followed`: the diskseq of another one whose I/Os were shown, or 0.
    pub fn fate(&self, followed: u64) -> Result<Fate> {
        let is_it = |device: &BlockDevice| match self.follow {
            Follow::NoOther => {
                device.diskseq == self.first.diskseq && device.device == self.first.device
            }
            Follow::Mapped => mapped(&device.name).as_ref() == Some(&self.name),
            _ => device.name == self.name,
        };
        let now = common::block_devices()?.into_iter().find(is_it);
        // A partition that is made again has another number, on the same disk.
        let other = |device: &BlockDevice| {
            (device.diskseq, device.device) != (self.first.diskseq, self.first.device)
        };
        Ok(Fate {
            kind: "filter",
            filter: "disk",
            name: common::printable(&self.name),
            replaced: followed > 0 || now.as_ref().is_some_and(other),
            gone: now.is_none(),
        })
    }
}

/// A name as the numbers in which the BPF program compares it: in memory, the bytes of the name and zeros.
pub fn copy(name: &[u8], words: &mut [u64]) {
    for (word, bytes) in words.iter_mut().zip(name.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
}

/// What became of what a filter names, as a line of --json.
#[derive(Debug, Serialize)]
pub struct Fate {
    pub kind: &'static str,
    pub filter: &'static str,
    pub name: String,
    /// By another one, whose I/Os were shown as well.
    pub replaced: bool,
    /// At the end of the run.
    pub gone: bool,
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = &self.name;
        let gone = if self.gone { ", and is gone now" } else { "" };
        match (self.filter, self.replaced) {
            ("pid", _) => write!(f, "Process {name} has ended: no I/O of it can come any more."),
            ("cgroup", true) => {
                write!(
                    f,
                    "The cgroup {name} was made again{gone}. What is shown is of all that had this path."
                )
            }
            ("cgroup", false) => {
                write!(
                    f,
                    "The cgroup {name} is gone. If it had been made again, it would have been followed."
                )
            }
            (_, true) => write!(
                f,
                "{name} was attached again, or replaced{gone}. What is shown is of all that had this name."
            ),
            (_, false) => write!(f, "{name} is gone: since then, no I/O of it could come."),
        }
    }
}
