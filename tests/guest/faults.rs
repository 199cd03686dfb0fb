//! What may happen to a run from outside: killed at any moment, tracefs or the disk gone, clocks
//! set, CPUs taken away, more I/O in flight than a map holds, 100,000 I/Os.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::{
    commands::{instances, loaded, wait_until_unloaded},
    disks::{self, Mapped, NullBlk},
    run::{
        Running, between, count, ensure_none, entries_left, fio, fio_command, max_latency,
        may_skip, program, shell, stage, submitted, wait_until,
    },
};

tests![
    killed_at_any_moment_leaves_nothing,
    tracefs_may_be_unmounted,
    the_disk_may_go,
    stage04_waits_for_a_suspended_disk,
    stage03_sees_what_hangs_from_the_start,
    the_clock_may_be_set,
    a_cpu_may_go_and_come,
    a_hundred_thousand_ios,
    sums_are_exact_when_detached_under_load,
    what_does_not_fit_is_counted,
];

/// SIGKILL, 10 times: all along the way to the hooks, and in the second after they are in place.
fn killed_at_any_moment_leaves_nothing() -> Result<()> {
    let before = loaded()?;
    let start = Instant::now();
    let running = Running::stage("stage06", &[])?;
    let to_tracing = start.elapsed();
    running.interrupt()?;
    for run in 0..10 {
        let name = ["stage02", "stage06", "stage07", "stage09"][run as usize / 2 % 4];
        let mut running = Running::spawn(&mut Command::new(program(name)))?;
        if run % 2 == 0 {
            thread::sleep(to_tracing * run / 10);
        } else {
            running.wait_for("tracing")?;
            thread::sleep(Duration::from_secs(1) * run / 10);
        }
        running.signal(Signal::KILL)?;
        let ended = running.end()?;
        ensure!(ended.code.is_none(), "{name} was not killed: {ended:?}");
        wait_until_unloaded(&before).with_context(|| format!("{name}, run {run}"))?;
        ensure!(instances().len() <= 1, "{name}, run {run}: {:?}", instances());
    }
    stage("stage01", &["--duration", "100ms"])?;
    ensure!(instances().is_empty(), "{:?}", instances());
    wait_until_unloaded(&before)
}

/// The loop that reads from a disk by the hundreds, as long as it is needed.
struct Load(Running);

impl Load {
    fn on(disk: &str) -> Result<Load> {
        let load = format!(
            "fio --name=load --filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
             --rate_iops=300 --thread --time_based --runtime=600 --size=64M --output-format=terse >/dev/null 2>&1"
        );
        Ok(Load(Running::bash(&format!("exec {load}"))?))
    }

    fn stop(self) -> Result<()> {
        self.0.signal(Signal::INT)?;
        self.0.end().map(|_| ())
    }
}

/// Waits for some more I/O on the disk.
fn some_more(disk: &str) -> Result<()> {
    let before = disks::bios(disk)?;
    wait_until("the load", || Ok(disks::bios(disk)? > before + 100))
}

fn tracefs_may_be_unmounted() -> Result<()> {
    let disk = disks::virtio()?;
    for name in ["stage02", "stage03"] {
        let before = disks::bios(&disk)?;
        let running = Running::stage(name, &[])?;
        let load = Load::on(&disk)?;
        some_more(&disk)?;
        shell("umount -l /sys/kernel/tracing; umount -l /sys/kernel/debug/tracing || true")?;
        let result = some_more(&disk).and_then(|()| load.stop());
        let ended = running.signal(Signal::INT).and_then(|()| running.end());
        shell("mount -t tracefs tracefs /sys/kernel/tracing")?;
        result?;
        let ended = ended?;
        ensure!(ended.code == Some(0), "{name}: {ended:?}");
        let reads = disks::bios(&disk)? - before;
        let lines = submitted(&ended.stdout);
        ensure!(lines == reads, "{name}: {lines} lines, {reads} reads: {}", ended.stdout);
        if name == "stage03" {
            let completed = count(&ended.stdout, "bios completed")?;
            ensure!(completed == reads, "{reads} reads: {}", ended.stdout);
        }
        ensure!(instances().is_empty(), "{name} left {:?}", instances());
    }
    Ok(())
}

