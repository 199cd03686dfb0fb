//! More threads than CPUs: every I/O is measured all the same, and the sums are exact.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    disks::{self, NullBlk},
    run::{
        Running, between, count, ensure_none, entries_left, fio, submitted, summary, wait_until,
    },
};

pub const TESTS: &[Test] = &[
    ("stages_measure_all_of_64_threads", stages_measure_all_of_64_threads),
    (
        "stages_measure_all_of_eight_threads_on_one_cpu",
        stages_measure_all_of_eight_threads_on_one_cpu,
    ),
    (
        "stages_have_exact_sums_when_detached_under_load",
        stages_have_exact_sums_when_detached_under_load,
    ),
];

const STAGES: [&str; 6] = ["stage00", "stage03", "stage04", "stage05", "stage06", "stage07"];

/// 64 threads with 64 I/Os each in flight. All stages run at once, without event lines but for
/// stage 03, which has no --quiet.
fn stages_measure_all_of_64_threads() -> Result<()> {
    measure_all(6400, &["--quiet"], "--numjobs=64 --iodepth=64 --number_ios=100")
}

/// Eight threads take turns on one CPU while the stages print three lines for every I/O.
fn stages_measure_all_of_eight_threads_on_one_cpu() -> Result<()> {
    measure_all(400, &[], "--numjobs=8 --iodepth=16 --cpus_allowed=0 --number_ios=50")
}

/// One disk after the other is read that often.
fn measure_all(ios: u64, options: &[&str], load: &str) -> Result<()> {
    let disks = [disks::virtio()?, disks::nvme()?];
    let running = Running::stages(STAGES.map(|stage| {
        let takes_quiet = !["stage00", "stage03"].contains(&stage);
        (stage, if takes_quiet { options.to_vec() } else { vec![] })
    }))?;
    let (mut bios, mut requests) = (0, 0);
    for disk in &disks {
        let before = [disks::bios(disk)?, disks::requests(disk)?];
        fio(&format!(
            "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --thread \
             --norandommap --size=128M {load}"
        ))?;
        let of_disk = disks::bios(disk)? - before[0];
        ensure!(of_disk >= ios, "{disk}: {of_disk} of {ios} bios");
        bios += of_disk;
        requests += disks::requests(disk)? - before[1];
    }
    let left = entries_left()?;
    let outputs = Running::interrupt_all(running)?;
    for (stage, output) in STAGES.into_iter().zip(&outputs) {
        let (what, expected) = match stage {
            "stage00" | "stage07" => ("requests completed", requests),
            _ => ("bios completed", bios),
        };
        let summary = summary(output);
        let completed = count(summary, what)?;
        ensure!(completed == expected, "{stage}: {completed} of {expected}: {summary}");
        ensure_none(summary, &["in flight", "dropped", "unmatched"]).context(stage)?;
        ensure!(!summary.contains("measured,"), "{stage}: all were measured: {summary}");
    }
    ensure!(left == 0, "{left} entries are left in the maps");
    Ok(())
}

/// After the programs have been detached, none of them is running any more: what started has
/// completed or is in flight, to the last bio, and each has its lines. With one CPU, too, where
/// membarrier(2) waits for nothing.
fn stages_have_exact_sums_when_detached_under_load() -> Result<()> {
    let online = |on: bool| {
        fs::write("/sys/devices/system/cpu/cpu1/online", if on { "1" } else { "0" })
            .context("cpu1/online")
    };
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "2000000")])?;
    let _load = Running::bash(&format!(
        "exec fio --name=load --filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio \
         --iodepth=2 --numjobs=4 --thread --time_based --runtime=600 --rate_iops=40 --output-format=terse >/dev/null",
        disk.name
    ))?;
    let loaded = || {
        let before = disks::bios(&disk.name)?;
        wait_until("the load", || Ok(disks::bios(&disk.name)? > before + 40))
    };
    let result = [true, false].into_iter().try_for_each(|both| {
        online(both)?;
        for _ in 0..2 {
            let running = Running::stage("stage03", &[])?;
            loaded()?;
            let output = running.interrupt()?;
            let lost = between(&output, " trace lines, ", " lost")?;
            ensure!(lost == "0", "{lost} lines were lost: the load is too fast");
            let sum = ["bios completed", "in flight"]
                .iter()
                .map(|what| count(&output, what))
                .sum::<Result<u64>>()?;
            ensure!(
                submitted(&output) == sum && sum >= 40,
                "{} started: {output}",
                submitted(&output)
            );
            let durations = output.matches("time duration: ").count() as u64;
            ensure!(count(&output, "bios completed")? == durations, "{durations} lines: {output}");
            ensure_none(&output, &["dropped", "split"])?;
        }
        Ok(())
    });
    online(true)?;
    result
}
