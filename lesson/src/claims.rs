//! What `cargo lesson prove` proves: claims about programs, made out of the exercises, the mutants and the READMEs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{
    exercise::Exercise,
    experiments::{Experiment, experiments},
    judges::Judges,
    mutants::{
        self, Edit, ExperimentJudge, Mutant, Mutants, OriginalProgram, RightAnswer, StepAnswer,
    },
};

/// The judge that starts a program, which is all that an error of the verifier needs.
const STARTS: &str = "exercise_leaves_nothing";

/// A program, what judges it, and what has to come out.
pub struct Claim {
    /// In words, and unique.
    pub what: String,
    pub about: About,
    /// The only kernel on which its tests can tell.
    pub kernel: Option<String>,
    pub program: ClaimSource,
    /// The program whose place it takes.
    pub judged_as: String,
    /// The guest tests that judge it.
    pub tests: Vec<String>,
    pub expected: Expected,
}

/// What a claim is about.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum About {
    /// The start of an exercise, or its answer.
    Exercise,
    WrongAnswer,
    WrongProgram,
    Experiment,
}

/// Where a program comes from.
pub enum ClaimSource {
    /// It was built with the judges.
    Already(PathBuf),
    /// From this one, in the copy of the workshop.
    Edited(OriginalProgram, Edit),
}

/// What has to come out.
pub enum Expected {
    Pass,
    /// Any of the judges says no.
    Fail,
    /// The program does not start, and says these lines; with `-v`, those of the verifier's log, too.
    Refused {
        lines: Vec<String>,
        log: Vec<String>,
    },
    /// The compiler says these lines.
    NotCompiled(Vec<String>),
}

/// All claims. `all`: the judges of a stage also judge it as an answer.
pub fn claims(
    workspace: &Path,
    judges: &Judges,
    programs: &[OriginalProgram],
    all: bool,
) -> Result<Vec<Claim>> {
    let (mutants, exercises) = (Mutants::read(workspace)?, Exercise::all(workspace)?);
    let mut claims = Vec::new();
    let mut answers = mutants.step;
    for exercise in &exercises {
        claims.push(start_fails(exercise, judges));
        claims.extend(answer_passes(exercise, judges, all));
        for step in 1..exercise.steps.len() {
            let is_its = |it: &StepAnswer| it.exercise == exercise.id && it.step == step;
            let found = answers.iter().position(is_its);
            let found = found.with_context(|| {
                format!("mutants.toml has no answer to {}", exercise.place(Some(step - 1)))
            })?;
            claims.extend(step_is_a_step(exercise, answers.remove(found), programs)?);
        }
    }
    let of_none = answers.first().map(|it| format!("exercise {}, step {}", it.exercise, it.step));
    ensure!(of_none.is_none(), "mutants.toml answers {of_none:?}, which is no step but the last");
    for wrong in mutants.wrong {
        claims.push(wrong_is_refused(wrong, programs, &exercises)?);
    }
    for right in mutants.right {
        claims.push(right_passes(right, programs, &exercises)?);
    }
    let mut red = mutants.mutant;
    for experiment in experiments(workspace)? {
        claims.extend(experiment_shows(experiment, programs, &mut red)?);
    }
    let left: Vec<_> = red.iter().map(|red| format!("{}: {}", red.stage, red.edit)).collect();
    ensure!(
        left.is_empty(),
        "no README makes this experiment of mutants.toml: {}",
        left.join(", ")
    );
    Ok(claims)
}

fn of_exercise(
    exercise: &Exercise,
    what: &str,
    program: ClaimSource,
    tests: Vec<String>,
    expected: Expected,
) -> Claim {
    Claim {
        what: format!("exercise {}: {what}", exercise.id),
        about: About::Exercise,
        kernel: exercise.kernel.clone(),
        program,
        judged_as: exercise.judged_as(),
        tests,
        expected,
    }
}

fn tests_of(exercise: &Exercise) -> Vec<String> {
    exercise.judges().into_iter().map(|judge| judge.test.clone()).collect()
}

fn start_fails(exercise: &Exercise, judges: &Judges) -> Claim {
    let start = match stage_of(&exercise.start) {
        Some(stage) => ClaimSource::Already(judges.program(&stage)),
        None => ClaimSource::Edited(OriginalProgram::start(exercise), Edit::Texts(Vec::new())),
    };
    // By the judges of its first step.
    let tests = exercise.steps[0].judges.iter().map(|judge| judge.test.clone()).collect();
    of_exercise(exercise, "the start fails", start, tests, Expected::Fail)
}

/// An answer to a step passes it, and does not pass the next one: that one asks for more.
fn step_is_a_step(
    exercise: &Exercise,
    answer: StepAnswer,
    programs: &[OriginalProgram],
) -> Result<[Claim; 2]> {
    let original = mutants::answer(exercise, programs).context("an exercise without an answer")?;
    let claim = |step: usize, what: String, expected| {
        let source = ClaimSource::Edited(original.clone(), Edit::Texts(answer.edit.clone()));
        let tests = exercise.steps[step].judges.iter().map(|judge| judge.test.clone()).collect();
        of_exercise(exercise, &what, source, tests, expected)
    };
    let step = answer.step;
    Ok([
        claim(step - 1, format!("an answer to step {step} passes"), Expected::Pass),
        claim(
            step,
            format!("an answer to step {step} is none to step {}", step + 1),
            Expected::Fail,
        ),
    ])
}

