//! `cargo lesson`: exercises that a machine checks. The judges are the guest tests, with the
//! learner's program in the place of the stage.

mod class;
mod desk;
mod exercise;
mod experiments;
mod explain;
mod incident;
mod judges;
mod mutants;
mod next;
mod prove;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, IsTerminal, Write},
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use workshop::{
    events::{Ended, Verdict},
    fail::{USAGE, fail},
    judging::Subject,
    printable, say,
};

use textwrap::{Options, WordSplitter, indent};
use vm::{
    arch::Arch,
    commands::kept::{Hidden, Kept},
    run::Run,
};

use crate::{
    class::{Class, Joined, Outcome},
    desk::{Desk, STATE},
    exercise::{Exercise, HINTS, Judge},
    judges::Judges,
    next::Progress,
    prove::Prove,
};

/// Not yet: a judge said no, or the attempt does not compile.
const NOT_YET: u8 = 1;
/// Exercises that a machine checks. Without a command: where you are, and what to do next.
///
/// Exit codes: 0 done, 1 not yet, 2 wrong usage, 125 the virtual machine died.
#[derive(Parser)]
#[command(name = "cargo lesson", bin_name = "cargo lesson")]
struct Cli {
    /// The virtual machine's architecture [default: this machine's]
    #[arg(long, global = true, env = "VM_ARCH", value_enum)]
    arch: Option<Arch>,
    #[command(subcommand)]
    command: Option<Cmd>,
}

