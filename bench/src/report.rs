//! Figures, tables, the chart, and the figures that READMEs and the pages of docs/ quote.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::plan::{BenchOutcome, GROWTH, Load, Measured, Question, Run, questions};

/// The results, for people, relative to the workspace's root.
pub const RESULTS: &str = "bench/RESULTS.md";
/// A picture of them.
pub const CHART: &str = "bench/added.svg";
/// The results, for the next run, which measures another kernel or other rows.
const STORE: &str = "bench/results.json";
/// Instructions a second of a CPU: 3 GHz, and one in each cycle.
const SPEED: f64 = 3e9;
/// RESULTS.md: the tables stand between these lines, other text around them.
const MARKS: (&str, &str) =
    ("<!-- written by: cargo vm bench -->\n", "<!-- end of what it wrote -->");
/// Where another tracer is cheaper, and nobody has looked into it.
const NO_REASON: &str = "no reason is known.";
/// Runs that differ by more than this are noted.
const AGREE: f64 = 0.005;

/// What was measured, against what a read costs alone.
pub struct Results<'a> {
    outcomes: &'a [BenchOutcome],
    native: bool,
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let n = values.len();
    if n == 0 { f64::NAN } else { (values[(n - 1) / 2] + values[n / 2]) / 2.0 }
}

/// What a read takes, without the tracer's own process; natively, all the time that passes.
fn thread(measured: &Measured, native: bool) -> f64 {
    let own = |run: &Run| run.thread.filter(|_| !native).unwrap_or(run.elapsed);
    median(measured.runs.iter().map(own))
}

fn elapsed(measured: &Measured) -> f64 {
    median(measured.runs.iter().map(|run| run.elapsed + run.later))
}

/// How far the runs lie apart, as a part of the shortest.
fn spread(measured: &Measured, native: bool) -> f64 {
    let own = |run: &Run| run.thread.filter(|_| !native).unwrap_or(run.elapsed);
    let (low, high) = measured
        .runs
        .iter()
        .map(own)
        .fold((f64::MAX, 0.0_f64), |(low, high), run| (low.min(run), high.max(run)));
    (high - low) / low
}

/// Digits in groups of three. Four significant digits are what repeats.
fn grouped(value: f64) -> String {
    let mut rest = value.abs().round() as u64;
    rest = match rest {
        0..10_000 => rest,
        10_000..100_000 => rest.div_ceil(10) * 10,
        _ => rest / 1000 * 1000,
    };
    let mut text = String::new();
    loop {
        let (high, low) = (rest / 1000, rest % 1000);
        let sign = if value < -0.5 { "-" } else { "" };
        text = match (high, text.is_empty()) {
            (0, true) => return format!("{sign}{low}"),
            (0, false) => return format!("{sign}{low},{text}"),
            (_, true) => format!("{low:03}"),
            (_, false) => format!("{low:03},{text}"),
        };
        rest = high;
    }
}

impl<'a> Results<'a> {
    /// Fails where the first row is not `nothing`.
    pub fn new(outcomes: &'a [BenchOutcome], native: bool) -> Result<Results<'a>> {
        let first = outcomes.first().filter(|outcome| outcome.name == "nothing");
        first.context("the first row is not `nothing`: there is nothing to compare with")?;
        Ok(Results { outcomes, native })
    }

    /// The names of the rows.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.outcomes.iter().map(|outcome| outcome.name.as_str())
    }

