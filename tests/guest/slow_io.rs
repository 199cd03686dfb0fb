//! `slow_io` beside the block layer's tracepoints, and beside delays that are put into one part.

use crate::prelude::*;

tests![
    slow_io_blames_the_right_part,
    slow_io_counts_lost_lines,
    slow_io_ends_beside_a_busy_disk,
    slow_io_knows_whose_cgroup_and_when,
    slow_io_names_errors,
    slow_io_names_commands_for_zones,
    slow_io_names_files,
    slow_io_records_what_came_before,
    stage13_counts_what_is_lost,
    stage13_prints_slow_bios,
    stage14_divides_a_bios_time,
    stage14_follows_a_request,
];

/// What finds no room in the buffer is lost, and each bio has a line or is counted.
fn stage13_counts_what_is_lost() -> Result<()> {
    const READS: u32 = 20_000;
    let (quick, maps) = (NullBlk::new("quick", "")?, Maps::new());
    let before = disks::bios(&quick.name)?;
    let mut room = 0;
    let load = || {
        room = maps.ring();
        disks::read(&quick.name, READS)
    };
    let output = beside_a_stopped("stage13", &["--min", "1ns"], load)?;
    let did = disks::bios(&quick.name)? - before;
    let lines = bios_lines(&output).len() as u64;
    let (slow, lost) = (count(&output, "slow")?, count(&output, "lost (")?);
    let completed = count(&output, "bios completed")?;
    // How large the buffer is, a learner decides: a record has more bytes than that. Ours is small enough.
    let has_room = subject().is_some() && room > 64 * READS;
    ensure!(
        (lost > 0 || has_room) && slow == lines,
        "{lines} lines, {slow} slow, {lost} lost, of {room} bytes"
    );
    if has_room {
        judged_weakly("the ring buffer has room for all: nothing had to be lost");
    }
    ensure!((slow + lost, did) == (completed, completed), "{did} reads, {slow} slow, {lost} lost");
    compared(&format!(
        "{did} reads were too many for a program that is stopped; yours: {slow} slow and {lost} lost"
    ));
    Ok(())
}

/// The lines of slow bios.
fn bios_lines(output: &str) -> Vec<&str> {
    output.lines().filter(|line| line.contains(" KiB  ")).collect()
}

/// The time that a line begins with, ms.
fn first_ms(line: &str) -> Result<f64> {
    let first = line.split_whitespace().next().context("no time")?;
    first.parse().with_context(|| line.to_owned())
}

/// A slow bio has a line, with what ftrace saw submitted and a time from the timer's on; a quicker one has none.
/// The disk has more sectors than 32 bits hold, and one bio takes more ns.
fn stage13_prints_slow_bios() -> Result<()> {
    const LATE: u64 = 4_300; // ms: 5 more than 32 bits of ns, which leave less than --min
    let slow = NullBlk::timer("timer", 200, "size=4194304 memory_backed=1 discard=1")?;
    let quicker = NullBlk::timer("other", 20, "")?;
    let late = NullBlk::timer("late", LATE, "")?;
    let dev = format!("{} ", disks::numbers(&slow.name)?.replace(':', ","));
    let submitted = Ftrace::new(&[Hook::Tracepoint("block/block_bio_queue", "")])?;
    let mut running = Running::stages([
        ("stage13", vec!["--min", "190ms"]),
        // More than 32 bits of ns, which leave 105 ms.
        ("stage13", vec!["--min", "4400ms"]),
    ])?;
    let (second, mut running) = (running.remove(1), running.remove(0));
    let first = Running::bash(&reads(&late.name, 1))?;
    disks::read(&quicker.name, 10)?;
    shell(&format!("blkdiscard --force --offset 8MiB --length 1MiB /dev/{}", slow.name))?;
    running.prints(&format!(" of {} (", slow.name)).context("a line as soon as a bio is slow")?;
    let options = "--rw=randrw --bsrange=4k-64k --offset=2500G --size=16M";
    fio_direct(&slow.name, &format!("{options} --iodepth=4 --number_ios=40"))?;
    first.end_well()?;
    let quickest = second.interrupt()?;
    let of_disks = [&slow.name, &late.name].map(|name| format!(" of {name} ("));
    let is_quick = |line: &&&str| first_ms(line).is_ok_and(|it| it < 4400.0);
    let quick = bios_lines(&quickest);
    let quick =
        quick.iter().filter(is_quick).find(|line| of_disks.iter().any(|it| line.contains(it)));
    ensure!(quick.is_none(), "--min 4400ms, and {quick:?}: {quickest}");
    let output = running.interrupt()?;
    let lines = bios_lines(&output);
    for line in &lines {
        ensure!(first_ms(line)? >= 190.0, "--min 190ms, and {line}: {output}");
    }
    let is_late = |line: &&&str| line.contains(&format!(" of {} (", late.name));
    let late: Vec<f64> =
        lines.iter().filter(is_late).map(|l| first_ms(l)).collect::<Result<_>>()?;
    let is_right = late.len() == 1 && late[0] >= LATE as f64;
    ensure!(is_right, "a disk takes {LATE} ms, {late:?}: {output}");

    let shown = format!(" of {} (", slow.name);
    let mut ours = Vec::new();
    for line in lines.iter().filter(|line| line.contains(&shown)) {
        ensure!(first_ms(line)? >= 200.0, "the disk takes 200 ms: {line}");
        let (_, line) = line.split_once(" ms ").context("no unit")?;
        ours.push(line.trim().to_owned());
    }
    let events = submitted.events()?;
    let of_disk = events.iter().filter(|event| event.text.starts_with(&dev));
    let with_data = of_disk.filter(|event| !event.text.contains(" + 0 "));
    let mut theirs = Vec::new();
    for event in with_data {
        let (sectors, task) = event
            .text
            .rsplit_once(" + ")
            .and_then(|it| it.1.split_once(" ["))
            .context("no size")?;
        let (kib, task) = (sectors.parse::<u64>()? / 2, task.trim_end_matches(']'));
        let numbers = dev.trim().replace(',', ":");
        let sector = event.sector()?;
        theirs.push(format!("{kib} KiB  Sector ({sector}){shown}{numbers}) by {task}"));
    }
    ours.retain(|line| line.contains("  Sector ("));
    ours.sort();
    theirs.sort();
    ensure!(
        ours == theirs && ours.len() > 40,
        "submitted:\n{}\nyours:\n{}",
        theirs.join("\n"),
        ours.join("\n")
    );
    compared(&format!(
        "ftrace saw {} bios with data of a disk that takes 200 ms, and so did you; one took {LATE} ms, yours \
         {:.1} ms",
        theirs.len(),
        late[0]
    ));
    Ok(())
}

