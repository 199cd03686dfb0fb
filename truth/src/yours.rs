//! A tool that a file of yours declares, and how its cells are shown: in lines, as JSON, and as a badge.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::{Case, Cell, Family, Tool, TruthReport, Verdict, report};

pub(crate) fn family() -> Family {
    Family::Yours
}

/// The tool that a file declares: `name`, `command`, and what it answers. A program of its directory begins with
/// `./`. A script, `.bt` or `.py`, gets its interpreter, and Debian sid's root, which has both.
pub fn yours(file: &Path) -> Result<Tool> {
    let shown = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?;
    let mut tool: Tool = toml::from_str(&text).with_context(|| shown.to_string())?;
    let file = file.canonicalize().with_context(|| shown.to_string())?;
    let dir = file.parent().context("it lies in no directory")?;
    ensure!(tool.family == Family::Yours, "{shown}: `family` is for the tools of the comparison");
    ensure!(!tool.answers.is_empty(), "{shown}: it answers no question");
    for (question, answer) in &tool.answers {
        answer.read("").with_context(|| format!("{shown}: {}", report::key(*question)))?;
    }
    // A shell mounts it into the tool's root.
    let quotable = dir.to_str().is_some_and(|dir| !dir.contains('\''));
    ensure!(quotable, "{shown}: the directory's name cannot be quoted");
    let program =
        tool.argv.first().with_context(|| format!("{shown}: `command` is empty"))?.clone();
    if program.starts_with("./") {
        let found = dir.join(&program);
        ensure!(found.is_file(), "{shown}: there is no {}", found.display());
    }
    let interpreter = match Path::new(&program).extension().and_then(|it| it.to_str()) {
        Some("bt") => Some("bpftrace"),
        Some("py") => Some("python3"),
        _ => None,
    };
    if let Some(interpreter) = interpreter {
        tool.argv.insert(0, interpreter.to_owned());
    }
    if interpreter.is_some() || ["bpftrace", "python3"].contains(&program.as_str()) {
        tool.rootfs.get_or_insert_with(|| "sid".to_owned());
    }
    tool.rootfs = tool.rootfs.filter(|rootfs| rootfs != "host");
    tool.headers |= tool.argv[0] == "python3";
    tool.dir = Some(dir.to_owned());
    Ok(tool)
}

/// What came out for one tool on one kernel.
#[derive(Debug)]
pub struct Score<'a> {
    kernel: &'a str,
    cells: Vec<&'a Cell>,
}

impl<'a> Score<'a> {
    /// Of each kernel, the cells of a tool, in the cases' order.
    pub fn from_report(report: &'a TruthReport, cases: &[Case], tool: &Tool) -> Vec<Score<'a>> {
        let cells = |kernel: &str| {
            cases.iter().filter_map(|case| report.cell(kernel, case, tool)).collect()
        };
        let kernels = report.kernels.keys();
        kernels.map(|kernel| Score { kernel, cells: cells(kernel) }).collect()
    }

    /// How many are right, of how many: what could not be judged here is neither.
    fn counts(&self) -> (usize, usize) {
        let judged = |cell: &&&Cell| !matches!(cell.verdict, Verdict::NotRun { .. });
        let right = |cell: &&&Cell| cell.verdict == Verdict::Right;
        (self.cells.iter().filter(right).count(), self.cells.iter().filter(judged).count())
    }

    /// Whether a figure is wrong that the tool did not admit, or was not printed.
    pub fn is_wrong(&self) -> bool {
        let fine = |cell: &&Cell| {
            use Verdict::*;
            matches!(cell.verdict, Right | Admitted { .. } | NotRun { .. } | NotAsked)
        };
        !self.cells.iter().all(fine) || self.counts().1 == 0
    }

    /// `9 of 12 true on 7.2`
    pub fn line(&self) -> String {
        let (right, all) = self.counts();
        format!("{right} of {all} true on {}", self.kernel)
    }

    /// A line for each case, and the sum.
    pub fn text(&self) -> String {
        let wide = self.cells.iter().map(|cell| cell.case.len()).max().unwrap_or(0);
        let row = |cell: &&Cell| {
            let why = match &cell.verdict {
                Verdict::NotRun { why } => format!(": {why}"),
                _ => String::new(),
            };
            let said = report::text(cell).replace("**", "");
            format!("  {:wide$}  {said}{why}\n", cell.case)
        };
        self.cells.iter().map(row).collect::<String>() + &self.line()
    }
}

/// A badge, as shields.io reads it from an address: its `endpoint`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Badge {
    schema_version: u32,
    label: &'static str,
    message: String,
    color: &'static str,
}

