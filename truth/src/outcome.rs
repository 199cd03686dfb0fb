//! What a comparison has found, and how it is told.

use std::sync::Mutex;

use anyhow::{Context, Result};
use truth::{Badge, Cell, Family, Score, TruthReport, Verdict};
use vm::cargo::follow::at_once;
use workshop::{lock, say};

use crate::comparison::{Comparison, Purpose};
use crate::guests;
use crate::kernel_diff::{self, KernelDiff};
use crate::prepared::{self, Before, Prepared};
use crate::results::{self, JSON, MARKDOWN, PICTURE};
use crate::schedule::{self, Job};

/// What came out. The files keep what was found before, too.
#[derive(Default)]
pub struct ComparisonOutcome {
    /// The cells that were judged.
    found: TruthReport,
    /// Cells of tools of ours that were not, and why.
    not_judged: Vec<String>,
    /// Guests that failed.
    failed: Vec<anyhow::Error>,
}

impl ComparisonOutcome {
    /// Judges the cells of all jobs. Each is written when it is known: what runs long may be ended at any time.
    pub fn judge(comparison: &Comparison, prepared: &Prepared, jobs: &[Job]) -> ComparisonOutcome {
        let outcome = Mutex::new(ComparisonOutcome::default());
        let failed = at_once(schedule::guests(&prepared.plan), jobs, |job| {
            guests::judge_all(&comparison.run, prepared, job, |release, cell| {
                lock(&outcome).take(comparison, prepared, job.kernel, release, cell)
            })
        });
        let outcome = outcome.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        ComparisonOutcome { failed, ..outcome }
    }

    /// Takes a cell in, and keeps it where it is one of the page's.
    fn take(
        &mut self,
        comparison: &Comparison,
        prepared: &Prepared,
        kernel: &str,
        release: &str,
        cell: Cell,
    ) -> Result<()> {
        let what = format!("{kernel}, {}, {}", cell.case, cell.tool);
        let why = match &cell.verdict {
            Verdict::NotRun { why } => format!(": {why}"),
            _ => String::new(),
        };
        say!("{what}: {}{why}", truth::shown(&cell));
        let tool = comparison.tools.iter().find(|tool| tool.name == cell.tool);
        let tool = tool.with_context(|| format!("the guest judged {what}"))?;
        if !why.is_empty() && tool.family == Family::Ours {
            self.not_judged.push(format!("{what}{why}"));
        }
        self.found.releases.insert(kernel.to_owned(), release.to_owned());
        self.found.add(kernel, cell.clone());
        if !comparison.is_kept() {
            return Ok(());
        }
        let version = prepared::version(&prepared.plan, tool);
        results::change(comparison.run.workspace(), |report| {
            report.judged_on(kernel, release, tool, version.as_deref());
            report.add(kernel, cell);
        })
    }

    /// Shows what it was made for.
    pub fn show(&self, comparison: &Comparison, prepared: &Prepared) -> Result<()> {
        if comparison.purpose == Purpose::Cell {
            self.show_cell(comparison);
        } else if !comparison.yours.is_empty() {
            self.show_yours(comparison)?;
        } else if let Some(before) = &prepared.before {
            self.show_kernel_diff(comparison, before)?;
        } else if !self.found.kernels.is_empty() {
            say!("{MARKDOWN}, {PICTURE} and {JSON} are written");
        }
        if let Some(file) = &comparison.badge {
            let badge = Badge::from_scores(&self.scores_of_yours(comparison));
            workshop::write(file, &(serde_json::to_string(&badge)? + "\n"))?;
        }
        Ok(())
    }

    fn show_cell(&self, comparison: &Comparison) {
        let (case, tool) = (&comparison.cases[0], &comparison.tools[0]);
        workshop::outln!("tool:  {}", tool.argv.join(" "));
        workshop::outln!("load:  {} (tests/guest/table/loads.rs, {}())", case.load, case.name);
        workshop::outln!("judge: {}", case.judge);
        for cell in self.found.cells(&case.name, &tool.name) {
            workshop::outln!("{cell}");
        }
    }

    fn show_yours(&self, comparison: &Comparison) -> Result<()> {
        let Comparison { cases, tools, yours, .. } = comparison;
        let mut text = String::new();
        for tool in tools {
            for score in Score::from_report(&self.found, cases, tool) {
                text += &format!("{}\n{}\n", tool.name, score.text());
            }
        }
        match comparison.json {
            true => {
                text.lines().for_each(|line| say!("{line}"));
                workshop::outln!("{}", truth::json(&self.found, cases, yours)?);
            }
            false => workshop::out!("{text}"),
        }
        Ok(())
    }

    fn show_kernel_diff(&self, comparison: &Comparison, before: &Before) -> Result<()> {
        let Comparison { run, cases, tools, kernels, .. } = comparison;
        let diff = KernelDiff {
            kernels: [before.page.newest().unwrap_or_default(), &kernels[0]],
            functions: &before.functions,
            names: kernel_diff::names(run.workspace())?,
            reports: [&before.page, &self.found],
        };
        workshop::out!("{}", diff.markdown(cases, tools)?);
        Ok(())
    }

    fn scores_of_yours(&self, comparison: &Comparison) -> Vec<Score<'_>> {
        let scores = comparison
            .yours
            .iter()
            .flat_map(|tool| Score::from_report(&self.found, &comparison.cases, tool));
        scores.collect()
    }

    /// The exit code: 1 where something is wrong or was not judged, which it says.
    pub fn exit_code(&self, comparison: &Comparison) -> Result<i32> {
        let is_wrong = self.scores_of_yours(comparison).iter().any(Score::is_wrong);
        let wrong = self.found.wrong_of_ours()?;
        wrong.iter().for_each(|line| say!("wrong: {line}"));
        self.not_judged.iter().for_each(|line| say!("a tool of ours was not judged: {line}"));
        self.failed.iter().for_each(|error| say!("cells were not judged: {error:#}"));
        let is_complete = self.not_judged.is_empty() && self.failed.is_empty();
        Ok(i32::from(is_wrong || !wrong.is_empty() || !is_complete))
    }
}
