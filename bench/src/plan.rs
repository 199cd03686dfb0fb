//! What `cargo vm bench` asks of the program that measures, and what that answers.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// What reads while a tracer runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// 4 KiB at a random place of a null_blk disk, past the page cache.
    #[default]
    Direct,
    /// 4 KiB at a random place, all of it in the page cache.
    Cached4k,
    /// 1 MiB at a random place, all of it in the page cache.
    Cached1m,
    /// As [`Load::Direct`], from 4 disks in turn.
    Disks4,
    /// As [`Load::Direct`], from 16 disks in turn.
    Disks16,
    /// By 16 threads at once, of a disk that takes [`Load::DELAY_NS`].
    Threads16,
    /// By 64 threads at once, of a disk that takes [`Load::DELAY_NS`].
    Threads64,
}

impl Load {
    /// How the cost grows.
    pub const GROWTH: [Load; 5] =
        [Load::Direct, Load::Disks4, Load::Disks16, Load::Threads16, Load::Threads64];
    /// What the disk of several threads takes: less than 16 reads take the CPU, which is never idle.
    pub const DELAY_NS: u32 = 20_000;

    /// How many disks are read.
    pub fn disks(self) -> usize {
        match self {
            Load::Disks4 => 4,
            Load::Disks16 => 16,
            _ => 1,
        }
    }

    /// By how many threads.
    pub fn threads(self) -> u32 {
        match self {
            Load::Threads16 => 16,
            Load::Threads64 => 64,
            _ => 1,
        }
    }
}

/// The rows of which is measured how the cost grows.
pub const GROWTH: [&str; 6] = [
    "exporter",
    "exporter bios",
    "slow_io min 10s",
    "stage04",
    "biolatency of libbpf-tools",
    "biolatency.bt of bpftrace",
];

/// The loads of a tracer of the page cache.
pub const CACHED: &[Load] = &[Load::Cached4k, Load::Cached1m];
/// The loads of any other tracer.
pub const DIRECT: &[Load] = &[Load::Direct];

/// Pairs of programs that do nothing: name for `measure --floor`, of the row, what reads.
pub const EMPTY: [(&str, &str, &[Load]); 4] = [
    ("kprobe", "empty: kprobe submit_bio, kprobe bio_endio", DIRECT),
    ("fentry", "empty: fentry submit_bio, fentry bio_endio", DIRECT),
    ("mixed", "empty: kprobe submit_bio, fentry bio_endio", DIRECT),
    ("filemap", "empty: fentry filemap_read, fexit filemap_read", CACHED),
];

/// Something to run beside the reads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// Names the row: `stage04 quiet`.
    pub name: String,
    /// The package that has the program, where that is none of the workshop's.
    pub package: Option<String>,
    /// Program and arguments. `{reader}` is the process that reads, `{other}` one that does not;
    /// empty: nothing runs beside the reads.
    pub argv: Vec<String>,
    /// What reads.
    pub loads: Vec<Load>,
    /// Whether it prints a line for each read.
    pub lines: bool,
    /// At most so many reads a run.
    pub most: Option<u32>,
}

/// What several tracers answer: ours, and others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    /// Names it: `The slowest bio`.
    pub name: String,
    /// The row of ours.
    pub ours: String,
    /// Why ours is not the cheapest, where another one is.
    pub why: Option<String>,
    /// Whether the reads come from the page cache.
    #[serde(default)]
    cached: bool,
    /// Whether each read is a line.
    #[serde(default)]
    lines: bool,
    /// The tracers of others that answer it.
    pub peer: Vec<Peer>,
}

/// A tracer that is not ours.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// The row's name.
    pub name: String,
    package: String,
    argv: Vec<String>,
}

/// The questions, in the order of the report.
pub fn questions() -> Result<Vec<Question>> {
    #[derive(Deserialize)]
    struct Questions {
        question: Vec<Question>,
    }
    let all: Questions =
        toml::from_str(include_str!("../questions.toml")).context("questions.toml")?;
    Ok(all.question)
}

impl Question {
    /// What reads while they answer.
    pub fn load(&self) -> Load {
        if self.cached { Load::Cached4k } else { Load::Direct }
    }

    /// The others' rows.
    pub fn peers(&self) -> impl Iterator<Item = Row> {
        self.peer.iter().map(|peer| Row {
            name: peer.name.clone(),
            package: Some(peer.package.clone()),
            argv: peer.argv.clone(),
            loads: vec![self.load()],
            lines: self.lines,
            most: None,
        })
    }

    /// The names of the rows: ours first.
    pub fn rows(&self) -> impl Iterator<Item = &str> {
        let peers = self.peer.iter().map(|peer| peer.name.as_str());
        std::iter::once(self.ours.as_str()).chain(peers)
    }

    /// What our row has to be measured with, too.
    pub fn ask(&self, row: &mut Row) {
        if !row.loads.contains(&self.load()) {
            row.loads.push(self.load());
        }
        row.lines |= self.lines;
    }
}

/// A script that prepares a root file system, its first argument, for what is started in it; the second one,
/// if any, has the kernel's headers.
pub const MOUNTS: &str = "cd \"$1\"; mkdir -p proc sys dev run tmp usr/src usr/lib/modules
    for dir in proc sys dev; do mount --rbind /$dir $dir; done
    for dir in ${2:+src lib/modules}; do mount --bind \"$2/usr/$dir\" usr/$dir; done\n";

/// What to measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchPlan {
    /// One after the other.
    pub rows: Vec<Row>,
    /// I/Os a run of [`Load::Direct`] and [`Load::Cached4k`]; those of 1 MiB are fewer.
    pub ios: u32,
    /// How many runs of each load.
    pub runs: u32,
    /// Whether each tracer is started once before, so that its files are in memory.
    pub warm: bool,
    /// Whether fio does the direct reads.
    pub fio: bool,
    /// The root file system of the tracers that are not ours; none: that of the machine.
    pub root: Option<PathBuf>,
    /// The kernel's headers, for those that compile C.
    pub headers: Option<PathBuf>,
}

/// A run, in ns for each I/O; where the clock counts instructions, that is instructions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The time that passed.
    pub elapsed: f64,
    /// The CPU time of the thread that reads: without the tracer's own process. fio reports none.
    pub thread: Option<f64>,
    /// What the tracer's process takes after the last read, until it has done its work for all.
    #[serde(default)]
    pub later: f64,
}

/// The runs of a load.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// What read.
    pub load: Load,
    /// All runs.
    pub runs: Vec<Run>,
}

/// A program in the kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BpfProgram {
    /// As the kernel knows it: at most 15 letters.
    pub name: String,
    /// How many instructions the verifier followed.
    pub verified: u32,
    /// The size of its machine code in bytes.
    pub jited: usize,
}

/// How a tracer started and ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Started {
    /// ms from exec until it was attached: until it used less than 2 ms of CPU time in a second.
    pub attach_ms: f64,
    /// CPU time of its process in that time, in ms.
    pub attach_cpu_ms: f64,
    /// Its peak resident memory then, in KiB.
    pub attached_kib: u64,
    /// ms from SIGINT to its end.
    pub exit_ms: f64,
    /// Its programs in the kernel.
    pub programs: Vec<BpfProgram>,
}

/// What came out of a row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchOutcome {
    /// The row's name.
    pub name: String,
    /// The load's runs.
    pub measured: Vec<Measured>,
    /// `None`: nothing was started.
    pub started: Option<Started>,
    /// Why the row has no figures, or what is wrong with them.
    pub note: Option<String>,
}
