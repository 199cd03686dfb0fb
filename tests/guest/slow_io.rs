//! `slow_io` beside the block layer's tracepoints, and beside delays that are put into one part.

use std::{collections::HashMap, fs, time::Duration};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    disks::{self, Mapped, NullBlk, ScsiDebug},
    ftrace::{Event, Ftrace, Hook},
    run::{
        Running, compared, count, fio, fio_command, judged_weakly, may_skip, not_judged, program,
        shell, stage, wait_until, workspace,
    },
};

tests![
    slow_io_has_blktraces_parts,
    slow_io_blames_the_right_part,
    slow_io_knows_operations_by_blktraces_letters,
    slow_io_adds_up_what_it_shows,
    slow_io_counts_lost_lines,
    slow_io_ends_beside_a_busy_disk,
    slow_io_names_errors,
    slow_io_shows_flushes_around_a_write,
    slow_io_has_no_wait_without_statistics,
    slow_io_has_documented_json,
    slow_io_measures_all_of_64_threads,
    slow_io_shows_what_is_wanted,
    slow_io_records_what_came_before,
];

const NAMES: [&str; 5] = ["wait_ns", "queue_ns", "device_ns", "end_ns", "mapper_ns"];

/// The output of `slow_io` beside a process that may read 20 times a second.
pub fn throttled() -> Result<String> {
    let disk = disks::virtio()?;
    let cgroup = throttle(&disk)?;
    let running = Running::stage("slow_io", &[])?;
    let read = read_throttled(&cgroup, &disk, 10);
    let output = running.interrupt();
    shell(&format!("rmdir {cgroup}"))?;
    read?;
    output
}

/// Makes a cgroup that may read 20 times a second from this disk.
pub fn throttle(disk: &str) -> Result<String> {
    let (numbers, cgroup) = (disks::numbers(disk)?, "/sys/fs/cgroup/throttled");
    shell(&format!(
        "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup; \
         echo +io >/sys/fs/cgroup/cgroup.subtree_control; mkdir -p {cgroup}; \
         echo '{numbers} riops=20' >{cgroup}/io.max"
    ))?;
    Ok(cgroup.to_owned())
}

fn read_throttled(cgroup: &str, disk: &str, reads: u32) -> Result<()> {
    let dd = format!("dd if=/dev/{disk} of=/dev/null bs=4k count={reads} iflag=direct status=none");
    shell(&format!("bash -c 'echo $$ >{cgroup}/cgroup.procs; exec {dd}'"))?;
    Ok(())
}

/// The JSON objects of an output, of one kind.
fn objects(output: &str, kind: &str) -> Result<Vec<Value>> {
    let lines = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    Ok(lines.into_iter().filter(|line| line["kind"] == kind).collect())
}

/// The lines of `slow_io --json --min 0` for the bios of this disk while a load runs.
fn lines_of(disk: &str, load: impl FnOnce() -> Result<()>) -> Result<Vec<Value>> {
    let running = Running::stage("slow_io", &["--json", "--min", "0", "--disk", disk])?;
    load()?;
    let output = running.interrupt()?;
    let lines = objects(&output, "bio")?;
    for line in &lines {
        adds_up(line)?;
    }
    let counters = objects(&output, "counters")?;
    ensure!(counters.len() == 1 && counters[0]["completed"] == lines.len(), "{counters:?}");
    ensure!(counters[0]["lost"] == 0 && counters[0]["dropped"] == 0, "{counters:?}");
    Ok(lines)
}

/// The parts of every bio are its latency.
fn adds_up(line: &Value) -> Result<()> {
    let parts: Vec<u64> = NAMES.iter().filter_map(|name| line[name].as_u64()).collect();
    let total = line["total_ns"].as_u64().context("no total")?;
    ensure!(parts.is_empty() || parts.iter().sum::<u64>() == total, "{line}");
    Ok(())
}

fn part(line: &Value, name: &str) -> u64 {
    line[format!("{name}_ns")].as_u64().unwrap_or(0)
}

fn sum(lines: &[Value], name: &str) -> u64 {
    lines.iter().map(|line| part(line, name)).sum()
}

fn median(mut times: Vec<u64>) -> u64 {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or(0)
}

/// The ends of the parts of a read: submit_bio(), blktrace's G, D and C, bio_endio().
const STEPS: [&str; 5] =
    ["submit_bio", "block_getrq", "block_rq_issue", "block_rq_complete", "bio_endio"];

/// When ftrace saw a step of a read, and its events before and after it in that task or interrupt, in ns: a
/// hook of ours at the same place runs between them.
#[derive(Clone, Copy)]
struct Moment {
    before: u64,
    time: u64,
    after: u64,
}

