//! A learner's room of its own: `mine/`, `mine.old/` and `.lesson/` of a test lie over those of this clone, which
//! stay as they are, and its guests are not found by others. Where nothing may be mounted, a clone that has none
//! of the three lends its own place.

#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::{CommandExt, ExitStatusExt},
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    ptr,
    sync::mpsc::{Receiver, channel},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// The limit for anything: a guest boots, and an attempt is built.
const LIMIT: Duration = Duration::from_secs(600);
const PLACES: [&str; 3] = ["mine", "mine.old", ".lesson"];

pub struct Room {
    directory: TempDir,
    workspace: PathBuf,
    /// The clone itself is the room.
    is_clone: bool,
    /// Rooms take turns: what is built of `mine/01` lies in the same place for all.
    _turn: File,
}

impl Room {
    /// `None` where this user may mount nothing, also not for itself, and the clone is in use: that is said.
    pub fn new() -> Option<Room> {
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap();
        let directory = tempfile::Builder::new().prefix("room").tempdir_in("/tmp").unwrap();
        for place in PLACES {
            fs::create_dir(directory.path().join(place)).unwrap();
        }
        fs::create_dir(directory.path().join("run")).unwrap();
        let turn = File::create(Path::new(env!("CARGO_TARGET_TMPDIR")).join("room.lock")).unwrap();
        // SAFETY: the descriptor is open.
        assert_eq!(unsafe { libc::flock(turn.as_raw_fd(), libc::LOCK_EX) }, 0);
        let mut room = Room { directory, workspace, is_clone: false, _turn: turn };
        if room.command("true").output().is_ok_and(|output| output.status.success()) {
            return Some(room);
        }
        // One with something in it stays.
        PLACES.iter().for_each(|place| drop(fs::remove_dir(room.workspace.join(place))));
        if PLACES.iter().any(|place| room.workspace.join(place).exists()) {
            eprintln!("not tested: `unshare --mount` is not allowed here, and there are attempts");
            return None;
        }
        room.is_clone = true;
        Some(room)
    }

    /// A file of the workshop.
    pub fn workshop(&self, file: &str) -> PathBuf {
        self.workspace.join(file)
    }

    /// A file of the room: `mine/01/src/main.rs`.
    pub fn path(&self, file: &str) -> PathBuf {
        let is_there =
            self.is_clone && PLACES.iter().any(|place| Path::new(file).starts_with(place));
        if is_there { self.workspace.join(file) } else { self.directory.path().join(file) }
    }

    /// A program in this room.
    fn command(&self, program: &str) -> Command {
        let mut command = match self.is_clone {
            true => Command::new(program),
            false => self.mounted(program),
        };
        command.current_dir(&self.workspace).env("TMPDIR", self.path("run"));
        command.env_remove("VM_KERNEL").env_remove("VM_ARCH").stdin(Stdio::null());
        command
    }

    fn mounted(&self, program: &str) -> Command {
        let mut script = "set -e; ".to_owned();
        for place in PLACES {
            // An empty directory may stay: git ignores it.
            fs::create_dir_all(self.workspace.join(place)).unwrap();
            script +=
                &format!("mount --bind {}/{place} {place}; ", self.directory.path().display());
        }
        let mut unshare = Command::new("unshare");
        unshare.arg("--mount");
        // SAFETY: no argument, and no memory touched.
        if unsafe { libc::geteuid() } != 0 {
            unshare.arg("--map-root-user");
        }
        unshare.args(["sh", "-c", &format!("{script} exec \"$@\""), "sh", program]);
        unshare
    }

    pub fn lesson(&self, arguments: &[&str]) -> Command {
        let mut lesson = self.command(env!("CARGO_BIN_EXE_lesson"));
        lesson.args(arguments);
        lesson
    }

    /// Runs it to its end: the exit code, and all that it said.
    pub fn run(&self, arguments: &[&str]) -> (i32, String) {
        Running::new(self.lesson(arguments)).end()
    }

    /// How many guests of this room run.
    pub fn guests(&self) -> usize {
        let place = self.path("run");
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let is_one = |words: Vec<u8>| {
            let words = String::from_utf8_lossy(&words).into_owned();
            words.contains(place.to_str().unwrap()) && words.contains("-kernel")
        };
        entries.filter(|it| fs::read(it.path().join("cmdline")).is_ok_and(is_one)).count()
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.lesson(&["stop"]).output().ok();
        for place in PLACES.map(|place| self.workspace.join(place)) {
            match self.is_clone {
                true => fs::remove_dir_all(place).ok(),
                false => fs::remove_dir(place).ok(),
            };
        }
    }
}

/// A program, and what it has said on both streams, or on its terminal.
pub struct Running {
    child: Child,
    output: Receiver<Vec<u8>>,
    said: String,
    terminal: Option<File>,
}

impl Running {
    pub fn new(mut command: Command) -> Running {
        let (output, input) = std::io::pipe().unwrap();
        command.stdout(input.try_clone().unwrap()).stderr(input);
        Running::start(command, output, None)
    }

    /// In a terminal, as a shell would start it.
    pub fn on_terminal(mut command: Command) -> Running {
        let (mut master, mut slave) = (0, 0);
        // SAFETY: both are written, and the other arguments may be null.
        let opened = unsafe {
            let none = (ptr::null_mut(), ptr::null(), ptr::null());
            libc::openpty(&raw mut master, &raw mut slave, none.0, none.1, none.2)
        };
        assert_eq!(opened, 0);
        // SAFETY: they were just opened, and nobody else has them.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        for set in [Command::stdin, Command::stdout, Command::stderr] {
            set(&mut command, slave.try_clone().unwrap());
        }
        Running::start(command, master.try_clone().unwrap(), Some(master))
    }

    fn start(
        mut command: Command,
        mut from: impl Read + Send + 'static,
        terminal: Option<File>,
    ) -> Running {
        let has_terminal = terminal.is_some();
        // SAFETY: async-signal-safe system calls, no memory of the parent touched.
        unsafe {
            command.pre_exec(move || {
                for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                libc::setsid();
                if has_terminal {
                    libc::ioctl(0, libc::TIOCSCTTY, 0);
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        // The ends that the child has.
        drop(command);
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    break;
                }
            }
        });
        Running { child, output, said: String::new(), terminal }
    }

    /// Waits until it has said this.
    pub fn expect(&mut self, text: &str) {
        let start = Instant::now();
        while !self.said.contains(text) {
            let left = LIMIT.saturating_sub(start.elapsed());
            match self.output.recv_timeout(left) {
                Ok(bytes) => self.said += &String::from_utf8_lossy(&bytes),
                Err(error) => panic!("no {text:?} ({error}) in {:?}", self.said),
            }
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the child was not waited for: this is its number.
        unsafe { libc::kill(self.child.id().cast_signed(), signal) };
    }

    pub fn type_in(&mut self, text: &str) {
        self.terminal.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }

    /// Waits for its end: the exit code, or 128 and the signal's number, and all that it said.
    pub fn end(mut self) -> (i32, String) {
        let start = Instant::now();
        let status = loop {
            while let Ok(bytes) = self.output.try_recv() {
                self.said += &String::from_utf8_lossy(&bytes);
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(start.elapsed() < LIMIT, "it does not end: {}", self.said);
            thread::sleep(Duration::from_millis(20));
        };
        // A guest that stays has its output open no more than a moment.
        while let Ok(bytes) = self.output.recv_timeout(Duration::from_millis(300)) {
            self.said += &String::from_utf8_lossy(&bytes);
        }
        let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap());
        (code, std::mem::take(&mut self.said))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
