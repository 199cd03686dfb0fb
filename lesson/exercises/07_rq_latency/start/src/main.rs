//! Exercise 07: the slowest request, where on the disk it was, and who started it.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceMaps, TraceSkelBuilder, types::max_latency};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for max_latency {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.wait()?;
    session.detach()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    let in_flight = skel.maps.starts.keys().count();
    common::print_total(counts.completed, "requests completed");
    println!("{in_flight:>8} in flight");
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    let not_measured = in_flight as u64 + counts.dropped;
    common::print_skipped(skel.object())?;
    print_max_latency(&skel.maps, &common::of_measured(counts.completed, not_measured))
}

fn print_max_latency(maps: &TraceMaps, of_measured: &str) -> Result<()> {
    let records = common::per_cpu::<max_latency>(&maps.max)?;
    let latency = |record: &max_latency| record.end - record.start.time;
    let Some(slowest) = records.iter().filter(|r| r.io != 0).max_by_key(|r| latency(r)) else {
        return Ok(());
    };
    let (io, from, to) = (format!("{:#x}", slowest.io), slowest.start.time, slowest.end);
    println!("=====================================================");
    println!("From: blk_mq_start_request(rq={io}) {from}\nTo  : block_rq_complete (rq={io}) {to}");
    let device = common::Device(slowest.start.dev as u32);
    println!("Bio Info : {}", device.sector(slowest.start.sector));
    println!("Max latency {} ns{of_measured}", latency(slowest));
    println!("=====================================================");
    common::print_stack(&maps.stacks, slowest.start.stack_id)
}
