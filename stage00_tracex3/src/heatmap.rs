//! A histogram as one row of a heatmap: a column for every tenth of a decade, or as many as the terminal has room for.

use std::ops::Range;

use clap::Args;

use common::{Cli, InFlight};

use crate::histogram::{Histogram, longest};

/// Columns in a decade where nothing else is asked for: 10 ms, 12.6 ms, 15.8 ms … 100 ms.
const TENTHS: usize = 10;
/// The decade of 1 us; the first one is that of 1 ns.
const MICROSECOND: usize = 3;
/// The last decade has one column: 10 s, and longer.
const LAST: usize = 10;
/// Columns for the sum of a row: ` # 1234567`.
const SUM: usize = 10;
/// Columns in a decade, on a terminal: room for its name, and never so many that a slot is wider than a column.
const WIDTHS: [usize; 2] = [6, 60];

/// From few to many, as text and as 256-colour codes.
const SYMBOLS: [char; 5] = ['.', ':', 'o', 'O', '@'];
const COLOURS: [u8; 5] = [52, 124, 196, 208, 226];

/// The command line of a stage that prints a heatmap.
pub type HeatmapCli = Cli<HeatmapOptions>;

/// `--all`, `--text`.
#[derive(Args, Debug)]
pub struct HeatmapOptions {
    /// Latencies below 1 us in columns of their own, too
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
    /// The heatmap that the options ask for, on a terminal with so many columns, if it is one.
    pub fn heatmap(&self, terminal: Option<usize>, has_colours: bool) -> Heatmap {
        let first = if self.all { 0 } else { MICROSECOND };
        let text = self.text || !has_colours;
        let mut heatmap =
            Heatmap { first, text, terminal, shown: first..LAST, decade: TENTHS, fits: false };
        heatmap.widen();
        heatmap
    }
}

/// How a heatmap looks.
#[derive(Clone, Debug)]
pub struct Heatmap {
    /// The first decade that may be shown: 0 is that of 1 ns. What is less is in its first column.
    first: usize,
    /// Characters, not colours.
    text: bool,
    /// How many columns the terminal has.
    terminal: Option<usize>,
    /// The decades that are shown.
    shown: Range<usize>,
    /// Columns in a decade.
    decade: usize,
    /// Whether these are the decades that have held a request.
    fits: bool,
}

impl Heatmap {
    /// What the rows mean, in two lines.
    pub fn legend(&self) -> String {
        let ramp: String = (1..=SYMBOLS.len()).map(|level| self.cell(level)).collect();
        format!(
            "request latency, a row every 2 s; the outermost columns hold what lies beyond\n  \
             {ramp}  from few requests to many, compared with the fullest column of the row"
        )
    }

    /// On a terminal, shows the decades of these latencies and of all before, as wide as there is room for. Whether
    /// that has changed the scale.
    pub fn fit(&mut self, new: &Histogram) -> bool {
        let counted = new.slots.iter().enumerate().filter(|(_, count)| **count > 0);
        let mut decades = counted.map(|(slot, _)| column(slot, 1).clamp(self.first, LAST - 1));
        let (Some(_), Some(least)) = (self.terminal, decades.next()) else { return false };
        let most = decades.next_back().unwrap_or(least);
        let shown = match self.fits {
            true => least.min(self.shown.start)..(most + 1).max(self.shown.end),
            // Three at least: a picture of one decade says nothing of what is near.
            false => least.min(LAST - 3)..(most + 1).max(least + 3).min(LAST),
        };
        self.fits = true;
        let is_new = shown != self.shown;
        self.shown = shown;
        self.widen();
        is_new
    }

    /// Takes the room that there is.
    fn widen(&mut self) {
        if let Some(terminal) = self.terminal {
            let [least, most] = WIDTHS;
            let room = terminal.saturating_sub(SUM + 1) / self.shown.len();
            self.decade = room.clamp(least, most);
        }
    }

    /// The line above the rows: where each decade begins.
    pub fn scale(&self) -> String {
        let decades =
            ["1ns", "10ns", "100ns", "1us", "10us", "100us", "1ms", "10ms", "100ms", "1s", "10s"];
        let shown = &decades[self.shown.start..=self.shown.end];
        let width = self.decade - 1;
        shown
            .iter()
            .map(|name| format!("|{name:<width$}"))
            .collect::<String>()
            .trim_end()
            .to_owned()
    }

