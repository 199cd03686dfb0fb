//! A value, of a field or in a register, by the kernel's description of its type.

use std::{collections::HashMap, ops::Range, rc::Rc};

use common::btf::Type;
use libbpf_rs::libbpf_sys::{
    BTF_INT_BOOL, BTF_INT_SIGNED, BTF_KIND_ENUM, BTF_KIND_ENUM64, BTF_KIND_FLOAT, BTF_KIND_INT,
    BTF_KIND_PTR, BTF_KIND_STRUCT, BTF_KIND_UNION,
};
use serde_json::Value;

use crate::{errno, value::hex};

/// The block layer keeps the operation in this many low bits of `bi_opf`, and flags above them.
const OPERATION_BITS: u32 = 8;

/// The names of the kernel's functions, by address.
pub type Functions = HashMap<u64, String>;

/// The constants of an enum, by value.
type Names = HashMap<i128, String>;

/// A field of a struct.
pub struct Field {
    /// Its path: `bi_iter.bi_sector`.
    pub name: String,
    /// Position in bits, from the start of the struct.
    pub offset: usize,
    pub scalar: Scalar,
}

/// What a field or a register holds. Beyond the type's width, a register holds anything.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    pub bits: usize,
    pub shape: Shape,
}

/// How a value is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    Unsigned,
    Signed,
    Bool,
    /// Hexadecimal: a floating point number, which the kernel hardly uses, or a part of a struct.
    Hex,
    /// A pointer, or an error in its place; to a function by its name.
    Pointer,
    /// An array of `char`, up to its first NUL.
    Text,
    /// Hexadecimal, byte by byte.
    Bytes,
    /// The name of a constant, or of several.
    Enum(Rc<Names>),
    /// An operation in the lowest bits, where there is one, and flags, by the numbers of their bits.
    Flags {
        operations: Option<Rc<Names>>,
        flags: Rc<Names>,
    },
}

impl Field {
    /// The bytes that hold the field.
    pub fn bytes(&self) -> Range<usize> {
        self.offset / 8..(self.offset + self.scalar.bits).div_ceil(8)
    }

    /// Its value, in the bytes of the whole struct.
    pub fn value(&self, bytes: &[u8], functions: &Functions) -> Value {
        let bytes = &bytes[self.bytes()];
        match self.scalar.shape {
            Shape::Text => {
                let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
                text.escape_ascii().to_string().into()
            }
            Shape::Bytes => {
                bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
            }
            _ => {
                // The machines that the workshop supports are little-endian.
                let number = bytes.iter().take(16).rev();
                let number = number.fold(0_u128, |sum, &byte| sum << 8 | u128::from(byte));
                self.scalar.value(number >> (self.offset % 8), functions)
            }
        }
    }
}

impl Scalar {
    /// What a field or a register holds with a value of this type. `None`: it is `void`, or consists
    /// of several.
    pub fn from_type(kind: Type) -> Option<Scalar> {
        let kind = kind.bare();
        let shape = match kind.kind() {
            BTF_KIND_INT => match kind.encoding() {
                encoding if encoding & BTF_INT_BOOL != 0 => Shape::Bool,
                encoding if encoding & BTF_INT_SIGNED != 0 => Shape::Signed,
                _ => Shape::Unsigned,
            },
            BTF_KIND_ENUM | BTF_KIND_ENUM64 => Shape::Enum(Rc::new(names(kind))),
            BTF_KIND_PTR => Shape::Pointer,
            BTF_KIND_FLOAT => Shape::Hex,
            _ => return None,
        };
        Some(Scalar { bits: 8 * kind.size(), shape })
    }

    /// What a register holds with a value of this type: a part, where the type consists of several values.
    pub fn in_register(kind: Type) -> Option<Scalar> {
        let is_part = [BTF_KIND_STRUCT, BTF_KIND_UNION].contains(&kind.bare().kind());
        let part = Scalar { bits: 64, shape: Shape::Hex };
        let whole = Scalar::from_type(kind);
        if is_part || whole.as_ref().is_some_and(|whole| whole.bits > 64) {
            Some(part)
        } else {
            whole
        }
    }

    /// The value of a number.
    pub fn value(&self, number: u128, functions: &Functions) -> Value {
        let unused = 128 - self.bits.min(128);
        let (number, signed) = (number << unused >> unused, (number as i128) << unused >> unused);
        match &self.shape {
            Shape::Unsigned if self.bits <= 64 => (number as u64).into(),
            Shape::Signed if self.bits <= 64 => (signed as i64).into(),
            Shape::Bool => (number != 0).into(),
            Shape::Unsigned => number.to_string().into(),
            Shape::Signed => signed.to_string().into(),
            Shape::Pointer => match (functions.get(&(number as u64)), errno::name(number as i64)) {
                (Some(name), _) => name.clone().into(),
                (_, Some(error)) => format!("-{error}").into(),
                _ => hex(number as u64).into(),
            },
            Shape::Enum(names) => constant(names, signed, number).into(),
            Shape::Flags { operations, flags } => {
                let operations = operations.as_deref();
                operation_and_flags(operations, flags, number).into()
            }
            Shape::Hex | Shape::Text | Shape::Bytes => format!("{number:#x}").into(),
        }
    }

