//! The names of the functions in a stack.

use std::{collections::HashMap, fs::File, io::Write, os::fd::AsRawFd, path::PathBuf};

use anyhow::{Context, Result, ensure};
use blazesym::{
    MaybeDefault,
    symbolize::{
        Input, Symbolizer,
        source::{Kernel, Source},
    },
};
use libbpf_rs::{MapCore, MapFlags};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::kallsyms;

/// Prints a stack: `=> ext4_file_read_iter() [ext4]`.
pub fn print_stack(stacks: &impl MapCore, id: i64) -> Result<()> {
    for line in stack(stacks, id)? {
        println!("=> {line}");
    }
    Ok(())
}

/// The functions of the stack that `bpf_get_stackid()` of a kprobe program has stored under `id`, the
/// outermost one first and the hooked one last: `ext4_file_read_iter() [ext4]`.
///
/// Where there is no stack (a negative id), one line that says why.
pub fn stack(stacks: &impl MapCore, id: i64) -> Result<Vec<String>> {
    if id < 0 {
        return Ok(vec![format!("no stack: {}", no_stack(id))]);
    }
    let id = u32::try_from(id).context("a stack id has 32 bits")?;
    let Some(bytes) = stacks.lookup(&id.to_ne_bytes(), MapFlags::ANY)? else {
        return Ok(vec![format!("no stack: {id} is not in the map")]);
    };
    let addresses: Vec<u64> = bytes
        .chunks_exact(8)
        .filter_map(|bytes| Some(u64::from_ne_bytes(bytes.try_into().ok()?)))
        .take_while(|&address| address != 0)
        .collect();
    // All but the first are return addresses: the instruction after the call may be in the next
    // function already.
    let calls: Vec<u64> =
        addresses.iter().enumerate().map(|(n, address)| address - u64::from(n > 0)).collect();
    let mut functions = functions(&calls)?;
    functions.reverse();
    Ok(functions)
}

/// Why `bpf_get_stackid()` gave none: its errors, from the kernel's kernel/bpf/stackmap.c.
fn no_stack(id: i64) -> String {
    match -id {
        14 => "the kernel could not walk the stack (EFAULT)".into(),
        17 => "another stack has its slot in the map (EEXIST)".into(),
        12 => "the map is full (ENOMEM)".into(),
        error => format!("error {error}"),
    }
}

/// The kernel function at each address, `function() [module]`; `0x…` where there is none.
pub fn functions(addresses: &[u64]) -> Result<Vec<String>> {
    let path = kallsyms::PATH;
    let text = kallsyms::read().context("the kernel's addresses have no names")?;
    // Reading it twice would take longer than all the rest: blazesym reads a copy.
    let mut copy = File::from(memfd_create("kallsyms", MemfdFlags::CLOEXEC).context(path)?);
    copy.write_all(text.as_bytes()).context(path)?;
    let kernel = Source::Kernel(Kernel {
        kallsyms: PathBuf::from(format!("/proc/self/fd/{}", copy.as_raw_fd())).into(),
        vmlinux: MaybeDefault::None,
        ..Kernel::default()
    });
    let symbolizer = Symbolizer::new();
    let found = symbolizer.symbolize(&kernel, Input::AbsAddr(addresses)).context(path)?;
    ensure!(
        found.len() == addresses.len(),
        "{} names for {} addresses",
        found.len(),
        addresses.len()
    );
    let modules = modules(&text);
    let names = found.iter().zip(addresses).map(|(found, &address)| {
        let Some(symbol) = found.as_sym() else {
            return format!("{address:#x}");
        };
        match modules.get(&(symbol.addr, &*symbol.name)) {
            Some(module) => format!("{}() {module}", symbol.name),
            None => format!("{}()", symbol.name),
        }
    });
    Ok(names.collect())
}

/// The module of each symbol that is not in the kernel proper: `[ext4]`. From the lines of
/// /proc/kallsyms: from 6.4 on, a module has several ranges of addresses, of which /proc/modules
/// shows the first one with the size of all.
fn modules(text: &str) -> HashMap<(u64, &str), &str> {
    let located = kallsyms::symbols(text).filter_map(|symbol| {
        let module = symbol.module?;
        Some(((symbol.address()?, symbol.name), module))
    });
    located.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ranges that /proc/modules gives for these two would overlap.
    #[test]
    fn a_symbol_is_in_the_module_that_kallsyms_names() {
        let kallsyms = "ffffffff81000000 T submit_bio\n\
            ffffffffc0500000 t ext4_readahead\t[ext4]\n\
            ffffffffc0501000 t mb_cache_entry_get\t[mbcache]\n\
            ffffffffc0502000 t ext4_writepages\t[ext4]\nodd\n";
        let modules = modules(kallsyms);
        assert_eq!(modules.get(&(0xffff_ffff_c050_1000, "mb_cache_entry_get")), Some(&"[mbcache]"));
        assert_eq!(modules.get(&(0xffff_ffff_c050_2000, "ext4_writepages")), Some(&"[ext4]"));
        assert_eq!(modules.get(&(0xffff_ffff_8100_0000, "submit_bio")), None);
    }

    #[test]
    fn a_missing_stack_has_a_reason() {
        assert!(no_stack(-17).contains("EEXIST"));
        assert!(no_stack(-95).contains("95"));
    }
}