/// null_blk's power goes off while four dd read from it: what was submitted ends, and so do they.
fn the_disk_may_go() -> Result<()> {
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "20000000")])?;
    let names = ["stage03", "stage07"];
    let running = Running::stages(names.map(|name| (name, vec![])))?;
    let before = disks::requests(&disk.name)?;
    let read = format!("exec dd if=/dev/{} of=/dev/null bs=4k iflag=direct status=none", disk.name);
    let readers: Vec<Running> = (0..4).map(|_| Running::bash(&read)).collect::<Result<_>>()?;
    some_more(&disk.name)?;
    let done = disks::requests(&disk.name)? - before;
    disk.power_off()?;
    for reader in readers {
        reader.end()?;
    }
    let outputs = Running::interrupt_all(running)?;
    ensure!(outputs[0].contains(" trace lines, 0 lost"), "{}", outputs[0]);
    let bios = submitted(&outputs[0]);
    let requests = count(&outputs[1], "requests completed")?;
    ensure!(bios > 100 && count(&outputs[0], "bios completed")? == bios, "{bios}: {}", outputs[0]);
    ensure!((done..=bios).contains(&requests), "{done} to {bios} requests: {}", outputs[1]);
    outputs.iter().try_for_each(|output| ensure_none(output, &["in flight", "dropped"]))
}

/// A disk that can be suspended, and the reading of a sector of it.
fn halting() -> Result<(Mapped, String)> {
    let disk = Mapped::new("halt", &format!("0 131072 linear /dev/{} 0", disks::virtio()?))?;
    let read =
        format!("exec dd if={} of=/dev/null bs=4k count=1 iflag=direct status=none", disk.path());
    Ok((disk, read))
}

/// Starts `read`, and waits until it waits for what it has submitted.
fn halted(read: &str) -> Result<Running> {
    let reader = Running::bash(read)?;
    wait_until("dd's waiting", || {
        let stack = fs::read_to_string(format!("/proc/{}/stack", reader.id()))?;
        Ok(stack.contains("] __blkdev_direct_IO_simple+"))
    })?;
    Ok(reader)
}

fn stage04_waits_for_a_suspended_disk() -> Result<()> {
    let (disk, read) = halting()?;
    for resumed in [true, false] {
        let running = Running::stage("stage04", &[])?;
        shell(&read)?;
        disk.suspend(true)?;
        let reader = halted(&read)?;
        thread::sleep(Duration::from_millis(300));
        if resumed {
            disk.suspend(false)?;
            ensure!(reader.end()?.code == Some(0), "dd failed");
            let output = running.interrupt()?;
            ensure!(max_latency(&output)? > 200_000_000, "the read waited: {output}");
            ensure!(count(&output, "bios completed")? == 2, "{output}");
            ensure!(count(&output, "in flight")? == 0, "{output}");
        } else {
            let output = running.interrupt();
            disk.suspend(false)?;
            reader.end()?;
            let output = output?;
            ensure!(count(&output, "bios completed")? == 1, "{output}");
            ensure!(count(&output, "in flight")? == 1, "{output}");
        }
    }
    Ok(())
}

/// What never comes back is no silence.
fn stage03_sees_what_hangs_from_the_start() -> Result<()> {
    let (disk, read) = halting()?;
    disk.suspend(true)?;
    let running = Running::stage("stage03", &[])?;
    let reader = halted(&read)?;
    let output = running.interrupt();
    disk.suspend(false)?;
    reader.end()?;
    let output = output?;
    ensure!(count(&output, "bios completed")? == 0, "{output}");
    ensure!(count(&output, "in flight")? == 1, "{output}");
    ensure!(!output.contains("was seen"), "{output}");
    Ok(())
}

