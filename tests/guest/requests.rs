//! Stages 00 and 07: how long requests take. The judges: fio, the block layer's counters, ftrace.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::{
    bios::{check_modules, check_stack},
    disks::{self, NullBlk, ScsiDebug},
    ftrace::{Event, Ftrace, Hook},
    run::{
        BIO, REQUEST, Running, compared, count, ensure_none, entries_left, fio, ms, now, shell,
        slowest, summary, wait_until,
    },
};

tests![
    stage00_counts_every_request_in_its_column,
    stage00_has_ftraces_percentiles,
    stage07_finds_the_slow_request,
    stage07_says_that_a_flush_has_no_sector,
    stage07_waits_for_the_last_part,
    stage07_counts_a_second_try,
    stage07_has_the_time_of_the_disk,
];

/// Bounds of the latencies of requests, by the kernel's own tracer. A stage reads the clock twice
/// for each request, each time between two events of ftrace:
///
/// - a probe of blk_mq_start_request() that was attached after the stage's: the kernel calls the
///   newest probe first. Then the stage's probe, then block_rq_issue, in that function.
/// - block_rq_complete, by an instance that was enabled before the stage, then the stage, then an
///   instance that was enabled after it: a tracepoint calls its programs in the order they came.
///
/// So the bounds hold however long a CPU stands still in between.
struct Bounds {
    before: Ftrace,
    after: Option<Ftrace>,
}

const ISSUE: Hook = Hook::Tracepoint("block/block_rq_issue", "");
const COMPLETE: Hook = Hook::Tracepoint("block/block_rq_complete", "");

impl Bounds {
    /// To be called before the stage is started, and [`Bounds::stage_has_started`] after that.
    fn new() -> Result<Bounds> {
        Ok(Bounds { before: Ftrace::new(&[ISSUE, COMPLETE])?, after: None })
    }

    fn stage_has_started(&mut self) -> Result<()> {
        let hooks = [ISSUE, COMPLETE, Hook::Function("blk_mq_start_request")];
        self.after = Some(Ftrace::new(&hooks)?);
        Ok(())
    }

    /// The shortest and the longest latencies that the stage can have measured, in ns, each sorted.
    /// Of two requests for the same sector at the same time, the pairs are not known: the load must
    /// have none.
    fn latencies(&self) -> Result<[Vec<u64>; 2]> {
        let after = self.after.as_ref().context("the stage has not started")?;
        Ok([latencies(&self.before.events()?)?, latencies(&after.events()?)?])
    }

    /// Checks the percentiles and the maximum. A percentile is the upper end of its slot, which is
    /// up to a 32nd wide; ftrace rounds each time down to a microsecond.
    fn check(&self, output: &str) -> Result<()> {
        let [low, high] = self.latencies()?;
        let completed = count(output, "requests completed")? as usize;
        ensure!(low.len() == completed, "ftrace saw {} of them: {output}", low.len());
        ensure!(high.len() == completed, "ftrace saw {} of them: {output}", high.len());
        for (name, permille) in [("p50", 500), ("p99", 990), ("p99.9", 999), ("max", 1000)] {
            let (low, high) = (percentile(&low, permille), percentile(&high, permille));
            let slot = if name == "max" { 0 } else { high / 32 };
            let range = low.saturating_sub(1000)..=high + 1000 + slot;
            let ours = figure(output, name)?;
            ensure!(range.contains(&ours), "{name}: {ours} ns is not in {range:?}: {output}");
        }
        Ok(())
    }
}

