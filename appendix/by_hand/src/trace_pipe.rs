//! The lines that `bpf_trace_printk()` writes, from a tracefs instance of our own.
//!
//! Every instance has a trace_pipe of its own, and gets every line: so several programs can read at
//! once, and the global trace_pipe is left alone.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::{Path, PathBuf},
    process,
};

use anyhow::{Context, Result};

use crate::tracefs::tracefs;

/// What the names of our instances begin with; those of the stages, too.
const PREFIX: &str = "bpf-workshop-";

/// An instance, which is removed when this is dropped. A lock is held on it: one without a lock was
/// left by a killed process, and whoever comes next removes it.
pub struct TracePipe {
    path: PathBuf,
    _lock: File,
    pipe: Option<File>,
    rest: Vec<u8>,
}

impl TracePipe {
    /// Makes an instance.
    pub fn open() -> Result<TracePipe> {
        let instances = tracefs()?.join("instances");
        remove_left_overs(&instances);
        let path = instances.join(format!("{PREFIX}hand-{}", process::id()));
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let directory = File::open(&path).context("the new tracefs instance")?;
        lock(&directory).context("the lock of the new tracefs instance")?;
        let mut pipe = TracePipe { path, _lock: directory, pipe: None, rest: Vec::new() };
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
}

impl Drop for TracePipe {
    fn drop(&mut self) {
        // An instance cannot be removed while its pipe is open.
        self.pipe = None;
        fs::remove_dir(&self.path).ok();
    }
}

fn remove_left_overs(instances: &Path) {
    for entry in fs::read_dir(instances).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let Ok(directory) = File::open(entry.path()) else { continue };
        if ours && lock(&directory).is_ok() {
            fs::remove_dir(entry.path()).ok();
        }
    }
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
    fn lost_lines_are_counted() {
        assert_eq!(lost_lines("CPU:1 [LOST 12 EVENTS]"), Some(12));
        assert_eq!(lost_lines("  dd-9 [000] ..1 3.1: bpf_trace_printk: Hello!!"), None);
    }
}
