//! The programs of an incident: three services, and four programs that run beside them in every incident.
//! Each reads on its standard input what it does: nothing on its command line tells one incident from another.

use std::{
    fmt::Write as _,
    fs::{self, File, OpenOptions},
    io::Write,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use incidents::{
    measured::{BUCKETS, GET, KINDS, LIST, PAGE, PUT, bucket},
    plan::Numbers,
};
use serde::{Deserialize, Serialize};

/// The sizes of a service's files in bytes: random reads and writes past the cache, reads through it, and a
/// file that is read from its beginning to its end.
pub const FILES: [(&str, u64); 3] = [("data", 8 << 20), ("pages", 24 << 20), ("list", 6 << 20)];

/// What a program is told.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Orders {
    /// Its directories: a service has one, the others look after several.
    pub directories: Vec<PathBuf>,
    /// In which of them it does more than usual.
    pub place: usize,
    /// What it does more than usual.
    pub extra: Option<ExtraLoad>,
    /// How long a disk may have an I/O by its data sheet, in ms: what is slow depends on it.
    pub disk_ms: u64,
}

/// More than usual, each for one of the programs.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum ExtraLoad {
    /// A service gets so many times as many requests, from so many times as many customers.
    Requests(u64),
    /// So many MiB are copied, again and again.
    Copy(u64),
    /// So many threads read what is to be copied.
    Read(u64),
    /// So many threads call fsync.
    Fsync(u64),
    /// The page cache is emptied, each time after so many ms.
    Forget(u64),
    /// A real-time thread for each CPU is busy for so many ms at a time.
    Busy(u64),
    /// One thread computes, with what CPU is left.
    ComputeGently,
}

/// From which time on a request is slow: one of 4 KiB past the page cache, of a page.
const SLOW: [Duration; 2] = [Duration::from_millis(250), Duration::from_millis(150)];

/// The same for a list, which consists of many I/Os, one after the other.
fn slow_list(disk_ms: u64) -> Duration {
    Duration::from_millis(300 + 30 * disk_ms)
}

/// Threads of a service: those that read past the page cache, write, read a page through it, read a list.
const THREADS: [u64; 4] = [20, 4, 4, 4];

/// After a failure, a request is made again so much later, and this often at most.
const AGAIN: (Duration, usize) = (Duration::from_millis(300), 10);

/// A buffer that O_DIRECT takes.
#[repr(align(4096))]
struct Block([u8; 4096]);

/// Does what a program of this name does, until it is killed, or until who has started it ends: the proof, or the
/// learner's shell.
pub fn run(name: &str, orders: &Orders) -> Result<()> {
    // SAFETY: a plain system call.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    match name {
        "backupd" => backup(orders),
        "reportd" => report(orders),
        "tidyd" => tidy(orders),
        "sensord" => sensor(orders),
        "indexd" => index(orders),
        "checkd" => check(orders),
        _ => serve(name, orders),
    }
}

/// Answers requests: single blocks past the page cache, pages that consist of many blocks, and lists that are read
/// from their beginning to their end. What takes long is in the log.
fn serve(name: &str, orders: &Orders) -> Result<()> {
    let directory = orders.directories.first().context("no directory")?;
    let requests = &Requests::new(name)?;
    warm_up(&directory.join("pages"))?;
    // So many times as many, and as often.
    let hurry = if let Some(ExtraLoad::Requests(times)) = orders.extra { times } else { 1 };
    thread::scope(|scope| {
        let readers = THREADS[0] * hurry;
        for thread in 0..readers + THREADS[1] * hurry {
            let is_reader = thread < readers;
            let file = direct(&directory.join("data"), !is_reader)?;
            scope.spawn(move || serve_blocks(requests, &file, thread, is_reader, hurry));
        }
        for thread in 0..THREADS[2] {
            let file = File::open(directory.join("pages"))?;
            scope.spawn(move || serve_pages(requests, &file, thread));
        }
        let slow = slow_list(orders.disk_ms);
        for thread in 0..THREADS[3] {
            let list = directory.join("list");
            scope.spawn(move || serve_list(requests, &list, thread, slow));
        }
        requests.report(name)
    })
}

