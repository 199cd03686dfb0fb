//! Stages 00 and 07: how long requests take. The judges: fio, the block layer's counters, ftrace.

use std::{collections::HashMap, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    disks::{self, NullBlk, ScsiDebug},
    run::{Running, count, durations, ensure_none, fio, max_latency, shell},
};

pub const TESTS: &[Test] = &[
    ("stage00_counts_every_request_in_its_column", stage00_counts_every_request_in_its_column),
    ("stage00_has_fios_percentiles", stage00_has_fios_percentiles),
    ("stage00_counts_virtio_and_nvme", stage00_counts_virtio_and_nvme),
    ("stage07_measures_every_request", stage07_measures_every_request),
    ("stage07_is_never_shorter_than_the_device", stage07_is_never_shorter_than_the_device),
    ("stage07_finds_the_slow_request", stage07_finds_the_slow_request),
    ("stage07_says_that_a_flush_has_no_sector", stage07_says_that_a_flush_has_no_sector),
    ("stage07_waits_for_the_last_part", stage07_waits_for_the_last_part),
    ("stage07_counts_a_second_try", stage07_counts_a_second_try),
    ("stage07_is_within_stage03", stage07_is_within_stage03),
];

/// Latencies of requests by the kernel's own tracer, which stamps both events by the same clock.
struct Ftrace {
    instance: PathBuf,
}

impl Ftrace {
    fn start() -> Result<Ftrace> {
        let instance = PathBuf::from("/sys/kernel/tracing/instances/requests");
        fs::create_dir(&instance)?;
        let ftrace = Ftrace { instance };
        for (file, value) in [
            ("trace_clock", "mono"),
            ("buffer_size_kb", "8192"),
            ("events/block/block_rq_issue/enable", "1"),
            ("events/block/block_rq_complete/enable", "1"),
        ] {
            fs::write(ftrace.instance.join(file), value).context(file)?;
        }
        Ok(ftrace)
    }

    /// The latencies so far, in ns, the shortest first, and how many requests completed. Two that
    /// read the same sector at once cannot be told apart, and count as one latency.
    /// `fio-1 [000] d..1. 12.345678: block_rq_issue: 252,0 R 4096 () 1234 + 8 [fio]`
    fn latencies(&self) -> Result<(Vec<u64>, u64)> {
        let mut issued = HashMap::new();
        let mut completed = 0;
        let mut latencies = Vec::new();
        for line in fs::read_to_string(self.instance.join("trace"))?.lines() {
            let Some((head, event)) = line.split_once(": block_rq_") else { continue };
            let time = head.rsplit(' ').next().unwrap_or_default().replace('.', "");
            let time = time.parse::<u64>().with_context(|| line.to_owned())? * 1000;
            let (kind, rest) = event.split_once(": ").context("odd event")?;
            let device = rest.split(' ').next().unwrap_or_default().to_owned();
            let sector = rest.rsplit_once(" + ").and_then(|(before, _)| before.rsplit(' ').next());
            let key = (device, sector.unwrap_or_default().to_owned());
            if kind == "issue" {
                // Issued again, for the rest, or after an error: the first time counts.
                issued.entry(key).or_insert(time);
                continue;
            }
            completed += 1;
            if let Some(start) = issued.remove(&key) {
                latencies.push(time - start);
            }
        }
        latencies.sort();
        Ok((latencies, completed))
    }
}

impl Drop for Ftrace {
    fn drop(&mut self) {
        fs::remove_dir(&self.instance).ok();
    }
}

/// The figure of a line like `     p50     10223615 ns   10.2 ms`.
fn figure(output: &str, name: &str) -> Result<u64> {
    let mut lines = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let words = lines
        .find(|words| words.first() == Some(&name))
        .with_context(|| format!("no {name}: {output}"))?;
    words
        .get(1)
        .and_then(|word| word.parse().ok())
        .with_context(|| format!("no figure of {name}: {output}"))
}

fn within_5_percent(what: &str, ours: u64, judge: u64) -> Result<()> {
    let off = (ours as f64 - judge as f64) / judge as f64 * 100.0;
    ensure!(off.abs() <= 5.0, "{what}: {ours} ns, the judge says {judge} ns: {off:+.1} %");
    Ok(())
}

fn percentile(sorted: &[u64], permille: usize) -> u64 {
    sorted[(sorted.len() * permille).div_ceil(1000).clamp(1, sorted.len()) - 1]
}

const RANDOM_READS: &str = "--rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 --numjobs=2 \
     --number_ios=2000 --norandommap --size=128M";

