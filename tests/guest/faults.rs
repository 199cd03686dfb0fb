//! What may happen to a run: I/O that hangs, clocks that are set, full maps, the end during a load.

use crate::{pagecache::new_file, prelude::*};

tests![
    what_hangs_is_in_flight,
    the_clock_may_be_set,
    sums_are_exact_when_detached_under_load,
    what_does_not_fit_is_counted,
    a_module_that_is_gone_names_no_function,
];

/// A disk that can be suspended.
fn halting() -> Result<Mapped> {
    Mapped::new("halt", &format!("0 131072 linear /dev/{} 0", disks::virtio()?))
}

/// What never comes back is no silence. Stage 04 has seen a read before, stage 03 has not.
fn what_hangs_is_in_flight() -> Result<()> {
    let disk = halting()?;
    let read = reads(&disk.path(), 1);
    let stage04 = Running::stage("stage04", &[])?;
    shell(&read)?;
    disk.suspend(true)?;
    let stage03 = Running::stage("stage03", &[])?;
    let reader = Running::bash(&format!("exec {read}"))?;
    reader.waits_in("] __blkdev_direct_IO_simple+")?;
    let outputs = Running::interrupt_all(vec![stage03, stage04]);
    disk.suspend(false)?;
    reader.end_well()?;
    for (output, completed) in outputs?.into_iter().zip([0, 1]) {
        let counts = (count(&output, "bios completed")?, count(&output, "in flight")?);
        ensure!(counts == (completed, 1), "not {completed} completed, 1 in flight: {output}");
        ensure!(!output.contains("was seen"), "{output}");
    }
    Ok(())
}

/// An hour on and back: latencies are of the clock that nobody sets, and so is --duration. The second run begins
/// when the first one has seen the first step.
fn the_clock_may_be_set() -> Result<()> {
    let null = NullBlk::timer("test", 300, "")?;
    let (read, mut runs) = (reads(&null.name, 1), Vec::new());
    for step in ["+3600", "-3600"] {
        let start = Instant::now();
        let mut running = Running::stage("stage04", &["--duration", "6s"])?;
        let tracing = Instant::now();
        shell(&format!("{read} & sleep 0.1; date -s @$(( $(date +%s) {step} )); wait"))?;
        let (traced, still) = (tracing.elapsed(), running.runs()?);
        ensure!(still || traced >= Duration::from_secs(3), "{step}: over after {traced:?}");
        runs.push((step, start, running));
    }
    for (step, start, running) in runs {
        let (output, most) = (running.end_well()?.stdout, start.elapsed().as_nanos() as u64);
        let latency = max_latency(&output)?;
        ensure!((300_000_000..most).contains(&latency), "{step}: {output}");
    }
    Ok(())
}

