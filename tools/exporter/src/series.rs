//! The histograms: from the kernel's memory to one for each disk and operation.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};

use anyhow::Result;
use libbpf_rs::{Map, MapCore, MapFlags};

use crate::{
    looks::Look,
    shared::{Atomics, Shared, read},
    trace::{TraceMaps, types},
};

/// How many disks and partitions times operations there may be: SERIES in series.h.
pub const PLACES: u32 = 256;
/// How many buckets a histogram has: BUCKETS in buckets.h.
pub const BUCKETS: usize = 54;

/// The parts in the order of `enum part` in parts.h; last, `in_no_part` of series.h.
pub const PARTS: [&str; 6] = ["wait", "queue", "device", "end", "mapper", "unknown"];
/// The operations in the order of `enum operation` in series.h.
pub const OPERATIONS: [&str; 5] = ["read", "write", "flush", "discard", "other"];

/// `struct histogram` of series.h.
#[repr(C)]
struct Histogram {
    diskseq: AtomicU64,
    operation: AtomicU32,
    unused: AtomicU32,
    sum: AtomicU64,
    parts: [AtomicU64; PARTS.len()],
    parts_made: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

const _: () = assert!(size_of::<Histogram>() == size_of::<types::histogram>());
// SAFETY: atomics only.
unsafe impl Atomics for Histogram {}

/// A histogram of times.
#[derive(Clone, Debug)]
pub struct Times {
    /// Of all of them, ns.
    pub sum: u64,
    /// How many fell into each bucket.
    pub buckets: [u64; BUCKETS],
}

impl Default for Times {
    fn default() -> Times {
        Times { sum: 0, buckets: [0; BUCKETS] }
    }
}

impl Times {
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Adds those of another CPU.
    pub fn add(&mut self, other: &Times) {
        self.sum += other.sum;
        self.buckets.iter_mut().zip(other.buckets).for_each(|(sum, count)| *sum += count);
    }
}

/// What was added up of the bios, or the requests, of a disk and operation.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    /// The latencies.
    pub all: Times,
    /// Of requests: how much of it they waited in the queue, how long the driver had them, and all the time of those
    /// of which that is not known.
    pub phases: [Times; 3],
    /// Of each of [`PARTS`] of bios, ns.
    pub parts: [u64; PARTS.len()],
    /// How many parts were split off them.
    pub parts_made: u64,
}

impl Sums {
    /// Adds those of another CPU.
    pub fn add(&mut self, other: &Sums) {
        self.all.add(&other.all);
        self.phases.iter_mut().zip(&other.phases).for_each(|(sum, phase)| sum.add(phase));
        self.parts_made += other.parts_made;
        self.parts.iter_mut().zip(other.parts).for_each(|(sum, part)| *sum += part);
    }
}

/// A disk's name and an operation.
pub type Series = (String, &'static str);

/// The histograms alone.
pub struct Memory(Shared<Histogram>);

impl Memory {
    /// The histograms in a map that is loaded.
    pub fn new(maps: &TraceMaps<'_>, cpus: u32) -> Result<Memory> {
        Shared::new(&maps.histograms, (PLACES * cpus) as usize).map(Memory)
    }

    /// How many reads of these disks there were, and their sum in ns.
    pub fn reads(&self, disks: &BTreeSet<u64>) -> [u64; 2] {
        let mut reads = [0; 2];
        for cpus in self.0.chunks_exact(self.0.len() / PLACES as usize) {
            let is_read = cpus[0].operation.load(Relaxed) == 0;
            if is_read && disks.contains(&cpus[0].diskseq.load(Relaxed)) {
                for cpu in cpus {
                    reads[0] += read(&cpu.buckets).iter().sum::<u64>();
                    reads[1] += cpu.sum.load(Relaxed);
                }
            }
        }
        reads
    }
}

/// The histograms, and the disks that they belong to.
pub struct Histograms<'a> {
    memory: Shared<Histogram>,
    cpus: usize,
    places: &'a Map<'a>,
    unused: &'a Map<'a>,
}

