//! `ctracer` with other structs than bios, judged by fio and by what the load knows of its objects.

use std::mem::discriminant;

use crate::{
    ctracer::{calls, engines, lines, number, traced, values},
    prelude::*,
};

tests![
    ctracer_gives_each_request_a_life,
    ctracer_sees_the_ends_that_probes_miss,
    ctracer_gives_each_page_a_life,
    ctracer_has_one_json_type_per_field,
    ctracer_keeps_to_its_memory,
];

/// The page cache is filled and emptied in turn: a folio that is added to it is not the one that was
/// there before, though they are freed in batches, which no function with a folio tells.
fn ctracer_gives_each_page_a_life() -> Result<()> {
    let disk = disks::virtio()?;
    let only = ["--only=filemap_*_folio", "--only=__folio_put*", "--only=folio_add_lru"];
    let read = format!("dd if=/dev/{disk} of=/dev/null bs=64k count=8 skip=16 2>&1");
    let load = format!("for i in 1 2 3; do blockdev --flushbufs /dev/{disk}; {read}; done");
    let all = traced(&[&["--type=folio"], &only[..]].concat(), || shell(&load))?;
    let mut added = HashMap::<u64, u64>::new();
    for event in calls(&all, "filemap_add_folio") {
        *added.entry(number(&event["life"])?).or_default() += 1;
    }
    // 1.5 MiB, in folios of at most 512 KiB.
    ensure!(added.len() >= 3, "{} folios were added", added.len());
    let twice = added.iter().find(|(_, times)| **times > 1);
    ensure!(twice.is_none(), "life and additions: {twice:?}, of {} lives", added.len());
    let index = 16 * (64 << 10) / 4096;
    let has_it = |event: &Value| values(event, "index").any(|value| *value == index);
    ensure!(lines(&all, "event").any(has_it), "no folio has the index {index}");
    Ok(())
}

/// Programs called `true` and `12345`: a thread's name is a text, and a process's number is a number.
fn ctracer_has_one_json_type_per_field() -> Result<()> {
    shell("cp $(command -v sleep) /run/12345; cp $(command -v sleep) /run/true")?;
    let mut pid = 0_u64;
    let all = traced(&["--type=task_struct", "--only=exit_signals"], || {
        pid = shell("/run/12345 0; echo $$; exec /run/true 0")?.trim().parse()?;
        Ok(())
    })?;
    let mut types = HashMap::<&str, &Value>::new();
    let (mut names, mut pids) = (HashSet::new(), HashSet::new());
    for event in lines(&all, "event") {
        let changes = event["changes"].as_array().into_iter().flatten();
        let changes = changes.flat_map(|change| {
            let field = change["field"].as_str().unwrap_or_default();
            [(field, &change["before"]), (field, &change["after"])]
        });
        let fields = event["fields"].as_object().into_iter().flatten();
        for (field, value) in fields.map(|(field, value)| (field.as_str(), value)).chain(changes) {
            let known = *types.entry(field).or_insert(value);
            ensure!(discriminant(known) == discriminant(value), "{field} is {known} and {value}");
        }
        names.extend(values(event, "comm"));
        pids.extend(values(event, "pid"));
    }
    for (found, wanted) in
        [(&names, Value::from("true")), (&names, "12345".into()), (&pids, pid.into())]
    {
        ensure!(found.contains(&wanted), "no {wanted}: {found:?}");
    }
    Ok(())
}