const NAMES: [&str; 5] = ["wait_ns", "queue_ns", "device_ns", "end_ns", "mapper_ns"];

/// Makes a cgroup that may read 20 times a second from this disk.
pub fn throttle(disk: &str) -> Result<String> {
    cgroup("throttled", "io.max", &format!("{} riops=20", disks::numbers(disk)?))
}

/// The path of a cgroup with a limit: `memory.max`, `4M`.
pub fn cgroup(name: &str, limit: &str, value: &str) -> Result<String> {
    let (controller, _) = limit.split_once('.').context("no controller")?;
    let cgroup = format!("/sys/fs/cgroup/{name}");
    shell(&format!(
        "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; \
         echo +{controller} >/sys/fs/cgroup/cgroup.subtree_control; mkdir -p {cgroup}; \
         echo '{value}' >{cgroup}/{limit}"
    ))?;
    Ok(cgroup)
}

pub fn read_throttled(cgroup: &str, disk: &str, count: u32) -> Result<String> {
    let dd = reads(disk, count);
    shell(&format!("bash -c 'echo $$ >{cgroup}/cgroup.procs; exec {dd}'"))
}

/// The JSON objects of an output, of one kind.
pub fn objects(output: &str, kind: &str) -> Result<Vec<Value>> {
    let lines = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    Ok(lines.into_iter().filter(|line| line["kind"] == kind).collect())
}

/// What `slow_io --json --min 0` prints beside a load; and its lines, one a bio, whose parts are its latency.
pub fn traced<T>(
    options: &[&str],
    load: impl FnOnce() -> Result<T>,
) -> Result<(String, Vec<Value>)> {
    let (output, lines, unseen) = traced_but_skipped(options, load)?;
    ensure!(unseen == 0, "{unseen} completions were not seen: {output}");
    Ok((output, lines))
}

/// What slow_io prints beside a load, its lines, and how many completions were not seen: no more than it says were
/// skipped.
pub fn traced_but_skipped<T>(
    options: &[&str],
    load: impl FnOnce() -> Result<T>,
) -> Result<(String, Vec<Value>, u64)> {
    let (_, output) = beside("slow_io", &[&["--json", "--min", "0"], options].concat(), || {
        load()?;
        wait_until("idle disks", || Ok(disks::all_in_flight()? == 0))
    })?;
    let (lines, counters) = (objects(&output, "bio")?, objects(&output, "counters")?);
    for line in &lines {
        let parts: Vec<u64> = NAMES.iter().filter_map(|name| line[name].as_u64()).collect();
        let (sum, total) = (parts.iter().sum::<u64>(), part(line, "total"));
        ensure!(total > 0 && (parts.is_empty() || sum == total), "parts of {sum} ns: {line}");
    }
    let [counters] = &counters[..] else { bail!("{counters:?}") };
    ensure!(counters["completed"] == lines.len(), "{} lines: {counters}", lines.len());
    // A start whose completion was not seen is left, or dropped with the next one at its address.
    let [lost, dropped, left, skipped] =
        ["lost", "dropped", "in_flight", "skipped"].map(|name| counters[name].as_u64());
    let unseen = left.context("in_flight")? + dropped.context("dropped")?.div_ceil(2);
    ensure!(lost == Some(0) && Some(unseen) <= skipped, "more is missing than skipped: {counters}");
    Ok((output, lines, unseen))
}

/// The lines of one disk.
pub fn of_disk(lines: &[Value], disk: &str) -> Vec<Value> {
    lines.iter().filter(|line| line["disk"] == disk).cloned().collect()
}

pub fn part(line: &Value, name: &str) -> u64 {
    line[format!("{name}_ns")].as_u64().unwrap_or(0)
}

fn sum(lines: &[Value], name: &str) -> u64 {
    lines.iter().map(|line| part(line, name)).sum()
}

/// Disks that are slow in one way each: the medium, twice; one tag for eight threads, so that seven of them
/// wait; the same with a scheduler, where they have a request, which waits; one without statistics.
fn to_divide() -> Result<[NullBlk; 5]> {
    let (slow, bulk) = (NullBlk::timer("timer", 60, "")?, NullBlk::timer("bulk", 60, "")?);
    let (one_tag, queued) = (NullBlk::one_tag("one_tag", 20)?, NullBlk::one_tag("queued", 20)?);
    let mute = NullBlk::one_tag("mute", 20)?;
    fs::write(one_tag.queue("scheduler"), "none")?;
    fs::write(mute.queue("scheduler"), "none")?;
    queued.queues()?;
    fs::write(bulk.queue("nomerges"), "0")?;
    // With one tag, each request has the times that these have left.
    disks::read(&mute.name, 3)?;
    fs::write(mute.queue("iostats"), "0")?;
    Ok([slow, bulk, one_tag, queued, mute])
}

