//! `cargo truth`: our tools and others beside outside judges, in the guest.
//!
//! The others' user space is a root file system of its own in the cache, made of Debian's packages. The
//! library says which tools and cases there are; the guest tests' program runs them.

mod comparison;
mod guests;
mod kernel_diff;
mod outcome;
mod prepared;
mod results;
mod schedule;

use anyhow::{Result, ensure};
use clap::Parser;
use vm::run::Run;

use crate::comparison::{Comparison, Options, Purpose};
use crate::outcome::ComparisonOutcome;
use crate::prepared::Prepared;

fn main() {
    let options = Options::parse();
    vm::commands::main(true, || compare(options))
}

/// Runs the command. Returns the exit code: 1 where a tool of ours is wrong or was not judged, where one of
/// yours is wrong, or where a guest failed.
fn compare(options: Options) -> Result<i32> {
    let run = Run::new(options.arch)?;
    if options.render {
        return results::render(run.workspace()).map(|()| 0);
    }
    let comparison = Comparison::choose(run, options)?;
    let prepared = Prepared::make(&comparison)?;
    let jobs = schedule::jobs(&comparison, &prepared)?;
    let may_be_none = comparison.purpose == Purpose::Missing;
    ensure!(!jobs.is_empty() || may_be_none, "no cell was judged, see above");
    let outcome = ComparisonOutcome::judge(&comparison, &prepared, &jobs);
    outcome.show(&comparison, &prepared)?;
    outcome.exit_code(&comparison)
}
