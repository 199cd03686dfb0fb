//! Stage 09: the same for one process: the others are left out in the kernel.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::PidCli as Cli;
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

/// What reads a file through the page cache, on 5.12 and later, and before.
const READ: [&str; 2] = ["filemap_read", "generic_file_buffered_read"];

fn main() -> ExitCode {
    common::main(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_DESCRIPTION"), run)
}

fn run(cli: &Cli) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let (skel, links) = common::load(TraceSkelBuilder::default(), &mut object, cli, |open| {
        common::hook_first_of(&READ, [&mut open.progs.read_begins, &mut open.progs.read_ends])?;
        let constants = common::constants(&mut open.maps.rodata_data)?;
        constants.quiet = cli.own.quiet;
        constants.page_shift = common::page_shift();
        constants.pid = cli.own.pid.unwrap_or_default();
        constants.namespace = common::pid_namespace()?;
        Ok(())
    })?;
    common::print_trace_pipe(cli, links)?;
    let counts = common::counters(&skel.maps.bss_data)?;
    if let Some(pid) = cli.own.pid {
        println!("Filtered PID : {pid}");
    }
    common::print_total(counts.completed, "reads through the page cache", skel.object())?;
    println!("=====================================================");
    println!("[Total {} Hit {} miss {}]", counts.total, counts.hit, counts.total - counts.hit);
    println!("=====================================================");
    println!("{:>8} readahead: pages brought in beyond what was asked for", counts.readahead);
    println!("{:>8} refused: would have had to wait; not in the total", counts.refused);
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped: the map was full, or their end not seen", counts.dropped);
    println!("{:>8} unmatched: begun before, or dropped", counts.unmatched);
    common::print_missed(skel.object())?;
    Ok(())
}
