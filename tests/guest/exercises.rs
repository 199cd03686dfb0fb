//! Judges of the exercises that are no stage, and of every attempt. They run for `cargo lesson` only,
//! with the learner's program in the place of `exercise` or of a stage.

use std::{cmp::Ordering, io::Read};

use libbpf_rs::{MapCore, MapHandle, query::ProgInfoIter};
use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};
use rustix::time::{ClockId, clock_gettime};
use socket2::{SockFilter, SockRef};

use crate::{
    bios::{ONE_PLACE, lines_add_up},
    clean::{self, Of},
    exercise_loads::split_out_of_order,
    prelude::*,
    requests,
};

tests![
    exercise_leaves_nothing,
    exercise_joins,
    exercise_accounts,
    exercise_requests => requests::exercise_requests,
    exercise_disk,
    exercise_disk_refuses,
    exercise_inode => pagecache::exercise_inode,
    exercise_hits_and_misses => pagecache::exercise_hits_and_misses,
    exercise_io_uring => pagecache::exercise_io_uring,
    exercise_may_ask_again => pagecache::exercise_may_ask_again,
    exercise_readers => pagecache::exercise_readers,
    exercise_histogram,
    exercise_histogram_of_two_cpus,
    exercise_bytes,
    exercise_returns,
    exercise_queue,
    exercise_without,
    exercise_preempted,
    exercise_runqueue,
    exercise_retransmit,
];

/// The name of a program that takes the place of no stage.
pub const EXERCISE: &str = "exercise";

/// Starts an attempt, and says with which arguments: some exercises need something to filter by: a disk, a file,
/// a process.
pub fn start(subject: &str) -> Result<(&'static [&'static str], Running)> {
    start_with(subject, &[&[], &["vda"], &["/proc/self/exe"], &["1"]])
}

/// Starts it with the first of these lists of arguments that it takes.
pub fn start_with<'a>(
    subject: &str,
    arguments: &[&'a [&'a str]],
) -> Result<(&'a [&'a str], Running)> {
    let mut refused = Vec::new();
    let mut tries =
        arguments.iter().copied().map(|arguments| (arguments, Running::stage(subject, arguments)));
    let started = tries.find_map(|(arguments, started)| match started {
        Ok(running) => Some(Ok((arguments, running))),
        Err(error) if subject != EXERCISE || error.to_string().contains("verifier") => {
            Some(Err(error))
        }
        Err(error) => {
            refused.push(format!("with {arguments:?}: {error}"));
            None
        }
    });
    started.with_context(|| {
        let tried = "it does not start without an argument, nor with a disk, a file or a process";
        format!("{tried}:\n{}", refused.join("\n"))
    })?
}

/// After Ctrl-C, and by itself after --duration, the attempt exits with 0, and nothing of it is left.
fn exercise_leaves_nothing() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let (before, first, pins_before) = (clean::loaded(), clean::now(Of::All), clean::pins());
    let programs = ProgInfoIter::default().count();
    let (arguments, running) = start(&subject)?;
    let mut command = Command::new(program(&subject));
    let mut timed = Running::spawn(command.args(arguments).args(["--duration", "1s"]))?;
    let more = ProgInfoIter::default().count() > programs;
    ensure!(more, "it says that it traces, and no BPF program is loaded");
    timed.wait_for(": tracing ")?;
    running.interrupt()?;
    let timed = timed.end_within(Duration::from_secs(30)).context("with --duration 1s")?;
    ensure!(timed.code == Some(0), "with --duration 1s: {timed:?}");
    // At once: what is pinned stays loaded.
    let mut pins = clean::pins();
    pins.retain(|pin| !pins_before.contains(pin));
    ensure!(
        pins.is_empty(),
        "your program has ended, and leaves what it has pinned, which stays loaded: {}. Remove the file before \
         the program ends, or pin nothing",
        pins.join(", ")
    );
    let still_loaded = || clean::loaded().into_iter().filter(|it| !before.contains(it));
    attempt_until("the end of what your program has loaded", || {
        Ok(still_loaded().next().is_none())
    })
    .with_context(|| {
        let what = still_loaded().collect::<Vec<_>>().join(", ");
        format!("your program has ended, and this is still loaded, or attached: {what}")
    })?;
    let left = clean::difference(&first, &clean::now(Of::All));
    // The next check is of a program that may have nothing to do with it.
    for instance in left.iter().filter_map(|it| it.strip_prefix(clean::INSTANCE)) {
        fs::remove_dir(Path::new(TRACEFS).join("instances").join(instance)).ok();
    }
    ensure!(left.is_empty(), "this is left, or has another value than before: {left:?}");
    compared(
        "the kernel lists the same programs, maps and links as before, nothing is pinned, and no setting is another",
    );
    Ok(())
}

/// How many bios a program must be able to have in flight.
const ROOM: u64 = 16_384;

/// Fills a map of bios in flight, which has some entries; how many it has room for, which may be more than asked for.
pub fn fill(starts: &MapHandle, entries: u64) -> Result<u64> {
    let room = u64::from(starts.max_entries());
    ensure!(room >= ROOM, "your map `starts` has room for {room} bios, and has to have for {ROOM}");
    let no_room = || format!("your map `starts` has no room for its {room} bios");
    let keys: Vec<u64> = (entries + 1..=room).collect();
    for some in keys.chunks(ROOM as usize) {
        insert(starts, some).with_context(no_room)?;
    }
    Ok(room)
}

const LEFT_IN_FLIGHT: &str = ": the judge left so many entries in your map";

/// An output that says which of the entries in flight are the judge's.
fn with_ours(output: &str, room: u64) -> String {
    output.replace(" in flight", &format!(" in flight ({room} are the judge's)"))
}

/// How far a sum is from what it has to be, which may differ from run to run.
fn odd(expected: u64, yours: u64) -> String {
    match yours.cmp(&expected) {
        Ordering::Less => format!(", {} too few", expected - yours),
        Ordering::Equal => String::new(),
        Ordering::Greater => format!(", {} too many", yours - expected),
    }
}

/// Every bio that has a start is completed or split, and the others are unmatched. No address is taken here, and
/// the map is never full.
fn exercise_joins() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let virtio = disks::virtio()?;
    let (mixed, long, maps) = (Mixed::new("test")?, Long::new()?, Maps::new());
    let running = Running::stage(&subject, &[])?;
    let ftrace = exercise_loads::bios()?;
    let long_write = long.write()?;
    ftrace.events()?;
    let did = mixed.run(&ftrace)?;
    let split_up = split_out_of_order(&virtio, &ftrace)?;
    long_write.end_well()?;
    maps.ensure_atomic(false)?;
    let left = maps.in_flight()?;
    ensure!(left == 0, "all bios have completed, and {left} entries are left in your map `starts`");
    let output = whole(running.interrupt()?)?;
    let bios = (did.submitted.len() + split_up.submitted.len()) as u64 + 1;
    let split = split_up.submitted.len() as u64 + Mixed::SPLIT;
    completed_or_split(&output, bios, split, &format!("ftrace saw {bios} bios, {split} split"))?;
    lines_add_up(&output)?;
    let longest = durations(&output)?.into_iter().max().unwrap_or_default();
    let least = Long::NS;
    ensure!(longest >= least, "one bio took {least} ns, your longest {longest} ns: {output}");
    // The long write is device mapper's, too.
    let unmatched = did.parts + split_up.parts + Mixed::ENDS_OF_CLONE + 1;
    ensure_counts(&output, &[("unmatched", unmatched, ": parts, and clones of device mapper")])
}

