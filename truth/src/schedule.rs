//! Which guest judges which cells.

use anyhow::Result;
use truth::{Case, Family, Tool, TruthPlan, TruthReport};
use vm::cargo::follow::workers;
use workshop::say;

use crate::comparison::{Comparison, Purpose};
use crate::prepared::{self, Prepared};
use crate::results::{self, JSON};

/// The cells that one guest judges.
pub struct Job<'c> {
    /// Its kernel line.
    pub kernel: &'c str,
    /// What it is told.
    pub plan: TruthPlan,
}

/// How many guests run at once. What a single cell shows is for people: guests take turns.
pub fn guests(plan: &TruthPlan) -> usize {
    if plan.shows { 1 } else { workers() }
}

/// The jobs of a comparison: of each kernel, as many as guests run at once.
pub fn jobs<'c>(comparison: &'c Comparison, prepared: &Prepared) -> Result<Vec<Job<'c>>> {
    let mut known = match comparison.purpose {
        Purpose::Missing => results::read(comparison.run.workspace())?,
        _ => TruthReport::default(),
    };
    let mut jobs = Vec::new();
    for kernel in &comparison.kernels {
        if comparison.purpose == Purpose::Missing {
            forget_older(&mut known, comparison, prepared, kernel)?;
        }
        jobs.extend(jobs_of_kernel(comparison, prepared, kernel, &known)?);
    }
    Ok(jobs)
}

/// Drops the cells that were judged on another release of the kernel, or with another version of a tool: they are
/// missing.
fn forget_older(
    known: &mut TruthReport,
    comparison: &Comparison,
    prepared: &Prepared,
    kernel: &str,
) -> Result<()> {
    let release = comparison.run.table.kernel(kernel)?.release;
    for tool in &comparison.tools {
        let version = prepared::version(&prepared.plan, tool);
        known.judged_on(kernel, &release, tool, version.as_deref());
    }
    Ok(())
}

fn jobs_of_kernel<'c>(
    comparison: &Comparison,
    prepared: &Prepared,
    kernel: &'c str,
    known: &TruthReport,
) -> Result<Vec<Job<'c>>> {
    let Comparison { run, cases, tools, .. } = comparison;
    let headers = match tools.iter().any(Tool::needs_headers) {
        true => prepared::headers(run, kernel)?,
        false => None,
    };
    // Without its headers, none of bcc's tools says anything of a kernel. A script of yours may not
    // need them.
    let can_run = |tool: &Tool| tool.family != Family::Bcc || headers.is_some();
    if !tools.iter().any(can_run) {
        return Ok(Vec::new());
    }
    let plan = &prepared.plan;
    let is_wanted = |case: &Case, tool: &Tool| {
        let is_known = known.is_known(kernel, case, tool, plan.runs);
        tool.is_asked(case) && can_run(tool) && !is_known
    };
    let parts = parts(cases, tools, guests(plan), is_wanted);
    if parts.is_empty() {
        say!("{kernel}: {JSON} has all of these cells");
    }
    let plan = |cells| TruthPlan { cells, headers: headers.clone(), ..plan.clone() };
    Ok(parts.into_iter().map(|cells| Job { kernel, plan: plan(cells) }).collect())
}

/// The wanted cells, in as many parts as guests run at once. Neighbours in a row or a column of the table
/// are in different parts: some cases take long beside all tools, and some tools in all cases.
fn parts(
    cases: &[Case],
    tools: &[Tool],
    parts: usize,
    wanted: impl Fn(&Case, &Tool) -> bool,
) -> Vec<Vec<(String, String)>> {
    let mut cells = vec![Vec::new(); parts];
    for (row, case) in cases.iter().enumerate() {
        for tool in tools.iter().filter(|tool| wanted(case, tool)) {
            let order = (0..parts).map(|part| (row + part) % parts);
            let shortest = order.min_by_key(|&part| cells[part].len()).unwrap_or(0);
            cells[shortest].push((case.name.clone(), tool.name.clone()));
        }
    }
    cells.retain(|part| !part.is_empty());
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wanted_cell_is_in_one_part() {
        let (cases, tools) = (truth::cases().unwrap(), truth::tools().unwrap());
        let one = parts(&cases, &tools, 1, |case, tool| tool.is_asked(case)).remove(0);
        for count in 2..5 {
            let parts = parts(&cases, &tools, count, |case, tool| tool.is_asked(case));
            assert_eq!(parts.len(), count);
            assert!(parts.iter().all(|part| part.len() >= one.len() / count), "{parts:?}");
            let mut all: Vec<_> = parts.concat();
            all.sort();
            let mut sorted = one.clone();
            sorted.sort();
            assert_eq!(all, sorted);
        }
        // The tools that take longest are in all parts.
        let bcc = |case: &Case, tool: &Tool| tool.is_asked(case) && tool.family == Family::Bcc;
        for part in parts(&cases, &tools, 2, bcc) {
            let of = |name| part.iter().filter(|(_, tool)| tool == name).count();
            assert!(of("biolatency-bpfcc") > 5 && of("biosnoop-bpfcc") > 5, "{part:?}");
        }
        assert!(parts(&cases, &tools, 2, |_, _| false).is_empty());
    }
}
