//! The lines that `bpf_trace_printk()` writes, from a tracefs instance of our own.
//!
//! Every instance has a trace_pipe of its own, and gets every line: so several programs can read at
//! once, and the global trace_pipe is left alone. What another `hello_open` prints is the same text, and
//! cannot be told apart: so others are looked for.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::{
        fd::{AsRawFd, FromRawFd},
        unix::fs::OpenOptionsExt,
    },
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result};

use crate::{message::Unsupported, tracefs::tracefs};

/// What the names of our instances begin with; those of the stages, too.
const PREFIX: &str = "bpf-workshop-";

/// An instance, which is removed when this is dropped. A lock is held on it: one without a lock was
/// left by a killed process, and whoever comes next removes it.
pub struct TracePipe {
    path: PathBuf,
    _lock: File,
    pipe: Option<File>,
    rest: Vec<u8>,
    /// The instances of programs of the workshop that ran when this was opened.
    neighbours: Vec<String>,
    /// inotify, which reports those that come later.
    comers: Option<File>,
}

impl TracePipe {
    /// Makes an instance.
    pub fn open() -> Result<TracePipe> {
        let instances = tracefs()?.join("instances");
        check_lock(&instances)?;
        let comers = comers(&instances).ok();
        let neighbours = remove_left_overs(&instances);
        // Another start may take a new instance for a left-over before it is locked: try again.
        let name = |attempt| format!("{PREFIX}hand-{}-{attempt}", process::id());
        let (path, directory) = (0..10)
            .find_map(|attempt| create(instances.join(name(attempt))).ok())
            .map_or_else(|| create(instances.join(name(10))), Ok)?;
        let (pipe, rest) = (None, Vec::new());
        let mut pipe = TracePipe { path, _lock: directory, pipe, rest, neighbours, comers };
        let file = pipe.path.join("trace_pipe");
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&file);
        pipe.pipe = Some(opened.with_context(|| file.display().to_string())?);
        let event = pipe.path.join("events/bpf_trace/bpf_trace_printk/enable");
        fs::write(&event, "1").with_context(|| event.display().to_string())?;
        Ok(pipe)
    }

    /// The lines that have come.
    pub fn lines(&mut self) -> Result<Vec<String>> {
        let mut bytes = [0; 16 * 1024];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => self.rest.extend_from_slice(&bytes[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("the trace pipe could not be read"),
            }
            if self.rest.len() > 1 << 20 {
                break;
            }
        }
        let whole = self.rest.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let lines: Vec<u8> = self.rest.drain(..whole).collect();
        Ok(String::from_utf8_lossy(&lines).lines().map(str::to_owned).collect())
    }

    /// How many other programs of this name have read trace lines since this was opened.
    pub fn others(&mut self) -> usize {
        let mut events = vec![0; 64 * 1024];
        let read = self.comers.as_mut().and_then(|comers| comers.read(&mut events).ok());
        self.neighbours.extend(names(&events[..read.unwrap_or(0)]));
        // bpf-workshop-hand-PROCESS-ATTEMPT
        let prefix = format!("{PREFIX}hand-");
        let process = |name: &String| name.strip_prefix(&prefix)?.split('-').next()?.parse().ok();
        let mut processes: Vec<u32> = self.neighbours.iter().filter_map(process).collect();
        processes.retain(|process| *process != process::id());
        processes.sort();
        processes.dedup();
        processes.len()
    }
}

impl Drop for TracePipe {
    fn drop(&mut self) {
        // An instance cannot be removed while its pipe is open.
        self.pipe = None;
        fs::remove_dir(&self.path).ok();
    }
}

/// Fails, with exit code 3, where the kernel is locked down: it refuses tracefs even to root.
fn check_lock(instances: &Path) -> Result<()> {
    let readme = instances.with_file_name("README");
    match File::open(readme) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => Err(Unsupported(
            "this kernel is locked down (lockdown=confidentiality): no program may read trace lines. Boot it \
             with lockdown=integrity or without Secure Boot, or start the program in the VM with cargo vm run"
                .into(),
        )
        .into()),
        _ => Ok(()),
    }
}

/// Makes and locks an instance.
fn create(path: PathBuf) -> Result<(PathBuf, File)> {
    fs::create_dir(&path).with_context(|| path.display().to_string())?;
    let directory = File::open(&path).context("the new tracefs instance")?;
    lock(&directory).context("the lock of the new tracefs instance")?;
    Ok((path, directory))
}

/// Removes the instances that killed runs have left. Returns the names of the others.
fn remove_left_overs(instances: &Path) -> Vec<String> {
    let mut living = Vec::new();
    for entry in fs::read_dir(instances).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(directory) = File::open(entry.path()) else { continue };
        if name.starts_with(PREFIX) && lock(&directory).is_ok() {
            fs::remove_dir(entry.path()).ok();
        } else if name.starts_with(PREFIX) {
            living.push(name);
        }
    }
    living
}

/// Has inotify(7) report the instances that are made from here on.
fn comers(instances: &Path) -> Result<File> {
    let path = CString::new(instances.as_os_str().as_encoded_bytes())?;
    // SAFETY: a system call without addresses; a new descriptor has no other owner.
    let inotify = unsafe {
        match libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) {
            -1 => return Err(io::Error::last_os_error().into()),
            fd => File::from_raw_fd(fd),
        }
    };
    // SAFETY: the path ends with a zero.
    match unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), libc::IN_CREATE) } {
        -1 => Err(io::Error::last_os_error().into()),
        _ => Ok(inotify),
    }
}

/// The names in what inotify reports: `struct inotify_event`, four numbers of 32 bits, of which the last
/// one is the length of the name behind them, with zeroes at its end.
fn names(mut events: &[u8]) -> Vec<String> {
    let mut names = Vec::new();
    while let Some((head, rest)) = events.split_first_chunk::<16>() {
        let length = u32::from_ne_bytes([head[12], head[13], head[14], head[15]]) as usize;
        let Some((name, rest)) = rest.split_at_checked(length) else { break };
        names.push(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned());
        events = rest;
    }
    names
}

fn lock(directory: &File) -> io::Result<()> {
    // SAFETY: a system call without addresses.
    match unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// How many lines the kernel says were lost where its buffer was full: `CPU:1 [LOST 123 EVENTS]`.
pub fn lost_lines(line: &str) -> Option<u64> {
    let (_, rest) = line.strip_prefix("CPU:")?.split_once(" [LOST ")?;
    rest.strip_suffix(" EVENTS]")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_behind_the_heads_of_events() {
        let event = |name: &[u8; 8]| [&[0; 12][..], &8_u32.to_ne_bytes(), name].concat();
        let events = [event(b"one\0\0\0\0\0"), event(b"another\0")].concat();
        assert_eq!(names(&events), ["one", "another"]);
        assert!(names(&events[..20]).is_empty());
    }

    #[test]
    fn lost_lines_are_counted() {
        assert_eq!(lost_lines("CPU:1 [LOST 12 EVENTS]"), Some(12));
        assert_eq!(lost_lines("  dd-9 [000] ..1 3.1: bpf_trace_printk: Hello!!"), None);
    }
}
