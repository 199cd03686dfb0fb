//! Starting and ending the programs under test.

use std::{
    cell::Cell,
    io::{BufRead, BufReader, Read},
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    sync::{
        Arc, LazyLock,
        mpsc::{Receiver, RecvTimeoutError},
    },
};

use rustix::{
    process::kill_process,
    thread::{CpuSet, sched_setaffinity},
    time::{ClockId, clock_gettime},
};
use workshop::{events::GuestMessage, judging::Judging};

use crate::prelude::*;

/// The longest that anything here may take; then it has failed.
pub const LIMIT: Duration = Duration::from_secs(120);

/// The longest that an attempt may take to end after Ctrl-C: a learner waits.
const ENDING: Duration = Duration::from_secs(60);

/// How long a learner waits without a word.
const SILENCE: Duration = Duration::from_secs(10);

/// The most that an attempt may print on each stream, in bytes.
const MOST: u64 = 16 << 20;

/// Set where a judge has failed, or the check was interrupted: an attempt is waited for no more.
pub static OVER: AtomicBool = AtomicBool::new(false);

/// The directory of the programs under test, in memory.
const PROGRAMS: &str = "/run/programs";

/// What this run is told.
pub fn judging() -> &'static Judging {
    static JUDGING: LazyLock<Judging> =
        LazyLock::new(|| Judging::from_env().unwrap_or_else(|error| panic!("{error:#}")));
    &JUDGING
}

/// The program in whose place an attempt runs, and that attempt: only where `cargo lesson` judges one.
pub fn subject() -> Option<(String, PathBuf)> {
    let subject = judging().subject.as_ref().filter(|subject| subject.is_attempt)?;
    Some((subject.name.clone(), subject.file.clone()))
}

/// What runs in the place of this program: an attempt, or a wrong program that a test has to refuse.
fn in_place_of(program: &str) -> Option<&'static Path> {
    let subject = judging().subject.as_ref().filter(|subject| subject.name == program)?;
    Some(&subject.file)
}

/// Whether this program is to be judged: only the attempt where there is one.
pub fn is_judged(program: &str) -> bool {
    subject().is_none_or(|(subject, _)| subject == program)
}

/// Whether this program is judged: all are, but where there is an attempt or a wrong program.
pub fn is_subject(program: &str) -> bool {
    judging().subject.as_ref().is_none_or(|subject| subject.name == program)
}

/// How much of a load to run: a third where `cargo lesson` judges an attempt, and a learner waits.
pub fn load(all: u64) -> u64 {
    if subject().is_some() { all.div_ceil(3) } else { all }
}

/// All of these cases, or only the last `few` where `cargo lesson` judges an attempt: a learner waits.
pub fn cases<T>(all: impl IntoIterator<Item = T>, few: usize) -> Vec<T> {
    let mut all: Vec<T> = all.into_iter().collect();
    let left_out = if subject().is_some() { all.len().saturating_sub(few) } else { 0 };
    all.drain(..left_out);
    all
}

/// What an attempt was compared with, and its figure: `cargo lesson` shows it beside the verdict.
pub fn compared(figures: &str) {
    if subject().is_some() {
        GuestMessage::Compared(figures.to_owned()).print();
    }
}

/// Fails where an attempt's figures are wrong, with its output; else says what they were compared with.
pub fn judge(is_right: bool, figures: &str, output: &str) -> Result<()> {
    ensure!(is_right, "{figures}:\n{output}");
    compared(figures);
    Ok(())
}

/// Nanoseconds as milliseconds: `200.4 ms`.
pub fn ms(ns: u64) -> String {
    format!("{}.{} ms", ns / 1_000_000, ns / 100_000 % 10)
}

/// The path of a program of the workshop, in memory: the workspace is shared without a cache, and a
/// program started from it takes twice as long.
pub fn program(name: &str) -> PathBuf {
    let from = in_place_of(name).map_or_else(|| built().join(name), Path::to_owned);
    let to = Path::new(PROGRAMS).join(name);
    copy(&from, &to).unwrap_or_else(|error| {
        let beside = "what a judge runs beside an attempt stands in `beside` of exercise.toml";
        panic!("{}: {error} ({beside})", from.display())
    });
    to
}

