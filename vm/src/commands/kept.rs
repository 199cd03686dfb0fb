//! Guests that stay, for `cargo lesson`: one boots once, and then runs one program after another.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Subcommand;
use host::fail::{Fail, GUEST_DIED, fail};
use host::say;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};

use crate::commands::launch::{self, Program};
use crate::machine::qemu::Guest;
use crate::run::{GuestOptions, Run, duration};
use crate::session::wire::{Exit, Request};
use crate::session::{cleanup, guest, host as session, rundir};

/// How long an earlier program may take to end before a message says what this one waits for.
const PAUSE: Duration = Duration::from_millis(200);
const STEP: Duration = Duration::from_millis(50);
/// How long the launcher may take to end.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// What the launcher's programs start themselves as.
#[derive(Subcommand)]
pub enum Hidden {
    /// Runs in the guest and starts programs there
    #[command(hide = true)]
    Agent,
    /// A guest that stays, for `cargo lesson`
    #[command(hide = true)]
    Kept {
        /// Its name: there is one of each in a workspace
        name: String,
        /// What to do with it
        #[command(subcommand)]
        what: What,
    },
}

/// What to do with a guest that stays.
#[derive(Subcommand)]
pub enum What {
    /// Boot it, print a line when it is ready, and keep it
    Boot {
        /// What to boot
        #[command(flatten)]
        guest: GuestOptions,
        /// End it after this time without a program
        #[arg(long, value_parser = duration, default_value = "15m")]
        idle: Duration,
    },
    /// Run a program in it, when those before have ended. Exits with 125 where the guest has ended
    Run {
        /// End the guest after this time without output
        #[arg(long, value_parser = duration, default_value = "10m")]
        patience: Duration,
        /// The program, and its arguments
        #[arg(required = true, trailing_var_arg = true)]
        program: Vec<OsString>,
    },
    /// End it; exit with 1 where it does not run
    Stop,
}

impl Hidden {
    /// Runs the command. `run`: not in the guest, where nothing is to be resolved.
    pub fn main(self, run: impl FnOnce() -> Result<Run>) -> Result<i32> {
        let Hidden::Kept { name, what } = self else { return guest::main().map(|()| 0) };
        let run = run()?;
        let kept = Kept { run: &run, name };
        match what {
            What::Boot { guest, idle } => {
                let guest = Guest { joined_by: Some(kept.name), ..run.guest(&guest)? };
                launch::keep(&run, &guest, idle).map(|()| 0)
            }
            What::Run { patience, program } => {
                let request = launch::request(run.arch, &Program::other(program), None)?;
                kept.run(request, patience, |stream, it| session::talk(stream, it, false))
            }
            What::Stop => Ok(i32::from(!kept.stop()?)),
        }
    }
}

/// A guest that stays, whether it runs or not.
pub struct Kept<'r> {
    /// What its command line comes to.
    pub run: &'r Run,
    /// Its name.
    pub name: String,
}

impl Kept<'_> {
    /// Its run directory and its launcher, where it runs or boots, with this kernel if one is named.
    pub fn find(&self, kernel: Option<&str>) -> Result<Option<(PathBuf, rundir::Info)>> {
        rundir::running(self.run.workspace(), self.run.arch.name(), &self.name, kernel)
    }

    /// Boots it, in a process of its own, which says what it says in `log`. Whether it is ready.
    pub fn boot(&self, options: &[String], log: &Path) -> Result<bool> {
        let mut boot = Command::new(cleanup::OWN_FILE);
        boot.args(["--arch", self.run.arch.name(), "kept", &self.name, "boot"]).args(options);
        boot.current_dir(self.run.workspace()).stdin(Stdio::null());
        boot.stdout(Stdio::piped()).stderr(File::create(log)?);
        // Ctrl-C ends a check and not the guest.
        let mut launcher = boot.process_group(0).spawn().context("cannot start the launcher")?;
        let stdout = launcher.stdout.take().context("the launcher has no output")?;
        Ok(matches!(BufReader::new(stdout).lines().next(), Some(Ok(_))))
    }

    /// Runs a program in the guest, when those before it have ended; `talk` holds the session. Where none
    /// of its output comes for `patience`, ends the guest. Returns its status, 125 where the guest ended.
    pub fn run(
        &self,
        request: Request,
        patience: Duration,
        talk: impl FnOnce(UnixStream, Request) -> Result<Option<Exit>>,
    ) -> Result<i32> {
        let Some((dir, _)) = self.find(None)? else { return Ok(GUEST_DIED) };
        let in_use = rundir::in_use(&dir)?;
        let take = |how| flock(&in_use, how).is_ok();
        if !take(FlockOperation::NonBlockingLockExclusive) {
            // The launcher itself holds it for a moment, and so does a program that was just interrupted.
            std::thread::sleep(PAUSE);
            if !take(FlockOperation::NonBlockingLockExclusive) {
                say!("waiting for an earlier check to end");
                while !take(FlockOperation::LockExclusive) {}
            }
        }
        match launch::enter(&dir, request, Some(patience), talk) {
            Ok(Some(exit)) => return Ok(exit.status),
            Err(error) if !error.is::<Fail>() => return Err(error),
            _ => {}
        }
        // Where QEMU has ended, its launcher notices that, too, and says why.
        let start = Instant::now();
        while start.elapsed() < END_PATIENCE / 2 {
            if !rundir::is_alive(&dir) {
                return Ok(GUEST_DIED);
            }
            std::thread::sleep(STEP);
        }
        self.stop()?;
        Err(fail(GUEST_DIED, "the guest has stopped responding, and was stopped: check again"))
    }

    /// Ends the launcher, and with it the guest; returns when both have ended. Whether it ran.
    pub fn stop(&self) -> Result<bool> {
        let Some((dir, info)) = self.find(None)? else { return Ok(false) };
        let launcher = Pid::from_raw(info.pid as i32).context("the guest's launcher has no id")?;
        for signal in [Signal::TERM, Signal::KILL] {
            let start = Instant::now();
            while rundir::is_alive(&dir) && start.elapsed() < END_PATIENCE {
                let _ = kill_process(launcher, signal);
                std::thread::sleep(STEP);
            }
        }
        Ok(true)
    }
}
