//! Running cargo, for the workshop's own workspace.

use std::{
    env,
    ffi::OsStr,
    io::{BufReader, Read},
    path::PathBuf,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, anyhow, ensure};
use cargo_metadata::{Artifact, CompilerMessage, Message, Metadata, MetadataCommand};
pub use common_base::is_cargos;

/// Cargo, in the workshop's workspace.
#[derive(Clone, Debug)]
pub struct Cargo {
    /// The directory with the workspace's Cargo.toml.
    pub workspace: PathBuf,
    /// Whether it says nothing but errors.
    pub quiet: bool,
    /// The variables with which it builds for another architecture than this machine's.
    variables: Vec<(String, String)>,
}

impl Cargo {
    /// Cargo, which builds for this machine.
    pub fn new(workspace: impl Into<PathBuf>, quiet: bool) -> Cargo {
        Cargo { workspace: workspace.into(), quiet, variables: Vec::new() }
    }

    /// The same, with these variables: they make it build for another architecture.
    pub fn with(&self, variables: Vec<(String, String)>) -> Cargo {
        Cargo { variables, ..self.clone() }
    }

    /// The same, which says nothing but errors.
    pub fn quiet(&self) -> Cargo {
        Cargo { quiet: true, ..self.clone() }
    }

    /// A `cargo` command at the workspace, without what an outer `cargo run` has set for the package
    /// that it runs.
    pub fn command(&self) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
        command.current_dir(&self.workspace);
        for (name, value) in env::vars_os() {
            if is_cargos(&name) {
                command.env_remove(name);
            } else if name == "CARGO_TARGET_DIR" || name == "CARGO_BUILD_TARGET_DIR" {
                // Relative to where the outer cargo was started, which may be another directory.
                if let Ok(absolute) = std::path::absolute(value) {
                    command.env(name, absolute);
                }
            }
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// What cargo knows of the workspace, without its dependencies. Needs no network.
    pub fn metadata(&self) -> Result<Metadata> {
        let output = self
            .command()
            .args(["metadata", "--no-deps", "--offline", "--format-version=1"])
            .output()
            .context("cannot start cargo")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cargo cannot read the workspace: {}", said.trim_end());
        let json = std::str::from_utf8(&output.stdout).context("cargo metadata: not UTF-8")?;
        MetadataCommand::parse(json).context("cargo metadata: unexpected output")
    }

    /// Runs a cargo command that builds, and returns what it has made; cargo's messages go to stderr.
    /// `args` begins with cargo's subcommand.
    pub fn artifacts(&self, args: &[impl AsRef<OsStr>]) -> Result<Vec<Artifact>> {
        let words: Vec<_> = args.iter().map(|arg| arg.as_ref().to_string_lossy()).collect();
        let built = self.build(args, Stdio::inherit())?;
        built.map_err(|_| anyhow!("cargo {} failed, see above", words.join(" ")))
    }

    /// The same, with cargo's messages to `stderr`; where cargo fails, what it said if that is a pipe.
    pub fn build(
        &self,
        args: &[impl AsRef<OsStr>],
        stderr: Stdio,
    ) -> Result<Result<Vec<Artifact>, String>> {
        let mut command = self.command();
        command.args(args).args(self.quiet.then_some("--quiet"));
        built(command.arg("--message-format=json-render-diagnostics").stderr(stderr), |_| {})
    }
}

/// What a cargo command that builds has made, as its messages say, those of the compiler handed over as they
/// come; where cargo fails, what it said if standard error is a pipe.
pub fn built(
    command: &mut Command,
    mut on_message: impl FnMut(CompilerMessage),
) -> Result<Result<Vec<Artifact>, String>> {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start cargo")?;
    let errors = child.stderr.take();
    let errors = thread::spawn(move || {
        let mut said = Vec::new();
        errors.map(|mut errors| errors.read_to_end(&mut said));
        String::from_utf8_lossy(&said).into_owned()
    });
    let mut made = Vec::new();
    let messages = child.stdout.take().context("no pipe from cargo")?;
    for message in Message::parse_stream(BufReader::new(messages)) {
        match message? {
            Message::CompilerArtifact(artifact) => made.push(artifact),
            Message::CompilerMessage(message) => on_message(message),
            _ => {}
        }
    }
    let status = child.wait().context("cargo")?;
    let said = errors.join().unwrap_or_default();
    Ok(if status.success() { Ok(made) } else { Err(said) })
}

/// The executable of the target `name` among what cargo has made.
pub fn executable(artifacts: &[Artifact], name: &str) -> Result<PathBuf> {
    let named = artifacts.iter().filter(|artifact| artifact.target.name == name);
    let found = named.filter_map(|artifact| artifact.executable.clone()).next_back();
    found.map(Into::into).with_context(|| format!("cargo built no executable {name}"))
}
