//! Programs that misbehave, for the tests of messages and of detaching. The variable `BROKEN` chooses: a
//! hook that is gone, code that the verifier rejects, a program that nobody attaches, or one that runs for
//! long.

use std::{env, mem::MaybeUninit, process::ExitCode, thread, time::Duration};

use anyhow::Result;
use common::{Cli, NoOptions, Session, counters};

mod gone {
    include!(concat!(env!("OUT_DIR"), "/gone.skel.rs"));
}
mod refused {
    include!(concat!(env!("OUT_DIR"), "/refused.skel.rs"));
}
mod slow {
    include!(concat!(env!("OUT_DIR"), "/slow.skel.rs"));
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
            let open = session.open(slow::SlowSkelBuilder::default(), &mut object)?;
            let _skel = session.load(open)?;
            session.begin()
        }
        Ok("slow") => {
            let open = session.open(slow::SlowSkelBuilder::default(), &mut object)?;
            let skel = session.load(open)?;
            session.attach([&skel.progs.block_rq_issue])?;
            session.begin()?;
            while !session.is_over() {
                thread::sleep(Duration::from_millis(50));
            }
            session.detach()?;
            // First the ends: a program that ends in between would look as if it had been waited for.
            let counts = counters(&skel.maps.bss_data)?;
            let ended = counts.ended;
            println!("{ended} ended\n{} begun", counts.begun);
            Ok(())
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