    fn measured(&self, name: &str, load: Load) -> Option<&'a Measured> {
        let row = self.outcomes.iter().find(|outcome| outcome.name == name)?;
        row.measured.iter().find(|measured| measured.load == load)
    }

    /// What a row adds to a read, beside the tracer's own process.
    pub fn added(&self, name: &str, load: Load) -> Option<f64> {
        let base = thread(self.measured("nothing", load)?, self.native);
        Some(thread(self.measured(name, load)?, self.native) - base)
    }

    /// What a row adds to a read, the tracer's own process included.
    fn whole(&self, name: &str, load: Load) -> Option<f64> {
        let base = elapsed(self.measured("nothing", load)?);
        Some(elapsed(self.measured(name, load)?) - base)
    }

    /// Whether the runs agree so far that their figure can be a budget.
    pub fn repeats(&self, name: &str, load: Load) -> bool {
        self.measured(name, load)
            .is_some_and(|measured| spread(measured, self.native) < 2.0 * AGREE)
    }

    fn base(&self, load: Load) -> Option<f64> {
        self.measured("nothing", load).map(|measured| thread(measured, self.native))
    }

    /// The tables, as Markdown.
    pub fn tables(&self) -> String {
        let mut text = String::new();
        self.write_tables(&mut text, &[]).unwrap_or_default(); // a String takes everything
        text
    }

    /// `others`: what was measured on other kernels.
    fn write_tables(&self, text: &mut String, others: &[(&str, Results)]) -> std::fmt::Result {
        if let Some(base) = self.base(Load::Direct) {
            self.write_direct(text, base, others)?;
        }
        if let (Some(small), Some(large)) = (self.base(Load::Cached4k), self.base(Load::Cached1m)) {
            self.write_cached(text, small, large)?;
        }
        self.write_starts(text)?;
        self.write_notes(text)
    }

    fn unit(&self) -> &'static str {
        if self.native { "ns (median; spread of the runs)" } else { "instructions" }
    }

    /// What a row adds to a read; natively, also how far its runs lie apart.
    fn cell(&self, name: &str, load: Load) -> String {
        match (self.added(name, load), self.measured(name, load)) {
            (Some(added), Some(measured)) if self.native => {
                format!("{} ({:.1} %)", grouped(added), 100.0 * spread(measured, true))
            }
            (Some(added), _) => grouped(added),
            _ => "–".into(),
        }
    }

    /// Direct reads: a column for each kernel.
    fn write_direct(
        &self,
        text: &mut String,
        base: f64,
        others: &[(&str, Results)],
    ) -> std::fmt::Result {
        let unit = self.unit();
        write!(text, "A direct read of 4 KiB alone: {} {unit}", grouped(base))?;
        for (kernel, other) in others {
            let base = other.base(Load::Direct).map_or("–".into(), grouped);
            write!(text, ", on {kernel} {base}")?;
        }
        let columns: String = others.iter().map(|(kernel, _)| format!(" {kernel} |")).collect();
        let lines = "---:|".repeat(others.len());
        writeln!(text, ".\n\n| direct 4 KiB reads | added | with its process |{columns}")?;
        writeln!(text, "|---|---:|---:|{lines}")?;
        for row in &self.outcomes[1..] {
            let Some(whole) = self.whole(&row.name, Load::Direct) else { continue };
            let (added, whole) = (self.cell(&row.name, Load::Direct), grouped(whole));
            write!(text, "| {} | {added} | {whole} |", row.name)?;
            for (_, other) in others {
                write!(text, " {} |", shown(other.added(&row.name, Load::Direct)))?;
            }
            writeln!(text)?;
        }
        Ok(())
    }

    /// Reads from the page cache; `small` and `large`: what one of each size takes alone.
    fn write_cached(&self, text: &mut String, small: f64, large: f64) -> std::fmt::Result {
        let (small, large, unit) = (grouped(small), grouped(large), self.unit());
        writeln!(
            text,
            "\nA read from the page cache alone: {small} {unit} for 4 KiB, {large} for 1 MiB.\n"
        )?;
        writeln!(text, "| reads from the page cache | 4 KiB | 1 MiB |\n|---|---:|---:|")?;
        for row in &self.outcomes[1..] {
            if row.measured.iter().any(|measured| measured.load != Load::Direct) {
                let cells = [Load::Cached4k, Load::Cached1m].map(|load| self.cell(&row.name, load));
                writeln!(text, "| {} | {} | {} |", row.name, cells[0], cells[1])?;
            }
        }
        Ok(())
    }

    /// How each tracer started and ended, and its programs in the kernel.
    fn write_starts(&self, text: &mut String) -> std::fmt::Result {
        writeln!(
            text,
            "\n| start and programs | attached ms | CPU ms | memory KiB | exit ms | verified | bytes |\n\
             |---|---:|---:|---:|---:|---:|---:|"
        )?;
        for row in &self.outcomes[1..] {
            let Some(started) = &row.started else { continue };
            let verified: u64 = started.programs.iter().map(|p| u64::from(p.verified)).sum();
            let bytes: usize = started.programs.iter().map(|program| program.jited).sum();
            writeln!(
                text,
                "| {} | {:.0} | {:.0} | {} | {:.0} | {} | {} |",
                row.name,
                started.attach_ms,
                started.attach_cpu_ms,
                started.attached_kib,
                started.exit_ms,
                verified,
                bytes
            )?;
        }
        Ok(())
    }

    fn write_notes(&self, text: &mut String) -> std::fmt::Result {
        let mut notes = Vec::new();
        for row in self.outcomes {
            notes.extend(row.note.as_ref().map(|note| format!("- {}: {note}", row.name)));
            for measured in row.measured.iter().filter(|_| !self.native) {
                let spread = spread(measured, false);
                if spread > AGREE {
                    let load = match measured.load {
                        Load::Direct => "direct reads",
                        Load::Cached4k => "cached reads of 4 KiB",
                        Load::Cached1m => "cached reads of 1 MiB",
                        Load::Disks4 => "4 disks",
                        Load::Disks16 => "16 disks",
                        Load::Threads16 => "16 threads",
                        Load::Threads64 => "64 threads",
                    };
                    notes.push(format!(
                        "- {}: the runs of {load} differ by {:.1} %",
                        row.name,
                        100.0 * spread
                    ));
                }
            }
        }
        if !notes.is_empty() {
            writeln!(text, "\nNotes:\n\n{}", notes.join("\n"))?;
        }
        Ok(())
    }

    /// A bar for what each tracer adds to a read, question by question.
    fn chart(&self, kernel: &str, questions: &[Question]) -> String {
        let mut bars = Vec::new();
        for question in questions {
            bars.push((question.name.as_str(), None));
            bars.extend(
                question
                    .rows()
                    .filter_map(|name| Some((name, Some(self.whole(name, question.load())?)))),
            );
        }
        let most = bars.iter().filter_map(|(_, added)| *added).fold(1.0, f64::max);
        let height = 24 * bars.len() + 44;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"860\" height=\"{height}\" font-family=\"sans-serif\" \
             font-size=\"13\">\n<rect width=\"860\" height=\"{height}\" fill=\"#fff\"/>\n\
             <text x=\"10\" y=\"22\" font-weight=\"bold\">Instructions added to a read of 4 KiB on {kernel}, \
             question by question</text>\n"
        );
        for (n, (name, added)) in bars.iter().enumerate() {
            let (y, text) = (24 * n + 36, 24 * n + 50);
            let Some(added) = added else {
                svg += &format!("<text x=\"10\" y=\"{text}\" font-weight=\"bold\">{name}</text>\n");
                continue;
            };
            let width = (added.max(0.0) / most * 440.0).round();
            let ours = questions.iter().any(|question| question.ours == *name);
            let color = if ours { "#2b6cb0" } else { "#a0aec0" };
            svg += &format!(
                "<text x=\"290\" y=\"{text}\" text-anchor=\"end\">{name}</text>\
                 <rect x=\"300\" y=\"{y}\" width=\"{width}\" height=\"18\" fill=\"{color}\"/>\
                 <text x=\"{}\" y=\"{text}\">{}</text>\n",
                width + 306.0,
                grouped(*added)
            );
        }
        svg + "</svg>\n"
    }
}

