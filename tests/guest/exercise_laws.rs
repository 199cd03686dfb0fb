//! Laws that every exercise's program keeps, each written once: an exercise lists the judge of a law, or says by
//! name why it is excused. They run for `cargo lesson` only, as those of `exercises.rs`.

use std::sync::OnceLock;

use libbpf_rs::MapCore;

use crate::{exercises, prelude::*};

tests![exercise_two_cpus, exercise_slowest, exercise_unseen, exercise_order];

/// The stages that look whether the delete of a start has succeeded.
const LOOK_AT_DELETES: [&str; 8] =
    ["stage03", "stage04", "stage05", "stage06", "stage10", "stage11", "stage13", "stage14"];

/// What is wrong with the program's instructions, once a judge of this process has read them: `prove` has several in
/// one process, and a start takes seconds.
static FAULT: OnceLock<Option<String>> = OnceLock::new();

/// Reads them.
fn read_program(subject: &str, maps: &Maps) {
    let looks = LOOK_AT_DELETES.contains(&subject);
    let read = maps.ensure_atomic(looks);
    // Only there, two programs do the same at one hook.
    let read =
        if subject == "stage11" { read.and_then(|()| maps.ensure_own_records()) } else { read };
    FAULT.get_or_init(|| read.err().map(|error| format!("{error:#}")));
}

/// Nothing goes wrong where two CPUs come at once: read from the program, for it cannot be waited for.
fn exercise_two_cpus() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    if FAULT.get().is_none() {
        let maps = Maps::new();
        let (_, running) = exercises::start(&subject)?;
        read_program(&subject, &maps);
        running.interrupt()?;
    }
    let fault = FAULT.get().and_then(Option::as_deref);
    ensure!(fault.is_none(), "{}", fault.unwrap_or_default());
    compared(
        "no instruction of your program adds in steps, or writes a record, to what CPUs share",
    );
    Ok(())
}

/// A disk that takes 4.4 s for each I/O, and fails to read this sector.
fn failing_late() -> Result<NullBlk> {
    let bad = format!("badblocks=+{}-{}", Long::SECTOR, Long::SECTOR + 7);
    NullBlk::timer("late", LATE / 1_000_000, &format!("size=3145728 {bad}"))
}

const LATE: u64 = 4_400_000_000;
const DISCARD: u64 = 1_000_000_000;

/// What the block of a slowest I/O has to name, and the least that it takes.
struct Named {
    /// Its address, by ftrace.
    io: String,
    disk: String,
    sector: u64,
    least: u64,
}

/// The slowest I/O is neither the first nor the latest, on any CPU, and not of the first CPU; it fails, or has no
/// data, and takes more than 32 bits of ns.
fn exercise_slowest() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let is_request = ["stage07", EXERCISE].contains(&&*subject);
    let start = if is_request { "blk_mq_start_request" } else { "submit_bio" };
    let quick = NullBlk::timer("quick", 1, "")?;
    let (slow, late) = (NullBlk::timer("slow", 200, "")?, failing_late()?);
    let discarded = NullBlk::timer("discarded", DISCARD / 1_000_000, "memory_backed=1 discard=1")?;
    let mut running = Running::stages([(&*subject, vec![]), (&*subject, vec![])])?;
    let (second, first) = (running.remove(1), running.remove(0));
    let begin = now();
    let ftrace = Ftrace::new(&[Hook::Function(start)])?;
    let on = |cpu: u32, command: &str| shell(&format!("taskset -c {cpu} {command}"));
    let on_both = |command: &str| [0, 1].into_iter().try_for_each(|cpu| on(cpu, command).map(drop));
    // Of bios: a request may be started by a thread of the kernel.
    let io = |by: &str| -> Result<String> {
        let mut events = ftrace.events()?.into_iter();
        let event = events.find(|event| is_request || event.task == by);
        Ok(event.context("ftrace saw no start")?.argument)
    };
    on_both(&reads(&quick.name, 2))?;
    ftrace.events()?;
    on(1, &format!("blkdiscard --force --offset 8MiB --length 1MiB /dev/{}", discarded.name))?;
    let (io_of_discard, disk) = (io("blkdiscard")?, discarded.name.clone());
    let discard = Named { io: io_of_discard, disk, sector: 16_384, least: DISCARD };
    on_both(&reads(&quick.name, 2))?;
    // Longer than what is left of the late one's time in 32 bits.
    on_both(&reads(&slow.name, 1))?;
    ftrace.events()?;
    // The first run ends meanwhile, long before the late one does.
    let (fails, first) = thread::scope(|scope| -> Result<_> {
        let first = scope.spawn(|| first.interrupt());
        let fails = reads(&late.name, 1);
        let fails = on(1, &format!("bash -c '! {fails} skip={}' 2>/dev/null", Long::SECTOR / 8));
        Ok((fails, first.join().map_err(|_| anyhow!("the end panicked"))?))
    })?;
    fails?;
    discard.judge(&subject, begin, &first?)?;
    let (io, disk) = (io("dd")?, late.name.clone());
    let late = Named { io, disk, sector: Long::SECTOR, least: LATE };
    on_both(&reads(&slow.name, 1))?;
    on_both(&reads(&quick.name, 2))?;
    late.judge(&subject, begin, &second.interrupt()?)
}

