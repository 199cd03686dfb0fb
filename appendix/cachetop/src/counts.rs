//! The counts of the processes: from the map to rows that can be sorted.

use std::{
    cmp::Ordering,
    collections::HashMap,
    iter::Sum,
    ops::{Add, Sub},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use libbpf_rs::{MapCore, MapFlags};
use serde::{Serialize, Serializer, ser::SerializeMap};

use crate::trace::types;

// SAFETY: the C structs hold integers only: any bytes are a value of them.
unsafe impl plain::Plain for types::process {}
unsafe impl plain::Plain for types::counts {}

/// What a process has done; all but `reads` in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub reads: u64,
    pub hits: u64,
    pub misses: u64,
    pub readahead: u64,
    pub dirtied: u64,
}

impl Counts {
    /// The share of the pages asked for that were in memory: 0 to 100, `None` where no page was.
    pub fn hit_percent(&self) -> Option<f64> {
        let total = self.hits + self.misses;
        (total > 0).then(|| self.hits as f64 * 100.0 / total as f64)
    }

    fn zip(self, other: Counts, f: impl Fn(u64, u64) -> u64) -> Counts {
        Counts {
            reads: f(self.reads, other.reads),
            hits: f(self.hits, other.hits),
            misses: f(self.misses, other.misses),
            readahead: f(self.readahead, other.readahead),
            dirtied: f(self.dirtied, other.dirtied),
        }
    }
}

impl Add for Counts {
    type Output = Counts;
    fn add(self, other: Counts) -> Counts {
        self.zip(other, |a, b| a + b)
    }
}

impl Sub for Counts {
    type Output = Counts;
    fn sub(self, other: Counts) -> Counts {
        self.zip(other, |a, b| a - b)
    }
}

impl Sum for Counts {
    fn sum<I: Iterator<Item = Counts>>(counts: I) -> Counts {
        counts.fold(Counts::default(), Add::add)
    }
}

impl Serialize for Counts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("reads", &self.reads)?;
        map.serialize_entry("hits", &self.hits)?;
        map.serialize_entry("misses", &self.misses)?;
        map.serialize_entry("hit_percent", &self.hit_percent())?;
        map.serialize_entry("readahead", &self.readahead)?;
        map.serialize_entry("dirtied", &self.dirtied)?;
        map.end()
    }
}

/// A process, and what it has done in an interval.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// 0: the processes that this PID namespace does not see, together.
    pub pid: u64,
    pub comm: String,
    #[serde(flatten)]
    pub counts: Counts,
}

/// A column, also what rows can be sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Column {
    Pid,
    Comm,
    Reads,
    Hits,
    Misses,
    #[value(name = "hit%")]
    HitPercent,
    Readahead,
    Dirtied,
}
use Column::*;

impl Column {
    /// From left to right.
    pub const ALL: [Column; 8] = [Pid, Comm, Reads, Hits, Misses, HitPercent, Readahead, Dirtied];

    pub fn title(self) -> &'static str {
        match self {
            Pid => "PID",
            Comm => "COMM",
            Reads => "READS",
            Hits => "HITS",
            Misses => "MISSES",
            HitPercent => "HIT%",
            Readahead => "READAHEAD",
            Dirtied => "DIRTIED",
        }
    }

    /// In characters.
    pub fn width(self) -> usize {
        match self {
            Pid => 7,
            Comm => 15,
            HitPercent => 6,
            Readahead => 9,
            _ => 8,
        }
    }

    pub fn value(self, row: &Row) -> String {
        let counts = &row.counts;
        match self {
            Pid if row.pid == 0 => "-".into(),
            Pid => row.pid.to_string(),
            Comm => row.comm.clone(),
            Reads => counts.reads.to_string(),
            Hits => counts.hits.to_string(),
            Misses => counts.misses.to_string(),
            HitPercent => {
                counts.hit_percent().map_or("-".into(), |percent| format!("{percent:.1}"))
            }
            Readahead => counts.readahead.to_string(),
            Dirtied => counts.dirtied.to_string(),
        }
    }

    /// A text of this column, as wide as the column: names begin at its left, numbers end at its right.
    pub fn aligned(self, text: &str) -> String {
        let width = self.width();
        if self == Comm { format!("{text:<width$}") } else { format!("{text:>width$}") }
    }

    /// Numbers descend, and names and process numbers ascend.
    fn order(self, a: &Row, b: &Row) -> Ordering {
        let (left, right) = (&a.counts, &b.counts);
        match self {
            Pid => a.pid.cmp(&b.pid),
            Comm => a.comm.cmp(&b.comm),
            Reads => right.reads.cmp(&left.reads),
            Hits => right.hits.cmp(&left.hits),
            Misses => right.misses.cmp(&left.misses),
            HitPercent => {
                let percent = |counts: &Counts| counts.hit_percent().unwrap_or(-1.0);
                percent(right).total_cmp(&percent(left))
            }
            Readahead => right.readahead.cmp(&left.readahead),
            Dirtied => right.dirtied.cmp(&left.dirtied),
        }
    }
}

