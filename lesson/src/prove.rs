//! `cargo lesson prove`: every exercise can be failed and passed, its judges refuse the wrong answers
//! that are known, and every experiment of a README ("Break it") gives the error that the README shows,
//! or turns a judge red.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use serde::Deserialize;
use workshop::{events::Verdict, judging::Subject, lock};

use vm::{
    cargo::follow::{at_once, workers},
    commands::kept::Kept,
    run::Run,
};

use crate::{
    exercise::{Exercise, Judge},
    experiments::{experiments, is_shown},
    explain,
    judges::Judges,
    mutants::{self, Edit, Program, Workshop, Wrong},
};

/// The judge that starts a program, which is all that an error of the verifier needs.
const STARTS: &str = "exercise_leaves_nothing";

/// How a judge's message begins where the program ends before it is judged: see `tests/guest/run.rs`.
const NO_START: &str = "your program does not start:";

/// What `lesson/exercises/mutants.toml` holds.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mutants {
    mutant: Vec<Red>,
    /// In the order of the file.
    pub wrong: Vec<Wrong>,
}

/// An experiment without an error, and the judge that notices it, or why none does.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Red {
    stage: String,
    edit: String,
    judge: Option<String>,
    /// The only kernel on which it can.
    kernel: Option<String>,
    unproven: Option<String>,
}

