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
use common_screen::{cut, width};
use libbpf_rs::{MapCore, MapFlags};
use nix::unistd::{Uid, User};
use serde::{Serialize, Serializer, ser::SerializeMap};
use unicode_truncate::{Alignment, UnicodeTruncateStr};

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
    /// `None`: of several users.
    pub user: Option<String>,
    pub comm: String,
    #[serde(flatten)]
    pub counts: Counts,
}

/// A column, also what rows can be sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Column {
    Pid,
    User,
    Comm,
    Reads,
    Hits,
    Misses,
    #[value(name = "hit%")]
    HitPercent,
    Readahead,
    Dirtied,
}
use Column::{Comm, Dirtied, HitPercent, Hits, Misses, Pid, Readahead, Reads};

impl Column {
    /// From left to right.
    pub const ALL: [Column; 9] =
        [Pid, Column::User, Comm, Reads, Hits, Misses, HitPercent, Readahead, Dirtied];

    pub fn title(self) -> &'static str {
        match self {
            Pid => "PID",
            Column::User => "USER",
            Comm => "COMM",
            Reads => "READS",
            Hits => "HITS",
            Misses => "MISSES",
            HitPercent => "HIT%",
            Readahead => "READAHEAD",
            Dirtied => "DIRTIED",
        }
    }

    /// In characters: room for what these rows have there, and no less than usual.
    pub fn width(self, rows: &[Row]) -> usize {
        rows.iter().map(|row| width(&self.value(row))).fold(self.usual_width(), usize::max)
    }

    /// How wide it is at least, in characters, lest the columns move each time.
    pub fn usual_width(self) -> usize {
        match self {
            Column::User => 8,
            Comm => 15,
            HitPercent => 5,
            Readahead => 9,
            Pid | Reads | Hits | Misses | Dirtied => 7,
        }
    }

    pub fn value(self, row: &Row) -> String {
        let counts = &row.counts;
        match self {
            Pid if row.pid == 0 => "-".into(),
            Pid => row.pid.to_string(),
            Column::User => row.user.clone().unwrap_or("-".into()),
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

    /// Whether it holds text, which may be cut: a part of a number would be another number.
    pub fn is_text(self) -> bool {
        matches!(self, Column::User | Comm)
    }

    /// A text of this column in so many characters: names begin at its left, numbers end at its right.
    /// A name that is too long ends with `…`.
    pub fn aligned(self, text: &str, columns: usize) -> String {
        let (text, alignment) = match self.is_text() {
            true => (cut(text, columns), Alignment::Left),
            false => (text.into(), Alignment::Right),
        };
        text.unicode_pad(columns, alignment, false).into_owned()
    }

    /// Numbers descend, and names and process numbers ascend.
    fn order(self, a: &Row, b: &Row) -> Ordering {
        let (left, right) = (&a.counts, &b.counts);
        match self {
            Pid => a.pid.cmp(&b.pid),
            Column::User => a.user.cmp(&b.user),
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
    /// Their names, once they have been looked up.
    users: HashMap<u64, String>,
}

impl Sampler {
    pub fn new() -> Sampler {
        let now = Instant::now();
        let (before, users) = (HashMap::new(), HashMap::new());
        Sampler { start: now, last: now, total: Counts::default(), before, users }
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
                let (user, comm) = match process.pid {
                    0 => (None, "(elsewhere)".into()),
                    _ => (Some(self.user(now.user)), common::text(&now.comm)),
                };
                rows.push(Row { pid: process.pid, user, comm, counts: difference });
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

    /// The name of a user, or the number where there is no name.
    fn user(&mut self, number: u64) -> String {
        let look_up = || User::from_uid(Uid::from_raw(number as u32)).ok().flatten();
        let name = self.users.entry(number).or_insert_with(|| {
            look_up().map_or(number.to_string(), |user| common::printable(&user.name))
        });
        name.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pid: u64, comm: &str, hits: u64, misses: u64, dirtied: u64) -> Row {
        let counts = Counts { hits, misses, dirtied, ..Counts::default() };
        Row { pid, user: Some(format!("user{}", pid % 2)), comm: comm.into(), counts }
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
            (Column::User, [2, 1, 3]),
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
        assert_eq!(json["user"], "user1");
        let json = serde_json::to_value(row(3, "dd", 0, 0, 1)).unwrap();
        assert!(json["hit_percent"].is_null());
    }

    #[test]
    fn a_name_is_cut_with_a_mark_and_a_number_never() {
        assert_eq!(Comm.aligned("postgres", 8), "postgres");
        assert_eq!(Comm.aligned("postgres", 7), "postgr…");
        assert_eq!(Comm.aligned("数据库", 4), "数… ", "two columns each");
        assert_eq!(Comm.aligned("dd", 0), "");
        assert_eq!(Hits.aligned("4099", 3), "4099");
        assert_eq!(Hits.width(&[row(1, "", 1_234_567_890, 0, 0)]), 10);
    }

    #[test]
    fn a_user_has_a_name_or_a_number() {
        let mut sampler = Sampler::new();
        assert_eq!(sampler.user(0), "root");
        assert_eq!(sampler.user(4_294_967_294), "4294967294");
    }
}
