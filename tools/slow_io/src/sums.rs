//! What was added up: for each disk where the time went.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsFd, AsRawFd},
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use common::colours;
use libbpf_rs::{Map, MapCore, MapFlags, MapHandle, MapType, libbpf_sys::bpf_map_create_opts};
use plain::Plain;
use serde_json::{Value, json};
use textwrap::{Options, fill};

use crate::{
    below,
    cli::Slow,
    disks::{Id, Names},
    kind::Kind,
    parts::{self, NAMES, Parts},
    trace::types::{disk, disk_id, slow_ones, sum},
};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for disk {}
// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for disk_id {}

/// How wide a sentence is at most.
const COLUMNS: usize = 100;

/// The place of the part that every bio with a request has: `enum part` in parts.h.
const DEVICE: usize = 2;

/// What is added up in the kernel: a map for each disk and partition.
pub struct Sums<'a> {
    names: &'a Names,
    maps: BTreeMap<Id, MapHandle>,
}

impl<'a> Sums<'a> {
    /// Of disks that have these names: none yet.
    pub fn new(names: &'a Names) -> Sums<'a> {
        Sums { names, maps: BTreeMap::new() }
    }

    /// Puts a map of its own into the kernel for each new disk. Only of these: while a task is in bpf(2), the
    /// kernel skips all kprobe programs on its CPU (kernel/bpf/syscall.c, bpf_disable_instrumentation()), also
    /// when it has taken the CPU from that task.
    pub fn follow(&mut self, disks: &Map<'_>) -> Result<()> {
        self.names.look()?;
        let mut new = self.names.all();
        new.retain(|id| !self.maps.contains_key(id));
        new.truncate(disks.max_entries() as usize - self.maps.len());
        for id in new {
            let (key, value) = (size_of::<u32>() as u32, size_of::<disk>() as u32);
            let options = bpf_map_create_opts {
                sz: size_of::<bpf_map_create_opts>() as libbpf_rs::libbpf_sys::size_t,
                ..Default::default()
            };
            let name = Some("of_disk");
            let map = MapHandle::create(MapType::PercpuArray, name, key, value, 2, &options)
                .context("there is no memory for the sums of a disk")?;
            let key = disk_id { diskseq: id.diskseq, dev: id.device, unused: 0 };
            // SAFETY: the struct is integers without padding.
            let key = unsafe { plain::as_bytes(&key) };
            disks.update(key, &map.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY)?;
            self.maps.insert(id, map);
        }
        Ok(())
    }

    /// The disks that have sums of their own.
    pub fn ids(&self) -> impl Iterator<Item = Id> {
        self.maps.keys().copied()
    }

    /// What was added up for each disk that was used, and for others, until a turn after their first bio. Disks that
    /// had one name after another are one, where they are followed by it; else each is told apart.
    pub fn read(&self, others: &Map<'_>, by_name: bool) -> Result<Vec<Disk>> {
        self.each(by_name, |id, disk| match id.and_then(|id| self.maps.get(&id)) {
            Some(map) => disk.add(map),
            None => disk.add(others),
        })
    }

    /// The same of what was read already; `None`: of no disk that has sums of its own.
    pub fn of_values(
        &self,
        values: &HashMap<Option<Id>, disk>,
        by_name: bool,
    ) -> Result<Vec<Disk>> {
        self.each(by_name, |id, disk| {
            values.get(&id).into_iter().for_each(|value| disk.add_value(value));
            Ok(())
        })
    }

    fn each(
        &self,
        by_name: bool,
        add: impl Fn(Option<Id>, &mut Disk) -> Result<()>,
    ) -> Result<Vec<Disk>> {
        let mut used = vec![Disk { name: "other disks".to_owned(), ..Disk::default() }];
        add(None, &mut used[0])?;
        for id in self.maps.keys() {
            let name = self.names.name(*id)?.to_string();
            let same = used.iter().position(|disk| by_name && disk.name == name);
            let place = same.unwrap_or(used.len());
            if same.is_none() {
                used.push(Disk { name, ..Disk::default() });
            }
            used[place].diskseq = Some(id.diskseq);
            add(Some(*id), &mut used[place])?;
        }
        used.retain(|disk| disk.bios() > 0);
        for place in 0..used.len() {
            let same = |other: &&Disk| other.name == used[place].name;
            used[place].shares_name = used.iter().filter(same).count() > 1;
        }
        Ok(used)
    }
}

/// The sums of one part.
#[derive(Clone, Default)]
pub struct Sum {
    /// In ns, as the next one.
    pub sum: u64,
    /// The longest.
    pub max: u64,
    slots: Vec<u64>,
}

impl Sum {
    fn add(&mut self, other: &sum) {
        self.sum += other.sum;
        self.max = self.max.max(other.max);
        self.slots.resize(other.slots.len(), 0);
        self.slots.iter_mut().zip(other.slots).for_each(|(slot, count)| *slot += u64::from(count));
    }