/// The requests of a service: what came out of them, and where the slow ones are noted.
struct Requests {
    /// All, slow ones, the longest in ms.
    count: [AtomicU64; 3],
    /// By kind: how many were slow, and how many took so long.
    slow: [AtomicU64; KINDS.len()],
    took: [[AtomicU64; BUCKETS]; KINDS.len()],
    /// How many customers are served at once, at most.
    customers: AtomicU64,
    log: File,
}

impl Requests {
    fn new(name: &str) -> Result<Requests> {
        let log = Path::new("/var/log").join(format!("{name}.log"));
        let log = OpenOptions::new().create(true).append(true).open(log)?;
        Ok(Requests {
            count: Default::default(),
            slow: Default::default(),
            took: std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))),
            customers: AtomicU64::new(u64::MAX),
            log,
        })
    }

    /// Lets a customer of this number wait while so many are not wanted.
    fn admit(&self, customer: u64) {
        while customer >= self.customers.load(Relaxed) {
            thread::sleep(Duration::from_millis(200));
        }
    }

    /// Takes a request after a pause: that nobody is there to take it is a part of its time.
    fn take(&self, kind: usize, slow: Duration, pause: u64, mut body: impl FnMut() -> Result<()>) {
        let pause = Duration::from_millis(pause);
        let due = Instant::now() + pause;
        thread::sleep(pause);
        let mut result = body();
        let mut failed = 0;
        while result.is_err() && failed < AGAIN.1 {
            failed += 1;
            thread::sleep(AGAIN.0);
            result = body();
        }
        let took = due.elapsed();
        self.count[0].fetch_add(1, Relaxed);
        self.count[2].fetch_max(took.as_millis() as u64, Relaxed);
        self.took[kind][bucket(took)].fetch_add(1, Relaxed);
        if took >= slow || result.is_err() {
            self.count[1].fetch_add(1, Relaxed);
            self.slow[kind].fetch_add(1, Relaxed);
            let what = KINDS[kind];
            let how = match result {
                Err(error) => format!(": {error:#}"),
                Ok(()) if failed > 0 => format!(", and failed {failed} times before"),
                Ok(()) => String::new(),
            };
            let line = format!("{} {what} took {} ms{how}\n", now(), took.as_millis());
            // At once: others write there, too.
            let _ = { &self.log }.write_all(line.as_bytes());
        }
    }

    /// Writes the count for others to read, again and again.
    fn report(&self, name: &str) -> Result<()> {
        let status = format!("/run/{name}.status");
        let latencies = format!("/run/{name}.latencies");
        let limit = format!("/run/{name}.customers");
        loop {
            thread::sleep(Duration::from_millis(500));
            let customers = fs::read_to_string(&limit).ok();
            let customers = customers.and_then(|text| text.trim().parse().ok());
            self.customers.store(customers.unwrap_or(u64::MAX), Relaxed);
            fs::write(format!("{latencies}.new"), self.latencies())?;
            fs::rename(format!("{latencies}.new"), &latencies)?;
            let [all, slow, most] = self.count.each_ref().map(|n| n.load(Relaxed));
            let text = format!("requests {all}\nslow {slow}\nlongest_ms {most}\n");
            // As a whole, for whoever reads it.
            fs::write(format!("{status}.new"), text)?;
            fs::rename(format!("{status}.new"), &status)?;
        }
    }
}

impl Requests {
    /// A line for each kind: its name, how many were slow, and how many took how long, as far as there were any.
    fn latencies(&self) -> String {
        let mut text = String::new();
        for (kind, name) in KINDS.iter().enumerate() {
            let _ = write!(text, "{name} {}", self.slow[kind].load(Relaxed));
            for (bucket, count) in self.took[kind].iter().enumerate() {
                let count = count.load(Relaxed);
                if count > 0 {
                    let _ = write!(text, " {bucket}:{count}");
                }
            }
            text.push('\n');
        }
        text
    }
}

/// Reads a file into the page cache, so that a page's first request is as quick as its second.
fn warm_up(file: &Path) -> Result<()> {
    let mut pages = File::open(file)?;
    // SAFETY: a system call on an open file.
    unsafe { libc::posix_fadvise(pages.as_raw_fd(), 0, 0, libc::POSIX_FADV_WILLNEED) };
    std::io::copy(&mut pages, &mut std::io::sink())?;
    Ok(())
}

