//! Where every hit of every probe went: what the kernel counts, and what the programs do.

use anyhow::Result;
use libbpf_rs::MapCore;

use crate::{attach::KernelCounts, record::Ledger, trace::types::counts};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for counts {}

/// Reads both sides at a moment when no probe is hit in between, if there is one: probes are attached,
/// but the programs record nothing.
pub fn read(
    kernel: impl Fn() -> Result<KernelCounts>,
    counters: &impl MapCore,
) -> Result<(KernelCounts, Vec<counts>)> {
    const TRIES: usize = 20;
    let (mut before, mut own) = (kernel()?, common::per_cpu(counters)?);
    for _ in 0..TRIES {
        let after = kernel()?;
        if after == before {
            break;
        }
        before = after;
        own = common::per_cpu(counters)?;
    }
    Ok((before, own))
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
