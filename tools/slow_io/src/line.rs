//! A line for each slow bio.

use std::{
    cell::Cell,
    collections::{BTreeMap, HashMap},
    time::Instant,
};

use anyhow::Result;
use libbpf_rs::Map;
use serde_json::{Value, json};

use crate::{
    cgroups::Cgroups,
    cli::{Clock, Slow},
    clock,
    disks::Names,
    event::Completed,
    file::{self, File},
    operation::Operations,
    parts::{self, Parts},
    recent,
    trace::TraceMaps,
};

/// Prints the slow bios, as they come or at the end.
pub struct Lines<'a> {
    options: &'a Slow,
    bold: bool,
    operations: &'a Operations,
    names: &'a Names,
    maps: &'a TraceMaps<'a>,
    cgroups: Cgroups,
    /// The functions of stacks.
    stacks: HashMap<i32, Vec<String>>,
    /// With --top: the slowest, by latency; the second number tells equal ones apart.
    top: BTreeMap<(u64, u64), (Completed, Option<File>)>,
    /// The first error.
    failed: Option<anyhow::Error>,
    /// When its turn ends; none for what is left at the end, and after an error.
    turn: &'a Cell<Option<Instant>>,
}

impl<'a> Lines<'a> {
    /// Prints the line that names the columns.
    pub fn new(
        options: &'a Slow,
        bold: bool,
        operations: &'a Operations,
        names: &'a Names,
        maps: &'a TraceMaps<'a>,
        turn: &'a Cell<Option<Instant>>,
    ) -> Lines<'a> {
        if !options.json {
            let wall = match options.time {
                Clock::Wall => format!("{:<24} ", "WALL CLOCK"),
                Clock::Kernel => String::new(),
            };
            let file = options.file.then_some("FILE");
            let process = columns("PROCESS", options.cgroup.map(|_| "CGROUP"), file);
            println!(
                "{wall}{:>10} {:<7} {:<4} {:>10} {:>5} {:>8} {:>9} {:>9} {:>9} {:>9} ms {:>5} {process}",
                "TIME",
                "DISK",
                "OP",
                "SECTOR",
                "KIB",
                "TOTAL",
                "WAIT",
                "QUEUE",
                "DEVICE",
                "END",
                "PID"
            );
        }
        Lines {
            options,
            bold,
            operations,
            names,
            maps,
            cgroups: Cgroups::default(),
            stacks: HashMap::new(),
            top: BTreeMap::new(),
            failed: None,
            turn,
        }
    }

    /// A bio that took long, from the ring buffer. Returns 0, or -1 to stop its reader when its turn has ended.
    /// After an error, which [`finish`](Lines::finish) returns, there is no turn and no line any more.
    pub fn add(&mut self, bytes: &[u8]) -> i32 {
        if self.failed.is_none()
            && let Err(error) = self.try_add(bytes)
        {
            self.failed = Some(error);
            self.turn.set(None);
        }
        let is_over = self.turn.get().is_some_and(|end| Instant::now() >= end);
        if is_over { -1 } else { 0 }
    }

    fn try_add(&mut self, bytes: &[u8]) -> Result<()> {
        let (bio, file) = file::sent(bytes)?;
        self.cgroup(&bio);
        if let Some(most) = self.options.top {
            self.top.insert((latency(&bio), bio.times.ended), (bio, file));
            if self.top.len() > most as usize {
                self.top.pop_first();
            }
            return Ok(());
        }
        if let Some(time) = self.options.before {
            for earlier in recent::before(&self.maps.recent, &bio, time)? {
                self.print(&earlier, None, true)?;
            }
        }
        self.print(&bio, file.as_ref(), false)
    }

    /// Prints what --top has kept, the slowest first. Fails where a line before could not be made.
    pub fn finish(mut self) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        for (bio, file) in std::mem::take(&mut self.top).into_values().rev() {
            self.print(&bio, file.as_ref(), false)?;
        }
        Ok(())
    }

    fn print(&mut self, bio: &Completed, file: Option<&File>, is_before: bool) -> Result<()> {
        let Completed { by, times } = bio;
        let disk = self.names.name(by.into())?;
        let stack = match self.options.stack && !is_before {
            true => self.stack(&self.maps.stacks, by.stack_id)?,
            false => Vec::new(),
        };
        let divided = parts::from_times(times);
        let letters = self.operations.letters(by.operation);
        let wall = (self.options.time == Clock::Wall).then(|| clock::wall(times.ended));
        if self.options.json {
            let mut object = object(bio, &disk, &letters, &divided, &stack, is_before);
            object["ended_wall_ns"] = json!(wall.map(|wall| wall.as_nanos() as u64));
            object["cgroup"] = json!(self.cgroup(bio));
            object["inode"] = json!(file.map(|file| file.inode));
            object["links"] = json!(file.map(|file| file.links));
            object["path"] = json!(file.and_then(|file| file.path.as_deref()));
            println!("{object}");
            return Ok(());
        }
        let wall = wall.map_or_else(String::new, |wall| clock::text(wall) + " ");
        let (total, shown) = parts::milliseconds(latency(bio), &divided);
        let largest = parts::largest(&divided);
        let mark = |place: usize, width: usize| match largest == Some(place) {
            true if self.bold => format!("\x1b[1m{:>width$}\x1b[0m", shown[place]),
            true => format!("{:>width$}", format!("*{}", shown[place])),
            false => format!("{:>width$}", shown[place]),
        };
        let seconds =
            format!("{}.{:03}", times.ended / 1_000_000_000, times.ended / 1_000_000 % 1000);
        let sector = if by.sector == u64::MAX { "-".to_owned() } else { by.sector.to_string() };
        let kib = match by.bytes % 1024 {
            0 => (by.bytes / 1024).to_string(),
            _ => format!("{:.1}", f64::from(by.bytes) / 1024.0),
        };
        let [wait, queue, device, end] = [0, 1, 2, 3].map(|place| mark(place, 9));
        let mut notes = Vec::new();
        if divided[4].is_some() {
            notes.push(format!("mapper {}", mark(4, 0)));
        }
        notes.extend((by.requests > 1).then(|| format!("{} requests", by.requests)));
        notes.extend((times.starts > 1).then(|| format!("started {} times", times.starts)));
        notes.extend(divided[2].is_none().then(|| "no request seen".to_owned()));
        notes.extend(common::block_status(times.status));
        notes.extend(is_before.then(|| "before:".to_owned()));
        let notes = notes.join(", ");
        let file = file.map_or_else(|| "-".to_owned(), File::to_string);
        let file = self.options.file.then_some(file.as_str());
        let cgroup = self.options.cgroup.map(|_| self.cgroup(bio).unwrap_or("-"));
        let process = columns(&common::text(&by.comm), cgroup, file);
        let line = format!(
            "{wall}{seconds:>10} {disk:<7} {letters:<4} {sector:>10} {kib:>5} {total:>8} {wait} {queue} \
             {device} {end} {:>8} {process}",
            by.process
        );
        println!("{line}{}{notes}", if notes.is_empty() { "" } else { "; " });
        stack.iter().for_each(|function| println!("=> {function}"));
        Ok(())
    }

    /// The name of its cgroup, where that is asked for and known.
    fn cgroup(&mut self, bio: &Completed) -> Option<&str> {
        self.options.cgroup.and_then(|_| self.cgroups.name(bio.by.cgroup))
    }

    fn stack(&mut self, stacks: &Map<'_>, id: i32) -> Result<Vec<String>> {
        if let Some(known) = self.stacks.get(&id) {
            return Ok(known.clone());
        }
        let functions = common::stack(stacks, id.into())?;
        self.stacks.insert(id, functions.clone());
        Ok(functions)
    }
}

