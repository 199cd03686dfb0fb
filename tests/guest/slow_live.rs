//! `slow_io --live`: its screen, as a terminal shows it, beside loads whose figures are known from outside.

use std::{
    io::Read,
    num::NonZeroU16,
    sync::{Arc, Mutex},
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};
use vt100::Parser;

use crate::prelude::*;

tests![
    slow_live_shows_the_slow_disk,
    slow_live_shows_what_hangs,
    slow_live_says_what_is_lost,
    slow_live_needs_a_terminal,
];

/// The exit code of slow_io in the terminal, and the number of the shell that has started it.
const ENDED: &str = "/run/live";
const SHELL: &str = "/run/live_shell";

/// A terminal with slow_io in it, on its full screen.
struct Live {
    running: Running,
    terminal: File,
    screen: Arc<Mutex<Parser>>,
    columns: u16,
}

impl Live {
    fn new(lines: u16, columns: u16, options: &str) -> Result<Live> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let slave = ptsname(&master, Vec::new())?.into_string()?;
        let (screen, terminal) = (Arc::new(Mutex::new(Parser::default())), File::from(master));
        let mut live = Live { running: Running::bash(":")?, terminal, screen, columns };
        live.resize(lines, columns)?;
        let (screen, mut output) = (Arc::clone(&live.screen), live.terminal.try_clone()?);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                lock(&screen).process(&bytes[..count]);
            }
        });
        let path = program("slow_io");
        let command = format!("{} --live {options}", path.display());
        fs::remove_file(ENDED).ok();
        // The shell keeps the terminal, whose modes are looked at later, until it reads a line.
        live.running = Running::bash(&format!(
            "exec setsid -cw sh -c 'echo $$ >{SHELL}; export TERM=xterm; {command}; echo $? >{ENDED}; read -r _' \
             <{slave} >{slave} 2>&1"
        ))?;
        live.shows("Disks")?;
        Ok(live)
    }

    /// The screen has another size now.
    fn resize(&mut self, lines: u16, columns: u16) -> Result<()> {
        let size = NonZeroU16::new(lines).zip(NonZeroU16::new(columns)).context("no size")?;
        lock(&self.screen).screen_mut().set_size(size.0, size.1);
        self.columns = columns;
        let size = Winsize { ws_row: lines, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.terminal, size)?)
    }

    fn types(&mut self, keys: &str) -> Result<()> {
        Ok(self.terminal.write_all(keys.as_bytes())?)
    }

    fn text(&self) -> String {
        lock(&self.screen).screen().contents()
    }

    /// Waits until the screen is as it should be, and returns its text.
    fn is(&self, what: &str, condition: impl Fn(&str) -> bool) -> Result<String> {
        let mut text = String::new();
        let is_so = || {
            text = self.text();
            Ok(condition(&text))
        };
        wait_until(what, is_so).with_context(|| self.text())?;
        Ok(text)
    }

    fn shows(&self, what: &str) -> Result<String> {
        self.is(what, |text| text.contains(what))
    }

    /// The lines of a table below its titles, by its name, up to the next table.
    fn rows(text: &str, table: &str) -> Vec<Vec<String>> {
        let is_heading = |line: &&str| heading(line).is_some();
        let lines = text.lines().skip_while(|line| heading(line) != Some(table)).skip(2);
        let rows = lines.take_while(|line| !is_heading(line) && !line.starts_with("q quit"));
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
        rows.map(words).filter(|row: &Vec<String>| !row.is_empty()).collect()
    }

    /// The values of a column in a table.
    fn column(text: &str, table: &str, title: &str) -> Result<Vec<String>> {
        let lines: Vec<&str> = text.lines().collect();
        let at = lines.iter().position(|line| heading(line) == Some(table)).context("no table")?;
        let titles = lines[at + 1];
        let from = titles.find(title).with_context(|| format!("no {title}: {text}"))?;
        let to = from + title.len();
        let values = lines[at + 2..].iter().take_while(|line| {
            heading(line).is_none() && !line.starts_with("q quit") && !line.trim().is_empty()
        });
        // Numbers end where their title does, texts begin there.
        let value = |line: &&str| {
            let line: Vec<char> = line.chars().collect();
            let is_in = |at: usize| line.get(at).is_some_and(|c| *c != ' ');
            let (mut begin, mut end) = (from.min(line.len()), to.min(line.len()));
            while begin > 0 && is_in(begin - 1) && is_in(begin) {
                begin -= 1;
            }
            while is_in(end) && end > from && is_in(end - 1) {
                end += 1;
            }
            line[begin..end].iter().collect::<String>().trim().to_owned()
        };
        Ok(values.map(value).collect())
    }

    /// No line of the screen is cut, and its first and last ones are those of the tool.
    fn is_whole(&self, text: &str) -> Result<()> {
        let lines: Vec<&str> = text.lines().collect();
        let room = usize::from(self.columns);
        ensure!(lines.iter().all(|line| line.chars().count() <= room), "{text}");
        ensure!(lines[0].starts_with("slow_io "), "{text}");
        ensure!(lines.last().is_some_and(|line| line.starts_with("q quit")), "{text}");
        for table in ["Disks", "Slowest", "Who"] {
            ensure!(lines.iter().any(|line| heading(line) == Some(table)), "no {table}: {text}");
        }
        Ok(())
    }

    fn is_alternate(&self) -> bool {
        lock(&self.screen).screen().alternate_screen()
    }

    fn is_raw(&self) -> Result<bool> {
        Ok(!tcgetattr(&self.terminal)?.local_modes.contains(LocalModes::ICANON))
    }

    /// Ends it with this key. What it prints then: the terminal is as it was.
    fn end(mut self, key: &str) -> Result<String> {
        ensure!(self.is_alternate() && self.is_raw()?, "not a full screen");
        self.resize(500, 200)?;
        // A key that comes with the new size waits for the next one: crossterm looks at one of the two.
        self.is("the large screen", |text| text.lines().count() > 400)?;
        self.types(key)?;
        let code = || Ok::<String, anyhow::Error>(fs::read_to_string(ENDED).unwrap_or_default());
        wait_until("the end", || Ok(code()?.ends_with('\n'))).with_context(|| self.text())?;
        ensure!(code()?.trim() == "0", "exit code {}: {}", code()?, self.text());
        wait_until("the modes", || Ok(!self.is_raw()?))?;
        ensure!(!self.is_alternate(), "the alternate screen is left: {}", self.text());
        ensure!(!lock(&self.screen).screen().hide_cursor(), "no cursor");
        self.shows(" measured")
    }
}

