//! From the kernel's description of a struct to the list of its fields.

use std::{collections::HashSet, rc::Rc};

use anyhow::{Context, Result, bail};
use common::btf::{Btf, Type};
use libbpf_rs::libbpf_sys::{BTF_KIND_ARRAY, BTF_KIND_STRUCT, BTF_KIND_UNION};

use super::scalar::{Field, Scalar, Shape, names};

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
    /// The fields that were found so far.
    pub fields: Vec<Field>,
}

impl<'btf> Builder<'btf> {
    pub fn new(btf: &'btf Btf<'btf>) -> Self {
        Self { btf, fields: Vec::new() }
    }

    /// Adds the members of a struct or union that starts at bit `base`. `owner` is the innermost
    /// struct that has a name, `prefix` what stands before the members' names.
    pub fn members(&mut self, outer: Type, owner: &str, prefix: &str, base: usize) -> Result<()> {
        let is_struct = outer.kind() == BTF_KIND_STRUCT;
        let first = self.fields.len();
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
            let offset = base + member.offset;
            match self.flags(owner, member.name) {
                Some(shape) => {
                    self.add(name, offset, member.bits.unwrap_or(8 * member.kind.size()), shape);
                }
                None => self.field(member.kind, owner, name, offset, member.bits)?,
            }
        }
        if !is_struct {
            let (mut places, mut fields) = (HashSet::new(), self.fields.split_off(first));
            fields.retain(|field| places.insert((field.offset, field.scalar.bits)));
            self.fields.extend(fields);
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
        match kind.kind() {
            BTF_KIND_STRUCT | BTF_KIND_UNION => {
                let owner = if kind.name().is_empty() { owner } else { kind.name() };
                return self.members(kind, owner, &name, offset);
            }
            BTF_KIND_ARRAY => return self.array(kind, owner, name, offset),
            _ => {}
        }
        let Some(scalar) = Scalar::from_type(kind) else {
            bail!("BTF has a member {name} of the unexpected kind {}", kind.kind())
        };
        self.add(name, offset, bits.unwrap_or(scalar.bits), scalar.shape);
        Ok(())
    }

    fn add(&mut self, name: String, offset: usize, bits: usize, shape: Shape) {
        self.fields.push(Field { name, offset, scalar: Scalar { bits, shape } });
    }

    fn array(&mut self, kind: Type, owner: &str, name: String, offset: usize) -> Result<()> {
        let (element, count) = kind.array().context("an array is none")?;
        let bits = 8 * element.size();
        if element.bare().name() == "char" && count > 0 {
            self.add(name, offset, bits * count, Shape::Text);
        } else if count <= MAX_ELEMENTS {
            for index in 0..count {
                let name = format!("{name}[{index}]");
                self.field(element, owner, name, offset + index * bits, None)?;
            }
        } else {
            let bytes = bits * count / 8;
            for start in (0..bytes).step_by(CHUNK) {
                let end = bytes.min(start + CHUNK);
                let name = format!("{name}[bytes {start}..{end}]");
                self.add(name, offset + start * 8, (end - start) * 8, Shape::Bytes);
            }
        }
        Ok(())
    }

    /// How `member` is written, where it is one of [`FLAGS`] and this kernel's BTF has the names.
    fn flags(&self, owner: &str, member: &str) -> Option<Shape> {
        let (.., constant, has_operation) =
            FLAGS.iter().find(|(of, name, ..)| (*of, *name) == (owner, member))?;
        let with = |constant: &str| Some(Rc::new(names(self.btf.enum_with(constant)?)));
        let flags = with(constant)?;
        let operations = has_operation.then(|| with("REQ_OP_READ")).flatten();
        Some(Shape::Flags { operations, flags })
    }
}
