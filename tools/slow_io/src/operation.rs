//! What a bio does, in blktrace's letters.

use std::{cell::RefCell, collections::HashMap, rc::Rc};

use anyhow::{Context, Result};
use libbpf_rs::btf::{Btf, types::Enum};

/// The running kernel's numbers of operations and flags: they differ from version to version.
pub struct Operations {
    /// Number and letters.
    operations: Vec<(u32, &'static str)>,
    before: u32,
    /// Bit and letter, in blktrace's order.
    after: Vec<(u32, char)>,
    /// The letters of those that were asked for.
    known: RefCell<HashMap<u32, Rc<str>>>,
}

/// Letters of blk_fill_rwbs(), kernel/trace/blktrace.c. It has none for others.
const OPERATIONS: [(&str, &str); 12] = [
    ("REQ_OP_READ", "R"),
    ("REQ_OP_WRITE", "W"),
    ("REQ_OP_WRITE_ZEROES", "WZ"),
    ("REQ_OP_FLUSH", "F"),
    ("REQ_OP_DISCARD", "D"),
    ("REQ_OP_SECURE_ERASE", "DE"),
    ("REQ_OP_ZONE_APPEND", "ZA"),
    ("REQ_OP_ZONE_RESET", "ZR"),
    ("REQ_OP_ZONE_RESET_ALL", "ZR"),
    ("REQ_OP_ZONE_OPEN", "ZO"),
    ("REQ_OP_ZONE_CLOSE", "ZC"),
    ("REQ_OP_ZONE_FINISH", "ZF"),
];

const FLAGS: [(&str, char); 4] =
    [("__REQ_FUA", 'F'), ("__REQ_RAHEAD", 'A'), ("__REQ_SYNC", 'S'), ("__REQ_META", 'M')];

impl Operations {
    /// Reads the numbers from the kernel's BTF.
    pub fn of_kernel() -> Result<Operations> {
        let btf = Btf::from_vmlinux().context("the kernel's BTF could not be read")?;
        let members = |name: &str| -> Vec<(String, u32)> {
            let Some(found) = btf.type_by_name::<Enum<'_>>(name) else { return Vec::new() };
            let text = |name: Option<&std::ffi::OsStr>| {
                name.unwrap_or_default().to_string_lossy().into_owned()
            };
            found.iter().map(|member| (text(member.name), member.value as u32)).collect()
        };
        let (operations, flags) = (members("req_op"), members("req_flag_bits"));
        let number = |all: &[(String, u32)], name: &str| {
            all.iter().find(|(known, _)| known == name).map(|(_, number)| *number)
        };
        Ok(Operations {
            operations: OPERATIONS
                .into_iter()
                .filter_map(|(name, letters)| Some((number(&operations, name)?, letters)))
                .collect(),
            before: number(&flags, "__REQ_PREFLUSH").map_or(0, |bit| 1 << bit),
            after: FLAGS
                .into_iter()
                .filter_map(|(name, letter)| Some((1 << number(&flags, name)?, letter)))
                .collect(),
            known: RefCell::default(),
        })
    }

    /// `RSM`: a read, somebody waits for it, of the file system's own data. `N`: an operation that
    /// blktrace has no letter for.
    pub fn letters(&self, operation: u32) -> Rc<str> {
        let mut known = self.known.borrow_mut();
        Rc::clone(known.entry(operation).or_insert_with(|| self.spell(operation).into()))
    }

    fn spell(&self, operation: u32) -> String {
        let number = operation & 0xff;
        let known = self.operations.iter().find(|(known, _)| *known == number);
        let mut letters = String::new();
        if operation & self.before != 0 {
            letters.push('F');
        }
        letters += known.map_or("N", |(_, letters)| letters);
        letters.extend(self.after.iter().filter(|(bit, _)| operation & bit != 0).map(|(_, c)| c));
        letters
    }
}