/// The steps of each read of a disk, by its sector.
fn steps(disk: &str, events: &[Event]) -> Result<HashMap<u64, [Option<Moment>; 5]>> {
    let dev = fs_numbers(disk)?;
    const ROUNDED: u64 = 1000; // ftrace rounds down to microseconds
    let mut moments: Vec<Moment> = Vec::new();
    let mut last: HashMap<(char, String), usize> = HashMap::new();
    for (number, event) in events.iter().enumerate() {
        let in_task = event.interrupt == '.';
        let place = if in_task { event.task.clone() } else { event.cpu.to_string() };
        let before = last.insert((event.interrupt, place), number);
        if let Some(before) = before {
            moments[before].after = event.time + ROUNDED;
        }
        let before = before.map_or(event.time, |before| moments[before].time);
        moments.push(Moment { before, time: event.time, after: event.time + ROUNDED });
    }
    let mut steps: HashMap<u64, [Option<Moment>; 5]> = HashMap::new();
    let (mut submitted, mut completed) = (HashMap::new(), HashMap::new());
    for (event, moment) in events.iter().zip(moments) {
        match event.name.as_str() {
            "submit_bio" => {
                submitted.insert(&event.task, moment);
            }
            "bio_endio" => {
                if let Some(sector) = completed.remove(&event.cpu) {
                    steps.entry(sector).or_default()[4] = Some(moment);
                }
            }
            _ if !event.text.starts_with(&dev) => {} // another disk's, or of none
            "block_bio_queue" => {
                let read = steps.entry(event.sector()?).or_default();
                read[0] = submitted.remove(&event.task);
            }
            name => {
                let sector = event.sector()?;
                let step = STEPS.iter().position(|step| *step == name).context("odd event")?;
                steps.entry(sector).or_default()[step] = Some(moment);
                if name == "block_rq_complete" {
                    completed.insert(event.cpu, sector);
                }
            }
        }
    }
    Ok(steps)
}

/// The times between submit_bio(), blktrace's G, D and C, and bio_endio() of each read are the parts of
/// its line. blktrace's Q comes after submit_bio(), and after a cgroup's limit. A task or a CPU may have to
/// wait between ftrace's hook and ours, so each time is compared with the earliest and the latest moments at
/// which ours can have run.
fn slow_io_has_blktraces_parts() -> Result<()> {
    if shell("uname -r")?.contains("-rt") {
        // Measured: 16 of 300 waits lay outside of what ftrace allows, by up to 2 ms.
        return not_judged("softirqs are tasks there: ftrace's neighbouring events are no bounds");
    }
    let null = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "3000000")])?;
    for disk in [disks::virtio()?, disks::nvme()?, disks::scsi()?, null.name.clone()] {
        let judge = Ftrace::new(&[
            Hook::Call("submit_bio"),
            Hook::Tracepoint("block/block_bio_queue", ""),
            Hook::Tracepoint("block/block_getrq", ""),
            Hook::Tracepoint("block/block_rq_issue", ""),
            Hook::Tracepoint("block/block_rq_complete", ""),
            Hook::Call("bio_endio"),
            // What is before and after them.
            Hook::Tracepoint("syscalls/sys_enter_io_submit", ""),
            Hook::Tracepoint("syscalls/sys_exit_io_submit", ""),
            Hook::Call("blk_add_timer"),
            Hook::Tracepoint("irq/irq_handler_entry", ""),
            Hook::Tracepoint("irq/irq_handler_exit", ""),
            Hook::Tracepoint("irq/softirq_entry", ""),
            Hook::Tracepoint("irq/softirq_exit", ""),
            Hook::Tracepoint("timer/hrtimer_expire_entry", ""),
        ])?;
        let mut events = Vec::new();
        let lines = lines_of(&disk, || {
            judge.events()?;
            fio(&format!(
                "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
                 --number_ios=300 --size=128M"
            ))?;
            events = judge.events()?;
            Ok(())
        })?;
        let steps = steps(&disk, &events)?;
        let fios: Vec<&Value> = lines.iter().filter(|line| line["process"] == "fio").collect();
        let some_skipped = may_skip()? && (270..300).contains(&fios.len());
        ensure!(some_skipped || fios.len() >= 300, "{disk}: {} of 300 reads", fios.len());
        if some_skipped {
            judged_weakly(&format!("{disk}: {} of 300 reads were measured", fios.len()));
        }
        let judged: Vec<(&Value, Vec<Moment>)> = fios
            .into_iter()
            .filter_map(|line| {
                let steps = steps.get(&line["sector"].as_u64()?)?;
                Some((line, steps.iter().copied().collect::<Option<_>>()?))
            })
            .collect();
        ensure!(judged.len() >= 250, "{disk}: {} reads with all of ftrace's times", judged.len());
        for (number, name) in ["wait", "queue", "device", "end"].into_iter().enumerate() {
            let (mut apart, mut widths) = (Vec::new(), Vec::new());
            for (line, steps) in &judged {
                let (from, to, mine) = (steps[number], steps[number + 1], part(line, name));
                let least = to.before.saturating_sub(from.after);
                let most = to.after.saturating_sub(from.before);
                if !(least..=most).contains(&mine) {
                    apart.push(format!("{mine} ns, ftrace {least} to {most}"));
                }
                widths.push(most - least);
            }
            let width = median(widths);
            compared(&format!("{disk}: {name}: {} times differ, p50 of {width} ns", apart.len()));
            // A real-time kernel runs softirqs in tasks: their events are not the task's own.
            let (some, few) =
                (apart.len() * 100 > judged.len(), apart.len() * 100 <= judged.len() * 5);
            ensure!(!some || few && may_skip()?, "{disk}: {name}: {apart:#?}");
            if some {
                judged_weakly(&format!("{disk}: {name}: {} times differ", apart.len()));
            }
            if width > 500_000 {
                judged_weakly(&format!(
                    "{disk}: {name}: ftrace knows half of the times to {width} ns"
                ));
            }
        }
    }
    Ok(())
}

