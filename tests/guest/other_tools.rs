//! Tools that are not ours: in a root of their own, and ready when their programs are attached.

use std::os::unix::process::ExitStatusExt;

use truth::{Broke, NOT_READY, Tool, TruthPlan};

use crate::{prelude::*, table::ToolRefusal};

/// How many have been started: each has a file of its own for its output.
static STARTED: AtomicU32 = AtomicU32::new(0);
/// A tool has attached its programs once it has not used a CPU for this long.
const IDLE: Duration = Duration::from_secs(2);
/// After so long, a user presses Ctrl-C again: Python loses one that comes while bcc calls it back.
const PATIENCE: Duration = Duration::from_secs(20);
/// A tool that runs in a root of its own.
pub struct Peer {
    child: Child,
    /// What it prints.
    output: PathBuf,
    /// What it prints once it measures, if anything.
    ready: String,
    /// How long its start may take.
    limit: Duration,
}

impl Peer {
    pub fn start(tool: &Tool, plan: &TruthPlan) -> Result<Peer> {
        shell(&tool.mounts(plan, &fs::read_to_string("/proc/mounts")?))?;
        let path = PathBuf::from(format!("/run/peer-{}", STARTED.fetch_add(1, Relaxed)));
        let output = fs::File::create(&path).context("no file in /run")?;
        let command = tool.command(plan);
        let child = Command::new(&command[0])
            .args(&command[1..])
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("PYTHONUNBUFFERED", "1")
            .env("LC_ALL", "C.UTF-8")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .context("chroot does not start")?;
        Ok(Peer { child, output: path, ready: tool.ready.clone(), limit: tool.ready_limit() })
    }

    /// Waits until it has loaded programs, and has not worked for a while.
    pub fn wait(&mut self) -> Result<()> {
        let (start, mut idle, mut before) = (Instant::now(), Instant::now(), 0);
        loop {
            if let Some(status) = self.child.try_wait()? {
                let flood = |broke: Broke| Broke(format!("{NOT_READY}: {broke}"));
                self.has_not_flooded().map_err(flood)?;
                return Err(ToolRefusal(format!("{} ({status})", self.said())).into());
            }
            let cpu = self.ticks().unwrap_or(before);
            if cpu > before {
                (idle, before) = (Instant::now(), cpu);
            }
            let is_ready = match self.ready.is_empty() {
                true => idle.elapsed() >= IDLE && self.has_programs(),
                false => self.text()?.contains(&self.ready),
            };
            if is_ready {
                return Ok(());
            }
            let limit = self.limit;
            ensure!(
                start.elapsed() < limit,
                Broke(format!("{NOT_READY} after {limit:?}: {}", self.said()))
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ticks of 10 ms of CPU time so far.
    fn ticks(&self) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    }

    /// Whether it holds a BPF program, a link of one, or an event of perf.
    fn has_programs(&self) -> bool {
        let files = fs::read_dir(format!("/proc/{}/fd", self.child.id())).into_iter().flatten();
        files.flatten().filter_map(|file| fs::read_link(file.path()).ok()).any(|target| {
            let target = target.to_string_lossy();
            ["bpf-prog", "bpf_link", "[perf_event]"].iter().any(|end| target.ends_with(end))
        })
    }

    pub fn interrupt(&self) -> Result<()> {
        kill_process_group(Pid::from_child(&self.child), Signal::INT).context("kill")
    }

    /// Waits for its end; what it has printed, and its exit code.
    pub fn end(mut self) -> Result<(String, Option<i32>)> {
        let mut again = Some(Instant::now() + PATIENCE);
        let ended = wait_until("the end after Ctrl-C", || {
            if again.take_if(|again| *again < Instant::now()).is_some() {
                self.interrupt()?;
            }
            Ok(self.child.try_wait()?.is_some())
        });
        ended.map_err(|error| Broke(format!("{error}: {}", self.said())))?;
        self.has_not_flooded()?;
        let status = self.child.wait()?;
        Ok((self.text()?, status.code().or(status.signal().map(|signal| 128 + signal))))
    }

    fn has_not_flooded(&self) -> Result<(), Broke> {
        Broke::if_flood(fs::metadata(&self.output).map_or(0, |file| file.len()))
    }

    fn text(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(&self.output)?).into_owned())
    }

    /// The line of its output that is most likely the reason.
    fn said(&self) -> String {
        let text = self.text().unwrap_or_default();
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
        let error =
            lines().find(|line| line.to_lowercase().contains("error") || line.contains("ailed"));
        error.or(lines().next_back()).unwrap_or("it says nothing").to_owned()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            kill_process_group(Pid::from_child(&self.child), Signal::KILL).ok();
            self.child.wait().ok();
        }
        fs::remove_file(&self.output).ok();
    }
}