#[derive(Subcommand)]
enum Cmd {
    /// Begin an exercise, or return to it: copies its starting point to mine/ID
    Start {
        /// 04, or the name of an exercise [default: the first that is not done]
        id: Option<String>,
    },
    /// Judge your attempt, in the virtual machine
    Check(Check),
    /// Show the next of three hints
    Hint,
    /// Show the differences between your attempt and the answer, once it is done
    Solution {
        /// Show them before it is done
        #[arg(long)]
        anyhow: bool,
    },
    /// Start over; the attempt is kept in mine.old/
    Reset {
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// End the virtual machine that `check` keeps
    Stop,
    /// Find out what is wrong with a machine: disks, services, and a fault that a number determines
    Incident(incident::Options),
    /// Say what is wrong, and learn whether that is right
    Answer(incident::Said),
    /// Show on a page where everybody in a class is, until Ctrl-C
    Class {
        /// Where to listen; 0.0.0.0:3001 lets other machines reach it
        #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:3001")]
        listen: SocketAddr,
    },
    /// Report your verdicts to a class: exercise, judge, minutes, hints, incidents; never code
    Join {
        /// The address that the class listens on, such as 192.168.1.7:3001
        address: String,
        /// What the page calls you
        name: String,
    },
    /// Report nothing any more
    Leave,
    /// Prove that every exercise can be failed and passed, and every README's experiment too
    #[command(hide = true)]
    Prove(Prove),
    #[command(flatten)]
    Hidden(Hidden),
}

#[derive(Args)]
struct Check {
    /// The exercise, which becomes the current one [default: the one that was started last]
    id: Option<String>,
    /// Check again whenever you save a file, until all judges agree
    #[arg(long)]
    watch: bool,
    /// Kernel line: 6.1, 6.1-rt, 6.12, 6.18, 7.2, 7.3 [default: the exercise's; else 6.1, arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE")]
    kernel: Option<String>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Cmd::Hidden(hidden)) = cli.command {
        vm::commands::main(!matches!(hidden, Hidden::Agent), || hidden.main(|| Run::new(cli.arch)));
    }
    // A reader that goes (`cargo lesson | head -1`) ends this program quietly, as it does others.
    // SAFETY: no other thread runs yet, and the default action needs no handler.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    match run(cli) {
        Ok(code) => code,
        Err(error) => {
            say!("{error:#}");
            ExitCode::from(workshop::fail::code(&error) as u8)
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode> {
    let workspace = workshop::root()?;
    let run = || Run::new(cli.arch);
    let exercises = Exercise::all(&workspace)?;
    let mut desk = Desk::open(&workspace)?;
    let current = || {
        let id = desk.progress.current.as_deref();
        let found = exercises.iter().find(|exercise| Some(exercise.id.as_str()) == id);
        found.ok_or_else(|| fail(USAGE, "no exercise is started yet: cargo lesson start"))
    };
    let done = ExitCode::SUCCESS;
    match cli.command {
        None => status(&desk, &exercises)?,
        Some(Cmd::Start { id }) => start(&mut desk, &exercises, id)?,
        Some(Cmd::Check(check)) => {
            let exercise = match &check.id {
                Some(id) => named(&exercises, id)?.clone(),
                None => current()?.clone(),
            };
            if !desk.has_attempt(&exercise) {
                let message = format!(
                    "{} does not exist: cargo lesson start {} makes it",
                    exercise.directory().display(),
                    exercise.id
                );
                return Err(fail(USAGE, message));
            }
            if check.id.is_some() {
                desk.start(&exercise)?;
            }
            return check.run(&run()?, &mut desk, &exercise, &exercises);
        }
        Some(Cmd::Hint) => {
            let exercise = current()?.clone();
            match desk.hint(&exercise)? {
                Some((number, hint)) => {
                    // Prose is one line, code several.
                    let hint =
                        if hint.contains('\n') { hint.to_owned() } else { wrapped(hint, 90) };
                    println!("Hint {number} of {HINTS}:\n\n{}", indent(hint.trim_end(), "  "));
                }
                None => {
                    let anyhow = if desk.known(&exercise).done { "" } else { " --anyhow" };
                    println!(
                        "There are no more hints. `cargo lesson solution{anyhow}` shows the answer."
                    );
                }
            }
        }
        Some(Cmd::Solution { anyhow }) => {
            let exercise = current()?;
            if !anyhow && !desk.known(exercise).done {
                let message = "your attempt has not passed yet; `cargo lesson solution --anyhow` \
                               shows the answer nevertheless";
                return Err(fail(NOT_YET.into(), message));
            }
            let (mine, answer) = (exercise.directory().join("src"), exercise.solution.join("src"));
            println!("diff -u {} {}", mine.display(), answer.display());
            let mut diff = Command::new("diff");
            diff.arg("-ru").args([mine, answer]).current_dir(&workspace);
            diff.status().context("cannot start diff")?;
        }
        Some(Cmd::Reset { yes }) => {
            let exercise = current()?.clone();
            let mine = exercise.directory();
            if !yes && !confirmed(&format!("Start {} over?", mine.display()))? {
                println!("Nothing was changed.");
                return Ok(done);
            }
            if desk.has_attempt(&exercise) {
                let kept = desk.reset(&exercise)?;
                println!("Your attempt is in {} now.", kept.display());
            } else {
                desk.start(&exercise)?;
            }
            println!("{} starts from {} again.", mine.display(), exercise.start.display());
        }
        Some(Cmd::Prove(options)) => {
            let wrong = prove::prove(&run()?, &options)?;
            return Ok(if wrong.is_empty() { done } else { ExitCode::from(NOT_YET) });
        }
        Some(Cmd::Stop) => match Kept::of(&run()?, None).stop()? {
            true => println!("The virtual machine has ended."),
            false => println!("No virtual machine is running."),
        },
        Some(Cmd::Incident(options)) => return incident::begin(&run()?, &mut desk, &options),
        Some(Cmd::Answer(said)) => return incident::answer(&run()?, &mut desk, &said),
        Some(Cmd::Class { listen }) => {
            let message = format!("cannot listen on {listen}: choose another one with --listen");
            let listener = TcpListener::bind(listen).context(message)?;
            println!("http://{} shows who has joined. Ctrl-C ends it.", listener.local_addr()?);
            Class::new(&exercises).serve(listener)?;
        }
        Some(Cmd::Join { address, name }) => {
            class::check_name(&name).map_err(|error| fail(USAGE, error.to_string()))?;
            let exercise = current().ok().cloned();
            Joined::join(&mut desk, address.clone(), name, exercise.as_ref())?;
            println!(
                "Each `cargo lesson start` and `check` tells {address} your name, the exercise, \
                 which judge\nsays no, the minutes since the start, how many hints you took, and your \
                 answers to incidents;\nnever your code. `cargo lesson leave` ends that."
            );
        }
        Some(Cmd::Leave) => match class::leave(&mut desk)? {
            true => println!("Nothing is reported any more."),
            false => println!("You have joined no class."),
        },
        Some(Cmd::Hidden(_)) => {}
    }
    Ok(done)
}

/// Asks on the terminal; without one, nobody can agree.
fn confirmed(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Err(fail(USAGE, "reset asks on a terminal; --yes answers without one"));
    }
    print!("{question} The old one is kept in mine.old/. [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

/// A paragraph in lines of at most so many columns.
fn wrapped(text: &str, columns: usize) -> String {
    let options = Options::new(columns).word_splitter(WordSplitter::NoHyphenation);
    let words: Vec<&str> = text.split_whitespace().collect();
    textwrap::fill(&words.join(" "), options)
}

fn status(desk: &Desk, exercises: &[Exercise]) -> Result<()> {
    let progress = Progress::at(desk, exercises)?;
    let own = exercises.iter().position(Exercise::is_own);
    for (number, exercise) in exercises.iter().enumerate() {
        if own == Some(number) {
            println!("\nOn your own:");
        }
        let mark = match (desk.known(exercise).done, desk.has_attempt(exercise)) {
            (true, _) => "✓",
            (false, true) => "…",
            (false, false) => " ",
        };
        let is_current = desk.progress.current.as_deref() == Some(exercise.id.as_str());
        let arrow = if is_current { ">" } else { " " };
        let after = match progress.waits_for(exercise) {
            Some(stage) if mark == " " => format!(" (after stage {stage})"),
            _ => String::new(),
        };
        println!("{arrow} {mark} {:<10} {}{after}", exercise.id, exercise.title);
    }
    let current = exercises.iter().find(|e| desk.progress.current.as_ref() == Some(&e.id));
    match current.filter(|exercise| desk.has_attempt(exercise)) {
        Some(exercise) if !desk.known(exercise).done => println!(
            "\nEdit {}/src, then run `cargo lesson check`. Stuck? `cargo lesson hint`",
            exercise.directory().display()
        ),
        _ if exercises.iter().all(|exercise| desk.known(exercise).done) => {
            println!("\nAll exercises are done. `cargo lesson start ID` returns to one.");
        }
        Some(exercise) => {
            println!("\n{}", progress.after(exercise));
        }
        None => println!("\n`cargo lesson start` begins the next exercise, `start ID` any other."),
    }
    Ok(())
}

/// The exercise of this id: `04`, `4`, `histogram`.
fn named<'e>(exercises: &'e [Exercise], id: &str) -> Result<&'e Exercise> {
    let found = exercises.iter().find(|e| e.id == id || e.id == format!("{id:0>2}"));
    found.ok_or_else(|| {
        let ids: Vec<&str> = exercises.iter().map(|e| e.id.as_str()).collect();
        fail(USAGE, format!("there is no exercise {id}; there are {}", ids.join(", ")))
    })
}

fn start(desk: &mut Desk, exercises: &[Exercise], id: Option<String>) -> Result<()> {
    let progress = Progress::at(desk, exercises)?;
    let none_left =
        || fail(USAGE, "all exercises are done; `cargo lesson start ID` returns to one");
    let exercise = match &id {
        Some(id) => named(exercises, id)?,
        None => progress.first().ok_or_else(none_left)?,
    };
    let (id, mine) = (&exercise.id, exercise.directory());
    let mine = mine.display();
    match desk.start(exercise)? {
        true => println!("{mine} is a copy of {}.", exercise.start.display()),
        false => println!(
            "{mine} is your earlier attempt, as you left it. `cargo lesson reset` starts over."
        ),
    }
    println!("\nRead: {}", exercise.read);
    println!("\nExercise {id}: {}\n\n{}\n", exercise.title, indent(exercise.task.trim_end(), "  "));
    let kernel = exercise.kernel.as_ref().map(|kernel| format!("--kernel {kernel} "));
    let run = format!("cargo vm run {}{}", kernel.unwrap_or_default(), exercise.package());
    println!("Edit {mine}/src. `{run}` runs your program,");
    println!("`cargo lesson check` judges it, `cargo lesson hint` helps.");
    class::report(desk, Some(exercise), Outcome::Here);
    Ok(())
}

impl Check {
    fn run(
        &self,
        run: &Run,
        desk: &mut Desk,
        exercise: &Exercise,
        exercises: &[Exercise],
    ) -> Result<ExitCode> {
        let workspace = run.workspace();
        loop {
            let before = saved(workspace, exercise);
            let done = self.once(run, desk, exercise)?;
            if done {
                println!("\nDone. `cargo lesson solution` compares yours with ours.\n");
                println!("{}", Progress::at(desk, exercises)?.after(exercise));
            }
            if done || !self.watch {
                return Ok(if done { ExitCode::SUCCESS } else { ExitCode::from(NOT_YET) });
            }
            println!("\nWaiting for you to save a file (Ctrl-C ends)\n");
            while saved(workspace, exercise) == before {
                thread::sleep(Duration::from_millis(200));
            }
            println!("building …\n");
        }
    }

