//! Stage 03: how long every bio takes.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session, TracePipe};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

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
    common::print_skipped(skel.object())?;
    Ok(())
}
