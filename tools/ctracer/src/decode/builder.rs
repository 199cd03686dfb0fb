//! From the kernel's description of a struct to the list of its fields.

use std::{collections::HashMap, rc::Rc};

use anyhow::{Context, Result, bail};
use libbpf_rs::btf::{
    Btf, BtfKind, BtfType, HasSize,
    types::{Array, Composite, Enum, Enum64, Int, IntEncoding, MemberAttr},
};

use super::field::{Field, Names, Shape};

/// Arrays of at most so many elements are listed element by element, longer ones as bytes.
const MAX_ELEMENTS: usize = 16;

/// How many bytes of a long array stand in one field.
const CHUNK: usize = 32;

/// Members that hold flags, but are declared as plain integers. The flags' names are in BTF as an
/// enum of bit numbers; its type is often anonymous, so it is found by one of its constants.
const FLAGS: [FlagMember; 7] = [
    FlagMember { owner: "bio", member: "bi_opf", constant: "__REQ_SYNC", operation: true },
    FlagMember { owner: "bio", member: "bi_flags", constant: "BIO_CHAIN", operation: false },
    FlagMember { owner: "request", member: "cmd_flags", constant: "__REQ_SYNC", operation: true },
    FlagMember {
        owner: "request",
        member: "rq_flags",
        constant: "__RQF_STARTED",
        operation: false,
    },
    FlagMember { owner: "page", member: "flags", constant: "PG_locked", operation: false },
    FlagMember { owner: "folio", member: "flags", constant: "PG_locked", operation: false },
    FlagMember { owner: "buffer_head", member: "b_state", constant: "BH_Lock", operation: false },
];

struct FlagMember {
    owner: &'static str,
    member: &'static str,
    constant: &'static str,
    operation: bool,
}

/// Walks through a struct's members and collects the fields.
pub struct Builder<'btf> {
    btf: &'btf Btf<'btf>,
    /// Enums that were searched for by one of their constants.
    enums: HashMap<&'static str, Option<Rc<Names>>>,
    /// The fields that were found so far.
    pub fields: Vec<Field>,
}

impl<'btf> Builder<'btf> {
    /// For types of this BTF.
    pub fn new(btf: &'btf Btf<'btf>) -> Self {
        Self { btf, enums: HashMap::new(), fields: Vec::new() }
    }

    /// Adds the members of a struct or union that starts at bit `base`. `owner` is the innermost
    /// struct that has a name, `prefix` what stands before the members' names.
    pub fn members(
        &mut self,
        composite: &Composite<'btf>,
        owner: &str,
        prefix: &str,
        base: usize,
    ) -> Result<()> {
        let union_starts_at = self.fields.len();
        for index in 0..composite.len() {
            let member = composite.get(index).context("BTF lost a member")?;
            let ty: BtfType =
                self.btf.type_by_id(member.ty).context("BTF lacks a member's type")?;
            let (offset, bits) = match member.attr {
                MemberAttr::Normal { offset } => (offset, None),
                MemberAttr::BitField { size, offset } => (offset, Some(usize::from(size))),
            };
            let own = member.name.map(|name| name.to_string_lossy());
            let name = match &own {
                None => prefix.to_owned(),
                // atomic_t has one member, `counter`: the field is called as what contains it.
                Some(_) if composite.is_struct && composite.len() == 1 && !prefix.is_empty() => {
                    prefix.to_owned()
                }
                Some(own) if prefix.is_empty() => own.to_string(),
                Some(own) => format!("{prefix}.{own}"),
            };
            let first = self.fields.len();
            let offset = base + offset as usize;
            match own.and_then(|own| self.flags(owner, &own)) {
                Some(shape) => {
                    let bits = bits.map_or_else(|| size_of(&ty), Ok)?;
                    self.fields.push(Field { name, offset, bits, shape });
                }
                None => self.field(&ty, owner, name, offset, bits)?,
            }
            if !composite.is_struct {
                let mut added = self.fields.split_off(first);
                added.retain(|field| {
                    let earlier = &self.fields[union_starts_at..];
                    !earlier.iter().any(|old| (old.offset, old.bits) == (field.offset, field.bits))
                });
                self.fields.append(&mut added);
            }
        }
        Ok(())
    }

