//! The way for kernels without 9p, such as Debian's cloud flavour, to see this machine's files:
//! virtiofs, with one virtiofsd for each directory.

use std::ffi::OsString;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use rustix::process::Signal;
use workshop::fail::{MACHINE, fail};

use crate::fetch::cache::find_tool;
use crate::session::processes::end_with_us;

/// Where distributions keep virtiofsd: it is no program that a user starts.
const PLACES: [&str; 2] = ["/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"];

fn virtiofsd() -> Result<PathBuf> {
    let places = PLACES.into_iter().map(PathBuf::from).filter(|file| file.is_file());
    find_tool("virtiofsd").into_iter().chain(places).next().ok_or_else(|| {
        let message = "this kernel has no 9p. It boots with virtiofs instead, which needs virtiofsd: install \
                       the package virtiofsd, or take a kernel with 9p (in Debian, any without \"cloud\" in \
                       its name)";
        fail(MACHINE, message)
    })
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
    let virtiofsd = virtiofsd()?;
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
        let mut command = Command::new(&virtiofsd);
        // Its standard input is the socket that QEMU connects to.
        command.args(["--fd=0", "--sandbox=none", "--no-announce-submounts", "--shared-dir"]);
        command.arg(path).args(read_only.then_some("--readonly"));
        command.stdin(Stdio::from(OwnedFd::from(listener))).stdout(log.try_clone()?).stderr(log);
        end_with_us(&mut command, Signal::KILL);
        // It ends when QEMU does, whose connection it serves.
        command.spawn().context("cannot start virtiofsd")?;
        let mut chardev = OsString::from(format!("socket,id={tag},path="));
        chardev.push(socket);
        options.extend(["-chardev".into(), chardev, "-device".into()]);
        options.push(format!("vhost-user-fs-pci,chardev={tag},tag={tag}").into());
    }
    Ok(options)
}
