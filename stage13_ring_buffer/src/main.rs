//! Stage 13: every slow bio, as it completes.

use std::{io, mem::MaybeUninit, process::ExitCode, thread, time::Duration};

use anyhow::{Result, ensure};
use common::{Device, Session};
use libbpf_rs::{MapCore, RingBufferBuilder, skel::Skel};

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
    let mut slow = 0;
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, |bytes| {
        slow += 1;
        print(bytes);
        0 // a negative number would end the reading
    })?;
    let ring = ring.build()?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.begin()?;
    while !session.is_over() {
        // Not all at once: a busy disk may fill the buffer as quickly as it is read.
        let read = ring.consume_raw_n(1000);
        ensure!(read >= 0, "the ring buffer: {}", io::Error::from_raw_os_error(-read));
        if read == 0 {
            thread::sleep(Duration::from_millis(50));
        }
    }
    session.detach()?;
    ring.consume()?;
    drop(ring);
    let counts = common::counters(&skel.maps.bss_data)?;
    common::print_total(counts.completed, "bios completed");
    println!("{slow:>8} slow");
    println!("{:>8} lost (the buffer was full)", counts.lost);
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    common::print_skipped(skel.object())
}

/// Prints the line of a bio.
fn print(bytes: &[u8]) {
    let mut bio = start::default();
    if plain::copy_from_bytes(&mut bio, bytes).is_err() {
        return; // it never is: the kernel writes whole records
    }
    let ms = (bio.end - bio.time) as f64 / 1e6;
    let (sector, name) = (Device(bio.dev as u32).sector(bio.sector), common::text(&bio.comm));
    println!("{ms:>9.3} ms  {:>4} KiB  {sector} by {name}", bio.bytes / 1024);
}
