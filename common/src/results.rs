//! What a stage has counted, from the maps to the screen.

use std::{
    collections::BTreeMap,
    io::Error,
    ops::{Deref, DerefMut},
    os::fd::{AsFd, AsRawFd},
    sync::Mutex,
};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    Link, MapCore, MapFlags, Object, ProgramMut,
    libbpf_sys::{bpf_prog_get_info_by_fd, bpf_prog_info},
    query::{LinkTypeInfo, PerfEventType},
};
use plain::Plain;

use crate::{preflight, printable};

/// Prints `N WHAT`; for none, also what to try.
pub fn print_total(count: u64, what: &str) {
    let hint = " (was anything read or written? dd iflag=direct reads past the page cache)";
    println!("{count:>8} {what}{}", if count == 0 { hint } else { "" });
}

/// Prints how often a program of the object was skipped, and which one.
pub fn print_skipped(object: &Object) -> Result<()> {
    Skips::of(object)?.print();
    Ok(())
}

/// Prints how often a program was skipped, of an object of which two programs hook one event. What one
/// of the two misses, the other one sees. So this counts what both may have missed: the smaller number,
/// and no more than the `unmeasured` starts, of which an event that nobody has seen leaves one behind.
pub fn print_skipped_by_both(
    object: &Object,
    both: [&ProgramMut; 2],
    unmeasured: u64,
) -> Result<()> {
    Skips::by_pairs(object, &[(both, unmeasured)])?.print();
    Ok(())
}

/// How often the kernel skipped programs of an object, as far as it counts that.
pub struct Skips {
    /// Name and times, of those that were skipped.
    times: Vec<(String, u64)>,
    /// Those whose skips this kernel does not count.
    not_counted: Vec<String>,
    /// Whether any program's skips are counted.
    counts: bool,
}

impl Skips {
    /// Of an object that hooks several events with two programs each: see [`print_skipped_by_both`].
    pub fn by_pairs(object: &Object, pairs: &[([&ProgramMut; 2], u64)]) -> Result<Skips> {
        Ok(Skips::of(object)?.paired(pairs))
    }

    /// The same from these times, while the programs are attached:
    /// [`Session::skips`](crate::Session::skips).
    pub fn so_far(
        object: &Object,
        mut times: Vec<(String, u64)>,
        pairs: &[([&ProgramMut; 2], u64)],
    ) -> Result<Skips> {
        times.retain(|(_, times)| *times > 0);
        Ok(Skips { times, ..Skips::of(object)? }.paired(pairs))
    }

    fn paired(self, pairs: &[([&ProgramMut; 2], u64)]) -> Skips {
        let mut skips = self;
        for (both, unmeasured) in pairs {
            if both.iter().any(|program| !program.autoload()) {
                continue;
            }
            let names = both.map(|program| program.name().to_string_lossy().into_owned());
            let Skips { times, not_counted, .. } = &mut skips;
            let of = |name: &String| match times.iter().find(|(skip, _)| skip == name) {
                Some((_, times)) => *times,
                None if not_counted.contains(name) => u64::MAX,
                None => 0,
            };
            let least = names.iter().map(of).min().unwrap_or_default().min(*unmeasured);
            times.retain(|(name, _)| !names.contains(name));
            times.extend((least > 0).then(|| (names.join("() and "), least)));
        }
        skips
    }

    /// All but those of a program whose skips lose nothing.
    pub fn without(mut self, program: &str) -> Skips {
        self.times.retain(|(name, _)| name != program);
        self
    }

    fn of(object: &Object) -> Result<Skips> {
        let (times, not_counted) = (skipped(object)?, not_counted(object)?);
        let loaded = object.progs().filter(|program| program.autoload()).count();
        // Where none is counted, nobody knows whether it is 0.
        Ok(Skips { counts: loaded > not_counted.len(), times, not_counted })
    }

    /// Whether this kernel counts how often it skips this program.
    pub fn counts(&self, program: &str) -> bool {
        !self.not_counted.iter().any(|name| name == program)
    }

    /// How often, in all.
    pub fn times(&self) -> u64 {
        self.times.iter().map(|(_, times)| times).sum()
    }

    /// Prints those that were skipped.
    pub fn print_times(&self) {
        for (program, times) in &self.times {
            println!("{times:>8} skipped ({program}() already running on this CPU)");
        }
    }

    /// Prints all that is known: also that there were none, and which are not counted.
    pub fn print(&self) {
        if self.times.is_empty() && self.counts {
            println!("{:>8} skipped (program already running on this CPU)", 0);
        }
        self.print_times();
        self.print_not_counted();
    }

    /// Prints of which programs this kernel does not count it.
    pub fn print_not_counted(&self) {
        if let [program, others @ ..] = &*self.not_counted {
            let others: String = others.iter().map(|other| format!(", {other}()")).collect();
            println!("{:>8} skipped ({program}(){others}: not counted on this kernel)", '-');
        }
    }
}

/// The object's programs whose skips this kernel does not count: those of kprobes and of tracepoints' records,
/// before 6.7 (trace_call_bpf() in kernel/trace/bpf_trace.c).
fn not_counted(object: &Object) -> Result<Vec<String>> {
    if !preflight::is_before((6, 7))? {
        return Ok(Vec::new());
    }
    let uncounted = object.progs().filter(|program| {
        let section = program.section().as_encoded_bytes();
        program.autoload() && (section.starts_with(b"kprobe") || section.starts_with(b"tp/"))
    });
    Ok(uncounted.map(|program| program.name().to_string_lossy().into_owned()).collect())
}