fn read_to_divide([slow, bulk, one_tag, queued, mute]: &[NullBlk; 5]) -> Result<String> {
    fio_direct(&one_tag.name, "--ioengine=psync --numjobs=8 --number_ios=5 --size=8M")?;
    fio_direct(&queued.name, "--iodepth=8 --number_ios=30 --size=8M")?;
    shell(&[slow, mute].map(|disk| reads(&disk.name, 10)).join("; "))?;
    // 16 bios that are merged, and one that is split.
    let dd = "dd status=none";
    shell(&format!(
        "cd /dev; {dd} if=zero of={0} bs=64k count=1 conv=fsync; \
         {dd} if={0} of=null bs=4M count=1 iflag=direct",
        bulk.name
    ))
}

/// A delay in one place stands in that column. A flush before a write is in QUEUE, and one after it in END.
fn stage14_divides_a_bios_time() -> Result<()> {
    const FLUSH: f64 = 20.0; // ms
    let (all, quick) = (to_divide()?, NullBlk::new("quick", "")?);
    let (cached, has_flush_after) = cached(20_000_000)?;
    fs::write(all[2].queue("max_sectors_kb"), "64")?;
    let load = || {
        read_to_divide(&all)?;
        commit_to(&cached)?;
        shell(&format!("dd if=/dev/{} of=/dev/null bs=128k count=1 iflag=direct", all[2].name))?;
        disks::read(&quick.name, 36)
    };
    let (_, output) = beside("stage14", &[], load)?;
    divides(&all, &quick, &output)?;
    let is_split = |line: &&str| line.contains(" 128 KiB  ") && line.contains(&all[2].name);
    let split = bios_lines(&output).into_iter().find(is_split);
    let split = split.context("no line of the bio that was split")?;
    ensure!(columns(split)?[1] >= 20.0, "its last part has waited for the one before: {split}");
    // Of the journal's blocks, the last one commits.
    let of_journal = |line: &&str| line.contains(&cached.name) && line.contains(" by jbd2/");
    let commit = bios_lines(&output).into_iter().rfind(of_journal).context("no commit block")?;
    let [_, _, queue, device, end] = columns(commit)?[..] else { bail!("{commit}") };
    let is_right = queue >= FLUSH && device >= FLUSH && (end >= FLUSH || !has_flush_after);
    ensure!(is_right, "a flush before this write, after it {has_flush_after}: {commit}");
    compared(&format!(
        "a flush of {FLUSH} ms before the journal's commit: your queue {queue} ms, device {device} ms; the last \
         part of a split bio has waited at least {FLUSH} ms: yours {} ms",
        columns(split)?[1]
    ));
    Ok(())
}

/// Requests that a disk completes in parts, each of which completes bios, and gets again for the rest: as often as
/// ftrace sees.
fn stage14_follows_a_request() -> Result<()> {
    const READS: u64 = 96;
    let disk = ScsiDebug::new("ndelay=20000000 opts=0x100 every_nth=2 dev_size_mb=64")?;
    let again = Ftrace::new(&[Hook::Tracepoint("block/block_rq_requeue", "")])?;
    let batches = "--iodepth=16 --iodepth_batch=16 --iodepth_batch_complete_min=16";
    let load = || {
        let before = disks::requests(&disk.name)?;
        fio_direct(&disk.name, &format!("--rw=read {batches} --number_ios={READS} --size=4M"))?;
        let requests = disks::requests(&disk.name)? - before;
        // Each is split in two. Of some, the first part is the one that is transferred in parts.
        fs::write(format!("/sys/block/{}/queue/max_sectors_kb", disk.name), "64")?;
        let dd = "iflag=direct status=none";
        shell(&format!("dd if=/dev/{} of=/dev/null bs=128k count=6 {dd}", disk.name))?;
        Ok(requests)
    };
    let (requests, output) = beside("stage14", &[], load)?;
    let again = again.events()?.len() as u64;
    ensure!(requests < READS && again > 0, "nothing is merged, or in parts: {requests}, {again}");
    let of_disk = format!(" of {} (", disk.name);
    let mut lines = bios_lines(&output);
    lines.retain(|line| line.contains(&of_disk));
    let (mut lines, split): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| !line.contains(" 128 KiB  "));
    ensure!(split.len() == 6, "{} lines of 6 bios that were split: {output}", split.len());
    for line in split {
        let end = columns(line)?[4];
        ensure!(end < 10.0, "a bio ends with the part that completes last: {line}");
    }
    lines.retain(|line| line.ends_with(" by fio"));
    ensure!(lines.len() as u64 == READS, "{} lines of {READS}: {output}", lines.len());
    for line in lines {
        let ms = columns(line)?;
        let is_right = (ms[1..].iter().sum::<f64>() - ms[0]).abs() < 0.01 && ms[3] >= 20.0;
        ensure!(is_right, "each request takes 20 ms: {line}");
    }
    let requeued = count(&output, "requeued (")?;
    ensure!(requeued == again, "{again} requests were requeued, not {requeued}: {output}");
    compared(&format!(
        "{READS} bios in {requests} requests of at least 20 ms, of which {again} were requeued: yours {requeued}"
    ));
    Ok(())
}

/// The total of a line and its parts, ms; NaN for what is not known.
fn columns(line: &str) -> Result<Vec<f64>> {
    let words = line.split_whitespace().take_while(|word| *word != "ms");
    words.map(|word| Ok(if word == "-" { f64::NAN } else { word.parse()? })).collect()
}

/// A write of a file system with a journal, whose commit block asks for flushes.
fn commit_to(cached: &NullBlk) -> Result<String> {
    shell(&format!(
        "mount /dev/{} /mnt/cached; dd if=/dev/zero of=/mnt/cached/file bs=4k count=1 conv=fsync; \
         umount /mnt/cached",
        cached.name
    ))
}

