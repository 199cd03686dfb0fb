//! Where the time of a bio went.

use serde_json::{Map, Value, json};

use crate::trace::types::times;

/// The parts of a latency, in ns; `None` where a part cannot be told from the next one. In the order
/// of `enum part` in parts.h: their sum is the latency.
pub type Parts = [Option<u64>; 5];

/// How the columns are called.
pub const NAMES: [&str; 5] = ["wait", "queue", "device", "end", "mapper"];

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

/// `wait_ns`, `queue_ns` …: number or null.
pub fn json(parts: &Parts) -> Map<String, Value> {
    KEYS.iter().zip(parts).map(|(&key, part)| (key.to_owned(), json!(part))).collect()
}

/// Milliseconds with three digits.
pub fn ms(ns: u64) -> String {
    format!("{}.{:03}", ns / 1_000_000, ns / 1000 % 1000)
}

/// Milliseconds with three digits: the latency, and its parts, rounded so that they add up to it.
pub fn milliseconds(latency: u64, parts: &Parts) -> (String, [String; 5]) {
    let whole = latency.div_ceil(1000);
    let mut us = parts.map(|part| part.map(|ns| ns / 1000));
    let mut missing = whole - us.iter().flatten().sum::<u64>().min(whole);
    // To those that lost most by rounding down.
    let mut order: Vec<usize> = (0..parts.len()).filter(|&place| parts[place].is_some()).collect();
    order.sort_by_key(|&place| std::cmp::Reverse(parts[place].unwrap_or_default() % 1000));
    for place in order {
        if missing > 0 {
            us[place] = us[place].map(|us| us + 1);
            missing -= 1;
        }
    }
    let text = |us: u64| format!("{}.{:03}", us / 1000, us % 1000);
    (text(whole), us.map(|us| us.map_or_else(|| "-".to_owned(), text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounded_parts_add_up() {
        let parts = [Some(1_600), Some(1_600), Some(9_999), None, Some(1)];
        let (total, shown) = milliseconds(13_200, &parts);
        assert_eq!(total, "0.014");
        assert_eq!(shown, ["0.002", "0.002", "0.010", "-", "0.000"]);
        assert_eq!(milliseconds(0, &[None; 5]).0, "0.000");
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
            let (total, shown) = milliseconds(latency, &parts);
            let us = |text: &String| text.replace('.', "").parse::<u64>().unwrap_or(0);
            assert_eq!(us(&total), shown.iter().map(us).sum::<u64>(), "{parts:?}");
        }
    }
}
