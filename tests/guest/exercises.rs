//! Judges of the exercises that are no stage, and of every attempt. They run for `cargo lesson` only,
//! with the learner's program in the place of `exercise` or of a stage.

use std::{collections::BTreeMap, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use libbpf_rs::MapCore;

use crate::{
    commands::{instances, loaded, wait_until_unloaded},
    disks::{self, NullBlk},
    maps::{Maps, insert},
    mixed::{self, Direct, Mixed, Ram, split_out_of_order},
    pagecache,
    run::{
        Running, compared, count, durations, ensure_none, fio, not_judged, shell, skipped_some,
        stage, subject, summary,
    },
};

tests![
    exercise_leaves_nothing,
    exercise_accounts,
    exercise_in_flight,
    exercise_disk,
    exercise_disk_refuses,
    exercise_inode => pagecache::exercise_inode,
    exercise_io_uring => pagecache::exercise_io_uring,
    exercise_may_ask_again => pagecache::exercise_may_ask_again,
    exercise_histogram,
    exercise_histogram_of_two_cpus,
    exercise_bytes,
];

/// The name of a program that takes the place of no stage.
pub const EXERCISE: &str = "exercise";

/// After Ctrl-C, the attempt exits with 0, and nothing of it is left in the kernel.
fn exercise_leaves_nothing() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let before = loaded()?;
    // Some exercises need something to filter by: a disk, a file.
    let arguments = [&[][..], &["vda"], &["/proc/self/exe"]];
    let mut tries = arguments.iter().map(|arguments| Running::stage(&subject, arguments));
    let is_answer = |started: &Result<Running>| match started {
        Ok(_) => true,
        Err(error) => subject != EXERCISE || error.to_string().contains("verifier"),
    };
    let running = tries
        .find(is_answer)
        .context("it does not start without an argument, nor with a disk or a file")??;
    ensure!(!loaded()?.is_subset(&before), "it says that it traces, and no BPF program is loaded");
    running.interrupt()?;
    wait_until_unloaded(&before)?;
    ensure!(instances().is_empty(), "these tracefs instances are left: {:?}", instances());
    compared("bpftool lists the same programs, maps and links as before");
    Ok(())
}

fn read(disk: &str, count: u64) -> Result<()> {
    let dd = format!("dd if=/dev/{disk} of=/dev/null bs=4k count={count} iflag=direct status=none");
    shell(&dd).map(|_| ())
}

/// Every bio is measured, split, dropped or in flight, and counted once. That an address is taken
/// happens in earnest where a completion was not seen; here the judge takes it.
fn exercise_accounts() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    // First: to find it, a bio is made that is never submitted.
    let virtio = disks::virtio()?;
    let mixed = Mixed::new("test")?;
    let maps = Maps::new();
    let running = Running::stage(&subject, &[])?;
    let ftrace = mixed::bios()?;
    let (did, split_up) = (mixed.run_under(&ftrace)?, split_out_of_order(&virtio, &ftrace)?);
    let mut disk = Direct::open(&mixed.disk.name)?;
    let mut read = || -> Result<u64> {
        disk.read(4096)?;
        let events = ftrace.events()?;
        let submitted: Vec<_> = events.iter().filter(|event| event.name == "submit_bio").collect();
        ensure!(submitted.len() == 1, "{} bios of a read", submitted.len());
        Ok(u64::from_str_radix(submitted[0].argument.trim_start_matches("0x"), 16)?)
    };
    // The bio of such a read is on the thread's stack, whose start changes by up to 1 KiB.
    let near = read()?;
    let taken: Vec<u64> = (-64..=64).map(|n: i64| near.wrapping_add_signed(16 * n)).collect();
    maps.ensure_atomic()?;
    let starts = maps.named("starts")?;
    let left = starts.keys().count();
    ensure!(left == 0, "all bios have completed, and {left} entries are left in your map `starts`");
    let inserted = insert(&starts, taken.iter().copied())?;
    let (mut reads, mut bio) = (1, 0);
    while !taken.contains(&bio) {
        ensure!(reads < 10, "no read has its bio near {near:#x}: the test does not test");
        bio = read()?;
        reads += 1;
    }
    let output = running.interrupt()?;
    if skipped_some(&output)? {
        return not_judged("programs were skipped, as they may be on a real-time kernel");
    }
    let bios = (did.submitted.len() + split_up.submitted.len()) as u64 + reads;
    let of = |what| count(&output, what);
    let (completed, split) = (of("bios completed")?, of("split")?);
    let split_bios = split_up.submitted.len() as u64 + Mixed::SPLIT;
    let what = format!(
        "ftrace saw {bios} bios (reads, writes, a flush, of a disk and its partition), of which the \
         block layer split {split_bios}; the address of one was taken"
    );
    ensure!(
        completed + split == bios - 1 && (1..=split_bios).contains(&split),
        "{what}: {completed} completed, {split} split: {output}"
    );
    let lines = durations(&output)?.len() as u64;
    ensure!(lines == completed, "{lines} durations, {completed} completed: {output}");
    let (left, parts) = (inserted - 1, did.parts + split_up.parts);
    for (what, expected, why) in [
        ("dropped", 2, "the address of one bio was taken, and neither is measured".to_owned()),
        ("in flight", left, format!("the judge left {left} entries in your map")),
        ("unmatched", parts + 1, format!("{parts} parts, and the bio that was dropped")),
    ] {
        let yours = of(what)?;
        ensure!(yours == expected, "{yours} {what}, and has to be {expected} ({why}): {output}");
    }
    ensure_none(&output, &[])?;
    compared(&format!("{bios} bios: you completed {completed}, split {split}, and dropped one"));
    Ok(())
}