fn shown(figure: Option<f64>) -> String {
    figure.map_or("–".into(), grouped)
}

/// What was measured on a kernel.
#[derive(Serialize, Deserialize)]
pub struct Measurement {
    /// The kernel's release, and how many reads a run has. Of rows that were measured elsewhere, both are named.
    pub on: String,
    /// The packages of the tracers that are not ours, and their versions, as well.
    pub versions: BTreeMap<String, String>,
    /// The rows.
    pub outcomes: Vec<BenchOutcome>,
}

/// What was measured on all kernels, by kernel line.
#[derive(Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Store(BTreeMap<String, Measurement>);

/// What a run was made on, beside an earlier one whose rows may be left.
fn both(old: &str, new: &str) -> String {
    match old.split(" and ").any(|old| old == new) {
        true => old.to_owned(),
        false => format!("{old} and {new}"),
    }
}

/// Moves the rows of a run onto an earlier one, whose reads alone took a few instructions more or less.
fn onto(old: &[BenchOutcome], new: &mut [BenchOutcome]) {
    let alone = |rows: &[BenchOutcome]| rows.first().map_or(Vec::new(), |row| row.measured.clone());
    let (from, to) = (alone(new), alone(old));
    for measured in new.iter_mut().flat_map(|row| &mut row.measured) {
        let of = |all: &[Measured]| all.iter().find(|m| m.load == measured.load).cloned();
        let (Some(from), Some(to)) = (of(&from), of(&to)) else { continue };
        for run in &mut measured.runs {
            run.elapsed += elapsed(&to) - elapsed(&from);
            run.thread = run.thread.map(|ns| ns + thread(&to, false) - thread(&from, false));
        }
    }
}

