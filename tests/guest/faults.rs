//! What may happen to a run from outside: killed at any moment, tracefs or the disk gone, clocks
//! set, CPUs taken away, more I/O in flight than a map holds, a million I/Os.

use std::{
    fs::{self, File},
    os::{fd::AsRawFd, unix::fs::FileExt},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::{
    commands::{instances, loaded, wait_until_unloaded},
    disks::{self, Mapped, NullBlk},
    pagecache,
    run::{
        Running, count, ensure_none, fio, judged_weakly, max_latency, may_skip, preempts, program,
        shell, stage, submitted, wait_until,
    },
};

tests![
    killed_at_any_moment_leaves_nothing,
    tracefs_may_be_unmounted,
    stage03_survives_the_disk => || the_disk_may_go("stage03", "bios"),
    stage07_survives_the_disk => || the_disk_may_go("stage07", "requests"),
    stage04_waits_for_a_suspended_disk,
    stage03_sees_what_hangs_from_the_start,
    the_clock_may_be_set,
    a_cpu_may_go_and_come,
    a_million_ios,
    ends_in_tasks_are_measured_or_counted,
    stage00_counts_what_does_not_fit => || what_does_not_fit("stage00", "requests"),
    stage04_counts_what_does_not_fit => || what_does_not_fit("stage04", "bios"),
    stage07_counts_what_does_not_fit => || what_does_not_fit("stage07", "requests"),
    stage08_counts_refused_reads => || counts_refused_reads("stage08"),
    stage09_counts_refused_reads => || counts_refused_reads("stage09"),
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
    for name in ["stage02", "stage04"] {
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
        if name == "stage04" {
            let completed = count(&ended.stdout, "bios completed")?;
            ensure!(completed == reads, "{reads} reads: {}", ended.stdout);
        }
        ensure!(instances().is_empty(), "{name} left {:?}", instances());
    }
    Ok(())
}

/// null_blk's power goes off while four dd read from it: what was submitted ends, and so do they.
fn the_disk_may_go(name: &str, what: &str) -> Result<()> {
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "20000000")])?;
    let running = Running::stage(name, &[])?;
    let read = format!("dd if=/dev/{} of=/dev/null bs=4k iflag=direct status=none", disk.name);
    let readers: Vec<Running> =
        (0..4).map(|_| Running::bash(&format!("exec {read}"))).collect::<Result<_>>()?;
    some_more(&disk.name)?;
    disk.power_off()?;
    for reader in readers {
        reader.end()?;
    }
    let output = running.interrupt()?;
    ensure!(output.contains(" trace lines, 0 lost"), "{output}");
    let begun = match what {
        "bios" => submitted(&output),
        _ => output.matches("printk: blk_mq_start_request(rq=").count() as u64,
    };
    ensure!(begun > 100, "{begun} {what}: {output}");
    ensure!(count(&output, &format!("{what} completed"))? == begun, "{begun} {what}: {output}");
    ensure_none(&output, &["in flight", "dropped"])?;
    Ok(())
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
            Running::spawn(Command::new(program("stage04")).args(["--quiet", "--duration", "6s"]))?;
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
    let running =
        [Running::stage("stage04", &["--quiet"])?, Running::stage("stage07", &["--quiet"])?];
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

/// 64 reads on their way at once, and a map for 8 only.
fn what_does_not_fit(name: &str, what: &str) -> Result<()> {
    let disk = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "50000000"),
        ("hw_queue_depth", "128"),
    ])?;
    let mut arguments = vec!["--in-flight", "8"];
    arguments.extend((name == "stage07").then_some("--quiet"));
    let running = Running::stage(name, &arguments)?;
    let before = disks::bios(&disk.name)?;
    fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=32 \
         --numjobs=2 --number_ios=1000 --norandommap",
        disk.name
    ))?;
    let done = disks::bios(&disk.name)? - before;
    let output = running.interrupt()?;
    let completed = count(&output, &format!("{what} completed"))?;
    let dropped = count(&output, "dropped")?;
    ensure!(done == 2000, "{done} reads");
    ensure!(dropped > 500 && completed > 0, "not much to count: {output}");
    ensure!(completed + dropped == done, "{done} reads: {output}");
    // Where stage 07 has two programs at the end, the kprobe counts them, and the kernel skips it where
    // it interrupts the one at the start.
    let may_miss = name == "stage07" && preempts()?;
    let unmatched = count(&output, "unmatched")?;
    let least = if may_miss { dropped / 2 } else { dropped };
    ensure!((least..=dropped).contains(&unmatched), "ends without a start: {output}");
    if unmatched < dropped {
        judged_weakly(&format!("{unmatched} of {dropped} ends without a start were counted"));
    }
    ensure_none(&output, &["in flight"])?;
    Ok(())
}

/// preadv2() of 4 KiB that is not to wait; of what is not in the page cache, it gets EAGAIN.
fn read_without_waiting(file: &File, offset: i64) -> isize {
    let mut page = [0_u8; 4096];
    let iov = libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: page.len() };
    // SAFETY: the one buffer that `iov` names outlives the call.
    unsafe { libc::preadv2(file.as_raw_fd(), &iov, 1, offset, libc::RWF_NOWAIT) }
}

