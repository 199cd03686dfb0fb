//! Stage 09: the same for one process: the kernel leaves out all others.

use std::{mem::MaybeUninit, process::ExitCode};

use anyhow::Result;
use common::{PidCli as Cli, Session};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.quiet = cli.own.quiet;
    constants.page_shift = common::page_shift();
    constants.pid = cli.own.pid.unwrap_or_default();
    constants.pid_namespace = common::pid_namespace()?;
    let has_sessions = common::has_sessions()?;
    open.progs.filemap_read_session.set_autoload(has_sessions);
    open.progs.filemap_read_entry.set_autoload(!has_sessions);
    open.progs.filemap_read_exit.set_autoload(!has_sessions);
    if !common::has_function("filemap_read")? {
        // Its name up to 5.11.
        let old = "generic_file_buffered_read".to_owned();
        open.progs.filemap_read_entry.set_attach_target(0, Some(old.clone()))?;
        open.progs.filemap_read_exit.set_attach_target(0, Some(old))?;
    }
    let skel = session.load(open)?;
    if has_sessions {
        session.attach([&skel.progs.page_added, &skel.progs.filemap_read_session])?;
    } else {
        let (entry, exit) = (&skel.progs.filemap_read_entry, &skel.progs.filemap_read_exit);
        session.attach([&skel.progs.page_added, exit, entry])?;
    }
    session.trace_until_done()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    if let Some(pid) = cli.own.pid {
        println!("Filtered PID : {pid}");
    }
    common::print_total(counts.completed, "reads through the page cache", skel.object())?;
    println!("=====================================================");
    println!("[Total {} Hit {} miss {}]", counts.total, counts.hit, counts.total - counts.hit);
    println!("=====================================================");
    println!("{:>8} readahead (pages brought in beyond those asked for)", counts.readahead);
    println!("{:>8} refused (would have had to wait; not in the total)", counts.refused);
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped (map full, or return not seen)", counts.dropped);
    println!("{:>8} unmatched (return without an entry)", counts.unmatched);
    common::print_skipped(skel.object())
}
