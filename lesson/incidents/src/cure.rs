//! Removes the cause, as docs/incidents.md says: for the proof that it is the cause, and that the service is then cured.

use anyhow::{Result, bail};
use incidents::plan::{Cure, Fault, IncidentPlan};

use crate::{
    machine::{below, disk_of, shell},
    scene::OTHERS,
};

/// Does what removes the cause of this incident.
pub fn apply(plan: &IncidentPlan) -> Result<()> {
    let (name, process) = (plan.service.name(), plan.service.process());
    let disk = disk_of(plan.service)?;
    let disks = below(&disk)?;
    let lower = disks.first().map_or("", String::as_str);
    let group = format!("/sys/fs/cgroup/{name}");
    let kill = |process: &str| match OTHERS.contains(&process) {
        true => Ok(format!("pkill -KILL -x {process}")),
        false => bail!("{process} is no process that can be stopped"),
    };
    let command = match plan.answer().cure {
        Cure::IoLimit => {
            format!("echo \"$(cat /sys/block/{lower}/dev) riops=max wiops=max\" > {group}/io.max")
        }
        Cure::MemoryLimit => format!("echo max > {group}/memory.max"),
        Cure::CpuLimit => format!("echo max > {group}/cpu.max"),
        Cure::Scheduler => format!("echo none > /sys/block/{lower}/queue/scheduler"),
        Cure::NrRequests => format!("echo 64 > /sys/block/{lower}/queue/nr_requests"),
        Cure::Readahead => format!("echo 128 > /sys/block/{disk}/queue/read_ahead_kb"),
        Cure::Table => linear(name, lower),
        // The leg that is quick stays.
        Cure::Disk if plan.fault == Fault::SlowLeg => linear(name, lower),
        Cure::Disk | Cure::QueueDepth => other_disk(name, lower),
        Cure::Flushes => kill("reportd")?,
        Cure::Cache => kill("tidyd")?,
        Cure::Copying => kill("backupd")?,
        Cure::Priority => kill("sensord")?,
        Cure::Load => format!("echo 20 > /run/{process}.customers"),
        other => bail!("no fault has the cure {other:?}"),
    };
    shell(&command).map(drop)
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
        dd if=/dev/{lower} of=$spare bs=1M iflag=direct conv=sparse status=none
        dmsetup load {name} --table \"0 $size linear $spare 0\"
        dmsetup resume {name}"
    )
}
