//! Stages 01 to 06: every bio, its latency, its sector, its stack.

use std::{collections::HashMap, fs, path::Path, thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    Test,
    disks::{self, Mapped, Mounted, NullBlk, ScsiDebug},
    run::{
        BIO, REQUEST, Running, between, count, durations, ensure_none, fio, now, shell, slowest,
        submitted, times, unless_missed, wait_until,
    },
};

pub const TESTS: &[Test] = &[
    ("stage01_has_a_line_for_every_bio", stage01_has_a_line_for_every_bio),
    ("stage02_shows_both_ends", stage02_shows_both_ends),
    ("stage03_lines_add_up", stage03_lines_add_up),
    ("stage03_measures_every_bio", stage03_measures_every_bio),
    ("stage03_measures_every_split_bio", stage03_measures_every_split_bio),
    ("stage03_follows_a_long_chain", stage03_follows_a_long_chain),
    ("stage03_waits_for_checksums", stage03_waits_for_checksums),
    ("stage03_counts_what_was_never_queued", stage03_counts_what_was_never_queued),
    ("stage04_finds_the_delayed_bio", stage04_finds_the_delayed_bio),
    ("stage04_is_right_about_split_bios", stage04_is_right_about_split_bios),
    ("stage04_ends_with_the_last_part", stage04_ends_with_the_last_part),
    ("stage05_names_disk_and_sector", stage05_names_disk_and_sector),
    ("stage06_shows_the_stack", stage06_shows_the_stack),
];

fn dd(device: &str, skip: u64, blocks: u64) -> Result<()> {
    let from = format!("if={device} skip={skip} count={blocks}");
    shell(&format!("dd {from} of=/dev/null bs=4k iflag=direct status=none")).map(|_| ())
}

fn stage01_has_a_line_for_every_bio() -> Result<()> {
    let disk = disks::virtio()?;
    let start = now();
    let running = Running::stage("stage01", &[])?;
    let before = disks::bios(&disk)?;
    dd(&format!("/dev/{disk}"), 0, 500)?;
    let reads = disks::bios(&disk)? - before;
    let output = running.interrupt()?;
    let end = now();
    ensure!(submitted(&output) == reads, "{} lines, {reads} reads", submitted(&output));
    let times = times(&output)?;
    ensure!(times.len() as u64 == reads, "{} times, {reads} reads: {output}", times.len());
    let strange = times.iter().find(|time| !(start..=end).contains(time));
    ensure!(strange.is_none(), "{strange:?} is not from {start} to {end}: {output}");
    Ok(())
}

fn stage02_shows_both_ends() -> Result<()> {
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000")])?;
    let running = Running::stage("stage02", &[])?;
    let before = now();
    dd(&format!("/dev/{}", disk.name), 0, 1)?;
    let after = now();
    let output = running.interrupt()?;
    let bio = between(&output, "submit_bio(bio=", ")")?;
    let submitted: u64 =
        between(&output, &format!("submit_bio(bio={bio}) called: "), "\n")?.parse()?;
    let ended: u64 = between(&output, &format!("bio_endio (bio={bio}) called: "), "\n")?.parse()?;
    ensure!(before <= submitted && ended <= after, "not from {before} to {after}: {output}");
    ensure!(submitted + 10_000_000 <= ended, "shorter than the timer: {output}");
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
            let start =
                starts.remove(bio).with_context(|| format!("{bio} ends twice: {output}"))?;
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
    Ok(())
}

