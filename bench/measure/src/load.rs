//! The reads that are measured.

use std::fs;
use std::io;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};

use bench::plan::{Load, Run};

/// A disk that completes every request at once, on the CPU that submitted it.
const DISK: &str = "/dev/nullb0";
/// The part of the disk that is read: it fits into the page cache.
const SPAN: usize = 16 << 20;

/// Creates the disk.
pub fn create_disk() -> Result<()> {
    ensure!(!fs::exists(DISK)?, "{DISK} is there already: run modprobe -r null_blk first");
    let options =
        ["irqmode=0", "queue_mode=2", "submit_queues=1", "nr_devices=1", "gb=1", "bs=512"];
    let status = Command::new("modprobe").arg("null_blk").args(options).status();
    let status = status.context("cannot start modprobe")?;
    ensure!(status.success(), "modprobe null_blk ended with {status}");
    for _ in 0..200 {
        if fs::exists(DISK)? {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    bail!("{DISK} does not appear after modprobe null_blk");
}

/// Removes it.
pub fn remove_disk() {
    // The figures are there already; a disk that is left over does no harm.
    let _ = Command::new("modprobe").args(["-r", "null_blk"]).status();
}

/// A buffer that O_DIRECT accepts.
#[repr(C, align(4096))]
struct Buffer([u8; 1 << 20]);

/// Reads from the disk as `load` says.
pub struct Reader {
    file: std::os::fd::OwnedFd,
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
            Load::Direct => (OFlags::DIRECT, 4096),
            Load::Cached4k => (OFlags::empty(), 4096),
            Load::Cached1m => (OFlags::empty(), 1 << 20),
        };
        let file = rustix::fs::open(DISK, OFlags::RDONLY | OFlags::CLOEXEC | flags, Mode::empty())
            .with_context(|| format!("cannot open {DISK}"))?;
        let fio = fio && load == Load::Direct;
        let mut reader =
            Reader { file, buffer: Box::new(Buffer([0; 1 << 20])), size, load, random: 1, fio };
        if load != Load::Direct {
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
        let bytes = rustix::io::pread(&self.file, buffer, (place * self.size) as u64)?;
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
            self.read(place).with_context(|| format!("cannot read from {DISK}"))?;
        }
        let (cpu, elapsed) = (thread_ns() - cpu, start.elapsed());
        let each = |ns: f64| ns / f64::from(ios);
        Ok(Run { elapsed: each(elapsed.as_nanos() as f64), thread: Some(each(cpu)) })
    }
}

fn thread_ns() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// The same reads by fio, with the time that it says they took.
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
    Ok(Run { elapsed: ms * 1e6 / done, thread: None })
}