/// `252,0 `
fn fs_numbers(disk: &str) -> Result<String> {
    Ok(format!("{} ", disks::numbers(disk)?.replace(':', ",")))
}

/// A delay in one place is blamed on that part, and on no other one: at least 95 % of each bio's time. Of one
/// in ten it may be less, for a busy host may stop the guest's CPU anywhere.
fn slow_io_blames_the_right_part() -> Result<()> {
    let blamed = |what: &str, lines: &[Value], name: &str, least: u64| -> Result<()> {
        let blamed = sum(lines, name);
        ensure!(blamed >= least, "{what}: {blamed} ns of {least} are in {name}: {lines:?}");
        // Of bios that the cgroup lets pass two at a time, one has not waited.
        let delayed = lines.iter().filter(|line| part(line, "total") >= 40_000_000);
        let (delayed, others): (Vec<_>, Vec<_>) =
            delayed.partition(|line| part(line, name) * 100 >= part(line, "total") * 95);
        ensure!(
            others.len() * 9 <= delayed.len(),
            "{what}: not in {name}: {others:?} of {lines:?}"
        );
        Ok(())
    };
    let read = |device: &str, options: &str| -> Result<()> {
        fio(&format!("--filename={device} --rw=randread --bs=4k --direct=1 --size=16M {options}"))?;
        Ok(())
    };

    // null_blk's timer: the device.
    let null = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "60000000")])?;
    let path = format!("/dev/{}", null.name);
    let lines = lines_of(&null.name, || read(&path, "--ioengine=psync --number_ios=10"))?;
    blamed("a timer of 60 ms", &lines, "device", 10 * 60_000_000)?;
    drop(null);

    // One tag for eight threads: seven of them wait.
    let null = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "20000000"),
        ("hw_queue_depth", "1"),
        ("submit_queues", "1"),
    ])?;
    let path = format!("/dev/{}", null.name);
    shell(&format!("echo none >/sys/block/{}/queue/scheduler", null.name))?;
    let lines = lines_of(&null.name, || {
        read(&path, "--ioengine=psync --numjobs=8 --thread --number_ios=5")
    })?;
    let (wait, device, total) = (sum(&lines, "wait"), sum(&lines, "device"), sum(&lines, "total"));
    ensure!(
        wait > 2 * device && (wait + device) * 100 > total * 95,
        "one tag: {wait} of {total}: {lines:?}"
    );

    // The same with a scheduler: they have a request, which waits for the disk.
    for scheduler in ["mq-deadline", "bfq"] {
        shell(&format!(
            "modprobe -q {scheduler}; cd /sys/block/{}/queue; echo {scheduler} >scheduler; echo 64 >nr_requests",
            null.name
        ))?;
        let lines =
            lines_of(&null.name, || read(&path, "--ioengine=libaio --iodepth=8 --number_ios=30"))?;
        let (queue, device, total) =
            (sum(&lines, "queue"), sum(&lines, "device"), sum(&lines, "total"));
        ensure!(
            queue > 2 * device && (queue + device) * 100 > total * 95,
            "{scheduler}: {queue} of {total}: {lines:?}"
        );
    }
    drop(null);

    // A cgroup that may do 20 reads a second: they wait before they have a request.
    let null = NullBlk::new(&[])?;
    let cgroup = throttle(&null.name)?;
    let lines = lines_of(&null.name, || read_throttled(&cgroup, &null.name, 30));
    shell(&format!("rmdir {cgroup}"))?;
    blamed("io.max", &lines?, "wait", 1_000_000_000)?;

    // dm-delay: device mapper.
    let slow = Mapped::new("slow", &format!("0 20000 delay /dev/{} 0 50", null.name))?;
    let lines = lines_of(&slow.disk()?, || read(&slow.path(), "--ioengine=psync --number_ios=10"))?;
    blamed("dm-delay", &lines, "mapper", 10 * 44_000_000)?;
    let twice = Mapped::new("twice", &format!("0 20000 linear {} 0", slow.path()))?;
    let lines =
        lines_of(&twice.disk()?, || read(&twice.path(), "--ioengine=psync --number_ios=10"))?;
    blamed("dm-linear on dm-delay", &lines, "mapper", 10 * 44_000_000)?;
    drop(twice);
    drop(slow);
    drop(null);

    if shell("uname -r")?.contains("-rt") {
        judged_weakly(
            "real-time threads keep a real-time kernel's timers waiting, and so this test",
        );
        return Ok(());
    }
    // A thread of the kernel verifies checksums after the disk, and real-time threads keep every CPU.
    // With a scheduler, another thread of the kernel would have to give the request to the driver. The shell
    // has the highest priority: else it waits for the CPU itself, and dd starts when the loops have ended.
    let debug = ScsiDebug::new("dif=1 dix=1 dev_size_mb=64")?;
    shell(&format!("echo none >/sys/block/{}/queue/scheduler", debug.name))?;
    let lines = lines_of(&debug.name, || {
        // `timeout` has a priority above the loop that it ends.
        shell(&format!(
            "chrt -f 20 sh -c 'for cpu in $(seq 0 $(($(nproc) - 1))); do \
               taskset -c $cpu chrt -f 15 timeout 4 chrt -f 10 sh -c \"while :; do :; done\" & done; \
             sleep 1; dd if=/dev/{} of=/dev/null bs=4k count=30 iflag=direct status=none; wait'",
            debug.name
        ))?;
        Ok(())
    })?;
    let is_kept = |line: &&Value| part(line, "total") > 100_000_000;
    let of_dd = lines.iter().filter(|line| line["process"] == "dd").cloned();
    let (kept, others): (Vec<Value>, Vec<Value>) = of_dd.partition(|line| is_kept(&line));
    // The disk's own time is no delay.
    let usual = median(others.iter().map(|line| part(line, "device")).collect());
    // Where the interrupt leaves its softirq to ksoftirqd, which waits as well, it is the device's time.
    let (device, end, total) = (sum(&kept, "device"), sum(&kept, "end"), sum(&kept, "total"));
    ensure!((device + end) * 100 >= total * 95, "a busy CPU: {end} of {total}: {kept:?}");
    let is_end =
        |line: &&Value| part(line, "end") * 100 >= part(line, "total").saturating_sub(usual) * 95;
    let seen = kept.iter().any(|line| is_end(&line));
    ensure!(seen || kept.len() < 3, "a busy CPU: no read has its time in end: {lines:?}");
    if !seen {
        judged_weakly(&format!(
            "the busy CPU has kept {} of 30 reads, and none at its end",
            kept.len()
        ));
    }
    Ok(())
}

