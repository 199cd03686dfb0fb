//! The workspace of the learner's attempts, `mine/`.
//!
//! Attempts are no members of the workshop's own workspace, so that one that does not compile, or
//! whose Cargo.toml is damaged, breaks no command of the workshop, and none changes a file that git
//! tracks. Theirs has the same versions and profiles, because its Cargo.toml and its Cargo.lock are
//! made from those of the workshop; so it shares what is built in the target directory, and needs
//! no network where the workshop needs none.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use cargo_metadata::{CompilerMessage, MetadataCommand, Package, Target};

use crate::{
    cargo::{Cargo, built},
    write,
};

/// The directory of the learner's attempts, relative to the workspace.
pub const MINE: &str = "mine";

/// The way from there to the workshop.
const UP: &str = "../";

/// How the Cargo.toml of the attempts begins.
const WRITTEN: &str = "# Written by `cargo lesson` from the Cargo.toml of the workshop, again at each call: your\n\
     # own dependencies belong in the Cargo.toml of the attempt.\n";

/// A package of the learner's.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    /// Its directory below `mine/`.
    pub directory: String,
    /// The package's name; where its Cargo.toml is damaged, the one that it had.
    pub package: String,
}

/// The attempts, as a workspace.
#[derive(Debug)]
pub struct Prepared {
    cargo: Cargo,
    target: PathBuf,
    /// The directories of those that are one program and nothing more, by package.
    programs: BTreeMap<String, String>,
    /// Why only one attempt is in there: what cargo says of all of them together.
    pub fallback_reason: Option<String>,
}

fn dir(cargo: &Cargo) -> PathBuf {
    cargo.workspace.join(MINE)
}

/// All attempts, by directory. Needs no cargo: one with a damaged Cargo.toml is among them.
pub fn attempts(cargo: &Cargo) -> Vec<Attempt> {
    let entries = fs::read_dir(dir(cargo)).into_iter().flatten().flatten();
    let mut attempts: Vec<Attempt> = entries
        .filter_map(|entry| {
            let directory = entry.file_name().into_string().ok()?;
            let text = fs::read(entry.path().join("Cargo.toml")).ok()?;
            let manifest = toml::from_str::<toml::Table>(&String::from_utf8_lossy(&text)).ok();
            let name = manifest.as_ref().and_then(|it| it.get("package")?.get("name")?.as_str());
            let package = name.map_or_else(|| format!("{MINE}-{directory}"), str::to_owned);
            Some(Attempt { directory, package })
        })
        .collect();
    attempts.sort_by(|a, b| a.directory.cmp(&b.directory));
    attempts
}

/// Makes `mine/` a workspace, or brings it in line with the workshop's: its Cargo.toml, its
/// Cargo.lock, and cargo's configuration for who works in there. Where cargo cannot read one of the
/// attempts, only the package `wanted` is a member.
pub fn prepare(cargo: &Cargo, wanted: &str) -> Result<Prepared> {
    let prepare = || -> Result<Prepared> {
        fs::create_dir_all(dir(cargo).join(".cargo"))?;
        // That of the workshop: also where the user has configured another one.
        let target = PathBuf::from(cargo.metadata()?.target_directory);
        write(&dir(cargo).join(".cargo/config.toml"), &config(cargo, &target)?)?;
        copy_lock(cargo)?;
        let attempts = attempts(cargo);
        let (mut programs, mut fallback_reason) = (BTreeMap::new(), None);
        match read(cargo, &attempts)? {
            Ok(read) => programs = read,
            Err(reason) => {
                fallback_reason = Some(reason);
                // Where it is the one that cannot be read, whoever builds it learns that from cargo.
                let it = attempts.iter().find(|attempt| attempt.package == wanted);
                if let Ok(read) = read(cargo, it.map_or(&[], std::slice::from_ref))? {
                    programs = read;
                }
            }
        }
        Ok(Prepared { cargo: cargo.clone(), target, programs, fallback_reason })
    };
    prepare().with_context(|| format!("cannot make {MINE}/ a workspace of its own"))
}

