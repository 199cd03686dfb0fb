//! Stages 01 to 06, 10: every bio, its latency, its sector, its stack, its parts.

use crate::{
    exercise_loads::{calls, same_calls},
    prelude::*,
};

tests![
    stage01_has_a_line_for_every_bio,
    stage02_shows_both_ends,
    stage02_sees_every_completion,
    stage03_lines_add_up,
    stage03_drops_what_is_submitted_twice,
    stage04_reads_the_records_of_all_cpus,
    stage05_names_disk_and_sector,
    stage05_a_flush_has_no_sector,
    stage06_shows_the_stack,
    stage10_is_right_about_split_bios,
    stage10_follows_a_long_chain,
];

fn stage01_has_a_line_for_every_bio() -> Result<()> {
    let mixed = Mixed::new("test")?;
    let start = now();
    let running = Running::stage("stage01", &[])?;
    let did = mixed.run(&exercise_loads::bios()?)?;
    // An answer with a ring buffer has no instance.
    let clocks = shell("cat /sys/kernel/tracing/instances/*/trace_clock || true")?;
    let output = running.interrupt()?;
    let end = now();
    ensure!(!clocks.contains("[local]"), "not the clock of bpf_ktime_get_ns(): {clocks}");
    same_calls(&output, "submit_bio(", &did.submitted, &did.submitted)?;
    let mut calls = calls(&output, "submit_bio(")?.into_iter();
    let strange = calls.find(|(_, time)| !(start..=end).contains(time));
    ensure!(strange.is_none(), "{strange:?} is not from {start} to {end}: {output}");
    let bios = did.submitted.len();
    compared(&format!("ftrace saw {bios} bios, and their addresses; so did you"));
    Ok(())
}

const IS_KPROBE: &str = "your program at bio_endio() is a kprobe. All kprobe programs of a CPU share one guard: the \
     kernel skips one that interrupts another. fentry has a guard of its own";

/// Two bios at a time, so that the one that completes is not always the one that came last.
fn stage02_shows_both_ends() -> Result<()> {
    const TIMER: u64 = 500_000_000;
    let disk = NullBlk::timer("test", 500, "memory_backed=1 discard=1 badblocks=+8000-8007")?;
    let mut other = Direct::open(&disks::virtio()?)?;
    let below = NullBlk::new("notes", "memory_backed=1")?;
    let noting = exercise_loads::noting("noting", &below.name)?;
    let running = Running::stage("stage02", &[])?;
    let kprobes = fs::read_to_string("/sys/kernel/debug/kprobes/list")?; // ftrace has none yet
    ensure!(!kprobes.contains(" bio_endio+"), "{IS_KPROBE}");
    let before = disks::bios(&disk.name)?;
    let ftrace = exercise_loads::bios()?;
    let two = "--iodepth=2 --iodepth_batch=2 --iodepth_batch_complete_min=2";
    fio_direct(
        &disk.name,
        &format!("--rw=randrw {two} --number_ios=8 --cpus_allowed=1 --size=2M --sync=dsync"),
    )?;
    // With nothing beside it, a flush; then a discard, a read that fails, a note, and one of another disk.
    shell(&format!(
        "dd if=/dev/null of=/dev/{0} conv=fsync,notrunc status=none
         blkdiscard --force --offset 8MiB --length 1MiB /dev/{0}
         if dd if=/dev/{0} of=/dev/null bs=4k skip=1000 count=1 iflag=direct 2>&1; then exit 1; fi",
        disk.name
    ))?;
    shell(&exercise_loads::writes_a_note(&noting))?;
    other.read(4096, 0)?;
    let (submitted, ended): (Vec<_>, Vec<_>) =
        ftrace.events()?.into_iter().partition(|event| event.name == "submit_bio");
    let bios = disks::bios(&disk.name)? - before;
    ensure!(bios >= 9 && submitted.len() as u64 == bios + 5, "{bios} bios, {submitted:?}");
    let output = running.interrupt()?;
    same_calls(&output, "submit_bio(", &submitted, &submitted)?;
    same_calls(&output, "bio_endio (", &ended, &submitted)?;
    let long = lives(&output)?.filter(|life| *life >= TIMER).count() as u64;
    // The disk counts no discard; and what has no timer may be late.
    let is_right = (bios + 1..=bios + 3).contains(&long);
    let timer = format!("the disk takes {} for each of {} bios", ms(TIMER), bios + 1);
    judge(is_right, &format!("{timer}; {long} of your pairs of lines are so far apart"), &output)
}

