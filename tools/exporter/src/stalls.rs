//! Disks that complete nothing although they have something to do: no hook sees that, and no histogram changes.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::looks::Look;

/// What a disk was seen with.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// How many requests the kernel had counted as completed.
    completed: u64,
    /// Since when that is so, with requests in flight.
    since: Option<Instant>,
}

/// A disk with requests, and for how long it is known to have completed none of those in flight.
#[derive(Clone, Debug, PartialEq)]
pub struct Stall {
    /// The disk's name.
    pub disk: String,
    /// 0: it has completed some since the look before, or has none in flight.
    pub age: Duration,
}

/// All disks, by their diskseq.
#[derive(Debug, Default)]
pub struct Stalls(HashMap<u64, Seen>);

impl Stalls {
    /// Those of a look. Disks without statistics are left out: what they complete is not counted.
    pub fn of(&mut self, look: &Look) -> Vec<Stall> {
        let (mut seen, mut stalls) = (HashMap::new(), Vec::new());
        for disk in &look.disks {
            let is_counted = disk.kernels.as_ref().is_none_or(|kernels| kernels.has_statistics);
            let Some(stat) = disk.stat.as_ref().filter(|_| is_counted) else { continue };
            let before = self.0.get(&disk.diskseq).copied();
            let now = next(before, stat.completed(), stat.in_flight, stat.at);
            let age = now.since.map_or(Duration::ZERO, |since| stat.at - since);
            seen.insert(disk.diskseq, now);
            stalls.push(Stall { disk: disk.name.clone(), age });
        }
        self.0 = seen;
        stalls
    }
}

/// Where none has completed between two looks, what was in flight at the first one is so still.
fn next(before: Option<Seen>, completed: u64, in_flight: u64, now: Instant) -> Seen {
    let same = before.filter(|before| before.completed == completed);
    let since = (in_flight > 0).then(|| same.and_then(|before| before.since).unwrap_or(now));
    Seen { completed, since }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_ends_with_a_completion() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut seen = None;
        for (second, completed, in_flight, since) in [
            (0, 5, 0, None),
            (1, 5, 2, Some(1)),
            (2, 5, 1, Some(1)),
            (3, 6, 1, Some(3)), // one of them has completed
            (4, 6, 1, Some(3)),
            (5, 6, 0, None), // a command that the kernel does not count
            (6, 6, 1, Some(6)),
            (7, 8, 0, None),
        ] {
            let now = next(seen, completed, in_flight, at(second));
            assert_eq!(now.since, since.map(at), "after {second} s");
            seen = Some(now);
        }
    }
}
