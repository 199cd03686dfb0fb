//! The flight recorder: what completed before a slow bio.

use std::{collections::HashMap, time::Duration};

use anyhow::{Result, anyhow};
use common::Device;
use libbpf_rs::{Map, MapCore, MapFlags};

use crate::{Io, line};

/// How many records the map has room for: RECENT in recent.h for each of two programs.
pub const ENTRIES: u32 = 2 * 1024;

/// A record of the BPF program.
pub fn io(bytes: &[u8]) -> Result<Io> {
    let mut io = Io::default();
    plain::copy_from_bytes(&mut io, bytes)
        .map_err(|_| anyhow!("a record of {} bytes", bytes.len()))?;
    Ok(io)
}

/// The bios of the same disk, its partitions included, that have completed in this time before `slow`, the
/// oldest one first. Each program on each CPU keeps the last 1024. A record that is being written while it
/// is read is left out: then two reads differ.
pub fn before(recent: &Map<'_>, slow: &Io, time: Duration) -> Result<Vec<Io>> {
    let mut found = Vec::new();
    let mut disks = HashMap::new();
    let mut disk = |dev| {
        let name =
            |dev| Device(dev).partition_of().map_or_else(|| line::name(dev), |(disk, _)| disk);
        disks.entry(dev).or_insert_with(|| name(dev)).clone()
    };
    let slow_disk = disk(slow.dev);
    let from = slow.ended.saturating_sub(time.as_nanos() as u64);
    for key in recent.keys() {
        let read = || recent.lookup_percpu(&key, MapFlags::ANY).map(Option::unwrap_or_default);
        for (bytes, _) in read()?.iter().zip(read()?).filter(|(bytes, again)| *bytes == again) {
            let io = io(bytes)?;
            if disk(io.dev) == slow_disk && (from..slow.ended).contains(&io.ended) {
                found.push(io);
            }
        }
    }
    found.sort_by_key(|io| io.ended);
    Ok(found)
}
