//! `ctracer`: the life of a kernel struct.

use std::{
    mem::MaybeUninit,
    process::ExitCode,
    sync::atomic::{AtomicU64, Ordering},
};

use anyhow::{Context, Result};
use common::{Cli, Session, btf::Btf};

mod attach;
mod check;
mod cli;
mod decode;
mod discovery;
mod errno;
mod errors;
mod events;
mod filter;
mod follow;
mod gaps;
mod ledger;
mod life;
mod lives;
mod multi_attach;
mod outputs;
mod record;
mod recording;
mod report;
mod summary;
mod text;
mod value;
mod trace {
    #![allow(missing_docs)]
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use attach::{Attached, Tier};
use cli::{Command, Ctracer};
use decode::Layout;
use follow::Follower;
use lives::{END_MISSED, Effect, Rules};
use outputs::Outputs;
use trace::{OpenTraceSkel, TraceSkelBuilder};

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli<Ctracer>, session: &mut Session) -> Result<()> {
    let cli = &cli.own;
    if let Some(Command::Report { file, memory, files }) = &cli.command {
        return outputs::report(file, *memory, files);
    }
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    session.has_room(&open)?;
    let types = Btf::read("vmlinux", None)?;
    let tier = Tier::choose(&types);
    let found = discovery::discover(cli, &types)?;
    if cli.list {
        found.print();
        return Ok(());
    }
    let _runs = attach::count_runs()?; // before there are files that nobody fills
    let outputs = Outputs::create(&cli.files, None)?;
    let layout = Layout::new(&types, &cli.type_name, &found.symbols)?;

    set_constants(&mut open, cli, tier, &layout)?;
    tier.prepare(&mut open, &found.functions)?;
    let mut skel = session.load(open)?;

    if tier == Tier::Single {
        attach::fill(&skel.maps.functions, &found.functions)?;
    }
    let attached = Attached::attach(tier, &mut skel, &found.functions, session)?;
    let Some(attached) = attached else { return Ok(()) };

    let reader = events::Reader::new(&skel.maps.events, layout.size)?;
    let trace = found.into_trace(&cli.type_name)?;
    let mut follower = Follower::new(cli, &layout, &trace, session.has_colours())?;
    let own = || common::per_cpu(&skel.maps.counters);
    let read = || ledger::read(|| attached.counts(&skel.progs), own);
    let before = read()?;
    let variables = skel.maps.bss_data.as_deref_mut().context("the program has no variables")?;
    // SAFETY: the variable is aligned, and mapped as long as the programs are loaded. Not a plain
    // write: the compiler does not know that the kernel reads it.
    let recording = unsafe { AtomicU64::from_ptr(&raw mut variables.recording) };
    recording.store(1, Ordering::SeqCst);
    session.begin()?;
    while !session.is_over() && follower.bound().is_none() {
        follower.take(reader.poll()?)?;
    }
    recording.store(0, Ordering::SeqCst);
    session.detach()?;
    let ledger = ledger::between(&before, &read()?);
    follower.take(reader.rest()?)?;
    if let Some(process) = cli.pid.as_ref().filter(|process| process.has_ended()) {
        eprintln!("ctracer: process {} has ended", process.number);
    }
    outputs.write(follower.finish(ledger)?)
    // `attached` is dropped last: the user sees the results while the probes are removed.
}

/// Tells the BPF program the struct, the filter, and how lives begin and end.
fn set_constants(
    open: &mut OpenTraceSkel<'_>,
    cli: &Ctracer,
    tier: Tier,
    layout: &Layout,
) -> Result<()> {
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.object_size = layout.size as u64;
    constants.by_address = tier == Tier::Single;
    if let Some(process) = &cli.pid {
        (constants.pid, constants.started) = (process.number, process.started);
    }
    constants.pid_namespace = common::pid_namespace()?;
    constants.dev = cli.dev.unwrap_or(0);
    constants.sample = cli.sample.unwrap_or(1);
    let rules = Rules(&cli.type_name);
    constants.by_life = rules.tell_the_first_event();
    constants.of_others = Effect::OF_OTHERS;
    constants.end_missed = END_MISSED;
    let made_at = rules.made().and_then(|field| layout.position(field));
    constants.made_at = made_at.unwrap_or(0) as u32;
    let comparisons = cli.filter.as_ref().map(|filter| filter.resolve(layout)).transpose()?;
    let comparisons = comparisons.unwrap_or_default();
    constants.comparisons = comparisons.len() as u32;
    constants.filter[..comparisons.len()].copy_from_slice(&comparisons);
    Ok(())
}
