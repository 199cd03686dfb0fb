//! The programs of the workshop, and the learner's attempts at exercises.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use cargo_metadata::Metadata;
use serde::Deserialize;
use workshop::attempts;
use workshop::cargo::Cargo;
use workshop::say;

use crate::cargo::{announced, build};

/// A program of the workshop: a `bin` target of a package with `[package.metadata.workshop]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkshopProgram {
    /// The target's name, which is also the name that `cargo vm run` takes.
    pub name: String,
    pub package: String,
    /// Whether the package's name stands for it, too: `default-run` in Cargo.toml.
    pub is_default: bool,
    /// Whether it reads keys on a terminal: `reads_keys`.
    pub reads_keys: bool,
    /// How `cargo vm bench` measures it.
    pub bench: BenchForms,
    /// Whether it is the learner's attempt at an exercise, in the workspace `mine/`.
    pub is_attempt: bool,
}

impl WorkshopProgram {
    /// Whether `cargo vm run NAME` means this program.
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.is_default && self.package == name
    }

    /// Builds it. Returns the executable.
    pub fn build(&self, cargo: &Cargo) -> Result<PathBuf> {
        if !self.is_attempt {
            let built = ["build", "--package", &self.package, "--bin", &self.name];
            return build(cargo, &built, &self.name);
        }
        let prepared = attempts::prepare(cargo, &self.package)?;
        if let Some(why) = &prepared.fallback_reason {
            say!("cargo cannot read all attempts, so only {} is built:\n{why}", self.package);
        }
        let what = format!("building: cargo build --package {}", self.package);
        let built = announced(cargo, what, || prepared.build(&self.package, true))?;
        built.map_err(|_| anyhow!("cargo build --package {} failed, see above", self.package))
    }
}

/// `bench` in `[package.metadata.workshop]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchForms {
    /// Measure with reads from the page cache instead of direct ones.
    pub cached: bool,
    /// The arguments, a form each. Default: none at all.
    pub forms: Vec<String>,
    /// At most so many reads a run: the program keeps all that it sees.
    pub most_reads: Option<u32>,
}

impl Default for BenchForms {
    fn default() -> BenchForms {
        BenchForms { cached: false, forms: vec![String::new()], most_reads: None }
    }
}

/// The programs of the workshop, sorted by name. Needs no network.
pub fn programs(cargo: &Cargo) -> Result<Vec<WorkshopProgram>> {
    programs_of(&cargo.metadata()?)
}

/// The learner's attempts at exercises. They are no part of the workspace.
pub fn attempts(cargo: &Cargo) -> Vec<WorkshopProgram> {
    let attempts = attempts::attempts(cargo).into_iter().map(|attempt| WorkshopProgram {
        name: attempt.package.clone(),
        package: attempt.package,
        is_default: false,
        reads_keys: false,
        bench: BenchForms::default(),
        is_attempt: true,
    });
    attempts.collect()
}

/// The programs whose names stand in a command as whole words, each once: in its arguments
/// (`bash -c 'stage05 | head'`), or in the file of the script that it runs.
pub fn named_in<'p>(
    programs: &'p [WorkshopProgram],
    args: &[OsString],
) -> Vec<&'p WorkshopProgram> {
    let mut named: Vec<&WorkshopProgram> = Vec::new();
    for text in texts(args) {
        let in_a_name = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        for word in text.split(|c| !in_a_name(c)) {
            let program = programs.iter().find(|program| program.is_called(word));
            named.extend(program.filter(|program| !named.contains(program)));
        }
    }
    named
}

/// What a command consists of: its words, and the text of the script that it runs.
pub fn texts(args: &[OsString]) -> Vec<String> {
    let words = args.iter().map(|arg| arg.to_string_lossy().into_owned());
    words.chain(script(args)).collect()
}

/// The script that a command runs: a shell's first argument, or the command itself.
fn script(args: &[OsString]) -> Option<String> {
    let mut words =
        args.iter().map(Path::new).filter(|arg| !arg.to_string_lossy().starts_with('-'));
    let command = words.next()?;
    let is_shell = ["sh", "bash", "dash"].iter().any(|shell| command.ends_with(shell));
    let file = if is_shell { words.next()? } else { command };
    let text = file.is_file().then(|| fs::read_to_string(file).ok())??;
    (is_shell || text.starts_with("#!")).then_some(text)
}

