//! Exercise without: how long requests took, from a field of each.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session};
use libbpf_rs::skel::Skel;

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
    session.attach([&skel.progs.io_end])?;
    session.wait()?;
    session.detach()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "requests completed");
    println!("{:>8} ns in all, from allocation to completion", counts.total);
    println!("{:>8} without a time of allocation", counts.not_noted);
    common::print_skipped(skel.object())?;
    let longest = common::per_cpu::<u64>(&skel.maps.max)?.into_iter().max().unwrap_or_default();
    println!("Max latency {longest} ns");
    Ok(())
}
