//! Whether the guest of `cargo lesson`, in which many attempts are judged, is as it was after its boot.
//!
//! A judge removes what it made, and an attempt takes along what it loaded. Where either was cut off, or an
//! attempt leaves something, the next one would be judged by that: the figures of a disk that nobody removed, a
//! program that still prints.

use std::ffi::OsStr;

use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};

use crate::{pagecache, prelude::*};

/// Where the state after the boot is kept.
const FIRST: &str = "/run/guest-tests.state";
/// How long the kernel may take to free what has no user any more.
const SOON: Duration = Duration::from_secs(5);

/// How an instance of tracefs is shown, before its name.
pub const INSTANCE: &str = "instance of tracefs ";

/// Settings that change by themselves.
const OWN_WAY: [&str; 6] = [
    "kernel/hung_task_detect_count",
    "kernel/hung_task_warnings",
    "kernel/ns_last_pid",
    "kernel/perf_event_max_sample_rate",
    "kernel/tainted",
    "vm/stat_refresh",
];
/// The settings of tracefs that one program changes for all.
const OF_TRACEFS: [&str; 12] = [
    "buffer_size_kb",
    "current_tracer",
    "dynamic_events",
    "kprobe_events",
    "set_event",
    "set_event_pid",
    "set_ftrace_filter",
    "set_ftrace_pid",
    "trace_clock",
    "tracing_cpumask",
    "tracing_on",
    "uprobe_events",
];

/// What there is, by name, and what it is set to, where it is a setting.
pub type State = BTreeMap<String, String>;

/// Whose processes belong to a state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Of {
    All,
    /// Those of this session do not: the guest's init ends them.
    Others,
}

/// Keeps the state, unless an earlier run in this guest has: that was nearer to its boot.
pub fn keep_first() -> Result<()> {
    match Path::new(FIRST).exists() {
        true => Ok(()),
        false => Ok(fs::write(FIRST, serde_json::to_string(&now(Of::Others))?)?),
    }
}

