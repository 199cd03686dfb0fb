//! Guests in the background, for `cargo lesson`: one boots once, and then runs one program after another.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Subcommand;
use common_base::duration;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use workshop::fail::{Fail, GUEST_DIED, fail};
use workshop::say;

use crate::commands::launch::{self, GuestProgram};
use crate::commands::setup;
use crate::commands::test::DISK_OPTIONS;
use crate::machine::qemu::Guest;
use crate::run::{For, GuestOptions, Run, named};
use crate::session::processes::{end_with_us, leave_alone};
use crate::session::protocol::{Exit, Request, Stream};
use crate::session::{cleanup, guest, host as session, rundir};

/// How long an earlier program may take to end before a message says what this one waits for.
const PAUSE: Duration = Duration::from_millis(200);
const STEP: Duration = Duration::from_millis(50);
/// How long a program may say nothing before the guest counts as dead.
const SILENCE: Duration = Duration::from_secs(600);
/// How long the launcher may take to notice that QEMU has ended.
const END_PATIENCE: Duration = Duration::from_secs(5);

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
                let Some(taken) = it.take_running()? else { return Ok(GUEST_DIED) };
                let talk = |stream, request| session::talk(stream, request, false);
                taken.join(&program, patience, talk)
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

    /// Its run directory and its launcher, where it runs or boots.
    fn find(&self) -> Result<Option<(PathBuf, rundir::Info)>> {
        rundir::running(self.run.workspace(), self.run.arch.name(), &self.name, None)
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

    /// Boots the guest if it does not run, runs another kernel, or is not as it was after its boot.
    pub fn start(&self) -> Result<()> {
        self.take().map(drop)
    }

    /// The guest, when those who use it have ended. One that is not as it was after its boot is ended, and
    /// so is one with another kernel: a new one boots.
    pub fn take(&self) -> Result<TakenGuest<'_, 'r>> {
        let kernel = self.kernel.clone().unwrap_or_else(|| self.run.table.default_name());
        loop {
            if let Some(taken) = self.take_running()? {
                let why = taken.unclean();
                if why.is_none() && taken.info.kernel == kernel {
                    return Ok(taken);
                }
                if let Some(why) = why {
                    say!("{why}; its virtual machine is ended, and a new one boots");
                }
                rundir::end(&taken.dir, &taken.info)?;
            }
            self.boot(&kernel)?;
        }
    }

    /// The guest where one runs or boots, when those who use it have ended.
    fn take_running(&self) -> Result<Option<TakenGuest<'_, 'r>>> {
        while let Some((dir, info)) = self.find()? {
            let in_use = match rundir::in_use(&dir) {
                Err(_) if !rundir::is_alive(&dir) => continue,
                opened => opened?,
            };
            let take = |how| flock(&in_use, how).is_ok();
            if !take(FlockOperation::NonBlockingLockExclusive) {
                // The launcher itself holds it for a moment, and so does a program that was just interrupted.
                std::thread::sleep(PAUSE);
                if !take(FlockOperation::NonBlockingLockExclusive) {
                    say!("waiting for an earlier check to end");
                    while let Err(error) = flock(&in_use, FlockOperation::LockExclusive) {
                        ensure!(
                            error == Errno::INTR,
                            "the run directory cannot be locked: {error}"
                        );
                    }
                }
            }
            // Those who had it may have ended it.
            if rundir::is_alive(&dir) {
                return Ok(Some(TakenGuest { guest: self, dir, info, _in_use: in_use }));
            }
        }
        Ok(None)
    }

    /// Boots the guest, in a process of its own.
    fn boot(&self, kernel: &str) -> Result<()> {
        let run = self.run;
        // Here, where it can ask for a password: the guest's launcher has no terminal.
        run.need_packages(if self.stays { For::Judge } else { For::Test })?;
        setup::prepare(run, &[kernel.to_owned()])?;
        let mut boot = Command::new(cleanup::OWN_FILE);
        boot.args(["--arch", run.arch.name(), "background", &self.name, "boot"]);
        boot.args(["--kernel", kernel]).args(DISK_OPTIONS);
        if self.stays {
            let foreign = run.arch.is_foreign().then(|| format!(" --arch {}", run.arch.name()));
            eprintln!(
                "booting {}; the guest stays for the next check, and ends after 15 minutes without one, or \
                 with `cargo lesson stop{}`",
                self.kernel(),
                foreign.unwrap_or_default()
            );
            // Ctrl-C reaches this process, which ends the guest.
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
            Some(Ok(_)) if self.stays => leave_alone(Pid::from_child(&launcher)),
            Some(Ok(_)) => {}
            _ => {
                cleanup::end_if_asked();
                return Err(self.ended());
            }
        }
        Ok(())
    }

    /// Ends the launcher, and with it the guest; returns when both have ended. Whether it ran.
    pub fn stop(&self) -> Result<bool> {
        let Some((dir, info)) = self.find()? else { return Ok(false) };
        rundir::end(&dir, &info)?;
        Ok(true)
    }
}

