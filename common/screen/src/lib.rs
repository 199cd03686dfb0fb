//! The terminal, as a full screen and back: for programs that draw one, and that keys change.

use std::{
    fs::File,
    io::Write,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor::{Hide, Show},
        event::{self, Event, KeyCode, KeyEvent, KeyModifiers},
        execute,
        terminal::{
            Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode,
            enable_raw_mode,
        },
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Signal, kill_current_process_group},
};
use signal_hook::consts::SIGCONT;
use unicode_truncate::UnicodeTruncateStr;

/// Waits for the end of the process that has started it, and restores the terminal where that was
/// killed: a good end writes a line first. The signals are those that come from the terminal.
const WATCH: &str = r#"trap '' INT TERM HUP QUIT TTOU
read -r _ || { stty "$1" </dev/tty; printf '\033[?1049l\033[?25h' >/dev/tty; }"#;

/// What a turn has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing that is not on the screen.
    Same,
    /// Something that has to be drawn.
    New,
    /// That the run has ended.
    End,
}

/// What a program shows on a full screen.
pub trait Scene {
    /// Looks for what is new. Called after each key, and every tenth of a second.
    fn turn(&mut self) -> Result<Turn>;
    /// Draws everything.
    fn draw(&mut self, frame: &mut Frame<'_>);
    /// Does what a key means; whether to continue.
    fn key(&mut self, key: KeyEvent) -> bool;
    /// The process was stopped, and continues.
    fn continued(&mut self) -> Result<()>;
}

/// Shows it, until a key or a turn says that it ends. Ctrl-Z gives the terminal to the shell meanwhile.
pub fn show(scene: &mut impl Scene) -> Result<()> {
    let continued = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGCONT, Arc::clone(&continued))
        .context("no handler for SIGCONT could be installed")?;
    let mut screen = FullScreen::enter()?;
    let mut is_changed = true;
    loop {
        match scene.turn()? {
            Turn::End => return Ok(()),
            Turn::Same if !is_changed => {}
            Turn::Same | Turn::New => screen.draw(|frame| scene.draw(frame))?,
        }
        // Also another size of the terminal.
        let event = screen.event(Duration::from_millis(100))?;
        is_changed = event.is_some();
        let suspend = match event {
            Some(Event::Key(key)) if is_suspend(&key) => true,
            Some(Event::Key(key)) if !scene.key(key) => return Ok(()),
            _ => false,
        };
        // After a stop, the shell has used the terminal.
        if suspend || continued.load(Ordering::Relaxed) {
            drop(screen);
            if suspend {
                self::suspend()?;
            }
            screen = FullScreen::enter()?;
            continued.store(false, Ordering::Relaxed);
            scene.continued()?;
            is_changed = true;
        }
    }
}

/// As many of the parts of a line as fit, and `…` for the others. No part is cut: there are numbers in them.
pub fn fit(parts: &[String], separator: &str, room: usize) -> String {
    let mut lines = (0..=parts.len()).rev().map(|count| {
        let rest = (count < parts.len()).then_some("…");
        let parts: Vec<&str> = parts[..count].iter().map(String::as_str).chain(rest).collect();
        parts.join(separator)
    });
    lines.find(|line| width(line) <= room).unwrap_or_default()
}

/// How many columns a text takes: some characters take two, some none.
pub fn width(text: &str) -> usize {
    text.unicode_truncate(usize::MAX).1
}

/// A text, or where that is too long, its beginning and `…`.
pub fn cut(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.into();
    }
    match columns.checked_sub(1) {
        Some(left) => text.unicode_truncate(left).0.to_owned() + "…",
        None => String::new(),
    }
}

/// Whether this key is Ctrl-Z, which the terminal does not turn into a signal for a full screen.
fn is_suspend(key: &KeyEvent) -> bool {
    key.code == KeyCode::Char('z') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Stops this process and those that the shell has started with it, as the terminal would, until the
/// shell continues them. Where there is no such shell, the kernel stops nothing.
fn suspend() -> Result<()> {
    kill_current_process_group(Signal::TSTP).context("the process could not be stopped")
}

/// The terminal of this process, until this is dropped.
struct FullScreen {
    terminal: Terminal<CrosstermBackend<File>>,
    tty: File,
    watcher: Child,
}

impl FullScreen {
    /// Switches to the terminal's second screen, and to keys that come as they are pressed.
    fn enter() -> Result<FullScreen> {
        let tty = File::options().read(true).write(true).open("/dev/tty").context("/dev/tty")?;
        let modes = Command::new("stty").arg("-g").stdin(tty.try_clone()?).output();
        let modes = modes.context("stty could not be started")?.stdout;
        let watcher = Command::new("sh")
            .args(["-c", WATCH, "sh", String::from_utf8_lossy(&modes).trim()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .context("sh could not be started")?;
        let terminal = Terminal::new(CrosstermBackend::new(tty.try_clone()?))?;
        // From here on, dropping it restores the terminal.
        let mut screen = FullScreen { terminal, tty, watcher };
        enable_raw_mode().context("the terminal's mode could not be set")?;
        // Not Terminal::clear(), which asks for the cursor's place: not every terminal answers.
        execute!(screen.tty, EnterAlternateScreen, Clear(ClearType::All), Hide)
            .context("the terminal")?;
        Ok(screen)
    }

    /// Draws a screen, in the size that the terminal has now.
    fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> Result<()> {
        self.terminal.draw(draw).context("the terminal could not be written to")?;
        Ok(())
    }

    /// Waits for a key, at most `limit`. Fails where the terminal is gone: crossterm would
    /// read from it again and again, get nothing, and never return.
    fn event(&self, limit: Duration) -> Result<Option<Event>> {
        let what = "the terminal could not be read";
        let mut tty = [PollFd::new(&self.tty, PollFlags::IN)];
        let limit = Timespec::try_from(limit).context(what)?;
        match poll(&mut tty, Some(&limit)) {
            Err(Errno::INTR) => return Ok(None),
            result => result.context(what)?,
        };
        ensure!(
            !tty[0].revents().intersects(PollFlags::HUP | PollFlags::ERR),
            "the terminal is gone"
        );
        if event::poll(Duration::ZERO).context(what)? {
            return event::read().context(what).map(Some);
        }
        Ok(None)
    }
}

impl Drop for FullScreen {
    fn drop(&mut self) {
        execute!(self.tty, LeaveAlternateScreen, Show).ok();
        disable_raw_mode().ok();
        if let Some(mut stdin) = self.watcher.stdin.take() {
            stdin.write_all(b"\n").ok();
        }
        self.watcher.wait().ok();
    }
}
