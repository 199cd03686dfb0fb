//! Stages 01 to 06, 10, 11: every bio, its latency, its sector, its stack, its parts.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};

use crate::{
    disks::{self, Mapped, Mounted, NullBlk, ScsiDebug},
    ftrace::{Event, Ftrace, Hook},
    maps::Maps,
    mixed::{Mixed, calls, same_calls},
    run::{
        BIO, REQUEST, Running, Slowest, between, cases, compared, count, ensure_none, entries_left,
        fio, is_judged, judged_weakly, load, may_skip, ms, not_judged, now, preempts, shell,
        slowest, subject, submitted, summary, times, wait_until,
    },
    table::loads::checksummed,
};

tests![
    stage01_has_a_line_for_every_bio,
    stage02_shows_both_ends,
    stage02_sees_every_completion,
    stage03_lines_add_up,
    stage03_measures_every_bio,
    stage03_drops_what_is_submitted_twice,
    stage04_finds_the_delayed_bio,
    stage04_reads_the_records_of_all_cpus,
    stage05_names_disk_and_sector,
    stage05_a_flush_has_no_sector,
    stage06_shows_the_stack,
    stage06_has_the_stack_of_that_bio,
    stage10_is_right_about_split_bios,
    stage10_ends_with_the_last_part,
    stage10_follows_a_long_chain,
    stage10_waits_for_checksums,
];

fn dd(device: &str, skip: u64, blocks: u64) -> Result<()> {
    let from = format!("if={device} skip={skip} count={blocks}");
    shell(&format!("dd {from} of=/dev/null bs=4k iflag=direct status=none")).map(|_| ())
}

fn stage01_has_a_line_for_every_bio() -> Result<()> {
    let mixed = Mixed::new("test")?;
    let start = now();
    let running = Running::stage("stage01", &[])?;
    let did = mixed.run()?;
    let output = running.interrupt()?;
    let end = now();
    same_calls(&output, "submit_bio(", &did.submitted)?;
    let strange = times(&output)?.into_iter().find(|time| !(start..=end).contains(time));
    ensure!(strange.is_none(), "{strange:?} is not from {start} to {end}: {output}");
    let bios = did.submitted.len();
    compared(&format!("ftrace saw {bios} bios, and their addresses; so did you"));
    Ok(())
}

/// Two bios at a time, so that the one that completes is not always the one that came last.
fn stage02_shows_both_ends() -> Result<()> {
    const TIMER: u64 = 500_000_000;
    let timer = TIMER.to_string();
    let settings = [("irqmode", "2"), ("completion_nsec", &*timer), ("submit_queues", "2")];
    let disk = NullBlk::new(&settings)?;
    let running = Running::stage("stage02", &[])?;
    let before = disks::bios(&disk.name)?;
    let ftrace = Ftrace::new(&[Hook::Function("submit_bio"), Hook::Function("bio_endio")])?;
    fio(&format!(
        "--filename=/dev/{0} --rw=randrw --bs=4k --direct=1 --ioengine=libaio --iodepth=2 \
         --iodepth_batch=2 --iodepth_batch_complete_min=2 --number_ios=8 --cpus_allowed=1 --thread",
        disk.name
    ))?;
    // With nothing beside it, a flush.
    shell(&format!("dd if=/dev/null of=/dev/{} conv=fsync,notrunc status=none", disk.name))?;
    let (submitted, ended): (Vec<_>, Vec<_>) =
        ftrace.events()?.into_iter().partition(|event| event.name == "submit_bio");
    let bios = disks::bios(&disk.name)? - before;
    ensure!(bios >= 8 && submitted.len() as u64 == bios + 1, "{bios} bios, {submitted:?}");
    let output = running.interrupt()?;
    same_calls(&output, "submit_bio(", &submitted)?;
    same_calls(&output, "bio_endio (", &ended)?;
    let (starts, ends) = (calls(&output, "submit_bio(")?, calls(&output, "bio_endio (")?);
    let lives = starts.iter().flat_map(|(bio, starts)| starts.iter().zip(&ends[bio]));
    let long = lives.filter(|(start, end)| *start + TIMER <= **end).count() as u64;
    ensure!(
        long == bios,
        "{long} of {bios} pairs of lines are as far apart as the timer: {output}"
    );
    compared(&format!("the disk's timer is {}; {long} of your pairs are as far apart", ms(TIMER)));
    Ok(())
}

