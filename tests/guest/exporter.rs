//! The exporter, beside the kernel's counters, fio, and a real Prometheus.

use std::{
    io::{ErrorKind, Read},
    net::Shutdown,
};

use truth::Question::{DriverRequests, Requests};

use crate::{prelude::*, table, truth::skipped};

tests![
    exporter_adds_up_what_the_kernel_does,
    exporter_counts_what_the_disks_count,
    exporter_survives_hostile_clients,
    exporter_beside_prometheus,
    exporter_runs_as_its_unit_says,
];

pub const PORT: u16 = 9435;
/// A request of a client that takes this machine for another one, or for one of that name.
const FOREIGN: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: disks.example:9435\r\n\r\n";

/// Starts an exporter that listens on a port of the loopback interface.
pub fn start(arguments: &[&str]) -> Result<Running> {
    let listen = format!("127.0.0.1:{PORT}");
    Running::stage("exporter", &[&["--listen", &listen], arguments].concat())
}

/// What a server sends back for these bytes, within a time limit.
fn send(port: u16, request: &[u8]) -> Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).context("connect")?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.write_all(request)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("no answer")?;
    Ok(answer)
}

/// The body of a page.
pub fn get(port: u16, path: &str) -> Result<String> {
    let answer = send(port, format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no end of the headers")?;
    ensure!(head.starts_with("HTTP/1") && head.contains(" 200 OK"), "{path}: {answer}");
    Ok(body.to_owned())
}

/// The samples of one scrape: a metric with its labels, and the value.
pub struct Scrape(pub HashMap<String, f64>);

impl Scrape {
    pub fn now() -> Result<Scrape> {
        let text = get(PORT, "/metrics")?;
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').context("no value")?;
            Ok((name.to_owned(), value.parse().with_context(|| line.to_owned())?))
        };
        Ok(Scrape(lines.map(sample).collect::<Result<_>>()?))
    }

    /// 0 where there is no such sample yet.
    pub fn get(&self, sample: &str) -> f64 {
        self.0.get(sample).copied().unwrap_or(0.0)
    }

    /// How often the kernel skipped programs, whose names begin so.
    pub fn skipped(&self, program: &str) -> f64 {
        let of = format!("storage_programs_skipped_total{{program=\"{program}");
        self.0.iter().filter(|(name, _)| name.starts_with(&of)).map(|(_, times)| times).sum()
    }

    /// The requests that were missed so.
    fn missed(&self) -> f64 {
        self.skipped("rq_done\"")
    }

    /// Of a disk and an operation.
    pub fn figure(&self, metric: &str, disk: &str, op: &str) -> f64 {
        self.get(&format!("{metric}{{disk=\"{disk}\",op=\"{op}\"}}"))
    }

    pub fn bios(&self, disk: &str, op: &str) -> u64 {
        self.figure("storage_bio_seconds_count", disk, op) as u64
    }

    /// What only the kernel has counted of a disk, and what only the exporter has; `None`: they cannot be compared.
    pub fn gap(&self, disk: &str) -> Result<Option<[f64; 2]>> {
        let of = |metric| self.0.get(&format!("storage_{metric}\"}}")).copied();
        let gap = ["exporter", "kernel"].map(|side| {
            of(format!("unaccounted_requests_total{{disk=\"{disk}\",missing_in=\"{side}"))
        });
        match (of(format!("disk_audited{{disk=\"{disk}")), gap) {
            (Some(1.0), [Some(missing), Some(extra)]) => Ok(Some([missing, extra])),
            (Some(0.0), [None, None]) => Ok(None),
            odd => bail!("{disk}: {odd:?}"),
        }
    }

    /// The sum of a histogram is one that its buckets allow.
    pub fn sum_fits(&self, name: &str, disk: &str, op: &str) -> Result<()> {
        let sum = self.figure(&format!("{name}_sum"), disk, op);
        if sum == 0.0 {
            return Ok(());
        }
        let (mut below, mut from, mut least, mut most) = (0, 0.0, 0.0, 0.0);
        for (limit, count) in self.buckets(&format!("{name}_bucket"), disk, op)? {
            let here = (count - below) as f64;
            least += here * from;
            // What took longer than the last limit may have taken any time.
            most += if here > 0.0 { here * limit } else { 0.0 };
            (below, from) = (count, limit);
        }
        ensure!(
            (least..=most).contains(&sum),
            "{name} {disk} {op}: {sum} s, not {least} to {most}"
        );
        Ok(())
    }

    /// The parts of the reads of a disk, whose sum is all of their latency.
    fn parts(&self, disk: &str) -> Result<HashMap<&str, f64>> {
        let of = format!("storage_bio_part_seconds_total{{disk=\"{disk}\",op=\"read\",part=\"");
        let part = |name| str::strip_suffix(str::strip_prefix(name, &of)?, "\"}");
        let parts = self.0.iter().filter_map(|(name, seconds)| Some((part(name)?, *seconds)));
        let parts: HashMap<&str, f64> = parts.collect();
        let all = self.figure("storage_bio_seconds_sum", disk, "read");
        let sum = parts.values().sum::<f64>();
        ensure!(all > 0.0 && (sum - all).abs() < 1e-6, "{disk}: parts {parts:?} of {all} s");
        Ok(parts)
    }

    /// How many bios or requests took at most as long as the limit of each bucket, in seconds.
    fn buckets(&self, name: &str, disk: &str, op: &str) -> Result<Vec<(f64, u64)>> {
        let prefix = format!("{name}{{disk=\"{disk}\",op=\"{op}\",le=\"");
        let mut buckets = Vec::new();
        for (name, count) in &self.0 {
            if let Some(limit) = name.strip_prefix(&prefix) {
                buckets.push((limit.trim_end_matches("\"}").parse::<f64>()?, *count as u64));
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        ensure!(buckets.len() == 54, "{disk} {op}: {} buckets", buckets.len());
        ensure!(buckets.is_sorted_by_key(|bucket| bucket.1), "{buckets:?}");
        let all = self.figure(&name.replace("_bucket", "_count"), disk, op);
        ensure!(buckets[53] == (f64::INFINITY, all as u64), "{buckets:?}");
        Ok(buckets)
    }

    /// Nothing was lost.
    pub fn is_complete(&self) -> Result<()> {
        let missing = ["storage_bios_not_measured_total", "storage_reads_not_measured_total"];
        let is_missing = |name: &str| missing.iter().any(|missing| name.starts_with(missing));
        let lost = self.0.iter().find(|(name, value)| is_missing(name) && **value != 0.0);
        ensure!(lost.is_none(), "{lost:?}");
        Ok(())
    }
}

const LOADS: &str = "in_tasks threads_64_nvme polled parts merge requeue partial iostats_off flush passthrough discard \
     one_tag partition after_flushes multipath";

/// What the exporter counts apart of the requests of a load.
const APART: [(&str, &str, &str); 5] = [
    ("requeue", "retried", "requeued"),
    ("partial", "retried", "partial"),
    ("partial", "retried", "requeued"),
    ("iostats_off", "not_measured", "no_statistics"),
    ("passthrough", "not_measured", "passthrough"),
];

/// Requests, by default: after each load, how many there were and how long they took is what the kernel's own
/// counters have, of each disk and operation. What is not measured is counted apart.
fn exporter_adds_up_what_the_kernel_does() -> Result<()> {
    let running = start(&[])?;
    for case in LOADS.split_whitespace() {
        let mut load = table::set_up(case)?;
        let before = Quiet::now()?;
        let facts = load().context(case)?;
        let after = Quiet::now()?;
        after.adds_up(&before, case == "multipath").context(case)?;
        let fact = |question| facts.iter().find(|fact| fact.question == question);
        for (_, what, reason) in APART.iter().filter(|(of, ..)| *of == case) {
            let name = format!("storage_requests_{what}_total{{reason=\"{reason}\"}}");
            let ours = (after.scrape.get(&name) - before.scrape.get(&name)) as u64;
            let expected = match *what {
                "retried" => fact(Requests).map(|requests| requests.again),
                _ => fact(DriverRequests).map(|requests| requests.expected.least),
            };
            ensure!(Some(ours) == expected && ours > 0, "{case}: {ours} {name}, not {expected:?}");
        }
    }
    has_what_is_skipped_in_the_gap()?;
    counts_starts_that_are_shared()?;
    takes_a_place_again()?;
    running.interrupt().map(drop)
}

/// Where the kernel takes the CPU from a task in the program, it skips the program for all others there: 64 threads,
/// until that has happened. [`Quiet::adds_up`] judges the gap.
fn has_what_is_skipped_in_the_gap() -> Result<()> {
    let disk = NullBlk::new("skips", "irqmode=1 submit_queues=2")?;
    for _ in 0..if preempts()? { 5 } else { 0 } {
        let before = Quiet::now()?;
        fio_direct(&disk.name, "--iodepth=16 --numjobs=64 --number_ios=100")?;
        let after = Quiet::now()?;
        after.adds_up(&before, false)?;
        if after.scrape.missed() > before.scrape.missed() {
            return Ok(());
        }
    }
    judged_weakly("no program was skipped");
    Ok(())
}

/// 32 reads that are submitted at once, and complete meanwhile. From 6.9 on, the kernel takes the time of all of
/// them once: its own counters have them end as they begin. Fio sees their ends later than the kernel.
fn counts_starts_that_are_shared() -> Result<()> {
    const READS: u64 = 640;
    let disk = NullBlk::new("plugged", "irqmode=0 submit_queues=2")?;
    let before = Quiet::now()?;
    let batches = "--iodepth=32 --iodepth_batch=32 --iodepth_batch_complete_min=32";
    let report = fio_direct(&disk.name, &format!("{batches} --number_ios={READS}"))?;
    let after = Quiet::now()?;
    let [count, ms, _, kernels] = after.since(&before, false)[&(disk.name.as_str(), "read")];
    let mean = report["read"]["lat_ns"]["mean"].as_f64().context("no mean")?;
    let fios = mean * READS as f64 / 1e6;
    ensure!(count == READS as f64, "{count} of {READS} reads");
    ensure!(ms <= fios, "{ms} ms, and fio saw {fios} ms");
    ensure!(ms >= kernels - later(count, kernels), "{ms} ms, the kernel {kernels} ms");
    let name = "storage_requests_shared_start_total";
    let shared = (after.scrape.get(name) - before.scrape.get(name)) as u64;
    let caches = fs::read("/sys/kernel/btf/vmlinux")?;
    // The member of struct blk_plug that has the time.
    let caches = caches.windows(11).any(|name| name == b"\0cur_ktime\0");
    let expected = if caches { READS / 2..=READS / 32 * 31 } else { 0..=0 };
    ensure!(expected.contains(&shared), "{shared} share a start, not {expected:?}");
    Ok(())
}

/// A disk that comes 32 disks after another one gets its places, if that has gone: with nothing in them.
fn takes_a_place_again() -> Result<()> {
    for n in 0..34 {
        let disk = NullBlk::new("again", "size=16")?;
        if [0, 1, 32, 33].contains(&n) {
            // The first one, all of whose places are free again when it has gone, has more than the later one.
            disks::read(&disk.name, if n < 2 { 20 } else { 5 })?;
            let (scrape, stat) = (Scrape::now()?, disks::stat(&disk.name)?);
            let ours = scrape.figure("storage_request_seconds_count", &disk.name, "read");
            ensure!(ours == stat[0] as f64, "disk {n}: {ours}, and there were {}", stat[0]);
        }
        ends_with(disk)?;
    }
    Ok(())
}

/// Operations, and where the kernel's counters of a disk have their number and their time.
const OPERATIONS: [(&str, usize, usize); 4] =
    [("read", 0, 3), ("write", 4, 7), ("discard", 11, 14), ("flush", 15, 16)];

/// The time of a request, and the two that it consists of.
pub const PHASES: [&str; 3] =
    ["storage_request_seconds", "storage_request_queue_seconds", "storage_request_device_seconds"];

/// The time of requests that are in neither of these two.
pub const UNDIVIDED: &str = "storage_request_undivided_seconds";

/// How many ms the kernel may have more for this number of requests, which took it so many ms: it takes the time
/// when it has completed the bios, up to 0.15 ms after the exporter on an idle machine, and 1 ms on a busy one,
/// which emulates the guest's CPUs in turns.
pub fn later(requests: f64, ms: f64) -> f64 {
    2.0 + 0.01 * ms + 0.3 * requests
}

/// What the exporter and the kernel have counted, at a time when nothing completes.
pub struct Quiet {
    pub scrape: Scrape,
    /// Of each disk that has requests, and operation: the exporter's number and ms, and the kernel's.
    sums: HashMap<(String, &'static str), [f64; 4]>,
}

impl Quiet {
    pub fn now() -> Result<Quiet> {
        let mut quiet = None;
        wait_until("a quiet moment", || {
            let (idle, before, scrape) = (disks::all_in_flight()? == 0, stats()?, Scrape::now()?);
            let stats = stats()?;
            let sums = stats.iter().flat_map(|(disk, stat)| {
                OPERATIONS.map(|(operation, number, time)| {
                    let ours = scrape.figure("storage_request_seconds_count", disk, operation);
                    let seconds = scrape.figure("storage_request_seconds_sum", disk, operation);
                    let [kernels, ms] = [number, time].map(|field| stat[field] as f64);
                    ((disk.clone(), operation), [ours, seconds * 1e3, kernels, ms])
                })
            });
            quiet = Some(Quiet { sums: sums.collect(), scrape });
            Ok(idle && before == stats)
        })?;
        quiet.context("nothing")
    }

    /// What has been added to the sums since then. `clones`: the kernel counts clones of flushes as reads.
    fn since(&self, before: &Quiet, clones: bool) -> HashMap<(&str, &str), [f64; 4]> {
        let mut since = HashMap::<_, [f64; 4]>::new();
        for (of @ (disk, operation), now) in &self.sums {
            let before = before.sums.get(of).unwrap_or(&[0.0; 4]);
            let operation = if clones && *operation == "flush" { "read" } else { operation };
            let grown = since.entry((disk.as_str(), operation)).or_default();
            (0..4).for_each(|n| grown[n] += now[n] - before[n]);
        }
        since
    }

    /// Whether the exporter has added up what the kernel has.
    fn adds_up(&self, before: &Quiet, clones: bool) -> Result<()> {
        let skipped = self.scrape.missed() - before.scrape.missed();
        let mut gaps = HashMap::new();
        for ((disk, operation), [ours, ms, kernels, kernels_ms]) in self.since(before, clones) {
            let what = format!(
                "{disk} {operation}: {ours}, {ms} ms; the kernel {kernels}, {kernels_ms} ms; {skipped} skipped"
            );
            let missing = kernels - ours;
            ensure!((0.0..=skipped).contains(&missing), what);
            *gaps.entry(disk).or_insert(0.0) += missing;
            if missing > 0.0 {
                judged_weakly(&what);
                continue;
            }
            // Of requests that complete together, the kernel takes the time before the first; of dm-multipath's,
            // when they have completed in a softirq, too.
            let exact = later(kernels, kernels_ms);
            let much = 0.1 * kernels_ms + kernels;
            let (early, more) = match disk {
                disk if disk.starts_with("nvme") || disk == "polled" => (much, 0.0),
                disk if disk.starts_with("dm-") => (0.0, much),
                _ => (0.0, kernels),
            };
            let late = kernels_ms - ms;
            ensure!((-early - exact..=more + exact).contains(&late), "{what}: {late} ms later");
        }
        for (disk, missing) in gaps {
            let is_silent =
                fs::read_to_string(format!("/sys/block/{disk}/queue/iostats"))? == "0\n";
            let gap = self.scrape.gap(disk)?;
            ensure!(gap.is_none() == is_silent, "{disk}, statistics: {}, {gap:?}", !is_silent);
            let Some([now, extra]) = gap else { continue };
            let before = before.scrape.gap(disk).ok().flatten().unwrap_or_default()[0];
            let is_right = now - before == missing && now <= self.scrape.missed();
            ensure!(is_right, "{disk}: the gap was {before}, is {now}, {missing} are missing");
            ensure!(extra == 0.0, "{disk}: {extra} that the kernel has not");
        }
        let mut all = self.sums.keys();
        all.try_for_each(|(disk, operation)| {
            let mut names = PHASES.into_iter().chain([UNDIVIDED]);
            names.try_for_each(|name| self.scrape.sum_fits(name, disk, operation))
        })
    }
}

/// The kernel's counters of all disks that have requests.
pub fn stats() -> Result<HashMap<String, Vec<u64>>> {
    let disks = fs::read_dir("/sys/block")?.flatten();
    let names = disks.map(|disk| disk.file_name().to_string_lossy().into_owned());
    let have_requests = names.filter(|name| Path::new(&format!("/sys/block/{name}/mq")).exists());
    have_requests.map(|name| Ok((name.clone(), disks::stat(&name)?))).collect()
}

/// One exporter, and loads of which the kernel's counters, fio and timers know. Each disk is the successor of
/// the one before, and has its name: the series of a disk end with it.
fn exporter_counts_what_the_disks_count() -> Result<()> {
    // Just above the limit of a bucket, 8,388,608 ns. Made before any program sees its partition scan.
    let late = NullBlk::new("late", "irqmode=2 completion_nsec=8400000")?;
    let silent = NullBlk::new("silent", "")?;
    fs::write(silent.queue("iostats"), "0")?;
    let running = start(&["--bios", "--parts"])?;
    has_fios_latencies(&late.name)?;
    counts_operations()?;
    says_what_is_in_no_part(&silent.name)?;
    divides_batches(&disks::nvme()?)?;
    // Before a virtio disk is looked for: to read its serial number, the driver makes a bio that nobody submits.
    let scrape = Scrape::now()?;
    scrape.is_complete()?;
    let hits = scrape.get("storage_page_cache_pages_total{result=\"hit\"}");
    ensure!(hits > 0.0, "fio was started, and {hits} pages were hit: {:?}", scrape.0);
    counts_what_it_was_skipped_for(running.id())?;
    running.interrupt().map(drop)
}

/// Reads, writes, flushes and discards of the whole disk and of a partition, on two CPUs: the
/// disk's counters say how many there were.
fn counts_operations() -> Result<()> {
    let disk =
        NullBlk::new("test", "memory_backed=1 size=64 discard=1 cache_size=8 submit_queues=2")?;
    let (name, partition) = (&disk.name, disks::partition(&disk.name));
    shell(&format!(
        "echo ',,83' | sfdisk --quiet --no-reread --force /dev/{name} 2>&1; \
         partx -u /dev/{name}; test -e /dev/{partition}; sync"
    ))?;
    let (before, scrape_before) = (disks::stat(name)?, Scrape::now()?);
    let loads = [
        (name, "--rw=randrw --numjobs=4 --number_ios=250"),
        (&partition, "--rw=randread --number_ios=200"),
        (name, "--rw=randtrim --number_ios=100 --ioengine=sync"),
        (name, "--rw=write --fsync=1 --number_ios=100"),
    ];
    let mut written = 0;
    for (device, options) in loads {
        let report = fio_direct(device, &format!("--ioengine=psync --size=32m {options}"))?;
        written += report["write"]["total_ios"].as_u64().context("no count")?;
    }
    let (scrape, after) = (Scrape::now()?, disks::stat(name)?);
    let completed = |field: usize| after[field] - before[field];
    // The kernel counts a flush also as a write: fio knows how much it wrote.
    let [reads, discards, flushes] = [0, 11, 15].map(completed);
    for (op, kernels) in
        [("read", reads), ("write", written), ("discard", discards), ("flush", flushes)]
    {
        let ours = scrape.bios(name, op) - scrape_before.bios(name, op);
        ensure!(ours == kernels && ours >= 90, "{op}: {ours}, and there were {kernels}");
        scrape.buckets("storage_bio_seconds_bucket", name, op)?;
    }
    ensure!(scrape.bios(&partition, "read") == 0, "a partition is no disk");
    ends_with(disk)
}

/// The series of a disk end with it.
fn ends_with(disk: NullBlk) -> Result<()> {
    let name = disk.name.clone();
    drop(disk);
    let text = get(PORT, "/metrics")?;
    ensure!(!text.contains(&format!("\"{name}\"")), "{name} is gone: {text}");
    Ok(())
}

/// Every bio takes at least as long as the delay that the disk has, and no longer than fio waited.
fn has_fios_latencies(disk: &str) -> Result<()> {
    const DELAY: f64 = 0.0084;
    let options = "--ioengine=psync --number_ios=100 --size=512m --output-format=json+";
    let report = fio_direct(disk, options)?;
    let scrape = Scrape::now()?;
    let device = scrape.parts(disk)?["device"];
    ensure!(device >= 100.0 * DELAY, "100 reads took {device} s at the disk");
    let (ios, clat) = (&report["read"]["total_ios"], &report["read"]["clat_ns"]);
    let bios = scrape.bios(disk, "read");
    ensure!(*ios == bios, "fio: {ios}, we: {bios}");
    let sum = scrape.figure("storage_bio_seconds_sum", disk, "read");
    let (mean, fios) = (sum / bios as f64, &clat["mean"]);
    let most = fios.as_f64().unwrap_or(0.0) / 1e9;
    ensure!((DELAY..=most).contains(&mean), "mean {mean} s, delay {DELAY} s, fio {fios} ns");
    // A bin of fio's is at most 1.6 % wide, and is known by its middle.
    let bins = clat["bins"].as_object().context("no bins")?;
    let fios_up_to = |limit: f64| -> u64 {
        let within = |ns: &String| ns.parse::<f64>().unwrap_or(f64::MAX) * 1.016 / 1e9 <= limit;
        bins.iter().filter(|bin| within(bin.0)).filter_map(|bin| bin.1.as_u64()).sum()
    };
    for (limit, count) in scrape.buckets("storage_bio_seconds_bucket", disk, "read")? {
        ensure!(limit >= DELAY || count == 0, "{count} bios took {limit} s, less than {DELAY} s");
        let fios = fios_up_to(limit);
        ensure!(count >= fios, "up to {limit} s: {count} bios, and fio saw {fios}");
    }
    Ok(())
}

/// A disk without statistics, of which nobody knows how long bios waited for a request, and one without
/// requests: what is unknown is not 0.
fn says_what_is_in_no_part(silent: &str) -> Result<()> {
    shell("modprobe dm_zero")?;
    let without_requests = Mapped::new("zeros", "0 65536 zero")?;
    disks::read(silent, 20)?;
    disks::read(&without_requests.path(), 20)?;
    let scrape = Scrape::now()?;
    let parts = scrape.parts(&without_requests.disk()?)?;
    ensure!(!parts.contains_key("device") && !parts.contains_key("wait"), "no request: {parts:?}");
    let parts = scrape.parts(silent)?;
    ensure!(parts.contains_key("device"), "without statistics: {parts:?}");
    ensure!(!parts.contains_key("wait"), "without statistics: {parts:?}");
    Ok(())
}

/// A disk that completes its requests in batches, which the kernel's blk_update_request() does not see: their times are
/// at least those of its counter, for which all of a batch end at one instant, and at most those of fio.
fn divides_batches(disk: &str) -> Result<()> {
    let requests = || -> Result<f64> {
        let scrape = Scrape::now()?;
        let parts = scrape.parts(disk).unwrap_or_default();
        Ok(["queue", "device"].iter().filter_map(|part| parts.get(*part)).sum())
    };
    let (before, stat) = (requests()?, disks::stat(disk)?[3]);
    let report = fio_direct(disk, "--iodepth=8 --number_ios=200")?;
    let (ours, kernels) = (requests()? - before, (disks::stat(disk)?[3] - stat) as f64 / 1e3);
    let most = report["read"]["lat_ns"]["mean"].as_f64().context("no latency")? * 200.0 / 1e9;
    let right = kernels * 0.9 - 0.001..=most;
    let what = format!("{disk}: {ours} s in queue and device; its counter {kernels}, fio {most}");
    ensure!(right.contains(&ours), what);
    Ok(())
}

/// A timer completes bios in the middle of other probes, whose CPU then runs no kprobe: the kernel counts
/// these with the kprobe, and shows the figure as long as the link is there.
fn counts_what_it_was_skipped_for(process: u32) -> Result<()> {
    let disk = NullBlk::new("test", "irqmode=2 completion_nsec=10000 submit_queues=2")?;
    fio_direct(&disk.name, "--iodepth=16 --size=128M --numjobs=16 --number_ios=300")?;
    // Others may do I/O meanwhile.
    let before = of_the_kernel(process)?;
    let ours = Scrape::now()?.skipped("") as u64;
    let after = of_the_kernel(process)?;
    let (Some(before), Some(after)) = (before, after) else {
        judged_weakly("this kernel does not show in /proc what a kprobe has missed");
        return Ok(());
    };
    ensure!((before..=after).contains(&ours), "{ours}; the kernel: {before} to {after}");
    if before == 0 {
        judged_weakly("no program was skipped");
    }
    Ok(())
}

/// What the kprobes of a process have missed, and how often the programs that are loaded were skipped, which are
/// its own; `None`: the kernel does not show the former.
fn of_the_kernel(process: u32) -> Result<Option<u64>> {
    let mut missed = None;
    for (_, info) in fdinfo(process)? {
        if let Some(number) = info.lines().find_map(|line| line.strip_prefix("missed:")) {
            missed = Some(missed.unwrap_or(0) + number.trim().parse::<u64>()?);
        }
    }
    missed.map(|missed| Ok(missed + skipped()?)).transpose()
}

/// The open files of a process and what /proc says of each. One that is closed meanwhile is no link.
fn fdinfo(process: u32) -> Result<Vec<(PathBuf, String)>> {
    let files = fs::read_dir(format!("/proc/{process}/fdinfo"))?.map(|file| {
        let path = file?.path();
        let info = fs::read_to_string(&path).unwrap_or_default();
        Ok((path, info))
    });
    files.collect()
}

/// Beside many clients that send too little, too much, nothing, or nonsense, one who asks properly
/// gets an answer. After SIGTERM, nobody is served, and nothing of the process is left.
fn exporter_survives_hostile_clients() -> Result<()> {
    let before = loaded()?;
    let running = start(&[])?;
    for (request, expected) in [
        (&b"GET / HTTP/1.1\r\nHost: localhost:9435\r\n\r\n"[..], "HTTP/1.1 200 OK"),
        (b"GET /etc/passwd HTTP/1.1\r\nHost: [::1]\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"GET /../metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.0\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        // What a browser sends for a page whose name leads here since it was fetched.
        (FOREIGN, "HTTP/1.1 421 Misdirected Request"),
        (b"\0\x01\x02\r\n\r\n", "HTTP/1.1 400 Bad Request"),
    ] {
        let answer = send(PORT, request)?;
        let is_expected = answer.starts_with(&format!("{expected}\r\n"));
        ensure!(is_expected, "{}: {answer}", request.escape_ascii());
    }
    let told = send(PORT, FOREIGN)?;
    ensure!(told.contains("--host NAME") && !told.contains("storage_"), "{told}");
    let listen = format!("127.0.0.1:{BIOS_PORT}");
    let named = Running::stage("exporter", &["--listen", &listen, "--host", "disks.example"])?;
    let served = send(BIOS_PORT, FOREIGN)?;
    ensure!(served.starts_with("HTTP/1.1 200 OK\r\n") && served.contains("storage_"), "{served}");
    named.interrupt()?;

    // Whether it reads the answer or not: it is disconnected.
    let mut huge = TcpStream::connect(("127.0.0.1", PORT))?;
    let headers = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(1 << 20));
    huge.write_all(headers.as_bytes()).ok();
    huge.set_read_timeout(Some(Duration::from_secs(20)))?;
    let closed = huge.read_to_end(&mut Vec::new());
    ensure!(!closed.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "still connected");

    // One byte a second, for ever.
    let mut slow = TcpStream::connect(("127.0.0.1", PORT))?;
    slow.set_read_timeout(Some(Duration::from_secs(1)))?;
    let (start, mut is_served) = (Instant::now(), true);
    while is_served && start.elapsed() < Duration::from_secs(30) {
        Scrape::now()?;
        let waits = |error: std::io::Error| error.kind() == ErrorKind::WouldBlock;
        is_served = slow.write_all(b"G").is_ok() && slow.read(&mut [0]).is_err_and(waits);
    }
    let ended = start.elapsed();
    ensure!(ended < Duration::from_secs(20), "a slow client was served for {ended:?}");

    // Many that say nothing, some that have gone, some that do not read.
    let mut silent = Vec::new();
    for number in 0..300 {
        let mut stream = TcpStream::connect(("127.0.0.1", PORT))?;
        match number % 3 {
            0 => stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?,
            1 => stream.shutdown(Shutdown::Both)?,
            _ => (),
        }
        silent.push(stream);
        if number % 50 == 0 {
            Scrape::now()?;
        }
    }
    Scrape::now()?;
    let files = fs::read_dir(format!("/proc/{}/fd", running.id()))?.count();
    ensure!(files < 100, "{files} open files");
    let threads = fs::read_dir(format!("/proc/{}/task", running.id()))?.count();
    ensure!(threads < 10, "{threads} threads");

    running.signal(Signal::TERM)?;
    let start = Instant::now();
    wait_until("the end of listening", || Ok(TcpStream::connect(("127.0.0.1", PORT)).is_err()))?;
    let stopped = start.elapsed();
    let ended = running.end()?;
    ensure!(stopped < Duration::from_secs(1), "listened for {stopped:?}");
    ensure!(ended.code == Some(0) && !ended.stderr.contains("error"), "{ended:?}");
    drop(silent);
    wait_until_unloaded(&before)
}

/// Where Prometheus listens.
pub const PROMETHEUS: u16 = 9090;
/// Of a second exporter.
pub const BIOS_PORT: u16 = 9436;

/// Starts it with the `prometheus.yml` of a directory, in which it also keeps its data.
pub fn start_prometheus(directory: &str) -> Result<Running> {
    let prometheus = Running::spawn(Command::new("prometheus").args([
        &format!("--config.file={directory}/prometheus.yml"),
        &format!("--storage.tsdb.path={directory}"),
        &format!("--web.listen-address=127.0.0.1:{PROMETHEUS}"),
    ]))?;
    wait_until("Prometheus", || Ok(get(PROMETHEUS, "/-/ready").is_ok()))?;
    Ok(prometheus)
}

/// The values that a query finds.
fn query(promql: &str) -> Result<Vec<f64>> {
    let query: String = promql.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let answer = get(PROMETHEUS, &format!("/api/v1/query?query={query}"))?;
    let answer: Value = serde_json::from_str(&answer)?;
    let found =
        answer["data"]["result"].as_array().with_context(|| format!("{promql}: {answer}"))?;
    let number = |one: &Value| one["value"][1].as_str().and_then(|figure| figure.parse().ok());
    found.iter().map(|one| number(one).with_context(|| one.to_string())).collect()
}

/// Waits until a query finds values that this accepts.
fn wait_for(promql: &str, accepts: impl Fn(&[f64]) -> bool) -> Result<Vec<f64>> {
    let mut last = Vec::new();
    let found = wait_until(promql, || {
        last = query(promql)?;
        Ok(accepts(&last))
    });
    found.with_context(|| format!("last: {last:?}")).map(|()| last)
}

/// Prometheus scrapes two exporters each second, one of requests and one of bios: it finds what fio did, and
/// rules and panels find something of either.
fn exporter_beside_prometheus() -> Result<()> {
    needs("prometheus")?;
    let rules = fs::canonicalize(workspace().join("tools/exporter/rules.yml"))?;
    for tests in ["rules_test.yml", "rules_test_day.yml"] {
        shell(&format!("promtool test rules {}", rules.with_file_name(tests).display()))?;
    }
    let directory = "/run/prometheus";
    fs::remove_dir_all(directory).ok();
    fs::create_dir_all(directory)?;
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{}]\n\
         scrape_configs:\n- job_name: storage\n  static_configs:\n  - targets: ['127.0.0.1:{PORT}', '127.0.0.1:{BIOS_PORT}']\n",
        rules.display()
    );
    fs::write(format!("{directory}/prometheus.yml"), config)?;
    let disk = NullBlk::timer("test", 200, "")?;
    let name = &disk.name;
    let below = NullBlk::new("below", "")?;
    let late = Mapped::new("late", &format!("0 65536 delay /dev/{} 0 {LATE_MS}", below.name))?;
    let (listen, canary) = (format!("127.0.0.1:{BIOS_PORT}"), late.path());
    let of_bios = ["--parts", "--canary", &canary, "--listen", &listen];
    let exporters = [start(&["--canary", &canary])?, Running::stage("exporter", &of_bios)?];
    for port in [PORT, BIOS_PORT] {
        shell(&format!("curl -s http://127.0.0.1:{port}/metrics | promtool check metrics"))?;
    }
    let prometheus = start_prometheus(directory)?;
    // A series starts with its first I/O: let Prometheus see it before the load.
    let of = format!("disk=\"{name}\",op=\"read\"");
    let totals = ["request", "bio"].map(|what| format!("storage_{what}_seconds_count{{{of}}}"));
    disks::read(name, 1)?;
    for total in &totals {
        wait_for(total, |ios| ios == [1.0])?;
    }
    let (from, stat) = (wait_for_scrapes(&totals)?, disks::stat(name)?);
    let report = fio_direct(name, "--iodepth=8 --size=512m --number_ios=80")?;
    let ios = report["read"]["total_ios"].as_f64().context("fio's reads")?;
    for total in &totals {
        let seen = wait_for(total, |seen| seen.iter().any(|seen| *seen > ios))?;
        ensure!(seen == [ios + 1.0], "fio {ios}, dd 1, Prometheus {seen:?}");
    }
    let (to, after) = (wait_for_scrapes(&totals)?, disks::stat(name)?);
    for ((total, from), to) in totals.iter().zip(from).zip(to) {
        for (total, field, unit) in
            [(total.clone(), 0, 1.0), (total.replace("_count", "_sum"), 3, 1e3)]
        {
            let kernels = (after[field] - stat[field]) as f64 / unit / (to - from);
            let ms = ((to - from) * 1e3).round() + 1.0;
            let rate = query(&format!("rate({total}[{ms}ms] @ {to:.3})"))?;
            let near = |rate: &f64| (rate - kernels).abs() <= 0.01 * kernels;
            ensure!(rate.len() == 1 && rate.iter().all(near), "{total}: {rate:?}, stat {kernels}");
        }
    }
    finds_the_canary()?;

    for rule in ["io_seconds:p99_rate5m", "queue_seconds:p99_rate5m", "ios:rate5m"] {
        for port in [PORT, BIOS_PORT] {
            let of = format!("instance=\"127.0.0.1:{port}\",{of}");
            let rule = format!("instance_disk_op:storage_{rule}{{{of}}}");
            wait_for(&rule, |found| !found.is_empty())?;
        }
    }
    wait_for("instance:storage_page_cache_hit:ratio_rate5m", |found| !found.is_empty())?;

    the_dashboard_shows_something()?;
    notices_a_lie(exporters[0].id(), name)?;
    prometheus.signal(Signal::TERM)?;
    let ended = prometheus.end()?;
    ensure!(!ended.stderr.contains("level=error"), "{}", ended.stderr);
    exporters.into_iter().try_for_each(|exporter| exporter.interrupt().map(drop))
}

/// Every panel does, of the exporters together, and each of its menus offers something of either.
fn the_dashboard_shows_something() -> Result<()> {
    let dashboard = workspace().join("tools/exporter/dashboard.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(dashboard)?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    table::set_up("after_flushes")?()?; // which the kernel does not divide
    for target in panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten() {
        let expr = target["expr"].as_str().context("no expr")?;
        let expr = expr.replace("$__rate_interval", "1m");
        let expr = expr.replace("$instance", ".*").replace("$disk", ".*");
        // After a scrape that took too long, a panel is empty until the next one.
        wait_for(&expr, |found| !found.is_empty())?;
    }
    let menus = dashboard["templating"]["list"].as_array().context("no menus")?;
    let menus: Vec<&str> = menus.iter().filter_map(|menu| menu["definition"].as_str()).collect();
    ensure!(menus.len() == 2, "{menus:?}");
    for menu in menus {
        let selector = run::between(menu, "label_values(", "}, ")?.replace("$instance", ".*");
        for port in [PORT, BIOS_PORT] {
            let of = format!("{selector},instance=\"127.0.0.1:{port}\"}}");
            ensure!(!query(&of)?.is_empty(), "{menu} offers nothing of port {port}");
        }
    }
    Ok(())
}

/// How much dm-delay adds to a canary's way, in ms, and at least, in s: it counts ticks, of which some come early.
const LATE_MS: u32 = 300;
const LATE: f64 = 0.25;

/// When Prometheus scrapes each of these the next time, in seconds. They do not change.
fn wait_for_scrapes(totals: &[String]) -> Result<Vec<f64>> {
    let next = |total: &String| {
        let time = format!("timestamp({total})");
        let before = query(&time)?;
        Ok(wait_for(&time, |now| !now.is_empty() && now > before.as_slice())?[0])
    };
    totals.iter().map(next).collect()
}

/// A query of how many reads an exporter has not found again, or not yet.
fn missing_canaries(port: u16) -> String {
    let of = format!("{{instance=\"127.0.0.1:{port}\"}}");
    format!("storage_canary_reads_total{of} - storage_canary_reads_seen_total{of}")
}

/// Each exporter finds its reads again: the delay is in a bio's latency, not in that of its request.
fn finds_the_canary() -> Result<()> {
    for (port, is_bio) in [(PORT, false), (BIOS_PORT, true)] {
        let of = format!("{{instance=\"127.0.0.1:{port}\"}}");
        let missing = missing_canaries(port);
        wait_for(&format!("storage_canary_reads_total{of} > 2"), |made| !made.is_empty())?;
        ensure!(query(&missing)?.iter().all(|missing| *missing < 2.0), "{missing}");
        let [latency, wait] = ["latency", "wait"].map(|what| {
            wait_for(&format!("storage_canary_{what}_seconds{of}"), |it| !it.is_empty())
        });
        let (latency, wait) = (latency?[0], wait?[0]);
        let is_right = wait >= LATE && (latency >= LATE) == is_bio;
        ensure!(is_right, "port {port}: {latency} s of {wait} s, {LATE_MS} ms late");
    }
    Ok(())
}

/// Ends the program at block_rq_complete. bpftool cannot detach it, for such a link has no detach; a debugger closes
/// it.
pub fn close_the_hook(exporter: u32) -> Result<()> {
    needs("gdb")?;
    let link = fdinfo(exporter)?.into_iter().find(|(_, info)| info.contains("block_rq_complete"));
    let link = link.context("no link to block_rq_complete")?.0;
    let link = link.file_name().context("a path without a name")?.display();
    shell(&format!("gdb -nx -batch -p {exporter} -ex 'call (int)close({link})' 2>&1")).map(drop)
}

/// A program that nobody runs any more: the kernel counts on, and the canary is lost.
fn notices_a_lie(exporter: u32, disk: &str) -> Result<()> {
    let before = Scrape::now()?.gap(disk)?.context("not audited")?;
    close_the_hook(exporter)?;
    disks::read(disk, 20)?;
    let gap = Scrape::now()?.gap(disk)?.context("not audited")?;
    ensure!(before == [0.0; 2] && gap == [20.0, 0.0], "{before:?}, 20 reads later {gap:?}");
    wait_for(&missing_canaries(PORT), |missing| missing.iter().any(|it| *it > 2.0)).map(drop)
}

/// The unit's user and capabilities are enough, and each of them is needed; systemd understands the unit.
fn exporter_runs_as_its_unit_says() -> Result<()> {
    needs("systemd-analyze")?;
    let unit = workspace().join("tools/exporter/storage-exporter.service");
    let text = fs::read_to_string(&unit)?;
    fs::create_dir_all("/usr/local/bin")?;
    fs::copy(program("exporter"), "/usr/local/bin/storage-exporter")?;
    let unit = unit.display();
    let said = shell(&format!("systemd-analyze verify {unit} 2>&1"))?;
    ensure!(!said.contains("exporter.service"), "{said}");
    // 2.4 of 10; 2.5 where the whole network may talk to it. (What hides /proc/kallsyms would be 0.2 less.)
    ensure!(!text.contains("\nProtectKernelTunables="), "it hides /proc/kallsyms: {text}");
    shell(&format!("systemd-analyze security --offline=yes --threshold=24 --no-pager {unit}"))?;
    shell(&format!("grep -x IPAddressDeny=any {unit} && grep -x IPAddressAllow=localhost {unit}"))?;

    let setting = |name: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(name));
        found.with_context(|| format!("no {name}"))
    };
    let capabilities = setting("AmbientCapabilities=")?;
    ensure!(capabilities == setting("CapabilityBoundingSet=")?, "{capabilities}: {text}");
    let names = capabilities.to_lowercase().replace("cap_", "");
    let names: Vec<&str> = names.split_whitespace().collect();
    let command = setting("ExecStart=")?;
    let start = |names: &[&str]| {
        Running::bash(&format!("exec {} --no-new-privs {command}", commands::with(names)))
    };
    let _paranoid = Setting::new(commands::PARANOID, "2")?;
    let mut running = start(&names)?;
    running.wait_for("storage-exporter: tracing ")?;
    let answer = Scrape::now()?;
    let labels = answer.0.keys().find(|name| name.starts_with("storage_exporter_build_info"));
    ensure!(labels.is_some_and(|labels| labels.contains("kernel=\"")), "{labels:?}");
    running.interrupt()?;
    for name in &names {
        let others: Vec<&str> = names.iter().copied().filter(|other| other != name).collect();
        let ended = start(&others)?.end()?;
        ensure!(ended.code == Some(3), "without {name}: {ended:?}");
    }
    Ok(())
}
