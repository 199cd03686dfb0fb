//! What the kernel says of its disks, read by threads that may have to wait.
//!
//! Who reads a file of /sys can wait for a disk: `queue/iostats` for as long as somebody changes another setting
//! of the queue, which is not changed before all requests of a disk that hangs have completed. Who reads
//! /proc/sys/kernel/ftrace_enabled waits while the kernel hooks functions. So a scrape reads no such file. It asks
//! a thread for a look, waits for a moment, and takes what is known by then.
//!
//! Where the thread waits for one file, another thread takes its place, and leaves that one file out.

use std::{
    collections::{BTreeMap, HashSet},
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Error, Result, ensure};

/// How long a scrape waits for a look.
const WAIT: Duration = Duration::from_millis(250);
/// A thread that takes longer for one task is replaced.
const STUCK: Duration = Duration::from_millis(100);
/// How many threads may wait for a file each, while another one looks. The unit allows 16 tasks in all.
const THREADS: usize = 8;

/// Counts that are compared: of reads and flushes, of writes, of discards. The kernel takes the flush that
/// dm-multipath sends down a path for a read.
pub type Counts = [i64; 3];

/// `/sys/block/DISK/stat`, for which nobody has to wait.
#[derive(Clone, Debug)]
pub struct Stat {
    /// When this began to be read.
    pub at: Instant,
    /// How many reads, writes, discards and flushes have completed; older kernels have less.
    operations: [Option<i64>; 4],
    /// How many requests are in flight.
    pub in_flight: u64,
}

/// What the kernel has counted of a disk with requests, and whether that can be compared.
#[derive(Clone, Debug)]
pub struct Kernels {
    /// When the counts began to be read.
    pub at: Instant,
    /// The counts.
    pub counts: Counts,
    /// Whether the kernel counts at all: `queue/iostats`.
    pub has_statistics: bool,
    /// Whether the exporter counts the same.
    pub is_audited: bool,
}

/// A disk.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Its name.
    pub name: String,
    /// The kernel's number for it, see [`common::BlockDevice`].
    pub diskseq: u64,
    /// Whether it came after the first look, so that the kernel's counters began at 0 since then. A disk that only
    /// gets a new number keeps its counters, as a loop device does that is attached again.
    pub is_new: bool,
    /// Whether it has requests.
    pub has_requests: bool,
    /// Since when it has been known.
    pub since: Instant,
    /// What its `stat` says, also where a setting of its queue cannot be read.
    pub stat: Option<Stat>,
    /// What the kernel has counted, if all of that was read.
    pub kernels: Option<Kernels>,
    /// The inode of its directory in /sys, which stays as long as the disk does, whatever its number.
    directory: u64,
}

/// All disks, as far as they are known.
#[derive(Debug, Default)]
pub struct Look {
    /// By their names.
    pub disks: Vec<Disk>,
    /// A disk with this number or a lower one that is not among them has gone. One with a higher number may have
    /// come later.
    settled: u64,
}

impl Look {
    /// The name of the disk with this number.
    pub fn name(&self, diskseq: u64) -> Option<&str> {
        let disk = self.disks.iter().find(|disk| disk.diskseq == diskseq)?;
        Some(&disk.name)
    }

    /// Whether the disk with this number has gone.
    pub fn lacks(&self, diskseq: u64) -> bool {
        diskseq <= self.settled && self.name(diskseq).is_none()
    }
}

/// What may have to wait.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Task {
    /// Whether the hooks run.
    Hooks,
    /// The names of all disks.
    List,
    /// What tells a disk from others.
    Identity(String),
    /// What the kernel has counted of it.
    Stat(String),
    /// Whether that can be compared: settings of its queue.
    Settings(String),
}

/// A name in /sys/block.
#[derive(Debug)]
struct Named {
    /// Whether an earlier list had other names only.
    is_new: bool,
    disk: Option<Disk>,
}

/// What the threads share.
#[derive(Default)]
struct State {
    /// How many looks were asked for, and how many of these are done.
    asked: u64,
    done: u64,
    /// The number of the thread that looks. Those before it are stuck, and end when they are no longer.
    thread: u64,
    /// When that thread began what it does.
    began: Option<Instant>,
    /// What is being read, also by threads that are stuck.
    busy: HashSet<Task>,
    has_list: bool,
    names: BTreeMap<String, Named>,
    /// The highest number of a disk so far, and that before the list was read.
    highest: u64,
    settled: u64,
    /// Why what is measured is not complete any more.
    hooks: Option<Error>,
}

/// What two sides share.
struct Shared {
    bios: bool,
    hooks_run: Box<dyn Fn() -> Result<()> + Send + Sync>,
    state: Mutex<State>,
    /// A look is asked for, or something is done.
    changed: Condvar,
}

/// The threads.
pub struct Looks(Arc<Shared>);

