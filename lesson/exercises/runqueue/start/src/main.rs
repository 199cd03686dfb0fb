//! Exercise runqueue: how long each thread of a process waits for a CPU.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session};

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
    let _skel = session.load(open)?;
    session.wait()?;
    session.detach()
}
