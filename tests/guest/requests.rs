//! Stages 00 and 07: how long requests take. The judges: fio, the block layer's counters, ftrace.

use crate::{
    bios::check_stack,
    maps::Maps,
    mixed::{Long, bio_info},
    prelude::*,
    table::loads,
};

tests![stage00_counts_every_request_in_its_column, stage07_has_the_time_of_the_disk,];

const ISSUE: Hook = Hook::Tracepoint("block/block_rq_issue", "");
const COMPLETE: Hook = Hook::Tracepoint("block/block_rq_complete", "");

/// Of 400 requests, 20 take 200 ms or more, all of them on the second CPU, and the others 10 ms: nothing stands
/// left of the column that begins there, and each percentile is between its timer and fio's slowest read.
fn stage00_counts_every_request_in_its_column() -> Result<()> {
    let (quick, slow) = (NullBlk::timer("quick", 10, &[])?, NullBlk::timer("slow", 200, &[])?);
    let read = |disk: &NullBlk, options: &str| {
        fio_direct(&disk.name, &format!("--iodepth=4 --size=64M {options}"))
    };
    let running = Running::stage("stage00", &[])?;
    let disks = [&quick, &slow];
    let before = disks.map(|disk| disks::requests(&disk.name));
    let report = read(&quick, "--number_ios=380")?;
    let late = read(&slow, "--number_ios=20 --cpus_allowed=1")?;
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
    let most = loads::slowest(&report)?.max(loads::slowest(&late)?);
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
    let found = rows(output, &format!(r"{name} +(\d+) ns"));
    let [figure] = found.first().with_context(|| format!("no {name}: {output}"))?;
    Ok(figure.parse()?)
}

/// The time of a request begins with the driver, not in the queue before it, and ends with its last part:
/// scsi_debug, at every third command, transfers a part and leaves the rest to another one. That is the
/// slowest request, and not the last one. A second run sees a longer one, of a loop device.
fn stage07_has_the_time_of_the_disk() -> Result<()> {
    const COMMAND: u64 = 400_000_000;
    let two_commands = 2 * COMMAND..1_600_000_000;
    let one_tag = [("hw_queue_depth", "1"), ("submit_queues", "1"), ("memory_backed", "1")];
    let more = [("discard", "1"), ("badblocks", "+100000-100007")];
    let queued = NullBlk::timer("test", 200, &[&one_tag[..], &more].concat())?;
    queued.queues()?;
    let (path, partly) =
        (format!("/dev/{}", queued.name), ScsiDebug::new("opts=0x100 dev_size_mb=64")?);
    let driver = "/sys/bus/pseudo/drivers/scsi_debug";
    shell(&format!("echo {COMMAND} >{driver}/ndelay; echo 3 >{driver}/every_nth; modprobe loop"))?;
    let long = Long::new()?;
    let loop_path = shell(&format!("losetup --show --find /dev/{}", long.disk()?))?;
    let loop_path = loop_path.trim();
    // It goes when nobody has it open any more.
    let _open = fs::File::open(loop_path)?;
    shell(&format!("losetup --detach {loop_path}"))?;
    let (quick, maps) = (disks::virtio()?, Maps::new());
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
         dd if=/dev/zero of=/dev/{quick} bs=4k count=1 oflag=direct,dsync conv=notrunc status=none",
        partly.name
    ))?;
    let (requests, entries) = (done()? - before, maps.in_flight()?);
    let events = ftrace.events()?;
    let output = running.remove(0).interrupt()?;
    // The first sector of what was transferred in parts.
    let numbers = disks::numbers(&partly.name)?;
    let is_part = |event: &&Event| {
        let text = event.text.trim_start().replace(',', ":");
        event.name == "block_rq_complete" && text.starts_with(&numbers) && !text.contains(" + 128 ")
    };
    let parts = events.iter().filter(is_part).map(Event::sector).collect::<Result<Vec<_>>>()?;
    // What was transferred in two parts is issued and completed twice. The write completes again, too, behind its
    // flush; and so does what asks for a flush, which is a request of the kernel's own.
    let [issued, ended] = [ISSUE, COMPLETE].map(|hook| {
        let Hook::Tracepoint(name, _) = hook else { unreachable!() };
        let of_it = events.iter().filter(|event| name.ends_with(&event.name)).count();
        (of_it - parts.len() / 2) as u64
    });
    let completed = count(&output, "requests completed")?;
    let is_right = requests >= 17 && ended > issued && completed == issued;
    let figures = format!("{requests} requests by the disks, {issued} were issued, {ended} ended");
    ensure!(is_right, "{figures}: {output}");
    ensure!(entries == 0, "{entries} entries are left in the map: {output}");
    let twice = ("unmatched", ended - issued, ": ends of what a flush has completed");
    ensure_counts(&output, &[("in flight", 0, ""), ("dropped", 0, ""), twice])?;
    let infos = parts.iter().map(|sector| bio_info(&partly.name, *sector));
    let infos = infos.collect::<Result<Vec<_>>>()?;
    ensure!(!infos.is_empty(), "nothing was transferred in parts: the test does not test");
    let longest = slowest(&output, REQUEST)?.latency;
    let is_named = output.lines().any(|line| infos.iter().any(|info| line == info));
    let least = format!("a request takes two commands, {}, one of {infos:?}", ms(2 * COMMAND));
    let is_right = two_commands.contains(&longest) && is_named;
    judge(is_right, &format!("{least}; yours {}", ms(longest)), &output)?;
    shell(&format!(
        "dd if={loop_path} of=/dev/null bs=4k count=1 skip={} status=none
         dd if=/dev/{quick} of=/dev/null bs=4k count=1 iflag=direct status=none",
        Long::SECTOR / 8
    ))?;
    let output = running.remove(0).interrupt()?;
    let info = bio_info(loop_path.trim_start_matches("/dev/"), Long::SECTOR)?;
    let (longest, least) = (slowest(&output, REQUEST)?.latency, Long::NS);
    let is_named = output.lines().any(|line| line == info);
    check_stack(&output, REQUEST, &stacks.events()?)?;
    let figures = format!("another one takes {}, `{info}`; yours {}", ms(least), ms(longest));
    judge(longest >= least && is_named, &figures, &output)
}
