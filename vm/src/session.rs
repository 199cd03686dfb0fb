//! The host's side of a session: this process's terminal or pipes, joined to a program in
//! the guest.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{isatty, tcgetpgrp, tcgetwinsize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGWINCH};

use crate::cleanup;
use crate::error::{GUEST_DIED, fail};
use crate::proto::{CHUNK, Kind, Request, STDIN_WINDOW, Size, read_frame, write_frame};
use crate::qemu;

/// How long the guest may take to answer a signal.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(10);
/// So many signals end the launcher at once.
const SIGNALS_UNTIL_KILL: u32 = 3;
/// What Ctrl-C is on a terminal in raw mode.
const CTRL_C: u8 = 3;
/// How long a guest that runs may take until its agent answers.
const AGENT_PATIENCE: Duration = Duration::from_secs(120);

/// How a program ended.
#[derive(Clone, Copy, Debug)]
pub struct Exit {
    /// Its exit code, 128 and the signal's number where a signal ended it.
    pub status: i32,
    /// Other sessions that are still open in the guest.
    pub others: u32,
}

/// The connection to the agent, as the threads share it.
struct Link {
    writer: Mutex<UnixStream>,
    /// Bytes of standard input that the guest can still take.
    credit: Mutex<usize>,
    more_credit: Condvar,
    signals: AtomicU32,
    signals_taken: AtomicU32,
    /// Frames that have come.
    frames: AtomicU32,
    /// Output is being written: whoever reads it lets us wait, not the guest.
    writing: AtomicBool,
}

/// The session that signals go to, once there is one.
static LINK: Mutex<Option<Arc<Link>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    /// Sends a frame. Where the guest is gone, the reading side notices.
    fn send(&self, kind: Kind, data: &[u8]) {
        let _ = write_frame(&mut *lock(&self.writer), kind, data);
    }

    fn give_credit(&self, bytes: usize) {
        *lock(&self.credit) += bytes;
        self.more_credit.notify_all();
    }

    fn take_credit(&self) -> usize {
        let mut credit = lock(&self.credit);
        while *credit == 0 {
            credit = self.more_credit.wait(credit).unwrap_or_else(PoisonError::into_inner);
        }
        let taken = (*credit).min(CHUNK);
        *credit -= taken;
        taken
    }
}

/// What of this process is a terminal.
#[derive(Clone, Copy, Debug)]
pub struct Terminals {
    /// Standard input and output are this terminal and ours to switch to raw mode.
    pub raw: bool,
    /// Standard output is a terminal.
    pub stdout: bool,
    /// Standard error is a terminal.
    pub stderr: bool,
    /// The size of the first that is one.
    pub size: Option<Size>,
}

impl Terminals {
    /// Looks at the three standard descriptors.
    pub fn look() -> Terminals {
        let (stdin, stdout, stderr) =
            (isatty(io::stdin()), isatty(io::stdout()), isatty(io::stderr()));
        Terminals { raw: stdin && stdout && in_foreground(), stdout, stderr, size: size() }
    }
}

fn size() -> Option<Size> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let sizes = [stdout.as_fd(), stderr.as_fd(), stdin.as_fd()].map(|fd| tcgetwinsize(fd).ok());
    sizes.into_iter().flatten().next().map(|s| Size { rows: s.ws_row, cols: s.ws_col })
}

/// Whether reading the terminal on standard input would not stop us.
fn in_foreground() -> bool {
    tcgetpgrp(io::stdin()).is_ok_and(|pgrp| pgrp == rustix::process::getpgrp())
}

/// Starts to handle signals: without a session they end the launcher, with one they go to
/// the program.
pub fn watch_signals() -> Result<()> {
    static WATCHED: AtomicBool = AtomicBool::new(false);
    if WATCHED.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP, SIGWINCH])
        .context("cannot handle signals")?;
    std::thread::spawn(move || {
        for signal in &mut signals {
            let link = lock(&LINK).clone();
            match link {
                Some(link) if signal == SIGWINCH => {
                    if let Some(size) = size() {
                        link.send(Kind::Size, &size.to_bytes());
                    }
                }
                Some(link) => forward(&link, signal),
                None if signal == SIGWINCH => {}
                None => cleanup::end(128 + signal, None),
            }
        }
    });
    Ok(())
}

fn forward(link: &Arc<Link>, signal: i32) {
    let count = link.signals.fetch_add(1, Ordering::SeqCst) + 1;
    if count >= SIGNALS_UNTIL_KILL {
        cleanup::end(128 + signal, Some("the third signal: not waiting for the program any more"));
    }
    let sender = Arc::clone(link);
    // The connection may be stuck: neither this nor the watching may wait for the other.
    std::thread::spawn(move || sender.send(Kind::Signal, &signal.to_le_bytes()));
    watch(link, 128 + signal, move |link| link.signals_taken.load(Ordering::SeqCst) >= count);
}

/// Ends the launcher where the guest has not answered in time.
fn watch(link: &Arc<Link>, status: i32, answered: impl Fn(&Link) -> bool + Send + 'static) {
    const STEP: Duration = Duration::from_millis(100);
    let link = Arc::clone(link);
    std::thread::spawn(move || {
        let mut waited = Duration::ZERO;
        while waited < SIGNAL_PATIENCE {
            std::thread::sleep(STEP);
            if !link.writing.load(Ordering::SeqCst) {
                waited += STEP;
            }
        }
        let goes_on = lock(&LINK).as_ref().is_some_and(|now| Arc::ptr_eq(now, &link));
        if goes_on && !answered(&link) {
            cleanup::end(status, Some("the guest does not react any more: not waiting for it"));
        }
    });
}