/// Writes a Cargo.toml with these members. Returns those that are one program and nothing more, or what cargo says
/// where it cannot read that workspace.
fn read(cargo: &Cargo, members: &[Attempt]) -> Result<Result<BTreeMap<String, String>, String>> {
    let members: Vec<_> = members.iter().map(|member| member.directory.clone()).collect();
    let file = cargo.workspace.join("Cargo.toml");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let text = manifest(&text, UP, &members);
    let text = text.with_context(|| file.display().to_string())?;
    write(&dir(cargo).join("Cargo.toml"), &format!("{WRITTEN}{text}"))?;
    let mut command = command(cargo, "metadata");
    command.args(["--no-deps", "--offline", "--format-version=1"]);
    let output = command.output().context("cannot start cargo")?;
    if !output.status.success() {
        return Ok(Err(String::from_utf8_lossy(&output.stderr).trim_end().to_owned()));
    }
    let json = std::str::from_utf8(&output.stdout).context("cargo metadata: not UTF-8")?;
    let metadata = MetadataCommand::parse(json).context("cargo metadata: unexpected output")?;
    let is_program = |package: &Package| {
        let mut targets = package.targets.iter().filter(|target| !target.is_custom_build());
        targets.next().is_some_and(Target::is_bin) && targets.next().is_none()
    };
    let programs = metadata.packages.into_iter().filter(is_program).filter_map(|package| {
        let directory = package.manifest_path.parent()?.file_name()?.to_owned();
        Some((package.name.to_string(), directory))
    });
    Ok(Ok(programs.collect()))
}

/// A cargo command for the workspace of attempts. It runs in the workspace, where cargo finds the
/// workshop's configuration.
fn command(cargo: &Cargo, subcommand: &str) -> Command {
    let mut command = cargo.command();
    command.arg(subcommand).arg("--manifest-path").arg(dir(cargo).join("Cargo.toml"));
    command
}

/// What cargo needs to know where it is started in `mine/`, as an editor does it.
fn config(cargo: &Cargo, target: &Path) -> Result<String> {
    let target = match target.strip_prefix(&cargo.workspace) {
        Ok(below) => Path::new(UP).join(below),
        Err(_) => target.to_owned(),
    };
    let target = target.to_str().context("the target directory's name is not UTF-8")?;
    let build = toml::Table::from_iter([("target-dir".to_owned(), target.into())]);
    let mut config = toml::Table::from_iter([("build".to_owned(), build.into())]);
    let workshop = cargo.workspace.join("Cargo.toml");
    // Cargo splits an alias at blanks.
    if let Some(file) = workshop.to_str().filter(|file| !file.contains(char::is_whitespace)) {
        let alias = [("lesson", "--quiet "), ("vm", "")].map(|(name, quiet)| {
            let run = format!("run {quiet}--manifest-path {file} --package {name} --");
            (name.to_owned(), run.into())
        });
        config.insert("alias".into(), toml::Table::from_iter(alias).into());
    }
    let text = toml::to_string(&config)?;
    Ok(format!("# Written by `cargo lesson`: here, too, `cargo vm` is the workshop's.\n{text}"))
}

/// Lets the attempts begin with the workshop's Cargo.lock, and begin again where that has changed.
/// Cargo then removes what the attempts do not need, and adds what is theirs.
fn copy_lock(cargo: &Cargo) -> Result<()> {
    let file = cargo.workspace.join("Cargo.lock");
    let Ok(theirs) = fs::read_to_string(file) else { return Ok(()) };
    let began_with = dir(cargo).join(".cargo/Cargo.lock");
    let lock = dir(cargo).join("Cargo.lock");
    if !lock.exists() || fs::read_to_string(&began_with).ok().as_ref() != Some(&theirs) {
        write(&lock, &theirs)?;
        write(&began_with, &theirs)?;
    }
    Ok(())
}

