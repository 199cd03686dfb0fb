//! What has not completed: if it hangs, it is the slowest of all.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    fs,
    io::{Read, Write as _},
    os::fd::AsFd,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use libbpf_rs::{Iter, Link, RingBuffer, RingBufferBuilder};
use plain::Plain;
use serde::Serialize;

use crate::{
    cli::{Clock, Slow},
    clock,
    disks::{Id, Names},
    line::Layout,
    operation::Operations,
    parts::{self, Kib},
    trace::{
        TraceMaps, TraceProgs, TraceSkel,
        types::{found, io, stage, waiter},
    },
};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for io {}
// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for found {}
// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for waiter {}

/// An I/O that was submitted and has not completed, as a line of --json has it.
#[derive(Default, Serialize)]
pub struct Waiting {
    kind: &'static str,
    disk: Option<String>,
    operation: Option<String>,
    sector: Option<u64>,
    bytes: Option<u32>,
    /// How long ago it was submitted, in ns; of one from before the start, how long ago that was.
    age_ns: u64,
    before_start: bool,
    pid: Option<u32>,
    process: Option<String>,
    /// How far it has come: `none` (no request yet), `queue`, `driver`.
    reached: Option<&'static str>,
    /// The disk whose queue or driver has its request.
    reached_disk: Option<String>,
    /// For how long, in ns.
    reached_ns: Option<u64>,
    /// How many requests serve it.
    requests: u32,
    /// The function of the kernel in which its task waits, where the I/O itself was not found.
    function: Option<String>,
    /// What the line says of how far it has come.
    #[serde(skip)]
    text: String,
    /// Its bio's address, and when that was submitted.
    #[serde(skip)]
    key: Key,
}

/// An address alone identifies no bio. 0 for a time: it was submitted before the start.
type Key = (u64, u64);

/// The inode number of the PID namespace of the host: PROC_PID_INIT_INO of the kernel.
pub const INITIAL: u32 = 0xeffffffc;

/// How long an I/O has waited before a terminal shows it, and how often that looks.
const SECOND: Duration = Duration::from_secs(1);

/// So many lines at most: a disk that hangs may have thousands.
const LINES: usize = 20;

/// Reads what waits, without keeping any program from running.
pub struct Watch<'a> {
    options: &'a Slow,
    progs: &'a TraceProgs<'a>,
    operations: &'a Operations,
    names: &'a Names,
    layout: Layout,
    maps: &'a TraceMaps<'a>,
    ios: Link,
    tasks: Link,
    /// None where the kernel lacks the function.
    disks: Option<Link>,
    ring: RingBuffer<'a>,
    found: Rc<RefCell<Vec<found>>>,
    /// When the programs were attached, by the kernel's clock.
    began: u64,
    /// What was in flight then, and which tasks waited.
    older: Vec<found>,
    waiters: Vec<waiter>,
    /// When a terminal looks next, and from which age on it shows an I/O again.
    next: Instant,
    shown: HashMap<Key, u64>,
}