/// Reads or writes single blocks, past the page cache.
fn serve_blocks(requests: &Requests, file: &File, thread: u64, is_reader: bool, hurry: u64) {
    let mut numbers = Numbers(thread);
    let mut block = Box::new(Block([thread as u8; 4096]));
    let blocks = FILES[0].1 / 4096;
    // There are five readers for each writer: of both, the first ones are let in.
    let customer = if is_reader { thread } else { (thread - THREADS[0] * hurry) * 5 };
    loop {
        let at = numbers.below(blocks) * 4096;
        let pause = (400 + numbers.below(200)) / hurry;
        requests.admit(customer);
        match is_reader {
            true => {
                requests.take(GET, SLOW[0], pause, || Ok(file.read_exact_at(&mut block.0, at)?))
            }
            false => requests.take(PUT, SLOW[0], pause, || Ok(file.write_all_at(&block.0, at)?)),
        }
    }
}

/// Reads pages, each of which consists of many blocks.
fn serve_pages(requests: &Requests, file: &File, thread: u64) {
    // SAFETY: a system call on an open file.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    let mut numbers = Numbers(100 + thread);
    let mut piece = [0; 4096];
    loop {
        requests.take(PAGE, SLOW[1], 300 + numbers.below(200), || {
            for _ in 0..200 {
                let at = numbers.below(FILES[1].1 / 4096) * 4096;
                file.read_exact_at(&mut piece, at)?;
            }
            Ok(())
        });
    }
}

/// Reads a part of the list from its beginning to its end, and lets the page cache forget it.
fn serve_list(requests: &Requests, path: &Path, thread: u64, slow: Duration) -> Result<()> {
    let length = FILES[2].1 / THREADS[3];
    let mut piece = [0; 16384];
    let from = thread * length;
    loop {
        // Afresh: an open file keeps the readahead that its disk had when it was opened.
        let list = File::open(path)?;
        requests.take(LIST, slow, 1000, || {
            for at in (from..from + length).step_by(piece.len()) {
                list.read_exact_at(&mut piece, at)?;
            }
            Ok(())
        });
        forget(&list, from, length);
    }
}

/// Opens a file to read it, and maybe to write it, past the page cache.
fn direct(path: &Path, write: bool) -> Result<File> {
    let mut options = OpenOptions::new();
    Ok(options.read(true).write(write).custom_flags(libc::O_DIRECT).open(path)?)
}

/// Tells the page cache to forget so many bytes of a file.
fn forget(file: &File, from: u64, length: u64) {
    let (from, length) = (from as i64, length as i64);
    // SAFETY: a system call on an open file.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), from, length, libc::POSIX_FADV_DONTNEED) };
}

/// The time of day: `14:03:07`.
fn now() -> String {
    // SAFETY: `tm` is written by localtime_r, which takes what time() returns.
    let tm = unsafe {
        let (time, mut tm) = (libc::time(std::ptr::null_mut()), std::mem::zeroed());
        libc::localtime_r(&time, &mut tm);
        tm
    };
    format!("{:02}:{:02}:{:02}", tm.tm_hour, tm.tm_min, tm.tm_sec)
}

/// Copies files; where that is much, without an end.
fn backup(orders: &Orders) -> Result<()> {
    let piece = vec![0x55; 1 << 20];
    if let Some(ExtraLoad::Read(threads)) = orders.extra {
        for directory in &orders.directories {
            File::create(directory.join("copy"))?.write_all(&piece)?;
        }
        let list = orders.directories[orders.place].join("list");
        return thread::scope(|scope| {
            for thread in 0..threads {
                let list = direct(&list, false)?;
                scope.spawn(move || -> Result<()> {
                    let mut numbers = Numbers(thread);
                    let mut block = Box::new(Block([0; 4096]));
                    loop {
                        list.read_exact_at(&mut block.0, numbers.below(FILES[2].1 / 4096) * 4096)?;
                    }
                });
            }
            Ok(())
        });
    }
    let extra = if let Some(ExtraLoad::Copy(size)) = orders.extra { Some(size) } else { None };
    loop {
        for (index, directory) in orders.directories.iter().enumerate() {
            let extra = extra.filter(|_| orders.place == index);
            let mut copy = File::create(directory.join("copy"))?;
            for _ in 0..extra.unwrap_or(1) {
                copy.write_all(&piece)?;
            }
            if extra.is_some() {
                copy.sync_data()?;
            }
        }
        thread::sleep(Duration::from_millis(if extra.is_none() { 3000 } else { 50 }));
    }
}

