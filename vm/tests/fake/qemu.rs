//! Stands in for QEMU where the launcher is judged: a machine that boots at once. It takes QEMU's
//! options and serves the same sockets and files; the guest's own agent runs the programs, on this
//! machine and with the rights of this user.
//!
//! Like QEMU, this process can be stopped and killed: all that the launcher and the guest say to each
//! other goes through it. The guest is a process of its own, which ends when this one does.

#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::{self, Read};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio, exit};
use std::sync::Mutex;
use std::thread::{JoinHandle, spawn};

use rustix::process::{Resource, Rlimit, getpid, set_child_subreaper, setrlimit};

use vm::session::{guest, processes};

/// Where the guest has its control groups, below the working directory.
const GROUPS: &str = "groups";
/// The largest stack of a guest's program. Its arguments may take a quarter of that.
const STACK: Option<u64> = Some(8 << 20);

/// The threads that copy from the guest to the launcher.
static COPIES: Mutex<Vec<JoinHandle<()>>> = Mutex::new(Vec::new());

fn main() {
    let options: Vec<String> = std::env::args().skip(1).collect();
    match options.split_first() {
        Some((first, options)) if first == "guest" => run_guest(options),
        _ => run_machine(&options),
    }
}

/// Copies between the launcher's sockets and the guest's, until the guest has ended.
fn run_machine(options: &[String]) {
    let ports = ports(options);
    let dir = ports[0].1.parent().unwrap().to_owned();
    for (_, path) in ports {
        let listener = UnixListener::bind(&path).unwrap();
        spawn(move || listener.incoming().for_each(|launcher| connect(launcher.unwrap(), &path)));
    }
    let mut guest = Command::new("/proc/self/exe");
    guest.arg("guest").args(options).current_dir(dir).stdin(Stdio::piped());
    let mut guest = guest.spawn().unwrap();
    let power = guest.stdin.take(); // however this process ends, the guest notices
    let status = guest.wait().unwrap();
    drop(power);
    let copies = std::mem::take(&mut *COPIES.lock().unwrap());
    copies.into_iter().for_each(|copy| copy.join().unwrap());
    exit(status.code().unwrap_or(1));
}

fn connect(launcher: UnixStream, path: &Path) {
    let guest = UnixStream::connect(inside(path)).unwrap();
    let copy = |from: &UnixStream, to: &UnixStream| {
        let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
        spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = (to.shutdown(Shutdown::Write), from.shutdown(Shutdown::Read));
        })
    };
    copy(&launcher, &guest);
    COPIES.lock().unwrap().push(copy(&guest, &launcher));
}

/// What init does, as far as the launcher sees it, and the agent.
fn run_guest(options: &[String]) {
    spawn(|| {
        let _ = io::stdin().read(&mut [0]);
        power_off();
    });
    set_child_subreaper(Some(getpid())).unwrap();
    setrlimit(Resource::Stack, Rlimit { current: STACK, maximum: STACK }).unwrap();
    let ports = ports(options).into_iter().map(|(number, path)| {
        // No control groups: what a program leaves runs until the guest ends.
        let group = Path::new(GROUPS).join(format!("session{number}"));
        fs::create_dir_all(&group).unwrap();
        symlink("/dev/null", group.join("cgroup.procs")).unwrap();
        let port = UnixListener::bind(inside(&path)).unwrap();
        (number, move || Ok(File::from(OwnedFd::from(port.accept()?.0))))
    });
    let ports = ports.collect();
    fs::write(path(options, "file,id=console,").unwrap(), "no kernel boots here\n").unwrap();
    fs::write(path(options, "mount_tag=ctl,").unwrap().join("up"), "1.00\n").unwrap();
    guest::serve(ports, Path::new(GROUPS)).unwrap();
    power_off();
}

/// Ends what the programs have left.
fn power_off() {
    processes::end_descendants();
    exit(0);
}

/// The numbers of the guest's ports, and the launcher's sockets.
fn ports(options: &[String]) -> Vec<(u32, PathBuf)> {
    let port = |n| path(options, &format!("socket,id=port{n},")).map(|path| (n, path));
    (0..).map_while(port).collect()
}

/// Where the guest listens, as the other end of this socket.
fn inside(socket: &Path) -> PathBuf {
    socket.with_extension("guest")
}

/// The path in the option that contains `text`.
fn path(options: &[String], text: &str) -> Option<PathBuf> {
    let option = options.iter().find(|option| option.contains(text))?;
    option.split(',').find_map(|part| part.strip_prefix("path=")).map(PathBuf::from)
}