/// An hour on and back: latencies are of the clock that nobody sets, and so is --duration.
fn the_clock_may_be_set() -> Result<()> {
    let null = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "300000000")])?;
    let read = format!("dd if=/dev/{} of=/dev/null bs=4k count=1 iflag=direct", null.name);
    for step in ["+3600", "-3600"] {
        let start = Instant::now();
        let mut running =
            Running::spawn(Command::new(program("stage04")).args(["--duration", "6s"]))?;
        running.wait_for("tracing")?;
        let tracing = Instant::now();
        shell(&format!(
            "{read} status=none & sleep 0.1; date -s @$(( $(date +%s) {step} )); wait"
        ))?;
        let ended = running.end()?;
        let (all, traced) = (start.elapsed(), tracing.elapsed());
        ensure!(ended.code == Some(0), "{ended:?}");
        ensure!(traced >= Duration::from_secs(3), "{step}: over after {traced:?}");
        let latency = max_latency(&ended.stdout)?;
        let most = all.as_nanos() as u64;
        ensure!((300_000_000..most).contains(&latency), "{step}: {}", ended.stdout);
    }
    Ok(())
}

/// The second CPU goes while it has I/O on its way, and comes back; what it has seen stays.
fn a_cpu_may_go_and_come() -> Result<()> {
    let online = |on: bool| {
        fs::write("/sys/devices/system/cpu/cpu1/online", if on { "1" } else { "0" })
            .context("cpu1/online")
    };
    let disk = disks::virtio()?;
    let slow = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "900000000")])?;
    let before = disks::bios(&disk)? + disks::bios(&slow.name)?;
    let running = [Running::stage("stage04", &[])?, Running::stage("stage07", &[])?];
    let load = Load::on(&disk)?;
    let result = (|| {
        some_more(&disk)?;
        // It ends on the CPU that it began on, and is the slowest.
        let read = format!("dd if=/dev/{} of=/dev/null bs=4k count=1 iflag=direct", slow.name);
        shell(&format!("taskset -c 1 {read} status=none"))?;
        for _ in 0..2 {
            online(false)?;
            some_more(&disk)?;
            online(true)?;
            some_more(&disk)?;
        }
        online(false)
    })();
    load.stop()?;
    let completed = disks::bios(&disk)? + disks::bios(&slow.name)? - before;
    let outputs: Vec<Result<String>> = running.into_iter().map(Running::interrupt).collect();
    online(true)?;
    result?;
    for output in outputs {
        let output = output?;
        let what = if output.contains("bios") { "bios completed" } else { "requests completed" };
        ensure!(count(&output, what)? == completed, "{completed} completed: {output}");
        ensure_none(&output, &["in flight", "dropped"])?;
        ensure!(max_latency(&output)? >= 900_000_000, "what CPU 1 saw is gone: {output}");
    }
    Ok(())
}

/// The maps have room for 16,384 I/Os, and 20,000 reads wait for a suspended disk; of requests, a disk has
/// not so many on their way, so its map is made smaller.
fn what_does_not_fit_is_counted() -> Result<()> {
    let (disk, _) = halting()?;
    let stage = Running::stage("stage04", &[])?;
    let before = disks::bios(&disk.disk()?)?;
    disk.suspend(true)?;
    let load = fio_command(&format!(
        "--filename={} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=10000 --numjobs=2 \
         --number_ios=10000 --norandommap --thread",
        disk.path()
    ));
    let load = Running::bash(&format!("exec {load} >/dev/null"))?;
    wait_until("fio has submitted all", || {
        let stacks = shell(&format!("cat /proc/{}/task/*/stack", load.id()))?;
        Ok(stacks.matches("] read_events+").count() == 2)
    })?;
    disk.suspend(false)?;
    ensure!(load.end()?.code == Some(0), "fio failed");
    let done = disks::bios(&disk.disk()?)? - before;
    ensure!(done == 20_000, "{done} reads");
    // Of each, device mapper submits a clone by another way.
    accounted(&stage.interrupt()?, "bios", done, done - 16_384, done)?;

    let disk = [("irqmode", "2"), ("completion_nsec", "50000000"), ("hw_queue_depth", "128")];
    let disk = NullBlk::new(&disk)?;
    let stage = Running::stage("stage00", &["--in-flight", "8", "-t"])?;
    let before = disks::bios(&disk.name)?;
    fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=32 \
         --numjobs=2 --number_ios=1000 --norandommap",
        disk.name
    ))?;
    accounted(&stage.interrupt()?, "requests", disks::bios(&disk.name)? - before, 500, 0)
}

