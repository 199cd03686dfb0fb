//! Tools that are not ours: in a root of their own, and ready when their programs are attached.

use std::{
    os::unix::process::CommandExt,
    process::{Child, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use rustix::process::{Pid, kill_process_group};
use truth::Tool;

use crate::{prelude::*, table::Refusal};

/// How many have been started: each has a file of its own for its output.
static STARTED: AtomicU32 = AtomicU32::new(0);
/// A tool has attached its programs once it has not used a CPU for this long.
const IDLE: Duration = Duration::from_secs(2);
/// How long its start may take: bcc's tools compile, for a minute in an emulated machine that is busy.
/// One that takes longer has refused nothing: the cell is not judged.
const READY_LIMIT: Duration = Duration::from_secs(400);

/// A tool that runs in a root of its own.
pub struct Peer {
    child: Child,
    /// What it prints.
    output: PathBuf,
}

impl Peer {
    pub fn start(tool: &Tool, root: &Path, headers: Option<&Path>) -> Result<Peer> {
        let to = root.display();
        if !fs::read_to_string("/proc/mounts")?.contains(&format!(" {to}/proc ")) {
            shell(&format!(
                "mkdir -p {to}/proc {to}/sys {to}/dev {to}/run {to}/tmp {to}/usr/src {to}/usr/lib/modules
                 for dir in proc sys dev; do mount --rbind /$dir {to}/$dir; done"
            ))?;
            if let Some(headers) = headers {
                let from = headers.display();
                shell(&format!(
                    "for dir in src lib/modules; do mount --bind {from}/usr/$dir {to}/usr/$dir; done"
                ))?;
            }
        }
        let path = PathBuf::from(format!("/run/peer-{}", STARTED.fetch_add(1, Relaxed)));
        let output = fs::File::create(&path).context("no file in /run")?;
        // Line by line, though it is no terminal.
        let child = Command::new("chroot")
            .arg(root)
            .args(["stdbuf", "-oL"])
            .args(&tool.argv)
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
        Ok(Peer { child, output: path })
    }

    /// Waits until it has loaded programs, and has not worked for a while.
    pub fn wait(&mut self) -> Result<()> {
        let (start, mut idle, mut before) = (Instant::now(), Instant::now(), 0);
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Err(Refusal(format!("{} ({status})", self.said())).into());
            }
            let cpu = self.ticks().unwrap_or(before);
            if cpu > before {
                (idle, before) = (Instant::now(), cpu);
            }
            if idle.elapsed() >= IDLE && self.has_programs() {
                return Ok(());
            }
            if start.elapsed() > READY_LIMIT {
                bail!("not attached after {READY_LIMIT:?}: {}", self.said());
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Ticks of 10 ms of CPU time so far.
    fn ticks(&self) -> Option<u64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    }

    /// Whether it holds a BPF program or a link of one.
    fn has_programs(&self) -> bool {
        let files = fs::read_dir(format!("/proc/{}/fd", self.child.id())).into_iter().flatten();
        files.flatten().filter_map(|file| fs::read_link(file.path()).ok()).any(|target| {
            let target = target.to_string_lossy();
            target.ends_with("bpf-prog") || target.ends_with("bpf_link")
        })
    }

    pub fn interrupt(&self) -> Result<()> {
        kill_process_group(Pid::from_child(&self.child), Signal::INT).context("kill")
    }

    /// Waits for its end; what it has printed, and its exit code.
    pub fn end(mut self) -> Result<(String, Option<i32>)> {
        let ended = wait_until("the end", || Ok(self.child.try_wait()?.is_some()));
        ended.with_context(|| self.said())?;
        let status = self.child.wait()?;
        Ok((String::from_utf8_lossy(&fs::read(&self.output)?).into_owned(), status.code()))
    }

    /// The line of its output that is most likely the reason.
    fn said(&self) -> String {
        let text = fs::read(&self.output).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
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
