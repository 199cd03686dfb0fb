//! --live: a full screen. One thread takes what comes from the kernel, all the time; another one draws, and waits for
//! keys and for the terminal.

use std::{
    fs,
    io::{IsTerminal, stdin},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, Sender, TryRecvError, channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use common::{Session, Usage};
use common_screen::{Scene, Turn};
use ratatui::{Frame, crossterm::event::KeyEvent};

mod grid;
mod rows;
mod snapshot;
mod view;

pub use snapshot::Reader;

use crate::{
    answer::Counts, disks::Names, operation::Operations, run::Run, sums::Sums, waiting::Watch,
};
use snapshot::Snapshot;
use view::View;

/// How often the screen gets new figures.
const SECOND: Duration = Duration::from_secs(1);

/// A full screen needs a terminal; without one, exit code 2.
pub fn has_terminal(session: &Session) -> Result<()> {
    if session.stdout_is_terminal() && stdin().is_terminal() {
        return Ok(());
    }
    let why = "--live fills a terminal, and stdin or stdout is none: without --live, each slow I/O is a line, and \
               with --json, an object";
    Err(Usage(why.to_owned()).into())
}

/// How many CPUs the machine may have.
pub fn cpus() -> Result<u32> {
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible")
        .context("the number of CPUs could not be read")?;
    let last = possible.trim().trim_start_matches("0-").parse::<u32>();
    let last = last.ok().filter(|last| *last == 0 || possible.starts_with("0-"));
    let message = format!(
        "--live needs CPUs with consecutive numbers, and this machine has {}: use --top or --who",
        possible.trim()
    );
    last.map_or_else(|| common::unsupported(message), |last| Ok(last + 1))
}

/// What the screen's figures are made of.
pub struct Live<'a, 'obj, 'ring> {
    /// What happens all the time.
    pub run: &'a Run<'a, 'obj, 'ring>,
    /// Of the disks.
    pub names: &'a Names,
    /// Of the kernel.
    pub operations: &'a Operations,
    /// What reads the sums.
    pub reader: Reader,
}

impl Live<'_, '_, '_> {
    /// Shows it until the run ends, or a key ends it.
    pub fn show(&mut self, sums: &mut Sums<'_>, watch: &mut Watch<'_>) -> Result<()> {
        let (snapshots, receiver) = channel();
        let session = self.run.session;
        let view = View::new(self.run.options.min, common::kernel_clock(), session.has_colours());
        let (hooks_run, is_over) = (AtomicBool::new(true), AtomicBool::new(false));
        let check = session.hooks_check();
        let mut screen = Screen { snapshots: receiver, view, hooks_run: &hooks_run };
        thread::scope(|scope| {
            // Whoever asks for it may have to wait, while the kernel hooks functions for somebody else.
            let checking = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    hooks_run.fetch_and(check().is_ok(), Ordering::Relaxed);
                    thread::park_timeout(SECOND);
                }
            });
            let shown = scope.spawn(|| common_screen::show(&mut screen));
            let collected = self.collect(sums, watch, &snapshots, || shown.is_finished());
            is_over.store(true, Ordering::Relaxed);
            checking.thread().unpark();
            drop(snapshots);
            let shown = shown.join().map_err(|_| anyhow!("the screen could not be drawn"));
            collected.and(shown?)
        })
    }

    /// Sends a snapshot each second, until nobody wants any.
    fn collect(
        &mut self,
        sums: &mut Sums<'_>,
        watch: &mut Watch<'_>,
        snapshots: &Sender<Snapshot>,
        is_unwanted: impl Fn() -> bool,
    ) -> Result<()> {
        let mut of_others = 0;
        let mut next = Instant::now();
        while !self.run.is_over() && !is_unwanted() {
            self.run.turn()?;
            self.run.follow_disks(&mut of_others, sums)?;
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + SECOND;
            self.reader.follow(&self.run.skel.maps, sums)?;
            // Where the screen has just ended, nobody takes it.
            snapshots.send(self.snapshot(sums, watch)?).ok();
        }
        Ok(())
    }

    fn snapshot(&self, sums: &Sums<'_>, watch: &mut Watch<'_>) -> Result<Snapshot> {
        let Run { session, skel, options, lines, .. } = *self.run;
        let at = common::kernel_clock();
        let disks = self.reader.disks(sums, options.disk.is_some())?;
        let causes = self.reader.causes(self.names, self.operations)?;
        let waiting = watch.hanging()?;
        let hanging = waiting.len() as u64;
        let counts = Counts::so_far(skel, session, options, &disks, hanging)?;
        let slow = lines.borrow_mut().take_recent()?;
        Ok(Snapshot { at, disks, causes, slow, waiting, counts })
    }
}

/// What the screen's thread has.
struct Screen<'a> {
    snapshots: Receiver<Snapshot>,
    view: View,
    hooks_run: &'a AtomicBool,
}

impl Scene for Screen<'_> {
    fn turn(&mut self) -> Result<Turn> {
        let mut is_new = false;
        loop {
            match self.snapshots.try_recv() {
                Ok(snapshot) => self.view.take(snapshot),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Ok(Turn::End),
            }
            is_new = true;
        }
        is_new |= self.view.now(common::kernel_clock(), self.hooks_run.load(Ordering::Relaxed));
        Ok(if is_new { Turn::New } else { Turn::Same })
    }

    fn draw(&mut self, frame: &mut Frame<'_>) {
        self.view.draw(frame);
    }

    fn key(&mut self, key: KeyEvent) -> bool {
        self.view.key(key)
    }

    fn continued(&mut self) -> Result<()> {
        Ok(())
    }
}