/// Two reads at once, and a map for one.
fn exercise_in_flight() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "300000000")])?;
    let running = Running::stage(&subject, &["--quiet", "--in-flight", "1"])?;
    fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=2 \
         --iodepth_batch=2 --iodepth_batch_complete_min=2 --number_ios=2 --thread",
        disk.name
    ))?;
    let output = running.interrupt()?;
    for (what, expected) in
        [("bios completed", 1), ("in flight", 0), ("dropped", 1), ("unmatched", 1)]
    {
        let yours = count(&output, what)?;
        ensure!(
            yours == expected,
            "two reads at once, --in-flight 1: {yours} {what}, and has to be {expected}: {output}"
        );
    }
    compared("two reads at once, and --in-flight 1: you measured one, and dropped one");
    Ok(())
}

/// Beside the disk there is another one of its driver, and its own partition, which a second run of the
/// attempt filters by.
fn exercise_disk() -> Result<()> {
    // Its minor number, 0, is that of the first disk of any driver.
    let data = disks::data()?;
    let (this, other) = (Mixed::new("test")?, Mixed::new("other")?);
    let (disk, partition) = (&this.disk.name, &this.partition);
    let running =
        Running::stages([(EXERCISE, vec![disk.as_str()]), (EXERCISE, vec![partition.as_str()])])?;
    let did = this.run()?;
    other.run()?;
    read(&data, 30)?;
    let outputs = Running::interrupt_all(running)?;
    if skipped_some(&outputs[0])? || skipped_some(&outputs[1])? {
        return not_judged("programs were skipped, as they may be on a real-time kernel");
    }
    let mut measured = 0;
    for (output, disk, bios, split, parts) in [
        (&outputs[0], disk, Mixed::OF_DISK, Mixed::SPLIT, did.parts),
        (&outputs[1], partition, Mixed::OF_PARTITION, 0, 0),
    ] {
        let output = summary(output);
        let of = |what| count(output, what);
        let (completed, yours) = (of("bios completed")?, of("split")?);
        ensure!(
            completed + yours == bios && yours <= split,
            "{bios} bios were submitted to {disk}, of which {split} were split; you count {completed} \
             completed and {yours} split: {output}"
        );
        let unmatched = of("unmatched")?;
        ensure!(
            unmatched == parts,
            "{disk}: {unmatched} unmatched, and has to be {parts}, the parts: {output}"
        );
        ensure_none(output, &["in flight", "dropped"]).with_context(|| disk.clone())?;
        compared(&format!("{bios} bios of {disk}; you completed {completed}, split {yours}"));
        measured += completed;
    }
    // Each of the two runs sees the lines of both.
    let lines = durations(&outputs[0])?.len() as u64;
    ensure!(lines == measured, "{lines} durations of {measured} bios: {}", outputs[0]);
    Ok(())
}

