//! Stage 01: a line for every bio that is submitted.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::Cli;

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

fn main() -> ExitCode {
    common::main(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_DESCRIPTION"), run)
}

fn run(cli: &Cli) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let (_skel, links) = common::load(TraceSkelBuilder::default(), &mut object, cli, |_| Ok(()))?;
    common::print_trace_pipe(cli, links)?;
    Ok(())
}