/// A delay in one place is blamed on that part, and on no other one; what nobody knows is null; operations are
/// blktrace's; and tables, causes and the README say the same as the lines. The lesson, stage 14, sees the same.
fn slow_io_blames_the_right_part() -> Result<()> {
    let all = &to_divide()?;
    let [slow, _, one_tag, queued, mute] = all;
    // A cgroup that may do 20 reads a second, and device mapper on the same disk.
    let plain = NullBlk::new("plain", "")?;
    let cgroup = throttle(&plain.name)?;
    let delay = Mapped::new("slow", &format!("0 20000 delay /dev/{} 0 50", plain.name))?;
    let twice = Mapped::new("twice", &format!("0 20000 linear {} 0", delay.path()))?;
    const FLUSH: u64 = 20_000_000;
    let (cached, has_flush_after) = cached(FLUSH)?;
    // Without statistics nobody notes when a request is allocated, and on 7.2 it keeps an earlier time.
    let silent = NullBlk::new("silent", "hw_queue_depth=4 submit_queues=1")?;
    fs::write(silent.queue("scheduler"), "none")?;
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    let judge = Ftrace::new(&[Hook::Tracepoint("block/block_bio_queue", "")])?;
    let (mut events, mut lesson) = (Vec::new(), String::new());

    let traced = traced(&["--who"], || {
        let running = Running::stage("stage14", &[])?;
        read_to_divide(all)?;
        read_throttled(&cgroup, &plain.name, 30)?;
        shell(&[&delay, &twice].map(|mapped| reads(&mapped.path(), 10)).join("; "))?;
        for (on, skip) in [("1", 0), ("0", 1000), ("1", 2000)] {
            fs::write(silent.queue("iostats"), on)?;
            shell(&format!("{} skip={skip}", reads(&silent.name, 12)))?;
        }
        lesson = running.interrupt()?;

        commit_to(&cached)?;
        judge.events()?;
        operations(&virtio)?;
        fio_direct(&virtio, "--rw=randrw --iodepth=8 --number_ios=200 --size=64M")?;
        events = judge.events()?;
        fio_direct(&nvme, "--iodepth=8 --number_ios=200")?;
        Ok(())
    });
    shell(&format!("rmdir {cgroup}"))?;
    let (output, lines) = traced?;
    divides(all, &silent, &lesson)?;

    // What delays a bio is in that part of each one, whole. A busy host stops the guest's CPU for some ms, anywhere:
    // that 95 % of a bio's time are there is asked of most, and of all together but for the worst tenth.
    for (disk, name, all, each) in [
        (&slow.name, "device", 10 * 60_000_000, 60_000_000),
        (&plain.name, "wait", 1_000_000_000, 30_000_000),
        (&delay.disk()?, "mapper", 10 * 44_000_000, 40_000_000),
        (&twice.disk()?, "mapper", 10 * 44_000_000, 40_000_000),
    ] {
        let mut lines = of_disk(&lines, disk);
        let blamed = sum(&lines, name);
        ensure!(blamed >= all, "{disk}: {blamed} ns of {all} are in {name}: {lines:?}");
        // Of bios that the cgroup lets pass two at a time, one has not waited.
        lines.retain(|line| part(line, "total") >= 40_000_000);
        let has = |line: &&Value| part(line, name) >= each;
        let is_most = |line: &&Value| part(line, name) * 100 >= part(line, "total") * 95;
        let right = lines.iter().all(|line| has(&line));
        let most = lines.iter().filter(is_most).count();
        ensure!(right && most * 2 > lines.len(), "{disk}: not in {name}: {lines:?}");
        lines.sort_by_key(|line| part(line, "total") - part(line, name));
        lines.truncate(lines.len() - lines.len() / 10);
        let [blamed, total] = [name, "total"].map(|name| sum(&lines, name));
        ensure!(blamed * 100 >= total * 95, "{disk}: {blamed} of {total} in {name}: {lines:?}");
    }
    for (disk, name) in [(&one_tag.name, "wait"), (&queued.name, "queue")] {
        let lines = of_disk(&lines, disk);
        let [blamed, device, total] = [name, "device", "total"].map(|name| sum(&lines, name));
        ensure!(
            blamed > 2 * device && (blamed + device) * 100 > total * 95,
            "{disk}: {name} {blamed}, device {device} of {total}: {lines:?}"
        );
    }
    // A flush before a write is in QUEUE, and one after it in END. The journal's commit block has both.
    let mut commits = of_disk(&lines, &cached.name);
    commits.retain(|line| line["operation"].as_str().is_some_and(|o| o.starts_with("FWF")));
    ensure!(!commits.is_empty(), "no commit block");
    for commit in commits {
        let [queue, device, end] = ["queue", "device", "end"].map(|name| part(&commit, name));
        ensure!(queue >= FLUSH && device >= FLUSH, "a flush before a write: {commit}");
        ensure!(end >= FLUSH || !has_flush_after, "a flush after a write: {commit}");
    }
    if !has_flush_after {
        judged_weakly("null_blk writes past its cache here: there is no flush after a write");
    }

    let of_silent = of_disk(&lines, &silent.name);
    for from in [0, 8000, 16000] {
        let read =
            |line: &&Value| (from..from + 8000).contains(&line["sector"].as_u64().unwrap_or(0));
        let of_dd = of_silent.iter().filter(read).filter(|line| line["process"] == "dd");
        let of_dd: Vec<bool> = of_dd.map(|line| line["wait_ns"].is_u64()).collect();
        ensure!(of_dd == [from != 8000; 12], "from {from}, waits are known: {of_silent:?}");
    }
    ensure!(of_silent.iter().all(|line| line["queue_ns"].is_u64()), "{of_silent:?}");
    // Nor is there a sum of it: see adds_up().
    let of_mute = of_disk(&lines, &mute.name);
    ensure!(of_mute.iter().all(|line| line["wait_ns"].is_null()), "{of_mute:?}");
    has_blktraces_letters(&of_disk(&lines, &virtio), &virtio, &events)?;
    // nvme completes requests in batches, which the kernel's blk_update_request() does not see.
    let mut of_nvme = of_disk(&lines, &nvme);
    of_nvme.retain(|line| line["operation"] == "R");
    let is_known = |line: &Value| line["device_ns"].as_u64().is_some_and(|device| device > 0);
    ensure!(of_nvme.len() == 200 && of_nvme.iter().all(is_known), "{nvme}: {of_nvme:?}");
    adds_up(&output, &lines)?;
    is_documented(&output)
}

