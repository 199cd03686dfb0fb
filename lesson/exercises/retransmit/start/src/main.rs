//! Exercise retransmit: how many TCP segments each connection had to send again.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, Session};

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
    let _skel = session.load(open)?;
    session.wait()?;
    session.detach()
}
