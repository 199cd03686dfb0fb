//! cachetop: its counts, judged by mincore() and /proc/PID/io, and its screen, by a terminal.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    num::NonZeroU16,
    os::unix::{
        fs::{FileExt, OpenOptionsExt},
        process::CommandExt,
    },
    process::{Child, Command},
    sync::{Arc, Mutex},
    thread,
};

use anyhow::{Context, Result, ensure};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};
use serde_json::Value;

use crate::{
    disks::{self, Mapped, Mounted},
    pagecache::{Watched, new_file, page_size},
    run::{Running, count, program, shell, stage, wait_until},
};

tests![
    cachetop_reads_as_mincore_sees_them,
    cachetop_counts_dirtied_pages,
    cachetop_prints_tables,
    cachetop_leaves_the_terminal_and_comes_back,
];

const MIB: u64 = 1 << 20;

/// The size of the terminal.
const ROWS: NonZeroU16 = NonZeroU16::new(24).expect("not 0");
const COLUMNS: NonZeroU16 = NonZeroU16::new(80).expect("not 0");

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
    // A page that is in the cache, but waits for its data, is not resident: the reader waits, too.
    let disk = disks::virtio()?;
    let slow = Mapped::new("slow", &format!("0 131072 delay /dev/{disk} 0 500"))?;
    let delayed = Watched::cold(&slow.path(), &slow.disk()?)?;
    delayed.advise(libc::POSIX_FADV_WILLNEED, 8 * MIB, 16 * page_size())?;
    let there = delayed.resident(8 * MIB, 16 * page_size())?;
    ensure!(there == 0, "the delayed pages are there: the test does not test");
    let on_their_way = delayed.read_now(8 * MIB, 16 * page_size(), there)?;
    // Another process, whose reads are all hits, and another user. The last file is on the root, an
    // overlayfs, whose reads the kernel makes in the name of root.
    let user = "setpriv --reuid nobody --clear-groups";
    shell(&format!("{user} cat {} /etc/passwd >/dev/null", file.path))?;
    let output = running.interrupt()?;
    let report = Report::parse(&output)?;
    let (hits, misses) = reads.iter().fold((0, 0), |(h, m), read| (h + read.hit, m + read.miss));
    let readahead = file.resident(0, file.size)? - before - misses;
    let judged = [reads.len() as u64 + 1, hits, misses + on_their_way.miss, readahead];
    let counted = ["reads", "hits", "misses", "readahead"].map(|what| report.own(what));
    ensure!(misses > 0 && counted == judged, "{counted:?}, not {judged:?}: {output}");
    let cat = |row: &Value| row["comm"] == "cat";
    ensure!(report.sum("hits", cat) >= MIB / page_size(), "cat: {output}");
    let mut users = report.rows().filter(|row| row["pid"] == std::process::id() || cat(row));
    let user = |row: &Value| if cat(row) { "nobody" } else { "root" };
    ensure!(users.all(|row| row["user"] == user(row)), "users: {output}");
    Ok(())
}

/// How many pages the kernel says this process has dirtied: it adds them to `write_bytes`.
fn written() -> Result<u64> {
    let io = fs::read_to_string("/proc/self/io")?;
    let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    Ok(bytes.context("no write_bytes")?.parse::<u64>()? / page_size())
}

/// A page that is dirty already is not dirtied again; after it was written to the disk, it is.
fn cachetop_counts_dirtied_pages() -> Result<()> {
    let mounted = Mounted::new()?;
    let watched: Watched = new_file(&mounted, "dirty", MIB)?;
    let file = OpenOptions::new().read(true).write(true).open(&watched.path)?;
    let running = Running::stage("cachetop", &["--json", "--interval", "200ms"])?;
    let before = written()?;
    for _ in 0..2 {
        for page in 0..MIB / page_size() {
            file.write_all_at(&[2; 100], page * page_size())?;
        }
    }
    let once = written()? - before;
    file.sync_all()?;
    file.write_all_at(&vec![3; 100 * page_size() as usize], 7 * page_size() + 1)?;
    // New pages: on 7.2, in large folios.
    file.write_all_at(&vec![4; MIB as usize], 2 * MIB)?;
    let judged = written()? - before;
    let output = running.interrupt()?;
    let report = Report::parse(&output)?;
    let expected = once + 101 + MIB / page_size();
    ensure!(once == MIB / page_size() && judged >= expected, "{once}, then {judged} pages");
    let counted = report.own("dirtied");
    ensure!(counted == judged, "{counted} pages, not {judged}: {output}");
    Ok(())
}

