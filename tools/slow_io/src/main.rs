//! `slow_io`: every slow I/O, and where its time went.

use std::{cell::RefCell, mem::MaybeUninit, process::ExitCode};

use anyhow::{Context, Result};
use common::Session;
use libbpf_rs::RingBufferBuilder;

mod answer;
mod below;
mod cgroups;
mod cli;
mod clock;
mod disks;
mod event;
mod file;
mod kind;
mod line;
mod live;
mod named;
mod only;
mod operation;
mod parts;
mod recent;
mod run;
mod sums;
mod waiting;
mod who;
mod trace {
    include!(concat!(env!("OUT_DIR"), "/trace.skel.rs"));
}
use answer::Counts;
use cli::{Slow, SlowCli as Cli, Who};
use disks::Names;
use line::{Layout, Lines};
use live::{Live, Reader};
use operation::Operations;
use run::Run;
use sums::{Disk, Sums};
use trace::{OpenTraceSkel, TraceProgs, TraceSkelBuilder};
use waiting::{INITIAL, Watch};

fn main() -> ExitCode {
    common::main(common::program!(), run)
}

fn run(cli: &Cli, session: &mut Session) -> Result<()> {
    let options = &cli.own;
    if options.live {
        live::has_terminal(session)?;
    }
    let mut object = MaybeUninit::uninit();
    let mut open = session.open(TraceSkelBuilder::default(), &mut object)?;
    size_maps(&mut open, options)?;
    let preempts = common::preempts()?;
    open.progs.look_at_disk.set_autoload(common::has_function("part_inflight_show")?);
    set_constants(&mut open, options, preempts)?;
    only::set(&mut open, options)?;
    choose_programs(&mut open, options, preempts);
    let mut skel = session.load(open)?;
    let runs = skel.maps.data_data.take().context("the program has no variables")?;
    let names = Names::default();
    let mut sums = Sums::new(&names);
    sums.follow(&skel.maps.disks)?;
    let operations = Operations::of_kernel()?;
    // poll() reads until the buffer is empty, and a busy disk may fill it faster than lines are printed: an
    // error from its callback ends it after each turn.
    let layout = Layout::of(session.terminal_columns(), session.has_colours());
    let lines = RefCell::new(Lines::new(options, layout, &operations, &names, &skel.maps)?);
    let mut ring = RingBufferBuilder::new();
    ring.add(&skel.maps.events, |bytes| lines.borrow_mut().add(bytes))?;
    let ring = ring.build()?;
    only::follow(&skel, session, options)?;
    attach(&skel.progs, session)?;
    let mut watch = Watch::new(&skel, options, &operations, &names, layout)?;
    let reader = options.live.then(|| Reader::new(&skel)).transpose()?;
    set(&mut runs.starts_unseen, false);
    session.begin()?;
    let run = Run { session, skel: &skel, options, ring: &ring, lines: &lines };
    match reader {
        Some(reader) => Live { run: &run, names: &names, operations: &operations, reader }
            .show(&mut sums, &mut watch)?,
        None => print_slow_bios(&run, &mut sums, &mut watch)?,
    }
    set(&mut runs.starts_unseen, true);
    let look = watch.look()?;
    session.detach()?;
    let waiting = watch.list(&look)?;
    lines.borrow_mut().end_turns();
    ring.consume()?;
    drop(ring);
    lines.into_inner().finish()?;
    let disks = sums.read(&skel.maps.other_disks, options.disk.is_some())?;
    print_disks(&disks, options, session.has_colours());
    if options.who.is_some() {
        who::print(&skel.maps, options, &operations, &names)?;
    }
    if !options.json && !disks.is_empty() {
        answer::print_slow(&disks, options);
    }
    only::print(&skel, options)?;
    waiting::print(&waiting, options.json)?;
    let counts = Counts::read(&skel, options, &disks)?;
    match options.json {
        true => counts.print_json(),
        false => counts.print(cli.verbose, session.hooks_still_run().is_ok()),
    }
    Ok(())
}

