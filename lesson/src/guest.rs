//! The guest that stays between checks, and runs the judges.

use std::{fs, path::PathBuf, time::Duration};

use anyhow::Result;
use clap::ValueEnum;
use host::fail::{GUEST_DIED, fail};
use vm::{
    commands::{
        kept::Kept,
        launch::{self, Program},
        setup,
        test::DISKS,
    },
    run::{For, Run},
    session::{host::listen, wire::Stream},
};

use crate::desk::STATE;

/// How long a judge may say nothing before the guest counts as dead.
const PATIENCE: Duration = Duration::from_secs(600);

/// A guest with the disks that the guest tests need.
pub struct Guest<'r> {
    kept: Kept<'r>,
    /// The kernel's name, where the user gives one.
    kernel: Option<String>,
    /// Whether it waits for another check.
    stays: bool,
}

impl<'r> Guest<'r> {
    /// The guest of this workspace, whether it runs or not. `kernel`: as `--kernel` names it, or
    /// the default.
    pub fn of(run: &'r Run, kernel: Option<&str>) -> Guest<'r> {
        let kernel = vm::run::named(kernel).map(str::to_owned);
        Guest { kept: Kept { run, name: "guest".to_owned() }, kernel, stays: true }
    }

    /// A guest for proofs on this kernel, beside the one for checks.
    pub fn of_proof(run: &'r Run, kernel: Option<&str>) -> Guest<'r> {
        let name = format!("proof-{}", kernel.unwrap_or("default").replace('/', "-"));
        Guest { kept: Kept { run, name }, stays: false, ..Guest::of(run, kernel) }
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
        let Kept { run, name } = &self.kept;
        run.workspace().join(STATE).join(format!("{name}-{}.log", run.arch.name()))
    }

    /// Starts the guest if it does not run, or runs another kernel.
    pub fn start(&self) -> Result<()> {
        let run = self.kept.run;
        let kernel = self.kernel.clone().unwrap_or_else(|| run.default_kernel());
        if self.kept.find(Some(&kernel))?.is_some() {
            return Ok(());
        }
        self.kept.stop()?;
        // Here, where it can ask for a password: the guest's launcher has no terminal.
        run.need_packages(if self.stays { For::Judge } else { For::Test })?;
        setup::prepare(run, std::slice::from_ref(&kernel))?;
        let arch = match run.arch.is_foreign() {
            true => format!(" --arch {}", run.arch.name()),
            false => String::new(),
        };
        let stays = format!(
            "; the guest stays for the next check, and ends after 15 minutes without one, or with \
             `cargo lesson stop{arch}`"
        );
        eprintln!("booting {}{}", self.kernel(), if self.stays { &stays } else { "" });
        fs::create_dir_all(run.workspace().join(STATE))?;
        let disks = DISKS.iter().filter_map(ValueEnum::to_possible_value);
        let mut options = vec!["--kernel".to_owned(), kernel];
        options.extend(disks.flat_map(|disk| ["--disk".to_owned(), disk.get_name().to_owned()]));
        match self.kept.boot(&options, &self.log())? {
            true => Ok(()),
            false => Err(self.ended()),
        }
    }

    /// The error that the guest has ended.
    fn ended(&self) -> anyhow::Error {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(15)..].join("\n  ");
        fail(GUEST_DIED, format!("the guest has ended; its launcher said:\n  {last}"))
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
        let program = Program { env: vec![variable], ..Program::other(argv) };
        let request = launch::request(self.kept.run.arch, &program, None)?;
        let (mut output, mut errors) = (Vec::new(), Vec::new());
        let status = self.kept.run(request, PATIENCE, |stream, request| {
            listen(stream, request, |from, data| match from {
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

    /// Ends the guest, if it runs, and waits for its end. Whether it ran.
    pub fn stop(&self) -> Result<bool> {
        self.kept.stop()
    }
}
