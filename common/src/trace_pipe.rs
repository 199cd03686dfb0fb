//! The lines that `bpf_printk()` writes.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    mem::MaybeUninit,
    os::fd::OwnedFd,
    path::Path,
    process,
};

use anyhow::{Context, Result};
use libbpf_rs::{
    AsRawLibbpf, OpenObject,
    btf::{
        Btf,
        types::{DataSec, Var},
    },
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{
        AtFlags, FlockOperation, Mode, OFlags, flock,
        inotify::{CreateFlags, Reader, WatchFlags, add_watch, init},
        mkdirat, openat, unlinkat,
    },
};

use crate::{error::unsupported, preflight, printable};

const PREFIX: &str = "bpf-workshop-";

/// What ftrace writes before an event's text.
const EVENT: &str = "bpf_trace_printk: ";

/// The lines that `bpf_printk()` writes: a tracefs instance of our own, with a trace pipe that no other
/// process reads. Several programs can run at once, and the global trace_pipe is left alone.
///
/// Every instance gets the lines of every program. Those that none of this program's formats begins are
/// counted and not printed. The same texts of two programs cannot be told apart: what other programs of the
/// workshop ran meanwhile is said at the end.
///
/// A lock is held on it for as long as this process lives. An instance without a lock was left by a
/// killed process; the next `open` removes it.
///
/// All accesses go through the two open directories: tracefs may even be unmounted meanwhile.
pub struct TracePipe {
    /// `instances` of tracefs.
    instances: File,
    /// The instance's name there.
    name: String,
    /// The instance; holds the lock.
    directory: File,
    pipe: Option<File>,
    /// The beginning of a line whose end has not been read yet.
    rest: Vec<u8>,
    /// The beginning of an event, up to a newline in its thread's name.
    before: String,
    /// How the lines of this program begin: [`formats`].
    formats: Vec<Vec<u8>>,
    lines: u64,
    lost: u64,
    /// Lines that begin otherwise.
    others: u64,
    /// The instances of other programs that run now, and a watch for those that come.
    neighbours: Vec<String>,
    comers: Option<OwnedFd>,
}

