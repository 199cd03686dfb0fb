//! `cargo lesson prove`: every exercise can be failed and passed, its judges refuse the wrong answers
//! that are known, and every experiment of a README ("Break it") gives the error that the README shows,
//! or turns a judge red.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use host::{events::Verdict, room::Room, stages};
use serde::Deserialize;
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
};

use crate::{
    desk::{copy_attempt, manifest},
    exercise::{Exercise, Judge},
    explain,
    guest::Guest,
    judges::{self, Judges},
};

/// The judge that starts a program, which is all that an error of the verifier needs.
const STARTS: &str = "exercise_leaves_nothing";

/// The workspace of the packages that proofs make, relative to the workshop's root: not the learner's.
const ROOM: &str = ".lesson/proof";

/// `exercises/mutants.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutants {
    mutant: Vec<Red>,
    wrong: Vec<Wrong>,
}

/// A program that looks like an answer, and that a judge must refuse.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wrong {
    /// The exercise's id.
    exercise: String,
    /// What is wrong.
    what: String,
    /// Which of the exercise's judges refuses it.
    judge: String,
    /// What makes it out of the answer: texts of its sources, and what stands there instead.
    edit: Vec<[String; 2]>,
}

impl Wrong {
    /// Whether this is the text of a wrong answer: each edit, made in all of these sources. An edit that
    /// changes none is an error.
    fn edited(&self, mut sources: Vec<String>) -> Result<Vec<String>> {
        for [old, new] in &self.edit {
            let found = sources.iter().any(|source| source.contains(old.as_str()));
            ensure!(
                found && old != new,
                "mutants.toml, exercise {}, {}: the answer has no {old:?}",
                self.exercise,
                self.what
            );
            sources = sources.iter().map(|source| source.replace(old.as_str(), new)).collect();
        }
        Ok(sources)
    }
}

/// An experiment without an error, and the judge that notices it, or why none does.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Red {
    stage: String,
    edit: String,
    judge: Option<String>,
    unproven: Option<String>,
}

/// An experiment of a README.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Experiment {
    stage: String,
    /// The commands, with those of earlier experiments that are not undone yet.
    edits: String,
    /// The block that comes next: what the README says that there is to see.
    promised: String,
}

/// A program, what judges it, and what has to come out.
struct Claim {
    what: String,
    program: Program,
    judged_as: String,
    tests: Vec<String>,
    expected: Expected,
}

enum Program {
    Built(PathBuf),
    /// A directory to copy a new package from.
    Start(PathBuf, Exercise),
    Mutant(Experiment),
    /// One of those that [`build_wrong`] builds.
    Wrong(WrongProgram),
}

/// A wrong answer as a program.
struct WrongProgram {
    wrong: Wrong,
    /// The directory of the answer that it is made from.
    answer: PathBuf,
    /// `wrong-03-1`.
    name: String,
}

enum Expected {
    Pass,
    /// Any of the judges says no.
    Fail,
    /// The program does not start, and says these lines.
    Refused(Vec<String>),
    /// The compiler says these lines.
    NotCompiled(Vec<String>),
}

/// A claim, and its program once it is built: the same for all kernels.
type Built = (Claim, OnceLock<Result<Result<PathBuf, String>>>);

