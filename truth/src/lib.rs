//! How true are storage tracers? The tools, the cases in which they run, and the verdicts.
//!
//! `tools.toml` says how a tool is started, when it is ready, which questions it answers and how its
//! output is read. `cases.toml` says in words what each case does and who judges it. The loads are in
//! `tests/guest/truth.rs`.

mod answer;
mod picture;
mod report;
mod start;
mod verdict;
mod yours;

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

pub use answer::{How, ToolAnswer};
pub use report::{RUNS, TruthReport, text as shown};
pub use start::Broke;
pub use verdict::{Expected, Fact, NOT_READY, Verdict, judge, together, warns};
pub use yours::{Badge, Score, json, yours};

/// What a tool can be asked. A tool is judged only by the questions that it answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Question {
    /// How many I/Os completed: bios or requests, whichever a tool counts.
    Ios,
    /// How many bios completed.
    Bios,
    /// How many of them a process named `dd` submitted.
    BiosOfDd,
    /// The sector of the slowest bio, in the device that it was submitted to.
    SlowSector,
    /// The highest sector that was read or written, in its disk.
    HighestSector,
    /// The latency of the slowest bio, ns.
    SlowestBio,
    /// The latency of the slowest bio, ns, where a cgroup's limit holds it back before the block layer's first
    /// tracepoint.
    SlowestThrottled,
    /// How much of the bios' latency passed before the driver had them, in percent.
    QueuedShare,
    /// How many requests completed.
    Requests,
    /// How many of them were of 64 KiB or more, below 128 KiB.
    LargeRequests,
    /// How many requests the driver completed: flushes as well, which the block layer makes for all that
    /// ask for one at the time, and no request that only asks for a flush.
    DriverRequests,
    /// How many of those ended without a start: they only asked for a flush.
    UnissuedRequests,
    /// How many bios ended that nobody submitted: clones of device mapper, a driver's own.
    OtherBios,
    /// How many bios ended that nobody submitted, with the parts of split bios, each of which ends beside the
    /// whole.
    OtherBiosAndParts,
    /// The latency of the slowest request, ns: at least the truth.
    SlowestRequest,
    /// The latency of the fastest request, ns: at least the truth.
    FastestRequest,
    /// How many pages that were read were resident before.
    Hits,
    /// How many were not.
    Misses,
    /// How many reads a process has asked a file system for.
    FileReads,
    /// How many bytes disks have read and written.
    Bytes,
    /// How many of them a process named `dd` has asked for.
    BytesOfDd,
    /// How many bios were merged into the request of another one.
    Merges,
    /// How many of a hundred bios were.
    MergedShare,
    /// The latency of all I/Os together, ns: divided by the time that passed, the mean queue depth.
    TimeInFlight,
    /// How long at least one I/O was in flight, ns.
    BusyTime,
    /// For how much of the time that passed at least one I/O was in flight, in percent.
    Utilisation,
    /// The mean latency, ns.
    MeanLatency,
}

impl Question {
    /// Whether the answers of two loads that run one after the other add up.
    pub fn adds_up(self) -> bool {
        use Question::*;
        !matches!(
            self,
            SlowSector
                | HighestSector
                | SlowestBio
                | SlowestThrottled
                | QueuedShare
                | SlowestRequest
                | FastestRequest
                | Merges
                | MergedShare
                | Utilisation
                | MeanLatency
        )
    }
}

/// Who publishes a tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// This workshop: its tools, which measure all.
    Ours,
    /// Its lessons, which count what they do not measure. They are in no table.
    Lessons,
    /// bcc's tools in C, with libbpf.
    LibbpfTools,
    /// bpftrace's tools.
    Bpftrace,
    /// bcc's tools in Python.
    Bcc,
    /// Tools that read the kernel's counters: sysstat, iotop.
    Counters,
    /// Tools that take the kernel's events without BPF: blktrace, perf.
    Events,
    /// Whoever runs `cargo truth --tool FILE`: in no table.
    Yours,
}

