//! The guest that stays between checks: the launcher keeps it, and runs the judges in it.

use std::{
    env,
    fs::{self, File},
    io::{BufRead, BufReader},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::OnceLock,
};

use anyhow::{Context, Result};
use host::fail::{GUEST_DIED, fail};

use crate::desk::STATE;

/// The architecture of guests, where it is not this machine's.
static ARCH: OnceLock<String> = OnceLock::new();

/// Makes guests have this architecture.
pub fn set_arch(arch: String) {
    ARCH.get_or_init(|| arch);
}

/// What cargo is told where it builds for guests. Needs the launcher, and what that installs.
pub fn build_for_guests(root: &Path) -> Result<()> {
    let build_env = launcher(root, &["build-env"])?.stdout(Stdio::piped()).spawn();
    let output =
        build_env.and_then(Child::wait_with_output).context("cannot start the launcher")?;
    match output.status.code() {
        Some(0) => {}
        code => return Err(fail(code.unwrap_or(1), "cargo cannot build for guests, see above")),
    }
    host::cargo::build_for_guests(serde_json::from_slice(&output.stdout)?);
    Ok(())
}

/// The launcher's command line.
fn launcher(root: &Path, arguments: &[&str]) -> Result<Command> {
    let own = env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(own.with_file_name("vm"));
    command.args(arguments).current_dir(root);
    command.envs(ARCH.get().map(|arch| ("VM_ARCH", arch)));
    Ok(command)
}

/// A guest with the disks that the guest tests need.
pub struct Guest {
    root: PathBuf,
    /// Its name, by which the launcher finds it.
    name: String,
    kernel: Option<String>,
    /// Whether it waits for another check.
    stays: bool,
}

impl Guest {
    /// The guest of this workspace, whether it runs or not. `kernel`: as `--kernel` names it, or
    /// the launcher's default.
    pub fn of(root: &Path, kernel: Option<&str>) -> Guest {
        let kernel = kernel.filter(|kernel| !kernel.is_empty()).map(str::to_owned);
        let name = ARCH.get().map_or_else(|| "guest".to_owned(), |arch| format!("guest-{arch}"));
        Guest { root: root.to_owned(), name, kernel, stays: true }
    }

    /// A guest for proofs on this kernel, beside the one for checks.
    pub fn of_proof(root: &Path, kernel: Option<&str>) -> Guest {
        let name = format!("proof-{}", kernel.unwrap_or("default").replace('/', "-"));
        Guest { name, stays: false, ..Guest::of(root, kernel) }
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

    /// What its launcher said.
    fn log(&self) -> PathBuf {
        self.root.join(STATE).join(format!("{}.log", self.name))
    }

    /// What the program that ran last said on standard error.
    pub fn errors(&self) -> PathBuf {
        self.log().with_extension("errors")
    }

    /// The command line of something that the launcher does with this guest.
    fn kept(&self, what: &str) -> Result<Command> {
        let mut command = launcher(&self.root, &["kept", &self.name, what])?;
        command.stdin(Stdio::null());
        Ok(command)
    }

    /// Starts the guest if it does not run, or runs another kernel.
    pub fn start(&self) -> Result<()> {
        let kernel = || self.kernel.iter().flat_map(|kernel| ["--kernel", kernel]);
        let runs = self.kept("runs")?.args(kernel()).status();
        if runs.context("cannot start the launcher")?.success() {
            return Ok(());
        }
        self.stop()?;
        // Here, where it can ask for a password: the guest's launcher has no terminal.
        let setup = launcher(&self.root, &["setup"])?.args(kernel()).status();
        match setup.context("cannot start the launcher")?.code() {
            Some(0) => {}
            code => {
                return Err(fail(code.unwrap_or(1), "cargo vm setup failed, see above"));
            }
        }
        let arch = ARCH.get().map(|arch| format!(" --arch {arch}")).unwrap_or_default();
        let stays = format!(
            "; the guest stays for the next check, and ends after 15 minutes without one, or with \
             `cargo lesson stop{arch}`"
        );
        eprintln!("booting {}{}", self.kernel(), if self.stays { &stays } else { "" });
        fs::create_dir_all(self.root.join(STATE))?;
        let mut boot = self.kept("boot")?;
        boot.args(kernel()).args(["--disk", "virtio", "--disk", "nvme", "--disk", "scsi"]);
        boot.stdout(Stdio::piped()).stderr(File::create(self.log())?);
        // Ctrl-C ends a check and not the guest.
        let mut launcher = boot.process_group(0).spawn().context("cannot start the launcher")?;
        let stdout = launcher.stdout.take().context("the launcher has no output")?;
        match BufReader::new(stdout).lines().next() {
            Some(Ok(_)) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    /// The error that the guest has ended.
    fn ended(&self) -> anyhow::Error {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(15)..].join("\n  ");
        fail(GUEST_DIED, format!("the guest has ended; its launcher said:\n  {last}"))
    }

    /// Runs a program in the guest, with these variables, and hands over each line of its standard
    /// output. Returns how it ended.
    pub fn run(
        &self,
        program: &[&str],
        variables: &[(&str, String)],
        mut on_line: impl FnMut(&str),
    ) -> Result<ExitStatus> {
        // That of the program before.
        fs::remove_file(self.errors()).ok();
        let mut run = self.kept("run")?;
        run.args(["sh", "-c", "exec \"$@\" 2>\"$0\""]).arg(self.errors()).args(program);
        run.envs(variables.iter().cloned()).stdout(Stdio::piped());
        let mut running = run.spawn().context("cannot start the launcher")?;
        let stdout = running.stdout.take().context("the launcher has no output")?;
        for line in BufReader::new(stdout).split(b'\n') {
            on_line(&String::from_utf8_lossy(&line?));
        }
        let status = running.wait()?;
        if status.code() == Some(GUEST_DIED) {
            return Err(self.ended());
        }
        Ok(status)
    }

    /// Ends the guest, if it runs, and waits for its end. Whether it ran.
    pub fn stop(&self) -> Result<bool> {
        // Without a launcher, which the first check builds, there is no guest.
        Ok(self.kept("stop")?.status().is_ok_and(|status| status.success()))
    }
}
