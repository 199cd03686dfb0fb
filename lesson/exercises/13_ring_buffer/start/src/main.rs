//! Exercise 13: every slow bio, as it completes.

use std::{mem::MaybeUninit, process::ExitCode, time::Duration};

use anyhow::Result;
use common::{Device, Session};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::{TraceSkelBuilder, types::start};

/// What only this program has.
#[derive(clap::Args, Debug)]
struct Options {
    /// The shortest latency that is shown
    #[arg(long, value_name = "TIME", value_parser = common::duration, default_value = "10ms")]
    min: Duration,
}
type Cli = common::Cli<Options>;

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for start {}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.address_of_bio_chain_endio = common::kernel_function("bio_chain_endio")?;
    constants.min = cli.own.min.as_nanos() as i64;
    let skel = session.load(open)?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.wait()?;
    session.detach()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "bios completed");
    // Here: how many were slow, and how many were lost.
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    common::print_skipped(skel.object())
}

/// Prints the line of a bio.
#[expect(dead_code)] // remove this line once you call it
fn print(bytes: &[u8]) {
    let mut bio = start::default();
    if plain::copy_from_bytes(&mut bio, bytes).is_err() {
        return; // it never is: the kernel writes whole records
    }
    let ms = (bio.end - bio.time) as f64 / 1e6;
    let (sector, name) = (Device(bio.dev as u32).sector(bio.sector), common::text(&bio.comm));
    println!("{ms:>9.3} ms  {:>4} KiB  {sector} by {name}", bio.bytes / 1024);
}
