//! The guest that stays between checks. `cargo vm run` boots it with `lesson/guest.sh` as its
//! program, and the two sides talk through files of the workspace, which the guest shares: see there.

use std::{
    env, fs,
    fs::File,
    io::{Read, Seek, SeekFrom},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use host::fail::{GUEST_DIED, fail};
use rustix::fs::FlockOperation;

use crate::desk::STATE;

/// The guest ends after this many seconds without a check.
const IDLE: &str = "900";
/// How long the guest may take for the next line of output.
const PATIENCE: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(50);

/// A guest with the disks that the guest tests need.
#[derive(Clone)]
pub struct Guest {
    dir: PathBuf,
    /// Whether it waits for another check.
    stays: bool,
    kernel: Option<String>,
}

impl Guest {
    /// The guest of this workspace, whether it runs or not. `kernel`: as `--kernel` names it, or
    /// the launcher's default.
    pub fn of(root: &Path, kernel: Option<&str>) -> Guest {
        let kernel = kernel.filter(|kernel| !kernel.is_empty()).map(str::to_owned);
        Guest { dir: root.join(STATE).join("guest"), stays: true, kernel }
    }

    /// A guest for proofs on this kernel, beside the one for checks.
    pub fn of_proof(root: &Path, kernel: Option<&str>) -> Guest {
        let name = format!("proof-{}", kernel.unwrap_or("default"));
        Guest { dir: root.join(STATE).join(name), stays: false, ..Guest::of(root, kernel) }
    }

    /// The kernel, to be shown: `kernel 6.1`.
    pub fn kernel(&self) -> String {
        let named = self.kernel.as_ref().map(|kernel| format!("kernel {kernel}"));
        named.unwrap_or_else(|| "the default kernel".to_owned())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Where what the guest's programs said can be read.
    pub fn log(&self) -> PathBuf {
        self.file("output")
    }

    fn forget(&self, names: &[&str]) {
        for name in names {
            fs::remove_file(self.file(name)).ok();
        }
    }

    /// Whether the launcher of a guest lives: it holds a lock, on the file that is its stdin.
    pub fn is_running(&self) -> bool {
        let Ok(lock) = File::open(self.file("lock")) else { return false };
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).is_err()
    }

    /// Starts the guest if it does not run, or runs another kernel.
    pub fn start(&self, root: &Path) -> Result<()> {
        let runs = fs::read_to_string(self.file("kernel")).unwrap_or_default();
        if self.is_running() && runs == self.kernel() {
            return Ok(());
        }
        self.stop()?;
        let own = env::current_exe().context("cannot find this program")?;
        let launcher = own.with_file_name("vm");
        // Here, where it can ask for a password: the guest's launcher has no terminal.
        let kernel = self.kernel.iter().flat_map(|kernel| ["--kernel", kernel]);
        let setup = Command::new(&launcher).arg("setup").args(kernel.clone()).status();
        match setup.context("cannot start the launcher")?.code() {
            Some(0) => {}
            code => {
                return Err(fail(code.unwrap_or(1), "cargo vm setup failed, see above"));
            }
        }
        fs::create_dir_all(&self.dir).with_context(|| self.dir.display().to_string())?;
        self.forget(&["pid", "ready", "request", "running", "status", "stop"]);
        fs::write(self.file("kernel"), self.kernel())?;
        // Empty, for it is the launcher's standard input. Whoever has it open has it locked.
        File::create(self.file("lock"))?;
        let stdin = File::open(self.file("lock"))?;
        rustix::fs::flock(&stdin, FlockOperation::NonBlockingLockExclusive)
            .context("another check is starting the guest: try again")?;
        let log = File::create(self.file("log"))?;
        let stays = "; the guest stays for the next check, and ends after 15 minutes without one, or \
                     with `cargo lesson stop`";
        eprintln!("booting {}{}", self.kernel(), if self.stays { stays } else { "" });
        let mut command = Command::new(launcher);
        command.arg("run").args(kernel).args(["--idle", "--cpus", "2"]);
        command.args(["--disk", "virtio", "--disk", "nvme", "--disk", "scsi", "bash"]);
        command.arg(root.join("lesson/guest.sh")).arg(&self.dir).arg(IDLE);
        command.current_dir(root).stdin(stdin).stdout(log.try_clone()?).stderr(log);
        // Ctrl-C ends a check and not the guest.
        let launcher = command.process_group(0).spawn().context("cannot start the launcher")?;
        fs::write(self.file("pid"), launcher.id().to_string())?;
        // With the command goes this process's share of the lock.
        drop(command);
        self.wait("ready")
    }

    /// Waits for a file that the guest makes.
    fn wait(&self, name: &str) -> Result<()> {
        while !self.file(name).exists() {
            self.check_alive()?;
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn check_alive(&self) -> Result<()> {
        if self.is_running() {
            return Ok(());
        }
        let log = fs::read_to_string(self.file("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(15)..].join("\n  ");
        Err(fail(GUEST_DIED, format!("the guest has ended; its launcher said:\n  {last}")))
    }

    /// Runs a script in the guest, and hands over each line of its standard output.
    pub fn run(&self, script: &str, mut on_line: impl FnMut(&str) -> Result<()>) -> Result<()> {
        if self.file("running").exists() || self.file("request").exists() {
            eprintln!("waiting for an earlier check, which was interrupted");
        }
        while self.file("running").exists() || self.file("request").exists() {
            self.check_alive()?;
            thread::sleep(PAUSE);
        }
        self.forget(&["status", "output", "errors"]);
        fs::write(self.file("new"), script)?;
        fs::rename(self.file("new"), self.file("request"))?;
        let (mut read, mut line, mut last) = (0, Vec::new(), Instant::now());
        loop {
            let done = self.file("status").exists();
            let mut new = Vec::new();
            if let Ok(mut output) = File::open(self.file("output")) {
                output.seek(SeekFrom::Start(read))?;
                output.read_to_end(&mut new)?;
            }
            read += new.len() as u64;
            if !new.is_empty() {
                last = Instant::now();
            }
            for byte in new {
                if byte == b'\n' {
                    on_line(&String::from_utf8_lossy(&line))?;
                    line.clear();
                } else {
                    line.push(byte);
                }
            }
            if done {
                return Ok(());
            }
            self.check_alive()?;
            if last.elapsed() > PATIENCE {
                self.kill();
                let message = "the guest has stopped responding, and was stopped: check again";
                return Err(fail(GUEST_DIED, message));
            }
            thread::sleep(PAUSE);
        }
    }

    /// Ends the guest, if it runs, and waits for its end. Whether it ran.
    pub fn stop(&self) -> Result<bool> {
        if !self.is_running() {
            return Ok(false);
        }
        fs::write(self.file("stop"), "")?;
        let start = Instant::now();
        while self.is_running() {
            if start.elapsed() > Duration::from_secs(60) {
                self.kill();
            }
            thread::sleep(PAUSE);
        }
        Ok(true)
    }

    /// Asks the launcher itself to end: it takes the guest down.
    pub fn kill(&self) {
        let pid = fs::read_to_string(self.file("pid")).ok().and_then(|pid| pid.parse().ok());
        // After the launcher has ended, another process may have its number.
        let pid = pid.filter(|_| self.is_running());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).ok();
        }
    }
}
