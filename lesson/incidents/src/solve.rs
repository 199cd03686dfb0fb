//! Finds what is wrong, as docs/slow-disk.md does: by what the tools and the kernel print.

use std::{collections::BTreeMap, fs, path::PathBuf, time::Instant};

use anyhow::{Context, Result, bail};
use incidents::plan::{Cure, IncidentAnswer, Layer, Service, Which, Who};
use serde_json::Value;

use crate::machine::{ServiceStatus, below, cpu_of, disk_of, is_verbose, shell};

/// How long each tool looks, in seconds.
const SECONDS: u64 = 8;
/// From which latency on a bio is slow here, if the disk is quicker by its data sheet.
const SLOW_MS: u64 = 120;
const PARTS: [(&str, Layer); 5] = [
    ("wait_ns", Layer::Wait),
    ("queue_ns", Layer::Queue),
    ("device_ns", Layer::Device),
    ("end_ns", Layer::End),
    ("mapper_ns", Layer::Mapper),
];

/// What is wrong with this service, whose disk needs so many ms for each I/O by its data sheet.
pub fn solve(service: Service, sheet_ms: u64) -> Result<IncidentAnswer> {
    let slow_ns = SLOW_MS.max(sheet_ms * 3 / 2) * 1_000_000;
    let (first, began) = (ServiceStatus::load(service)?, Instant::now());
    let lines = json(&format!("slow_io --json --min 0 --duration {SECONDS}s"))?;
    // slow_io also has to start and to end, which takes long where much else runs.
    let slow_requests = ServiceStatus::load(service)?.since(&first).slow() as f64 * SECONDS as f64
        / began.elapsed().as_secs_f64();
    let disk = disk_of(service)?;
    let (mut all, process) = (of_disk(&lines, &disk), service.process());
    all.retain(|bio| bio["process"] == *process);
    let is_slow = |bio: &&Value| number(bio, "total_ns") >= slow_ns;
    let slow: Vec<&Value> = all.iter().copied().filter(is_slow).collect();
    if is_verbose() {
        eprintln!("{slow_requests:.0} slow requests, {} slow bios of {}", slow.len(), all.len());
    }
    // The service makes again what fails.
    let failed: Vec<&Value> = all.iter().copied().filter(|bio| bio["error"].is_string()).collect();
    if !failed.is_empty() {
        let which = if is_a_range(&all, &failed) { Which::Range } else { Which::All };
        let (layer, who, cure) = (Layer::Errors, Who::Nobody, Cure::Table);
        return Ok(IncidentAnswer { layer, service, who, which, cure });
    }
    // A CPU that is taken makes some bios slow, and more requests than bios. A request may also wait for a journal's.
    let is_journal = |bio: &&&Value| bio["process"].as_str().unwrap_or("").starts_with("jbd2");
    let of_journal =
        of_disk(&lines, &disk).iter().filter(is_journal).filter(|bio| is_slow(bio)).count();
    // Nor are a few of thousands the reason.
    let are_some = !slow.is_empty() && slow.len() * 100 >= all.len();
    match are_some && (slow.len() + of_journal) as f64 * 2.0 >= slow_requests {
        true => of_bios(service, &lines, &all, &slow, slow_ns),
        false => without_bios(service),
    }
}