/// Whoever leads the session of a terminal takes the others with it.
impl Drop for Live {
    fn drop(&mut self) {
        shell(&format!("kill -KILL $(cat {SHELL})")).ok();
    }
}

fn lock(screen: &Mutex<Parser>) -> std::sync::MutexGuard<'_, Parser> {
    screen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Which table begins with this line: ` 2 Slowest, 5 of 9  by TOTAL`.
fn heading(line: &str) -> Option<&str> {
    let line = line.trim_start_matches(['▸', ' ']);
    let (number, rest) = line.split_once(' ')?;
    let name = rest.split([',', ' ']).next()?;
    let is_one = ["Disks", "Slowest", "Who", "Hanging"].contains(&name) && rest.contains("by ");
    (number.len() == 1 && is_one).then_some(name)
}

fn number(text: &str) -> Result<f64> {
    text.trim_end_matches('%').trim().parse().with_context(|| text.to_owned())
}

/// Beside a quick disk, one whose timer takes 200 ms: it is on top, and its time is the device's. What the screen counts
/// is what fio and the kernel have counted.
fn slow_live_shows_the_slow_disk() -> Result<()> {
    const DELAY: f64 = 200.0; // ms
    let (slow, quick) = (NullBlk::timer("slow", DELAY as u64, "")?, NullBlk::new("quick", "")?);
    let (first, other) = (&*slow.name, &*quick.name);
    let before = [disks::bios(first)?, disks::bios(other)?];
    let mut live = Live::new(24, 80, "--min 150ms")?;
    let load = |disk: &str, reads| fio_direct(disk, &format!("--number_ios={reads} --size=64M"));
    let fio = load(other, 3000)?;
    ensure!(fio["read"]["total_ios"] == 3000, "{fio}");
    load(first, 30)?;
    wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))?;
    // The last figures are those of all.
    let bios = [disks::bios(first)? - before[0], disks::bios(other)? - before[1]];
    let counts = |text: &str| -> Result<BTreeMap<String, String>> {
        let names = Live::column(text, "Disks", "DISK")?;
        Ok(names.into_iter().zip(Live::column(text, "Disks", "I/OS")?).collect())
    };
    let all = |text: &str| {
        counts(text).is_ok_and(|counts| {
            let of = |disk: &str| counts.get(disk).and_then(|count| count.parse::<u64>().ok());
            [of(first), of(other)] == bios.map(Some)
        })
    };
    let is_there = |text: &str| all(text) && live.is_whole(text).is_ok();
    let text = live.is(&format!("{bios:?} I/Os"), is_there)?;
    let column = |title: &str| Live::column(&text, "Disks", title);
    ensure!(column("DISK")?[0] == first, "the slow one is not on top: {text}");
    ensure!(column("SLOW")?[0] == bios[0].to_string(), "each takes {DELAY} ms: {text}");
    for title in ["P50", "P99", "MAX ms"] {
        ensure!(number(&column(title)?[0])? >= DELAY, "{title}, and each takes {DELAY} ms: {text}");
    }
    let bar = &column("PARTS")?[0];
    let device = bar.matches('d').count();
    ensure!(bar.len() >= 10 && device * 10 >= bar.len() * 8, "{bar:?} is not the device's: {text}");
    ensure!(text.contains(" I/Os") && text.contains(" were measured."), "{text}");
    let times = Live::column(&text, "Slowest", "TOTAL ms")?;
    let times = times.iter().map(|time| number(time)).collect::<Result<Vec<_>>>()?;
    ensure!(!times.is_empty() && times.is_sorted_by(|a, b| a >= b), "{times:?}: {text}");
    let who = Live::rows(&text, "Who");
    ensure!(
        who.iter().any(|row| row.contains(&"fio".to_owned()) && row.contains(&"3000".into())),
        "{text}"
    );

    // Only the slow disk; then its process, and everything again.
    live.types("\r")?;
    let is_only = |text: &str| {
        let disks = Live::column(text, "Disks", "DISK").unwrap_or_default();
        text.contains(&format!("ONLY disk {first}"))
            && disks == [first]
            && !text.contains(&format!(" {other} "))
    };
    live.is("the slow disk only", is_only)?;
    live.types("\x1b")?;
    live.is("no filter", |text| !text.contains("ONLY") && text.contains(other))?;
    live.types(&format!("/{other}\r"))?;
    live.is("the other one", |text| {
        !text.contains(&format!("\n{first} ")) && text.contains(&format!("\n{other} "))
    })?;
    // A letter that follows at once would be one with Alt.
    live.types("\x1b")?;
    live.is("no filter again", |text| !text.contains("ONLY"))?;
    // By the name; and the other way round of keys, by the last column.
    live.types("s")?;
    live.shows("1 Disks  by HANG")?;

    // A pause keeps what is shown; the counts begin again.
    live.types("p")?;
    live.shows("PAUSED")?;
    load(other, 7)?;
    thread::sleep(Duration::from_secs(3));
    let paused = live.text();
    ensure!(all(&paused), "paused at {bios:?}: {paused}");
    live.types("r")?;
    live.is("no counts", |text| {
        let none = counts(text).is_ok_and(|it| it.values().all(|count| count == "0"));
        text.contains("since r") && none
    })?;
    load(first, 5)?;
    live.is("5 reads", |text| {
        counts(text).is_ok_and(|it| it.get(first).is_some_and(|it| it == "5"))
    })?;

    live.resize(40, 120)?;
    let text = live.is("a large screen", |text| {
        let lines: Vec<&str> = text.lines().collect();
        lines.len() == 40 && lines[39].contains("p pause") && live.is_whole(text).is_ok()
    })?;
    ensure!(Live::column(&text, "Disks", "MAX ms").is_ok(), "{text}");
    live.types("?")?;
    live.shows("take the filter away")?;
    live.types("?")?;
    live.is("the tables", |text| text.contains("Disks"))?;

    // The record has all of the run, whatever the screen has begun again.
    let record = live.end("q")?;
    let of_disk = |disk: &str, count: u64| record.contains(&format!("\n{disk}: {count} I/Os\n"));
    ensure!(of_disk(first, bios[0] + 5) && of_disk(other, bios[1] + 7), "{record}");
    let verdict = format!("{first}: {0} of {0} I/Os took 150ms or longer", bios[0] + 5);
    ensure!(record.contains(&verdict) && record.contains(" were measured."), "{record}");
    let lines = record.lines().filter(|line| line.split_whitespace().nth(1) == Some(first));
    ensure!((10..=20).contains(&lines.count()), "the 20 slowest: {record}");
    Ok(())
}