fn stage03_measures_every_bio() -> Result<()> {
    let virtio = disks::virtio()?;
    let linear = Mapped::new("lin", &format!("0 262144 linear /dev/{virtio} 0"))?;
    for (disk, ios, below) in [
        (virtio.clone(), 10_000, None),
        (disks::nvme()?, 10_000, None),
        (linear.disk()?, 500, Some(virtio)),
    ] {
        let running = Running::stage("stage03", &["--quiet"])?;
        let done = || -> Result<(u64, u64)> {
            Ok((disks::bios(&disk)?, below.as_ref().map_or(Ok(0), |disk| disks::bios(disk))?))
        };
        let before = done()?;
        fio(&format!(
            "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=16 \
             --numjobs=2 --number_ios={ios} --norandommap --size=128M"
        ))?;
        let after = done()?;
        let (submitted, clones) = (after.0 - before.0, after.1 - before.1);
        let map = shell("bpftool map dump name starts --json")?;
        let output = running.interrupt()?;
        ensure!(submitted >= 2 * ios, "{submitted} bios");
        ensure!(map.trim() == "[]", "left in the map: {map:.300} {output}");
        let completed = count(&output, "bios completed")?;
        ensure!(completed == submitted, "{disk}: {completed} of {submitted}: {output}");
        ensure_none(&output, &["in flight", "dropped"]).with_context(|| disk.clone())?;
        // Device mapper's clones end as bios do; submitted they are past submit_bio().
        ensure!(count(&output, "unmatched")? == clones, "{disk}: {clones} clones: {output}");
    }
    Ok(())
}

/// 4 MiB at a time, which the block layer splits: the last part to end is now the bio itself, now
/// another.
fn stage03_measures_every_split_bio() -> Result<()> {
    for disk in [disks::virtio()?, disks::nvme()?, disks::scsi()?] {
        let running = Running::stage("stage03", &[])?;
        let before = disks::bios(&disk)?;
        shell(&format!("dd if=/dev/{disk} of=/dev/null bs=4M count=40 iflag=direct status=none"))?;
        let parts = disks::bios(&disk)? - before;
        let map = shell("bpftool map dump name starts --json")?;
        let output = running.interrupt()?;
        let submitted = submitted(&output);
        ensure!(parts > submitted, "{disk}: nothing was split: {submitted} bios, {parts} parts");
        ensure!(
            count(&output, "bios completed")? == submitted,
            "{disk}: {submitted} submitted: {output}"
        );
        ensure!(map.trim() == "[]", "{disk}: left in the map: {map:.300} {output}");
        ensure_none(&output, &["in flight", "dropped"]).with_context(|| disk.clone())?;
    }
    Ok(())
}

/// Of a disk with checksums (T10 PI), what was read is verified first, and then passes bio_endio()
/// again: that is its end, and the only one. The second call comes from a worker; an interrupt there
/// that calls it for another bio is missed, in any kernel.
fn stage03_waits_for_checksums() -> Result<()> {
    let disk = ScsiDebug::new("dif=1 dix=1 dev_size_mb=64")?;
    let verify = fs::read_to_string(format!("/sys/block/{}/integrity/read_verify", disk.name))?;
    ensure!(verify.trim() == "1", "nothing is verified: {verify}");
    let running = Running::stage("stage03", &["--quiet"])?;
    let before = disks::bios(&disk.name)?;
    for rw in ["randwrite", "randread"] {
        fio(&format!(
            "--filename=/dev/{} --rw={rw} --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
             --number_ios=500 --size=32M",
            disk.name
        ))?;
    }
    let bios = disks::bios(&disk.name)? - before;
    let output = running.interrupt()?;
    let counted = count(&output, "bios completed")? + count(&output, "dropped")?;
    ensure!(counted == bios, "{bios} bios: {output}");
    ensure!(count(&output, "in flight")? + count(&output, "unmatched")? == 0, "{output}");
    Ok(())
}

/// A flush of a disk without a write cache ends before it reaches a queue, a read beyond the end
/// too: such a bio passes bio_endio(), and no tracepoint.
fn stage03_counts_what_was_never_queued() -> Result<()> {
    let disk = NullBlk::new(&[("memory_backed", "0")])?;
    let cache = fs::read_to_string(format!("/sys/block/{}/queue/write_cache", disk.name))?;
    ensure!(cache.trim() == "write through", "null_blk has a cache: {cache}");
    let running = Running::stage("stage03", &["--quiet"])?;
    let before = disks::bios(&disk.name)?;
    let report = fio(&format!(
        "--filename=/dev/{} --rw=randwrite --bs=4k --direct=1 --fsync=1 --number_ios=200 --size=64M",
        disk.name
    ))?;
    let writes = disks::bios(&disk.name)? - before;
    let map = shell("bpftool map dump name starts --json")?;
    let output = running.interrupt()?;
    let flushes = report["sync"]["total_ios"].as_u64().context("no count of fsync()")?;
    ensure!(writes == 200 && flushes > 190, "{writes} writes, {flushes} flushes");
    ensure!(map.trim() == "[]", "left in the map: {map:.300} {output}");
    ensure!(count(&output, "bios completed")? == writes + flushes, "{flushes} flushes: {output}");
    ensure!(count(&output, "in flight")? == 0, "{output}");
    Ok(())
}