/// All bios are completed or split, and some are split: at most as many as the block layer split.
fn completed_or_split(output: &str, bios: u64, split_bios: u64, what: &str) -> Result<()> {
    let of = |what| count(output, what);
    let (completed, split) = (of("bios completed")?, of("split")?);
    let summary = summary(output);
    let asks = "is `bio_stays_in_flight()` called for each bio, once its entry is deleted?";
    let is_right = (1..=split_bios).contains(&split);
    ensure!(is_right, "{split} split, and the block layer split {split_bios}: {asks}\n{summary}");
    let (yours, odd) = (completed + split, odd(bios, completed + split));
    ensure!(
        odd.is_empty(),
        "{yours} completed or split{odd}, and have to be {bios}: {what}:\n{summary}"
    );
    compared(&format!("{what}; yours: {completed} bios completed and {split} split"));
    Ok(())
}

/// Answers that measure bios in parts, and checksummed ones, where others count them as split.
const MEASURE_PARTS: [&str; 4] = ["stage10", "stage11", "stage13", "stage14"];

/// Every bio is measured, split, dropped or in flight, and counted once. That an address is taken
/// happens in earnest where a completion was not seen; here the judge takes it, and fills the map.
fn exercise_accounts() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    // First: to find it, a bio is made that is never submitted.
    let virtio = disks::virtio()?;
    let (mixed, long, checksummed) = (Mixed::new("test")?, Long::new()?, Checksummed::new()?);
    // Longer than what the lower 32 bits of the long one's time amount to, on whichever CPU that ends.
    let slow = [NullBlk::timer("slow0", 500, "")?, NullBlk::timer("slow1", 700, "")?];
    let maps = Maps::new();
    let running = Running::stage(&subject, &[])?;
    let (ftrace, printed) = (exercise_loads::bios()?, Ftrace::new(&[Hook::PRINTED])?);
    let long_write = long.write()?;
    ftrace.events()?;
    // Each is the slowest one that has ended so far, unless a CPU stood still.
    let mut places: Vec<Place> = Vec::new();
    for (cpu, disk) in slow.iter().enumerate() {
        let before = now();
        shell(&format!("taskset -c {cpu} {}", reads(&format!("/dev/{}", disk.name), 1)))?;
        let read = ftrace.events()?.into_iter().find(|event| event.name == "submit_bio");
        let record = maps.arrays()?.records(read.context("no bio")?.address()?, before..=now());
        let same = record.iter().find(|place| places.contains(place));
        ensure!(same.is_none(), "{}{ONE_PLACE}", same.map(Place::to_string).unwrap_or_default());
        places.extend(record);
    }
    let did = mixed.run(&ftrace)?;
    let split_up = split_out_of_order(&virtio, &ftrace)?;
    let verified = checksummed.run(&ftrace)?;
    long_write.end_well()?;
    ftrace.events()?;
    maps.ensure_atomic(true)?;
    let left = maps.in_flight()?;
    ensure!(left == 0, "all bios have completed, and {left} entries are left in your map `starts`");
    let (taken, reads) = exercise_loads::take_an_address(&mixed.disk.name, &ftrace, &maps)?;
    let room = fill(&maps.named("starts")?[0], taken - 1)?;
    // By another process, whose bio has another address.
    disks::read(&mixed.disk.name, 1)?;
    let output = with_ours(&whole(running.interrupt()?)?, room);
    let dropped = ": the address of one bio was taken, and neither is measured; one found no room";
    ensure_counts(&output, &[("dropped", 3, dropped)])?;
    let bios = (did.submitted.len() + split_up.submitted.len() + slow.len()) as u64
        + reads
        + verified.bios
        + 2;
    let measures_parts = MEASURE_PARTS.contains(&&*subject);
    let split_bios = split_up.submitted.len() as u64 + Mixed::SPLIT;
    let what = format!(
        "ftrace saw {bios} bios (reads, writes, a flush, a discard, a failure, of several disks), of \
         which the block layer split {split_bios} and verified {}; the address of one was taken, and one \
         found the map full",
        verified.reads
    );
    let (parts, unmatched) = if measures_parts {
        let completed = count(&output, "bios completed")?;
        let figures = format!("{what}; yours: {completed} bios completed");
        judge(completed == bios - 2, &figures, &output)?;
        (0, ": the bios that were dropped, and clones of device mapper")
    } else {
        completed_or_split(&output, bios - 2, split_bios + verified.reads, &what)?;
        let unmatched =
            ": parts, ends of bios that were dropped or had ended, and clones of device mapper";
        (did.parts + split_up.parts + verified.reads, unmatched)
    };
    let counts = [
        ("in flight", room, LEFT_IN_FLIGHT),
        ("unmatched", parts + 3 + Mixed::ENDS_OF_CLONE, unmatched),
    ];
    ensure_counts(&output, &counts)?;
    let info = exercise_loads::bio_info(&long.mapped.disk()?, Long::SECTOR)?;
    let longest = longest(&subject, &output, &info)?;
    let lines = printed.events()?.len();
    ensure!(
        subject == "stage03" || lines == 0,
        "your program still writes {lines} lines: {output}"
    );
    let least = Long::NS;
    ensure!(longest >= least, "one bio took {least} ns, your longest {longest} ns: {output}");
    compared(&format!("one took more than {}: yours {}", ms(least), ms(longest)));
    Ok(())
}

/// The longest time of a bio that an output shows, ns. From stage 05 on, it names the place, too.
fn longest(subject: &str, output: &str, info: &str) -> Result<u64> {
    if subject == "stage03" {
        lines_add_up(output)?;
        return Ok(durations(output)?.into_iter().max().unwrap_or_default());
    }
    let place = info.trim_start_matches("Bio Info : ");
    let is_named = output.lines().any(|line| line.contains(place));
    ensure!(is_named || subject == "stage04", "no line has {place:?}: {output}");
    if ["stage13", "stage14"].contains(&subject) {
        let times = output.lines().filter(|line| line.contains(place));
        let times = times.filter_map(|line| line.split_whitespace().next()?.parse::<f64>().ok());
        return Ok((times.fold(0.0, f64::max) * 1e6) as u64);
    }
    Ok(slowest(output, BIO)?.latency)
}

