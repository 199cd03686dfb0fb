//! Ending what this process has started, and what that has started.
//!
//! No crate does this: `process-wrap` and `command-group` end a process group, and what cargo, sudo and
//! the test programs start has groups and sessions of its own, or has to stay in the terminal's.

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, set_child_subreaper,
    set_parent_process_death_signal,
};
use workshop::{lock, say};

/// How long a process may take to end after SIGTERM, before it gets SIGKILL; and after that.
const PATIENCE: Duration = Duration::from_secs(5);
/// Ended in the middle of its work, it would leave half-installed packages: it is told to end,
/// and waited for.
const WAITED_FOR: &str = "apt-get";

/// Children that outlive this process. Some it has not started itself: where a shell becomes the launcher by
/// exec, its children, like the `tee` of `cargo vm run stage06 > >(tee log)`, become the launcher's.
static LEFT_ALONE: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// Lets a command's process get this signal when the thread that starts it ends: also where that is killed.
pub fn end_with_us(command: &mut Command, signal: Signal) {
    let parent = getpid();
    // SAFETY: two system calls, async-signal-safe, no memory of the parent touched.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(signal))?;
            // It may have ended just now.
            if getppid() == Some(parent) { Ok(()) } else { Err(ErrorKind::Interrupted.into()) }
        });
    }
}

/// Notes the children that there are before this process starts any.
pub fn note_inherited() {
    lock(&LEFT_ALONE).extend(children());
}

/// Lets a child outlive this process.
pub fn leave_alone(child: Pid) {
    lock(&LEFT_ALONE).push(child);
}

/// The children of this process that run.
fn children() -> Vec<Pid> {
    let own = getpid().as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let child = |entry: fs::DirEntry| {
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        // PID (NAME) STATE PARENT …, and the name may contain blanks and brackets.
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let runs = !matches!(fields.next()?, "Z" | "X");
        (runs && fields.next()? == own).then_some(pid)
    };
    entries.filter_map(child).collect()
}

/// Whether a process is apt-get, or sudo that runs it.
fn is_waited_for(pid: Pid) -> bool {
    let words = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    words.split(|&byte| byte == 0).any(|word| word == WAITED_FOR.as_bytes())
}

/// Ends all that this process has started, and all that these have started. Returns whether there was
/// anything to end.
pub fn end_descendants() -> bool {
    // Whatever loses its parent now becomes a child of this process.
    let _ = set_child_subreaper(Some(getpid()));
    let mut left_alone = lock(&LEFT_ALONE).clone();
    let mut told = HashMap::new();
    let mut is_over = false;
    loop {
        let mut left = children();
        left.retain(|pid| !left_alone.contains(pid));
        // Twice: one may become a child after it was looked at.
        if left.is_empty() && std::mem::replace(&mut is_over, true) {
            return !told.is_empty();
        }
        for pid in left {
            is_over = false;
            let waited_for = is_waited_for(pid);
            let Some(since) = told.get(&pid).map(Instant::elapsed) else {
                told.insert(pid, Instant::now());
                let signal = if waited_for { Signal::INT } else { Signal::TERM };
                let is_ours = kill_process(pid, signal).is_ok();
                if waited_for {
                    say!(
                        "waiting for {WAITED_FOR}: interrupted, it would leave half-installed packages"
                    );
                } else if is_ours {
                    let _ = kill_process(pid, Signal::CONT);
                } else {
                    // What belongs to another user (sudo) is not ours to end.
                    told.remove(&pid);
                    left_alone.push(pid);
                }
                continue;
            };
            if !waited_for && since > PATIENCE {
                let _ = kill_process(pid, Signal::KILL);
            }
            if !waited_for && since > 2 * PATIENCE {
                left_alone.push(pid);
            }
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
