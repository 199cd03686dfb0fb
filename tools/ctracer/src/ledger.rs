//! The ledger: where every hit of every probe went.

use anyhow::Result;
use libbpf_rs::MapCore;

use crate::{attach::KernelCounts, model::Ledger, trace::types};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for types::counts {}

/// What the kernel and the programs have counted until now.
#[derive(Clone, Copy, Default)]
pub struct Reading {
    kernel: KernelCounts,
    own: Own,
}

#[derive(Clone, Copy, Default)]
struct Own {
    entries: u64,
    returns: u64,
    lost: u64,
    objects_lost: u64,
    filtered: u64,
    null: u64,
    unmatched: u64,
    outside: u64,
}

impl Own {
    fn read(map: &impl MapCore) -> Result<Own> {
        Ok(common::per_cpu::<types::counts>(map)?.iter().fold(Own::default(), |sum, cpu| Own {
            entries: sum.entries + cpu.entries,
            returns: sum.returns + cpu.returns,
            lost: sum.lost + cpu.lost,
            objects_lost: sum.objects_lost + cpu.objects_lost,
            filtered: sum.filtered + cpu.filtered,
            null: sum.null + cpu.null,
            unmatched: sum.unmatched + cpu.unmatched,
            outside: sum.outside + cpu.outside,
        }))
    }
}

impl Reading {
    /// Reads both sides at a moment when no probe is hit in between, if there is one: probes are
    /// attached, but the programs record nothing.
    pub fn take(
        kernel: impl Fn() -> Result<KernelCounts>,
        counters: &impl MapCore,
    ) -> Result<Reading> {
        const TRIES: usize = 20;
        let mut before = kernel()?;
        for _ in 0..TRIES {
            let own = Own::read(counters)?;
            let after = kernel()?;
            if after == before {
                return Ok(Reading { kernel: before, own });
            }
            before = after;
        }
        Ok(Reading { kernel: before, own: Own::read(counters)? })
    }

    /// What came after `earlier`.
    pub fn since(&self, earlier: &Reading) -> Ledger {
        let (kernel, own) = (&self.kernel, &self.own);
        let recursion = kernel.recursion.saturating_sub(earlier.kernel.recursion);
        let instances = kernel.instances - earlier.kernel.instances;
        Ledger {
            hits: kernel.runs - earlier.kernel.runs + recursion + instances,
            entries: own.entries - earlier.own.entries,
            returns: own.returns - earlier.own.returns,
            lost: own.lost - earlier.own.lost,
            recursion,
            instances,
            filtered: own.filtered - earlier.own.filtered,
            null: own.null - earlier.own.null,
            unmatched: own.unmatched - earlier.own.unmatched,
            outside: own.outside - earlier.own.outside,
            objects_lost: own.objects_lost - earlier.own.objects_lost,
        }
    }
}

impl Ledger {
    /// What the parts add up to: [`Ledger::hits`], where all is well.
    pub fn sum(&self) -> u64 {
        self.entries
            + self.returns
            + self.lost
            + self.recursion
            + self.instances
            + self.filtered
            + self.null
            + self.unmatched
            + self.outside
    }
}
