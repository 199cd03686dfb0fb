//! `ctracer` with requests, judged by fio: one life a request, on every kind of disk.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{
    ctracer::{lines, number},
    disks::{self, NullBlk},
    run::{Running, count, fio, judged_weakly, may_skip},
};

tests![ctracer_gives_each_request_a_life, ctracer_sees_the_ends_that_probes_miss,];

/// As many lives as fio has read blocks, and all of them end, though many completions interrupt
/// somebody's probe, which the ledger tells.
fn ctracer_sees_the_ends_that_probes_miss() -> Result<()> {
    let disk = disks::virtio()?;
    let functions = ["--only=submit_bio*", "--only=bio_*", "--only=blk*"];
    let running = Running::stage("ctracer", &[&functions[..], &["--quiet"]].concat())?;
    let report = fio(&format!(
        "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine=libaio --iodepth=32 \
         --numjobs=4 --number_ios=250 --size=200M"
    ))?;
    let reads = number(&report["read"]["total_ios"])?;
    let output = running.interrupt()?;
    // The ring buffer has room for all events of so many.
    ensure!(reads == 1000, "{reads} reads");
    let objects = output.lines().find(|line| line.contains(" objects (struct bio), "));
    let objects = objects.with_context(|| output.clone())?;
    let numbers: Vec<u64> = objects.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [lives, ended] = numbers[..] else { bail!("{objects}") };
    ensure!(count(&output, "lost")? == 0, "{output}");
    let missed = output.lines().filter(|line| line.contains(" missed ("));
    let missed = missed.filter_map(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    println!("{lives} lives, {ended} of them ended, {} hits missed", missed.sum::<u64>());
    // A real-time kernel completes in a thread, which may lose its CPU in the fentry program.
    let least = if may_skip()? { reads - reads / 100 } else { reads };
    ensure!(lives == reads && (least..=reads).contains(&ended), "{reads} reads: {output}");
    if ended < reads {
        judged_weakly(&format!("{ended} of {reads} lives have an end"));
    }
    Ok(())
}

/// The first and the last things that happen to a request, and what a driver does in between.
const FUNCTIONS: &[&str] = &[
    "--only=__rq_qos_*",
    "--only=blk_mq_rq_late_init",
    "--only=blk_mq_start_request",
    "--only=blk_mq_end_request",
    "--only=blk_mq_*free_request",
    "--only=__blk_mq_free_request",
    "--only=blk_mq_finish_request",
    "--only=nvme_*",
    "--only=scsi_*",
    "--only=null_*",
];

/// So many reads of each disk are so many lives, and all of them end. Where the kernel has skipped a
/// hit, which the ledger tells, an end may be missing.
fn ctracer_gives_each_request_a_life() -> Result<()> {
    const READS: u64 = 200;
    let null = NullBlk::new(&[])?;
    for disk in [disks::virtio()?, disks::nvme()?, disks::scsi()?, null.name.clone()] {
        for engine in ["psync", "libaio --iodepth=16"] {
            let running =
                Running::stage("ctracer", &[FUNCTIONS, &["--type=request", "--json"]].concat())?;
            let report = fio(&format!(
                "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine={engine} \
                 --number_ios={READS}"
            ))?;
            let output = running.interrupt()?;
            let requests = number(&report["read"]["total_ios"])?;
            lives_of(&output, requests).with_context(|| format!("{disk}, {engine}"))?;
        }
    }
    Ok(())
}

fn lives_of(output: &str, requests: u64) -> Result<()> {
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let ledger = lines(&all, "ledger").next().context("no ledger")?;
    let all_missed = number(&ledger["recursion"])? + number(&ledger["instances"])?;
    // Most of them are in the middle of a life.
    let missed = all_missed.min(requests / 50);
    ensure!(number(&ledger["lost"])? == 0, "{ledger}");
    let mut starts = BTreeMap::<u64, u64>::new();
    for event in lines(&all, "event") {
        if event["function"] == "blk_mq_start_request" && event["kind"] == "entry" {
            *starts.entry(number(&event["life"])?).or_default() += 1;
        }
    }
    let twice = starts.iter().find(|(_, count)| **count > 1);
    ensure!(twice.is_none(), "life and starts: {twice:?}");
    ensure!(
        starts.len() as u64 + missed >= requests && starts.len() as u64 <= requests + 2,
        "{} lives that were started, {requests} requests: {ledger}",
        starts.len()
    );
    let lives: Vec<&Value> = lines(&all, "life").collect();
    let ended = |life: &&&Value| !life["end"].is_null();
    let started = |life: &&&Value| life["life"].as_u64().is_some_and(|n| starts.contains_key(&n));
    let (count, ends) = (lives.len() as u64, lives.iter().filter(ended).count() as u64);
    let of_started = lives.iter().filter(started).filter(ended).count();
    println!("{requests} requests: {count} lives, {ends} of them ended, {all_missed} hits missed");
    ensure!(ends + missed >= count, "{ends} of {count} lives ended: {ledger}");
    ensure!(of_started as u64 + missed >= requests, "{of_started} ended: {ledger}");
    if ends < count {
        judged_weakly(&format!("{ends} of {count} lives have an end"));
    }
    // What comes before the start, and after the end, is no life of its own.
    ensure!(count <= requests + missed + 4, "{count} lives: {ledger}");
    Ok(())
}