impl Prepared {
    /// Builds an attempt: its program, or what cargo and the compiler said. `shown`: that goes to stderr as it
    /// comes.
    pub fn build(&self, package: &str, shown: bool) -> Result<Result<PathBuf, String>> {
        // Rustc sees an attempt from `mine/`: a panic is to name its file from the workshop's root, where the
        // learner's terminal is. Only one program can be given rustc's own options.
        let directory = self.programs.get(package);
        let mut command = command(&self.cargo, if directory.is_some() { "rustc" } else { "build" });
        command.arg("--target-dir").arg(&self.target).args(["--package", package]);
        let ansi = shown && std::io::stderr().is_terminal();
        let format = if ansi { "json-diagnostic-rendered-ansi" } else { "json" };
        command.arg(format!("--message-format={format}"));
        command.args(self.cargo.quiet.then_some("--quiet"));
        if let Some(directory) = directory {
            command.arg("--");
            let mut remap = |from: &OsStr, to: &OsStr| {
                let pair = [from, to].join(OsStr::new("="));
                command.arg("--remap-path-prefix").arg(pair);
            };
            remap(directory.as_ref(), format!("{MINE}/{directory}").as_ref());
            // The directory that a backtrace puts before it.
            remap(dir(&self.cargo).as_ref(), self.cargo.workspace.as_ref());
        }
        command.stderr(if shown { Stdio::inherit() } else { Stdio::piped() });
        let mut said = String::new();
        let built = built(&mut command, |message| match self.rendered(&message) {
            // Where nobody reads it any more, there is the exit code.
            text if shown => drop(std::io::stderr().write_all(text.as_bytes())),
            text => said += &text,
        })?;
        let made = match built {
            Ok(made) => made,
            Err(errors) => return Ok(Err(said + &errors)),
        };
        let program = made.into_iter().filter_map(|artifact| artifact.executable).next_back();
        Ok(Ok(program.with_context(|| format!("{package} has no program"))?.into()))
    }

    /// What the compiler said. It names files from `mine/`: here they are named from the
    /// workshop's root, where the learner's terminal is.
    fn rendered(&self, message: &CompilerMessage) -> String {
        let text = message.message.rendered.clone().unwrap_or_default();
        let mut files: Vec<&str> = Vec::new();
        let children = message.message.children.iter().flat_map(|child| &child.spans);
        for span in message.message.spans.iter().chain(children) {
            let is_ours = dir(&self.cargo).join(&span.file_name).is_file();
            if is_ours && Path::new(&span.file_name).is_relative() {
                files.push(&span.file_name);
            }
        }
        files.sort_unstable();
        files.dedup();
        // `04/src/main.rs:3` is `mine/04/src/main.rs:3`.
        let from_root =
            |text: String, file| text.replace(&format!("{file}:"), &format!("{MINE}/{file}:"));
        files.into_iter().fold(text, from_root)
    }
}

/// The Cargo.toml of a workspace like the workshop's, whose text this is: with other members, and with
/// `prefix` before its relative paths.
pub fn manifest(workshop: &str, prefix: &str, members: &[String]) -> Result<String> {
    let mut manifest: toml::Value = toml::from_str(workshop)?;
    let workspace = manifest.get_mut("workspace").and_then(toml::Value::as_table_mut);
    workspace.context("no [workspace]")?.insert("members".into(), members.to_vec().into());
    move_paths(&mut manifest, prefix);
    Ok(toml::to_string(&manifest)?)
}