/// Operations and flags, in the letters of the tracepoint block_bio_queue.
fn slow_io_knows_operations_by_blktraces_letters() -> Result<()> {
    let disk = disks::virtio()?;
    let judge = Ftrace::new(&[Hook::Tracepoint("block/block_bio_queue", "")])?;
    let path = format!("/dev/{disk}");
    let mut events = Vec::new();
    let lines = lines_of(&disk, || {
        judge.events()?;
        shell(&format!("dd if={path} of=/dev/null bs=4k count=3 iflag=direct status=none"))?;
        shell(&format!(
            "dd if=/dev/zero of={path} bs=4k count=3 oflag=direct conv=fsync status=none"
        ))?;
        shell(&format!("dd if=/dev/zero of={path} bs=64k count=3 oflag=dsync status=none"))?;
        shell(&format!("blkdiscard -o 1M -l 1M {path} || true; blkdiscard -z -o 1M -l 1M {path}"))?;
        shell(&format!(
            "mkfs.ext4 -q -F {path} 20M; mount {path} /mnt; echo a >/mnt/a; sync; umount /mnt"
        ))?;
        events = judge.events()?;
        Ok(())
    })?;
    let dev = fs_numbers(&disk)?;
    let mut theirs: Vec<String> = Vec::new();
    for event in events.iter().filter(|event| event.text.starts_with(&dev)) {
        theirs.extend(event.text.split(' ').nth(1).map(str::to_owned));
    }
    let mut ours: Vec<String> = Vec::new();
    for line in &lines {
        ours.extend(line["operation"].as_str().map(str::to_owned));
    }
    // Older kernels have no letter for zeroes that are written.
    if !theirs.iter().any(|letters| letters.contains("WZ")) {
        ours.iter_mut().for_each(|letters| *letters = letters.replace("WZ", "N"));
    }
    // The tracepoint has the order of the submissions, a line that of the ends.
    theirs.sort();
    ours.sort();
    ensure!(ours == theirs, "{ours:?}, blktrace: {theirs:?}");
    let kinds: std::collections::BTreeSet<&String> = ours.iter().collect();
    ensure!(kinds.len() >= 6, "only {kinds:?}");
    Ok(())
}

