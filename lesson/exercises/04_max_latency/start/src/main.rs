//! Exercise 04: the slowest bio.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session, TracePipe};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceMaps, TraceSkelBuilder};

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    let mut pipe = TracePipe::open()?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.trace(&mut pipe)?;
    session.detach()?;
    pipe.finish()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    let in_flight = skel.maps.starts.keys().count();
    common::print_total(counts.completed, "bios completed");
    println!("{in_flight:>8} in flight");
    println!("{:>8} split or checksummed (not measured before stage 10)", counts.split);
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    let not_measured = in_flight as u64 + counts.split + counts.dropped;
    common::print_skipped(skel.object())?;
    print_max_latency(&skel.maps, &common::of_measured(counts.completed, not_measured))
}

fn print_max_latency(_maps: &TraceMaps, of_measured: &str) -> Result<()> {
    // Here: choose the slowest bio of all CPUs' records.
    // `of_measured` says how many bios were not measured, if there are any.
    let (io, from, to) = ("0x0", 0, 0);
    println!("=====================================================");
    println!("From: submit_bio(bio={io}) {from}\nTo  : bio_endio (bio={io}) {to}");
    println!("Max latency {} ns{of_measured}", to - from);
    println!("=====================================================");
    Ok(())
}
