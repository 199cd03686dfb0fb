//! Where the time of a run goes: the build, the boots, and the slowest tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use host::events::Cost;
use serde::Serialize;

/// How many of the slowest tests the end of a run names, for each kernel.
const NAMED: usize = 10;

/// What a run of tests has taken. All times in the file are in ms.
#[derive(Debug, Default, Serialize)]
pub struct Timings {
    /// Until all programs were built.
    build: u64,
    /// From the start to the closing line.
    all: u64,
    guests: Vec<Guest>,
    tests: Vec<Test>,
}

/// A boot for a part of the guest tests.
#[derive(Clone, Debug, Serialize)]
struct Guest {
    place: String,
    label: String,
    /// Until its first test began.
    boot: u64,
    /// From the start to the end of the guest.
    took: u64,
}

#[derive(Clone, Debug, Serialize)]
struct Test {
    place: String,
    name: String,
    #[serde(flatten)]
    cost: Cost,
}

fn ms(time: Duration) -> u64 {
    time.as_millis() as u64
}

/// `1 min 12 s`, `12.3 s`.
fn shown(ms: u64) -> String {
    match ms / 1000 {
        0..60 => format!("{}.{} s", ms / 1000, ms / 100 % 10),
        s => format!("{} min {:02} s", s / 60, s % 60),
    }
}

/// `1 test`, `2 tests`.
fn number(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

impl Timings {
    /// A test has ended.
    pub fn test(&mut self, place: &str, name: &str, cost: Cost) {
        self.tests.push(Test { place: place.to_owned(), name: name.to_owned(), cost });
    }

    /// A guest has ended whose first test began `boot` after its start.
    pub fn guest(&mut self, place: &str, label: &str, boot: Duration, took: Duration) {
        let (place, label) = (place.to_owned(), label.to_owned());
        self.guests.push(Guest { place, label, boot: ms(boot), took: ms(took) });
    }

    /// The programs were built after the first time, and the run has ended after the second.
    pub fn run(&mut self, build: Duration, all: Duration) {
        (self.build, self.all) = (ms(build), ms(all));
    }

    /// Adds what another one has measured.
    pub fn add(&mut self, other: &Timings) {
        self.guests.extend_from_slice(&other.guests);
        self.tests.extend_from_slice(&other.tests);
    }

    /// The lines for the end of a run.
    pub fn closing(&self) -> String {
        let mut places = BTreeMap::<&str, Vec<&Test>>::new();
        for test in &self.tests {
            places.entry(&test.place).or_default().push(test);
        }
        let mut text = String::new();
        for (place, mut tests) in places {
            tests.sort_by_key(|test| std::cmp::Reverse(test.cost.took));
            let mut sum = Cost::default();
            tests.iter().for_each(|test| sum.add(&test.cost));
            text += &format!("{place}: {} in {}", shown(sum.took), number(tests.len(), "test"));
            if sum.starts > 0 {
                text += &format!(
                    ", {} of it in {} starts of programs, {} in their ends",
                    shown(sum.starting),
                    sum.starts,
                    shown(sum.ending)
                );
            }
            let boots: Vec<u64> =
                self.guests.iter().filter(|g| g.place == place).map(|g| g.boot).collect();
            if !boots.is_empty() {
                let took = shown(boots.iter().sum());
                text += &format!("; {took} in {}", number(boots.len(), "boot"));
            }
            text += "\n";
            for test in tests.iter().take(NAMED) {
                text += &format!("    {:>12}  {}\n", shown(test.cost.took), test.name);
            }
        }
        if self.all > 0 {
            text += &format!("{} in all, {} of it the build\n", shown(self.all), shown(self.build));
        }
        text
    }

    /// Writes all of it as JSON, each boot and each test in a line of its own.
    pub fn write(&self, file: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?.replace("},{", "},\n{") + "\n";
        fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first() {
        let mut timings = Timings::default();
        assert_eq!(timings.closing(), "");
        for n in 0..12 {
            let cost = Cost { took: n * 1000, starts: 1, starting: 100, ending: 50 };
            timings.test("6.1", &format!("test_{n}"), cost);
        }
        timings.test("host", "other", Cost { took: 61_500, ..Cost::default() });
        let mut other = Timings::default();
        other.guest("6.1", "6.1 (1/2)", Duration::from_secs(9), Duration::from_secs(80));
        timings.add(&other);
        timings.run(Duration::from_secs(3), Duration::from_secs(150));
        let text = timings.closing();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "6.1: 1 min 06 s in 12 tests, 1.2 s of it in 12 starts of programs, 0.6 s in their ends; \
             9.0 s in 1 boot"
        );
        assert_eq!(lines[1], "          11.0 s  test_11");
        assert_eq!(lines[10], "           2.0 s  test_2");
        assert_eq!(lines[11], "host: 1 min 01 s in 1 test");
        assert_eq!(lines[13], "2 min 30 s in all, 3.0 s of it the build");
    }
}