    /// The name of the error that a pointer or a negative integer stands for: `EINVAL`.
    pub fn error(&self, register: u64) -> Option<String> {
        match self.value(register.into(), &Functions::new()) {
            Value::Number(number) => errno::name(number.as_i64()?),
            _ if self.shape == Shape::Pointer => errno::name(register as i64),
            _ => None,
        }
    }
}

/// The constants of an enum. Of several with the same value, the first counts; one that only says
/// how many there are is left out.
pub fn names(kind: Type) -> Names {
    let is_count = |name: &str| name.contains("NR_") || name.ends_with("_LAST");
    let found = kind.constants().into_iter().rev().filter(|(name, _)| !is_count(name));
    found.map(|(name, value)| (value, name.to_owned())).collect()
}

/// The constant's name; where there is none, the flags that the value is made of, or its number.
fn constant(names: &Names, signed: i128, unsigned: u128) -> String {
    let exact = names.get(&signed).or_else(|| names.get(&(unsigned as i128)));
    if let Some(name) = exact {
        return name.clone();
    }
    let set = (0..64).map(|bit| 1_i128 << bit).filter(|flag| unsigned as i128 & flag != 0);
    let flags: Option<Vec<&str>> = set.map(|flag| names.get(&flag).map(String::as_str)).collect();
    match flags {
        Some(flags) if unsigned >> 64 == 0 && !flags.is_empty() => flags.join("|"),
        _ => signed.to_string(),
    }
}

/// `REQ_OP_READ|REQ_SYNC`: the operation, then the flags; bits without a name as one number.
fn operation_and_flags(operations: Option<&Names>, flags: &Names, value: u128) -> String {
    let (mut parts, mut rest) = (Vec::new(), value);
    if let Some(operations) = operations {
        let operation = value & ((1 << OPERATION_BITS) - 1);
        parts.push(constant(operations, operation as i128, operation));
        rest -= operation;
    }
    for bit in 0..64 {
        if let Some(name) = flags.get(&bit).filter(|_| rest >> bit & 1 == 1) {
            parts.push(name.trim_start_matches('_').to_owned());
            rest &= !(1 << bit);
        }
    }
    if rest != 0 || parts.is_empty() {
        parts.push(format!("{rest:#x}"));
    }
    parts.join("|")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::value::named;

    #[test]
    fn a_value_has_the_width_of_its_type() {
        use Shape::{Bool, Hex, Pointer, Signed, Unsigned};
        let functions = Functions::from([(0xffff_ffff_c050_0010, "clone_endio".to_owned())]);
        for (bits, shape, register, expected) in [
            (8, Bool, 0x1001, "true"),
            (8, Bool, 0xff00, "false"),
            (32, Signed, 0xffff_ffea, "-EINVAL"),
            (32, Signed, 0x7_0000_0005, "5"),
            (32, Signed, 0x8000_0000, "-2147483648"),
            (64, Signed, -11_i64 as u64, "-EAGAIN"),
            (64, Signed, 0xffff_ffea, "4294967274"),
            (8, Signed, 0xfe, "-ENOENT"),
            (32, Unsigned, 0xffff_ffff_ffff_ffea, "4294967274"),
            (8, Unsigned, 0x1ff, "255"),
            (64, Unsigned, u64::MAX, "18446744073709551615"),
            (64, Pointer, 0, "0x0"),
            (64, Pointer, -2_i64 as u64, "-ENOENT"),
            (64, Pointer, 0xffff_8880_0000_1000, "0xffff888000001000"),
            (64, Pointer, 0xffff_ffff_c050_0010, "clone_endio"),
            (64, Pointer, -4096_i64 as u64, "0xfffffffffffff000"),
            (64, Hex, 0x10, "0x10"),
        ] {
            let scalar = Scalar { bits, shape };
            let text = named(&scalar.value(register.into(), &functions));
            assert_eq!(text, expected, "{scalar:?} {register:#x}");
        }
        let names = Names::from([(0, "RQ_END_IO_NONE".to_owned()), (-1, "BAD".to_owned())]);
        let scalar = Scalar { bits: 32, shape: Shape::Enum(Rc::new(names)) };
        let value = |register: u64| named(&scalar.value(register.into(), &functions));
        let texts = [0xdead_0000_0000, 0xffff_ffff, 8].map(value);
        assert_eq!(texts, ["RQ_END_IO_NONE", "BAD", "8"]);
    }

    #[test]
    fn a_value_has_the_json_type_of_its_type() {
        let scalar = |bits, shape| Scalar { bits, shape };
        let json =
            |scalar: &Scalar, register: u64| scalar.value(register.into(), &Functions::new());
        let signed = scalar(32, Shape::Signed);
        assert_eq!(json(&signed, 0xffff_ffea), -22);
        assert_eq!(json(&scalar(64, Shape::Unsigned), u64::MAX), u64::MAX);
        assert_eq!(json(&scalar(8, Shape::Bool), 1), true);
        assert_eq!(json(&scalar(64, Shape::Pointer), -2_i64 as u64), "-ENOENT");
        assert_eq!(signed.error(0xffff_ffea).as_deref(), Some("EINVAL"));
        assert_eq!(scalar(64, Shape::Pointer).error(-2_i64 as u64).as_deref(), Some("ENOENT"));
        assert_eq!(
            (signed.error(22), scalar(32, Shape::Unsigned).error(0xffff_ffea)),
            (None, None)
        );
    }
}
