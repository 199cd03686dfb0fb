//! Guests in the background, for `cargo lesson`: one boots once, and then runs one program after another.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Subcommand;
use common_base::duration;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Signal, kill_process};
use workshop::fail::{Fail, GUEST_DIED, fail};
use workshop::say;

use crate::commands::launch::{self, GuestProgram};
use crate::commands::setup;
use crate::commands::test::DISK_OPTIONS;
use crate::machine::qemu::Guest;
use crate::run::{For, GuestOptions, Run, named};
use crate::session::processes::end_with_us;
use crate::session::protocol::{Exit, Request, Stream};
use crate::session::{cleanup, guest, host as session, rundir};

/// How long an earlier program may take to end before a message says what this one waits for.
const PAUSE: Duration = Duration::from_millis(200);
const STEP: Duration = Duration::from_millis(50);
/// How long a program may say nothing before the guest counts as dead.
const SILENCE: Duration = Duration::from_secs(600);
/// How long the launcher may take to end.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// What the launcher's programs start themselves as.
#[derive(Subcommand)]
pub enum Hidden {
    /// Runs in the guest and starts programs there
    #[command(hide = true)]
    Agent,
    /// A guest in the background, for `cargo lesson`
    #[command(hide = true)]
    Background {
        /// Its name: there is one of each in a workspace
        name: String,
        /// What to do with it
        #[command(subcommand)]
        what: What,
    },
}

/// What to do with a guest in the background.
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
        let Hidden::Background { name, what } = self else { return guest::main().map(|()| 0) };
        let run = run()?;
        let it = BackgroundGuest { run: &run, name, kernel: None, stays: true };
        match what {
            What::Boot { guest, idle } => {
                let guest = Guest { joined_by: Some(it.name), ..run.guest(&guest)? };
                launch::keep(&run, &guest, idle).map(|()| 0)
            }
            What::Run { patience, program } => {
                let program = GuestProgram::other(program);
                it.join(&program, patience, |stream, request| session::talk(stream, request, false))
            }
            What::Stop => Ok(i32::from(!it.stop()?)),
        }
    }
}

/// A guest in the background, whether it runs or not, with the disks that the guest tests need.
pub struct BackgroundGuest<'r> {
    run: &'r Run,
    name: String,
    /// The kernel's name, where the user gives one.
    kernel: Option<String>,
    /// Whether it outlives this process, for the next one.
    stays: bool,
}

impl<'r> BackgroundGuest<'r> {
    /// The guest of this workspace. `kernel`: as `--kernel` names it, or the default.
    pub fn new(run: &'r Run, kernel: Option<&str>) -> BackgroundGuest<'r> {
        let kernel = named(kernel).map(str::to_owned);
        BackgroundGuest { run, name: "guest".to_owned(), kernel, stays: true }
    }

    /// A guest beside that one, for proofs on this kernel, which ends with this process.
    pub fn for_proof(run: &'r Run, kernel: Option<&str>) -> BackgroundGuest<'r> {
        let name = format!("proof-{}", kernel.unwrap_or("default").replace('/', "-"));
        BackgroundGuest { name, stays: false, ..BackgroundGuest::new(run, kernel) }
    }

    /// Whether this is its kernel.
    pub fn runs(&self, kernel: &str) -> bool {
        self.kernel.as_deref() == Some(kernel)
    }

    /// The kernel, to be shown: `kernel 6.1`.
    pub fn kernel(&self) -> String {
        let named = self.kernel.as_ref().map(|kernel| format!("kernel {kernel}"));
        named.unwrap_or_else(|| "the default kernel".to_owned())
    }

    /// Its run directory and its launcher, where it runs or boots, with this kernel if one is named.
    fn find(&self, kernel: Option<&str>) -> Result<Option<(PathBuf, rundir::Info)>> {
        rundir::running(self.run.workspace(), self.run.arch.name(), &self.name, kernel)
    }

    /// What its launcher says.
    fn log(&self) -> PathBuf {
        let file = format!(".lesson/{}-{}.log", self.name, self.run.arch.name());
        self.run.workspace().join(file)
    }

    /// The error that the guest has ended.
    fn ended(&self) -> anyhow::Error {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(15)..].join("\n  ");
        fail(GUEST_DIED, format!("the guest has ended; its launcher said:\n  {last}"))
    }

    /// Boots the guest if it does not run, or runs another kernel: in a process of its own.
    pub fn start(&self) -> Result<()> {
        let run = self.run;
        let kernel = self.kernel.clone().unwrap_or_else(|| run.table.default_name());
        if self.find(Some(&kernel))?.is_some() {
            return Ok(());
        }
        self.stop()?;
        // Here, where it can ask for a password: the guest's launcher has no terminal.
        run.need_packages(if self.stays { For::Judge } else { For::Test })?;
        setup::prepare(run, std::slice::from_ref(&kernel))?;
        let mut boot = Command::new(cleanup::OWN_FILE);
        boot.args([
            "--arch",
            run.arch.name(),
            "background",
            &self.name,
            "boot",
            "--kernel",
            &kernel,
        ]);
        boot.args(DISK_OPTIONS);
        if self.stays {
            let foreign = run.arch.is_foreign().then(|| format!(" --arch {}", run.arch.name()));
            eprintln!(
                "booting {}; the guest stays for the next check, and ends after 15 minutes without one, or \
                 with `cargo lesson stop{}`",
                self.kernel(),
                foreign.unwrap_or_default()
            );
            // Ctrl-C ends a check and not the guest.
            boot.process_group(0);
        } else {
            eprintln!("booting {}", self.kernel());
            end_with_us(&mut boot, Signal::TERM);
        }
        fs::create_dir_all(run.workspace().join(".lesson"))?;
        boot.current_dir(run.workspace()).stdin(Stdio::null());
        boot.stdout(Stdio::piped()).stderr(File::create(self.log())?);
        let mut launcher = boot.spawn().context("cannot start the launcher")?;
        let stdout = launcher.stdout.take().context("the launcher has no output")?;
        match BufReader::new(stdout).lines().next() {
            Some(Ok(_)) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    /// Runs a program in the guest, with this variable, and hands over each line of its standard
    /// output. Returns its status, and what it said on standard error.
    pub fn run(
        &self,
        program: &[&str],
        variable: (&'static str, String),
        mut on_line: impl FnMut(&str),
    ) -> Result<(i32, String)> {
        let argv = program.iter().map(Into::into).collect();
        let program = GuestProgram { env: vec![variable], ..GuestProgram::other(argv) };
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let status = self.join(&program, SILENCE, |stream, request| {
            session::listen(stream, request, |from, data| match from {
                Stream::Stderr => errors.extend_from_slice(data),
                Stream::Stdout => {
                    output.extend_from_slice(data);
                    while let Some(end) = output.iter().position(|&byte| byte == b'\n') {
                        let line: Vec<u8> = output.drain(..=end).collect();
                        on_line(String::from_utf8_lossy(&line).trim_end_matches('\n'));
                    }
                }
            })
        })?;
        if status == GUEST_DIED {
            return Err(self.ended());
        }
        Ok((status, String::from_utf8_lossy(&errors).into_owned()))
    }

    /// Runs a program in the guest, when those before it have ended; `talk` holds the session. Where none
    /// of its output comes for `patience`, ends the guest. Returns its status, 125 where the guest ended.
    fn join(
        &self,
        program: &GuestProgram,
        patience: Duration,
        talk: impl FnOnce(UnixStream, Request) -> Result<Option<Exit>>,
    ) -> Result<i32> {
        let request = launch::request(self.run, program, None)?;
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
