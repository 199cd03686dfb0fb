//! Stdout, whose reader may go (`| head`).

use std::{
    fs::File,
    io::{self, ErrorKind, IsTerminal, PipeReader, Write},
    os::fd::AsFd,
    panic,
    sync::OnceLock,
    thread,
};

use anyhow::{Context, Result};
use rustix::stdio::dup2_stdout;

use crate::cli;

/// Whether stdout is a terminal, as [`passed_on`] found it.
static TERMINAL: OnceLock<bool> = OnceLock::new();

pub(crate) fn is_terminal() -> bool {
    *TERMINAL.get_or_init(|| io::stdout().is_terminal())
}

/// Runs with a pipe in stdout's place, whose lines a thread passes on: `println!` panics where the
/// reader has gone, and the pipe's reader stays. A reader who goes asks for the end of the run.
pub(crate) fn passed_on(run: impl FnOnce() -> Result<()>) -> Result<()> {
    is_terminal();
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned().context("stdout")?);
    let (lines, pipe) = io::pipe().context("no pipe could be made")?;
    dup2_stdout(pipe).context("stdout")?;
    let passing = thread::spawn({
        let stdout = stdout.try_clone().context("stdout")?;
        move || pass_on(lines, stdout)
    });
    let result = run();
    io::stdout().flush().context("stdout")?;
    // The pipe's last writer is gone: the thread ends.
    dup2_stdout(stdout).context("stdout")?;
    let passed = passing.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
    result.and(passed.context("stdout"))
}

fn pass_on(mut lines: PipeReader, mut stdout: File) -> io::Result<()> {
    let passed = io::copy(&mut lines, &mut stdout);
    cli::stop();
    io::copy(&mut lines, &mut io::sink())?;
    match passed {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
