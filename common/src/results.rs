//! What a stage has counted, from the maps to the screen.

use std::{
    ops::{Deref, DerefMut},
    os::fd::AsFd,
};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    MapCore, MapFlags, Object, Program, ProgramMut,
    query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo},
};
use plain::Plain;

/// Prints `N WHAT`; for none, also what to try.
pub fn print_total(count: u64, what: &str) {
    let hint = " (was anything read or written? dd iflag=direct reads past the page cache)";
    println!("{count:>8} {what}{}", if count == 0 { hint } else { "" });
}

/// Prints how often a program of the object was skipped, and which one.
pub fn print_skipped(object: &Object) -> Result<()> {
    print_skips(&skipped(object)?);
    Ok(())
}

/// The same for an object of which two programs hook one event: what one of them misses, the other
/// one sees. So of these two, it counts what both may have missed: the smaller number, and no more
/// than the `unmeasured` starts, of which an event that nobody has seen leaves one behind.
pub fn print_skipped_by_both(
    object: &Object,
    both: [&ProgramMut; 2],
    unmeasured: u64,
) -> Result<()> {
    let names = both.map(|program| program.name().to_string_lossy().into_owned());
    let both_loaded = both.iter().all(|program| program.autoload());
    let mut skips = skipped(object)?;
    if both_loaded {
        let times = |name: &String| skips.iter().find(|(skip, _)| skip == name).map_or(0, |s| s.1);
        let least = names.iter().map(times).min().unwrap_or_default().min(unmeasured);
        skips.retain(|(name, _)| !names.contains(name));
        skips.extend((least > 0).then(|| (names.join("() and "), least)));
    }
    print_skips(&skips);
    Ok(())
}

fn print_skips(skips: &[(String, u64)]) {
    if skips.is_empty() {
        println!("{:>8} skipped (program already running on this CPU)", 0);
    }
    for (program, times) in skips {
        println!("{times:>8} skipped ({program}() already running on this CPU)");
    }
}

/// ` (of 997 measured, 3 not)`, to stand behind a figure that is taken from what was measured only;
/// nothing where all was measured.
pub fn of_measured(measured: u64, not_measured: u64) -> String {
    match not_measured {
        0 => String::new(),
        not => format!(" (of {measured} measured, {not} not)"),
    }
}

/// How often the kernel skipped any of the object's programs: each time, an event was not seen.
pub fn times_skipped(object: &Object) -> Result<u64> {
    Ok(skipped(object)?.iter().map(|(_, times)| times).sum())
}

/// How often the kernel skipped each of the object's programs, because an interrupt or another task
/// found the same program running on the same CPU; only those that it did skip. Skipped kprobe
/// programs are counted from 6.7 on.
fn skipped(object: &Object) -> Result<Vec<(String, u64)>> {
    let skipped = programs(object)?.into_iter().map(|(name, info)| (name, info.recursion_misses));
    Ok(skipped.filter(|(_, times)| *times > 0).collect())
}

/// The object's programs that are loaded, and what the kernel says about them. (It cuts their names
/// after 15 characters.)
pub(crate) fn programs(object: &Object) -> Result<Vec<(String, ProgramInfo)>> {
    let query = || ProgInfoQueryOptions::default().include_jited_prog_insns(true);
    let mut programs = Vec::new();
    for program in object.progs().filter(|program| program.autoload()) {
        let id = Program::id_from_fd(program.as_fd()).context("a loaded program has no id")?;
        let info = ProgInfoIter::with_query_opts(query()).find(|info| info.id == id);
        let name = program.name().to_string_lossy().into_owned();
        programs.extend(info.map(|info| (name, info)));
    }
    Ok(programs)
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
