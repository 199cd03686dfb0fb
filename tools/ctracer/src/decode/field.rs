//! A field of a struct: where it lies, and how its bytes become a value.

use std::{collections::HashMap, rc::Rc};

use serde_json::Value;

use crate::value::hex;

/// The block layer keeps the operation in this many low bits of `bi_opf`, and flags above them.
const OPERATION_BITS: u32 = 8;

/// A field, and how its value is written.
pub struct Field {
    /// Its path: `bi_iter.bi_sector`.
    pub name: String,
    /// Position in bits, from the start of the struct.
    pub offset: usize,
    /// Width in bits.
    pub bits: usize,
    /// How its value is written.
    pub shape: Shape,
}

/// How the value of a field is written.
pub enum Shape {
    /// A number.
    Unsigned,
    /// A number that can be negative.
    Signed,
    /// `true` or `false`.
    Bool,
    /// A pointer or a floating point number, which the kernel hardly uses: hexadecimal.
    Hex,
    /// A pointer to a function.
    Function,
    /// An array of `char`, up to its first NUL.
    Text,
    /// Hexadecimal, byte by byte.
    Bytes,
    /// The name of a constant, or of several.
    Enum(Rc<Names>),
    /// An operation in the lowest bits, where there is one, and flags.
    Flags {
        /// The operations, by value.
        operations: Option<Rc<Names>>,
        /// The flags, by the numbers of their bits.
        bits: Rc<Names>,
    },
}

/// The constants of an enum, by value.
pub struct Names(pub HashMap<i128, String>);

impl Field {
    /// The bytes that hold the field.
    pub fn bytes(&self) -> std::ops::Range<usize> {
        self.offset / 8..self.end()
    }

    /// The first byte behind it.
    pub fn end(&self) -> usize {
        (self.offset + self.bits).div_ceil(8)
    }

    /// Its value, in the bytes of the whole struct. `functions`: their names, by address.
    pub fn value(&self, bytes: &[u8], functions: &HashMap<u64, String>) -> Value {
        let bytes = &bytes[self.bytes()];
        match &self.shape {
            Shape::Unsigned if self.bits <= 64 => (self.number(bytes) as u64).into(),
            Shape::Signed if self.bits <= 64 => (self.signed(bytes) as i64).into(),
            Shape::Bool => (self.number(bytes) != 0).into(),
            Shape::Unsigned => self.number(bytes).to_string().into(),
            Shape::Signed => self.signed(bytes).to_string().into(),
            Shape::Hex => format!("{:#x}", self.number(bytes)).into(),
            Shape::Function => {
                let address = self.number(bytes) as u64;
                functions.get(&address).cloned().unwrap_or_else(|| hex(address)).into()
            }
            Shape::Text => {
                let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
                text.escape_ascii().to_string().into()
            }
            Shape::Bytes => {
                bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into()
            }
            Shape::Enum(names) => names.value(self.signed(bytes), self.number(bytes)).into(),
            Shape::Flags { operations, bits } => {
                flags(operations.as_deref(), bits, self.number(bytes)).into()
            }
        }
    }

    /// The field as an unsigned number. The machines that the workshop supports are little-endian.
    fn number(&self, bytes: &[u8]) -> u128 {
        let number =
            bytes.iter().take(16).rev().fold(0_u128, |sum, &byte| sum << 8 | u128::from(byte));
        let unused = 128 - self.bits.min(128);
        (number >> (self.offset % 8)) << unused >> unused
    }

    fn signed(&self, bytes: &[u8]) -> i128 {
        let unused = 128 - self.bits.min(128);
        (self.number(bytes) as i128) << unused >> unused
    }
}

impl Names {
    /// The constant's name; where there is none, the flags that the value is made of, or its number.
    fn value(&self, signed: i128, unsigned: u128) -> String {
        let exact = self.0.get(&signed).or_else(|| self.0.get(&(unsigned as i128)));
        if let Some(name) = exact {
            return name.clone();
        }
        let set = (0..64).map(|bit| 1_i128 << bit).filter(|flag| unsigned as i128 & flag != 0);
        let names: Option<Vec<&str>> =
            set.map(|flag| self.0.get(&flag).map(String::as_str)).collect();
        match names {
            Some(names) if unsigned >> 64 == 0 && !names.is_empty() => names.join("|"),
            _ => signed.to_string(),
        }
    }
}

/// `REQ_OP_READ|REQ_SYNC`: the operation, then the flags; bits without a name as one number.
fn flags(operations: Option<&Names>, bits: &Names, value: u128) -> String {
    let mut parts = Vec::new();
    let mut rest = value;
    if let Some(operations) = operations {
        let operation = value & ((1 << OPERATION_BITS) - 1);
        parts.push(operations.value(operation as i128, operation));
        rest -= operation;
    }
    for bit in 0..64 {
        if let Some(name) = bits.0.get(&bit).filter(|_| rest >> bit & 1 == 1) {
            parts.push(name.trim_start_matches('_').to_owned());
            rest &= !(1 << bit);
        }
    }
    if rest != 0 || parts.is_empty() {
        parts.push(format!("{rest:#x}"));
    }
    parts.join("|")
}
