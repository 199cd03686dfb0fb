//! What is printed at the end.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use crate::model::{Event, Kind, Ledger, Life, Trace};

/// How many hops are listed.
const HOPS: usize = 15;

/// Collects what the summary needs of every event.
#[derive(Default)]
pub struct Summary {
    events: u64,
    /// Events that came after the last one that `--max-events` or `--memory` allows.
    pub beyond: u64,
    /// It was `--memory`.
    pub no_memory: bool,
    /// Ends that are known without their calls.
    pub ends_again: u64,
    /// With `--errors`: how many lives had none.
    pub without_error: Option<usize>,
    /// The function that each life was passed to last, and when.
    last: HashMap<usize, (usize, u64)>,
    /// Function to function: ns.
    hops: HashMap<(usize, usize), Vec<u64>>,
    /// The first and the last function of each life.
    ends: HashMap<usize, (usize, usize)>,
}

impl Summary {
    /// Takes notice of an event.
    pub fn event(&mut self, event: &Event) {
        self.events += 1;
        if event.kind != Kind::Entry {
            return;
        }
        let now = (event.function, event.time);
        if let Some((function, time)) = self.last.insert(event.life, now) {
            let hop = self.hops.entry((function, event.function)).or_default();
            hop.push(event.time.saturating_sub(time));
        }
        self.ends.entry(event.life).or_insert((event.function, 0)).1 = event.function;
    }

    /// The memory of this and of the lives, in bytes.
    pub fn memory(&self) -> usize {
        const LIFE: usize = size_of::<Life>() + 4 * size_of::<(usize, usize, u64)>();
        self.events as usize * size_of::<u64>() + self.ends.len() * LIFE
    }

    /// How many events there were.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Prints the summary. `open`: calls that have not returned.
    pub fn print(&self, w: &mut dyn Write, trace: &Trace, open: usize) -> io::Result<()> {
        let ended = trace.lives.iter().filter(|life| life.end.is_some()).count();
        let lives = trace.lives.len();
        writeln!(w, "=====================================================")?;
        writeln!(w, "{:>10} events", self.events)?;
        if self.beyond > 0 {
            let bound = if self.no_memory { "--memory" } else { "--max-events" };
            writeln!(w, "{:>10} more events, not shown ({bound})", self.beyond)?;
        }
        writeln!(w, "{lives:>10} objects (struct {}), {ended} of them ended", trace.type_name)?;
        if self.ends_again > 0 {
            let ends = self.ends_again;
            writeln!(
                w,
                "{ends:>10} of these ends seen by an fentry program: their calls were missed"
            )?;
        }
        if let Some(others) = self.without_error {
            writeln!(w, "{others:>10} objects without an error, not shown (--errors)")?;
        }
        writeln!(w, "{open:>10} calls in flight")?;
        print_ledger(w, &trace.ledger)?;
        self.print_slowest(w, trace)?;
        self.print_hops(w, trace)?;
        writeln!(w, "=====================================================")
    }

    fn print_slowest(&self, w: &mut dyn Write, trace: &Trace) -> io::Result<()> {
        let durations =
            trace.lives.iter().enumerate().filter_map(|(n, l)| Some((l.end? - l.begin, n)));
        let Some((duration, number)) = durations.max() else { return Ok(()) };
        let name = |function: usize| trace.functions[function].name.as_str();
        let (first, last) = self.ends.get(&number).copied().unwrap_or_default();
        let address = trace.lives[number].address;
        let among = match trace.lives.iter().filter(|life| life.end.is_none()).count() {
            0 => String::new(),
            open => format!(", of the {} that ended; {open} did not", trace.lives.len() - open),
        };
        writeln!(
            w,
            "Slowest life: #{number} at {address:#x}, {duration} ns, from {}() to {}(){among}",
            name(first),
            name(last)
        )
    }

    fn print_hops(&self, w: &mut dyn Write, trace: &Trace) -> io::Result<()> {
        let mut hops: Vec<_> = self.hops.iter().map(|(hop, times)| (hop, times.clone())).collect();
        if hops.is_empty() {
            return Ok(());
        }
        // The names only break ties: the order must not depend on chance.
        hops.sort_by_key(|(hop, times)| (std::cmp::Reverse(times.iter().sum::<u64>()), **hop));
        let all = hops.len();
        writeln!(w, "Time from one function to the next (ns), the largest sums first:")?;
        writeln!(w, "{:>10} {:>10} {:>10} {:>10}  hop", "count", "p50", "p99", "max")?;
        for ((from, to), mut times) in hops.into_iter().take(HOPS) {
            times.sort_unstable();
            let (count, max) = (times.len(), times.last().copied().unwrap_or(0));
            let (p50, p99) = (percentile(&times, 50), percentile(&times, 99));
            let (from, to) = (&trace.functions[*from].name, &trace.functions[*to].name);
            writeln!(w, "{count:>10} {p50:>10} {p99:>10} {max:>10}  {from} -> {to}")?;
        }
        if all > HOPS {
            writeln!(w, "{:>10} others", all - HOPS)?;
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
    for (count, what) in [
        (ledger.entries, "calls recorded"),
        (ledger.returns, "returns recorded"),
        (ledger.lost, "lost (ring buffer or table of open calls full)"),
        (ledger.recursion, "missed (another BPF program was running on the CPU)"),
        (ledger.instances, "missed (no room to remember the call, or inside another probe)"),
        (ledger.filtered, "filtered (--pid, --dev, --sample, --filter)"),
        (ledger.null, "without an object (NULL)"),
        (ledger.unmatched, "returns of calls that were not recorded"),
        (ledger.outside, "before the start or after the end"),
    ] {
        writeln!(w, "{count:>12} {what}")?;
    }
    if ledger.objects_lost > 0 {
        let lost = ledger.objects_lost;
        writeln!(w, "{lost:>10} second objects of recorded calls lost (ring buffer full)")?;
    }
    let (hits, sum) = (ledger.hits, ledger.sum());
    match hits.abs_diff(sum) {
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
        let mut trace = crate::calls::tests::sample();
        let print = |trace: &Trace| {
            let mut text = Vec::new();
            Summary::default().print_slowest(&mut text, trace).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert!(print(&trace).starts_with("Slowest life: #0 "), "{}", print(&trace));
        assert!(print(&trace).ends_with("()\n"), "{}", print(&trace));
        trace.lives[0].end = None;
        let expected = ", of the 1 that ended; 1 did not\n";
        assert!(print(&trace).ends_with(expected), "{}", print(&trace));
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
