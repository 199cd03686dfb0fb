//! QEMU's own sandbox: a filter of the system calls that it may make (seccomp). A guest that breaks out of its
//! emulated machine can start no program then, and take no rights.
//!
//! Not every QEMU and not every container has it: that is tried once, and remembered.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use workshop::fail::{USAGE, fail};
use workshop::say;

use crate::arch::Arch;
use crate::fetch::cache::{self, Cache, tool};
use crate::session::processes::end_with_us;

/// QEMU's option: all that it can do without is forbidden. The guest's disks, shares and ports need none of it.
pub const OPTIONS: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";
/// The variable that switches it off.
const SWITCH: &str = "VM_SANDBOX";
/// How long a QEMU without a machine may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// Whether a QEMU starts with it, on this boot of the host.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Note {
    boot_id: String,
    qemu: String,
    options: String,
    works: bool,
}

/// Whether the user wants it: VM_SANDBOX=0 says no.
fn is_wanted() -> Result<bool> {
    match std::env::var(SWITCH).as_deref() {
        Err(_) | Ok("" | "1") => Ok(true),
        Ok("0") => Ok(false),
        Ok(other) => Err(fail(USAGE, format!("{SWITCH}={other} is not supported: use 0 or 1"))),
    }
}

/// Whether QEMU gets it: where the user wants it and it works here.
pub fn is_used(arch: Arch, cache: &Cache) -> Result<bool> {
    Ok(is_wanted()? && works(&tool(arch.qemu())?, PATIENCE, cache)?)
}

/// For `cargo vm doctor`.
pub fn describe(arch: Arch, cache: &Cache) -> Result<String> {
    Ok(if !is_wanted()? {
        format!("off ({SWITCH}=0): QEMU may do whatever this user may")
    } else if is_used(arch, cache)? {
        "on: QEMU may start no program and take no rights (seccomp)".into()
    } else {
        format!(
            "not available: {} does not start with `-sandbox on` here, so QEMU may do whatever this user may",
            arch.qemu()
        )
    })
}

fn works(qemu: &Path, patience: Duration, cache: &Cache) -> Result<bool> {
    let mut note = Note {
        boot_id: std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default(),
        qemu: format!("{} {}", qemu.display(), cache::stamp(qemu)?),
        options: OPTIONS.to_owned(),
        works: true,
    };
    let name = qemu.file_name().unwrap_or_default().to_string_lossy();
    let file = cache.path(format!("sandbox-{name}.json"));
    let old = std::fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok());
    for works in [true, false] {
        note.works = works;
        if old.as_ref() == Some(&note) {
            return Ok(works);
        }
    }
    let Some(works) = starts(qemu, patience) else { return Ok(false) };
    note.works = works;
    if let Err(error) = serde_json::to_string(&note)
        .map_err(anyhow::Error::from)
        .and_then(|text| workshop::write(&file, &text))
    {
        say!("the result of trying QEMU's sandbox could not be stored: {error:#}");
    }
    Ok(works)
}

/// Whether a QEMU without a machine starts with it, and ends when it is told to. `None`: it does not end, which
/// says nothing about the sandbox.
fn starts(qemu: &Path, patience: Duration) -> Option<bool> {
    let mut command = Command::new(qemu);
    command.args(["-sandbox", OPTIONS, "-machine", "none", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-monitor", "stdio"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    end_with_us(&mut command, Signal::KILL);
    let mut child = command.spawn().ok()?;
    if let Some(mut monitor) = child.stdin.take() {
        // One that has ended reads nothing.
        let _ = monitor.write_all(b"quit\n");
    }
    let start = Instant::now();
    while start.elapsed() < patience {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status.success());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = child.kill();
    let _ = child.wait();
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_qemu_is_tried_once() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(&temp.path().join("cache")).unwrap();
        let tries = temp.path().join("tries");
        let qemu = |name: &str, script: &str| {
            let file = temp.path().join(name);
            let text = format!("#!/bin/sh\necho \"$*\" >>{}\n{script}\n", tries.display());
            fs::write(&file, text).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
            file
        };
        let works = |qemu: &Path| works(qemu, PATIENCE, &cache).unwrap();
        let count = || fs::read_to_string(&tries).unwrap_or_default().lines().count();
        let good = qemu("good", "read word; [ $word = quit ]");
        let bad = qemu("bad", "exit 1");
        for (qemu, wanted) in [(&good, true), (&bad, false), (&good, true), (&bad, false)] {
            assert_eq!(works(qemu), wanted);
        }
        assert_eq!(count(), 2, "{:?}", fs::read_to_string(&tries));
        // Another QEMU of that name.
        let bad = qemu("bad", "read word; exit 0; # installed anew");
        assert!(works(&bad));
        // One that hangs may work another time.
        let hangs = qemu("hangs", "exec sleep 1000");
        for _ in 0..2 {
            let soon = Duration::from_millis(300);
            assert!(!super::works(&hangs, soon, &cache).unwrap());
        }
        assert_eq!(count(), 5);
    }
}