/// The last columns; cgroup and file where they are asked for.
fn columns(process: &str, cgroup: Option<&str>, file: Option<&str>) -> String {
    match (cgroup, file) {
        (None, None) => process.to_owned(),
        (Some(last), None) | (None, Some(last)) => format!("{process:<15} {last}"),
        (Some(cgroup), Some(file)) => format!("{process:<15} {cgroup:<20} {file}"),
    }
}

/// How long a bio took, in ns.
fn latency(bio: &Completed) -> u64 {
    bio.times.ended - bio.times.submitted
}

/// A line of --json. Every key is in every line, and has one type, or null.
fn object(
    bio: &Completed,
    disk: &str,
    letters: &str,
    divided: &Parts,
    stack: &[String],
    before: bool,
) -> Value {
    let Completed { by, times } = bio;
    let mut object = json!({
        "kind": "bio",
        "ended_ns": times.ended,
        "before": before,
        "pid": by.process,
        "process": common::text(&by.comm),
        "disk": disk,
        "diskseq": by.diskseq,
        "major": by.dev >> 20,
        "minor": by.dev & 0xfffff,
        "operation": letters,
        "sector": (by.sector != u64::MAX).then_some(by.sector),
        "bytes": by.bytes,
        "total_ns": latency(bio),
        "requests": (by.requests > 0).then_some(by.requests),
        "starts": (times.starts > 0).then_some(times.starts),
        "error": common::block_status(times.status),
        "stack": stack,
    });
    if let Value::Object(map) = &mut object {
        map.extend(parts::json(divided));
    }
    object
}
