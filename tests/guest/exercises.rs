//! Judges of the exercises that are no stage, and of every attempt. They run for `cargo lesson` only,
//! with the learner's program in the place of `exercise` or of a stage.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    bios::{DELAY, in_three_parts},
    commands::{instances, loaded, wait_until_unloaded},
    disks::{self, NullBlk},
    pagecache,
    run::{
        Running, cases, compared, count, durations, ensure_none, shell, skipped_some, stage,
        subject,
    },
};

pub const TESTS: &[Test] = &[
    ("exercise_leaves_nothing", exercise_leaves_nothing),
    ("exercise_split", exercise_split),
    ("exercise_disk", exercise_disk),
    ("exercise_disk_refuses", exercise_disk_refuses),
    ("exercise_inode", pagecache::exercise_inode),
    ("exercise_io_uring", pagecache::exercise_io_uring),
    ("exercise_may_ask_again", pagecache::exercise_may_ask_again),
    ("exercise_histogram", exercise_histogram),
    ("exercise_bytes", exercise_bytes),
];

/// The name of a program that takes the place of no stage.
pub const EXERCISE: &str = "exercise";

/// After Ctrl-C, the attempt exits with 0, and nothing of it is left in the kernel.
fn exercise_leaves_nothing() -> Result<()> {
    let (subject, _) = subject().context("VM_SUBJECT names no program: NAME=FILE")?;
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

/// A read of which any part is the slow one is counted as split, or measured to that part's end.
fn exercise_split() -> Result<()> {
    let (subject, _) = subject().context("VM_SUBJECT names no program: NAME=FILE")?;
    let disk = NullBlk::new(&[("irqmode", "1"), ("hw_queue_depth", "64")])?;
    for slow in cases(0..3, 2) {
        let split = in_three_parts(&format!("/dev/{}", disk.name), slow)?;
        let running = Running::stage(&subject, &[])?;
        let read = format!("dd if={} of=/dev/null bs=96k count=1 iflag=direct", split.path());
        shell(&format!("{read} status=none"))?;
        let output = running.interrupt()?;
        if skipped_some(&output)? {
            continue;
        }
        let (completed, split) = (count(&output, "bios completed")?, count(&output, "split")?);
        let what = format!("one read, in three parts, of which number {} takes 200 ms", slow + 1);
        ensure!(completed + split == 1, "{what}: {completed} completed, {split} split: {output}");
        let short = durations(&output)?.into_iter().find(|duration| *duration < DELAY);
        ensure!(short.is_none(), "{what}: you printed {} ns: {output}", short.unwrap_or_default());
        compared(&format!("{what}: you printed {completed} completed, {split} split"));
    }
    Ok(())
}

fn exercise_disk() -> Result<()> {
    let (this, other) = (disks::virtio()?, disks::nvme()?);
    let running = Running::stage(EXERCISE, &[&this])?;
    let before = disks::bios(&this)?;
    read(&other, 30)?;
    read(&this, 40)?;
    let bios = disks::bios(&this)? - before;
    let output = running.interrupt()?;
    let completed = count(&output, "bios completed")?;
    ensure!(completed == bios, "{completed} bios completed, {bios} reads of {this}: {output}");
    let lines = durations(&output)?.len() as u64;
    ensure!(lines == bios, "{lines} durations, {bios} reads of {this}: {output}");
    compared(&format!("{this} did {bios} reads, {other} 30; you measured {lines}"));
    ensure_none(&output, &["in flight", "dropped", "unmatched"])
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
    let null =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000"), ("submit_queues", "2")])?;
    let virtio = disks::virtio()?;
    let running = Running::stage(EXERCISE, &[])?;
    let before = [disks::bios(&virtio)?, disks::bios(&null.name)?];
    read(&virtio, 60)?;
    read(&null.name, 40)?;
    let expected = [disks::bios(&virtio)? - before[0], disks::bios(&null.name)? - before[1]];
    let output = running.interrupt()?;
    let disks = histograms(&output)?;
    for (disk, bios) in [&virtio, &null.name].into_iter().zip(expected) {
        let slots = disks.get(disk).with_context(|| format!("no `disk {disk}` in {output}"))?;
        let sum: u64 = slots.values().sum();
        ensure!(sum == bios, "{sum} bios of {disk} in the slots, {bios} were read: {output}");
        compared(&format!("the disk {disk} did {bios} reads; your slots have {sum}"));
    }
    let early = disks[&null.name].keys().find(|low| **low * 2 - 1 < 10_000_000);
    ensure!(
        early.is_none(),
        "{} takes 10 ms, and has bios from {early:?} ns on: {output}",
        null.name
    );
    let (mut printed, mut judged) = (BTreeMap::<u64, u64>::new(), BTreeMap::new());
    for (low, bios) in disks.values().flatten() {
        *printed.entry(*low).or_default() += bios;
    }
    for duration in durations(&output)? {
        *judged.entry(1_u64 << duration.ilog2()).or_default() += 1;
    }
    ensure!(printed == judged, "slots {printed:?}, from the event lines {judged:?}: {output}");
    Ok(())
}

fn exercise_bytes() -> Result<()> {
    let disk = disks::virtio()?;
    let running = Running::stage(EXERCISE, &[])?;
    let dd = |bs: &str, count: u32| -> Result<String> {
        let dd = format!("exec dd if=/dev/{disk} of=/dev/null iflag=direct status=none");
        let dd = Running::bash(&format!("{dd} bs={bs} count={count}"))?;
        let pid = dd.id().to_string();
        ensure!(dd.end()?.code == Some(0), "dd failed");
        Ok(pid)
    };
    let (large, small) = (dd("64k", 16)?, dd("4k", 64)?);
    let fio = Running::bash(&format!(
        "exec fio --name=t --filename=/dev/{disk} --rw=read --bs=64k --direct=1 --thread --numjobs=4 \
         --size=256k --offset_increment=256k --output-format=terse"
    ))?;
    let threads = fio.id().to_string();
    ensure!(fio.end()?.code == Some(0), "fio failed");
    // A discard has a length, and transfers nothing.
    let null = NullBlk::new(&[("memory_backed", "1"), ("discard", "1")])?;
    let discard = format!("exec blkdiscard --force --length 4MiB /dev/{}", null.name);
    let discard = Running::bash(&discard)?;
    let discards = discard.id().to_string();
    ensure!(discard.end()?.code == Some(0), "blkdiscard failed");
    let output = running.interrupt()?;
    let mut lines = Vec::new();
    for line in output.lines().filter_map(|line| line.strip_prefix("pid ")) {
        let (process, bytes) = line.rsplit_once(": ").context("odd line")?;
        let bytes = bytes.strip_suffix(" bytes").with_context(|| format!("odd: {line}"))?;
        lines.push((
            process.split(' ').next().unwrap_or_default().to_owned(),
            bytes.parse::<u64>()?,
        ));
    }
    ensure!(lines.is_sorted_by(|a, b| a.1 >= b.1), "not sorted by bytes: {output}");
    for (pid, bytes) in [(large, 1 << 20), (small, 256 << 10), (threads, 1 << 20)] {
        let found: Vec<u64> = lines.iter().filter(|(p, _)| *p == pid).map(|(_, b)| *b).collect();
        let yours = match found[..] {
            [] => "no line for it".to_owned(),
            _ => format!("{found:?}"),
        };
        ensure!(found == [bytes], "process {pid} read {bytes} bytes, you say {yours}: {output}");
        compared(&format!("process {pid} read {bytes} bytes; you printed {bytes}"));
    }
    let discarded = lines.iter().find(|(pid, bytes)| *pid == discards && *bytes > 0);
    ensure!(discarded.is_none(), "blkdiscard, {discards}, transferred nothing: {output}");
    Ok(())
}
