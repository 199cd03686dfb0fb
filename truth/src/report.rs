//! The table of all cells: as JSON, as Markdown, and as a picture.

use std::{collections::BTreeMap, fmt::Write};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::picture::Picture;
use crate::{Case, Cell, Expected, Family, Question, Tool, Verdict, cases, tools};

/// Every cell that was judged, by kernel line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TruthReport {
    /// The cells of each line.
    pub kernels: BTreeMap<String, Vec<Cell>>,
    /// The release of each line on which they were judged.
    pub releases: BTreeMap<String, String>,
    /// The version of each tool that was judged.
    pub versions: BTreeMap<String, String>,
}

/// How often a cell is judged at most.
pub const RUNS: u32 = 3;

/// The families of others, as headings.
const OTHERS: [(Family, &str); 5] = [
    (Family::LibbpfTools, "libbpf-tools (C, libbpf)"),
    (Family::Bpftrace, "bpftrace's tools"),
    (Family::Bcc, "bcc's tools (Python)"),
    (Family::Counters, "tools that read counters"),
    (Family::Events, "blktrace and perf"),
];

impl TruthReport {
    /// Takes a cell in, in the place of an older one; one that was not judged replaces none.
    pub fn add(&mut self, kernel: &str, cell: Cell) {
        let cells = self.kernels.entry(kernel.to_owned()).or_default();
        let is_old = |old: &Cell| (&old.case, &old.tool) == (&cell.case, &cell.tool);
        if matches!(cell.verdict, Verdict::NotRun { .. }) && cells.iter().any(is_old) {
            return;
        }
        cells.retain(|old| (&old.case, &old.tool) != (&cell.case, &cell.tool));
        cells.push(cell);
    }

    /// Notes what the cells are judged on. Those of another release or another version are dropped:
    /// the page never mixes them.
    pub fn judged_on(&mut self, kernel: &str, release: &str, tool: &Tool, version: Option<&str>) {
        let before = self.releases.insert(kernel.to_owned(), release.to_owned());
        if before.is_some_and(|before| before != release) {
            self.kernels.remove(kernel);
        }
        let Some(version) = version else { return };
        let before = self.versions.insert(tool.name.clone(), version.to_owned());
        if before.is_some_and(|before| before != version) {
            for cells in self.kernels.values_mut() {
                cells.retain(|cell| cell.tool != tool.name);
            }
        }
    }

    /// Whether a cell has its verdict: of ours, the worst of so many runs; of others, the first that
    /// is right, or else the best of so many.
    pub fn is_known(&self, kernel: &str, case: &Case, tool: &Tool, runs: u32) -> bool {
        self.cell(kernel, case, tool).is_some_and(|cell| match cell.verdict {
            Verdict::NotRun { .. } => false,
            Verdict::Refused { .. } | Verdict::Broke { .. } => true,
            Verdict::Right if !tool.is_strict() => cell.exit.is_some(),
            _ => cell.runs >= runs && cell.exit.is_some(),
        })
    }

    /// The newest of its kernel lines.
    pub fn newest(&self) -> Option<&str> {
        let version = |line: &&String| -> Vec<u32> {
            line.split('.').map(|part| part.parse().unwrap_or(0)).collect()
        };
        self.kernels.keys().max_by_key(version).map(String::as_str)
    }

    /// The cells of our tools that are wrong: a kernel, a case, a tool each.
    pub fn wrong_of_ours(&self) -> Result<Vec<String>> {
        let ours = tools_of(Family::Ours)?;
        let mut wrong = Vec::new();
        for (kernel, cells) in &self.kernels {
            for cell in cells.iter().filter(|cell| ours.iter().any(|tool| tool.name == cell.tool)) {
                if cell.verdict.rank() > (2, u64::MAX) {
                    wrong.push(format!("{kernel}, {}, {}: {}", cell.case, cell.tool, text(cell)));
                }
            }
        }
        Ok(wrong)
    }

