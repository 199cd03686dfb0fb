//! A program that no kernel takes, for the tests of what is said then: the variable `BROKEN` chooses
//! between a hook that is gone and code that the verifier rejects.

use std::{env, mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, NoOptions, Session};

mod gone {
    include!(concat!(env!("OUT_DIR"), "/gone.skel.rs"));
}
mod refused {
    include!(concat!(env!("OUT_DIR"), "/refused.skel.rs"));
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli<NoOptions>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    if env::var_os("BROKEN").is_some_and(|which| which == "gone") {
        let open = session.open(gone::GoneSkelBuilder::default(), &mut object)?;
        let skel = session.load(open)?;
        session.attach([&skel.progs.blk_start_request_entry])
    } else {
        let open = session.open(refused::RefusedSkelBuilder::default(), &mut object)?;
        let skel = session.load(open)?;
        session.attach([&skel.progs.bio_endio_entry])
    }
}
