//! The host's side of a session: this process's terminal or pipes, joined to a program in
//! the guest.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::termios::{isatty, tcgetwinsize};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGTERM, SIGWINCH};
use workshop::fail::{GUEST_DIED, fail};
use workshop::lock;

use crate::session::cleanup;
use crate::session::crash_report::tail;
use crate::session::protocol::{
    CHUNK, Exit, Message, Request, Size, Stream, read_message, write_message,
};

/// How long the guest may take to answer a signal.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(10);
/// The thread that waits for the answer.
const WATCH: &str = "watch";
/// This many signals end the launcher at once.
const SIGNALS_UNTIL_KILL: u32 = 3;
/// So many chunks of standard input may be on their way: signals and window sizes do not queue behind all
/// that the program has not read.
const IN_FLIGHT: usize = 8;
/// The byte that Ctrl-C is on a terminal in raw mode.
const CTRL_C: u8 = 3;
/// How long a guest may take from its init's first message to its agent's.
const AGENT_PATIENCE: Duration = Duration::from_secs(120);
/// The connection to the agent, as the threads share it.
struct Link {
    writer: Mutex<UnixStream>,
    signals: AtomicU32,
    /// Messages received.
    messages: AtomicU32,
    /// Output is being written: what is waited for is its reader, not the guest.
    writing: AtomicBool,
}

/// The session that signals go to, once there is one.
static LINK: Mutex<Option<Arc<Link>>> = Mutex::new(None);

impl Link {
    fn new(writer: UnixStream) -> Link {
        Link {
            writer: Mutex::new(writer),
            signals: AtomicU32::new(0),
            messages: AtomicU32::new(0),
            writing: AtomicBool::new(false),
        }
    }

    /// Sends a message. Where the guest has died, the reading side notices.
    fn send(&self, message: Message) {
        let _ = write_message(&mut *lock(&self.writer), &message);
    }
}

/// The size of the first of the standard descriptors that is a terminal.
pub fn size() -> Option<Size> {
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
    let sizes = [stdout.as_fd(), stderr.as_fd(), stdin.as_fd()].map(|fd| tcgetwinsize(fd).ok());
    sizes.into_iter().flatten().next().map(|s| Size { rows: s.ws_row, cols: s.ws_col })
}

/// Starts to handle signals: without a session they end the launcher, with one they go to
/// the program. Signals that were ignored when the launcher started (nohup) stay ignored.
pub fn watch_signals() -> Result<()> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ending = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|&signal| !ignores(&status, signal));
    let mut signals = signal_hook::iterator::Signals::new(ending.chain([SIGWINCH, SIGCONT]))
        .context("cannot handle signals")?;
    std::thread::spawn(move || {
        for signal in &mut signals {
            let link = lock(&LINK).clone();
            match (link, signal) {
                (link, SIGWINCH | SIGCONT) => {
                    if signal == SIGCONT {
                        cleanup::raw_terminal_again();
                    }
                    // The connection may be stuck: this thread never waits for it.
                    let sized = link.zip(size().map(Message::Size));
                    sized.map(|(link, size)| std::thread::spawn(move || link.send(size)));
                }
                (Some(link), _) => forward(&link, signal),
                (None, _) => cleanup::exit(128 + signal, None),
            }
        }
    });
    Ok(())
}

/// Whether a process with this /proc/PID/status ignores the signal.
fn ignores(status: &str, signal: i32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}

fn forward(link: &Arc<Link>, signal: i32) {
    let count = link.signals.fetch_add(1, Ordering::SeqCst) + 1;
    if count >= SIGNALS_UNTIL_KILL {
        let message = "third signal: ending without waiting for the program";
        cleanup::exit(128 + signal, Some(message));
    }
    watch(link, 128 + signal);
    // Neither this thread nor the watching one may wait for the connection.
    let sender = Arc::clone(link);
    std::thread::spawn(move || sender.send(Message::Signal(signal)));
}

/// Ends the launcher where the guest sends nothing at all in time.
fn watch(link: &Arc<Link>, status: i32) {
    let (link, before) = (Arc::clone(link), link.messages.load(Ordering::SeqCst));
    let watch = move || {
        let responds = responds(&link, SIGNAL_PATIENCE, before);
        let open = lock(&LINK).as_ref().is_some_and(|now| Arc::ptr_eq(now, &link));
        if open && !responds {
            let seconds = SIGNAL_PATIENCE.as_secs();
            let message = format!("the guest has stopped responding ({seconds} s): stopping it");
            cleanup::exit(status, Some(&message));
        }
    };
    // Without a thread to watch it, a third signal ends a hung guest.
    let _ = std::thread::Builder::new().name(WATCH.into()).spawn(watch);
}

/// Whether the guest sends more than `before` messages, as soon as that is known. The time that the reader
/// of its output takes does not count.
fn responds(link: &Link, patience: Duration, before: u32) -> bool {
    const STEP: Duration = Duration::from_millis(100);
    let answered = || link.messages.load(Ordering::SeqCst) != before;
    let mut waited = Duration::ZERO;
    while waited < patience && !answered() {
        std::thread::sleep(STEP);
        if !link.writing.load(Ordering::SeqCst) {
            waited += STEP;
        }
    }
    answered()
}

