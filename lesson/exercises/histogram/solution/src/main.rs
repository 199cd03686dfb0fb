//! Exercise histogram: for each disk, how many bios took how long.

use std::{collections::BTreeMap, mem::MaybeUninit, process::ExitCode};

use anyhow::{Context, Result};
use common::{Cli, Device, Session};
use libbpf_rs::{MapCore, MapFlags, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for trace::types::slot {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.wait()?;
    session.detach()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "bios completed");
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} split or checksummed (not measured before stage 10)", counts.split);
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    common::print_skipped(skel.object())?;
    println!("{:>8} not in a histogram (map full)", counts.no_slot);
    print_histograms(&skel.maps.slots)
}

fn print_histograms(slots: &impl MapCore) -> Result<()> {
    let mut disks = BTreeMap::<u32, BTreeMap<u32, u64>>::new();
    for key in slots.keys() {
        let mut slot = trace::types::slot::default();
        plain::copy_from_bytes(&mut slot, &key).ok().context("a key is too short")?;
        let bios = slots.lookup(&key, MapFlags::ANY)?.context("a slot is gone")?;
        let bios = u64::from_ne_bytes(bios.try_into().ok().context("odd value")?);
        disks.entry(slot.dev).or_default().insert(slot.power, bios);
    }
    for (disk, slots) in disks {
        println!("disk {}", Device(disk));
        let most = slots.values().copied().max().unwrap_or(1);
        for (power, bios) in slots {
            let (low, high) = (1_u64 << power, (2_u64 << power) - 1);
            let stars = "*".repeat((bios * 40).div_ceil(most) as usize);
            println!("{low:>12} -> {high:<12} ns : {bios:<8} |{stars:<40}|");
        }
    }
    Ok(())
}
