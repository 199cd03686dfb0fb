//! Stage 07: the slowest request, where on the disk it was, and who issued it.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Device, QuietCli as Cli, Session};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for trace::types::max_latency {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    common::constants(&mut open.maps.rodata_data)?.quiet = cli.own.quiet;
    let skel = session.load(open)?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.block_rq_complete, &skel.progs.blk_mq_start_request_entry])?;
    session.trace_until_done()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "requests completed", skel.object())?;
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (completion without a start)", counts.unmatched);
    common::print_skipped(skel.object())?;
    // A skipped completion leaves its start behind, which is dropped when the address comes again.
    let skipped = common::times_skipped(skel.object())?;
    let not_measured = counts.dropped.max(skipped);
    print_max_latency(&skel.maps.max, &skel.maps.stacks, counts.completed, not_measured)
}

fn print_max_latency(
    max: &impl MapCore,
    stacks: &impl MapCore,
    measured: u64,
    not_measured: u64,
) -> Result<()> {
    let records = common::per_cpu::<trace::types::max_latency>(max)?;
    let latency = |record: &trace::types::max_latency| record.end - record.start.time;
    let Some(slowest) = records.iter().filter(|r| r.io != 0).max_by_key(|r| latency(r)) else {
        return Ok(());
    };
    println!("=====================================================");
    println!("From: blk_mq_start_request(rq={:#x}) {}", slowest.io, slowest.start.time);
    println!("To  : block_rq_complete (rq={:#x}) {}", slowest.io, slowest.end);
    println!("Bio Info : {}", Device(slowest.start.dev).sector(slowest.start.sector));
    println!("Max latency {} ns{}", latency(slowest), common::of_measured(measured, not_measured));
    println!("=====================================================");
    common::print_stack(stacks, slowest.start.stack_id)
}