    fn bios(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// What came since these earlier sums. The longest of that is known as well as its slot, unless it is the longest
    /// of all.
    fn since(&self, earlier: &Sum) -> Sum {
        let before = earlier.slots.iter().copied().chain(std::iter::repeat(0));
        let slots = self.slots.iter().zip(before).map(|(now, before)| now.saturating_sub(before));
        let slots: Vec<u64> = slots.collect();
        let last = slots.iter().rposition(|count| *count > 0);
        let max = match last {
            None => 0,
            _ if self.max > earlier.max => self.max,
            Some(slot) if slot + 1 < slots.len() => longest(slot).min(self.max),
            Some(_) => self.max,
        };
        Sum { sum: self.sum.saturating_sub(earlier.sum), max, slots }
    }

    /// The time in ns that `percent` do not exceed: at most 6 % too long.
    pub fn percentile(&self, percent: u64) -> u64 {
        let rank = (self.bios() * percent).div_ceil(100);
        let mut counted = 0;
        let reached = self.slots.iter().position(|count| {
            counted += count;
            counted >= rank
        });
        // The last slot has no upper end.
        let reached = reached.filter(|slot| slot + 1 < self.slots.len());
        reached.map_or(self.max, longest).min(self.max)
    }
}

/// The longest time of a slot, in ns: slot_of() in sums.h the other way round.
fn longest(slot: usize) -> u64 {
    let shift = (slot / 16).saturating_sub(1);
    ((slot - shift * 16) as u64) << shift | ((1 << shift) - 1)
}

/// The sums of one disk.
#[derive(Clone, Default)]
pub struct Disk {
    name: String,
    /// None of several disks.
    diskseq: Option<u64>,
    /// With another one that was used.
    shares_name: bool,
    parts: [Sum; NAMES.len()],
    total: Sum,
    /// Of these, how many nobody was seen to submit.
    nobodys: u64,
    slow: SlowOnes,
}

/// The sums of those of its bios that took `--min` or longer, in ns.
#[derive(Clone, Default)]
struct SlowOnes {
    bios: u64,
    requests: u64,
    total: u64,
    /// `None`: none of them has this part.
    parts: Parts,
}

impl SlowOnes {
    fn add(&mut self, other: &slow_ones) {
        self.bios += other.bios;
        self.requests += other.requests;
        self.total += other.total;
        for (place, part) in self.parts.iter_mut().enumerate() {
            if other.known >> place & 1 == 1 {
                *part = Some(part.unwrap_or_default() + other.parts[place]);
            }
        }
    }

    /// The part that has most of their time, and its share in percent: none, where no part has half of it.
    fn most(&self) -> Option<(&'static str, u64)> {
        let known = NAMES.into_iter().zip(self.parts).filter_map(|(name, ns)| Some((name, ns?)));
        let (name, ns) = known.max_by_key(|(_, ns)| *ns)?;
        // Rounded as the shares of the table are.
        let percent = (ns as f64 / self.total.max(1) as f64 * 100.0).round() as u64;
        (percent >= 50).then_some((name, percent))
    }

    /// The share of the time in no part, in percent.
    fn unknown(&self) -> u64 {
        let known: u64 = self.parts.iter().flatten().sum();
        (self.total.saturating_sub(known) as f64 / self.total.max(1) as f64 * 100.0).round() as u64
    }

