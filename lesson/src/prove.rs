//! `cargo lesson prove`: every exercise can be failed and passed, its judges refuse the wrong answers
//! that are known, and every experiment of a README ("Break it") gives the error that the README shows,
//! or turns a judge red.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Mutex, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow, bail, ensure};
use clap::Args;
use workshop::{
    cargo::Cargo,
    events::{Ended, Verdict},
    judging::Subject,
    lock,
};

use vm::{
    cargo::follow::{at_once, workers},
    commands::background::BackgroundGuest,
    run::Run,
};

use crate::{
    claims::{About, Claim, ClaimSource, Expected, claims},
    experiments::is_shown,
    explain,
    judges::{Judged, Judges},
    lesson::NOT_YET,
    mutants::{self, Workshop},
};

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
    #[arg(long, value_name = "DAYS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..), allow_hyphen_values = true)]
    days: u64,
    /// Try nothing more after this time, and say how much was left (20m)
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, allow_hyphen_values = true)]
    within: Option<Duration>,
    /// Prove only what contains one of these
    filters: Vec<String>,
}

/// Claims, the judges that they need, and the guests in which they are proven.
struct Proof<'r> {
    /// Cargo, as it builds for guests.
    cargo: Cargo,
    judges: Judges,
    claims: Vec<Built>,
    guests: Vec<BackgroundGuest<'r>>,
    /// Whether every kernel gets wrong answers and experiments.
    all: bool,
    /// A sample has one claim in so many.
    days: u64,
    today: u64,
    /// When nothing more is tried.
    deadline: Option<Instant>,
}

/// Proves the exercises on each of the kernels (of a sample, on one of them), as many at a time as there are CPUs;
/// that wrong answers are refused, half of them on the first kernel and half on the last one; and the experiments on
/// the first one, whose messages the READMEs show, and the wrong programs, but for those that name another one.
/// Returns the exit code: "not yet" where something does not hold.
pub fn prove(run: &Run, options: &Prove) -> Result<ExitCode> {
    // A proof that was interrupted leaves its programs.
    mutants::remove(run.workspace());
    let proof = Proof::choose(run, options)?;
    proof.name_what_is_left_out();
    let sum = proof.run();
    mutants::remove(run.workspace());
    let holds = proof.report(&sum)?;
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::from(NOT_YET) })
}