/// As many completions as submissions, with more threads than CPUs: an interrupt that finds a program at
/// work on its CPU does not skip the one at the completion. On a real-time kernel, where completions are
/// in threads, it may.
fn stage02_sees_every_completion() -> Result<()> {
    if may_skip()? {
        return not_judged("completions are in threads on this kernel, and may be skipped");
    }
    let disk = disks::virtio()?;
    let before = disks::bios(&disk)?;
    let load = || fio_direct(&disk, "--iodepth=16 --size=128M --numjobs=16 --number_ios=100");
    let (_, output) = beside("stage02", &[], load)?;
    let reads = disks::bios(&disk)? - before;
    let lines = |function| calls(&output, function).map(|calls| calls.len() as u64);
    let (submitted, ended) = (lines("submit_bio(")?, lines("bio_endio (")?);
    ensure!(output.contains(" trace lines, 0 lost"), "lines were lost: {}", summary(&output));
    ensure!(reads >= 1600 && submitted >= reads, "{reads} reads, {submitted} lines");
    ensure!(ended == submitted, "{submitted} bios were submitted, {ended} completed");
    Ok(())
}

/// The slides' three lines of every bio, what they say together, and how many there were.
fn stage03_lines_add_up() -> Result<()> {
    let (disk, ios, maps) = (disks::virtio()?, load(300), Maps::new());
    let running = Running::stage("stage03", &[])?;
    let before = disks::bios(&disk)?;
    fio_direct(&disk, &format!("--iodepth=8 --numjobs=2 --number_ios={ios} --size=128M"))?;
    let (did, left) = (disks::bios(&disk)? - before, maps.in_flight()?);
    let output = running.interrupt()?;
    for function in ["submit_bio(", "bio_endio ("] {
        let lines = calls(&output, function)?.len() as u64;
        ensure!(lines == did, "{lines} lines of {function}…) of {did} bios: {output}");
    }
    let completed = lines_add_up(&output)?;
    ensure!(did >= 2 * ios && completed == did, "{completed} of {did} bios: {}", summary(&output));
    ensure_none(&output, &["in flight", "split", "dropped", "unmatched"])?;
    ensure!(left == 0, "{left} entries are left in the map: {}", summary(&output));
    compared(&format!(
        "{did} bios were submitted; yours: {completed}, and each line's time is theirs"
    ));
    Ok(())
}

/// The times between the two lines of each bio that has an end, and a start before it.
fn lives(output: &str) -> Result<impl Iterator<Item = u64>> {
    let (starts, ends) = (calls(output, "submit_bio(")?, calls(output, "bio_endio (")?);
    Ok(ends.into_iter().filter_map(move |end| {
        let before = starts.partition_point(|start| *start <= end);
        let start = starts[..before].last().filter(|start| start.0 == end.0)?;
        Some(end.1 - start.1)
    }))
}

/// Each duration of the output is the time between two of its lines; returns how many there are. Of parts
/// of bios, there may be lines, too, and no duration.
pub fn lines_add_up(output: &str) -> Result<u64> {
    let mut lives: Vec<u64> = lives(output)?.collect();
    let durations = durations(output)?;
    for duration in &durations {
        let life = lives.iter().position(|life| life == duration);
        let why = || {
            format!(
                "{duration} ns: no two lines of a bio are so far apart, or not so often: {output}"
            )
        };
        lives.swap_remove(life.with_context(why)?);
    }
    let (number, completed) = (durations.len() as u64, count(output, "bios completed")?);
    let figures = format!("{number} pairs of lines are as far apart as your durations say");
    judge(number == completed, &format!("{figures}, of {completed} bios"), output)?;
    Ok(number)
}

