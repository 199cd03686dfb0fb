//! The way for kernels without 9p, such as Debian's cloud flavour, to see this machine's files:
//! virtiofs, with one virtiofsd for each directory.

use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use host::fail::{MACHINE, fail};
use rustix::process::Signal;

use crate::fetch::cache::find_tool;

/// Where distributions keep virtiofsd: it is no program that a user starts.
const PLACES: [&str; 3] =
    ["/usr/libexec/virtiofsd", "/usr/lib/virtiofsd", "/usr/lib/qemu/virtiofsd"];

/// Makes all mounts read-only, for itself only, and becomes virtiofsd.
const READ_ONLY: &str = r#"
while read -r _ dir _; do
	dir=$(printf %b "$dir")
	mount -o remount,bind,ro "$dir" 2>/dev/null || [ ! -w "$dir" ] || exit 1
done </proc/self/mounts
exec "$@""#;

/// A virtiofsd, and how it takes its options.
struct Daemon {
    file: PathBuf,
    /// The one of old, in C, a part of QEMU until 8.0. It works for root only.
    old: bool,
}

impl Daemon {
    fn find() -> Result<Daemon> {
        let missing = |what: &str| {
            let message = format!(
                "this kernel has no 9p. It boots with virtiofs instead, which needs virtiofsd, and \
                 {what}: install the package virtiofsd, or take a kernel with 9p (in Debian, any \
                 without \"cloud\" in its name)"
            );
            fail(MACHINE, message)
        };
        let places = PLACES.into_iter().map(PathBuf::from).filter(|file| file.is_file());
        let file = find_tool("virtiofsd").into_iter().chain(places).next();
        let file = file.ok_or_else(|| missing("that is not here"))?;
        let help = Command::new(&file).arg("--help").output().context("cannot start virtiofsd")?;
        let old = !String::from_utf8_lossy(&help.stdout).contains("--shared-dir");
        if old && !rustix::process::geteuid().is_root() {
            return Err(missing("the one that is here, which is QEMU's own, works for root only"));
        }
        Ok(Daemon { file, old })
    }

    /// The command that serves `path`; standard input is the socket that QEMU connects to.
    fn command(&self, path: &Path, read_only: bool) -> Command {
        let mut command;
        if self.old {
            // It has no option for this.
            command = Command::new(if read_only { "unshare".into() } else { self.file.clone() });
            if read_only {
                command.args(["--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh"]);
                command.arg(&self.file);
            }
            let mut source = OsString::from("source=");
            source.push(path);
            command.args(["-f", "--fd=0", "-o", "sandbox=chroot", "-o"]).arg(source);
        } else {
            command = Command::new(&self.file);
            command
                .args(["--fd=0", "--sandbox=none", "--no-announce-submounts", "--shared-dir"])
                .arg(path);
            if read_only {
                command.arg("--readonly");
            }
        }
        command
    }
}

pub struct Share {
    /// What the guest mounts it by.
    pub tag: String,
    pub path: PathBuf,
    /// Whether the guest cannot write there.
    pub read_only: bool,
}

/// Starts what serves the directories. Returns QEMU's options for them.
pub fn serve(memory: &str, dir: &Path, shares: &[Share]) -> Result<Vec<OsString>> {
    let daemon = Daemon::find()?;
    let unit = if memory.ends_with(|c: char| c.is_ascii_digit()) { "M" } else { "" };
    // virtiofsd reads and writes the guest's memory.
    let backend = format!("memory-backend-memfd,id=mem,size={memory}{unit},share=on");
    let mut options: Vec<OsString> = ["-object", &backend].map(Into::into).to_vec();
    options.extend(["-machine", "memory-backend=mem"].map(OsString::from));
    for Share { tag, path, read_only } in shares {
        let socket = dir.join(format!("{tag}.sock"));
        let _ = fs::remove_file(&socket); // of a QEMU that was given up
        let listener = UnixListener::bind(&socket)
            .with_context(|| format!("cannot create {}", socket.display()))?;
        let log = fs::File::create(dir.join(format!("{tag}.log")))?;
        let mut command = daemon.command(path, *read_only);
        command.stdin(Stdio::from(OwnedFd::from(listener))).stdout(log.try_clone()?).stderr(log);
        // SAFETY: one system call, async-signal-safe, no memory of the parent touched.
        unsafe {
            command.pre_exec(|| {
                Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
            });
        }
        // It ends when QEMU does, whose connection it serves.
        command.spawn().context("cannot start virtiofsd")?;
        let mut chardev = OsString::from(format!("socket,id={tag},path="));
        chardev.push(socket);
        options.extend(["-chardev".into(), chardev, "-device".into()]);
        options.push(format!("vhost-user-fs-pci,chardev={tag},tag={tag}").into());
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_served_read_only() {
        let args = |old: bool, read_only: bool| {
            let daemon = Daemon { file: "/v".into(), old };
            let command = daemon.command(Path::new("/"), read_only);
            let all = std::iter::once(command.get_program()).chain(command.get_args());
            all.map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        assert!(args(false, true).contains(&"--readonly".to_owned()));
        assert!(!args(false, false).contains(&"--readonly".to_owned()));
        assert_eq!(args(true, true)[0], "unshare");
        assert_eq!(args(true, false)[0], "/v");
    }
}