/// As many completions as submissions, with more threads than CPUs: an interrupt that finds a program at
/// work on its CPU does not skip the one at the completion. On a real-time kernel, where completions are
/// in threads, it may.
fn stage02_sees_every_completion() -> Result<()> {
    if may_skip()? {
        return not_judged("completions are in threads on this kernel, and may be skipped");
    }
    let disk = disks::virtio()?;
    let running = Running::stage("stage02", &[])?;
    let before = disks::bios(&disk)?;
    fio(&format!(
        "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=16 --thread \
         --norandommap --size=128M --numjobs=16 --number_ios=100"
    ))?;
    let reads = disks::bios(&disk)? - before;
    let output = running.interrupt()?;
    let ended = output.lines().filter(|line| line.contains("printk: bio_endio (bio=0x")).count();
    let (submitted, ended) = (submitted(&output), ended as u64);
    ensure!(output.contains(" trace lines, 0 lost"), "lines were lost: {}", summary(&output));
    ensure!(reads >= 1600 && submitted >= reads, "{reads} reads, {submitted} lines");
    ensure!(ended == submitted, "{submitted} bios were submitted, {ended} completed");
    Ok(())
}

/// The slides' three lines of every bio, and what they say together.
fn stage03_lines_add_up() -> Result<()> {
    let disk = disks::virtio()?;
    let running = Running::stage("stage03", &[])?;
    fio(&format!(
        "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=4 --number_ios=400"
    ))?;
    let output = running.interrupt()?;
    let mut starts = HashMap::new();
    let (mut ends, mut durations) = (Vec::new(), Vec::new());
    for line in output.lines() {
        if let Ok(rest) = between(&format!("{line}\n"), "submit_bio(bio=", "\n") {
            let (bio, time) = rest.split_once(") called: ").context("odd line")?;
            starts.insert(bio.to_owned(), time.parse::<u64>()?);
        } else if let Ok(rest) = between(&format!("{line}\n"), "bio_endio (bio=", "\n") {
            let (bio, time) = rest.split_once(") called: ").context("odd line")?;
            let start = starts.remove(bio).with_context(|| format!("{bio} ends twice"))?;
            ends.push(time.parse::<u64>()? - start);
        } else if line.contains("time duration: ") {
            durations.push(between(line, "time duration: ", " ns")?.parse::<u64>()?);
        }
    }
    ends.sort();
    durations.sort();
    ensure!(
        ends.len() >= 400 && ends == durations,
        "{} ends, {} durations: {output}",
        ends.len(),
        durations.len()
    );
    ensure!(count(&output, "bios completed")? == ends.len() as u64, "{output}");
    ensure!(starts.is_empty(), "never ended: {starts:?}: {output}");
    let ends = ends.len();
    compared(&format!("{ends} pairs of lines are as far apart as your {ends} durations say"));
    Ok(())
}

fn stage03_measures_every_bio() -> Result<()> {
    let (disk, ios) = (disks::virtio()?, load(1500));
    let running = Running::stage("stage03", &[])?;
    let before = disks::bios(&disk)?;
    fio(&format!(
        "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=16 \
         --numjobs=2 --number_ios={ios} --norandommap --size=128M"
    ))?;
    let submitted = disks::bios(&disk)? - before;
    let left = entries_left()?;
    let output = running.interrupt()?;
    ensure!(submitted >= 2 * ios, "{submitted} bios");
    ensure!(left == 0, "{left} entries are left in the map: {}", summary(&output));
    let completed = count(&output, "bios completed")?;
    ensure!(completed == submitted, "{completed} of {submitted}: {output}");
    ensure_none(&output, &["in flight", "split", "dropped", "unmatched"])?;
    compared(&format!("{disk} did {submitted} reads; you completed {completed}"));
    Ok(())
}

/// The time that a read takes includes the verification: the second call of bio_endio() is the end.
fn stage10_waits_for_checksums() -> Result<()> {
    let disk = checksummed()?;
    let ftrace =
        Ftrace::new(&[Hook::Function("bio_endio"), Hook::Function("bio_integrity_verify_fn")])?;
    let running = Running::stage("stage10", &[])?;
    dd(&format!("/dev/{}", disk.name), 0, 50)?;
    let output = running.interrupt()?;
    ensure!(count(&output, "bios completed")? == 50, "50 reads: {output}");
    let slowest = slowest(&output, BIO)?;
    let events = ftrace.events()?;
    let during = |event: &&Event| (slowest.from..=slowest.to + 1_000_000).contains(&event.time);
    let verified = |event: &&Event| event.name == "bio_integrity_verify_fn";
    let verified = events.iter().filter(verified).find(during).context("nothing was verified")?;
    let is_call = |event: &&Event| event.name == "bio_endio" && event.argument == slowest.io;
    let calls = events.iter().filter(is_call).filter(during).count();
    ensure!(calls == 2, "bio_endio() was called {calls} times for {}, not twice", slowest.io);
    ensure!(
        slowest.to >= verified.time,
        "ends before {}, its verification: {output}",
        verified.time
    );
    Ok(())
}

