//! Calls by function, and how they are printed.

use std::{collections::BTreeMap, fmt::Write};

/// What the calls of one place, or of one function, add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Calls.
    pub calls: u64,
    /// Bytes that they asked for.
    pub asked: u64,
    /// Bytes that they were given.
    pub given: u64,
}

impl Calls {
    fn add(&mut self, other: Calls) {
        self.calls += other.calls;
        self.asked += other.asked;
        self.given += other.given;
    }

    fn since(self, before: Calls) -> Calls {
        Calls {
            calls: self.calls - before.calls,
            asked: self.asked - before.asked,
            given: self.given - before.given,
        }
    }
}

/// The calls of each place in the kernel, by the address that `kmalloc()` returns to.
pub type Sites = BTreeMap<u64, Calls>;

/// What has been added since `before`.
pub fn since(now: &Sites, before: &Sites) -> Sites {
    let before = |site| before.get(site).copied().unwrap_or_default();
    let since = now.iter().map(|(site, calls)| (*site, calls.since(before(site))));
    since.filter(|(_, calls)| calls.calls > 0).collect()
}

/// The `top` functions with the most calls, the sum of the others, and the sum of all.
pub fn table(sites: &Sites, name: impl Fn(u64) -> String, top: usize) -> String {
    let mut functions: BTreeMap<String, Calls> = BTreeMap::new();
    let mut all = Calls::default();
    for (site, calls) in sites {
        functions.entry(name(*site)).or_default().add(*calls);
        all.add(*calls);
    }
    let mut rows: Vec<(String, Calls)> = functions.into_iter().collect();
    // Stable: functions with the same numbers stay in the order of their names.
    rows.sort_by_key(|(_, calls)| std::cmp::Reverse((calls.calls, calls.asked)));
    let left = rows.split_off(top.min(rows.len()));
    if !left.is_empty() {
        let mut sum = Calls::default();
        left.iter().for_each(|(_, calls)| sum.add(*calls));
        rows.push((format!("({} other functions)", left.len()), sum));
    }
    rows.push(("(all)".into(), all));
    let mut text = format!("{:>10} {:>12} {:>12} FUNCTION\n", "CALLS", "ASKED", "GIVEN");
    for (name, Calls { calls, asked, given }) in rows {
        writeln!(text, "{calls:>10} {asked:>12} {given:>12} {name}").unwrap_or_default();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(calls: u64) -> Calls {
        Calls { calls, asked: calls * 10, given: calls * 16 }
    }

    #[test]
    fn places_add_up_to_functions() {
        let sites = Sites::from([(1, calls(1)), (2, calls(5)), (3, calls(2)), (4, calls(1))]);
        let name = |site| if site < 3 { "b()".into() } else { format!("a{site}()") };
        assert_eq!(
            table(&sites, name, 2),
            "     CALLS        ASKED        GIVEN FUNCTION\n         \
             6           60           96 b()\n         \
             2           20           32 a3()\n         \
             1           10           16 (1 other functions)\n         \
             9           90          144 (all)\n"
        );
        assert!(!table(&sites, name, 3).contains("other"));
    }

    #[test]
    fn an_interval_is_a_difference() {
        let before = Sites::from([(1, calls(1)), (2, calls(2))]);
        let now = Sites::from([(1, calls(1)), (2, calls(5)), (3, calls(4))]);
        assert_eq!(since(&now, &before), Sites::from([(2, calls(3)), (3, calls(4))]));
    }
}