/// Proves the exercises on each of these kernels, as many at a time as there are CPUs; that wrong answers
/// are refused, half of them on the first kernel and half on the last one; and the experiments on the
/// first one, whose messages the READMEs show. `all`: wrong answers and experiments on each, and the
/// stages as answers, too, which `cargo vm test` proves anyway. What is not begun `within` this time is
/// not tried. Returns what does not hold.
pub fn prove(
    root: &Path,
    kernels: &[String],
    all: bool,
    within: Option<Duration>,
    filters: &[String],
) -> Result<Vec<String>> {
    let deadline = within.and_then(|within| Instant::now().checked_add(within));
    // A proof that was interrupted leaves its packages.
    remove_room(root);
    let judges = Judges::build(root)?;
    let mut claims = claims(root, &judges, all)?;
    let wanted = |what: &str| filters.iter().any(|filter| what.contains(filter));
    claims.retain(|claim| filters.is_empty() || wanted(&claim.what));
    let claims: Vec<Built> = claims.into_iter().map(|claim| (claim, OnceLock::new())).collect();
    let kernels: Vec<Option<&str>> = match kernels {
        [] => vec![None],
        named => named.iter().map(|kernel| Some(&**kernel)).collect(),
    };
    let guests = kernels.iter().map(|kernel| Guest::of_proof(root, *kernel));
    let guests: Arc<Vec<Guest>> = Arc::new(guests.collect());
    let clean = {
        let (root, guests) = (root.to_owned(), guests.clone());
        move || {
            for guest in guests.iter() {
                guest.stop().ok();
            }
            remove_room(&root);
        }
    };
    // Where a signal ends this, a package that is being built is built first, and is the last one.
    let (building, stopped) = (Arc::new(Mutex::new(())), Arc::new(AtomicBool::new(false)));
    let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
    thread::spawn({
        let (clean, building, stopped) = (clean.clone(), building.clone(), stopped.clone());
        move || {
            if let Some(signal) = signals.forever().next() {
                stopped.store(true, Ordering::Relaxed);
                let _building = building.lock();
                clean();
                std::process::exit(128 + signal);
            }
        }
    });
    let of_kernel = |number: usize| -> Vec<&Built> {
        let last = guests.len() - 1;
        let wanted = |(at, (claim, _)): &(usize, &Built)| match claim.program {
            _ if all => true,
            Program::Mutant(_) => number == 0,
            Program::Wrong(_) => number == if at % 2 == 0 { 0 } else { last },
            _ => true,
        };
        claims.iter().enumerate().filter(wanted).map(|(_, built)| built).collect()
    };
    let number: usize = (0..guests.len()).map(|number| of_kernel(number).len()).sum();
    let next = Mutex::new(guests.iter().enumerate());
    let sums = thread::scope(|scope| {
        // While the guests judge one program, the host builds the next.
        scope.spawn(|| {
            let wrong: Vec<&WrongProgram> = claims
                .iter()
                .filter_map(|(claim, _)| match &claim.program {
                    Program::Wrong(wrong) => Some(wrong),
                    _ => None,
                })
                .collect();
            let wrong_built = OnceLock::new();
            for (number, (claim, built)) in claims.iter().enumerate() {
                let _building = building.lock();
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                if is_over(deadline) {
                    built.set(Err(anyhow!("the time was up"))).ok();
                    continue;
                }
                let program = match &claim.program {
                    Program::Wrong(program) => {
                        let all = wrong_built.get_or_init(|| {
                            build_wrong(root, &wrong).map_err(|error| format!("{error:#}"))
                        });
                        let built = all.as_ref().map(|()| Ok(judges.program(&program.name)));
                        built.map_err(|error| anyhow!("{error}"))
                    }
                    _ => {
                        let built = scope.spawn(move || build(root, claim, number)).join();
                        built.unwrap_or_else(|_| Err(anyhow!("the builder panicked")))
                    }
                };
                built.set(program).ok();
            }
        });
        let work = || {
            let mut sum = Sum::default();
            let take = || next.lock().ok().and_then(|mut next| next.next());
            while let Some((number, guest)) = take() {
                let claims = of_kernel(number);
                if claims.is_empty() {
                    continue;
                }
                match guest.start() {
                    Ok(()) => on(guest, &judges, &claims, deadline, &mut sum),
                    Err(error) => {
                        println!("✗ {}: {error:#}", guest.kernel());
                        let what = |claim: &Claim| format!("{}: {}", guest.kernel(), claim.what);
                        sum.wrong.extend(claims.iter().map(|(claim, _)| what(claim)));
                    }
                }
                guest.stop().ok();
            }
            sum
        };
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..cpus.min(guests.len())).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.collect::<Result<Vec<_>, _>>().map_err(|_| anyhow!("a worker panicked"))
    });
    clean();
    let mut sum = Sum::default();
    for Sum { wrong, not_tried } in sums? {
        sum.wrong.extend(wrong);
        sum.not_tried += not_tried;
    }
    let Sum { wrong, not_tried } = sum;
    // Once more, where the eye ends: the lines above are hundreds.
    for what in &wrong {
        println!("does not hold: {what}");
    }
    let number = number - not_tried;
    println!("{} of {number} hold", number - wrong.len());
    ensure!(number > 0 || not_tried == 0, "there was no time to try anything");
    if not_tried > 0 {
        println!("{not_tried} more were not tried: the time was up");
    }
    Ok(wrong)
}

/// What came out.
#[derive(Default)]
struct Sum {
    /// The claims that do not hold.
    wrong: Vec<String>,
    /// How many claims there was no time for.
    not_tried: usize,
}

