//! `ctracer`'s filters, judged by fio: which reads of which disk and which process there were.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    ctracer::{lines, number},
    disks::{self, Mapped, NullBlk},
    run::{Gate, Running, fio, program, shell, stage, wait_until},
};

tests![
    ctracer_follows_one_disk,
    ctracer_follows_one_process,
    ctracer_samples_lives_of_one_address,
    ctracer_takes_only_a_process,
    ctracer_filters_by_field,
    ctracer_shows_lives_with_errors,
];

/// Where functions are attached one by one (6.1), all of them take too long.
fn has_fprobe() -> Result<bool> {
    Ok(std::fs::read_to_string("/proc/kallsyms")?.contains(" register_fprobe_ips\n"))
}

/// Functions of a bio's life, from which a filter has to tell one from the next: some are inlined in
/// some kernels.
fn sets() -> Result<Vec<&'static [&'static str]>> {
    let few: &[&str] = &["--only=submit_bio", "--only=bio_endio"];
    let many: &[&str] = &["--only=submit_bio*", "--only=bio_*"];
    Ok(vec![few, if has_fprobe()? { &[] } else { many }])
}

/// The events of a run, and the calls of submit_bio().
fn parse(output: &str) -> Result<(Vec<Value>, Vec<Value>)> {
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let is_submit = |event: &&Value| event["function"] == "submit_bio" && event["kind"] == "entry";
    let submits = lines(&all, "event").filter(is_submit).cloned().collect();
    Ok((all, submits))
}

/// Each life is one I/O: it is submitted once.
fn submitted_once(submits: &[Value]) -> Result<()> {
    let mut lives = BTreeSet::new();
    for event in submits {
        ensure!(lives.insert(number(&event["life"])?), "submitted twice: {event}");
    }
    Ok(())
}

/// The reads of one disk out of four loads, on three disks, whose bios share their memory.
fn ctracer_follows_one_disk() -> Result<()> {
    let (wanted, data, nvme) = (disks::virtio()?, disks::data()?, disks::nvme()?);
    let dev = format!("--dev={}", disks::numbers(&wanted)?);
    for functions in sets()? {
        let running = Running::stage("ctracer", &[functions, &["--json", &dev]].concat())?;
        let mut expected = 0;
        for (disk, count) in [(&wanted, 50), (&data, 200), (&nvme, 200), (&wanted, 50)] {
            let report = fio(&format!(
                "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine=libaio \
                 --iodepth=4 --number_ios={count}"
            ))?;
            if *disk == wanted {
                expected += number(&report["read"]["total_ios"])?;
            }
        }
        let (all, submits) = parse(&running.interrupt()?)?;
        ensure!(
            submits.len() as u64 == expected && expected >= 100,
            "{} of {expected} reads are bios of {wanted}: {functions:?}",
            submits.len()
        );
        submitted_once(&submits)?;
        // Where a bio points to, at every event but that of its initialisation, which fills it in.
        let mut targets = BTreeMap::<String, &Value>::new();
        for event in lines(&all, "event").filter(|event| event["function"] != "bio_init") {
            let changes = event["changes"].as_array().into_iter().flatten();
            let changed = changes.filter(|change| change["field"] == "bi_bdev");
            let now = changed.map(|change| &change["after"]).chain(event["fields"].get("bi_bdev"));
            targets.extend(now.map(|now| (now.to_string(), event)));
        }
        ensure!(targets.len() == 1, "bios of {} disks: {targets:?}", targets.len());
    }
    Ok(())
}

