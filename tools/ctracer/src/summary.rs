//! What is printed at the end.

use std::{cmp::Reverse, collections::HashMap};

use common::colours::{self, PARTS};

use crate::{
    gaps::{Gaps, Left, Step},
    life::Life,
    record::{Kind, Ledger, Trace},
};

/// How many hops are listed.
const HOPS: usize = 15;

/// Collects what the summary needs of every event. Functions and lives are numbers.
#[derive(Default)]
pub struct Summary {
    pub events: u64,
    /// Events that came after the last one that `--max-events` or `--memory` allows.
    pub beyond: u64,
    /// The option of these that it was.
    pub bound: &'static str,
    /// Ends that are known without their calls.
    pub ends_again: u64,
    /// With `--errors`: how many lives had none.
    pub without_error: Option<usize>,
    /// The functions that each life was passed to first and last, and when to the last one.
    lives: HashMap<usize, (usize, usize, u64)>,
    /// Function to function, and which part of an I/O's time that is: ns.
    hops: HashMap<(usize, usize, Option<usize>), Vec<u64>>,
    gaps: Gaps,
    has_colours: bool,
}

impl Summary {
    /// For a trace of these functions.
    pub fn new(trace: &Trace, has_colours: bool) -> Summary {
        Summary { gaps: Gaps::new(trace), has_colours, ..Summary::default() }
    }

    /// Takes notice of an event. Returns the part of an I/O's time that the object leaves with it.
    pub fn event(&mut self, step: Step) -> Option<Left> {
        self.events += 1;
        let (part, left) = self.gaps.take(step);
        if step.kind != Kind::Entry {
            return left;
        }
        let first = match self.lives.get(&step.life) {
            Some(&(first, last, before)) => {
                let hop = self.hops.entry((last, step.function, part)).or_default();
                hop.push(step.time.saturating_sub(before));
                first
            }
            None => step.function,
        };
        self.lives.insert(step.life, (first, step.function, step.time));
        left
    }

    /// The memory of this, in bytes.
    pub fn memory(&self) -> usize {
        const LIFE: usize = 2 * size_of::<(usize, (usize, usize, u64))>();
        let lives = self.lives.len() * LIFE + self.gaps.memory();
        self.events as usize * size_of::<u64>() + lives
    }

    /// The text of the summary. `open`: calls that have not returned.
    pub fn print(&self, trace: &Trace, lives: &[Life], ledger: &Ledger, open: usize) -> String {
        const RULER: &str = "=====================================================\n";
        let line = |count: u64, what: String| format!("{count:>10} {what}\n");
        let if_any = |count, what| if count > 0 { line(count, what) } else { String::new() };
        let ended = lives.iter().filter(|life| life.end.is_some()).count();
        let missed = "of these ends seen by an fentry program: their calls were missed";
        let objects = format!("objects (struct {}), {ended} of them ended", trace.type_name);
        let others = "objects without an error, not shown (--errors)".to_owned();
        [
            RULER.to_owned(),
            line(self.events, "events".to_owned()),
            if_any(self.beyond, format!("more events, not shown ({})", self.bound)),
            line(lives.len() as u64, objects),
            if_any(self.ends_again, missed.to_owned()),
            self.without_error.map_or(String::new(), |count| line(count as u64, others)),
            line(open as u64, "calls in flight".to_owned()),
            print_ledger(ledger),
            self.slowest(trace, lives),
            self.hops(trace),
            RULER.to_owned(),
        ]
        .concat()
    }

    fn slowest(&self, trace: &Trace, lives: &[Life]) -> String {
        let ended = lives.iter().filter_map(|life| Some((life.duration?, life.life)));
        let Some((duration, number)) = ended.max() else { return String::new() };
        let (first, last, _) = self.lives.get(&number).copied().unwrap_or_default();
        let [first, last] = [first, last].map(|function| &trace.functions[function].name);
        let among = match lives.iter().filter(|life| life.end.is_none()).count() {
            0 => String::new(),
            open => format!(", of the {} that ended; {open} did not", lives.len() - open),
        };
        let took = format!("#{number} at {}, {duration} ns", lives[number].address);
        format!("Slowest life: {took}, from {first}() to {last}(){among}\n")
    }

