//! The terminal, as a full screen and back.

use std::{
    fs::File,
    io::Write,
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
pub use ratatui::crossterm::event::Event;
use ratatui::{
    Frame, Terminal,
    backend::CrosstermBackend,
    crossterm::{
        cursor::{Hide, Show},
        event::{self, KeyCode, KeyEvent, KeyModifiers},
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

/// Waits for the end of the process that has started it, and restores the terminal where that was
/// killed: a good end writes a line first. The signals are those that come from the terminal.
const WATCH: &str = r#"trap '' INT TERM HUP QUIT TTOU
read -r _ || { stty "$1" </dev/tty; printf '\033[?1049l\033[?25h' >/dev/tty; }"#;

/// Whether this key is Ctrl-Z, which the terminal does not turn into a signal for a full screen.
pub fn is_suspend(key: &KeyEvent) -> bool {
    key.code == KeyCode::Char('z') && key.modifiers.contains(KeyModifiers::CONTROL)
}

/// Stops this process and those that the shell has started with it, as the terminal would, until the
/// shell continues them. Where there is no such shell, the kernel stops nothing.
pub fn suspend() -> Result<()> {
    kill_current_process_group(Signal::TSTP).context("the process could not be stopped")
}

/// The terminal of this process, until this is dropped.
pub struct FullScreen {
    terminal: Terminal<CrosstermBackend<File>>,
    tty: File,
    watcher: Child,
}

impl FullScreen {
    /// Switches to the terminal's second screen, and to keys that come as they are pressed.
    pub fn enter() -> Result<FullScreen> {
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
    pub fn draw(&mut self, draw: impl FnOnce(&mut Frame)) -> Result<()> {
        self.terminal.draw(draw).context("the terminal could not be written to")?;
        Ok(())
    }

    /// Waits for a key, at most `limit`. Fails where the terminal is gone: crossterm would
    /// read from it again and again, get nothing, and never return.
    pub fn event(&self, limit: Duration) -> Result<Option<Event>> {
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
