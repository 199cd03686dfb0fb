//! Reading a figure from what a tool has printed.

use anyhow::{Context, Result};
use regex_lite::Regex;
use serde::{Deserialize, Deserializer, Serialize};

use crate::Expected;

/// Where in a tool's output a figure is, and how several make one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolAnswer {
    /// How the lines make one figure.
    pub how: How,
    /// A regular expression of the lines. Its group `figure`, or the first one, is the number, with K, M
    /// or G for 1024, its square or its cube. A group `most`, or the second one, makes it a row of a
    /// histogram: the number lies between both. A group `plus` is added, a group `unit` says the number's
    /// unit, and a group `weight` how much it counts in a mean. `(?m)` is implied.
    pub lines: String,
    /// The unit of the number, where its line does not say it: a name, or how many of the question's it
    /// is.
    #[serde(default = "one", deserialize_with = "unit")]
    pub unit: f64,
    /// By how much of itself the figure may be off: a tool that prints rates rounds them, and does not
    /// say for how long each was measured.
    #[serde(default)]
    pub about: f64,
}

fn one() -> f64 {
    1.0
}

/// The units by name: of times in ns, of sizes in bytes.
const UNITS: [(&str, f64); 11] = [
    ("ns", 1.0),
    ("us", 1e3),
    ("µs", 1e3),
    ("ms", 1e6),
    ("s", 1e9),
    ("B", 1.0),
    ("KiB", 1024.0),
    ("MiB", 1048576.0),
    ("GiB", 1073741824.0),
    ("sectors", 512.0),
    ("%", 1.0),
];

fn named(name: &str) -> Result<f64> {
    let found = UNITS.iter().find(|(known, _)| *known == name).map(|(_, unit)| *unit);
    found.with_context(|| {
        let known: Vec<&str> = UNITS.iter().map(|(known, _)| *known).collect();
        format!("{name:?} is no unit: these are {}", known.join(", "))
    })
}

/// A number, or the name of a unit.
fn unit<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<f64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Unit {
        Number(f64),
        Name(String),
    }
    match Unit::deserialize(value)? {
        Unit::Number(number) => Ok(number),
        Unit::Name(name) => named(&name).map_err(serde::de::Error::custom),
    }
}

/// How the numbers of several lines make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// Their sum; 0 where there is none.
    Sum,
    /// How many lines there are; none is 0.
    Count,
    /// The largest.
    Max,
    /// The smallest.
    Min,
    /// Their mean.
    Mean,
}

impl ToolAnswer {
    /// The figure, and the most that it can be; `None` where nothing was printed that could be one.
    pub fn read(&self, output: &str) -> Result<Option<Expected>> {
        let lines = Regex::new(&format!("(?m){}", self.lines)).context(self.lines.clone())?;
        if self.how == How::Count {
            return Ok(Some(Expected::exactly(lines.find_iter(output).count() as u64)));
        }
        let has_names = lines.capture_names().flatten().next().is_some();
        let mut weights = Vec::new();
        let numbers = lines.captures_iter(output).map(|found| {
            let group = |name, at| if has_names { found.name(name) } else { found.get(at) };
            let least = group("figure", 1);
            let least = least.with_context(|| format!("no group in {}", self.lines))?;
            let unit = found.name("unit").map_or(Ok(self.unit), |unit| named(unit.as_str()))?;
            let plus = found.name("plus").map_or(Ok(0.0), |plus| number(plus.as_str()))?;
            let least = (number(least.as_str())? + plus) * unit;
            let most = group("most", 2).map(|most| number(most.as_str())).transpose()?;
            weights.push(found.name("weight").map_or(Ok(1.0), |of| number(of.as_str()))?);
            Ok((least, most.map_or(least, |most| most * unit)))
        });
        let numbers = numbers.collect::<Result<Vec<(f64, f64)>>>()?.into_iter();
        let compare = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0);
        let figure = match self.how {
            How::Sum => Some(numbers.fold((0.0, 0.0), |sum, n| (sum.0 + n.0, sum.1 + n.1))),
            How::Min => numbers.min_by(compare),
            How::Max | How::Count => numbers.max_by(compare),
            How::Mean => {
                let all: f64 = weights.iter().sum();
                let each = numbers.zip(&weights).map(|(n, weight)| (n.0 * weight, n.1 * weight));
                let sum = each.fold((0.0, 0.0), |sum, n| (sum.0 + n.0, sum.1 + n.1));
                (all > 0.0).then_some((sum.0 / all, sum.1 / all))
            }
        };
        Ok(figure.map(|(least, most)| Expected {
            least: (least * (1.0 - self.about)).round() as u64,
            most: (most * (1.0 + self.about)).round() as u64,
        }))
    }
}