fn exercise_disk_refuses() -> Result<()> {
    let ended = stage(EXERCISE, &["no-such-disk", "--duration", "1s"])?;
    ensure!(matches!(ended.code, Some(1 | 2)), "exit code {:?}: {}", ended.code, ended.stderr);
    ensure!(ended.stderr.contains("no-such-disk"), "the message: {}", ended.stderr);
    compared(&format!("you said: {}", ended.stderr.trim()));
    Ok(())
}

/// The histograms of an output: for each disk, the slots by their lower ends, with how many bios.
fn histograms(output: &str) -> Result<BTreeMap<String, BTreeMap<u64, u64>>> {
    let mut disks = BTreeMap::<String, BTreeMap<u64, u64>>::new();
    let mut disk = None;
    for line in output.lines() {
        if let Some(name) = line.strip_prefix("disk ") {
            disk =
                Some(disks.entry(name.split(' ').next().unwrap_or_default().into()).or_default());
        } else if let Some((low, rest)) = line.split_once(" -> ") {
            let Ok(low) = low.trim().parse::<u64>() else { continue };
            let slots = disk.as_mut().with_context(|| format!("no disk before {line:?}"))?;
            let mut words = rest.split_whitespace();
            let mut number = || words.find_map(|word| word.parse::<u64>().ok());
            let (high, bios) = (number().context("no end")?, number().context("no count")?);
            ensure!(low.is_power_of_two() && high == 2 * low - 1, "odd slot: {line}");
            ensure!(slots.insert(low, bios).is_none(), "a slot comes twice: {line}");
        }
    }
    Ok(disks)
}

fn exercise_histogram() -> Result<()> {
    const TIMER: u64 = 1_000_000;
    let (one, other) = (Mixed::new("test")?, Mixed::new("other")?);
    let running = Running::stage(EXERCISE, &[])?;
    one.run()?;
    read(&other.disk.name, 40)?;
    let output = running.interrupt()?;
    if skipped_some(&output)? {
        return not_judged("programs were skipped, as they may be on a real-time kernel");
    }
    let disks = histograms(&output)?;
    for (disk, bios, slow) in [
        (&one.disk.name, Mixed::OF_DISK, Mixed::OF_DISK),
        // A flush takes no time: the disk has no cache.
        (&one.partition, Mixed::OF_PARTITION, Mixed::OF_PARTITION - 1),
        (&other.disk.name, 40, 40),
    ] {
        let slots = disks.get(disk).with_context(|| format!("no `disk {disk}` in {output}"))?;
        let sum: u64 = slots.values().sum();
        ensure!(sum == bios, "{sum} bios of {disk} in the slots, it did {bios}: {output}");
        let slots = slots.iter().filter(|(low, _)| **low * 2 > TIMER);
        let above: u64 = slots.map(|(_, bios)| bios).sum();
        ensure!(
            above >= slow,
            "{slow} bios of {disk} took 1 ms or more, of which {above} are in such slots: {output}"
        );
        compared(&format!("the disk {disk} did {bios} bios; your slots have {sum}"));
    }
    let (mut printed, mut judged) = (BTreeMap::<u64, u64>::new(), BTreeMap::new());
    for (low, bios) in disks.values().flatten() {
        *printed.entry(*low).or_default() += bios;
    }
    for duration in durations(&output)? {
        *judged.entry(1_u64 << duration.ilog2()).or_default() += 1;
    }
    ensure!(printed == judged, "slots {printed:?}, from the event lines {judged:?}: {output}");
    ensure_none(&output, &["in flight", "dropped", "unmatched"])
}