/// Zeroes are written with one bio for every MiB, each of them a part of the next one. Here the first
/// one takes longest, and all that come after it end with it, in one call of bio_endio().
fn stage10_follows_a_long_chain() -> Result<()> {
    let null = NullBlk::timer("test", 0, "")?;
    let device = format!("/dev/{}", null.name);
    let first_is_slow = format!("0 2048 delay {device} 0 200;2048 79872 linear {device} 2048");
    let chain = Mapped::new("chain", &first_is_slow)?;
    let zero = format!("blkdiscard --force --zeroout --offset 0 --length 40MiB {}", chain.path());
    let (_, output) = beside("stage10", &[], || shell(&zero))?;
    let completed = count(&output, "bios completed")?;
    ensure!(completed == 40, "{completed} of 40 bios: {output}");
    let latency = slowest(&output, BIO)?.latency;
    let figures =
        format!("40 bios end with the first one, after 200 ms; you printed {}", ms(latency));
    judge(latency >= DELAY, &figures, &output)?;
    ensure_none(&output, &["in flight", "dropped"])
}

/// The shortest time, ns, that dm-delay is taken to need for 200 ms. It counts ticks of 4 ms
/// (drivers/md/dm-delay.c, CONFIG_HZ=250), and in an emulated machine some come late, and then
/// several at once: 193 ms were measured.
const DELAY: u64 = 150_000_000;

/// What is said where both CPUs have written their slowest bio to one place.
pub const ONE_PLACE: &str = ": CPU 0 and CPU 1 have written their slowest bio to this one place: when both do so \
     at once, the words come from two bios, or the shorter one is what stays";

/// The timer of a slow disk, and the interrupts of another one, come to the CPU that has submitted. So with
/// I/O on one CPU, the slowest bio is in the record of that CPU, and must be found on any of them. That two
/// CPUs write their records at once is too rare to be waited for; but records at one place can collide.
fn stage04_reads_the_records_of_all_cpus() -> Result<()> {
    const TIMER: u64 = 200_000_000;
    let disk = disks::virtio()?;
    let slow = NullBlk::timer("test", 200, "")?;
    let mut places = HashMap::new();
    for cpu in 0..std::thread::available_parallelism()?.get() {
        let maps = Maps::new();
        let running = Running::stage("stage04", &[])?;
        let dd = format!("taskset -c {cpu} dd bs=4k status=none");
        shell(&format!("{dd} if=/dev/{disk} of=/dev/null count=1 iflag=direct"))?;
        let (ftrace, before) = (Ftrace::new(&[Hook::Function("submit_bio")])?, now());
        shell(&format!(
            "{dd} if=/dev/{} of=/dev/null count=1 iflag=direct
             {dd} if=/dev/{disk} of=/dev/null count=20 iflag=direct
             {dd} if=/dev/zero of=/dev/{disk} count=20 oflag=direct conv=notrunc,fsync",
            slow.name
        ))?;
        let arrays = maps.arrays()?;
        let output = running.interrupt()?;
        let delayed = ftrace.events()?.into_iter().next().context("ftrace saw no bio")?.argument;
        let load = format!("a read, a slow one, 20 reads, 20 writes and a flush on CPU {cpu}");
        let completed = count(&output, "bios completed")?;
        ensure!(completed == 43, "{load}: {completed} bios completed, not 43: {output}");
        let slowest = slowest(&output, BIO).with_context(|| format!("{load}: {output}"))?;
        let (latency, is_slow_one) = (slowest.latency, slowest.io == delayed);
        // An emulated CPU can stand still for longer.
        let is_it = if is_slow_one { slowest.from >= before } else { latency > 2 * TIMER };
        let figures =
            format!("{load}: the slow one takes {}, you printed {}", ms(TIMER), ms(latency));
        judge(latency >= TIMER && is_it, &figures, &output)?;
        let io = u64::from_str_radix(slowest.io.trim_start_matches("0x"), 16)?;
        let times = slowest.from..=slowest.to;
        for place in arrays.records(io, times) {
            let other = places.insert(place.clone(), cpu).filter(|other| *other != cpu);
            ensure!(other.is_none(), "{place}{ONE_PLACE}");
        }
    }
    Ok(())
}

