//! `--filter`: comparisons of fields, which the BPF program makes.

use anyhow::{Context, Result};

use crate::{decode::Layout, trace::types};

/// How many comparisons the program has room for.
pub const MOST: usize = 4;

/// What compares, the longest first: their names begin alike. The bits say for which results it holds:
/// 1 less, 2 equal, 4 greater.
const OPERATORS: [(&str, u32); 6] =
    [("==", 2), ("!=", 5), ("<=", 3), (">=", 6), ("<", 1), (">", 4)];

/// A comparison, as it is written: `bi_opf & 0xff == 1`.
#[derive(Clone, Debug, PartialEq)]
struct Comparison {
    field: String,
    mask: Option<u64>,
    holds_if: u32,
    value: u64,
}

/// Comparisons that all have to hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Filter(Vec<Comparison>);

/// Reads `FIELD [& MASK] OPERATOR NUMBER`, several joined by `and`. An error says what is wrong with
/// the text, and where there are more than [`MOST`].
pub fn parse(text: &str) -> Result<Filter, String> {
    let parts: Vec<&str> = text.split(" and ").flat_map(|part| part.split("&&")).collect();
    if parts.len() > MOST {
        return Err(format!("at most {MOST} comparisons, here are {}", parts.len()));
    }
    parts.into_iter().map(|part| comparison(part.trim())).collect::<Result<_, _>>().map(Filter)
}

fn comparison(text: &str) -> Result<Comparison, String> {
    let found = OPERATORS.iter().find_map(|(name, bits)| {
        let (left, right) = text.split_once(name)?;
        Some((left.trim(), *bits, right.trim()))
    });
    let Some((left, holds_if, right)) = found else {
        return Err(format!(
            "{text:?} is no comparison: write a field, one of == != < <= > >= and a number, as in \
             'bi_iter.bi_sector == 2048' or 'bi_opf & 0xff == 1'"
        ));
    };
    let (field, mask) = match left.split_once('&') {
        Some((field, mask)) => (field.trim(), Some(as_number(mask.trim())?)),
        None => (left, None),
    };
    Ok(Comparison { field: field.to_owned(), mask, holds_if, value: as_number(right)? })
}

/// `2048`, `0xff`, `-1`, `true`: a negative number as it stands in 64 bits.
fn as_number(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let parsed = match digits.strip_prefix("0x") {
        _ if digits.starts_with(['+', '-']) => None,
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => digits.parse().ok().or(digits.parse::<bool>().ok().map(u64::from)),
    };
    let parsed = parsed.map(|number| if digits == text { number } else { number.wrapping_neg() });
    parsed.ok_or_else(|| format!("{text:?} is no number: write it like 2048, 0xff or -1"))
}

impl Filter {
    /// As the program wants it, for the struct of this layout. Fails where the struct has no such field,
    /// or one that is no whole number of bytes.
    pub fn resolve(&self, layout: &Layout) -> Result<Vec<types::comparison>> {
        let resolve = |Comparison { field, mask, holds_if, value }: &Comparison| {
            let (offset, size, is_signed) = layout.as_scalar(field).context("--filter")?;
            Ok(types::comparison {
                mask: mask.unwrap_or(u64::MAX),
                value: *value,
                offset: offset as u32,
                size: size as u32,
                // With a mask, what is compared is no negative number.
                is_signed: u32::from(is_signed && mask.is_none()),
                holds_if: *holds_if,
            })
        };
        self.0.iter().map(resolve).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::tests::layout;

    fn one(text: &str) -> [u64; 6] {
        let found = parse(text).unwrap().resolve(&layout("bio")).unwrap();
        let [one] = found[..] else { panic!("{} comparisons", found.len()) };
        [
            one.offset.into(),
            one.size.into(),
            one.mask,
            one.holds_if.into(),
            one.value,
            one.is_signed.into(),
        ]
    }

    #[test]
    fn comparisons_are_read() {
        let at = |name| layout("bio").position(name).unwrap() as u64;
        let sector = at("bi_iter.bi_sector");
        assert_eq!(one("bi_iter.bi_sector == 2048"), [sector, 8, u64::MAX, 2, 2048, 0]);
        assert_eq!(one("bi_iter.bi_sector>=0x10"), [sector, 8, u64::MAX, 6, 16, 0]);
        assert_eq!(one("bi_opf & 0xff == 1"), [at("bi_opf"), 4, 0xff, 2, 1, 0]);
        assert_eq!(one(" bi_opf&1!=0 "), [at("bi_opf"), 4, 1, 5, 0, 0]);
        let count = at("__bi_remaining");
        assert_eq!(one("__bi_remaining > -1"), [count, 4, u64::MAX, 4, u64::MAX, 1]);
        let two = "bi_iter.bi_sector < 8 and bi_iter.bi_size <= 4096 && bi_status != 0";
        assert_eq!(parse(two).unwrap().0.len(), 3);
    }

    #[test]
    fn what_is_none_is_refused() {
        for (wrong, why) in [
            ("", "is no comparison"),
            ("bi_opf", "is no comparison"),
            ("bi_opf = 1", "is no comparison"),
            ("bi_opf == READ", "is no number"),
            ("bi_opf & x == 1", "is no number"),
            ("bi_opf == --1", "is no number"),
            ("bi_opf == 0x", "is no number"),
            ("a==1 and a==1 and a==1 and a==1 and a==1", "at most 4"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
        for (wrong, why) in [
            ("bi_opff == 1", "--filter: the struct has no field bi_opff: --json shows"),
            ("bi_iter == 1", "no field bi_iter: it consists of several, like bi_iter.bi_sector"),
        ] {
            let error = parse(wrong).unwrap().resolve(&layout("bio")).err().unwrap();
            assert!(format!("{error:#}").contains(why), "{wrong}: {error:#}");
        }
    }
}