/// Zeroes are written with one bio for every MiB, each of them a part of the next one. Here the first
/// one takes longest, and all that come after it end with it, in one call of bio_endio().
fn stage10_follows_a_long_chain() -> Result<()> {
    let null = NullBlk::new(&[("irqmode", "2"), ("submit_queues", "2")])?;
    let device = format!("/dev/{}", null.name);
    let first_is_slow = format!("0 2048 delay {device} 0 200;2048 79872 linear {device} 2048");
    let chain = Mapped::new("chain", &first_is_slow)?;
    let running = Running::stage("stage10", &[])?;
    shell(&format!("blkdiscard --force --zeroout --offset 0 --length 40MiB {}", chain.path()))?;
    let output = running.interrupt()?;
    let completed = count(&output, "bios completed")?;
    ensure!(completed == 40, "{completed} of 40 bios: {output}");
    let latency = slowest(&output, BIO)?.latency;
    ensure!(latency >= DELAY, "shorter than the first one: {output}");
    compared(&format!("40 bios end with the first one, after 200 ms; you printed {}", ms(latency)));
    ensure_none(&output, &["in flight", "dropped"])
}

/// The shortest time, ns, that dm-delay is taken to need for 200 ms. It counts ticks of 4 ms
/// (drivers/md/dm-delay.c, CONFIG_HZ=250), and in an emulated machine some come late, and then
/// several at once: 193 ms were measured.
const DELAY: u64 = 150_000_000;

fn stage04_finds_the_delayed_bio() -> Result<()> {
    // It completes in an interrupt, as disks do: where it completes in a task, a preemptible kernel may
    // skip the stage.
    let null =
        NullBlk::new(&[("irqmode", "2"), ("submit_queues", "2"), ("completion_nsec", "10000")])?;
    let (null, virtio) = (format!("/dev/{}", null.name), disks::virtio()?);
    // 4 KiB at sector 80000 take 200 ms, the rest takes what it takes.
    let slow = Mapped::new(
        "slow",
        &format!(
            "0 80000 linear {null} 0;80000 8 delay {null} 80000 200;80008 80000 linear {null} 80008"
        ),
    )?;
    let beside = |cpu, disk: &str| {
        format!(
            "fio --name=load{cpu} --filename={disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
             --cpus_allowed={cpu} --rate_iops=200 --thread --time_based --runtime=600 --size=32M --output-format=terse"
        )
    };
    let loads = [beside(0, &slow.path()), beside(1, &format!("/dev/{virtio}"))]
        .map(|load| Running::bash(&format!("exec {load} >/dev/null 2>&1")));
    let slow_disk = slow.disk()?;
    let done = || -> Result<u64> { Ok(disks::bios(&slow_disk)?.min(disks::bios(&virtio)?)) };
    let some_more = || {
        let before = done()?;
        wait_until("the load", || Ok(done()? >= before + 100))
    };
    let start = now();
    let running = Running::stage("stage04", &[])?;
    some_more()?;
    let ftrace = Ftrace::new(&[Hook::Function("submit_bio")])?;
    let read = format!("dd if={} skip=10000 count=1 of=/dev/null bs=4k iflag=direct", slow.path());
    let pid = shell(&format!("{read} status=none & wait $!; echo $!"))?;
    let output = running.interrupt()?;
    let end = now();
    drop(loads);
    let task = format!("-{}", pid.trim());
    let events = ftrace.events()?;
    let delayed = events.iter().find(|event| event.task.ends_with(&task));
    let delayed = &delayed.with_context(|| format!("ftrace has no bio of dd{task}"))?.argument;
    let slowest = slowest(&output, BIO)?;
    // An emulated CPU can stand still for longer than the delay: then that bio is the slowest.
    ensure!(
        slowest.io == delayed || slowest.latency > 200_000_000,
        "dd's delayed read, {delayed}, is not the slowest: {output}"
    );
    ensure!(start <= slowest.from && slowest.to <= end, "not from {start} to {end}: {output}");
    ensure!(slowest.latency >= DELAY, "shorter than its delay: {output}");
    ensure!(count(&output, "bios completed")? > 200, "no load: {output}");
    ensure_none(&output, &["dropped"])?;
    // fio keeps 8 on their way on each disk, and dd's has ended.
    ensure!(count(&output, "in flight")? <= 16, "{output}");
    let latency = ms(slowest.latency);
    compared(&format!("dm-delay, in ticks of 4 ms: 200 ms; you printed {latency}"));
    Ok(())
}

