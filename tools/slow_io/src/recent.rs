//! The flight recorder: what completed before a slow bio.

use std::time::Duration;

use anyhow::{Result, anyhow};
use libbpf_rs::{Map, MapCore, MapFlags};

use crate::event::Completed;

/// How many records the map has room for: RECENT in recent.h for each of two programs.
pub const ENTRIES: u32 = 2 * 1024;

/// A bio that the BPF program has recorded.
pub fn completed(bytes: &[u8]) -> Result<Completed> {
    let mut completed = Completed::default();
    plain::copy_from_bytes(&mut completed, bytes)
        .map_err(|_| anyhow!("a record of {} bytes", bytes.len()))?;
    Ok(completed)
}

/// The bios of the same disk, its partitions included, that have completed in this time before `slow`, the
/// oldest one first. Each program on each CPU keeps the last 1024. A record that is being written while it
/// is read is left out: then two reads differ.
pub fn before(recent: &Map<'_>, slow: &Completed, time: Duration) -> Result<Vec<Completed>> {
    let mut found = Vec::new();
    let from = slow.times.ended.saturating_sub(time.as_nanos() as u64);
    for key in recent.keys() {
        let read = || recent.lookup_percpu(&key, MapFlags::ANY).map(Option::unwrap_or_default);
        for (bytes, _) in read()?.iter().zip(read()?).filter(|(bytes, again)| *bytes == again) {
            let earlier = completed(bytes)?;
            let is_of_disk = earlier.by.diskseq == slow.by.diskseq;
            if is_of_disk && (from..slow.times.ended).contains(&earlier.times.ended) {
                found.push(earlier);
            }
        }
    }
    found.sort_by_key(|earlier| earlier.times.ended);
    Ok(found)
}