/// A string of C, such as a thread's or a file's name, as [`printable`].
pub fn text(string: &[i8]) -> String {
    let bytes: Vec<u8> = string.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    printable(&String::from_utf8_lossy(&bytes))
}

/// ` (of 997 measured, 3 not)`, to stand behind a figure that is taken from what was measured only;
/// nothing where all was measured.
pub fn of_measured(measured: u64, not_measured: u64) -> String {
    match not_measured {
        0 => String::new(),
        not => format!(" (of {measured} measured, {not} not)"),
    }
}

/// How often the kernel skipped any of the object's programs: each time, an event was not seen. While
/// they are attached, [`Session::skips`](crate::Session::skips) knows more.
pub fn times_skipped(object: &Object) -> Result<u64> {
    Ok(skipped(object)?.iter().map(|(_, times)| times).sum())
}

/// How often the kernel skipped each of the object's programs, because an interrupt or another task
/// found the same program running on the same CPU, or an interrupt any kprobe; only those that it did
/// skip. Skipped kprobe programs are counted from 6.7 on.
fn skipped(object: &Object) -> Result<Vec<(String, u64)>> {
    let skips = skips(object, std::iter::empty())?;
    Ok(skips.into_iter().filter(|(_, times)| *times > 0).collect())
}

/// The same of all that are loaded, and with what kprobes that are still attached have [`missed`].
pub(crate) fn skips<'a>(
    object: &Object,
    kprobes: impl Iterator<Item = &'a Link>,
) -> Result<Vec<(String, u64)>> {
    let attached: Vec<_> = kprobes.filter_map(missed).collect();
    let detached = MISSED.lock().map_err(|_| Error::other("a thread panicked"))?;
    let times = |info: bpf_prog_info| {
        let attached = attached.iter().filter(|(program, _)| *program == info.id);
        info.recursion_misses
            + detached.get(&info.id).copied().unwrap_or_default()
            + attached.map(|(_, times)| times).sum::<u64>()
    };
    Ok(programs(object)?.into_iter().map(|(name, info)| (name, times(info))).collect())
}

/// What [`remember_missed`] has read, by the id of the link's program.
static MISSED: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());

/// Keeps for [`skipped`] what a link that is about to go has [`missed`].
pub(crate) fn remember_missed(link: &Link) {
    if let Some((program, missed)) = missed(link)
        && let Ok(mut all) = MISSED.lock()
    {
        *all.entry(program).or_default() += missed;
    }
}

/// The program of a kprobe's link, and how often it did not begin, because its CPU was in another
/// kprobe. The kernel counts these with the kprobe, not with the program (kernel/kprobes.c,
/// kprobes_inc_nmissed_count()), and shows them as long as there is the link, from 6.7 on.
pub(crate) fn missed(link: &Link) -> Option<(u32, u64)> {
    let info = link.info().ok()?;
    match info.info {
        LinkTypeInfo::PerfEvent(event) => match event.event_type {
            PerfEventType::Kprobe { missed, .. } => Some((info.prog_id, missed)),
            _ => None,
        },
        _ => None,
    }
}

/// The object's programs that are loaded, and what the kernel says about them. (It cuts their names
/// after 15 characters.)
pub(crate) fn programs(object: &Object) -> Result<Vec<(String, bpf_prog_info)>> {
    let loaded = object.progs().filter(|program| program.autoload());
    let name = |program: &libbpf_rs::Program| program.name().to_string_lossy().into_owned();
    loaded.map(|program| Ok((name(&program), program_info(&program)?))).collect()
}

/// What the kernel says about a loaded program. By the program's id, it would ask for CAP_SYS_ADMIN.
pub fn program_info(program: &impl AsFd) -> Result<bpf_prog_info> {
    let (mut info, mut size) = (bpf_prog_info::default(), size_of::<bpf_prog_info>() as u32);
    // SAFETY: the kernel writes at most `size` bytes to `info`, which holds integers only.
    let code = unsafe {
        bpf_prog_get_info_by_fd(program.as_fd().as_raw_fd(), &raw mut info, &raw mut size)
    };
    ensure!(code == 0, "the kernel does not describe a program: {}", Error::last_os_error());
    Ok(info)
}

/// The constants of a program that is open but not loaded: `const volatile` in C. The verifier
/// takes their values for given, and drops the code that they switch off.
pub fn constants<T>(rodata: &mut Option<impl DerefMut<Target = T>>) -> Result<&mut T> {
    rodata.as_deref_mut().context("the program has no constants")
}

/// The size of this kernel's pages, as the power of two that it is: 12 where they have 4 KiB.
pub fn page_shift() -> u32 {
    rustix::param::page_size().ilog2()
}

/// The global variables of a loaded program, which share their memory with the kernel.
pub fn counters<T>(bss: &Option<impl Deref<Target = T>>) -> Result<&T> {
    bss.as_deref().context("the program has no variables")
}

/// All records of a per-CPU array: those that every CPU keeps under every key.
///
/// Fails where the map's values have not the size of `T`: the Rust type is not the C type.
pub fn per_cpu<T: Plain + Default>(map: &impl MapCore) -> Result<Vec<T>> {
    ensure!(
        map.value_size() as usize == size_of::<T>(),
        "the map's values are {} bytes",
        map.value_size()
    );
    let mut records = Vec::new();
    for key in map.keys() {
        let cpus = map.lookup_percpu(&key, MapFlags::ANY)?.context("an array lost a key")?;
        for bytes in cpus {
            let mut record = T::default();
            plain::copy_from_bytes(&mut record, &bytes).ok().context("a record is too short")?;
            records.push(record);
        }
    }
    Ok(records)
}