fn stage00_counts_every_request_in_its_column() -> Result<()> {
    let disk =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000"), ("submit_queues", "2")])?;
    let ftrace = Ftrace::start()?;
    let running = Running::stage("stage00", &[])?;
    let before = disks::requests(&disk.name)?;
    let report = fio(&format!("--filename=/dev/{} {RANDOM_READS}", disk.name))?;
    let requests = disks::requests(&disk.name)? - before;
    let output = running.interrupt()?;
    ensure!(report["read"]["total_ios"].as_u64() == Some(4000), "{report}");
    ensure!(count(&output, "requests completed")? == requests, "{requests} requests: {output}");
    ensure_none(&output, &["unmatched", "dropped"])?;
    // The timer of 10 ms can only be late: nothing stands left of the column that begins there.
    let legend = output.lines().find(|line| line.contains("|10ms")).context("no legend")?;
    let column = legend.find("|10ms").context("no column of 10 ms")?;
    let rows: Vec<&str> = output.lines().filter(|line| line.contains(" # ")).collect();
    ensure!(!rows.is_empty(), "no rows: {output}");
    for row in rows {
        let cells = row.split(" # ").next().unwrap_or_default();
        let early = cells.get(..column).unwrap_or(cells);
        ensure!(early.trim().is_empty(), "shorter than the timer: {output}");
    }
    let (judge, completed) = ftrace.latencies()?;
    ensure!(completed == requests, "ftrace saw {completed} of {requests}");
    for (name, permille) in [("p50", 500), ("p99", 990), ("p99.9", 999), ("max", 1000)] {
        // Where a CPU stood still, neighbours differ by more than that: one in 1000 either way.
        let (least, most) = (percentile(&judge, permille - 1), percentile(&judge, permille + 1));
        let ours = figure(&output, name)?;
        within_5_percent(name, ours, ours.clamp(least, most)).with_context(|| output.clone())?;
    }
    Ok(())
}

/// fio's own latency holds the time until fio is woken up, in an emulated machine some
/// milliseconds: hence a second. And one I/O a thread: with libaio, fio waits in the end for all
/// that are on their way, and the first of them seem as slow as the last.
///
/// A run in which fio was woken up later than that judges nothing: one of three must be good.
fn stage00_has_fios_percentiles() -> Result<()> {
    has_fios_percentiles().or_else(|_| has_fios_percentiles()).or_else(|_| has_fios_percentiles())
}

fn has_fios_percentiles() -> Result<()> {
    let disk = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "1000000000"),
        ("submit_queues", "2"),
    ])?;
    let running = Running::stage("stage00", &[])?;
    let report = fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=psync --thread --numjobs=64 \
         --number_ios=8 --norandommap --size=128M",
        disk.name
    ))?;
    let output = running.interrupt()?;
    for (name, fios) in [("p50", "50.000000"), ("p99", "99.000000")] {
        let judge = report["read"]["clat_ns"]["percentile"][fios].as_u64();
        let judge = judge.context("fio gives no percentiles")?;
        within_5_percent(name, figure(&output, name)?, judge).with_context(|| output.clone())?;
    }
    Ok(())
}

fn stage00_counts_virtio_and_nvme() -> Result<()> {
    for disk in [disks::virtio()?, disks::nvme()?] {
        let ftrace = Ftrace::start()?;
        let running = Running::stage("stage00", &[])?;
        let before = disks::requests(&disk)?;
        fio(&format!("--filename=/dev/{disk} {RANDOM_READS}"))?;
        let requests = disks::requests(&disk)? - before;
        let output = running.interrupt()?;
        ensure!(
            count(&output, "requests completed")? == requests,
            "{disk}: {requests} requests: {output}"
        );
        ensure!(count(&output, "in flight")? == 0, "{disk}: {output}");
        within_5_percent("p50", figure(&output, "p50")?, percentile(&ftrace.latencies()?.0, 500))
            .with_context(|| output)?;
    }
    Ok(())
}

fn stage07_measures_every_request() -> Result<()> {
    let null = NullBlk::new(&[("irqmode", "1"), ("submit_queues", "2")])?;
    for disk in [disks::virtio()?, disks::nvme()?, disks::scsi()?, null.name.clone()] {
        let running = Running::stage("stage07", &["--quiet"])?;
        let before = disks::requests(&disk)?;
        fio(&format!("--filename=/dev/{disk} {RANDOM_READS}"))?;
        let requests = disks::requests(&disk)? - before;
        let map = shell("bpftool map dump name starts --json")?;
        let output = running.interrupt()?;
        ensure!(requests >= 3000, "{disk}: {requests} requests");
        ensure!(map.trim() == "[]", "{disk}: left in the map: {map:.300}\n{output}");
        ensure!(
            count(&output, "requests completed")? == requests,
            "{disk}: {requests} requests: {output}"
        );
        ensure_none(&output, &["in flight", "dropped", "unmatched"])
            .with_context(|| disk.clone())?;
    }
    Ok(())
}