/// Stages 04 to 06 do not measure them, and say so, but for those whose last part is the bio itself.
fn stage10_is_right_about_split_bios() -> Result<()> {
    let read = |device: &str, at_least: u64, what: &str| -> Result<()> {
        let mut stages = vec!["stage04", "stage05", "stage10"];
        // Where an attempt is judged, it is one of them.
        stages.retain(|stage| is_judged(stage) && (*stage != "stage05" || subject().is_some()));
        let running = Running::stages(stages.iter().map(|stage| (*stage, vec![])))?;
        let printed = Hook::Tracepoint("bpf_trace/bpf_trace_printk", "");
        let ftrace = Ftrace::new(&[Hook::Function("submit_bio"), printed])?;
        shell(&format!("dd if={device} of=/dev/null bs=96k count=1 iflag=direct status=none"))?;
        let events = ftrace.events()?;
        let (submitted, printed): (Vec<_>, Vec<_>) =
            events.iter().partition(|event| event.name == "submit_bio");
        ensure!(submitted.len() == 1, "{} bios of one read", submitted.len());
        ensure!(printed.is_empty(), "the program writes a line: {:?}", printed[0].text);
        for (output, stage) in Running::interrupt_all(running)?.into_iter().zip(stages) {
            ensure_none(&output, &["in flight", "dropped"]).with_context(|| what.to_owned())?;
            let completed = count(&output, "bios completed")?;
            if completed == 0 && stage != "stage10" {
                ensure!(count(&output, "split")? == 1, "{what}: {output}");
                ensure!(!output.contains("Max latency"), "{what}: {output}");
                compared(&format!("{what}: you counted it as split, and gave no latency"));
                continue;
            }
            ensure!(completed == 1, "{what}: {stage}: {output}");
            // Device mapper's clones complete, too, and were never submitted: they are no parts.
            if stage == "stage10" && !device.contains("mapper") {
                ensure_none(&output, &["unmatched"]).with_context(|| what.to_owned())?;
            }
            let (latency, least) = (slowest(&output, BIO)?.latency, ms(at_least));
            let figures = format!("{what}: {least} at least; you printed {}", ms(latency));
            judge(latency >= at_least, &figures, &output).context(stage)?;
        }
        Ok(())
    };
    let plain = NullBlk::new("test", "irqmode=1 hw_queue_depth=64")?;
    let device = format!("/dev/{}", plain.name);
    for slow in cases([0, 2, 1], 1) {
        // Device mapper splits a read at the borders of its three targets, of which one takes 200 ms.
        let table = (0..3).map(|part| {
            let (kind, delay) = if part == slow { ("delay", " 200") } else { ("linear", "") };
            format!("{0} 64 {kind} {device} {0}{delay};", part * 64)
        });
        let split = Mapped::new("split", &table.collect::<String>())?;
        let part = ["first", "middle", "last"][slow];
        read(&split.path(), DELAY, &format!("a read in three parts, of which the {part} is slow"))?;
    }
    drop(plain);
    // The block layer splits the read in three; the disk does one part at a time, 20 ms each.
    let serial = NullBlk::one_tag("test", 20)?;
    fs::write(serial.queue("max_sectors_kb"), "32")?;
    read(&format!("/dev/{}", serial.name), 3 * 20_000_000, "a read in three parts, one by one")
}

/// A request is of the whole disk, and the lowest one.
fn stage05_names_disk_and_sector() -> Result<()> {
    let mut all = Vec::new();
    for disk in cases([disks::nvme()?, disks::scsi()?, disks::virtio()?], 1) {
        // From sector 4096 on.
        let partition = disks::partitioned(&disk)?;
        all.push((format!("/dev/{disk}"), disk.clone(), 8000, 8000, disk.clone()));
        all.push((format!("/dev/{partition}"), partition, 8000, 12_096, disk));
    }
    let (partition, .., disk) = &all[1];
    let linear = Mapped::new("lin", &format!("0 16384 linear {partition} 1024"))?;
    all.push((linear.path(), linear.disk()?, 0, 5120, disk.clone()));
    let last = all.len() - 1;
    for (number, (path, device, sector, absolute, disk)) in all.into_iter().enumerate() {
        let mut of_bio = exercise_loads::bio_info(&device, sector)?;
        if Path::new(&format!("/sys/class/block/{device}/partition")).exists() {
            of_bio += &format!(", sector {absolute} of {disk}");
        }
        let of_request = exercise_loads::bio_info(&disk, absolute)?;
        // Each for a disk and for a partition, and all of them for the last.
        let its_turn = |turn| number == last || number % 3 == turn || subject().is_some();
        let mut stages = vec![(0, "stage05"), (1, "stage06"), (1, "stage11"), (2, "stage07")];
        stages.retain(|&(turn, stage)| its_turn(turn) && is_judged(stage));
        let running = Running::stages(stages.iter().map(|&(_, stage)| (stage, vec![])))?;
        if device == path.trim_start_matches("/dev/") && device != disk {
            let write = "bs=4k count=1 seek=1000 oflag=direct conv=notrunc status=none";
            shell(&format!("dd if=/dev/zero of={path} {write}"))?;
        } else {
            shell(&format!("{} skip={}", reads(&path, 1), sector / 8))?;
        }
        for (output, (_, stage)) in Running::interrupt_all(running)?.into_iter().zip(stages) {
            let (lines, expected) =
                if stage == "stage07" { (REQUEST, &of_request) } else { (BIO, &of_bio) };
            let found = output.lines().any(|line| line == expected);
            slowest(&output, lines)?;
            let figures = format!("dd read sector {sector} of {device}: `{expected}`");
            judge(found, &figures, &output).context(stage)?;
        }
    }
    Ok(())
}

