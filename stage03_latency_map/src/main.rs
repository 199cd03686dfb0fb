//! Stage 03: how long every bio takes.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::QuietCli as Cli;
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

fn main() -> ExitCode {
    common::main(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_DESCRIPTION"), run)
}

fn run(cli: &Cli) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let (skel, links) = common::load(TraceSkelBuilder::default(), &mut object, cli, |open| {
        common::constants(&mut open.maps.rodata_data).map(|c| c.quiet = cli.own.quiet)
    })?;
    common::print_trace_pipe(cli, links)?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "bios completed", skel.object())?;
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped: the map was full, or their end not seen", counts.dropped);
    println!("{:>8} unmatched: their start was not seen", counts.unmatched);
    common::print_missed(skel.object())?;
    Ok(())
}