impl<'a> Watch<'a> {
    /// To be called when the programs are attached: what is in flight now and has no entry is older.
    pub fn new(
        skel: &'a TraceSkel<'a>,
        options: &'a Slow,
        operations: &'a Operations,
        names: &'a Names,
        layout: Layout,
    ) -> Result<Watch<'a>> {
        let began = common::kernel_clock();
        let progs = &skel.progs;
        let found = Rc::new(RefCell::new(Vec::new()));
        let into = Rc::clone(&found);
        let mut ring = RingBufferBuilder::new();
        ring.add(&skel.maps.reached, move |bytes| {
            into.borrow_mut().extend(value::<found>(bytes));
            0
        })?;
        let disks = &progs.look_at_disk;
        let mut watch = Watch {
            options,
            progs,
            operations,
            names,
            layout,
            maps: &skel.maps,
            ios: progs.each_io.attach_iter(skel.maps.ios.as_fd())?,
            tasks: progs.each_task.attach()?,
            disks: if disks.autoload() { Some(disks.attach()?) } else { None },
            ring: ring.build()?,
            found,
            began,
            older: Vec::new(),
            waiters: Vec::new(),
            next: Instant::now() + SECOND,
            shown: HashMap::new(),
        };
        let mut older = watch.look_at_disks()?;
        older.retain(|found| found.submitted == 0 && watch.is_asked_for(found));
        watch.older = older;
        // They are known by their numbers on the host. With --cgroup, nobody knows whose they are.
        if common::pid_namespace()? == INITIAL && watch.is_of_all_cgroups() {
            watch.waiters = watch.look_at_tasks()?;
        }
        Ok(watch)
    }

    fn is_of_all_cgroups(&self) -> bool {
        self.options.cgroup.as_ref().is_none_or(|cgroup| cgroup.depth() == 0)
    }

    /// Whether --disk asks for it, as far as it is known.
    fn is_asked_for(&self, found: &found) -> bool {
        self.is_of_all_cgroups()
            && self.options.disk.as_ref().is_none_or(|disk| disk.was(found.diskseq, found.dev))
    }

    /// How far all has come. What this finds of an I/O is true if [`list`](Watch::list) finds it in flight after that.
    pub fn look(&self) -> Result<Look> {
        let unplaced = || Ok::<u64, anyhow::Error>(common::counters(&self.maps.bss_data)?.unplaced);
        let before = unplaced()?;
        let found = self.look_at_disks()?;
        let waiters = if self.waiters.is_empty() { Vec::new() } else { self.look_at_tasks()? };
        let is_whole = self.disks.is_some() && unplaced()? == before;
        Ok(Look { found, waiters, is_whole, now: common::kernel_clock() })
    }

    /// What has waited for --min or longer at the time of the look, the oldest first.
    pub fn list(&self, look: &Look) -> Result<Vec<Waiting>> {
        let mut requests: HashMap<Key, Vec<&found>> = HashMap::new();
        for found in &look.found {
            requests.entry((found.bio, found.submitted)).or_default().push(found);
        }
        let min = self.options.min.as_nanos();
        let is_old = |age: u64| u128::from(age) >= min;
        let mut list = Vec::new();
        for (key, io) in self.look_at_ios()? {
            let age = look.now.saturating_sub(io.submitted);
            // An entry that was made at the end of a request waits for nothing: its end was not seen.
            if is_old(age) && io.by.is_nobodys == 0 {
                let found = requests.get(&key).map_or(&[][..], Vec::as_slice);
                list.push(self.of_io(key, &io, age, found, look)?);
            }
        }
        list.extend(self.without_submitter(look, &requests, is_old)?);
        if is_old(look.now.saturating_sub(self.began)) {
            list.extend(self.older(look, &requests)?);
        }
        list.sort_by_key(|waiting| (std::cmp::Reverse(waiting.age_ns), waiting.key));
        Ok(list)
    }

    fn of_io(&self, key: Key, io: &io, age: u64, found: &[&found], look: &Look) -> Result<Waiting> {
        let by = &io.by;
        let mut waiting = Waiting {
            kind: "waiting",
            disk: Some(self.names.name(by.into())?.to_string()),
            operation: Some(self.operations.letters(by.operation).to_string()),
            sector: (by.sector != u64::MAX).then_some(by.sector),
            bytes: Some(by.bytes),
            age_ns: age,
            pid: Some(by.process),
            process: Some(common::text(&by.comm)),
            key,
            ..Waiting::default()
        };
        self.reach(&mut waiting, by.dev, found, look)?;
        Ok(waiting)
    }

    /// Notes how far it has come, as what was found of it says.
    fn reach(&self, waiting: &mut Waiting, dev: u32, found: &[&found], look: &Look) -> Result<()> {
        let served = found.iter().filter(|found| found.stage != stage::NO_REQUEST);
        let requests: HashSet<u64> = served.clone().map(|found| found.rq).collect();
        waiting.requests = requests.len() as u32;
        let Some(first) = served.min_by_key(|found| found.allocated) else {
            if look.is_whole {
                waiting.reached = Some("none");
                waiting.text = no_request(dev);
            }
            return Ok(());
        };
        let is_with_driver = first.stage == stage::WITH_DRIVER;
        let since = if is_with_driver { first.started } else { first.allocated };
        // A request may be older than its bio: one of a batch, or one that it was merged into.
        let ns = (since != 0).then(|| look.now.saturating_sub(since.max(waiting.key.1)));
        let disk = self.names.of_device(first.below)?.to_string();
        let is_below = waiting.disk.as_ref() != Some(&disk);
        waiting.text = match (is_with_driver, is_below) {
            (true, true) => format!("with {disk}'s driver"),
            (true, false) => "with the driver".to_owned(),
            (false, true) => format!("in {disk}'s queue"),
            (false, false) => "in the queue".to_owned(),
        };
        if let Some(ns) = ns {
            waiting.text += &format!(" for {}", seconds(ns));
        }
        waiting.reached = Some(if is_with_driver { "driver" } else { "queue" });
        waiting.reached_disk = Some(disk);
        waiting.reached_ns = ns;
        Ok(())
    }

    /// Requests that nobody was seen to submit: of an array, a cache, a multipath. They have an entry only when they end.
    fn without_submitter(
        &self,
        look: &Look,
        requests: &HashMap<Key, Vec<&found>>,
        is_old: impl Fn(u64) -> bool,
    ) -> Result<Vec<Waiting>> {
        let mut list = Vec::new();
        if self.options.pid.is_some() {
            return Ok(list);
        }
        for (key, found) in requests.iter().filter(|((_, submitted), _)| *submitted == 0) {
            let is_older = self.older.iter().any(|older| older.bio == key.0);
            let Some(first) = found.iter().find(|found| found.allocated != 0) else { continue };
            let age = look.now.saturating_sub(first.allocated);
            if is_older || !is_old(age) || !self.is_asked_for(first) {
                continue;
            }
            let mut waiting = Waiting { kind: "waiting", age_ns: age, ..self.of_found(first)? };
            waiting.key = (key.0, first.allocated);
            self.reach(&mut waiting, first.dev, found, look)?;
            waiting.text += ", no submitter seen";
            list.push(waiting);
        }
        Ok(list)
    }

    /// What was in flight when the programs were attached, and still is.
    fn older(&self, look: &Look, now: &HashMap<Key, Vec<&found>>) -> Result<Vec<Waiting>> {
        let is_same = |a: &found, b: &found| {
            (a.bio, a.diskseq, a.sector, a.bytes) == (b.bio, b.diskseq, b.sector, b.bytes)
        };
        let is_still = |then: &waiter| {
            let is_it = |now: &waiter| (now.task, now.switches) == (then.task, then.switches);
            look.waiters.iter().any(is_it)
        };
        let tasks: Vec<&waiter> = self.waiters.iter().filter(|task| is_still(task)).collect();
        let (mut list, mut known, mut done) = (Vec::new(), HashSet::new(), HashSet::new());
        for then in &self.older {
            let found = now.get(&(then.bio, 0)).map_or(&[][..], Vec::as_slice);
            if !done.insert(then.bio) || !found.iter().any(|found| is_same(found, then)) {
                continue;
            }
            // It may have woken meanwhile, to show that it does not hang itself: the I/O is the same.
            let task = look.waiters.iter().find(|task| waits_for(task, then));
            known.extend(task.map(|task| task.task));
            let mut waiting = self.before_start(self.of_found(then)?, look, task);
            waiting.key = (then.bio, 0);
            self.reach(&mut waiting, then.dev, found, look)?;
            waiting.text += ", since before the start";
            list.push(waiting);
        }
        for task in tasks.into_iter().filter(|task| !known.contains(&task.task)) {
            let mut waiting = self.before_start(Waiting::default(), look, Some(task));
            let function = function(task);
            waiting.text = format!(
                "waits for an I/O in {}(), since before the start",
                function.as_deref().unwrap_or("?")
            );
            waiting.function = function;
            waiting.key = (task.task, 0);
            list.push(waiting);
        }
        if self.options.disk.is_some() {
            list.retain(|waiting| waiting.disk.is_some());
        }
        if let Some(process) = &self.options.pid {
            list.retain(|waiting| waiting.pid == Some(process.number));
        }
        Ok(list)
    }

    /// What was found of an I/O of which nothing else is known.
    fn of_found(&self, found: &found) -> Result<Waiting> {
        let disk = Id { diskseq: found.diskseq, device: found.dev };
        Ok(Waiting {
            disk: Some(self.names.name(disk)?.to_string()),
            operation: Some(self.operations.letters(found.operation).to_string()),
            sector: Some(found.sector),
            bytes: Some(found.bytes),
            ..Waiting::default()
        })
    }

    fn before_start(&self, known: Waiting, look: &Look, task: Option<&waiter>) -> Waiting {
        Waiting {
            kind: "waiting",
            age_ns: look.now.saturating_sub(self.began),
            before_start: true,
            pid: task.map(|task| task.process),
            process: task.map(|task| common::text(&task.comm)),
            ..known
        }
    }

    /// In a terminal, shows what has waited for a second and --min, and again whenever its age has doubled.
    pub fn show(&mut self) -> Result<()> {
        let is_wanted = !self.options.json && self.options.top.is_none();
        if !is_wanted || Instant::now() < self.next {
            return Ok(());
        }
        self.next = Instant::now() + SECOND;
        let list = self.hanging()?;
        let shown = std::mem::take(&mut self.shown);
        let mut new = Vec::new();
        for waiting in &list {
            let again = shown.get(&waiting.key).copied().filter(|&again| waiting.age_ns < again);
            if again.is_none() {
                new.push(waiting);
            }
            self.shown.insert(waiting.key, again.unwrap_or(2 * waiting.age_ns));
        }
        self.show_lines(&new)
    }

    /// What has waited for a second and --min, the oldest first. Where nothing does, this costs next to nothing.
    pub fn hanging(&mut self) -> Result<Vec<Waiting>> {
        let now = common::kernel_clock();
        let least = SECOND.max(self.options.min).as_nanos() as u64;
        let is_old = |time: u64| now.saturating_sub(time) >= least;
        let are_older = !self.older.is_empty() || !self.waiters.is_empty();
        let some_wait = self.look_at_ios()?.keys().any(|&(_, submitted)| is_old(submitted));
        let mut list = Vec::new();
        let has_looked = some_wait || are_older && is_old(self.began);
        if has_looked {
            list = self.list(&self.look()?)?;
        }
        if has_looked && is_old(self.began) && !list.iter().any(|waiting| waiting.before_start) {
            // None of them is there any more, or will be.
            (self.older, self.waiters) = (Vec::new(), Vec::new());
        }
        list.retain(|waiting| waiting.age_ns >= least);
        Ok(list)
    }

    /// In the columns of those that have completed, but that TIME says `waiting`, and a text stands for the parts: where
    /// there is no room, behind the process.
    fn show_lines(&self, new: &[&Waiting]) -> Result<()> {
        let mut out = std::io::stdout().lock();
        let time = match self.options.clock(true) {
            Clock::Wall => {
                let now = clock::text(clock::wall(common::kernel_clock()));
                format!("{now} {:>10}", "waiting")
            }
            Clock::Boot => format!("{:>10}", "waiting"),
            Clock::Day => format!("{:<12}", "waiting"),
        };
        for waiting in new.iter().take(LINES) {
            let Columns { disk, operation, sector, kib, pid, process } = waiting.columns();
            let age = parts::ms(waiting.age_ns);
            let text = &waiting.text;
            write!(out, "{time} {disk:<7} {operation:<5} {sector:>10} {kib:>5} {age:>8} ")?;
            match (self.layout.numbers, self.layout.bar) {
                (true, false) => {
                    writeln!(out, "{:<39} {pid:>8} {process}", format!("so far, {text}"))
                }
                (true, true) => {
                    writeln!(out, "{:<53} {pid:>5} {process}", format!("so far, {text}"))
                }
                _ => writeln!(out, "{:<13} {pid:>5} {process}; {text}", "so far"),
            }?;
        }
        if new.len() > LINES {
            writeln!(out, "{time} … and {} more", new.len() - LINES)?;
        }
        Ok(out.flush()?)
    }

    /// What each disk has in flight, as the kernel's requests say.
    fn look_at_disks(&self) -> Result<Vec<found>> {
        if self.disks.is_none() {
            return Ok(Vec::new());
        }
        for disk in fs::read_dir("/sys/block").context("/sys/block")? {
            let file = disk?.path().join("inflight");
            let found = self.found.borrow().len();
            for _ in 0..LOOKS {
                self.found.borrow_mut().truncate(found); // of the look before
                let missed = missed_looks(self.progs)?;
                // A disk may have gone meanwhile.
                fs::read(&file).ok();
                self.ring.consume()?;
                if missed_looks(self.progs)? == missed {
                    break;
                }
            }
        }
        Ok(self.found.take())
    }

    /// Those that have waited for --min, with their bios' addresses.
    fn look_at_ios(&self) -> Result<HashMap<Key, io>> {
        let entries = read_all(&self.ios)?;
        let entries = entries.chunks_exact(size_of::<u64>() + size_of::<io>());
        Ok(entries
            .filter_map(|entry| {
                let (bio, io) = entry.split_at(size_of::<u64>());
                let (bio, io) = (value::<u64>(bio)?, value::<io>(io)?);
                Some(((bio, io.submitted), io))
            })
            .collect())
    }

    fn look_at_tasks(&self) -> Result<Vec<waiter>> {
        let all = read_all(&self.tasks)?;
        Ok(all.chunks_exact(size_of::<waiter>()).filter_map(value::<waiter>).collect())
    }
}