/// Copies a program, unless that was done: `cargo lesson` runs many tests in one guest.
fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    let (new, old) = (fs::metadata(from)?, fs::metadata(to));
    let time = new.modified()?;
    if old.is_ok_and(|old| old.len() == new.len() && old.modified().is_ok_and(|t| t == time)) {
        return Ok(());
    }
    fs::create_dir_all(PROGRAMS)?;
    fs::copy(from, to)?;
    fs::File::open(to)?.set_modified(time)
}

/// The directory in which the programs were built.
pub fn built() -> PathBuf {
    judging().programs.clone()
}

/// The workspace's root.
pub fn workspace() -> PathBuf {
    judging().workspace.clone()
}

/// The directories of the stages there, `stage00_tracex3` first.
pub fn stages() -> Result<Vec<String>> {
    Ok(workshop::stages(&workspace())?)
}

/// Where this test's time goes, so far.
pub mod cost {
    use std::{
        sync::{Mutex, PoisonError},
        time::Instant,
    };

    use workshop::events::Cost;

    /// What was counted, and until when: of programs that start or end at once, each ms counts once.
    static SO_FAR: Mutex<(Cost, Option<Instant>)> =
        Mutex::new((Cost { took: 0, starts: 0, starting: 0, ending: 0 }, None));

    fn add(since: Instant, add: impl FnOnce(&mut Cost, u64)) {
        let mut so_far = SO_FAR.lock().unwrap_or_else(PoisonError::into_inner);
        let (cost, until) = &mut *so_far;
        let since = until.map_or(since, |until| since.max(until));
        add(cost, since.elapsed().as_millis() as u64);
        *until = Some(Instant::now());
    }

    /// A program that was spawned then has said that it is ready.
    pub fn started(since: Instant) {
        add(since, |cost, ms| {
            cost.starts += 1;
            cost.starting += ms;
        });
    }

    /// A program that got a signal then has ended.
    pub fn ended(since: Instant) {
        add(since, |cost, ms| cost.ending += ms);
    }

    /// All of it, and begins anew.
    pub fn take() -> Cost {
        std::mem::take(&mut SO_FAR.lock().unwrap_or_else(PoisonError::into_inner).0)
    }
}

/// A program that runs beside the test.
pub struct Running {
    name: String,
    is_attempt: bool,
    spawned: Instant,
    /// When it got its last signal: one that is stopped and continued does not end.
    signalled: Cell<Option<Instant>>,
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
    said: String,
    /// What was read of its stdout so far.
    printed: String,
    /// Whether it has printed more than it may.
    too_much: Arc<AtomicBool>,
}

/// Adds lines to `read` until one has `text`. Whether one came before their end.
fn line_with(
    text: &str,
    lines: &Receiver<String>,
    read: &mut String,
    is_attempt: bool,
) -> Result<bool> {
    poll_until(&format!("{text:?}"), LIMIT, is_attempt, || {
        match lines.recv_timeout(MOMENT) {
            Ok(line) => read.push_str(&line),
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => return Ok(Some(false)),
        }
        let line = read.lines().next_back().unwrap_or_default();
        Ok(line.contains(text).then_some(true))
    })
}

