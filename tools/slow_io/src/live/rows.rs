//! From what was added up to the rows of the tables.

use std::collections::{BTreeMap, HashMap};

use super::{
    grid::{
        Cell, Column,
        Holds::{self, Bar, Number, Text},
        Row,
    },
    snapshot::{By, Cause, Snapshot},
};
use crate::{
    line::SlowIo,
    parts::{self, Kib, Mark, Ms, Parts},
    sums::Disk,
    waiting::Waiting,
};

const fn column(title: &'static str, holds: Holds, keep: u8) -> Column {
    Column { title, holds, keep }
}

/// Of the disks.
pub const DISKS: &[Column] = &[
    column("DISK", Text, 100),
    column("I/OS", Number, 60),
    column("I/O/S", Number, 80),
    column("MIB/S", Number, 40),
    column("SLOW", Number, 90),
    column("HANG", Number, 70),
    column("PARTS", Bar, 95),
    column("P50", Number, 50),
    column("P99", Number, 92),
    column("MAX ms", Number, 88),
    column("SUM ms", Number, 30),
    column("WAIT%", Number, 20),
    column("QUEUE%", Number, 20),
    column("DEVICE%", Number, 20),
    column("END%", Number, 20),
    column("MAPPER%", Number, 10),
];

/// Of the slow I/Os.
pub const SLOWEST: &[Column] = &[
    column("TIME", Text, 70),
    column("DISK", Text, 95),
    column("OP", Text, 60),
    column("SECTOR", Number, 20),
    column("KIB", Number, 50),
    column("TOTAL ms", Number, 100),
    column("PARTS", Bar, 90),
    column("WAIT", Number, 10),
    column("QUEUE", Number, 10),
    column("DEVICE", Number, 10),
    column("END", Number, 10),
    column("PID", Number, 55),
    column("PROCESS", Text, 85),
    column("NOTE", Text, 65),
];

/// Of who has caused I/Os.
pub const WHO: &[Column] = &[
    column("PID", Number, 60),
    column("PROCESS", Text, 100),
    column("DISK", Text, 80),
    column("OP", Text, 55),
    column("I/OS", Number, 75),
    column("I/O/S", Number, 50),
    column("MIB/S", Number, 65),
    column("SUM ms", Number, 95),
    column("SHARE", Number, 85),
    column("MEAN ms", Number, 70),
    column("PARTS", Bar, 88),
];

/// Of what hangs.
pub const HANGING: &[Column] = &[
    column("AGE", Number, 100),
    column("DISK", Text, 95),
    column("OP", Text, 60),
    column("SECTOR", Number, 20),
    column("KIB", Number, 40),
    column("PID", Number, 70),
    column("PROCESS", Text, 85),
    column("HOW FAR IT HAS COME", Text, 90),
];

/// Two snapshots: what came in between is shown.
#[derive(Clone, Copy)]
pub struct Between<'a> {
    /// `None`: the start.
    pub from: Option<&'a Snapshot>,
    /// The latest that is shown.
    pub to: &'a Snapshot,
    /// The one before: for what is in a second.
    pub before: Option<&'a Snapshot>,
}