/// A page of task_structs, which have 10,000 bytes each: the kernel knows how much memory the stage has
/// had when the trace began, and at most.
fn ctracer_keeps_to_its_memory() -> Result<()> {
    const MEMORY: u64 = 16_000;
    // The ring buffer, what was taken out of it when the trace ended, and what waited to be sorted.
    const ON_THE_WAY: u64 = 2 * (16 << 10) + (9 << 10);
    // What malloc() has between the pieces that are in use: eight runs differed by 3.4 MiB.
    const BETWEEN: u64 = (MEMORY + ON_THE_WAY) / 16;
    let mut command = Command::new(program("ctracer"));
    command.args(["--type=task_struct", "--quiet", "--html=/run/html", "--memory=16M"]);
    command.args(["--only=select_task_rq_*", "--only=wakeup_preempt_*", "--only=set_next_*"]);
    let mut running = Running::spawn(&mut command)?;
    running.wait_for(": tracing ")?;
    let path = format!("/proc/{}/status", running.id());
    let most = || -> Result<u64> {
        Ok(between(&fs::read_to_string(&path)?, "VmHWM:", "kB")?.trim().parse()?)
    };
    let (without, mut with) = (most()?, 0);
    // Two processes that wake each other up.
    let _load = Running::bash(
        "mkfifo /run/ping /run/pong 2>/dev/null; exec perl -e '
        $SIG{ALRM} = sub { exit }; alarm 100; $| = 1;
        if (fork) { open A, \">/run/ping\"; open B, \"/run/pong\" }
        else { open B, \"/run/ping\"; open A, \">/run/pong\"; }
        while (1) { syswrite A, \"x\"; sysread B, $_, 1 }'",
    )?;
    wait_until("the trace is full", || Ok(most().map(|most| with = most).is_err()))?;
    let ended = running.end_well()?;
    println!("{with} KiB at most, {without} KiB at the start");
    ensure!(ended.stderr.contains("it takes 16 MB (--memory)"), "{ended:?}");
    let bound = without + MEMORY + ON_THE_WAY + BETWEEN;
    ensure!(with <= bound, "{with} KiB of {bound}, {without} at the start: {ended:?}");
    // It is used, too.
    ensure!(with >= without + MEMORY / 4, "{with} KiB, {without} at the start: {ended:?}");
    Ok(())
}

/// As many lives as fio has read blocks, and as many calls and returns; all lives end, though many
/// completions interrupt somebody's probe, which the ledger tells.
fn ctracer_sees_the_ends_that_probes_miss() -> Result<()> {
    let disk = disks::virtio()?;
    let load = || fio_direct(&disk, "--iodepth=32 --numjobs=4 --number_ios=250 --size=200M");
    let arguments = ["--quiet", "--only=submit_bio", "--only=bio_endio"];
    let (report, output) = beside("ctracer", &arguments, load)?;
    let of = |what: &str| count(&output, what);
    let reads = number(&report["read"]["total_ios"])?;
    let objects = output.lines().find(|line| line.contains(" objects (struct bio), "));
    let objects = objects.context("no objects")?;
    let numbers: Vec<u64> = objects.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [lives, ended] = numbers[..] else { bail!("{objects}") };
    ensure!(of("lost")? == 0, "{output}");
    // A real-time kernel completes in a thread, which may lose its CPU in the fentry program.
    let least = if may_skip()? { reads - reads / 100 } else { reads };
    ensure!(lives == reads && (least..=reads).contains(&ended), "{reads} reads: {output}");
    if ended < reads {
        judged_weakly(&format!("{ended} of {reads} lives have an end"));
    }

    ensure!(output.contains("the ledger balances"), "{output}");
    let hits = of("hits of the probes")? - of("before the start")?;
    // With kprobe.session, the kernel skips the return of a call that it has missed.
    let missed = of("missed (another BPF program")?;
    let whole = hits < 4 * reads + 100 && hits + missed >= 4 * reads;
    ensure!(whole, "{hits} hits, {missed} of them missed, {reads} reads: {output}");
    let (events, recorded) = (of("events")?, of("calls recorded")? + of("returns recorded")?);
    ensure!(events == recorded && recorded > 2 * reads, "{events} events, {recorded}: {output}");
    Ok(())
}

/// The first and the last things that happen to a request, and what a driver does in between.
const FUNCTIONS: &[&str] = &[
    "--only=__rq_qos_*",
    "--only=blk_mq_rq_late_init",
    "--only=blk_mq_start_request",
    "--only=blk_mq_end_request",
    "--only=*blk_mq_*free_request",
    "--only=blk_mq_finish_request",
    "--only=nvme_setup_cmd",
    "--only=nvme_*complete*",
    "--only=nvme_cleanup_cmd",
    "--only=scsi_*request*",
    "--only=scsi_complete",
    "--only=null_*",
];

/// So many reads of each disk are so many lives, and all of them end. Where the kernel has skipped a
/// hit, which the ledger tells, an end may be missing.
fn ctracer_gives_each_request_a_life() -> Result<()> {
    const READS: u64 = 60;
    let (null, virtio, nvme, scsi) =
        (NullBlk::new("test", "")?, disks::virtio()?, disks::nvme()?, disks::scsi()?);
    let (disks, job) =
        ([&*virtio, &nvme, &scsi, &null.name], format!("--rw=randread --number_ios={READS}"));
    let all = traced(&[FUNCTIONS, &["--type=request"]].concat(), || engines(&disks, 16, &[&job]))?;
    let requests = 2 * READS * disks.len() as u64;
    let ledger = lines(&all, "ledger").next().context("no ledger")?;
    // Most of them are in the middle of a life.
    let missed = number(&ledger["recursion"])? + number(&ledger["instances"])?;
    let missed = missed.min(requests / 50);
    ensure!(number(&ledger["lost"])? == 0, "{ledger}");
    let lives: Vec<&Value> = lines(&all, "life").collect();
    let mut starts = BTreeSet::new();
    for event in calls(&all, "blk_mq_start_request") {
        let life = number(&event["life"])?;
        ensure!(starts.insert(life), "#{life} is started twice: {ledger}");
    }
    let started = starts.len() as u64;
    let whole = started + missed >= requests && started <= requests + 8;
    ensure!(whole, "{started} lives that were started, {requests} requests: {ledger}");
    let has_it = |event: &&Value| values(event, "__data_len").any(|length| *length == 4096);
    let reads = lines(&all, "event").filter(has_it).filter_map(|event| event["life"].as_u64());
    let reads: BTreeSet<_> = reads.filter(|life| starts.contains(life)).collect();
    ensure!(reads.len() as u64 + missed >= requests, "{} have 4096 bytes", reads.len());

    let ended: Vec<_> = lives.iter().filter(|life| !life["end"].is_null()).collect();
    let is_started =
        |life: &Value| life["life"].as_u64().is_some_and(|life| starts.contains(&life));
    let of_started = ended.iter().filter(|life| is_started(life)).count() as u64;
    let (count, ends) = (lives.len() as u64, ended.len() as u64);
    ensure!(ends + missed >= count, "{ends} of {count} lives ended: {ledger}");
    ensure!(of_started + missed >= requests, "{of_started} of {requests} ended: {ledger}");
    if ends < count {
        judged_weakly(&format!("{ends} of {count} lives have an end"));
    }
    // What comes before the start, and after the end, is no life of its own.
    ensure!(count <= requests + missed + 16, "{count} lives, {requests} requests: {ledger}");
    Ok(())
}
