//! The wrong programs of `lesson/exercises/mutants.toml`: each is one of ours, or the answer to an exercise, with
//! an edit that breaks a promise. They are built in a copy of the workshop, as all that is edited for a
//! proof.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use walkdir::WalkDir;
use workshop::cargo::{Cargo, executable};

use crate::{
    exercise::Exercise,
    state::{BUILD, manifest},
};

/// What `lesson/exercises/mutants.toml` holds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutants {
    /// The experiments without an error.
    pub mutant: Vec<ExperimentJudge>,
    /// In the order of the file.
    pub wrong: Vec<Mutant>,
    /// Right answers in another style: what a task leaves free is free.
    #[serde(default)]
    pub right: Vec<RightAnswer>,
    /// An answer to each step of an exercise but the last one.
    #[serde(default)]
    pub step: Vec<StepAnswer>,
}

/// The answer to a step, which is none to the next one.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepAnswer {
    /// The id of the exercise.
    pub exercise: String,
    /// The number of the step, from 1.
    pub step: usize,
    /// What makes it out of the whole answer.
    pub edit: Vec<[String; 2]>,
}

/// A right answer that is not ours, which the judges of its exercise have to take.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RightAnswer {
    /// The id of the exercise.
    pub exercise: String,
    pub what: String,
    /// What makes it out of our answer.
    pub edit: Vec<[String; 2]>,
}

/// An experiment without an error, and the judge that notices it, or why none does.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentJudge {
    /// The directory of the stage or tool.
    pub stage: String,
    /// Stands in the README.
    pub edit: String,
    /// The guest test that turns red.
    pub judge: Option<String>,
    /// The only kernel on which it can.
    pub kernel: Option<String>,
    /// Why no test can notice it.
    pub unproven: Option<String>,
}

impl Mutants {
    /// Reads the file.
    pub fn read(workspace: &Path) -> Result<Mutants> {
        let text = fs::read_to_string(workspace.join("lesson/exercises/mutants.toml"))
            .context("mutants.toml")?;
        toml::from_str(&text).context("mutants.toml")
    }
}

/// A wrong program, and the guest test that must refuse it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutant {
    /// The id of the exercise that it looks like an answer to.
    pub exercise: Option<String>,
    /// Or the program of the workshop that it is made from.
    pub program: Option<String>,
    pub what: String,
    /// The guest test that refuses it; of an exercise, one of its judges.
    pub judge: String,
    /// The only kernel on which that test can tell.
    pub kernel: Option<String>,
    /// What makes it out of the right program.
    pub edit: Vec<[String; 2]>,
}

/// What makes another program out of one of ours.
pub enum Edit {
    /// Texts of its sources, and what stands there instead.
    Texts(Vec<[String; 2]>),
    /// Commands of a shell, in the root of the workspace.
    Commands(String),
}

impl Mutant {
    /// The program that it takes the place of, for messages.
    pub fn place(&self) -> String {
        match (&self.exercise, &self.program) {
            (Some(exercise), _) => format!("exercise {exercise}"),
            (None, program) => program.clone().unwrap_or_default(),
        }
    }
}

/// Makes each edit in the first of these groups of sources that has its text: in all places there. An edit
/// that changes nothing is an error.
fn replace(edits: &[[String; 2]], groups: &mut [Vec<Source>]) -> Result<()> {
    for [old, new] in edits {
        let has_it = |group: &&mut Vec<Source>| {
            old != new && group.iter().any(|source| source.text.contains(old.as_str()))
        };
        let group = groups.iter_mut().find(has_it);
        for source in group.with_context(|| format!("the sources have no {old:?}"))? {
            source.text = source.text.replace(old.as_str(), new);
        }
    }
    Ok(())
}

/// A program of the workshop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginalProgram {
    pub name: String,
    /// The package that builds it.
    pub package: String,
    /// The package's directory, relative to the workspace.
    pub directory: PathBuf,
}

impl OriginalProgram {
    /// What an attempt at an exercise begins with, where that is no program: in the copy, it is one.
    pub fn start(exercise: &Exercise) -> OriginalProgram {
        let (name, package) = (exercise.package(), exercise.package());
        OriginalProgram { name, package, directory: exercise.start.clone() }
    }
}