/// `17`, `0.25`, or `8K`, as bpftrace prints the ends of a row.
fn number(text: &str) -> Result<f64> {
    let power = text.chars().last().and_then(|last| "KMG".find(last));
    let (digits, power) = match power {
        Some(power) => (&text[..text.len() - 1], power as i32 + 1),
        None => (text, 0),
    };
    let number: f64 = digits.parse().with_context(|| format!("no number: {text:?}"))?;
    Ok(number * 1024_f64.powi(power))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(how: How, lines: &str, unit: f64) -> ToolAnswer {
        ToolAnswer { how, lines: lines.into(), unit, about: 0.0 }
    }

    #[test]
    fn figures_are_read() {
        let rows = "[4K, 8K)   3 |@@  |\n[8K, 16K)  14 |@@@@|\n";
        let sum = answer(How::Sum, r"^\[.*\)\s+(\d+) \|", 1.0);
        let exactly = |figure| Some(Expected::exactly(figure));
        assert_eq!(sum.read(rows).unwrap(), exactly(17));
        let row = r"^\[(\d+[KMG]?), (\d+[KMG]?)\)\s+[1-9]";
        let between = |least, most| Some(Expected { least, most });
        let fastest = answer(How::Min, row, 1000.0);
        assert_eq!(fastest.read(rows).unwrap(), between(4_096_000, 8_192_000));
        let slowest = answer(How::Max, row, 1000.0);
        assert_eq!(slowest.read(rows).unwrap(), between(8_192_000, 16_384_000));
        let count = answer(How::Count, r"^\[", 1.0);
        assert_eq!((count.read(rows).unwrap(), count.read("").unwrap()), (exactly(2), exactly(0)));
        let slowest = answer(How::Max, r"took ([\d.]+) ms", 1e6);
        assert_eq!(slowest.read("took 1.5 ms\ntook 0.25 ms\n").unwrap(), exactly(1_500_000));
        assert_eq!(slowest.read("").unwrap(), None);
        assert!(answer(How::Sum, "took", 1.0).read("took").is_err());
    }

    #[test]
    fn groups_have_names_and_numbers_units() {
        let read = |text: &str| toml::from_str::<ToolAnswer>(text);
        let took =
            "how = \"max\"\nlines = '(?<what>\\w+) took (?<figure>[\\d.]+) ?(?<unit>[mu]s)?'";
        let slowest = read(&format!("{took}\nunit = \"s\"")).unwrap();
        let exactly = |figure| Some(Expected::exactly(figure));
        assert_eq!(
            slowest.read("one took 80ms\nanother took 900 us\n").unwrap(),
            exactly(80_000_000)
        );
        assert_eq!(slowest.read("one took 0.1").unwrap(), exactly(100_000_000));
        let error = read(&format!("{took}\nunit = \"days\"")).unwrap_err().to_string();
        assert!(error.contains("\"days\" is no unit: these are ns, us,"), "{error}");
        let row = "how = \"max\"\nlines = '(?<figure>\\d+) -> (?<most>\\d+)'\nunit = \"KiB\"";
        let between = Some(Expected { least: 4096, most: 8192 });
        assert_eq!(read(row).unwrap().read("4 -> 8").unwrap(), between);
        let mean = "how = \"mean\"\nlines = '(?<weight>\\d+)/s of (?<figure>\\d+)'\nabout = 0.1";
        let mean = read(mean).unwrap();
        assert_eq!(
            mean.read("30/s of 10\n10/s of 50").unwrap(),
            Some(Expected { least: 18, most: 22 })
        );
        assert_eq!((mean.read("0/s of 10").unwrap(), mean.read("").unwrap()), (None, None));
    }
}