/// The lesson: a delay in one place stands in that column; the columns are the total; where nobody notes when
/// a request is allocated, the time is not divided.
fn divides(
    [device, bulk, one_tag, queued, mute]: &[NullBlk; 5],
    silent: &NullBlk,
    output: &str,
) -> Result<()> {
    let mut all = Vec::new();
    for line in bios_lines(output) {
        all.push((line, columns(line)?));
    }
    // Reads: fio and dd send a flush, too, which is slow where the host has stopped the guest's CPU.
    let of = |disk: &NullBlk| -> Vec<&Vec<f64>> {
        let of = format!(" of {} (", disk.name);
        let is_its = |line: &str| line.contains(&of) && line.contains("Sector (");
        all.iter().filter(|(line, _)| is_its(line)).map(|(_, ms)| ms).collect()
    };
    for (disk, part, count, least) in [
        (device, 3, 10, 600.0),
        (bulk, 3, 17, 1000.0),
        (one_tag, 1, 40, 1000.0),
        (queued, 2, 30, 1000.0),
    ] {
        let lines = of(disk);
        ensure!(lines.len() >= count, "{}: {} lines: {output}", disk.name, lines.len());
        let odd = |line: &&&Vec<f64>| (line[1..].iter().sum::<f64>() - line[0]).abs() >= 0.01;
        ensure!(lines.iter().find(odd).is_none(), "{}: {:?}", disk.name, lines.iter().find(odd));
        let [time, all] =
            [part, 0].map(|column| lines.iter().map(|line| line[column]).sum::<f64>());
        let is_blamed = time >= least && time * 2.0 > all;
        ensure!(is_blamed, "{}, {part}: {time} of {all} ms: {output}", disk.name);
    }
    // Each line is of one read: where it is, how large, and whose.
    let shown = |n: u32| format!(" ms     4 KiB  Sector ({}) of {} (", n * 8, device.name);
    let of_dd =
        |n| all.iter().any(|(line, _)| line.contains(&shown(n)) && line.ends_with(" by dd"));
    ensure!((0..10).all(of_dd), "dd's reads of {}: {output}", device.name);
    let is_unknown = |line: &&Vec<f64>| line[1..].iter().all(|ms| ms.is_nan());
    let mute = of(mute);
    let are_unknown = mute.iter().all(|line| is_unknown(line) && line[0] >= 20.0);
    ensure!(mute.len() == 10 && are_unknown, "{mute:?}: {output}");
    let unknown = all.iter().filter(|(_, line)| is_unknown(&line)).count();
    let said = format!("{} slow, {unknown} of them not divided", all.len());
    ensure!(output.contains(&said), "not {said:?}: {output}");
    ensure!(count(output, "bios completed")? >= 100, "{output}");
    ensure!(of(silent).len() < 12, "a quick disk: {output}");
    Ok(())
}

/// A disk with a cache and a file system, whose timer takes so many ns for each flush and for each write; and
/// whether a flush comes after a write that has to be on the disk, for it cannot write past its cache.
fn cached(timer: u64) -> Result<(NullBlk, bool)> {
    let has_flush_after = fs::read_to_string("/sys/kernel/config/nullb/features")?.contains("fua");
    let past = if has_flush_after { "fua=0" } else { "" };
    let settings = format!("irqmode=2 completion_nsec={timer} memory_backed=1 size=64 {past}");
    let disk = NullBlk::new("cached", &format!("{settings} cache_size=8"))?;
    let mkfs = "mkfs.ext4 -q -N 32 -J size=4 -E lazy_itable_init=0";
    shell(&format!("{mkfs} /dev/{}; mkdir -p /mnt/cached; sync", disk.name))?;
    Ok((disk, has_flush_after))
}

/// Reads, writes, flushes, discards, zeroes, metadata.
fn operations(disk: &str) -> Result<String> {
    shell(&format!(
        "path=/dev/{disk}; dd if=$path of=/dev/null bs=4M count=2 iflag=direct status=none; \
         dd if=/dev/zero of=$path bs=4k count=3 oflag=direct conv=fsync status=none; \
         dd if=/dev/zero of=$path bs=64k count=3 oflag=dsync status=none; \
         blkdiscard -o 1M -l 1M $path || true; blkdiscard -z -o 1M -l 1M $path; \
         mkfs.ext4 -q -F $path 20M; mount $path /mnt; echo a >/mnt/a; sync; umount /mnt"
    ))
}

/// Operations and flags, in the letters of the tracepoint block_bio_queue.
fn has_blktraces_letters(lines: &[Value], disk: &str, events: &[Event]) -> Result<()> {
    let dev = format!("{} ", disks::numbers(disk)?.replace(':', ","));
    let of_disk = events.iter().filter(|event| event.text.starts_with(&dev));
    let mut theirs: Vec<&str> = of_disk.filter_map(|event| event.text.split(' ').nth(1)).collect();
    let ours = lines.iter().filter_map(|line| line["operation"].as_str());
    // Older kernels have no letter for zeroes that are written.
    let has_zeroes = theirs.iter().any(|letters| letters.contains("WZ"));
    let mut ours: Vec<String> =
        ours.map(|ours| if has_zeroes { ours.into() } else { ours.replace("WZ", "N") }).collect();
    // The tracepoint has the order of the submissions, a line that of the ends.
    theirs.sort();
    ours.sort();
    ensure!(ours == theirs, "letters: {ours:?}, blktrace: {theirs:?}");
    ours.dedup();
    ensure!(ours.len() >= 6, "only {ours:?}");
    Ok(())
}