/// Three runs filter by a disk, by its partition, and by one of device mapper, beside another disk.
fn exercise_disk() -> Result<()> {
    // Its minor number, 0, is that of the first disk of any driver.
    let (data, long) = (disks::data()?, Long::new()?);
    let (this, other) = (Mixed::new("test")?, Mixed::new("other")?);
    let (disk, partition, upper) = (&this.disk.name, &this.partition, &long.mapped.disk()?);
    let maps = Maps::new();
    let running = [disk, partition, upper].map(|disk| (EXERCISE, vec![disk.as_str()]));
    let running = Running::stages(running)?;
    let long_write = long.write()?;
    let did = this.run(&exercise_loads::bios()?)?;
    other.run(&exercise_loads::bios()?)?;
    disks::read(&data, 30)?;
    long_write.end_well()?;
    maps.ensure_atomic(true)?;
    let rooms = maps.named("starts")?.into_iter().map(|starts| fill(&starts, 0));
    let room = rooms.collect::<Result<Vec<_>>>()?[0];
    disks::read(disk, 1)?;
    let outputs = Running::interrupt_all(running)?.into_iter().map(whole);
    let outputs = outputs.collect::<Result<Vec<_>>>()?;
    let mut measured = 0;
    for (output, disk, bios, split, parts, dropped) in [
        (&outputs[0], disk, Mixed::OF_DISK, Mixed::SPLIT, did.parts, 1),
        (&outputs[1], partition, Mixed::OF_PARTITION, 0, Mixed::ENDS_OF_CLONE, 0),
        (&outputs[2], upper, 1, 0, 0, 0),
    ] {
        let output = &with_ours(summary(output), room);
        let of = |what| count(output, what);
        let (completed, yours) = (of("bios completed")?, of("split")?);
        let figures = format!(
            "{bios} bios were submitted to {disk} before your map was full, of which {split} were \
             split; you completed {completed}, split {yours}"
        );
        judge(completed + yours == bios && yours <= split, &figures, output)?;
        let unmatched = ": parts, clones, or ends of bios that were dropped";
        let counts = [
            ("dropped", dropped, ": they found the map full"),
            ("unmatched", parts + dropped, unmatched),
            ("in flight", room, LEFT_IN_FLIGHT),
        ];
        ensure_counts(output, &counts).with_context(|| disk.clone())?;
        measured += completed;
    }
    // Each of the runs sees the lines of all, but for those of a ring buffer of its own.
    let mut lines = durations(&outputs[0])?;
    if !outputs[0].contains(" trace lines, ") {
        lines.extend([durations(&outputs[1])?, durations(&outputs[2])?].concat());
    }
    let number = lines.len() as u64;
    ensure!(number == measured, "{number} durations of {measured} bios: {}", outputs[0]);
    let (least, longest) = (Long::NS, lines.into_iter().max().unwrap_or_default());
    ensure!(longest >= least, "a bio of {upper} took {least} ns, your longest {longest} ns");
    Ok(())
}

fn exercise_disk_refuses() -> Result<()> {
    let ended = stage(EXERCISE, &["no-such-disk", "--duration", "1s"])?;
    ensure!(matches!(ended.code, Some(1 | 2)), "exit code {:?}: {}", ended.code, ended.stderr);
    ensure!(ended.stderr.contains("no-such-disk"), "the message: {}", ended.stderr);
    compared(&format!("you said: {}", ended.stderr.trim()));
    Ok(())
}

/// The histograms of an output: for each disk, the slots by their lower ends, with how many bios.
fn histograms(output: &str) -> Result<BTreeMap<String, BTreeMap<u64, u64>>> {
    let mut disks = BTreeMap::<String, BTreeMap<u64, u64>>::new();
    for of_disk in format!("\n{output}").split("\ndisk ").skip(1) {
        let name = of_disk.split([' ', '\n']).next().unwrap_or_default();
        let slots = disks.entry(name.to_owned()).or_default();
        for row in rows(of_disk, r"(\d+) -> +(\d+)\D+(\d+)\b") {
            let [low, high, bios] = row.map(|number| number.parse().unwrap_or(u64::MAX));
            if bios == 0 {
                continue; // an empty row may be there, also one for 0 ns
            }
            ensure!(low.is_power_of_two() && high == 2 * low - 1, "odd slot: {row:?}");
            ensure!(slots.insert(low, bios).is_none(), "a slot comes twice: {row:?}");
        }
    }
    Ok(disks)
}

fn exercise_histogram() -> Result<()> {
    const TIMER: u64 = 1_000_000;
    let one = Mixed::new("test")?;
    let (slow, long) = (NullBlk::timer("slow", 100, "")?, Long::new()?);
    let maps = Maps::new();
    let running = Running::stage(EXERCISE, &[])?;
    let long_write = long.write()?;
    let did = one.run(&exercise_loads::bios()?)?;
    disks::read(&slow.name, 20)?;
    long_write.end_well()?;
    let room = fill(&maps.named("starts")?[0], 0)?;
    disks::read(&slow.name, 1)?;
    let output = with_ours(&whole(running.interrupt()?)?, room);
    let split = count(&output, "split")?;
    ensure!(split <= Mixed::SPLIT, "{split} split, the load has {}: {output}", Mixed::SPLIT);
    let disks = histograms(&output)?;
    for (disk, bios, quick) in [
        (&one.disk.name, Mixed::OF_DISK - split, 0),
        // A flush takes no time: the disk has no cache.
        (&one.partition, Mixed::OF_PARTITION, 1),
        (&slow.name, 20, 0),
    ] {
        let slots = disks.get(disk).with_context(|| format!("no `disk {disk}` in {output}"))?;
        let sum: u64 = slots.values().sum();
        let figures = format!("the disk {disk} did {bios} bios; your slots have {sum}");
        judge(sum == bios, &figures, &output)?;
        let above = slots.iter().filter(|(low, _)| **low * 2 > TIMER);
        let above: u64 = above.map(|(_, bios)| bios).sum();
        let figures = format!("{bios} bios of {disk} took 1 ms or more, {above} are in such slots");
        ensure!(above >= bios - quick, "{figures}: {output}");
    }
    let right = disks[&slow.name].get(&(1 << 26)).copied().unwrap_or_default();
    ensure!(right >= 15, "20 reads took 100 ms each, {right} are in the slot of that: {output}");
    let upper = &long.mapped.disk()?;
    let right = disks.get(upper).and_then(|slots| slots.get(&(1 << 32))).copied();
    ensure!(right == Some(1), "{right:?} bios of {upper} in the slot of {} ns: {output}", Long::NS);
    let unmatched = ": parts, the one that found the map full, and clones of device mapper";
    let counts = [
        ("dropped", 1, ": it found the map full"),
        ("in flight", room, LEFT_IN_FLIGHT),
        ("unmatched", did.parts + 2 + Mixed::ENDS_OF_CLONE, unmatched),
    ];
    ensure_counts(&output, &counts)
}

/// Two CPUs add to the same slots at once.
fn exercise_histogram_of_two_cpus() -> Result<()> {
    let (ram, maps) = (Ram::new()?, Maps::new());
    let race = || ram.race(RACE, false).and_then(|reads| maps.ensure_atomic(true).map(|()| reads));
    let (reads, output) = beside(EXERCISE, &[], race)?;
    let disks = histograms(&output)?;
    let slots = disks.get(Ram::NAME).with_context(|| format!("no {}: {output}", Ram::NAME))?;
    let sum: u64 = slots.values().sum();
    let figures = format!("two CPUs did {reads} bios at once; your slots have {sum}");
    judge(sum == reads, &figures, &output)
}

