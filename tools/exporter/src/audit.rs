//! Whether the exporter has counted what the kernel has: its counts beside those in /sys/block/DISK/stat.
//!
//! Both counts change while they are read. A request is counted here first, and by the kernel a moment later.
//! So what was read later is no less than what the other one had, if both count the same: the kernel's counts
//! less ours that were read after them are the least that we miss. The other way round, ours have to be a second
//! older.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::series::{Series, Sums};

/// Within this time, the kernel counts what has completed.
const SOON: Duration = Duration::from_secs(1);

/// Counts that are compared: of reads and flushes, of writes, of discards. The kernel takes the flush that
/// dm-multipath sends down a path for a read.
type Counts = [i64; 3];

/// What the kernel has counted of a disk with requests.
#[derive(Debug)]
struct Kernels {
    name: String,
    counts: Counts,
    is_audited: bool,
}

/// The kernel's counts of all disks, by their diskseq.
#[derive(Debug)]
pub struct Look(HashMap<u64, Kernels>);

/// A disk, as this knows it.
#[derive(Debug, Default)]
struct Disk {
    /// By how much the kernel's counts were larger than ours at the start: at least, and at most. A disk that came
    /// later starts at 0 in both.
    least: Counts,
    most: Counts,
    /// Ours at the last look, and those that were a second old at a later one.
    last: Counts,
    older: Counts,
    /// What only one of both has.
    missing: Counts,
    extra: Counts,
    /// Whether the kernel's counts cannot be compared for now.
    is_paused: bool,
}

/// What the comparison of a disk has found.
#[derive(Clone, Debug, PartialEq)]
pub struct Gap {
    /// The disk's name.
    pub disk: String,
    /// Requests that the kernel has counted and the exporter has not, and those that only the exporter has; `None`:
    /// nobody knows, for the kernel's counts cannot be compared.
    pub missing_in: Option<(u64, Option<u64>)>,
}

/// All disks.
#[derive(Debug)]
pub struct Audit {
    bios: bool,
    disks: HashMap<u64, Disk>,
    /// When `older` of the disks was read.
    at: Instant,
}

impl Audit {
    /// Takes what both have counted when the programs have just been attached.
    pub fn begin(
        bios: bool,
        mut ours: impl FnMut() -> Result<BTreeMap<Series, Sums>>,
    ) -> Result<Audit> {
        let mut audit = Audit { bios, disks: HashMap::new(), at: Instant::now() };
        let (before, look, after) = (ours()?, audit.look()?, ours()?);
        for (diskseq, Kernels { name, counts, .. }) in look.0 {
            let [before, after] = [&before, &after].map(|ours| audit.ours(ours, &name));
            let (least, most) = (less(counts, after), less(counts, before));
            let disk = Disk { least, most, last: after, older: after, ..Disk::default() };
            audit.disks.insert(diskseq, disk);
        }
        Ok(audit)
    }

    /// What the kernel has counted: to be taken before ours are read.
    pub fn look(&self) -> Result<Look> {
        let mut look = HashMap::new();
        for disk in common::block_devices()?.into_iter().filter(|disk| !disk.is_partition) {
            let path = Path::new("/sys/block").join(&disk.name);
            if let Some(counts) = self.kernels(&path)
                && diskseq(&path) == Some(disk.diskseq)
            {
                let is_audited = is_auditable(&path, self.bios);
                look.insert(disk.diskseq, Kernels { name: disk.name, counts, is_audited });
            }
        }
        Ok(Look(look))
    }

    /// Compares that with ours, which were read after it.
    pub fn compare(&mut self, look: &Look, ours: &BTreeMap<Series, Sums>) -> Vec<Gap> {
        self.disks.retain(|diskseq, _| look.0.contains_key(diskseq));
        let is_soon = self.at.elapsed() < SOON;
        let mut gaps = Vec::new();
        for (&diskseq, kernels) in &look.0 {
            let ours = self.ours(ours, &kernels.name);
            if self::diskseq(&Path::new("/sys/block").join(&kernels.name)) != Some(diskseq) {
                continue; // it has gone meanwhile, and ours may be those of another disk of this name
            }
            let disk = self.disks.entry(diskseq).or_default();
            disk.compare(kernels, ours, is_soon);
            let (missing, extra) =
                (disk.missing.iter().sum::<i64>(), disk.extra.iter().sum::<i64>());
            let extra = (!self.bios).then_some(extra as u64);
            let missing_in = kernels.is_audited.then_some((missing as u64, extra));
            gaps.push(Gap { disk: kernels.name.clone(), missing_in });
        }
        if !is_soon {
            self.at = Instant::now();
        }
        gaps.sort_by(|a, b| a.disk.cmp(&b.disk));
        gaps
    }