/// The table of each disk is the sum of its lines, and so are its causes, to the nanosecond.
fn adds_up(output: &str, lines: &[Value]) -> Result<()> {
    let (tables, causes) = (objects(output, "disk")?, objects(output, "cause")?);
    let bios: u64 = tables.iter().filter_map(|table| table["bios"].as_u64()).sum();
    ensure!(bios == lines.len() as u64, "{} lines: {tables:?}", lines.len());
    for table in &tables {
        let disk = table["disk"].as_str().context("no disk")?;
        let (lines, causes) = (of_disk(lines, disk), of_disk(&causes, disk));
        for name in ["wait", "queue", "device", "end", "mapper", "total"] {
            let (row, key) = (&table[name], format!("{name}_ns"));
            let mut all: Vec<u64> = lines.iter().filter_map(|line| line[&key].as_u64()).collect();
            all.sort();
            let (exact, of_causes) = (all.iter().sum::<u64>(), sum(&causes, name));
            ensure!(of_causes == exact, "{disk} {name}: lines {exact}, causes {of_causes}");
            let Some(max) = all.last() else {
                let none = row.is_null() && causes.iter().all(|cause| cause[&key].is_null());
                ensure!(none, "{disk}: no line has a {name}: {row}, {causes:?}");
                continue;
            };
            ensure!(
                row["sum_ns"] == exact && row["max_ns"] == *max,
                "{disk} {name}: {exact}, {max}: {row}"
            );
            for (percent, key) in [(50, "p50_ns"), (99, "p99_ns")] {
                let true_one = all[(all.len() * percent).div_ceil(100) - 1];
                let shown = row[key].as_u64().context("no percentile")?;
                let allowed = true_one..=true_one + true_one / 15 + 1;
                ensure!(allowed.contains(&shown), "{disk} {name} {key}: {true_one}: {row}");
            }
        }
    }
    Ok(())
}

/// Every object has the keys of its kind, which the README explains.
fn is_documented(output: &str) -> Result<()> {
    let readme = fs::read_to_string(workspace().join("tools/slow_io/README.md"))?;
    for kind in ["bio", "disk", "cause", "counters"] {
        let keys = |object: &Value| -> Vec<String> {
            object.as_object().into_iter().flat_map(|object| object.keys().cloned()).collect()
        };
        let mut keys: Vec<_> = objects(output, kind)?.iter().map(keys).collect();
        keys.dedup();
        let [keys] = &keys[..] else { bail!("keys of {kind}: {keys:?}") };
        let unknown = keys.iter().find(|key| !readme.contains(&format!("`{key}`")));
        ensure!(unknown.is_none(), "the README does not explain {unknown:?} of {kind}");
    }
    Ok(())
}

/// What the ring buffer has no room for is counted. `blkdiscard` submits a bio of zeroes for each MiB.
fn slow_io_counts_lost_lines() -> Result<()> {
    const KEPT: u64 = ((4 << 20) - 1) / 144; // bytes of the buffer, which is never full, and of a bio in it
    shell("modprobe dm_zero")?;
    let zeros = Mapped::new("zeros", &format!("0 {} zero", 40_u64 << 21))?;
    let disk = zeros.disk()?;
    let options = ["--json", "--min", "0", "--top", "1", "--disk", &disk];
    let discard = format!("blkdiscard -z {}", zeros.path());
    let output = beside_a_stopped("slow_io", &options, || shell(&discard))?;
    let counters = objects(&output, "counters")?;
    let [lost, completed] =
        ["lost", "completed"].map(|name| counters[0][name].as_u64().unwrap_or(0));
    ensure!(lost > 0 && completed == lost + KEPT, "{lost} lost of {completed}, {KEPT} kept");
    Ok(())
}

/// A reader that is slower than the disk does not keep the stage from its end.
fn slow_io_ends_beside_a_busy_disk() -> Result<()> {
    let null = NullBlk::new("test", "")?;
    let options = "--iodepth=32 --numjobs=2 --time_based --runtime=580";
    let busy = fio_direct_command(&null.name, options);
    let mut busy = Running::bash(&format!("exec {busy}"))?;
    wait_until("the load", || Ok(disks::bios(&null.name)? > 2000))?;
    let stage = program("slow_io");
    let stage = format!("{} --min 0 --disk {} --duration 2s", stage.display(), null.name);
    let ended = Running::bash(&format!("{stage} | dd ibs=8 obs=64k status=none"))?.end()?;
    ensure!(busy.runs()?, "`slow_io` ran for as long as the disk was busy");
    let lines = ended.stdout.lines().count();
    ensure!(lines > 500, "{lines} lines, the test does not test");
    Ok(())
}

/// A disk without requests has no parts, and an error has its name.
fn slow_io_names_errors() -> Result<()> {
    const READS: usize = 12;
    let broken = Mapped::new("broken", "0 8000 error")?;
    // Its sector 0x1234 has a medium error.
    let debug = ScsiDebug::new("opts=2 dev_size_mb=64 ndelay=20000000 random=1")?;
    fs::write(format!("/sys/block/{}/queue/max_sectors_kb", debug.name), "64")?;
    let skip = 582 * 4096;
    let read = |path: &str, options: &str| {
        format!("! dd if={path} of=/dev/null count=1 {options} status=none 2>&1; ")
    };
    let debugs = format!("/dev/{}", debug.name);
    let loads = read(&broken.path(), "bs=4k iflag=direct")
        + &read(&debugs, "bs=4k skip=582 iflag=direct")
        + &read(&debugs, &format!("bs=128k skip={skip} iflag=direct,skip_bytes")).repeat(READS);
    let (_, lines) = traced(&[], || shell(&loads))?;

    let failed = of_disk(&lines, &broken.disk()?);
    ensure!(!failed.is_empty() && failed.iter().all(|line| line["error"] == "EIO"), "{failed:?}");
    let is_unknown = NAMES.iter().all(|name| failed[0][name].is_null());
    ensure!(is_unknown, "no request, and parts: {failed:?}");
    let mut of_debug = of_disk(&lines, &debug.name);
    of_debug.retain(|line| line["process"] == "dd");
    let (one, split): (Vec<_>, Vec<_>) =
        of_debug.into_iter().partition(|line| line["bytes"] == 4096);
    ensure!(one.len() == 1 && one[0]["error"] == "ENODATA", "a medium error: {one:?}");
    ensure!(part(&one[0], "device") > 0, "{one:?}");
    // Of a bio in two parts, the first one fails, and is in every second case the last to complete: then the
    // whole gets its error only after that part's bio_endio().
    let in_parts = split.iter().all(|line| line["requests"].as_u64() > Some(1));
    ensure!(split.len() == READS && in_parts, "{} of {READS} in parts: {split:?}", split.len());
    ensure!(split.iter().all(|line| line["error"] == "ENODATA"), "errors of parts: {split:?}");
    Ok(())
}

