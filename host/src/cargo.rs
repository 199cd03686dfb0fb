//! Running cargo, for the workshop's own workspace.

use std::{
    env,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
};

use anyhow::{Context, Result, ensure};
use cargo_metadata::{Artifact, Message, Metadata, MetadataCommand};

/// A `cargo` command at the workshop's root, without what an outer `cargo run` has set for the
/// package that it runs.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    command.current_dir(root);
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
    command
}

/// The variables of [`build_for_guests`].
static FOR_GUESTS: OnceLock<Vec<(String, String)>> = OnceLock::new();

/// Lets [`cargo_for_guests`] build with these variables, for another architecture than this machine's.
pub fn build_for_guests(variables: Vec<(String, String)>) {
    FOR_GUESTS.get_or_init(|| variables);
}

/// [`cargo`], for programs that run in a guest.
pub fn cargo_for_guests(root: &Path) -> Command {
    let mut command = cargo(root);
    command.envs(FOR_GUESTS.get().into_iter().flatten().map(|(name, value)| (name, value)));
    command
}

/// Whether `cargo run` set this variable to describe the package that it runs.
pub fn is_cargos(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with("CARGO_PKG_")
        || name.starts_with("CARGO_MANIFEST_")
        || name.starts_with("CARGO_BIN_")
        || ["CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE", "OUT_DIR"].contains(&&*name)
}

/// What cargo knows of the workspace, without its dependencies. Needs no network.
pub fn metadata(root: &Path) -> Result<Metadata> {
    let output = cargo(root)
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
pub fn artifacts(root: &Path, args: &[impl AsRef<OsStr>], quiet: bool) -> Result<Vec<Artifact>> {
    artifacts_by(cargo(root), args, quiet)
}

/// [`artifacts`], for programs that run in a guest.
pub fn artifacts_for_guests(
    root: &Path,
    args: &[impl AsRef<OsStr>],
    quiet: bool,
) -> Result<Vec<Artifact>> {
    artifacts_by(cargo_for_guests(root), args, quiet)
}

fn artifacts_by(
    mut command: Command,
    args: &[impl AsRef<OsStr>],
    quiet: bool,
) -> Result<Vec<Artifact>> {
    command.args(args).args(quiet.then_some("--quiet"));
    command.arg("--message-format=json-render-diagnostics");
    command.stdin(Stdio::null()).stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    let words: Vec<_> = args.iter().map(|arg| arg.as_ref().to_string_lossy()).collect();
    ensure!(output.status.success(), "cargo {} failed, see above", words.join(" "));
    Ok(artifacts_of(&output.stdout))
}

fn artifacts_of(messages: &[u8]) -> Vec<Artifact> {
    let messages = Message::parse_stream(messages).filter_map(|message| match message {
        Ok(Message::CompilerArtifact(artifact)) => Some(artifact),
        _ => None,
    });
    messages.collect()
}

/// The executable of the target `name` among what cargo has made.
pub fn executable(artifacts: &[Artifact], name: &str) -> Result<PathBuf> {
    let named = artifacts.iter().filter(|artifact| artifact.target.name == name);
    let found = named.filter_map(|artifact| artifact.executable.clone()).next_back();
    found.map(Into::into).with_context(|| format!("cargo built no executable {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_are_found_among_the_messages() {
        let artifact = |name: &str, kind: &str, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","package_id":"p","manifest_path":"/w/Cargo.toml",
                "target":{{"name":"{name}","kind":["{kind}"],"crate_types":["{kind}"],
                "src_path":"/w/a.rs","edition":"2024","doctest":false,"test":true}},
                "profile":{{"opt_level":"0","debuginfo":0,"debug_assertions":true,
                "overflow_checks":true,"test":false}},"features":[],"filenames":[],
                "executable":{executable},"fresh":true}}"#
            )
            .replace('\n', "")
        };
        let messages = [
            artifact("common", "lib", "null"),
            artifact("stage06", "bin", r#""/t/debug/stage06""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let artifacts = artifacts_of(messages.join("\n").as_bytes());
        assert_eq!(executable(&artifacts, "stage06").unwrap(), Path::new("/t/debug/stage06"));
        assert!(artifacts.len() == 2 && executable(&artifacts, "common").is_err());
    }
}
