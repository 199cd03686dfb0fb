//! What the user sees.

use std::{collections::BTreeMap, fmt};

use common::hookable::Refusal;

use crate::Function;

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}({})", self.name, self.parameters)?;
        self.module.as_ref().map_or(Ok(()), |module| write!(f, " [{module}]"))
    }
}

/// What `--list` promises.
pub fn list(functions: &[Function], left_out: &[(Function, Refusal)]) {
    for function in functions {
        println!("{function}");
    }
    println!("\nLeft out:");
    for (function, why) in left_out {
        println!("{function}: {why}");
    }
    println!("\n{:>8} functions can be hooked, {} are left out", functions.len(), left_out.len());
}

/// The functions that were called, those with the most calls first.
pub fn table(mut calls: Vec<(u64, &Function)>) {
    calls.sort_by(|(a, f), (b, g)| b.cmp(a).then_with(|| f.name.cmp(&g.name)));
    println!("{:>8}  function", "calls");
    let called: Vec<_> = calls.iter().filter(|(calls, _)| *calls > 0).collect();
    for (calls, function) in &called {
        println!("{calls:>8}  {function}");
    }
    let sum: u64 = called.iter().map(|(calls, _)| calls).sum();
    println!(
        "{sum:>8} calls of {} functions; {} were not called",
        called.len(),
        calls.len() - called.len()
    );
}

/// How many functions were hooked, and for those that were not, why.
pub fn left_out(hooked: usize, name: &str, left_out: &[(Function, Refusal)]) {
    println!(
        "{hooked:>8} functions hooked that take a struct {name} *, {} not (see --list):",
        left_out.len()
    );
    let mut reasons = BTreeMap::new();
    for (_, why) in left_out {
        *reasons.entry(why.reason()).or_insert(0) += 1;
    }
    for (reason, number) in reasons {
        println!("{number:>8} {reason}");
    }
}

/// Where Ctrl-C came before all functions were hooked.
pub fn not_tried(tried: usize, not_tried: usize) {
    let all = tried + not_tried;
    println!(
        "{not_tried:>8} more were not tried: attaching was interrupted after {tried} of {all} functions"
    );
}