/// A disk of zones: what blkzone asked for, with the letter and the sector of each command, though it carries no data.
fn slow_io_names_commands_for_zones() -> Result<()> {
    let disk = NullBlk::new("zoned", "zoned=1 zone_size=4 size=64")?;
    let commands = [("open", "ZO"), ("close", "ZC"), ("finish", "ZF"), ("reset", "ZR")];
    let zones = [0, 16384, 24576];
    let ask = |(what, _): &(&str, &str)| {
        zones.map(|at| format!("blkzone {what} -o {at} -l 8192 /dev/{}; ", disk.name)).concat()
    };
    let (_, lines) =
        traced(&["--disk", &disk.name], || shell(&commands.each_ref().map(ask).concat()))?;
    let named = |line: &Value| {
        let letters = line["operation"].as_str()?.get(..2)?.to_owned();
        Some((letters, line["sector"].as_u64()?, line["bytes"].as_u64()?))
    };
    let seen: Vec<_> = lines.iter().filter_map(named).collect();
    let asked =
        commands.iter().flat_map(|(_, letters)| zones.map(|at| (letters.to_string(), at, 0)));
    ensure!(seen == asked.collect::<Vec<_>>(), "{lines:?}");
    Ok(())
}

/// Bios of files: through the page cache and past it, of one with two names, of deleted ones, below a loop device. Each
/// byte that was asked for is of the file that stat(1) knows; what is of the disk or of its journal is of none.
fn slow_io_names_files() -> Result<()> {
    const ALL: &str = "deep/read linked closed deleted image deep/written";
    const BYTES: u64 = 256 << 10;
    let disk = NullBlk::new("files", "memory_backed=1 size=128")?;
    let _mounted = Mounted::made("ext4", &disk.name, "noatime")?;
    let inodes = shell(&format!(
        "modprobe loop; mkdir -p /run/ext4/one/deep; cd /run/ext4/one; \
         for file in {ALL}; do head -c {BYTES} /dev/urandom >$file; done; : >deep/written; \
         ln linked second; sync; echo 3 >/proc/sys/vm/drop_caches; stat -c %i {ALL}"
    ))?;
    let [read, linked, closed, deleted, image, written] =
        inodes.lines().collect::<Vec<_>>().try_into().map_err(|_| anyhow!("{inodes}"))?;
    let options = |more| [&["--min", "0", "--file", "--disk", &disk.name][..], more].concat();
    let running = Running::stages([("slow_io", options(&["--json"])), ("slow_io", options(&[]))])?;
    let dd = "dd bs=64k status=none";
    shell(&format!(
        "cd /run/ext4/one; cat deep/read linked >/dev/null; {dd} iflag=direct if=second of=/dev/null; \
         exec 3<closed 4<deleted; rm closed deleted; cat <&3 >/dev/null; {dd} iflag=direct <&4 >/dev/null; \
         loop=$(losetup -f --show --direct-io=on image); {dd} if=$loop of=/dev/null; losetup -d $loop; \
         {dd} count=4 if=/dev/zero of=deep/written conv=fsync; \
         dd bs=4k count=1 seek=37 if=/dev/zero of=deep/written conv=fsync,notrunc status=none; \
         {dd} count=4 if=/dev/zero of=deep/written oflag=direct conv=notrunc; \
         for flag in direct sync; do {dd} if=/dev/{} skip=2000 count=4 iflag=$flag of=/dev/null; done",
        disk.name
    ))?;
    let outputs = Running::interrupt_all(running)?;

    let mut found = BTreeMap::new();
    let lines = objects(&outputs[0], "bio")?;
    let (files, others): (Vec<_>, Vec<_>) = lines.iter().partition(|line| line["inode"].is_u64());
    for line in files {
        let operation = line["operation"].as_str().context("operation")?;
        let file = ["inode", "links", "path"].map(|key| line[key].to_string()).join(" ");
        *found.entry(format!("{} {file}", &operation[..1])).or_default() +=
            line["bytes"].as_u64().unwrap_or(0);
    }
    let expected = BTreeMap::from([
        (format!("R {read} 1 \"/one/deep/read\""), BYTES),
        (format!("R {linked} 2 null"), BYTES),
        (format!("R {linked} 2 \"/one/second\""), BYTES),
        (format!("R {closed} 0 null"), BYTES),
        (format!("R {deleted} 0 null"), BYTES),
        (format!("R {image} 1 \"/one/image\""), BYTES),
        (format!("W {written} 1 \"/one/deep/written\""), 2 * BYTES + 4096),
    ]);
    ensure!(found == expected, "{expected:?}, but {found:?}");
    let raw = others.iter().filter(|line| line["sector"].as_u64() >= Some(2000 * 128));
    let raw: u64 = raw.filter_map(|line| line["bytes"].as_u64()).sum();
    let journal = others.iter().filter(|line| line["process"].to_string().contains("jbd2"));
    ensure!(raw >= 2 * BYTES && journal.count() > 0, "{raw} bytes: {others:?}");
    let mut shown =
        [(read, "/one/deep/read"), (linked, "/one/second"), (closed, "(deleted)")].into_iter();
    let is_shown = shown.all(|(inode, path)| outputs[1].contains(&format!(" {inode} {path}")));
    ensure!(is_shown, "{}", outputs[1]);
    Ok(())
}