/// A tool, as `tools.toml` or a file of yours declares it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tool {
    /// Its name in the table.
    pub name: String,
    /// Who publishes it.
    #[serde(default = "yours::family")]
    pub family: Family,
    /// The program and its arguments.
    #[serde(alias = "command")]
    pub argv: Vec<String>,
    /// The directory in which it runs: of a tool of yours, that of its file.
    #[serde(default)]
    pub dir: Option<PathBuf>,
    /// The root file system in which it runs, `truth/rootfs-NAME.toml`; ours need none.
    pub rootfs: Option<String>,
    /// The package there that it is of.
    pub package: Option<String>,
    /// What it prints once it is ready; others are ready when their programs are attached.
    #[serde(default)]
    pub ready: String,
    /// It prints, every so many seconds, what was since the last time.
    #[serde(default)]
    pub period: u64,
    /// Its figures are of all the time since the boot: what a load adds to them is the figure.
    #[serde(default)]
    pub since_boot: bool,
    /// It compiles its programs with the kernel's headers, for up to a minute at each start.
    #[serde(default)]
    pub headers: bool,
    /// The questions that it answers, and where in its output.
    pub answers: BTreeMap<Question, ToolAnswer>,
    /// It also counts what other processes do meanwhile.
    #[serde(default)]
    pub system_wide: bool,
    /// It counts pages that any process accesses, also through mappings, as each one does that starts:
    /// nobody knows how many these are, so that only a figure that is too small is wrong.
    #[serde(default)]
    pub counts_mappings: bool,
    /// It counts what the driver gets, a request that is tried again twice.
    #[serde(default)]
    pub at_issue: bool,
    /// What it says that it has not measured.
    pub admits: Option<ToolAnswer>,
    /// What it says that it has not measured, where each I/O counts once: what it has measured and this are all.
    pub leaves_out: Option<ToolAnswer>,
    /// A page that it serves, `127.0.0.1:9435/metrics`: its figures are there.
    pub page: Option<String>,
}

impl Family {
    /// As in `tools.toml`.
    pub fn name(self) -> &'static str {
        match self {
            Family::Ours => "ours",
            Family::Lessons => "lessons",
            Family::LibbpfTools => "libbpf-tools",
            Family::Bpftrace => "bpftrace",
            Family::Bcc => "bcc",
            Family::Counters => "counters",
            Family::Events => "events",
            Family::Yours => "yours",
        }
    }
}

impl Tool {
    /// Whether the worst of several runs counts, and not the best.
    pub fn is_strict(&self) -> bool {
        matches!(self.family, Family::Ours | Family::Yours)
    }

    /// The figure that it printed. One that counts since the boot prints its figures twice, with [`BEFORE`]
    /// between them.
    pub fn figure(&self, answer: &ToolAnswer, output: &str) -> Result<Option<Expected>> {
        let Some((before, after)) = output.split_once(BEFORE).filter(|_| self.since_boot) else {
            return answer.read(output);
        };
        let (before, after) = (answer.read(before)?, answer.read(after)?);
        Ok(before.zip(after).map(|(before, after)| Expected {
            least: after.least.saturating_sub(before.least),
            most: after.most.saturating_sub(before.most),
        }))
    }

    /// Whether it answers one of a case's questions. One that serves a page has one address.
    pub fn is_asked(&self, case: &Case) -> bool {
        (case.copies == 1 || self.page.is_none())
            && case.asks.iter().any(|question| self.answers.contains_key(question))
    }
}

/// What separates what a tool printed before a load from what it printed after it.
pub const BEFORE: char = '\u{c}';

/// The variable that holds a [`TruthPlan`], as JSON.
pub const PLAN: &str = "VM_TRUTH";

/// What the guest is to judge.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TruthPlan {
    /// The names of a case and of a tool each.
    pub cells: Vec<(String, String)>,
    /// How often each cell is judged.
    pub runs: u32,
    /// Where the root file systems are, by name.
    pub rootfs: BTreeMap<String, PathBuf>,
    /// A directory with the kernel's headers.
    pub headers: Option<PathBuf>,
    /// Tools that `tools.toml` does not have.
    pub yours: Vec<Tool>,
    /// Print the commands of the load and what the tool prints.
    pub shows: bool,
}