/// The table of a disk is the sum of its lines, and so are the causes, to the nanosecond.
fn slow_io_adds_up_what_it_shows() -> Result<()> {
    let disk = disks::virtio()?;
    let arguments = ["--json", "--min", "0", "--disk", &disk, "--who", "stack"];
    let running = Running::stage("slow_io", &arguments)?;
    let report = fio(&format!(
        "--filename=/dev/{disk} --rw=randrw --bs=4k --direct=1 --ioengine=libaio --iodepth=8 --number_ios=400 --size=64M"
    ))?;
    let output = running.interrupt()?;
    let (lines, causes) = (objects(&output, "bio")?, objects(&output, "cause")?);
    let total = |rows: &[Value], key: &str| {
        rows.iter().map(|row| row[key].as_u64().unwrap_or(0)).sum::<u64>()
    };
    let disks = objects(&output, "disk")?;
    ensure!(
        disks.len() == 1 && disks[0]["bios"] == lines.len(),
        "{} lines: {disks:?}",
        lines.len()
    );
    for name in ["wait", "queue", "device", "end", "total"] {
        let (row, mut all): (&Value, Vec<u64>) =
            (&disks[0][name], lines.iter().map(|line| part(line, name)).collect());
        all.sort();
        let exact: u64 = all.iter().sum();
        ensure!(
            row["sum_ns"] == exact && row["max_ns"] == all[all.len() - 1],
            "{name}: {exact}: {row}"
        );
        ensure!(total(&causes, &format!("{name}_ns")) == exact, "{name}: {exact}: {causes:?}");
        for (percent, key) in [(50, "p50_ns"), (99, "p99_ns")] {
            let true_one = all[(all.len() * percent).div_ceil(100) - 1];
            let shown = row[key].as_u64().context("no percentile")?;
            ensure!(
                (true_one..=true_one + true_one / 15 + 1).contains(&shown),
                "{name} {key}: {true_one}: {row}"
            );
        }
    }
    for (operation, key) in [("R", "read"), ("W", "write")] {
        let is_of = |row: &&Value| row["process"] == "fio" && row["operation"] == operation;
        let of_fio: Vec<Value> = causes.iter().filter(is_of).cloned().collect();
        let stack = |row: &Value| row["stack"].to_string().contains("io_submit");
        ensure!(!of_fio.is_empty() && of_fio.iter().any(stack), "{causes:?}");
        ensure!(
            total(&of_fio, "bytes") >= report[key]["io_bytes"].as_u64().unwrap_or(0),
            "{causes:?}"
        );
    }

    // There is room for one cause only.
    let running = Running::stage("slow_io", &["--disk", &disk, "--who", "--causes", "1"])?;
    let path = format!("/dev/{disk}");
    shell(&format!("dd if={path} of=/dev/null bs=4k count=3 iflag=direct status=none"))?;
    shell(&format!("dd if=/dev/zero of={path} bs=4k count=5 oflag=direct status=none"))?;
    let output = running.interrupt()?;
    ensure!(count(&output, "without a cause")? >= 5, "{output}");
    Ok(())
}

/// What the ring buffer has no room for is counted.
fn slow_io_counts_lost_lines() -> Result<()> {
    let null = NullBlk::new(&[])?;
    let running = Running::stage("slow_io", &["--json", "--min", "0", "--disk", &null.name])?;
    running.signal(Signal::STOP)?;
    fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=psync --loops=2 --size=64M",
        null.name
    ))?;
    running.signal(Signal::CONT)?;
    let output = running.interrupt()?;
    let (lines, counters) = (objects(&output, "bio")?.len() as u64, objects(&output, "counters")?);
    let (lost, completed) = (counters[0]["lost"].as_u64(), counters[0]["completed"].as_u64());
    ensure!(
        lost > Some(0) && lost.map(|lost| lost + lines) == completed,
        "{lines} lines: {counters:?}"
    );
    ensure!(completed >= Some(30000), "{counters:?}");
    Ok(())
}

/// A reader that is slower than the disk does not keep the stage from its end.
fn slow_io_ends_beside_a_busy_disk() -> Result<()> {
    let null = NullBlk::new(&[])?;
    let busy = fio_command(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=32 --numjobs=2 \
         --thread --time_based --runtime=580",
        null.name
    ));
    let mut busy = Running::bash(&format!("exec {busy}"))?;
    // The shell reads each byte by a system call.
    let lines = format!("{} --min 0 --duration 2s 2>/dev/null", program("slow_io").display());
    let read = "sh -c 'n=0; while read -r line; do n=$((n + 1)); done; echo $n'";
    let mut stage = Running::bash(&format!("{lines} | {read}"))?;
    stage.wait_at_most(Duration::from_secs(500))?;
    let read: u64 = stage.end()?.stdout.trim().parse()?;
    ensure!(read > 1000, "{read} lines, the test does not test");
    ensure!(busy.runs()?, "`slow_io` ran for as long as the disk was busy");
    Ok(())
}