/// A flush has no data, and so no place on the disk. That of the request ends with its bio, which had no start.
fn stage05_a_flush_has_no_sector() -> Result<()> {
    let disk = NullBlk::timer("test", 500, "memory_backed=1 cache_size=1")?;
    let stages = [
        ("stage05", BIO, "bios completed", 0),
        ("stage06", BIO, "bios completed", 0),
        ("stage07", REQUEST, "requests completed", 1),
    ];
    let stages: Vec<_> = stages.into_iter().filter(|(stage, ..)| is_judged(stage)).collect();
    let running = Running::stages(stages.iter().map(|(stage, ..)| (*stage, vec![])))?;
    shell(&format!("dd if=/dev/null of=/dev/{} conv=fsync,notrunc status=none", disk.name))?;
    let numbers = disks::numbers(&disk.name)?;
    let expected =
        format!("Bio Info : no sector (a flush, or another command) of {} ({numbers})", disk.name);
    for (output, (stage, lines, what, others)) in
        Running::interrupt_all(running)?.iter().zip(stages)
    {
        ensure!(count(output, what)? == 1, "{stage}: one flush: {output}");
        let found = output.lines().any(|line| line == expected);
        judge(found, &format!("a flush of {}: `{expected}`", disk.name), output).context(stage)?;
        ensure!(slowest(output, lines)?.latency >= 500_000_000, "{stage}: {output}");
        ensure!(count(output, "unmatched")? == others, "{stage}: {output}");
    }
    Ok(())
}

fn stage06_shows_the_stack() -> Result<()> {
    let mounted = Mounted::new()?;
    shell("dd if=/dev/zero of=/mnt/data/read bs=1M count=4 conv=fsync status=none; sync")?;
    // Each with a module that is in its stacks: a request may start when ext4 has handed over all bios.
    let stages = [
        ("stage06", BIO, "submit_bio", "ext4"),
        ("stage07", REQUEST, "blk_mq_start_request", "virtio_blk"),
    ];
    let stages: Vec<_> = stages.into_iter().filter(|(stage, ..)| is_judged(stage)).collect();
    for (command, must_have) in [
        // A deep stack: the kernel copies, through the page cache, which is empty of it. To a new file, for ext4
        // writes one at once that replaces another, and that is slower.
        (
            "dd if=/mnt/data/read of=/dev/null iflag=nocache count=0 status=none; \
             rm -f /mnt/data/copy; cp /mnt/data/read /mnt/data/copy"
                .to_owned(),
            "filemap_get_pages",
        ),
        // The first bio has another stack: it is not the slowest one.
        (
            format!(
                "{}; dd if=/dev/zero of=/mnt/data/read bs=1M count=4 conv=notrunc,fsync status=none",
                reads(&format!("/dev/{}", mounted.disk), 1)
            ),
            "ext4_sync_file",
        ),
    ] {
        for (stage, lines, function, module) in &stages {
            // The slowest is now the read or write itself, now the journal's.
            let mut seen = false;
            for _ in 0..10 {
                let queued = Hook::Tracepoint("block/block_bio_queue", "");
                let ftrace =
                    Ftrace::new(&[Hook::Stack(function), Hook::Function("bio_endio"), queued])?;
                let (_, output) = beside(stage, &[], || shell(&command))?;
                let stack = check_stack(&output, *lines, &ftrace.events()?)?;
                compared(&format!("ftrace shows the same {} functions as you", stack.len()));
                seen = stack.iter().any(|frame| frame == must_have);
                let has_module = output.contains(&format!("() [{module}]\n"));
                ensure!(!seen || has_module, "no function is of [{module}]:\n{output}");
                rustix::fs::sync();
                if seen {
                    break;
                }
            }
            ensure!(seen, "{stage}: {must_have} is in no stack of {command}");
        }
    }
    Ok(())
}