/// Zeroes are written with one bio for every MiB, each of them a part of the next one. Here the first
/// one takes longest, and all that come after it end with it, in one call of bio_endio().
fn stage03_follows_a_long_chain() -> Result<()> {
    let null = NullBlk::new(&[("irqmode", "1"), ("submit_queues", "2")])?;
    let device = format!("/dev/{}", null.name);
    let first_is_slow = format!("0 2048 delay {device} 0 200;2048 79872 linear {device} 2048");
    let chain = Mapped::new("chain", &first_is_slow)?;
    let running = Running::stage("stage03", &[])?;
    shell(&format!("blkdiscard --force --zeroout --offset 0 --length 40MiB {}", chain.path()))?;
    let output = running.interrupt()?;
    let slow = durations(&output)?.iter().filter(|&&duration| duration >= DELAY).count();
    ensure!(slow == 40, "{slow} of 40 bios took as long as the first: {output}");
    ensure!(count(&output, "bios completed")? == submitted(&output), "{output}");
    ensure_none(&output, &["in flight", "dropped"])
}

/// The shortest time, ns, that dm-delay is taken to need for 200 ms. It counts ticks of 4 ms
/// (drivers/md/dm-delay.c, CONFIG_HZ=250), and in an emulated machine some come late, and then
/// several at once: 193 ms were measured.
const DELAY: u64 = 150_000_000;

fn stage04_finds_the_delayed_bio() -> Result<()> {
    let null =
        NullBlk::new(&[("irqmode", "1"), ("submit_queues", "2"), ("completion_nsec", "10000")])?;
    let (null, virtio) = (format!("/dev/{}", null.name), disks::virtio()?);
    // 4 KiB at sector 80000 take 200 ms, the rest takes what it takes.
    let slow = Mapped::new(
        "slow",
        &format!(
            "0 80000 linear {null} 0;80000 8 delay {null} 80000 200;80008 80000 linear {null} 80008"
        ),
    )?;
    let load = |cpu, disk: &str| {
        format!(
            "fio --name=load{cpu} --filename={disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
             --cpus_allowed={cpu} --rate_iops=300 --time_based --runtime=600 --size=32M --output-format=terse >/dev/null 2>&1 & load{cpu}=$!; "
        )
    };
    let loads = [load(0, &slow.path()), load(1, &format!("/dev/{virtio}"))].concat();
    let pids = shell(&format!("{loads} disown -a; echo $load0 $load1"))?.replace('\n', " ");
    let slow_disk = slow.disk()?;
    let done = || -> Result<u64> { Ok(disks::bios(&slow_disk)?.min(disks::bios(&virtio)?)) };
    let some_more = || {
        let before = done()?;
        wait_until("the load", || Ok(done()? >= before + 250))
    };
    let bio_info =
        format!("Bio Info : Sector (80000) of {slow_disk} ({})", disks::numbers(&slow_disk)?);
    let one_of_thousands = |run: usize| {
        let start = now();
        // Mostly stage 04, which starts sooner; the others add the sector that the record has.
        let stage = match run % 10 {
            3 | 6 => "stage05",
            9 => "stage06",
            _ => "stage04",
        };
        let running = Running::stage(stage, &[])?;
        some_more()?;
        let read =
            format!("dd if={} skip=10000 count=1 of=/dev/null bs=4k iflag=direct", slow.path());
        let pid = shell(&format!("{read} status=none & wait $!; echo $!"))?;
        let output = running.interrupt()?;
        let end = now();
        // Who submitted what, when, says the trace pipe: `dd-1234 [001] …: submit_bio(bio=…`
        let task = format!("-{} ", pid.trim());
        let mut lines =
            output.lines().filter(|l| l.contains(&task) && l.contains("submit_bio(bio="));
        let delayed =
            lines.next().with_context(|| format!("run {run}: dd's read is not there: {output}"))?;
        let all = output.clone();
        let output = &output[output.find("trace lines").context("no summary")?..];
        let slowest = slowest(output, BIO).with_context(|| format!("run {run}"))?;
        // An emulated CPU can stand still for longer than the delay: then that bio is the slowest.
        let durations = durations(&all)?;
        let is_dds =
            delayed.ends_with(&format!("submit_bio(bio={}) called: {}", slowest.io, slowest.from));
        ensure!(
            durations.iter().max() == Some(&slowest.latency)
                && (is_dds || slowest.latency > 200_000_000),
            "run {run}: the delayed read is not the maximum: {delayed} {output}"
        );
        ensure!(
            !is_dds || stage == "stage04" || output.lines().any(|line| line == bio_info),
            "run {run}: {bio_info} is not in {output}"
        );
        ensure!(
            start <= slowest.from && slowest.to <= end,
            "run {run}: not from {start} to {end}: {output}"
        );
        ensure!(slowest.latency >= DELAY, "run {run}: shorter than its delay: {output}");
        ensure!(count(output, "bios completed")? > 500, "run {run}: no load: {output}");
        ensure_none(output, &["dropped"]).with_context(|| format!("run {run}"))?;
        // fio keeps 8 on their way on each disk, and dd's has ended.
        ensure!(count(output, "in flight")? <= 16, "run {run}: {output}");
        Ok(())
    };
    let result = (0..20).try_for_each(|run| unless_missed(|| one_of_thousands(run)));
    shell(&format!("kill {pids}; while kill -0 {pids} 2>/dev/null; do sleep 0.1; done"))?;
    result
}