/// How long two CPUs collide.
const RACE: Duration = Duration::from_millis(1000);

fn exercise_bytes() -> Result<()> {
    let disk = disks::virtio()?;
    let ram = Ram::new()?;
    // A discard has a length, and transfers nothing.
    let null = NullBlk::new("test", "memory_backed=1 discard=1 badblocks=+100000-100007")?;
    let large = NullBlk::new("large", "size=8192")?;
    // A disk above it: what it hands down is not submitted again.
    let stacked = Mapped::new("stacked", &format!("0 8192 linear /dev/{} 0", large.name))?;
    let maps = Maps::new();
    let running = Running::stage(EXERCISE, &[])?;
    maps.ensure_atomic(true)?;
    let mut did = Vec::new();
    let direct = "iflag=direct status=none";
    let read = format!("if=/dev/{disk} of=/dev/null {direct}");
    let write = format!("if=/dev/zero of=/dev/{disk} oflag=direct,dsync conv=notrunc status=none");
    let fio = format!(
        "--name=t --filename=/dev/{disk} --rw=readwrite --bs=64k --direct=1 --thread --numjobs=4 --size=256k \
         --offset_increment=256k --output-format=terse"
    );
    // Some disks write zeroes by themselves, others have them sent: more than 2^32 bytes of them.
    let zeroes = format!("/sys/block/{disk}/queue/write_zeroes_max_bytes");
    let sent = if fs::read_to_string(zeroes)?.trim() == "0" { 64 << 10 } else { 0 };
    let (all, zero) = ((4 << 30) + (64 << 10), "--force --zeroout --length");
    for (name, bytes, arguments) in [
        ("dd", 1 << 20, format!("{read} bs=64k count=16")),
        ("dd", 256 << 10, format!("{read} bs=4k count=64")),
        ("dd", 512 << 10, format!("{write} bs=32k count=16")),
        ("fio", 1 << 20, fio),
        ("dd", 256 << 10, format!("if={} of=/dev/null bs=32k count=8 {direct}", stacked.path())),
        (
            "dd",
            4 << 10,
            format!("if=/dev/{} of=/dev/null bs=4k skip=12500 count=1 {direct}", null.name),
        ),
        ("blkdiscard", 0, format!("--force --length 4MiB /dev/{}", null.name)),
        ("blkdiscard", sent, format!("{zero} 64KiB /dev/{disk}")),
        ("blkdiscard", all, format!("{zero} {all} /dev/{}", large.name)),
    ] {
        let process = Running::bash(&format!("exec {name} {arguments}"))?;
        did.push((process.id(), format!("({name})"), bytes));
        let (ended, fails) = (process.end()?, arguments.contains("skip=12500"));
        ensure!(ended.code == Some(i32::from(fails)), "{name} {arguments}: {ended:?}");
    }
    // Two threads of this process collide.
    let me = fs::read_to_string("/proc/self/comm")?;
    let reads = ram.race(RACE, false)?;
    let output = running.interrupt()?;
    did.push((std::process::id(), format!("({})", me.trim()), reads * 512));
    let mut lines = Vec::new();
    for [pid, name, bytes] in rows(&output, r"pid (\d+)(.*): (\d+) bytes$") {
        ensure!(!name.is_empty(), "no name: pid {pid}: {bytes} bytes");
        lines.push((pid.parse::<u32>()?, name.trim_start(), bytes.parse::<u64>()?));
    }
    ensure!(lines.is_sorted_by(|a, b| a.2 >= b.2), "not sorted by bytes: {output}");
    for (pid, name, bytes) in did {
        let yours = lines.iter().filter(|line| line.0 == pid);
        let yours: Vec<_> = yours.map(|(_, name, bytes)| (*name, *bytes)).collect();
        let is_right = match bytes {
            0 => yours.iter().all(|line| line.1 == 0),
            _ => yours == [(&*name, bytes)],
        };
        let figures =
            format!("process {pid} {name} transferred {bytes} bytes; your lines of it: {yours:?}");
        judge(is_right, &figures, &output)?;
    }
    let event = output.lines().find(|line| line.contains("bpf_trace_printk: "));
    ensure!(event.is_none(), "an event line: {event:?}");
    Ok(())
}

/// The rows `  12        3  submit_bio_wait(bio)`: calls, and those that have not returned.
fn inside(output: &str) -> Result<BTreeMap<String, (u64, u64)>> {
    let (mut table, mut before) = (BTreeMap::new(), u64::MAX);
    for [calls, inside, name] in rows(output, r"(\d+)\s+(\d+)\s+([^\s(]+)[^(]*\(") {
        let calls = calls.parse()?;
        ensure!(calls <= before, "{calls} calls below {before}: not sorted by calls: {output}");
        before = calls;
        table.insert(name.to_owned(), (calls, inside.parse()?));
    }
    ensure!(!table.is_empty(), "no row `CALLS INSIDE FUNCTION(PARAMETERS)` in {output}");
    Ok(table)
}

/// Threads wait inside of functions, which their stacks name; a call may return on another CPU.
fn exercise_returns() -> Result<()> {
    let (hung, virtio) = (Mapped::hung("hung")?, disks::virtio()?);
    let disk = hung.disk()?;
    // Without a scheduler, a bio without a tag waits before it gets a request.
    fs::write(format!("/sys/block/{disk}/queue/scheduler"), "none")?;
    let running = Running::stage(EXERCISE, &[])?;
    disks::read(&virtio, 20)?;
    let dd = |cpu: u32| Running::bash(&format!("exec taskset -c {cpu} {}", reads(&hung.path(), 1)));
    let (moved, failing) = (dd(0)?, Failing(&hung));
    moved.waits_in("submit_bio_wait")?;
    shell(&format!("taskset -cp 1 {}", moved.id()))?;
    drop(failing);
    moved.end()?;
    hung.message("queue_if_no_path")?;
    let waiting = (0..3).map(|n| dd(n % 2)).collect::<Result<Vec<_>>>()?;
    let failing = Failing(&hung);
    wait_until("three reads wait, two of them for the tag", || {
        let all = waiting.iter().map(Running::stack).collect::<Result<Vec<_>>>()?;
        let wait = |function: &str| all.iter().filter(|stack| stack.contains(function)).count();
        Ok((wait("submit_bio_wait"), wait("blk_mq_get_tag")) == (3, 2))
    })?;
    let stacks = waiting.iter().map(Running::stack).collect::<Result<String>>()?;
    let output = whole(running.interrupt()?)?;
    drop(failing);
    for dd in waiting {
        dd.end()?;
    }
    let rows = inside(&output)?;
    let mut expected = BTreeMap::<&str, u64>::new();
    // `[<0>] submit_bio_wait+0x52/0x90`
    for frame in stacks.lines().filter_map(|line| line.split_once("] ")) {
        let function = frame.1.split('+').next().unwrap_or_default();
        if rows.contains_key(function) {
            *expected.entry(function).or_default() += 1;
        }
    }
    ensure!(expected.get("submit_bio_wait") == Some(&3), "{expected:?}, {stacks}: {output}");
    // Three functions call the next one in place of a return, and leave no frame: both wait for the tag.
    let tail_calls = ["submit_bio", "submit_bio_noacct", "__submit_bio"];
    expected.extend(tail_calls.map(|function| (function, 2)));
    ensure_none(&output, &[])?;
    for (function, (calls, inside)) in &rows {
        let waits = expected.get(function.as_str()).copied().unwrap_or(0);
        let yours =
            format!("{waits} threads wait in {function}(); yours {inside} of {calls} calls");
        ensure!(*inside == waits && *calls >= waits, "{yours}: {output}");
    }
    let named = expected.len();
    compared(&format!("three stacks name {named} of your functions, as often as you do"));
    let submitted = rows.get("submit_bio").context("no submit_bio")?.0;
    ensure!(submitted == 24, "24 reads, and {submitted} calls of submit_bio(): {output}");
    Ok(())
}

