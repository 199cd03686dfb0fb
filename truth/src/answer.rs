//! Reading a figure from what a tool has printed.

use anyhow::{Context, Result};
use regex_lite::Regex;
use serde::Deserialize;

use crate::Expected;

/// Where in a tool's output a figure is, and how several make one.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// How the lines make one figure.
    pub how: How,
    /// A regular expression of the lines; its first group is the number, with K, M or G for 1024, its
    /// square or its cube. A second group makes it a row of a histogram: the number lies between both.
    /// `(?m)` is implied.
    pub lines: String,
    /// The unit of the number, in the question's: 1000000 where a tool prints ms and ns are asked for.
    #[serde(default = "one")]
    pub unit: f64,
}

fn one() -> f64 {
    1.0
}

/// How the numbers of several lines make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
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
}

impl Answer {
    /// The figure, and the most that it can be; `None` where nothing was printed that could be one.
    pub fn of(&self, output: &str) -> Result<Option<Expected>> {
        let lines = Regex::new(&format!("(?m){}", self.lines)).context(self.lines.clone())?;
        if self.how == How::Count {
            return Ok(Some(Expected::exactly(lines.find_iter(output).count() as u64)));
        }
        let numbers = lines.captures_iter(output).map(|found| {
            let least = found.get(1).with_context(|| format!("no group in {}", self.lines))?;
            let least = number(least.as_str())? * self.unit;
            let most = found.get(2).map(|most| number(most.as_str())).transpose()?;
            Ok((least, most.map_or(least, |most| most * self.unit)))
        });
        let numbers = numbers.collect::<Result<Vec<(f64, f64)>>>()?.into_iter();
        let compare = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0);
        let figure = match self.how {
            How::Sum => Some(numbers.fold((0.0, 0.0), |sum, n| (sum.0 + n.0, sum.1 + n.1))),
            How::Min => numbers.min_by(compare),
            How::Max | How::Count => numbers.max_by(compare),
        };
        Ok(figure.map(|(least, most)| Expected {
            least: least.round() as u64,
            most: most.round() as u64,
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

    fn answer(how: How, lines: &str, unit: f64) -> Answer {
        Answer { how, lines: lines.into(), unit }
    }

    #[test]
    fn figures_are_read() {
        let rows = "[4K, 8K)   3 |@@  |\n[8K, 16K)  14 |@@@@|\n";
        let sum = answer(How::Sum, r"^\[.*\)\s+(\d+) \|", 1.0);
        let exactly = |figure| Some(Expected::exactly(figure));
        assert_eq!(sum.of(rows).unwrap(), exactly(17));
        let row = r"^\[(\d+[KMG]?), (\d+[KMG]?)\)\s+[1-9]";
        let between = |least, most| Some(Expected { least, most });
        let fastest = answer(How::Min, row, 1000.0);
        assert_eq!(fastest.of(rows).unwrap(), between(4_096_000, 8_192_000));
        let slowest = answer(How::Max, row, 1000.0);
        assert_eq!(slowest.of(rows).unwrap(), between(8_192_000, 16_384_000));
        let count = answer(How::Count, r"^\[", 1.0);
        assert_eq!((count.of(rows).unwrap(), count.of("").unwrap()), (exactly(2), exactly(0)));
        let slowest = answer(How::Max, r"took ([\d.]+) ms", 1e6);
        assert_eq!(slowest.of("took 1.5 ms\ntook 0.25 ms\n").unwrap(), exactly(1_500_000));
        assert_eq!(slowest.of("").unwrap(), None);
        assert!(answer(How::Sum, "took", 1.0).of("took").is_err());
    }
}
