//! More threads than CPUs: every I/O is measured all the same, and the sums are exact.

use std::fs;

use anyhow::{Context, Result, ensure};

use crate::{
    disks::{self, Mapped, NullBlk},
    ftrace::{Ftrace, Hook},
    requests::driver_commands,
    run::{
        Running, between, count, ensure_none, entries_left, fio, judged_weakly, preempts, shell,
        submitted, summary, wait_until,
    },
};

tests![
    stages_measure_all_of_64_threads,
    stages_measure_all_of_eight_threads_on_one_cpu,
    stages_have_exact_sums_when_detached_under_load,
    stage06_misses_no_end_in_a_task,
    stage06_misses_no_end_of_btrfs,
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
    let commands = driver_commands()?;
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
    let commands = commands.events()?.len() as u64;
    let left = entries_left()?;
    let outputs = Running::interrupt_all(running)?;
    for (stage, output) in STAGES.into_iter().zip(&outputs) {
        let (what, expected) = match stage {
            "stage00" | "stage07" => ("requests completed", requests + commands),
            _ => ("bios completed", bios),
        };
        let summary = summary(output);
        let completed = count(summary, what)?;
        ensure!(completed == expected, "{stage}: {completed} of {expected}: {summary}");
        ensure_none(summary, &["in flight", "dropped"]).context(stage)?;
        // The driver's commands have bios that nobody submits.
        let unmatched = count(summary, "unmatched")?;
        ensure!(unmatched <= commands, "{stage}: {unmatched} unmatched: {summary}");
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

/// Bios that complete in a task: those of dm-crypt in its workers, of raid5 in raid5d, of dm-thin in its
/// worker. A kernel that preempts takes the CPU away inside the fentry program there; the second program
/// of stages 06 and 07 sees what it misses.
fn stage06_misses_no_end_in_a_task() -> Result<()> {
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    shell("modprobe -a dm_crypt dm_raid raid456 dm_thin_pool xts || true")?;
    let key = "0123456789abcdef".repeat(8);
    let crypt =
        Mapped::new("crypt", &format!("0 65536 crypt aes-xts-plain64 {key} 0 /dev/{virtio} 0"))?;
    let reads = |of: &Mapped, rw: &str| {
        fio(&format!(
            "--filename={} --rw={rw} --bs=64k --direct=1 --ioengine=libaio --iodepth=4 --thread \
             --norandommap --size=32M --numjobs=64 --number_ios=20",
            of.path()
        ))
        .map(|_| ())
    };
    misses_nothing(&[&virtio], || reads(&crypt, "randrw")).context("dm-crypt")?;
    drop(crypt);
    let slice = |name: &str, disk: &str, at: u64| {
        Mapped::new(name, &format!("0 65536 linear /dev/{disk} {at}"))
    };
    let slices = [slice("a", &virtio, 0)?, slice("b", &virtio, 65536)?, slice("c", &nvme, 0)?];
    let [a, b, c] = slices.each_ref().map(Mapped::path);
    let raid =
        Mapped::new("raid", &format!("0 131072 raid raid5_ls 2 64 nosync 3 - {a} - {b} - {c}"))?;
    misses_nothing(&[&virtio, &nvme], || reads(&raid, "randrw")).context("raid5")?;
    drop(raid);
    shell(&format!("dd if=/dev/zero of={a} bs=4k count=1 oflag=direct status=none"))?;
    let pool = Mapped::new("pool", &format!("0 65536 thin-pool {a} {b} 128 0"))?;
    shell(&format!("dmsetup message {} 0 'create_thin 0'", pool.path()))?;
    let thin = Mapped::new("thin", &format!("0 65536 thin {} 0", pool.path()))?;
    misses_nothing(&[&virtio], || {
        reads(&thin, "randwrite")?;
        shell(&format!("blkdiscard {}", thin.path()))?;
        // The pool writes its metadata within a second, unasked; when it is suspended, at once.
        pool.suspend(true)
    })
    .context("dm-thin")
}

/// btrfs completes the bios of a null_blk in its own workers, and in the tasks that submit.
fn stage06_misses_no_end_of_btrfs() -> Result<()> {
    let disk = NullBlk::new(&[("irqmode", "1"), ("memory_backed", "1"), ("submit_queues", "2")])?;
    shell(&format!(
        "modprobe btrfs; mkfs.btrfs --quiet --force /dev/{0}; mkdir -p /run/btrfs; \
         mount -t btrfs /dev/{0} /run/btrfs",
        disk.name
    ))
    .context("no btrfs: is the package btrfs-progs installed?")?;
    let result = misses_nothing(&[&disk.name], || {
        fio(
            "--filename=/run/btrfs/file --rw=randrw --bs=64k --direct=1 --ioengine=libaio --iodepth=4 \
             --thread --norandommap --size=32M --numjobs=64 --number_ios=20",
        )?;
        shell("umount /run/btrfs").map(|_| ())
    });
    if result.is_err() {
        shell("umount /run/btrfs").ok();
    }
    result
}

/// Stages 06 and 07 measure every bio that is submitted, by ftrace's count, and every request that these
/// disks count, while `load` runs, which ends when the last of them has completed. Where the kernel does
/// not preempt, an interrupt that finds the program at work in a task is all that is missed, and counted.
/// Where it does, both programs must have missed the end, the second one because the interrupt found
/// another kprobe at work; it is counted with both names, and leaves one or two bios without a figure.
fn misses_nothing(disks: &[&str], load: impl FnOnce() -> Result<()>) -> Result<()> {
    let preempts = preempts()?;
    let running = Running::stages(["stage06", "stage07"].map(|stage| (stage, vec!["--quiet"])))?;
    let requests = || disks.iter().map(|disk| disks::requests(disk)).sum::<Result<u64>>();
    let flushes = || disks.iter().map(|disk| disks::flushes(disk)).sum::<Result<u64>>();
    let before = (requests()?, flushes()?);
    let ftrace = Ftrace::new(&[Hook::Function("submit_bio")])?;
    load()?;
    wait_until("the disks are idle", || {
        Ok(disks.iter().map(|disk| disks::in_flight(disk)).sum::<Result<u64>>()? == 0)
    })?;
    let bios = ftrace.events()?.len() as u64;
    let (requests, flushes) = (requests()? - before.0, flushes()? - before.1);
    let outputs = Running::interrupt_all(running)?;
    ensure!(bios >= 1280 && requests >= 640, "{bios} bios, {requests} requests");
    // A flush that the block layer makes is a request, too, which the disk counts apart.
    let expected =
        [("bios completed", bios..=bios), ("requests completed", requests..=requests + flushes)];
    for (output, (what, expected)) in outputs.iter().zip(expected) {
        let output = summary(output);
        let of = |what| count(output, what);
        let (completed, lost) = (of(what)?, of("in flight")? + of("dropped")?);
        ensure!(expected.contains(&(completed + lost)), "{what}, of {expected:?}: {output}");
        let both_missed = !preempts || output.contains(" skipped (io_end() and io_end_probe() ");
        ensure!(lost == 0 || both_missed, "{lost} are lost: {output}");
        ensure!(lost <= 2 * of("skipped")?, "{lost} are lost: {output}");
        ensure!(!preempts || lost > 0 || of("skipped")? == 0, "{output}");
        if lost > 0 {
            judged_weakly(&format!("{lost} of {} are lost, and said to be", completed + lost));
        }
    }
    Ok(())
}
