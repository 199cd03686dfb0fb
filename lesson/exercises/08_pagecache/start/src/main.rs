//! Exercise 08: every read through the page cache, and how many bytes it returned.

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
    common::pages_have(4096)?;
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    let mut pipe = TracePipe::open()?;
    session.attach([&skel.progs.read_ends, &skel.progs.read_begins])?;
    session.trace(&mut pipe)?;
    session.detach()?;
    pipe.finish()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "reads through the page cache");
    println!("{:>8} bytes returned", counts.returned);
    println!("{:>8} not judged (asynchronous, ended early, or resized)", counts.not_judged);
    println!("{:>8} in flight", skel.maps.reads.keys().count());
    println!("{:>8} dropped (map full)", counts.dropped);
    println!("{:>8} unmatched (return without an entry)", counts.unmatched);
    common::print_skipped(skel.object())
}