/// Checks that the printed stack is the one that ftrace took of that I/O then, frame by frame, with the module of
/// each function; returns it. One address can come several times, and between two handlers of one probe up to
/// 34 ms have passed: more than between two I/Os; a CPU that stands still there makes this I/O the slowest one.
/// Its event comes after the end of the one before it, where `events` has the calls of bio_endio(), too, and
/// not after its own. Where `events` has the bios that reach a queue, the place is that of this one.
pub fn check_stack(output: &str, lines: [&str; 2], events: &[Event]) -> Result<Vec<String>> {
    let slowest = slowest(output, lines)?;
    let (ends, mut starts): (Vec<&Event>, Vec<&Event>) = events
        .iter()
        .filter(|event| event.argument == slowest.io && event.time <= slowest.to)
        .partition(|event| event.name == "bio_endio");
    let before = ends.iter().map(|end| end.time).filter(|time| *time < slowest.from).max();
    starts.retain(|start| Some(start.time) > before);
    // Where it is the only one, it may be late.
    let limit = if starts.len() == 1 { 2_000_000_000 } else { 100_000_000 };
    let apart = |start: &&Event| start.time.abs_diff(slowest.from);
    let judge = starts.into_iter().min_by_key(apart).filter(|start| apart(start) <= limit);
    let judge = judge.with_context(|| format!("ftrace has not seen the I/O: {output}"))?;
    let is_its =
        |it: &&Event| it.name == "block_bio_queue" && it.cpu == judge.cpu && it.time >= judge.time;
    let info = between(output, "Bio Info : ", "\n")?;
    if let Some(queued) = events.iter().find(is_its).filter(|_| lines == BIO) {
        let disk = queued.text.trim_start().split(' ').next().unwrap_or_default().replace(',', ":");
        let sector = format!("Sector ({}) of ", queued.sector()?);
        let is_right = info.starts_with(&sector) && info.ends_with(&format!(" ({disk})"));
        ensure!(is_right || info.starts_with("no "), "it was {sector}({disk}): {output}");
    }
    let kallsyms = fs::read_to_string("/proc/kallsyms")?;
    let known: HashSet<(&str, &str)> = kallsyms
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace().skip(2);
            Some((words.next()?, words.next().unwrap_or_default()))
        })
        .collect();
    let mut functions = Vec::new();
    for frame in output.lines().filter_map(|line| line.strip_prefix("=> ")) {
        let (function, module) = frame.split_once("()").with_context(|| {
            format!("a line of the stack names no function of the kernel:\n{output}")
        })?;
        ensure!(known.contains(&(function, module.trim())), "{frame} is not of that module");
        functions.push(function.to_owned());
    }
    ensure!(functions == judge.stack, "the judge, {}: {:?}\n{output}", apart(&judge), judge.stack);
    ensure!(functions.last() == Some(&judge.name), "not of {}: {output}", judge.name);
    Ok(functions)
}

/// An address has a start already, as after a lost completion: neither bio is measured, one is unmatched.
fn stage03_drops_what_is_submitted_twice() -> Result<()> {
    let (disk, maps) = (NullBlk::timer("test", 20, "")?, Maps::new());
    let load = || exercise_loads::take_an_address(&disk.name, &exercise_loads::bios()?, &maps);
    let ((taken, reads), output) = beside("stage03", &[], load)?;
    ensure_counts(
        &output,
        &[
            ("bios completed", reads - 1, ""),
            ("dropped", 2, ": both bios of an address"),
            ("unmatched", 1, ": the end of the second one"),
            ("in flight", taken - 1, ": those that were taken"),
        ],
    )
}
