//! The agent: the guest's end of the sessions.
//!
//! It serves the virtio-serial ports: one thread for each, one session after another. A write to a
//! port blocks until the host has opened its end, so no port has to be polled.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use workshop::fail::{Fail, MACHINE, USAGE, fail};
use workshop::lock;

use crate::session::protocol::{
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
/// How long the killed processes of a session may take to end.
const LAST_WAIT: Duration = Duration::from_secs(5);

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
    P: Fn() -> io::Result<File> + Send + 'static,
{
    let mut first = None;
    for (number, port) in ports {
        let group = groups.join(format!("session{number}"));
        let thread = thread::spawn(move || {
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
        thread::sleep(Duration::from_millis(100));
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
type Port = Mutex<File>;

/// Sends a message; blocks while no host is connected.
fn send(port: &Port, message: Message) -> io::Result<()> {
    write_message(&mut *lock(port), &message)
}

/// The sessions of a port. Port 0 has one: the guest ends with it.
fn sessions(number: u32, group: &Path, port: impl Fn() -> io::Result<File>) -> Result<()> {
    loop {
        session(group, &port()?)?;
        if number == 0 {
            return Ok(());
        }
    }
}

/// One session: from the host's connection to its end, and the program's.
fn session(group: &Path, file: &File) -> Result<()> {
    let mut reader = file.try_clone()?;
    let port = Mutex::new(file.try_clone()?);
    // Returns when the host has connected.
    send(&port, Message::Hello)?;
    let request = loop {
        match read_message(&mut reader) {
            Ok(Some(Message::Request(request))) => break request,
            Ok(Some(_)) => {} // for a program that has ended, or did not start
            _ => return Ok(()),
        }
    };
    OPEN.fetch_add(1, Ordering::SeqCst);
    let exit = |status| {
        let others = OPEN.fetch_sub(1, Ordering::SeqCst) - 1;
        send(&port, Message::Exit(Exit { status, others })).ok();
    };
    match SessionProgram::start(&request, group) {
        Ok(program) => program.serve(reader, &port, group, exit),
        Err(error) => {
            let why = format!("vm: {error:#}\n").into_bytes();
            send(&port, Message::Output(Stream::Stderr, why)).ok();
            exit(error.downcast_ref::<Fail>().map_or(126, |fail| fail.code));
            while let Ok(Some(_)) = read_message(&mut reader) {}
        }
    }
    Ok(())
}

/// A program that runs in a session.
struct SessionProgram {
    child: Child,
    workload: Option<Child>,
    stdin: Option<File>,
    stdin_tty: bool,
    outputs: Vec<(Output, File)>,
    /// The terminal's master.
    terminal: Option<File>,
}

impl SessionProgram {
    fn start(request: &Request, group: &Path) -> Result<SessionProgram> {
        let (program, args) = request.argv.split_first().context("no program")?;
        let _ = fs::create_dir(group);
        let pty = Pty::open(request)?;
        let on_pty = |wanted: bool| -> io::Result<Stdio> {
            match &pty {
                Some(pty) if wanted => Ok(pty.slave.try_clone()?.into()),
                _ => Ok(Stdio::piped()),
            }
        };
        let mut command = Command::new(program);
        command.args(args).env_clear().envs(request.env.iter().cloned()).current_dir(&request.cwd);
        command.stdin(on_pty(request.stdin_tty)?);
        command.stdout(on_pty(request.stdout_tty)?).stderr(on_pty(request.stderr_tty)?);
        catch(group, &mut command, pty.as_ref().map(|pty| pty.slave.try_clone()).transpose()?)?;
        let mut child = command.spawn().map_err(|error| not_started(request, &error))?;

        let terminal: Option<File> = pty.map(|pty| pty.master.into());
        let mut outputs = Vec::new();
        let mut add = |stream, source: Option<File>| {
            if let Some(source) = source {
                outputs.push((Output { stream, closed: AtomicBool::new(false) }, source));
            }
        };
        let master = || terminal.as_ref().map(File::try_clone).transpose();
        add(Stream::Stdout, child.stdout.take().map(|pipe| OwnedFd::from(pipe).into()));
        add(Stream::Stderr, child.stderr.take().map(|pipe| OwnedFd::from(pipe).into()));
        add(if request.stdout_tty { Stream::Stdout } else { Stream::Stderr }, master()?);
        let stdin = match child.stdin.take() {
            Some(pipe) => Some(OwnedFd::from(pipe).into()),
            None => master()?,
        };
        let workload = request.workload.as_ref();
        let workload = workload.and_then(|file| start_workload(file, request, group));
        Ok(SessionProgram {
            child,
            workload,
            stdin,
            stdin_tty: request.stdin_tty,
            outputs,
            terminal,
        })
    }

    /// Serves the host's messages until it has gone. `exit`: the program has ended, and all that it has
    /// written is sent.
    fn serve(self, mut reader: File, port: &Port, group: &Path, exit: impl FnOnce(i32) + Send) {
        let SessionProgram { mut child, mut workload, stdin, stdin_tty, outputs, terminal } = self;
        let pid = Pid::from_child(&child);
        // The program has not been waited for, so `pid` is still its id.
        let alive = &AtomicBool::new(true);
        let signal = |signal| {
            if alive.load(Ordering::SeqCst) {
                let _ = kill_process_group(pid, signal);
            }
        };
        let (outputs, sources): (Vec<Output>, Vec<File>) = outputs.into_iter().unzip();
        let outputs = &outputs;
        let (chunks, to_feed) = mpsc::channel();
        let (running, ended) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || feed(stdin, stdin_tty, &to_feed, port));
            let copies = outputs.iter().zip(sources);
            let copies = copies.map(|(output, from)| scope.spawn(|| output.copy(from, port)));
            let copies: Vec<_> = copies.collect();
            scope.spawn(move || {
                let status = child.wait();
                alive.store(false, Ordering::SeqCst);
                let _ = workload.as_mut().map(Child::kill);
                kill(group);
                let _ = workload.as_mut().map(Child::wait);
                copies.into_iter().for_each(|copy| drop(copy.join()));
                exit(status.map_or(126, code));
                drop(running);
            });
            let mut chunks = Some(chunks);
            while let Ok(Some(message)) = read_message(&mut reader) {
                match (message, &chunks) {
                    (Message::Stdin(data), Some(chunks)) => drop(chunks.send(data)),
                    (Message::StdinEof, _) => chunks = None,
                    (Message::Closed(stream), _) => {
                        outputs
                            .iter()
                            .filter(|output| output.stream == stream)
                            .for_each(Output::close);
                    }
                    (Message::Size(size), _) => drop(terminal.as_ref().map(|it| resize(it, size))),
                    (Message::Signal(number), _) => {
                        signal(Signal::from_named_raw(number).unwrap_or(Signal::TERM));
                        send(port, Message::SignalTaken).ok();
                    }
                    _ => {}
                }
            }
            drop(chunks);
            // The host has gone: do what happens when a terminal is closed.
            outputs.iter().for_each(Output::close);
            signal(Signal::HUP);
            let _ = ended.recv_timeout(Duration::from_secs(2));
            signal(Signal::KILL);
        });
    }
}

/// A program's status as a shell reports it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The error that a program did not start, with the status of the session.
fn not_started(request: &Request, error: &io::Error) -> anyhow::Error {
    let program = request.argv[0].to_string_lossy();
    if error.kind() == ErrorKind::ArgumentListTooLong {
        let kib = size_of_arguments(&request.argv, &request.env) / 1024;
        let message = format!(
            "{program}: its arguments and environment take {kib} KiB, more than Linux accepts \
             (`getconf ARG_MAX` shows the limit); pass them in a file, or through standard input"
        );
        return fail(USAGE, message);
    }
    if !Path::new(&request.cwd).is_dir() {
        return anyhow!("the directory {} is not in the guest", request.cwd.to_string_lossy());
    }
    if error.kind() == ErrorKind::NotFound {
        let message = "there is no such program in the guest, and no program of that name in this \
                       workspace";
        return fail(127, format!("{program}: {message}"));
    }
    anyhow!("{program}: {error}")
}

/// Starts the workload, which runs as long as the program.
fn start_workload(file: &OsStr, request: &Request, group: &Path) -> Option<Child> {
    let mut command = Command::new("sh");
    command.arg(file).env_clear().envs(request.env.iter().cloned()).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let console = File::options().write(true).open("/dev/console");
    command.stderr(console.map_or_else(|_| Stdio::null(), Stdio::from));
    catch(group, &mut command, None).ok()?;
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
            let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
            let master = openpt(flags)?;
            unlockpt(&master)?;
            let slave = ioctl_tiocgptpeer(&master, flags)?;
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

/// Makes a command start in a session's control group, so that nothing outlives the session: as the leader of
/// a new session of the kernel's, with the terminal where there is one.
fn catch(group: &Path, command: &mut Command, terminal: Option<OwnedFd>) -> Result<()> {
    let procs = File::options().write(true).open(group.join("cgroup.procs"));
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

/// Kills the processes that are left in a control group, and waits for their end.
fn kill(group: &Path) {
    let _ = fs::write(group.join("cgroup.kill"), "1");
    let start = Instant::now();
    let is_busy = |error: io::Error| error.kind() == ErrorKind::ResourceBusy;
    while fs::remove_dir(group).is_err_and(is_busy) && start.elapsed() < LAST_WAIT {
        thread::sleep(Duration::from_millis(10));
    }
}

/// The way to the host of what a program writes.
struct Output {
    stream: Stream,
    /// The host has closed its end.
    closed: AtomicBool,
}

impl Output {
    /// Closes the program's output: what it writes next is lost, and then its writes fail.
    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Copies to the host until all have closed the source, of whom the end of the control group leaves
    /// none; or the host its end.
    fn copy(&self, mut source: File, port: &Port) {
        let mut buffer = vec![0; CHUNK - 16];
        loop {
            match source.read(&mut buffer) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // An error: a terminal's master, after its last user.
                Ok(0) | Err(_) => return,
                Ok(_) if self.closed.load(Ordering::SeqCst) => return,
                Ok(n) => drop(send(port, Message::Output(self.stream, buffer[..n].to_vec()))),
            }
        }
    }
}

/// Gives the program its standard input, and asks the host for more whenever it has taken some.
fn feed(mut stdin: Option<File>, on_terminal: bool, data: &Receiver<Vec<u8>>, port: &Port) {
    for chunk in data {
        // Where the write fails, the program reads no more.
        stdin = stdin.filter(|mut file| file.write_all(&chunk).is_ok());
        send(port, Message::StdinTaken).ok();
    }
    if on_terminal && let Some(file) = &mut stdin {
        let _ = file.write_all(END_OF_INPUT);
    }
}