/// How often a look at a disk is made at most: who else reads these files may keep the kernel from running the
/// program, if it loses its CPU in the middle of it.
const LOOKS: usize = 10;

/// How often the kernel has not run the program that looks at a disk.
pub fn missed_looks(progs: &TraceProgs<'_>) -> Result<u64> {
    match progs.look_at_disk.autoload() {
        true => Ok(common::program_info(&progs.look_at_disk)?.recursion_misses),
        false => Ok(0),
    }
}

/// What was found at one moment.
pub struct Look {
    found: Vec<found>,
    waiters: Vec<waiter>,
    /// Each request was found.
    is_whole: bool,
    now: u64,
}

/// How much memory a task's stack has.
const STACK: u64 = 16 * 1024;

/// Whether this task waits for that I/O: its bio, or what it calls at its end, is the task's or on its stack.
fn waits_for(task: &waiter, older: &found) -> bool {
    let is_on_stack = |address: u64| (task.stack..task.stack + STACK).contains(&address);
    older.waiter == task.task || is_on_stack(older.waiter) || is_on_stack(older.bio)
}

/// Functions that only wait.
const WAITS: [&str; 10] = [
    "io_schedule",
    "blk_io_schedule",
    "wait_for_completion",
    "submit_bio_wait",
    "bio_await",
    "bit_wait",
    "__wait_on_bit",
    "out_of_line_wait",
    "folio_wait",
    "__folio_lock",
];