    /// What was judged of a case and a tool, a line for each kernel.
    pub fn cells<'a>(&'a self, case: &'a str, tool: &'a str) -> impl Iterator<Item = String> + 'a {
        let of = move |cell: &&Cell| cell.case == case && cell.tool == tool;
        self.kernels.iter().flat_map(move |(kernel, cells)| {
            cells.iter().filter(of).map(move |cell| format!("{kernel}: {}", text(cell)))
        })
    }

    /// The cell of a case and a tool on a kernel line.
    pub fn cell(&self, kernel: &str, case: &Case, tool: &Tool) -> Option<&Cell> {
        let cells = self.kernels.get(kernel)?;
        cells.iter().find(|cell| cell.case == case.name && cell.tool == tool.name)
    }

    /// The worst cell of those of our tools that were run.
    fn ours(&self, kernel: &str, case: &Case, ours: &[Tool]) -> Option<&Cell> {
        let asked = ours.iter().filter(|tool| tool.is_asked(case));
        asked
            .filter_map(|tool| self.cell(kernel, case, tool))
            .max_by_key(|cell| cell.verdict.rank())
    }

    /// That, in words; how often it was judged, if not often.
    fn shown_ours(&self, kernel: &str, case: &Case, ours: &[Tool]) -> String {
        let asked = ours.iter().filter(|tool| tool.is_asked(case));
        let runs = asked.filter_map(|tool| self.cell(kernel, case, tool)).map(|cell| cell.runs);
        let few = runs.min().filter(|runs| *runs < RUNS).map_or(String::new(), in_runs);
        self.ours(kernel, case, ours).map_or("not run".to_owned(), text) + &few
    }

    /// A table for each kernel and family, and the commands.
    pub fn markdown(&self) -> Result<String> {
        let (cases, tools, ours) = (cases()?, tools()?, tools_of(Family::Ours)?);
        let mut text = String::new();
        for kernel in self.kernels.keys() {
            let release = self.releases.get(kernel).map_or(String::new(), |of| format!(" ({of})"));
            writeln!(text, "\n## Kernel {kernel}{release}")?;
            for (family, heading) in OTHERS {
                writeln!(text, "\n### {heading}")?;
                self.family(&mut text, kernel, &tools_of(family)?)?;
            }
            let is_alone = |case: &&Case| {
                !tools.iter().any(|tool| tool.family != Family::Ours && tool.is_asked(case))
            };
            writeln!(text, "\n### Asked of our tools only\n\n| case | ours |\n|---|---|")?;
            for case in cases.iter().filter(is_alone) {
                let ours = self.shown_ours(kernel, case, &ours);
                writeln!(text, "| {} | {ours} |", link(&case.name))?;
            }
        }
        text.push_str("\n## The cases\n");
        for Case { name, load, judge, .. } in &cases {
            writeln!(text, "\n### {name}\n\n- Load: {load}\n- Judge: {judge}")?;
            writeln!(text, "- A cell: `cargo truth --reproduce \"{name}/TOOL\"`")?;
        }
        text.push_str("\n## The tools\n");
        for tool in &tools {
            writeln!(text, "\n### {}\n", tool.name)?;
            let words = tool.argv.iter().flat_map(|word| word.split_whitespace());
            let command = format!("- Command: `{}`", words.collect::<Vec<_>>().join(" "));
            let width = textwrap::Options::new(100).subsequent_indent("  ").break_words(false);
            let width = width.word_splitter(textwrap::WordSplitter::NoHyphenation);
            writeln!(text, "{}", textwrap::fill(&command, width))?;
            if let (Some(package), Some(rootfs)) = (&tool.package, &tool.rootfs) {
                let version = self.versions.get(&tool.name).map_or("", |version| version.as_str());
                let suite = if rootfs == "bookworm" { "12" } else { rootfs };
                writeln!(text, "- Package: {package} {version}, of Debian {suite}")?;
            }
        }
        Ok(text)
    }

    /// The table of a family, and below it what did not run, and why.
    fn family(&self, text: &mut String, kernel: &str, tools: &[Tool]) -> Result<()> {
        let (cases, ours) = (cases()?, tools_of(Family::Ours)?);
        let names: Vec<String> = tools.iter().map(|tool| link(&tool.name)).collect();
        writeln!(text, "\n| case | ours | {} |", names.join(" | "))?;
        writeln!(text, "|---|---|{}", "---|".repeat(tools.len()))?;
        let (mut not_run, mut refusals) = (Vec::new(), BTreeMap::new());
        for case in &cases {
            let asked = tools.iter().filter(|tool| tool.is_asked(case));
            let cells: Vec<&Cell> =
                asked.clone().filter_map(|tool| self.cell(kernel, case, tool)).collect();
            if cells.is_empty() {
                not_run.extend(asked.clone().next().map(|_| case.name.as_str()));
                continue;
            }
            for cell in cells {
                if let Verdict::Refused { said } = &cell.verdict {
                    refusals.entry(cell.tool.as_str()).or_insert(said);
                }
            }
            let mut row = vec![link(&case.name), self.shown_ours(kernel, case, &ours)];
            row.extend(
                tools.iter().map(|tool| shown(tool.is_asked(case), self.cell(kernel, case, tool))),
            );
            writeln!(text, "| {} |", row.join(" | "))?;
        }
        for (tool, said) in refusals {
            paragraph(text, &format!("{tool} refuses: `{}`", said.replace('`', "'")))?;
        }
        if !not_run.is_empty() {
            paragraph(text, &format!("Not run yet: {}.", not_run.join(", ")))?;
        }
        Ok(())
    }

    /// A bar for each tool and kernel: how many loads it measures right, how many not.
    pub fn picture(&self) -> Result<String> {
        let (cases, ours) = (cases()?, tools_of(Family::Ours)?);
        let mut picture = Picture::new(self.kernels.keys().collect(), cases.len());
        let of_ours = |kernel: &String| {
            cases.iter().filter_map(|case| self.ours(kernel, case, &ours)).collect()
        };
        picture.head("this workshop", 0);
        picture.row("all of its tools", &self.kernels.keys().map(of_ours).collect::<Vec<_>>())?;
        for (family, heading) in OTHERS {
            picture.head(heading, 8);
            for tool in tools_of(family)? {
                let of_tool = |kernel: &String| {
                    cases.iter().filter_map(|case| self.cell(kernel, case, &tool)).collect()
                };
                picture.row(&tool.name, &self.kernels.keys().map(of_tool).collect::<Vec<_>>())?;
            }
        }
        picture.finish()
    }
}

