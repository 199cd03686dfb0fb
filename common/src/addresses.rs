//! Addresses of kernel functions, as constants of a program.

use std::{
    fs::File,
    io::{BufRead, BufReader},
};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{
    AsRawLibbpf, OpenObject,
    btf::{
        Btf,
        types::{DataSec, Var},
    },
};

use crate::error::unsupported;

/// What the name of such a constant begins with; the rest is the function's.
const PREFIX: &str = "address_of_";

/// Sets each constant `address_of_FUNCTION` of the object to the address of that function, from
/// /proc/kallsyms. Where the kernel has no such function, or hides it, a constant keeps a value that
/// the program gave it; without one, this fails with [`Unsupported`](crate::Unsupported) (exit code 3).
///
/// `extern const void FUNCTION __ksym` gives the address, too, but libbpf then reads all of
/// /proc/kallsyms, some 600,000,000 instructions. This stops at the last function that it needs.
pub fn set(object: &mut OpenObject) -> Result<()> {
    let wanted = constants(object)?;
    if wanted.is_empty() {
        return Ok(());
    }
    let path = "/proc/kallsyms";
    let kallsyms = BufReader::new(File::open(path).context(path)?);
    let names: Vec<&str> = wanted.iter().map(|(name, _)| name.as_str()).collect();
    let addresses = look_up(kallsyms, &names).context(path)?;
    let mut maps = object.maps_mut();
    let values = maps.find(|map| map.name().to_string_lossy().ends_with(".rodata"));
    let mut values = values.context("the object has no map .rodata")?;
    let values = values.initial_value_mut().context(".rodata has no initial value")?;
    for ((name, offset), address) in wanted.iter().zip(addresses) {
        let value = values.get_mut(*offset..*offset + size_of::<u64>());
        let value = value.with_context(|| format!("{PREFIX}{name} is not in .rodata"))?;
        match address {
            Some(address @ 1..) => value.copy_from_slice(&address.to_ne_bytes()),
            _ if value.iter().any(|&byte| byte != 0) => {}
            Some(_) => {
                return unsupported(format!(
                    "the kernel hides the address of {name}(): a root user with CAP_SYSLOG sees it \
                     after sysctl kernel.kptr_restrict=1"
                ));
            }
            None => return unsupported(format!("this kernel has no function {name}()")),
        }
    }
    Ok(())
}

/// The functions whose addresses the object asks for, each with the place of the constant in .rodata.
fn constants(object: &OpenObject) -> Result<Vec<(String, usize)>> {
    // SAFETY: the object lives as long as its BTF is used here.
    let raw = unsafe { object.as_libbpf_object().as_ref() };
    let Some(btf) = Btf::from_bpf_object(raw)? else { return Ok(Vec::new()) };
    let Some(rodata) = btf.type_by_name::<DataSec>(".rodata") else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for variable in rodata.iter() {
        let name =
            btf.type_by_id::<Var>(variable.ty).and_then(|var| var.name().map(|n| n.to_owned()));
        let name = name.unwrap_or_default();
        if let Some(function) = name.to_string_lossy().strip_prefix(PREFIX) {
            ensure!(variable.size == size_of::<u64>(), "{PREFIX}{function} must be a u64");
            found.push((function.to_owned(), variable.offset as usize));
        }
    }
    Ok(found)
}

/// The address of each function, from the lines of /proc/kallsyms: `ffffffff81000000 t name`, and
/// behind a tab the module.
fn look_up(mut kallsyms: impl BufRead, functions: &[&str]) -> Result<Vec<Option<u64>>> {
    let mut found = vec![None; functions.len()];
    let mut line = Vec::new();
    while found.contains(&None) && kallsyms.read_until(b'\n', &mut line)? > 0 {
        let mut words = line.split(|byte| byte.is_ascii_whitespace());
        let (address, kind, name) = (words.next(), words.next(), words.next());
        let place = functions.iter().position(|function| name == Some(function.as_bytes()));
        if let (Some(place), Some(address), Some(b"t" | b"T")) = (place, address, kind) {
            let address = u64::from_str_radix(str::from_utf8(address)?, 16)?;
            found[place] = Some(address);
        }
        line.clear();
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KALLSYMS: &[u8] = b"0000000000000000 A fixed_percpu_data\n\
        ffffffff81000000 d bio_chain_endio\n\
        ffffffff81000010 t bio_chain_endio\n\
        ffffffffc0500000 t ext4_readahead\t[ext4]\n\
        odd";

    #[test]
    fn a_function_has_the_address_of_its_line() -> Result<()> {
        let addresses = look_up(KALLSYMS, &["ext4_readahead", "bio_chain_endio"])?;
        assert_eq!(addresses, [Some(0xffff_ffff_c050_0000), Some(0xffff_ffff_8100_0010)]);
        Ok(())
    }

    #[test]
    fn neither_a_missing_function_nor_data_has_an_address() -> Result<()> {
        assert_eq!(look_up(KALLSYMS, &["io_complete_rw"])?, [None]);
        assert_eq!(look_up(KALLSYMS, &["fixed_percpu_data"])?, [None]);
        Ok(())
    }

    #[test]
    fn nothing_is_read_after_the_last_function() -> Result<()> {
        let mut rest = KALLSYMS;
        look_up(&mut rest, &["bio_chain_endio"])?;
        assert!(rest.starts_with(b"ffffffffc0500000"));
        Ok(())
    }

    #[test]
    fn a_hidden_address_is_0() -> Result<()> {
        let kallsyms = &b"0000000000000000 t bio_chain_endio\n"[..];
        assert_eq!(look_up(kallsyms, &["bio_chain_endio"])?, [Some(0)]);
        Ok(())
    }
}
