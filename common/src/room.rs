//! The memory of a program's maps, which an option may make larger than the machine's.

use anyhow::Result;
use clap::{Args, CommandFactory};
use common_base::{available, cgroup_lacks, limit, mib};
use libbpf_rs::{MapType, OpenMap, OpenObject, num_possible_cpus};

use crate::{
    cli::Cli,
    error::{Unsupported, Usage, unsupported},
};

/// What a program takes beside its maps: its own pages, the kernel's types, which libbpf reads, and what the kernel
/// makes of its code. With 16 MiB in all, stage 03 is ended by the kernel; with 20, it runs.
const BESIDE: u64 = 16 << 20;

/// The options that give maps their room.
const SIZES: [&str; 2] = ["in-flight", "causes"];

/// Those of [`SIZES`] that a program has.
pub(crate) fn options<Own: Args>() -> Vec<String> {
    let command = Cli::<Own>::command();
    let has = |name: &&str| command.get_opts().any(|option| option.get_long() == Some(name));
    SIZES.into_iter().filter(has).map(|name| format!("--{name}")).collect()
}

/// The error where the kernel has not had the memory for the maps, which need so many bytes: with exit code 3 where a
/// cgroup has a limit, else with 2.
pub(crate) fn too_little(maps: u64, options: &[String]) -> anyhow::Error {
    let less = smaller(options);
    match limit() {
        Some(limit) => {
            let lack = limit.lacks(maps + BESIDE);
            Unsupported(format!("the kernel has not the memory for this program: {lack}{less}"))
                .into()
        }
        None => {
            let less = if options.is_empty() { ": free some" } else { &less };
            Usage(format!("the kernel has not the memory for the maps of this program{less}"))
                .into()
        }
    }
}

fn smaller(options: &[String]) -> String {
    match options {
        [] => String::new(),
        options => format!(", or give a smaller {}", options.join(" or ")),
    }
}

/// Fails, with exit code 3, where a cgroup leaves a program too little memory, with maps of so many bytes: the kernel
/// would end it in the middle.
pub(crate) fn cgroup_leaves(maps: u64, options: &[String]) -> Result<()> {
    let lack = cgroup_lacks(maps + BESIDE);
    lack.map_or(Ok(()), |lack| unsupported(lack + &smaller(options)))
}

/// How many bytes the maps of an object need.
pub(crate) fn of_maps(object: &OpenObject) -> Result<u64> {
    let cpus = num_possible_cpus()? as u64;
    Ok(object.maps().map(|map| bytes(&map, cpus).max(others(&map, cpus))).sum())
}

/// Fails, with exit code 2, where the maps of an object need more memory than the machine has. The kernel
/// would not refuse them: it would end other programs to get the memory, or this one. With 3 where a cgroup leaves
/// too little.
pub(crate) fn check(object: &OpenObject, options: &[String]) -> Result<()> {
    cgroup_leaves(of_maps(object)?, options)?;
    let cpus = num_possible_cpus()? as u64;
    let sizes = object.maps().map(|map| (bytes(&map, cpus), map));
    let sizes: Vec<(u64, OpenMap<'_>)> = sizes.collect();
    let needed: u64 = sizes.iter().map(|(bytes, _)| bytes).sum();
    let largest = sizes.iter().max_by_key(|(bytes, _)| bytes);
    match (available(), largest) {
        (Some(available), Some((_, map))) if needed > available && !options.is_empty() => {
            let (name, entries) = (map.name().to_string_lossy(), map.max_entries());
            let fit = (u128::from(entries) * u128::from(available) / u128::from(needed)) as u64;
            Err(Usage(format!(
                "the maps of this program need {}, and {} of memory are available. The largest one, {name}, \
                 has {entries} entries, and about {} would fit: give a smaller {}",
                mib(needed),
                mib(available),
                rounded(fit),
                options.join(" or ")
            ))
            .into())
        }
        _ => Ok(()),
    }
}

/// Down to two digits.
fn rounded(number: u64) -> u64 {
    let unit = 10_u64.pow(number.checked_ilog10().unwrap_or(0).saturating_sub(1));
    number / unit * unit
}

/// What the kernel allocates for a hash map when it is made: kernel/bpf/hashtab.c, htab_map_alloc(). Maps of
/// other kinds have a size of their own, which no option changes.
fn bytes(map: &OpenMap<'_>, cpus: u64) -> u64 {
    let round = |bytes: u32| u64::from(bytes).next_multiple_of(8);
    let (key, value, entries) =
        (round(map.key_size()), round(map.value_size()), u64::from(map.max_entries()));
    let entry = match map.map_type() {
        MapType::Hash | MapType::LruHash => 48 + key + value,
        MapType::PercpuHash | MapType::LruPercpuHash => 56 + key + value * cpus,
        _ => return 0,
    };
    entries * entry + entries.next_power_of_two() * 16
}

/// The same for maps of other kinds.
fn others(map: &OpenMap<'_>, cpus: u64) -> u64 {
    let value = u64::from(map.value_size()).next_multiple_of(8);
    let entries = u64::from(map.max_entries());
    match map.map_type() {
        MapType::Array | MapType::Queue => entries * value,
        MapType::PercpuArray => entries * value * cpus,
        MapType::StackTrace => entries * (value + 32),
        MapType::RingBuf => entries,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{InFlight, NoOptions};

    #[test]
    fn a_program_names_the_options_that_it_has() {
        assert_eq!(options::<InFlight>(), ["--in-flight"]);
        assert!(options::<NoOptions>().is_empty());
        assert!(
            too_little(0, &options::<InFlight>()).to_string().ends_with("a smaller --in-flight")
        );
    }

    #[test]
    fn a_limit_has_two_digits() {
        assert_eq!([3_987_654, 99, 100, 7, 0].map(rounded), [3_900_000, 99, 100, 7, 0]);
    }
}