/// A program that has ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Running {
    /// Starts a stage, and returns when it says that its programs are attached.
    pub fn stage(name: &str, arguments: &[&str]) -> Result<Running> {
        Ok(Running::stages([(name, arguments.to_vec())])?.remove(0))
    }

    /// Starts several stages at once, for a part of a start is waiting, and returns when all are attached.
    pub fn stages<'a>(
        stages: impl IntoIterator<Item = (&'a str, Vec<&'a str>)>,
    ) -> Result<Vec<Running>> {
        let start = |(name, arguments): (&str, Vec<&str>)| {
            Running::spawn(Command::new(program(name)).args(arguments))
        };
        let mut running = stages.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        running.iter_mut().try_for_each(|running| running.wait_for(": tracing "))?;
        Ok(running)
    }

    /// Starts a command.
    pub fn spawn(command: &mut Command) -> Result<Running> {
        let path = Path::new(command.get_program());
        let name = path.to_string_lossy().into_owned();
        let is_attempt = subject().is_some_and(|(own, _)| path == Path::new(PROGRAMS).join(own));
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("{name} does not start"))?;
        let most = if is_attempt { MOST } else { u64::MAX };
        let too_much = Arc::new(AtomicBool::new(false));
        let stdout = lines(child.stdout.take().context("no stdout")?, most, &too_much);
        let stderr = lines(child.stderr.take().context("no stderr")?, most, &too_much);
        let (spawned, signalled) = (Instant::now(), Cell::new(None));
        let [said, printed] = [const { String::new() }; 2];
        Ok(Running {
            name,
            is_attempt,
            spawned,
            signalled,
            child,
            stdout,
            stderr,
            said,
            printed,
            too_much,
        })
    }

    /// Starts a script of the shell.
    pub fn bash(script: &str) -> Result<Running> {
        Running::spawn(Command::new("bash").args(["-c", script]))
    }

    /// Waits for a line on stdout that contains `text`.
    pub fn prints(&mut self, text: &str) -> Result<()> {
        if let Ok(true) = line_with(text, &self.stdout, &mut self.printed, self.is_attempt) {
            return Ok(());
        }
        kill(&self.child);
        bail!("it does not print {text:?} while it runs, but:\n{}", last_of(&self.printed))
    }

    /// Waits for a line on stderr that contains `text`.
    pub fn wait_for(&mut self, text: &str) -> Result<()> {
        if let Ok(true) = line_with(text, &self.stderr, &mut self.said, self.is_attempt) {
            // Else it is a load that has begun.
            if text.contains("tracing") {
                cost::started(self.spawned);
            }
            return Ok(());
        }
        // Its output may end a moment before it.
        thread::sleep(Duration::from_millis(100));
        let ended = self.child.try_wait().ok().flatten();
        kill(&self.child);
        let printed: String = self.stdout.try_iter().collect();
        let said = format!("{}{printed}", self.said);
        let name = self.name.rsplit('/').next().unwrap_or_default();
        let did = match (in_place_of(name), ended) {
            (Some(_), Some(status)) => format!("your program does not start: {}", how(status)),
            (Some(_), None) => "your program does not start: it still runs".to_owned(),
            (None, _) => name.to_owned(),
        };
        let when =
            if text.contains("tracing") { ", as a program does once it is attached" } else { "" };
        let never = format!("it never said {text:?}{when}");
        match last_of(&said).trim_end() {
            "" => bail!("{did}; {never}, and nothing else either"),
            said => bail!("{did}; {never}, but:\n{said}"),
        }
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The functions of the kernel in which it is.
    pub fn stack(&self) -> Result<String> {
        fs::read_to_string(format!("/proc/{}/stack", self.id())).context("no stack")
    }

    /// Waits until it waits in this function of the kernel.
    pub fn waits_in(&self, function: &str) -> Result<()> {
        wait_until(function, || Ok(self.stack()?.contains(function)))
    }

    /// Whether it runs still.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.signalled.set(Some(Instant::now()));
        kill_process(Pid::from_child(&self.child), signal).context("kill")
    }

    /// Waits for the end; a time-out is a failure.
    pub fn end(self) -> Result<Ended> {
        let limit = if self.is_attempt { ENDING } else { LIMIT };
        self.end_within(limit)
    }

    /// Waits for the end within this time; a time-out is a failure.
    pub fn end_within(mut self, limit: Duration) -> Result<Ended> {
        let status = self.status(limit)?;
        let stdout = std::mem::take(&mut self.printed) + &self.rest(&self.stdout)?;
        let stderr = std::mem::take(&mut self.said) + &self.rest(&self.stderr)?;
        if let Some(since) = self.signalled.get() {
            cost::ended(since);
        }
        Ok(Ended { code: status.code(), stdout, stderr })
    }

    /// How it is called where a learner reads it.
    fn shown(&self) -> &str {
        if self.is_attempt { "your program" } else { &self.name }
    }

    fn status(&mut self, limit: Duration) -> Result<ExitStatus> {
        let after = if self.signalled.get().is_some() { " after Ctrl-C" } else { "" };
        let what = format!("the end of {}{after}", self.shown());
        let status = poll_until(&what, limit, self.is_attempt, || {
            let status = self.child.try_wait()?;
            if status.is_none() {
                ensure!(!self.too_much.load(Relaxed), "more than 16 MB of output");
                thread::sleep(MOMENT);
            }
            Ok(status)
        });
        status.map_err(|error| {
            kill(&self.child);
            let said: Vec<String> = self.stdout.try_iter().chain(self.stderr.try_iter()).collect();
            anyhow!("{error}. It was killed; the last that it said:\n{}", last_of(&said.concat()))
        })
    }

    /// Waits for the end, by itself or after a signal; it must exit with 0.
    pub fn end_well(self) -> Result<Ended> {
        let name = self.shown().to_owned();
        let ended = self.end()?;
        if ended.code != Some(0) {
            let code = ended.code.map_or("no exit code".into(), |code| format!("exit code {code}"));
            bail!("{name}: {code}, and it said: {}\n{}", ended.stderr, ended.stdout);
        }
        Ok(ended)
    }

    /// Reads a stream until the program and everything that it has started have closed it.
    fn rest(&self, stream: &Receiver<String>) -> Result<String> {
        let mut text = String::new();
        let what = format!("the end of the output of {}", self.shown());
        let ended = poll_until(&what, LIMIT, self.is_attempt, || {
            match stream.recv_timeout(MOMENT) {
                Ok(line) => text.push_str(&line),
                Err(RecvTimeoutError::Disconnected) => return Ok(Some(())),
                Err(RecvTimeoutError::Timeout) => {}
            }
            Ok(None)
        });
        ended.map_err(|error| {
            kill(&self.child);
            anyhow!(
                "{error}. It has ended, but a process that it started still has its output open"
            )
        })?;
        Ok(text)
    }

    /// Ends the program as Ctrl-C does; it must exit with 0.
    pub fn interrupt(self) -> Result<String> {
        Ok(Running::interrupt_all(vec![self])?.remove(0))
    }

    /// Ends several programs at once as Ctrl-C does; each must exit with 0.
    pub fn interrupt_all(running: Vec<Running>) -> Result<Vec<String>> {
        running.iter().try_for_each(|running| running.signal(Signal::INT))?;
        let end = |running: Running| Ok(running.end_well().context("after Ctrl-C")?.stdout);
        running.into_iter().map(end).collect()
    }
}

