//! Stages 00 and 07: how long requests take. The judges: fio, the block layer's counters, ftrace.

use std::{fs, ops::Range};

use anyhow::{Context, Result, ensure};

use crate::{
    bios::check_stack,
    disks::{self, NullBlk, ScsiDebug},
    ftrace::{Event, Ftrace, Hook},
    mixed::{Long, bio_info},
    run::{
        REQUEST, Running, compared, count, ensure_none, entries_left, fio_command, fio_report, ms,
        shell, slowest,
    },
};

tests![stage00_counts_every_request_in_its_column, stage07_has_the_time_of_the_disk,];

const ISSUE: Hook = Hook::Tracepoint("block/block_rq_issue", "");
const COMPLETE: Hook = Hook::Tracepoint("block/block_rq_complete", "");

/// Of 400 requests, 20 take 200 ms or more, all of them on the second CPU, and the others 10 ms: nothing stands
/// left of the column that begins there, and each percentile is between its timer and fio's slowest read.
fn stage00_counts_every_request_in_its_column() -> Result<()> {
    let (quick, slow) = (NullBlk::timer("quick", 10, &[])?, NullBlk::timer("slow", 200, &[])?);
    let reads = |disk: &NullBlk, options: &str| {
        fio_command(&format!(
            "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=4 --thread \
             --size=64M {options}",
            disk.name
        ))
    };
    let running = Running::stage("stage00", &[])?;
    let disks = [&quick, &slow];
    let before = disks.map(|disk| disks::requests(&disk.name));
    let report = shell(&reads(&quick, "--number_ios=380"))?;
    let late = shell(&reads(&slow, "--number_ios=20 --cpus_allowed=1"))?;
    let done = disks.map(|disk| disks::requests(&disk.name));
    let output = running.interrupt()?;
    let mut requests = 0;
    for (done, before) in done.into_iter().zip(before) {
        requests += done? - before?;
    }
    ensure!(requests == 400, "{requests} requests");
    ensure!(count(&output, "requests completed")? == requests, "{requests} requests: {output}");
    ensure_none(&output, &["unmatched", "dropped", "in flight"])?;
    let legend = output.lines().find(|line| line.contains("|10ms")).context("no legend")?;
    let column = legend.find("|10ms").context("no column of 10 ms")?;
    let mut in_rows = 0;
    for (cells, count) in output.lines().filter_map(|line| line.split_once(" # ")) {
        let early = cells.get(..column).unwrap_or(cells);
        ensure!(early.trim().is_empty(), "shorter than the timer: {output}");
        in_rows += if count == "no I/O" { 0 } else { count.parse()? };
    }
    ensure!(in_rows == requests, "{in_rows} in the rows, {requests} requests: {output}");
    let slowest = |report: &str| -> Result<u64> {
        fio_report(report)?["read"]["lat_ns"]["max"].as_u64().context("no latency")
    };
    let most = slowest(&report)?.max(slowest(&late)?);
    let figures = ["p50", "p99", "p99.9", "max"].map(|name| figure(&output, name));
    for (figure, least) in
        figures.into_iter().zip([10_000_000, 200_000_000, 200_000_000, 200_000_000])
    {
        let (figure, slot) = (figure?, most / 32);
        ensure!(
            (least..=most + slot).contains(&figure),
            "{figure}, not {least} to {most}: {output}"
        );
    }
    Ok(())
}

/// The figure of a line like `     p50     10223615 ns   10.2 ms`.
fn figure(output: &str, name: &str) -> Result<u64> {
    let mut lines = output.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let words = lines.find(|words| words.first() == Some(&name));
    words.and_then(|words| words.get(1)?.parse().ok()).with_context(|| format!("{name}: {output}"))
}