impl<'a> Histograms<'a> {
    /// Hands all places to the BPF programs.
    pub fn new(maps: &'a TraceMaps<'a>, cpus: u32) -> Result<Histograms<'a>> {
        let memory = Shared::new(&maps.histograms, (PLACES * cpus) as usize)?;
        let (places, unused) = (&*maps.places, &*maps.unused);
        for place in 0..PLACES {
            unused.update(&[], &place.to_ne_bytes(), MapFlags::ANY)?;
        }
        Ok(Histograms { memory, cpus: cpus as usize, places, unused })
    }

    /// The sums of each disk of a look; its partitions' are its own. Removes disks that are gone: a disk is
    /// known by its diskseq, which is no other one's, whatever name and number that gets.
    pub fn read(&self, look: &Look) -> Result<BTreeMap<Series, Sums>> {
        let mut series: BTreeMap<Series, Sums> = BTreeMap::new();
        for place in 0..PLACES as usize {
            let cpus = &self.memory[place * self.cpus..(place + 1) * self.cpus];
            let diskseq = cpus[0].diskseq.load(Relaxed);
            let operation = cpus[0].operation.load(Relaxed);
            if diskseq == 0 {
                continue;
            }
            if look.lacks(diskseq) {
                self.release(place, diskseq, operation)?;
            }
            let Some(disk) = look.name(diskseq) else { continue };
            let operation = OPERATIONS.get(operation as usize).copied().unwrap_or("other");
            let sums = series.entry((disk.to_owned(), operation)).or_default();
            for cpu in cpus {
                let (parts, buckets) = (read(&cpu.parts), read(&cpu.buckets));
                let (sum, parts_made) = (cpu.sum.load(Relaxed), cpu.parts_made.load(Relaxed));
                let all = Times { sum, buckets };
                sums.add(&Sums { all, parts, parts_made, ..Sums::default() });
            }
        }
        Ok(series)
    }

    /// Empties a place, and hands it to the BPF programs.
    fn release(&self, place: usize, diskseq: u64, operation: u32) -> Result<()> {
        let key = types::series { diskseq, operation, unused: 0 };
        // SAFETY: integers without padding.
        self.places.delete(unsafe { plain::as_bytes(&key) })?;
        for cpu in &self.memory[place * self.cpus..(place + 1) * self.cpus] {
            cpu.diskseq.store(0, Relaxed);
            let counters =
                [&cpu.sum, &cpu.parts_made].into_iter().chain(&cpu.parts).chain(&cpu.buckets);
            counters.for_each(|counter| counter.store(0, Relaxed));
        }
        self.unused.update(&[], &(place as u32).to_ne_bytes(), MapFlags::ANY)?;
        Ok(())
    }
}

/// The longest time of each bucket, in ns: bucket_of() in buckets.h the other way round. The last one
/// has no limit.
pub fn limits() -> impl Iterator<Item = Option<u64>> {
    let limit = |bucket: usize| match bucket {
        0 => 1024,
        _ => (3 + (bucket as u64 - 1) % 2) << (9 + (bucket - 1) / 2),
    };
    (0..BUCKETS - 1).map(move |bucket| Some(limit(bucket))).chain([None])
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Write, process::Command, process::Stdio};

    use super::*;

    /// The buckets into which the C function puts these times.
    fn buckets(times: &[u64]) -> Vec<usize> {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("buckets");
        let header = concat!(env!("CARGO_MANIFEST_DIR"), "/src/buckets.h");
        let source = format!(
            "#include <stdio.h>\n#define __VMLINUX_H__\n#undef __always_inline\n#define __always_inline inline\n\
             typedef unsigned int u32;\ntypedef unsigned long long u64;\n#include \"{header}\"\n\
             int main(void)\n{{\n\tu64 ns;\n\twhile (scanf(\"%llu\", &ns) == 1)\n\
             \t\tprintf(\"%u\\n\", bucket_of(ns));\n}}\n"
        );
        fs::write(place.path().join("buckets.c"), source).unwrap();
        fs::write(place.path().join("vmlinux.h"), "").unwrap();
        let mut cc = Command::new("cc");
        cc.current_dir(place.path()).args(["-I.", "-o", "buckets", "buckets.c"]);
        assert!(cc.status().unwrap().success());
        let (input, output) = (Stdio::piped(), Stdio::piped());
        let mut child = Command::new(program).stdin(input).stdout(output).spawn().unwrap();
        let lines: String = times.iter().map(|ns| format!("{ns}\n")).collect();
        child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap().stdout;
        String::from_utf8(output).unwrap().lines().map(|line| line.parse().unwrap()).collect()
    }

    #[test]
    fn a_bucket_ends_with_its_limit() {
        let limits: Vec<u64> = limits().flatten().collect();
        assert_eq!((limits.len(), limits[0], limits[52]), (BUCKETS - 1, 1 << 10, 1 << 36));
        assert!(limits.is_sorted_by(|a, b| a < b && b * 2 <= a * 4));
        let times = limits.iter().flat_map(|&limit| [limit, limit + 1]);
        let expected: Vec<usize> =
            (0..BUCKETS - 1).flat_map(|bucket| [bucket, bucket + 1]).collect();
        assert_eq!(buckets(&times.collect::<Vec<_>>()), expected);
        assert_eq!(buckets(&[0, 1, u64::MAX]), [0, 0, BUCKETS - 1]);
    }
}
