//! The agent: the guest's end of the sessions.
//!
//! It serves the virtio-serial ports: one thread for each, one session after another. A write to a
//! port blocks until the host has opened its end, so no port has to be polled.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use host::fail::{MACHINE, fail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};

use crate::session::wire::{
    CHUNK, Exit, Message, Request, Size, Stream, read_message, size_of_arguments, write_message,
};

/// The file that exists only in the guest.
pub const MARK: &str = "/run/bpf-vm";
/// Where the guest's kernel lists the ports with their names.
const PORTS: &str = "/sys/class/virtio-ports";
/// Where the guest has its control groups.
const GROUPS: &str = "/sys/fs/cgroup";
/// Ctrl-D: the end of input on a terminal.
const END_OF_INPUT: &[u8] = b"\x04";

/// Sessions whose program has not ended.
static OPEN: AtomicU32 = AtomicU32::new(0);

/// The agent's main: serves the guest's ports.
pub fn main() -> Result<()> {
    if !Path::new(MARK).exists() {
        return Err(fail(MACHINE, "the agent runs in the guest only"));
    }
    let ports = ports()?.into_iter().map(|(number, path)| {
        let file = File::options().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        Ok((number, move || file.try_clone()))
    });
    serve(ports.collect::<Result<_>>()?, Path::new(GROUPS))
}

