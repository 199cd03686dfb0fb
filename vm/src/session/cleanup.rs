//! Whatever ends the launcher: the terminal is restored, no process that it started still runs,
//! and the run directory is removed.
//!
//! [`exit`] does this, once, for every end that the launcher notices. Where a launcher is killed, the
//! kernel kills its QEMU, and the next launcher removes the run directory.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use workshop::{lock, say};

use crate::session::processes;
use crate::session::rundir::{self, Info};

/// The file of this program, even if cargo has replaced it meanwhile.
pub const OWN_FILE: &str = "/proc/self/exe";

struct State {
    qemu: Option<Child>,
    run_dir: Option<PathBuf>,
    /// The terminal's settings before it was put into raw mode.
    terminal: Option<Termios>,
    /// A guest that stays, while this process runs something in it.
    guest: Option<(PathBuf, Info)>,
}

static STATE: Mutex<State> =
    Mutex::new(State { qemu: None, run_dir: None, terminal: None, guest: None });

/// How long nothing new may start before the launcher exits from a thread that is not the main one.
const QUIET: Duration = Duration::from_millis(500);

/// Whether [`exit`] was called.
static EXITING: AtomicBool = AtomicBool::new(false);

/// Does not return where another thread ends the launcher: nothing else is to begin.
pub fn end_if_asked() {
    if EXITING.load(Ordering::SeqCst) {
        exit(1, None);
    }
}

/// Ends the launcher: restores the terminal, ends what this process has started, removes the run
/// directory, prints the message. A second caller waits until the first has ended the process.
pub fn exit(code: i32, message: Option<&str>) -> ! {
    static MAIN_WAITS: AtomicBool = AtomicBool::new(false);
    let main = std::thread::current().name() == Some("main");
    while EXITING.swap(true, Ordering::SeqCst) {
        MAIN_WAITS.fetch_or(main, Ordering::SeqCst);
        std::thread::sleep(Duration::from_secs(1));
    }
    restore_terminal();
    kill_qemu();
    end_guest();
    let mut quiet_since = Instant::now();
    // The main thread may continue where a command failed, and start the next one.
    loop {
        if processes::end_descendants() {
            quiet_since = Instant::now();
        }
        if main || MAIN_WAITS.load(Ordering::SeqCst) || quiet_since.elapsed() > QUIET {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    clean_up();
    if let Some(message) = message {
        // Of the program that ends: `cargo truth` ends here, too.
        let own = std::env::current_exe().ok();
        let name = own.as_ref().and_then(|file| file.file_name()).unwrap_or("vm".as_ref());
        let _ = writeln!(std::io::stderr(), "{}: {message}", name.to_string_lossy());
    }
    std::process::exit(code);
}

/// Undoes what a guest needed; also called where the launcher continues.
pub fn clean_up() {
    restore_terminal();
    kill_qemu();
    if let Some(dir) = lock(&STATE).run_dir.take() {
        let _ = fs::remove_dir_all(dir);
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

/// Whether standard input is this process's terminal, with this process in the foreground. In the
/// background, reading it or changing its settings would stop the process.
pub fn in_foreground() -> bool {
    tcgetpgrp(std::io::stdin()).is_ok_and(|pgrp| pgrp == rustix::process::getpgrp())
}

/// Sets the terminal on standard input to raw mode until the end.
pub fn raw_terminal() -> Result<()> {
    let saved = tcgetattr(std::io::stdin()).context("cannot read the terminal's settings")?;
    lock(&STATE).terminal = Some(saved);
    set_raw().context("cannot change the terminal's settings")
}

/// Raw mode again, where the terminal was in it: a shell changes the settings of a terminal when
/// it stops a job or takes it to the background.
pub fn raw_terminal_again() {
    if in_foreground() {
        let _ = set_raw();
    }
}

fn set_raw() -> rustix::io::Result<()> {
    let Some(mut raw) = lock(&STATE).terminal.clone() else {
        return Ok(());
    };
    raw.make_raw();
    tcsetattr(std::io::stdin(), OptionalActions::Now, &raw)
}

/// Restores the terminal's settings. From the background nothing has to be restored: there the
/// terminal is the shell's.
pub fn restore_terminal() {
    if let Some(saved) = lock(&STATE).terminal.take()
        && in_foreground()
    {
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &saved);
    }
}

/// Takes over the run directory, to remove it at the end.
pub fn own_run_dir(dir: &Path) {
    lock(&STATE).run_dir = Some(dir.to_owned());
}

/// Takes over the running QEMU, to kill it at the end.
pub fn own_qemu(child: Child) {
    lock(&STATE).qemu = Some(child);
}

/// Takes over a guest that stays, or gives it back: where this process is ended meanwhile, that is ended, too.
pub fn own_guest(guest: Option<(PathBuf, Info)>) {
    lock(&STATE).guest = guest;
}

/// Ends the guest that stays: what runs there was cut off.
fn end_guest() {
    let guest = lock(&STATE).guest.take();
    if let Some((dir, info)) = guest {
        // First: without a terminal, nobody may read what is said.
        let _ = rundir::end(&dir, &info);
        say!("interrupted: the virtual machine is ended, too, and the next check boots a new one");
    }
}

pub fn qemu_ended() -> Option<std::process::ExitStatus> {
    lock(&STATE).qemu.as_mut().and_then(|child| child.try_wait().ok().flatten())
}

pub fn kill_qemu() {
    if let Some(mut child) = lock(&STATE).qemu.take() {
        let _ = child.kill();
        let _ = child.wait();
    }
}