/// All programs of the workshop, and the answers that are none. Needs no network.
pub fn programs(cargo: &Cargo) -> Result<Vec<OriginalProgram>> {
    let workspace = &cargo.workspace;
    let mut programs = Vec::new();
    for package in cargo.metadata()?.workspace_packages() {
        let directory = package.manifest_path.parent().context("no directory")?.as_std_path();
        let directory = directory.strip_prefix(workspace)?.to_owned();
        if package.metadata.get("workshop").is_some() || directory.starts_with("lesson/exercises") {
            let bins = package.targets.iter().filter(|target| target.is_bin());
            programs.extend(bins.map(|bin| OriginalProgram {
                name: bin.name.clone(),
                package: package.name.clone(),
                directory: directory.clone(),
            }));
        }
    }
    Ok(programs)
}

/// The one that a wrong program is made from.
pub fn original(
    wrong: &Mutant,
    programs: &[OriginalProgram],
    exercises: &[Exercise],
) -> Result<OriginalProgram> {
    let found = match (&wrong.exercise, &wrong.program) {
        (Some(id), None) => exercises
            .iter()
            .find(|exercise| exercise.id == *id)
            .and_then(|exercise| answer(exercise, programs)),
        (None, Some(name)) => programs.iter().find(|program| program.name == *name),
        _ => None,
    };
    let missing = || format!("mutants.toml, {}: no such exercise or program", wrong.what);
    found.cloned().with_context(missing)
}

/// The answer to an exercise, whole.
pub fn answer<'p>(
    exercise: &Exercise,
    programs: &'p [OriginalProgram],
) -> Option<&'p OriginalProgram> {
    programs.iter().find(|program| program.directory == exercise.solution)
}

struct Source {
    /// Relative to the workspace.
    file: PathBuf,
    text: String,
}

/// The files below this directory.
fn sources(workspace: &Path, directory: &Path) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for entry in WalkDir::new(workspace.join(directory)) {
        let entry = entry?;
        if !entry.file_type().is_dir() {
            let file = entry.path().strip_prefix(workspace)?.to_owned();
            let text = fs::read_to_string(entry.path());
            let text = text.with_context(|| file.display().to_string())?;
            sources.push(Source { file, text });
        }
    }
    Ok(sources)
}

/// The sources that an edit may be about, as they are: the program's own, the headers, and what all
/// programs share.
fn editable(workspace: &Path, program: &OriginalProgram) -> Result<[Vec<Source>; 3]> {
    let own = sources(workspace, &program.directory.join("src"))?;
    let mut headers = sources(workspace, Path::new("common/bpf"))?;
    headers.extend(sources(workspace, Path::new("tools/bpf"))?);
    let mut shared = sources(workspace, Path::new("common/src"))?;
    for more in ["common/http/src", "common/screen/src"] {
        shared.extend(sources(workspace, Path::new(more))?);
    }
    Ok([own, headers, shared])
}

/// Where wrong programs are made, relative to the workspace.
const PLACE: &str = ".lesson/wrong";

/// The copy of the workshop, in a directory of [`PLACE`]: cargo knows a package by its path relative to
/// the workspace, and must not take this one for the original.
const COPY: &str = "copy";

/// A copy of the workshop, as a workspace of its own.
pub struct Workshop {
    /// Cargo, as it builds the original for guests.
    cargo: Cargo,
    /// The target directory of the workshop: what has been built there of other crates is used here.
    build: PathBuf,
}

impl Workshop {
    /// Copies what these programs are built from.
    pub fn copy(cargo: &Cargo, programs: &[&OriginalProgram]) -> Result<Workshop> {
        let workspace = &cargo.workspace;
        let place = workspace.join(PLACE);
        let mut members =
            ["common", "common/build", "common/http", "common/screen"].map(PathBuf::from).to_vec();
        members.extend(programs.iter().map(|program| program.directory.clone()));
        members.sort();
        members.dedup();
        for member in &members {
            write(&place, &sources(workspace, member)?)?;
        }
        let is_package =
            |it: &&&OriginalProgram| workspace.join(&it.directory).join("Cargo.toml").exists();
        for OriginalProgram { package, directory, .. } in
            programs.iter().filter(|it| !is_package(it))
        {
            let file = |name: &str, text| Source { file: directory.join(name), text };
            let id = package.trim_start_matches("mine-");
            let texts = [("build.rs", BUILD.to_owned()), ("Cargo.toml", manifest(id, "a start"))];
            write(&place, &texts.map(|(name, text)| file(name, text)))?;
        }
        let member = |directory: &PathBuf| Path::new(COPY).join(directory).display().to_string();
        let names: Vec<String> = members.iter().map(member).collect();
        let manifest = fs::read_to_string(workspace.join("Cargo.toml"))?;
        let manifest = workshop::attempts::manifest(&manifest, &format!("{COPY}/"), &names)?;
        fs::write(place.join("Cargo.toml"), manifest)?;
        fs::copy(workspace.join("Cargo.lock"), place.join("Cargo.lock"))?;
        let build = cargo.metadata()?.target_directory.into();
        Ok(Workshop { cargo: cargo.clone(), build })
    }

