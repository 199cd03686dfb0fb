//! Exercise runqueue: how long each thread of a process waits for a CPU.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::{Context, Result};
use common::{Cli, Session};
use libbpf_rs::{MapCore, MapFlags, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

/// The process.
#[derive(clap::Args, Debug)]
struct Process {
    /// The process whose threads are measured
    #[arg(value_parser = common::process)]
    pid: u32,
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Process>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    common::constants(&mut open.maps.rodata_data)?.process = cli.own.pid;
    let skel = session.load(open)?;
    let progs = &skel.progs;
    session.attach([&progs.wakes, &progs.is_born, &progs.switches])?;
    session.wait()?;
    session.detach()?;
    let mut threads = Vec::new();
    for key in skel.maps.waited.keys() {
        let value = skel.maps.waited.lookup(&key, MapFlags::ANY)?.context("an entry is gone")?;
        let tid = u32::from_ne_bytes(key.try_into().ok().context("odd key")?);
        threads.push((u64::from_ne_bytes(value.try_into().ok().context("odd value")?), tid));
    }
    threads.sort();
    for (ns, tid) in threads.iter().rev() {
        println!("tid {tid}: {ns} ns");
    }
    println!("{:>8} ns waited for a CPU", threads.iter().map(|(ns, _)| ns).sum::<u64>());
    println!("{:>8} dropped (map full)", common::counters(&skel.maps.bss_data)?.dropped);
    common::print_skipped(skel.object())
}
