//! The reads that are measured.

use std::fs;
use std::io;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};

use bench::plan::{Load, Run};

/// The number of the disk that takes its time: the one after those of the growth's loads.
const SLOW: usize = 16;
/// Where null_blk's disks are made one by one.
const CONFIGFS: &str = "/sys/kernel/config";
/// The part of a disk that is read: it fits into the page cache.
const SPAN: usize = 16 << 20;

/// A disk that completes every request at once, on the CPU that submitted it.
fn disk(number: usize) -> String {
    format!("/dev/nullb{number}")
}

/// Creates so many of these disks, and one more that takes its time where `threads` will read.
pub fn create_disks(count: usize, threads: bool) -> Result<()> {
    let first = disk(0);
    ensure!(!fs::exists(&first)?, "{first} is there already: run modprobe -r null_blk first");
    let count = format!("nr_devices={count}");
    let options = ["irqmode=0", "queue_mode=2", "submit_queues=1", &count, "gb=1", "bs=512"];
    let status = Command::new("modprobe").arg("null_blk").args(options).status();
    let status = status.context("cannot start modprobe")?;
    ensure!(status.success(), "modprobe null_blk ended with {status}");
    if threads {
        if !fs::exists(format!("{CONFIGFS}/nullb"))? {
            let status =
                Command::new("mount").args(["-t", "configfs", "configfs", CONFIGFS]).status();
            ensure!(status?.success(), "cannot mount {CONFIGFS}");
        }
        let dir = format!("{CONFIGFS}/nullb/nullb{SLOW}");
        fs::create_dir(&dir).with_context(|| dir.clone())?;
        let delay = Load::DELAY_NS.to_string();
        for (name, value) in [
            ("irqmode", "2"),
            ("completion_nsec", &delay),
            ("submit_queues", "1"),
            ("size", "1024"),
            ("blocksize", "512"),
            ("power", "1"),
        ] {
            fs::write(format!("{dir}/{name}"), value).with_context(|| format!("{dir}/{name}"))?;
        }
    }
    for _ in 0..200 {
        if fs::exists(&first)? && (!threads || fs::exists(disk(SLOW))?) {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    bail!("the disks do not appear after modprobe null_blk");
}

/// Removes them.
pub fn remove_disks() {
    // The figures are there already; a disk that is left over does no harm.
    let _ = fs::remove_dir(format!("{CONFIGFS}/nullb/nullb{SLOW}"));
    let _ = Command::new("modprobe").args(["-r", "null_blk"]).status();
}

/// A buffer that O_DIRECT accepts.
#[repr(C, align(4096))]
struct Buffer([u8; 1 << 20]);

/// Reads from the disk as `load` says.
pub struct Reader {
    files: Vec<std::os::fd::OwnedFd>,
    buffer: Box<Buffer>,
    size: usize,
    load: Load,
    random: u32,
    fio: bool,
}

impl Reader {
    /// Opens the disk. Where the reads come from the page cache, reads all once.
    pub fn open(load: Load, fio: bool) -> Result<Reader> {
        let (flags, size) = match load {
            Load::Cached4k => (OFlags::empty(), 4096),
            Load::Cached1m => (OFlags::empty(), 1 << 20),
            _ => (OFlags::DIRECT, 4096),
        };
        let disks = if load.threads() > 1 { SLOW..SLOW + 1 } else { 0..load.disks() };
        let open = |path: String| {
            rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC | flags, Mode::empty())
                .with_context(|| format!("cannot open {path}"))
        };
        let files = disks.map(|number| open(disk(number))).collect::<Result<_>>()?;
        let fio = fio && load == Load::Direct;
        let mut reader =
            Reader { files, buffer: Box::new(Buffer([0; 1 << 20])), size, load, random: 1, fio };
        if matches!(load, Load::Cached4k | Load::Cached1m) {
            // After a few times, the kernel has each page in its list of active pages.
            for place in (0..4).flat_map(|_| 0..SPAN / size) {
                reader.read(place)?;
            }
        }
        Ok(reader)
    }

    /// How many reads are a run where a run of 4 KiB has `ios`.
    pub fn ios(&self, ios: u32) -> u32 {
        if self.load == Load::Cached1m { (ios / 100).max(10) } else { ios }
    }

    fn read(&mut self, place: usize) -> io::Result<()> {
        let buffer = &mut self.buffer.0[..self.size];
        let file = &self.files[place % self.files.len()];
        let bytes = rustix::io::pread(file, buffer, (place * self.size) as u64)?;
        if bytes == self.size { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Reads `ios` times, and returns what one read took.
    pub fn run(&mut self, ios: u32) -> Result<Run> {
        if self.fio {
            return fio(ios);
        }
        let (start, cpu) = (Instant::now(), thread_ns());
        for _ in 0..ios {
            self.random = self.random.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            let place = (self.random >> 8) as usize % (SPAN / self.size);
            self.read(place).context("cannot read from the disk")?;
        }
        let (cpu, elapsed) = (thread_ns() - cpu, start.elapsed());
        let each = |ns: f64| ns / f64::from(ios);
        let elapsed = each(elapsed.as_nanos() as f64);
        Ok(Run { elapsed, thread: Some(each(cpu)), later: 0.0 })
    }
}

/// Reads `ios` times by all of a load's threads at once.
pub fn by_threads(load: Load, ios: u32) -> Result<Run> {
    let reader = |random| Ok(Reader { random, ..Reader::open(load, false)? });
    let readers = (1..=load.threads()).map(reader);
    let readers = readers.collect::<Result<Vec<_>>>()?;
    let each = ios / load.threads();
    let start = Instant::now();
    std::thread::scope(|scope| {
        let run = |mut reader: Reader| scope.spawn(move || reader.run(each).map(|_| ()));
        let threads: Vec<_> = readers.into_iter().map(run).collect();
        threads.into_iter().try_for_each(|thread| {
            thread.join().map_err(|_| anyhow::anyhow!("a thread that reads panicked"))?
        })
    })?;
    let elapsed = start.elapsed().as_nanos() as f64 / f64::from(each * load.threads());
    Ok(Run { elapsed, thread: None, later: 0.0 })
}

fn thread_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Direct reads by fio, with the time that it says they took.
fn fio(ios: u32) -> Result<Run> {
    let size = format!("--io_size={}", u64::from(ios) * 4096);
    let output = Command::new("fio")
        .args(["--name=bench", "--filename=/dev/nullb0", "--ioengine=psync", "--rw=randread"])
        .args(["--bs=4k", "--direct=1", "--size=16m", "--norandommap", "--gtod_reduce=1"])
        .args(["--thread", "--invalidate=0", "--output-format=json", &size])
        .output()
        .context("cannot start fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let text = &text[text.find('{').context("fio printed no JSON")?..];
    let json: serde_json::Value = serde_json::from_str(text).context("fio's JSON")?;
    let read = &json["jobs"][0]["read"];
    let done = read["total_ios"].as_f64().filter(|&done| done > 0.0).context("fio read nothing")?;
    let ms = read["runtime"].as_f64().context("fio's JSON has no runtime")?;
    Ok(Run { elapsed: ms * 1e6 / done, thread: None, later: 0.0 })
}