    /// An answer: how many of all were slow, and why, as far as that can be said. `next`: where to look.
    fn verdict(&self, bios: u64, min: Duration, next: impl Fn(Part<'_>) -> String) -> String {
        let shown = humantime::format_duration(min);
        let slow = match min.is_zero() {
            true => format!("all {bios} I/Os, as --min is 0."),
            false => format!("{} of {bios} I/Os took {shown} or longer.", self.bios),
        };
        match self.most() {
            Some((part, percent)) => {
                let next = answer(&next(Part::Known(part, self.requests / self.bios)));
                format!("{slow} Of their time, {part} has {percent} %:{next}")
            }
            None if self.parts.iter().all(Option::is_none) => {
                let next = answer(&next(Part::Unknown));
                format!(
                    "{slow} Where their time went is not known: none of their requests was seen.{next}"
                )
            }
            None if self.unknown() >= 50 => {
                let (percent, next) = (self.unknown(), answer(&next(Part::Unknown)));
                format!(
                    "{slow} Of their time, {percent} % is in no part: these have no request that was seen.{next}"
                )
            }
            None => format!("{slow} No part has half of their time."),
        }
    }
}

/// Where most of the slow ones' time is.
enum Part<'a> {
    /// A part, and how many requests one of them has.
    Known(&'a str, u64),
    /// In no part.
    Unknown,
}

/// Below a sentence, where to look.
fn answer(next: &str) -> String {
    let lines = Options::new(COLUMNS).initial_indent("\n  -> ").subsequent_indent("     ");
    if next.is_empty() { String::new() } else { fill(next, lines) }
}

impl Disk {
    /// Which disks are below this one: those with a table, that of the most slow ones first; or all, if none has.
    fn below(&self, all: &[Disk], is_filtered: bool) -> String {
        let below = below::leaves(&self.name);
        let mut tables: Vec<&Disk> = all.iter().filter(|disk| below.contains(&disk.name)).collect();
        tables.sort_by_key(|disk| std::cmp::Reverse(disk.slow.total));
        if !tables.is_empty() {
            let names: Vec<&str> = tables.iter().map(|disk| &*disk.name).collect();
            return format!(
                "the disks below it have tables of their own, the slowest first: {}",
                names.join(", ")
            );
        }
        let names: Vec<&str> = below.iter().map(|name| &**name).collect();
        match names.is_empty() {
            true => String::new(),
            false if is_filtered => format!(
                "the disks below it have tables of their own without --disk, --pid and --cgroup: {}",
                names.join(", ")
            ),
            false => format!("the disks below it have no requests, either: {}", names.join(", ")),
        }
    }

    /// Of all CPUs, and of both programs.
    fn add(&mut self, map: &impl MapCore) -> Result<()> {
        for program in [0_u32, 1] {
            let values = map.lookup_percpu(&program.to_ne_bytes(), MapFlags::ANY)?;
            for bytes in values.into_iter().flatten() {
                let disk: &disk = plain::from_bytes(&bytes).map_err(|_| anyhow!("struct disk"))?;
                self.add_value(disk);
            }
        }
        Ok(())
    }

    fn add_value(&mut self, disk: &disk) {
        self.parts.iter_mut().zip(&disk.parts).for_each(|(sum, other)| sum.add(other));
        self.total.add(&disk.total);
        self.nobodys += disk.nobodys;
        self.slow.add(&disk.slow_ones);
    }

    /// What came since `earlier`, which is of the same disk. Of the slow ones, only their number.
    pub fn since(&self, earlier: &Disk) -> Disk {
        let slow = SlowOnes {
            bios: self.slow.bios.saturating_sub(earlier.slow.bios),
            ..SlowOnes::default()
        };
        Disk {
            name: self.name.clone(),
            parts: std::array::from_fn(|part| self.parts[part].since(&earlier.parts[part])),
            total: self.total.since(&earlier.total),
            nobodys: self.nobodys.saturating_sub(earlier.nobodys),
            slow,
            ..*self
        }
    }