/// A case beside a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// The case.
    pub case: String,
    /// The tool.
    pub tool: String,
    /// What came out.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// How often the kernel skipped one of its programs meanwhile, `recursion_misses`.
    pub skipped: u64,
    /// How many runs were judged.
    pub runs: u32,
    /// What it exited with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// A figure is wrong, the tool exited with 0, and has printed no word of an error or a loss.
    #[serde(default)]
    pub silent: bool,
}

/// A case, in words.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// The guest test `loads_GROUP` runs its loads one after the other, beside programs that are started once. Without
    /// one, no guest test does.
    pub group: Option<String>,
    /// What its judge knows.
    pub asks: Vec<Question>,
    /// Others are not asked, and the table has no row for it.
    #[serde(default)]
    pub only_ours: bool,
    /// How often each tool runs at once.
    #[serde(default = "once")]
    pub copies: usize,
    /// In the guest tests, only these tools run beside it: its other questions are those of other cases.
    #[serde(default)]
    pub beside: Vec<String>,
    /// What runs.
    pub load: String,
    /// Who says what is true.
    pub judge: String,
}

impl Case {
    /// Whether the guest tests run this tool beside it.
    pub fn runs_beside(&self, tool: &Tool) -> bool {
        tool.is_asked(self) && (self.beside.is_empty() || self.beside.contains(&tool.name))
    }
}

fn once() -> usize {
    1
}

/// The tools that are compared.
pub fn tools() -> Result<Vec<Tool>> {
    let is_ours = |tool: &Tool| tool.family <= Family::Lessons;
    let of_table =
        |tool: &Tool| tool.family != Family::Lessons && !(is_ours(tool) && tool.page.is_some());
    Ok(all_tools()?.into_iter().filter(of_table).collect())
}

/// All tools, with the lessons, and those that serve a page.
pub fn all_tools() -> Result<Vec<Tool>> {
    #[derive(Deserialize)]
    struct File {
        tool: Vec<Tool>,
    }
    let file: File = toml::from_str(include_str!("../tools.toml")).context("truth/tools.toml")?;
    Ok(file.tool)
}

/// The cases of the comparison.
pub fn cases() -> Result<Vec<Case>> {
    Ok(all_cases()?.into_iter().filter(|case| !case.only_ours).collect())
}

/// All cases.
pub fn all_cases() -> Result<Vec<Case>> {
    #[derive(Deserialize)]
    struct File {
        case: Vec<Case>,
    }
    let file: File = toml::from_str(include_str!("../cases.toml")).context("truth/cases.toml")?;
    Ok(file.case)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_can_be_read() {
        let tools = all_tools().unwrap();
        for tool in &tools {
            let answers = tool.answers.values().chain(&tool.admits).chain(&tool.leaves_out);
            for answer in answers {
                answer.read("").unwrap_or_else(|error| panic!("{}: {error:#}", tool.name));
            }
            assert!(!tool.answers.is_empty(), "{} answers nothing", tool.name);
            let is_ours = tool.family <= Family::Lessons;
            assert!(tool.family != Family::Yours && tool.dir.is_none(), "{}", tool.name);
            assert_eq!(tool.package.is_none(), is_ours, "{} is of which package?", tool.name);
            assert_eq!(tool.rootfs.is_none(), is_ours, "{} runs where?", tool.name);
        }
        let unique: std::collections::BTreeSet<_> = tools.iter().map(|tool| &tool.name).collect();
        assert_eq!(unique.len(), tools.len());
        let cases = all_cases().unwrap();
        assert!(cases.len() >= 20);
        for case in &cases {
            let ours = |tool: &&Tool| tool.family == Family::Ours && tool.is_asked(case);
            assert!(tools.iter().any(|tool| ours(&tool)), "{}: no tool is asked", case.name);
        }
    }
}
