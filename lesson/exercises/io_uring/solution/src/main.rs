//! Exercise io_uring: the same for reads that are asked for more than once.

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
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    // Without io_uring, no read has this callback.
    let callback = common::kernel_function_if_any("io_complete_rw")?;
    common::constants(&mut open.maps.rodata_data)?.address_of_io_complete_rw = callback;
    let skel = session.load(open)?;
    let mut pipe = TracePipe::open()?;
    session.attach([&skel.progs.page_added, &skel.progs.read_ends, &skel.progs.read_begins])?;
    session.trace(&mut pipe)?;
    session.detach()?;
    pipe.finish()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "reads through the page cache");
    println!("=====================================================");
    println!("[Total {} Hit {} miss {}]", counts.total, counts.hit, counts.total - counts.hit);
    println!("=====================================================");
    println!("{:>8} readahead (pages brought in beyond those asked for)", counts.readahead);
    println!("{:>8} not judged (ended by an error, or resized)", counts.not_judged);
    println!("{:>8} refused (would have had to wait; not in the total)", counts.refused);
    println!("{:>8} in flight", skel.maps.reads.keys().count());
    println!("{:>8} dropped (map full)", counts.dropped);
    println!("{:>8} unmatched (return without an entry)", counts.unmatched);
    common::print_skipped(skel.object())
}
