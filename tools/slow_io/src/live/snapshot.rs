//! What the kernel has added up so far, as the screen gets it.

use std::{
    collections::{HashMap, HashSet},
    os::fd::AsFd,
};

use anyhow::{Result, anyhow};
use libbpf_rs::{Link, MapCore, MapFlags};
use plain::Plain;

use crate::{
    answer::Counts,
    disks::{Id, Names},
    line::SlowIo,
    operation::Operations,
    parts::Parts,
    sums::{Disk, Sums},
    trace::{
        TraceMaps, TraceSkel,
        types::{cause, cause_sum, disk, watched, watched_kind},
    },
    waiting::{Waiting, read_all, value},
};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for watched {}

/// All that is shown, at one moment.
pub struct Snapshot {
    /// When, by the kernel's clock, in ns.
    pub at: u64,
    /// Those that were used.
    pub disks: Vec<Disk>,
    /// By process, disk and operation.
    pub causes: Vec<Cause>,
    /// The slowest since the snapshot before.
    pub slow: Vec<SlowIo>,
    /// What hangs, the oldest first.
    pub waiting: Vec<Waiting>,
    /// Whether all was measured.
    pub counts: Counts,
}

/// Who, and what they have done since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Who: what tells causes apart.
    pub by: By,
    /// How many I/Os.
    pub bios: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their latencies, in ns.
    pub sum: u64,
    /// What each part has of that.
    pub parts: Parts,
}

/// What tells causes apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct By {
    /// `None`: nobody was seen to submit them.
    pub pid: Option<u32>,
    /// Its name, or `-`.
    pub process: String,
    /// What the I/O was for.
    pub disk: String,
    /// In blktrace's letters, without flags.
    pub operation: String,
}

/// Reads what is added up, without keeping any program from running.
pub struct Reader {
    disks: Link,
    causes: Link,
    /// What the iterator visits already.
    known: HashSet<Id>,
}

impl Reader {
    /// To be called once the programs are loaded.
    pub fn new(skel: &TraceSkel<'_>) -> Result<Reader> {
        let (progs, maps) = (&skel.progs, &skel.maps);
        let reader = Reader {
            disks: progs.each_disk.attach_iter(maps.all_watched.as_fd())?,
            causes: progs.each_cause.attach_iter(maps.causes.as_fd())?,
            known: HashSet::new(),
        };
        watch(maps, 0, &watched { kind: watched_kind::OTHER_DISKS, ..watched::default() })?;
        Ok(reader)
    }

    /// Has the iterator visit disks that have got sums. Only these are told to the kernel: while a task is in bpf(2),
    /// kprobe programs are skipped on its CPU.
    pub fn follow(&mut self, maps: &TraceMaps<'_>, sums: &Sums<'_>) -> Result<()> {
        for id in sums.ids() {
            if self.known.insert(id) {
                let mut new = watched { kind: watched_kind::A_DISK, ..watched::default() };
                (new.id.diskseq, new.id.dev) = (id.diskseq, id.device);
                watch(maps, self.known.len() as u32, &new)?;
            }
        }
        Ok(())
    }

    /// The sums of each disk that was used.
    pub fn disks(&self, sums: &Sums<'_>, by_name: bool) -> Result<Vec<Disk>> {
        let bytes = read_all(&self.disks)?;
        let mut values = HashMap::new();
        for entry in bytes.chunks_exact(size_of::<watched>() + size_of::<disk>()) {
            let (of, sums) = entry.split_at(size_of::<watched>());
            let of: watched = value(of).ok_or_else(|| anyhow!("struct watched"))?;
            let is_one = of.kind == watched_kind::A_DISK;
            let id = is_one.then_some(Id { diskseq: of.id.diskseq, device: of.id.dev });
            let sums: disk = value(sums).ok_or_else(|| anyhow!("struct disk"))?;
            values.insert(id, sums);
        }
        sums.of_values(&values, by_name)
    }

    /// Who has caused how much. With `--who stack`, all stacks of a process together.
    pub fn causes(&self, names: &Names, operations: &Operations) -> Result<Vec<Cause>> {
        let bytes = read_all(&self.causes)?;
        let mut causes: HashMap<By, Cause> = HashMap::new();
        for entry in bytes.chunks_exact(size_of::<cause>() + size_of::<cause_sum>()) {
            let (of, sum) = entry.split_at(size_of::<cause>());
            let of: cause = value(of).ok_or_else(|| anyhow!("struct cause"))?;
            let sum: cause_sum = value(sum).ok_or_else(|| anyhow!("struct cause_sum"))?;
            let is_known = of.is_nobodys == 0;
            let disk = names.name(Id { diskseq: of.diskseq, device: of.dev })?;
            let by = By {
                pid: is_known.then_some(of.process),
                process: if is_known { common::text(&of.comm) } else { "-".to_owned() },
                disk: disk.to_string(),
                operation: operations.letters(of.operation).to_string(),
            };
            let new = Cause { by: by.clone(), bios: 0, bytes: 0, sum: 0, parts: Parts::default() };
            let cause = causes.entry(by).or_insert(new);
            cause.bios += sum.bios;
            cause.bytes += sum.bytes;
            cause.sum += sum.sum;
            for (place, part) in cause.parts.iter_mut().enumerate() {
                if sum.known >> place & 1 == 1 {
                    *part = Some(part.unwrap_or_default() + sum.parts[place]);
                }
            }
        }
        Ok(causes.into_values().collect())
    }
}

/// Puts it into this place of what the iterator visits.
fn watch(maps: &TraceMaps<'_>, place: u32, what: &watched) -> Result<()> {
    // SAFETY: the struct is integers without padding.
    let bytes = unsafe { plain::as_bytes(what) };
    Ok(maps.all_watched.update(&place.to_ne_bytes(), bytes, MapFlags::ANY)?)
}