/// None where no judge of the exercise is left to ask.
fn answer_passes(exercise: &Exercise, judges: &Judges, all: bool) -> Option<Claim> {
    let answer = stage_of(&exercise.solution);
    let package = format!("solution-{}", exercise.id);
    let program = judges.program(answer.as_ref().unwrap_or(&package));
    // `cargo vm test` runs a stage's own judges, but not those of attempts.
    let of_attempts = |test: &String| test.starts_with("exercise_") && test != STARTS;
    let mut tests = tests_of(exercise);
    tests.retain(|test| all || answer.is_none() || of_attempts(test));
    let program = ClaimSource::Already(program);
    (!tests.is_empty())
        .then(|| of_exercise(exercise, "the answer passes", program, tests, Expected::Pass))
}

/// An answer in another style passes all judges of its exercise.
fn right_passes(
    right: RightAnswer,
    programs: &[OriginalProgram],
    exercises: &[Exercise],
) -> Result<Claim> {
    let exercise = exercises.iter().find(|it| it.id == right.exercise);
    let missing = || format!("mutants.toml: {}: no exercise {}", right.what, right.exercise);
    let exercise = exercise.with_context(missing)?;
    let original = mutants::answer(exercise, programs).with_context(missing)?.clone();
    let program = ClaimSource::Edited(original, Edit::Texts(right.edit));
    let what = format!("right: {}", right.what);
    Ok(of_exercise(exercise, &what, program, tests_of(exercise), Expected::Pass))
}

fn wrong_is_refused(
    wrong: Mutant,
    programs: &[OriginalProgram],
    exercises: &[Exercise],
) -> Result<Claim> {
    let original = mutants::original(&wrong, programs, exercises)?;
    let exercise = exercises.iter().find(|it| Some(&it.id) == wrong.exercise.as_ref());
    ensure!(
        exercise.is_none_or(|it| it.judges().iter().any(|judge| judge.test == wrong.judge)),
        "mutants.toml: {} does not judge the {}",
        wrong.judge,
        wrong.place()
    );
    Ok(Claim {
        what: format!("{}, wrong: {}", wrong.place(), wrong.what),
        about: exercise.map_or(About::WrongProgram, |_| About::WrongAnswer),
        kernel: wrong.kernel.clone().or_else(|| exercise?.kernel.clone()),
        judged_as: exercise.map_or_else(|| original.name.clone(), Exercise::judged_as),
        tests: vec![wrong.judge],
        expected: Expected::Fail,
        program: ClaimSource::Edited(original, Edit::Texts(wrong.edit)),
    })
}

/// None where nothing can notice it: that is said. Takes its judge out of `red`.
fn experiment_shows(
    experiment: Experiment,
    programs: &[OriginalProgram],
    red: &mut Vec<ExperimentJudge>,
) -> Result<Option<Claim>> {
    let stage = workshop::package_in(&experiment.stage).context("odd stage")?.to_owned();
    let original = programs.iter().find(|it| it.directory == Path::new(&experiment.stage));
    let original = original.cloned().with_context(|| format!("{stage} is no program"))?;
    let (mut tests, mut kernel) = (vec![STARTS.to_owned()], None);
    let expected = match promised_error(&experiment, &stage) {
        Some(error) => error,
        None => {
            let red = take_judge(&experiment, red)?;
            let Some(judge) = red.judge else {
                let why = red.unproven.context("mutants.toml: neither `judge` nor `unproven`")?;
                workshop::outln!("- {}: {}: not proven: {why}", red.stage, red.edit);
                return Ok(None);
            };
            (tests, kernel) = (vec![judge], red.kernel);
            Expected::Fail
        }
    };
    let mut seds = experiment.edits.lines().filter(|line| line.starts_with("sed -i"));
    let last = seds.next_back().unwrap_or_default();
    Ok(Some(Claim {
        what: format!("{}: {last}", experiment.stage),
        about: About::Experiment,
        kernel,
        judged_as: stage,
        program: ClaimSource::Edited(original, Edit::Commands(experiment.edits)),
        tests,
        expected,
    }))
}

/// The error that the README shows, if it shows one.
fn promised_error(experiment: &Experiment, stage: &str) -> Option<Expected> {
    let lines = |text: &str| -> Vec<String> {
        let lines = experiment.promised.lines().filter(|line| line.contains(text));
        // A README cuts a long line, and ends it with `…`.
        lines.map(|line| line.trim().trim_end_matches('…').trim_end().to_owned()).collect()
    };
    let mut refused = lines(&format!("{stage}: "));
    refused.retain(|line| !line.contains(": tracing"));
    if !refused.is_empty() || !experiment.log.is_empty() {
        refused.extend(lines(".bpf.c:"));
        return Some(Expected::Refused { lines: refused, log: experiment.log.clone() });
    }
    let compiler = lines(" error: ");
    (!compiler.is_empty()).then_some(Expected::NotCompiled(compiler))
}

/// The judge that `mutants.toml` names for an experiment without an error.
fn take_judge(experiment: &Experiment, red: &mut Vec<ExperimentJudge>) -> Result<ExperimentJudge> {
    let found = red
        .iter()
        .position(|red| red.stage == experiment.stage && experiment.edits.contains(&red.edit));
    let found = found.with_context(|| {
        format!(
            "{}: lesson/exercises/mutants.toml names no judge for {}",
            experiment.stage, experiment.edits
        )
    })?;
    Ok(red.remove(found))
}

fn stage_of(directory: &Path) -> Option<String> {
    workshop::package_in(&directory.to_string_lossy()).map(str::to_owned)
}
