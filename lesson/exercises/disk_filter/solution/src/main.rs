//! Exercise disk: how long every bio of one disk takes.

use std::{fs, mem::MaybeUninit, process::ExitCode};

use anyhow::{Context, Result};
use common::{Session, TracePipe};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

/// The options of this program.
#[derive(clap::Args, Debug)]
struct DiskOptions {
    /// The disk or partition, by its name in /dev
    disk: String,
}
type Cli = common::Cli<DiskOptions>;

/// The kernel's number of a disk or partition.
fn number(disk: &str) -> Result<u32> {
    let file = format!("/sys/class/block/{disk}/dev");
    let text = fs::read_to_string(&file).with_context(|| format!("no disk {disk}: {file}"))?;
    let (major, minor) = text.trim().split_once(':').context("odd number of a device")?;
    Ok(major.parse::<u32>()? << 20 | minor.parse::<u32>()?)
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    common::constants(&mut open.maps.rodata_data)?.disk = number(&cli.own.disk)?;
    let skel = session.load(open)?;
    let mut pipe = TracePipe::open()?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.trace(&mut pipe)?;
    session.detach()?;
    pipe.finish()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "bios completed");
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} split or checksummed (not measured before stage 05)", counts.split);
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    common::print_skipped(skel.object())
}