impl Store {
    /// Takes what a run has measured so far into the files: one that breaks off keeps its rows. `default`:
    /// the kernel whose programs have budgets; `all`: rows that the run has not measured are gone.
    pub fn keep(
        root: &Path,
        default: &str,
        kernel: &str,
        new: Measurement,
        all: bool,
    ) -> Result<()> {
        let mut store = Store::read(root)?;
        store.add(kernel, new, all);
        store.write(root, default)
    }

    /// As the last run has left it.
    fn read(root: &Path) -> Result<Store> {
        let text = fs::read_to_string(root.join(STORE)).context(STORE)?;
        serde_json::from_str(&text).context(STORE)
    }

    fn add(&mut self, kernel: &str, mut new: Measurement, all: bool) {
        let Some(old) = self.0.remove(kernel) else {
            self.0.insert(kernel.to_owned(), new);
            return;
        };
        let alike = (&old.on, &old.versions) == (&new.on, &new.versions);
        if !all {
            onto(&old.outcomes, &mut new.outcomes);
            new.on = both(&old.on, &new.on);
            for (package, version) in &mut new.versions {
                if let Some(old) = old.versions.get(package) {
                    *version = both(old, version);
                }
            }
        }
        let order: Vec<String> = old.outcomes.iter().map(|row| row.name.clone()).collect();
        let mut left = Vec::new();
        for row in old.outcomes {
            match new.outcomes.iter_mut().find(|outcome| outcome.name == row.name) {
                Some(outcome) => {
                    let is_new = |m: &Measured| outcome.measured.iter().any(|n| n.load == m.load);
                    let (_, kept): (Vec<_>, Vec<_>) = row.measured.into_iter().partition(is_new);
                    // How the cost grows is a run of its own: what it found elsewhere is gone with all else.
                    if !all || alike {
                        outcome.measured.extend(kept);
                    }
                    outcome.started = outcome.started.take().or(row.started);
                }
                None if all => {}
                None => left.push(row),
            }
        }
        new.outcomes.extend(left);
        if !all {
            let place = |row: &BenchOutcome| order.iter().position(|name| *name == row.name);
            new.outcomes.sort_by_key(|row| place(row).unwrap_or(order.len()));
        }
        new.versions = old.versions.into_iter().chain(new.versions).collect();
        self.0.insert(kernel.to_owned(), new);
    }

    /// Writes it, the report and the picture.
    fn write(&self, root: &Path, default: &str) -> Result<()> {
        let file = root.join(RESULTS);
        let text = fs::read_to_string(&file).context(RESULTS)?;
        let (before, rest) =
            text.split_once(MARKS.0).context("RESULTS.md has no place for the tables")?;
        let (_, after) = rest.split_once(MARKS.1).context("RESULTS.md has no end of the tables")?;
        fs::write(root.join(STORE), workshop::json::to_lines(self)?).context(STORE)?;
        let (tables, chart) = self.report(default)?;
        fs::write(&file, [before, MARKS.0, "\n", &tables, "\n", MARKS.1, after].concat())?;
        fs::write(root.join(CHART), chart).context(CHART)
    }

