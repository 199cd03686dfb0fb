//! Building an attempt, and having the guest tests judge it.

use std::{
    collections::BTreeMap,
    env, fs, mem,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, bail};
use cargo_metadata::Message;
use room::{Built, Room};
use serde::Deserialize;

use crate::{explain, guest::Guest};

/// What the judges consist of: programs that were built.
pub struct Judges {
    root: PathBuf,
    /// The directory with the programs.
    pub target: PathBuf,
    /// The guest tests.
    tests: PathBuf,
}

impl Judges {
    /// Builds the guest tests, the launcher and the stages that some tests run beside the attempt.
    pub fn build(root: &Path) -> Result<Judges> {
        let own = env::current_exe().context("cannot find this program")?;
        let mut launcher = vec!["build".to_owned(), "--package=vm".to_owned()];
        let mut stages = vec!["build".to_owned()];
        for entry in fs::read_dir(root)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.starts_with("stage") {
                let stage = name.split('_').next().unwrap_or(&name);
                stages.push(format!("--package={stage}"));
            }
        }
        let mut tests: Vec<String> =
            ["test", "--package=guest_tests", "--test=guest", "--no-run"].map(str::to_owned).into();
        tests.push("--message-format=json-render-diagnostics".to_owned());
        let mut found = None;
        for (what, arguments) in [
            ("the launcher", &mut launcher),
            ("the stages", &mut stages),
            ("the judges", &mut tests),
        ] {
            // Quiet, or every check begins with three lines about nothing to do.
            let quiet = own.with_file_name("vm").exists();
            arguments.extend(quiet.then(|| "--quiet".to_owned()));
            let output = room::cargo(root)
                .args(arguments)
                .stdin(Stdio::null())
                .stderr(Stdio::inherit())
                .output()
                .context("cannot start cargo")?;
            if !output.status.success() {
                bail!("cargo could not build {what}, see above");
            }
            for message in Message::parse_stream(&output.stdout[..]) {
                if let Message::CompilerArtifact(artifact) = message?
                    && artifact.target.name == "guest"
                {
                    found = artifact.executable.map(PathBuf::from).or(found);
                }
            }
        }
        let tests = found.context("cargo built the judges, but named no executable")?;
        // deps/guest-0123 lies beside the programs.
        let target = tests.ancestors().nth(2).context("the judges have no directory")?.to_owned();
        Ok(Judges { root: root.to_owned(), target, tests })
    }

    /// Runs tests in the guest, in this order up to the first that fails, with `program` in the place
    /// of the program `judged_as`. Hands over each verdict as it comes.
    pub fn run(
        &self,
        guest: &Guest,
        judged_as: &str,
        program: &Path,
        tests: &[&str],
        mut on_verdict: impl FnMut(&str, &Verdict),
    ) -> Result<BTreeMap<String, Verdict>> {
        let text = |path: &Path| path.display().to_string();
        let variables = [
            ("VM_WORKSPACE", text(&self.root)),
            ("VM_TARGET_DIR", text(&self.target)),
            ("VM_JUDGES", tests.join(",")),
            ("VM_SUBJECT", format!("{judged_as}={}", program.display())),
        ];
        let mut verdicts = BTreeMap::new();
        let mut figures = Vec::new();
        guest.run(&[&text(&self.tests), "--format", "json"], &variables, |line| {
            if let Some(compared) = line.strip_prefix(COMPARED) {
                figures.push(compared.to_owned());
            } else if let Some((test, verdict)) = verdict(line) {
                let figures = mem::take(&mut figures);
                let verdict = match verdict {
                    Verdict::Good(_) => Verdict::Good(figures),
                    bad => bad,
                };
                on_verdict(&test, &verdict);
                verdicts.insert(test, verdict);
            }
        })?;
        if verdicts.is_empty() {
            bail!("the judges did not begin; see {}", guest.errors().display());
        }
        Ok(verdicts)
    }
}

/// What a judge says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As expected: what was compared with what.
    Good(Vec<String>),
    /// Not so: why.
    Bad(String),
    /// An earlier judge said no.
    NotRun,
}

/// A line of libtest-mimic's JSON.
#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    event: String,
    name: Option<String>,
    stdout: Option<String>,
}

/// What stands before the figures that a judge has compared.
const COMPARED: &str = "compared: ";

/// What the guest tests say of a test that comes after one that has failed.
const NOT_RUN: &str = "not run";

fn verdict(line: &str) -> Option<(String, Verdict)> {
    let event: Event = serde_json::from_str(line).ok()?;
    if event.kind != "test" {
        return None;
    }
    let verdict = match event.event.as_str() {
        "ok" => Verdict::Good(Vec::new()),
        "failed" => {
            let said = event.stdout.unwrap_or_default();
            let said = said.trim().trim_start_matches("Error: ");
            let said = said.strip_prefix('"').and_then(|s| s.strip_suffix('"')).unwrap_or(said);
            if said == NOT_RUN { Verdict::NotRun } else { Verdict::Bad(said.to_owned()) }
        }
        _ => return None,
    };
    Some((event.name?, verdict))
}

/// Builds an attempt; where it does not compile, the error is the compiler's message.
pub fn build_attempt(room: &Room, package: &str) -> Result<Result<PathBuf, String>> {
    let room = room.prepare(Some(package))?;
    for directory in &room.left_out {
        let directory = directory.display();
        eprintln!("lesson: {directory} is left out: cargo cannot read its Cargo.toml");
    }
    Ok(match room.build(package, true, false)? {
        Built::Program(file) => Ok(file),
        Built::Failed(said) => Err(explain::compiler(&said).to_owned()),
    })
}

/// Builds a package of the workshop.
pub fn build(root: &Path, target: &Path, package: &str) -> Result<PathBuf> {
    let output = room::cargo(root)
        .args(["build", "--quiet", "--package", package])
        .stdin(Stdio::null())
        .output()
        .context("cannot start cargo")?;
    if !output.status.success() {
        bail!("{}", explain::compiler(&String::from_utf8_lossy(&output.stderr)));
    }
    Ok(target.join(package))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_read() {
        let ok = r#"{ "type": "test", "name": "a", "event": "ok" }"#;
        assert_eq!(verdict(ok), Some(("a".into(), Verdict::Good(Vec::new()))));
        let bad = r#"{ "type": "test", "name": "b", "event": "failed", "stdout": "Error: \"0 lines,\n500\"\n" }"#;
        assert_eq!(verdict(bad), Some(("b".into(), Verdict::Bad("0 lines,\n500".into()))));
        let not = r#"{ "type": "test", "name": "c", "event": "failed", "stdout": "Error: \"not run\"\n" }"#;
        assert_eq!(verdict(not), Some(("c".into(), Verdict::NotRun)));
        assert_eq!(verdict(r#"{ "type": "test", "name": "a", "event": "started" }"#), None);
        assert_eq!(verdict("kernel 6.1.0-50-amd64"), None);
    }
}
