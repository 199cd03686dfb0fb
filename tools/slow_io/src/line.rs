//! A line for each slow I/O.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::{self, Write as _},
    io::{self, Write as _},
    time::Instant,
};

use anyhow::Result;
use common::colours;
use jiff::tz::TimeZone;
use libbpf_rs::Map;
use serde::Serialize;

use crate::{
    cgroups::Cgroups,
    cli::{Clock, Slow},
    clock,
    disks::Names,
    event::Completed,
    file::{self, File},
    operation::Operations,
    parts::{self, Kib, Mark, Ms, Parts},
    recent,
    trace::TraceMaps,
};

/// Prints the slow bios, as they come or at the end.
pub struct Lines<'a> {
    options: &'a Slow,
    clock: Clock,
    zone: TimeZone,
    layout: Layout,
    operations: &'a Operations,
    names: &'a Names,
    maps: &'a TraceMaps<'a>,
    cgroups: Cgroups<'a>,
    /// The functions of stacks.
    stacks: HashMap<i32, Vec<String>>,
    /// With --top and --live: the slowest, by latency; the second number tells equal ones apart.
    top: BTreeMap<(u64, u64), (Completed, Option<File>)>,
    /// The first error.
    failed: Option<anyhow::Error>,
    /// When its turn ends; none for what is left at the end, and after an error.
    turn: Option<Instant>,
    /// Lines that are not written yet.
    out: String,
    /// The line that names the columns, where it is not written yet.
    header: String,
    /// With --live: the slowest since the last look, as `top` has them.
    recent: BTreeMap<(u64, u64), (Completed, Option<File>)>,
}

/// A slow I/O, as a screen shows it.
#[derive(Clone, Debug)]
pub struct SlowIo {
    /// When it completed, by the kernel's clock; and how long it took. In ns.
    pub ended: u64,
    /// See `ended`.
    pub latency: u64,
    /// When it completed, in the clock that was asked for.
    pub time: String,
    /// What it was for.
    pub disk: String,
    /// In blktrace's letters.
    pub operation: String,
    /// `None`: it has no data.
    pub sector: Option<u64>,
    /// Its size.
    pub bytes: u32,
    /// Where its time went.
    pub parts: Parts,
    /// Of the process; `None`: nobody was seen to submit it.
    pub pid: Option<u32>,
    /// Its name, or `-`.
    pub process: String,
    /// What few I/Os have: an error, device mapper's share.
    pub notes: String,
}

/// So many of the slowest between two looks.
const RECENT: usize = 200;

/// What a terminal has beside text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The largest part is bold, not marked with a `*`.
    bold: bool,
    /// A bar shows the parts.
    pub bar: bool,
    /// A column for each part has its time.
    pub numbers: bool,
}

/// Columns of a bar.
const BAR: usize = 10;
/// Columns of a line with the times of the parts, up to a short name of a process.
const WIDE: usize = 108;

impl Layout {
    /// That of a terminal with so many columns, if it is one. Where a line has no room for the times of the parts, it
    /// has the bar alone.
    pub fn of(terminal: Option<usize>, has_colours: bool) -> Layout {
        let room = terminal.unwrap_or(WIDE);
        let bar = has_colours && !(WIDE..=WIDE + BAR).contains(&room);
        Layout { bold: terminal.is_some(), bar, numbers: !bar || room >= WIDE }
    }
}

/// So many bytes of lines are written at once, also if there are more.
const MUCH: usize = 64 * 1024;

