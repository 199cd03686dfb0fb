//! A tracer: started, watched until it is attached, ended with SIGINT.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::disable_transparent_huge_pages;

use bench::plan::{BpfProgram, Started};

/// A tracer is attached once it uses no more CPU time than this ...
const IDLE_CPU: Duration = Duration::from_millis(2);
/// ... in this time.
const IDLE: Duration = Duration::from_secs(1);
/// How long it may take to get there.
const PATIENCE: Duration = Duration::from_secs(600);
/// How often it is looked at.
const STEP: Duration = Duration::from_millis(5);

/// A tracer that runs.
pub struct Tracer {
    child: Child,
    out: PathBuf,
    started: Started,
}

impl Tracer {
    /// Starts a tracer and waits until it is attached. `dir` takes its output.
    pub fn start(argv: &[String], dir: &Path) -> Result<Tracer> {
        let (program, args) = argv.split_first().context("no program")?;
        let before: Vec<u32> = ProgInfoIter::default().map(|info| info.id).collect();
        let out = dir.join("out");
        let file = File::create(&out).with_context(|| out.display().to_string())?;
        let start = Instant::now();
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::null()).stderr(file.try_clone()?).stdout(file);
        // Whether the heap gets a huge page depends on where it happens to lie: 2 MiB of memory.
        // SAFETY: one system call, async-signal-safe, no memory of the parent touched.
        unsafe {
            command.pre_exec(|| Ok(disable_transparent_huge_pages(true)?));
        }
        let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
        let started = Started {
            attach_ms: 0.0,
            attach_cpu_ms: 0.0,
            attached_kib: 0,
            exit_ms: 0.0,
            programs: Vec::new(),
        };
        let mut tracer = Tracer { child, out, started };
        if let Err(error) = tracer.await_attached(start, &before) {
            tracer.kill();
            return Err(error);
        }
        let query = ProgInfoQueryOptions::default().include_jited_prog_insns(true);
        let new = ProgInfoIter::with_query_opts(query).filter(|info| !before.contains(&info.id));
        let programs = new.map(|info| BpfProgram {
            name: info.name.to_string_lossy().into_owned(),
            verified: info.verified_insns,
            jited: info.jited_prog_insns.len(),
        });
        tracer.started.programs = programs.collect();
        if tracer.started.programs.is_empty() {
            let said = tracer.said();
            tracer.kill();
            bail!("does not attach: {said}");
        }
        Ok(tracer)
    }

    fn await_attached(&mut self, start: Instant, before: &[u32]) -> Result<()> {
        // A process that waits for its files is idle, too: the guest's clock jumps ahead then.
        let loaded = || ProgInfoIter::default().any(|info| !before.contains(&info.id));
        let (then, cpu_then) = self.await_idle(start, loaded).context("does not attach")?;
        self.started.attach_ms = then.as_secs_f64() * 1e3;
        self.started.attach_cpu_ms = cpu_then.as_secs_f64() * 1e3;
        self.started.attached_kib = self.status_kib("VmHWM:")?;
        Ok(())
    }

    /// Waits until it is idle and `ready`. Returns the time that has passed since `start` until then, and its
    /// CPU time.
    fn await_idle(
        &mut self,
        start: Instant,
        ready: impl Fn() -> bool,
    ) -> Result<(Duration, Duration)> {
        let mut samples = VecDeque::new();
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ({status})", self.said());
            }
            let (now, cpu) = (start.elapsed(), cpu_time(&self.child)?);
            samples.push_back((now, cpu));
            while let Some(&(then, cpu_then)) = samples.front() {
                if now - then < IDLE {
                    break;
                }
                if cpu.saturating_sub(cpu_then) <= IDLE_CPU && ready() {
                    return Ok((then, cpu_then));
                }
                samples.pop_front();
            }
            if now > PATIENCE {
                bail!("is busy after {} s: {}", PATIENCE.as_secs(), self.said());
            }
            sleep(STEP);
        }
    }

    /// Waits until it has done all that it does for the reads before. Returns the CPU time of that.
    pub fn catch_up(&mut self) -> Result<Duration> {
        let (start, before) = (Instant::now(), cpu_time(&self.child)?);
        let (_, cpu) = self.await_idle(start, || true)?;
        Ok(cpu.saturating_sub(before))
    }

    /// Ends it as Ctrl-C does. Returns how it started and ended, and what it printed last and
    /// how many lines.
    pub fn end(mut self) -> Result<(Started, String, u64)> {
        let start = Instant::now();
        kill_process(Pid::from_child(&self.child), Signal::INT)?;
        while self.child.try_wait()?.is_none() {
            if start.elapsed() > PATIENCE {
                self.kill();
                bail!("has not ended {} s after SIGINT", PATIENCE.as_secs());
            }
            sleep(Duration::from_millis(2));
        }
        self.started.exit_ms = start.elapsed().as_secs_f64() * 1e3;
        // Reading 8 KiB suffices, however much was printed.
        let text = tail(&self.out)?;
        let lines = BufReader::new(File::open(&self.out)?).split(b'\n').count() as u64;
        Ok((self.started.clone(), text, lines))
    }

    fn kill(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The last line that it printed with words: there is the error.
    fn said(&self) -> String {
        let text = tail(&self.out).unwrap_or_default();
        let is_text = |line: &&str| line.contains(char::is_alphanumeric);
        let last = text.lines().rev().map(str::trim).find(is_text);
        last.unwrap_or("it says nothing").to_owned()
    }

    fn status_kib(&self, key: &str) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok());
        kib.with_context(|| format!("/proc/PID/status has no {key}"))
    }
}

fn tail(path: &Path) -> Result<String> {
    use std::os::unix::fs::FileExt;
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let from = file.metadata()?.len().saturating_sub(8192);
    let mut bytes = vec![0; 8192];
    let n = file.read_at(&mut bytes, from)?;
    Ok(String::from_utf8_lossy(&bytes[..n]).into_owned())
}

/// The CPU time of all threads of a process.
fn cpu_time(child: &Child) -> Result<Duration> {
    let mut clock = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // rustix has no clock of another process. SAFETY: both pointers are to places of the right type.
    let done = unsafe {
        libc::clock_getcpuclockid(child.id() as i32, &mut clock) == 0
            && libc::clock_gettime(clock, &mut time) == 0
    };
    // A process that has just ended has no clock any more; try_wait() sees it next time.
    Ok(if done { Duration::new(time.tv_sec as u64, time.tv_nsec as u32) } else { Duration::ZERO })
}