/// A program, what judges it, and what has to come out.
struct Claim {
    what: String,
    about: About,
    /// The only kernel on which its tests can tell.
    kernel: Option<String>,
    program: Made,
    judged_as: String,
    tests: Vec<String>,
    expected: Expected,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum About {
    /// The start of an exercise, or its answer.
    Exercise,
    WrongAnswer,
    WrongProgram,
    Experiment,
}

/// Where a program comes from.
enum Made {
    /// It was built with the judges.
    Already(PathBuf),
    /// From this one, in the copy of the workshop.
    Edited(Program, Edit),
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

/// What to prove, and where.
#[derive(Args)]
pub struct Prove {
    /// Kernel lines: 6.1, 6.1-rt, 6.12, 6.18, 7.2, 7.3, or several with commas [default: 6.1]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE", value_delimiter = ',')]
    kernel: Vec<String>,
    /// Run the judges on the stages, too, as `cargo vm test` does, and take wrong answers and the
    /// READMEs' experiments to every kernel
    #[arg(long)]
    all: bool,
    /// A sample: of what has to be refused, one in so many, others each day; answers on one kernel each
    #[arg(long, value_name = "DAYS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    days: u64,
    /// Try nothing more after this time, and say how much was left (20m)
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    within: Option<Duration>,
    /// Prove only what contains one of these
    filters: Vec<String>,
}

/// Proves the exercises on each of the kernels (of a sample, on one of them), as many at a time as there are CPUs; that wrong answers
/// are refused, half of them on the first kernel and half on the last one; and the experiments on the
/// first one, whose messages the READMEs show, and the wrong programs, but for those that name another
/// one. Returns what does not hold.
pub fn prove(run: &Run, options: &Prove) -> Result<Vec<String>> {
    let workspace = run.workspace();
    let Prove { kernel: kernels, all, days, within, filters } = options;
    let (all, deadline) = (*all, within.and_then(|within| Instant::now().checked_add(within)));
    // A proof that was interrupted leaves its programs.
    mutants::remove(workspace);
    let programs = mutants::programs(&run.cargo)?;
    let judges = Judges::build(run, programs.iter().map(|program| program.package.as_str()))?;
    let cargo = &run.guests()?.quiet();
    let mut claims = claims(workspace, &judges, &programs, all)?;
    let wanted = |what: &str| filters.iter().any(|filter| what.contains(filter));
    claims.retain(|claim| filters.is_empty() || wanted(&claim.what));
    ensure!(!claims.is_empty(), "there is nothing to prove that contains one of {filters:?}");
    let today = workshop::today();
    let mut turn = today;
    claims.retain(|claim| {
        let is_sampled = !matches!(claim.expected, Expected::Pass);
        turn += u64::from(is_sampled);
        !is_sampled || turn.is_multiple_of(*days)
    });
    let claims: Vec<Built> = claims.into_iter().map(|claim| (claim, OnceLock::new())).collect();
    let named = kernels.iter().map(|kernel| Kept::of_proof(run, Some(kernel)));
    let default = kernels.is_empty().then(|| Kept::of_proof(run, None));
    let guests: Vec<Kept> = named.chain(default).collect();
    let of_kernel = |number: usize| -> Vec<&Built> {
        let last = guests.len() - 1;
        let wanted = |(at, (claim, _)): &(usize, &Built)| match (&claim.kernel, claim.about) {
            (Some(kernel), _) => guests[number].runs(kernel),
            (None, About::WrongProgram) => number == 0,
            _ if all => true,
            (None, About::Experiment) => number == 0,
            (None, About::WrongAnswer) => number == if at % 2 == 0 { 0 } else { last },
            // A sample has each of these on one kernel, tomorrow on the other one.
            _ if *days > 1 && (*at as u64 + today).is_multiple_of(2) => number == 0,
            _ if *days > 1 => number == last,
            _ => true,
        };
        claims.iter().enumerate().filter(wanted).map(|(_, built)| built).collect()
    };
    let number: usize = (0..guests.len()).map(|number| of_kernel(number).len()).sum();
    for (claim, _) in &claims {
        if let Some(kernel) = &claim.kernel
            && !guests.iter().any(|guest| guest.runs(kernel))
        {
            println!("- {}: not proven: needs --kernel {kernel}", claim.what);
        }
    }
    let sum = Mutex::new(Sum::default());
    thread::scope(|scope| {
        // While the guests judge one program, the host builds the next.
        scope.spawn(|| {
            let originals = claims.iter().filter_map(|(claim, _)| match &claim.program {
                Made::Edited(original, _) => Some(original),
                Made::Already(_) => None,
            });
            let copy = Workshop::copy(cargo, &originals.collect::<Vec<_>>());
            for (number, (claim, built)) in claims.iter().enumerate() {
                let program = match (&claim.program, &copy) {
                    (Made::Already(file), _) => Ok(Ok(file.clone())),
                    _ if is_over(deadline) => Err(anyhow!("the time was up")),
                    (_, Err(error)) => Err(anyhow!("{error:#}")),
                    (Made::Edited(original, edit), Ok(copy)) => {
                        copy.build(original, edit, &format!("wrong-{number}"))
                    }
                };
                built.set(program).ok();
            }
        });
        at_once(workers(), &(0..guests.len()).collect::<Vec<_>>(), |&number| {
            let (guest, claims) = (&guests[number], of_kernel(number));
            if claims.is_empty() {
                return Ok(());
            }
            match guest.start() {
                Ok(()) => prove_on(guest, &judges, &claims, deadline, &sum),
                Err(error) => {
                    println!("✗ {}: {error:#}", guest.kernel());
                    let what = |claim: &Claim| format!("{}: {}", guest.kernel(), claim.what);
                    lock(&sum).wrong.extend(claims.iter().map(|(claim, _)| what(claim)));
                }
            }
            guest.stop().ok();
            Ok(())
        });
    });
    mutants::remove(workspace);
    let Sum { wrong, not_tried } = sum.into_inner().unwrap_or_else(PoisonError::into_inner);
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
fn prove_on(
    guest: &Kept<'_>,
    judges: &Judges,
    claims: &[&Built],
    deadline: Option<Instant>,
    sum: &Mutex<Sum>,
) {
    for (claim, built) in claims {
        let built = built.wait();
        if is_over(deadline) {
            lock(sum).not_tried += 1;
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
                lock(sum).wrong.push(format!("{what}\n    {why}"));
            }
        }
    }
}

/// Reads `lesson/exercises/mutants.toml`.
pub fn mutants(workspace: &Path) -> Result<Mutants> {
    let text = fs::read_to_string(workspace.join("lesson/exercises/mutants.toml"))
        .context("mutants.toml")?;
    toml::from_str(&text).context("mutants.toml")
}

fn claims(
    workspace: &Path,
    judges: &Judges,
    programs: &[Program],
    all: bool,
) -> Result<Vec<Claim>> {
    let mut claims = Vec::new();
    let (mutants, exercises) = (mutants(workspace)?, Exercise::all(workspace)?);
    for exercise in &exercises {
        let mut tests: Vec<String> =
            exercise.judges.iter().map(|Judge { test, .. }| test.clone()).collect();
        let start = match stage_of(&exercise.start) {
            Some(stage) => Made::Already(judges.program(&stage)),
            None => Made::Edited(Program::start(exercise), Edit::Texts(Vec::new())),
        };
        let claim = |what: &str, program, tests, expected| Claim {
            what: format!("exercise {}: {what}", exercise.id),
            about: About::Exercise,
            kernel: exercise.kernel.clone(),
            program,
            judged_as: exercise.judged_as(),
            tests,
            expected,
        };
        claims.push(claim("the start fails", start, tests.clone(), Expected::Fail));
        let answer = stage_of(&exercise.solution);
        let package = format!("solution-{}", exercise.id);
        let program = judges.program(answer.as_ref().unwrap_or(&package));
        // `cargo vm test` runs a stage's own judges, but not those of attempts.
        let of_attempts = |test: &String| test.starts_with("exercise_") && test != STARTS;
        tests.retain(|test| all || answer.is_none() || of_attempts(test));
        if !tests.is_empty() {
            let program = Made::Already(program);
            claims.push(claim("the answer passes", program, tests, Expected::Pass));
        }
    }
    for wrong in mutants.wrong {
        let original = mutants::original(&wrong, programs, &exercises)?;
        let exercise = exercises.iter().find(|it| Some(&it.id) == wrong.exercise.as_ref());
        ensure!(
            exercise.is_none_or(|it| it.judges.iter().any(|judge| judge.test == wrong.judge)),
            "mutants.toml: {} does not judge the {}",
            wrong.judge,
            wrong.of()
        );
        claims.push(Claim {
            what: format!("{}, wrong: {}", wrong.of(), wrong.what),
            about: exercise.map_or(About::WrongProgram, |_| About::WrongAnswer),
            kernel: wrong.kernel.clone().or_else(|| exercise?.kernel.clone()),
            judged_as: exercise.map_or_else(|| original.name.clone(), Exercise::judged_as),
            tests: vec![wrong.judge],
            expected: Expected::Fail,
            program: Made::Edited(original, Edit::Texts(wrong.edit)),
        });
    }
    let mut red = mutants.mutant;
    for experiment in experiments(workspace)? {
        let lines = |text: &str| -> Vec<String> {
            let lines = experiment.promised.lines().filter(|line| line.contains(text));
            // A README cuts a long line, and ends it with `…`.
            lines.map(|line| line.trim().trim_end_matches('…').trim_end().to_owned()).collect()
        };
        let stage = workshop::package_in(&experiment.stage).context("odd stage")?.to_owned();
        let original = programs.iter().find(|it| it.directory == Path::new(&experiment.stage));
        let original = original.cloned().with_context(|| format!("{stage} is no program"))?;
        let mut refused = lines(&format!("{stage}: "));
        refused.retain(|line| !line.contains(": tracing"));
        let (mut tests, mut kernel) = (vec![STARTS.to_owned()], None);
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
                    "{}: lesson/exercises/mutants.toml names no judge for {}",
                    experiment.stage, experiment.edits
                )
            })?;
            let red = red.remove(found);
            let Some(judge) = red.judge else {
                let why = red.unproven.context("mutants.toml: neither `judge` nor `unproven`")?;
                println!("- {}: {}: not proven: {why}", red.stage, red.edit);
                continue;
            };
            (tests, kernel) = (vec![judge], red.kernel);
            Expected::Fail
        };
        let mut seds = experiment.edits.lines().filter(|line| line.starts_with("sed -i"));
        let last = seds.next_back().unwrap_or_default();
        claims.push(Claim {
            what: format!("{}: {last}", experiment.stage),
            about: About::Experiment,
            kernel,
            judged_as: stage,
            program: Made::Edited(original, Edit::Commands(experiment.edits)),
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

fn stage_of(directory: &Path) -> Option<String> {
    workshop::package_in(&directory.to_string_lossy()).map(str::to_owned)
}

/// The first judge that says no, and why.
fn failed(said: &BTreeMap<String, Verdict>) -> Option<(&String, &String)> {
    said.iter().find_map(|(test, verdict)| match verdict {
        Verdict::Failed(why) => Some((test, why)),
        _ => None,
    })
}

/// Whether a claim holds; an error where not.
fn check(
    judges: &Judges,
    guest: &Kept<'_>,
    claim: &Claim,
    program: Result<&PathBuf, &String>,
) -> Result<()> {
    let program = match (&claim.expected, program) {
        (Expected::NotCompiled(lines), Err(said)) => return is_shown(said, lines),
        (Expected::NotCompiled(_), Ok(_)) => bail!("it compiles"),
        (_, Err(said)) => bail!("it does not compile: {said}"),
        (_, Ok(program)) => program,
    };
    let tests: Vec<&str> = claim.tests.iter().map(String::as_str).collect();
    let is_attempt = claim.about != About::WrongProgram;
    let subject = Subject { name: claim.judged_as.clone(), file: program.to_owned(), is_attempt };
    let said = judges.run(guest, subject, &tests, |_| {})?;
    let bad = failed(&said);
    match (&claim.expected, bad) {
        (Expected::Pass, Some((test, why))) => bail!("{test}: {why}"),
        (Expected::Pass, None) => {
            ensure!(said.len() == tests.len(), "{} of {} judges ran", said.len(), tests.len());
            let passed = said.values().any(|verdict| *verdict == Verdict::Passed);
            ensure!(passed, "no judge could judge on this kernel: {said:?}");
            Ok(())
        }
        (Expected::Refused(lines), Some((_, why))) => is_shown(why, lines),
        (Expected::NotCompiled(_), _) | (_, None) => {
            bail!("no judge refuses it: {said:?}")
        }
        // A judge that says no because the program does not start has not judged it.
        (Expected::Fail, Some((test, why))) => {
            let starts = !explain::is_refused(why) && (is_attempt || !why.contains(NO_START));
            ensure!(starts, "{test}: {why}");
            Ok(())
        }
    }
}
