//! Guests that stay, for `cargo lesson`: one boots once, and then runs one program after another.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use host::fail::{Fail, GUEST_DIED, fail};
use host::say;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::guest::rundir::{self, Info};
use crate::launch::{self, Program};

/// How long an earlier program may take to end before a message says what this one waits for.
const PAUSE: Duration = Duration::from_millis(200);
const STEP: Duration = Duration::from_millis(50);
/// How long the launcher may take to end.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// Runs a program in the guest, when those before it have ended. Where none of its output comes for
/// `patience`, ends the guest.
pub fn run(dir: &Path, info: &Info, patience: Duration, program: &Program) -> Result<i32> {
    let in_use = rundir::in_use(dir)?;
    let take = |how| flock(&in_use, how).is_ok();
    if !take(FlockOperation::NonBlockingLockExclusive) {
        // The launcher itself holds it for a moment, and so does a program that was just interrupted.
        std::thread::sleep(PAUSE);
        if !take(FlockOperation::NonBlockingLockExclusive) {
            say!("waiting for an earlier check to end");
            while !take(FlockOperation::LockExclusive) {}
        }
    }
    match launch::enter(dir, program, false, Some(patience)) {
        Ok(Some(exit)) => return Ok(exit.status),
        Err(error) if !error.is::<Fail>() => return Err(error),
        _ => {}
    }
    // Where QEMU has ended, its launcher notices that, too, and says why.
    let start = Instant::now();
    while start.elapsed() < END_PATIENCE / 2 {
        if !rundir::is_alive(dir) {
            return Ok(GUEST_DIED);
        }
        std::thread::sleep(STEP);
    }
    stop(dir, info)?;
    Err(fail(GUEST_DIED, "the guest has stopped responding, and was stopped: check again"))
}

/// Ends the launcher, and with it the guest; returns when both have ended.
pub fn stop(dir: &Path, info: &Info) -> Result<()> {
    let launcher = Pid::from_raw(info.pid as i32).context("the guest's launcher has no id")?;
    for signal in [Signal::TERM, Signal::KILL] {
        let start = Instant::now();
        while rundir::is_alive(dir) && start.elapsed() < END_PATIENCE {
            let _ = kill_process(launcher, signal);
            std::thread::sleep(STEP);
        }
    }
    Ok(())
}
