//! The table of all cells: as JSON, as Markdown, and as a picture.

use std::{collections::BTreeMap, fmt::Write};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::{Case, Cell, Expected, Family, Question, Tool, Verdict, cases, tools};

/// Every cell that was judged, by kernel line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The cells of each line.
    pub kernels: BTreeMap<String, Vec<Cell>>,
}

/// The families of others, as headings.
const OTHERS: [(Family, &str); 3] = [
    (Family::LibbpfTools, "libbpf-tools (C, libbpf)"),
    (Family::Bpftrace, "bpftrace's tools"),
    (Family::Bcc, "bcc's tools (Python)"),
];

impl Report {
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

    /// The cells of our tools that are wrong: a kernel, a case, a tool each.
    pub fn wrong_of_ours(&self) -> Result<Vec<String>> {
        let ours = of(Family::Ours)?;
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

    /// A table for each kernel and family, and the commands.
    pub fn markdown(&self) -> Result<String> {
        let (cases, ours) = (cases()?, of(Family::Ours)?);
        let mut text = String::new();
        for kernel in self.kernels.keys() {
            writeln!(text, "\n## Kernel {kernel}")?;
            for (family, heading) in OTHERS {
                let tools = of(family)?;
                let names: Vec<&str> = tools.iter().map(|tool| tool.name.as_str()).collect();
                writeln!(text, "\n### {heading}\n\n| case | ours | {} |", names.join(" | "))?;
                writeln!(text, "|---|---|{}", "---|".repeat(tools.len()))?;
                let mut not_run = Vec::new();
                for case in &cases {
                    let asked = tools.iter().filter(|tool| tool.is_asked(case));
                    let run = asked.clone().filter(|tool| self.cell(kernel, case, tool).is_some());
                    if run.count() == 0 {
                        not_run.extend(asked.clone().next().map(|_| case.name.as_str()));
                        continue;
                    }
                    let mut row = vec![shown(true, self.ours(kernel, case, &ours))];
                    row.extend(
                        tools
                            .iter()
                            .map(|tool| shown(tool.is_asked(case), self.cell(kernel, case, tool))),
                    );
                    writeln!(text, "| {} | {} |", case.name, row.join(" | "))?;
                }
                if !not_run.is_empty() {
                    let mut column = 0;
                    for word in format!("Not run yet: {}.", not_run.join(", ")).split(' ') {
                        let is_next = column > 0 && column + 1 + word.len() <= 100;
                        let between = if is_next { ' ' } else { '\n' };
                        write!(text, "{between}{word}")?;
                        column = word.len() + if is_next { column + 1 } else { 0 };
                    }
                    text.push('\n');
                }
            }
            let alone = |case: &&Case| {
                !tools().is_ok_and(|tools| {
                    tools.iter().any(|tool| tool.family != Family::Ours && tool.is_asked(case))
                })
            };
            writeln!(text, "\n### Asked of our tools only\n\n| case | ours |\n|---|---|")?;
            for case in cases.iter().filter(alone) {
                writeln!(
                    text,
                    "| {} | {} |",
                    case.name,
                    shown(true, self.ours(kernel, case, &ours))
                )?;
            }
        }
        text.push_str("\n## The cases\n\n| case | load | judge |\n|---|---|---|\n");
        for case in &cases {
            writeln!(text, "| {} | {} | {} |", case.name, case.load, case.judge)?;
        }
        text.push_str("\n## The tools\n\n| tool | command | root |\n|---|---|---|\n");
        for tool in tools()? {
            let root = tool.root.as_deref().unwrap_or("-");
            writeln!(text, "| {} | `{}` | {root} |", tool.name, tool.argv.join(" "))?;
        }
        Ok(text)
    }

    /// A bar for each tool and kernel: how many loads it measures right, how many not.
    pub fn picture(&self) -> Result<String> {
        const LEFT: usize = 150;
        const TOP: usize = 84;
        const ROW: usize = 22;
        const LOAD: usize = 6;
        let (cases, ours) = (cases()?, of(Family::Ours)?);
        let wide = cases.len() * LOAD + 30;
        let width = LEFT + wide * self.kernels.len().max(3);
        let mut y = TOP;
        let mut bars = String::new();
        let mut bar = |y: usize, name: &str, cells: &[Vec<&Cell>]| {
            writeln!(bars, "<text x=\"{}\" y=\"{}\">{name}</text>", 16, y + 13)?;
            for (block, cells) in cells.iter().enumerate() {
                let mut x = LEFT + block * wide;
                for (fill, _, is_it) in OUTCOMES {
                    let loads = cells.iter().filter(|cell| is_it(&cell.verdict)).count();
                    if loads == 0 {
                        continue;
                    }
                    let long = loads * LOAD;
                    write!(
                        bars,
                        "<rect x=\"{x}\" y=\"{y}\" width=\"{long}\" height=\"18\" fill=\"{fill}\"/>"
                    )?;
                    if loads > 1 {
                        writeln!(
                            bars,
                            "<text x=\"{}\" y=\"{}\" fill=\"white\" text-anchor=\"middle\" \
                             font-size=\"11\">{loads}</text>",
                            x + long / 2,
                            y + 13
                        )?;
                    }
                    x += long;
                }
            }
            anyhow::Ok(())
        };
        let mut heads = vec![(y, "this workshop")];
        y += ROW - 2;
        let of_ours = |kernel: &String| {
            cases.iter().filter_map(|case| self.ours(kernel, case, &ours)).collect()
        };
        bar(y, "all of its tools", &self.kernels.keys().map(of_ours).collect::<Vec<_>>())?;
        y += ROW;
        for (family, heading) in OTHERS {
            heads.push((y + 8, heading));
            y += ROW + 6;
            for tool in of(family)? {
                let of_tool = |kernel: &String| {
                    cases.iter().filter_map(|case| self.cell(kernel, case, &tool)).collect()
                };
                bar(y, &tool.name, &self.kernels.keys().map(of_tool).collect::<Vec<_>>())?;
                y += ROW;
            }
        }
        let height = y + 46;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"white\"/>\n\
             <text x=\"8\" y=\"24\" font-size=\"16\" font-weight=\"bold\">\
             Does a storage tracer print what is true?</text>\n\
             <text x=\"8\" y=\"44\">How many loads each tool measures right, of those that it was \
             run with. A figure is judged from outside.</text>\n"
        );
        for (block, kernel) in self.kernels.keys().enumerate() {
            let x = LEFT + block * wide;
            writeln!(svg, "<text x=\"{x}\" y=\"70\" font-weight=\"bold\">Linux {kernel}</text>")?;
        }
        for (y, head) in heads {
            writeln!(svg, "<text x=\"8\" y=\"{}\" font-weight=\"bold\">{head}</text>", y + 13)?;
        }
        svg.push_str(&bars);
        let mut x = 8;
        for (fill, what, _) in OUTCOMES {
            let y = height - 26;
            writeln!(
                svg,
                "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{fill}\"/>\
                 <text x=\"{}\" y=\"{}\">{what}</text>",
                x + 20,
                y + 12
            )?;
            x += 40 + what.len() * 6;
        }
        svg.push_str("</svg>\n");
        Ok(svg)
    }
}