    /// One row: a cell a column, empty only where there was nothing, and how many there were.
    pub fn row(&self, histogram: &Histogram) -> String {
        let [first, last] = [self.shown.start, self.shown.end].map(|at| at * self.decade);
        let mut columns = vec![0; last - first + 1];
        for (slot, count) in histogram.slots.iter().enumerate() {
            columns[column(slot, self.decade).clamp(first, last) - first] += count;
        }
        let fullest = columns.iter().copied().max().unwrap_or_default();
        let cells: String = columns.iter().map(|&count| self.cell(level(count, fullest))).collect();
        match histogram.count() {
            0 => format!("{cells} # no I/O"),
            count => format!("{cells} # {count}"),
        }
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

/// The column of a slot, with so many in a decade. A slot that lies across two columns counts to the later one, so
/// that a disk of exactly 10 ms stands under `10ms`: a column begins at most 3.1 % early.
fn column(slot: usize, decade: usize) -> usize {
    ((longest(slot) as f64).log10() * decade as f64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::histogram::slot;

    fn heatmap(all: bool, text: bool, terminal: Option<usize>) -> Heatmap {
        let room = InFlight { in_flight: 1 };
        HeatmapOptions { all, text, room }.heatmap(terminal, false)
    }

    fn plain() -> Heatmap {
        heatmap(false, true, None)
    }

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
            let heatmap = Heatmap { text, ..heatmap(all, text, None) };
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
            assert_eq!(column(slot(ns), TENTHS), expected, "{ns} ns");
        }
        assert_eq!([0, 1, 10].map(|slot| column(slot, TENTHS)), [0, 0, 10]);
    }

    #[test]
    fn nothing_that_was_counted_is_left_blank() {
        let row =
            plain().row(&from_latencies(&[(5, 1), (20_000, 500), (1_000_000, 1000), (1 << 63, 1)]));
        let cells = format!(".{:12}o{:16}@{:39}. # 1502", "", "", "");
        assert_eq!(row, cells);
    }

    #[test]
    fn an_idle_row_says_so() {
        assert_eq!(plain().row(&from_latencies(&[])), format!("{:71} # no I/O", ""));
    }

    #[test]
    fn a_row_is_as_wide_as_its_scale_and_text_has_no_codes() {
        let wide = heatmap(true, true, None);
        for heatmap in [&plain(), &wide] {
            let row = heatmap.row(&from_latencies(&[(20_000_000_000, 1)]));
            assert_eq!(row.find('@'), heatmap.scale().find("|10s"));
            assert!(!(row + &heatmap.legend()).contains('\x1b'));
        }
        assert_eq!((plain().scale().len(), wide.scale().len()), (74, 104));
        let coloured = Heatmap { text: false, ..plain() };
        assert!(coloured.row(&from_latencies(&[(20_000, 1)])).contains("\x1b[48;5;226m \x1b[0m"));
        assert_eq!(coloured.legend().matches("\x1b[0m").count(), SYMBOLS.len());
    }

    #[test]
    fn a_terminal_is_filled_by_what_there_is_and_never_wrapped() {
        let latencies =
            |ns: &[u64]| from_latencies(&ns.iter().map(|ns| (*ns, 1)).collect::<Vec<_>>());
        for columns in [60, 80, 120, 180] {
            let mut heatmap = heatmap(false, true, Some(columns));
            let width = |heatmap: &Heatmap, new: &Histogram| {
                let row = heatmap.row(new).len().max(heatmap.scale().len());
                assert!(row <= columns, "{row} of {columns}");
                row
            };
            assert!(heatmap.legend().lines().all(|line| line.len() <= 80));
            let none = latencies(&[]);
            assert!(!heatmap.fit(&none) && width(&heatmap, &none) > columns * 3 / 4);
            // One latency: its decade, and the two above.
            let few = latencies(&[143_000]);
            assert!(heatmap.fit(&few) && width(&heatmap, &few) > columns * 3 / 4);
            assert_eq!(heatmap.shown, 5..8);
            assert!(!heatmap.fit(&few), "nothing new");
            // Two more decades above, and one below: nothing that was shown goes.
            let more = latencies(&[11_000, 2_000_000_000]);
            assert!(heatmap.fit(&more) && width(&heatmap, &more) > columns * 3 / 4);
            assert_eq!(heatmap.shown, 4..10);
            assert!(!heatmap.fit(&latencies(&[1_000_000])));
        }
    }

    #[test]
    fn no_column_of_a_wide_terminal_is_always_empty() {
        let mut heatmap = heatmap(false, true, Some(500));
        // Every latency from 1 to 2 ms.
        let all: Vec<_> = (1_000_000..2_000_000).step_by(1000).map(|ns| (ns, 1)).collect();
        let all = from_latencies(&all);
        assert!(heatmap.fit(&all));
        let row = heatmap.row(&all);
        let drawn = row.split(" #").next().unwrap().trim();
        assert!(drawn.len() > 10 && !drawn.contains(' '), "{row:?}");
    }

    #[test]
    fn what_lies_beyond_every_scale_is_in_the_outermost_columns() {
        let mut heatmap = heatmap(false, true, Some(80));
        let beyond = from_latencies(&[(500, 1), (90_000_000_000, 1)]);
        assert!(!heatmap.fit(&beyond), "it is the whole scale, as before");
        let row = heatmap.row(&beyond);
        assert_eq!((row.find('@'), row.rfind('@')), (Some(0), heatmap.scale().find("|10s")));
    }
}
