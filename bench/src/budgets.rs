//! What each program may cost.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::plan::Load;
use crate::report::Results;

/// What each program may cost, relative to the workspace's root.
pub const BUDGETS: &str = "bench/budgets.toml";
/// A budget is exceeded by more than this, and by more than the one instruction of rounding.
const TOLERANCE: f64 = 1.03;

/// What a row may cost; what is not in the file is not limited.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    /// Instructions added to a direct read.
    direct: Option<u64>,
    /// To a read of 4 KiB from the page cache.
    cached_4k: Option<u64>,
    /// To one of 1 MiB.
    cached_1m: Option<u64>,
}

/// The budgets of the workspace.
pub fn read(root: &Path) -> Result<BTreeMap<String, Budget>> {
    let text = fs::read_to_string(root.join(BUDGETS)).context(BUDGETS)?;
    toml::from_str(&text).context(BUDGETS)
}

/// What was measured, as the text of [`BUDGETS`], for the rows that `is_ours`.
pub fn write(results: &Results, is_ours: impl Fn(&str) -> bool) -> Result<String> {
    let rows = results.names().filter(|name| is_ours(name));
    let budgets: BTreeMap<&str, Budget> = rows.map(|name| (name, budget(results, name))).collect();
    Ok(format!(
        "# What each program may cost on the default kernel: instructions added to a read. Written by\n\
         # `cargo vm bench --bless`: what was measured. More than 3 % above this fails `cargo vm bench`\n\
         # and `cargo vm test`. Memory is reported and has no budget: it depends on the libraries.\n\n{}",
        toml::to_string(&budgets)?
    ))
}

/// What a row may cost: what it does cost, where the runs agree.
fn budget(results: &Results, name: &str) -> Budget {
    let now = costs(results, name);
    Budget {
        direct: now.direct.filter(|_| results.repeats(name, Load::Direct)),
        cached_4k: now.cached_4k.filter(|_| results.repeats(name, Load::Cached4k)),
        cached_1m: now.cached_1m.filter(|_| results.repeats(name, Load::Cached1m)),
    }
}

/// What a row costs, as its budget counts it.
fn costs(results: &Results, name: &str) -> Budget {
    let added = |load| results.added(name, load).map(|added| added.max(0.0).round() as u64);
    Budget {
        direct: added(Load::Direct),
        cached_4k: added(Load::Cached4k),
        cached_1m: added(Load::Cached1m),
    }
}

/// The budgets that are exceeded.
pub fn exceeded(results: &Results, budgets: &BTreeMap<String, Budget>) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, budget) in budgets {
        let now = costs(results, name);
        for (what, now, budget) in [
            ("a direct read", now.direct, budget.direct),
            ("a cached read of 4 KiB", now.cached_4k, budget.cached_4k),
            ("a cached read of 1 MiB", now.cached_1m, budget.cached_1m),
        ] {
            if let (Some(now), Some(budget)) = (now, budget)
                && now as f64 > budget as f64 * TOLERANCE
                && now > budget + 1
            {
                lines.push(format!(
                    "{name}: {now} instructions added to {what}, the budget is {budget}. If the gain is worth that, \
                     cargo vm bench --bless makes it the budget"
                ));
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::outcomes;

    #[test]
    fn a_budget_may_be_exceeded_by_3_percent() {
        let of = |text| toml::from_str::<BTreeMap<String, Budget>>(text).unwrap();
        let check = |added, budgets| {
            exceeded(&Results::new(&outcomes(added, 1), false).unwrap(), &of(budgets))
        };
        let budgets = "[\"stage04 quiet\"]\ndirect = 1000\n";
        assert!(check(1029.0, budgets).is_empty());
        assert!(
            check(1040.0, budgets)[0]
                .starts_with("stage04 quiet: 1040 instructions added to a direct")
        );
        let nothing = "[\"stage04 quiet\"]\ndirect = 0\n";
        assert!(check(1.0, nothing).is_empty() && !check(2.0, nothing).is_empty());
    }

    #[test]
    fn what_is_blessed_is_the_budget() {
        let outcomes = outcomes(1234.0, 9);
        let results = Results::new(&outcomes, false).unwrap();
        let text = write(&results, |name| name.starts_with("stage")).unwrap();
        let read: BTreeMap<String, Budget> = toml::from_str(&text).unwrap();
        let budget = Budget { direct: Some(1234), ..Budget::default() };
        assert_eq!(read, BTreeMap::from([("stage04 quiet".to_owned(), budget)]));
    }

    #[test]
    fn the_budgets_file_is_readable() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        assert!(read(&root).unwrap().len() > 10);
    }
}