/// Checks that what was done is completed or dropped, at least so much of it, and that what is dropped is
/// unmatched at its end, as others are that never began.
fn accounted(output: &str, what: &str, done: u64, least: u64, others: u64) -> Result<()> {
    let completed = count(output, &format!("{what} completed"))?;
    let (dropped, unmatched) = (count(output, "dropped")?, count(output, "unmatched")?);
    ensure!(dropped >= least && completed > 0, "not {least} dropped: {output}");
    ensure!(completed + dropped == done, "{done} reads: {output}");
    ensure!(unmatched == dropped + others, "ends without a start: {output}");
    ensure_none(output, &["in flight"])
}

/// Stages that print no lines, at the same time, over 100,000 reads by 16 threads of a null_blk that completes
/// in an interrupt, as disks do: their memory does not grow, and no map is left with an entry.
fn a_hundred_thousand_ios() -> Result<()> {
    const IOS: u64 = 100_000;
    let settings = [("irqmode", "2"), ("completion_nsec", "10000"), ("submit_queues", "2")];
    let disk = NullBlk::new(&settings)?;
    let names = ["stage00", "stage06", "stage07", "stage11"];
    let options = |name| if name == "stage00" { vec!["-t"] } else { vec![] };
    let running = Running::stages(names.map(|name| (name, options(name))))?;
    // Anonymous memory, kB: what the tool itself has taken.
    let memory = |running: &Running| -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", running.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        Ok(line.context("no RssAnon")?.trim().trim_end_matches(" kB").parse()?)
    };
    let before = disks::bios(&disk.name)?;
    let mut load = Running::bash(&format!(
        "exec fio --name=t --filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=32 \
         --iodepth_batch=8 --iodepth_batch_complete_min=8 --numjobs=16 --number_ios={} --norandommap --thread \
         --gtod_reduce=1 --output-format=terse >/dev/null",
        disk.name,
        IOS / 16
    ))?;
    let done = || Ok::<_, anyhow::Error>(disks::bios(&disk.name)? - before);
    wait_until("the first I/Os", || Ok(done()? > 10_000))?;
    let early: Vec<u64> = running.iter().map(memory).collect::<Result<_>>()?;
    // An emulated guest that shares its CPU needs a minute and more; the launcher ends what hangs.
    load.wait_at_most(Duration::from_secs(600))?;
    let late: Vec<u64> = running.iter().map(memory).collect::<Result<_>>()?;
    let (done, left) = (done()?, entries_left()?);
    ensure!(done == IOS, "{done} reads");
    let outputs = Running::interrupt_all(running)?;
    ensure!(left == 0 || may_skip()?, "{left} entries are left in the maps: {}", outputs.concat());
    for (((output, name), early), late) in outputs.into_iter().zip(names).zip(early).zip(late) {
        ensure!(late <= early + 256, "{name} has taken {early} kB, then {late}");
        let what = match name {
            "stage00" | "stage07" => "requests completed",
            _ => "bios completed",
        };
        // An end that was skipped leaves its start behind: in flight, or dropped with the next one.
        let lost = count(&output, "dropped")? + count(&output, "in flight")?;
        ensure!(count(&output, what)? + lost == done, "{name}: {done} reads: {output}");
        ensure!(lost == 0 || may_skip()? && count(&output, "skipped")? > 0, "{name}: {output}");
    }
    Ok(())
}

/// After the programs have been detached, none of them is running any more: what started has
/// completed or is in flight, to the last bio, and each has its lines. With one CPU, too, where
/// membarrier(2) waits for nothing.
fn sums_are_exact_when_detached_under_load() -> Result<()> {
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