impl<'r> Proof<'r> {
    /// What these options come to.
    fn choose(run: &'r Run, options: &Prove) -> Result<Proof<'r>> {
        let Prove { kernel: kernels, all, days, within, filters } = options;
        let deadline = within.and_then(|within| Instant::now().checked_add(within));
        let programs = mutants::programs(&run.cargo)?;
        let judges = Judges::build(run, programs.iter().map(|program| program.package.as_str()))?;
        let mut claims = claims(run.workspace(), &judges, &programs, *all)?;
        let wanted = |what: &str| filters.iter().any(|filter| what.contains(filter));
        claims.retain(|claim| filters.is_empty() || wanted(&claim.what));
        ensure!(!claims.is_empty(), "there is nothing to prove that contains one of {filters:?}");
        let today = workshop::today();
        sample(&mut claims, *days, today);
        let named = kernels.iter().map(|kernel| BackgroundGuest::for_proof(run, Some(kernel)));
        let default = kernels.is_empty().then(|| BackgroundGuest::for_proof(run, None));
        Ok(Proof {
            cargo: run.guests()?.quiet(),
            judges,
            claims: claims.into_iter().map(|claim| (claim, OnceLock::new())).collect(),
            guests: named.chain(default).collect(),
            all: *all,
            days: *days,
            today,
            deadline,
        })
    }

    /// The claims that are proven in the guest of this number.
    fn claims_of(&self, number: usize) -> Vec<&Built> {
        let last = self.guests.len() - 1;
        let wanted = |(at, (claim, _)): &(usize, &Built)| match (&claim.kernel, claim.about) {
            (Some(kernel), _) => self.guests[number].runs(kernel),
            (None, About::WrongProgram) => number == 0,
            _ if self.all => true,
            (None, About::Experiment) => number == 0,
            (None, About::WrongAnswer) => number == if at % 2 == 0 { 0 } else { last },
            // A sample has each claim about an exercise on one kernel, tomorrow on the other one.
            _ if self.days > 1 && (*at as u64 + self.today).is_multiple_of(2) => number == 0,
            _ if self.days > 1 => number == last,
            _ => true,
        };
        self.claims.iter().enumerate().filter(wanted).map(|(_, built)| built).collect()
    }

    fn name_what_is_left_out(&self) {
        for (claim, _) in &self.claims {
            if let Some(kernel) = &claim.kernel
                && !self.guests.iter().any(|guest| guest.runs(kernel))
            {
                workshop::outln!("- {}: not proven: needs --kernel {kernel}", claim.what);
            }
        }
    }

    /// Tries all claims. While the guests judge one program, the host builds the next.
    fn run(&self) -> Sum {
        let sum = Mutex::new(Sum::default());
        thread::scope(|scope| {
            scope.spawn(|| self.build_programs());
            at_once(workers(), &(0..self.guests.len()).collect::<Vec<_>>(), |&number| {
                self.prove_in(number, &sum);
                Ok(())
            });
        });
        sum.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    fn build_programs(&self) {
        let originals = self.claims.iter().filter_map(|(claim, _)| match &claim.program {
            ClaimSource::Edited(original, _) => Some(original),
            ClaimSource::Already(_) => None,
        });
        let copy = Workshop::copy(&self.cargo, &originals.collect::<Vec<_>>());
        for (number, (claim, built)) in self.claims.iter().enumerate() {
            let program = match (&claim.program, &copy) {
                (ClaimSource::Already(file), _) => Ok(Ok(file.clone())),
                _ if self.is_over() => Err(anyhow!("the time was up")),
                (_, Err(error)) => Err(anyhow!("{error:#}")),
                (ClaimSource::Edited(original, edit), Ok(copy)) => {
                    copy.build(original, edit, &format!("wrong-{number}"))
                }
            };
            built.set(program).ok();
        }
    }

    /// Boots the guest of this number, and proves its claims there.
    fn prove_in(&self, number: usize, sum: &Mutex<Sum>) {
        let (guest, claims) = (&self.guests[number], self.claims_of(number));
        if claims.is_empty() {
            return;
        }
        match guest.start() {
            Ok(()) => self.prove_all(guest, &claims, sum),
            Err(error) => {
                workshop::outln!("✗ {}: {error:#}", guest.kernel());
                let what = |claim: &Claim| format!("{}: {}", guest.kernel(), claim.what);
                lock(sum).wrong.extend(claims.iter().map(|(claim, _)| what(claim)));
            }
        }
        guest.stop().ok();
    }

    /// Proves claims in one guest, as long as there is time.
    fn prove_all(&self, guest: &BackgroundGuest<'_>, claims: &[&Built], sum: &Mutex<Sum>) {
        for (claim, built) in claims {
            let built = built.wait();
            if self.is_over() {
                lock(sum).not_tried += 1;
                continue;
            }
            let verdict = match built {
                Ok(program) => self.check_in(guest, claim, program.as_ref()),
                Err(error) => Err(anyhow!("{error:#}")),
            };
            let what = format!("{}: {}", guest.kernel(), claim.what);
            match verdict {
                Ok(()) => workshop::outln!("✓ {what}"),
                Err(error) => {
                    let why = format!("{error:#}").replace('\n', "\n    ");
                    workshop::outln!("✗ {what}\n    {why}");
                    lock(sum).wrong.push(format!("{what}\n    {why}"));
                }
            }
        }
    }

    /// Whether a claim holds in this guest, or in a new one where this one's machine let no judge judge: a disk of
    /// QEMU's that has lost a command loses more of them.
    fn check_in(
        &self,
        guest: &BackgroundGuest<'_>,
        claim: &Claim,
        program: Result<&PathBuf, &String>,
    ) -> Result<()> {
        let first = check(&self.judges, guest, claim, program);
        let Err(error) = &first else { return first };
        if !error.is::<Unjudged>() {
            return first;
        }
        workshop::outln!("- {}: {}: {error}; in a new guest:", guest.kernel(), claim.what);
        guest.stop()?;
        guest.start()?;
        check(&self.judges, guest, claim, program)
    }

    /// Says what does not hold, and how many claims hold. Whether all do.
    fn report(&self, sum: &Sum) -> Result<bool> {
        let Sum { wrong, not_tried } = sum;
        // Once more, where the eye ends: the lines above are hundreds.
        for what in wrong {
            workshop::outln!("does not hold: {what}");
        }
        let number: usize = (0..self.guests.len()).map(|number| self.claims_of(number).len()).sum();
        let number = number - not_tried;
        workshop::outln!("{} of {number} hold", number - wrong.len());
        ensure!(number > 0 || *not_tried == 0, "there was no time to try anything");
        if *not_tried > 0 {
            workshop::outln!("{not_tried} more were not tried: the time was up");
        }
        Ok(wrong.is_empty())
    }

    fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// Keeps, of the claims that something is refused, one in `days`, others each day.
fn sample(claims: &mut Vec<Claim>, days: u64, today: u64) {
    let mut turn = today;
    claims.retain(|claim| {
        let is_sampled = !matches!(claim.expected, Expected::Pass);
        turn += u64::from(is_sampled);
        !is_sampled || turn.is_multiple_of(days)
    });
}

/// What came out.
#[derive(Default)]
struct Sum {
    /// The claims that do not hold.
    wrong: Vec<String>,
    /// How many claims there was no time for.
    not_tried: usize,
}

/// The first judge that says no, and why.
fn failed(said: &BTreeMap<String, Verdict>) -> Option<(&String, &String)> {
    said.iter().find_map(|(test, verdict)| match verdict {
        Verdict::Failed(why) => Some((test, why)),
        _ => None,
    })
}

/// No judge says that a program is wrong, and some could not judge it: the message.
#[derive(Debug)]
struct Unjudged(String);

impl std::error::Error for Unjudged {}

impl fmt::Display for Unjudged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a program that is refused prints these lines of the verifier's log with `-v`.
fn shows_log(guest: &BackgroundGuest<'_>, program: &Path, log: &[String]) -> Result<()> {
    let program = program.to_string_lossy();
    let language = ("LC_ALL", "C".to_owned());
    let taken = guest.take()?;
    let (status, said) = taken.run(&[&program, "-v", "--duration", "1s"], language, |_| {})?;
    ensure!(status != 0, "the verifier accepts it");
    taken.is_clean()?; // it was not loaded: nothing of it is left
    is_shown(&said, log)
}

/// Each judge that passes an answer says what it has compared, and they leave the guest as it was: an error where
/// not.
fn is_well_judged(Judged { ended, left }: &Judged) -> Result<()> {
    let is_mute = |it: &&Ended| it.verdict == Verdict::Passed && it.compared.is_empty();
    let mute = ended.values().find(is_mute).map(|it| &it.name);
    ensure!(mute.is_none(), "{mute:?} passes it, and does not say what it has compared");
    ensure!(left.is_empty(), "the next check needs another guest: {}", left.join(", "));
    Ok(())
}

/// Whether a claim holds; an error where not.
fn check(
    judges: &Judges,
    guest: &BackgroundGuest<'_>,
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
    let judged = judges.run(guest, subject, &tests)?;
    if claim.about == About::Exercise && matches!(claim.expected, Expected::Pass) {
        is_well_judged(&judged)?;
    }
    let said = judged.ended.into_iter().map(|(test, ended)| (test, ended.verdict)).collect();
    let bad = failed(&said);
    match (&claim.expected, bad) {
        (Expected::Pass, Some((test, why))) => bail!("{test}: {why}"),
        (Expected::Pass, None) => {
            ensure!(said.len() == tests.len(), "{} of {} judges ran", said.len(), tests.len());
            let passed = said.values().any(|verdict| *verdict == Verdict::Passed);
            if !passed {
                return Err(Unjudged(format!("no judge could judge: {said:?}")).into());
            }
            Ok(())
        }
        (Expected::Refused { lines, log }, Some((_, why))) => {
            is_shown(why, lines)?;
            if log.is_empty() { Ok(()) } else { shows_log(guest, program, log) }
        }
        (_, None) if said.values().any(|verdict| matches!(verdict, Verdict::NotJudged(_))) => {
            Err(Unjudged(format!("no judge refuses it, and not all could judge it: {said:?}"))
                .into())
        }
        (Expected::NotCompiled(_), _) | (_, None) => bail!("no judge refuses it: {said:?}"),
        // A judge that says no because the program does not start has not judged it.
        (Expected::Fail, Some((test, why))) => {
            let starts =
                !explain::is_refused(why) && (is_attempt || !why.contains(explain::NO_START));
            ensure!(starts, "{test}: {why}");
            Ok(())
        }
    }
}