impl TracePipe {
    /// Makes an instance, and removes those that killed runs have left.
    ///
    /// Fails with [`Unsupported`](crate::Unsupported) where tracefs is not mounted.
    pub fn open() -> Result<TracePipe> {
        let path = preflight::tracefs()?.join("instances");
        let comers = comers(&path).ok();
        let neighbours = remove_left_overs(&path);
        let instances = File::open(&path).with_context(|| path.display().to_string())?;
        // Another start may take a new instance for a left-over before it is locked: try again.
        let mut attempts = (0..10)
            .map(|attempt| create(&instances, format!("{PREFIX}{}-{attempt}", process::id())))
            .peekable();
        if let Some(Err(error)) = attempts.peek()
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            return unsupported(
                "the capability CAP_DAC_OVERRIDE is missing: only root may make a trace pipe, which event \
                 lines need",
            );
        }
        let (name, directory) = attempts
            .find_map(Result::ok)
            .with_context(|| format!("no tracefs instance could be made in {}", path.display()))?;
        let mut pipe = TracePipe {
            instances,
            name,
            directory,
            pipe: None,
            rest: Vec::new(),
            before: String::new(),
            formats: Vec::new(),
            lines: 0,
            lost: 0,
            others: 0,
            neighbours,
            comers,
        };
        let opened =
            openat(&pipe.directory, "trace_pipe", OFlags::RDONLY | OFlags::NONBLOCK, Mode::empty());
        let opened = opened.context("the instance's trace_pipe could not be opened")?;
        pipe.pipe = Some(opened.into());
        // The clock of bpf_ktime_get_ns(): the times at both ends of a line can be compared. The tracer's
        // own one (`local`) ran nine times too fast in an emulated machine whose host was busy.
        pipe.set("trace_clock", "mono").context("the instance's clock could not be set")?;
        pipe.enable(true).context("the event bpf_trace_printk could not be switched on")?;
        Ok(pipe)
    }

    fn enable(&self, on: bool) -> io::Result<()> {
        self.set("events/bpf_trace/bpf_trace_printk/enable", if on { "1" } else { "0" })
    }

    fn set(&self, name: &str, value: &str) -> io::Result<()> {
        let mut file: File = openat(&self.directory, name, OFlags::WRONLY, Mode::empty())?.into();
        file.write_all(value.as_bytes())
    }

    /// Prints from here on only lines that begin as one of these [`formats`]; all, where there is none.
    pub(crate) fn only(&mut self, formats: &[Vec<u8>]) {
        self.formats = formats.to_vec();
    }

    /// Waits up to a tenth of a second for lines and prints those that have come.
    pub(crate) fn print(&mut self) -> Result<()> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        let wait = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&wait)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(()),
            Ok(_) => self.drain(64 * 1024).map(|_| ()),
            Err(error) => Err(error).context("polling the trace pipe failed"),
        }
    }

    /// Prints what is in the pipe, at most about `limit` bytes; whether there may be more.
    fn drain(&mut self, limit: usize) -> Result<bool> {
        let mut bytes = [0; 16 * 1024];
        let mut done = 0;
        while done < limit {
            let Some(pipe) = &mut self.pipe else { return Ok(false) };
            match pipe.read(&mut bytes) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    done += n;
                    self.print_lines(&bytes[..n], &mut io::stdout().lock())?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("reading the trace pipe failed"),
            }
        }
        Ok(true)
    }

    fn print_lines(&mut self, bytes: &[u8], out: &mut impl Write) -> Result<()> {
        self.rest.extend_from_slice(bytes);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else {
            return Ok(());
        };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        for line in String::from_utf8_lossy(&whole).lines() {
            let lost = lost_events(line);
            self.lost += lost.unwrap_or(0);
            let text = line.split_once(EVENT).map(|(_, text)| text);
            // A thread's name may hold a newline: then the event's text is in a later line.
            if lost.is_none() && text.is_none() {
                self.before.push_str(line);
                self.before.push('?');
                continue;
            }
            let line = std::mem::take(&mut self.before) + line;
            let begins = |format: &Vec<u8>| text.is_none_or(|t| t.as_bytes().starts_with(format));
            if !self.formats.is_empty() && !self.formats.iter().any(begins) {
                self.others += 1;
                continue;
            }
            self.lines += u64::from(lost.is_none());
            writeln!(out, "{}", printable(&line)).context("stdout")?;
        }
        out.flush().context("stdout")
    }

    /// Prints the rest, then how many lines there were, how many were lost, and what other programs have to do
    /// with them.
    pub fn finish(mut self) -> Result<()> {
        self.enable(false).context("the event bpf_trace_printk could not be switched off")?;
        while self.drain(1 << 20)? {}
        match (self.lines, self.lost) {
            (0, 0) => println!(
                "No event was seen. Was anything read or written meanwhile? (dd reads through the page cache, dd iflag=direct past it.)"
            ),
            (lines, lost) => println!("{lines} trace lines, {lost} lost"),
        }
        if self.others > 0 {
            println!(
                "{} lines that no bpf_printk() of this program writes, not shown",
                self.others
            );
        }
        if let Some(others) = self.ran_beside() {
            println!(
                "{others} printed trace lines meanwhile, too. Where the texts are the same, the lines above \
                 are of both."
            );
        }
        Ok(())
    }

    /// The programs of the workshop that have read trace lines while this one did: `process 7, process 9`.
    fn ran_beside(&mut self) -> Option<String> {
        let mut names = std::mem::take(&mut self.neighbours);
        let mut buffer = [MaybeUninit::uninit(); 4096];
        if let Some(comers) = &self.comers {
            let mut events = Reader::new(comers, &mut buffer);
            while let Ok(event) = events.next() {
                let name = event.file_name().map(|name| name.to_string_lossy().into_owned());
                names.extend(name.filter(|name| name.starts_with(PREFIX)));
            }
        }
        Some(processes(names)).filter(|processes| !processes.is_empty())
    }
}

/// The other processes that these instances are of: `process 7, process 9`.
fn processes(instances: Vec<String>) -> String {
    let number = |name: &String| name.split('-').find_map(|part| part.parse::<u32>().ok());
    let mut numbers: Vec<u32> = instances.iter().filter_map(number).collect();
    numbers.retain(|number| *number != process::id());
    numbers.sort();
    numbers.dedup();
    let processes: Vec<String> = numbers.iter().map(|number| format!("process {number}")).collect();
    processes.join(", ")
}

impl Drop for TracePipe {
    fn drop(&mut self) {
        // An instance cannot be removed while its pipe is open.
        self.pipe = None;
        unlinkat(&self.instances, &self.name, AtFlags::REMOVEDIR).ok();
    }
}

/// Makes and locks an instance.
fn create(instances: &File, name: String) -> io::Result<(String, File)> {
    mkdirat(instances, &name, Mode::RWXU)?;
    let directory = openat(instances, &name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    flock(&directory, FlockOperation::NonBlockingLockExclusive)?;
    Ok((name, directory.into()))
}

/// Removes the instances of killed runs: those that no living process has locked. The others are left: their
/// names.
fn remove_left_overs(instances: &Path) -> Vec<String> {
    let mut left = Vec::new();
    for entry in fs::read_dir(instances).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Ok(directory) = File::open(entry.path()) else { continue };
        if !name.starts_with(PREFIX) {
            continue;
        }
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => drop(fs::remove_dir(entry.path())),
            Err(_) => left.push(name),
        }
    }
    left
}

/// Has inotify report the instances that are made from here on.
fn comers(instances: &Path) -> io::Result<OwnedFd> {
    let inotify = init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
    add_watch(&inotify, instances, WatchFlags::CREATE)?;
    Ok(inotify)
}