/// What is not as it was after the boot, once the kernel has freed what it will.
pub fn left() -> Result<Vec<String>> {
    let first: State = serde_json::from_str(&fs::read_to_string(FIRST)?)?;
    let start = Instant::now();
    loop {
        let left = difference(&first, &now(Of::Others));
        if left.is_empty() || start.elapsed() > SOON {
            return Ok(left);
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// How what is loaded or attached is shown, before its kind and number.
const OF_BPF: &str = "BPF ";

/// What came, went, or has another value. What is loaded may go: the kernel frees a map some time after the end of who
/// has used it, and `first` may have seen one of these.
pub fn difference(first: &State, now: &State) -> Vec<String> {
    let came_or_changed = now.iter().filter_map(|(name, value)| match first.get(name) {
        Some(before) if before == value => None,
        Some(before) => Some(format!("{name} is {value:?} and was {before:?}")),
        // A module and a disk bring settings of their own.
        None if name.starts_with('/') => None,
        None => Some(name.clone()),
    });
    let is_gone = |name: &&String| !name.starts_with(OF_BPF) && !now.contains_key(*name);
    let gone = first.keys().filter(is_gone);
    came_or_changed.chain(gone.map(|name| format!("{name} is gone"))).collect()
}

/// The state now.
pub fn now(of: Of) -> State {
    let things = [modules(), disks(), mounts(), processes(of), loaded(), pins()].concat();
    let mut state: State = things.into_iter().map(|thing| (thing, String::new())).collect();
    let names = |kind: &str, directory: &str| {
        entries(directory).into_iter().map(|path| format!("{kind}{}", name(&path))).collect()
    };
    let more: [Vec<String>; 3] = [
        names(INSTANCE, &format!("{TRACEFS}/instances")),
        names("network interface ", "/sys/class/net"),
        names("disk of null_blk ", "/sys/kernel/config/nullb"),
    ];
    state.extend(more.concat().into_iter().map(|thing| (thing, String::new())));
    state.extend(settings());
    state
}

fn entries(directory: impl AsRef<Path>) -> Vec<PathBuf> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The kernel loads its own modules when they are needed, and what they make is seen: a disk, a mount. A module
/// that does not come with the kernel taints it.
fn modules() -> Vec<String> {
    let loaded = entries("/sys/module");
    let of_kernel = ["null_blk", "dm_mod", "dm_delay", "nvme", "virtio_scsi", "sd_mod"];
    let is_foreign = |path: &&PathBuf| {
        fs::read_to_string(path.join("taint")).is_ok_and(|taint| taint.contains('O'))
    };
    let foreign = loaded.iter().filter(is_foreign).map(|path| name(path));
    let needed = of_kernel.iter().filter(|it| Path::new("/sys/module").join(it).exists());
    foreign.chain(needed.map(|it| (*it).to_owned())).map(|it| format!("module {it}")).collect()
}

/// Those with a size: the module `loop` makes some that wait for a file.
fn disks() -> Vec<String> {
    let has_size = |disk: &PathBuf| {
        fs::read_to_string(disk.join("size")).is_ok_and(|sectors| sectors.trim() != "0")
    };
    entries("/sys/block")
        .iter()
        .filter(|it| has_size(it))
        .map(|it| format!("disk {}", name(it)))
        .collect()
}

fn mounts() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    // The kernel itself mounts tracefs there, for the first who looks.
    let places = text.lines().filter_map(|line| line.split(' ').nth(1));
    let places = places.filter(|place| *place != "/sys/kernel/debug/tracing");
    places.map(|place| format!("mount {place}")).collect()
}

/// Processes that are not the kernel's own.
fn processes(of: Of) -> Vec<String> {
    let group = |process: &Path| fs::read_to_string(process.join("cgroup")).unwrap_or_default();
    let own = group(Path::new("/proc/self"));
    let shown = |process: PathBuf| {
        let number: u32 = name(&process).parse().ok()?;
        let program = fs::read_link(process.join("exe")).ok()?;
        let belongs = of == Of::All || group(&process) != own;
        belongs.then(|| format!("process {number}, {}", program.display()))
    };
    entries("/proc").into_iter().filter_map(shown).collect()
}

/// What is loaded and attached, with its number and the name that its source gives it.
pub fn loaded() -> Vec<String> {
    let named =
        |kind: &str, id: u32, name: &OsStr| format!("{OF_BPF}{kind} {id} ({})", name.display());
    let programs = ProgInfoIter::default().map(|it| named("program", it.id, &it.name));
    let maps = MapInfoIter::default().map(|it| named("map", it.id, &it.name));
    let links = LinkInfoIter::default().map(|it| format!("{OF_BPF}link {}", it.id));
    programs.chain(maps).chain(links).collect()
}

/// What is pinned in a file system of BPF, wherever that is mounted.
pub fn pins() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let is_bpf = |line: &&str| line.split(' ').nth(2) == Some("bpf");
    let places = text.lines().filter(is_bpf).filter_map(|line| line.split(' ').nth(1));
    let mut directories: Vec<PathBuf> = places.map(PathBuf::from).collect();
    let mut pins = Vec::new();
    while let Some(directory) = directories.pop() {
        for path in entries(directory) {
            match path.is_dir() {
                true => directories.push(path),
                // Two are the kernel's own.
                false if path.to_string_lossy().ends_with(".debug") => {}
                false => pins.push(format!("pin {}", path.display())),
            }
        }
    }
    pins
}

/// The pages of a buffer of the tracer; nothing where the size is the kernel's own. It lets the buffer grow when it is
/// first used, and says its size before as `7 (expanded: 1408)`, and then as what these pages hold: each has a header
/// of 16 bytes. Before 6.6, whoever has sized the buffer of an instance has `7` here.
fn in_pages(size: &str) -> Option<String> {
    let kib: u64 = size.split_whitespace().next()?.parse().ok()?;
    let in_pages = |kib: u64| (kib * 1024).div_ceil(pagecache::page_size() - 16);
    let pages = in_pages(kib);
    let is_usual = pages == in_pages(7) || pages == in_pages(1408);
    Some(if is_usual { String::new() } else { pages.to_string() })
}

/// What can be written: of the kernel, of tracefs and of each disk.
fn settings() -> State {
    let mut files = Vec::new();
    let mut directories = ["/proc/sys", "/sys/kernel/mm"].map(PathBuf::from).to_vec();
    directories.push(Path::new(TRACEFS).join("options"));
    directories.extend(entries("/sys/block").iter().map(|disk| disk.join("queue")));
    while let Some(directory) = directories.pop() {
        for path in entries(directory) {
            match fs::symlink_metadata(&path) {
                Ok(meta) if meta.is_dir() => directories.push(path),
                Ok(meta) if meta.mode() & 0o200 != 0 && meta.mode() & 0o400 != 0 => {
                    files.push(path)
                }
                _ => {}
            }
        }
    }
    files.retain(|path| !OWN_WAY.iter().any(|own| path.ends_with(own)));
    files.extend(OF_TRACEFS.map(|name| Path::new(TRACEFS).join(name)));
    files.extend(["/sys/kernel/debug/kprobes/enabled".into()]);
    let value = |path: PathBuf| {
        let text = fs::read(&path).ok()?;
        // The kernel itself enables the event of bpf_printk(), for the first program that has it.
        let text = String::from_utf8_lossy(&text).replace("bpf_trace:bpf_trace_printk\n", "");
        let is_buffer = path.ends_with("buffer_size_kb");
        let text = if is_buffer { in_pages(&text)? } else { text.trim().to_owned() };
        Some((path.display().to_string(), text))
    };
    files.into_iter().filter_map(value).collect()
}
