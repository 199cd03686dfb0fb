//! What a stage has counted, from the maps to the screen.

use std::{
    ops::{Deref, DerefMut},
    os::fd::AsFd,
};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    MapCore, MapFlags, Object, Program,
    query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo},
};
use plain::Plain;

/// Prints `N WHAT`, or, where the object's programs saw nothing else either, what to try.
pub fn print_total(count: u64, what: &str, object: &Object) -> Result<()> {
    if count == 0 && saw_nothing(object)? {
        println!(
            "No I/O was seen: 0 {what}. Was anything read or written meanwhile? (dd reads through the page cache, dd iflag=direct past it.)"
        );
    } else {
        println!("{count:>8} {what}");
    }
    Ok(())
}

/// Prints how often a program of the object was skipped, and which one.
pub fn print_skipped(object: &Object) -> Result<()> {
    let skipped = skipped(object)?;
    if skipped.is_empty() {
        println!("{:>8} skipped (program already running on this CPU)", 0);
    }
    for (program, times) in skipped {
        println!("{times:>8} skipped ({program}() already running on this CPU)");
    }
    Ok(())
}

/// ` (of 997 measured, about 3 not)`, to stand behind a figure that is taken from what was measured only;
/// nothing where all was measured.
pub fn of_measured(measured: u64, not_measured: u64) -> String {
    match not_measured {
        0 => String::new(),
        not => format!(" (of {measured} measured, about {not} not)"),
    }
}

/// How often the kernel skipped any of the object's programs: each time, an event was not seen.
pub fn times_skipped(object: &Object) -> Result<u64> {
    Ok(skipped(object)?.iter().map(|(_, times)| times).sum())
}

/// How often the kernel skipped each of the object's programs, because an interrupt or another task
/// found the same program running on the same CPU; only those that it did skip. The kernel counts
/// that from 5.12 on, for kprobes from 6.7 on; before, the list is empty.
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

/// Whether nothing is on its way, every counter is 0, and nothing was missed.
fn saw_nothing(object: &Object) -> Result<bool> {
    for map in object.maps() {
        let name = map.name().to_string_lossy();
        let empty = if name == "starts" {
            map.keys().next().is_none()
        } else if name.ends_with(".bss") {
            let counters = map.lookup(&0_u32.to_ne_bytes(), MapFlags::ANY)?;
            counters.is_none_or(|bytes| bytes.iter().all(|&byte| byte == 0))
        } else {
            true
        };
        if !empty {
            return Ok(false);
        }
    }
    Ok(skipped(object)?.is_empty())
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
