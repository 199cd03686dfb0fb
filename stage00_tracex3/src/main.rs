//! Stage 00: how long block requests take, as a heatmap; after the kernel's own tracex3.

use std::{
    mem::MaybeUninit,
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use common::{HeatmapCli as Cli, Histogram};
use libbpf_rs::{MapCore, skel::Skel};

mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use trace::TraceSkelBuilder;

fn main() -> ExitCode {
    common::main(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_DESCRIPTION"), run)
}

const ROW: Duration = Duration::from_secs(2);

fn run(cli: &Cli) -> Result<()> {
    let (builder, mut object) = (TraceSkelBuilder::default(), MaybeUninit::uninit());
    let (skel, mut links) = common::load(builder, &mut object, cli, |_| Ok(()))?;
    let heatmap = cli.own.heatmap();
    println!("{}", heatmap.legend());
    let mut total = Histogram::default();
    let (mut over, start) = (common::deadline(cli), Instant::now());
    for row in 1.. {
        while !over && start.elapsed() < row * ROW {
            thread::sleep(Duration::from_millis(50));
            over = common::deadline(cli);
        }
        if over {
            links.detach();
        }
        let now = Histogram::sum(&common::per_cpu(&skel.maps.latencies)?);
        if row % 20 == 1 {
            println!("{}", heatmap.scale());
        }
        println!("{}", heatmap.row(&now.since(&total)));
        total = now;
        if over {
            break;
        }
    }
    common::print_total(total.count(), "requests completed", skel.object())?;
    if total.count() > 0 {
        let percentiles = [("p50", 500), ("p99", 990), ("p99.9", 999)];
        let percentiles = percentiles.map(|(name, permille)| (name, total.percentile(permille)));
        for (name, ns) in percentiles.into_iter().chain([("max", total.max)]) {
            println!("{name:>8} {ns:>12} ns {:>9}", common::readable(ns));
        }
    }
    let counts = common::counters(&skel.maps.bss_data)?;
    println!("{:>8} in flight", skel.maps.starts.keys().count());
    println!("{:>8} dropped: the map was full, or their end not seen", counts.dropped);
    println!("{:>8} unmatched: flushes, dropped, issued before or after", counts.unmatched);
    common::print_missed(skel.object())?;
    Ok(())
}
