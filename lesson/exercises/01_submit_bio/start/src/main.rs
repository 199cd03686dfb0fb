//! Exercise 01: a line for every bio that is submitted.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session, TracePipe};

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
    let mut pipe = TracePipe::open()?;
    session.attach([&skel.progs.io_start])?;
    session.trace(&mut pipe)?;
    session.detach()?;
    pipe.finish()?;
    Ok(())
}
