//! /proc/kallsyms: the kernel's symbols and their addresses.
//!
//! The kernel makes its 10 MB for each reader anew, some 600,000,000 instructions: who needs one symbol reads
//! up to that one (`open`, `next_function`), and who needs several reads all of it once (`read`,
//! `symbols`).

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
};

use anyhow::{Context, Result};

use crate::mounted::mounted;

/// Where it is.
pub(crate) const PATH: &str = "/proc/kallsyms";

/// A line: `ffffffff81000000 t submit_bio`, and behind a tab the module, `[ext4]`.
pub struct Symbol<'a> {
    hexadecimal: &'a str,
    /// A letter, as nm(1) has them: `t` or `T` for code.
    pub kind: &'a str,
    /// Its name.
    pub name: &'a str,
    /// `[ext4]`; none for the kernel proper.
    pub module: Option<&'a str>,
}

impl<'a> Symbol<'a> {
    fn parse(line: &'a str) -> Option<Symbol<'a>> {
        let (symbol, module) = match line.split_once('\t') {
            Some((symbol, module)) => (symbol, Some(module)),
            None => (line, None),
        };
        let (hexadecimal, rest) = symbol.split_once(' ')?;
        let (kind, name) = rest.split_once(' ')?;
        Some(Symbol { hexadecimal, kind, name, module })
    }

    /// Its address: 0 where the kernel hides it.
    pub fn address(&self) -> Option<u64> {
        u64::from_str_radix(self.hexadecimal, 16).ok()
    }

    /// Whether it is a function that others cannot replace.
    pub fn is_function(&self) -> bool {
        matches!(self.kind, "t" | "T")
    }
}

/// Its content.
pub(crate) fn read() -> Result<String> {
    mounted()?;
    fs::read_to_string(PATH).with_context(|| format!("{PATH} could not be read"))
}

/// The symbols of such a text. Odd lines are left out.
pub fn symbols(text: &str) -> impl Iterator<Item = Symbol<'_>> {
    text.lines().filter_map(Symbol::parse)
}

/// For [`next_function`].
pub(crate) fn open() -> Result<BufReader<File>> {
    mounted()?;
    Ok(BufReader::new(File::open(PATH).context(PATH)?))
}

/// The next function that is looked for, with what `known` says of its name, and its address. Nothing behind its
/// line is read.
pub(crate) fn next_function<T>(
    kallsyms: &mut impl BufRead,
    known: impl Fn(&str) -> Option<T>,
) -> Result<Option<(T, u64)>> {
    let mut line = String::new();
    while kallsyms.read_line(&mut line).context(PATH)? > 0 {
        if let Some(symbol) = Symbol::parse(line.trim_end_matches('\n'))
            && symbol.is_function()
            && let Some(known) = known(symbol.name)
        {
            let address = symbol.address().with_context(|| format!("{PATH}: {line}"))?;
            return Ok(Some((known, address)));
        }
        line.clear();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_has_four_parts() {
        let text = "ffffffff81000010 t bio_endio\nodd\nffffffffc0500000 d ext4_magic\t[ext4]\n";
        let [first, second] = symbols(text).collect::<Vec<_>>().try_into().ok().unwrap();
        assert_eq!((first.address(), first.name), (Some(0xffff_ffff_8100_0010), "bio_endio"));
        assert!(first.is_function() && first.module.is_none());
        assert_eq!((second.name, second.module), ("ext4_magic", Some("[ext4]")));
        assert!(!second.is_function());
    }
}