impl Looks {
    /// Starts the first one. `bios`: the exporter counts those. `hooks_run` fails where what is measured is not
    /// complete any more.
    pub fn new(
        bios: bool,
        hooks_run: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Result<Looks> {
        let hooks_run = Box::new(hooks_run);
        let (state, changed) = (Mutex::default(), Condvar::new());
        let looks = Looks(Arc::new(Shared { bios, hooks_run, state, changed }));
        looks.replace(&mut looks.0.lock()).context("no thread for /sys could be started")?;
        Ok(looks)
    }

    /// Asks for a look, and waits for it, but not for long. What is older than this call says so by its time.
    /// Fails where the hooks do not run any more.
    pub fn look(&self) -> Result<Look> {
        let until = Instant::now() + WAIT;
        let mut state = self.0.lock();
        state.asked += 1;
        let wanted = state.asked;
        self.0.changed.notify_all();
        while state.done < wanted {
            let now = Instant::now();
            let stuck = state.began.map(|began| began + STUCK);
            if stuck.is_some_and(|stuck| stuck <= now) && self.replace(&mut state).is_err() {
                break;
            }
            let left = stuck.filter(|stuck| *stuck > now).map_or(until, |stuck| stuck.min(until));
            if now >= until {
                break;
            }
            let waited = self.0.changed.wait_timeout(state, left.saturating_duration_since(now));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if let Some(error) = state.hooks.take() {
            return Err(error);
        }
        Ok(state.look())
    }

    /// Lets another thread continue, and leave out what the others wait for.
    fn replace(&self, state: &mut State) -> Result<()> {
        ensure!(state.busy.len() <= THREADS, "{THREADS} threads wait for /sys");
        let (shared, number) = (Arc::clone(&self.0), state.thread + 1);
        let run = move || while shared.next(number).is_some() {};
        thread::Builder::new().name("looks".to_owned()).spawn(run)?;
        (state.thread, state.began) = (number, None);
        Ok(())
    }
}

impl State {
    fn look(&self) -> Look {
        let disks = self.names.values().filter_map(|named| named.disk.clone()).collect();
        // A disk that cannot be told from others may be any.
        let is_known = |(name, named): (&String, &Named)| {
            named.disk.is_some() || !self.busy.contains(&Task::Identity(name.clone()))
        };
        Look { disks, settled: if self.names.iter().all(is_known) { self.settled } else { 0 } }
    }

    fn has_listed(&mut self, list: Vec<String>, settled: u64) {
        let is_new = std::mem::replace(&mut self.has_list, true);
        let list: HashSet<String> = list.into_iter().collect();
        self.names.retain(|name, _| list.contains(name));
        for name in list {
            self.names.entry(name).or_insert(Named { is_new, disk: None });
        }
        self.settled = settled;
    }

    fn has_identified(&mut self, name: &str, identity: Option<Identity>) {
        let Some(named) = self.names.get_mut(name) else { return };
        let Some(Identity { diskseq, directory, has_requests }) = identity else {
            named.disk = None;
            return;
        };
        self.highest = self.highest.max(diskseq);
        let before = named.disk.take();
        let (since, stat, kernels) = match &before {
            Some(before) if before.diskseq == diskseq => {
                (before.since, before.stat.clone(), before.kernels.clone())
            }
            _ => (Instant::now(), None, None),
        };
        let is_new = match &before {
            Some(before) if before.directory != directory => true,
            Some(before) => before.is_new && before.diskseq == diskseq,
            None => named.is_new,
        };
        let name = name.to_owned();
        named.disk =
            Some(Disk { name, diskseq, is_new, has_requests, since, stat, kernels, directory });
    }

    /// The disk of this name, if it is still this one.
    fn disk(&mut self, name: &str, diskseq: u64) -> Option<&mut Disk> {
        let disk = self.names.get_mut(name)?.disk.as_mut()?;
        (disk.diskseq == diskseq).then_some(disk)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until somebody asks for a look, and looks. `None`: another thread does so from now on.
    fn next(&self, thread: u64) -> Option<()> {
        let mut state = self.lock();
        while state.thread == thread && state.done == state.asked {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (wanted, settled) = (state.asked, state.highest);
        drop(state);

        let hooks = || (self.hooks_run)().err();
        self.does(thread, Task::Hooks, hooks, |state, error| state.hooks = error)?;
        self.does(thread, Task::List, names, |state, list| {
            state.has_listed(list.unwrap_or_default(), settled);
        })?;
        let names: Vec<String> = self.lock().names.keys().cloned().collect();
        for name in names {
            let path = Path::new("/sys/block").join(&name);
            let task = Task::Identity(name.clone());
            let read = || Identity::read(&path);
            self.does(thread, task, read, |state, found| state.has_identified(&name, found))?;
            let disk = self.lock().names.get(&name).and_then(|named| named.disk.clone());
            let Some(disk) = disk.filter(|disk| disk.has_requests) else { continue };
            let mut stat = None;
            let read = || Stat::read(&path, disk.diskseq);
            self.does(thread, Task::Stat(name.clone()), read, |state, found| {
                if let (Some(disk), Some(found)) = (state.disk(&name, disk.diskseq), found) {
                    disk.stat = Some(found.clone());
                    stat = Some(found);
                }
            })?;
            let Some(stat) = stat else { continue };
            let read = || Kernels::read(&stat, &path, disk.diskseq, self.bios);
            self.does(thread, Task::Settings(name.clone()), read, |state, found| {
                if let (Some(disk), Some(found)) = (state.disk(&name, disk.diskseq), found) {
                    disk.kernels = Some(found);
                }
            })?;
        }
        let mut state = self.lock();
        if state.thread == thread {
            state.done = wanted;
            self.changed.notify_all();
        }
        Some(())
    }

    /// Does a task, if no other thread waits for the same. `None`: this thread was replaced meanwhile.
    fn does<T>(
        &self,
        thread: u64,
        task: Task,
        work: impl FnOnce() -> T,
        keep: impl FnOnce(&mut State, T),
    ) -> Option<()> {
        let mut state = self.lock();
        if state.thread != thread {
            return None;
        }
        if !state.busy.insert(task.clone()) {
            return Some(());
        }
        state.began = Some(Instant::now());
        drop(state);
        let busy = Busy(self, task);
        let found = work();
        drop(busy);
        let mut state = self.lock();
        keep(&mut state, found);
        if state.thread != thread {
            return None;
        }
        state.began = None;
        Some(())
    }
}

/// A task that is being done; also where it panics, no longer than that.
struct Busy<'a>(&'a Shared, Task);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.lock().busy.remove(&self.1);
    }
}

fn names() -> Result<Vec<String>> {
    let disks = fs::read_dir("/sys/block").context("/sys/block")?.flatten();
    Ok(disks.map(|disk| disk.file_name().to_string_lossy().into_owned()).collect())
}

/// What tells a disk from all others.
struct Identity {
    diskseq: u64,
    directory: u64,
    has_requests: bool,
}

impl Identity {
    fn read(disk: &Path) -> Option<Identity> {
        // A path of nvme multipath is a disk without a number.
        if !disk.join("dev").exists() {
            return None;
        }
        let directory = fs::metadata(disk).ok()?.ino();
        let has_requests = disk.join("mq").exists();
        Some(Identity { diskseq: diskseq(disk)?, directory, has_requests })
    }
}

impl Stat {
    /// Of the disk with this number.
    fn read(disk: &Path, number: u64) -> Option<Stat> {
        let at = Instant::now();
        let stat = read(&disk.join("stat")).ok()?;
        let stat: Vec<i64> = stat.split_whitespace().flat_map(str::parse).collect();
        let operations = [0, 4, 11, 15].map(|n| stat.get(n).copied());
        let stat = Stat { at, operations, in_flight: *stat.get(8)? as u64 };
        (diskseq(disk) == Some(number)).then_some(stat)
    }

