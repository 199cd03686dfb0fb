//! How long each call of a system call takes: two programs, a hash map between them, and a ring from
//! the kernel to this process.

use std::{
    io::{BufWriter, Write, stdout},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use by_hand::{
    bpf::{LoadedProgram, Map, MapKind},
    cli::{AFTER_HELP, Common, Run, syscall},
    insn::{
        Code,
        Helper::{
            GetCurrentPidTgid, KtimeGetNs, MapDeleteElem, MapLookupElem, MapUpdateElem,
            PerfEventOutput,
        },
        Reg::{R0, R1, R2, R3, R4, R5, R6, R7, R10},
    },
    perf::{Attached, Record, Rings, check_syscall},
};
use clap::Parser;

/// Measure how long each call of a system call takes
#[derive(Parser)]
#[command(name = "syscall_profiler", version, after_help = AFTER_HELP)]
struct Cli {
    /// The system call, as in /sys/kernel/tracing/events/syscalls/sys_enter_NAME
    #[arg(value_name = "NAME", default_value = "openat", value_parser = syscall)]
    syscall: String,
    #[command(flatten)]
    common: Common,
    /// Print no line for each call
    #[arg(short, long)]
    quiet: bool,
    /// Size of each CPU's ring in pages, a power of two
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = pages)]
    #[arg(allow_negative_numbers = true)]
    pages: usize,
}

impl AsRef<Common> for Cli {
    fn as_ref(&self) -> &Common {
        &self.common
    }
}

fn pages(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=65536) if usize::is_power_of_two(n) => Ok(n),
        _ => Err("give a power of two from 1 to 65536".into()),
    }
}

fn main() -> ExitCode {
    by_hand::cli::main("syscall_profiler", run)
}

/// How many calls can be in progress at a time.
const IN_PROGRESS: u32 = 16384;
// What the counters count.
const DROPPED: u32 = 0;
const UNMATCHED: u32 = 1;
const LOST: u32 = 2;
const WITHOUT_RETURN: u32 = 3;
const RETURNS_IN_CHILD: u32 = 4;
const COUNTERS: u32 = 5;
/// In the context of a program on sys_exit_NAME: what the call returns.
const RETURN_VALUE: i16 = 16;
// Places on the stack.
const SCRATCH: i16 = -4;
const THREAD: i16 = -16;
const TIME: i16 = -24;
/// The sample is what lies from TIME on: the time taken and the thread.
const SAMPLE_SIZE: i32 = 16;
/// For bpf_perf_event_output(): the ring of this CPU.
const CURRENT_CPU: u32 = u32::MAX;

/// How often a call returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Returns {
    /// In the thread that has called.
    Once,
    /// There, and in the new process or thread, with 0.
    Twice,
    /// It ends the caller, or makes it continue elsewhere.
    Never,
}

impl Returns {
    fn new(syscall: &str) -> Returns {
        match syscall {
            "clone" | "clone3" | "fork" | "vfork" => Returns::Twice,
            "exit" | "exit_group" | "rt_sigreturn" => Returns::Never,
            _ => Returns::Once,
        }
    }
}

/// `starts[thread] = now`; a call that never returns is only counted.
fn enter(starts: &Map, counters: &Map, returns: Returns) -> Code {
    let mut code = Code::new();
    if returns == Returns::Never {
        code.count(counters, WITHOUT_RETURN, SCRATCH);
        code.exit_with(0);
        return code;
    }
    code.call(GetCurrentPidTgid);
    code.store(R10, THREAD, R0);
    code.call(KtimeGetNs);
    code.store(R10, TIME, R0);
    code.set_map(R1, starts);
    code.stack_address(R2, THREAD.into());
    code.stack_address(R3, TIME.into());
    code.set(R4, 0); // BPF_ANY
    code.call(MapUpdateElem);
    let stored = code.jump_if_zero(R0);
    code.count(counters, DROPPED, SCRATCH);
    code.land(stored);
    code.exit_with(0);
    code
}