impl Between<'_> {
    /// From the snapshot before to the latest one, in s.
    fn seconds(&self) -> Option<f64> {
        let before = self.before?;
        Some(self.to.at.saturating_sub(before.at) as f64 / 1e9).filter(|seconds| *seconds > 0.0)
    }

    /// A row for each disk that was used, or that has something which hangs; the one with the most time first.
    pub fn disks(&self) -> Vec<Row> {
        let mut hanging: HashMap<&str, u64> = HashMap::new();
        for waiting in &self.to.waiting {
            *hanging.entry(waiting.columns().disk).or_default() += 1;
        }
        let mut disks: Vec<(Disk, Option<f64>)> =
            self.to.disks.iter().map(|disk| (self.since(disk), self.rate(disk))).collect();
        disks.sort_by_key(|(disk, _)| std::cmp::Reverse(disk.total().sum));
        let bytes = self.bytes();
        let mut rows: Vec<Row> = Vec::new();
        for (disk, rate) in disks {
            let name = disk.which();
            let mib = bytes.as_ref().map(|bytes| *bytes.get(&*name).unwrap_or(&0.0));
            rows.push(of_disk(&disk, rate, mib, hanging.remove(&*name).unwrap_or(0)));
        }
        // Those that have completed nothing.
        for (name, count) in BTreeMap::from_iter(hanging) {
            let mut cells = vec![Cell::Unknown; DISKS.len()];
            (cells[0], cells[5]) = (Cell::Text(name.to_owned()), Cell::count(count));
            (cells[1], cells[4], cells[6]) = (Cell::count(0), Cell::count(0), Cell::Bar([0; 5], 0));
            rows.push(Row { key: name.to_owned(), disk: name.to_owned(), process: None, cells });
        }
        rows
    }

    fn since(&self, disk: &Disk) -> Disk {
        let earlier = self.from.and_then(|from| same(from, disk));
        earlier.map_or_else(|| disk.clone(), |earlier| disk.since(earlier))
    }

    /// I/Os a second.
    fn rate(&self, disk: &Disk) -> Option<f64> {
        let (seconds, before) = (self.seconds()?, self.before?);
        let bios = same(before, disk).map_or(0, Disk::bios);
        Some(disk.bios().saturating_sub(bios) as f64 / seconds)
    }

    /// MiB a second of each disk: not known where some I/Os have no cause.
    fn bytes(&self) -> Option<HashMap<String, f64>> {
        let seconds = self.seconds()?;
        if self.to.counts.without_cause() > 0 {
            return None;
        }
        let mut bytes = HashMap::new();
        for cause in self.causes(self.before) {
            *bytes.entry(cause.by.disk).or_default() += cause.bytes as f64 / 1048576.0 / seconds;
        }
        Some(bytes)
    }

    /// What came since then.
    fn causes(&self, from: Option<&Snapshot>) -> Vec<Cause> {
        let earlier: HashMap<&By, &Cause> = from
            .into_iter()
            .flat_map(|from| &from.causes)
            .map(|cause| (&cause.by, cause))
            .collect();
        let since = |cause: &Cause| {
            let mut cause = cause.clone();
            if let Some(earlier) = earlier.get(&cause.by) {
                cause.bios = cause.bios.saturating_sub(earlier.bios);
                cause.bytes = cause.bytes.saturating_sub(earlier.bytes);
                cause.sum = cause.sum.saturating_sub(earlier.sum);
                for (part, earlier) in cause.parts.iter_mut().zip(earlier.parts) {
                    *part = part.map(|ns| ns.saturating_sub(earlier.unwrap_or_default()));
                }
            }
            cause
        };
        self.to.causes.iter().map(since).filter(|cause| cause.bios > 0).collect()
    }

    /// A row for each process, disk and operation, that with the most time first.
    pub fn who(&self) -> Vec<Row> {
        let mut causes = self.causes(self.from);
        causes.sort_by(|a, b| b.sum.cmp(&a.sum).then(a.by.cmp(&b.by)));
        let all: u64 = causes.iter().map(|cause| cause.sum).sum();
        let rates: HashMap<By, (u64, u64)> = self
            .causes(self.before)
            .into_iter()
            .map(|cause| (cause.by, (cause.bios, cause.bytes)))
            .collect();
        let row = |cause: &Cause| {
            let now = rates.get(&cause.by).copied().unwrap_or_default();
            of_cause(cause, all, self.seconds().map(|seconds| (now.0, now.1, seconds)))
        };
        causes.iter().map(row).collect()
    }

    /// A row for each I/O that hangs, the oldest first.
    pub fn hanging(&self) -> Vec<Row> {
        self.to.waiting.iter().map(of_waiting).collect()
    }
}

/// The same disk in another snapshot.
fn same<'a>(snapshot: &'a Snapshot, disk: &Disk) -> Option<&'a Disk> {
    snapshot.disks.iter().find(|other| other.is_same(disk))
}

/// A rate: 0.0 is none.
fn rate(rate: Option<f64>) -> Cell {
    match rate {
        None => Cell::Unknown,
        Some(rate) if rate > 0.0 && rate < 0.05 => Cell::Number(rate, "<0.1".to_owned()),
        Some(rate) => Cell::Number(rate, format!("{rate:.1}")),
    }
}

fn ms(ns: u64) -> Cell {
    Cell::Number(ns as f64, parts::ms(ns))
}

fn bar(parts: Parts, whole: u64) -> Cell {
    Cell::Bar(parts.map(Option::unwrap_or_default), whole)
}

