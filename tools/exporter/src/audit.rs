//! Whether the exporter has counted what the kernel has: its counts beside those in /sys/block/DISK/stat.
//!
//! Both counts change while they are read. A request is counted here first, and by the kernel a moment later.
//! So what was read later is no less than what the other one had, if both count the same: the kernel's counts
//! less ours that were read after them are the least that we miss. The other way round, ours have to be a second
//! older.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::{
    looks::{self, Counts, Kernels, Look},
    series::{Series, Sums},
};

/// Within this time, the kernel counts what has completed.
const SOON: Duration = Duration::from_secs(1);

/// What the exporter has counted, and when that had been read.
#[derive(Debug)]
pub struct Ours {
    /// Of each disk and operation.
    pub series: BTreeMap<Series, Sums>,
    /// The time after that.
    pub at: Instant,
}

/// A disk, as this knows it.
#[derive(Debug)]
struct Disk {
    /// By how much the kernel's counts were larger than ours at the start: at least, and at most. A disk that came
    /// later starts at 0 in both.
    least: Counts,
    most: Counts,
    /// Ours at the last comparison, and those that are to be a second older than the kernel's.
    last: (Counts, Instant),
    older: (Counts, Instant),
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
    /// Whether the kernel keeps statistics of it, if that is known.
    pub has_statistics: Option<bool>,
    /// How old the kernel's counts are; where they were never read, since when that has been tried.
    pub age: Duration,
}

/// All disks.
#[derive(Debug)]
pub struct Audit {
    bios: bool,
    disks: HashMap<u64, Disk>,
    /// Disks that are to be compared from the next look on, see [`Audit::awaits_disks`].
    awaited: HashSet<u64>,
}

impl Audit {
    /// Of requests, or of bios. It knows no disk yet.
    pub fn new(bios: bool) -> Audit {
        Audit { bios, disks: HashMap::new(), awaited: HashSet::new() }
    }