/// How long each request of these events can have been queued, at least and at most, by its address. The
/// program's own look at the clock lies between ftrace's probe, which is called before its, and block_rq_issue
/// in that function; and the time of allocation between the bio (for a disk that gets a batch, its first one)
/// and what the thread does after block_getrq: 7.2 takes that time in blk_account_io_start(), which is called
/// later. So the bounds hold however long a CPU stands still.
fn queued(events: &[Event], batch: &str) -> Result<BTreeMap<String, Vec<RangeInclusive<u64>>>> {
    let (mut bios, mut allocated) = (BTreeMap::new(), BTreeMap::<_, Option<u64>>::new());
    let (mut starts, mut queued) = (BTreeMap::new(), BTreeMap::<String, Vec<_>>::new());
    // By thread: the request that it has got, until it does something else.
    let mut got = BTreeMap::new();
    for event in events {
        if let Some(io) = got.remove(&event.place())
            && let Some(time) = allocated.get_mut(&io)
        {
            time.get_or_insert(event.time);
        }
        if event.name == "blk_mq_start_request" {
            starts.insert(event.place(), event);
            continue;
        }
        let disk = event.text.trim_start().split(' ').next().unwrap_or_default();
        let io = (disk, event.sector()?);
        match event.name.as_str() {
            "block_bio_queue" if disk == batch => *bios.entry((disk, 0)).or_insert(event.time),
            "block_bio_queue" => *bios.entry(io).or_insert(event.time),
            "block_getrq" => {
                allocated.insert(io, None);
                got.insert(event.place(), io);
                0
            }
            "block_rq_insert" => 0,
            _ => {
                let (Some(latest), Some(start)) =
                    (allocated.remove(&io), starts.get(&event.place()))
                else {
                    continue; // started again
                };
                let latest = latest.unwrap_or(event.time).min(start.time);
                let first =
                    if disk == batch { bios.get(&(disk, 0)).copied() } else { bios.remove(&io) };
                let bounds = start.time - latest..=event.time - first.context("no bio")?;
                queued.entry(start.argument.clone()).or_default().push(bounds);
                0
            }
        };
    }
    Ok(queued)
}

/// The times from the allocation of a request to the driver: in a scheduler, more than 2^32 ns; in a plug,
/// of a disk without one; before the first of two tries.
fn exercise_queue() -> Result<()> {
    // ftrace counts in µs; and another hook may look at the clock a moment before it.
    const NEAR: u64 = 100_000;
    let one_queue = "submit_queues=1 hw_queue_depth=64";
    let slow = NullBlk::one_tag("slow", 100)?;
    let (plugged, silent) =
        (NullBlk::new("plugged", one_queue)?, NullBlk::new("silent", one_queue)?);
    let retried = ScsiDebug::new("opts=0x10 dev_size_mb=64")?;
    disks::read(&silent.name, 30)?; // on 7.2, a request without a time keeps that of an earlier one
    slow.queues()?;
    [&plugged, &silent]
        .into_iter()
        .try_for_each(|disk| fs::write(disk.queue("scheduler"), "none"))?;
    fs::write(silent.queue("iostats"), "0")?;
    fs::write("/sys/bus/pseudo/drivers/scsi_debug/every_nth", "3")?;
    let running = Running::stage(EXERCISE, &[])?;
    let ftrace = Ftrace::new(&[
        Hook::Function("blk_mq_start_request"),
        Hook::Tracepoint("block/block_getrq", ""),
        Hook::Tracepoint("block/block_rq_insert", ""),
        Hook::Tracepoint("block/block_rq_issue", ""),
        Hook::Tracepoint("block/block_bio_queue", ""),
    ])?;
    let disks = [&slow.name, &plugged.name, &retried.name];
    let done = || disks.iter().map(|disk| disks::requests(disk)).sum::<Result<u64>>();
    let before = done()?;
    let mixed = "--rw=randrw --rwmixread=90 --iodepth=56 --number_ios=56 --size=16M";
    let load = fio_direct_command(&slow.name, mixed);
    let load = Running::bash(&format!("exec {load}"))?;
    let batch = "--iodepth=32 --iodepth_batch=32 --number_ios=32 --size=16M";
    fio_direct(&plugged.name, batch)?;
    disks::read(&retried.name, 10)?;
    load.end_well()?;
    let (requests, events) = (done()? - before, ftrace.events()?);
    disks::read(&silent.name, 30)?;
    let output = running.interrupt()?;
    let judged = queued(&events, &disks::numbers(&plugged.name)?.replace(':', ","))?;
    let number: usize = judged.values().map(Vec::len).sum();
    let longest = judged.values().flatten().map(|bounds| *bounds.start()).max().unwrap_or_default();
    let tests = requests >= 98 && number as u64 == requests && longest > 1 << 32;
    ensure!(tests, "{requests} requests, ftrace saw {number}; one waited for {longest} ns");
    let (mut lines, mut sum) = (BTreeMap::<&str, Vec<u64>>::new(), 0);
    for line in output.lines().filter(|line| line.contains(" queued: ")) {
        let time = between(line, " queued: ", " ns")?.parse::<u64>()?;
        lines.entry(between(line, "(rq=", ")")?).or_default().push(time);
        sum += time;
    }
    let printed: usize = lines.values().map(Vec::len).sum();
    ensure!(printed == number, "{number} requests with a time, {printed} lines: {output}");
    for (request, bounds) in &judged {
        let yours = lines.get(request.as_str()).map_or(&[][..], Vec::as_slice);
        ensure!(yours.len() == bounds.len(), "{request}: {yours:?}, ftrace {bounds:?}: {output}");
        for (yours, bounds) in yours.iter().zip(bounds) {
            let (least, most) = (bounds.start().saturating_sub(NEAR), bounds.end() + NEAR);
            let is_right = (least..=most).contains(yours);
            ensure!(is_right, "{request}: {yours} ns; ftrace says {bounds:?} ns: {output}");
        }
    }
    ensure!(count(&output, "ns queued")? == sum, "{sum} ns in your lines: {output}");
    let of_all = format!("ns queued (of {number} requests)");
    ensure!(output.contains(&of_all), "{number} requests have lines: {output}");
    ensure!(count(&output, "without a time")? == 30, "30 requests have no time: {output}");
    let completed = count(&output, "requests completed")?;
    ensure!(completed == requests + 30, "{completed} completed of {requests} + 30: {output}");
    let longest = ms(longest);
    compared(&format!(
        "{number} times lie between two of ftrace's events; the longest is {longest}"
    ));
    Ok(())
}

