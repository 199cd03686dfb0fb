//! Building an attempt, and having the guest tests judge it.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context, Result, bail};
use workshop::{
    attempts,
    cargo::{Cargo, executable},
    events::{Ended, Reader, TestEvent, Verdict},
    judging::{Judging, Subject},
    say,
};

use vm::{
    commands::background::BackgroundGuest,
    run::{For, Run},
};

use crate::{explain, state::STATE};

/// How much of what a check has left is named.
const LEFT_SHOWN: usize = 3;

/// What came out of a run of judges.
pub struct Judged {
    /// What each said.
    pub ended: BTreeMap<String, Ended>,
    /// What is not as it was after the guest's boot.
    pub left: Vec<String>,
}

/// What the judges consist of: programs that were built.
pub struct Judges {
    /// What they are told, without an attempt.
    judging: Judging,
    /// The guest tests.
    tests: PathBuf,
}

impl Judges {
    /// Builds the guest tests and these packages, whose programs are judged.
    pub fn build<'a>(run: &Run, packages: impl IntoIterator<Item = &'a str>) -> Result<Judges> {
        run.need_packages(For::Run)?;
        let mut cargo = run.guests()?.clone();
        // Quiet but for the first time, or every check begins with three lines about nothing to do.
        cargo.quiet = !is_first(run);
        let mut build = vec!["build".to_owned()];
        build.extend(packages.into_iter().map(|package| format!("--package={package}")));
        if build.len() > 1 {
            cargo.artifacts(&build)?;
        }
        let tests = ["test", "--package=guest_tests", "--test=guest", "--no-run"];
        let tests = executable(&cargo.artifacts(&tests)?, "guest")?;
        Ok(Judges { judging: Judging::by(&tests, run.workspace()), tests })
    }

    /// The file of a program that was built with the judges.
    pub fn program(&self, name: &str) -> PathBuf {
        self.judging.programs.join(name)
    }

    /// Runs tests in the guest, in this order up to the first that fails, with `subject` in the place of
    /// the program of its name. What they said, once it is known that it was they: until then, an attempt may
    /// have said it.
    pub fn run(
        &self,
        guest: &BackgroundGuest<'_>,
        subject: Subject,
        tests: &[&str],
    ) -> Result<Judged> {
        let judging = Judging {
            judges: tests.iter().map(|&test| test.to_owned()).collect(),
            subject: Some(subject),
            ..self.judging.clone()
        };
        let (mut reader, mut verdicts, mut left) = (Reader::default(), BTreeMap::new(), None);
        let tests = self.tests.to_string_lossy();
        let variable = judging.to_env()?;
        let taken = guest.take()?;
        let (status, errors) =
            taken.run(&[&tests, "--format", "json"], variable, |line| match reader.read(line) {
                TestEvent::Ended(ended) => drop(verdicts.insert(ended.name.clone(), ended)),
                TestEvent::Waiting(what) => {
                    say!("waiting for {what}, up to a minute or two (Ctrl-C ends)")
                }
                TestEvent::Left(what) => left.get_or_insert_with(Vec::new).extend(what),
                _ => {}
            })?;
        if verdicts.len() < judging.judges.len() {
            let (said, of) = (verdicts.len(), judging.judges.len());
            bail!(
                "the judges ended early, exit status {status}: {said} of {of} have said something\n{errors}"
            );
        }
        if !are_theirs(status, verdicts.values().map(|ended| &ended.verdict)) {
            bail!(
                "the judges ended with exit status {status}, which does not go with these verdicts: something \
                 else has written them, or has ended the judges. Is it your program?\n{errors}"
            );
        }
        let left = left.context("the judges ended without a word about what is left")?;
        match &left[..] {
            [] => taken.is_clean()?,
            what => taken.note_unclean(&what_is_left(what))?,
        }
        Ok(Judged { ended: verdicts, left })
    }
}

/// Why a guest in which that is left is of no use to the next attempt.
fn what_is_left(what: &[String]) -> String {
    let more = what.len().saturating_sub(LEFT_SHOWN);
    let shown = what[..what.len() - more].join(", ");
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("an earlier run has left something ({shown}{more})")
}

/// Whether the guest tests themselves can have said this: what runs beside them as root, such as an attempt,
/// may write where they write, but it is the guest's init that reports their exit status.
fn are_theirs<'a>(status: i32, verdicts: impl IntoIterator<Item = &'a Verdict>) -> bool {
    let failed = verdicts.into_iter().any(|verdict| matches!(verdict, Verdict::Failed(_)));
    status == if failed { 101 } else { 0 }
}

/// Whether no attempt was judged here yet: what is built takes minutes then.
pub fn is_first(run: &Run) -> bool {
    !run.workspace().join(STATE).join("log").exists()
}

/// Builds an attempt; where it does not compile, the error is the compiler's message.
pub fn build_attempt(cargo: &Cargo, package: &str) -> Result<Result<PathBuf, String>> {
    let prepared = attempts::prepare(cargo, package)?;
    if let Some(why) = &prepared.fallback_reason {
        say!("cargo cannot read all attempts, so only {} is built:\n{why}", package);
    }
    Ok(prepared.build(package, false)?.map_err(|said| explain::compiler(&said).to_owned()))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use workshop::workspace;

    use crate::exercise::Exercise;

    #[test]
    fn a_verdict_needs_the_judges_own_exit_status() {
        let failed = [Verdict::Passed, Verdict::Failed("why".to_owned()), Verdict::NotRun];
        assert!(are_theirs(0, &[Verdict::Passed, Verdict::NotJudged("why".to_owned())]));
        assert!(are_theirs(101, &failed));
        // Killed, and spoken for; or it said no, and something else said yes in its name.
        assert!(!are_theirs(137, &[Verdict::Passed]) && !are_theirs(101, &[Verdict::Passed]));
        assert!(!are_theirs(0, &failed));
    }

    #[test]
    fn what_is_left_is_named_in_a_line() {
        let what: Vec<String> = (0..5).map(|n| format!("disk dm-{n}")).collect();
        assert_eq!(
            what_is_left(&what),
            "an earlier run has left something (disk dm-0, disk dm-1, disk dm-2 and 2 more)"
        );
        assert!(what_is_left(&what[..1]).ends_with("something (disk dm-0)"));
    }

    #[test]
    fn every_judge_is_a_guest_test() {
        let workspace = workspace();
        let exercises = Exercise::all(&workspace).unwrap();
        let judges: Vec<String> =
            exercises.iter().flat_map(Exercise::judges).map(|it| it.test.clone()).collect();
        // As `cargo vm test` builds it, which runs this test: it is there already.
        let cargo = Cargo::new(&workspace, true);
        let built = cargo.artifacts(&["test", "--workspace", "--no-run"]).unwrap();
        let tests = executable(&built, "guest").unwrap();
        // It refuses a name that is none.
        let list = |judges: Vec<String>| {
            let judging = Judging { judges, ..Judging::by(&tests, &workspace) };
            let mut list = Command::new(&tests);
            list.arg("--list").envs([judging.to_env().unwrap()]).output().unwrap()
        };
        let (listed, unknown) = (list(judges), list(vec!["no_such_test".to_owned()]));
        assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
        assert!(!unknown.status.success());
    }
}