/// What a test that failed has left running must not disturb the next one. Of fio, only --thread keeps
/// all of it in its process group.
impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            kill(&self.child);
            self.child.wait().ok();
        }
    }
}

/// How a program has ended, in words.
fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("it ended with exit code {code}"),
        (None, signal) => format!("signal {} ended it", signal.unwrap_or_default()),
    }
}

/// Kills a program and those that it has started: each program here leads a process group.
fn kill(child: &Child) {
    kill_process_group(Pid::from_child(child), Signal::KILL).ok();
}

/// What a load returns, and the output of a stage beside it.
pub fn beside<T>(
    name: &str,
    arguments: &[&str],
    load: impl FnOnce() -> Result<T>,
) -> Result<(T, String)> {
    let running = Running::stage(name, arguments)?;
    Ok((load()?, running.interrupt()?))
}

/// The output of one that was stopped meanwhile: it empties no buffer, so that the kernel has no room for more.
pub fn beside_a_stopped<T>(
    name: &str,
    arguments: &[&str],
    load: impl FnOnce() -> Result<T>,
) -> Result<String> {
    let running = Running::stage(name, arguments)?;
    running.signal(Signal::STOP)?;
    load()?;
    running.signal(Signal::CONT)?;
    running.interrupt()
}

/// A file of /sys or /proc that says something else until this is dropped.
pub struct Setting(PathBuf, String);

impl Setting {
    pub fn new(file: impl Into<PathBuf>, value: &str) -> Result<Setting> {
        let file = file.into();
        let before = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        fs::write(&file, value).with_context(|| format!("{} = {value}", file.display()))?;
        Ok(Setting(file, before))
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        fs::write(&self.0, self.1.trim()).ok();
    }
}

/// A process whose script begins with [`Gate::WAIT`] sleeps there until [`Gate::open`].
pub struct Gate(fs::File);

impl Gate {
    /// A command of the shell that waits.
    pub const WAIT: &str = "read -r go </run/gate";

    pub fn new() -> Result<Gate> {
        shell("rm -f /run/gate; mkfifo /run/gate")?;
        // Open for both, a fifo waits for nobody.
        Ok(Gate(File::options().read(true).write(true).open("/run/gate").context("/run/gate")?))
    }

