//! The histograms of requests: from each CPU's memory to one for each disk and operation.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use anyhow::Result;

use crate::{
    looks::Look,
    series::{BUCKETS, OPERATIONS, Series, Sums, Times},
    shared::{Atomics, Shared, read},
    trace::{TraceMaps, types},
};

/// All of a request's time, in the queue, at the device, undivided: `enum phase` of requests.h.
const PHASES: usize = 4;

/// `struct phase_times` of requests.h.
#[repr(C)]
struct PhaseTimes {
    sum: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

/// `struct requests` of requests.h: whole cache lines, or two CPUs would write one.
#[repr(C, align(64))]
struct Histogram {
    of: AtomicU64,
    allocated: AtomicU64,
    phases: [PhaseTimes; PHASES],
}

const _: () = assert!(size_of::<Histogram>() == size_of::<types::requests>());
// SAFETY: atomics only.
unsafe impl Atomics for Histogram {}

/// How many counters `struct others` of requests.h has.
pub const OTHERS: usize = 6;

/// `struct others`.
#[repr(C, align(64))]
struct Others([AtomicU64; OTHERS]);

const _: () = assert!(size_of::<Others>() == size_of::<types::others>());
// SAFETY: atomics only.
unsafe impl Atomics for Others {}

/// The histograms of all CPUs.
pub struct Requests {
    requests: Shared<Histogram>,
    others: Shared<Others>,
}

impl PhaseTimes {
    fn read(&self) -> Times {
        Times { sum: self.sum.load(Relaxed), buckets: read(&self.buckets) }
    }
}

/// How many bytes the places of all CPUs may have together. The unit allows the service 256 MiB.
const MEMORY: usize = 64 << 20;
/// Each CPU has so many places at least.
const LEAST: usize = 64;

/// How many places each CPU needs: for all operations of the disks with requests that there are, and of as many that
/// come later, as far as memory allows.
pub fn places(cpus: u32) -> Result<u32> {
    let has_requests = |name: &str| Path::new("/sys/block").join(name).join("mq").exists();
    let disks = common::block_devices()?;
    let disks = disks.iter().filter(|disk| !disk.is_partition && has_requests(&disk.name)).count();
    Ok(places_for(disks, cpus))
}

fn places_for(disks: usize, cpus: u32) -> u32 {
    let most = MEMORY / (size_of::<Histogram>() * cpus as usize);
    let most = if most < LEAST { LEAST } else { 1 << most.ilog2() };
    (2 * 4 * disks).next_power_of_two().clamp(LEAST, most) as u32
}

impl Requests {
    /// The histograms in maps that are loaded, with so many places for each CPU.
    pub fn new(maps: &TraceMaps<'_>, places: u32, cpus: u32) -> Result<Requests> {
        let requests = Shared::new(&maps.requests, (places * cpus) as usize)?;
        Ok(Requests { requests, others: Shared::new(&maps.others, cpus as usize)? })
    }

    /// The sums of each disk of a look. Empties the places of those that are gone.
    pub fn read(&self, look: &Look) -> BTreeMap<Series, Sums> {
        let mut series: BTreeMap<Series, Sums> = BTreeMap::new();
        for place in self.requests.iter() {
            let of = place.of.load(Relaxed);
            let (diskseq, operation) = (of >> 3, of as usize & 7);
            if diskseq == 0 {
                continue;
            }
            if look.lacks(diskseq) {
                for PhaseTimes { sum, buckets } in &place.phases {
                    buckets.iter().chain([sum]).for_each(|counter| counter.store(0, Relaxed));
                }
                place.of.store(0, Relaxed);
            }
            let Some(disk) = look.name(diskseq) else { continue };
            let operation = OPERATIONS.get(operation).copied().unwrap_or("other");
            let [all, queue, device, undivided] = place.phases.each_ref().map(PhaseTimes::read);
            let sums = series.entry((disk.to_owned(), operation)).or_default();
            sums.add(&Sums { all, phases: [queue, device, undivided], ..Sums::default() });
        }
        series
    }

    /// How many reads of these disks there were, and their sum in ns.
    pub fn reads(&self, disks: &BTreeSet<u64>) -> [u64; 2] {
        let is_theirs = |of: u64| of & 7 == 0 && disks.contains(&(of >> 3));
        let places = self.requests.iter().filter(|place| is_theirs(place.of.load(Relaxed)));
        places.fold([0; 2], |[count, sum], place| {
            let all = place.phases[0].read();
            [count + all.count(), sum + all.sum]
        })
    }

    /// No statistics, passthrough, without a place, partial, requeued, shared start.
    pub fn others(&self) -> [u64; OTHERS] {
        let cpus: Vec<[u64; OTHERS]> = self.others.iter().map(|cpu| read(&cpu.0)).collect();
        std::array::from_fn(|index| cpus.iter().map(|cpu| cpu[index]).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_have_room_and_no_more() {
        assert_eq!([1, 8, 9, 65, 140].map(|disks| places_for(disks, 2)), [64, 64, 128, 1024, 2048]);
        for cpus in [1, 2, 64, 128, 8192] {
            let places = places_for(10_000, cpus) as usize;
            let bytes = places * cpus as usize * size_of::<Histogram>();
            assert!(places.is_power_of_two() && places >= LEAST);
            assert!(bytes <= MEMORY || places == LEAST, "{cpus} CPUs: {bytes} bytes");
        }
    }
}