    /// How many requests have completed, of all operations.
    pub fn completed(&self) -> u64 {
        self.operations.iter().flatten().sum::<i64>() as u64
    }
}

impl Kernels {
    /// The kernel's counts of a disk that has requests. Waits where somebody changes a setting of its queue.
    fn read(stat: &Stat, disk: &Path, number: u64, bios: bool) -> Option<Kernels> {
        let [reads, writes, discards, flushes] = stat.operations;
        let (reads, writes, discards) = (reads?, writes?, discards?);
        let counts = match bios {
            // A bio without data that asks for a flush is a write there, and the flush another request.
            true => [reads + writes + discards, 0, 0],
            false => [reads + flushes?, writes, discards],
        };
        let has_statistics = read(&disk.join("queue/iostats")).ok()?.trim() == "1";
        let is_audited = has_statistics && (!bios || is_auditable(disk));
        let kernels = Kernels { at: stat.at, counts, has_statistics, is_audited };
        (diskseq(disk) == Some(number)).then_some(kernels)
    }
}

fn diskseq(disk: &Path) -> Option<u64> {
    read(&disk.join("diskseq")).ok()?.trim().parse().ok()
}

/// A file of /sys that has one line: in half as many system calls as a file of any length needs.
fn read(file: &Path) -> io::Result<String> {
    let mut line = [0; 1024];
    let length = File::open(file)?.read(&mut line)?;
    Ok(String::from_utf8_lossy(&line[..length]).into_owned())
}

/// Whether the kernel counts bios as the exporter does. It does not where other disks lie above this one: they send
/// it bios of their own; nor on a disk with checksums, where a bio completes after its request.
fn is_auditable(disk: &Path) -> bool {
    let has = |directory: &Path| {
        fs::read_dir(directory.join("holders")).is_ok_and(|mut holders| holders.next().is_some())
    };
    let entries = || fs::read_dir(disk).into_iter().flatten().flatten();
    let checksums = read(&disk.join("integrity/format")).unwrap_or_default();
    ["", "none"].contains(&checksums.trim())
        && !has(disk)
        && !entries().any(|entry| has(&entry.path()))
}