    /// Adds a field, or the fields that it consists of.
    fn field(
        &mut self,
        ty: &BtfType<'btf>,
        owner: &str,
        name: String,
        offset: usize,
        bits: Option<usize>,
    ) -> Result<()> {
        let ty = ty.skip_mods_and_typedefs();
        let mut width = bits;
        let shape = match ty.kind() {
            BtfKind::Struct | BtfKind::Union => {
                let composite = Composite::try_from(ty).ok().context("a struct is none")?;
                let own = ty.name().map(|name| name.to_string_lossy());
                return self.members(&composite, own.as_deref().unwrap_or(owner), &name, offset);
            }
            BtfKind::Array => return self.array(ty, owner, &name, offset),
            BtfKind::Int => {
                let int = Int::try_from(ty).ok().context("an integer is none")?;
                width = width.or(Some(usize::from(int.bits)));
                match int.encoding {
                    IntEncoding::Signed => Shape::Signed,
                    IntEncoding::Bool => Shape::Bool,
                    IntEncoding::Char | IntEncoding::None => Shape::Unsigned,
                }
            }
            BtfKind::Enum | BtfKind::Enum64 => Shape::Enum(Rc::new(names(ty))),
            BtfKind::Ptr if is_function(&ty) => Shape::Function,
            BtfKind::Ptr | BtfKind::Float => Shape::Hex,
            other => bail!("BTF has a member {name} of the unexpected kind {other:?}"),
        };
        let bits = width.map_or_else(|| size_of(&ty), Ok)?;
        self.fields.push(Field { name, offset, bits, shape });
        Ok(())
    }

    fn array(&mut self, ty: BtfType<'btf>, owner: &str, name: &str, offset: usize) -> Result<()> {
        let array = Array::try_from(ty).ok().context("an array is none")?;
        let element = array.contained_type();
        let bits = size_of(&element)?;
        let is_char = element.skip_mods_and_typedefs().name().is_some_and(|name| name == "char");
        if is_char && array.capacity() > 0 {
            let bits = bits * array.capacity();
            self.fields.push(Field { name: name.to_owned(), offset, bits, shape: Shape::Text });
        } else if array.capacity() <= MAX_ELEMENTS {
            for index in 0..array.capacity() {
                let name = format!("{name}[{index}]");
                self.field(&element, owner, name, offset + index * bits, None)?;
            }
        } else {
            let bytes = bits * array.capacity() / 8;
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
        let known = FLAGS.iter().find(|flag| flag.owner == owner && flag.member == member)?;
        let bits = self.enum_with(known.constant)?;
        let operations = known.operation.then(|| self.enum_with("REQ_OP_READ")).flatten();
        Some(Shape::Flags { operations, bits })
    }

    /// The enum that has a constant of this name.
    fn enum_with(&mut self, constant: &'static str) -> Option<Rc<Names>> {
        let btf = self.btf;
        let search = || {
            let has = |found: &Enum| {
                (0..found.len())
                    .filter_map(|index| found.get(index)?.name)
                    .any(|name| name == constant)
            };
            let found = btf.type_by_kind::<Enum>().find(has)?;
            Some(Rc::new(names(*found)))
        };
        self.enums.entry(constant).or_insert_with(search).clone()
    }
}

/// The constants of an enum. Of several with the same value, the first counts; one that only says
/// how many there are is left out.
fn names(ty: BtfType) -> Names {
    let mut names = HashMap::new();
    let mut add = |name: Option<&std::ffi::OsStr>, value: i128| {
        let name = name.unwrap_or_default().to_string_lossy();
        let is_count = name.contains("NR_") || name.ends_with("_LAST");
        if !is_count {
            names.entry(value).or_insert_with(|| name.into_owned());
        }
    };
    if let Ok(found) = Enum::try_from(ty) {
        found.iter().for_each(|member| add(member.name, member.value.into()));
    } else if let Ok(found) = Enum64::try_from(ty) {
        found.iter().for_each(|member| add(member.name, member.value));
    }
    Names(names)
}

/// Whether a pointer points to a function.
fn is_function(pointer: &BtfType) -> bool {
    let target = pointer.next_type().map(|target| target.skip_mods_and_typedefs());
    target.is_some_and(|target| target.kind() == BtfKind::FuncProto)
}

/// The size of a type in bits.
fn size_of(ty: &BtfType) -> Result<usize> {
    let ty = ty.skip_mods_and_typedefs();
    let bytes = match ty.kind() {
        BtfKind::Ptr => 8,
        BtfKind::Array => {
            let array = Array::try_from(ty).ok().context("an array is none")?;
            return Ok(size_of(&array.contained_type())? * array.capacity());
        }
        BtfKind::Int => Int::try_from(ty).ok().context("an integer is none")?.size(),
        BtfKind::Enum => Enum::try_from(ty).ok().context("an enum is none")?.size(),
        BtfKind::Enum64 => Enum64::try_from(ty).ok().context("an enum is none")?.size(),
        BtfKind::Struct | BtfKind::Union => {
            Composite::try_from(ty).ok().context("a struct is none")?.size()
        }
        BtfKind::Float => 8,
        other => bail!("BTF has a member of the unexpected kind {other:?}"),
    };
    Ok(bytes * 8)
}