    /// The tables and the picture.
    fn report(&self, default: &str) -> Result<(String, String)> {
        let questions = questions()?;
        let kernels = self.0.iter().map(|(name, measurement)| {
            Ok((name.as_str(), Results::new(&measurement.outcomes, false)?))
        });
        let kernels: Vec<(&str, Results)> = kernels.collect::<Result<_>>()?;
        let (newest, last) = kernels.last().context("nothing was measured")?;
        let mut text = String::new();
        self.write_versions(&mut text)?;
        write_questions(&mut text, &questions, &kernels)?;
        write_growth(&mut text, newest, last)?;
        write_cpus(&mut text, newest, last)?;
        let chart = last.chart(newest, &questions);
        write_programs(&mut text, kernels, default)?;
        Ok((text, chart))
    }

    /// On what each kernel's figures were measured.
    fn write_versions(&self, text: &mut String) -> std::fmt::Result {
        for (kernel, measurement) in &self.0 {
            let of = |(package, version)| format!(", {package} {version}");
            let versions: String = measurement.versions.iter().map(of).collect();
            writeln!(text, "- {kernel}: {}{versions}", measurement.on)?;
        }
        Ok(())
    }
}

/// A table for each question, with a column for each kernel.
fn write_questions(
    text: &mut String,
    questions: &[Question],
    kernels: &[(&str, Results)],
) -> std::fmt::Result {
    let head: String = kernels.iter().map(|(kernel, _)| format!(" {kernel} |")).collect();
    let line = "---:|".repeat(kernels.len());
    writeln!(text, "\n### Question by question")?;
    for question in questions {
        writeln!(text, "\n| {} |{head}\n|---|{line}", question.name)?;
        for name in question.rows() {
            write!(text, "| {name} |")?;
            for (_, results) in kernels {
                write!(text, " {} |", shown(results.whole(name, question.load())))?;
            }
            writeln!(text)?;
        }
        let ours = |results: &Results| results.whole(&question.ours, question.load());
        let is_dearer = kernels.iter().any(|(_, results)| {
            let others = question.rows().filter_map(|n| results.whole(n, question.load()));
            ours(results) > others.reduce(f64::min)
        });
        if is_dearer {
            let why = question.why.as_deref().unwrap_or(NO_REASON);
            writeln!(text, "\nWhy ours is not the cheapest:\n{why}")?;
        }
    }
    Ok(())
}

fn write_growth(text: &mut String, kernel: &str, results: &Results) -> std::fmt::Result {
    writeln!(text, "\n### How the cost grows, on {kernel}\n")?;
    writeln!(text, "| disks and threads | 1 | 4 disks | 16 disks | 16 threads | 64 threads |")?;
    writeln!(text, "|---|---:|---:|---:|---:|---:|")?;
    for name in GROWTH {
        let cells = Load::GROWTH.map(|load| shown(results.whole(name, load)));
        writeln!(text, "| {name} | {} |", cells.join(" | "))?;
    }
    Ok(())
}

/// How many CPUs a tracer takes on a busy machine.
fn write_cpus(text: &mut String, kernel: &str, results: &Results) -> std::fmt::Result {
    writeln!(text, "\n### At a million reads a second, on {kernel}\n")?;
    writeln!(text, "| by arithmetic | % of a read | CPUs at 1 million | CPUs at 5 million |")?;
    writeln!(text, "|---|---:|---:|---:|")?;
    for name in GROWTH {
        if let (Some(whole), Some(base)) =
            (results.whole(name, Load::Direct), results.base(Load::Direct))
        {
            let cpus = [1e6, 5e6].map(|reads| format!("{:.2}", whole * reads / SPEED));
            writeln!(text, "| {name} | {:.0} | {} |", 100.0 * whole / base, cpus.join(" | "))?;
        }
    }
    Ok(())
}