fn cachetop_prints_tables() -> Result<()> {
    let ended = stage("cachetop", &["--duration", "3s", "--interval", "300ms", "--sort", "pid"])?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let tables = ended.stdout.lines().filter(|line| line.starts_with("    PID USER ")).count();
    ensure!(tables >= 6 && !ended.stdout.contains('\x1b'), "{tables} tables: {ended:?}");
    count(&ended.stdout, "pages dirtied")?;
    ensure!(count(&ended.stdout, "skipped")? == 0, "{ended:?}");
    for wrong in [["--interval", "1"], ["--sort", "size"]] {
        let ended = stage("cachetop", &wrong)?;
        ensure!(ended.code == Some(2) && ended.stderr.contains(wrong[0]), "{ended:?}");
    }
    Ok(())
}

/// A shell on a terminal of its own.
struct Shell {
    shell: Child,
    keys: File,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Shell {
    fn new() -> Result<Shell> {
        let keys = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&keys)?;
        unlockpt(&keys)?;
        let (ws_row, ws_col) = (ROWS.get(), COLUMNS.get());
        tcsetwinsize(&keys, Winsize { ws_row, ws_col, ws_xpixel: 0, ws_ypixel: 0 })?;
        let name = ptsname(&keys, Vec::new())?.into_string()?;
        // Not this process's terminal: it would be hung up with the shell.
        let flags = libc::O_NOCTTY;
        let terminal = OpenOptions::new().read(true).write(true).custom_flags(flags).open(name)?;
        // Not bash: it restores the modes of the terminal itself.
        let mut sh = Command::new("dash");
        sh.arg("-i").env("PS1", "$ ").env("TERM", "xterm").stdin(terminal.try_clone()?);
        sh.stdout(terminal.try_clone()?).stderr(terminal);
        // SAFETY: two system calls, async-signal-safe, no memory of the parent touched.
        unsafe {
            sh.pre_exec(|| {
                rustix::process::setsid()?;
                Ok(rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?)
            })
        };
        let shell = sh.spawn().context("dash")?;
        let keys = File::from(keys);
        let screen = Arc::new(Mutex::new(vt100::Parser::new(ROWS, COLUMNS, 0)));
        let (mut output, parser) = (keys.try_clone()?, Arc::clone(&screen));
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut bytes) {
                parser.lock().expect("no panic").process(&bytes[..n]);
            }
        });
        Ok(Shell { shell, keys, screen })
    }

    fn types(&mut self, keys: &str) -> Result<()> {
        self.keys.write_all(keys.as_bytes()).context("the terminal")
    }

    /// Waits for a text on the terminal's second screen, or on the first one.
    fn shows(&self, text: &str, second: bool) -> Result<()> {
        let mut shown = String::new();
        let result = wait_until(text, || {
            let screen = self.screen.lock().expect("no panic");
            let screen = screen.screen();
            shown = screen.contents();
            // Whoever has the second screen reads keys as they are pressed, and hides the cursor.
            let is_raw = !tcgetattr(&self.keys)?.local_modes.intersects(LocalModes::ICANON);
            // Nothing of the shell's is left there.
            let is_whole = !shown.contains("Stopped");
            let state = [screen.alternate_screen(), screen.hide_cursor(), is_raw];
            shown += &format!("\n{state:?}");
            Ok(shown.contains(text) && state == [second; 3] && (is_whole || !second))
        });
        result.with_context(|| format!("the screen:\n{shown}"))
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // The shell's end hangs its terminal up, which ends the rest.
        self.shell.kill().ok();
        self.shell.wait().ok();
    }
}

/// Ctrl-Z gives the terminal back, as does the end; `fg` draws everything again, also after a stop
/// that no program can see coming.
fn cachetop_leaves_the_terminal_and_comes_back() -> Result<()> {
    let mut shell = Shell::new()?;
    shell.types(&format!("{} --interval 200ms\r", program("cachetop").display()))?;
    shell.shows("    PID USER ", true)?;
    for _ in 0..2 {
        shell.types("\x1a")?;
        shell.shows("Stopped", false)?;
        shell.types("clear; fg\r")?;
        shell.shows("    PID USER ", true)?;
    }
    shell.types("u")?;
    shell.shows("by USER", true)?;
    self::shell("pkill -STOP -x cachetop")?;
    // The shell gets the terminal as it is.
    let stopped = || -> Result<bool> {
        let screen = shell.screen.lock().expect("no panic");
        Ok(screen.screen().contents().contains("Stopped"))
    };
    wait_until("the stop", stopped)?;
    shell.types("fg\n")?;
    shell.shows("    PID USER ", true)?;
    shell.types("q")?;
    shell.shows("pages dirtied", false)?;
    Ok(())
}
