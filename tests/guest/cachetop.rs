//! cachetop: its counts, judged by mincore() and /proc/PID/io; and the terminal that it leaves.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::FileExt,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    Test,
    disks::Mounted,
    pagecache::{Watched, new_file},
    run::{Running, count, program, shell, stage, wait_until},
};

pub const TESTS: &[Test] = &[
    ("cachetop_reads_as_mincore_sees_them", cachetop_reads_as_mincore_sees_them),
    ("cachetop_counts_dirtied_pages", cachetop_counts_dirtied_pages),
    ("cachetop_prints_tables", cachetop_prints_tables),
    ("cachetop_restores_the_terminal", cachetop_restores_the_terminal),
];

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// What cachetop has printed as JSON: the sums of the intervals.
struct Report {
    intervals: Vec<Value>,
    end: Value,
}

impl Report {
    fn parse(output: &str) -> Result<Report> {
        let lines = output.lines().map(serde_json::from_str::<Value>);
        let mut intervals = lines.collect::<Result<Vec<_>, _>>().context("not JSON")?;
        let end = intervals.pop().context("no output")?;
        let report = Report { intervals, end };
        for what in ["reads", "hits", "misses", "readahead", "dirtied"] {
            let sum = report.sum(what, |_| true);
            ensure!(report.end["total"][what] == sum, "{what}: {sum}, not {}", report.end);
        }
        for row in report.rows() {
            let percent = row["hit_percent"].as_f64();
            let asked = row["hits"].as_u64().zip(row["misses"].as_u64()).context("no counts")?;
            ensure!(percent.is_some() == (asked != (0, 0)), "{row}");
            ensure!(percent.is_none_or(|percent| (0.0..=100.0).contains(&percent)), "{row}");
        }
        for what in ["dropped", "in_flight", "uncounted", "skipped"] {
            ensure!(report.end[what] == 0, "{what}: {}", report.end);
        }
        Ok(report)
    }

    fn rows(&self) -> impl Iterator<Item = &Value> {
        self.intervals
            .iter()
            .flat_map(|interval| interval["processes"].as_array().into_iter().flatten())
    }

    fn sum(&self, what: &str, of: impl Fn(&Value) -> bool) -> u64 {
        self.rows().filter(|row| of(row)).filter_map(|row| row[what].as_u64()).sum()
    }

    /// Of this process.
    fn own(&self, what: &str) -> u64 {
        self.sum(what, |row| row["pid"] == std::process::id())
    }
}

fn cachetop_reads_as_mincore_sees_them() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = new_file(&mounted, "top", MIB + 100)?;
    let running = Running::stage("cachetop", &["--json", "--interval", "200ms"])?;
    let before = file.resident(0, file.size)?;
    let mut reads = file.read_all(10_000)?;
    reads.extend(file.read_all(64 * 1024)?);
    file.settled(0, file.size)?;
    // Another process, whose reads are all hits.
    shell(&format!("cat {} >/dev/null", file.path))?;
    let output = running.interrupt()?;
    let report = Report::parse(&output)?;
    let (hits, misses) = reads.iter().fold((0, 0), |(h, m), read| (h + read.hit, m + read.miss));
    let judged = [reads.len() as u64, hits, misses, file.resident(0, file.size)? - before - misses];
    let counted = ["reads", "hits", "misses", "readahead"].map(|what| report.own(what));
    ensure!(misses > 0 && counted == judged, "{counted:?}, not {judged:?}: {output}");
    let cat = |row: &Value| row["comm"] == "cat";
    ensure!(report.sum("hits", cat) >= MIB / PAGE, "cat: {output}");
    Ok(())
}

/// How many pages the kernel says this process has dirtied: it adds them to `write_bytes`.
fn written() -> Result<u64> {
    let io = fs::read_to_string("/proc/self/io")?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    Ok(bytes.context("no write_bytes")?.parse::<u64>()? / PAGE)
}

