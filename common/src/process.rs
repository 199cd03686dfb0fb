//! The one process that a stage is to see.

use std::{
    fs,
    os::{fd::OwnedFd, unix::fs::MetadataExt},
    str::FromStr,
    sync::Arc,
};

use anyhow::{Context, Result};
use clap::Args;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    param::clock_ticks_per_second,
    process::{Pid as Number, PidfdFlags, pidfd_open},
};

use crate::{cli::Cli, clock::namespace_offset};

/// The command line of a stage that can be limited to one process.
pub type PidCli = Cli<Pid>;

/// `[PID]`.
#[derive(Args, Debug)]
pub struct Pid {
    /// The process to see, with all its threads [default: every process]
    #[arg(value_parser = process, allow_negative_numbers = true)]
    pub pid: Option<u32>,
}

/// The inode number of the PID namespace that this process is in: within it, numbers of processes
/// mean what the user means by them.
pub fn pid_namespace() -> Result<u32> {
    let path = "/proc/self/ns/pid";
    let inode = fs::metadata(path).with_context(|| path.to_owned())?.ino();
    u32::try_from(inode).with_context(|| format!("{path} has inode number {inode}"))
}

/// The number of a process that is there now; else says why it is none.
pub fn process(text: &str) -> Result<u32, String> {
    let hint = "give the number of a process, as `ps -e` shows it";
    if let Some(lack) = common_base::unmounted() {
        return Err(lack.to_owned());
    }
    let pid: i128 = text.parse().map_err(|_| format!("not a number; {hint}"))?;
    let largest = fs::read_to_string("/proc/sys/kernel/pid_max")
        .ok()
        .and_then(|max| max.trim().parse::<i128>().ok())
        .unwrap_or(i32::MAX.into());
    if !(1..largest).contains(&pid) {
        return Err(format!("processes have numbers from 1 to {} here; {hint}", largest - 1));
    }
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else {
        return Err(format!("there is no such process; {hint}"));
    };
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")).map(str::trim);
    match process.and_then(|process| process.parse().ok()) {
        Some(process) if i128::from(process) == pid => Ok(process),
        Some(process) => Err(format!("this is a thread of process {process}; give that number")),
        None => Err(format!("/proc/{pid}/status does not say which process it is")),
    }
}

/// One process: not a later one that gets its number.
#[derive(Clone, Debug)]
pub struct Process {
    /// Its number in this PID namespace.
    pub number: u32,
    /// When it was started, in ns of CLOCK_BOOTTIME as the kernel has it: `start_boottime` of its first thread is
    /// less than a tick (USER_HZ, 10 ms) later.
    pub started: u64,
    pidfd: Arc<OwnedFd>,
}

impl FromStr for Process {
    type Err = String;

    /// The one that has this number now; else says why there is none.
    fn from_str(text: &str) -> Result<Process, String> {
        let number = process(text)?;
        let gone = || format!("process {number} has just ended");
        let pid = i32::try_from(number).ok().and_then(Number::from_raw).ok_or_else(gone)?;
        let pidfd = pidfd_open(pid, PidfdFlags::empty())
            .map_err(|error| format!("process {number} cannot be followed: {error}"))?;
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).map_err(|_| gone())?;
        let ticks = started(&stat).ok_or_else(|| format!("/proc/{number}/stat is odd: {stat}"))?;
        let tick = 1_000_000_000 / clock_ticks_per_second();
        // In a time namespace, /proc shows the time by the namespace's clock.
        let started = i128::from(ticks * tick) - namespace_offset("boottime");
        let process = Process { number, started: started as u64, pidfd: Arc::new(pidfd) };
        // Then what /proc has just said may have been of the next one with its number.
        if process.has_ended() { Err(gone()) } else { Ok(process) }
    }
}

impl Process {
    /// Whether all of its threads have ended.
    pub fn has_ended(&self) -> bool {
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut ended, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}

/// The start of a process, in ticks: the 22nd field of /proc/PID/stat, whose second one is a name in parentheses,
/// which may hold anything.
fn started(stat: &str) -> Option<u64> {
    stat.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_there() {
        assert_eq!(process(&std::process::id().to_string()), Ok(std::process::id()));
        for (wrong, why) in [
            ("0", "from 1"),
            ("-1", "from 1"),
            ("99999999999999999999", "from 1"),
            ("4194304", "from 1"),
            ("", "not a number"),
            ("sh", "not a number"),
            ("1.5", "not a number"),
        ] {
            let error = process(wrong).unwrap_err();
            assert!(error.contains(why) && error.contains("ps -e"), "{wrong}: {error}");
        }
    }

    #[test]
    fn a_dead_process_is_none() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let error = process(&child.id().to_string()).unwrap_err();
        assert!(error.contains("no such process"), "{error}");
    }

    #[test]
    fn a_process_is_known_by_its_start() {
        let stat = "7 (a) b) (c) S 1 7 7 0 -1 4194560 9 0 0 0 1 2 3 4 20 0 1 0 4711 6 5";
        assert_eq!(started(stat), Some(4711));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let process: Process = child.id().to_string().parse().unwrap();
        let now = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        assert!((0..1_000_000_000).contains(&(now - process.started)), "{now}: {process:?}");
        assert!(!process.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
    }

    #[test]
    fn this_namespace_has_a_number() {
        assert!(pid_namespace().unwrap() > 0);
    }
}
