//! What a run does all the time: takes the slow I/Os out of the ring buffer.

use std::{
    cell::RefCell,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use common::Session;
use libbpf_rs::{
    ErrorKind::{Interrupted, PermissionDenied},
    RingBuffer,
};

use crate::{cli::Slow, line::Lines, only, sums::Sums, trace::TraceSkel};

/// How long slow bios are taken before anything else is done.
const TURN: Duration = Duration::from_millis(100);

/// What lasts while the programs are attached.
pub struct Run<'a, 'obj, 'ring> {
    /// The session that has attached them.
    pub session: &'a Session,
    /// Programs and maps.
    pub skel: &'a TraceSkel<'obj>,
    /// What was asked for.
    pub options: &'a Slow,
    /// Where slow I/Os come from, and where they go.
    pub ring: &'a RingBuffer<'ring>,
    /// See `ring`.
    pub lines: &'a RefCell<Lines<'obj>>,
}

impl Run<'_, '_, '_> {
    /// Whether nothing comes any more, or nobody wants it.
    pub fn is_over(&self) -> bool {
        let is_over = self.session.is_over() || only::is_over(self.skel, self.options);
        is_over || self.lines.borrow().has_failed()
    }

    /// Takes slow bios from the ring buffer, for a tenth of a second.
    pub fn turn(&self) -> Result<()> {
        self.lines.borrow_mut().begin_turn(Instant::now() + TURN);
        match self.ring.poll(TURN) {
            // -1, with which a turn ends, is -EPERM.
            Err(error) if ![Interrupted, PermissionDenied].contains(&error.kind()) => {
                Err(error).context("the ring buffer could not be read")
            }
            _ => self.lines.borrow_mut().flush(),
        }
    }

    /// Gives each disk that has come its sums, where there was an I/O of one that has none.
    pub fn follow_disks(&self, of_others: &mut u64, sums: &mut Sums<'_>) -> Result<()> {
        let others = common::counters(&self.skel.maps.bss_data)?.of_others;
        if others != *of_others {
            *of_others = others; // there is a new disk, or was one
            sums.follow(&self.skel.maps.disks)?;
        }
        Ok(())
    }
}
