//! Loads beside programs: each load runs once, beside all programs that say something about it, which are
//! started once for a group of loads. What is true of a load, judges from outside say: the kernel's counters,
//! fio, ftrace, a timer, mincore(). What a program prints has to be that, and each has laws of its own.
//!
//! The loads are in `truth/cases.toml` and [`loads`], the programs in `truth/tools.toml`.

pub mod laws;
pub mod loads;

use truth::{BEFORE, Family, Tool, TruthPlan, together};

use crate::{other_tools::Peer, prelude::*, run::NotJudged};

/// The groups of `truth/cases.toml`.
macro_rules! groups {
    ($($test:ident $group:literal),* $(,)?) => {
        pub const TESTS: &[crate::Test] =
            &[$((stringify!($test), || group($group))),*];
    };
}

groups![
    loads_disks "disks",
    loads_threads "threads",
    loads_split "split",
    loads_checksums "checksums",
    loads_partial "partial",
    loads_slow_sector "slow_sector",
    loads_stacked "stacked",
    loads_twice "twice",
    loads_timer "timer",
    loads_one_tag "one_tag",
    loads_paced "paced",
    loads_io_max "io_max",
    loads_writeback "writeback",
    loads_sizes "sizes",
    loads_cache "cache",
];

/// A tool that did not start, and what it said.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ToolRefusal(pub String);

/// Tools that run beside a load.
pub struct Beside {
    running: Vec<(Tool, Tracer)>,
    /// What those that count since the boot printed before the load.
    before: Vec<String>,
}

enum Tracer {
    Ours(Running),
    Peer(Peer),
}

/// What a tool has left.
pub struct Printed {
    pub tool: Tool,
    pub text: String,
    pub exit: Option<i32>,
}

impl Beside {
    /// Starts each tool so many times, until all are ready. The plan says where the roots of others are.
    pub fn start(tools: &[Tool], copies: usize, plan: Option<&TruthPlan>) -> Result<Beside> {
        let pid = std::process::id().to_string();
        let start = |tool: &Tool| {
            let argv = tool.argv.iter().map(|argument| argument.replace("{pid}", &pid)).collect();
            let tool = Tool { argv, ..tool.clone() };
            if tool.family <= Family::Lessons {
                let (name, arguments) = tool.argv.split_first().context("no program")?;
                let running = Running::spawn(Command::new(program(name)).args(arguments))?;
                return Ok((tool, Tracer::Ours(running)));
            }
            let peer = Peer::start(&tool, plan.context("a tool of others needs a plan")?)?;
            Ok((tool, Tracer::Peer(peer)))
        };
        let all = tools.iter().flat_map(|tool| vec![tool; copies]);
        let mut running = all.map(start).collect::<Result<Vec<_>>>()?;
        for (tool, tracer) in &mut running {
            match tracer {
                Tracer::Ours(running) => running.wait_for(&tool.ready)?,
                Tracer::Peer(peer) => peer.wait()?,
            }
        }
        let before = running.iter().map(|(tool, _)| match &tool.page {
            Some(page) if tool.since_boot => Ok(served(page)? + &BEFORE.to_string()),
            _ => Ok(String::new()),
        });
        Ok(Beside { before: before.collect::<Result<_>>()?, running })
    }

    /// Ends them when all disks are idle.
    pub fn end(self) -> Result<Vec<Printed>> {
        wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))?;
        let period = self.running.iter().map(|(tool, _)| tool.period).max().unwrap_or(0);
        thread::sleep(Duration::from_secs(2 * period));
        let mut pages = self.before;
        for ((tool, tracer), shown) in self.running.iter().zip(&mut pages) {
            *shown += &tool.page.as_deref().map_or(Ok(String::new()), served)?;
            match tracer {
                Tracer::Ours(running) => running.signal(Signal::INT)?,
                Tracer::Peer(peer) => peer.interrupt()?,
            }
        }
        let ended = self.running.into_iter().zip(pages).map(|((tool, tracer), page)| {
            let (text, exit) = match tracer {
                Tracer::Ours(running) => {
                    (running.end_well().context("after Ctrl-C")?.stdout, Some(0))
                }
                Tracer::Peer(peer) => peer.end()?,
            };
            Ok(Printed { tool, text: page + &text, exit })
        });
        ended.collect()
    }
}

/// What a server has at `127.0.0.1:9435/metrics`.
fn served(page: &str) -> Result<String> {
    let (address, path) = page.split_once('/').context("no path")?;
    let port = address.rsplit(':').next().unwrap_or_default().parse().context("no port")?;
    exporter::get(port, &format!("/{path}"))
}

/// Sets up the load of a case.
pub fn set_up(case: &str) -> Result<loads::Ready> {
    let load = loads::LOADS.iter().find(|(known, _)| *known == case);
    load.with_context(|| format!("{case} has no load"))?.1().context(case.to_owned())
}

/// Runs a group's loads, one after the other, beside all of our programs that answer their questions, started
/// once. Where one is wrong, `cargo truth --reproduce CASE/TOOL` runs one load beside one program.
fn group(name: &str) -> Result<()> {
    let mut cases = truth::all_cases()?;
    cases.retain(|case| case.group.as_deref() == Some(name));
    let asked = |tool: &Tool| cases.iter().any(|case| case.runs_beside(tool));
    let mut tools = truth::all_tools()?;
    tools.retain(|it| it.family <= Family::Lessons && asked(it) && is_subject(&it.argv[0]));
    ensure!(!tools.is_empty(), "no tool is asked");
    let mut ready = Vec::new();
    for case in &cases {
        match set_up(&case.name) {
            Ok(load) => ready.push((case.name.clone(), load)),
            // This kernel has no such disk: it has the other ones.
            Err(why) if why.is::<NotJudged>() && cases.len() > 1 => {
                judged_weakly(&format!("{why:#}"))
            }
            Err(error) => return Err(error),
        }
    }
    let copies = cases.iter().map(|case| case.copies).max().unwrap_or(1);
    let beside = Beside::start(&tools, copies, None)?;
    let mut loads = Vec::new();
    for (name, ready) in &mut ready {
        loads.push((name.clone(), ready().with_context(|| format!("load {name}"))?));
    }
    let printed = beside.end()?;
    drop(ready);
    let facts = together(&loads)?;
    let wrong = printed.iter().filter_map(|Printed { tool, text, .. }| {
        let error = laws::hold(tool, &facts, text).err()?;
        Some(format!("{}: {error:#}\n{}\n", tool.name, laws::summary(text)))
    });
    let wrong: String = wrong.collect();
    let names: Vec<&str> = loads.iter().map(|(name, _)| name.as_str()).collect();
    ensure!(wrong.is_empty(), "{wrong}after {}", names.join(", "));
    Ok(())
}