/// The reads of one process, while others read the same disk, before, meanwhile and after.
fn ctracer_follows_one_process() -> Result<()> {
    let disk = disks::virtio()?;
    let read = format!(
        "fio --thread --name=t --filename=/dev/{disk} --direct=1 --rw=randread --bs=4k \
         --ioengine=libaio --iodepth=4 --output-format=terse"
    );
    for functions in sets()? {
        let gate = Gate::new()?;
        // exec keeps the number of the process.
        let one = format!("{}\nexec {read} --number_ios=50 --rate_iops=50", Gate::WAIT);
        let process = Running::bash(&one)?;
        let pid = process.id().to_string();
        let mut command = Command::new(program("ctracer"));
        command.args(functions).args(["--json", "--pid", &pid]);
        let mut running = Running::spawn(&mut command)?;
        running.wait_for(": tracing ")?;
        let others = format!("{read} --number_ios=100");
        shell(&others)?;
        let beside = Running::bash(&format!("exec {read} --number_ios=300 --rate_iops=300"))?;
        gate.open()?;
        ensure!(process.end()?.code == Some(0), "fio failed");
        ensure!(beside.end()?.code == Some(0), "fio failed");
        shell(&others)?;
        let (_, submits) = parse(&running.interrupt()?)?;
        ensure!(
            submits.len() == 50,
            "{} bios of a process that reads 50 times: {functions:?}",
            submits.len()
        );
        submitted_once(&submits)?;
        for event in &submits {
            ensure!(event["tgid"].as_u64() == pid.parse().ok(), "another process's: {event}");
        }
    }
    Ok(())
}

/// One I/O in ten, of one thread that uses the same memory for all of them.
fn ctracer_samples_lives_of_one_address() -> Result<()> {
    let disk = NullBlk::new(&[])?;
    for functions in sets()? {
        let running = Running::stage("ctracer", &[functions, &["--json", "--sample=10"]].concat())?;
        // One CPU: each one counts by itself.
        fio(&format!(
            "--filename=/dev/{} --direct=1 --rw=read --bs=4k --ioengine=psync --number_ios=400 \
             --cpus_allowed=0",
            disk.name
        ))?;
        let (all, submits) = parse(&running.interrupt()?)?;
        submitted_once(&submits)?;
        let mut sectors = Vec::new();
        let mut known = BTreeMap::<u64, u64>::new();
        for event in lines(&all, "event") {
            let life = number(&event["life"])?;
            let changes = event["changes"].as_array().into_iter().flatten();
            let changed = changes.filter(|change| change["field"] == "bi_iter.bi_sector");
            let now = changed.map(|change| &change["after"]);
            for sector in now.chain(event["fields"].get("bi_iter.bi_sector")) {
                known.insert(life, number(sector)?);
            }
            if event["function"] == "submit_bio" && event["kind"] == "entry" {
                sectors.push(known.get(&life).copied().context("no sector")?);
            }
        }
        ensure!(sectors.len() == 40, "{} of 400 reads: {functions:?}", sectors.len());
        let strides: BTreeSet<u64> =
            sectors.windows(2).map(|pair| pair[1].wrapping_sub(pair[0])).collect();
        ensure!(strides == BTreeSet::from([80]), "not every tenth read: {sectors:?}");
    }
    Ok(())
}

/// A part of a sequential read by its sectors, and of a mixed load the writes, which the disk counts
/// itself.
fn ctracer_filters_by_field() -> Result<()> {
    let disk = NullBlk::new(&[("memory_backed", "0")])?;
    let io = |options: &str| {
        fio(&format!("--filename=/dev/{} --direct=1 --bs=4k --number_ios=400 {options}", disk.name))
    };
    let run = |filter: &str, options: &str| -> Result<(Vec<Value>, Vec<Value>)> {
        let arguments = ["--only=submit_bio*", "--only=bio_*", "--json", "--filter", filter];
        let running = Running::stage("ctracer", &arguments)?;
        io(options)?;
        let (all, submits) = parse(&running.interrupt()?)?;
        submitted_once(&submits)?;
        Ok((all, submits))
    };
    // 400 reads of 8 sectors: those from sector 800 on, before 1600, are a quarter of them.
    let filter = "bi_iter.bi_sector >= 800 and bi_iter.bi_sector < 0x640";
    let (all, submits) = run(filter, "--rw=read --ioengine=psync")?;
    ensure!(submits.len() == 100, "{} of 400 reads have these sectors", submits.len());
    let is_end = |event: &&Value| event["function"] == "bio_endio" && event["kind"] == "return";
    let ends: BTreeSet<u64> = lines(&all, "event")
        .filter(is_end)
        .map(|end| number(&end["life"]))
        .collect::<Result<_>>()?;
    ensure!(ends.len() == 100, "{} of 100 lives are followed to their end", ends.len());

    let stat = || -> Result<u64> {
        let text = std::fs::read_to_string(format!("/sys/block/{}/stat", disk.name))?;
        Ok(text.split_whitespace().nth(4).context("stat")?.parse()?)
    };
    for engine in ["psync", "libaio --iodepth=8"] {
        let before = stat()?;
        let options = format!("--rw=randrw --ioengine={engine}");
        let (_, submits) = run("bi_opf & 0xff == 1", &options)?;
        let writes = stat()? - before;
        ensure!(
            submits.len() as u64 == writes && (100..300).contains(&writes),
            "{} of {writes} writes, {engine}",
            submits.len()
        );
    }
    // A count with a sign: as one without, it would not be above -1.
    let load = "--rw=read --ioengine=psync";
    for (filter, count) in [("__bi_remaining > -1", 400), ("__bi_remaining < 0", 0)] {
        let (_, submits) = run(filter, load)?;
        ensure!(submits.len() == count, "{filter}: {} of {count}", submits.len());
    }

    for (filter, code, message) in [
        ("bi_opf", 2, "is no comparison"),
        ("bi_sectors == 1", 1, "no field bi_sectors"),
        ("bi_iter == 1", 1, "like bi_iter.bi_sector"),
    ] {
        let ended = stage("ctracer", &["--filter", filter])?;
        ensure!(ended.code == Some(code) && ended.stderr.contains(message), "{filter}: {ended:?}");
    }
    Ok(())
}