/// Two CPUs add to the same slots at once.
fn exercise_histogram_of_two_cpus() -> Result<()> {
    let (ram, maps) = (Ram::new()?, Maps::new());
    let running = Running::stage(EXERCISE, &["--quiet"])?;
    let reads = ram.race(RACE)?;
    maps.ensure_atomic()?;
    let output = running.interrupt()?;
    let disks = histograms(&output)?;
    let slots = disks.get(Ram::NAME).with_context(|| format!("no {}: {output}", Ram::NAME))?;
    let sum: u64 = slots.values().sum();
    ensure!(sum == reads, "two CPUs did {reads} bios at once, your slots have {sum}: {output}");
    compared(&format!("two CPUs did {reads} bios at once; your slots have {sum}"));
    Ok(())
}

/// How long two CPUs collide.
const RACE: Duration = Duration::from_millis(1000);

fn exercise_bytes() -> Result<()> {
    let disk = disks::virtio()?;
    let ram = Ram::new()?;
    // A discard has a length, and transfers nothing.
    let null = NullBlk::new(&[("memory_backed", "1"), ("discard", "1")])?;
    let maps = Maps::new();
    let running = Running::stage(EXERCISE, &[])?;
    maps.ensure_atomic()?;
    let mut did = Vec::new();
    let mut run = |name: &'static str, bytes: u64, command: String| -> Result<()> {
        let process = Running::bash(&format!("exec {name} {command}"))?;
        did.push((process.id().to_string(), name, bytes));
        ensure!(process.end()?.code == Some(0), "{name} failed");
        Ok(())
    };
    let read = format!("if=/dev/{disk} of=/dev/null iflag=direct status=none");
    run("dd", 1 << 20, format!("{read} bs=64k count=16"))?;
    run("dd", 256 << 10, format!("{read} bs=4k count=64"))?;
    let write = format!("if=/dev/zero of=/dev/{disk} oflag=direct conv=notrunc,fsync status=none");
    run("dd", 512 << 10, format!("{write} bs=32k count=16"))?;
    run(
        "fio",
        1 << 20,
        format!(
            "--name=t --filename=/dev/{disk} --rw=readwrite --bs=64k --direct=1 --thread --numjobs=4 \
             --size=256k --offset_increment=256k --output-format=terse"
        ),
    )?;
    run("blkdiscard", 0, format!("--force --length 4MiB /dev/{}", null.name))?;
    // Two threads of this process collide.
    let me = fs::read_to_string("/proc/self/comm")?;
    let reads = ram.race(RACE)?;
    let output = running.interrupt()?;
    let mut lines = Vec::new();
    for line in output.lines().filter_map(|line| line.strip_prefix("pid ")) {
        let (process, bytes) = line.rsplit_once(": ").context("odd line")?;
        let bytes = bytes.strip_suffix(" bytes").with_context(|| format!("odd: {line}"))?;
        let (pid, name) = process.split_once(' ').with_context(|| format!("no name: {line}"))?;
        lines.push((pid.to_owned(), name.to_owned(), bytes.parse::<u64>()?));
    }
    ensure!(lines.is_sorted_by(|a, b| a.2 >= b.2), "not sorted by bytes: {output}");
    let mine = (std::process::id().to_string(), me.trim(), reads * 512);
    for (pid, name, bytes) in
        did.iter().map(|(pid, name, bytes)| (pid, *name, *bytes)).chain([(&mine.0, mine.1, mine.2)])
    {
        let of_it = lines.iter().filter(|(process, ..)| process == pid);
        let found: Vec<(&str, u64)> = of_it.map(|(_, name, bytes)| (&**name, *bytes)).collect();
        if bytes == 0 {
            let none = found.iter().all(|(_, bytes)| *bytes == 0);
            ensure!(none, "{name}, {pid}, transferred nothing, you say {found:?}: {output}");
            continue;
        }
        let wanted = format!("({name})");
        let yours = match found[..] {
            [] => "have no line for it".to_owned(),
            _ => format!("say {found:?}"),
        };
        ensure!(
            found == [(&*wanted, bytes)],
            "process {pid} {wanted} transferred {bytes} bytes, you {yours}: {output}"
        );
        compared(&format!("process {pid} {wanted} transferred {bytes} bytes; so you say"));
    }
    let event = output.lines().find(|line| line.contains("bpf_trace_printk: "));
    ensure!(event.is_none(), "an event line: {event:?}");
    Ok(())
}