fn stage07_is_never_shorter_than_the_device() -> Result<()> {
    let null =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000"), ("submit_queues", "2")])?;
    let running = Running::stage("stage07", &[])?;
    let before = disks::requests(&null.name)?;
    fio(&format!("--filename=/dev/{} {RANDOM_READS} --numjobs=1 --number_ios=250", null.name))?;
    let requests = disks::requests(&null.name)? - before;
    let output = running.interrupt()?;
    let durations = durations(&output)?;
    let lines = durations.len() as u64;
    ensure!(lines == requests, "{lines} lines, {requests} requests: {output}");
    let shortest = durations.iter().min().context("no requests")?;
    ensure!(*shortest >= 10_000_000, "{shortest} ns on a disk that takes 10 ms: {output}");
    Ok(())
}

fn stage07_finds_the_slow_request() -> Result<()> {
    // Longer than an emulated disk is ever kept waiting.
    let slow = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "2000000000")])?;
    let running = Running::stage("stage07", &["--quiet"])?;
    let read = format!(
        "dd if=/dev/{} of=/dev/null bs=4k skip=1000 count=1 iflag=direct status=none",
        slow.name
    );
    let reads = shell(&format!("({read}) & wait $!; echo read"));
    fio(&format!("--filename=/dev/{} {RANDOM_READS}", disks::virtio()?))?;
    ensure!(reads?.contains("read"), "dd failed");
    let output = running.interrupt()?;
    let expected =
        format!("Bio Info : Sector (8000) of {} ({})", slow.name, disks::numbers(&slow.name)?);
    ensure!(output.lines().any(|line| line == expected), "{expected} is not in {output}");
    ensure!(max_latency(&output)? >= 2_000_000_000, "{output}");
    ensure!(output.lines().any(|line| line == "=> blk_mq_start_request()"), "{output}");
    Ok(())
}

/// fsync of a disk with a cache of its own, and nothing to write: a flush is all that it gets.
fn stage07_says_that_a_flush_has_no_sector() -> Result<()> {
    let slow = NullBlk::new(&[
        ("memory_backed", "1"),
        ("cache_size", "1"),
        ("irqmode", "2"),
        ("completion_nsec", "500000000"),
    ])?;
    let running = Running::stage("stage07", &["--quiet"])?;
    shell(&format!("sync /dev/{}", slow.name))?;
    let output = running.interrupt()?;
    let expected = format!(
        "Bio Info : no sector (a flush or a driver's command) of {} ({})",
        slow.name,
        disks::numbers(&slow.name)?
    );
    ensure!(output.lines().any(|line| line == expected), "{expected} is not in {output}");
    ensure!(max_latency(&output)? >= 500_000_000, "{output}");
    Ok(())
}

/// scsi_debug, at every tenth command, transfers a part and leaves the rest to another one.
fn stage07_waits_for_the_last_part() -> Result<()> {
    two_tries_are_one_request("0x100")
}

/// scsi_debug, at every tenth command, fails in a way that lets the kernel try again.
fn stage07_counts_a_second_try() -> Result<()> {
    two_tries_are_one_request("0x10")
}

/// `opts` of scsi_debug: what goes wrong. It takes 20 ms for a command.
fn two_tries_are_one_request(opts: &str) -> Result<()> {
    let disk = ScsiDebug::new(&format!("ndelay=20000000 opts={opts} every_nth=10 dev_size_mb=64"))?;
    let running = Running::stage("stage07", &[])?;
    let before = disks::requests(&disk.name)?;
    shell(&format!(
        "dd if=/dev/{} of=/dev/null bs=64k count=60 iflag=direct status=none",
        disk.name
    ))?;
    let requests = disks::requests(&disk.name)? - before;
    let output = running.interrupt()?;
    let durations = durations(&output)?;
    ensure!(
        durations.len() as u64 == requests,
        "{} lines, {requests} requests: {output}",
        durations.len()
    );
    let in_parts = durations.iter().filter(|&&duration| duration >= 40_000_000).count();
    ensure!(in_parts >= 5, "{in_parts} of {requests} took as long as two commands: {output}");
    ensure!(count(&output, "in flight")? == 0, "{output}");
    Ok(())
}

fn stage07_is_within_stage03() -> Result<()> {
    let (bios, requests) = (Running::stage("stage03", &[])?, Running::stage("stage07", &[])?);
    let disk = disks::virtio()?;
    shell(&format!("dd if=/dev/{disk} of=/dev/null bs=4k count=200 iflag=direct status=none"))?;
    let (requests, bios) = (requests.interrupt()?, bios.interrupt()?);
    // Every trace pipe has the lines of both, in the order of time.
    let mut request = None;
    let mut compared = 0;
    for line in bios.lines() {
        if line.contains("blk_mq_start_request() -> block_rq_complete()") {
            request = Some(durations(line)?[0]);
        } else if line.contains("submit_bio() -> bio_endio()") {
            let request =
                request.take().with_context(|| format!("no request: {requests}{bios}"))?;
            let bio = durations(line)?[0];
            ensure!(bio >= request, "a bio took {bio} ns, its request {request} ns");
            compared += 1;
        }
    }
    ensure!(compared == 200, "{compared} of 200 I/Os: {requests}{bios}");
    Ok(())
}
