//! cachetop: its counts, judged by mincore() and /proc/PID/io, and its screen, by a terminal.

use crate::prelude::*;

tests![
    cachetop_reads_as_mincore_sees_them,
    cachetop_counts_dirtied_pages,
    cachetop_leaves_the_terminal_and_comes_back,
];

/// What cachetop has printed as JSON: the processes of all intervals.
pub struct CachetopReport(Vec<Value>);

impl CachetopReport {
    pub fn parse(output: &str) -> Result<CachetopReport> {
        let lines = output.lines().map(serde_json::from_str::<Value>);
        let lines = lines.collect::<Result<Vec<_>, _>>().context("not JSON")?;
        let (end, intervals) = lines.split_last().context("no output")?;
        let rows = intervals.iter().filter_map(|interval| interval["processes"].as_array());
        let report = CachetopReport(rows.flatten().cloned().collect());
        for what in ["reads", "hits", "misses", "readahead", "dirtied"] {
            let sum = report.sum(what, |_| true);
            ensure!(end["total"][what] == sum, "{what}: {sum}, not {end}");
        }
        for row in &report.0 {
            let percent = row["hit_percent"].as_f64();
            let asked = row["hits"].as_u64().zip(row["misses"].as_u64()).context("no counts")?;
            ensure!(percent.is_some() == (asked != (0, 0)), "{row}");
            ensure!(percent.is_none_or(|percent| (0.0..=100.0).contains(&percent)), "{row}");
        }
        for what in ["dropped", "in_flight", "uncounted", "skipped"] {
            ensure!(end[what] == 0, "{what}: {end}");
        }
        Ok(report)
    }

    fn sum(&self, what: &str, of: impl Fn(&Value) -> bool) -> u64 {
        self.0.iter().filter(|row| of(row)).filter_map(|row| row[what].as_u64()).sum()
    }

    /// Of this process.
    pub fn own(&self, what: &str) -> u64 {
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
    delayed.advise(Advice::WillNeed, 8 * MIB, 16 * page_size())?;
    let there = delayed.resident(8 * MIB, 16 * page_size())?;
    ensure!(there == 0, "the delayed pages are there: the test does not test");
    let on_their_way = delayed.read_now(8 * MIB, 16 * page_size(), there)?;
    // Another process, whose reads are all hits, and another user. The last file is on the root, an
    // overlayfs, whose reads the kernel makes in the name of root.
    let user = "setpriv --reuid nobody --clear-groups";
    shell(&format!("{user} cat {} /etc/passwd >/dev/null", file.path))?;
    let output = running.interrupt()?;
    let report = CachetopReport::parse(&output)?;
    let (hits, misses) = reads.iter().fold((0, 0), |(h, m), read| (h + read.hit, m + read.miss));
    let readahead = file.resident(0, file.size)? - before - misses;
    let judged = [reads.len() as u64 + 1, hits, misses + on_their_way.miss, readahead];
    let counted = ["reads", "hits", "misses", "readahead"].map(|what| report.own(what));
    ensure!(misses > 0 && counted == judged, "{counted:?}, not {judged:?}: {output}");
    let cat = |row: &Value| row["comm"] == "cat";
    ensure!(report.sum("hits", cat) >= MIB / page_size(), "cat: {output}");
    let mut users = report.0.iter().filter(|row| row["pid"] == std::process::id() || cat(row));
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
    let report = CachetopReport::parse(&output)?;
    let expected = once + 101 + MIB / page_size();
    ensure!(once == MIB / page_size() && judged >= expected, "{once}, then {judged} pages");
    let counted = report.own("dirtied");
    ensure!(counted == judged, "{counted} pages, not {judged}: {output}");
    Ok(())
}

/// Ctrl-Z gives the terminal back, as does the end; `fg` draws everything again, also after a stop that no
/// program can see coming. The shell is dash: bash restores the modes of the terminal itself.
fn cachetop_leaves_the_terminal_and_comes_back() -> Result<()> {
    const SCREEN: &str = "/run/screen";
    shell(&format!("rm -f /run/keys {SCREEN}; mkfifo /run/keys"))?;
    // Open for both, a fifo waits for nobody.
    let mut keys = OpenOptions::new().read(true).write(true).open("/run/keys")?;
    let terminal = format!(
        "exec script -qfc 'stty rows 24 cols 80; TERM=xterm exec dash -i' {SCREEN} </run/keys >/dev/null"
    );
    let _terminal = Running::bash(&terminal)?;
    // Types something, and waits until this was shown so often, and whose the terminal's modes are then.
    let mut types = |what: &str, shown: &str, times: usize, is_raw: bool| -> Result<()> {
        keys.write_all(what.as_bytes())?;
        let mut screen = String::new();
        let result = wait_until(shown, || {
            screen = String::from_utf8_lossy(&fs::read(SCREEN).unwrap_or_default()).into_owned();
            Ok(screen.matches(shown).count() >= times)
        });
        result.with_context(|| format!("{what:?}: {screen:?}"))?;
        let modes = "stty -a -F $(ps -C dash -o tty= | sed 's,^,/dev/,;s/ *$//')";
        wait_until("the terminal's modes", || Ok(shell(modes)?.contains(" -icanon ") == is_raw))
    };
    let (second, first) = ("\x1b[?1049h", "\x1b[?1049l");
    types(&format!("{} --interval 200ms\r", program("cachetop").display()), second, 1, true)?;
    for stop in 1..=2 {
        types("", "USER", 1, true)?;
        types("\x1a", first, stop, false)?;
        types("fg\r", second, 1 + stop, true)?;
    }
    // The shell gets the terminal as it is.
    shell("pkill -STOP -x cachetop")?;
    types("", "Stopped", 3, true)?;
    types("fg\n", second, 4, true)?;
    types("q", "pages dirtied", 1, false)
}
