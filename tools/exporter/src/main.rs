//! Latency histograms of all disks, for Prometheus.

use std::{
    collections::BTreeMap,
    fs,
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use common::{Cli, InFlight, Session};
use common_http::{Request, Server};
use libbpf_rs::skel::Skel;

mod audit;
mod canary;
mod http;
mod metrics;
mod requests;
mod series;
mod shared;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use audit::Audit;
use canary::Canary;
use metrics::{Build, Ios, Metrics, reads_not_measured};
use requests::Requests;
use series::{Histograms, Memory, Series, Sums};
use shared::Shared;
use trace::TraceSkelBuilder;

/// What is served, and where.
#[derive(Args, Debug)]
struct Exporter {
    /// Where to listen: address and port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9435")]
    listen: SocketAddr,
    /// Measure bios, from their submission on, instead of requests: this costs more
    #[arg(long)]
    bios: bool,
    /// As --bios, and count the seconds that bios spend in each part of their way: as `slow_io` does
    #[arg(long)]
    parts: bool,
    /// After each scrape, read 4 KiB of this file or block device, and look for that in the figures
    #[arg(long, value_name = "PATH")]
    canary: Option<PathBuf>,
    /// The size of the maps of bios.
    #[command(flatten)]
    room: InFlight,
}

/// What the histograms are of.
enum Measured<'a> {
    Requests(Requests),
    Bios(Histograms<'a>),
}

impl Measured<'_> {
    fn read(&self) -> Result<BTreeMap<Series, Sums>> {
        match self {
            Measured::Requests(requests) => requests.read(),
            Measured::Bios(histograms) => histograms.read(),
        }
    }
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Exporter>, session: &mut Session) -> Result<()> {
    let Exporter { listen, bios, parts, ref room, ref canary } = cli.own;
    let bios = bios || parts;
    let listener = TcpListener::bind(listen).with_context(|| {
        format!("{listen} cannot be listened on; choose another address with --listen")
    })?;
    let address = listener.local_addr().context("the listening socket has no address")?;

    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let cpus = libbpf_rs::num_possible_cpus().context("the number of CPUs is unknown")? as u32;
    let maps = &mut open.maps;
    maps.ios.set_max_entries(if bios { room.in_flight } else { 1 })?;
    maps.issues.set_max_entries(if parts { room.in_flight } else { 1 })?;
    maps.ways.set_max_entries(if parts { room.in_flight } else { 1 })?;
    maps.histograms.set_max_entries(if bios { series::PLACES * cpus } else { 1 })?;
    maps.requests.set_max_entries(if bios { 1 } else { series::PLACES * cpus })?;
    maps.others.set_max_entries(cpus)?;
    maps.pages.set_max_entries(cpus)?;
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.cpus = cpus;
    constants.page_shift = common::page_shift();
    constants.with_parts = parts;
    if bios {
        constants.address_of_bio_chain_endio = common::kernel_function("bio_chain_endio")?;
        // Of modules that may not be loaded: then there are no such bios.
        constants.ends = common::ends_of_clones()?;
    } else {
        constants.address_of_mq_flush_data_end_io =
            common::kernel_function("mq_flush_data_end_io")?;
    }
    let preempts = common::preempts()?;
    constants.first = preempts.into();
    let progs = &mut open.progs;
    progs.rq_done.set_autoload(!bios);
    progs.rq_requeued.set_autoload(!bios);
    progs.bio_start.set_autoload(bios);
    progs.bio_chained.set_autoload(bios);
    progs.bio_end.set_autoload(bios);
    progs.bio_end_probe.set_autoload(bios && preempts);
    progs.rq_start.set_autoload(parts);
    progs.rq_end.set_autoload(parts);
    progs.bio_remap.set_autoload(parts);
    progs.rq_end_probe.set_autoload(parts && preempts);
    let has_sessions = common::has_sessions()?;
    progs.filemap_read_session.set_autoload(has_sessions);
    progs.filemap_read_entry.set_autoload(!has_sessions);
    progs.filemap_read_exit.set_autoload(!has_sessions);
    let skel = session.load(open)?;
    let measured = if bios {
        Measured::Bios(Histograms::new(&skel.maps, cpus)?)
    } else {
        Measured::Requests(Requests::new(&skel.maps, cpus)?)
    };
    let pages: Shared<shared::Pages> = Shared::new(&skel.maps.pages, cpus as usize)?;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("kernel's release")?;
    let build = Build { version: env!("CARGO_PKG_VERSION"), kernel: kernel.trim().to_owned() };

    session.attach([&skel.progs.rq_requeued, &skel.progs.rq_done])?;
    // The completions first: then no I/O is seen to start whose completion is not hooked yet.
    let progs = &skel.progs;
    session.attach([&progs.bio_end, &progs.bio_end_probe, &progs.rq_end, &progs.rq_end_probe])?;
    session.attach([&progs.rq_start, &progs.bio_remap, &progs.bio_chained, &progs.bio_start])?;
    session.attach([&progs.page_added, &progs.filemap_read_exit])?;
    session.attach([&progs.filemap_read_entry, &progs.filemap_read_session])?;
    let mut audit = Audit::begin(bios, || measured.read())?;
    let reads: canary::Reads = if bios {
        let memory = Memory::new(&skel.maps, cpus)?;
        Box::new(move |disks| memory.reads(disks))
    } else {
        let requests = Requests::new(&skel.maps, cpus)?;
        Box::new(move |disks| requests.reads(disks))
    };
    let canary = canary.as_ref().map(|path| Canary::new(path, bios, reads));
    let mut canary = canary.transpose()?;
    let mut server = Server::new(listener, "GET")?;
    eprintln!("exporter: http://{address}/metrics");
    session.begin()?;
    while !session.is_over() {
        let mut metrics = |format| {
            session.hooks_still_run()?;
            let counts = common::counters(&skel.maps.bss_data)?;
            let look = audit.look()?; // before our figures are read
            let series = measured.read()?;
            let gaps = audit.compare(&look, &series);
            let ios = match &measured {
                Measured::Requests(requests) => Ios::requests(series, requests.others()),
                Measured::Bios(_) => Ios::bios(series, parts, counts),
            };
            let metrics = Metrics {
                build: build.clone(),
                ios,
                gaps,
                canary: canary.as_ref().map(Canary::sight),
                pages: pages.iter().map(shared::Pages::read).collect(),
                reads_not_measured: reads_not_measured(counts),
                skipped: session.times_skipped(skel.object())?,
            };
            let text = metrics.encode(format);
            if let Some(canary) = &mut canary {
                canary.fly();
            }
            text
        };
        let answer = |request: &Request| http::answer(request, &mut metrics);
        server.serve(Duration::from_millis(50), answer)?;
    }
    drop(server);
    // From here on, connections are refused. It is the kernel that needs time to detach the programs.
    session.detach_at_once();
    Ok(())
}
