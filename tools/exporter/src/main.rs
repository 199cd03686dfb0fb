//! Latency histograms of all disks, for Prometheus.

use std::{
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Args;
use common::{Cli, InFlight, Session};
use common_http::{Names, Request, Server};

mod audit;
mod canary;
mod http;
mod looks;
mod metrics;
mod requests;
mod scrape;
mod series;
mod shared;
mod stalls;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use canary::Canary;
use looks::Looks;
use requests::Requests;
use scrape::{Measured, Scraper, Texts};
use series::{Histograms, Memory};
use trace::{OpenTraceSkel, TraceProgs, TraceSkel, TraceSkelBuilder};

/// What is served, and where.
#[derive(Args, Debug)]
struct Exporter {
    /// Where to listen: address and port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9435", value_parser = address)]
    listen: SocketAddr,
    /// A name of this machine that clients ask for, beside its host name; may be given several times
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
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

fn address(text: &str) -> Result<SocketAddr, String> {
    let hint = "give an address and a port, like 127.0.0.1:9435, 0.0.0.0:9435 or [::1]:9435";
    text.parse().map_err(|error| format!("{error}; {hint}"))
}

/// What is measured, by the options.
#[derive(Clone, Copy)]
struct Chosen {
    bios: bool,
    parts: bool,
    /// How many CPUs there may be.
    cpus: u32,
    /// How many places for requests each of them has.
    places: u32,
}

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Exporter>, session: &mut Session) -> Result<()> {
    let options = &cli.own;
    let (listener, address) = listen(options.listen)?;
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    let cpus = libbpf_rs::num_possible_cpus().context("the number of CPUs is unknown")? as u32;
    let (bios, parts) = (options.bios || options.parts, options.parts);
    let chosen = Chosen { bios, parts, cpus, places: requests::places(cpus)? };
    size_maps(&mut open, chosen, &options.room)?;
    let preempts = common::preempts()?;
    set_constants(&mut open, chosen, preempts)?;
    choose_programs(&mut open, chosen, preempts)?;
    let skel = session.load(open)?;
    let measured = if chosen.bios {
        Measured::Bios(Histograms::new(&skel.maps, cpus)?)
    } else {
        Measured::Requests(Requests::new(&skel.maps, chosen.places, cpus)?)
    };
    attach(&skel.progs, session)?;
    let looks = Looks::new(chosen.bios, session.hooks_check())?;
    let mut scraper = Scraper::new(&skel, measured, chosen.parts, looks, cpus)?;
    if let Some(path) = &options.canary {
        scraper.canary = Some(Canary::new(path, chosen.bios, reads(&skel, chosen)?)?);
    }
    let mut server = Server::new(listener, "GET", Names::new(&options.host))?;
    eprintln!("{}: http://{address}/metrics", session.name());
    session.begin()?;
    while !session.is_over() {
        let mut texts = Texts::default();
        let mut metrics = |format| texts.get(format, || scraper.scrape(session, format));
        let answer = |request: &Request| http::answer(request, &mut metrics);
        server.serve(Duration::from_millis(50), answer)?;
    }
    drop(server);
    // From here on, connections are refused. It is the kernel that needs time to detach the programs.
    session.detach_at_once();
    Ok(())
}

fn listen(wanted: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(wanted).with_context(|| {
        format!("{wanted} cannot be listened on; choose another address with --listen")
    })?;
    let address = listener.local_addr().context("the listening socket has no address")?;
    Ok((listener, address))
}

/// Gives maps that are not used the least room.
fn size_maps(open: &mut OpenTraceSkel<'_>, chosen: Chosen, room: &InFlight) -> Result<()> {
    let Chosen { bios, parts, cpus, places } = chosen;
    let maps = &mut open.maps;
    maps.ios.set_max_entries(if bios { room.in_flight } else { 1 })?;
    maps.requeued.set_max_entries(if parts || !bios { room.in_flight } else { 1 })?;
    maps.ways.set_max_entries(if parts { room.in_flight } else { 1 })?;
    maps.histograms.set_max_entries(if bios { series::PLACES * cpus } else { 1 })?;
    maps.requests.set_max_entries(if bios { 1 } else { places * cpus })?;
    maps.others.set_max_entries(cpus)?;
    maps.pages.set_max_entries(cpus)?;
    Ok(())
}

fn set_constants(open: &mut OpenTraceSkel<'_>, chosen: Chosen, preempts: bool) -> Result<()> {
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.cpus = chosen.cpus;
    constants.places_of_a_cpu = chosen.places;
    constants.page_shift = common::page_shift();
    constants.with_parts = chosen.parts;
    if chosen.bios {
        constants.address_of_bio_chain_endio = common::kernel_function("bio_chain_endio")?;
        // Of modules that may not be loaded: then there are no such bios.
        constants.ends = common::ends_of_clones()?;
    } else {
        constants.address_of_mq_flush_data_end_io =
            common::kernel_function("mq_flush_data_end_io")?;
    }
    constants.first = preempts.into();
    Ok(())
}

/// Loads the programs for this kernel and for what is measured.
fn choose_programs(open: &mut OpenTraceSkel<'_>, chosen: Chosen, preempts: bool) -> Result<()> {
    let Chosen { bios, parts, .. } = chosen;
    let progs = &mut open.progs;
    progs.rq_done.set_autoload(!bios);
    progs.rq_requeued.set_autoload(!bios);
    progs.bio_start.set_autoload(bios);
    progs.bio_chained.set_autoload(bios);
    progs.bio_end.set_autoload(bios);
    progs.bio_end_probe.set_autoload(bios && preempts);
    progs.rq_given_back.set_autoload(parts);
    progs.rq_end.set_autoload(parts);
    progs.bio_remap.set_autoload(parts);
    progs.rq_end_probe.set_autoload(parts && preempts);
    let has_sessions = common::has_sessions()?;
    progs.filemap_read_session.set_autoload(has_sessions);
    progs.filemap_read_entry.set_autoload(!has_sessions);
    progs.filemap_read_exit.set_autoload(!has_sessions);
    Ok(())
}

/// Attaches the completions first: then no I/O is seen to start whose completion is not hooked yet.
fn attach(progs: &TraceProgs<'_>, session: &mut Session) -> Result<()> {
    session.attach([&progs.rq_requeued, &progs.rq_done])?;
    session.attach([&progs.bio_end, &progs.bio_end_probe, &progs.rq_end, &progs.rq_end_probe])?;
    session.attach([
        &progs.rq_given_back,
        &progs.bio_remap,
        &progs.bio_chained,
        &progs.bio_start,
    ])?;
    session.attach([&progs.page_added, &progs.filemap_read_exit])?;
    session.attach([&progs.filemap_read_entry, &progs.filemap_read_session])
}

/// What the canary finds its reads in.
fn reads(skel: &TraceSkel<'_>, chosen: Chosen) -> Result<canary::Reads> {
    if chosen.bios {
        let memory = Memory::new(&skel.maps, chosen.cpus)?;
        Ok(Box::new(move |disks| memory.reads(disks)))
    } else {
        let requests = Requests::new(&skel.maps, chosen.places, chosen.cpus)?;
        Ok(Box::new(move |disks| requests.reads(disks)))
    }
}