impl Badge {
    /// Of a tool on some kernels.
    pub fn from_scores(scores: &[Score]) -> Badge {
        let lines: Vec<String> = scores.iter().map(Score::line).collect();
        let whole = scores.iter().all(|score| score.counts().0 == score.counts().1);
        let color = match scores.iter().any(Score::is_wrong) {
            true => "red",
            false if whole => "brightgreen",
            false => "yellow",
        };
        Badge { schema_version: 1, label: "cargo truth", message: lines.join(", "), color }
    }
}

/// The cells of some tools, as JSON.
pub fn json(report: &TruthReport, cases: &[Case], tools: &[Tool]) -> Result<String> {
    #[derive(Serialize)]
    struct Whole<'a> {
        #[serde(flatten)]
        report: &'a TruthReport,
        badges: BTreeMap<&'a str, Badge>,
    }
    let badge = |tool| Badge::from_scores(&Score::from_report(report, cases, tool));
    let badges = tools.iter().map(|tool| (tool.name.as_str(), badge(tool))).collect();
    Ok(serde_json::to_string_pretty(&Whole { report, badges })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: &str = r#"
        name = "mine"
        command = ["./mine.bt", "-v"]
        ready = "Attached"
        [answers.requests]
        how = "sum"
        lines = '^@: (?<figure>\d+)'
    "#;

    fn declared(text: &str) -> Result<Tool> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("mine.bt"), "").unwrap();
        let file = dir.path().join("mine.toml");
        fs::write(&file, text).unwrap();
        yours(&file)
    }

    #[test]
    fn a_file_declares_a_tool() {
        let tool = declared(MINE).unwrap();
        assert_eq!(tool.argv, ["bpftrace", "./mine.bt", "-v"]);
        assert_eq!((tool.rootfs.as_deref(), tool.headers), (Some("sid"), false));
        assert!(tool.is_strict() && tool.needs_headers() == tool.headers);
        assert_eq!(tool.ready, "Attached");
        let binary = declared(&MINE.replace("./mine.bt", "slow")).unwrap();
        assert_eq!((binary.rootfs, binary.argv), (None, vec!["slow".into(), "-v".into()]));
        let python = declared(&MINE.replace("./mine.bt", "python3")).unwrap();
        assert!(python.headers && python.rootfs.is_some());
        let here = declared(&MINE.replace("ready", "rootfs = \"host\"\nready")).unwrap();
        assert!(here.rootfs.is_none());
    }

    #[test]
    fn a_file_that_declares_none_says_why() {
        let error = |text: &str| format!("{:#}", declared(text).unwrap_err());
        let unknown = error(&MINE.replace("answers.requests", "answers.speed"));
        assert!(unknown.contains("`speed`") && unknown.contains("`requests`"), "{unknown}");
        let absent = error(&MINE.replace("./mine.bt", "./other.bt"));
        assert!(absent.contains("there is no ") && absent.contains("other.bt"), "{absent}");
        let open = error(&MINE.replace("(?<figure>", "(?<figure"));
        assert!(open.contains("mine.toml: requests: "), "{open}");
        let other = error(&MINE.replace("ready", "family = \"bcc\"\nready"));
        assert!(other.contains("`family` is for"), "{other}");
    }

    #[test]
    fn the_badge_is_the_sum() {
        let cases = crate::cases().unwrap();
        let tool = Tool { name: "mine".into(), ..declared(MINE).unwrap() };
        let mut report = TruthReport::default();
        let mut add = |case: &str, verdict| {
            let cell = Cell {
                case: case.to_owned(),
                tool: "mine".to_owned(),
                verdict,
                skipped: 0,
                runs: 1,
                exit: Some(0),
                silent: false,
            };
            report.add("7.2", cell);
            let scores = Score::from_report(&report, &cases, &tool);
            let badge = Badge::from_scores(&scores);
            (badge.message, badge.color, scores[0].is_wrong())
        };
        let why = || Verdict::NotRun { why: "no disk".into() };
        assert_eq!(add("threads_1", why()), ("0 of 0 true on 7.2".into(), "red", true));
        let right = ("1 of 1 true on 7.2".into(), "brightgreen", false);
        assert_eq!(add("threads_16", Verdict::Right), right);
        let how = "it printed more than 32 MiB".to_owned();
        assert_eq!(
            add("timer", Verdict::Broke { how }),
            ("1 of 2 true on 7.2".into(), "red", true)
        );
        let text = Score::from_report(&report, &cases, &tool)[0].text();
        assert!(
            text.starts_with("  threads_1   not run: no disk\n  threads_16  right\n"),
            "{text}"
        );
        let json: serde_json::Value =
            serde_json::from_str(&json(&report, &cases, &[tool]).unwrap()).unwrap();
        assert_eq!(json["badges"]["mine"]["schemaVersion"], 1);
        assert_eq!(json["kernels"]["7.2"][2]["verdict"], "broke");
    }
}
