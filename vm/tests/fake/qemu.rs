//! Stands in for QEMU where the launcher is judged: a machine that has booted at once. It takes QEMU's
//! options, serves the same sockets and files, and the guest's own agent runs the programs, on this
//! machine and with the rights of this user.
//!
//! Like QEMU, this process can be stopped and killed: everything between the launcher and the guest goes
//! through it. The guest is a process of its own, which ends when this one does.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, exit};
use std::sync::{Mutex, PoisonError};
use std::thread::{JoinHandle, spawn};

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getpid, set_child_subreaper, setrlimit};

#[path = "../../src/guest"]
mod guest {
    #[allow(dead_code)] // what the agent needs in a real guest only
    pub mod agent;
    #[allow(dead_code)]
    pub mod proto;
    /// Below the working directory.
    pub const GROUPS: &str = "groups";
}
#[allow(dead_code)]
#[path = "../../src/processes.rs"]
mod processes;

/// What a guest's program may take as its stack, which also limits its arguments.
const STACK: u64 = 8 << 20;

/// The threads that copy from the guest to the launcher.
static COPIES: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

fn main() -> Result<()> {
    let mut options: Vec<String> = std::env::args().skip(1).collect();
    if options.first().is_none_or(|first| first != "guest") {
        return machine(&options);
    }
    options.remove(0);
    run_guest(&options)
}

/// The machine: copies between the launcher's sockets and the guest's, until the guest has ended.
fn machine(options: &[String]) -> Result<()> {
    let ports = ports(options);
    for (_, path) in ports.clone() {
        let listener = UnixListener::bind(&path)?;
        spawn(move || {
            for launcher in listener.incoming().flatten() {
                connect(launcher, &path).expect("the guest listens before it says that it is up");
            }
        });
    }
    let dir = ports[0].1.parent().context("no directory")?;
    let mut guest = Command::new("/proc/self/exe");
    guest.arg("guest").args(options).current_dir(dir).stdin(Stdio::piped());
    let mut guest = guest.spawn()?;
    let power = guest.stdin.take(); // however this process ends, the guest notices
    let status = guest.wait()?;
    drop(power);
    for copy in std::mem::take(&mut *COPIES.lock().unwrap_or_else(PoisonError::into_inner)) {
        let _ = copy.join();
    }
    exit(status.code().unwrap_or(1))
}

fn connect(launcher: UnixStream, path: &Path) -> io::Result<()> {
    let guest = UnixStream::connect(inside(path))?;
    let copy = |mut from: UnixStream, mut to: UnixStream| {
        spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
        })
    };
    copy(launcher.try_clone()?, guest.try_clone()?);
    COPIES.lock().unwrap_or_else(PoisonError::into_inner).push(copy(guest, launcher));
    Ok(())
}

/// The guest: the agent, once init has reported.
fn run_guest(options: &[String]) -> Result<()> {
    spawn(|| {
        let _ = io::stdin().read(&mut [0]);
        power_off()
    });
    set_child_subreaper(Some(getpid()))?;
    setrlimit(Resource::Stack, Rlimit { current: Some(STACK), maximum: Some(STACK) })?;
    let ports = ports(options).into_iter().map(|(number, path)| {
        // No control groups: what a program leaves runs until the guest ends.
        let group = Path::new(guest::GROUPS).join(format!("session{number}"));
        fs::create_dir_all(&group)?;
        symlink("/dev/null", group.join("cgroup.procs"))?;
        let port = UnixListener::bind(inside(&path))?;
        Ok((number, move || Ok(File::from(OwnedFd::from(port.accept()?.0)))))
    });
    let ports = ports.collect::<Result<_>>()?;
    let console = find(options, "-chardev", "file,id=console").context("no console")?;
    File::create(console)?.write_all(b"no kernel boots here\n")?;
    let shared = find(options, "-virtfs", "mount_tag=ctl").context("no run directory")?;
    fs::write(shared.join("up"), "1.00\n")?;
    guest::agent::serve(ports)?;
    power_off()
}

/// Ends what the programs have left.
fn power_off() -> ! {
    processes::end_descendants(None);
    exit(0)
}

/// The sockets of the guest's ports.
fn ports(options: &[String]) -> Vec<(u32, PathBuf)> {
    let port = |n| find(options, "-chardev", &format!("socket,id=port{n},")).map(|path| (n, path));
    (0..).map_while(port).collect()
}

/// Where the guest listens, as the other end of this socket.
fn inside(socket: &Path) -> PathBuf {
    socket.with_extension("guest")
}

/// The path in the first option of that name which contains `text`.
fn find(options: &[String], name: &str, text: &str) -> Option<PathBuf> {
    let mut pairs = options.windows(2);
    let pair = pairs.find(|pair| pair[0] == name && pair[1].contains(text))?;
    pair[1].split(',').find_map(|part| part.strip_prefix("path=")).map(PathBuf::from)
}