/// Two cgroups on one disk. `io` is not enabled below the second one; the first one's write goes to the page cache,
/// and a kernel thread writes it back. No wall-clock time is outside of the run.
fn slow_io_knows_whose_cgroup_and_when() -> Result<()> {
    let disk = NullBlk::new("shared", "memory_backed=1 size=64")?;
    let mounted = Mounted::made("ext4", &disk.name, "noatime")?;
    shell("sync -f /run/ext4")?;
    throttle(&disk.name)?; // mounts the file system of cgroups
    let control = "rmdir throttled; echo +memory >cgroup.subtree_control; mkdir -p one two/below";
    shell(&format!("cd /sys/fs/cgroup; {control}"))?;
    let options = |cgroup, others| [&["--min", "0", "--time", "wall", cgroup][..], others].concat();
    let running = Running::stages([
        ("slow_io", options("--cgroup=one", &["--json"])),
        ("slow_io", options("--cgroup=/sys/fs/cgroup/two/", &[])),
        ("slow_io", options("--cgroup", &["--json", "--disk", &disk.name])),
    ])?;
    let within = |cgroup: &str, load: &str| {
        shell(&format!("sh -c 'echo $$ >/sys/fs/cgroup/{cgroup}/cgroup.procs; exec {load}'"))
    };
    let began: u64 = shell("date +%s%N")?.trim().parse()?;
    within("one", &reads(&disk.name, 10))?;
    within("two/below", &reads(&disk.name, 12))?;
    within("one", "dd if=/dev/zero of=/run/ext4/file bs=1M count=1 status=none")?;
    mounted.unmount()?;
    let ended: u64 = shell("date +%s%N")?.trim().parse()?;
    let outputs = Running::interrupt_all(running)?;
    shell("cd /sys/fs/cgroup; rmdir one two/below two")?;
    for (output, of_two) in [(&outputs[0], 0), (&outputs[2], 12)] {
        let lines = objects(output, "bio")?;
        let of = |cgroup: &str, by: &str| -> Vec<&Value> {
            let of = lines.iter().filter(|line| line["cgroup"] == cgroup);
            of.filter(|line| line["operation"] == by).collect()
        };
        let reads = [of("/one", "RS").len(), of("/two/below", "RS").len()];
        let others = lines.iter().any(|line| line["cgroup"] != "/one");
        ensure!(reads == [10, of_two] && others == (of_two > 0), "{reads:?}: {output}");
        let writes = of("/one", "W");
        let bytes: u64 = writes.iter().filter_map(|line| line["bytes"].as_u64()).sum();
        let by_dd = writes.iter().any(|line| line["process"] == "dd");
        ensure!(bytes == 1 << 20 && !by_dd, "written back: {writes:?}");
        // The file system wrote its own before that, too.
        let of_ours = lines.iter().filter(|line| line["cgroup"] != "/");
        let mut times = of_ours.map(|line| line["ended_wall_ns"].as_u64().unwrap_or(0));
        ensure!(times.all(|time| (began..=ended).contains(&time)), "{began} to {ended}: {output}");
    }
    // The columns show the same times and cgroups.
    let day = shell(&format!("date -u +%FT -d @{}", ended / 1_000_000_000))?;
    let lines: Vec<_> = outputs[1].lines().filter(|line| line.contains(" RS ")).collect();
    let odd = lines.iter().any(|l| !l.starts_with(day.trim()) || !l.ends_with(" /two/below"));
    ensure!(lines.len() == 12 && !odd, "{}", outputs[1]);
    Ok(())
}

/// Before one slow read, quick ones, of which the flight recorder shows those of the same disk.
fn slow_io_records_what_came_before() -> Result<()> {
    // On whichever CPUs they end, a recorder that keeps eight of each program and CPU does not have all of them.
    const QUICK: u32 = 40;
    let null = NullBlk::new("test", "")?;
    let table = format!("0 8000 linear /dev/{0} 0;8000 8000 delay /dev/{0} 8000 300", null.name);
    let mapped = Mapped::new("record", &table)?;
    let quick = [reads(&mapped.path(), QUICK), reads(&null.name, 9)].join("; ");
    let load = format!("{quick}; {} skip=1000", reads(&mapped.path(), 1));
    let options = ["--json", "--min", "200ms", "--before", "20s"];
    let (_, output) = beside("slow_io", &options, || shell(&load))?;
    let lines = objects(&output, "bio")?;
    let disk = mapped.disk()?;
    let mut delayed = of_disk(&lines, &disk);
    delayed.retain(|line| line["sector"] == 8000);
    ensure!(delayed.len() == 1 && delayed[0]["before"] == false, "{delayed:?}: {output}");
    // A quick read is slow where its CPU stood still for so long; then it is shown for that.
    let is_slow = |line: &Value| line["total_ns"].as_u64() >= Some(200_000_000);
    ensure!(lines.iter().all(|line| line["before"] == !is_slow(line)), "{output}");
    let quick = lines.iter().filter(|line| line["process"] == "dd" && line["sector"] != 8000);
    let of_disk = quick.clone().filter(|line| line["disk"] == disk.as_str()).count();
    ensure!(of_disk == QUICK as usize, "{of_disk} reads before: {output}");
    let elsewhere = quick.filter(|line| line["disk"] != disk.as_str()).all(is_slow);
    ensure!(elsewhere, "reads of another disk were shown: {output}");
    let times: Vec<Option<u64>> = lines.iter().map(|line| line["ended_ns"].as_u64()).collect();
    ensure!(times.is_sorted(), "{output}");
    wait_until("no I/O is on its way", || Ok(disks::in_flight(&null.name)? == 0))
}
