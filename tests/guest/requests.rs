//! Stages 00 and 07: how long requests take. The judges: fio, the block layer's counters, timers.

use anyhow::{Context, Result, ensure};

use crate::{
    disks::{self, NullBlk, ScsiDebug},
    run::{
        REQUEST, Running, compared, count, ensure_none, entries_left, fio_command, fio_report, ms,
        shell, slowest, summary,
    },
};

tests![
    stage00_counts_every_request_in_its_column,
    stage07_waits_for_the_last_part,
    stage07_has_the_time_of_the_disk,
];

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

/// scsi_debug, at every tenth command, transfers a part and leaves the rest to another one. The time that it
/// takes for a command is longer than an emulated CPU stands still.
fn stage07_waits_for_the_last_part() -> Result<()> {
    const COMMAND: u64 = 100_000_000;
    let disk = format!("ndelay={COMMAND} opts=0x100 every_nth=10 dev_size_mb=64");
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
    let disk = NullBlk::one_tag("test", 200)?;
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