/// Connects to a port's socket, which QEMU creates when it starts, and waits until the agent
/// serves it. `dir` is the run directory. `None`: the guest died first.
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
    let hello = loop {
        match read_message(&mut stream) {
            // What a session of this port has left, whose launcher was killed.
            Ok(Some(message)) if message != Message::Hello => {}
            other => break other,
        }
    };
    match hello {
        Ok(Some(_)) => {}
        Err(e) if e.kind() == ErrorKind::WouldBlock => {
            let (limit, tail) = (AGENT_PATIENCE.as_secs(), tail(dir));
            let message =
                format!("the guest has booted, but not become ready within {limit} s{tail}");
            return Err(fail(GUEST_DIED, message));
        }
        // A broken stream and its end mean the same.
        _ => return Ok(None),
    }
    stream.set_read_timeout(None)?;
    Ok(Some(stream))
}

/// Runs a program in the guest, connected to this process's standard descriptors; without
/// `stdin`, standard input is left alone and the program's is empty.
/// `None`: the guest died before the program ended.
pub fn talk(mut stream: UnixStream, request: Request, stdin: bool) -> Result<Option<Exit>> {
    let link = Arc::new(Link::new(stream.try_clone()?));
    let raw = request.stdin_tty;
    link.send(Message::Request(request));
    if raw {
        cleanup::raw_terminal()?;
    }
    *lock(&LINK) = Some(Arc::clone(&link));
    let (is_taken, taken) = mpsc::channel();
    (0..IN_FLIGHT).try_for_each(|_| is_taken.send(()))?;
    // From the background of its terminal, reading that would stop this process.
    if stdin && (!isatty(io::stdin()) || cleanup::in_foreground()) {
        let for_stdin = Arc::clone(&link);
        let session = stream.try_clone()?;
        std::thread::spawn(move || send_stdin(&for_stdin, &session, raw, &taken));
    } else {
        link.send(Message::StdinEof);
    }

    let mut stdout = Some(File::from(io::stdout().as_fd().try_clone_to_owned()?));
    let mut stderr = Some(File::from(io::stderr().as_fd().try_clone_to_owned()?));
    let mut exit = None;
    // A broken stream and its end mean the same: the guest has died.
    while let Ok(Some(message)) = read_message(&mut stream) {
        link.messages.fetch_add(1, Ordering::SeqCst);
        match message {
            Message::Output(to, data) => {
                let output = if to == Stream::Stdout { &mut stdout } else { &mut stderr };
                link.writing.store(true, Ordering::SeqCst);
                if write(output, &data).is_err() {
                    link.send(Message::Closed(to));
                }
                link.writing.store(false, Ordering::SeqCst);
            }
            Message::StdinTaken => drop(is_taken.send(())),
            Message::Exit(how) => {
                exit = Some(how);
                break;
            }
            _ => {}
        }
    }
    *lock(&LINK) = None;
    // The thread that reads standard input ends: what is typed from now on is for the shell.
    let _ = stream.shutdown(Shutdown::Both);
    cleanup::restore_terminal();
    Ok(exit)
}

/// Runs a program in the guest without input, and hands over its output. `None`: the guest died before the
/// program ended. Where this process ends first, the agent ends the program.
pub fn listen(
    mut stream: UnixStream,
    request: Request,
    mut on_output: impl FnMut(Stream, &[u8]),
) -> Result<Option<Exit>> {
    for message in [Message::Request(request), Message::StdinEof] {
        write_message(&mut stream, &message).context("the guest takes no program")?;
    }
    while let Ok(Some(message)) = read_message(&mut stream) {
        match message {
            Message::Output(from, data) => on_output(from, &data),
            Message::Exit(how) => return Ok(Some(how)),
            _ => {}
        }
    }
    Ok(None)
}

/// Writes all of it to standard output or error, until its reader closes that. Returns an error once, at
/// the first write that fails.
fn write(output: &mut Option<File>, mut data: &[u8]) -> io::Result<()> {
    let Some(file) = output else { return Ok(()) };
    while !data.is_empty() {
        match file.write(data) {
            Ok(n) => data = &data[n..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(file, PollFlags::OUT)], None)?;
            }
            Err(e) => {
                if e.kind() != ErrorKind::BrokenPipe {
                    workshop::say!("cannot write the program's output: {e}");
                }
                *output = None;
                return Err(e);
            }
        }
    }
    Ok(())
}

/// Sends standard input to the guest, a chunk for each that was `taken`. A terminal in raw mode makes no
/// signal of Ctrl-C: a guest that sends nothing at all after one is dead.
fn send_stdin(link: &Arc<Link>, stream: &UnixStream, raw: bool, taken: &Receiver<()>) {
    let Ok(fd) = io::stdin().as_fd().try_clone_to_owned() else {
        return link.send(Message::StdinEof);
    };
    let mut file = File::from(fd);
    let mut buffer = vec![0; CHUNK];
    // Keys do not wait: where the guest hangs, Ctrl-C has to be seen. An error: the program has ended.
    while raw || taken.recv().is_ok() {
        let n = loop {
            let mut both =
                [PollFd::new(&file, PollFlags::IN), PollFd::new(&stream, PollFlags::empty())];
            let _ = poll(&mut both, None);
            if !both[1].revents().is_empty() {
                return; // the session has ended
            }
            match file.read(&mut buffer) {
                Ok(n) => break n,
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(_) => break 0,
            }
        };
        if n == 0 {
            return link.send(Message::StdinEof);
        }
        if raw && buffer[..n].contains(&CTRL_C) {
            watch(link, 128 + SIGINT);
        }
        link.send(Message::Stdin(buffer[..n].to_vec()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_takes_its_time_is_not_the_guests_fault() {
        let link = Link::new(UnixStream::pair().unwrap().0);
        let soon = Duration::from_millis(200);
        assert!(!responds(&link, soon, 0));
        link.writing.store(true, Ordering::SeqCst);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(3 * soon);
                link.messages.store(1, Ordering::SeqCst);
            });
            assert!(responds(&link, soon, 0));
        });
    }
}