/// The timer of a slow disk, and the interrupts of another one, come to the CPU that has submitted. So with
/// I/O on one CPU, the slowest bio is in the record of that CPU, and must be found on any of them. That two
/// CPUs write their records at once is too rare to be waited for; but records at one place can collide.
fn stage04_reads_the_records_of_all_cpus() -> Result<()> {
    const TIMER: u64 = 200_000_000;
    let disk = disks::virtio()?;
    let slow = [("irqmode", "2"), ("submit_queues", "2"), ("completion_nsec", "200000000")];
    let slow = NullBlk::new(&slow)?;
    let mut places = HashMap::new();
    for cpu in 0..std::thread::available_parallelism()?.get() {
        let maps = Maps::new();
        let running = Running::stage("stage04", &[])?;
        let ftrace = Ftrace::new(&[Hook::Function("submit_bio")])?;
        let dd = format!("taskset -c {cpu} dd bs=4k status=none");
        shell(&format!("{dd} if=/dev/{} of=/dev/null count=1 iflag=direct", slow.name))?;
        shell(&format!("{dd} if=/dev/{disk} of=/dev/null count=20 iflag=direct"))?;
        shell(&format!(
            "{dd} if=/dev/zero of=/dev/{disk} count=20 oflag=direct conv=notrunc,fsync"
        ))?;
        let arrays = maps.arrays()?;
        let output = running.interrupt()?;
        let delayed = ftrace.events()?.into_iter().next().context("ftrace saw no bio")?.argument;
        let load = format!("a slow read, 20 reads, 20 writes and a flush on CPU {cpu}");
        let completed = count(&output, "bios completed")?;
        ensure!(completed == 42, "{load}: {completed} bios completed, not 42: {output}");
        let slowest = slowest(&output, BIO).with_context(|| format!("{load}: {output}"))?;
        let latency = slowest.latency;
        // An emulated CPU can stand still for longer.
        ensure!(
            latency >= TIMER && (slowest.io == delayed || latency > 2 * TIMER),
            "{load}: the slow read, {delayed}, is not the slowest: {output}"
        );
        compared(&format!("{load}: the slow one takes {}, you printed {}", ms(TIMER), ms(latency)));
        let io = u64::from_str_radix(slowest.io.trim_start_matches("0x"), 16)?;
        for place in arrays.records([io, slowest.from, slowest.to]) {
            let other = places.insert(place.clone(), cpu).filter(|other| *other != cpu);
            ensure!(
                other.is_none(),
                "CPU 0 and CPU 1 have written their slowest bio to one place, {place}, as several \
                 words: when both write at once, the words come from two bios"
            );
        }
    }
    Ok(())
}

/// A device of 96 KiB. Device mapper splits a read of it at the borders of its three targets, of which
/// number `slow` takes 200 ms.
fn in_three_parts(device: &str, slow: usize) -> Result<Mapped> {
    let target = |part| if part == slow { ("delay", " 200") } else { ("linear", "") };
    let tables: Vec<String> = (0..3)
        .map(|part| {
            let ((kind, delay), start) = (target(part), part * 64);
            format!("{start} 64 {kind} {device} {start}{delay}")
        })
        .collect();
    Mapped::new("split", &tables.join(";"))
}

