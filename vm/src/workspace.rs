//! The Cargo workspace: where it is, what it holds, building a program of it.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// The directory that holds the root Cargo.toml.
///
/// `cargo run` names the package's directory; a binary started by hand looks upwards from
/// where it stands, and at last where it was built.
pub fn root() -> Result<PathBuf> {
    let is_root = |dir: &Path| dir.join("vm/kernels.toml").is_file();
    let by_cargo = std::env::var_os("CARGO_MANIFEST_DIR")
        .and_then(|dir| Path::new(&dir).parent().map(Path::to_owned));
    let cwd = std::env::current_dir().unwrap_or_default();
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    by_cargo
        .iter()
        .map(PathBuf::as_path)
        .chain(cwd.ancestors())
        .chain(built)
        .find(|dir| is_root(dir))
        .map(|dir| dir.canonicalize().unwrap_or(dir.to_owned()))
        .context(
            "this is not inside the workshop's workspace: no vm/kernels.toml above this directory",
        )
}

/// A `cargo` command at the workspace root, without what the outer `cargo run` has set for
/// this package.
pub fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.current_dir(root);
    for (name, _) in std::env::vars_os() {
        if is_cargos(&name) {
            command.env_remove(name);
        }
    }
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

/// `--quiet` where nobody watches: a first build takes minutes and should be seen to work.
pub fn quiet() -> Option<&'static str> {
    (!std::io::stderr().is_terminal()).then_some("--quiet")
}

/// What `cargo metadata` tells, as far as we read it.
#[derive(Deserialize)]
pub struct Metadata {
    /// The workspace's packages.
    pub packages: Vec<Package>,
}

/// A package of the workspace.
#[derive(Deserialize)]
pub struct Package {
    /// Its name, as `cargo run -p` wants it.
    pub name: String,
    /// What it builds.
    pub targets: Vec<Target>,
}

/// A target of a package.
#[derive(Deserialize)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// `bin`, `lib`, `test` and so on.
    pub kind: Vec<String>,
}

impl Metadata {
    /// The programs of the workspace that are meant to run in the guest.
    pub fn programs(self) -> Vec<String> {
        let is_bin = |target: &Target| target.kind.iter().any(|kind| kind == "bin");
        let packages = self.packages.into_iter().filter(|p| p.targets.iter().any(is_bin));
        packages.map(|p| p.name).filter(|name| name != "vm").collect()
    }
}

/// Asks cargo what the workspace holds. Needs no network.
pub fn metadata(root: &Path) -> Result<Metadata> {
    let output = cargo(root)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo cannot read the workspace, see above");
    serde_json::from_slice(&output.stdout).context("cargo metadata: unexpected output")
}

/// Builds every program of the workspace.
pub fn build_all(root: &Path) -> Result<()> {
    let built = cargo(root).args(["build", "--workspace"]).args(quiet()).status();
    let built = built.context("cannot start cargo")?;
    ensure!(built.success(), "cargo could not build the programs of the workspace, see above");
    Ok(())
}

/// One line of `cargo --message-format=json`, as far as we read it.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

/// Runs a cargo command that builds and returns the executable of the target `name`.
/// `args` begins with cargo's subcommand.
pub fn build(root: &Path, args: &[&str], name: &str) -> Result<PathBuf> {
    let output = cargo(root)
        .args(args)
        .args(quiet())
        .arg("--message-format=json-render-diagnostics")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo could not build {name}, see above");
    find_executable(&output.stdout, name)
        .with_context(|| format!("cargo built {name} but named no executable of that name"))
}

fn find_executable(messages: &[u8], name: &str) -> Option<PathBuf> {
    messages
        .split(|&b| b == b'\n')
        .filter_map(|line| serde_json::from_slice::<Message>(line).ok())
        .filter(|m| m.reason == "compiler-artifact")
        .filter(|m| m.target.as_ref().is_some_and(|t| t.name == name))
        .filter_map(|m| m.executable)
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_executable_is_found_among_the_messages() {
        let messages = br#"{"reason":"compiler-artifact","target":{"name":"common","kind":["lib"]},"executable":null}
{"reason":"compiler-artifact","target":{"name":"stage06","kind":["bin"]},"executable":"/t/debug/stage06"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(find_executable(messages, "stage06"), Some("/t/debug/stage06".into()));
        assert_eq!(find_executable(messages, "common"), None);
    }

    #[test]
    fn programs_are_the_packages_with_a_binary() {
        let json = r#"{"packages":[
            {"name":"stage06","targets":[{"name":"stage06","kind":["bin"]}]},
            {"name":"common","targets":[{"name":"common","kind":["lib"]}]},
            {"name":"vm","targets":[{"name":"vm","kind":["bin"]}]}]}"#;
        let metadata: Metadata = serde_json::from_str(json).unwrap();
        assert_eq!(metadata.programs(), ["stage06"]);
    }
}
