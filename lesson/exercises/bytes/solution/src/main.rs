//! Exercise bytes: how many bytes each process submits.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::{Context, Result};
use common::{Cli, Session};
use libbpf_rs::{MapCore, MapFlags};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for trace::types::process {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(_cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let skel = session.load(open)?;
    session.attach([&skel.progs.io_start])?;
    session.wait()?;
    session.detach()?;
    print_processes(&skel.maps.processes)?;
    let counts = common::counters(&skel.maps.bss_data)?;
    println!("{} bytes not counted (map full)", counts.not_counted);
    Ok(())
}

fn print_processes(map: &impl MapCore) -> Result<()> {
    let mut lines = Vec::new();
    for key in map.keys() {
        let value = map.lookup(&key, MapFlags::ANY)?.context("an entry is gone")?;
        let mut process = trace::types::process::default();
        plain::copy_from_bytes(&mut process, &value).ok().context("a value is too short")?;
        let pid = u32::from_ne_bytes(key.try_into().ok().context("odd key")?);
        lines.push((process.bytes, pid, common::text(&process.name)));
    }
    lines.sort();
    for (bytes, pid, name) in lines.iter().rev() {
        println!("pid {pid} ({name}): {bytes} bytes");
    }
    Ok(())
}
