//! From the kernel's description of a struct to the list of its fields.

use std::{collections::HashMap, rc::Rc};

use anyhow::{Context, Result, bail};
use common::btf::{Btf, Type};
use libbpf_rs::libbpf_sys::{
    BTF_INT_BOOL, BTF_INT_SIGNED, BTF_KIND_ARRAY, BTF_KIND_ENUM, BTF_KIND_ENUM64, BTF_KIND_FLOAT,
    BTF_KIND_FUNC_PROTO, BTF_KIND_INT, BTF_KIND_PTR, BTF_KIND_STRUCT, BTF_KIND_UNION,
};

use super::field::{Field, Names, Shape};

/// Arrays of at most so many elements are listed element by element, longer ones as bytes.
const MAX_ELEMENTS: usize = 16;

/// How many bytes of a long array stand in one field.
const CHUNK: usize = 32;

/// Members that hold flags, but are declared as plain integers: struct, member, whether its lowest bits
/// are an operation. The flags' names are in BTF as an enum of bit numbers; its type is often
/// anonymous, so it is found by one of its constants.
const FLAGS: [(&str, &str, &str, bool); 7] = [
    ("bio", "bi_opf", "__REQ_SYNC", true),
    ("bio", "bi_flags", "BIO_CHAIN", false),
    ("request", "cmd_flags", "__REQ_SYNC", true),
    ("request", "rq_flags", "__RQF_STARTED", false),
    ("page", "flags", "PG_locked", false),
    ("folio", "flags", "PG_locked", false),
    ("buffer_head", "b_state", "BH_Lock", false),
];

/// Walks through a struct's members and collects the fields.
pub struct Builder<'btf> {
    btf: &'btf Btf<'btf>,
    /// Enums that were searched for by one of their constants.
    enums: HashMap<&'static str, Option<Rc<Names>>>,
    /// The fields that were found so far.
    pub fields: Vec<Field>,
}

impl<'btf> Builder<'btf> {
    pub fn new(btf: &'btf Btf<'btf>) -> Self {
        Self { btf, enums: HashMap::new(), fields: Vec::new() }
    }

    /// Adds the members of a struct or union that starts at bit `base`. `owner` is the innermost
    /// struct that has a name, `prefix` what stands before the members' names.
    pub fn members(&mut self, outer: Type, owner: &str, prefix: &str, base: usize) -> Result<()> {
        let is_struct = outer.kind() == BTF_KIND_STRUCT;
        let union_starts_at = self.fields.len();
        let members = outer.members();
        // atomic_t has one member, `counter`: the field is called as what contains it.
        let is_wrapper = is_struct && members.len() == 1 && !prefix.is_empty();
        for member in members {
            let name = match (member.name, prefix) {
                ("", _) => prefix.to_owned(),
                _ if is_wrapper => prefix.to_owned(),
                (own, "") => own.to_owned(),
                (own, prefix) => format!("{prefix}.{own}"),
            };
            let (first, offset) = (self.fields.len(), base + member.offset);
            match self.flags(owner, member.name) {
                Some(shape) => {
                    let bits = member.bits.unwrap_or(8 * member.kind.size());
                    self.fields.push(Field { name, offset, bits, shape });
                }
                None => self.field(member.kind, owner, name, offset, member.bits)?,
            }
            if !is_struct {
                let added = self.fields.split_off(first);
                for field in added {
                    let place = |field: &Field| (field.offset, field.bits);
                    let earlier = &self.fields[union_starts_at..first];
                    if !earlier.iter().any(|old| place(old) == place(&field)) {
                        self.fields.push(field);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds a field, or the fields that it consists of.
    fn field(
        &mut self,
        kind: Type,
        owner: &str,
        name: String,
        offset: usize,
        bits: Option<usize>,
    ) -> Result<()> {
        let kind = kind.bare();
        let shape = match kind.kind() {
            BTF_KIND_STRUCT | BTF_KIND_UNION => {
                let owner = if kind.name().is_empty() { owner } else { kind.name() };
                return self.members(kind, owner, &name, offset);
            }
            BTF_KIND_ARRAY => return self.array(kind, owner, name, offset),
            BTF_KIND_INT => match kind.encoding() {
                encoding if encoding & BTF_INT_SIGNED != 0 => Shape::Signed,
                encoding if encoding & BTF_INT_BOOL != 0 => Shape::Bool,
                _ => Shape::Unsigned,
            },
            BTF_KIND_ENUM | BTF_KIND_ENUM64 => Shape::Enum(Rc::new(names(kind))),
            BTF_KIND_PTR => match kind.target() {
                Some(target) if target.kind() == BTF_KIND_FUNC_PROTO => Shape::Function,
                _ => Shape::Hex,
            },
            BTF_KIND_FLOAT => Shape::Hex,
            other => bail!("BTF has a member {name} of the unexpected kind {other}"),
        };
        let bits = bits.unwrap_or(8 * kind.size());
        self.fields.push(Field { name, offset, bits, shape });
        Ok(())
    }

    fn array(&mut self, kind: Type, owner: &str, name: String, offset: usize) -> Result<()> {
        let (element, count) = kind.array().context("an array is none")?;
        let bits = 8 * element.size();
        if element.bare().name() == "char" && count > 0 {
            self.fields.push(Field { name, offset, bits: bits * count, shape: Shape::Text });
        } else if count <= MAX_ELEMENTS {
            for index in 0..count {
                let name = format!("{name}[{index}]");
                self.field(element, owner, name, offset + index * bits, None)?;
            }
        } else {
            let bytes = bits * count / 8;
            for start in (0..bytes).step_by(CHUNK) {
                let end = bytes.min(start + CHUNK);
                self.fields.push(Field {
                    name: format!("{name}[bytes {start}..{end}]"),
                    offset: offset + start * 8,
                    bits: (end - start) * 8,
                    shape: Shape::Bytes,
                });
            }
        }
        Ok(())
    }

    /// How `member` is written, where it is one of [`FLAGS`] and this kernel's BTF has the names.
    fn flags(&mut self, owner: &str, member: &str) -> Option<Shape> {
        let (.., constant, has_operation) =
            FLAGS.iter().find(|(of, name, ..)| (*of, *name) == (owner, member))?;
        let bits = self.enum_with(constant)?;
        let operations = has_operation.then(|| self.enum_with("REQ_OP_READ")).flatten();
        Some(Shape::Flags { operations, bits })
    }

    fn enum_with(&mut self, constant: &'static str) -> Option<Rc<Names>> {
        let search = || self.btf.enum_with(constant).map(|found| Rc::new(names(found)));
        self.enums.entry(constant).or_insert_with(search).clone()
    }
}

/// The constants of an enum. Of several with the same value, the first counts; one that only says
/// how many there are is left out.
fn names(kind: Type) -> Names {
    let is_count = |name: &str| name.contains("NR_") || name.ends_with("_LAST");
    let found = kind.constants().into_iter().rev().filter(|(name, _)| !is_count(name));
    Names(found.map(|(name, value)| (value, name.to_owned())).collect())
}