    /// Whether these are sums of the same disk, at another time.
    pub fn is_same(&self, other: &Disk) -> bool {
        self.name == other.name && (self.diskseq == other.diskseq || !self.shares_name)
    }

    /// The sums of its latencies.
    pub fn total(&self) -> &Sum {
        &self.total
    }

    /// The sum of each part, in ns; `None`: known of no bio.
    pub fn part_sums(&self) -> Parts {
        self.parts.each_ref().map(|sum| (sum.bios() > 0).then_some(sum.sum))
    }

    /// How many of its I/Os have completed.
    pub fn bios(&self) -> u64 {
        self.total.bios()
    }

    /// How many of them nobody was seen to submit.
    pub fn nobodys(&self) -> u64 {
        self.nobodys
    }

    /// How many of them took `--min` or longer.
    pub fn slow(&self) -> u64 {
        self.slow.bios
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many of its I/Os were slow, and why, as far as that can be said. `all`: the disks that have a table.
    pub fn verdict(&self, options: &Slow, all: &[Disk]) -> String {
        let is_filtered =
            options.disk.is_some() || options.pid.is_some() || options.cgroup.is_some();
        let Disk { name, total, slow, .. } = self;
        let next = |part: Part<'_>| match part {
            Part::Known(part, requests) => Kind::of(name).next(part, requests),
            Part::Unknown => self.below(all, is_filtered),
        };
        format!("{}: {}", self.which(), slow.verdict(total.bios(), options.min, next))
    }

    /// The parts that are known of any bio.
    fn known(&self) -> impl Iterator<Item = (&'static str, &Sum)> {
        NAMES.into_iter().zip(&self.parts).filter(|(_, sum)| sum.bios() > 0)
    }

    /// Bios without a request that was seen: every other one has this part.
    fn undivided(&self) -> u64 {
        self.total.bios().saturating_sub(self.parts[DEVICE].bios())
    }

    /// A line of --json.
    pub fn json(&self) -> Value {
        let mut object = json!({
            "kind": "disk", "disk": self.name, "diskseq": self.diskseq, "bios": self.total.bios(),
            "undivided": self.undivided(), "no_submitter": self.nobodys,
        });
        for (name, sum) in NAMES.into_iter().zip(&self.parts).chain([("total", &self.total)]) {
            let [p50, p99] = [50, 99].map(|percent| sum.percentile(percent));
            object[name] = match sum.bios() {
                0 => Value::Null, // a part that is known of no bio is not 0
                _ => json!({ "sum_ns": sum.sum, "p50_ns": p50, "p99_ns": p99, "max_ns": sum.max }),
            };
        }
        object["slow"] = json!({ "bios": self.slow.bios, "requests": self.slow.requests, "total_ns": self.slow.total });
        for (key, ns) in parts::KEYS.into_iter().zip(self.slow.parts) {
            object["slow"][key] = json!(ns);
        }
        object
    }

    /// Its name; its diskseq, too, where another disk has the name.
    pub fn which(&self) -> String {
        let diskseq = self.diskseq.filter(|_| self.shares_name);
        self.name.clone()
            + &diskseq.map_or_else(String::new, |diskseq| format!(" (diskseq {diskseq})"))
    }