/// A colour, what it means, and which verdicts it shows.
type Outcome = (&'static str, &'static str, fn(&Verdict) -> bool);

const OUTCOMES: [Outcome; 4] = [
    ("#2e8b57", "right", |verdict| matches!(verdict, Verdict::Right)),
    ("#d9902f", "too small, and says so", |verdict| matches!(verdict, Verdict::Admitted { .. })),
    ("#c0392b", "wrong", |verdict| matches!(verdict, Verdict::Wrong { .. })),
    ("#8e8e8e", "does not start on this kernel", |verdict| {
        matches!(verdict, Verdict::Refused { .. })
    }),
];

fn of(family: Family) -> Result<Vec<Tool>> {
    Ok(tools()?.into_iter().filter(|tool| tool.family == family).collect())
}

/// The text of a cell: empty where the tool does not answer the question.
fn shown(asked: bool, cell: Option<&Cell>) -> String {
    match (asked, cell) {
        (false, _) => String::new(),
        (true, None) => "not run".to_owned(),
        (true, Some(cell)) => text(cell),
    }
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
            let said: String = said.chars().filter(|c| !"|`\n".contains(*c)).take(60).collect();
            format!("refuses: {said}")
        }
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

fn name(question: Question) -> &'static str {
    match question {
        Question::Ios => "I/Os",
        Question::Bios => "bios",
        Question::BiosOfDd => "dd's I/Os",
        Question::SlowSector => "sector",
        Question::SlowestBio => "slowest bio",
        Question::SlowestThrottled => "slowest bio",
        Question::QueuedShare => "share in the queue",
        Question::Requests => "requests",
        Question::LargeRequests => "requests of 64 KiB",
        Question::SlowestRequest => "slowest",
        Question::FastestRequest => "fastest",
        Question::Hits => "hits",
        Question::Misses => "misses",
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
        let mut report = Report::default();
        let wrong = Verdict::Wrong {
            question: Question::Requests,
            printed: Some(Expected::exactly(4003)),
            expected: Expected::exactly(5008),
        };
        report.add("7.2", cell("threads_16", "biolatency", Verdict::Right));
        report.add("7.2", cell("threads_16", "biolatency", wrong.clone()));
        let text = report.markdown().unwrap();
        let row = text.lines().find(|line| line.starts_with("| threads_16 |")).unwrap();
        let shown =
            "| threads_16 | not run | **wrong**, silently: requests 4003, true 5008, 7 skipped |";
        assert!(row.starts_with(shown), "{row}");
        let others = text.lines().find(|line| line.starts_with("Not run yet: ")).unwrap();
        assert!(others.contains("threads_64") && !others.contains("threads_16"), "{others}");
        assert!(row.ends_with("| not run | not run |  |"), "{row}");
        assert!(report.picture().unwrap().contains("#c0392b"));
        assert!(report.wrong_of_ours().unwrap().is_empty());
        let before = report.clone();
        let not_run = Verdict::NotRun { why: "no disk".into() };
        report.add("7.2", cell("threads_16", "biolatency", not_run));
        assert_eq!(report, before);
        report.add("7.2", cell("threads_16", "stage07", wrong));
        assert_eq!(report.wrong_of_ours().unwrap().len(), 1);
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<Report>(&json).unwrap(), report);
    }

    /// Nobody has edited a figure by hand: `cargo vm truth --render` writes these files.
    #[test]
    fn the_page_and_the_picture_are_those_of_the_cells() {
        let file = |name: &str| {
            std::fs::read_to_string(format!("{}/../bench/{name}", env!("CARGO_MANIFEST_DIR")))
        };
        let report: Report = serde_json::from_str(&file("truth.json").unwrap()).unwrap();
        let old = "is not what the cells say: `cargo vm truth --render` writes it";
        assert!(file("TRUTH.md").unwrap().ends_with(&report.markdown().unwrap()), "TRUTH.md {old}");
        assert!(file("truth.svg").unwrap() == report.picture().unwrap(), "truth.svg {old}");
    }
}
