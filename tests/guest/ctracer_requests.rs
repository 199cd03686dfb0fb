//! `ctracer` with other structs than bios, judged by fio and by what the load knows of its objects.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{
    ctracer::{calls, engines, lines, number, parse, values},
    disks::{self, NullBlk},
    run::{Running, count, fio, judged_weakly, may_skip},
};

tests![ctracer_gives_each_request_a_life, ctracer_sees_the_ends_that_probes_miss];

/// As many lives as fio has read blocks, and as many calls and returns; all lives end, though many
/// completions interrupt somebody's probe, which the ledger tells.
fn ctracer_sees_the_ends_that_probes_miss() -> Result<()> {
    let disk = disks::virtio()?;
    let running = Running::stage("ctracer", &["--quiet", "--only=submit_bio", "--only=bio_endio"])?;
    let report = fio(&format!(
        "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine=libaio --iodepth=32 \
         --numjobs=4 --number_ios=250 --size=200M"
    ))?;
    let output = running.interrupt()?;
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
        (NullBlk::new(&[])?, disks::virtio()?, disks::nvme()?, disks::scsi()?);
    let running = Running::stage("ctracer", &[FUNCTIONS, &["--type=request", "--json"]].concat())?;
    let disks = [&*virtio, &*nvme, &*scsi, &*null.name];
    engines(&disks, 16, &[&format!("--rw=randread --number_ios={READS}")])?;
    let (all, requests) = (parse(&running.interrupt()?)?, 2 * READS * disks.len() as u64);
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