    /// Lets the one process that waits, or will, continue. The gate must live until it has.
    pub fn open(&self) -> Result<()> {
        (&self.0).write_all(b"go\n").context("/run/gate")
    }
}

/// Waits until `condition` holds; a time-out is a failure.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    poll_until(what, LIMIT, false, || {
        let holds = condition()?;
        if !holds {
            thread::sleep(MOMENT);
        }
        Ok(holds.then_some(()))
    })
}

/// Between two looks.
const MOMENT: Duration = Duration::from_millis(20);

/// The same, of an attempt: a learner waits, who is told what for, and may end it.
pub fn attempt_until(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    poll_until(what, ENDING, true, || {
        let holds = condition()?;
        if !holds {
            thread::sleep(MOMENT);
        }
        Ok(holds.then_some(()))
    })
}

/// Asks for something, each time for a moment, until it is there; a time-out is a failure. Where it is asked
/// of an attempt, a learner is told what lasts so long, and may end it.
fn poll_until<T>(
    what: &str,
    limit: Duration,
    of_attempt: bool,
    mut ask: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let (start, mut told) = (Instant::now(), !of_attempt);
    loop {
        if let Some(found) = ask()? {
            return Ok(found);
        }
        let lasts = start.elapsed();
        if !told && lasts > SILENCE {
            GuestMessage::Waiting(what.to_owned()).print();
            told = true;
        }
        ensure!(!of_attempt || !OVER.load(Relaxed), "{what}: not waited for, after Ctrl-C");
        ensure!(lasts < limit, "{what}: waited {limit:?} in vain");
    }
}

/// The last lines of what a program has said.
fn last_of(said: &str) -> &str {
    let start = said.rmatch_indices('\n').nth(20).map_or(0, |(end, _)| end + 1);
    let start = start.max(said.len().saturating_sub(10_000));
    &said[(start..).find(|&start| said.is_char_boundary(start)).unwrap_or_default()..]
}

/// The lines of a stream, up to so many bytes: then nobody reads it any more.
fn lines(
    stream: impl Read + Send + 'static,
    most: u64,
    too_much: &Arc<AtomicBool>,
) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    let too_much = Arc::clone(too_much);
    thread::spawn(move || {
        let mut stream = BufReader::new(stream.take(most));
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            sender.send(String::from_utf8_lossy(&line).into_owned()).ok();
            line.clear();
        }
        too_much.fetch_or(stream.get_ref().limit() == 0, Relaxed);
    });
    receiver
}

/// The kernel's: `6.1.0-50-amd64`.
pub fn release() -> Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned())
}

/// Whether programs may be skipped on this kernel even where the tools lose nothing elsewhere. It is a
/// real-time kernel, or preempts tasks: one that runs an fentry program is preempted, for example by a
/// thread that completes an I/O, and before 7.0 there is no other hook for the return of a function.
pub fn may_skip() -> Result<bool> {
    let release = release()?;
    Ok(release.contains("-rt") || preempts()? && !release.starts_with("7."))
}

/// What a test ends with that finds nothing here by which it could judge.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotJudged(String);

/// Ends a test that cannot judge, on this kernel or in this run, and says why.
pub fn not_judged<T>(reason: impl Into<String>) -> Result<T> {
    Err(NotJudged(reason.into()).into())
}

/// Says what a test leaves out that it judges elsewhere: the runner counts such tests.
pub fn judged_weakly(reason: &str) {
    GuestMessage::JudgedWeakly(reason.to_owned()).print();
}

/// Whether the kernel attaches one program to many functions at once, and knows these by their names.
pub fn has_fprobe() -> Result<bool> {
    Ok(fs::read_to_string("/proc/kallsyms")?.contains(" register_fprobe_ips\n"))
}