/// Serves the ports, which are functions that return the host's end: before each session of the port,
/// they are called. `groups` is the directory of control groups. Returns when the first session of port 0
/// and all others have ended.
pub fn serve<P>(ports: Vec<(u32, P)>, groups: &Path) -> Result<()>
where
    P: Fn() -> std::io::Result<File> + Send + 'static,
{
    let mut first = None;
    for (number, port) in ports {
        let group = Group { dir: groups.join(format!("session{number}")) };
        let thread = std::thread::spawn(move || {
            if let Err(error) = sessions(number, &group, port) {
                eprintln!("vm: session {number}: {error:#}");
            }
        });
        if number == 0 {
            first = Some(thread);
        }
    }
    let _ = first.context("the guest has no port 0")?.join();
    while OPEN.load(Ordering::SeqCst) > 0 {
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// The ports by number. The guest has no udev, which would create names for them in /dev.
fn ports() -> Result<Vec<(u32, PathBuf)>> {
    let entries = fs::read_dir(PORTS).with_context(|| format!("cannot read {PORTS}"))?;
    Ok(entries
        .flatten()
        .filter_map(|entry| {
            let name = fs::read_to_string(entry.path().join("name")).ok()?;
            let number = name.trim().strip_prefix("bpfvm.")?.parse().ok()?;
            Some((number, Path::new("/dev").join(entry.file_name())))
        })
        .collect())
}

/// The host's end of a session, as the threads share it.
type Port = Arc<Mutex<File>>;

fn lock(port: &Port) -> MutexGuard<'_, File> {
    port.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a message. Where the host has gone, the reading side notices.
fn send(port: &Port, message: Message) {
    let _ = write_message(&mut *lock(port), &message);
}

/// Says something on the program's standard error.
fn complain(port: &Port, why: &str) {
    send(port, Message::Output(Stream::Stderr, format!("vm: {why}\n").into_bytes()));
}

/// The sessions of a port. Port 0 has one: the guest ends with it.
fn sessions(number: u32, group: &Group, port: impl Fn() -> std::io::Result<File>) -> Result<()> {
    loop {
        session(number, group, &port()?)?;
        if number == 0 {
            return Ok(());
        }
    }
}

/// One session, from the host's connection to the program's end; where the host can connect again,
/// to the end of the connection.
fn session(number: u32, group: &Group, file: &File) -> Result<()> {
    let mut reader = file.try_clone()?;
    let port: Port = Arc::new(Mutex::new(file.try_clone()?));
    // Returns when the host has connected.
    write_message(&mut *lock(&port), &Message::Hello)?;
    let request = loop {
        match read_message(&mut reader) {
            Ok(Some(Message::Request(request))) => break request,
            Ok(Some(_)) => {} // for a program that has ended, or did not start
            _ => return Ok(()),
        }
    };
    OPEN.fetch_add(1, Ordering::SeqCst);
    let (connected, gone) = mpsc::channel();
    let status = run(group, &request, reader, &port, connected).unwrap_or_else(|error| {
        complain(&port, &format!("{error:#}"));
        126
    });
    let others = OPEN.fetch_sub(1, Ordering::SeqCst) - 1;
    send(&port, Message::Exit(Exit { status, others }));
    if number != 0 {
        // An error: the thread that reads the port has ended, and with it its `connected`.
        let _ = gone.recv();
    }
    Ok(())
}

/// Runs the program to its end and returns the status to exit with.
fn run(
    group: &Group,
    request: &Request,
    reader: File,
    port: &Port,
    connected: mpsc::Sender<()>,
) -> Result<i32> {
    let Some((program, args)) = request.argv.split_first() else {
        anyhow::bail!("no program");
    };
    let _ = fs::create_dir(&group.dir);
    let mut command = Command::new(program);
    command.args(args).env_clear().envs(request.env.iter().cloned()).current_dir(&request.cwd);

    let pty = Pty::open(request)?;
    let on_pty = |wanted: bool| -> Result<Option<Stdio>> {
        match &pty {
            Some(pty) if wanted => Ok(Some(pty.slave.try_clone()?.into())),
            _ => Ok(None),
        }
    };
    command.stdin(on_pty(request.stdin_tty)?.unwrap_or_else(Stdio::piped));
    command.stdout(on_pty(request.stdout_tty)?.unwrap_or_else(Stdio::piped));
    command.stderr(on_pty(request.stderr_tty)?.unwrap_or_else(Stdio::piped));
    group.catch(&mut command, pty.as_ref().map(|pty| pty.slave.try_clone()).transpose()?)?;

    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(not_started(request, &error, port)),
    };
    let pid = Pid::from_child(&child);
    drop(command); // its copies of the terminal would keep it open

    let stdin: Option<File> = match (child.stdin.take(), &pty) {
        (Some(pipe), _) => Some(OwnedFd::from(pipe).into()),
        (None, Some(pty)) => Some(pty.master.try_clone()?.into()),
        (None, None) => None,
    };
    let mut outputs = Outputs::default();
    if let Some(pipe) = child.stdout.take() {
        outputs.add(Stream::Stdout, OwnedFd::from(pipe), port)?;
    }
    if let Some(pipe) = child.stderr.take() {
        outputs.add(Stream::Stderr, OwnedFd::from(pipe), port)?;
    }
    let mut master = None;
    if let Some(pty) = pty {
        let stream = if request.stdout_tty { Stream::Stdout } else { Stream::Stderr };
        master = Some(pty.master.try_clone()?);
        outputs.add(stream, pty.master, port)?;
    }
    let outputs = Arc::new(outputs);

    let alive = Arc::new(AtomicBool::new(true));
    let input =
        Input { stdin, on_terminal: request.stdin_tty, master, pid, alive: Arc::clone(&alive) };
    let (for_reader, reader_port) = (Arc::clone(&outputs), Arc::clone(port));
    std::thread::spawn(move || input.serve(reader, &reader_port, &for_reader, connected));
    let workload = request.workload.as_ref().and_then(|file| start_workload(file, request, group));

    let status = child.wait().context("cannot wait for the program")?;
    alive.store(false, Ordering::SeqCst);
    if let Some(mut workload) = workload {
        let _ = rustix::process::kill_process_group(Pid::from_child(&workload), Signal::KILL);
        let _ = workload.wait();
    }
    group.kill();
    outputs.drain();
    Ok(code(status))
}

/// A program's status as a shell reports it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn not_started(request: &Request, error: &std::io::Error, port: &Port) -> i32 {
    let program = request.argv[0].to_string_lossy();
    let too_big = rustix::io::Errno::TOOBIG.raw_os_error();
    let (code, why) = if error.raw_os_error() == Some(too_big) {
        let kib = size_of_arguments(&request.argv, &request.env) / 1024;
        (
            2,
            format!(
                "{program}: its arguments and environment take {kib} KiB, more than Linux accepts \
                 (`getconf ARG_MAX` shows the limit); pass them in a file, or through standard input"
            ),
        )
    } else if !Path::new(&request.cwd).is_dir() {
        (126, format!("the directory {} is not in the guest", request.cwd.to_string_lossy()))
    } else if error.kind() == ErrorKind::NotFound {
        (
            127,
            format!(
                "{program}: there is no such program in the guest, and no program of that name in \
                 this workspace"
            ),
        )
    } else {
        (126, format!("{program}: {error}"))
    };
    complain(port, &why);
    code
}

