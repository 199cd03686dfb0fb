//! Latencies in slots: fine enough for percentiles.

/// Number of slots: 64 for 0 to 63 ns, which are exact, and 32 for every doubling up to 2^64 ns.
/// A slot is at most 1/32 (3.1 %) as wide as the latencies in it.
pub const SLOTS: usize = 64 + 58 * 32;

/// The slot of a latency in ns: the same arithmetic as `slot_of()` in the BPF program.
#[cfg(test)]
pub(crate) fn slot(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(6);
    shift as usize * 32 + (ns >> shift) as usize
}

/// The longest latency, in ns, that falls into a slot.
pub fn longest(slot: usize) -> u64 {
    let shift = (slot / 32).saturating_sub(1);
    ((slot - shift * 32) as u64) << shift | ((1 << shift) - 1)
}

/// How many requests had each latency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    /// The longest latency in ns, exact; 0 where it is not known yet.
    pub max: u64,
    /// How many latencies fell into each slot; `slots` in the BPF program.
    pub slots: [u64; SLOTS],
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { max: 0, slots: [0; SLOTS] }
    }
}

impl Histogram {
    /// What has come since `earlier`, which must be a former state of the same counters. `max`
    /// stays.
    pub fn since(&self, earlier: &Histogram) -> Histogram {
        let mut new = self.clone();
        for (slot, count) in new.slots.iter_mut().zip(earlier.slots) {
            *slot = slot.saturating_sub(count);
        }
        new
    }

    /// How many latencies there are.
    pub fn count(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// The latency in ns that `permille` of 1000 do not exceed: 500 is the median, 999 is p99.9.
    /// It is the upper end of a slot, so at most 3.1 % too long and never too short. 0 where
    /// nothing was counted.
    pub fn percentile(&self, permille: u32) -> u64 {
        let rank = (u128::from(self.count()) * u128::from(permille)).div_ceil(1000);
        let mut counted = 0;
        let reached = self.slots.iter().position(|&count| {
            counted += u128::from(count);
            counted >= rank
        });
        reached.map_or(self.max, |slot| longest(slot).min(self.max))
    }
}

/// A latency as a person reads it: three digits and a unit.
pub fn readable(ns: u64) -> String {
    let mut value = ns as f64;
    for unit in ["ns", "us", "ms"] {
        if value < 999.5 {
            let digits = if unit == "ns" || value >= 99.95 {
                0
            } else if value >= 9.995 {
                1
            } else {
                2
            };
            return format!("{value:.digits$} {unit}");
        }
        value /= 1000.0;
    }
    format!("{value:.2} s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slots_have_no_gap_and_the_width_that_is_promised() {
        for (ns, expected) in
            [(0, 0), (1, 1), (31, 31), (32, 32), (63, 63), (64, 64), (65, 64), (66, 65)]
        {
            assert_eq!(slot(ns), expected, "{ns} ns");
        }
        assert_eq!(slot(1 << 63), SLOTS - 32);
        assert_eq!(slot(u64::MAX), SLOTS - 1);
        assert_eq!(longest(SLOTS - 1), u64::MAX);
        let mut first = 0;
        for number in 0..SLOTS {
            let last = longest(number);
            assert_eq!((slot(first), slot(last)), (number, number));
            assert!(last - first <= first / 32, "{first} to {last} ns");
            first = last.wrapping_add(1);
        }
        assert_eq!(first, 0, "the last slot ends at 2^64");
    }

    fn from_latencies(latencies: impl IntoIterator<Item = u64>) -> Histogram {
        let mut histogram = Histogram::default();
        for ns in latencies {
            histogram.slots[slot(ns)] += 1;
            histogram.max = histogram.max.max(ns);
        }
        histogram
    }

    #[test]
    fn a_percentile_is_at_most_a_slot_too_long() {
        let thousand = from_latencies((1..=1000).map(|n| n * 10_000));
        for (permille, exact) in [(1, 10_000), (500, 5_000_000), (990, 9_900_000), (999, 9_990_000)]
        {
            let measured = thousand.percentile(permille);
            assert!((exact..=exact + exact / 32).contains(&measured), "{permille}: {measured}");
        }
        assert_eq!(thousand.percentile(1000), 10_000_000, "never beyond the exact maximum");
        assert_eq!(from_latencies([7]).percentile(500), 7);
        assert_eq!(from_latencies([]).percentile(999), 0);
    }

    #[test]
    fn intervals_are_told_apart() {
        let earlier = from_latencies([10, 20, 5_000]);
        let later = from_latencies([10, 20, 20, 5_000, 70]);
        let new = later.since(&earlier);
        assert_eq!((new.count(), new.slots[slot(20)], new.slots[slot(70)]), (2, 1, 1));
        assert_eq!(earlier.since(&earlier).count(), 0);
    }

    #[test]
    fn latencies_are_readable() {
        for (ns, expected) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_000, "1.00 us"),
            (10_223_615, "10.2 ms"),
            (99_960_000, "100 ms"),
            (999_900, "1.00 ms"),
            (12_345_000_000, "12.35 s"),
        ] {
            assert_eq!(readable(ns), expected);
        }
    }
}
