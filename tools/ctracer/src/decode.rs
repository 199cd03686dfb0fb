//! From the bytes of a struct to its fields, by the kernel's description of its types (BTF).
//!
//! The BPF program copies a struct as it lies in memory and knows nothing of its members. A
//! [`Layout`] is built once from BTF: a flat list of fields, each with its name, its position and
//! how its value is written. Decoding an event is then a walk over that list.

use anyhow::{Context, Result, ensure};
use common::{
    btf::Btf,
    kallsyms::{self, Symbol},
};

use crate::value::{Change, Pairs};

mod builder;
mod scalar;
use builder::Builder;
use scalar::{Field, Shape};
pub use scalar::{Functions, Scalar};

/// The fields of a struct, and how to read them.
pub struct Layout {
    /// In bytes.
    pub size: usize,
    fields: Vec<Field>,
    pub functions: Functions,
}

impl Layout {
    /// The layout of `struct type_name`. Fails where BTF has no definition of it. `symbols`, the
    /// content of /proc/kallsyms, gives pointers to functions their names: it has lines like
    /// `ffffffff814a2b10 t bio_endio`, for a module's with the module behind.
    pub fn new(btf: &Btf, type_name: &str, symbols: &str) -> Result<Self> {
        let found = btf
            .structure(type_name)
            .with_context(|| format!("BTF has no definition of struct {type_name}"))?;
        let mut builder = Builder::new(btf);
        builder.members(found, type_name, "", 0)?;
        let functions = kallsyms::symbols(symbols).filter(Symbol::is_function);
        let functions = functions.filter_map(|function| {
            let address = function.address().filter(|&at| at != 0)?;
            Some((address, function.name.to_owned()))
        });
        let functions = functions.collect();
        Ok(Self { size: found.size(), fields: builder.fields, functions })
    }

    /// A field that is a number of 1, 2, 4 or 8 bytes: its first byte, its size, and whether it has a
    /// sign. Fails where there is none of this name, or it is something else.
    pub fn as_scalar(&self, name: &str) -> Result<(usize, usize, bool)> {
        let field = self.field(name).with_context(|| {
            let within = format!("{name}.");
            let of_it = self.fields.iter().find(|field| field.name.starts_with(&within));
            let several = of_it.map(|field| format!("it consists of several, like {}", field.name));
            let hint = "--json shows all fields of each object's first event".to_owned();
            format!("the struct has no field {name}: {}", several.unwrap_or(hint))
        })?;
        let (offset, bits) = (field.offset, field.scalar.bits);
        ensure!(
            offset % 8 == 0 && matches!(bits, 8 | 16 | 32 | 64),
            "{name} has {bits} bits from bit {offset} on: only whole numbers of 1, 2, 4 or 8 bytes are \
             compared"
        );
        Ok((offset / 8, bits / 8, field.scalar.shape == Shape::Signed))
    }

    fn field(&self, name: &str) -> Option<&Field> {
        self.fields.iter().find(|field| field.name == name)
    }

    /// The first byte of a field.
    pub fn position(&self, name: &str) -> Option<usize> {
        self.field(name).map(|field| field.offset / 8)
    }

    /// The names and values of all fields that lie within `bytes`, in the order of the struct.
    ///
    /// A member of a member is called `bi_iter.bi_sector`, an element of an array `priv[1]`. Members
    /// of anonymous structs and unions have no prefix. Where members of a union have the same
    /// position and width, the first stands for all of them.
    pub fn fields(&self, bytes: &[u8]) -> Pairs {
        let within = self.fields.iter().filter(|field| field.bytes().end <= bytes.len());
        within.map(|field| (field.name.clone(), field.value(bytes, &self.functions))).collect()
    }

    /// What differs between two copies of the same object, in the order of the struct.
    pub fn changes(&self, before: &[u8], after: &[u8]) -> Vec<Change> {
        let common = before.len().min(after.len());
        let differs = |field: &&Field| {
            field.bytes().end <= common && before[field.bytes()] != after[field.bytes()]
        };
        let changes = self.fields.iter().filter(differs).map(|field| Change {
            field: field.name.clone(),
            before: field.value(before, &self.functions),
            after: field.value(after, &self.functions),
        });
        // Neighbouring bit fields share bytes, and a text ends before its array does.
        changes.filter(|change| change.before != change.after).collect()
    }
}

#[cfg(test)]
pub mod tests;