fn stage04_is_right_about_split_bios() -> Result<()> {
    let plain = NullBlk::new(&[("irqmode", "1"), ("hw_queue_depth", "64")])?;
    let device = format!("/dev/{}", plain.name);
    // Device mapper splits a 64 KiB read at the border of its two targets, 32 KiB each.
    for (half, table) in [
        ("second", format!("0 64 linear {device} 0;64 64 delay {device} 64 200")),
        ("first", format!("0 64 delay {device} 0 200;64 64 linear {device} 64")),
    ] {
        let split = Mapped::new("split", &table)?;
        let running = Running::stage("stage04", &[])?;
        shell(&format!(
            "dd if={} of=/dev/null bs=64k count=1 iflag=direct status=none",
            split.path()
        ))?;
        let output = running.interrupt()?;
        let submitted = submitted(&output);
        ensure!(submitted == 1, "{submitted} bios of one read: {output}");
        ensure!(slowest(&output, BIO)?.latency >= DELAY, "the {half} half is slow: {output}");
        ensure!(count(&output, "in flight")? == 0, "{output}");
    }
    drop(plain);
    // The block layer splits a 256 KiB read in four; the disk does one part at a time, 20 ms each.
    let serial = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "20000000"),
        ("hw_queue_depth", "1"),
        ("submit_queues", "1"),
    ])?;
    fs::write(format!("/sys/block/{}/queue/max_sectors_kb", serial.name), "64")?;
    let running = Running::stage("stage04", &[])?;
    let before = disks::bios(&serial.name)?;
    shell(&format!(
        "dd if=/dev/{} of=/dev/null bs=256k count=1 iflag=direct status=none",
        serial.name
    ))?;
    let parts = disks::bios(&serial.name)? - before;
    let output = running.interrupt()?;
    let submitted = submitted(&output);
    ensure!(submitted == 1 && parts == 4, "{submitted} bios, {parts} parts: {output}");
    ensure!(slowest(&output, BIO)?.latency >= 4 * 20_000_000, "shorter than its parts: {output}");
    ensure!(
        count(&output, "bios completed")? == 1 && count(&output, "in flight")? == 0,
        "{output}"
    );
    Ok(())
}