/// A disk of which one half answers every read with an error.
fn ctracer_shows_lives_with_errors() -> Result<()> {
    let disk = NullBlk::new(&[])?;
    let table = format!("0 8192 linear /dev/{} 0;8192 8192 error", disk.name);
    let bad = Mapped::new("bad", &table)?;
    let load = || -> Result<u64> {
        let path = bad.path();
        fio(&format!("--filename={path} --direct=1 --rw=read --bs=4k --number_ios=300"))?;
        // The exit code says that a read has failed.
        let read = format!("dd if={path} of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null");
        let failed = |block| Ok(shell(&format!("! {read} skip={block}")).is_ok());
        let results = [1100, 7, 1200, 1024, 8, 2047].map(failed).into_iter();
        Ok(results.collect::<Result<Vec<bool>>>()?.iter().filter(|&&failed| failed).count() as u64)
    };
    let arguments = ["--only=submit_bio*", "--only=bio_*", "--errors"];
    let running = Running::stage("ctracer", &[&arguments[..], &["--json"]].concat())?;
    let failed = load()?;
    let (all, submits) = parse(&running.interrupt()?)?;
    ensure!(failed == 4, "{failed} reads have failed");
    ensure!(
        submits.len() as u64 == failed,
        "{} of {failed} bios failed: {submits:?}",
        submits.len()
    );
    submitted_once(&submits)?;
    let lives: BTreeSet<u64> =
        lines(&all, "life").map(|life| number(&life["life"])).collect::<Result<_>>()?;
    ensure!(lives == (0..failed).collect(), "lives: {lives:?}");

    let running = Running::stage("ctracer", &arguments)?;
    load()?;
    let output = running.interrupt()?;
    ensure!(output.matches("submit_bio(struct bio *bio) #").count() as u64 == failed, "{output}");
    ensure!(output.contains("bi_status: 0 -> 10"), "no I/O error: {output}");
    ensure!(output.contains("objects without an error, not shown (--errors)"), "{output}");
    Ok(())
}

/// What --pid says of a number that is no process.
fn ctracer_takes_only_a_process() -> Result<()> {
    let mut gone = Command::new("true").spawn()?;
    gone.wait()?;
    let gone = gone.id().to_string();
    wait_until("the process is gone", || Ok(!std::path::Path::new("/proc").join(&gone).exists()))?;
    for (pid, message) in
        [(gone.as_str(), "there is no such process"), ("0", "from 1"), ("sh", "not a number")]
    {
        let ended = stage("ctracer", &["--pid", pid])?;
        ensure!(ended.code == Some(2) && ended.stderr.contains(message), "{pid}: {ended:?}");
    }
    Ok(())
}