/// The time of a request begins with the driver, not in the queue before it, and ends with its last part:
/// scsi_debug, at every third command, transfers a part and leaves the rest to another one. That is the
/// slowest request, and not the last one. A second run sees a longer one, of a loop device.
fn stage07_has_the_time_of_the_disk() -> Result<()> {
    const TIMER: u64 = 200_000_000;
    const COMMAND: u64 = 400_000_000;
    let queued = NullBlk::new(&[
        ("irqmode", "2"),
        ("hw_queue_depth", "1"),
        ("submit_queues", "1"),
        ("completion_nsec", &TIMER.to_string()),
        ("memory_backed", "1"),
        ("discard", "1"),
        ("badblocks", "+100000-100007"),
    ])?;
    let (path, settings) =
        (format!("/dev/{}", queued.name), format!("/sys/block/{}/queue", queued.name));
    fs::write(format!("{settings}/scheduler"), "mq-deadline")?;
    fs::write(format!("{settings}/nr_requests"), "64")?;
    let partly = ScsiDebug::new("opts=0x100 dev_size_mb=64")?;
    let long = Long::new()?;
    shell("modprobe loop")?;
    let upper = shell(&format!("losetup --show --find /dev/{}", long.disk()?))?;
    let upper = upper.trim().trim_start_matches("/dev/");
    let driver = "/sys/bus/pseudo/drivers/scsi_debug";
    shell(&format!("echo {COMMAND} >{driver}/ndelay; echo 3 >{driver}/every_nth"))?;
    let result = slowest_requests(&queued, &path, &partly, upper, 2 * COMMAND..8 * TIMER);
    shell(&format!("losetup --detach /dev/{upper}"))?;
    result
}

fn slowest_requests(
    queued: &NullBlk,
    path: &str,
    partly: &ScsiDebug,
    upper: &str,
    time: Range<u64>,
) -> Result<()> {
    let quick = disks::virtio()?;
    let mut running = Running::stages([("stage07", vec![]), ("stage07", vec![])])?;
    let done = || -> Result<u64> {
        Ok(disks::requests(&queued.name)?
            + disks::requests(&partly.name)?
            + disks::requests(&quick)?)
    };
    let stacks = Ftrace::new(&[Hook::Stack("blk_mq_start_request")])?;
    let (before, ftrace) = (done()?, Ftrace::new(&[ISSUE, COMPLETE])?);
    shell(&format!(
        "dd if=/dev/{} of=/dev/null bs=64k count=4 iflag=direct status=none &
         fio --name=t --filename={path} --rw=randrw --size=16M --bs=4k --direct=1 --ioengine=libaio \
           --iodepth=10 --number_ios=10 --output-format=terse >/dev/null
         if dd if={path} of=/dev/null bs=4k count=1 skip=12500 iflag=direct 2>&1; then exit 1; fi
         blkdiscard --force --offset 32MiB --length 1MiB {path}
         wait
         dd if=/dev/{quick} of=/dev/null bs=4k count=1 iflag=direct status=none",
        partly.name
    ))?;
    let (requests, entries) = (done()? - before, entries_left()?);
    let events = ftrace.events()?;
    let output = running.remove(0).interrupt()?;
    let completed = count(&output, "requests completed")?;
    ensure!(requests >= 17 && completed == requests, "{requests} requests: {output}");
    ensure!(entries == 0, "{entries} entries are left in the map: {output}");
    ensure_none(&output, &["in flight", "dropped", "unmatched"])?;
    // The first sector of what was transferred in parts.
    let numbers = disks::numbers(&partly.name)?;
    let is_part = |event: &&Event| {
        let text = event.text.trim_start().replace(',', ":");
        event.name == "block_rq_complete" && text.starts_with(&numbers) && !text.contains(" + 128 ")
    };
    let parts = events.iter().filter(is_part).map(Event::sector).collect::<Result<Vec<_>>>()?;
    let infos = parts.iter().map(|sector| bio_info(&partly.name, *sector));
    let infos = infos.collect::<Result<Vec<_>>>()?;
    ensure!(!infos.is_empty(), "nothing was transferred in parts: the test does not test");
    let longest = slowest(&output, REQUEST)?.latency;
    ensure!(
        time.contains(&longest) && output.lines().any(|line| infos.iter().any(|info| line == info)),
        "the slowest request takes two commands, {} ns in all, and is one of {infos:?}: {output}",
        time.start
    );
    compared(&format!("one request takes two commands, {}; yours {}", ms(time.start), ms(longest)));
    shell(&format!(
        "dd if=/dev/{upper} of=/dev/null bs=4k count=1 skip={} status=none
         dd if=/dev/{quick} of=/dev/null bs=4k count=1 iflag=direct status=none",
        Long::SECTOR / 8
    ))?;
    let output = running.remove(0).interrupt()?;
    let (longest, info) = (slowest(&output, REQUEST)?.latency, bio_info(upper, Long::SECTOR)?);
    ensure!(
        longest >= Long::NS && output.lines().any(|line| line == info),
        "one request took more than {} ns, {info:?}: {output}",
        Long::NS
    );
    check_stack(&output, REQUEST, &stacks.events()?)?;
    compared(&format!("another one takes {}; yours {}", ms(Long::NS), ms(longest)));
    Ok(())
}