/// `send(now - starts[thread], thread)`, and the entry is deleted.
fn exit(starts: &Map, counters: &Map, rings: &Map, returns: Returns) -> Code {
    let mut code = Code::new();
    code.copy(R6, R1); // the context, which a call would overwrite
    code.call(KtimeGetNs);
    code.copy(R7, R0);
    code.call(GetCurrentPidTgid);
    code.store(R10, THREAD, R0);
    code.set_map(R1, starts);
    code.stack_address(R2, THREAD.into());
    code.call(MapLookupElem);
    let found = code.jump_unless_zero(R0);
    if returns == Returns::Twice {
        code.load(R1, R6, RETURN_VALUE);
        let in_caller = code.jump_unless_zero(R1);
        code.count(counters, RETURNS_IN_CHILD, SCRATCH);
        code.exit_with(0);
        code.land(in_caller);
    }
    code.count(counters, UNMATCHED, SCRATCH);
    code.exit_with(0);
    code.land(found);
    code.load(R1, R0, 0);
    code.subtract(R7, R1);
    code.store(R10, TIME, R7);
    code.set_map(R1, starts);
    code.stack_address(R2, THREAD.into());
    code.call(MapDeleteElem);
    code.copy(R1, R6);
    code.set_map(R2, rings);
    code.set32(R3, CURRENT_CPU);
    code.stack_address(R4, TIME.into());
    code.set(R5, SAMPLE_SIZE);
    code.call(PerfEventOutput);
    let sent = code.jump_if_zero(R0);
    code.count(counters, LOST, SCRATCH);
    code.land(sent);
    code.exit_with(0);
    code
}

#[derive(Default)]
struct Totals {
    samples: u64,
    time: u64,
    shortest: Option<u64>,
    longest: u64,
}

impl Totals {
    /// Adds up the samples, and prints a line for each of them.
    fn add(&mut self, records: Vec<Record>, quiet: bool) -> Result<()> {
        let mut out = BufWriter::new(stdout().lock());
        for record in records {
            // Lost samples are counted where they are lost, also those that no record mentions.
            let Record::Sample(sample) = record else { continue };
            let numbers: Vec<u64> = sample
                .chunks_exact(8)
                .map(|bytes| bytes.try_into().map(u64::from_ne_bytes))
                .collect::<Result<_, _>>()?;
            let (&time, &thread) = numbers.first().zip(numbers.get(1)).context("a short sample")?;
            self.samples += 1;
            self.time += time;
            self.shortest = Some(self.shortest.map_or(time, |shortest| shortest.min(time)));
            self.longest = self.longest.max(time);
            if !quiet {
                // The upper half is the process, the lower half is the thread.
                let (process, thread) = (thread >> 32, thread as u32);
                writeln!(out, "{time:>12} ns  process {process} thread {thread}")?;
            }
        }
        Ok(out.flush()?)
    }
}

fn run(cli: &Cli, run: &mut Run) -> Result<()> {
    check_syscall(&cli.syscall)?;
    let starts = Map::new(MapKind::Hash, "starts", 8, 8, IN_PROGRESS)?;
    let counters = Map::new(MapKind::PerCpuArray, "counters", 4, 8, COUNTERS)?;
    let mut rings = Rings::new(cli.pages)?;
    let verbose = cli.common.verbose;
    let returns = Returns::new(&cli.syscall);
    let enter = enter(&starts, &counters, returns);
    let exit = exit(&starts, &counters, &rings.map, returns);
    let enter = LoadedProgram::load("syscall_enter", &enter, verbose)?;
    let exit = LoadedProgram::load("syscall_exit", &exit, verbose)?;
    // The exit first: then no call is seen to begin whose end is not seen.
    let exit_attached = Attached::to_syscall(&exit, "sys_exit", &cli.syscall)?;
    let enter_attached = Attached::to_syscall(&enter, "sys_enter", &cli.syscall)?;
    run.begins();
    let mut totals = Totals::default();
    while !run.is_over() {
        rings.wait(Duration::from_millis(100))?;
        totals.add(rings.take()?, cli.quiet)?;
    }
    drop(enter_attached);
    drop(exit_attached);
    totals.add(rings.take()?, cli.quiet)?;
    let Totals { samples, time, shortest, longest } = totals;
    let mut out = stdout();
    let without_return = counters.sum(WITHOUT_RETURN)?;
    writeln!(out, "{:>8} calls of {}()", samples + without_return, cli.syscall)?;
    if let Some(shortest) = shortest {
        let average = time / samples;
        writeln!(out, "{time:>8} ns in all, average {average} ns, {shortest} to {longest} ns")?;
    }
    match returns {
        Returns::Once => {}
        Returns::Twice => writeln!(
            out,
            "{:>8} returns in a new process or thread (not measured: it made no call)",
            counters.sum(RETURNS_IN_CHILD)?
        )?,
        Returns::Never => writeln!(out, "{without_return:>8} without a return (not measured)")?,
    }
    writeln!(out, "{:>8} in progress", starts.entries()?)?;
    writeln!(out, "{:>8} lost (ring full, or no ring for this CPU)", counters.sum(LOST)?)?;
    writeln!(out, "{:>8} dropped (map full)", counters.sum(DROPPED)?)?;
    writeln!(out, "{:>8} unmatched (return without a call)", counters.sum(UNMATCHED)?)?;
    let skipped = enter.skipped()? + exit.skipped()?;
    writeln!(out, "{skipped:>8} skipped (another program running on this CPU)")?;
    Ok(())
}