impl Named {
    /// The output names it: its time, its address, where it began, and its place, as far as the program prints that.
    fn judge(&self, subject: &str, begin: u64, output: &str) -> Result<()> {
        let Named { io, disk, sector, least } = self;
        let (latency, most) = (max_latency(output)?, now() - begin);
        let figures = format!("the slowest takes {}; yours {}", ms(*least), ms(latency));
        judge((*least..=most).contains(&latency), &figures, output)?;
        if subject == EXERCISE {
            return Ok(());
        }
        let yours = slowest(output, if subject == "stage07" { REQUEST } else { BIO })?;
        ensure!(yours.io == *io, "the slowest is {io}, and yours {}: {output}", yours.io);
        let info = exercise_loads::bio_info(disk, *sector)?;
        let is_named = subject == "stage04" || output.lines().any(|line| line == info);
        ensure!(is_named, "no line {info:?}: {output}");
        Ok(())
    }
}

/// A request that has the address of another one, whose completion nobody saw: here the judge puts that entry into
/// the map, under the address of the only request that a disk has: before it starts, and while the disk has it.
/// Then it fills the map.
fn exercise_unseen() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let disk = NullBlk::one_tag("one", 300)?;
    let (begin, maps) = (now(), Maps::new());
    let running = Running::stage(&subject, &[])?;
    let ftrace = Ftrace::new(&[Hook::Function("blk_mq_start_request")])?;
    disks::read(&disk.name, 1)?;
    let request = ftrace.events()?.first().context("ftrace saw no start")?.address()?;
    let starts = &maps.named("starts")?[0];
    let dd = Running::bash(&format!("exec {}", reads(&disk.name, 1)))?;
    wait_until("a request in flight", || Ok(starts.keys().count() == 1))?;
    insert(starts, &[request])?;
    dd.end_well()?;
    insert(starts, &[request])?;
    disks::read(&disk.name, 2)?;
    let again = ftrace.events()?;
    let same = again.iter().all(|event| event.address().is_ok_and(|it| it == request));
    ensure!(again.len() == 3 && same, "another request: the test does not test");
    let left = starts.keys().count();
    let room = exercises::fill(starts, 0)?;
    disks::read(&disk.name, 1)?;
    let output = whole(running.interrupt()?)?;
    let took = now() - begin;
    ensure!(left == 0, "all requests have completed, and {left} entries are left: {output}");
    let unmatched =
        ": the one whose entry became another's in flight, and the ends of what was dropped";
    let dropped = ": both requests of an address, and one that found the map full";
    let in_flight = ": the judge left so many entries in your map";
    ensure_counts(
        &output,
        &[
            ("requests completed", 2, ": of five reads"),
            ("dropped", 3, dropped),
            ("unmatched", 3, unmatched),
            ("in flight", room, in_flight),
        ],
    )?;
    let longest = max_latency(&output)?;
    let figures = format!("no request took longer than {}; your longest {}", ms(took), ms(longest));
    judge(longest <= took, &figures, &output)
}

/// What is at the start of an I/O is attached last; and all hooks are gone before the figures are read, which stand
/// below the last line: disks and a file are read until the program has ended.
fn exercise_order() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let mounted = Mounted::new()?;
    let file = new_file(&mounted, "order", MIB)?;
    let quick = NullBlk::timer("quick", 1, "")?;
    let all: &[&str] = &["--min", "1ns"];
    let has_min = ["stage13", "stage14"].contains(&&*subject);
    let none = if has_min { all } else { &[] };
    let maps = Maps::new();
    let (_, running) = exercises::start_with(&subject, &[none, &[&quick.name], &[&file.path]])?;
    read_program(&subject, &maps);
    maps.ensure_start_is_last()?;
    let is_over = AtomicBool::new(false);
    // On each CPU: whoever reads the counts of the first one only has half of them.
    let load = |cpu| -> Result<()> {
        stay_on(cpu)?;
        let mut disk = Direct::open(&quick.name)?;
        while !is_over.load(Relaxed) {
            disk.read(4096, 0)?;
            file.file().read_at(&mut [0; 4096], 0)?;
        }
        Ok(())
    };
    let load = &load;
    let output = thread::scope(|scope| {
        let loads = [0, 1].map(|cpu| scope.spawn(move || load(cpu)));
        thread::sleep(Duration::from_millis(500));
        let output = running.interrupt();
        is_over.store(true, Relaxed);
        for load in loads {
            load.join().map_err(|_| anyhow!("the load panicked"))??;
        }
        output
    })?;
    let Some((lines, total)) = lines_of(&output)? else {
        compared("of all programs of yours, the one that sees a start was attached last");
        return Ok(());
    };
    let (number, completed) = (lines.len() as u64, total);
    let last = lines.last().copied().unwrap_or_default();
    let first_count =
        output.find(" completed\n").or_else(|| output.find(" reads through")).unwrap_or(0);
    ensure!(
        last < first_count,
        "a line stands below the figures: they are printed too early: {output}"
    );
    let figures = format!("{number} lines, and you count {completed}");
    let why = "is everything detached, and the last line read, before the counts are?";
    judge(
        number == completed,
        &format!("while a disk and a file are read, {figures}: {why}"),
        &output,
    )
}

/// Where the lines of an output begin that go with a sum of its own, and that sum; none, where a program prints no
/// lines.
fn lines_of(output: &str) -> Result<Option<(Vec<usize>, u64)>> {
    let of = |text: &str| output.match_indices(text).map(|(at, _)| at).collect::<Vec<_>>();
    let (bios, reads, waits, slow) =
        (of(" time duration: "), of("read(inode="), of(" queued: "), of(" KiB  "));
    Ok(Some(if !bios.is_empty() {
        (bios, count(output, "bios completed")?)
    } else if !reads.is_empty() {
        (reads, count(output, "reads through")?)
    } else if !waits.is_empty() {
        (waits, between(output, " ns queued (of ", " requests)")?.parse()?)
    } else if !slow.is_empty() {
        (slow, count(output, "bios completed")? - count(output, "lost (")?)
    } else {
        return Ok(None);
    }))
}
