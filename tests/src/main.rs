//! Programs that misbehave, for the test of messages. The variable `BROKEN` chooses: a hook that is gone, code
//! that the verifier rejects, or a program that nobody attaches.

use std::{env, mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{Cli, NoOptions, Session};

mod gone {
    include!(concat!(env!("OUT_DIR"), "/gone.skel.rs"));
}
mod refused {
    include!(concat!(env!("OUT_DIR"), "/refused.skel.rs"));
}
mod unattached {
    include!(concat!(env!("OUT_DIR"), "/unattached.skel.rs"));
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli<NoOptions>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    match env::var("BROKEN").as_deref() {
        Ok("gone") => {
            let open = session.open(gone::GoneSkelBuilder::default(), &mut object)?;
            let skel = session.load(open)?;
            session.attach([&skel.progs.blk_start_request_entry])
        }
        Ok("unattached") => {
            let open = session.open(unattached::UnattachedSkelBuilder::default(), &mut object)?;
            let _skel = session.load(open)?;
            session.begin()
        }
        which => {
            let mut open = session.open(refused::RefusedSkelBuilder::default(), &mut object)?;
            open.progs.io_end.set_autoload(which != Ok("value"));
            open.progs.reads_too_much.set_autoload(which == Ok("value"));
            let skel = session.load(open)?;
            session.attach([&skel.progs.io_end])
        }
    }
}
