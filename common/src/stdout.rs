//! Stdout, whose reader may go away (`| head`).

use std::{
    fs::File,
    io::{self, ErrorKind, IsTerminal, PipeReader, Read, Write},
    os::fd::AsFd,
    panic,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use anyhow::{Context, Result, bail};
use common_base::closed_stdout;
use rustix::{stdio::dup2_stdout, termios::tcgetwinsize};

/// How many columns the terminal at stdout has; none if it is no terminal. A serial line, which does not know its own,
/// is taken for one of 80.
pub fn columns() -> Option<usize> {
    let size = io::stdout().is_terminal().then(|| tcgetwinsize(io::stdout()).ok());
    size.map(|size| size.map_or(0, |size| size.ws_col.into()))
        .map(|columns| if columns == 0 { 80 } else { columns })
}

/// Runs with a pipe in place of stdout, whose content a thread passes on: `println!` panics where
/// the reader has gone away, and this pipe's reader stays. When the real reader goes away, `stop` is
/// set.
pub(crate) fn passed_on(stop: &Arc<AtomicBool>, run: impl FnOnce() -> Result<()>) -> Result<()> {
    if let Some(closed) = closed_stdout() {
        bail!(closed);
    }
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned().context("stdout")?);
    let (lines, pipe) = io::pipe().context("no pipe could be made")?;
    dup2_stdout(pipe).context("stdout")?;
    let passing = thread::spawn({
        let (stdout, stop) = (stdout.try_clone().context("stdout")?, Arc::clone(stop));
        move || pass_on(lines, stdout, &stop)
    });
    let result = run();
    io::stdout().flush().context("stdout")?;
    // This closes the last writing end of the pipe: the thread ends.
    dup2_stdout(stdout).context("stdout")?;
    let passed = passing.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
    result.and(passed.context("stdout"))
}

/// Not `io::copy`, which is splice(2) here: that one locks the file it writes to, or takes its
/// offset, while it waits for lines, and stderr may go to the same file.
fn pass_on(mut lines: PipeReader, mut stdout: File, stop: &AtomicBool) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    let mut passed = Ok(());
    loop {
        let n = match lines.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if passed.is_ok() {
            passed = stdout.write_all(&buffer[..n]);
            if passed.is_err() {
                stop.store(true, Ordering::SeqCst);
            }
        }
    }
    match passed {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}