fn tools_of(family: Family) -> Result<Vec<Tool>> {
    Ok(tools()?.into_iter().filter(|tool| tool.family == family).collect())
}

/// A case or a tool, with a link to its heading, as GitHub derives the anchor.
fn link(name: &str) -> String {
    let anchor = name.to_lowercase().replace(' ', "-");
    let anchor = anchor.replace(|c: char| !c.is_ascii_alphanumeric() && !"-_".contains(c), "");
    format!("[{name}](#{anchor})")
}

/// The text of another's cell in a table: empty where the tool does not answer the question.
fn shown(asked: bool, cell: Option<&Cell>) -> String {
    match (asked, cell) {
        (false, _) => String::new(),
        (true, None) => "not run".to_owned(),
        (true, Some(cell)) => match cell.verdict {
            Verdict::Refused { .. } => "refuses".to_owned(),
            Verdict::Wrong { .. } if cell.runs < RUNS => text(cell) + &in_runs(cell.runs),
            // The first run that is right ends the runs.
            Verdict::Right if cell.runs > 1 => format!("right in 1 of {} runs", cell.runs),
            _ => text(cell),
        },
    }
}

/// Text of its own, in lines of at most 100 columns.
fn paragraph(page: &mut String, text: &str) -> Result<()> {
    Ok(writeln!(page, "\n{}", textwrap::fill(text, 100))?)
}

fn in_runs(runs: u32) -> String {
    format!(", in {runs} {}", if runs == 1 { "run" } else { "runs" })
}