    /// Builds an edited program. Returns its file, which is called `name`, or what cargo and the compiler
    /// say where it does not compile.
    pub fn build(
        &self,
        program: &OriginalProgram,
        edit: &Edit,
        name: &str,
    ) -> Result<Result<PathBuf, String>> {
        let workspace = &self.cargo.workspace;
        let place = workspace.join(PLACE);
        let mut groups = editable(workspace, program)?;
        if let Edit::Texts(texts) = edit {
            replace(texts, &mut groups)?;
        }
        groups.iter().try_for_each(|group| write(&place, group))?;
        if let Edit::Commands(commands) = edit {
            let mut bash = Command::new("bash");
            bash.args(["-e", "-c", commands]).current_dir(place.join(COPY));
            let output = bash.output().context("cannot start bash")?;
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(output.status.success(), "{commands}: {said}");
        }
        let path = |name: &str| place.join(name).display().to_string();
        let (manifest, target) = (path("Cargo.toml"), path("target"));
        let config = format!("build.build-dir={:?}", self.build);
        let build = ["build", "--offline", "--manifest-path", &manifest, "--target-dir", &target];
        let it = ["--config", &config, "--package", &program.package, "--bin", &program.name];
        let built = match self.cargo.build(&[build, it].concat(), Stdio::piped())? {
            Ok(built) => built,
            Err(said) => return Ok(Err(said)),
        };
        // The next one of this program is built at the same place.
        let kept = place.join(name);
        fs::copy(executable(&built, &program.name)?, &kept)?;
        // That one's sources must not make this program say that it is older than they are.
        let later = SystemTime::now() + Duration::from_secs(24 * 60 * 60);
        fs::File::open(&kept)?.set_modified(later)?;
        Ok(Ok(kept))
    }
}

/// Writes the sources that differ from what is there.
fn write(place: &Path, sources: &[Source]) -> Result<()> {
    for source in sources {
        let file = place.join(COPY).join(&source.file);
        fs::create_dir_all(file.parent().context("no directory")?)?;
        workshop::write(&file, &source.text)?;
    }
    Ok(())
}

/// Removes what [`Workshop`] has made.
pub fn remove(workspace: &Path) {
    fs::remove_dir_all(workspace.join(PLACE)).ok();
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn every_wrong_program_differs_from_the_right_one() {
        let workspace = workshop::workspace();
        let (exercises, programs) =
            (Exercise::all(&workspace).unwrap(), programs(&Cargo::new(&workspace, true)).unwrap());
        let mut number: BTreeMap<String, usize> = BTreeMap::new();
        for wrong in Mutants::read(&workspace).unwrap().wrong {
            let program = original(&wrong, &programs, &exercises).unwrap();
            let mut sources = editable(&workspace, &program).unwrap();
            replace(&wrong.edit, &mut sources).expect(&wrong.what);
            *number.entry(wrong.place()).or_default() += 1;
        }
        for exercise in exercises {
            let number = number.get(&format!("exercise {}", exercise.id)).copied().unwrap_or(0);
            assert!(number >= 3, "exercise {}: {number} wrong answers", exercise.id);
        }
    }

    #[test]
    fn an_edit_is_made_where_its_text_is_found_first() {
        let make = |old: &str, new: &str| -> Result<Vec<String>> {
            let source = |text: &str| Source { file: "x".into(), text: text.into() };
            let mut groups = [vec![source("a b"), source("b c")], vec![source("b d")]];
            replace(&[[old.into(), new.into()]], &mut groups)?;
            Ok(groups.into_iter().flatten().map(|source| source.text).collect())
        };
        assert_eq!(make("b", "e").unwrap(), ["a e", "e c", "b d"]);
        assert_eq!(make("d", "e").unwrap(), ["a b", "b c", "b e"]);
        assert!(make("x", "y").is_err() && make("a", "a").is_err());
    }
}
