//! Exercise 14: every slow bio, as it completes, and where its time went.

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
    let (mut slow, mut not_divided) = (0, 0);
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, |bytes| {
        slow += 1;
        not_divided += u64::from(!print(bytes));
        0 // a negative number would end the reading
    })?;
    let ring = ring.build()?;
    println!(
        "{:>9} {:>9} {:>9} {:>9} {:>9} ms  {:>4} KiB",
        "TOTAL", "WAIT", "QUEUE", "DEVICE", "END", ""
    );
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
    println!("{slow:>8} slow, {not_divided} of them not divided (no request with times)");
    println!("{:>8} lost (the buffer was full)", counts.lost);
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    println!("{:>8} requeued (requests that the driver got again)", counts.requeued);
    common::print_skipped(skel.object())
}

/// Prints the line of a bio; whether its time could be divided.
fn print(bytes: &[u8]) -> bool {
    let mut bio = start::default();
    if plain::copy_from_bytes(&mut bio, bytes).is_err() {
        return false; // it never is: the kernel writes whole records
    }
    let ms = |from: u64, to: u64| format!("{:.3}", to.saturating_sub(from) as f64 / 1e6);
    let mut columns = vec![ms(bio.time, bio.end)];
    let request = [bio.request.allocated, bio.request.issued, bio.request.completed];
    let is_divided = !request.contains(&0);
    let mut from = bio.time;
    for to in request.into_iter().chain([bio.end]) {
        // A bio may join an older request: what was before the bio is no part of its time.
        let to = to.clamp(from, bio.end.max(from));
        columns.push(if is_divided { ms(from, to) } else { "-".into() });
        from = to;
    }
    let columns: String = columns.iter().map(|column| format!("{column:>9} ")).collect();
    let (sector, name) = (Device(bio.dev as u32).sector(bio.sector), common::text(&bio.comm));
    println!("{columns}ms  {:>4} KiB  {sector} by {name}", bio.bytes / 1024);
    is_divided
}
