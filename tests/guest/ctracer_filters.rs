//! `ctracer`'s filters, judged by fio: which reads of which disk and which process there were.

use crate::{
    ctracer::{FEW, all_or, calls, engines, lines, number, traced, values},
    prelude::*,
};

tests![
    ctracer_follows_one_process_on_one_disk,
    ctracer_samples_whole_lives,
    ctracer_filters_by_field,
    ctracer_shows_lives_with_errors,
];

/// The lives that were submitted, in their order. Each life is one I/O: it is submitted once.
fn submitted(all: &[Value]) -> Result<Vec<u64>> {
    let submits = calls(all, "submit_bio").map(|event| number(&event["life"]));
    let submits = submits.collect::<Result<Vec<_>>>()?;
    let lives: BTreeSet<&u64> = submits.iter().collect();
    ensure!(lives.len() == submits.len(), "{} lives, {} submits", lives.len(), submits.len());
    Ok(submits)
}

/// Of these lives, those that have ended.
fn ended(all: &[Value], of: &[u64]) -> usize {
    let is_own = |life: &&Value| life["life"].as_u64().is_some_and(|life| of.contains(&life));
    lines(all, "life").filter(is_own).filter(|life| !life["end"].is_null()).count()
}

/// A process reads two disks; others, whose bios use the same memory, do so before, beside it and after.
fn ctracer_follows_one_process_on_one_disk() -> Result<()> {
    let (wanted, other) = (disks::virtio()?, disks::nvme()?);
    let read = |ios: u32| {
        format!(
            "fio --thread --output-format=terse --direct=1 --rw=randread --bs=4k --ioengine=libaio \
             --iodepth=4 --number_ios={ios} --name=t --filename=/dev/{wanted} --rate_iops={ios} \
             --name=u --stonewall --filename=/dev/{other}"
        )
    };
    let gate = Gate::new()?;
    // exec keeps the number of the process.
    let process = Running::bash(&format!("{}\nexec {}", Gate::WAIT, read(50)))?;
    let (pid, dev) = (process.id().to_string(), disks::numbers(&wanted)?);
    let all = traced(&[all_or(&FEW)?, &["--pid", &pid, "--dev", &dev]].concat(), || {
        let beside = Running::bash(&format!("exec {}", read(200)))?;
        gate.open()?;
        process.end_well()?;
        beside.end_well()
    })?;
    let lives = submitted(&all)?;
    ensure!(lives.len() == 50, "{} bios of a process that reads the disk 50 times", lives.len());
    let another =
        calls(&all, "submit_bio").find(|event| event["tgid"].as_u64() != pid.parse().ok());
    ensure!(another.is_none(), "another process's: {another:?}, not {pid}'s");
    let ends = ended(&all, &lives);
    ensure!(ends >= 45, "{ends} of 50 lives are followed to their end");
    // Where a bio points to, at every event but that of its initialisation, which fills it in.
    let later = lines(&all, "event").filter(|event| event["function"] != "bio_init");
    let targets: BTreeSet<_> =
        later.flat_map(|event| values(event, "bi_bdev")).map(Value::to_string).collect();
    ensure!(targets.len() == 1, "bios of {} disks: {targets:?}", targets.len());
    Ok(())
}

/// One I/O in five, with all that happens to it, of one thread that uses the same memory for all.
fn ctracer_samples_whole_lives() -> Result<()> {
    // The end of a read comes when the calls of the submission have returned: no probe misses it.
    let delayed = NullBlk::new("test", "irqmode=2 completion_nsec=20000000")?;
    let only = ["--only=submit_bio", "--only=bio_init", "--only=bio_endio", "--only=bio_uninit"];
    // One CPU: each one counts by itself.
    let options = "--rw=read --ioengine=psync --number_ios=60 --cpus_allowed=0";
    let load = || fio_direct(&delayed.name, options);
    let all = traced(&[&only[..], &["--sample=5"]].concat(), load)?;
    let mut sectors = BTreeMap::new();
    let mut events = BTreeMap::<u64, BTreeSet<String>>::new();
    for event in lines(&all, "event") {
        let life = number(&event["life"])?;
        sectors.extend(values(event, "bi_iter.bi_sector").map(|sector| (life, sector.as_u64())));
        events.entry(life).or_default().insert(format!("{} {}", event["function"], event["kind"]));
    }
    let lives = submitted(&all)?;
    let numbers = [lives.len(), events.len()];
    ensure!(numbers == [12, 12], "submits and lives of 60 reads: {numbers:?}, expected: 12");
    let submitted: Vec<u64> = lives.iter().filter_map(|life| sectors[life]).collect();
    let strides: BTreeSet<u64> = submitted.windows(2).map(|pair| pair[1] - pair[0]).collect();
    ensure!(strides == BTreeSet::from([40]), "not every fifth read: {submitted:?}");
    // The calls and the returns of four functions.
    let part = events.iter().find(|(_, events)| events.len() != 8);
    ensure!(part.is_none(), "a part of a life: {part:?}");
    Ok(())
}

