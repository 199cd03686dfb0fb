//! What has not completed: if it hangs, it is the slowest of all.

use std::time::Duration;

use anyhow::{Result, anyhow};
use libbpf_rs::{Map, MapCore, MapFlags};
use serde::Serialize;

use crate::{disks::Names, operation::Operations, parts::Kib, trace::types::io};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for io {}

/// An I/O that was submitted and has not completed, as a line of --json has it.
#[derive(Serialize)]
pub struct Waiting {
    kind: &'static str,
    disk: String,
    operation: String,
    sector: Option<u64>,
    bytes: u32,
    /// How long ago it was submitted, in ns.
    age_ns: u64,
    pid: u32,
    process: String,
}

/// Those that had waited for `min` or longer at the time `now` (ns, the kernel's clock), the oldest first. To be called
/// after the programs are detached: while it reads the map, the kernel would skip kprobe programs on this CPU.
pub fn waiting(
    ios: &Map<'_>,
    now: u64,
    min: Duration,
    operations: &Operations,
    names: &Names,
) -> Result<Vec<Waiting>> {
    let mut found = Vec::new();
    for key in ios.keys() {
        let Some(bytes) = ios.lookup(&key, MapFlags::ANY)? else { continue };
        let mut io = io::default();
        plain::copy_from_bytes(&mut io, &bytes)
            .map_err(|_| anyhow!("an entry of {} bytes", bytes.len()))?;
        let age = now.saturating_sub(io.submitted);
        if u128::from(age) < min.as_nanos() {
            continue;
        }
        found.push(Waiting {
            kind: "waiting",
            disk: names.name((&io.by).into())?.to_string(),
            operation: operations.letters(io.by.operation).to_string(),
            sector: (io.by.sector != u64::MAX).then_some(io.by.sector),
            bytes: io.by.bytes,
            age_ns: age,
            pid: io.by.process,
            process: common::text(&io.by.comm),
        });
    }
    found.sort_by_key(|waiting| std::cmp::Reverse(waiting.age_ns));
    Ok(found)
}

/// So many lines at most: a disk that hangs may have thousands.
const LINES: usize = 20;

/// Prints them: in a table, or as lines of --json.
pub fn print(waiting: &[Waiting], json: bool) -> Result<()> {
    if json {
        for waiting in waiting {
            println!("{}", serde_json::to_string(waiting)?);
        }
        return Ok(());
    }
    if waiting.is_empty() {
        return Ok(());
    }
    println!("\nStill waiting: {}, the oldest first", waiting.len());
    for Waiting { disk, operation, sector, bytes, age_ns, pid, process, .. } in
        waiting.iter().take(LINES)
    {
        let sector = sector.map_or_else(|| "-".to_owned(), |sector| sector.to_string());
        let age = format!("{}.{:03} s", age_ns / 1_000_000_000, age_ns / 1_000_000 % 1000);
        println!(
            "{age:>10} {disk:<7} {operation:<4} {sector:>10} {:>5} KiB {pid:>8} {process}",
            Kib(*bytes)
        );
    }
    if waiting.len() > LINES {
        println!("{:>10} and {} more", "…", waiting.len() - LINES);
    }
    Ok(())
}
