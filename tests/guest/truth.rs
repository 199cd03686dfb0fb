//! Storage tracers beside outside judges: each case runs a load beside a tool, and the kernel's counters,
//! fio, a timer or mincore() say what is true. The tests `truth_CASE` judge our own tools, `cargo vm truth`
//! judges all.

mod cases;
mod peers;

use std::{env, fmt, fs, process::Command, sync::atomic::Ordering::Relaxed, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;
use truth::{Cell, Expected, Fact, Family, PLAN, Plan, Tool, Verdict};

pub use cases::TESTS;
use peers::Peer;

use crate::run::{Running, SHOWN, judged_weakly, preempts, program, shell, wait_until};

/// Sets up, lets [`Beside::run`] run the load, and says what is true.
type Load = fn(&mut Beside) -> Result<Vec<Fact>>;

/// The tools that run beside a load, and what they printed.
pub struct Beside {
    tools: Vec<Tool>,
    /// Where the tools are not ours: their roots.
    plan: Option<Plan>,
    /// How often each of them runs at once.
    copies: usize,
    printed: Vec<Printed>,
    /// How often the kernel skipped a program that was running on the CPU already.
    skipped: u64,
}

/// What a tool has left.
struct Printed {
    tool: Tool,
    text: String,
    exit: Option<i32>,
}

const NOTHING: Expected = Expected { least: 0, most: 0 };

/// A tool that did not start, and what it said.
#[derive(Debug)]
struct Refusal(String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// A tool that runs.
enum Tracer {
    Ours(Running),
    Peer(Peer),
}

impl Beside {
    fn new(tools: Vec<Tool>) -> Beside {
        Beside { tools, plan: None, copies: 1, printed: Vec::new(), skipped: 0 }
    }

    /// Each tool runs so many times at once.
    pub fn copies(&mut self, copies: usize) {
        self.copies = copies;
    }

    /// Starts the tools, runs the load when they are ready, and ends them when all disks are idle.
    pub fn run<T>(&mut self, load: impl FnOnce() -> Result<T>) -> Result<T> {
        ensure!(self.printed.is_empty(), "a case has one load");
        let tools = self.tools.clone();
        let tools: Vec<&Tool> = tools.iter().flat_map(|tool| vec![tool; self.copies]).collect();
        let pid = std::process::id().to_string();
        let start = |tool: &&Tool| {
            let Some(root) = &tool.root else {
                let (name, arguments) = tool.argv.split_first().context("no program")?;
                let arguments = arguments.iter().map(|argument| argument.replace("{pid}", &pid));
                let running = Running::spawn(Command::new(program(name)).args(arguments))?;
                return Ok(Tracer::Ours(running));
            };
            let plan = self.plan.as_ref().context("a tool of others needs a plan")?;
            Peer::start(tool, &plan.roots[root], plan.headers.as_deref()).map(Tracer::Peer)
        };
        let started = Instant::now();
        let mut running = tools.iter().map(start).collect::<Result<Vec<_>>>()?;
        for (running, tool) in running.iter_mut().zip(&tools) {
            match running {
                Tracer::Ours(running) => running.wait_for(&tool.ready)?,
                Tracer::Peer(peer) => peer.wait()?,
            }
        }
        let ready = Instant::now();
        SHOWN.store(self.plan.as_ref().is_some_and(|plan| plan.shows), Relaxed);
        let truth = load();
        SHOWN.store(false, Relaxed);
        let truth = truth?;
        wait_until("idle disks", || Ok(in_flight()? == 0))?;
        let loaded = Instant::now();
        if self.plan.is_some() {
            self.skipped = skipped()?;
        }
        for running in &running {
            match running {
                Tracer::Ours(running) => running.signal(Signal::INT)?,
                Tracer::Peer(peer) => peer.interrupt()?,
            }
        }
        for (running, tool) in running.into_iter().zip(tools) {
            let (text, exit) = match running {
                Tracer::Ours(running) => (running.interrupted()?, Some(0)),
                Tracer::Peer(peer) => peer.end()?,
            };
            self.printed.push(Printed { tool: tool.clone(), text, exit });
        }
        if self.plan.is_some() {
            let ended = loaded.elapsed();
            let names: Vec<&str> = self.tools.iter().map(|tool| tool.name.as_str()).collect();
            println!(
                "{}: ready after {:.1?}, load {:.1?}, end {ended:.1?}",
                names.join(", "),
                ready - started,
                loaded - ready
            );
        }
        Ok(truth)
    }
}

/// How often the kernel has skipped programs that are loaded now, by its own count.
fn skipped() -> Result<u64> {
    let programs: Value = serde_json::from_str(&shell("bpftool prog show --json")?)?;
    let programs = programs.as_array().context("bpftool prints no list")?;
    Ok(programs.iter().filter_map(|program| program["recursion_misses"].as_u64()).sum())
}

/// Requests in flight on all disks.
fn in_flight() -> Result<u64> {
    let mut sum = 0;
    for disk in fs::read_dir("/sys/block")?.flatten() {
        let text = fs::read_to_string(disk.path().join("inflight")).unwrap_or_default();
        sum += text.split_whitespace().map(str::parse::<u64>).sum::<Result<u64, _>>()?;
    }
    Ok(sum)
}

/// Runs a case beside those of our tools that answer its questions, all at once: that is harder for them.
fn ours(name: &str, load: Load) -> Result<()> {
    let cases = truth::cases()?;
    let case = cases.iter().find(|case| case.name == name);
    let case = case.with_context(|| format!("truth/cases.toml has no case {name}"))?;
    let is_ours = |tool: &Tool| tool.family == Family::Ours && tool.is_asked(case);
    let tools: Vec<Tool> = truth::tools()?.into_iter().filter(is_ours).collect();
    ensure!(!tools.is_empty(), "no tool is asked");
    for tools in tools.chunks(if case.alone { 1 } else { tools.len() }) {
        let mut beside = Beside::new(tools.to_vec());
        let facts = load(&mut beside)?;
        let asked = facts.iter().all(|fact| case.asks.contains(&fact.question));
        ensure!(asked, "truth/cases.toml: {name} asks {:?}, and judges {facts:?}", case.asks);
        for Printed { tool, text, .. } in &beside.printed {
            right(tool, &facts, text)?;
        }
    }
    Ok(())
}

/// Checks that a tool of ours is right. Several at once: a kernel that preempts may skip a program, and
/// the tool says so.
fn right(tool: &Tool, facts: &[Fact], printed: &str) -> Result<()> {
    match truth::judge(tool, facts, printed)? {
        Verdict::Right => Ok(()),
        Verdict::Admitted { question, printed, expected }
            if preempts()? && (expected.least - printed.most) * 100 <= expected.least =>
        {
            let (name, figure, of) = (&tool.name, printed.least, expected.least);
            judged_weakly(&format!("{name}: {figure} of {of} ({question:?})"));
            Ok(())
        }
        verdict => bail!("{}: {verdict:?} of {facts:?}: {printed}", tool.name),
    }
}

/// The cells that `cargo vm truth` wants, if it is what runs us: prints each as a line of JSON.
pub fn cells(prepare: fn()) -> Option<Result<()>> {
    let plan = env::var(PLAN).ok()?;
    prepare();
    Some(serde_json::from_str(&plan).context(PLAN).and_then(|plan: Plan| {
        let (tools, cases) = (truth::tools()?, truth::cases()?);
        let mut refused: Vec<Cell> = Vec::new();
        for (case, tool) in &plan.cells {
            ensure!(cases.iter().any(|known| known.name == *case), "no such case: {case}");
            let load = cases::CASES.iter().find(|(known, _)| known == case);
            let load = load.with_context(|| format!("{case} has no load"))?.1;
            let tool = tools.iter().find(|known| known.name == *tool).context("no such tool")?;
            // What a tool needs to start is the same in each case.
            if let Some(cell) = refused.iter().find(|cell| cell.tool == tool.name) {
                let cell = Cell { case: case.clone(), ..cell.clone() };
                println!("{}", serde_json::to_string(&cell)?);
                continue;
            }
            for cell in cells_of(&plan, std::slice::from_ref(tool), case, load)? {
                println!("{}", serde_json::to_string(&cell)?);
                if matches!(cell.verdict, Verdict::Refused { .. }) {
                    refused.push(cell);
                }
            }
        }
        Ok(())
    }))
}

/// Judges tools that run at once, several times: of ours, the worst run counts, and of others the best.
fn cells_of(plan: &Plan, tools: &[Tool], case: &str, load: Load) -> Result<Vec<Cell>> {
    let mut kept: Vec<Cell> = Vec::new();
    for run in 1..=plan.runs {
        let mut beside = Beside::new(tools.to_vec());
        beside.plan = Some(plan.clone());
        let verdicts = verdicts(&mut beside, tools, load)?;
        if plan.shows {
            beside.printed.iter().for_each(show);
        }
        let cell = |(tool, verdict): (&Tool, Verdict)| {
            let left: Vec<&Printed> =
                beside.printed.iter().filter(|left| left.tool.name == tool.name).collect();
            let exit = left.iter().map(|left| left.exit).max().flatten();
            let warns = left.iter().map(|left| truth::warns(tool, &left.text));
            let warns = warns.collect::<Result<Vec<_>>>()?.contains(&true);
            Ok(Cell {
                case: case.to_owned(),
                tool: tool.name.clone(),
                skipped: beside.skipped,
                runs: run,
                exit,
                silent: matches!(verdict, Verdict::Wrong { .. }) && exit == Some(0) && !warns,
                verdict,
            })
        };
        let cells = tools.iter().zip(verdicts).map(cell).collect::<Result<Vec<_>>>()?;
        if kept.is_empty() {
            kept = cells;
        } else {
            for ((kept, cell), tool) in kept.iter_mut().zip(cells).zip(tools) {
                let is_worse = cell.verdict.rank() > kept.verdict.rank();
                if is_worse == (tool.family == Family::Ours) {
                    *kept = cell;
                } else {
                    kept.runs = run;
                }
            }
        }
        // One right run is enough for others.
        let is_right = |(cell, tool): (&Cell, &Tool)| {
            tool.family != Family::Ours && cell.verdict == Verdict::Right
        };
        if kept.iter().zip(tools).all(is_right) {
            break;
        }
    }
    Ok(kept)
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

/// A verdict for each tool: the worst one, where it ran several times at once.
fn verdicts(beside: &mut Beside, tools: &[Tool], load: Load) -> Result<Vec<Verdict>> {
    let facts = match load(beside) {
        Ok(facts) => facts,
        Err(error) => {
            let verdict = match error.downcast::<Refusal>() {
                Ok(Refusal(said)) => Verdict::Refused { said },
                Err(error) => Verdict::NotRun { why: format!("{error:#}") },
            };
            return Ok(vec![verdict; tools.len()]);
        }
    };
    let of = |tool: &Tool| {
        let runs = beside.printed.iter().filter(|left| left.tool.name == tool.name);
        let verdicts = runs.map(|Printed { tool, text, .. }| -> Result<Verdict> {
            let verdict = truth::judge(tool, &facts, text)?;
            // bpftrace 0.17 continues without the probes that it cannot attach, and says so.
            let mut lines = text.lines();
            let unattached = lines.find(|line| line.contains("could not attach probe"));
            Ok(match (verdict, unattached) {
                (Verdict::Wrong { printed: None | Some(NOTHING), .. }, Some(said)) => {
                    Verdict::Refused { said: said.to_owned() }
                }
                (verdict, _) => verdict,
            })
        });
        let verdicts = verdicts.collect::<Result<Vec<_>>>()?;
        verdicts.into_iter().max_by_key(Verdict::rank).context("nothing ran")
    };
    tools.iter().map(of).collect()
}