/// A cell, in words.
pub fn text(cell: &Cell) -> String {
    let lost = if cell.skipped > 0 { format!(", {} skipped", cell.skipped) } else { String::new() };
    let silently = if cell.silent { ", silently" } else { "" };
    match &cell.verdict {
        Verdict::NotAsked => String::new(),
        Verdict::Right => "right".to_owned(),
        Verdict::Admitted { question, printed, expected } => {
            format!("says so: {}", beside(*question, *printed, *expected))
        }
        Verdict::Wrong { question, printed: Some(printed), expected } => {
            format!("**wrong**{silently}: {}{lost}", beside(*question, *printed, *expected))
        }
        Verdict::Wrong { question, printed: None, .. } => {
            format!("**wrong**{silently}: no {}", name(*question))
        }
        Verdict::Refused { said } => {
            format!("refuses: {said}")
        }
        Verdict::Broke { how } => format!("**broke**: {how}"),
        Verdict::NotRun { .. } => "not run".to_owned(),
    }
}

fn beside(question: Question, printed: Expected, expected: Expected) -> String {
    let time = matches!(
        question,
        Question::SlowestBio
            | Question::SlowestThrottled
            | Question::SlowestRequest
            | Question::FastestRequest
            | Question::TimeInFlight
            | Question::BusyTime
            | Question::MeanLatency
    );
    let figure = |figure: u64| {
        if time { format!("{:.1} ms", figure as f64 / 1e6) } else { figure.to_string() }
    };
    let range = |of: Expected| {
        if of.least == of.most {
            figure(of.least)
        } else if of.most == u64::MAX {
            format!("{} or more", figure(of.least))
        } else {
            format!("{} to {}", figure(of.least), figure(of.most))
        }
    };
    format!("{} {}, true {}", name(question), range(printed), range(expected))
}

/// Its name in a file that declares a tool.
pub fn key(question: Question) -> String {
    let key = serde_json::to_value(question).unwrap_or_default();
    key.as_str().unwrap_or_default().to_owned()
}

