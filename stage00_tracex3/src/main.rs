//! Stage 00: how long block requests take, as a heatmap; after the kernel's own tracex3.

use std::{
    mem::MaybeUninit,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use common::Session;
use libbpf_rs::{MapCore, skel::Skel};

mod heatmap;
mod histogram;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use heatmap::HeatmapCli as Cli;
use histogram::{Histogram, readable};
use trace::TraceSkelBuilder;

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

const ROW: Duration = Duration::from_secs(2);

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    open.maps.starts.set_max_entries(cli.own.room.in_flight)?;
    let skel = session.load(open)?;
    // The completion first: then no I/O is seen to start whose completion is not hooked yet.
    session.attach([&skel.progs.io_end, &skel.progs.io_start])?;
    session.begin()?;
    let mut heatmap = cli.own.heatmap(session.terminal_columns(), session.has_colours());
    println!("{}", heatmap.legend());
    let (mut total, start) = (Histogram::default(), Instant::now());
    for row in 1.. {
        while !session.is_over() && start.elapsed() < row * ROW {
            thread::sleep(Duration::from_millis(50));
        }
        let over = session.is_over();
        if over {
            session.detach()?;
        }
        let now = Histogram { max: 0, slots: common::counters(&skel.maps.bss_data)?.slots };
        let new = now.since(&total);
        if heatmap.fit(&new) || row % 20 == 1 {
            println!("{}", heatmap.scale());
        }
        println!("{}", heatmap.row(&new));
        total = now;
        if over {
            break;
        }
    }
    total.max = common::per_cpu(&skel.maps.max)?.into_iter().max().unwrap_or_default();
    let counts = common::counters(&skel.maps.bss_data)?;
    let in_flight = skel.maps.starts.keys().count();
    common::print_total(total.count(), "requests completed");
    println!("{in_flight:>8} in flight");
    println!("{:>8} dropped (map full, or completion not seen)", counts.dropped);
    println!("{:>8} unmatched (no start seen)", counts.unmatched);
    common::print_skipped(skel.object())?;
    let not_measured = in_flight as u64 + counts.dropped;
    print_percentiles(&total, &common::of_measured(total.count(), not_measured));
    Ok(())
}

fn print_percentiles(total: &Histogram, of_measured: &str) {
    let percentiles = [("p50", 500), ("p99", 990), ("p99.9", 999)];
    let percentiles = percentiles.map(|(name, permille)| (name, total.percentile(permille)));
    for (name, ns) in percentiles.into_iter().chain([("max", total.max)]) {
        if total.count() > 0 {
            println!("{name:>8} {ns:>12} ns {:>9}{of_measured}", readable(ns));
        }
    }
}