/// Gives this thread a real-time priority: it then waits for no thread with a lower one, nor for one
/// without. Threads that it starts have none.
pub fn set_realtime(sched_priority: i32) -> Result<()> {
    let (policy, priority) =
        (libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, libc::sched_param { sched_priority });
    // SAFETY: the kernel reads the struct.
    let result = unsafe { libc::sched_setscheduler(0, policy, &raw const priority) };
    ensure!(result == 0, "SCHED_FIFO: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Whether a task may lose its CPU in the middle of a program.
pub fn preempts() -> Result<bool> {
    let release = release()?;
    let model = fs::read_to_string("/sys/kernel/debug/sched/preempt").unwrap_or_default();
    let lazily = ["(full)", "(lazy)"].iter().any(|word| model.contains(word));
    Ok(release.starts_with("7.") || release.contains("-rt") || lazily)
}

/// Whether a program was skipped, where that may be, and says so: what it has not seen is not counted.
pub fn skipped_some(output: &str) -> Result<bool> {
    let skipped = if preempts()? { laws::skipped(output) } else { 0 };
    if skipped > 0 {
        judged_weakly(&format!("a program was skipped {skipped} times"));
    }
    Ok(skipped > 0)
}

/// An output where that is not so; else ends the judge, which cannot judge it.
pub fn whole(output: String) -> Result<String> {
    match skipped_some(&output)? {
        true => not_judged("programs were skipped, as they may be on a real-time kernel"),
        false => Ok(output),
    }
}

/// Checks that these counts are 0, and that no program was skipped, as far as the kernel counts that.
pub fn ensure_none(output: &str, counts: &[&str]) -> Result<()> {
    let counts: Vec<_> = counts.iter().map(|what| (*what, 0, "")).collect();
    ensure_counts(output, &counts)
}

/// Checks that these counts have these values, and that no program was skipped, as far as the kernel counts that.
/// Behind each count stands what it is made of, if that needs to be said: `: parts`.
pub fn ensure_counts(output: &str, expected: &[(&str, u64, &str)]) -> Result<()> {
    let is_unknown = |line: &str| line.trim_start().starts_with("- skipped (");
    let mut skipped = output.lines().filter(|line| line.contains(" skipped (")).peekable();
    let nobody_counts = skipped.peek().is_some() && skipped.all(is_unknown);
    let skipped = (!nobody_counts).then_some(("skipped", 0, ""));
    for (what, expected, why) in expected.iter().copied().chain(skipped) {
        let yours = count(output, what)?;
        let summary = summary(output);
        ensure!(yours == expected, "{yours} {what}, and has to be {expected}{why}:\n{summary}");
    }
    Ok(())
}

/// Keeps this thread on a CPU. The threads that it starts stay there, too.
pub fn stay_on(cpu: usize) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    Ok(sched_setaffinity(None, &cpus)?)
}

/// Does this for each of them, at the same time.
pub fn in_threads<T: Send, U: Send>(
    all: impl IntoIterator<Item = T>,
    each: impl Fn(T) -> Result<U> + Sync,
) -> Result<Vec<U>> {
    let each = &each;
    thread::scope(|scope| {
        let threads: Vec<_> = all.into_iter().map(|one| scope.spawn(move || each(one))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    })
}

/// Runs a stage to its end.
pub fn stage(name: &str, arguments: &[&str]) -> Result<Ended> {
    Running::spawn(Command::new(program(name)).args(arguments))?.end()
}

/// Whether [`shell`] prints its commands: `cargo truth --reproduce` shows them.
pub static SHOWN: AtomicBool = AtomicBool::new(false);

/// Runs a command of sh, which starts in half of bash's time; fails where it fails, with what it said.
pub fn shell(command: &str) -> Result<String> {
    if SHOWN.load(Relaxed) {
        println!("$ {command}");
    }
    let mut sh = Command::new("sh");
    let running = Running::spawn(sh.args(["-e", "-c", command]))?;
    Ok(running.end_well().with_context(|| command.to_owned())?.stdout)
}

/// Ends a test that cannot judge without this command.
pub fn needs(command: &str) -> Result<()> {
    match shell(&format!("command -v {command}")) {
        Ok(_) => Ok(()),
        Err(_) => not_judged(format!("the root has no {command}")),
    }
}

/// Runs fio on a disk, past the page cache: random reads of 4 KiB, but for what the options say.
pub fn fio_direct(disk: &str, options: &str) -> Result<Value> {
    fio_report(&shell(&fio_direct_command(disk, options))?)
}

/// The command that does so. The path of a device is as good as a name.
pub fn fio_direct_command(disk: &str, options: &str) -> String {
    let path = Path::new("/dev").join(disk);
    fio_command(&format!(
        "--filename={} --direct=1 --rw=randread --bs=4k --ioengine=libaio --thread --norandommap {options}",
        path.display()
    ))
}

/// Runs fio with these options, and returns the one job (or the group) of its report.
pub fn fio(options: &str) -> Result<Value> {
    fio_report(&shell(&fio_command(options))?)
}

/// The command that runs fio with these options.
pub fn fio_command(options: &str) -> String {
    format!("fio --name=t --group_reporting --output-format=json {options}")
}

/// The one job (or the group) of fio's report.
pub fn fio_report(report: &str) -> Result<Value> {
    let report = report.find('{').map_or("", |start| &report[start..]);
    let mut report: Value = serde_json::from_str(report).context("fio's report")?;
    Ok(report["jobs"][0].take())
}

/// What a stage prints at the end of a run: what comes after the event lines.
pub fn summary(output: &str) -> &str {
    let lines =
        output.find(" trace lines, ").map_or(0, |end| output[..end].rfind('\n').unwrap_or(0));
    output[lines..].trim_start_matches('\n')
}

/// The number in front of `what` in a summary: `  20000 bios completed`, or `All 20 I/Os were measured`.
pub fn count(output: &str, what: &str) -> Result<u64> {
    let line = output
        .lines()
        .map(|line| line.strip_prefix("All ").unwrap_or(line))
        .find(|line| {
            line.trim_start().split_once(' ').is_some_and(|(_, rest)| rest.starts_with(what))
        })
        .with_context(|| format!("no {what:?} in {}", summary(output)))?;
    let number = line.split_whitespace().next().unwrap_or_default();
    number.parse().with_context(|| line.to_owned())
}

/// The durations of all event lines, in ns.
pub fn durations(output: &str) -> Result<Vec<u64>> {
    let lines = output.lines().filter(|line| line.contains("time duration: "));
    lines.map(|line| Ok(between(line, "time duration: ", " ns")?.parse()?)).collect()
}

/// CLOCK_MONOTONIC, ns: the clock of bpf_ktime_get_ns(), read by another way.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The block of the slowest I/O.
pub struct Slowest<'a> {
    /// The address.
    pub io: &'a str,
    pub from: u64,
    pub to: u64,
    pub latency: u64,
}

/// How the block names the start and the end of a bio, and of a request.
pub const BIO: [&str; 2] = ["From: submit_bio(bio=", "To  : bio_endio (bio="];
pub const REQUEST: [&str; 2] = ["From: blk_mq_start_request(rq=", "To  : block_rq_complete (rq="];

/// The block, whose lines must be about one I/O and agree.
pub fn slowest<'a>(output: &'a str, [from, to]: [&str; 2]) -> Result<Slowest<'a>> {
    let (io, from) = between(output, from, "\n")?.split_once(") ").context("odd From")?;
    let (same, to) = between(output, to, "\n")?.split_once(") ").context("odd To")?;
    ensure!(io == same, "two I/Os: {output}");
    let (from, to, latency) = (from.parse()?, to.parse()?, max_latency(output)?);
    ensure!(from + latency == to, "{latency} ns from {from} to {to}: {output}");
    Ok(Slowest { io, from, to, latency })
}

/// The latency of the slowest I/O, in ns.
pub fn max_latency(output: &str) -> Result<u64> {
    Ok(between(output, "Max latency ", " ns")?.parse()?)
}

/// What the groups of a pattern find, in each line of a text that is like it from its start on.
pub fn rows<'a, const N: usize>(text: &'a str, pattern: &str) -> Vec<[&'a str; N]> {
    let pattern = regex_lite::Regex::new(&format!("(?m)^ *{pattern}")).expect("a pattern");
    pattern.captures_iter(text).map(|row| row.extract().1).collect()
}

/// The text between `before` and `after`.
pub fn between<'a>(text: &'a str, before: &str, after: &str) -> Result<&'a str> {
    let (_, rest) = text.split_once(before).with_context(|| format!("no {before:?} in {text}"))?;
    let (found, _) = rest
        .split_once(after)
        .with_context(|| format!("no {after:?} after {before:?} in {text}"))?;
    Ok(found)
}