impl<'a> Lines<'a> {
    /// Prints the line that names the columns. Who looks at a terminal looks at a clock.
    pub fn new(
        options: &'a Slow,
        layout: Layout,
        operations: &'a Operations,
        names: &'a Names,
        maps: &'a TraceMaps<'a>,
    ) -> Result<Lines<'a>> {
        let clock = options.clock(layout.bold);
        let mut header = String::new();
        if !options.json {
            let time = match clock {
                Clock::Wall => format!("{:<24} {:>10}", "WALL CLOCK", "TIME"),
                Clock::Boot => format!("{:>10}", "TIME"),
                Clock::Day => format!("{:<12}", "TIME"),
            };
            let file = options.file.then_some("FILE");
            let mut process = String::new();
            columns(&mut process, "PROCESS", options.cgroup.as_ref().map(|_| "CGROUP"), file)?;
            let mut parts = String::new();
            if layout.numbers {
                write!(parts, " {:>9} {:>9} {:>9} {:>9}", "WAIT", "QUEUE", "DEVICE", "END")?;
            }
            // Above the pid, whose column is wide enough for both.
            let bar = if layout.bar { format!(" ms {:<BAR$}", "PARTS") } else { " ms".to_owned() };
            header = format!(
                "{time} {:<7} {:<5} {:>10} {:>5} {:>8}{parts}{bar} {:>5} {process}\n",
                "DISK", "OP", "SECTOR", "KIB", "TOTAL", "PID"
            );
        }
        // A full screen has the terminal until the end.
        if !options.live {
            print!("{}", std::mem::take(&mut header));
        }
        Ok(Lines {
            header,
            options,
            clock,
            zone: TimeZone::system(),
            layout,
            operations,
            names,
            maps,
            cgroups: Cgroups::new(options.cgroup.as_ref(), &maps.generations),
            stacks: HashMap::new(),
            top: BTreeMap::new(),
            failed: None,
            turn: None,
            out: String::new(),
            recent: BTreeMap::new(),
        })
    }

    /// The slowest since the last call.
    pub fn take_recent(&mut self) -> Result<Vec<SlowIo>> {
        let recent = std::mem::take(&mut self.recent);
        recent.into_values().map(|(bio, file)| self.slow_io(&bio, file.as_ref())).collect()
    }

    fn slow_io(&mut self, bio: &Completed, file: Option<&File>) -> Result<SlowIo> {
        let Completed { by, times } = bio;
        let divided = parts::from_times(times);
        let (_, us) = parts::microseconds(latency(bio), &divided);
        let mut notes = String::new();
        write_notes(&mut notes, bio, &Ms { us: us[4], mark: Mark::None }, false)?;
        let mut notes: Vec<String> = vec![notes.trim_start_matches("; ").to_owned()];
        notes.extend(file.map(File::to_string));
        notes.extend(self.cgroup(bio).map(str::to_owned));
        notes.retain(|note| !note.is_empty());
        let time = match self.clock {
            Clock::Day => clock::of_day(clock::wall(times.ended), &self.zone),
            Clock::Wall => clock::text(clock::wall(times.ended)),
            Clock::Boot => parts::ms(times.ended / 1000),
        };
        Ok(SlowIo {
            ended: times.ended,
            latency: latency(bio),
            time,
            disk: self.names.name(by.into())?.to_string(),
            operation: self.operations.letters(by.operation).to_string(),
            sector: (by.sector != u64::MAX).then_some(by.sector),
            bytes: by.bytes,
            parts: divided,
            pid: (!is_nobodys(bio)).then_some(by.process),
            process: process(bio).unwrap_or_else(|| "-".to_owned()),
            notes: notes.join(", "),
        })
    }

    /// From now to then, [`add`](Lines::add) takes records: a ring buffer that is never empty gives none of its time
    /// to anything else.
    pub fn begin_turn(&mut self, end: Instant) {
        self.turn = Some(end);
    }

    /// What is left in the ring buffer has no turn: all of it is taken.
    pub fn end_turns(&mut self) {
        self.turn = None;
    }

    /// Whether a line could not be made.
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Writes the lines that have come: once the ring buffer is empty, which takes one call of the kernel for all of
    /// them.
    pub fn flush(&mut self) -> Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(self.out.as_bytes())?;
        self.out.clear();
        Ok(stdout.flush()?)
    }

    /// A bio that took long, from the ring buffer. Returns 0, or -1 to stop its reader when its turn has ended.
    /// After an error, which [`finish`](Lines::finish) returns, there is no turn and no line any more.
    pub fn add(&mut self, bytes: &[u8]) -> i32 {
        if self.failed.is_none()
            && let Err(error) = self.try_add(bytes)
        {
            self.failed = Some(error);
            self.turn = None;
        }
        let is_over = self.turn.is_some_and(|end| Instant::now() >= end);
        if is_over { -1 } else { 0 }
    }

    fn try_add(&mut self, bytes: &[u8]) -> Result<()> {
        if self.out.len() > MUCH {
            self.flush()?;
        }
        let (bio, file) = file::sent(bytes)?;
        self.cgroup(&bio);
        let key = (latency(&bio), bio.times.ended);
        if self.options.live {
            let file = file.clone();
            keep(&mut self.recent, key, (bio, file), RECENT);
        }
        if let Some(most) = self.options.kept() {
            keep(&mut self.top, key, (bio, file), most as usize);
            return Ok(());
        }
        if let Some(time) = self.options.before {
            for earlier in recent::before(&self.maps.recent, &bio, time)? {
                self.print(&earlier, None, true)?;
            }
        }
        self.print(&bio, file.as_ref(), false)
    }

    /// Prints what --top or --live has kept, the slowest first. Fails where a line before could not be made.
    pub fn finish(mut self) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if !self.top.is_empty() {
            self.out = std::mem::take(&mut self.header);
        }
        for (bio, file) in std::mem::take(&mut self.top).into_values().rev() {
            self.print(&bio, file.as_ref(), false)?;
        }
        self.flush()
    }

    fn print(&mut self, bio: &Completed, file: Option<&File>, is_before: bool) -> Result<()> {
        let stack = match self.options.stack && !is_before && !is_nobodys(bio) {
            true => self.stack(&self.maps.stacks, bio.by.stack_id)?,
            false => Vec::new(),
        };
        let disk = self.names.name((&bio.by).into())?;
        if self.options.json {
            let mut object = Line::new(bio, &disk, file, &stack);
            let letters = self.operations.letters(bio.by.operation);
            object.operation = &letters;
            object.before = is_before;
            let is_wall = self.clock == Clock::Wall;
            object.ended_wall_ns = is_wall.then(|| clock::wall(bio.times.ended).as_nanos() as u64);
            let cgroup =
                self.options.cgroup.as_ref().and_then(|_| self.cgroups.name(bio.by.cgroup));
            object.cgroup = cgroup;
            self.out += &serde_json::to_string(&object)?;
            self.out.push('\n');
            return Ok(());
        }
        self.print_time(bio.times.ended)?;
        self.print_columns(bio, &disk)?;
        self.print_process(bio, file)?;
        self.print_notes(bio, is_before)?;
        self.out.push('\n');
        for function in &stack {
            writeln!(self.out, "=> {function}")?;
        }
        Ok(())
    }

    fn print_time(&mut self, ended: u64) -> Result<()> {
        let (seconds, ms) = (ended / 1_000_000_000, ended / 1_000_000 % 1000);
        match self.clock {
            Clock::Day => {
                let time = clock::of_day(clock::wall(ended), &self.zone);
                return Ok(write!(self.out, "{time} ")?);
            }
            Clock::Wall => write!(self.out, "{} ", clock::text(clock::wall(ended)))?,
            Clock::Boot => {}
        }
        Ok(write!(self.out, "{seconds:>6}.{ms:03} ")?)
    }

    /// From its disk to the number of its process.
    fn print_columns(&mut self, bio: &Completed, disk: &str) -> Result<()> {
        let Completed { by, times } = bio;
        let letters = self.operations.letters(by.operation);
        write!(self.out, "{disk:<7} {letters:<5} ")?;
        match by.sector {
            u64::MAX => write!(self.out, "{:>10} ", "-")?,
            sector => write!(self.out, "{sector:>10} ")?,
        }
        write!(self.out, "{:>5} ", Kib(by.bytes))?;
        let divided = parts::from_times(times);
        let (total, us) = parts::microseconds(latency(bio), &divided);
        write!(self.out, "{:>8}", Ms { us: Some(total), mark: Mark::None })?;
        if self.layout.numbers {
            for place in 0..4 {
                write!(self.out, " {:>9}", self.part(us, parts::largest(&divided), place))?;
            }
        }
        // Below " ms" and the bar's name.
        let mut pid = 8;
        if self.layout.bar {
            let cells = colours::cells(divided.map(Option::unwrap_or_default), latency(bio), BAR);
            let rest = BAR - cells.iter().sum::<usize>();
            write!(self.out, "    {}{:rest$}", colours::bar(cells), "")?;
            pid = 5;
        }
        match is_nobodys(bio) {
            true => write!(self.out, " {:>pid$} ", "-")?,
            false => write!(self.out, " {:>pid$} ", by.process)?,
        }
        Ok(())
    }

    fn part(&self, us: parts::Parts, largest: Option<usize>, place: usize) -> Ms {
        let mark = match largest == Some(place) {
            true if self.layout.bold => Mark::Bold,
            true => Mark::Star,
            false => Mark::None,
        };
        Ms { us: us[place], mark }
    }

    /// The last columns.
    fn print_process(&mut self, bio: &Completed, file: Option<&File>) -> Result<()> {
        let file = self.options.file.then(|| file.map_or_else(|| "-".to_owned(), File::to_string));
        let cgroup = match self.options.cgroup {
            Some(_) => Some(self.cgroups.name(bio.by.cgroup).unwrap_or("-")),
            None => None,
        };
        let process = process(bio).unwrap_or_else(|| "-".to_owned());
        columns(&mut self.out, &process, cgroup, file.as_deref())
    }

    /// What few bios have, behind a semicolon.
    fn print_notes(&mut self, bio: &Completed, is_before: bool) -> Result<()> {
        let divided = parts::from_times(&bio.times);
        let (_, us) = parts::microseconds(latency(bio), &divided);
        let mapper = self.part(us, parts::largest(&divided), 4);
        write_notes(&mut self.out, bio, &mapper, is_before)
    }

    /// The name of its cgroup, where that is asked for and known.
    fn cgroup(&mut self, bio: &Completed) -> Option<&str> {
        self.options.cgroup.as_ref().and_then(|_| self.cgroups.name(bio.by.cgroup))
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

/// What few bios have, behind a semicolon. `mapper`: its time in device mapper.
fn write_notes(out: &mut String, bio: &Completed, mapper: &Ms, is_before: bool) -> Result<()> {
    let Completed { by, times } = bio;
    let mut before = "; ";
    let mut note = |out: &mut String, text: fmt::Arguments<'_>| {
        let separator = std::mem::replace(&mut before, ", ");
        write!(out, "{separator}{text}")
    };
    if mapper.us.is_some() {
        note(out, format_args!("mapper {mapper}"))?;
    }
    if by.requests > 1 {
        note(out, format_args!("{} requests", by.requests))?;
    }
    if times.starts > 1 {
        note(out, format_args!("started {} times", times.starts))?;
    }
    if is_nobodys(bio) {
        note(out, format_args!("no submitter seen"))?;
    }
    if parts::from_times(times)[2].is_none() {
        note(out, format_args!("no request seen"))?;
    }
    if let Some(error) = common::block_status(times.status) {
        note(out, format_args!("{error}"))?;
    }
    if is_before {
        note(out, format_args!("before:"))?;
    }
    Ok(())
}