    /// Whether the last look had disks with counters of which nobody knows when they began: the programs had just
    /// been attached, or the disk got a new number and has kept its counters. To compare these, ours have to be
    /// read before the next look, too.
    pub fn awaits_disks(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Compares a look with ours, which were read after it, and for disks that this does not know also before.
    pub fn compare(&mut self, before: Option<&Ours>, look: &Look, ours: &Ours) -> Vec<Gap> {
        let there: HashSet<u64> = look.disks.iter().map(|disk| disk.diskseq).collect();
        self.disks.retain(|diskseq, _| there.contains(diskseq));
        let awaited = std::mem::take(&mut self.awaited);
        let gap = |disk: &looks::Disk| {
            let kernels = disk.kernels.as_ref();
            let since = kernels.map_or(disk.since, |kernels| kernels.at);
            Gap {
                disk: disk.name.clone(),
                // Else it had another number then, and ours of this name were of that.
                missing_in: self.missing_in(
                    disk,
                    before.filter(|_| awaited.contains(&disk.diskseq)),
                    ours,
                ),
                has_statistics: kernels.map(|kernels| kernels.has_statistics),
                age: ours.at.saturating_duration_since(since),
            }
        };
        look.disks.iter().filter(|disk| disk.has_requests).map(gap).collect()
    }

    fn missing_in(
        &mut self,
        disk: &looks::Disk,
        before: Option<&Ours>,
        ours: &Ours,
    ) -> Option<(u64, Option<u64>)> {
        let kernels = disk.kernels.as_ref()?;
        let mine = self.ours(ours, &disk.name);
        if !self.disks.contains_key(&disk.diskseq) {
            let before = before.filter(|before| before.at <= kernels.at);
            let before = before.map(|before| self.ours(before, &disk.name));
            let Some(begun) = Disk::begin(disk.is_new, before, kernels, (mine, ours.at)) else {
                self.awaited.insert(disk.diskseq);
                return None;
            };
            self.disks.insert(disk.diskseq, begun);
        }
        let known = self.disks.get_mut(&disk.diskseq)?;
        known.compare(kernels, (mine, ours.at));
        let sum = |counts: Counts| counts.iter().sum::<i64>() as u64;
        let extra = (!self.bios).then_some(sum(known.extra));
        (kernels.is_audited && !known.is_paused).then_some((sum(known.missing), extra))
    }

    /// Ours. Each request has at least one bio, or a part of one.
    fn ours(&self, ours: &Ours, name: &str) -> Counts {
        let mut counts = Counts::default();
        for ((_, operation), sums) in ours.series.iter().filter(|((disk, _), _)| disk == name) {
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
    /// With what both have at the start. `before`: ours, read before the kernel's; without these, nobody knows what
    /// of the kernel's came before ours, unless the disk is new.
    fn begin(
        is_new: bool,
        before: Option<Counts>,
        kernels: &Kernels,
        ours: (Counts, Instant),
    ) -> Option<Disk> {
        let (least, most) = match before {
            _ if is_new => (Counts::default(), Counts::default()),
            Some(before) => (less(kernels.counts, ours.0), less(kernels.counts, before)),
            None => return None,
        };
        let (missing, extra) = (Counts::default(), Counts::default());
        Some(Disk { least, most, last: ours, older: ours, missing, extra, is_paused: false })
    }

    fn compare(&mut self, kernels: &Kernels, ours: (Counts, Instant)) {
        let all = [0, 1, 2];
        let is_soon = kernels.at.saturating_duration_since(self.older.1) < SOON;
        if !kernels.is_audited {
            self.is_paused = true;
        } else if self.is_paused && kernels.at >= self.last.1 {
            // Read after ours were the last time. From here on, what is found is added to what was found before.
            self.is_paused = false;
            self.most = all.map(|n| kernels.counts[n] - self.last.0[n] - self.missing[n]);
            self.least = all.map(|n| kernels.counts[n] - ours.0[n] + self.extra[n]);
            self.older = ours;
        } else if !self.is_paused {
            let missing = less(less(kernels.counts, ours.0), self.most);
            self.missing = all.map(|n| self.missing[n].max(missing[n]));
            if !is_soon {
                let extra = all.map(|n| self.older.0[n] - kernels.counts[n] + self.least[n]);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Seconds after some instant.
    fn at(seconds: u64) -> Instant {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        *START.get_or_init(Instant::now) + Duration::from_secs(seconds)
    }

    fn kernels(reads: i64, is_audited: bool, second: u64) -> Kernels {
        let has_statistics = is_audited;
        Kernels { at: at(second), counts: [reads, 0, 0], has_statistics, is_audited }
    }

    fn begin(is_new: bool, before: Option<i64>, reads: i64, ours: i64) -> Option<Disk> {
        let before = before.map(|before| [before, 0, 0]);
        Disk::begin(is_new, before, &kernels(reads, true, 0), ([ours, 0, 0], at(0)))
    }

    /// The kernel had 10 to 12 more than ours when the exporter was started.
    fn disk() -> Disk {
        begin(false, Some(0), 12, 2).unwrap()
    }

    fn compare(disk: &mut Disk, kernels: &Kernels, ours: i64, second: u64) -> (i64, i64) {
        disk.compare(kernels, ([ours, 0, 0], at(second)));
        (disk.missing[0], disk.extra[0])
    }

    #[test]
    fn what_is_in_flight_is_in_no_gap() {
        let mut disk = disk();
        for (second, kernels_reads, ours, missing) in [
            (2, 110, 110, 0), // ours are read later
            (4, 150, 135, 3),
            (6, 200, 195, 3),
            (8, 207, 197, 3),
            (10, 210, 230, 3),
        ] {
            let kernels = kernels(kernels_reads, true, second);
            assert_eq!(compare(&mut disk, &kernels, ours, second), (missing, 0), "{disk:?}");
        }
        let soon = Kernels { at: at(11) - Duration::from_millis(1), ..kernels(212, true, 0) };
        assert_eq!(compare(&mut disk, &soon, 260, 11).1, 0, "not a second old: {disk:?}");
        assert_eq!(compare(&mut disk, &kernels(215, true, 11), 260, 11).1, 25, "{disk:?}");
    }

    /// The kernel's counts cannot be read for a while: they stay as they were, and ours continue.
    #[test]
    fn an_old_look_makes_no_gap() {
        let mut disk = disk();
        assert_eq!(compare(&mut disk, &kernels(112, true, 2), 102, 2), (0, 0), "{disk:?}");
        let old = kernels(120, true, 4);
        for second in [5, 10, 60, 3600] {
            let ours = 110 + 10 * second as i64;
            assert_eq!(compare(&mut disk, &old, ours, second), (0, 0), "{disk:?}");
        }
        let ours = 110 + 36_000;
        assert_eq!(compare(&mut disk, &kernels(ours + 12, true, 3601), ours, 3601), (0, 0));
        assert_eq!(compare(&mut disk, &kernels(ours + 17, true, 3603), ours, 3603), (5, 0));
    }

    #[test]
    fn a_pause_loses_no_gap() {
        let mut disk = disk();
        compare(&mut disk, &kernels(150, true, 2), 135, 2);
        compare(&mut disk, &kernels(150, false, 4), 900, 6);
        compare(&mut disk, &kernels(950, true, 5), 960, 7);
        assert!(disk.is_paused, "the kernel's are older than ours: {disk:?}");
        assert_eq!(compare(&mut disk, &kernels(150, true, 8), 960, 8), (3, 0), "{disk:?}");
        assert_eq!(compare(&mut disk, &kernels(160, true, 10), 965, 10), (8, 0), "{disk:?}");
    }

    #[test]
    fn counters_that_go_on_are_no_gap_and_new_ones_are() {
        assert!(begin(false, None, 130, 30).is_none(), "nobody knows what was before");
        let mut known = begin(false, Some(30), 130, 30).unwrap();
        assert_eq!(compare(&mut known, &kernels(130, true, 2), 30, 2), (0, 0), "{known:?}");
        assert_eq!(compare(&mut known, &kernels(137, true, 4), 30, 4), (7, 0), "{known:?}");
        let mut new = begin(true, None, 130, 30).unwrap();
        assert_eq!(compare(&mut new, &kernels(130, true, 2), 30, 2), (100, 0), "{new:?}");
    }
}
