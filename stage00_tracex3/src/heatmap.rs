//! A histogram as one row of a heatmap: a column for every tenth of a decade.

use std::env;

use clap::Args;

use common::{Cli, InFlight};

use crate::histogram::{Histogram, longest};

/// Columns in a decade: 10 ms, 12.6 ms, 15.8 ms … 100 ms.
const DECADE: usize = 10;
/// The column of 1 us; column 0 is 1 ns.
const MICROSECOND: usize = 3 * DECADE;
/// The last column: 10 s, and longer.
const LAST: usize = 10 * DECADE;

/// From few to many, as text and as 256-colour codes.
const SYMBOLS: [char; 5] = ['.', ':', 'o', 'O', '@'];
const COLOURS: [u8; 5] = [52, 124, 196, 208, 226];

/// The command line of a stage that prints a heatmap.
pub type HeatmapCli = Cli<HeatmapOptions>;

/// `--all`, `--text`.
#[derive(Args, Debug)]
pub struct HeatmapOptions {
    /// All latencies from 1 ns on, not from 1 us
    #[arg(short, long)]
    all: bool,
    /// Text only; also with NO_COLOR set, and where stdout is not a terminal
    #[arg(short, long)]
    text: bool,
    /// The size of the map.
    #[command(flatten)]
    pub room: InFlight,
}

impl HeatmapOptions {
    /// The heatmap that the options ask for.
    pub fn heatmap(&self, on_terminal: bool) -> Heatmap {
        Heatmap { all: self.all, text: self.text || !on_terminal || no_colours() }
    }
}

/// How a heatmap looks.
#[derive(Clone, Copy, Debug)]
pub struct Heatmap {
    /// Columns from 1 ns on, not from 1 us.
    pub all: bool,
    /// Characters, not colours.
    pub text: bool,
}

impl Heatmap {
    /// What the rows mean, in two lines.
    pub fn legend(&self) -> String {
        let ramp: String = (1..=SYMBOLS.len()).map(|level| self.cell(level)).collect();
        format!(
            "heatmap of request latency, a row every 2 s; the outermost columns hold what lies beyond\n  \
             {ramp}  from few requests to many, compared with the fullest column of the row"
        )
    }

    /// The line above the rows: where each decade begins.
    pub fn scale(&self) -> String {
        let decades =
            ["1ns", "10ns", "100ns", "1us", "10us", "100us", "1ms", "10ms", "100ms", "1s", "10s"];
        let shown = &decades[self.first() / DECADE..];
        shown.iter().map(|name| format!("|{name:<9}")).collect::<String>().trim_end().to_owned()
    }

    /// One row: a cell a column, empty only where there was nothing, and how many there were.
    pub fn row(&self, histogram: &Histogram) -> String {
        let mut columns = [0; LAST + 1];
        for (slot, count) in histogram.slots.iter().enumerate() {
            columns[column(slot).max(self.first())] += count;
        }
        let fullest = columns.iter().copied().max().unwrap_or_default();
        let cells: String =
            columns[self.first()..].iter().map(|&count| self.cell(level(count, fullest))).collect();
        match histogram.count() {
            0 => format!("{cells} # no I/O"),
            count => format!("{cells} # {count}"),
        }
    }

    fn first(&self) -> usize {
        if self.all { 0 } else { MICROSECOND }
    }

    fn cell(&self, level: usize) -> String {
        match level.checked_sub(1) {
            None => " ".into(),
            Some(shade) if self.text => SYMBOLS[shade].into(),
            Some(shade) => format!("\x1b[48;5;{}m \x1b[0m", COLOURS[shade]),
        }
    }
}

/// 0 for nothing, 5 for as many as in the fullest column, 1 for the first fifth of that.
fn level(count: u64, fullest: u64) -> usize {
    (u128::from(count) * SYMBOLS.len() as u128).div_ceil(u128::from(fullest.max(1))) as usize
}

/// The column of a slot. A slot that lies across two columns counts to the later one, so that
/// a disk of exactly 10 ms stands under `10ms`: a column begins at most 3.1 % early.
fn column(slot: usize) -> usize {
    let tenths = (longest(slot) as f64).log10() * DECADE as f64;
    (tenths as usize).min(LAST)
}

/// Whether the user wants no colours (`NO_COLOR`), or the terminal has none (`TERM=dumb`).
fn no_colours() -> bool {
    let unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    unwanted || env::var_os("TERM").is_some_and(|t| t == "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::histogram::slot;

    const TEXT: Heatmap = Heatmap { all: false, text: true };

    fn from_latencies(latencies: &[(u64, u64)]) -> Histogram {
        let mut histogram = Histogram::default();
        for &(ns, count) in latencies {
            histogram.slots[slot(ns)] += count;
        }
        histogram
    }

    #[test]
    fn a_latency_stands_under_its_name() {
        for (all, text) in [(false, true), (true, true), (false, false)] {
            let heatmap = Heatmap { all, text };
            let row = heatmap.row(&from_latencies(&[(10_000_000, 1)]));
            let at = heatmap.scale().find("|10ms").unwrap();
            assert_eq!(row.find(|c| c != ' '), Some(at), "{row:?}");
        }
        for (ns, expected) in [
            (1_000, 30),
            (1_200, 30),
            (1_300, 31),
            (9_900_000, 69),
            (10_000_000, 70),
            (12_500_000, 70),
            (10_000_000_000, 100),
        ] {
            assert_eq!(column(slot(ns)), expected, "{ns} ns");
        }
        assert_eq!((column(0), column(1), column(10)), (0, 0, 10));
    }

    #[test]
    fn nothing_that_was_counted_is_left_blank() {
        let row =
            TEXT.row(&from_latencies(&[(5, 1), (20_000, 500), (1_000_000, 1000), (1 << 63, 1)]));
        let cells = format!(".{:12}o{:16}@{:39}. # 1502", "", "", "");
        assert_eq!(row, cells);
    }

    #[test]
    fn an_idle_row_says_so() {
        assert_eq!(TEXT.row(&from_latencies(&[])), format!("{:71} # no I/O", ""));
    }

    #[test]
    fn a_row_is_as_wide_as_its_scale_and_text_has_no_codes() {
        let wide = Heatmap { all: true, text: true };
        for heatmap in [TEXT, wide] {
            let row = heatmap.row(&from_latencies(&[(20_000_000_000, 1)]));
            assert_eq!(row.find('@'), heatmap.scale().find("|10s"));
            assert!(!(row + &heatmap.legend()).contains('\x1b'));
        }
        assert_eq!((TEXT.scale().len(), wide.scale().len()), (74, 104));
        let coloured = Heatmap { all: false, text: false };
        assert!(coloured.row(&from_latencies(&[(20_000, 1)])).contains("\x1b[48;5;226m \x1b[0m"));
        assert_eq!(coloured.legend().matches("\x1b[0m").count(), SYMBOLS.len());
    }
}