/// Requests of several disks, of which the kernel's counters have the number and the time. One waits since before
/// the program was started; some are started again, or complete in parts.
fn exercise_without() -> Result<()> {
    // One tag: each request finds what the one before has left in its fields.
    let silent = NullBlk::new("silent", "hw_queue_depth=1 submit_queues=1")?;
    let slow = NullBlk::one_tag("slow", 50)?;
    slow.queues()?;
    disks::read(&silent.name, 30)?;
    fs::write(silent.queue("iostats"), "0")?;
    let (retried, hung) = (ScsiDebug::new("opts=0x110 dev_size_mb=64")?, Mapped::hung("hung")?);
    fs::write("/sys/bus/pseudo/drivers/scsi_debug/every_nth", "3")?;
    let (upper, since) = (hung.disk()?, Instant::now());
    let gone = NullBlk::timer("gone", 10, "")?;
    let old = Running::bash(&format!("exec {}", reads(&hung.path(), 1)))?;
    let failing = Failing(&hung);
    old.waits_in("submit_bio_wait")?;
    let until = Instant::now();
    let running = Running::stage(EXERCISE, &[])?;
    let counted = || -> Result<[u64; 2]> {
        let stats = exporter::stats()?;
        let sum = |fields: [usize; 3]| stats.values().flat_map(|it| fields.map(|n| it[n])).sum();
        Ok([sum([0, 4, 11]), sum([3, 7, 14])])
    };
    let before = counted()?;
    fio_direct(&slow.name, "--rw=randrw --iodepth=32 --number_ios=32 --size=16M")?;
    disks::read(&retried.name, 30)?;
    disks::read(&silent.name, 30)?;
    // A disk that is gone by the end: then only who has seen its requests knows of them.
    disks::read(&gone.name, 20)?;
    let of_gone = disks::stat(&gone.name)?;
    drop(gone);
    let least = until.elapsed();
    drop(failing);
    old.end()?;
    wait_until("the last one is counted", || Ok(disks::in_flight(&upper)? == 0))?;
    let (most, after) = (since.elapsed(), counted()?);
    let output = running.interrupt()?;
    let [number, time] = [0, 1].map(|n| after[n] - before[n] + of_gone[[0, 3][n]]);
    let of = |what| count(&output, what);
    let (completed, ns) = (of("requests completed")?, of("ns in all")?);
    let figures = format!("{number} requests, {time} ms; you have {completed}, {}", ms(ns));
    // The kernel takes the time up to 1 ms later, and rounds down for each disk.
    let near = time.abs_diff(ns / 1_000_000) <= 8 + number + time / 50;
    let is_right = completed == number && number >= 63 && near;
    judge(is_right, &figures, &output)?;
    let is_whole = ns % 1_000_000 == 0;
    ensure!(!is_whole, "{ns} ns are whole ms, as the kernel's files have them; yours are finer");
    let (silent, longest) = (of("without a time")?, Duration::from_nanos(max_latency(&output)?));
    ensure!(silent == 30, "30 requests have no time of allocation, you say {silent}: {output}");
    let figures = format!("one waited for {least:?} to {most:?}; your longest is {longest:?}");
    judge((least..=most).contains(&longest), &figures, &output)
}

/// How long this thread has waited for a CPU, as the kernel accounts for it: the second number.
fn run_delay() -> Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(text.split_whitespace().nth(1).context("no second number")?.parse()?)
}

/// For how long this thread had a CPU.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What a thread of the load has to say.
struct Waited {
    /// What it did.
    kind: &'static str,
    tid: u32,
    /// How long it waited before it ran for the first time, ns.
    new: u64,
    /// How long it waited in all, ns, as the kernel accounts for it. Of a thread that is preempted when it
    /// is about to sleep, and has its state already, the kernel counts no wait: sched_info_depart().
    all: u64,
    /// How long it neither had a CPU nor meant to sleep, ns: at most so long can it have waited.
    most: u64,
}

const COMPUTES: &str = "only computes";
const HUNGRY: &str = "computes, with the lowest priority, for longer";
const SLEEPS: &str = "sleeps and wakes up";
const ENDS: &str = "ends soon";

/// The life of a thread of the load on a CPU. At its end, it says how long it has waited.
fn wait_for_cpu(kind: &'static str, cpu: usize, load: Duration) -> Result<Waited> {
    let (start, used, new) = (Instant::now(), cpu_time(), run_delay()?);
    stay_on(cpu)?;
    let (tid, mut asleep) = (gettid(), Duration::ZERO);
    let mut sleep = |time| {
        thread::park_timeout(time);
        asleep += time;
    };
    match kind {
        COMPUTES => while start.elapsed() < load {},
        HUNGRY => {
            rustix::process::setpriority_process(Some(tid), 19)?;
            while start.elapsed() < Duration::from_secs(20) && run_delay()? <= 1 << 32 {}
        }
        SLEEPS => {
            rustix::process::setpriority_process(Some(tid), 19)?;
            sleep(load / 2); // no wait, and longer than what the comparison allows
            while start.elapsed() < load {
                sleep(Duration::from_millis(5));
            }
        }
        // It waits twice: when it is new, and when it wakes up.
        _ => sleep(Duration::from_millis(1)),
    }
    // From here on it does not wait: what it reads is all.
    set_realtime(2)?;
    let tid = tid.as_raw_nonzero().get() as u32;
    let most = start.elapsed().saturating_sub(asleep + (cpu_time() - used));
    Ok(Waited { kind, tid, new, all: run_delay()?, most: new + most.as_nanos() as u64 })
}

/// Starts so many threads on a CPU, one after the other. A new thread may find its CPU free, or be
/// chosen at once: here it waits, for this one keeps the CPU.
fn start_short_ones(cpu: usize, count: usize) -> Result<Vec<Waited>> {
    stay_on(cpu)?;
    set_realtime(1)?;
    let life = |_| {
        let start = Instant::now();
        let child = thread::spawn(move || wait_for_cpu(ENDS, cpu, Duration::ZERO));
        while start.elapsed() < Duration::from_millis(10) {}
        child.join().expect("a thread")
    };
    (0..count).map(life).collect()
}