    /// Judges the attempt as it is now. Whether all judges agree.
    fn once(&self, run: &Run, desk: &mut Desk, exercise: &Exercise) -> Result<bool> {
        let workspace = run.workspace();
        let judges = Judges::build(run, [])?;
        let cargo = run.guests()?.quiet();
        let program = match judges::build_attempt(&cargo, &exercise.package())? {
            Ok(program) => program,
            Err(said) => {
                println!("{said}");
                if let Some(meaning) = explain::missing_field(&said) {
                    println!("\nWhat this means:\n{}", wrapped(meaning, 90));
                }
                println!("\nYour program does not compile yet.");
                class::report(desk, Some(exercise), Outcome::Broken);
                return Ok(false);
            }
        };
        let named = self.kernel.as_ref().filter(|kernel| !kernel.is_empty());
        let kernel = named.or(exercise.kernel.as_ref());
        let guest = Kept::of(run, kernel.map(String::as_str));
        guest.start()?;
        let number = exercise.judges.len();
        let s = if number == 1 { "" } else { "s" };
        println!("exercise {}, {number} judge{s}, {}", exercise.id, guest.kernel());
        let log = workspace.join(STATE).join("log");
        fs::write(&log, "")?;
        let tests: Vec<&str> = exercise.judges.iter().map(|judge| judge.test.as_str()).collect();
        let subject = Subject { name: exercise.judged_as(), file: program, is_attempt: true };
        let said = judges.run(&guest, subject, &tests, |ended| {
            let judge = exercise.judges.iter().find(|judge| judge.test == ended.name);
            let Some(judge) = judge else { return };
            println!("{}", printable(&shown(judge, ended)));
            if let Verdict::Failed(why) = &ended.verdict {
                fs::write(&log, printable(&events_last(why))).ok();
            }
        })?;
        self.conclude(desk, exercise, &said)
    }