fn of_disk(disk: &Disk, per_second: Option<f64>, mib: Option<f64>, hanging: u64) -> Row {
    let (name, total, sums) = (disk.which(), disk.total(), disk.part_sums());
    let percent = |part: Option<u64>| {
        let percent = |ns| ns as f64 / total.sum.max(1) as f64 * 100.0;
        part.map_or(Cell::Unknown, |ns| Cell::Number(percent(ns), format!("{:.0}", percent(ns))))
    };
    // Where nothing has completed since, there are no times.
    let time = |ns| if disk.bios() == 0 { Cell::Unknown } else { ms(ns) };
    let mut cells = vec![
        Cell::Text(name.clone()),
        Cell::count(disk.bios()),
        rate(per_second),
        rate(mib),
        Cell::count(disk.slow()),
        Cell::count(hanging),
        bar(sums, total.sum),
        time(total.percentile(50)),
        time(total.percentile(99)),
        time(total.max),
        time(total.sum),
    ];
    cells.extend(sums.map(percent));
    Row { key: name.clone(), disk: name, process: None, cells }
}

/// `now`: what came in the last seconds, and in how many.
fn of_cause(cause: &Cause, all: u64, now: Option<(u64, u64, f64)>) -> Row {
    let By { pid, process, disk, operation } = cause.by.clone();
    let share = cause.sum as f64 / all.max(1) as f64 * 100.0;
    let cells = vec![
        pid.map_or(Cell::Unknown, |pid| Cell::count(pid.into())),
        Cell::Text(process.clone()),
        Cell::Text(disk.clone()),
        Cell::Text(operation.clone()),
        Cell::count(cause.bios),
        rate(now.map(|(bios, _, seconds)| bios as f64 / seconds)),
        rate(now.map(|(_, bytes, seconds)| bytes as f64 / 1048576.0 / seconds)),
        ms(cause.sum),
        Cell::Number(share, format!("{share:.0} %")),
        ms(cause.sum / cause.bios.max(1)),
        bar(cause.parts, cause.sum),
    ];
    let key = format!("{pid:?} {process} {disk} {operation}");
    Row { key, disk, process: Some((pid, process)), cells }
}

/// A slow I/O.
pub fn of_slow(io: &SlowIo) -> Row {
    // As the lines have it: rounded so that the parts add up.
    let (total, us) = parts::microseconds(io.latency, &io.parts);
    let ms = |us: u64| Cell::Number(us as f64, Ms { us: Some(us), mark: Mark::None }.to_string());
    let part = |place: usize| us[place].map_or(Cell::Unknown, ms);
    let cells = vec![
        Cell::Text(io.time.clone()),
        Cell::Text(io.disk.clone()),
        Cell::Text(io.operation.clone()),
        io.sector.map_or(Cell::Unknown, Cell::count),
        Cell::Number(io.bytes.into(), Kib(io.bytes).to_string()),
        ms(total),
        bar(io.parts, io.latency),
        part(0),
        part(1),
        part(2),
        part(3),
        io.pid.map_or(Cell::Unknown, |pid| Cell::count(pid.into())),
        Cell::Text(io.process.clone()),
        Cell::Text(io.notes.clone()),
    ];
    let key = format!("{} {} {:?}", io.ended, io.latency, io.sector);
    Row { key, disk: io.disk.clone(), process: Some((io.pid, io.process.clone())), cells }
}

fn of_waiting(waiting: &Waiting) -> Row {
    let it = waiting.columns();
    let number = |text: &str| match text.parse::<f64>() {
        Ok(number) => Cell::Number(number, text.to_owned()),
        Err(_) => Cell::Unknown,
    };
    let cells = vec![
        Cell::Number(waiting.age() as f64, waiting.age_text()),
        Cell::Text(it.disk.to_owned()),
        Cell::Text(it.operation.to_owned()),
        number(&it.sector),
        number(&it.kib),
        number(&it.pid),
        Cell::Text(it.process.to_owned()),
        // The sign before its age says so.
        Cell::Text(waiting.reached().replace(", since before the start", "")),
    ];
    let key = format!("{} {} {} {}", it.disk, it.operation, it.sector, it.pid);
    let process = Some((it.pid.parse().ok(), it.process.to_owned()));
    Row { key, disk: it.disk.to_owned(), process, cells }
}
