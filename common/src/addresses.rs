//! Addresses of kernel functions.

use std::{
    fs::File,
    io::{BufRead, BufReader},
};

use anyhow::{Context, Result};

use crate::error::unsupported;

/// The address of a function of the running kernel, from /proc/kallsyms. Where the kernel has no such
/// function, or hides its address, this fails with [`Unsupported`](crate::Unsupported) (exit code 3).
///
/// `extern const void FUNCTION __ksym` in the BPF program gives the address, too, but then libbpf reads
/// all of /proc/kallsyms, some 600,000,000 instructions. This stops at the function.
pub fn kernel_function(name: &str) -> Result<u64> {
    let path = "/proc/kallsyms";
    let kallsyms = BufReader::new(File::open(path).context(path)?);
    match look_up(kallsyms, name).context(path)? {
        Some(0) => unsupported(format!(
            "the kernel hides the address of {name}(): the capability CAP_SYSLOG is missing, or \
             kernel.kptr_restrict is 2 (then: sysctl kernel.kptr_restrict=1)"
        )),
        Some(address) => Ok(address),
        None => unsupported(format!("this kernel has no function {name}()")),
    }
}

/// The address of a function, from the lines of /proc/kallsyms: `ffffffff81000000 t name`, and behind a
/// tab the module.
fn look_up(mut kallsyms: impl BufRead, function: &str) -> Result<Option<u64>> {
    let mut line = Vec::new();
    while kallsyms.read_until(b'\n', &mut line)? > 0 {
        let mut words = line.split(|byte| byte.is_ascii_whitespace());
        let (address, kind, name) = (words.next(), words.next(), words.next());
        if let (Some(address), Some(b"t" | b"T")) = (address, kind)
            && name == Some(function.as_bytes())
        {
            return Ok(Some(u64::from_str_radix(str::from_utf8(address)?, 16)?));
        }
        line.clear();
    }
    Ok(None)
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
