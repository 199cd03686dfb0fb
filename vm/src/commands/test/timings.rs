//! Where the time of a run goes: the build, the boots, and the slowest tests.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use humantime::format_duration;
use serde::Serialize;
use workshop::events::Cost;

/// How many of the slowest tests the end of a run names, for each kernel.
const NAMED: usize = 10;

/// What a run of tests has taken, in ms.
#[derive(Debug, Default, Serialize)]
pub struct Timings {
    /// Until all programs were built.
    pub build: u64,
    /// From the start to the closing line.
    pub all: u64,
    pub guests: Vec<Guest>,
    pub tests: Vec<Test>,
}

/// A boot for a part of the guest tests.
#[derive(Clone, Debug, Serialize)]
pub struct Guest {
    pub place: String,
    pub label: String,
    /// Until its first test began.
    pub boot: u64,
    /// From the start to the end of the guest.
    pub took: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Test {
    pub place: String,
    pub name: String,
    #[serde(flatten)]
    pub cost: Cost,
}

/// `1m 12s`.
fn shown(ms: u64) -> String {
    format_duration(Duration::from_secs(ms / 1000)).to_string()
}

impl Timings {
    /// The lines for the end of a run.
    pub fn closing(&self) -> String {
        let mut places = BTreeMap::<&str, Vec<&Test>>::new();
        for test in &self.tests {
            places.entry(&test.place).or_default().push(test);
        }
        let mut text = String::new();
        for (place, mut tests) in places {
            let mut sum = Cost::default();
            tests.iter().for_each(|test| sum.add(&test.cost));
            let boots = self.guests.iter().filter(|guest| guest.place == place);
            let [boots, took, starting, ending] =
                [boots.map(|guest| guest.boot).sum(), sum.took, sum.starting, sum.ending]
                    .map(shown);
            let starts = sum.starts;
            text += &format!("{place}: {took} in tests");
            if starts > 0 {
                text += &format!(
                    ", of it {starting} in {starts} starts of programs and {ending} in their ends; {boots} \
                     in boots"
                );
            }
            text += "\n";
            tests.sort_by_key(|test| Reverse(test.cost.took));
            for Test { name, cost, .. } in tests.into_iter().take(NAMED) {
                text += &format!("    {:>12}  {name}\n", shown(cost.took));
            }
        }
        text + &format!("{} in all, {} of it the build\n", shown(self.all), shown(self.build))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_come_first() {
        let test = |n: u64| {
            let cost = Cost { took: n * 1000, starts: 1, starting: 100, ending: 50 };
            Test { place: "6.1".into(), name: format!("test_{n}"), cost }
        };
        let guest = Guest { place: "6.1".into(), label: "6.1".into(), boot: 9000, took: 80_000 };
        let tests = (0..12).map(test).collect();
        let text = Timings { build: 3000, all: 150_000, guests: vec![guest], tests }.closing();
        let lines: Vec<&str> = text.lines().collect();
        let sum = "6.1: 1m 6s in tests, of it 1s in 12 starts of programs and 0s in their ends; 9s in boots";
        assert_eq!(lines[0], sum);
        assert_eq!(lines[1], "             11s  test_11");
        assert_eq!(lines[10], "              2s  test_2");
        assert_eq!(lines[11], "2m 30s in all, 3s of it the build");
    }
}