/// Writes a report; where that is much, with many flushes.
fn report(orders: &Orders) -> Result<()> {
    let (place, threads, rest) = match orders.extra {
        Some(ExtraLoad::Fsync(threads)) => (orders.place, threads, Duration::ZERO),
        _ => (0, 1, Duration::from_secs(2)),
    };
    let directory = &orders.directories[place];
    thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || -> Result<()> {
                let mut report = File::create(directory.join(format!("report.{thread}")))?;
                loop {
                    report.write_all(b"all is well\n")?;
                    report.sync_all()?;
                    thread::sleep(rest);
                }
            });
        }
    });
    Ok(())
}

/// Removes what is old; where that is much, from the page cache.
fn tidy(orders: &Orders) -> Result<()> {
    loop {
        for directory in &orders.directories {
            let _ = fs::remove_file(directory.join("old"));
            fs::write(directory.join("old"), "old")?;
        }
        let place = &orders.directories[orders.place];
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            let rest = match orders.extra {
                Some(ExtraLoad::Forget(rest)) => {
                    let pages = File::open(place.join("pages"))?;
                    forget(&pages, 0, FILES[1].1);
                    rest
                }
                _ => 2000,
            };
            thread::sleep(Duration::from_millis(rest));
        }
    }
}

/// Reads a sensor, with real-time priority; where that is much, without a pause.
fn sensor(orders: &Orders) -> Result<()> {
    // SAFETY: plain system calls.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) } as usize;
    thread::scope(|scope| {
        for cpu in 0..cpus {
            scope.spawn(move || {
                // SAFETY: both structures are initialized, and this thread is meant.
                unsafe {
                    let mut set: libc::cpu_set_t = std::mem::zeroed();
                    libc::CPU_SET(cpu, &mut set);
                    libc::sched_setaffinity(0, size_of_val(&set), &set);
                    let priority = libc::sched_param { sched_priority: 50 };
                    libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority);
                }
                let busy = if let Some(ExtraLoad::Busy(ms)) = orders.extra { ms } else { 0 };
                let busy = Duration::from_millis(busy);
                loop {
                    let start = Instant::now();
                    let mut value = 0_u64;
                    while start.elapsed() < busy {
                        value = std::hint::black_box(value + 1);
                    }
                    thread::sleep(Duration::from_millis(600));
                }
            });
        }
    });
    Ok(())
}

/// Computes an index now and then; where that is much, with what CPU is left.
fn index(orders: &Orders) -> Result<()> {
    // A scheduler that waits for one process lets others wait; of a service alone, bfq soon joins the queues of all
    // threads, and none waits for another one.
    let list = direct(&orders.directories[orders.place].join("list"), false)?;
    thread::spawn(move || read_blocks(&list, Duration::from_millis(20)));
    let mut rest = Duration::from_secs(2);
    if let Some(ExtraLoad::ComputeGently) = orders.extra {
        // SAFETY: a system call.
        unsafe { libc::nice(19) };
        rest = Duration::from_millis(20);
    }
    let mut value = 0_u64;
    loop {
        for _ in 0..50_000 {
            value = std::hint::black_box(value.wrapping_mul(31) + 7);
        }
        thread::sleep(rest);
    }
}

/// Reads a file again, to check it.
fn check(orders: &Orders) -> Result<()> {
    let list = direct(&orders.directories[orders.place].join("list"), false)?;
    read_blocks(&list, Duration::from_millis(200))
}

/// Reads blocks past the page cache, each after so much time.
fn read_blocks(file: &File, rest: Duration) -> Result<()> {
    let (mut numbers, mut block) = (Numbers(0), Box::new(Block([0; 4096])));
    loop {
        file.read_exact_at(&mut block.0, numbers.below(FILES[2].1 / 4096) * 4096)?;
        thread::sleep(rest);
    }
}
