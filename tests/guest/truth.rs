//! Storage tracers beside outside judges, for `cargo truth`: each case runs a load beside a tool, and the
//! kernel's counters, fio, a timer or mincore() say what is true.

use std::env;

use truth::{Broke, Case, Cell, Expected, Fact, PLAN, Tool, TruthPlan, Verdict};

use crate::{
    prelude::*,
    table::{Beside, Printed, ToolRefusal, set_up},
};

const NOTHING: Expected = Expected { least: 0, most: 0 };

/// What is left of a tool that ran beside a load.
struct Ran {
    facts: Vec<Fact>,
    printed: Vec<Printed>,
    /// How often the kernel skipped a program that was running on the CPU already.
    skipped: u64,
}

/// Runs a case's load beside a tool.
fn run(plan: &TruthPlan, tool: &Tool, case: &Case) -> Result<Ran> {
    let mut ready = set_up(&case.name)?;
    let started = Instant::now();
    let beside = Beside::start(std::slice::from_ref(tool), case.copies, Some(plan))?;
    let is_ready = Instant::now();
    SHOWN.store(plan.shows, Relaxed);
    let facts = ready();
    SHOWN.store(false, Relaxed);
    let mut facts = facts?;
    facts.retain(|fact| case.asks.contains(&fact.question));
    wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))?;
    let loaded = Instant::now();
    let skipped = skipped()?;
    let printed = beside.end()?;
    println!(
        "{}: ready after {:.1?}, load {:.1?}, end {:.1?}",
        tool.name,
        is_ready - started,
        loaded - is_ready,
        loaded.elapsed()
    );
    Ok(Ran { facts, printed, skipped })
}

/// How often the kernel has skipped programs that are loaded now, by its own count.
pub fn skipped() -> Result<u64> {
    let programs: Value = serde_json::from_str(&shell("bpftool prog show --json")?)?;
    let programs = programs.as_array().context("bpftool prints no list")?;
    Ok(programs.iter().filter_map(|program| program["recursion_misses"].as_u64()).sum())
}

/// The cells that `cargo truth` wants, if it is what runs us: prints each as a line of JSON.
pub fn cells(prepare: fn()) -> Option<Result<()>> {
    let plan = env::var(PLAN).ok()?;
    prepare();
    Some(serde_json::from_str(&plan).context(PLAN).and_then(|plan: TruthPlan| {
        let (tools, cases) = ([truth::tools()?, plan.yours.clone()].concat(), truth::cases()?);
        let mut refused: Vec<Cell> = Vec::new();
        for (case, tool) in &plan.cells {
            let case = cases.iter().find(|known| known.name == *case);
            let case = case.context("no such case")?;
            let tool = tools.iter().find(|known| known.name == *tool).context("no such tool")?;
            // What a tool needs to start is the same in each case.
            if let Some(cell) = refused.iter().find(|cell| cell.tool == tool.name) {
                let cell = Cell { case: case.name.clone(), ..cell.clone() };
                println!("{}", serde_json::to_string(&cell)?);
                continue;
            }
            let cell = cell_of(&plan, tool, case)?;
            println!("{}", serde_json::to_string(&cell)?);
            if cell.verdict.is_of_start() {
                refused.push(cell);
            }
        }
        Ok(())
    }))
}

/// Judges a tool several times: of ours, the worst run counts, and of others the best.
fn cell_of(plan: &TruthPlan, tool: &Tool, case: &Case) -> Result<Cell> {
    let is_ours = tool.is_strict();
    let mut kept: Option<Cell> = None;
    for runs in 1..=plan.runs {
        let ran = run(plan, tool, case);
        let (printed, skipped) = ran.as_ref().map_or((&[][..], 0), |r| (&r.printed, r.skipped));
        if plan.shows {
            printed.iter().for_each(show);
        }
        let exit = printed.iter().map(|left| left.exit).max().flatten();
        let warns = printed.iter().map(|left| truth::warns(tool, &left.text));
        let warns = warns.collect::<Result<Vec<_>>>()?.contains(&true);
        let verdict = verdict(tool, ran)?;
        let silent = matches!(verdict, Verdict::Wrong { .. }) && exit == Some(0) && !warns;
        let (case, name) = (case.name.clone(), tool.name.clone());
        let cell = Cell { case, tool: name, skipped, runs, exit, silent, verdict };
        kept = Some(match kept {
            Some(kept) if (cell.verdict.rank() > kept.verdict.rank()) != is_ours => {
                Cell { runs, ..kept }
            }
            _ => cell,
        });
        if kept.as_ref().is_some_and(|cell| cell.verdict.is_final(tool)) {
            break;
        }
    }
    kept.context("no run")
}

/// Shows what a tool has printed; of many lines, the first and the last ones.
fn show(left: &Printed) {
    const FEW: usize = 30;
    let lines: Vec<&str> = left.text.lines().collect();
    for (n, line) in lines.iter().enumerate() {
        match n {
            _ if n < FEW || n + FEW >= lines.len() => println!("| {line}"),
            FEW => println!("| ... {} more lines ...", lines.len() - 2 * FEW),
            // What is no row, such as events that were lost.
            _ if line.starts_with(|c: char| c.is_alphabetic()) => println!("| {line}"),
            _ => {}
        }
    }
    println!("exit code: {}", left.exit.map_or("none".to_owned(), |code| code.to_string()));
}

/// The verdict on a tool: the worst one, where it ran several times at once.
fn verdict(tool: &Tool, ran: Result<Ran>) -> Result<Verdict> {
    let ran = match ran {
        Ok(ran) => ran,
        Err(error) => {
            return Ok(match error.downcast::<ToolRefusal>() {
                Ok(ToolRefusal(said)) => Verdict::Refused { said },
                Err(error) => match error.downcast::<Broke>() {
                    Ok(broke) => broke.verdict(tool),
                    Err(error) => Verdict::NotRun { why: format!("{error:#}") },
                },
            });
        }
    };
    let verdicts = ran.printed.iter().map(|Printed { text, .. }| -> Result<Verdict> {
        let verdict = truth::judge(tool, &ran.facts, text)?;
        // bpftrace 0.17 continues without the probes that it cannot attach, and says so.
        let unattached = text.lines().find(|line| line.contains("could not attach probe"));
        Ok(match (verdict, unattached) {
            (Verdict::Wrong { printed: None | Some(NOTHING), .. }, Some(said)) => {
                Verdict::Refused { said: said.to_owned() }
            }
            (verdict, _) => verdict,
        })
    });
    let verdicts = verdicts.collect::<Result<Vec<_>>>()?;
    verdicts.into_iter().max_by_key(Verdict::rank).context("nothing ran")
}
