//! The one process that a stage is to see.

use std::{fs, os::unix::fs::MetadataExt};

use anyhow::{Context, Result};
use clap::Args;

use crate::cli::Cli;

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
    fn this_namespace_has_a_number() {
        assert!(pid_namespace().unwrap() > 0);
    }
}