    fn hops(&self, trace: &Trace) -> String {
        let mut hops: Vec<_> = self.hops.iter().collect();
        if hops.is_empty() {
            return String::new();
        }
        // The names only break ties: the order must not depend on chance.
        hops.sort_by_key(|(hop, times)| {
            (Reverse(times.iter().map(|&ns| u128::from(ns)).sum::<u128>()), *hop)
        });
        let mut text =
            "Time from one function to the next (ns), the largest sums first:\n".to_owned();
        let heads = ["count", "p50", "p99", "max"].map(|head| format!("{head:>10}")).join(" ");
        text += &format!("{heads}  {:<6} hop\n", "part");
        for ((from, to, part), times) in hops.iter().take(HOPS) {
            let mut times = (*times).clone();
            times.sort_unstable();
            let [p50, p99, max] = [50, 99, 100].map(|percent| percentile(&times, percent));
            let (from, to) = (&trace.functions[*from].name, &trace.functions[*to].name);
            let count = times.len();
            let part = self.part(*part);
            text += &format!("{count:>10} {p50:>10} {p99:>10} {max:>10}  {part} {from} -> {to}\n");
        }
        match hops.len().saturating_sub(HOPS) {
            0 => text,
            others => text + &format!("{others:>10} others\n"),
        }
    }
}

impl Summary {
    /// A part's name, in its column.
    fn part(&self, part: Option<usize>) -> String {
        let Some(part) = part.map(|part| &PARTS[part]) else { return format!("{:<6}", "-") };
        let rest = " ".repeat(6 - part.name.len());
        match self.has_colours {
            true => colours::painted(part, part.name) + &rest,
            false => part.name.to_owned() + &rest,
        }
    }
}

/// The smallest value that at least `percent` of all are not above.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

fn print_ledger(ledger: &Ledger) -> String {
    let mut text = format!("{:>10} hits of the probes, counted by the kernel:\n", ledger.hits);
    let lines = ledger.lines();
    lines.iter().for_each(|(count, what)| text += &format!("{count:>12} {what}\n"));
    if ledger.objects_lost > 0 {
        text += &format!("{:>10} {}\n", ledger.objects_lost, Ledger::OBJECTS_LOST);
    }
    let sum = lines.iter().fold(0_u64, |sum, (count, _)| sum.saturating_add(*count));
    let verdict = match ledger.hits.abs_diff(sum) {
        0 => "the ledger balances".to_owned(),
        off => format!("{off} off (probes were hit while the counters were read)"),
    };
    text + &format!("{sum:>12} in all: {verdict}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values() {
        assert_eq!(percentile(&[], 50), 0);
        assert_eq!(percentile(&[7], 50), 7);
        assert_eq!(percentile(&[1, 2, 3, 4], 50), 2);
        assert_eq!(percentile(&[1, 2, 3, 4], 99), 4);
    }

    #[test]
    fn the_slowest_life_is_one_of_those_that_ended() {
        let mut sample = crate::report::tests::sample();
        let print = |sample: &crate::report::tests::Sample| {
            Summary::default().slowest(&sample.trace, &sample.lives)
        };
        assert!(print(&sample).starts_with("Slowest life: #0 "), "{}", print(&sample));
        assert!(print(&sample).ends_with("()\n"), "{}", print(&sample));
        (sample.lives[0].end, sample.lives[0].duration) = (None, None);
        let expected = ", of the 1 that ended; 1 did not\n";
        assert!(print(&sample).ends_with(expected), "{}", print(&sample));
    }

    #[test]
    fn a_ledger_says_whether_it_balances() {
        let mut ledger = Ledger { hits: 10, entries: 5, returns: 4, lost: 1, ..Ledger::default() };
        assert!(print_ledger(&ledger).ends_with("          10 in all: the ledger balances\n"));
        ledger.hits = 12;
        assert!(print_ledger(&ledger).contains("10 in all: 2 off"));
    }
}