/// Sorts by a column; rows that are equal there, by all their pages, and by the process.
pub fn sort(rows: &mut [Row], column: Column, reverse: bool) {
    let pages = |row: &Row| row.counts.hits + row.counts.misses + row.counts.dirtied;
    rows.sort_by(|a, b| {
        let order = column.order(a, b);
        let order = if reverse { order.reverse() } else { order };
        order.then(pages(b).cmp(&pages(a))).then(a.pid.cmp(&b.pid))
    });
}

/// Takes the difference between what the kernel has counted now and the time before.
pub struct Sampler {
    pub start: Instant,
    pub last: Instant,
    /// Of all processes, since the start.
    pub total: Counts,
    before: HashMap<Vec<u8>, Counts>,
}

impl Sampler {
    pub fn new() -> Sampler {
        let now = Instant::now();
        Sampler { start: now, last: now, total: Counts::default(), before: HashMap::new() }
    }

    /// How long the interval was, and what each process has done in it; those that did nothing are
    /// left out. The entries of processes that are gone are deleted.
    pub fn sample(&mut self, map: &impl MapCore) -> Result<(Duration, Vec<Row>)> {
        let mut rows = Vec::new();
        // All keys first: an iteration begins anew where its last key has been deleted.
        let keys: Vec<_> = map.keys().collect();
        for key in keys {
            let Some(value) = map.lookup(&key, MapFlags::ANY)? else { continue };
            let process = plain::from_bytes::<types::process>(&key).ok().context("odd key")?;
            let now = plain::from_bytes::<types::counts>(&value).ok().context("odd value")?;
            let counts = Counts {
                reads: now.reads,
                hits: now.hits,
                misses: now.misses,
                readahead: now.readahead,
                dirtied: now.dirtied,
            };
            let before = self.before.insert(key.clone(), counts);
            let difference = counts - before.unwrap_or_default();
            if difference != Counts::default() {
                let comm = if process.pid == 0 { "(elsewhere)".into() } else { text(&now.comm) };
                rows.push(Row { pid: process.pid, comm, counts: difference });
            } else if process.pid != 0 && !Path::new(&format!("/proc/{}", process.pid)).exists() {
                map.delete(&key)?;
                self.before.remove(&key);
            }
        }
        self.total = self.total + rows.iter().map(|row| row.counts).sum();
        let now = Instant::now();
        let time = now - self.last;
        self.last = now;
        Ok((time, rows))
    }
}

/// A string of C. Control characters would change more than their cell: they are replaced.
fn text(string: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = string.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).replace(char::is_control, "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pid: u64, comm: &str, hits: u64, misses: u64, dirtied: u64) -> Row {
        let counts = Counts { hits, misses, dirtied, ..Counts::default() };
        Row { pid, comm: comm.into(), counts }
    }

    #[test]
    fn a_ratio_is_between_0_and_100() {
        let percent = |hits, misses| row(1, "", hits, misses, 9).counts.hit_percent();
        assert_eq!(percent(0, 0), None);
        assert_eq!(percent(0, 5), Some(0.0));
        assert_eq!(percent(5, 0), Some(100.0));
        assert_eq!(percent(u64::MAX / 2, u64::MAX / 2), Some(50.0));
    }

    #[test]
    fn every_column_sorts() {
        let rows = [row(3, "b", 10, 1, 0), row(1, "c", 20, 30, 2), row(2, "a", 0, 0, 7)];
        for (column, expected) in [
            (Pid, [1, 2, 3]),
            (Comm, [2, 3, 1]),
            (Hits, [1, 3, 2]),
            (Misses, [1, 3, 2]),
            (HitPercent, [3, 1, 2]),
            (Dirtied, [2, 1, 3]),
            (Reads, [1, 3, 2]),
        ] {
            let mut sorted = rows.to_vec();
            sort(&mut sorted, column, false);
            assert_eq!(
                sorted.iter().map(|row| row.pid).collect::<Vec<_>>(),
                expected,
                "{column:?}"
            );
        }
        let mut sorted = rows.to_vec();
        sort(&mut sorted, Misses, true);
        assert_eq!(sorted.iter().map(|row| row.pid).collect::<Vec<_>>(), [2, 3, 1]);
    }

    #[test]
    fn json_has_a_member_for_each_count() {
        let json = serde_json::to_value(row(3, "dd", 3, 1, 0)).unwrap();
        assert_eq!(json["hit_percent"], 75.0);
        assert_eq!((&json["pid"], &json["comm"]), (&3.into(), &"dd".into()));
        let json = serde_json::to_value(row(3, "dd", 0, 0, 1)).unwrap();
        assert!(json["hit_percent"].is_null());
    }
}