/// The function of the kernel in which a task waits.
fn function(task: &waiter) -> Option<String> {
    let path = format!("/proc/{}/task/{}/stack", task.process, task.thread);
    let stack = fs::read_to_string(path).ok()?;
    let name = |line: &str| Some(line.split_once("] ")?.1.split_once('+')?.0.to_owned());
    let mut functions = stack.lines().filter_map(name);
    functions.find(|name| !WAITS.iter().any(|wait| name.starts_with(wait)))
}

/// Why an I/O has no request, as far as sysfs says.
fn no_request(dev: u32) -> String {
    let mut path = PathBuf::from(format!("/sys/dev/block/{}:{}", dev >> 20, dev & 0xfffff));
    if path.join("partition").exists() {
        path.push("..");
    }
    let is_suspended =
        fs::read_to_string(path.join("dm/suspended")).is_ok_and(|is| is.trim() == "1");
    let text = if is_suspended {
        "no request yet (suspended)"
    } else if path.join("mq").exists() {
        "no request yet"
    } else {
        "no request found"
    };
    text.to_owned()
}

/// The columns of a line, `-` where one is not known.
pub struct Columns<'a> {
    pub disk: &'a str,
    pub operation: &'a str,
    pub sector: String,
    pub kib: String,
    pub pid: String,
    pub process: &'a str,
}

