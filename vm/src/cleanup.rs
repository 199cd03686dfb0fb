//! Every way to end: the terminal as it was, no QEMU, no control directory.
//!
//! Within the process this is [`end`], which whoever comes first runs. For a launcher that
//! is killed there is the guard: a small child that waits for the launcher's end of a
//! socket to close, and then puts things right.

use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

/// The file of this program, also where cargo has put a newer one in its place meanwhile.
pub const OWN_FILE: &str = "/proc/self/exe";

/// What has to be undone at the end.
struct State {
    qemu: Option<Child>,
    control: Option<PathBuf>,
    terminal: Option<Termios>,
    guard: Option<UnixStream>,
}

static STATE: Mutex<State> =
    Mutex::new(State { qemu: None, control: None, terminal: None, guard: None });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the launcher: restores the terminal, kills QEMU, removes the control directory,
/// prints the message. A second caller waits for the first to be done.
pub fn end(code: i32, message: Option<&str>) -> ! {
    static ENDING: AtomicBool = AtomicBool::new(false);
    while ENDING.swap(true, Ordering::SeqCst) {
        std::thread::sleep(Duration::from_secs(1));
    }
    clean_up();
    if let Some(message) = message {
        crate::say!("{message}");
    }
    std::process::exit(code);
}

/// Undoes everything; also called where the process goes on.
pub fn clean_up() {
    restore_terminal();
    kill_qemu();
    let mut state = state();
    if let Some(dir) = state.control.take() {
        let _ = fs::remove_dir_all(dir);
    }
    if let Some(mut guard) = state.guard.take() {
        let _ = guard.write_all(b"q");
    }
}

/// Restores the terminal in a panic, before its message is printed.
pub fn restore_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        restore_terminal();
        print(info);
    }));
}

/// Puts the terminal on standard input into raw mode until the end.
pub fn raw_terminal() -> Result<()> {
    let stdin = std::io::stdin();
    let saved = tcgetattr(&stdin).context("cannot read the terminal's settings")?;
    let mut raw = saved.clone();
    raw.make_raw();
    state().terminal = Some(saved);
    tcsetattr(&stdin, OptionalActions::Now, &raw).context("cannot set the terminal")
}

/// Gives the terminal back as it was.
pub fn restore_terminal() {
    if let Some(saved) = state().terminal.take() {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &saved);
    }
}

/// Hands the control directory over to be removed at the end.
pub fn owns_control(dir: &Path) {
    state().control = Some(dir.to_owned());
}

/// Hands the running QEMU over to be killed at the end.
pub fn owns_qemu(child: Child) {
    state().qemu = Some(child);
}

/// QEMU's exit status, where it has ended.
pub fn qemu_ended() -> Option<std::process::ExitStatus> {
    state().qemu.as_mut().and_then(|child| child.try_wait().ok().flatten())
}

/// Kills QEMU and waits until it is gone.
pub fn kill_qemu() {
    if let Some(mut child) = state().qemu.take() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Starts the guard. `control` is the directory to remove, where this process owns one.
pub fn start_guard(control: Option<&Path>) -> Result<()> {
    let (mut ours, its) = UnixStream::pair()?;
    let stdin = std::io::stdin();
    let mut command = Command::new(OWN_FILE);
    command.arg("guard").args(control).stdin(std::os::fd::OwnedFd::from(its)).stderr(Stdio::null());
    if rustix::termios::isatty(&stdin) {
        command.stdout(stdin.as_fd().try_clone_to_owned()?);
    } else {
        command.stdout(Stdio::null());
    }
    // SAFETY: setsid is async-signal-safe and touches no memory of the parent.
    unsafe {
        command.pre_exec(|| Ok(rustix::process::setsid().map(|_| ())?));
    }
    command.spawn().context("cannot start the guard")?;
    // It has read the terminal's settings when it answers.
    ours.read_exact(&mut [0]).context("the guard did not start")?;
    state().guard = Some(ours);
    Ok(())
}

/// The guard's own main: standard input is the socket, standard output the terminal.
pub fn guard(control: Option<&Path>) -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    let tty = std::io::stdout();
    let saved = tcgetattr(&tty).ok();
    let socket = std::io::stdin();
    rustix::io::write(socket.as_fd(), b"r")?;
    if read_byte(socket.as_fd()) {
        return Ok(()); // the launcher has cleaned up itself
    }
    if let Some(saved) = saved {
        let _ = tcsetattr(&tty, OptionalActions::Now, &saved);
    }
    if let Some(dir) = control {
        // QEMU is being killed at the same moment and may still create a file.
        for _ in 0..20 {
            let _ = fs::remove_dir_all(dir);
            if !dir.exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

/// Waits for a byte; false at the end of the stream.
fn read_byte(fd: BorrowedFd<'_>) -> bool {
    loop {
        match rustix::io::read(fd, &mut [0; 1]) {
            Ok(n) => return n > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}
