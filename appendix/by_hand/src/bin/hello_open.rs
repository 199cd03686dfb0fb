//! The first program that does something: it prints a line for every openat().

use std::{
    io::{Write, stdout},
    process::ExitCode,
    thread,
    time::Duration,
};

use anyhow::Result;
use by_hand::{
    bpf::LoadedProgram,
    cli::{AFTER_HELP, Common, Run},
    insn::{
        Code,
        Helper::TracePrintk,
        Reg::{R1, R2, R10},
    },
    perf::Attached,
    trace_pipe::{TracePipe, lost_lines},
};
use clap::Parser;

/// Print a line for every openat(), from the kernel's trace pipe
#[derive(Parser)]
#[command(name = "hello_open", version, after_help = AFTER_HELP)]
struct Cli {
    #[command(flatten)]
    common: Common,
}

impl AsRef<Common> for Cli {
    fn as_ref(&self) -> &Common {
        &self.common
    }
}

/// Eight bytes with the zero at its end: one register holds them.
const MESSAGE: &[u8; 8] = b"Hello!!\0";

fn main() -> ExitCode {
    by_hand::cli::main("hello_open", run)
}

/// A BPF program of this kind has no data of its own: the text is built on the stack.
fn code() -> Code {
    let mut code = Code::new();
    code.set64(R1, u64::from_ne_bytes(*MESSAGE));
    code.store(R10, -8, R1);
    code.stack_address(R1, -8);
    code.set(R2, MESSAGE.len() as i32);
    code.call(TracePrintk);
    code.exit_with(0);
    code
}

fn run(cli: &Cli, run: &mut Run) -> Result<()> {
    let program = LoadedProgram::load("hello_open", &code(), cli.common.verbose)?;
    let mut pipe = TracePipe::open()?;
    let attached = Attached::to_syscall(&program, "sys_enter", "openat")?;
    run.begins();
    let (mut hellos, mut lost) = (0, 0);
    let mut print = |lines: Vec<String>| -> Result<()> {
        for line in lines {
            match lost_lines(&line) {
                Some(lines) => lost += lines,
                // The instance gets the lines of every BPF program, not only ours.
                None if !line.ends_with(": Hello!!") => continue,
                None => hellos += 1,
            }
            writeln!(stdout(), "{line}")?;
        }
        Ok(())
    };
    while !run.is_over() {
        print(pipe.lines()?)?;
        thread::sleep(Duration::from_millis(50));
    }
    drop(attached);
    loop {
        match pipe.lines()? {
            lines if lines.is_empty() => break,
            lines => print(lines)?,
        }
    }
    writeln!(stdout(), "{hellos:>8} calls of openat()")?;
    let others = pipe.others();
    if others > 0 {
        let same = "printed the same text meanwhile: its lines are among these";
        writeln!(stdout(), "{others:>8} other hello_open {same}")?;
    }
    writeln!(stdout(), "{lost:>8} lines lost (trace buffer full; lines of any BPF program)")?;
    writeln!(stdout(), "{:>8} skipped (another program running on this CPU)", program.skipped()?)?;
    Ok(())
}