/// Starts the workload, which runs as long as the program.
fn start_workload(file: &std::ffi::OsStr, request: &Request, group: &Group) -> Option<Child> {
    let mut command = Command::new("sh");
    command.arg(file).env_clear().envs(request.env.iter().cloned()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let console = File::options().write(true).open("/dev/console");
    command.stderr(console.map_or_else(|_| Stdio::null(), Stdio::from));
    group.catch(&mut command, None).ok()?;
    command.spawn().ok()
}

/// The terminal of a session.
struct Pty {
    master: OwnedFd,
    slave: OwnedFd,
}

impl Pty {
    /// A terminal, where any of the request's three descriptors is one.
    fn open(request: &Request) -> Result<Option<Pty>> {
        if !request.stdin_tty && !request.stdout_tty && !request.stderr_tty {
            return Ok(None);
        }
        let open = || -> rustix::io::Result<Pty> {
            let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
            grantpt(&master)?;
            unlockpt(&master)?;
            let name = ptsname(&master, Vec::new())?;
            let flags =
                rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
            let slave = rustix::fs::open(name, flags, rustix::fs::Mode::empty())?;
            if !request.stdin_tty {
                // The host's terminal is not raw: it already translates line ends and echoes.
                let mut settings = tcgetattr(&slave)?;
                settings.make_raw();
                tcsetattr(&slave, OptionalActions::Now, &settings)?;
            }
            Ok(Pty { master, slave })
        };
        let pty = open().context("cannot open a terminal in the guest")?;
        if let Some(size) = request.size {
            resize(&pty.slave, size);
        }
        Ok(Some(pty))
    }
}

fn resize(terminal: impl AsFd, size: Size) {
    let size = Winsize { ws_row: size.rows, ws_col: size.cols, ws_xpixel: 0, ws_ypixel: 0 };
    let _ = tcsetwinsize(terminal, size);
}

/// The control group of everything that a session starts, so that nothing outlives the session.
struct Group {
    dir: PathBuf,
}

impl Group {
    /// Makes the command start in the group, as the leader of a new session, with the terminal
    /// where there is one.
    fn catch(&self, command: &mut Command, terminal: Option<OwnedFd>) -> Result<()> {
        let procs = File::options().write(true).open(self.dir.join("cgroup.procs"));
        let procs = procs.context("cannot use the control group of the session")?;
        // SAFETY: only system calls, all async-signal-safe, no memory of the parent touched.
        unsafe {
            command.pre_exec(move || {
                rustix::io::write(&procs, b"0")?;
                rustix::process::setsid()?;
                if let Some(terminal) = &terminal {
                    rustix::process::ioctl_tiocsctty(terminal)?;
                }
                Ok(())
            });
        }
        Ok(())
    }

    /// Kills the processes that are left, and waits for their end.
    fn kill(&self) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(5) {
            let procs = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
            let pids: Vec<i32> = procs.lines().filter_map(|line| line.parse().ok()).collect();
            if pids.is_empty() {
                break;
            }
            for pid in pids.into_iter().filter_map(Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// The threads that send the program's output to the host.
#[derive(Default)]
struct Outputs {
    all: Vec<Output>,
}

struct Output {
    stream: Stream,
    /// The host has closed its end.
    closed: Arc<AtomicBool>,
    /// The program has ended: send what is there, wait for no more.
    ended: Arc<AtomicBool>,
    /// Dropped to wake the thread.
    wake: Mutex<Option<OwnedFd>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Outputs {
    fn add(&mut self, stream: Stream, source: OwnedFd, port: &Port) -> Result<()> {
        let (wake_reader, wake) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let closed = Arc::new(AtomicBool::new(false));
        let ended = Arc::new(AtomicBool::new(false));
        let (is_closed, has_ended, port) =
            (Arc::clone(&closed), Arc::clone(&ended), Arc::clone(port));
        let thread = std::thread::spawn(move || {
            copy_output(stream, source, wake_reader, &port, &is_closed, &has_ended);
        });
        let (wake, thread) = (Mutex::new(Some(wake)), Mutex::new(Some(thread)));
        self.all.push(Output { stream, closed, ended, wake, thread });
        Ok(())
    }

    /// Closes the program's output, so that its next write fails.
    fn close(&self, stream: Stream) {
        for output in self.all.iter().filter(|output| output.stream == stream) {
            output.closed.store(true, Ordering::SeqCst);
            output.wake();
        }
    }

    /// Waits until everything that was written has been sent to the host.
    fn drain(&self) {
        for output in &self.all {
            output.ended.store(true, Ordering::SeqCst);
            output.wake();
        }
        for output in &self.all {
            let thread = output.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(thread) = thread {
                let _ = thread.join();
            }
        }
    }
}

impl Output {
    fn wake(&self) {
        self.wake.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

fn copy_output(
    stream: Stream,
    source: OwnedFd,
    wake: OwnedFd,
    port: &Port,
    closed: &AtomicBool,
    ended: &AtomicBool,
) {
    // A process that left its control group may keep the pipe open for ever.
    let last_wait = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
    let mut file = File::from(source);
    let mut buffer = vec![0; CHUNK - 16];
    loop {
        let ending = ended.load(Ordering::SeqCst);
        if closed.load(Ordering::SeqCst) {
            return;
        }
        let ready = {
            let source = PollFd::new(&file, PollFlags::IN);
            let wake = PollFd::new(&wake, PollFlags::IN);
            let result = if ending {
                poll(&mut [source], Some(&last_wait)).map(|n| n > 0)
            } else {
                let mut both = [source, wake];
                poll(&mut both, None).map(|_| !both[0].revents().is_empty())
            };
            match result {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return,
            }
        };
        if !ready {
            if ending {
                return;
            }
            continue;
        }
        match file.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => send(port, Message::Output(stream, buffer[..n].to_vec())),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(_) => return, // a terminal's master, after its last user
        }
    }
}

/// What comes from the host during a session.
struct Input {
    stdin: Option<File>,
    on_terminal: bool,
    master: Option<OwnedFd>,
    pid: Pid,
    /// The program has not been waited for, so `pid` is still its id.
    alive: Arc<AtomicBool>,
}

impl Input {
    /// Serves the host's messages until the connection ends. Never waits for the program.
    fn serve(
        mut self,
        mut reader: File,
        port: &Port,
        outputs: &Outputs,
        connected: mpsc::Sender<()>,
    ) {
        let (sender, data) = mpsc::channel::<Vec<u8>>();
        let mut sender = Some(sender);
        let (stdin, on_terminal, stdin_port) =
            (self.stdin.take(), self.on_terminal, Arc::clone(port));
        std::thread::spawn(move || feed(stdin, on_terminal, &data, &stdin_port));
        while let Ok(Some(message)) = read_message(&mut reader) {
            match message {
                Message::Stdin(data) => {
                    if let Some(sender) = &sender {
                        let _ = sender.send(data);
                    }
                }
                Message::StdinEof => sender = None,
                Message::Closed(stream) => outputs.close(stream),
                Message::Size(size) => {
                    if let Some(master) = &self.master {
                        resize(master, size);
                    }
                }
                Message::Signal(number) => {
                    self.signal(signal_of(number));
                    send(port, Message::SignalTaken);
                }
                _ => {}
            }
        }
        drop(connected);
        // The host has gone: do what happens when a terminal is closed.
        outputs.close(Stream::Stdout);
        outputs.close(Stream::Stderr);
        self.signal(Signal::HUP);
        std::thread::sleep(Duration::from_secs(2));
        self.signal(Signal::KILL);
    }

    fn signal(&self, signal: Signal) {
        if self.alive.load(Ordering::SeqCst) {
            let _ = rustix::process::kill_process_group(self.pid, signal);
        }
    }
}

fn signal_of(number: i32) -> Signal {
    match number {
        1 => Signal::HUP,
        2 => Signal::INT,
        _ => Signal::TERM,
    }
}

/// Gives the program its standard input, and reports to the host what it took.
fn feed(mut stdin: Option<File>, on_terminal: bool, data: &mpsc::Receiver<Vec<u8>>, port: &Port) {
    for chunk in data {
        if let Some(file) = &mut stdin
            && file.write_all(&chunk).is_err()
        {
            stdin = None; // the program reads no more
        }
        send(port, Message::StdinTaken(chunk.len()));
    }
    if on_terminal && let Some(file) = &mut stdin {
        let _ = file.write_all(END_OF_INPUT);
    }
}
