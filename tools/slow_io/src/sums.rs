//! What was added up: for each disk where the time went.

use std::fs;

use anyhow::{Context, Result, anyhow};
use libbpf_rs::{Map, MapCore, MapFlags};
use plain::Plain;
use serde_json::{Value, json};

use crate::{
    cli, line,
    parts::{self, NAMES},
    trace::types::{disk, sum},
};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl Plain for disk {}

/// How many disks may come while the program runs, to be told apart.
const ROOM: usize = 16;

/// The place of the part that every bio with a request has: `enum part` in parts.h.
const DEVICE: usize = 2;

/// The disks and partitions, in the order of their places in the map `disks`. The first place is for
/// those that have none.
pub struct Places {
    devices: Vec<u32>,
    most: usize,
}

impl Places {
    /// Without a place yet; as many as there are disks now, and some more.
    pub fn of_machine() -> Result<Places> {
        Ok(Places { devices: Vec::new(), most: devices()?.len() + ROOM })
    }

    /// How many entries the map `disks` needs: there are two programs.
    pub fn entries(&self) -> u32 {
        2 * (1 + self.most) as u32
    }

    /// Gives new disks a place, and writes it to the map where the BPF program finds it. Only of these: while
    /// a task is in bpf(2), the kernel skips all kprobe programs on its CPU (kernel/bpf/syscall.c,
    /// bpf_disable_instrumentation()), also when it has taken the CPU from that task.
    pub fn write(&mut self, places: &Map<'_>) -> Result<()> {
        for dev in devices()? {
            if !self.devices.contains(&dev) && self.devices.len() < self.most {
                self.devices.push(dev);
                let place = self.devices.len() as u32;
                places.update(&dev.to_ne_bytes(), &place.to_ne_bytes(), MapFlags::ANY)?;
            }
        }
        Ok(())
    }

    /// What was added up for each disk that was used.
    pub fn disks(&self, disks: &Map<'_>) -> Result<Vec<Disk>> {
        let mut used = Vec::new();
        for (place, dev) in (0..).zip(std::iter::once(None).chain(self.devices.iter().map(Some))) {
            let name = dev.map_or_else(|| "other disks".to_owned(), |&dev| line::name(dev));
            let mut sums = Disk { name, ..Disk::default() };
            for key in [2 * place, 2 * place + 1_u32] {
                for bytes in
                    disks.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY)?.into_iter().flatten()
                {
                    let disk: &disk =
                        plain::from_bytes(&bytes).map_err(|_| anyhow!("struct disk"))?;
                    sums.parts.iter_mut().zip(&disk.parts).for_each(|(sum, other)| sum.add(other));
                    sums.total.add(&disk.total);
                }
            }
            used.extend((sums.total.bios() > 0).then_some(sums));
        }
        Ok(used)
    }
}

/// All block devices, by number.
fn devices() -> Result<Vec<u32>> {
    let path = "/sys/class/block";
    let mut devices = Vec::new();
    for entry in fs::read_dir(path).context(path)? {
        let dev = fs::read_to_string(entry.context(path)?.path().join("dev")).unwrap_or_default();
        devices.extend(cli::number(&dev));
    }
    Ok(devices)
}

/// The sums of one part.
#[derive(Default)]
struct Sum {
    sum: u64,
    max: u64,
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

    /// The time in ns that `percent` do not exceed: at most 6 % too long.
    fn percentile(&self, percent: u64) -> u64 {
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
#[derive(Default)]
pub struct Disk {
    name: String,
    parts: [Sum; NAMES.len()],
    total: Sum,
}

impl Disk {
    /// How many bios have completed.
    pub fn bios(&self) -> u64 {
        self.total.bios()
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
            "kind": "disk", "disk": self.name, "bios": self.total.bios(), "undivided": self.undivided(),
        });
        for (name, sum) in NAMES.into_iter().zip(&self.parts).chain([("total", &self.total)]) {
            let [p50, p99] = [50, 99].map(|percent| sum.percentile(percent));
            object[name] = match sum.bios() {
                0 => Value::Null, // a part that is known of no bio is not 0
                _ => json!({ "sum_ns": sum.sum, "p50_ns": p50, "p99_ns": p99, "max_ns": sum.max }),
            };
        }
        object
    }

    /// Prints where the time of the disk's bios went.
    pub fn print(&self, histogram: bool) {
        println!("\n{}: {} bios", self.name, self.total.bios());
        println!(
            "{:>8} {:>12} {:>6} {:>10} {:>10} {:>10} ms",
            "", "sum", "share", "p50", "p99", "max"
        );
        let share = |sum: &Sum| sum.sum as f64 / self.total.sum.max(1) as f64;
        for (name, sum) in self.known().chain([("total", &self.total)]) {
            let bar = "#".repeat((share(sum) * 30.0).round() as usize);
            let [sum_ms, p50, p99, max] =
                [sum.sum, sum.percentile(50), sum.percentile(99), sum.max].map(parts::ms);
            let percent = share(sum) * 100.0;
            let line = format!(
                "{name:>8} {sum_ms:>12} {percent:>4.0} % {p50:>10} {p99:>10} {max:>10}    {bar}"
            );
            println!("{}", line.trim_end());
        }
        if self.undivided() > 0 {
            println!("{:>8} of these bios had no request that was seen", self.undivided());
        }
        let largest = self.known().max_by_key(|(_, sum)| sum.sum);
        if let Some((name, _)) = largest.filter(|(_, sum)| share(sum) > 0.5) {
            println!("Most of it is {name}: {}", what_next(name));
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

/// What the largest part usually means, and what to look at.
fn what_next(part: &str) -> &'static str {
    match part {
        "wait" => "no request was free, or a cgroup was throttled (io.max, nr_requests)",
        "queue" => {
            "requests waited in the scheduler, for the disk, or for a flush (queue/scheduler, queue depth)"
        }
        "device" => "the disk itself (its load, its health; fewer or larger I/Os)",
        "end" => {
            "after the disk (parts of a split bio, checksums, a flush after a write, a busy CPU)"
        }
        _ => "device mapper (dmsetup table: encryption, delay, a snapshot)",
    }
}
