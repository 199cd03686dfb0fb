//! Removes the cause, as docs/incidents.md says: for the proof that it is the cause, and that the service is then cured.

use anyhow::{Result, bail};
use incidents::plan::{Cure, Fault, IncidentPlan, Who, name};

use crate::machine::{below, disk_of, shell};

/// Does what removes the cause of this incident.
pub fn apply(plan: &IncidentPlan) -> Result<()> {
    let answer = plan.answer();
    let process = match answer.who {
        Who::Nobody | Who::Itself => plan.service.process(),
        other => name(other),
    };
    let disk = disk_of(plan.service)?;
    let lower = below(&disk)?.into_iter().next().unwrap_or_default();
    // The leg that is quick stays.
    let cure = if plan.fault == Fault::SlowLeg { Cure::Table } else { answer.cure };
    shell(&command(cure, plan.service.name(), &disk, &lower, &process)?).map(drop)
}

/// What removes the cause: of a service, its device of device mapper, the disk below, and the process that causes it.
fn command(cure: Cure, name: &str, disk: &str, lower: &str, process: &str) -> Result<String> {
    let group = format!("/sys/fs/cgroup/{name}");
    Ok(match cure {
        Cure::IoLimit => {
            format!("echo \"$(cat /sys/block/{lower}/dev) riops=max wiops=max\" > {group}/io.max")
        }
        Cure::MemoryLimit => format!("echo max > {group}/memory.max"),
        Cure::CpuLimit => format!("echo max > {group}/cpu.max"),
        Cure::Scheduler => format!("echo none > /sys/block/{lower}/queue/scheduler"),
        Cure::NrRequests => format!("echo 64 > /sys/block/{lower}/queue/nr_requests"),
        Cure::Readahead => format!("echo 128 > /sys/block/{disk}/queue/read_ahead_kb"),
        Cure::Table => linear(name, lower),
        Cure::Disk | Cure::QueueDepth => other_disk(name, lower),
        Cure::Flushes | Cure::Cache | Cure::Copying | Cure::Priority => {
            format!("pkill -x {process}")
        }
        Cure::Load => format!("echo 20 > /run/{process}.customers"),
        other => bail!("no fault has the cure {other:?}"),
    })
}

/// The whole disk, as it is.
fn linear(name: &str, lower: &str) -> String {
    format!(
        "size=$(blockdev --getsz /dev/mapper/{name})
        dmsetup suspend --nolockfs {name}
        dmsetup load {name} --table \"0 $size linear /dev/{lower} 0\"
        dmsetup resume {name}"
    )
}

/// A copy of the disk, on a quick one.
fn other_disk(name: &str, lower: &str) -> String {
    format!(
        "cd /sys/kernel/config/nullb
        mkdir spare
        for set in memory_backed=1 size=256 irqmode=2 completion_nsec=2000000 submit_queues=1 power=1; do
            echo ${{set#*=}} > spare/${{set%=*}}
        done
        spare=/dev/nullb$(cat spare/index)
        test -b $spare || spare=/dev/spare
        size=$(blockdev --getsz /dev/mapper/{name})
        dmsetup suspend {name}
        dd if=/dev/{lower} of=$spare bs=1M iflag=direct conv=sparse
        dmsetup load {name} --table \"0 $size linear $spare 0\"
        dmsetup resume {name}"
    )
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    /// The page has each line of what the proof does, in the names that it uses.
    #[test]
    fn the_page_has_the_cures() {
        let page = include_str!("../../../docs/incidents.md");
        let mut known = 0;
        for cure in Cure::value_variants() {
            let Ok(command) = command(*cure, "NAME", "DM", "DISK", "PROCESS") else { continue };
            known += 1;
            for line in command.lines().map(str::trim) {
                assert!(page.contains(line), "{cure:?}: docs/incidents.md has no {line}");
            }
        }
        assert_eq!(known, 14);
    }
}