/// The maps have room for 16,384 I/Os, and 20,000 reads wait for a suspended disk; of requests, a disk has
/// not so many on their way, so its map is made smaller.
fn what_does_not_fit_is_counted() -> Result<()> {
    let disk = halting()?;
    let stage = Running::stage("stage04", &[])?;
    let before = disks::bios(&disk.disk()?)?;
    disk.suspend(true)?;
    let options = "--iodepth=10000 --numjobs=2 --number_ios=10000";
    let load = fio_direct_command(&disk.path(), options);
    let load = Running::bash(&format!("exec {load} >/dev/null"))?;
    wait_until("fio has submitted all", || {
        let stacks = shell(&format!("cat /proc/{}/task/*/stack", load.id()))?;
        Ok(stacks.matches("] read_events+").count() == 2)
    })?;
    disk.suspend(false)?;
    load.end_well()?;
    let done = disks::bios(&disk.disk()?)? - before;
    ensure!(done == 20_000, "{done} reads");
    // Of each, device mapper submits a clone by another way.
    accounted(&stage.interrupt()?, "bios", done, done - 16_384, done)?;

    let disk = NullBlk::timer("test", 50, "hw_queue_depth=128")?;
    let before = disks::bios(&disk.name)?;
    let load = || fio_direct(&disk.name, "--iodepth=32 --numjobs=2 --number_ios=1000");
    let (_, output) = beside("stage00", &["--in-flight", "8", "-t"], load)?;
    accounted(&output, "requests", disks::bios(&disk.name)? - before, 500, 0)
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

/// After the programs have been detached, none runs any more: what started has completed or is in
/// flight, to the last bio, and has its lines. With one CPU, too, where membarrier(2) waits for nothing.
fn sums_are_exact_when_detached_under_load() -> Result<()> {
    let disk = NullBlk::timer("test", 2, "")?;
    let options = "--iodepth=2 --numjobs=4 --time_based --runtime=600 --rate_iops=40";
    let load = fio_direct_command(&disk.name, options);
    let _load = Running::bash(&format!("exec {load} >/dev/null"))?;
    for cpu in ["1", "0"] {
        let _cpu = Setting::new("/sys/devices/system/cpu/cpu1/online", cpu)?;
        for _ in 0..2 {
            let running = Running::stage("stage03", &[])?;
            let before = disks::bios(&disk.name)?;
            wait_until("the load", || Ok(disks::bios(&disk.name)? > before + 40))?;
            let output = running.interrupt()?;
            let lost = between(&output, " trace lines, ", " lost")?;
            ensure!(lost == "0", "{lost} lines were lost: the load is too fast");
            let (completed, started) = (
                count(&output, "bios completed")?,
                exercise_loads::calls(&output, "submit_bio(")?.len() as u64,
            );
            let sum = completed + count(&output, "in flight")?;
            ensure!(started == sum && sum >= 40, "{started} started, not {sum}: {output}");
            let durations = output.matches("time duration: ").count() as u64;
            ensure!(completed == durations, "{durations} lines: {output}");
            ensure_none(&output, &["dropped", "split"])?;
        }
    }
    Ok(())
}

/// The module of loop devices is unloaded while their stacks are kept, and others are loaded, perhaps in its place:
/// no function of theirs is named, nor one of what lies before it.
fn a_module_that_is_gone_names_no_function() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = new_file(&mounted, "loop", 4 * MIB)?;
    let device = shell(&format!("modprobe loop; losetup --show --find {}", file.path))?;
    let device = device.trim();
    let loaded = || -> Result<HashSet<String>> {
        let modules = fs::read_to_string("/proc/modules")?;
        Ok(modules.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect())
    };
    let names = |output: &str| -> HashSet<String> {
        let stack = output.lines().filter(|line| line.starts_with("=> "));
        let modules = stack.filter_map(|line| line.rsplit_once(" [")?.1.strip_suffix(']'));
        modules.filter(|name| *name != "bpf").map(str::to_owned).collect()
    };
    let read =
        format!("echo 3 >/proc/sys/vm/drop_caches; dd if={device} of=/dev/null bs=64k count=4");
    let who = [("stage06", vec![]), ("slow_io", vec!["--who", "stack", "--min", "100s"])];
    // As long as it is there, it has a name.
    let running = Running::stages(who.clone())?;
    shell(&read)?;
    let outputs = Running::interrupt_all(running)?;
    ensure!(names(&outputs[1]).contains("loop"), "the test does not test: {outputs:?}");
    ensure!(!outputs.concat().contains("no name"), "{outputs:?}");

    let running = Running::stages(who)?;
    shell(&read)?;
    let before = loaded()?;
    shell(&format!("losetup --detach {device}"))?;
    wait_until("the end of the module", || Ok(shell("rmmod loop 2>/dev/null").is_ok()))?;
    let new: Vec<&str> = ["btrfs", "f2fs", "xfs", "udf"]
        .into_iter()
        .filter(|name| !before.contains(*name))
        .collect();
    shell(&format!("modprobe -a {}", new.join(" ")))?;
    let came: HashSet<String> = loaded()?.difference(&before).cloned().collect();
    ensure!(!came.is_empty(), "no module was loaded: the test does not test");
    let outputs = Running::interrupt_all(running);
    shell(&format!("modprobe -r -a {}", new.join(" ")))?;
    let outputs = outputs?;
    ensure!(outputs[1].contains(" (no name; unloaded meanwhile: loop)"), "{outputs:?}");
    for output in outputs {
        let wrong: Vec<String> = names(&output).difference(&before).cloned().collect();
        ensure!(wrong.is_empty() && !names(&output).contains("loop"), "{wrong:?}: {output}");
    }
    Ok(())
}