/// Of an encrypted disk and of one in memory, bios complete in tasks, where a preemptible kernel skips
/// fentry programs; those of a virtio disk complete in interrupts, where it skips kprobes.
fn exercise_preempted() -> Result<()> {
    if !preempts()? {
        return not_judged("this kernel does not preempt, and skips none of these completions");
    }
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let (below, ram) = (disks::virtio()?, Ram::new()?);
    let crypt = loads::crypt("crypt", &format!("/dev/{below}"))?;
    let running = Running::stage(&subject, &[])?;
    let upper = crypt.disk()?;
    let counts = || -> Result<[u64; 2]> { Ok([disks::bios(&upper)?, disks::bios(&below)?]) };
    let before = counts()?;
    // One after the other: an interrupt in a kprobe program, while a task has lost its CPU in the fentry
    // program, is missed by both. The program counts it, and that is its limit.
    for device in [&crypt.path(), &below] {
        fio_direct(device, "--size=32m --iodepth=16 --numjobs=64 --number_ios=30")?;
    }
    let after = counts()?;
    // Each read of the upper disk is one of the disk below, which is no bio that was submitted.
    let [upper, lower] = [0, 1].map(|n| after[n] - before[n]);
    ensure!(upper >= 1920 && lower >= 2 * 1920, "{upper} reads above, {lower} below: an odd load");
    let bios = lower + ram.race(Duration::from_secs(2), true)?;
    let output = running.interrupt()?;
    let of = |what| count(&output, what);
    let completed = of("bios completed")?;
    judge(completed == bios, &format!("{bios} bios; you completed {completed}"), &output)?;
    for what in ["in flight", "dropped"] {
        ensure!(of(what)? == 0, "all bios have completed: {output}");
    }
    // dm-crypt makes two bios of each.
    let (unmatched, made) = (of("unmatched")?, 2 * upper);
    let figures = format!(
        "dm-crypt makes {made} bios that were not submitted, and each of them counts once at most; yours: \
         {unmatched} unmatched"
    );
    judge((upper..=made).contains(&unmatched), &figures, &output)
}

/// More threads than CPUs, which wait in both ways: preempted, and woken. Many end meanwhile.
fn exercise_runqueue() -> Result<()> {
    const LOAD: Duration = Duration::from_secs(2);
    const SHORT: usize = 200;
    let running = Running::stage(EXERCISE, &[&std::process::id().to_string()])?;
    let others = (0..2)
        .map(|cpu| Running::bash(&format!("exec taskset -c {cpu} bash -c 'while :; do :; done'")));
    let others = others.collect::<Result<Vec<_>>>()?;
    let threads = [(COMPUTES, 0), (COMPUTES, 1), (SLEEPS, 0), (SLEEPS, 1), (HUNGRY, 0)];
    let waited =
        in_threads(threads.into_iter().chain([(ENDS, 0), (ENDS, 1)]), |(kind, cpu)| match kind {
            ENDS => start_short_ones(cpu, SHORT / 2),
            _ => Ok(vec![wait_for_cpu(kind, cpu, LOAD)?]),
        })?;
    let others = others.into_iter().map(|other| -> Result<String> {
        let tid = other.id().to_string();
        other.signal(Signal::KILL)?;
        other.end()?;
        Ok(tid)
    });
    let others = others.collect::<Result<Vec<_>>>()?;
    let output = running.interrupt()?;
    let mut lines = BTreeMap::new();
    for [tid, ns] in rows(&output, r"tid (\d+): (\d+) ns$") {
        ensure!(lines.insert(tid, ns.parse()?).is_none(), "tid {tid} has two lines: {output}");
    }
    let theirs = others.iter().find(|tid| lines.contains_key(tid.as_str()));
    let theirs = theirs.map_or("", |tid| tid);
    ensure!(theirs.is_empty(), "thread {theirs} is of another process: {output}");
    // The kernel accounts in the scheduler's clock, which is not that of bpf_ktime_get_ns().
    let is_true = |yours: u64, [least, most]: [u64; 2]| {
        let near = |time: u64| time / 5 + 50_000_000;
        (least.saturating_sub(near(least))..=most + near(most)).contains(&yours)
    };
    let yours = |tid: u32| lines.get(tid.to_string().as_str()).copied();
    let (short, long): (Vec<_>, Vec<_>) =
        waited.iter().flatten().partition(|thread| thread.kind == ENDS);
    for &&Waited { kind, tid, all: theirs, most, .. } in &long {
        let least = if kind == HUNGRY { 1 << 32 } else { 100_000_000 };
        ensure!(theirs > least, "{kind}, and waited {}: the test does not test", ms(theirs));
        let yours = yours(tid).unwrap_or_default();
        let times = format!("{}, at most {}; yours {}", ms(theirs), ms(most), ms(yours));
        let figures = format!("thread {tid}, which {kind}: {times}");
        // Of who never sleeps, the kernel counts every wait.
        let most = if kind == SLEEPS { theirs.max(most) } else { theirs };
        judge(is_true(yours, [theirs, most]), &figures, &output)?;
    }
    let missing = short.iter().filter(|thread| thread.all > 0 && yours(thread.tid).is_none());
    let missing = missing.count();
    ensure!(missing == 0, "{missing} of {SHORT} threads that ended have no line: {output}");
    let theirs: u64 = short.iter().map(|thread| thread.all).sum();
    let new: u64 = short.iter().map(|thread| thread.new).sum();
    let most: u64 = short.iter().map(|thread| thread.most.max(thread.all)).sum();
    let yours: u64 = short.iter().filter_map(|thread| yours(thread.tid)).sum();
    let tests = new > theirs * 2 / 5 && theirs > 500_000_000;
    ensure!(tests, "{} of {} when new: the test does not test", ms(new), ms(theirs));
    let times = format!("{} in all, {} of it when they were new", ms(theirs), ms(new));
    let times = format!("{times}, at most {}", ms(most));
    let figures = format!("{SHORT} threads that ended: {times}; yours {}", ms(yours));
    judge(is_true(yours, [theirs, most]), &figures, &output)?;
    let sum = count(&output, "ns waited for a CPU")?;
    ensure!(sum == lines.values().sum::<u64>(), "the sum is not that of the lines: {output}");
    Ok(())
}

/// What a socket receives: filters of classic BPF. `ret 0` keeps no byte of a segment.
const NOTHING: &[[u32; 2]] = &[[0x06, 0]];
/// Only who wants to connect: `ldb [13]; jset #2, 0, 1; ret #-1; ret #0`.
const SYNS: &[[u32; 2]] = &[[0x30, 13], [0x0100_0045, 2], [0x06, u32::MAX], [0x06, 0]];

/// Lets a socket receive only that.
fn receive(socket: &impl AsFd, only: &[[u32; 2]]) -> Result<()> {
    let code = |[code, k]: &[u32; 2]| {
        let [a, b, jt, jf] = code.to_le_bytes();
        SockFilter::new(u16::from_le_bytes([a, b]), jt, jf, *k)
    };
    let code: Vec<_> = only.iter().map(code).collect();
    SockRef::from(socket).attach_filter(&code).context("a filter")
}

/// Lets it receive everything again.
fn receive_all(socket: &impl AsFd) -> Result<()> {
    SockRef::from(socket).detach_filter().context("no filter")
}

/// What the kernel says about a connection.
fn tcp_info(socket: &TcpStream) -> Result<libc::tcp_info> {
    // SAFETY: the struct holds integers only.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut size = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the kernel writes at most `size` bytes.
    let result = unsafe {
        let info = (&raw mut info).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_TCP, libc::TCP_INFO, info, &raw mut size)
    };
    ensure!(result == 0, "TCP_INFO: {}", std::io::Error::last_os_error());
    Ok(info)
}

