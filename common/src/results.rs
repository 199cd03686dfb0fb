//! What a stage has counted, from the maps to the screen.

use std::ops::{Deref, DerefMut};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, MapFlags, Object};
use plain::Plain;

use crate::load::missed;

/// Prints `N WHAT`, or, where the object's programs saw nothing else either, what to try.
pub fn print_total(count: u64, what: &str, object: &Object) -> Result<()> {
    if count == 0 && saw_nothing(object)? {
        println!(
            "No I/O was seen: 0 {what}. Did anything read or write meanwhile? dd reads through the page cache, with iflag=direct past it"
        );
    } else {
        println!("{count:>8} {what}");
    }
    Ok(())
}

/// Prints how often a program of the object was skipped, and which.
pub fn print_missed(object: &Object) -> Result<()> {
    let missed = missed(object)?;
    if missed.is_empty() {
        println!("{:>8} missed: the program was at work there already", 0);
    }
    for (program, times) in missed {
        println!("{times:>8} missed: {program}() was at work there already");
    }
    Ok(())
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
    Ok(missed(object)?.is_empty())
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