/// Stages 04 to 06 do not measure them, and say so, but for those whose last part is the bio itself.
fn stage10_is_right_about_split_bios() -> Result<()> {
    let read = |device: &str, at_least: u64, what: &str| -> Result<()> {
        let mut stages = vec!["stage04", "stage05", "stage10"];
        // Where an attempt is judged, it is one of them.
        stages.retain(|stage| is_judged(stage) && (*stage != "stage05" || subject().is_some()));
        let running = Running::stages(stages.iter().map(|stage| (*stage, vec![])))?;
        let printed = Hook::Tracepoint("bpf_trace/bpf_trace_printk", "");
        let ftrace = Ftrace::new(&[Hook::Function("submit_bio"), printed])?;
        shell(&format!("dd if={device} of=/dev/null bs=96k count=1 iflag=direct status=none"))?;
        let events = ftrace.events()?;
        let (submitted, printed): (Vec<_>, Vec<_>) =
            events.iter().partition(|event| event.name == "submit_bio");
        ensure!(submitted.len() == 1, "{} bios of one read", submitted.len());
        ensure!(printed.is_empty(), "the program writes a line: {:?}", printed[0].text);
        for (output, stage) in Running::interrupt_all(running)?.into_iter().zip(stages) {
            ensure_none(&output, &["in flight", "dropped"]).with_context(|| what.to_owned())?;
            let completed = count(&output, "bios completed")?;
            if completed == 0 && stage != "stage10" {
                ensure!(count(&output, "split")? == 1, "{what}: {output}");
                ensure!(!output.contains("Max latency"), "{what}: {output}");
                compared(&format!("{what}: you counted it as split, and gave no latency"));
                continue;
            }
            ensure!(completed == 1, "{what}: {stage}: {output}");
            // Device mapper's clones complete, too, and were never submitted: they are no parts.
            if stage == "stage10" && !device.contains("mapper") {
                ensure_none(&output, &["unmatched"]).with_context(|| what.to_owned())?;
            }
            let latency = slowest(&output, BIO)?.latency;
            ensure!(latency >= at_least, "{what}: {stage}: shorter than {at_least} ns: {output}");
            let (least, latency) = (ms(at_least), ms(latency));
            compared(&format!("{what}: {least} at least; you printed {latency}"));
        }
        Ok(())
    };
    let plain = NullBlk::new(&[("irqmode", "1"), ("hw_queue_depth", "64")])?;
    let device = format!("/dev/{}", plain.name);
    for slow in cases([0, 2, 1], 1) {
        let split = in_three_parts(&device, slow)?;
        let part = ["first", "middle", "last"][slow];
        read(&split.path(), DELAY, &format!("a read in three parts, of which the {part} is slow"))?;
    }
    drop(plain);
    // The block layer splits the read in three; the disk does one part at a time, 20 ms each.
    let serial = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "20000000"),
        ("hw_queue_depth", "1"),
        ("submit_queues", "1"),
    ])?;
    fs::write(format!("/sys/block/{}/queue/max_sectors_kb", serial.name), "32")?;
    read(&format!("/dev/{}", serial.name), 3 * 20_000_000, "a read in three parts, one by one")
}

/// The end of a split bio lies between the completion of its last part and the moment at which it
/// wakes its reader, which does nothing but wait for it.
fn stage10_ends_with_the_last_part() -> Result<()> {
    // 16 parts, each of which takes its own time, up to 50 ms.
    let disk = ScsiDebug::new("random=1 dev_size_mb=64")?;
    fs::write(format!("/sys/block/{}/queue/max_sectors_kb", disk.name), "32")?;
    fs::write("/sys/bus/pseudo/drivers/scsi_debug/ndelay", "50000000")?;
    let ftrace = Ftrace::new(&[
        Hook::Tracepoint("block/block_rq_complete", ""),
        Hook::Tracepoint("sched/sched_waking", "comm == \"dd\""),
    ])?;
    let running = Running::stage("stage10", &[])?;
    shell(&format!(
        "dd if=/dev/{} of=/dev/null bs=512k count=10 iflag=direct status=none",
        disk.name
    ))?;
    let output = running.interrupt()?;
    let events = ftrace.events()?;
    ensure!(count(&output, "bios completed")? == 10, "ten reads: {output}");
    let Slowest { from, to, .. } = slowest(&output, BIO)?;
    // All parts of a read complete before the next read starts.
    let parts = |event: &&Event| event.name == "block_rq_complete" && event.time >= from;
    let last = events.iter().filter(parts).nth(15).context("a part is not there")?.time;
    let wakes = |event: &&Event| event.name == "sched_waking" && event.time >= last;
    let woken = events.iter().find(wakes).context("dd is never woken")?.time;
    ensure!(
        (last..=woken + 1000).contains(&to),
        "it ends at {to}, its last part at {last}, and dd is woken at {woken}: {output}"
    );
    Ok(())
}