/// The latencies of the requests of these events, in ns, the shortest first: from
/// blk_mq_start_request(), where that was recorded, else from block_rq_issue.
/// `block_rq_issue: 252,0 R 4096 () 1234 + 8 [fio]`
fn latencies(events: &[Event]) -> Result<Vec<u64>> {
    let (mut started, mut issued, mut latencies) = (HashMap::new(), HashMap::new(), Vec::new());
    for event in events {
        if event.name == "blk_mq_start_request" {
            started.insert(&event.task, event.time);
            continue;
        }
        let device = event.text.split(' ').next().unwrap_or_default();
        let (before, _) = event.text.rsplit_once(" + ").context("odd event")?;
        let request = (device, before.rsplit(' ').next().unwrap_or_default());
        if event.name == "block_rq_issue" {
            // Issued again, for the rest, or after an error: the first time counts.
            let time = started.remove(&event.task).unwrap_or(event.time);
            issued.entry(request).or_insert(time);
        } else if let Some(start) = issued.remove(&request) {
            latencies.push(event.time - start);
        }
    }
    latencies.sort();
    Ok(latencies)
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

fn percentile(sorted: &[u64], permille: usize) -> u64 {
    sorted[(sorted.len() * permille).div_ceil(1000).clamp(1, sorted.len()) - 1]
}

const RANDOM_READS: &str = "--rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 --numjobs=2 \
     --number_ios=2000 --norandommap --size=128M";

/// The same, and no sector is read twice at a time.
const APART: &str = "--rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 --numjobs=2 \
     --number_ios=1000 --size=64M --offset_increment=64M";

fn stage00_counts_every_request_in_its_column() -> Result<()> {
    let disk =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000"), ("submit_queues", "2")])?;
    let running = Running::stage("stage00", &[])?;
    let before = disks::requests(&disk.name)?;
    let report = fio(&format!("--filename=/dev/{} {RANDOM_READS}", disk.name))?;
    let requests = disks::requests(&disk.name)? - before;
    let output = running.interrupt()?;
    ensure!(report["read"]["total_ios"].as_u64() == Some(4000), "{report}");
    ensure!(count(&output, "requests completed")? == requests, "{requests} requests: {output}");
    ensure_none(&output, &["unmatched", "dropped", "in flight"])?;
    // The timer of 10 ms can only be late: nothing stands left of the column that begins there.
    let legend = output.lines().find(|line| line.contains("|10ms")).context("no legend")?;
    let column = legend.find("|10ms").context("no column of 10 ms")?;
    let rows: Vec<&str> = output.lines().filter(|line| line.contains(" # ")).collect();
    ensure!(!rows.is_empty(), "no rows: {output}");
    let mut in_rows = 0;
    for row in rows {
        let (cells, count) = row.split_once(" # ").context("no row")?;
        let early = cells.get(..column).unwrap_or(cells);
        ensure!(early.trim().is_empty(), "shorter than the timer: {output}");
        in_rows += if count == "no I/O" { 0 } else { count.parse()? };
    }
    ensure!(in_rows == requests, "{in_rows} in the rows, {requests} requests: {output}");
    Ok(())
}

/// Of a disk whose timer takes 10 ms, and of one that takes what it takes.
fn stage00_has_ftraces_percentiles() -> Result<()> {
    let null =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000"), ("submit_queues", "2")])?;
    for disk in [disks::virtio()?, null.name.clone()] {
        let mut bounds = Bounds::new()?;
        let running = Running::stage("stage00", &[])?;
        bounds.stage_has_started()?;
        fio(&format!("--filename=/dev/{disk} {APART} --number_ios=500"))?;
        bounds.check(&running.interrupt()?).with_context(|| disk.clone())?;
    }
    Ok(())
}

/// Requests of an nvme disk that are commands of the driver's own, which the disk's counters leave out:
/// where an emulated disk loses a command, the driver aborts it after 30 s, and resets the disk.
pub fn driver_commands() -> Result<Ftrace> {
    Ftrace::new(&[Hook::Tracepoint("nvme/nvme_setup_cmd", "qid == 0")])
}

fn stage07_finds_the_slow_request() -> Result<()> {
    // Longer than an emulated disk is ever kept waiting; null_blk gives a request up after 5 s.
    const TIMER: u64 = 4_000_000_000;
    let timer = TIMER.to_string();
    let slow = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", &timer)])?;
    let start = now();
    let running = Running::stage("stage07", &[])?;
    let ftrace = Ftrace::new(&[Hook::Stack("blk_mq_start_request")])?;
    let read = format!(
        "exec dd if=/dev/{} of=/dev/null bs=4k skip=1000 count=1 iflag=direct status=none",
        slow.name
    );
    let mut reads = Vec::new();
    loop {
        let too_short = [Running::stage("stage00", &[])?, Running::stage("stage07", &[])?];
        reads.push(Running::bash(&read)?);
        wait_until("the read's start", || Ok(disks::in_flight(&slow.name)? == 1))?;
        // Both at once: on a real-time kernel, either takes more than a second to end.
        for stage in &too_short {
            stage.signal(Signal::INT)?;
        }
        let ended = too_short.map(Running::end);
        // Else a CPU stood still until the read had ended.
        if disks::in_flight(&slow.name)? == 1 {
            for ended in ended {
                let ended = ended?;
                ensure!(ended.code == Some(0), "after SIGINT: {ended:?}");
                let output = ended.stdout;
                ensure!(count(&output, "in flight")? == 1, "the read is on its way: {output}");
                ensure!(count(&output, "requests completed")? == 0, "{output}");
            }
            break;
        }
        ensure!(reads.len() < 3, "{TIMER} ns are too short: {ended:?}");
    }
    fio(&format!("--filename=/dev/{} {RANDOM_READS}", disks::virtio()?))?;
    for read in reads {
        ensure!(read.end()?.code == Some(0), "dd failed");
    }
    let output = running.interrupt()?;
    let end = now();
    let expected =
        format!("Bio Info : Sector (8000) of {} ({})", slow.name, disks::numbers(&slow.name)?);
    ensure!(output.lines().any(|line| line == expected), "{expected} is not in {output}");
    let slowest = slowest(&output, REQUEST)?;
    ensure!(slowest.latency >= TIMER, "{output}");
    ensure!(start <= slowest.from && slowest.to <= end, "not from {start} to {end}: {output}");
    check_stack(&output, REQUEST, &ftrace.events()?)?;
    check_modules(&output)?;
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
    let stages = [("stage05", BIO), ("stage06", BIO), ("stage07", REQUEST)];
    let running = Running::stages(stages.map(|(stage, _)| (stage, vec![])))?;
    shell(&format!("sync /dev/{}", slow.name))?;
    let expected = format!(
        "Bio Info : no sector (a flush or a driver's command) of {} ({})",
        slow.name,
        disks::numbers(&slow.name)?
    );
    for (output, (stage, lines)) in Running::interrupt_all(running)?.into_iter().zip(stages) {
        let found = output.lines().any(|line| line == expected);
        ensure!(found, "{stage}: {expected} is not in {output}");
        ensure!(slowest(&output, lines)?.latency >= 500_000_000, "{stage}: {output}");
        // That of the bio ends with it, and has had no start.
        let unmatched = u64::from(lines == REQUEST);
        ensure!(count(&output, "unmatched")? == unmatched, "{stage}: {output}");
    }
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

/// `opts` of scsi_debug: what goes wrong. The time that it takes for a command is longer than an emulated CPU
/// stands still.
fn two_tries_are_one_request(opts: &str) -> Result<()> {
    const COMMAND: u64 = 100_000_000;
    let disk = format!("ndelay={COMMAND} opts={opts} every_nth=10 dev_size_mb=64");
    let disk = ScsiDebug::new(&disk)?;
    let running = Running::stage("stage07", &[])?;
    let before = disks::requests(&disk.name)?;
    shell(&format!(
        "dd if=/dev/{} of=/dev/null bs=64k count=20 iflag=direct status=none",
        disk.name
    ))?;
    let requests = disks::requests(&disk.name)? - before;
    let entries = entries_left()?;
    let output = running.interrupt()?;
    let completed = count(&output, "requests completed")?;
    ensure!(completed == requests, "{requests} requests: {output}");
    let latency = slowest(&output, REQUEST)?.latency;
    ensure!(latency >= 2 * COMMAND, "shorter than two commands: {output}");
    ensure_none(&output, &["in flight", "dropped", "unmatched"])?;
    ensure!(entries == 0, "{entries} entries are left in the map: {}", summary(&output));
    let (command, latency) = (ms(COMMAND), ms(latency));
    compared(&format!("some requests take two commands of {command}; you printed {latency}"));
    Ok(())
}

/// One request at a time: what waits for it is no part of its time.
fn stage07_has_the_time_of_the_disk() -> Result<()> {
    const TIMER: u64 = 200_000_000;
    let timer = TIMER.to_string();
    let one_tag = [("irqmode", "2"), ("hw_queue_depth", "1"), ("submit_queues", "1")];
    let disk = NullBlk::new(&[&one_tag[..], &[("completion_nsec", &*timer)]].concat())?;
    let running = Running::stage("stage07", &[])?;
    let before = disks::requests(&disk.name)?;
    let path = format!("/dev/{}", disk.name);
    shell(&format!(
        "for i in 1 2; do
           dd if={path} of=/dev/null bs=4k count=2 iflag=direct status=none &
           dd if=/dev/zero of={path} bs=4k count=2 oflag=direct conv=notrunc status=none &
         done; wait"
    ))?;
    let requests = disks::requests(&disk.name)? - before;
    let output = running.interrupt()?;
    let completed = count(&output, "requests completed")?;
    ensure!(requests == 8 && completed == requests, "{requests} requests: {output}");
    let latency = slowest(&output, REQUEST)?.latency;
    ensure!(
        (TIMER..3 * TIMER).contains(&latency),
        "the disk takes {TIMER} ns for each, one after the other: {output}"
    );
    compared(&format!("the disk takes {}; you printed {}", ms(TIMER), ms(latency)));
    Ok(())
}
