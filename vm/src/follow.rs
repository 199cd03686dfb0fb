//! Running a command for as long as it says something.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// How long a launcher may take to end after a signal, before it is killed.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Runs a command and hands over each line of its standard output. `on_line` returns how long
/// the next line may take to come; after that time the command is ended. Returns whether it
/// succeeded, and how it ended.
pub fn follow(
    mut command: Command,
    mut limit: Duration,
    mut on_line: impl FnMut(&str) -> Duration,
) -> Result<(bool, String)> {
    // SAFETY: one system call, async-signal-safe, no memory of the parent touched.
    unsafe {
        command
            .pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?));
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the tests")?;
    let output = child.stdout.take().context("the tests have no output")?;
    let (sender, lines) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let mut stopped = None;
    let mut signals = [Signal::TERM, Signal::KILL].into_iter();
    loop {
        match lines.recv_timeout(limit) {
            Ok(line) => limit = on_line(String::from_utf8_lossy(&line).trim_end()),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let Some(signal) = signals.next() else { break };
                stopped.get_or_insert_with(|| {
                    let whole = Duration::from_secs(limit.as_secs());
                    format!("stopped: no result for {}", humantime::format_duration(whole))
                });
                let _ = kill_process(Pid::from_child(&child), signal);
                limit = END_LIMIT;
            }
        }
    }
    let status = child.wait().context("cannot wait for the tests")?;
    Ok((status.success() && stopped.is_none(), stopped.unwrap_or_else(|| status.to_string())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_program_without_output_is_ended() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo a; exec sleep 1000"]);
        let mut lines = 0;
        let ended = follow(command, END_LIMIT, |_| {
            lines += 1;
            Duration::from_millis(1500)
        });
        assert_eq!(ended.unwrap(), (false, "stopped: no result for 1s".to_owned()));
        assert_eq!(lines, 1);
    }
}