/// Puts `prefix` before each relative `path`.
fn move_paths(value: &mut toml::Value, prefix: &str) {
    let toml::Value::Table(table) = value else { return };
    for (name, value) in table.iter_mut() {
        match value {
            toml::Value::String(path) if name == "path" && Path::new(path).is_relative() => {
                path.insert_str(0, prefix);
            }
            _ => move_paths(value, prefix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = r#"
[workspace]
resolver = "3"
members = []

[workspace.package]
version = "1.2.3"
edition = "2024"

[workspace.dependencies]
anyhow = "1"
common = { path = "common" }

[profile.dev]
opt-level = 1
"#;

    /// A workshop without anything, and attempts with these Cargo.tomls.
    fn workshop(attempts: &[(&str, &str)]) -> (tempfile::TempDir, Cargo) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("Cargo.toml"), ROOT).unwrap();
        for (name, manifest) in attempts {
            let src = dir.path().join("mine").join(name).join("src");
            fs::create_dir_all(&src).unwrap();
            fs::write(src.join("main.rs"), "fn main() {}\n").unwrap();
            fs::write(src.with_file_name("Cargo.toml"), manifest).unwrap();
        }
        let cargo = Cargo::new(dir.path(), true);
        (dir, cargo)
    }

    fn package(name: &str) -> String {
        format!(
            "[package]\nname = \"{name}\"\nversion.workspace = true\nedition.workspace = true\n"
        )
    }

    #[test]
    fn a_damaged_attempt_does_not_stop_the_others() {
        let (four, same) = (package("mine-04"), package("mine-04"));
        let no_such_key =
            package("mine-06") + "licence.workspace = true\ndescription.workspace = true\n";
        let (dir, cargo) = workshop(&[
            ("03", "[package\n"),
            ("04", &four),
            ("05", &same),
            ("06", &no_such_key),
            ("07", &package("mine-07")),
        ]);
        fs::create_dir(dir.path().join("mine/notes")).unwrap();
        let packages: Vec<String> = attempts(&cargo).into_iter().map(|a| a.package).collect();
        assert_eq!(packages, ["mine-03", "mine-04", "mine-04", "mine-06", "mine-07"]);
        let prepared = prepare(&cargo, "mine-07").unwrap();
        let why = prepared.fallback_reason.as_deref().unwrap();
        assert!(why.starts_with("error: ") && why.contains("mine/03"), "{why}");
        let file = prepared.build("mine-07", false).unwrap().unwrap();
        assert!(file.ends_with("debug/mine-07") && file.is_file(), "{}", file.display());
        // Of the damaged one itself, cargo says what is wrong.
        let built = prepare(&cargo, "mine-03").unwrap().build("mine-03", false).unwrap();
        let said = built.unwrap_err();
        assert!(said.contains("mine/03/Cargo.toml"), "{said}");
    }

    #[test]
    fn an_error_names_the_file_from_the_workshops_root() {
        let (dir, cargo) = workshop(&[("04", &package("mine-04"))]);
        fs::write(dir.path().join("mine/04/src/main.rs"), "fn main() { no_such(); }\n").unwrap();
        let said =
            prepare(&cargo, "mine-04").unwrap().build("mine-04", false).unwrap().unwrap_err();
        assert!(said.contains("--> mine/04/src/main.rs:1:13"), "{said}");
    }

    #[test]
    fn a_panic_names_the_file_from_the_workshops_root() {
        let bin = |name, file| format!("[[bin]]\nname = \"{name}\"\npath = \"src/{file}.rs\"\n");
        let two = package("mine-05") + &bin("mine-05", "main") + &bin("more", "main");
        let (dir, cargo) = workshop(&[("04", &package("mine-04")), ("05", &two)]);
        let main = "fn main() { panic!(\"at {}\", file!()) }\n";
        for (name, is_named) in [("04", true), ("05", false)] {
            fs::write(dir.path().join("mine").join(name).join("src/main.rs"), main).unwrap();
            let package = format!("mine-{name}");
            let built = prepare(&cargo, &package).unwrap().build(&package, false).unwrap();
            let mut program = Command::new(built.unwrap());
            let said = program.env("RUST_BACKTRACE", "1").output().unwrap().stderr;
            let said = String::from_utf8_lossy(&said);
            let place = format!("panicked at mine/{name}/src/main.rs:1:13");
            assert_eq!(said.contains(&place), is_named, "{said}");
            assert!(!said.contains("mine/mine"), "{said}");
        }
    }

    #[test]
    fn another_lock_of_the_workshops_is_taken_over_once() {
        let (dir, cargo) = workshop(&[]);
        let (theirs, ours) = (dir.path().join("Cargo.lock"), dir.path().join("mine/Cargo.lock"));
        for text in ["version = 4\n", "version = 4\n# pulled\n"] {
            fs::write(&theirs, text).unwrap();
            prepare(&cargo, "none").unwrap();
            assert_eq!(fs::read_to_string(&ours).unwrap(), text);
            fs::write(&ours, "version = 4\n# cargo's\n").unwrap();
            prepare(&cargo, "none").unwrap();
            assert_eq!(fs::read_to_string(&ours).unwrap(), "version = 4\n# cargo's\n");
        }
    }
}