/// A read that would have had to wait is neither a hit nor a miss.
fn counts_refused_reads(name: &str) -> Result<()> {
    // So slow that it cannot have the page there before the call returns.
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "500000000")])?;
    let file = File::open(format!("/dev/{}", disk.name))?;
    let offset = 16 << 20;
    let me = std::process::id().to_string();
    let pid = (name == "stage09").then_some(me.as_str());
    let running = Running::stage(name, &pid.into_iter().collect::<Vec<_>>())?;
    let cold = read_without_waiting(&file, offset);
    file.read_exact_at(&mut [0; 4096], offset as u64)?;
    let warm = read_without_waiting(&file, offset);
    let output = running.interrupt()?;
    ensure!((cold, warm) == (-1, 4096), "{cold} bytes, then {warm}");
    ensure!(count(&output, "not judged")? == 1, "{output}");
    let events = pagecache::events(&output)?;
    ensure!(!events.iter().any(|event| event.contains(" = -11:")), "{output}");
    if name == "stage09" {
        ensure!(count(&output, "reads through the page cache")? == 2, "{output}");
        ensure!(output.contains("[Total 2 Hit 1 miss 1]"), "{output}");
    }
    Ok(())
}

/// Where the kernel is preemptible and newest. Elsewhere, 100,000 show the same sooner.
fn a_million_ios() -> Result<()> {
    let ios = if is_newest()? { 1_000_000 } else { 100_000 };
    // Completes in an interrupt, as disks do.
    many_ios(&[("irqmode", "2"), ("completion_nsec", "10000")], ios, may_skip()?)
}

/// null_blk that completes in the task that submits. On a preemptible kernel, this task may lose the
/// CPU in the middle of an fentry program: what the others complete meanwhile is skipped.
fn ends_in_tasks_are_measured_or_counted() -> Result<()> {
    many_ios(&[("irqmode", "1")], 48_000, may_skip()? || is_newest()?)
}

fn is_newest() -> Result<bool> {
    Ok(fs::read_to_string("/proc/sys/kernel/osrelease")?.starts_with("7."))
}

/// All stages that can be quiet, at the same time, over so many O_DIRECT reads of null_blk by 16
/// threads.
fn many_ios(null: &[(&str, &str)], ios: u64, may_skip: bool) -> Result<()> {
    let disk = NullBlk::new(&[null, &[("submit_queues", "2")]].concat())?;
    let names = ["stage00", "stage04", "stage05", "stage06", "stage07", "stage08", "stage09"];
    let option = |name| if name == "stage00" { "-t" } else { "--quiet" };
    let running = Running::stages(names.map(|name| (name, vec![option(name)])))?;
    // Anonymous memory, kB: what the tool itself has taken.
    let memory = |running: &Running| -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", running.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        Ok(line.context("no RssAnon")?.trim().trim_end_matches(" kB").parse()?)
    };
    let before = disks::bios(&disk.name)?;
    let mut load = Running::bash(&format!(
        "exec fio --name=t --filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=32 \
             --iodepth_batch=8 --iodepth_batch_complete_min=8 --numjobs=16 --number_ios={} --norandommap --thread --gtod_reduce=1 --output-format=terse >/dev/null",
        disk.name,
        ios / 16
    ))?;
    let done = || Ok::<_, anyhow::Error>(disks::bios(&disk.name)? - before);
    wait_until("the first I/Os", || Ok(done()? > 10_000))?;
    let early: Vec<u64> = running.iter().map(memory).collect::<Result<_>>()?;
    // An emulated guest that shares its CPU needs ten minutes for a million; the launcher ends what hangs.
    load.wait_at_most(Duration::from_secs(1800))?;
    let late: Vec<u64> = running.iter().map(memory).collect::<Result<_>>()?;
    let done = done()?;
    ensure!(done == ios, "{done} reads");
    let mut left = Vec::new();
    for map in serde_json::from_str::<serde_json::Value>(&shell("bpftool map list --json")?)?
        .as_array()
        .context("bpftool")?
        .iter()
        .filter(|map| map["name"] == "starts")
    {
        left.push(shell(&format!("bpftool map dump id {} --json", map["id"]))?);
    }
    let outputs = Running::interrupt_all(running)?;
    for left in left {
        ensure!(
            may_skip || left.trim() == "[]",
            "left in a map: {left:.300}\n{}",
            outputs.concat()
        );
    }
    for (((output, name), early), late) in outputs.into_iter().zip(names).zip(early).zip(late) {
        ensure!(late <= early + 256, "{name} has taken {early} kB, then {late}");
        // Stages 06 and 07 have a second program where the kernel preempts.
        let may_skip = may_skip && !["stage06", "stage07"].contains(&name);
        let what = match name {
            // What they count are reads through the page cache, and these are not.
            "stage08" | "stage09" => continue,
            "stage00" | "stage07" => "requests completed",
            _ => "bios completed",
        };
        let completed = count(&output, what)?;
        // An end that was skipped leaves its start behind: in flight, or dropped with the next one.
        let lost = count(&output, "dropped")? + count(&output, "in flight")?;
        ensure!(completed + lost == done, "{name}: {done} reads: {output}");
        ensure!(may_skip || lost == 0, "{name}: {output}");
        if lost > 0 {
            judged_weakly(&format!("{name} says that it lost {lost} of {done}"));
        }
        ensure!((lost > 0) == (count(&output, "skipped")? > 0), "{name}: {output}");
        let said = format!(" ns (of {completed} measured, {lost} not)\n");
        let says = output.contains(" measured, ");
        ensure!(
            says == (lost > 0) && (!says || name == "stage00" || output.contains(&said)),
            "{name}: {output}"
        );
    }
    Ok(())
}