    fn conclude(
        &self,
        desk: &mut Desk,
        exercise: &Exercise,
        said: &BTreeMap<String, Verdict>,
    ) -> Result<bool> {
        let good = said.values().filter(|verdict| **verdict == Verdict::Passed).count();
        if good == exercise.judges.len() {
            desk.note(exercise, |known| known.done = true)?;
            class::report(desk, Some(exercise), Outcome::Passed);
            return Ok(true);
        }
        if !said.values().any(|verdict| matches!(verdict, Verdict::Failed(_) | Verdict::NotRun)) {
            println!(
                "\nNo judge refuses your program, but not every judge works on this kernel. \
                 `cargo lesson check --kernel LINE` checks on another one."
            );
            return Ok(false);
        }
        let no = exercise.judges.iter().find_map(|judge| match said.get(&judge.test)? {
            Verdict::Failed(_) => Some(judge.test.clone()),
            _ => None,
        });
        if let Some(judge) = no {
            class::report(desk, Some(exercise), Outcome::Refused { judge });
        }
        println!("\nAll that the judge said: {STATE}/log");
        println!("Read: {}   Stuck? cargo lesson hint", exercise.read);
        Ok(false)
    }
}

/// What a learner sees of a judge.
fn shown(judge: &Judge, ended: &Ended) -> String {
    let title = &judge.title;
    match &ended.verdict {
        Verdict::Passed => {
            let compared = ended.compared.iter().map(|figures| format!("\n      {figures}"));
            format!("  ✓ {title}{}", compared.collect::<String>())
        }
        Verdict::NotJudged(why) => format!("  – {title} (not judged: {why})"),
        Verdict::NotRun => format!("  – {title} (not run)"),
        Verdict::Failed(why) => {
            format!("  ✗ {title}\n{}", failure(&judge.expected, &events_last(why)))
        }
    }
}

/// How many lines of a judge's message are shown; the others are in the log.
const SHOWN: usize = 12;

/// A judge's message, with the lines of the trace pipe that it quotes behind all others: the program
/// prints its summary after them, and the summary says more.
fn events_last(why: &str) -> String {
    let (mut lines, mut events) = (Vec::new(), Vec::new());
    for line in why.lines() {
        let (text, event) = line.split_at(event(line).unwrap_or(line.len()));
        lines.extend(Some(text.trim_end()).filter(|text| event.is_empty() || !text.is_empty()));
        events.extend(Some(event).filter(|event| !event.is_empty()));
    }
    lines.extend(events);
    lines.join("\n")
}

/// Where an event of the trace pipe begins in this line: 24 columns for the task, then the CPU.
fn event(line: &str) -> Option<usize> {
    let (task_and_cpu, _) = line.split_once(": bpf_trace_printk: ")?;
    let start = task_and_cpu.rfind(" [")?.checked_sub(24)?;
    line.is_char_boundary(start).then_some(start)
}

/// What a learner sees of a judge that says no.
fn failure(expected: &str, why: &str) -> String {
    let lines: Vec<&str> = why.lines().collect();
    let mut shown = lines[..lines.len().min(SHOWN)].join("\n");
    if lines.len() > SHOWN {
        shown += &format!("\n… and {} more lines", lines.len() - SHOWN);
    }
    let mut text = format!(
        "      expected:\n{}\n      yours:\n{}",
        indent(expected.trim_end(), "        "),
        indent(&shown, "        ")
    );
    if explain::is_refused(why)
        && let Some(meaning) = explain::refusal(why)
    {
        let meaning = indent(&wrapped(meaning, 80), "        ");
        text += &format!("\n      what this means:\n{meaning}");
    }
    text
}

/// When the files of the attempt were last saved.
fn saved(workspace: &Path, exercise: &Exercise) -> Vec<(PathBuf, SystemTime)> {
    let package = workspace.join(exercise.directory());
    let directories = [package.join("src"), package];
    let entries = directories.iter().filter_map(|dir| fs::read_dir(dir).ok()).flatten().flatten();
    let times =
        entries.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.modified().ok()?)));
    let mut times: Vec<_> = times.filter(|(path, _)| path.is_file()).collect();
    times.sort();
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_failure_is_short_and_explained() {
        let long = format!("0 lines, 500 reads\n{}", "x\n".repeat(100));
        let shown = failure("a line for every bio", &long);
        assert!(shown.starts_with("      expected:\n        a line for every bio\n"), "{shown}");
        assert!(shown.contains("… and 89 more lines") && shown.lines().count() < 20, "{shown}");
        let shown =
            failure("x", "the verifier rejects y(): R0 invalid mem access 'map_value_or_null'");
        assert!(shown.contains("what this means:\n        A look-up"), "{shown}");
    }

    #[test]
    fn a_judge_that_could_not_judge_is_not_a_good_one() {
        let judge = Judge { test: "a".into(), title: "title".into(), expected: "x".into() };
        let ended = |verdict| Ended {
            name: "a".into(),
            verdict,
            compared: vec!["1 with 1".into()],
            weakly: None,
            cost: None,
        };
        assert_eq!(shown(&judge, &ended(Verdict::Passed)), "  ✓ title\n      1 with 1");
        let why = Verdict::NotJudged("no fentry".into());
        assert_eq!(shown(&judge, &ended(why)), "  – title (not judged: no fentry)");
    }

    #[test]
    fn a_summary_comes_before_events() {
        let event =
            "              dd-550     [001] ...21   229.544672: bpf_trace_printk: submit_bio(";
        let why = format!("1 of 500: {event}\n{event}\n\n2 trace lines, 0 lost\n       1 bios");
        let shown = format!("1 of 500:\n\n2 trace lines, 0 lost\n       1 bios\n{event}\n{event}");
        assert_eq!(events_last(&why), shown);
        // The name of a task has 15 characters at most, and any of them.
        let odd = event.replace("             dd-", "[x] y-z: [0000]-");
        assert_eq!(events_last(&format!("no: {odd}\nlast")), format!("no:\nlast\n{odd}"));
    }
}