/// The end of a split bio is that of its last part, not when the reader comes to let go of it: for
/// that, dd has to wait for a CPU here.
fn stage04_ends_with_the_last_part() -> Result<()> {
    // 16 parts, each of which takes its own time up to half a second.
    let disk = ScsiDebug::new("random=1 dev_size_mb=64")?;
    fs::write(format!("/sys/block/{}/queue/max_sectors_kb", disk.name), "32")?;
    fs::write("/sys/bus/pseudo/drivers/scsi_debug/ndelay", "500000000")?;
    let read = format!("dd if=/dev/{} of=/dev/null bs=512k count=1 iflag=direct", disk.name);
    for _ in 0..5 {
        let running = Running::stage("stage04", &["--quiet"])?;
        let pid = shell(&format!(
            "taskset -c 1 {read} status=none >/dev/null 2>&1 & until grep -q State:.[DZ] /proc/$!/status; do :; done; \
             taskset -pc 0 $! >/dev/null; disown -a; echo $!; \
             timeout 0.8 taskset -c 0 chrt -f 50 sh -c 'while :; do :; done' >/dev/null 2>&1 &"
        ))?;
        let state = || -> Result<Option<char>> {
            let status = fs::read_to_string(format!("/proc/{}/status", pid.trim()));
            Ok(status.ok().and_then(|s| between(&s, "State:\t", "\n").ok()?.chars().next()))
        };
        wait_until("the read", || Ok(state()? != Some('D')))?;
        let ended = now();
        thread::sleep(Duration::from_millis(100));
        // Its read has ended, and it is not there to say so.
        let held = state()? == Some('R');
        wait_until("the reader", || Ok(state()?.is_none_or(|state| state == 'Z')))?;
        let output = running.interrupt()?;
        let slowest = slowest(&output, BIO)?;
        if held {
            ensure!(slowest.to < ended, "{} ns too late: {output}", slowest.to - ended);
            return Ok(());
        }
    }
    bail!("the reader never had to wait for a CPU")
}

/// A request is of the whole disk, and the lowest one.
fn stage05_names_disk_and_sector() -> Result<()> {
    let mut reads = Vec::new();
    for disk in [disks::virtio()?, disks::nvme()?, disks::scsi()?] {
        // One partition from sector 4096 on.
        shell(&format!(
            "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{disk}; partx -u /dev/{disk} || true"
        ))?;
        let partition =
            if disk.starts_with("nvme") { format!("{disk}p1") } else { format!("{disk}1") };
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
        let mut running = Vec::new();
        // Each for a disk and for a partition, and all of them for the last.
        for turn in 0..3 {
            let stage = ["stage05", "stage06", "stage07"][turn];
            if number == last || number % 3 == turn {
                running.push((stage, Running::stage(stage, &["--quiet"])?));
            }
        }
        dd(&path, 1000, 1)?;
        for (stage, running) in running {
            let output = running.interrupt()?;
            let (lines, expected) =
                if stage == "stage07" { (REQUEST, &of_request) } else { (BIO, &of_bio) };
            let found = output.lines().any(|line| line == expected);
            ensure!(found, "{stage}: {expected} is not in {output}");
            slowest(&output, lines)?;
        }
    }
    Ok(())
}

/// A bio that ftrace saw.
struct Judged {
    bio: String,
    /// When it was submitted, ns, on the clock of bpf_ktime_get_ns().
    time: u64,
    /// Functions, outermost first.
    stack: Vec<String>,
}