/// Sets a variable that the kernel reads, in memory that both share.
fn set(variable: &mut bool, value: bool) {
    // SAFETY: it is a reference. The kernel reads it meanwhile: the compiler must leave no write out.
    unsafe { std::ptr::write_volatile(variable, value) }
}

fn size_maps(open: &mut OpenTraceSkel<'_>, options: &Slow) -> Result<()> {
    let maps = &mut open.maps;
    maps.ios.set_max_entries(options.room.in_flight)?;
    maps.requeued.set_max_entries(options.room.in_flight)?;
    maps.ways.set_max_entries(options.room.in_flight)?;
    if options.has_causes() {
        maps.causes.set_max_entries(options.causes)?;
    }
    if options.live {
        maps.all_watched.set_max_entries(maps.disks.max_entries() + 1)?;
    }
    if options.before.is_some() {
        maps.recent.set_max_entries(recent::ENTRIES)?;
    }
    Ok(())
}

fn set_constants(open: &mut OpenTraceSkel<'_>, options: &Slow, preempts: bool) -> Result<()> {
    let constants = common::constants(&mut open.maps.rodata_data)?;
    constants.slow = options.min.as_nanos() as u64;
    let namespace = common::pid_namespace()?;
    constants.pid_namespace = if namespace == INITIAL { 0 } else { namespace };
    constants.with_stack = with_stack(options);
    constants.who = options.has_causes();
    constants.cpus = if options.live { live::cpus()? } else { 0 };
    constants.who_by_stack = options.who == Some(Who::Stack);
    constants.record = options.before.is_some();
    constants.address_of_bio_chain_endio = common::kernel_function("bio_chain_endio")?;
    // Of modules that may not be loaded: then there are no such bios.
    constants.ends = common::ends_of_clones()?;
    constants.with_file = options.file;
    if options.file {
        constants.directs = common::kernel_functions_if_any(file::DIRECTS)?;
    }
    constants.looker = std::process::id();
    constants.first = preempts.into();
    Ok(())
}

/// Whether the stack of each submission is needed.
fn with_stack(options: &Slow) -> bool {
    options.stack || options.who == Some(Who::Stack)
}

/// Loads of each hook the program for this kernel and for these options.
fn choose_programs(open: &mut OpenTraceSkel<'_>, options: &Slow, preempts: bool) {
    let progs = &mut open.progs;
    progs.rq_end_probe.set_autoload(preempts);
    progs.bio_end_probe.set_autoload(preempts);
    progs.each_disk.set_autoload(options.live);
    progs.each_cause.set_autoload(options.live);
    let probes = preempts || with_stack(options);
    progs.bio_start.set_autoload(!probes);
    progs.bio_start_probe.set_autoload(probes);
}

/// Attaches the completions first: then no I/O is seen to start whose completion is not hooked yet.
fn attach(progs: &TraceProgs<'_>, session: &mut Session) -> Result<()> {
    session.attach([&progs.bio_end, &progs.bio_end_probe])?;
    session.attach([&progs.rq_end, &progs.rq_end_probe])?;
    session.attach([&progs.rq_requeued, &progs.bio_remap, &progs.bio_chained])?;
    session.attach([&progs.bio_start, &progs.bio_start_probe])
}

/// Prints lines until the run ends, and gives each disk that comes meanwhile its sums.
fn print_slow_bios(
    run: &Run<'_, '_, '_>,
    sums: &mut Sums<'_>,
    watch: &mut Watch<'_>,
) -> Result<()> {
    let mut of_others = 0;
    while !run.is_over() {
        run.turn()?;
        if run.session.stdout_is_terminal() {
            watch.show()?;
        }
        run.follow_disks(&mut of_others, sums)?;
    }
    Ok(())
}

fn print_disks(disks: &[Disk], options: &Slow, has_colours: bool) {
    for disk in disks {
        match options.json {
            true => println!("{}", disk.json()),
            false => disk.print(options.histogram, has_colours),
        }
    }
}