/// A disk without requests has no parts, and an error has its name.
fn slow_io_names_errors() -> Result<()> {
    let broken = Mapped::new("broken", "0 8000 error")?;
    let read = |path: &str, options: &str| {
        shell(&format!(
            "! dd if={path} of=/dev/null bs=4k count=1 {options} iflag=direct status=none 2>&1"
        ))
    };
    let lines = lines_of(&broken.disk()?, || read(&broken.path(), "").map(drop))?;
    ensure!(!lines.is_empty() && lines.iter().all(|line| line["error"] == "EIO"), "{lines:?}");
    ensure!(NAMES.iter().all(|name| lines[0][name].is_null()), "{lines:?}");
    drop(broken);
    // Its sector 0x1234 has a medium error.
    let debug = ScsiDebug::new("opts=2 dev_size_mb=64")?;
    let path = format!("/dev/{}", debug.name);
    let lines = lines_of(&debug.name, || read(&path, "skip=582").map(drop))?;
    let failed: Vec<&Value> = lines.iter().filter(|line| line["process"] == "dd").collect();
    ensure!(failed.len() == 1 && failed[0]["error"] == "ENODATA", "{lines:?}");
    ensure!(failed[0]["device_ns"].as_u64() > Some(0), "{lines:?}");
    drop(debug);
    // Of a bio in two parts, the first one fails, and is in every second case the last to complete: then the
    // whole gets its error only after that part's bio_endio().
    const READS: usize = 12;
    let debug = ScsiDebug::new("opts=2 dev_size_mb=64 ndelay=20000000 random=1")?;
    let path = format!("/dev/{}", debug.name);
    fs::write(format!("/sys/block/{}/queue/max_sectors_kb", debug.name), "64")?;
    let lines = lines_of(&debug.name, || {
        let read = format!(
            "! dd if={path} of=/dev/null bs=128k count=1 skip={} iflag=direct,skip_bytes status=none 2>&1",
            582 * 4096
        );
        (0..READS).try_for_each(|_| shell(&read).map(drop))
    })?;
    let is_split = |line: &&Value| line["process"] == "dd" && line["bytes"] == 128 << 10;
    let split: Vec<&Value> = lines.iter().filter(is_split).collect();
    let in_parts = split.iter().all(|line| line["requests"].as_u64() > Some(1));
    ensure!(split.len() == READS && in_parts, "{lines:?}");
    ensure!(split.iter().all(|line| line["error"] == "ENODATA"), "{split:?}");
    Ok(())
}

/// A flush before a write is in QUEUE, and one after it, where the disk cannot write past its cache, in END:
/// null_blk's timer takes 100 ms for each flush and for the write.
fn slow_io_shows_flushes_around_a_write() -> Result<()> {
    const TIMER: u64 = 100_000_000;
    let mut cached = vec![
        ("irqmode", "2"),
        ("completion_nsec", "100000000"),
        ("memory_backed", "1"),
        ("size", "64"),
        ("cache_size", "8"),
    ];
    let features = fs::read_to_string("/sys/kernel/config/nullb/features")?;
    let has_flush_after = features.contains("fua");
    if has_flush_after {
        cached.push(("fua", "0"));
    }
    let null = NullBlk::named("cached", &cached)?;
    let of_disk = |command: &str| shell(&command.replace("DISK", &format!("/dev/{}", null.name)));
    of_disk("mkfs.ext4 -q -N 32 -J size=4 -E lazy_itable_init=0 DISK")?;
    of_disk("mkdir -p /mnt/cached && mount DISK /mnt/cached && sync")?;
    let flushes = || disks::flushes(&null.name);
    let judged = || -> Result<(u64, Vec<Value>)> {
        let before = flushes()?;
        let lines = lines_of(&null.name, || {
            shell("dd if=/dev/zero of=/mnt/cached/file bs=4k count=1 conv=fsync").map(drop)
        })?;
        Ok((flushes()? - before, lines))
    };
    let judged = judged();
    shell("umount /mnt/cached")?;
    let (flushes, lines) = judged?;
    // The journal's commit block: a flush first, and the write past the cache.
    let is_commit =
        |line: &&Value| line["operation"].as_str().is_some_and(|o| o.starts_with("FWF"));
    let commits: Vec<&Value> = lines.iter().filter(is_commit).collect();
    let least = if has_flush_after { 2 } else { 1 };
    ensure!(!commits.is_empty() && flushes >= least, "{flushes} flushes: {lines:?}");
    for commit in commits {
        let [queue, device, end] = ["queue", "device", "end"].map(|name| part(commit, name));
        ensure!(queue >= TIMER && device >= TIMER, "{commit}");
        ensure!(end >= TIMER || !has_flush_after, "{commit}");
    }
    if !has_flush_after {
        judged_weakly("null_blk writes past its cache here: there is no flush after a write");
    }
    Ok(())
}

