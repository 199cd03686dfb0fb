//! Where every hit of every probe went: what the kernel counts, and what the programs do.

use std::time::Duration;

use anyhow::Result;

use crate::{attach::KernelCounts, record::Ledger, trace::types::counts};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for counts {}

/// Reads both sides at a moment when no program runs, if there is one: probes are attached, but the
/// programs record nothing. A program counts its hit before the kernel counts its run, and where a
/// machine's CPUs take turns, it may stay between the two for long.
pub fn read(
    kernel: impl Fn() -> Result<KernelCounts>,
    own: impl Fn() -> Result<Vec<counts>>,
) -> Result<(KernelCounts, Vec<counts>)> {
    const TRIES: usize = 20;
    const PAUSE: Duration = Duration::from_millis(1);
    let mut both = (kernel()?, own()?);
    for _ in 0..TRIES {
        let after = kernel()?;
        if after == both.0 && both.1.iter().map(parts).sum::<u64>() == after[0] {
            break;
        }
        std::thread::sleep(PAUSE);
        both = (kernel()?, own()?);
    }
    Ok(both)
}

/// The runs of the programs, by what became of each.
fn parts(cpu: &counts) -> u64 {
    cpu.entries + cpu.returns + cpu.lost + cpu.filtered + cpu.null + cpu.unmatched + cpu.outside
}

/// What came from one reading to the other.
pub fn between(
    (kernel_before, own_before): &(KernelCounts, Vec<counts>),
    (kernel, own): &(KernelCounts, Vec<counts>),
) -> Ledger {
    let counted = |of: fn(&counts) -> u64| {
        own.iter().map(of).sum::<u64>() - own_before.iter().map(of).sum::<u64>()
    };
    let since = |at: usize| kernel[at].saturating_sub(kernel_before[at]);
    let [runs, recursion, instances] = [0, 1, 2].map(since);
    Ledger {
        hits: runs + recursion + instances,
        entries: counted(|cpu| cpu.entries),
        returns: counted(|cpu| cpu.returns),
        lost: counted(|cpu| cpu.lost),
        recursion,
        instances,
        filtered: counted(|cpu| cpu.filtered),
        null: counted(|cpu| cpu.null),
        unmatched: counted(|cpu| cpu.unmatched),
        outside: counted(|cpu| cpu.outside),
        objects_lost: counted(|cpu| cpu.objects_lost),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn it_reads_when_no_program_runs() {
        let tries = Cell::new(0);
        let own = || {
            tries.set(tries.get() + 1);
            // A program has counted its hit, and the kernel not its run; then it has ended.
            let outside = if tries.get() < 3 { 8 } else { 7 };
            Ok(vec![
                counts { outside, ..Default::default() },
                counts { entries: 3, ..Default::default() },
            ])
        };
        let (kernel, own) = read(|| Ok([10, 1, 2]), own).unwrap();
        assert_eq!((kernel, own[0].outside, tries.get()), ([10, 1, 2], 7, 3));
        // One that loses a hit never gets there: the ledger says how much is off.
        let (kernel, own) = read(|| Ok([10, 1, 2]), || Ok(vec![counts::default()])).unwrap();
        assert_eq!((kernel[0], parts(&own[0])), (10, 0));
    }
}
