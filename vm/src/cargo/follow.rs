//! Running commands: for as long as they say something, and several at once.

use std::fs;
use std::io::{BufRead, BufReader};
use std::panic::resume_unwind;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};
use workshop::lock;

use crate::session::processes::end_with_us;

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
    end_with_us(&mut command, Signal::TERM);
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

/// Runs the jobs, at most `workers` at once. After an error, no other job begins. Returns the errors.
pub fn at_once<J: Sync>(
    workers: usize,
    jobs: &[J],
    work: impl Fn(&J) -> Result<()> + Sync,
) -> Vec<anyhow::Error> {
    let left = Mutex::new(jobs.iter());
    let next = || lock(&left).next();
    let worker = || -> Result<()> {
        while let Some(job) = next() {
            work(job).inspect_err(|_| lock(&left).by_ref().for_each(drop))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers.min(jobs.len())).map(|_| scope.spawn(worker)).collect();
        let ended = workers.into_iter().map(|it| it.join().unwrap_or_else(|it| resume_unwind(it)));
        ended.filter_map(Result::err).collect()
    })
}

/// How many guests to run at once: an emulated one keeps a CPU busy.
pub fn workers() -> usize {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    thread::available_parallelism().map_or(1, usize::from).min(guests_in(&meminfo))
}

/// How many guests of 2 GiB there is the memory for.
fn guests_in(meminfo: &str) -> usize {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kb = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<usize>().ok());
    kb.map_or(usize::MAX, |kb| kb >> 21).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_need_memory() {
        let guests = |kb: &str| guests_in(&format!("MemTotal: 1 kB\nMemAvailable:  {kb} kB\n"));
        assert_eq!((guests("1000000"), guests("4194303"), guests("9000000")), (1, 1, 4));
    }

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