/// Connects to a port's socket, which QEMU creates when it starts, and waits until the agent
/// serves it. `dir` is the control directory. `None`: the guest died first.
pub fn open(socket: &Path, dir: &Path) -> Result<Option<UnixStream>> {
    let start = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(_) if start.elapsed() > Duration::from_secs(10) => return Ok(None),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    stream.set_read_timeout(Some(AGENT_PATIENCE))?;
    match read_frame(&mut stream) {
        Ok(Some(frame)) if frame.kind == Kind::Hello => {}
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            let (limit, tail) = (AGENT_PATIENCE.as_secs(), qemu::tail(dir));
            let message = format!("the guest's agent has not answered for {limit} s{tail}");
            return Err(fail(GUEST_DIED, message));
        }
        // A broken stream and its end mean the same.
        _ => return Ok(None),
    }
    stream.set_read_timeout(None)?;
    Ok(Some(stream))
}

/// Runs a program in the guest, joined to this process's standard descriptors.
/// `None`: the guest died before the program ended.
pub fn talk(mut stream: UnixStream, request: &Request) -> Result<Option<Exit>> {
    let link = Arc::new(Link {
        writer: Mutex::new(stream.try_clone()?),
        credit: Mutex::new(STDIN_WINDOW),
        more_credit: Condvar::new(),
        signals: AtomicU32::new(0),
        signals_taken: AtomicU32::new(0),
        frames: AtomicU32::new(0),
        writing: AtomicBool::new(false),
    });
    link.send(Kind::Request, &serde_json::to_vec(request)?);
    if request.stdin_tty {
        cleanup::raw_terminal()?;
    }
    *lock(&LINK) = Some(Arc::clone(&link));
    let for_stdin = Arc::clone(&link);
    let raw = request.stdin_tty;
    std::thread::spawn(move || send_stdin(&for_stdin, raw));

    let mut stdout = Output::new(io::stdout().as_fd().try_clone_to_owned()?.into());
    let mut stderr = Output::new(io::stderr().as_fd().try_clone_to_owned()?.into());
    let write = |output: &mut Output, data: &[u8]| {
        link.writing.store(true, Ordering::SeqCst);
        let written = output.write(data);
        link.writing.store(false, Ordering::SeqCst);
        written
    };
    let mut exit = None;
    // A broken stream and its end mean the same: the guest is gone.
    while let Ok(Some(frame)) = read_frame(&mut stream) {
        link.frames.fetch_add(1, Ordering::SeqCst);
        match frame.kind {
            Kind::Stdout if write(&mut stdout, &frame.data).is_err() => {
                link.send(Kind::StdoutClosed, &[])
            }
            Kind::Stderr if write(&mut stderr, &frame.data).is_err() => {
                link.send(Kind::StderrClosed, &[])
            }
            Kind::StdinTaken => link.give_credit(frame.u32_at(0) as usize),
            Kind::SignalTaken => {
                link.signals_taken.fetch_add(1, Ordering::SeqCst);
            }
            Kind::Exit => {
                exit = Some(Exit { status: frame.u32_at(0) as i32, others: frame.u32_at(4) });
                break;
            }
            _ => {}
        }
    }
    *lock(&LINK) = None;
    cleanup::restore_terminal();
    Ok(exit)
}

/// Standard output or error, until nobody reads it any more.
struct Output {
    file: Option<File>,
}

impl Output {
    fn new(file: File) -> Output {
        Output { file: Some(file) }
    }

    /// Writes all of it. An error is given once, at the first write that nobody reads.
    fn write(&mut self, mut data: &[u8]) -> io::Result<()> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        while !data.is_empty() {
            match file.write(data) {
                Ok(n) => data = &data[n..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    poll(&mut [PollFd::new(file, PollFlags::OUT)], None)?;
                }
                Err(e) => {
                    if e.kind() != ErrorKind::BrokenPipe {
                        crate::say!("cannot write the program's output: {e}");
                    }
                    self.file = None;
                    return Err(e);
                }
            }
        }
        Ok(())
    }
}

/// Sends standard input to the guest, never more than the program has room for. A terminal in
/// raw mode makes no signal of Ctrl-C: a guest that says nothing at all after one is dead.
fn send_stdin(link: &Arc<Link>, raw: bool) {
    let stdin = io::stdin();
    let terminal = isatty(&stdin);
    let Ok(fd) = stdin.as_fd().try_clone_to_owned() else {
        return link.send(Kind::StdinEof, &[]);
    };
    let mut file = File::from(fd);
    let mut buffer = vec![0; CHUNK];
    loop {
        let room = link.take_credit();
        let n = loop {
            // Reading the terminal from the background would stop the whole launcher.
            if terminal && !in_foreground() {
                std::thread::sleep(Duration::from_millis(200));
                continue;
            }
            match file.read(&mut buffer[..room]) {
                Ok(n) => break n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(&file, PollFlags::IN)], None);
                }
                Err(_) => break 0,
            }
        };
        if n == 0 {
            return link.send(Kind::StdinEof, &[]);
        }
        if raw && buffer[..n].contains(&CTRL_C) {
            let before = link.frames.load(Ordering::SeqCst);
            watch(link, 128 + SIGINT, move |link| link.frames.load(Ordering::SeqCst) != before);
        }
        link.send(Kind::Stdin, &buffer[..n]);
        link.give_credit(room - n);
    }
}
