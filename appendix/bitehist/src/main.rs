//! How large block I/Os are, as a histogram.

use std::{
    mem::MaybeUninit,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use common::{Cli, InFlight, Session};
use libbpf_rs::{MapCore, MapFlags, skel::Skel};

mod histogram;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use histogram::{Histograms, Sizes};
use trace::{TraceSkelBuilder, types};

// SAFETY: the C structs hold integers only: any bytes are a value of them.
unsafe impl plain::Plain for types::which {}
// SAFETY: as above.
unsafe impl plain::Plain for types::sizes {}

/// `--interval`, `--per-disk`.
#[derive(Args, Debug)]
struct HistogramOptions {
    /// Print what completed in each interval, not only the sum at the end: 5s, 1m
    #[arg(short, long, value_name = "TIME", value_parser = common::duration)]
    interval: Option<Duration>,
    /// A histogram for each disk
    #[arg(short, long)]
    per_disk: bool,
    #[command(flatten)]
    room: InFlight,
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<HistogramOptions>, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    open.maps.starts.set_max_entries(cli.own.room.in_flight)?;
    let preempts = common::preempts()? && common::has_function("bpf_rdonly_cast")?;
    common::constants(&mut open.maps.rodata_data)?.first = preempts.into();
    open.progs.io_end_probe.set_autoload(preempts);
    let skel = session.load(open)?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    let ends = [&skel.progs.io_end, &skel.progs.io_end_probe];
    session.attach(ends)?;
    session.attach([&skel.progs.io_start])?;
    session.begin()?;
    let now = || histograms(&skel.maps.histograms, cli.own.per_disk);
    let (start, mut before, mut from) = (Instant::now(), Histograms::default(), Duration::ZERO);
    while !session.is_over() {
        thread::sleep(Duration::from_millis(50));
        let to = start.elapsed();
        if cli.own.interval.is_some_and(|interval| to >= from + interval) && !session.is_over() {
            let total = now()?;
            println!("from {:.1} s to {:.1} s:", from.as_secs_f64(), to.as_secs_f64());
            println!("{}", total.since(&before).text());
            (before, from) = (total, to);
        }
    }
    session.detach()?;
    let counts = common::counters(&skel.maps.bss_data)?;
    print!("{}", now()?.text());
    common::print_total(counts.completed, "I/Os completed");
    println!("{:>8} commands of a driver (in no histogram)", counts.commands);
    let in_flight = skel.maps.starts.keys().count();
    println!("{in_flight:>8} in flight");
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    let not_measured = in_flight as u64 + counts.dropped;
    common::print_skipped_by_both(skel.object(), ends, not_measured)
}

fn histograms(map: &impl MapCore, per_disk: bool) -> Result<Histograms> {
    let mut histograms = Histograms::default();
    for bytes in map.keys() {
        // The BPF program removes none: each key still has its value.
        let Some(value) = map.lookup(&bytes, MapFlags::ANY)? else { continue };
        let (mut which, mut sizes) = (types::which::default(), types::sizes::default());
        plain::copy_from_bytes(&mut which, &bytes).ok().context("a key is too short")?;
        plain::copy_from_bytes(&mut sizes, &value).ok().context("a histogram is too short")?;
        let types::sizes { ios, sectors, slots } = sizes;
        let disk = per_disk.then_some(which.dev);
        histograms.add(disk, which.kind, &Sizes { ios, sectors, slots });
    }
    Ok(histograms)
}