fn is_over(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// Proves all claims in one guest, as long as there is time.
fn on(guest: &Guest, judges: &Judges, claims: &[&Built], deadline: Option<Instant>, sum: &mut Sum) {
    for (claim, built) in claims {
        let built = built.wait();
        if is_over(deadline) {
            sum.not_tried += 1;
            continue;
        }
        let verdict = match built {
            Ok(program) => check(judges, guest, claim, program.as_ref()),
            Err(error) => Err(anyhow!("{error:#}")),
        };
        let what = format!("{}: {}", guest.kernel(), claim.what);
        match verdict {
            Ok(()) => println!("✓ {what}"),
            Err(error) => {
                let why = format!("{error:#}").replace('\n', "\n    ");
                println!("✗ {what}\n    {why}");
                sum.wrong.push(format!("{what}\n    {why}"));
            }
        }
    }
}

fn mutants(root: &Path) -> Result<Mutants> {
    let text = fs::read_to_string(root.join("exercises/mutants.toml")).context("mutants.toml")?;
    toml::from_str(&text).context("mutants.toml")
}

fn claims(root: &Path, judges: &Judges, all: bool) -> Result<Vec<Claim>> {
    let (mut claims, mut wrongs) = (Vec::new(), Vec::new());
    let mutants = mutants(root)?;
    for exercise in Exercise::all(root)? {
        let judged_as = exercise.judged_as();
        let tests: Vec<String> =
            exercise.judges.iter().map(|Judge { test, .. }| test.clone()).collect();
        let start = match stage_of(&exercise.start) {
            Some(stage) => Program::Built(judges.program(&stage)),
            None => Program::Start(exercise.start.clone(), exercise.clone()),
        };
        claims.push(Claim {
            what: format!("exercise {}: the start fails", exercise.id),
            program: start,
            judged_as: judged_as.clone(),
            tests: tests.clone(),
            expected: Expected::Fail,
        });
        for wrong in mutants.wrong.iter().filter(|wrong| wrong.exercise == exercise.id) {
            ensure!(
                tests.contains(&wrong.judge),
                "mutants.toml: {} does not judge the exercise {}",
                wrong.judge,
                exercise.id
            );
            let name = format!("wrong-{}-{}", exercise.id, wrongs.len());
            let answer = exercise.solution.clone();
            wrongs.push(Claim {
                what: format!("exercise {}, wrong: {}", exercise.id, wrong.what),
                program: Program::Wrong(WrongProgram { wrong: wrong.clone(), answer, name }),
                judged_as: judged_as.clone(),
                tests: vec![wrong.judge.clone()],
                expected: Expected::Fail,
            });
        }
        let answer = stage_of(&exercise.solution);
        let program = match &answer {
            Some(stage) => judges.program(stage),
            None => {
                let package = format!("solution-{}", exercise.id);
                judges::build(root, &package)?;
                judges.program(&package)
            }
        };
        // `cargo vm test` runs a stage's own judges, but not those of attempts.
        let of_attempts = |test: &String| test.starts_with("exercise_") && test != STARTS;
        let mut tests = tests;
        tests.retain(|test| all || answer.is_none() || of_attempts(test));
        if !tests.is_empty() {
            claims.push(Claim {
                what: format!("exercise {}: the answer passes", exercise.id),
                program: Program::Built(program),
                judged_as,
                tests,
                expected: Expected::Pass,
            });
        }
    }
    let number = wrongs.len();
    ensure!(number == mutants.wrong.len(), "mutants.toml: a wrong answer to an unknown exercise");
    claims.extend(wrongs);
    let mut red = mutants.mutant;
    for experiment in experiments(root)? {
        let lines = |text: &str| -> Vec<String> {
            let lines = experiment.promised.lines().filter(|line| line.contains(text));
            // A README cuts a long line, and ends it with `…`.
            lines.map(|line| line.trim().trim_end_matches('…').trim_end().to_owned()).collect()
        };
        let stage = stage_of(Path::new(&experiment.stage)).context("odd stage")?;
        let mut refused = lines(&format!("{stage}: "));
        refused.retain(|line| !line.contains(": tracing"));
        let mut tests = vec![STARTS.to_owned()];
        let expected = if !refused.is_empty() {
            refused.extend(lines(".bpf.c:"));
            Expected::Refused(refused)
        } else if !lines(" error: ").is_empty() {
            Expected::NotCompiled(lines(" error: "))
        } else {
            let found = red.iter().position(|red| {
                red.stage == experiment.stage && experiment.edits.contains(&red.edit)
            });
            let found = found.with_context(|| {
                format!(
                    "{}: exercises/mutants.toml names no judge for {}",
                    experiment.stage, experiment.edits
                )
            })?;
            let red = red.remove(found);
            let Some(judge) = red.judge else {
                let why = red.unproven.context("mutants.toml: neither `judge` nor `unproven`")?;
                println!("- {}: {}: not proven: {why}", red.stage, red.edit);
                continue;
            };
            tests = vec![judge];
            Expected::Fail
        };
        let mut seds = experiment.edits.lines().filter(|line| line.starts_with("sed -i"));
        let last = seds.next_back().unwrap_or_default();
        claims.push(Claim {
            what: format!("{}: {last}", experiment.stage),
            judged_as: stage,
            program: Program::Mutant(experiment),
            tests,
            expected,
        });
    }
    let left: Vec<_> = red.iter().map(|red| format!("{}: {}", red.stage, red.edit)).collect();
    ensure!(
        left.is_empty(),
        "no README makes this experiment of mutants.toml: {}",
        left.join(", ")
    );
    Ok(claims)
}

/// `stage04` of `stage04_max_latency`.
fn stage_of(directory: &Path) -> Option<String> {
    let name = directory.to_string_lossy();
    let stage = name.split('_').next().filter(|name| name.starts_with("stage"))?;
    Some(stage.to_owned())
}

/// The experiments of all READMEs, in order.
fn experiments(root: &Path) -> Result<Vec<Experiment>> {
    let mut experiments = Vec::new();
    for stage in stages(root)? {
        let readme = fs::read_to_string(root.join(&stage).join("README.md"))?;
        experiments.extend(of_readme(&stage, &readme));
    }
    Ok(experiments)
}

fn of_readme(stage: &str, readme: &str) -> Vec<Experiment> {
    let mut experiments: Vec<Experiment> = Vec::new();
    let mut edits = String::new();
    // Every second piece is a block of code.
    for block in readme.split("\n```").skip(1).step_by(2) {
        let block = block.split_once('\n').map_or("", |(_, block)| block);
        let commands = commands(block);
        if block.contains("git restore") {
            edits.clear();
        } else if !commands.is_empty() {
            edits += &commands;
            let (stage, edits) = (stage.to_owned(), edits.clone());
            experiments.push(Experiment { stage, edits, promised: String::new() });
        } else if let Some(last) = experiments.last_mut().filter(|last| last.promised.is_empty()) {
            last.promised = block.to_owned();
        }
    }
    experiments
}

/// The `sed` commands of a block, with their continuation lines.
fn commands(block: &str) -> String {
    let mut commands = String::new();
    let mut continues = false;
    for line in block.lines() {
        if continues || line.starts_with("sed -i") {
            commands += &format!("{line}\n");
            continues = line.ends_with('\\');
        }
    }
    commands
}

/// Builds a claim's program, as a package in [`ROOM`] where it is none yet.
fn build(root: &Path, claim: &Claim, number: usize) -> Result<Result<PathBuf, String>> {
    match &claim.program {
        Program::Built(file) => Ok(Ok(file.clone())),
        Program::Wrong(_) => bail!("a wrong answer is built with the others"),
        Program::Start(from, exercise) => build_copy(root, exercise.clone(), from, number),
        Program::Mutant(experiment) => {
            let Experiment { stage, edits, .. } = experiment;
            let copy = tempfile::tempdir()?;
            let script = format!(
                "set -e; mkdir {0}/common; cp -r common/bpf {0}/common; cp -r {stage} {0}; cd {0}\n{edits}\n\
                 if ! diff -qr {1}/common/bpf common/bpf; then cp common/bpf/*.h {stage}/src; fi",
                copy.path().display(),
                root.display()
            );
            let edit = Command::new("bash").args(["-c", &script]).current_dir(root).output()?;
            let said = String::from_utf8_lossy(&edit.stderr);
            ensure!(edit.status.success(), "{stage}: {edits}: {said}");
            let exercise = Exercise::of_stage(stage);
            build_copy(root, exercise, &copy.path().join(stage), number)
        }
    }
}

/// Builds all wrong answers as the programs of one package: each as a package of its own would take
/// several times as long.
fn build_wrong(root: &Path, wrong: &[&WrongProgram]) -> Result<()> {
    let mut package = Exercise::of_stage("wrong");
    package.title = "wrong answers".to_owned();
    let place = root.join(ROOM).join("wrong");
    let mut script = BUILD_WRONG.to_owned();
    for WrongProgram { wrong, answer, name } in wrong {
        let (mut files, mut sources) = (Vec::new(), Vec::new());
        for file in root.join(answer).join("src").read_dir()? {
            let file = file?;
            files.push(file.file_name());
            sources.push(fs::read_to_string(file.path())?);
        }
        let to = place.join("src/bin").join(name);
        fs::create_dir_all(&to)?;
        for (file, text) in files.iter().zip(wrong.edited(sources)?) {
            fs::write(
                to.join(file),
                text.replace("/trace.skel.rs", &format!("/{name}/trace.skel.rs")),
            )?;
        }
        script += &format!("    build(\"{name}\");\n");
    }
    fs::write(place.join("build.rs"), script + "}\n")?;
    fs::write(place.join("Cargo.toml"), manifest(&package))?;
    judges::build_attempt(&Room::at(root, ROOM), &package.package())?
        .map(|_| ())
        .map_err(|said| anyhow!("the wrong answers do not compile: {said}"))
}

/// The beginning of their `build.rs`: `main` continues with a line for each.
const BUILD_WRONG: &str = r#"//! Compiles the BPF program of each wrong answer.

use std::{env, path::PathBuf};

fn build(name: &str) {
    let variable = |name| PathBuf::from(env::var_os(name).unwrap());
    let source = variable("CARGO_MANIFEST_DIR").join("src/bin").join(name).join("trace.bpf.c");
    let out = variable("OUT_DIR").join(name);
    std::fs::create_dir_all(&out).unwrap();
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap();
    if let Err(error) = common_build::build("clang", &source, &arch, &out) {
        eprintln!("{name}: {error}");
        std::process::exit(1);
    }
}

fn main() {
"#;

/// Copies a directory's sources to a new package, and builds it. An edited header lies beside the
/// program, where the compiler looks first.
fn build_copy(
    root: &Path,
    mut exercise: Exercise,
    from: &Path,
    number: usize,
) -> Result<Result<PathBuf, String>> {
    exercise.id = format!("proof{number}");
    copy_attempt(root, from, &exercise, &root.join(ROOM).join(&exercise.id))?;
    judges::build_attempt(&Room::at(root, ROOM), &exercise.package())
}

/// Removes the packages that proofs have made.
fn remove_room(root: &Path) {
    fs::remove_dir_all(root.join(ROOM)).ok();
}

/// Whether a claim holds; an error where not.
fn check(
    judges: &Judges,
    guest: &Guest,
    claim: &Claim,
    program: Result<&PathBuf, &String>,
) -> Result<()> {
    let program = match (&claim.expected, program) {
        (Expected::NotCompiled(lines), Err(said)) => return has_lines(said, lines, claim),
        (Expected::NotCompiled(_), Ok(_)) => bail!("it compiles"),
        (_, Err(said)) => bail!("it does not compile: {said}"),
        (_, Ok(program)) => program,
    };
    let tests: Vec<&str> = claim.tests.iter().map(String::as_str).collect();
    let said = judges.run(guest, &claim.judged_as, program, &tests, |_| {})?;
    let bad = said.iter().find_map(|(test, verdict)| match verdict {
        Verdict::Failed(why) => Some((test, why)),
        _ => None,
    });
    match (&claim.expected, bad) {
        (Expected::Pass, Some((test, why))) => bail!("{test}: {why}"),
        (Expected::Pass, None) => {
            ensure!(said.len() == tests.len(), "{} of {} judges ran", said.len(), tests.len());
            let passed = said.values().any(|verdict| *verdict == Verdict::Passed);
            ensure!(passed, "no judge could judge on this kernel: {said:?}");
            Ok(())
        }
        (Expected::Refused(lines), Some((_, why))) => has_lines(why, lines, claim),
        (Expected::NotCompiled(_), _) | (_, None) => {
            bail!("no judge refuses it: {said:?}")
        }
        // A judge that says no because the program does not start has not judged it.
        (Expected::Fail, Some((test, why))) => {
            let starts = !explain::is_refused(why);
            ensure!(starts, "{test}: {why}");
            Ok(())
        }
    }
}

/// Whether a program's message has these lines of a README, in which it is a stage.
fn has_lines(said: &str, lines: &[String], claim: &Claim) -> Result<()> {
    let Program::Mutant(Experiment { stage, .. }) = &claim.program else { bail!("no mutant") };
    let name = stage_of(Path::new(stage)).context("odd stage")?;
    let mut normal = String::new();
    let without_number =
        |text: &str| text.trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
    for line in said.lines() {
        // mine-proof17: … and .lesson/proof/proof17/src/trace.bpf.c:9, or bio.h:9 beside it
        let line = line.trim();
        let line = match (line.strip_prefix("mine-proof"), line.split_once(".lesson/proof/proof")) {
            (Some(rest), _) => name.clone() + &without_number(rest),
            (_, Some((_, rest))) if rest.contains(".bpf.c") => {
                stage.clone() + &without_number(rest)
            }
            (_, Some((_, rest))) => without_number(rest).replace("/src/", "common/bpf/"),
            _ => line.to_owned(),
        };
        normal += &format!("{line}\n");
    }
    // `[40]`, a type's number in the object, depends on the compiler.
    let without_ids = |text: &str| -> String {
        let pieces = text.split('[').map(|piece| match piece.split_once(']') {
            Some((id, rest)) if id.chars().all(|c| c.is_ascii_digit()) => rest,
            _ => piece,
        });
        pieces.collect()
    };
    // `this kernel (6.1.0-50-amd64)`: READMEs show the default kernel's.
    let without_release = |text: &str| -> String {
        let mut pieces = text.split("this kernel (");
        let first = pieces.next().unwrap_or_default().to_owned();
        pieces.fold(first, |text, piece| {
            text + "this kernel" + piece.split_once(')').map_or(piece, |(_, rest)| rest)
        })
    };
    let bare = |text: &str| without_release(&without_ids(text));
    let normal = bare(&normal);
    for line in lines {
        ensure!(normal.contains(&bare(line)), "it does not say {line:?}, but:\n{normal}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn experiments_are_cumulative_until_they_are_undone() {
        let readme = "# x\n```\nsed -i a f\nrun\n```\nthen\n```\nerror 1\n```\n```\nsed -i b \\\n  g\n```\n\
                      ```\nerror 2\n```\n```\ngit restore f\n```\n```\nsed -i c h\n```\n```\nseen\n```\n";
        let expected = [
            ("sed -i a f\n", "error 1"),
            ("sed -i a f\nsed -i b \\\n  g\n", "error 2"),
            ("sed -i c h\n", "seen"),
        ];
        let found = of_readme("stage01_x", readme);
        let found: Vec<_> = found.iter().map(|e| (e.edits.as_str(), e.promised.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_wrong_answer_differs_from_the_right_one() {
        let root = workspace();
        let exercises = Exercise::all(&root).unwrap();
        let wrong = mutants(&root).unwrap().wrong;
        for exercise in &exercises {
            let read = |file| fs::read_to_string(root.join(&exercise.solution).join(file)).unwrap();
            let sources = ["src/main.rs", "src/trace.bpf.c"].map(read).to_vec();
            let of_it: Vec<&Wrong> = wrong.iter().filter(|w| w.exercise == exercise.id).collect();
            assert!(of_it.len() >= 3, "{}: {} wrong answers", exercise.id, of_it.len());
            for wrong in of_it {
                let edited = wrong.edited(sources.clone()).unwrap();
                assert_ne!(edited, sources, "{}: {}", exercise.id, wrong.what);
            }
        }
    }

    #[test]
    fn an_edit_that_changes_nothing_is_an_error() {
        let edit = |old: &str, new: &str| {
            let wrong = Wrong {
                exercise: "01".into(),
                what: "x".into(),
                judge: "x".into(),
                edit: vec![[old.into(), new.into()]],
            };
            wrong.edited(vec!["a b".into(), "b c".into()])
        };
        assert_eq!(edit("b", "d").unwrap(), ["a d", "d c"]);
        assert!(edit("x", "y").is_err() && edit("a", "a").is_err());
    }

    #[test]
    fn every_experiment_of_the_readmes_is_found() {
        let experiments = experiments(&workspace()).unwrap();
        assert!(experiments.len() >= 12, "{} experiments", experiments.len());
    }
}
