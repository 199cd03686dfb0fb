//! Stage 00: how long requests take. The judges: fio, the block layer's counters, ftrace.

use std::{collections::HashMap, fs, path::PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    disks::{self, NullBlk},
    run::{Running, count, fio},
};

pub const TESTS: &[Test] = &[
    ("stage00_counts_every_request_in_its_column", stage00_counts_every_request_in_its_column),
    ("stage00_has_fios_median", stage00_has_fios_median),
    ("stage00_counts_virtio_and_nvme", stage00_counts_virtio_and_nvme),
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
                issued.insert(key, time);
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
    sorted[(sorted.len() * permille).div_ceil(1000).max(1) - 1]
}

fn stage00_counts_every_request_in_its_column() -> Result<()> {
    let disk =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000"), ("submit_queues", "2")])?;
    let ftrace = Ftrace::start()?;
    let running = Running::stage("stage00", &[])?;
    let before = disks::bios(&disk.name)?;
    let report = fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 --numjobs=2 \
         --number_ios=2000 --norandommap --size=128M",
        disk.name
    ))?;
    let requests = disks::bios(&disk.name)? - before;
    let output = running.interrupt()?;
    ensure!(report["read"]["total_ios"].as_u64() == Some(4000) && requests >= 4000, "{requests}");
    ensure!(count(&output, "requests completed")? == requests, "{requests} requests: {output}");
    ensure!(
        count(&output, "unmatched")? + count(&output, "dropped")? + count(&output, "missed")? == 0,
        "{output}"
    );
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
    for (name, permille) in [("p50", 500), ("p99", 990)] {
        within_5_percent(name, figure(&output, name)?, percentile(&judge, permille))?;
    }
    Ok(())
}

/// fio's own latency holds the time until fio is woken up, in an emulated machine up to some
/// milliseconds, and at p99 sometimes ten: hence 100 ms, and the median.
fn stage00_has_fios_median() -> Result<()> {
    let disk = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "100000000"),
        ("submit_queues", "2"),
    ])?;
    let running = Running::stage("stage00", &[])?;
    let report = fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=16 --numjobs=2 \
         --number_ios=500 --norandommap --size=128M",
        disk.name
    ))?;
    let output = running.interrupt()?;
    let judge = report["read"]["clat_ns"]["percentile"]["50.000000"].as_u64();
    within_5_percent("p50", figure(&output, "p50")?, judge.context("fio gives no percentiles")?)
}

fn stage00_counts_virtio_and_nvme() -> Result<()> {
    for disk in [disks::virtio()?, disks::nvme()?] {
        let ftrace = Ftrace::start()?;
        let running = Running::stage("stage00", &[])?;
        let before = disks::bios(&disk)?;
        fio(&format!(
            "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
             --numjobs=2 --number_ios=2000 --norandommap --size=128M"
        ))?;
        let requests = disks::bios(&disk)? - before;
        let output = running.interrupt()?;
        ensure!(
            count(&output, "requests completed")? == requests,
            "{disk}: {requests} requests: {output}"
        );
        ensure!(count(&output, "in flight")? == 0, "{disk}: {output}");
        within_5_percent("p50", figure(&output, "p50")?, percentile(&ftrace.latencies()?.0, 500))?;
    }
    Ok(())
}
