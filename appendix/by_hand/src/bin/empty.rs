//! The smallest BPF program: `return 0`, on every openat().

use std::{
    io::{Write, stdout},
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::Result;
use by_hand::{
    bpf::{self, LoadedProgram},
    cli::{AFTER_HELP, Common, Run},
    insn::{Code, Reg::R0},
    perf::Attached,
};
use clap::Parser;

/// Attach a BPF program that does nothing, and count how often it runs
#[derive(Parser)]
#[command(name = "empty", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    common: Common,
    /// Leave out the instruction that sets the return value, and see the verifier reject the program
    #[arg(long)]
    reject: bool,
}

impl AsRef<Common> for Cli {
    fn as_ref(&self) -> &Common {
        &self.common
    }
}

fn main() -> ExitCode {
    by_hand::cli::main("empty", run)
}

fn code(reject: bool) -> Code {
    let mut code = Code::new();
    if !reject {
        code.set(R0, 0);
    }
    code.exit();
    code
}

fn run(cli: &Cli, run: &mut Run) -> Result<()> {
    let program = LoadedProgram::load("empty", &code(cli.reject), cli.common.verbose)?;
    let _stats = bpf::enable_stats()?;
    let attached = Attached::to_syscall(&program, "sys_enter", "openat")?;
    run.begins();
    let id = program.id()?;
    writeln!(stdout(), "program {id}, attached to sys_enter_openat: bpftool prog show id {id}")?;
    while !run.is_over() {
        thread::sleep(Duration::from_millis(50));
    }
    drop(attached);
    let (runs, time) = program.runs()?;
    writeln!(stdout(), "{runs:>8} runs, {} ns each", time.checked_div(runs).unwrap_or(0))?;
    writeln!(stdout(), "{:>8} skipped (another program running on this CPU)", program.skipped()?)?;
    Ok(())
}
