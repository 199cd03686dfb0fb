//! Stage 07: the slowest request, where it was, and who issued it.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Device, QuietCli as Cli};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for trace::types::max_latency {}

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
    common::print_total(counts.completed, "requests completed", skel.object())?;
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped: the map was full, or their end not seen", counts.dropped);
    println!("{:>8} unmatched: their start was not seen", counts.unmatched);
    common::print_missed(skel.object())?;
    print_max_latency(&skel.maps.max, &skel.maps.stacks)
}

fn print_max_latency(max: &impl MapCore, stacks: &impl MapCore) -> Result<()> {
    let records = common::per_cpu::<trace::types::max_latency>(max)?;
    let latency = |record: &trace::types::max_latency| record.started.end - record.started.start;
    let Some(slowest) = records.iter().filter(|r| r.io != 0).max_by_key(|r| latency(r)) else {
        return Ok(());
    };
    println!("=====================================================");
    println!("From: blk_mq_start_request(rq={:#x}) {}", slowest.io, slowest.started.start);
    println!("To  : block_rq_complete (rq={:#x}) {}", slowest.io, slowest.started.end);
    println!("Bio Info : {}", Device(slowest.started.dev).sector(slowest.started.sector));
    println!("Max latency {} ns", latency(slowest));
    println!("=====================================================");
    common::print_stack(stacks, slowest.started.stack_id, "blk_mq_start_request")
}