    /// Prints where the time of the disk's I/Os went; with colours, each part in its own.
    pub fn print(&self, histogram: bool, has_colours: bool) {
        println!("\n{}: {} I/Os", self.which(), self.total.bios());
        println!(
            "{:>8} {:>12} {:>6} {:>10} {:>10} {:>10} ms",
            "", "sum", "share", "p50", "p99", "max"
        );
        let share = |sum: &Sum| sum.sum as f64 / self.total.sum.max(1) as f64;
        let cells = colours::cells(self.parts.each_ref().map(|sum| sum.sum), self.total.sum, 30);
        for (name, sum) in self.known().chain([("total", &self.total)]) {
            let part = NAMES.iter().position(|it| *it == name);
            let bar = match has_colours {
                true => colours::bar(std::array::from_fn(|place| match part {
                    Some(part) if part != place => 0,
                    _ => cells[place],
                })),
                false => "#".repeat((share(sum) * 30.0).round() as usize),
            };
            let [sum_ms, p50, p99, max] =
                [sum.sum, sum.percentile(50), sum.percentile(99), sum.max].map(parts::ms);
            let percent = share(sum) * 100.0;
            let line = format!(
                "{name:>8} {sum_ms:>12} {percent:>4.0} % {p50:>10} {p99:>10} {max:>10}    {bar}"
            );
            println!("{}", line.trim_end());
        }
        if self.undivided() > 0 {
            println!("{:>8} of these had no request that was seen", self.undivided());
        }
        if self.nobodys > 0 {
            println!(
                "{:>8} of these had no submitter that was seen (md, bcache, a disk above; or older)",
                self.nobodys
            );
        }
        if histogram {
            print_histogram(&self.total);
        }
    }
}

/// How many bios took how long: a row for each doubling.
fn print_histogram(total: &Sum) {
    let mut rows = [0; 40];
    for (slot, count) in total.slots.iter().enumerate() {
        rows[longest(slot).checked_ilog2().unwrap_or(0).min(39) as usize] += count;
    }
    let used = |row: &usize| rows[*row] > 0;
    let (Some(from), Some(to)) = ((0..40).find(used), (0..40).rfind(used)) else { return };
    let most = rows.iter().copied().max().unwrap_or(0).max(1);
    for (row, count) in (from..=to).zip(&rows[from..=to]) {
        let us = (2_u64 << row) as f64 / 1000.0;
        let bar = "#".repeat((count * 40).div_ceil(most) as usize);
        println!("{}", format!("  < {us:>13.3} us {count:>8} {bar}").trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_has_the_longest_of_what_came() {
        let slots = |counts: &[(usize, u64)]| {
            let mut slots = vec![0; 592];
            counts.iter().for_each(|&(slot, count)| slots[slot] = count);
            slots
        };
        let earlier = Sum { sum: 1000, max: 900, slots: slots(&[(5, 1), (100, 1)]) };
        let later = Sum { sum: 1040, max: 900, slots: slots(&[(5, 3), (31, 2), (100, 1)]) };
        let since = later.since(&earlier);
        assert_eq!((since.sum, since.bios(), since.max), (40, 4, longest(31)));
        let more = Sum { sum: 3040, max: 2000, slots: slots(&[(5, 3), (31, 2), (100, 2)]) };
        assert_eq!(more.since(&later).max, 2000, "it is the longest of all");
        assert_eq!(later.since(&later).max, 0, "nothing came");
        assert_eq!(later.since(&Sum::default()).slots, later.slots);
    }

    #[test]
    fn a_verdict_is_about_the_slow_ones() {
        let min = Duration::from_millis(10);
        let mut slow = SlowOnes::default();
        let next = |part: Part<'_>| match part {
            Part::Known(part, requests) => Kind::Disk.next(part, requests),
            Part::Unknown => "the disks below".to_owned(),
        };
        let known = slow_ones {
            bios: 19,
            requests: 19,
            total: 1900,
            parts: [1862, 0, 38, 0, 0],
            known: 0b1111,
        };
        slow.add(&known);
        let verdict = slow.verdict(22_104, min, next);
        assert!(verdict.starts_with(
            "19 of 22104 I/Os took 10ms or longer. Of their time, wait has 98 %:\n  -> before a"
        ));
        let parts = [0, 33_000, 33_000, 34_000, 0];
        slow.add(&slow_ones { bios: 1, total: 100_000, parts, ..known });
        assert!(slow.verdict(22_104, min, next).ends_with("No part has half of their time."));
        let unknown = SlowOnes { bios: 1, total: 5, ..SlowOnes::default() };
        let verdict = unknown.verdict(1, min, next);
        assert!(verdict.ends_with("none of their requests was seen.\n  -> the disks below"));
        // Reads of a chunk are known, and the writes in stripes have most of the time.
        slow.add(&slow_ones { bios: 6, total: 900_000, requests: 0, known: 0, ..known });
        let verdict = slow.verdict(22_104, min, next);
        assert!(verdict.contains("Of their time, 90 % is in no part: these"), "{verdict}");
    }
}
