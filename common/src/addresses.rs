//! Addresses of kernel functions.

use std::io::BufRead;

use anyhow::Result;

use crate::{error::unsupported, kallsyms, modules};

/// The address of a function of the running kernel. Where the kernel has no such function, or hides its
/// address, this fails with [`Unsupported`](crate::Unsupported) (exit code 3).
pub fn kernel_function(name: &str) -> Result<u64> {
    match address(name)? {
        Some(address) => Ok(address),
        None => unsupported(format!("this kernel has no function {name}()")),
    }
}

/// The address of a function that the kernel need not have: without it, a number that is no address. Where
/// the kernel hides the address, this fails as [`kernel_function`] does.
pub fn kernel_function_if_any(name: &str) -> Result<u64> {
    Ok(address(name)?.unwrap_or(u64::MAX))
}

/// The functions that modules let bio_endio() call for their clones, in the order of `enum end` in tools/bpf/above.h.
const ENDS: [&str; 8] = [
    "crypt_endio",
    "raid1_end_read_request",
    "raid1_end_write_request",
    "raid10_end_read_request",
    "raid10_end_write_request",
    "raid5_align_endio",
    "md_end_io_acct",
    "md_end_clone_io",
];

/// Their addresses; where the module is not loaded, a number that is no address.
pub fn ends_of_clones() -> Result<[u64; 8]> {
    kernel_functions_if_any(ENDS)
}

/// The addresses of functions, read at once; of those that the kernel does not have, a number that is no address.
pub fn kernel_functions_if_any<const N: usize>(names: [&str; N]) -> Result<[u64; N]> {
    let mut symbols = kallsyms::open()?;
    let mut found = [u64::MAX; N];
    let places = |name: &str| names.iter().position(|known| *known == name);
    while let Some((place, address)) = kallsyms::next_function(&mut symbols, places)? {
        found[place] = address;
    }
    Ok(found)
}

/// For a program that will ask for names of functions. Fails, with exit code 3, where the kernel hides the
/// addresses of its functions: then none of them has a name. Modules that go from here on cost their functions
/// the names.
pub fn functions_have_names() -> Result<()> {
    modules::follow();
    kernel_function("_stext").map(|_| ()) // among the first lines
}

/// The address of a function, from /proc/kallsyms. `None`: the kernel has no such function.
///
/// `extern const void FUNCTION __ksym` in the BPF program gives the address, too, but then libbpf reads
/// all of /proc/kallsyms, some 600,000,000 instructions. This stops at the function.
fn address(name: &str) -> Result<Option<u64>> {
    match look_up(kallsyms::open()?, name)? {
        Some(0) => unsupported(format!(
            "the kernel hides the address of {name}(): the capability CAP_SYSLOG is missing, or \
             kernel.kptr_restrict is 2 (then: sysctl kernel.kptr_restrict=1)"
        )),
        address => Ok(address),
    }
}

/// The address of a function, from the lines of /proc/kallsyms.
fn look_up(mut symbols: impl BufRead, function: &str) -> Result<Option<u64>> {
    let found = kallsyms::next_function(&mut symbols, |name| (name == function).then_some(()))?;
    Ok(found.map(|(_, address)| address))
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
        assert_eq!(look_up(KALLSYMS, "ext4_readahead")?, Some(0xffff_ffff_c050_0000));
        assert_eq!(look_up(KALLSYMS, "bio_chain_endio")?, Some(0xffff_ffff_8100_0010));
        Ok(())
    }

    #[test]
    fn neither_a_missing_function_nor_data_has_an_address() -> Result<()> {
        assert_eq!(look_up(KALLSYMS, "io_complete_rw")?, None);
        assert_eq!(look_up(KALLSYMS, "fixed_percpu_data")?, None);
        Ok(())
    }

    #[test]
    fn nothing_is_read_after_the_function() -> Result<()> {
        let mut rest = KALLSYMS;
        look_up(&mut rest, "bio_chain_endio")?;
        assert!(rest.starts_with(b"ffffffffc0500000"));
        Ok(())
    }

    #[test]
    fn a_hidden_address_is_0() -> Result<()> {
        let kallsyms = &b"0000000000000000 t bio_chain_endio\n"[..];
        assert_eq!(look_up(kallsyms, "bio_chain_endio")?, Some(0));
        Ok(())
    }
}