/// Without statistics nobody notes when a request is allocated, and on 7.2 it keeps an earlier time.
fn slow_io_has_no_wait_without_statistics() -> Result<()> {
    let disk = NullBlk::named("silent", &[("hw_queue_depth", "4"), ("submit_queues", "1")])?;
    let queue = format!("/sys/block/{}/queue", disk.name);
    fs::write(format!("{queue}/scheduler"), "none")?;
    for with_statistics in [true, false, true] {
        fs::write(format!("{queue}/iostats"), u32::from(with_statistics).to_string())?;
        let dd = format!("dd if=/dev/{} of=/dev/null bs=4k count=30 iflag=direct", disk.name);
        let lines = lines_of(&disk.name, || shell(&dd).map(drop))?;
        let of_dd: Vec<&Value> = lines.iter().filter(|line| line["process"] == "dd").collect();
        let waits = of_dd.iter().filter(|line| line["wait_ns"].is_u64()).count();
        let expected = if with_statistics { 30 } else { 0 };
        ensure!(of_dd.len() == 30 && waits == expected, "{with_statistics}: {waits} of {lines:?}");
        ensure!(of_dd.iter().all(|line| line["queue_ns"].is_u64()), "{lines:?}");
    }
    // Nor is there a sum of it.
    fs::write(format!("{queue}/iostats"), "0")?;
    let running = Running::stage("slow_io", &["--json", "--disk", &disk.name, "--who"])?;
    shell(&format!("dd if=/dev/{} of=/dev/null bs=4k count=30 iflag=direct", disk.name))?;
    let output = running.interrupt()?;
    let (sums, causes) = (objects(&output, "disk")?, objects(&output, "cause")?);
    let is_known = |sum: &Value| sum["wait"].is_null() && sum["queue"].is_object();
    ensure!(sums.len() == 1 && sums.iter().all(is_known), "{output}");
    let is_known = |cause: &Value| cause["wait_ns"].is_null() && cause["queue_ns"].is_u64();
    ensure!(!causes.is_empty() && causes.iter().all(is_known), "{output}");
    Ok(())
}

/// Every object has the keys that the README explains, each with a value of one type, or null.
fn slow_io_has_documented_json() -> Result<()> {
    let disk = disks::virtio()?;
    let running =
        Running::stage("slow_io", &["--json", "--min", "0", "--disk", &disk, "--who", "--stack"])?;
    let path = format!("/dev/{disk}");
    shell(&format!(
        "dd if={path} of=/dev/null bs=4M count=2 iflag=direct status=none; \
         dd if=/dev/zero of={path} bs=4k count=2 oflag=direct conv=fsync status=none"
    ))?;
    let output = running.interrupt()?;
    let readme = std::fs::read_to_string(workspace().join("tools/slow_io/README.md"))?;
    let mut types: HashMap<(String, String), std::mem::Discriminant<Value>> = HashMap::new();
    for kind in ["bio", "disk", "cause", "counters"] {
        let objects = objects(&output, kind)?;
        let keys =
            |object: &Value| object.as_object().map(|map| map.keys().cloned().collect::<Vec<_>>());
        ensure!(!objects.is_empty(), "no {kind}: {output}");
        for object in &objects {
            ensure!(keys(object) == keys(&objects[0]), "{object}, {}", objects[0]);
            for (key, value) in object.as_object().context("no object")? {
                ensure!(readme.contains(&format!("`{key}`")), "the README does not explain {key}");
                if !value.is_null() {
                    let this = std::mem::discriminant(value);
                    let known = *types.entry((kind.to_owned(), key.clone())).or_insert(this);
                    ensure!(known == this, "{key} of {kind} has two types: {object}");
                }
            }
        }
    }
    Ok(())
}

/// More threads than CPUs: every bio has its line, its request and its parts.
fn slow_io_measures_all_of_64_threads() -> Result<()> {
    let disk = disks::virtio()?;
    let running = Running::stage("slow_io", &["--min", "1h", "--disk", &disk])?;
    let before = disks::bios(&disk)?;
    fio(&format!(
        "--filename=/dev/{disk} --rw=randread --bs=4k --direct=1 --ioengine=psync --numjobs=64 --thread \
         --number_ios=30 --norandommap --size=128M"
    ))?;
    let bios = disks::bios(&disk)? - before;
    let output = running.interrupt()?;
    ensure!(count(&output, "bios completed")? == bios, "{bios} bios: {output}");
    ensure!(count(&output, "dropped")? == 0 && count(&output, "in flight")? == 0, "{output}");
    ensure!(may_skip()? || count(&output, "skipped")? == 0, "{output}");
    ensure!(may_skip()? || !output.contains("no request that was seen"), "{output}");
    Ok(())
}