fn of_bios(
    service: Service,
    lines: &[Value],
    all: &[&Value],
    slow: &[&Value],
    slow_ns: u64,
) -> Result<IncidentAnswer> {
    let disk = disk_of(service)?;
    let lower = below(&disk)?;
    let mut layer = largest(slow);
    if layer.is_none() {
        // Device mapper has done the I/O itself: what did the disks below do?
        let of_lower = lower.iter().flat_map(|disk| of_disk(lines, disk));
        layer =
            largest(&of_lower.filter(|bio| number(bio, "total_ns") >= slow_ns).collect::<Vec<_>>());
    }
    let layer = layer.context("slow_io knows no part of any slow bio")?;
    // In percent: how many of the writes are slow, and how many of the reads.
    let [writes, reads] = [true, false].map(|write| {
        let of = |bios: &[&Value]| bios.iter().filter(|bio| is_write(bio) == write).count();
        of(slow) * 100 / of(all).max(1)
    });
    let mut which = match (writes, reads) {
        _ if writes * 5 < reads => Which::Reads,
        _ if reads * 5 < writes => Which::Writes,
        _ => Which::All,
    };
    if layer == Layer::Mapper && which == Which::All && is_a_range(all, slow) {
        which = Which::Range;
    }
    let queue = |file: &str| fs::read_to_string(format!("/sys/block/{}/queue/{file}", lower[0]));
    let bios_of = |names: &[&str]| share_of(lines, &disk, names);
    let (who, cure) = match layer {
        Layer::Wait if has_limit(service, &lower[0])? => (Who::Nobody, Cure::IoLimit),
        Layer::Wait if tags(&lower[0])? == 1 => (Who::Nobody, Cure::QueueDepth),
        Layer::Wait if queue("nr_requests")?.trim().parse::<u64>()? < tags(&lower[0])? => {
            (Who::Nobody, Cure::NrRequests)
        }
        Layer::Wait if bios_of(&["reportd", "jbd2"]) > 25 => (Who::Reportd, Cure::Flushes),
        Layer::Wait if bios_of(&["backupd"]) > 25 => (Who::Backupd, Cure::Copying),
        Layer::Wait if bios_of(&[&service.process()]) > 80 => (Who::Itself, Cure::Load),
        // Of the schedulers, one lets the disk idle. Else there is more than the disk takes: here, somebody's copy.
        Layer::Queue | Layer::Wait if queue("scheduler")?.contains("[bfq]") => {
            (Who::Nobody, Cure::Scheduler)
        }
        Layer::Queue | Layer::Wait => (Who::Backupd, Cure::Copying),
        Layer::Device => (Who::Nobody, Cure::Disk),
        Layer::Mapper if shell("dmsetup table")?.contains(" crypt ") => (Who::Nobody, Cure::Cipher),
        Layer::Mapper => (Who::Nobody, Cure::Table),
        _ => bail!("slow in {layer:?}: what does that?"),
    };
    Ok(IncidentAnswer { layer, service, who, which, cure })
}

/// No bio is slow: is the page cache, or the CPU?
fn without_bios(service: Service) -> Result<IncidentAnswer> {
    let found = |layer, who, which, cure| Ok(IncidentAnswer { layer, service, who, which, cure });
    let process = service.process();
    let disk = disk_of(service)?;
    let (mut hits, mut misses) = (0, 0);
    for interval in json(&format!("cachetop --json --interval 2s --duration {SECONDS}s"))? {
        for one in interval["processes"].as_array().into_iter().flatten() {
            if one["comm"] == *process {
                hits += number(one, "hits");
                misses += number(one, "misses");
            }
        }
    }
    let reads = |who, cure| found(Layer::PageCache, who, Which::Reads, cure);
    if misses * 10 > hits {
        let readahead = fs::read_to_string(format!("/sys/block/{disk}/queue/read_ahead_kb"))?;
        if readahead.trim() == "0" {
            return reads(Who::Nobody, Cure::Readahead);
        }
        let group = format!("/sys/fs/cgroup/{}/memory.max", service.name());
        if fs::read_to_string(group)?.trim() != "max" {
            return reads(Who::Nobody, Cure::MemoryLimit);
        }
        let said = shell(
            "cd /sys/kernel/tracing/instances && mkdir -p look && cd look && \
             echo 1 > events/syscalls/sys_enter_fadvise64/enable && sleep 2 && cat trace && \
             cd .. && rmdir look",
        )?;
        if said.contains("tidyd-") {
            return reads(Who::Tidyd, Cure::Cache);
        }
        bail!("{misses} misses and {hits} hits: what does that?");
    }
    let limit = fs::read_to_string(format!("/sys/fs/cgroup/{}/cpu.max", service.name()))?;
    if !limit.starts_with("max") {
        return found(Layer::Cpu, Who::Nobody, Which::All, Cure::CpuLimit);
    }
    match busiest()?.as_deref() {
        Some("sensord") => found(Layer::Cpu, Who::Sensord, Which::All, Cure::Priority),
        other => bail!("{hits} hits, {misses} misses, a busy process: {other:?}"),
    }
}

