//! Why a guest has died: what its console and QEMU have left in the run directory.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::session::cleanup;
use crate::session::rundir::read_shared;

/// How much is read of the end of the console and of QEMU's messages.
const END_OF_LOG: u64 = 64 * 1024;

/// Why the guest died, with the last lines of its console.
pub fn crash_report(dir: &Path) -> String {
    cause(dir) + &tail(dir)
}

/// The same in a line.
pub fn cause(dir: &Path) -> String {
    let start = Instant::now();
    let mut status = cleanup::qemu_ended();
    while status.is_none() && start.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(20));
        status = cleanup::qemu_ended();
    }
    let console = end_of(&dir.join("console"));
    let panic = console.lines().find_map(|line| line.split_once("Kernel panic - not syncing: "));
    if let Some(what) = read_shared(dir, "failed") {
        let what = last_lines(&what, 20).join("\n  ");
        format!("the guest could not be set up: {what}")
    } else if let Some((_, what)) = panic {
        format!("the guest's kernel panicked: {}", what.trim())
    } else {
        match status {
            Some(status) if status.signal() == Some(Signal::SYS.as_raw()) => {
                "QEMU made a system call that its sandbox forbids, and was killed; VM_SANDBOX=0 runs it \
                 without the sandbox"
                    .to_owned()
            }
            Some(status) if status.signal().is_some() => {
                format!("QEMU was killed by signal {}{}", status.signal().unwrap_or(0), log(dir))
            }
            Some(status) if !status.success() => {
                format!("QEMU could not run the guest{}", log(dir))
            }
            Some(_) => "the guest shut down before the program had ended".to_owned(),
            None => "the connection to the guest broke".to_owned(),
        }
    }
}

/// QEMU's last messages, to append to a message.
fn log(dir: &Path) -> String {
    let lines = last_lines(&end_of(&dir.join("qemu.log")), 3);
    if lines.is_empty() { String::new() } else { format!(" ({})", lines.join("; ")) }
}

/// The console's last lines, to append to a message.
pub fn tail(dir: &Path) -> String {
    let lines = last_lines(&end_of(&dir.join("console")), 20);
    if lines.is_empty() {
        return "; its console is empty".to_owned();
    }
    format!("; the last lines of its console:\n  {}", lines.join("\n  "))
}

/// The end of a file that may have grown to any size.
fn end_of(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(END_OF_LOG)))?;
        let mut bytes = Vec::new();
        file.take(END_OF_LOG).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// The last `n` lines that are not empty, without control characters.
fn last_lines(text: &str, n: usize) -> Vec<String> {
    let lines = text.lines().map(workshop::printable);
    let lines: Vec<String> = lines.filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(n)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::rundir::shared;
    use std::fs;

    #[test]
    fn the_consoles_last_lines_are_clean() {
        let text = "one\r\n\r\n\x1b[0mtwo\r\nthree";
        assert_eq!(last_lines(text, 2), ["?[0mtwo", "three"]);
        assert_eq!(last_lines("", 2), Vec::<String>::new());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("console");
        fs::write(&file, "x".repeat(1 << 20) + "\nlast").unwrap();
        assert_eq!(end_of(&file).len() as u64, END_OF_LOG);
        assert_eq!(last_lines(&end_of(&file), 1), ["last"]);
    }

    #[test]
    fn a_dead_guest_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("console"), "a\nKernel panic - not syncing: x\n").unwrap();
        let text = crash_report(dir.path());
        let wanted = "the guest's kernel panicked: x; the last lines of its console:\n  a\n";
        assert!(text.starts_with(wanted), "{text}");
        fs::create_dir(shared(dir.path())).unwrap();
        fs::write(shared(dir.path()).join("failed"), "mount: no\n").unwrap();
        assert!(crash_report(dir.path()).starts_with("the guest could not be set up: mount: no;"));
    }
}
