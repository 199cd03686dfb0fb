//! Exercise inode: for every read of one file, how many of its pages were in memory already.

use std::{fs, mem::MaybeUninit, os::unix::fs::MetadataExt, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use common::{Session, TracePipe};
use libbpf_rs::{MapCore, skel::Skel};
use rustix::fs::{major, minor};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

/// The options of this program.
#[derive(clap::Args, Debug)]
struct FileOptions {
    /// The file
    file: PathBuf,
}
type Cli = common::Cli<FileOptions>;

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    common::pages_have(4096)?;
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let constants = common::constants(&mut open.maps.rodata_data)?;
    let file = fs::metadata(&cli.own.file).with_context(|| cli.own.file.display().to_string())?;
    constants.file_inode = file.ino();
    constants.file_dev = u64::from(major(file.dev()) << 20 | minor(file.dev()));
    let skel = session.load(open)?;
    let mut pipe = TracePipe::open()?;
    session.attach([&skel.progs.page_added, &skel.progs.read_ends, &skel.progs.read_begins])?;
    session.trace(&mut pipe)?;
    session.detach()?;
    pipe.finish()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "reads through the page cache");
    println!("=====================================================");
    println!("[Total {} Hit {} miss {}]", counts.total, counts.hit, counts.total - counts.hit);
    println!("=====================================================");
    println!("{:>8} readahead (pages brought in beyond those asked for)", counts.readahead);
    println!("{:>8} not judged (asynchronous, ended early, or resized)", counts.not_judged);
    println!("{:>8} in flight", skel.maps.reads.keys().count());
    println!("{:>8} dropped (map full)", counts.dropped);
    println!("{:>8} unmatched (return without an entry)", counts.unmatched);
    common::print_skipped(skel.object())
}