    /// The kernel's counts of a disk that has requests.
    fn kernels(&self, disk: &Path) -> Option<Counts> {
        if !disk.join("mq").exists() {
            return None;
        }
        let stat = fs::read_to_string(disk.join("stat")).ok()?;
        let stat: Vec<i64> = stat.split_whitespace().flat_map(str::parse).collect();
        let [reads, writes, discards, flushes] = [0, 4, 11, 15].map(|n| stat.get(n).copied());
        let (reads, writes, discards) = (reads?, writes?, discards?);
        Some(match self.bios {
            // A bio without data that asks for a flush is a write there, and the flush another request.
            true => [reads + writes + discards, 0, 0],
            false => [reads + flushes?, writes, discards],
        })
    }

    /// Ours. Each request has at least one bio, or a part of one.
    fn ours(&self, series: &BTreeMap<Series, Sums>, name: &str) -> Counts {
        let mut counts = Counts::default();
        for ((_, operation), sums) in series.iter().filter(|((disk, _), _)| disk == name) {
            let group = match *operation {
                _ if self.bios => 0,
                "write" => 1,
                "discard" => 2,
                _ => 0,
            };
            counts[group] += (sums.all.count() + sums.parts_made) as i64;
        }
        counts
    }
}

impl Disk {
    fn compare(&mut self, kernels: &Kernels, ours: Counts, is_soon: bool) {
        let all = [0, 1, 2];
        if !kernels.is_audited {
            self.is_paused = true;
        } else if std::mem::take(&mut self.is_paused) {
            // From here on, what is found is added to what was found before.
            self.most = all.map(|n| kernels.counts[n] - self.last[n] - self.missing[n]);
            self.least = all.map(|n| kernels.counts[n] - ours[n] + self.extra[n]);
            self.older = ours;
        } else {
            let missing = less(less(kernels.counts, ours), self.most);
            self.missing = all.map(|n| self.missing[n].max(missing[n]));
            if !is_soon {
                let extra = all.map(|n| self.older[n] - kernels.counts[n] + self.least[n]);
                self.extra = all.map(|n| self.extra[n].max(extra[n]));
            }
        }
        self.last = ours;
        if !is_soon {
            self.older = ours;
        }
    }
}

fn less(these: Counts, those: Counts) -> Counts {
    [0, 1, 2].map(|n| these[n] - those[n])
}

fn diskseq(disk: &Path) -> Option<u64> {
    fs::read_to_string(disk.join("diskseq")).ok()?.trim().parse().ok()
}

/// Whether the kernel counts what the exporter does. Of bios, it does not where other disks lie above this one:
/// they send it bios of their own; nor on a disk with checksums, where a bio completes after its request.
fn is_auditable(disk: &Path, bios: bool) -> bool {
    let says = |file: &str| fs::read_to_string(disk.join(file)).unwrap_or_default();
    let has = |directory: &Path| {
        fs::read_dir(directory.join("holders")).is_ok_and(|mut holders| holders.next().is_some())
    };
    let entries = || fs::read_dir(disk).into_iter().flatten().flatten();
    let checksums = says("integrity/format");
    says("queue/iostats").trim() == "1"
        && (!bios
            || ["", "none"].contains(&checksums.trim())
                && !has(disk)
                && !entries().any(|entry| has(&entry.path())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk() -> Disk {
        // Busy when the exporter was started.
        Disk { least: [10, 0, 0], most: [12, 0, 0], ..Disk::default() }
    }

    fn kernels(reads: i64, is_audited: bool) -> Kernels {
        Kernels { name: "vda".into(), counts: [reads, 0, 0], is_audited }
    }

    #[test]
    fn what_is_in_flight_is_in_no_gap() {
        let mut disk = disk();
        for (kernels_reads, ours, missing, extra) in [
            (110, 110, 0, 0), // ours are read later
            (150, 135, 3, 0),
            (200, 195, 3, 0),
            (207, 197, 3, 0),
        ] {
            disk.compare(&kernels(kernels_reads, true), [ours, 0, 0], false);
            assert_eq!((disk.missing[0], disk.extra[0]), (missing, extra), "{disk:?}");
        }
        disk.compare(&kernels(210, true), [230, 0, 0], false);
        assert_eq!((disk.missing[0], disk.extra[0]), (3, 0), "{disk:?}");
        disk.compare(&kernels(212, true), [260, 0, 0], true);
        assert_eq!(disk.extra[0], 0, "not a second old: {disk:?}");
        disk.compare(&kernels(215, true), [260, 0, 0], false);
        assert_eq!(disk.extra[0], 25, "{disk:?}");
    }

    #[test]
    fn a_pause_loses_no_gap() {
        let mut disk = disk();
        disk.compare(&kernels(150, true), [135, 0, 0], false);
        disk.compare(&kernels(150, false), [900, 0, 0], false);
        disk.compare(&kernels(150, true), [900, 0, 0], false);
        assert_eq!((disk.missing[0], disk.extra[0]), (3, 0), "{disk:?}");
        disk.compare(&kernels(160, true), [905, 0, 0], false);
        assert_eq!((disk.missing[0], disk.extra[0]), (8, 0), "{disk:?}");
    }
}