/// A guest that runs, and that nobody else uses while this lives.
pub struct TakenGuest<'g, 'r> {
    guest: &'g BackgroundGuest<'r>,
    dir: PathBuf,
    info: rundir::Info,
    _in_use: File,
}

impl TakenGuest<'_, '_> {
    /// Runs a program in the guest, with this variable, and hands over each line of its standard
    /// output. Returns its status, and what it said on standard error.
    ///
    /// From now on, the guest counts as one that is not as it was after its boot, until
    /// [`TakenGuest::is_clean`] says otherwise: this process, or the program, may be killed.
    pub fn run(
        &self,
        program: &[&str],
        variable: (&'static str, String),
        mut on_line: impl FnMut(&str),
    ) -> Result<(i32, String)> {
        self.note_unclean("an earlier check was cut off")?;
        let argv = program.iter().map(Into::into).collect();
        let program = GuestProgram { env: vec![variable], ..GuestProgram::other(argv) };
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let listen = |stream, request| {
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
        };
        // A signal that ends this process ends the guest, too.
        cleanup::own_guest(self.guest.stays.then(|| (self.dir.clone(), self.info.clone())));
        let status = self.join(&program, SILENCE, listen);
        cleanup::end_if_asked();
        cleanup::own_guest(None);
        if *status.as_ref().unwrap_or(&0) == GUEST_DIED {
            return Err(self.guest.ended());
        }
        Ok((status?, String::from_utf8_lossy(&errors).into_owned()))
    }

    /// Why the guest is not as it was after its boot, where it is not.
    fn unclean(&self) -> Option<String> {
        fs::read_to_string(self.mark()).ok()
    }

    /// Notes why the guest is not as it was after its boot: whoever takes it next boots another one.
    pub fn note_unclean(&self, why: &str) -> Result<()> {
        fs::write(self.mark(), why).context("cannot write to the run directory")
    }

    /// Notes that the guest is as it was after its boot.
    pub fn is_clean(&self) -> Result<()> {
        fs::remove_file(self.mark()).context("cannot write to the run directory")
    }

    /// Where that stands: the guest does not see it.
    fn mark(&self) -> PathBuf {
        self.dir.join("unclean")
    }

    /// Runs a program in the guest; `talk` holds the session. Where none of its output comes for
    /// `patience`, ends the guest. Returns its status, 125 where the guest ended.
    fn join(
        &self,
        program: &GuestProgram,
        patience: Duration,
        talk: impl FnOnce(UnixStream, Request) -> Result<Option<Exit>>,
    ) -> Result<i32> {
        let request = launch::request(self.guest.run, program, None)?;
        match launch::enter(&self.dir, request, Some(patience), talk) {
            Ok(Some(exit)) => return Ok(exit.status),
            Err(error) if !error.is::<Fail>() => return Err(error),
            _ => {}
        }
        // Where QEMU has ended, its launcher notices that, too, and says why.
        let start = Instant::now();
        while start.elapsed() < END_PATIENCE {
            if !rundir::is_alive(&self.dir) {
                return Ok(GUEST_DIED);
            }
            std::thread::sleep(STEP);
        }
        cleanup::end_if_asked();
        rundir::end(&self.dir, &self.info)?;
        Err(fail(GUEST_DIED, "the guest has stopped responding, and was stopped: check again"))
    }
}
