//! Histograms of sizes, and how they are printed.

use std::{collections::BTreeMap, fmt::Write, iter::zip};

use common::Device;

/// Rows of a histogram: below 2 KiB, 2 to 3 KiB, 4 to 7 KiB …
pub const SLOTS: usize = 23;
/// Stars of the longest row.
const WIDTH: u64 = 40;
/// The kinds of I/O, by their numbers in the BPF program.
const KINDS: [&str; 3] = ["reads", "writes", "discards"];

/// How many I/Os had which size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// I/Os.
    pub ios: u64,
    /// Their sectors of 512 bytes.
    pub sectors: u64,
    /// I/Os in each row.
    pub slots: [u64; SLOTS],
}

impl Sizes {
    fn add(&mut self, other: &Sizes) {
        self.ios += other.ios;
        self.sectors += other.sectors;
        zip(&mut self.slots, other.slots).for_each(|(sum, slot)| *sum += slot);
    }

    fn subtract(&mut self, other: &Sizes) {
        self.ios -= other.ios;
        self.sectors -= other.sectors;
        zip(&mut self.slots, other.slots).for_each(|(sum, slot)| *sum -= slot);
    }

    /// A row for every power of two up to the largest size that occurred.
    fn rows(&self) -> String {
        let longest = self.slots.iter().max().copied().unwrap_or(0).max(1);
        let last = self.slots.iter().rposition(|&count| count > 0).unwrap_or(0);
        let mut text = format!("{:>18} : {:<8} |{:<40}|\n", "KiB", "I/Os", "distribution");
        for (slot, &count) in self.slots.iter().enumerate().take(last + 1) {
            let from = if slot == 0 { 0 } else { 1_u64 << slot };
            let to = (2_u64 << slot) - 1;
            // Whatever is there has a star.
            let stars = "*".repeat((count * WIDTH).div_ceil(longest) as usize);
            writeln!(text, "{from:>8} -> {to:<6} : {count:<8} |{stars:<40}|").unwrap_or_default();
        }
        text
    }
}

/// The histograms of each disk (`None`: of all disks) and each kind of I/O.
#[derive(Clone, Debug, Default)]
pub struct Histograms(BTreeMap<(Option<u32>, u32), Sizes>);

impl Histograms {
    /// Adds what the BPF program has counted for one disk and one kind of I/O.
    pub fn add(&mut self, disk: Option<u32>, kind: u32, sizes: &Sizes) {
        self.0.entry((disk, kind)).or_default().add(sizes);
    }

    /// What has been added since `before`.
    pub fn since(&self, before: &Histograms) -> Histograms {
        let mut since = self.clone();
        for (key, sizes) in &mut since.0 {
            before.0.get(key).into_iter().for_each(|before| sizes.subtract(before));
        }
        since.0.retain(|_, sizes| sizes.ios > 0);
        since
    }

    /// All of them, below each other.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for ((disk, kind), sizes) in &self.0 {
            let disk = disk.map_or(String::new(), |disk| format!("{} ", Device(disk)));
            let kind = KINDS.get(*kind as usize).copied().unwrap_or("others");
            let Sizes { ios, sectors, .. } = sizes;
            writeln!(text, "{disk}{kind}: {ios} I/Os, {sectors} sectors").unwrap_or_default();
            text += &sizes.rows();
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(rows: &[(usize, u64)], sectors: u64) -> Sizes {
        let mut sizes = Sizes { sectors, ..Sizes::default() };
        for &(slot, count) in rows {
            sizes.slots[slot] = count;
            sizes.ios += count;
        }
        sizes
    }

    #[test]
    fn rows_are_powers_of_two() {
        let mut all = Histograms::default();
        all.add(None, 0, &sizes(&[(0, 1), (2, 80)], 641));
        assert_eq!(
            all.text(),
            "reads: 81 I/Os, 641 sectors\n\
             \x20              KiB : I/Os     |distribution                            |\n\
             \x20      0 -> 1      : 1        |*                                       |\n\
             \x20      2 -> 3      : 0        |                                        |\n\
             \x20      4 -> 7      : 80       |****************************************|\n"
        );
    }

    #[test]
    fn an_interval_is_a_difference() {
        let (mut before, mut now) = (Histograms::default(), Histograms::default());
        before.add(None, 0, &sizes(&[(2, 3)], 24));
        before.add(None, 1, &sizes(&[(0, 1)], 1));
        now.add(None, 0, &sizes(&[(2, 4)], 32));
        now.add(None, 1, &sizes(&[(0, 1)], 1));
        let text = now.since(&before).text();
        assert!(text.starts_with("reads: 1 I/Os, 8 sectors\n"), "{text}");
        assert!(!text.contains("writes"), "{text}");
    }
}