/// --min, --top, --pid, --disk; and what is wrong with a name.
fn slow_io_shows_what_is_wanted() -> Result<()> {
    let null = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "20000000")])?;
    let read = || {
        shell(&format!(
            "dd if=/dev/{} of=/dev/null bs=4k count=10 iflag=direct status=none",
            null.name
        ))
    };
    let lines = |output: &str| output.lines().filter(|line| line.ends_with(" dd")).count();
    let running = Running::stages([
        ("slow_io", vec!["--min", "10ms"]),
        ("slow_io", vec!["--min", "10s"]),
        ("slow_io", vec!["--min", "0", "--top", "3"]),
        ("slow_io", vec!["--min", "0", "--pid", "1"]),
        ("slow_io", vec!["--min", "10s", "--histogram"]),
    ])?;
    read()?;
    let outputs = Running::interrupt_all(running)?;
    let counts: Vec<usize> = outputs.iter().map(|output| lines(output)).collect();
    ensure!(counts == [10, 0, 3, 0, 0], "{counts:?}: {}", outputs.concat());
    let rows = outputs[4].lines().filter_map(|line| line.trim().strip_prefix("< "));
    let bios =
        rows.map(|row| Ok(row.split_whitespace().nth(2).context("no count")?.parse::<u64>()?));
    ensure!(bios.sum::<Result<u64>>()? == count(&outputs[4], "bios completed")?, "{}", outputs[4]);
    // TIME DISK OP SECTOR KIB TOTAL
    let slowest = outputs[2].lines().filter(|line| line.ends_with(" dd"));
    let totals = slowest
        .map(|line| Ok(line.split_whitespace().nth(5).context("no total")?.parse::<f64>()?))
        .collect::<Result<Vec<f64>>>()?;
    ensure!(totals.is_sorted_by(|a, b| a >= b) && totals[2] >= 20.0, "{}", outputs[2]);
    // A disk with its partitions, a partition, and a name that `lsblk` shows.
    let disk = disks::virtio()?;
    let partition = disks::partition(&disk);
    shell(&format!(
        "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{disk}; partx -u /dev/{disk} || true"
    ))?;
    let mapped = Mapped::new("shown", &format!("0 4096 linear /dev/{disk} 0"))?;
    let path = mapped.path();
    let names = [&*disk, &partition, "shown", &path];
    let running = names.map(|disk| ("slow_io", vec!["--min", "0", "--disk", disk]));
    let running = Running::stages(running)?;
    for (file, count) in [(&disk, 3), (&partition, 4), (&"mapper/shown".to_owned(), 5)] {
        shell(&format!(
            "dd if=/dev/{file} of=/dev/null bs=4k count={count} iflag=direct status=none"
        ))?;
    }
    let outputs = Running::interrupt_all(running)?;
    let of_dd = |output: &String| output.lines().filter(|line| line.contains(" dd")).count();
    let counts: Vec<usize> = outputs.iter().map(of_dd).collect();
    ensure!(counts == [7, 4, 5, 5], "{counts:?}: {}", outputs.concat());
    for (arguments, word) in [(["--disk", "nothing"], "no such disk"), (["--min", "10"], "10ms")] {
        let ended = stage("slow_io", &arguments)?;
        ensure!(ended.code == Some(2) && ended.stderr.contains(word), "{ended:?}");
    }
    Ok(())
}

/// One slow read of device mapper, and quick ones before it, of which the flight recorder shows those of
/// the same disk.
fn slow_io_records_what_came_before() -> Result<()> {
    let null = NullBlk::new(&[])?;
    let table = format!("0 8000 linear /dev/{0} 0;8000 8000 delay /dev/{0} 8000 300", null.name);
    let mapped = Mapped::new("record", &table)?;
    let running = Running::stage("slow_io", &["--json", "--min", "200ms", "--before", "20s"])?;
    shell(&format!(
        "dd if={0} of=/dev/null bs=4k count=7 iflag=direct status=none; \
         dd if=/dev/{1} of=/dev/null bs=4k count=9 iflag=direct status=none; \
         dd if={0} of=/dev/null bs=4k count=1 skip=1000 iflag=direct status=none",
        mapped.path(),
        null.name
    ))?;
    let output = running.interrupt()?;
    let lines = objects(&output, "bio")?;
    let disk = mapped.disk()?;
    let delayed =
        lines.iter().filter(|line| line["disk"] == disk.as_str() && line["sector"] == 8000);
    let delayed: Vec<&Value> = delayed.collect();
    ensure!(delayed.len() == 1 && delayed[0]["before"] == false, "{delayed:?}: {output}");
    // A quick read is slow where its CPU stood still for so long; then it is shown for that.
    let is_slow = |line: &Value| line["total_ns"].as_u64() >= Some(200_000_000);
    ensure!(lines.iter().all(|line| line["before"] == !is_slow(line)), "{output}");
    let quick = lines.iter().filter(|line| line["process"] == "dd" && line["sector"] != 8000);
    let of_disk = quick.clone().filter(|line| line["disk"] == disk.as_str()).count();
    ensure!(of_disk == 7, "{of_disk} reads before: {output}");
    let elsewhere = quick.filter(|line| line["disk"] != disk.as_str()).all(is_slow);
    ensure!(elsewhere, "reads of another disk were shown: {output}");
    let times: Vec<Option<u64>> = lines.iter().map(|line| line["ended_ns"].as_u64()).collect();
    ensure!(times.is_sorted(), "{output}");
    wait_until("no I/O is on its way", || Ok(disks::in_flight(&null.name)? == 0))
}