/// An I/O that a suspended disk holds back is on the screen while it waits, with its age, which grows.
fn slow_live_shows_what_hangs() -> Result<()> {
    let disk = Mapped::new("waits", &format!("0 65536 linear /dev/{} 0", disks::virtio()?))?;
    let name = disk.disk()?;
    let live = Live::new(24, 80, "--min 100ms")?;
    disk.suspend(true)?;
    let began = Instant::now();
    let read = format!("exec dd if={} of=/dev/null bs=4k skip=9 count=1 iflag=direct", disk.path());
    let reader = Running::bash(&read)?;
    let looked = live.shows("1 HANGING").and_then(|_| {
        // A screen arrives in pieces.
        let is_there = |text: &str| text.contains("(suspended)") && live.is_whole(text).is_ok();
        let text = live.is("no request yet (suspended)", is_there)?;
        let elapsed = began.elapsed().as_secs_f64();
        let age = |text: &str| -> Result<f64> {
            let rows = Live::rows(text, "Hanging");
            let [row] = &rows[..] else { bail!("one hangs: {text}") };
            let is_it = row[1] == "s" && row[2] == name && row.contains(&"dd".to_owned());
            ensure!(is_it, "{row:?}");
            number(&row[0])
        };
        let first = age(&text)?;
        ensure!((1.0..=elapsed).contains(&first), "of at most {elapsed} s: {text}");
        let is_older = |text: &str| age(text).is_ok_and(|age| age >= first + 1.0);
        live.is("a second later", is_older)?;
        let hangs = Live::column(&text, "Disks", "HANG")?;
        ensure!(hangs.contains(&"1".to_owned()), "{text}");
        Ok(())
    });
    disk.suspend(false)?;
    reader.end_well()?;
    looked?;
    live.is("nothing hangs", |text| !text.contains("HANGING") && !text.contains("Hanging"))?;
    let record = live.end("\x03")?;
    ensure!(record.contains(&format!("{name}: 1 of 1 I/Os took 100ms or longer")), "{record}");
    Ok(())
}

