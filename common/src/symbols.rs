//! The names of the functions in a stack.

use std::{collections::BTreeMap, fs::File, io::Write, ops::Range, os::fd::AsRawFd, path::PathBuf};

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

use crate::{kallsyms, modules, printable};

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

/// The kernel function at each address, `function() [module]`; `0x…` where there is none. Its module may have
/// been unloaded, and another one may lie there now: then, too.
pub fn functions(addresses: &[u64]) -> Result<Vec<String>> {
    let path = kallsyms::PATH;
    let text = kallsyms::read().context("the kernel's addresses have no names")?;
    let fates = modules::fates();
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
    let (code, unloaded) = (Code::new(&text), printable(&fates.unloaded.join(", ")));
    let names = found.iter().zip(addresses).map(|(found, &address)| {
        match (found.as_sym(), code.owner(address)) {
            (Some(symbol), Some(None)) => format!("{}()", symbol.name),
            (Some(symbol), Some(Some(module))) if fates.is_own(module) => {
                format!("{}() {module}", symbol.name)
            }
            _ if unloaded.is_empty() => format!("{address:#x}"),
            _ => format!("{address:#x} (no name; unloaded meanwhile: {unloaded})"),
        }
    });
    Ok(names.collect())
}

/// Where the kernel's functions lie, from the lines of /proc/kallsyms. These have no sizes: blazesym takes what
/// lies behind a symbol for a part of it, up to the next one, and from 6.4 on, a module has several ranges of
/// addresses, of which /proc/modules shows the first one with the size of all.
struct Code<'a> {
    /// Of the kernel proper.
    kernel: Range<u64>,
    /// The symbols of modules, by their addresses: whether it is a function, and whose.
    modules: BTreeMap<u64, (bool, &'a str)>,
}

impl<'a> Code<'a> {
    fn new(text: &'a str) -> Code<'a> {
        let (mut kernel, mut modules) = (0..0, BTreeMap::new());
        for symbol in kallsyms::symbols(text) {
            match (symbol.module, symbol.name, symbol.address()) {
                (Some(module), _, Some(address)) => {
                    let is_function = matches!(symbol.kind, "t" | "T" | "w" | "W");
                    modules.entry(address).or_insert((is_function, module)).0 |= is_function;
                }
                (None, "_stext", Some(address)) => kernel.start = address,
                (None, "_etext", Some(address)) => kernel.end = address,
                _ => {}
            }
        }
        Code { kernel, modules }
    }

    /// Whose function lies there: a module's, or that of the kernel proper, `Some(None)`. `None`: no function.
    fn owner(&self, address: u64) -> Option<Option<&'a str>> {
        if self.kernel.contains(&address) {
            return Some(None);
        }
        let (start, (is_function, module)) = self.modules.range(..=address).next_back()?;
        let next = self.modules.range(address + 1..).next();
        let is_between = next.is_some_and(|(_, next)| *next == (true, module));
        // How long the last function of a module is, is not known. Its last page is no other module's.
        let page = rustix::param::page_size() as u64;
        let is_inside = is_between || address / page == start / page;
        (*is_function && is_inside).then_some(Some(*module))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KALLSYMS: &str = "ffffffff81000000 T _stext\n\
        ffffffff81000100 T submit_bio\n\
        ffffffff81900000 T _etext\n\
        ffffffff81a00000 D jiffies\n\
        ffffffffc0500000 t ext4_readahead\t[ext4]\n\
        ffffffffc0580040 t ext4_exit\t[ext4]\n\
        ffffffffc0580040 t cleanup_module\t[ext4]\n\
        ffffffffc05a0000 t mb_cache_entry_get\t[mbcache]\n\
        ffffffffc05a1000 r orc_header\t[mbcache]\n\
        ffffffffc05a1010 t mb_cache_touch\t[mbcache]\nodd\n";

    #[test]
    fn an_address_is_of_the_module_whose_functions_are_around_it() {
        let code = Code::new(KALLSYMS);
        assert_eq!(code.owner(0xffff_ffff_8100_0123), Some(None));
        assert_eq!(code.owner(0xffff_ffff_c050_0fff), Some(Some("[ext4]")));
        assert_eq!(code.owner(0xffff_ffff_c057_0000), Some(Some("[ext4]")));
        assert_eq!(code.owner(0xffff_ffff_c058_0fff), Some(Some("[ext4]")));
        assert_eq!(code.owner(0xffff_ffff_c05a_0100), Some(Some("[mbcache]")));
    }

    #[test]
    fn an_address_without_a_function_has_no_name() {
        let code = Code::new(KALLSYMS);
        for (address, what) in [
            (0xffff_ffff_8200_0000, "behind the kernel's functions"),
            (0xffff_ffff_c058_1000, "behind ext4's last page"),
            (0xffff_ffff_c059_fff0, "before mbcache's first function"),
            (0xffff_ffff_c05a_1004, "in mbcache's data"),
            (0xffff_ffff_c05a_2010, "behind the last one"),
            (0x1000, "before the first one"),
        ] {
            assert_eq!(code.owner(address), None, "{what}");
        }
    }

    #[test]
    fn a_missing_stack_has_a_reason() {
        assert!(no_stack(-17).contains("EEXIST"));
        assert!(no_stack(-95).contains("95"));
    }
}
