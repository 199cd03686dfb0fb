//! Counts the calls of a system call, in a map with a value for each CPU.

use std::{
    io::{Write, stdout},
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::Result;
use by_hand::{
    bpf::{LoadedProgram, Map, MapKind},
    cli::{AFTER_HELP, Common, Run, syscall},
    insn::Code,
    perf::{Attached, check_syscall},
};
use clap::Parser;

/// Count how often a system call is called
#[derive(Parser)]
#[command(name = "syscall_counter", version, after_help = AFTER_HELP)]
struct Cli {
    /// The system call, as in /sys/kernel/tracing/events/syscalls/sys_enter_NAME
    #[arg(value_name = "NAME", default_value = "fchmodat", value_parser = syscall)]
    syscall: String,
    #[command(flatten)]
    common: Common,
}

impl AsRef<Common> for Cli {
    fn as_ref(&self) -> &Common {
        &self.common
    }
}

fn main() -> ExitCode {
    by_hand::cli::main("syscall_counter", run)
}

fn code(counters: &Map) -> Code {
    let mut code = Code::new();
    code.count(counters, 0, -4);
    code.exit_with(0);
    code
}

fn run(cli: &Cli, run: &mut Run) -> Result<()> {
    check_syscall(&cli.syscall)?;
    let calls = Map::new(MapKind::PerCpuArray, "calls", 4, 8, 1)?;
    let program = LoadedProgram::load("syscall_counter", &code(&calls), cli.common.verbose)?;
    let attached = Attached::to_syscall(&program, "sys_enter", &cli.syscall)?;
    run.begins();
    while !run.is_over() {
        thread::sleep(Duration::from_millis(50));
    }
    drop(attached);
    for (cpu, calls) in calls.per_cpu(0)?.into_iter().enumerate().filter(|(_, calls)| *calls > 0) {
        writeln!(stdout(), "{calls:>8} on CPU {cpu}")?;
    }
    writeln!(stdout(), "{:>8} calls of {}()", calls.sum(0)?, cli.syscall)?;
    writeln!(stdout(), "{:>8} skipped (another program running on this CPU)", program.skipped()?)?;
    Ok(())
}