/// All segments that this thread's network has sent again: RetransSegs, by the line with the names.
fn segments_sent_again() -> Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/snmp")?;
    let mut lines = text.lines().filter(|line| line.starts_with("Tcp:"));
    let (names, numbers) = (lines.next().context("no names")?, lines.next().context("no Tcp")?);
    let mut both = names.split(' ').zip(numbers.split(' '));
    let (_, number) = both.find(|(name, _)| *name == "RetransSegs").context("no RetransSegs")?;
    Ok(number.parse()?)
}

/// What the kernel counts for connections that lose segments.
struct Lost {
    /// `SENDER -> RECEIVER`, and the segments that were sent again: of all connections, both directions.
    directions: Vec<(String, u64)>,
    /// RetransSegs.
    segments: u64,
}

/// Loses segments in a network of this thread's own, and fails to send some again.
fn lose_segments() -> Result<Lost> {
    const SEGMENT: usize = 1400;
    static BURST: [u8; 40 * SEGMENT] = [0; 40 * SEGMENT];
    // SAFETY: the thread gives up its network, and no table of files.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET)? };
    // A window must grow, and stay: where the machine is busy, cubic ends its slow start early.
    for (what, value) in [("congestion_control", "reno"), ("slow_start_after_idle", "0")] {
        fs::write(format!("/proc/sys/net/ipv4/tcp_{what}"), value)?;
    }
    // Segments as small as on a wire: a buffer of the kernel then holds many.
    // The two ends have different addresses, where there are two.
    shell("busybox ifconfig lo 127.0.0.3 mtu 1500 up")?;
    let connect = |(address, loses, most): (&str, bool, u32)| -> Result<[TcpStream; 2]> {
        let listener = TcpListener::bind(address)?;
        SockRef::from(&listener).set_tcp_mss(most)?;
        if loses {
            receive(&listener, SYNS)?;
        }
        let mut connected = TcpStream::connect(listener.local_addr()?)?;
        if loses {
            let before = segments_sent_again()?;
            wait_until("the answer is sent again", || Ok(segments_sent_again()? > before))?;
            receive_all(&listener)?;
        }
        connected.write_all(&[0])?;
        let pair = [connected, listener.accept()?.0];
        (&pair[1]).read_exact(&mut [0])?;
        for socket in &pair {
            socket.set_read_timeout(Some(Duration::from_secs(30)))?;
            socket.set_write_timeout(Some(Duration::from_secs(30)))?;
        }
        Ok(pair)
    };
    // The last one loses nothing.
    let pairs = [("127.0.0.2:0", true, 200), ("[::1]:0", true, 1400), ("127.0.0.1:0", false, 1400)]
        .map(connect)
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let acknowledged = |pairs: &[[TcpStream; 2]]| {
        let mut sockets = pairs.iter().flatten();
        sockets.try_fold(true, |all, socket| Ok(all && tcp_info(socket)?.tcpi_unacked == 0))
    };
    // So much arrives that a burst may be in flight as a whole.
    let has_room = |socket: &TcpStream| -> Result<bool> {
        let info = tcp_info(socket)?;
        Ok(u64::from(info.tcpi_snd_cwnd) * u64::from(info.tcpi_snd_mss) > BURST.len() as u64)
    };
    wait_until("a burst may be in flight", || {
        for [one, other] in &pairs {
            for (mut from, mut to) in [(one, other), (other, one)] {
                from.write_all(&BURST)?;
                to.read_exact(&mut [0; BURST.len()])?;
            }
        }
        pairs.iter().flatten().try_fold(true, |all, socket| Ok(all && has_room(socket)?))
    })?;
    wait_until("all is acknowledged", || acknowledged(&pairs))?;
    let lossy = &pairs[..2];
    lossy.iter().flatten().try_for_each(|socket| receive(socket, NOTHING))?;
    // The other direction sends half as much, so that nobody confuses both.
    for [one, other] in lossy {
        (&*one).write_all(&BURST)?;
        (&*other).write_all(&BURST[BURST.len() / 2..])?;
    }
    for socket in lossy.iter().flatten() {
        let again = || Ok(tcp_info(socket)?.tcpi_total_retrans > 0);
        wait_until("segments are sent again", again)?;
    }
    shell("busybox ifconfig lo down")?;
    // Of IPv6, on all kernels; of IPv4, some send to nobody, and count that.
    let mut failed = false;
    // At once: each try of a socket comes twice as late as the one before it.
    let before = lossy.iter().flatten().map(tcp_info).collect::<Result<Vec<_>>>()?;
    for (socket, before) in lossy.iter().flatten().zip(before) {
        wait_until("the kernel tries again without a network", || {
            Ok(tcp_info(socket)?.tcpi_retransmits > before.tcpi_retransmits + 1)
        })?;
        failed |= tcp_info(socket)?.tcpi_total_retrans == before.tcpi_total_retrans;
    }
    ensure!(failed, "nothing failed without a network: the test does not test");
    shell("busybox ifconfig lo up")?;
    lossy.iter().flatten().try_for_each(receive_all)?;
    wait_until("all is acknowledged", || acknowledged(&pairs))?;
    let mut directions = Vec::new();
    for socket in pairs.iter().flatten() {
        let name = format!("{} -> {}", socket.local_addr()?, socket.peer_addr()?);
        directions.push((name, u64::from(tcp_info(socket)?.tcpi_total_retrans)));
    }
    let enough = directions.iter().zip([257, 20, 40, 20]).all(|((_, again), sent)| *again >= sent);
    ensure!(enough, "not all segments were sent again: {directions:?}");
    let differ = directions[..4].chunks(2).all(|both| both[0].1 != both[1].1);
    ensure!(differ, "both directions lost as many, the test does not test: {directions:?}");
    Ok(Lost { directions, segments: segments_sent_again()? })
}

/// Connections that lose segments, beside what the kernel counts for each.
fn exercise_retransmit() -> Result<()> {
    let running = Running::stage(EXERCISE, &[])?;
    // The thread changes its network.
    let lost = in_threads([()], |()| lose_segments())?.remove(0);
    let output = whole(running.interrupt()?)?;
    let mut lines = Vec::new();
    for [connection, segments] in rows(&output, r"(.* -> .*): (\d+) segments$") {
        lines.push((connection, segments.parse::<u64>()?));
    }
    ensure!(lines.is_sorted_by(|a, b| a.1 >= b.1), "not sorted by segments: {output}");
    let lossy = || lost.directions.iter().filter(|(_, segments)| *segments > 0);
    for (name, theirs) in lossy() {
        let of_it = lines.iter().filter(|(connection, _)| *connection == name);
        let yours: Vec<u64> = of_it.map(|(_, segments)| *segments).collect();
        let figures = format!("{name} sent {theirs} segments again; you say {yours:?}");
        judge(yours == [*theirs], &figures, &output)?;
    }
    let (all, sum) = (lost.segments, lossy().map(|(_, segments)| segments).sum::<u64>());
    ensure!(all == sum, "RetransSegs is {all}, and {sum} by connection: the test does not test");
    let directions = lossy().count();
    let number = lines.len();
    ensure!(number == directions, "{directions} directions sent again, {number} lines: {output}");
    let total = count(&output, "segments sent again")?;
    ensure!(total == all, "RetransSegs has grown by {all}, you say {total}: {output}");
    Ok(())
}