/// The last columns; cgroup and file where they are asked for.
fn columns(
    out: &mut String,
    process: &str,
    cgroup: Option<&str>,
    file: Option<&str>,
) -> Result<()> {
    match (cgroup, file) {
        (None, None) => out.push_str(process),
        (Some(last), None) | (None, Some(last)) => write!(out, "{process:<15} {last}")?,
        (Some(cgroup), Some(file)) => write!(out, "{process:<15} {cgroup:<20} {file}")?,
    }
    Ok(())
}

/// Keeps the largest, so many at most.
fn keep<T>(all: &mut BTreeMap<(u64, u64), T>, key: (u64, u64), value: T, most: usize) {
    all.insert(key, value);
    if all.len() > most {
        all.pop_first();
    }
}

/// How long a bio took, in ns.
fn latency(bio: &Completed) -> u64 {
    bio.times.ended - bio.times.submitted
}

/// Whether only its request was seen, and nobody who has submitted it.
fn is_nobodys(bio: &Completed) -> bool {
    bio.by.is_nobodys != 0
}

/// The name of the process that has submitted it.
fn process(bio: &Completed) -> Option<String> {
    (!is_nobodys(bio)).then(|| common::text(&bio.by.comm))
}

/// A line of --json. Every key is in every line, and has one type, or null.
#[derive(Default, Serialize)]
struct Line<'a> {
    kind: &'static str,
    ended_ns: u64,
    before: bool,
    pid: Option<u32>,
    process: Option<String>,
    tid: Option<u32>,
    disk: &'a str,
    diskseq: u64,
    major: u32,
    minor: u32,
    operation: &'a str,
    sector: Option<u64>,
    bytes: u32,
    total_ns: u64,
    requests: Option<u32>,
    starts: Option<u32>,
    error: Option<String>,
    stack: &'a [String],
    wait_ns: Option<u64>,
    queue_ns: Option<u64>,
    device_ns: Option<u64>,
    end_ns: Option<u64>,
    mapper_ns: Option<u64>,
    ended_wall_ns: Option<u64>,
    cgroup: Option<&'a str>,
    inode: Option<u64>,
    links: Option<u32>,
    path: Option<&'a str>,
}

