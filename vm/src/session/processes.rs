//! The processes that this one has started, and those that they have started.
//!
//! No crate does this: `process-wrap` and `command-group` end a process group, and what cargo, sudo and
//! the test programs start has groups and sessions of its own, or has to stay in the terminal's.

use std::collections::HashMap;
use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use host::say;

/// How long a process may take to end after SIGTERM, before it gets SIGKILL.
const PATIENCE: Duration = Duration::from_secs(5);
/// Ended in the middle of its work, it would leave half-installed packages: it is told to end,
/// and waited for.
const WAITED_FOR: &str = "apt-get";

/// A process as /proc shows it. The time of its start tells it from a later one with the same id.
#[derive(Clone, Debug)]
struct Process {
    pid: i32,
    parent: i32,
    name: String,
    zombie: bool,
    started: u64,
}

impl PartialEq for Process {
    fn eq(&self, other: &Process) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// Children that this process has not started itself: where a shell becomes the launcher by exec,
/// its children, like the `tee` of `cargo vm run stage06 > >(tee log)`, become the launcher's.
static INHERITED: OnceLock<Vec<Process>> = OnceLock::new();

/// Notes the children that there are before this process starts any.
pub fn note_inherited() {
    let own = std::process::id() as i32;
    INHERITED.get_or_init(|| all().into_iter().filter(|process| process.parent == own).collect());
}

impl Process {
    fn read(pid: i32) -> Option<Process> {
        Process::parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    /// From a line of /proc/PID/stat. The name may contain blanks and brackets.
    fn parse(stat: &str) -> Option<Process> {
        let (pid, rest) = stat.split_once(" (")?;
        let (name, rest) = rest.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        Some(Process {
            pid: pid.parse().ok()?,
            name: name.to_owned(),
            zombie: matches!(*fields.first()?, "Z" | "X"),
            parent: fields.get(1)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }

    fn runs(&self) -> bool {
        Process::read(self.pid).is_some_and(|now| now == *self && !now.zombie)
    }

    /// Whether the signal could be sent.
    fn signal(&self, signal: Signal) -> bool {
        let pid = Pid::from_raw(self.pid).filter(|_| self.runs());
        pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
    }

    fn is_waited_for(&self) -> bool {
        self.name == WAITED_FOR
    }
}

fn all() -> Vec<Process> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Process::read).collect()
}

/// The descendants of `first` that run, without those of `except` and what they have started. A process
/// that is waited for takes care of its descendants itself.
fn descendants(all: &[Process], first: i32, except: &[Process]) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<&Process>> = HashMap::new();
    for process in all.iter().filter(|process| !except.contains(process)) {
        children.entry(process.parent).or_default().push(process);
    }
    let (mut found, mut next) = (Vec::new(), vec![first]);
    while let Some(parent) = next.pop() {
        for child in children.remove(&parent).unwrap_or_default() {
            if !child.zombie {
                found.push(child.clone());
            }
            if !child.is_waited_for() {
                next.push(child.pid);
            }
        }
    }
    found
}

/// Ends all that this process has started, and all that these have started. Returns whether there was
/// anything to end.
pub fn end_descendants() -> bool {
    let own = std::process::id() as i32;
    let inherited = INHERITED.get().map_or(&[][..], Vec::as_slice);
    let mut ours: Vec<Process> = Vec::new();
    // A stopped process starts no others: this comes to an end.
    loop {
        let mut new = descendants(&all(), own, inherited);
        new.retain(|process| !ours.contains(process));
        if new.is_empty() {
            break;
        }
        for process in new.iter().filter(|process| !process.is_waited_for()) {
            process.signal(Signal::STOP);
        }
        ours.extend(new);
    }
    let found = !ours.is_empty();
    let (mut waited_for, mut ours): (Vec<_>, Vec<_>) =
        ours.into_iter().partition(Process::is_waited_for);
    let tell = |processes: &[Process], signal| {
        for process in processes {
            process.signal(signal);
        }
    };
    // What belongs to another user (sudo) is not ours to end.
    ours.retain(|process| process.signal(Signal::TERM));
    tell(&ours, Signal::CONT);
    wait(&mut ours, PATIENCE);
    tell(&ours, Signal::KILL);
    wait(&mut ours, PATIENCE);
    if !waited_for.is_empty() {
        say!("waiting for {WAITED_FOR}: interrupted, it would leave half-installed packages");
        tell(&waited_for, Signal::INT);
        wait(&mut waited_for, Duration::MAX);
    }
    found
}

/// Waits until none of them runs, or for `patience`.
fn wait(processes: &mut Vec<Process>, patience: Duration) {
    let start = Instant::now();
    loop {
        processes.retain(Process::runs);
        if processes.is_empty() || start.elapsed() > patience {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: i32, parent: i32, name: &str) -> Process {
        let rest = "1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0";
        Process::parse(&format!("{pid} ({name}) S {parent} {rest}")).unwrap()
    }

    #[test]
    fn a_name_may_contain_anything() {
        let odd = process(5, 1, "a) S 3 (b");
        assert_eq!((odd.pid, odd.parent, odd.name.as_str()), (5, 1, "a) S 3 (b"));
        assert_eq!(odd.started, 77);
        assert!(Process::parse("5 (a) Z").is_none());
        let own = Process::read(std::process::id() as i32).unwrap();
        assert!(own.runs() && !Process { started: 0, ..own }.runs());
    }

    #[test]
    fn what_apt_has_started_is_left_to_apt() {
        let all = [
            process(10, 1, "vm"),
            process(11, 10, "cargo"),
            process(12, 11, "rustc"),
            process(13, 10, "tee"),
            process(14, 10, "env"),
            process(15, 14, "apt-get"),
            process(16, 15, "dpkg"),
            process(17, 1, "other"),
        ];
        let mut found: Vec<i32> =
            descendants(&all, 10, &all[3..4]).into_iter().map(|process| process.pid).collect();
        found.sort_unstable();
        assert_eq!(found, [11, 12, 14, 15]);
    }
}