/// All rows: of the default kernel, with a column for each other one.
fn write_programs(text: &mut String, kernels: Vec<(&str, Results)>, default: &str) -> Result<()> {
    writeln!(text, "\n### All programs\n")?;
    let (of_default, others): (Vec<_>, Vec<_>) =
        kernels.into_iter().partition(|(kernel, _)| *kernel == default);
    let (_, results) = of_default.first().context("the default kernel was not measured")?;
    results.write_tables(text, &others)?;
    for (kernel, other) in &others {
        let mut notes = String::new();
        other.write_notes(&mut notes)?;
        *text += &notes.replace("Notes:", &format!("Notes of {kernel}:"));
    }
    Ok(())
}

/// A figure of the tables: row and column.
#[cfg(test)]
fn figure<'t>(results: &'t str, row: &str, column: &str) -> Option<&'t str> {
    let cells = |line: &'t str| line.split('|').map(str::trim).collect::<Vec<_>>();
    let mut head: Vec<&str> = Vec::new();
    for line in results.lines() {
        let line_cells = cells(line);
        if !line.starts_with('|') {
            head.clear();
        } else if head.is_empty() {
            head = line_cells;
        } else if line_cells[1] == row
            && let Some(n) = head.iter().skip(2).position(|name| *name == column)
        {
            return line_cells.get(n + 2).copied();
        }
    }
    None
}