impl<'a> Line<'a> {
    fn new(
        bio: &Completed,
        disk: &'a str,
        file: Option<&'a File>,
        stack: &'a [String],
    ) -> Line<'a> {
        let Completed { by, times } = bio;
        let [wait_ns, queue_ns, device_ns, end_ns, mapper_ns] = parts::from_times(times);
        Line {
            kind: "bio",
            ended_ns: times.ended,
            pid: (!is_nobodys(bio)).then_some(by.process),
            process: process(bio),
            tid: (!is_nobodys(bio)).then_some(by.thread),
            disk,
            diskseq: by.diskseq,
            major: by.dev >> 20,
            minor: by.dev & 0xfffff,
            sector: (by.sector != u64::MAX).then_some(by.sector),
            bytes: by.bytes,
            total_ns: latency(bio),
            requests: (by.requests > 0).then_some(by.requests),
            starts: (times.starts > 0).then_some(times.starts),
            error: common::block_status(times.status),
            stack,
            wait_ns,
            queue_ns,
            device_ns,
            end_ns,
            mapper_ns,
            inode: file.map(|file| file.inode),
            links: file.map(|file| file.links),
            path: file.and_then(|file| file.path.as_deref()),
            ..Line::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_what_there_is_room_for() {
        let layout = |terminal, has_colours| {
            let Layout { bold, bar, numbers } = Layout::of(terminal, has_colours);
            (bold, bar, numbers)
        };
        assert_eq!(layout(None, false), (false, false, true), "no terminal");
        assert_eq!(layout(Some(80), false), (true, false, true), "NO_COLOR");
        assert_eq!(layout(Some(80), true), (true, true, false));
        assert_eq!(layout(Some(110), true), (true, false, true));
        assert_eq!(layout(Some(120), true), (true, true, true));
    }
}