/// What ftrace sees of every bio while `work` runs.
fn ftrace_stacks(work: impl FnOnce() -> Result<()>) -> Result<Vec<Judged>> {
    let argument = if cfg!(target_arch = "aarch64") { "%x0" } else { "%di" };
    let directory = Path::new("/sys/kernel/tracing/instances/judge");
    fs::create_dir(directory)?;
    let result = (|| {
        let event = format!("p:judge/submit submit_bio bio={argument}:x64");
        fs::write("/sys/kernel/tracing/kprobe_events", event)?;
        fs::write(directory.join("trace_clock"), "mono")?;
        let trigger = directory.join("events/judge/submit/trigger");
        fs::write(&trigger, "stacktrace")?;
        fs::write(directory.join("events/judge/submit/enable"), "1")?;
        let worked = work();
        fs::write(directory.join("events/judge/submit/enable"), "0")?;
        fs::write(&trigger, "!stacktrace")?;
        worked?;
        Ok::<_, anyhow::Error>(fs::read_to_string(directory.join("trace"))?)
    })();
    fs::remove_dir(directory)?;
    fs::write("/sys/kernel/tracing/kprobe_events", "")?;
    // `dd-123 [000] ..... 4.924053: submit: (submit_bio+0x0/0xa0) bio=0x…`, and next of that task
    // `dd-123 [000] ..... 4.925344: <stack trace>`, ` => submit_bio`, ` => …`, one a line.
    let mut judged: Vec<Judged> = Vec::new();
    let mut of_task = HashMap::new();
    let mut current = None;
    for line in result?.lines().filter(|line| !line.starts_with('#')) {
        if let Some(frame) = line.strip_prefix(" => ") {
            let stack: &mut Vec<String> = &mut current
                .and_then(|number: usize| judged.get_mut(number))
                .with_context(|| format!("no event: {line}"))?
                .stack;
            let function = frame.split(['+', ' ']).next().unwrap_or_default();
            if function == "submit_bio" {
                // What is below is the probe's.
                stack.clear();
            }
            stack.insert(0, function.to_owned());
            continue;
        }
        let (task, event) = line.split_once('[').with_context(|| format!("odd: {line}"))?;
        if let Some((_, bio)) = event.split_once(" bio=") {
            let time = event.split_once(": submit").context("no time")?.0;
            let time = time.split_whitespace().last().unwrap_or_default().replace('.', "");
            of_task.insert(task.trim().to_owned(), judged.len());
            let time = time.parse::<u64>().with_context(|| format!("odd: {line}"))? * 1000;
            judged.push(Judged { bio: bio.to_owned(), time, stack: Vec::new() });
        } else if event.contains("<stack trace>") {
            current = of_task.get(task.trim()).copied();
        }
    }
    Ok(judged)
}

fn stage06_shows_the_stack() -> Result<()> {
    let _mounted = Mounted::new()?;
    shell("dd if=/dev/zero of=/mnt/data/read bs=1M count=16 conv=fsync status=none; sync")?;
    for (command, must_have) in [
        (
            "dd if=/mnt/data/read of=/dev/null bs=4k count=1 iflag=direct status=none",
            "ext4_file_read_iter",
        ),
        (
            "dd if=/dev/zero of=/mnt/data/read bs=1M count=16 conv=notrunc,fsync status=none",
            "ext4_sync_file",
        ),
    ] {
        // The slowest is now the read or write itself, now the journal's.
        let mut seen = false;
        for _ in 0..10 {
            let mut output = String::new();
            let judged = ftrace_stacks(|| {
                let running = Running::stage("stage06", &[])?;
                shell(command)?;
                output = running.interrupt()?;
                Ok(())
            })?;
            seen |= check_stack(&output, &judged)?.iter().any(|frame| frame == must_have);
            shell("sync")?;
            if seen {
                break;
            }
        }
        ensure!(seen, "{must_have} is in no stack of {command}");
    }
    Ok(())
}

/// The printed stack must be the one that ftrace took of that bio then, frame by frame, and name
/// the module of each frame. Returns that stack.
fn check_stack(output: &str, judged: &[Judged]) -> Result<Vec<String>> {
    let slowest = slowest(output, BIO)?;
    // One bio can come several times; it is the same one, and its submissions lie apart.
    let judge = judged
        .iter()
        .filter(|judged| judged.bio == slowest.io)
        .min_by_key(|judged| judged.time.abs_diff(slowest.from))
        .with_context(|| format!("ftrace has not seen the bio: {output}"))?;
    let printed: Vec<&str> = output.lines().filter_map(|line| line.strip_prefix("=> ")).collect();
    let functions: Vec<&str> =
        printed.iter().filter_map(|frame| frame.split("()").next()).collect();
    ensure!(printed.last() == Some(&"submit_bio()"), "{output}");
    ensure!(functions == judge.stack, "the judge: {:?}\n{output}", judge.stack);
    let kallsyms = fs::read_to_string("/proc/kallsyms")?;
    for frame in printed {
        let (function, module) = frame.split_once("()").context("odd frame")?;
        let mut known = kallsyms.lines().filter_map(|line| {
            let mut words = line.split_whitespace().skip(2);
            (words.next()? == function).then(|| words.next().unwrap_or_default())
        });
        ensure!(known.any(|known| known == module.trim()), "{frame} is not of that module");
    }
    ensure!(output.contains("() [ext4]\n") || output.contains("() [jbd2]\n"), "{output}");
    Ok(judge.stack.clone())
}