impl Waiting {
    /// For how long it has waited, in ns.
    pub fn age(&self) -> u64 {
        self.age_ns
    }

    /// The same as the list says it.
    pub fn age_text(&self) -> String {
        let than = if self.before_start { "> " } else { "" };
        format!("{than}{}", seconds(self.age_ns))
    }

    /// How far it has come, as far as that is known.
    pub fn reached(&self) -> String {
        match self.requests {
            0 | 1 => self.text.clone(),
            requests => format!("{}, {requests} requests", self.text),
        }
    }

    /// What the list says of it.
    pub fn columns(&self) -> Columns<'_> {
        let number = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
        Columns {
            disk: self.disk.as_deref().unwrap_or("-"),
            operation: self.operation.as_deref().unwrap_or("-"),
            sector: number(self.sector.map(|sector| sector.to_string())),
            kib: number(self.bytes.map(|bytes| Kib(bytes).to_string())),
            pid: number(self.pid.map(|pid| pid.to_string())),
            process: self.process.as_deref().unwrap_or("-"),
        }
    }
}

/// `5.210 s`
fn seconds(ns: u64) -> String {
    format!("{}.{:03} s", ns / 1_000_000_000, ns / 1_000_000 % 1000)
}

/// Prints them: in a table, or as lines of --json.
pub fn print(waiting: &[Waiting], json: bool) -> Result<()> {
    if json {
        for waiting in waiting {
            println!("{}", serde_json::to_string(waiting)?);
        }
        return Ok(());
    }
    if waiting.is_empty() {
        return Ok(());
    }
    println!("\nStill waiting: {}, the oldest first", waiting.len());
    for waiting in waiting.iter().take(LINES) {
        let Columns { disk, operation, sector, kib, pid, process } = waiting.columns();
        let (age, mut text) = (waiting.age_text(), waiting.reached());
        if !text.is_empty() {
            text = format!("; {text}");
        }
        println!(
            "{age:>10} {disk:<7} {operation:<5} {sector:>10} {kib:>5} KiB {pid:>8} {process}{text}"
        );
    }
    if waiting.len() > LINES {
        println!("{:>10} and {} more", "…", waiting.len() - LINES);
    }
    Ok(())
}

/// All that an iterator's program writes.
pub fn read_all(link: &Link) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    Iter::new(link)?.read_to_end(&mut bytes).context("an iterator could not be read")?;
    Ok(bytes)
}

/// The same as a value; `None` if the bytes are too few.
pub fn value<T: Plain + Default>(bytes: &[u8]) -> Option<T> {
    let mut value = T::default();
    plain::copy_from_bytes(&mut value, bytes).ok()?;
    Some(value)
}