/// A request is of the whole disk, and the lowest one.
fn stage05_names_disk_and_sector() -> Result<()> {
    let mut reads = Vec::new();
    for disk in cases([disks::nvme()?, disks::scsi()?, disks::virtio()?], 1) {
        // One partition from sector 4096 on.
        shell(&format!(
            "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{disk}; partx -u /dev/{disk} || true"
        ))?;
        let partition = disks::partition(&disk);
        reads.push((format!("/dev/{disk}"), disk.clone(), 8000, disk.clone()));
        reads.push((format!("/dev/{partition}"), partition, 12_096, disk));
    }
    let (partition, .., disk) = &reads[1];
    let linear = Mapped::new("lin", &format!("0 16384 linear {partition} 1024"))?;
    reads.push((linear.path(), linear.disk()?, 13_120, disk.clone()));
    let last = reads.len() - 1;
    for (number, (path, device, absolute, disk)) in reads.into_iter().enumerate() {
        let mut of_bio =
            format!("Bio Info : Sector (8000) of {device} ({})", disks::numbers(&device)?);
        if Path::new(&format!("/sys/class/block/{device}/partition")).exists() {
            of_bio += &format!(", sector {absolute} of {disk}");
        }
        let of_request =
            format!("Bio Info : Sector ({absolute}) of {disk} ({})", disks::numbers(&disk)?);
        // Each for a disk and for a partition, and all of them for the last.
        let its_turn = |turn| number == last || number % 3 == turn || subject().is_some();
        let mut stages = vec![(0, "stage05"), (1, "stage06"), (1, "stage11"), (2, "stage07")];
        stages.retain(|&(turn, stage)| its_turn(turn) && is_judged(stage));
        let running = Running::stages(stages.iter().map(|&(_, stage)| (stage, vec![])))?;
        if device == path.trim_start_matches("/dev/") && device != disk {
            let write = "bs=4k count=1 seek=1000 oflag=direct conv=notrunc status=none";
            shell(&format!("dd if=/dev/zero of={path} {write}"))?;
        } else {
            dd(&path, 1000, 1)?;
        }
        for (output, (_, stage)) in Running::interrupt_all(running)?.into_iter().zip(stages) {
            let (lines, expected) =
                if stage == "stage07" { (REQUEST, &of_request) } else { (BIO, &of_bio) };
            let found = output.lines().any(|line| line == expected);
            ensure!(found, "{stage}: {expected} is not in {output}");
            slowest(&output, lines)?;
            compared(&format!("dd read sector 8000 of {device}; you printed `{expected}`"));
        }
    }
    Ok(())
}

/// A flush has no data, and so no place on the disk.
fn stage05_a_flush_has_no_sector() -> Result<()> {
    let disk = disks::virtio()?;
    let mut stages = vec!["stage05", "stage06"];
    stages.retain(|stage| is_judged(stage));
    let running = Running::stages(stages.iter().map(|stage| (*stage, vec![])))?;
    shell(&format!("dd if=/dev/null of=/dev/{disk} conv=fsync,notrunc status=none"))?;
    let numbers = disks::numbers(&disk)?;
    let expected =
        format!("Bio Info : no sector (a flush or a driver's command) of {disk} ({numbers})");
    for output in Running::interrupt_all(running)? {
        ensure!(count(&output, "bios completed")? == 1, "one flush: {output}");
        let found = output.lines().any(|line| line == expected);
        ensure!(found, "a flush: {expected} is not in {output}");
        compared(&format!("a flush of {disk}; you printed `{expected}`"));
    }
    Ok(())
}

fn stage06_shows_the_stack() -> Result<()> {
    let mounted = Mounted::new()?;
    shell("dd if=/dev/zero of=/mnt/data/read bs=1M count=16 conv=fsync status=none; sync")?;
    let read = "dd of=/dev/null bs=4k count=1 iflag=direct status=none if=";
    for (command, must_have) in [
        (format!("{read}/mnt/data/read"), "ext4_file_read_iter"),
        // The first bio has another stack: it is not the slowest one.
        (
            format!(
                "{read}/dev/{}; dd if=/dev/zero of=/mnt/data/read bs=1M count=16 \
                 conv=notrunc,fsync status=none",
                mounted.disk
            ),
            "ext4_sync_file",
        ),
    ] {
        // The slowest is now the read or write itself, now the journal's.
        let mut seen = false;
        for _ in 0..10 {
            let ftrace = Ftrace::new(&[Hook::Stack("submit_bio"), Hook::Function("bio_endio")])?;
            let running = Running::stage("stage06", &[])?;
            shell(&command)?;
            let output = running.interrupt()?;
            let stack = check_stack(&output, BIO, &ftrace.events()?)?;
            check_modules(&output)?;
            compared(&format!("ftrace shows the same {} functions as you", stack.len()));
            seen |= stack.iter().any(|frame| frame == must_have);
            ensure!(!seen || output.contains("() [ext4]\n"), "{output}");
            rustix::fs::sync();
            if seen {
                break;
            }
        }
        ensure!(seen, "{must_have} is in no stack of {command}");
    }
    Ok(())
}

/// Checks that the printed stack is the one that ftrace took of that I/O then, frame by frame.
/// Returns that stack.
pub fn check_stack(output: &str, lines: [&str; 2], events: &[Event]) -> Result<Vec<String>> {
    let judged = judged_stack(output, lines, events)?;
    judged.with_context(|| format!("ftrace has not seen the I/O, or not its stack: {output}"))
}