/// What a tool prints, an object a line.
fn json(command: &str) -> Result<Vec<Value>> {
    shell(command)?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn of_disk<'l>(lines: &'l [Value], disk: &str) -> Vec<&'l Value> {
    lines.iter().filter(|line| line["kind"] == "bio" && line["disk"] == disk).collect()
}

fn number(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or(0)
}

fn is_write(bio: &Value) -> bool {
    bio["operation"].as_str().is_some_and(|operation| operation.contains('W'))
}

/// The part with the largest sum, if all parts are most of the time.
fn largest(slow: &[&Value]) -> Option<Layer> {
    let of = |key| slow.iter().map(|bio| number(bio, key)).sum::<u64>();
    let sums = PARTS.map(|(key, layer)| (of(key), layer));
    let known: u64 = sums.iter().map(|(sum, _)| sum).sum();
    let (_, layer) = sums.into_iter().max_by_key(|(sum, _)| *sum)?;
    (known * 2 > of("total_ns")).then_some(layer)
}

/// Whether the sectors of these are a range, and many others are outside of it. One in twenty at either end may be
/// there by chance: a CPU stood still.
fn is_a_range(all: &[&Value], these: &[&Value]) -> bool {
    let mut sectors: Vec<u64> = these.iter().map(|bio| number(bio, "sector")).collect();
    sectors.sort_unstable();
    let few = sectors.len() / 20;
    let (Some(&from), Some(&to)) = (sectors.get(few), sectors.iter().nth_back(few)) else {
        return false;
    };
    let is_outside = |bio: &&&Value| !(from..=to).contains(&number(bio, "sector"));
    all.iter().filter(is_outside).count() > all.len() / 4
}

/// Whether the service's cgroup has a limit on this disk that it can reach.
fn has_limit(service: Service, disk: &str) -> Result<bool> {
    let number = fs::read_to_string(format!("/sys/block/{disk}/dev"))?;
    let limits = fs::read_to_string(format!("/sys/fs/cgroup/{}/io.max", service.name()))?;
    Ok(limits.lines().any(|line| line.starts_with(number.trim())))
}

/// How many I/Os a hardware queue of the device takes at once.
fn tags(disk: &str) -> Result<u64> {
    let mut tags = 0;
    for queue in fs::read_dir(format!("/sys/block/{disk}/mq"))? {
        let file: PathBuf = queue?.path().join("nr_tags");
        tags = tags.max(fs::read_to_string(file)?.trim().parse::<u64>()?);
    }
    Ok(tags)
}

/// Of all bios of a disk, how many percent are by processes whose names begin so.
fn share_of(lines: &[Value], disk: &str, names: &[&str]) -> usize {
    let all = of_disk(lines, disk);
    let is_theirs = |bio: &&&Value| {
        let process = bio["process"].as_str().unwrap_or_default();
        names.iter().any(|name| process.starts_with(name))
    };
    all.iter().filter(is_theirs).count() * 100 / all.len().max(1)
}

/// The process that uses most CPU, if it is much. A thread of the kernel is named after its work, now this, now that:
/// processes are known by their numbers.
fn busiest() -> Result<Option<String>> {
    let used = || -> Result<BTreeMap<PathBuf, (String, u64)>> {
        let processes = fs::read_dir("/proc")?.flatten().map(|process| process.path());
        Ok(processes.filter_map(|process| Some((process.clone(), cpu_of(&process)?))).collect())
    };
    let before = used()?;
    std::thread::sleep(std::time::Duration::from_secs(SECONDS));
    let delta = used()?.into_iter().map(|(process, (name, ticks))| {
        (ticks.saturating_sub(before.get(&process).map_or(0, |(_, before)| *before)), name)
    });
    // In ticks of 10 ms.
    Ok(delta.max().filter(|(ticks, _)| *ticks > SECONDS * 50).map(|(_, name)| name))
}