/// The figures of a README that are not those of RESULTS.md. Such a figure stands right before
/// `<!-- bench: ROW, COLUMN -->`.
#[cfg(test)]
fn wrong_figures(readme: &str, results: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut rest = readme;
    while let Some((before, mark)) = rest.split_once("<!-- bench: ") {
        let (mark, after) = mark.split_once("-->").unwrap_or((mark, ""));
        rest = after;
        let (row, column) = mark.trim().rsplit_once(", ").unwrap_or((mark.trim(), "added"));
        let before = before.trim_end();
        let digits = before.rfind(|c: char| !c.is_ascii_digit() && c != ',' && c != '.');
        let quoted = &before
            [digits.map_or(0, |at| at + before[at..].chars().next().map_or(1, char::len_utf8))..];
        match figure(results, row, column) {
            Some(figure) if figure == quoted => {}
            Some(figure) => wrong.push(format!("{row}, {column}: {quoted}, measured: {figure}")),
            None => wrong.push(format!("{row}, {column}: RESULTS.md has no such figure")),
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::outcomes;

    #[test]
    fn numbers_in_groups() {
        let texts = [0.2, 999.0, 1000.0, 1705.4, 12_345.0, 1_125_662.0, -20.0].map(grouped);
        assert_eq!(texts, ["0", "999", "1,000", "1,705", "12,350", "1,125,000", "-20"]);
    }

    #[test]
    fn tables_hold_what_readmes_quote() {
        let outcomes = outcomes(1704.0, 12_152);
        let results = Results::new(&outcomes, false).unwrap();
        let text = results.tables();
        assert_eq!(figure(&text, "stage04 quiet", "added"), Some("1,704"));
        assert_eq!(figure(&text, "stage04 quiet", "memory KiB"), Some("12152"));
        let readme = "It adds 1,704<!-- bench: stage04 quiet --> and takes\n12152 <!-- bench: stage04 quiet, memory KiB -->";
        assert!(wrong_figures(readme, &text).is_empty());
        let wrong = wrong_figures(&readme.replace("1,704", "–1,604"), &text);
        assert_eq!(wrong, ["stage04 quiet, added: 1,604, measured: 1,704"]);
        assert_eq!(wrong_figures("5<!-- bench: stage99 -->", &text).len(), 1);
        let questions = questions().unwrap();
        assert!(results.chart("6.1", &questions).contains(&questions[0].name));
    }

    #[test]
    fn ours_is_the_cheapest_or_the_report_says_why() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let (tables, _) = Store::read(&root).unwrap().report("6.1").unwrap();
        assert!(!tables.contains(NO_REASON), "{tables}");
    }

    #[test]
    fn runs_that_differ_are_noted() {
        let mut outcomes = outcomes(1704.0, 1);
        outcomes[1].measured[0].runs[1].thread = Some(7000.0);
        let text = Results::new(&outcomes, false).unwrap().tables();
        assert!(text.contains("stage04 quiet: the runs of direct reads differ by 4."), "{text}");
    }

    #[test]
    fn what_a_tracer_does_after_the_last_read_counts() {
        let mut outcomes = outcomes(1704.0, 1);
        outcomes[1].measured[0].runs.iter_mut().for_each(|run| run.later = 100.0);
        let results = Results::new(&outcomes, false).unwrap();
        assert_eq!(results.added("stage04 quiet", Load::Direct), Some(1704.0));
        assert_eq!(results.whole("stage04 quiet", Load::Direct), Some(1804.0));
    }

    #[test]
    fn rows_of_a_later_run_are_compared_with_its_own_reads() {
        let of = |on: &str, outcomes| Measurement {
            on: on.into(),
            versions: BTreeMap::from([("a".into(), on.into())]),
            outcomes,
        };
        let (old, mut new) = (outcomes(1704.0, 1), outcomes(2000.0, 1));
        let runs = new.iter_mut().flat_map(|row| &mut row.measured[0].runs);
        runs.for_each(|run| {
            run.elapsed += 8.0;
            run.thread = run.thread.map(|ns| ns + 8.0);
        });
        new[1].name = "stage05".into();
        let mut store = Store(BTreeMap::from([("6.1".to_owned(), of("6.1.0", old))]));
        store.add("6.1", of("6.1.1", new.clone()), false);
        store.add("6.1", of("6.1.1", new), false);
        let Measurement { on, versions, .. } = &store.0["6.1"];
        assert_eq!([on, &versions["a"]], ["6.1.0 and 6.1.1"; 2]);
        let results = Results::new(&store.0["6.1"].outcomes, false).unwrap();
        for (row, added) in [("stage04 quiet", 1704.0), ("stage05", 2000.0)] {
            assert_eq!(results.added(row, Load::Direct), Some(added));
            assert_eq!(results.whole(row, Load::Direct), Some(added));
        }
        let names: Vec<_> = store.0["6.1"].outcomes.iter().map(|row| &*row.name).collect();
        assert_eq!(names, ["nothing", "stage04 quiet", "stage05"]);

        // A run of all rows, which has no load of another one; where it was made elsewhere, that goes.
        let mut other = outcomes(1704.0, 1);
        other.iter_mut().for_each(|row| row.measured[0].load = Load::Cached4k);
        for (on, loads) in [("6.1.1", 2), ("6.1.2", 1)] {
            store.add("6.1", of("6.1.1", outcomes(1704.0, 1)), true);
            store.add("6.1", of("6.1.1", other.clone()), false);
            store.add("6.1", of(on, outcomes(1704.0, 1)), true);
            let Measurement { on: named, outcomes, .. } = &store.0["6.1"];
            assert_eq!((&**named, outcomes[1].measured.len()), (on, loads));
        }
    }

    #[test]
    fn figures_in_readmes_are_those_of_the_bench() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
        let results = fs::read_to_string(root.join(RESULTS)).unwrap();
        let hidden = |name: &str| name.starts_with('.') || name == "target";
        let files = walkdir::WalkDir::new(&root).into_iter();
        let files =
            files.filter_entry(|e| e.depth() == 0 || !hidden(&e.file_name().to_string_lossy()));
        let mut wrong = Vec::new();
        let mut quoted = 0;
        for entry in files.map(Result::unwrap) {
            let path = entry.path();
            let is_page = path.parent() == Some(root.join("docs").as_path())
                && path.extension().is_some_and(|extension| extension == "md");
            if !is_page && entry.file_name() != "README.md" {
                continue;
            }
            let text = fs::read_to_string(path).unwrap();
            let place = path.display();
            quoted += text.matches("<!-- bench: ").count();
            wrong.extend(
                wrong_figures(&text, &results).iter().map(|line| format!("{place}: {line}")),
            );
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(quoted > 0, "nobody quotes a figure");
    }
}