fn programs_of(metadata: &Metadata) -> Result<Vec<WorkshopProgram>> {
    let mut programs = Vec::new();
    for package in metadata.workspace_packages() {
        let Some(workshop) = package.metadata.get("workshop") else { continue };
        let reads_keys = workshop.get("reads_keys").and_then(serde_json::Value::as_bool);
        let bench = workshop.get("bench").cloned().map(serde_json::from_value::<BenchForms>);
        let bench = bench.transpose();
        let bench = bench.with_context(|| format!("{}: `bench`", package.manifest_path))?;
        for bin in package.targets.iter().filter(|target| target.is_bin()) {
            programs.push(WorkshopProgram {
                name: bin.name.clone(),
                package: package.name.clone(),
                is_default: package.default_run.as_ref() == Some(&bin.name),
                reads_keys: reads_keys.unwrap_or(false),
                bench: bench.clone().unwrap_or_default(),
                is_attempt: false,
            });
        }
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_a_commands_arguments() {
        let program = |package: &str, name: &str, is_default, is_attempt| WorkshopProgram {
            name: name.to_owned(),
            package: package.to_owned(),
            is_default,
            reads_keys: false,
            bench: BenchForms::default(),
            is_attempt,
        };
        let programs = [
            program("by_hand", "syscall_profiler", true, false),
            program("stage04", "stage04", false, false),
            program("stage05", "stage05", false, false),
            program("mine-04", "mine-04", false, true),
        ];
        let names = |args: &[&str]| -> Vec<&str> {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            named_in(&programs, &args).into_iter().map(|program| &*program.name).collect()
        };
        let script =
            "\n  stage05 --quiet 2> /run/log & until grep -qs tracing /run/log; do sleep 1; done\n";
        assert_eq!(names(&["-c", script]), ["stage05"]);
        assert_eq!(names(&["-c", "(stage04&stage05;stage04)|tail"]), ["stage04", "stage05"]);
        assert_eq!(names(&["-c", "n=$(mine-04 --quiet)"]), ["mine-04"]);
        assert_eq!(names(&["-p", "stage05", "mine-04"]), ["stage05", "mine-04"]);
        assert_eq!(names(&["target/debug/stage05", "-v"]), ["stage05"]);
        assert_eq!(names(&["-c", "by_hand"]), ["syscall_profiler"]);
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "#!/bin/sh\nstage04 | head").unwrap();
        assert_eq!(names(&["/bin/bash", "-e", path, "stage05"]), ["stage05", "stage04"]);
        assert_eq!(names(&[path]), ["stage04"]);
        assert_eq!(names(&["cat", path]), <[&str; 0]>::default());
        for other in
            ["ls stage05_sector", "cat /tmp/stage05.log", "mine-04b", "xstage05", "-stage05"]
        {
            assert_eq!(names(&[other]), <[&str; 0]>::default(), "{other}");
        }
    }

    #[test]
    fn an_attempt_is_a_program_though_its_manifest_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        let cargo = Cargo::new(dir.path(), true);
        assert_eq!(attempts(&cargo), []);
        for (name, text) in [("04", "[package]\nname = \"mine-4\"\n"), ("05", "[package\n")] {
            fs::create_dir_all(dir.path().join("mine").join(name)).unwrap();
            fs::write(dir.path().join("mine").join(name).join("Cargo.toml"), text).unwrap();
        }
        let attempts = attempts(&cargo);
        let names: Vec<_> = attempts.iter().map(|it| it.is_attempt.then_some(&*it.name)).collect();
        assert_eq!(names, [Some("mine-4"), Some("mine-05")]);
    }

    #[test]
    fn every_stage_is_a_program() {
        let workspace = workshop::workspace();
        let programs = programs(&Cargo::new(&workspace, true)).unwrap();
        let packages: Vec<&str> = programs.iter().map(|p| p.package.as_str()).collect();
        let (stages, tools) =
            (workshop::stages(&workspace).unwrap(), workshop::tools(&workspace).unwrap());
        for directory in stages.iter().chain(&tools) {
            let package = workshop::package_in(directory).unwrap();
            assert!(packages.contains(&package), "{package}: {programs:?}");
        }
        assert!(!packages.contains(&"vm"));
        let default = programs.iter().find(|p| p.package == "by_hand" && p.is_default).unwrap();
        assert_eq!(default.name, "syscall_profiler");
    }
}
