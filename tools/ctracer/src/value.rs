//! What a register holds, by the kernel's description of its type.

use std::collections::HashMap;

use common::btf::Type;
use libbpf_rs::libbpf_sys::{
    BTF_INT_BOOL, BTF_INT_SIGNED, BTF_KIND_ENUM, BTF_KIND_ENUM64, BTF_KIND_INT, BTF_KIND_PTR,
};
use serde_json::Value;

use crate::errno;

/// What a register holds, an argument or a result, by the kernel's description of its type. Beyond the
/// type's width, it holds anything.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Scalar {
    /// `void`.
    #[default]
    Nothing,
    /// `bool`.
    Bool,
    /// An integer of so many bits.
    Unsigned(u32),
    /// The same, with a sign.
    Signed(u32),
    /// A pointer, or an error in its place.
    Pointer,
    /// An enum of so many bits, and its constants.
    Enum(u32, HashMap<i128, String>),
    /// A struct in registers, of which one is seen: that register.
    Raw,
}

impl From<Type<'_>> for Scalar {
    /// What a register holds with a value of this type.
    fn from(kind: Type) -> Scalar {
        let bare = kind.bare();
        let bits = 8 * u32::try_from(bare.size()).unwrap_or(8);
        match bare.kind() {
            0 => Scalar::Nothing,
            BTF_KIND_PTR => Scalar::Pointer,
            BTF_KIND_INT => match bare.encoding() {
                encoding if encoding & BTF_INT_BOOL != 0 => Scalar::Bool,
                _ if bits > 64 => Scalar::Raw,
                encoding if encoding & BTF_INT_SIGNED != 0 => Scalar::Signed(bits),
                _ => Scalar::Unsigned(bits),
            },
            BTF_KIND_ENUM | BTF_KIND_ENUM64 => {
                let constants = bare.constants().into_iter().rev();
                Scalar::Enum(bits, constants.map(|(name, at)| (at, name.to_owned())).collect())
            }
            _ => Scalar::Raw,
        }
    }
}

impl Scalar {
    /// The value; `None` where there is none.
    pub fn value(&self, register: u64) -> Option<Value> {
        Some(match self {
            Scalar::Nothing => return None,
            Scalar::Bool => (register & 0xff != 0).into(),
            Scalar::Unsigned(bits) => unsigned(register, *bits).into(),
            Scalar::Signed(bits) => signed(register, *bits).into(),
            Scalar::Enum(bits, names) => {
                let (plus, minus) = (unsigned(register, *bits), signed(register, *bits));
                let name = names.get(&plus.into()).or_else(|| names.get(&minus.into()));
                name.cloned().unwrap_or_else(|| minus.to_string()).into()
            }
            Scalar::Pointer => match self.error(register) {
                Some(name) => format!("-{name}").into(),
                None => hex(register).into(),
            },
            Scalar::Raw => hex(register).into(),
        })
    }

    /// The name of the error that a pointer or a negative integer stands for: `EINVAL`.
    pub fn error(&self, register: u64) -> Option<String> {
        match self {
            Scalar::Signed(bits) => errno::of(signed(register, *bits)),
            Scalar::Pointer => errno::of(register as i64),
            _ => None,
        }
    }
}

/// An address as a text: JSON's numbers are too small for it in many programs.
pub fn hex(address: u64) -> String {
    format!("{address:#x}")
}

fn unsigned(register: u64, bits: u32) -> u64 {
    let unused = 64_u32.saturating_sub(bits);
    register.checked_shl(unused).map_or(0, |value| value >> unused)
}

fn signed(register: u64, bits: u32) -> i64 {
    let unused = 64_u32.saturating_sub(bits);
    register.checked_shl(unused).map_or(0, |value| value as i64 >> unused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::named;

    #[test]
    fn a_value_has_the_width_of_its_type() {
        let cases = [
            (Scalar::Nothing, 7, None),
            (Scalar::Bool, 0x1001, Some("true")),
            (Scalar::Bool, 0xff00, Some("false")),
            (Scalar::Signed(32), 0xffff_ffea, Some("-EINVAL")),
            (Scalar::Signed(32), 0x7_0000_0005, Some("5")),
            (Scalar::Signed(32), 0x8000_0000, Some("-2147483648")),
            (Scalar::Signed(64), -11_i64 as u64, Some("-EAGAIN")),
            (Scalar::Signed(64), 0xffff_ffea, Some("4294967274")),
            (Scalar::Signed(8), 0xfe, Some("-ENOENT")),
            (Scalar::Unsigned(32), 0xffff_ffff_ffff_ffea, Some("4294967274")),
            (Scalar::Unsigned(8), 0x1ff, Some("255")),
            (Scalar::Unsigned(64), u64::MAX, Some("18446744073709551615")),
            (Scalar::Pointer, 0, Some("0x0")),
            (Scalar::Pointer, -2_i64 as u64, Some("-ENOENT")),
            (Scalar::Pointer, 0xffff_8880_0000_1000, Some("0xffff888000001000")),
            (Scalar::Pointer, -4096_i64 as u64, Some("0xfffffffffffff000")),
            (Scalar::Raw, 0x10, Some("0x10")),
        ];
        for (returns, register, expected) in cases {
            let text = returns.value(register).as_ref().map(named);
            assert_eq!(text.as_deref(), expected, "{returns:?} {register:#x}");
        }
        let names = HashMap::from([(0, "RQ_END_IO_NONE".to_owned()), (-1, "BAD".to_owned())]);
        let returns = Scalar::Enum(32, names);
        let texts =
            [0xdead_0000_0000, 0xffff_ffff, 7].map(|value| named(&returns.value(value).unwrap()));
        assert_eq!(texts, ["RQ_END_IO_NONE", "BAD", "7"]);
    }

    #[test]
    fn a_value_has_the_json_type_of_its_type() {
        let json = |returns: &Scalar, register| returns.value(register).unwrap();
        assert_eq!(json(&Scalar::Signed(32), 0xffff_ffea), -22);
        assert_eq!(json(&Scalar::Unsigned(64), u64::MAX), u64::MAX);
        assert_eq!(json(&Scalar::Bool, 1), true);
        assert_eq!(json(&Scalar::Pointer, -2_i64 as u64), "-ENOENT");
        assert_eq!(Scalar::Signed(32).error(0xffff_ffea), Some("EINVAL".to_owned()));
    }
}