/// The same; `None` where ftrace has no stack of that I/O. One address can come several times, and
/// between two handlers of one probe up to 34 ms have passed: more than between two I/Os; a CPU that
/// stands still there makes this I/O the slowest one. Its event comes after the end of the one before it,
/// where `events` has the calls of bio_endio(), too, and not after its own.
fn judged_stack(output: &str, lines: [&str; 2], events: &[Event]) -> Result<Option<Vec<String>>> {
    let slowest = slowest(output, lines)?;
    let (ends, starts): (Vec<&Event>, Vec<&Event>) = events
        .iter()
        .filter(|event| event.argument == slowest.io && event.time <= slowest.to)
        .partition(|event| event.name == "bio_endio");
    let before = ends.iter().map(|end| end.time).filter(|time| *time < slowest.from).max();
    let starts: Vec<&Event> =
        starts.into_iter().filter(|start| Some(start.time) > before).collect();
    // Where it is the only one, it may be late.
    let limit = if starts.len() == 1 { 2_000_000_000 } else { 100_000_000 };
    let nearest = starts.into_iter().min_by_key(|start| start.time.abs_diff(slowest.from));
    let Some(judge) = nearest.filter(|judge| !judge.stack.is_empty()) else { return Ok(None) };
    let apart = judge.time.abs_diff(slowest.from);
    if apart > limit {
        return Ok(None);
    }
    let printed: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("=> ")).collect();
    let functions: Vec<&str> =
        printed.iter().filter_map(|frame| frame.split("()").next()).collect();
    let same = functions == judge.stack && functions.last() == Some(&judge.name.as_str());
    ensure!(same, "the judge, {apart} ns apart: {:?}\n{output}", judge.stack);
    Ok(Some(judge.stack.clone()))
}

/// Checks that the printed stack names the module of each function.
pub fn check_modules(output: &str) -> Result<()> {
    let kallsyms = fs::read_to_string("/proc/kallsyms")?;
    for frame in output.lines().filter_map(|line| line.strip_prefix("=> ")) {
        let (function, module) = frame.split_once("()").context("odd frame")?;
        let mut known = kallsyms.lines().filter_map(|line| {
            let mut words = line.split_whitespace().skip(2);
            (words.next()? == function).then(|| words.next().unwrap_or_default())
        });
        ensure!(known.any(|known| known == module.trim()), "{frame} is not of that module");
    }
    Ok(())
}

/// Five processes take turns on one CPU, each with a stack of its own kind; what the stage prints is
/// the stack of the bio that it prints.
fn stage06_has_the_stack_of_that_bio() -> Result<()> {
    // Up to August 2026, bpf_get_stackid() used a buffer of the CPU with preemption on: from 7.0 on,
    // every kernel is preemptible.
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let rounds = if release.starts_with("7.") { 2 } else { 1 };
    let mounted = Mounted::new()?;
    let disk = format!("/dev/{}", mounted.disk);
    let jobs = [
        format!("read --filename={disk} --rw=randread --ioengine=psync --direct=1"),
        "write --filename=/mnt/data/write --rw=randwrite --ioengine=psync --direct=1".into(),
        "sync --filename=/mnt/data/sync --rw=randwrite --ioengine=psync --fsync=1".into(),
        "uring --filename=/mnt/data/uring --rw=randread --ioengine=io_uring --direct=1".into(),
        "aio --filename=/mnt/data/aio --rw=randwrite --ioengine=libaio --direct=1".into(),
    ];
    shell(
        "fallocate -l 8M /mnt/data/write /mnt/data/sync /mnt/data/uring /mnt/data/aio 2>/dev/null || \
           for f in write sync uring aio; do dd if=/dev/zero of=/mnt/data/$f bs=1M count=8 status=none; done; sync",
    )?;
    let jobs = jobs.map(|job| format!(" --name={job} --bs=4k --size=8M"));
    let load = Running::bash(&format!(
        "exec fio --thread --cpus_allowed=0 --time_based --runtime=600 --rate_iops=30 --output-format=terse{} >/dev/null",
        jobs.concat()
    ))?;
    let before = disks::bios(&mounted.disk)?;
    wait_until("the load", || Ok(disks::bios(&mounted.disk)? > before + 100))?;
    let ftrace = Ftrace::new(&[Hook::Stack("submit_bio"), Hook::Function("bio_endio")])?;
    let mut collisions = 0;
    for _ in 0..rounds {
        let mut judged = 0;
        // Five runs that begin and end at times of their own.
        let running = ["500ms", "700ms", "900ms", "1100ms", "1300ms"]
            .map(|time| Running::stage("stage06", &["--duration", time]));
        let outputs =
            running.into_iter().map(|running| running?.end()).collect::<Result<Vec<_>>>()?;
        let events = ftrace.events()?;
        for ended in outputs {
            ensure!(ended.code == Some(0), "{ended:?}");
            ensure!(count(&ended.stdout, "dropped")? == 0, "{ended:?}");
            // A stage that ends reads its maps: meanwhile, a kernel that preempts may skip the others.
            let skipped = count(&ended.stdout, "skipped")?;
            ensure!(skipped == 0 || preempts()?, "{skipped} skipped: {ended:?}");
            if skipped > 0 {
                judged_weakly(&format!("{skipped} skipped"));
            }
            // Of the many kinds of stacks here, two may have the same hash. The stage says so, and prints
            // none.
            if ended.stdout.contains("=> no stack: another stack has its slot") {
                collisions += 1;
                continue;
            }
            judged += u64::from(judged_stack(&ended.stdout, BIO, &events)?.is_some());
        }
        ensure!(
            judged >= 4,
            "ftrace has the stacks of {judged} of the five, {collisions} had no slot"
        );
        ensure!(collisions <= 1, "{collisions} stacks without a slot in a map of 16,384");
        if judged < 5 {
            judged_weakly(&format!("{judged} stacks of five"));
        }
        let starts = events.iter().filter(|event| event.name == "submit_bio");
        let kinds: HashSet<_> = starts.map(|event| &event.stack).collect();
        ensure!(kinds.len() >= 5, "only {} kinds of stacks were submitted", kinds.len());
    }
    drop(load);
    Ok(())
}

