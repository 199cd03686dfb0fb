//! What is printed at the end.

use std::{
    cmp::Reverse,
    collections::HashMap,
    io::{self, Write},
};

use crate::record::{Kind, Ledger, Life, Trace};

/// How many hops are listed.
const HOPS: usize = 15;

/// Collects what the summary needs of every event. Functions and lives are numbers.
#[derive(Default)]
pub struct Summary {
    pub events: u64,
    /// Events that came after the last one that `--max-events` or `--memory` allows.
    pub beyond: u64,
    /// It was `--memory`.
    pub no_memory: bool,
    /// Ends that are known without their calls.
    pub ends_again: u64,
    /// With `--errors`: how many lives had none.
    pub without_error: Option<usize>,
    /// The functions that each life was passed to first and last, and when to the last one.
    lives: HashMap<usize, (usize, usize, u64)>,
    /// Function to function: ns.
    hops: HashMap<(usize, usize), Vec<u64>>,
}

impl Summary {
    /// Takes notice of an event.
    pub fn event(&mut self, function: usize, life: usize, kind: Kind, time: u64) {
        self.events += 1;
        if kind != Kind::Entry {
            return;
        }
        let first = match self.lives.get(&life) {
            Some(&(first, last, before)) => {
                let hop = self.hops.entry((last, function)).or_default();
                hop.push(time.saturating_sub(before));
                first
            }
            None => function,
        };
        self.lives.insert(life, (first, function, time));
    }

    /// The memory of this, in bytes.
    pub fn memory(&self) -> usize {
        const LIFE: usize = 2 * size_of::<(usize, (usize, usize, u64))>();
        self.events as usize * size_of::<u64>() + self.lives.len() * LIFE
    }

    /// Prints the summary. `open`: calls that have not returned.
    pub fn print(
        &self,
        w: &mut dyn Write,
        trace: &Trace,
        lives: &[Life],
        ledger: &Ledger,
        open: usize,
    ) -> io::Result<()> {
        const RULER: &str = "=====================================================";
        let ended = lives.iter().filter(|life| life.end.is_some()).count();
        writeln!(w, "{RULER}\n{:>10} events", self.events)?;
        if self.beyond > 0 {
            let bound = if self.no_memory { "--memory" } else { "--max-events" };
            writeln!(w, "{:>10} more events, not shown ({bound})", self.beyond)?;
        }
        let objects = format!("objects (struct {}), {ended} of them ended", trace.type_name);
        writeln!(w, "{:>10} {objects}", lives.len())?;
        if self.ends_again > 0 {
            let what = "of these ends seen by an fentry program: their calls were missed";
            writeln!(w, "{:>10} {what}", self.ends_again)?;
        }
        if let Some(others) = self.without_error {
            writeln!(w, "{others:>10} objects without an error, not shown (--errors)")?;
        }
        writeln!(w, "{open:>10} calls in flight")?;
        print_ledger(w, ledger)?;
        self.print_slowest(w, trace, lives)?;
        self.print_hops(w, trace)?;
        writeln!(w, "{RULER}")
    }

    fn print_slowest(&self, w: &mut dyn Write, trace: &Trace, lives: &[Life]) -> io::Result<()> {
        let ended = lives.iter().filter_map(|life| Some((life.duration?, life.life)));
        let Some((duration, number)) = ended.max() else { return Ok(()) };
        let (first, last, _) = self.lives.get(&number).copied().unwrap_or_default();
        let [first, last] = [first, last].map(|function| &trace.functions[function].name);
        let address = &lives[number].address;
        let among = match lives.iter().filter(|life| life.end.is_none()).count() {
            0 => String::new(),
            open => format!(", of the {} that ended; {open} did not", lives.len() - open),
        };
        writeln!(
            w,
            "Slowest life: #{number} at {address}, {duration} ns, from {first}() to {last}(){among}"
        )
    }

    fn print_hops(&self, w: &mut dyn Write, trace: &Trace) -> io::Result<()> {
        let mut hops: Vec<_> = self.hops.iter().map(|(hop, times)| (*hop, times.clone())).collect();
        if hops.is_empty() {
            return Ok(());
        }
        // The names only break ties: the order must not depend on chance.
        hops.sort_by_key(|(hop, times)| (Reverse(times.iter().sum::<u64>()), *hop));
        let others = hops.len().saturating_sub(HOPS);
        writeln!(w, "Time from one function to the next (ns), the largest sums first:")?;
        writeln!(w, "{:>10} {:>10} {:>10} {:>10}  hop", "count", "p50", "p99", "max")?;
        for ((from, to), mut times) in hops.into_iter().take(HOPS) {
            times.sort_unstable();
            let (count, max) = (times.len(), percentile(&times, 100));
            let (p50, p99) = (percentile(&times, 50), percentile(&times, 99));
            let (from, to) = (&trace.functions[from].name, &trace.functions[to].name);
            writeln!(w, "{count:>10} {p50:>10} {p99:>10} {max:>10}  {from} -> {to}")?;
        }
        if others > 0 {
            writeln!(w, "{others:>10} others")?;
        }
        Ok(())
    }
}

/// The smallest value that at least `percent` of all are not above.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0)
}

fn print_ledger(w: &mut dyn Write, ledger: &Ledger) -> io::Result<()> {
    writeln!(w, "{:>10} hits of the probes, counted by the kernel:", ledger.hits)?;
    let mut sum = 0;
    for (count, what) in ledger.lines() {
        sum += count;
        writeln!(w, "{count:>12} {what}")?;
    }
    if ledger.objects_lost > 0 {
        writeln!(w, "{:>10} {}", ledger.objects_lost, Ledger::OBJECTS_LOST)?;
    }
    match ledger.hits.abs_diff(sum) {
        0 => writeln!(w, "{sum:>12} in all: the ledger balances"),
        off => writeln!(
            w,
            "{sum:>12} in all: {off} off (probes were hit while the counters were read)"
        ),
    }
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
            let mut text = Vec::new();
            Summary::default().print_slowest(&mut text, &sample.trace, &sample.lives).unwrap();
            String::from_utf8(text).unwrap()
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
        let print = |ledger: &Ledger| {
            let mut text = Vec::new();
            print_ledger(&mut text, ledger).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert!(print(&ledger).ends_with("          10 in all: the ledger balances\n"));
        ledger.hits = 12;
        assert!(print(&ledger).contains("10 in all: 2 off"));
    }
}
