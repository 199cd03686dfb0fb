//! Exercise inode: for every read of one file, which of its pages were in memory already.

use std::{fs, mem::MaybeUninit, os::unix::fs::MetadataExt, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use common::Session;
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
    /// Print no event lines
    #[arg(short, long)]
    quiet: bool,
}
impl common::Options for FileOptions {
    fn prints_events(&self) -> bool {
        !self.quiet
    }
}
type Cli = common::Cli<FileOptions>;

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.quiet = cli.own.quiet;
    let file = fs::metadata(&cli.own.file).with_context(|| cli.own.file.display().to_string())?;
    constants.file_inode = file.ino();
    constants.file_dev = u64::from(major(file.dev()) << 20 | minor(file.dev()));
    constants.page_shift = common::page_shift();
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