/// Up to 6.3, btrfs has a compressed bio of a cgroup with the io controller submitted by a worker,
/// which calls submit_bio() again: the address has a start already, and the bio is not measured.
fn stage03_drops_what_is_submitted_twice() -> Result<()> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let mut version = release.split('.').map_while(|number| number.parse::<u32>().ok());
    let twice = (version.next(), version.next()) <= (Some(6), Some(3));
    if !twice || shell("modprobe btrfs").is_err() {
        return not_judged("this kernel submits no bio twice, or has no btrfs");
    }
    let disk = NullBlk::new(&[("irqmode", "1"), ("memory_backed", "1")])?;
    let cgroup = "/sys/fs/cgroup/punted";
    shell(&format!(
        "mkfs.btrfs --quiet /dev/{0}; mkdir -p /run/btrfs; \
         mount -t btrfs -o compress-force=lzo /dev/{0} /run/btrfs; \
         mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; \
         echo +io >/sys/fs/cgroup/cgroup.subtree_control; mkdir -p {cgroup}",
        disk.name
    ))?;
    let result = submitted_twice(cgroup);
    shell(&format!("umount /run/btrfs; rmdir {cgroup}"))?;
    result
}

fn submitted_twice(cgroup: &str) -> Result<()> {
    let ftrace = Ftrace::new(&[Hook::Stack("submit_bio")])?;
    let (stage03, stage06) = (Running::stage("stage03", &[])?, Running::stage("stage06", &[])?);
    // Every 128 KiB of it become one compressed bio.
    shell(&format!(
        "echo $$ >{cgroup}/cgroup.procs; yes workshop | head -c 16M >/run/btrfs/file; sync -f /run/btrfs"
    ))?;
    // btrfs may write on for a moment.
    wait_until("no entry is left in the maps", || Ok(entries_left()? == 0))?;
    let (stage03, stage06) = (stage03.interrupt()?, stage06.interrupt()?);
    // A worker makes the second call: blkg_async_bio_workfn(), whose last call of submit_bio() is a
    // jump, so that its own frame is gone.
    let is_second = |event: &Event| {
        let caller = event.stack.iter().rev().nth(1).map(String::as_str);
        matches!(caller, Some("blkg_async_bio_workfn" | "process_one_work"))
    };
    let (second, first): (Vec<Event>, Vec<Event>) =
        ftrace.events()?.into_iter().partition(is_second);
    let bios = first.len() as u64;
    ensure!(bios >= 100, "{bios} bios");
    ensure!(second.len() >= 100, "{} of {bios} bios were submitted twice", second.len());
    let twice = second.len() as u64;
    for output in [&stage03, &stage06] {
        ensure_none(output, &["in flight"])?;
        let split = count(output, "split").unwrap_or(0);
        let measured = count(output, "bios completed")? + split;
        ensure!(measured == bios - twice, "{twice} of {bios} bios: {}", summary(output));
        // Both of its starts are dropped, and its completion finds none. Stage 03 counts parts, too.
        ensure!(count(output, "dropped")? == 2 * twice, "{twice} of {bios}: {}", summary(output));
        let unmatched = count(output, "unmatched")?;
        let is_right = if split > 0 { unmatched >= twice } else { unmatched == twice };
        ensure!(is_right, "{twice} of {bios}: {}", summary(output));
    }
    Ok(())
}
