//! What `cargo vm bench` asks of the program that measures, and what that answers.

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
    /// The same, 1 MiB at a time.
    Cached1m,
}

/// The loads of a tracer of the page cache.
pub const CACHED: &[Load] = &[Load::Cached4k, Load::Cached1m];
/// Those of any other.
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
    /// At most so many reads a run.
    pub most: Option<u32>,
}

/// A tracer of `peers.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Peer {
    name: String,
    package: String,
    argv: Vec<String>,
    #[serde(default)]
    cached: bool,
}

/// Other tracers that do what a stage does.
pub fn peers() -> Result<Vec<Row>> {
    #[derive(Deserialize)]
    struct Peers {
        peer: Vec<Peer>,
    }
    let peers: Peers = toml::from_str(include_str!("../peers.toml")).context("peers.toml")?;
    let row = |Peer { name, package, argv, cached }| {
        let loads = if cached { CACHED } else { DIRECT }.to_vec();
        Row { name, package: Some(package), argv, loads, most: None }
    };
    Ok(peers.peer.into_iter().map(row).collect())
}

/// What to measure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
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
}

/// A run, in ns for each I/O; where the clock counts instructions, that is instructions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// The time that passed.
    pub elapsed: f64,
    /// The CPU time of the thread that reads: without the tracer's own process. fio reports none.
    pub thread: Option<f64>,
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
pub struct Outcome {
    /// The row's name.
    pub name: String,
    /// The load's runs.
    pub measured: Vec<Measured>,
    /// `None`: nothing was started.
    pub started: Option<Started>,
    /// Why the row has no figures, or what is wrong with them.
    pub note: Option<String>,
}