fn name(question: Question) -> &'static str {
    match question {
        Question::Ios => "I/Os",
        Question::Bios => "bios",
        Question::BiosOfDd => "dd's I/Os",
        Question::SlowSector => "sector",
        Question::HighestSector => "highest sector",
        Question::SlowestBio => "slowest bio",
        Question::SlowestThrottled => "slowest bio",
        Question::QueuedShare => "share in the queue",
        Question::Requests => "requests",
        Question::LargeRequests => "requests of 64 KiB",
        Question::DriverRequests => "requests of the driver",
        Question::UnissuedRequests => "requests without a start",
        Question::OtherBios | Question::OtherBiosAndParts => "bios without a start",
        Question::SlowestRequest => "slowest",
        Question::FastestRequest => "fastest",
        Question::Hits => "hits",
        Question::Misses => "misses",
        Question::FileReads => "reads of a file",
        Question::Bytes => "bytes",
        Question::BytesOfDd => "dd's bytes",
        Question::Merges => "merges",
        Question::MergedShare => "merged of 100",
        Question::TimeInFlight => "time in flight",
        Question::BusyTime => "busy",
        Question::Utilisation => "percent busy",
        Question::MeanLatency => "mean latency",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(case: &str, tool: &str, verdict: Verdict) -> Cell {
        let (case, tool) = (case.into(), tool.into());
        Cell { case, tool, verdict, skipped: 7, runs: 1, exit: Some(0), silent: true }
    }

    #[test]
    fn a_cell_that_was_not_run_is_shown_as_such() {
        let mut report = TruthReport::default();
        let wrong = Verdict::Wrong {
            question: Question::Requests,
            printed: Some(Expected::exactly(4003)),
            expected: Expected::exactly(5008),
        };
        report.add("7.2", cell("threads_16", "biolatency", Verdict::Right));
        report.add("7.2", cell("threads_16", "biolatency", wrong.clone()));
        let text = report.markdown().unwrap();
        let row = text.lines().find(|line| line.starts_with("| [threads_16](")).unwrap();
        let shown = "| [threads_16](#threads_16) | not run \
                     | **wrong**, silently: requests 4003, true 5008, 7 skipped, in 1 run |";
        assert!(row.starts_with(shown), "{row}");
        let anchor = link("biolatency.bt of 0.17");
        assert_eq!(anchor, "[biolatency.bt of 0.17](#biolatencybt-of-017)");
        let others = text.lines().find(|line| line.starts_with("Not run yet: ")).unwrap();
        assert!(others.contains("threads_64") && !others.contains("threads_16"), "{others}");
        assert!(row.ends_with("| not run | not run |  |  |"), "{row}");
        assert!(report.picture().unwrap().contains("#c0392b"));
        assert!(report.wrong_of_ours().unwrap().is_empty());
        let before = report.clone();
        let not_run = Verdict::NotRun { why: "no disk".into() };
        report.add("7.2", cell("threads_16", "biolatency", not_run));
        assert_eq!(report, before);
        report.add("7.2", cell("threads_16", "bitehist", wrong));
        assert_eq!(report.wrong_of_ours().unwrap().len(), 1);
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<TruthReport>(&json).unwrap(), report);
    }

    /// What is judged on another kernel, or of another version, is not shown beside the rest.
    #[test]
    fn cells_of_another_version_are_dropped() {
        let mut report = TruthReport::default();
        let tools = tools().unwrap();
        let tool = |name: &str| tools.iter().find(|tool| tool.name == name).unwrap();
        report.judged_on("7.2", "7.2.13", tool("biolatency"), Some("0.2"));
        report.add("7.2", cell("threads_16", "biolatency", Verdict::Right));
        report.add("7.2", cell("threads_16", "bitehist", Verdict::Right));
        report.judged_on("7.2", "7.2.13", tool("bitehist"), None);
        report.judged_on("6.1", "6.1.1", tool("biolatency"), Some("0.2"));
        assert_eq!(report.kernels["7.2"].len(), 2);
        report.judged_on("7.2", "7.2.13", tool("biolatency"), Some("0.3"));
        assert_eq!(report.kernels["7.2"].len(), 1);
        report.judged_on("7.2", "7.2.14", tool("bitehist"), None);
        assert!(report.kernels.is_empty());
    }

    #[test]
    fn one_right_run_is_enough_for_others() {
        let (cases, tools) = (cases().unwrap(), tools().unwrap());
        let case = cases.iter().find(|case| case.name == "threads_16").unwrap();
        let mut report = TruthReport::default();
        let mut is_known = |name: &str, verdict, runs, exit| {
            report.add("7.2", Cell { runs, exit, ..cell("threads_16", name, verdict) });
            let tool = tools.iter().find(|tool| tool.name == name).unwrap();
            report.is_known("7.2", case, tool, 3)
        };
        let wrong = Verdict::Wrong {
            question: Question::Requests,
            printed: None,
            expected: Expected::exactly(1),
        };
        assert!(is_known("biolatency", Verdict::Right, 1, Some(0)));
        assert!(!is_known("biolatency", Verdict::Right, 1, None));
        assert!(!is_known("biolatency", wrong.clone(), 2, Some(0)));
        assert!(is_known("biolatency", wrong, 3, Some(0)));
        assert!(is_known("biosnoop", Verdict::Refused { said: "no".into() }, 1, None));
        assert!(!is_known("bitehist", Verdict::Right, 1, Some(0)));
        assert!(is_known("bitehist", Verdict::Right, 3, Some(0)));
    }

    /// Nobody has edited a figure by hand: `cargo truth --render` writes these files.
    #[test]
    fn the_page_and_the_picture_are_those_of_the_cells() {
        let file =
            |name: &str| std::fs::read_to_string(format!("{}/{name}", env!("CARGO_MANIFEST_DIR")));
        let report: TruthReport = serde_json::from_str(&file("truth.json").unwrap()).unwrap();
        let old = "is not what the cells say: `cargo truth --render` writes it";
        assert!(file("TRUTH.md").unwrap().ends_with(&report.markdown().unwrap()), "TRUTH.md {old}");
        assert!(file("truth.svg").unwrap() == report.picture().unwrap(), "truth.svg {old}");
        // And it is whole.
        let (cases, tools) = (cases().unwrap(), tools().unwrap());
        for kernel in ["6.1", "6.12", "7.2"] {
            assert!(report.releases.contains_key(kernel), "no release of {kernel}");
            for case in &cases {
                for tool in tools.iter().filter(|tool| tool.is_asked(case)) {
                    let is_known = report.is_known(kernel, case, tool, RUNS);
                    assert!(is_known, "{kernel}, {}, {}: --missing", case.name, tool.name);
                }
            }
        }
    }
}
