//! Stages 00 and 07: how long requests take. The judges: fio, the block layer's counters, ftrace.

use crate::{bios::check_stack, exercise_loads::bio_info, prelude::*};

tests![stage00_counts_every_request_in_its_column, stage07_has_the_time_of_the_disk,];

/// Of 400 requests, 20 take 200 ms or more, all of them on the second CPU, and the others 10 ms: nothing stands
/// left of the column that begins there, and each percentile is between its timer and fio's slowest read.
fn stage00_counts_every_request_in_its_column() -> Result<()> {
    let (quick, slow) = (NullBlk::timer("quick", 10, "")?, NullBlk::timer("slow", 200, "")?);
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

/// A request, by ftrace: its ns from the first issue to the last end, and how many parts ended before.
struct Request {
    disk: String,
    sector: u64,
    took: u64,
    parts: usize,
}

/// All that were issued, each by the sector behind it, which is the same when the rest is issued; and the number of
/// ends that are of none of them: what a flush has completed.
fn requests(events: &[Event]) -> Result<(Vec<Request>, u64)> {
    let (mut issued, mut ended, mut others) = (HashMap::new(), Vec::new(), 0);
    for event in events {
        let numbers = event.text.trim_start().split(' ').next().unwrap_or_default();
        let disk = fs::read_link(format!("/sys/dev/block/{}", numbers.replace(',', ":")))?;
        let disk = disk.file_name().context("no disk")?.to_string_lossy().into_owned();
        let (sector, took) = (event.sector()?, event.time);
        let key = (disk.clone(), sector + between(&event.text, " + ", " ")?.parse::<u64>()?);
        if event.name == "block_rq_issue" {
            issued.entry(key).or_insert(Request { disk, sector, took, parts: 0 });
        } else if let Some(begun) = issued.remove(&key) {
            ended.push(Request { took: took - begun.took, ..begun });
        } else {
            let is_whole = |(whole, it): &(&(String, u64), &mut Request)| {
                whole.0 == disk && it.sector <= sector && key.1 < whole.1
            };
            match issued.iter_mut().find(is_whole) {
                Some((_, whole)) => whole.parts += 1,
                None => others += 1,
            }
        }
    }
    ensure!(issued.is_empty(), "{} requests have not ended", issued.len());
    Ok((ended, others))
}

/// What both steps of 07 do with a disk that takes 200 ms for a request, one at a time: ten reads and writes, which
/// wait in its scheduler, a read that fails, and a discard.
const QUEUED: &str = "hw_queue_depth=1 submit_queues=1 memory_backed=1 discard=1 \
                      badblocks=+100000-100007";

fn load_queued(disk: &NullBlk) -> String {
    format!(
        "fio --name=t --filename=/dev/{0} --rw=randrw --size=16M --bs=4k --direct=1 --ioengine=libaio \
           --iodepth=10 --number_ios=10 --output-format=terse >/dev/null
         if dd if=/dev/{0} of=/dev/null bs=4k count=1 skip=12500 iflag=direct 2>&1; then exit 1; fi
         blkdiscard --force --offset 32MiB --length 1MiB /dev/{0}",
        disk.name
    )
}

fn request_events() -> Result<Ftrace> {
    let hooks = ["block/block_rq_issue", "block/block_rq_complete"];
    Ftrace::new(&hooks.map(|it| Hook::Tracepoint(it, "")))
}

/// The first step of 07: requests that complete whole. The time begins with the driver, not in the queue before it.
pub fn exercise_requests() -> Result<()> {
    const TIMER: u64 = 200_000_000;
    let queued = NullBlk::timer("test", TIMER / 1_000_000, QUEUED)?;
    queued.queues()?;
    let maps = Maps::new();
    let running = Running::stage("stage07", &[])?;
    let ftrace = request_events()?;
    shell(&load_queued(&queued))?;
    let entries = maps.in_flight()?;
    let (issued, others) = requests(&ftrace.events()?)?;
    let output = running.interrupt()?;
    let (number, completed) = (issued.len() as u64, count(&output, "requests completed")?);
    let figures = format!("{number} requests were issued, and completed once");
    ensure!(number >= 12 && completed == number, "{figures}; yours {completed}: {output}");
    ensure!(entries == 0, "{entries} entries are left in the map: {output}");
    let unmatched = ("unmatched", others, ": ends of what a flush has completed");
    ensure_counts(&output, &[("in flight", 0, ""), ("dropped", 0, ""), unmatched])?;
    names_the_longest(&issued, TIMER, &output).map(drop)
}

/// The longest of these requests is named: where it lies, and its time, up to half of a command. Whether it was
/// one in parts; where the machine stands still, another one takes as long.
fn names_the_longest(issued: &[Request], command: u64, output: &str) -> Result<bool> {
    let most = issued.iter().map(|it| it.took).max().unwrap_or_default();
    let is_near = |took: u64| took.abs_diff(most) <= command / 2;
    let info = |it: &Request| Ok((bio_info(&it.disk, it.sector)?, it.parts > 0));
    let infos = issued.iter().filter(|it| is_near(it.took)).map(info);
    let infos = infos.collect::<Result<BTreeMap<_, _>>>()?;
    let (longest, named) = (slowest(output, REQUEST)?.latency, output.lines());
    let named = named.filter_map(|line| infos.get(line)).next();
    let least = format!("the longest request takes {}: {:?}", ms(most), infos.keys());
    let is_right = is_near(longest) && named.is_some();
    judge(is_right, &format!("{least}; yours {}", ms(longest)), output)?;
    Ok(named == Some(&true))
}

/// The time of a request begins with the driver, not in the queue before it, and ends with its last part:
/// scsi_debug, at every third command, transfers a part and leaves the rest to another one. That is the
/// slowest request, and not the last one. A second run sees a longer one, of a loop device.
fn stage07_has_the_time_of_the_disk() -> Result<()> {
    const COMMAND: u64 = 400_000_000;
    let queued = NullBlk::timer("test", 200, QUEUED)?;
    queued.queues()?;
    let partly = ScsiDebug::new("opts=0x100 dev_size_mb=64")?;
    let driver = "/sys/bus/pseudo/drivers/scsi_debug";
    shell(&format!("echo {COMMAND} >{driver}/ndelay; echo 3 >{driver}/every_nth; modprobe loop"))?;
    let long = Long::new()?;
    let loop_path = shell(&format!("losetup --show --find /dev/{}", long.mapped.disk()?))?;
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
    let (before, ftrace) = (done()?, request_events()?);
    shell(&format!(
        "dd if=/dev/{} of=/dev/null bs=64k count=4 iflag=direct status=none &
         {}
         wait
         dd if=/dev/zero of=/dev/{quick} bs=4k count=1 oflag=direct,dsync conv=notrunc status=none",
        partly.name,
        load_queued(&queued)
    ))?;
    let (done, entries) = (done()? - before, maps.in_flight()?);
    let (issued, others) = requests(&ftrace.events()?)?;
    let output = running.remove(0).interrupt()?;
    let (number, completed) = (issued.len() as u64, count(&output, "requests completed")?);
    let figures = format!("{done} requests by the disks, {number} were issued, {others} more ends");
    ensure!(done >= 17 && others > 0 && completed == number, "{figures}: {output}");
    ensure!(entries == 0, "{entries} entries are left in the map: {output}");
    let twice = ("unmatched", others, ": ends of what a flush has completed");
    ensure_counts(&output, &[("in flight", 0, ""), ("dropped", 0, ""), twice])?;
    let whole = issued.iter().filter(|it| it.parts > 0 && it.took >= 2 * COMMAND);
    ensure!(whole.count() > 0, "nothing was transferred in parts: the test does not test");
    if !names_the_longest(&issued, COMMAND, &output)? {
        judged_weakly("a request of one command took as long as one of two");
    }
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
