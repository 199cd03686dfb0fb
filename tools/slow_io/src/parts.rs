//! Where the time of a bio went.

use std::fmt::{self, Write};

use common::colours::PARTS;

use crate::trace::types::times;

/// The parts of a latency, in ns; `None` where a part cannot be told from the next one. In the order
/// of `enum part` in parts.h: their sum is the latency.
pub type Parts = [Option<u64>; 5];

/// How the columns are called.
pub const NAMES: [&str; 5] =
    [PARTS[0].name, PARTS[1].name, PARTS[2].name, PARTS[3].name, PARTS[4].name];

/// How --json calls them.
pub const KEYS: [&str; 5] = ["wait_ns", "queue_ns", "device_ns", "end_ns", "mapper_ns"];

/// The parts of a completed bio.
pub fn from_times(times: &times) -> Parts {
    times.parts.map(|ns| (ns != u64::MAX).then_some(ns))
}

/// The place of the largest part.
pub fn largest(parts: &Parts) -> Option<usize> {
    let known = parts.iter().enumerate().filter_map(|(place, part)| Some((place, (*part)?)));
    known.max_by_key(|(_, ns)| *ns).map(|(place, _)| place)
}

/// Milliseconds with three digits.
pub fn ms(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000_000, ns / 1000 % 1000)
}

/// The latency and its parts in us, rounded so that they add up to it.
pub fn microseconds(latency: u64, parts: &Parts) -> (u64, Parts) {
    let whole = latency.div_ceil(1000);
    let mut us = parts.map(|part| part.map(|ns| ns / 1000));
    let missing = whole - us.iter().flatten().sum::<u64>().min(whole);
    // To those that lost most by rounding down.
    let mut order = [0, 1, 2, 3, 4].map(|place| (parts[place].map(|ns| ns % 1000), place));
    order.sort_unstable_by_key(|&(lost, place)| (std::cmp::Reverse(lost), place));
    for (_, place) in order.into_iter().take(missing as usize) {
        us[place] = us[place].map(|us| us + 1);
    }
    (whole, us)
}

/// So many bytes in KiB: whole ones, or with a digit.
pub struct Kib(pub u32);

impl fmt::Display for Kib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Text::default();
        match self.0 % 1024 {
            0 => write!(text, "{}", self.0 / 1024)?,
            _ => write!(text, "{:.1}", f64::from(self.0) / 1024.0)?,
        }
        f.pad(text.as_str())
    }
}

/// So many us, as milliseconds with three digits; `-` where they are not known. A `*` or bold marks the largest part.
pub struct Ms {
    pub us: Option<u64>,
    pub mark: Mark,
}

/// How a part is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    None,
    Star,
    Bold,
}

impl fmt::Display for Ms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Text::default();
        match self.us {
            None => text.write_str("-")?,
            Some(us) => {
                let star = if self.mark == Mark::Star { "*" } else { "" };
                write!(text, "{star}{}.{:03}", us / 1000, us % 1000)?;
            }
        }
        match self.mark {
            Mark::Bold => {
                f.write_str("\x1b[1m")?;
                f.pad(text.as_str())?;
                f.write_str("\x1b[0m")
            }
            _ => f.pad(text.as_str()),
        }
    }
}

/// A text that needs no memory of its own: as long as the longest number of milliseconds.
#[derive(Default)]
struct Text {
    bytes: [u8; 24],
    used: usize,
}

impl Text {
    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.used]).unwrap_or_default()
    }
}

impl fmt::Write for Text {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.used + text.len();
        self.bytes.get_mut(self.used..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.used = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_parts_add_up() {
        let parts = [Some(1_600), Some(1_600), Some(9_999), None, Some(1)];
        let (total, us) = microseconds(13_200, &parts);
        assert_eq!((total, us), (14, [Some(2), Some(2), Some(10), None, Some(0)]));
        assert_eq!(microseconds(0, &[None; 5]).0, 0);
        assert_eq!(largest(&parts), Some(2));
    }

    #[test]
    fn every_sum_is_exact() {
        let mut seed = 1_u64;
        for _ in 0..10_000 {
            let parts: Parts = std::array::from_fn(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 60 > 2).then_some(seed >> 40)
            });
            if parts.iter().all(Option::is_none) {
                continue;
            }
            let latency = parts.iter().flatten().sum();
            let (total, us) = microseconds(latency, &parts);
            assert_eq!(total, us.iter().flatten().sum::<u64>(), "{parts:?}");
        }
    }

    #[test]
    fn milliseconds_keep_their_column() {
        let text = |us, mark| format!("{:>9}|", Ms { us, mark });
        assert_eq!(text(Some(12_345), Mark::None), "   12.345|");
        assert_eq!(text(Some(12_345), Mark::Star), "  *12.345|");
        assert_eq!(text(Some(12_345), Mark::Bold), "\x1b[1m   12.345\x1b[0m|");
        assert_eq!(text(None, Mark::None), "        -|");
        assert_eq!(text(Some(u64::MAX / 1000), Mark::Star), "*18446744073709.551|");
    }
}