/// A page that is dirty already is not dirtied again; after it was written to the disk, it is.
fn cachetop_counts_dirtied_pages() -> Result<()> {
    let mounted = Mounted::new()?;
    let watched: Watched = new_file(&mounted, "dirty", MIB)?;
    let file = OpenOptions::new().read(true).write(true).open(&watched.path)?;
    let running = Running::stage("cachetop", &["--json", "--interval", "200ms"])?;
    let before = written()?;
    for _ in 0..2 {
        for page in 0..MIB / PAGE {
            file.write_all_at(&[2; 100], page * PAGE)?;
        }
    }
    let once = written()? - before;
    file.sync_all()?;
    file.write_all_at(&vec![3; 100 * PAGE as usize], 7 * PAGE + 1)?;
    let judged = written()? - before;
    let output = running.interrupt()?;
    let report = Report::parse(&output)?;
    // A large folio is dirtied as a whole.
    ensure!(once == MIB / PAGE && judged >= once + 101, "{once}, then {judged} pages");
    let counted = report.own("dirtied");
    ensure!(counted == judged, "{counted} pages, not {judged}: {output}");
    Ok(())
}

fn cachetop_prints_tables() -> Result<()> {
    let ended =
        stage("cachetop", &["--duration", "700ms", "--interval", "300ms", "--sort", "pid"])?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let tables = ended.stdout.lines().filter(|line| line.starts_with("    PID COMM ")).count();
    ensure!(tables >= 2 && !ended.stdout.contains('\x1b'), "{tables} tables: {ended:?}");
    count(&ended.stdout, "pages dirtied")?;
    ensure!(count(&ended.stdout, "skipped")? == 0, "{ended:?}");
    for wrong in [["--interval", "1"], ["--sort", "size"]] {
        let ended = stage("cachetop", &wrong)?;
        ensure!(ended.code == Some(2) && ended.stderr.contains(wrong[0]), "{ended:?}");
    }
    Ok(())
}

/// How a full screen can end, and the exit code.
enum End {
    Key(&'static [u8]),
    Signal(Signal),
}

fn cachetop_restores_the_terminal() -> Result<()> {
    for (end, code) in [
        (End::Key(b"q"), 0),
        (End::Key(b"\x03"), 0),
        (End::Signal(Signal::TERM), 0),
        (End::Signal(Signal::KILL), 137),
    ] {
        let typescript = "/run/typescript";
        fs::write(typescript, "")?;
        let shown = || -> Result<String> {
            Ok(String::from_utf8_lossy(&fs::read(typescript)?).into_owned())
        };
        let top = program("cachetop");
        let script = format!(
            "stty rows 24 cols 80; modes=$(stty -g); {}; echo code=$?; \
             until [ \"$(stty -g)\" = \"$modes\" ]; do sleep 0.1; done; echo modes restored",
            top.display()
        );
        let mut terminal = Command::new("script")
            .args(["-qfec", &script, typescript])
            .env("TERM", "xterm")
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()?;
        wait_until("a full screen", || {
            let shown = shown()?;
            Ok(shown.contains("\x1b[?1049h") && shown.contains("HIT%"))
        })?;
        match end {
            End::Key(key) => terminal.stdin.as_mut().context("no stdin")?.write_all(key)?,
            End::Signal(signal) => {
                shell(&format!("kill -{} $(pidof cachetop)", signal.as_raw()))?;
            }
        }
        wait_until("a usable terminal", || {
            let shown = shown()?;
            let left = ["\x1b[?1049l", "\x1b[?25h", "modes restored"];
            Ok(left.iter().all(|left| shown.contains(left)))
        })?;
        terminal.wait()?;
        let shown = shown()?;
        ensure!(shown.contains(&format!("code={code}")), "not {code}: {shown}");
        ensure!(code != 0 || shown.contains("pages dirtied"), "no summary: {shown}");
    }
    Ok(())
}