/// What finds no room is as large on the screen as the figures.
fn slow_live_says_what_is_lost() -> Result<()> {
    let disk = NullBlk::timer("test", 5, "hw_queue_depth=64 submit_queues=1")?;
    let options = format!("--min 1h --in-flight 4 --causes 1 --disk {}", disk.name);
    let live = Live::new(24, 80, &options)?;
    let before = disks::bios(&disk.name)?;
    fio_direct(&disk.name, "--iodepth=16 --number_ios=200 --size=8M")?;
    let missing = |text: &str, what: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.contains("NOT ALL WAS MEASURED"))?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let place = words.iter().position(|word| *word == what)?;
        words[place - 1].parse().ok()
    };
    let did = disks::bios(&disk.name)? - before;
    let is_all = |text: &str| {
        let counts = Live::column(text, "Disks", "I/OS").unwrap_or_default();
        let measured = counts.first().and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
        missing(text, "dropped").is_some_and(|dropped| dropped > 50 && dropped + measured >= did)
    };
    let text = live.is("what was dropped", is_all)?;
    ensure!(!text.contains("were measured"), "{text}");
    let record = live.end("q")?;
    ensure!(record.contains("Not all was measured:"), "{record}");
    Ok(())
}

/// Without a terminal, there is no screen: exit code 2, and what to do.
fn slow_live_needs_a_terminal() -> Result<()> {
    let ended = Running::spawn(Command::new(program("slow_io")).arg("--live"))?.end()?;
    ensure!(ended.code == Some(2), "{ended:?}");
    ensure!(ended.stderr.contains("without --live, each slow I/O is a line"), "{ended:?}");
    let both = Command::new(program("slow_io")).args(["--live", "--json"]).output()?;
    ensure!(both.status.code() == Some(2), "{both:?}");
    Ok(())
}