/// How the lines of a program begin: each of its formats, up to the first `%`. What `%s` prints may be
/// anything, and the end of a line with it.
///
/// `bpf_printk()` keeps its format in a constant named `____fmt`, or `___fmt` where it has more than three
/// arguments. None, where there is no such constant, or one begins with `%`.
pub(crate) fn formats(object: &OpenObject) -> Vec<Vec<u8>> {
    // SAFETY: the object is open as long as it is borrowed.
    let raw = unsafe { object.as_libbpf_object().as_ref() };
    let btf = Btf::from_bpf_object(raw).ok().flatten();
    let section = btf.as_ref().and_then(|btf| btf.type_by_name::<DataSec<'_>>(".rodata"));
    let map = object.maps().find(|map| map.name().as_encoded_bytes().ends_with(b".rodata"));
    let constants = map.as_ref().and_then(|map| map.initial_value());
    let (Some(btf), Some(section), Some(constants)) = (&btf, section, constants) else {
        return Vec::new();
    };
    let texts = section.iter().filter_map(|constant| {
        let variable = btf.type_by_id::<Var<'_>>(constant.ty)?;
        let is_format = variable.name()?.as_encoded_bytes().windows(6).any(|at| at == b"___fmt");
        let start = constant.offset as usize;
        is_format.then(|| constants.get(start..start + constant.size)).flatten()
    });
    let formats: Vec<Vec<u8>> = texts.map(beginning).collect();
    if formats.iter().any(Vec::is_empty) { Vec::new() } else { formats }
}

/// What a line of this format begins with.
fn beginning(format: &[u8]) -> Vec<u8> {
    let text = format.split(|byte| b"%\n\0".contains(byte)).next();
    text.unwrap_or_default().to_vec()
}

/// How many lines the kernel says were lost: `CPU:1 [LOST 123 EVENTS]`, which stands in the trace
/// pipe where its buffer was full. `None` for any other line.
fn lost_events(line: &str) -> Option<u64> {
    let (cpu, rest) = line.strip_prefix("CPU:")?.split_once(" [LOST ")?;
    cpu.parse::<u32>().ok()?;
    rest.strip_suffix(" EVENTS]")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_programs_are_named_by_their_instances() {
        let names = ["bpf-workshop-71-0", "bpf-workshop-hand-9", "bpf-workshop-71-1"];
        assert_eq!(processes(names.map(str::to_owned).to_vec()), "process 9, process 71");
        assert_eq!(processes(vec![format!("{PREFIX}{}-0", process::id())]), "");
    }

    #[test]
    fn lost_lines_are_told_from_traced_ones() {
        assert_eq!(lost_events("CPU:1 [LOST 1234 EVENTS]"), Some(1234));
        assert_eq!(lost_events("CPU:12 [LOST 1 EVENTS]"), Some(1));
        let line = "  dd-99  [001] ...21  3.141593: bpf_trace_printk: CPU:1 [LOST 2 EVENTS]";
        assert_eq!(lost_events(line), None);
        assert_eq!(lost_events("CPU:x [LOST 2 EVENTS]"), None);
        assert_eq!(lost_events(""), None);
    }

    #[test]
    fn an_event_is_one_line() {
        let mut pipe = TracePipe {
            instances: File::open("/proc").unwrap(),
            name: "nonexistent".into(),
            directory: File::open("/proc").unwrap(),
            pipe: None,
            rest: Vec::new(),
            before: String::new(),
            formats: Vec::new(),
            lines: 0,
            lost: 0,
            others: 0,
            neighbours: Vec::new(),
            comers: None,
        };
        let mut out = Vec::new();
        pipe.print_lines(b"dd-1 bpf_trace_printk: one\ndd-1 bpf_tr", &mut out).unwrap();
        assert_eq!((pipe.lines, pipe.lost), (1, 0));
        pipe.print_lines(b"ace_printk: two\nCPU:0 [LOST 7 EVENTS]\n", &mut out).unwrap();
        assert_eq!((pipe.lines, pipe.lost, pipe.rest.len()), (2, 7, 0));
        pipe.only(&[beginning(b"three%s"), beginning(b"two\n\0")]);
        let others = "dd-1 bpf_trace_printk: four three\nd\nd-1 bpf_trace_printk: five\n";
        pipe.print_lines(others.as_bytes(), &mut out).unwrap();
        assert_eq!((pipe.lines, pipe.others), (2, 2));
        let hostile = "d\nd\x1b[1m\u{202e}-1 bpf_trace_printk: three\n";
        pipe.print_lines(hostile.as_bytes(), &mut out).unwrap();
        assert_eq!(pipe.lines, 3);
        let printed = "dd-1 bpf_trace_printk: one\ndd-1 bpf_trace_printk: two\nCPU:0 [LOST 7 EVENTS]\n\
                       d?d?[1m?-1 bpf_trace_printk: three\n";
        assert_eq!(String::from_utf8(out).unwrap(), printed);
    }
}