/// All operators at once: of 800 reads and 800 writes, the writes of some sectors.
fn ctracer_filters_by_field() -> Result<()> {
    let disk = NullBlk::new("test", "memory_backed=0")?;
    // As a count without a sign, it would not be above -1.
    let filter = "bi_iter.bi_sector >= 800 and bi_iter.bi_sector < 0x640 and __bi_remaining > -1 \
                  and bi_opf & 0xff == 1";
    let jobs = ["--rw=read --number_ios=400", "--rw=write --number_ios=400"];
    let arguments = [all_or(&FEW)?, &["--filter", filter]].concat();
    let all = traced(&arguments, || engines(&[&disk.name], 8, &jobs))?;
    let lives = submitted(&all)?;
    // By each engine, 800 sectors of 8 for a write.
    ensure!(lives.len() == 200, "{} of 200 writes", lives.len());
    let ends = ended(&all, &lives);
    ensure!(ends >= 195, "{ends} of 200 lives are followed to their end");
    Ok(())
}

/// A disk of which one half answers every read with an error, which threads with odd names read: escape
/// sequences, an end of line, separators, no name at all.
fn ctracer_shows_lives_with_errors() -> Result<()> {
    let disk = NullBlk::new("test", "")?;
    let table = format!("0 8192 linear /dev/{} 0;8192 8192 error", disk.name);
    let bad = Mapped::new("bad", &table)?;
    let arguments = [&FEW[..], &["--errors", "--folded=/run/names"]].concat();
    let running = Running::stage("ctracer", &arguments)?;
    fio_direct(&bad.path(), "--rw=read --ioengine=psync --number_ios=200")?;
    let mut device = Direct::open(&bad.path())?;
    let names = [c"\x1b[31mred\nline", c"", c"a;b c\x7f", c"\xc2\x9b5n", c"\t\xe2\x80\xae"];
    let good = [7, 1023].map(|block| (c"good", block));
    for (name, block) in names.into_iter().zip([1024, 1100, 1200, 8, 2047]).chain(good) {
        rustix::thread::set_name(name)?;
        let read = device.read(4096, block * 4096);
        rustix::thread::set_name(c"guest")?;
        ensure!(read.is_ok() == (block < 1024), "block {block}: {read:?}");
    }
    let output = running.interrupt()?;
    let folded = std::fs::read_to_string("/run/names")?;

    let failed = output.matches("submit_bio(struct bio *bio) #").count();
    ensure!(failed == 4, "{failed} of 4 bios failed: {output}");
    let is_known = |number: &str| ["0", "1", "2", "3"].contains(&number);
    let mut numbers =
        output.split(" #").skip(1).filter_map(|rest| rest.split([' ', ';', ',']).next());
    ensure!(numbers.all(is_known), "lives are not numbered anew: {output}");
    ensure!(output.contains("bi_status: 0 -> 10 (EIO)"), "no I/O error: {output}");
    ensure!(output.contains("objects without an error, not shown (--errors)"), "{output}");

    for text in [&output, &folded] {
        let odd = text.chars().find(|&c| c == '\u{202e}' || c != '\n' && c.is_control());
        ensure!(odd.is_none(), "a control character, {odd:?}: {text:?}");
    }
    // Each line is one of an event, or belongs to one.
    let mut graph = output.lines().skip(1).take_while(|line| !line.starts_with("====="));
    let half = graph.find(|line| !line.contains(" | ") && !line.ends_with(" |"));
    ensure!(half.is_none(), "half a line: {half:?}");
    ensure!(output.contains("?[31mred?line-"), "{output}");
    for line in folded.lines() {
        let (stack, time) = line.rsplit_once(' ').context("no time")?;
        let is_whole = stack.split(';').all(|frame| !frame.trim().is_empty());
        ensure!(is_whole && time.parse::<u64>().is_ok(), "an empty frame, or no time: {line:?}");
    }
    for stack in ["?[31mred?line;", "?;", "a_b c?;"] {
        ensure!(folded.lines().any(|line| line.starts_with(stack)), "no {stack:?}: {folded:?}");
    }
    Ok(())
}
