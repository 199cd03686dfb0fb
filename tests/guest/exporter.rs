//! The exporter, beside the kernel's counters, fio, and a real Prometheus.

use std::{
    collections::HashMap,
    fs,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::fs::FileExt,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use rustix::{
    fs::{Advice, fadvise},
    process::Signal,
};
use serde_json::Value;

use crate::{
    disks::{self, Mapped, Mounted, NullBlk},
    run::{
        Running, fio, fio_command, fio_report, judged_weakly, not_judged, program, shell,
        wait_until, workspace,
    },
};

tests![
    exporter_counts_what_the_disks_count,
    exporter_has_fios_latencies,
    exporter_divides_into_slow_ios_parts,
    exporter_says_what_is_in_no_part,
    exporter_forgets_disks_that_are_gone,
    exporter_keeps_what_a_partition_counted,
    exporter_counts_pages,
    exporter_counts_what_it_was_skipped_for,
    exporter_survives_hostile_clients,
    exporter_stops_listening_at_once,
    exporter_beside_prometheus,
    exporter_runs_as_its_unit_says,
];

const PORT: u16 = 9435;

/// Starts an exporter that listens on a port of the loopback interface.
fn start(port: u16, arguments: &[&str]) -> Result<Running> {
    let listen = format!("127.0.0.1:{port}");
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
fn get(port: u16, path: &str) -> Result<String> {
    let answer = send(port, format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no end of the headers")?;
    ensure!(head.starts_with("HTTP/1") && head.contains(" 200 OK"), "{path}: {answer}");
    Ok(body.to_owned())
}

/// The samples of one scrape: a metric with its labels, and the value.
struct Scrape(HashMap<String, f64>);

impl Scrape {
    fn of(port: u16) -> Result<Scrape> {
        let text = get(port, "/metrics")?;
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').context("no value")?;
            Ok((name.to_owned(), value.parse().with_context(|| line.to_owned())?))
        };
        Ok(Scrape(lines.map(sample).collect::<Result<_>>()?))
    }

    /// 0 where there is no such sample yet.
    fn get(&self, sample: &str) -> f64 {
        self.0.get(sample).copied().unwrap_or(0.0)
    }

    fn bios(&self, disk: &str, op: &str) -> u64 {
        let labels = format!("{{disk=\"{disk}\",op=\"{op}\"}}");
        self.get(&format!("storage_bio_latency_seconds_count{labels}")) as u64
    }

    fn seconds(&self, disk: &str, op: &str) -> f64 {
        self.get(&format!("storage_bio_latency_seconds_sum{{disk=\"{disk}\",op=\"{op}\"}}"))
    }

    fn part(&self, disk: &str, op: &str, part: &str) -> f64 {
        let labels = format!("{{disk=\"{disk}\",op=\"{op}\",part=\"{part}\"}}");
        self.get(&format!("storage_bio_part_seconds_total{labels}"))
    }

    fn pages(&self, result: &str) -> u64 {
        self.get(&format!("storage_page_cache_pages_total{{result=\"{result}\"}}")) as u64
    }

    /// How many bios took at most as long as the limit of each bucket, in seconds.
    fn buckets(&self, disk: &str, op: &str) -> Result<Vec<(f64, u64)>> {
        let labels = format!("\",disk=\"{disk}\",op=\"{op}\"}}");
        let mut buckets = Vec::new();
        for (name, count) in &self.0 {
            let limit = name.strip_prefix("storage_bio_latency_seconds_bucket{le=\"");
            if let Some(limit) = limit.and_then(|rest| rest.strip_suffix(&labels)) {
                buckets.push((limit.parse::<f64>()?, *count as u64));
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        ensure!(buckets.len() == 54, "{disk} {op}: {} buckets", buckets.len());
        ensure!(buckets.is_sorted_by_key(|bucket| bucket.1), "{buckets:?}");
        ensure!(buckets[53] == (f64::INFINITY, self.bios(disk, op)), "{buckets:?}");
        Ok(buckets)
    }

    /// Nothing was lost.
    fn is_complete(&self) -> Result<()> {
        let lost = self.0.iter().filter(|(name, value)| {
            name.starts_with("storage_bios_not_measured_total") && **value > 0.0
        });
        let lost: Vec<_> = lost.collect();
        ensure!(lost.is_empty(), "{lost:?}");
        Ok(())
    }
}

/// Reads, writes, flushes and discards of the whole disk and of a partition, on two CPUs, while
/// somebody scrapes all the time: the disk's counters say how many there were.
fn exporter_counts_what_the_disks_count() -> Result<()> {
    let disk = NullBlk::new(&[
        ("memory_backed", "1"),
        ("size", "64"),
        ("discard", "1"),
        ("cache_size", "8"),
        ("submit_queues", "2"),
    ])?;
    let name = &disk.name;
    shell(&format!("echo ',,83' | sfdisk --quiet --no-reread --force /dev/{name} 2>&1"))?;
    shell(&format!("partx -u /dev/{name}; test -e /dev/{}", disks::partition(name)))?;
    let running = start(PORT, &[])?;
    let before = fields(name)?;
    let is_over = AtomicBool::new(false);
    let written: u64 = thread::scope(|scope| -> Result<u64> {
        let scraping = scope.spawn(|| {
            let mut scrapes = 0;
            while !is_over.load(Ordering::Relaxed) {
                Scrape::of(PORT)?;
                scrapes += 1;
            }
            anyhow::Ok(scrapes)
        });
        let common = "--direct=1 --bs=4k --thread --size=32m --end_fsync=0";
        let loads = [
            fio(&format!(
                "{common} --filename=/dev/{name} --rw=randrw --numjobs=4 --number_ios=1000"
            )),
            fio(&format!(
                "{common} --filename=/dev/{} --rw=randread --number_ios=500",
                disks::partition(name)
            )),
            fio(&format!(
                "{common} --filename=/dev/{name} --rw=randtrim --number_ios=200 --ioengine=sync"
            )),
            fio(&format!("{common} --filename=/dev/{name} --rw=write --fsync=1 --number_ios=100")),
        ];
        is_over.store(true, Ordering::Relaxed);
        let scrapes = scraping.join().map_err(|_| anyhow::anyhow!("panic"))??;
        ensure!(scrapes > 3, "{scrapes} scrapes");
        let loads = loads.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(loads.iter().filter_map(|load| load["write"]["total_ios"].as_u64()).sum())
    })?;
    let (scrape, after) = (Scrape::of(PORT)?, fields(name)?);
    let completed = |field: usize| after[field] - before[field];
    // The kernel counts a flush also as a write: fio knows how much it wrote.
    for (op, kernels) in [
        ("read", completed(0)),
        ("write", written),
        ("discard", completed(11)),
        ("flush", completed(15)),
    ] {
        let ours = scrape.bios(name, op);
        ensure!(ours == kernels, "{op}: {ours}, and there were {kernels}");
        ensure!(ours >= 90, "{op}: only {ours}");
        scrape.buckets(name, op)?;
    }
    ensure!(scrape.bios(&disks::partition(name), "read") == 0, "a partition is no disk");
    scrape.is_complete()?;
    running.interrupt()?;
    Ok(())
}

fn fields(disk: &str) -> Result<Vec<u64>> {
    let text = fs::read_to_string(format!("/sys/block/{disk}/stat"))?;
    text.split_whitespace().map(|field| Ok(field.parse()?)).collect()
}

/// Every bio takes at least as long as the delay that the disk has, and no longer than fio waited.
fn exporter_has_fios_latencies() -> Result<()> {
    // 8.4 ms is just above the limit of a bucket, 8,388,608 ns: none may be below it.
    for delay in [8_400_000, 10_000_000] {
        let delayed = delay.to_string();
        let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", &delayed)])?;
        compare(&disk.name, &format!("/dev/{}", disk.name), delay as f64 / 1e9)?;
    }
    let below = NullBlk::new(&[])?;
    let delayed = Mapped::new("late", &format!("0 2097152 delay /dev/{} 0 50", below.name))?;
    // dm-delay counts ticks of 4 ms, and in an emulated machine several come late, and then at once.
    compare(&delayed.disk()?, &delayed.path(), 0.0375)
}

fn compare(disk: &str, path: &str, delay: f64) -> Result<()> {
    let running = start(PORT, &[])?;
    let options = "--direct=1 --rw=randread --bs=4k --number_ios=150 --size=512m --thread \
                   --output-format=json+";
    let report = fio(&format!("--filename={path} {options}"))?;
    let scrape = Scrape::of(PORT)?;
    running.interrupt()?;
    let (ios, clat) = (&report["read"]["total_ios"], &report["read"]["clat_ns"]);
    ensure!(*ios == scrape.bios(disk, "read"), "fio: {ios}, we: {}", scrape.bios(disk, "read"));
    let ios = scrape.bios(disk, "read") as f64;
    let (mean, fios) = (scrape.seconds(disk, "read") / ios, clat["mean"].as_f64().unwrap_or(0.0));
    ensure!(mean >= delay && mean <= fios / 1e9, "{delay} s, fio {fios} ns, we {mean} s");
    // A bin of fio's is at most 1.6 % wide, and is known by its middle.
    let bins = clat["bins"].as_object().context("no bins")?;
    let fios_up_to = |limit: f64| -> u64 {
        let within = |ns: &String| ns.parse::<f64>().unwrap_or(f64::MAX) * 1.016 / 1e9 <= limit;
        bins.iter().filter(|bin| within(bin.0)).filter_map(|bin| bin.1.as_u64()).sum()
    };
    // Where the host delays the guest's ticks, dm-delay is early: then fio has seen it, too.
    let early = fios_up_to(delay);
    for (limit, count) in scrape.buckets(disk, "read")? {
        ensure!(
            limit >= delay || count <= early,
            "{count} bios took {limit} s, with {delay} s delay; of fio's reads, {early} took less"
        );
        let fios = fios_up_to(limit);
        ensure!(count >= fios, "up to {limit} s: {count} bios, and fio saw {fios}");
    }
    Ok(())
}

/// A disk that takes one request at a time, and 10 ms for it: of four readers, three wait for a
/// request. The parts are all of the latency.
fn exporter_divides_into_slow_ios_parts() -> Result<()> {
    let disk = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "10000000"),
        ("hw_queue_depth", "1"),
        ("submit_queues", "1"),
    ])?;
    let name = &disk.name;
    let running = start(PORT, &["--parts"])?;
    fio(&format!(
        "--filename=/dev/{name} --direct=1 --rw=randread --bs=4k --numjobs=4 --number_ios=40 --size=64m --thread"
    ))?;
    let scrape = Scrape::of(PORT)?;
    running.interrupt()?;
    let part = |part| scrape.part(name, "read", part);
    let bios = scrape.bios(name, "read");
    ensure!(bios == 160, "{bios} bios");
    let (device, wait) = (part("device"), part("wait"));
    ensure!(device >= 1.6, "160 reads of 10 ms took {device} s");
    ensure!(
        wait > device,
        "four readers, one request: {wait} s of waiting, {device} s at the disk"
    );
    let (sum, all) = (
        ["wait", "queue", "device", "end", "mapper"].map(part).iter().sum::<f64>(),
        scrape.seconds(name, "read"),
    );
    ensure!((sum - all).abs() < 1e-6, "parts of {sum} s, latencies of {all} s");
    scrape.is_complete()
}

/// A disk without statistics, of which nobody knows how long bios waited for a request, and one without
/// requests: what is unknown is not 0, and the parts are all of the latency.
fn exporter_says_what_is_in_no_part() -> Result<()> {
    let silent = NullBlk::new(&[])?;
    fs::write(format!("/sys/block/{}/queue/iostats", silent.name), "0")?;
    shell("modprobe dm_zero")?;
    let without_requests = Mapped::new("zeros", "0 65536 zero")?;
    let running = start(PORT, &["--parts"])?;
    for path in [format!("/dev/{}", silent.name), without_requests.path()] {
        shell(&format!("dd if={path} of=/dev/null bs=4k count=20 iflag=direct status=none"))?;
    }
    let scrape = Scrape::of(PORT)?;
    running.interrupt()?;
    for (disk, known) in [(silent.name.clone(), true), (without_requests.disk()?, false)] {
        let of = format!("storage_bio_part_seconds_total{{disk=\"{disk}\",op=\"read\",part=");
        let parts: HashMap<&str, f64> = scrape
            .0
            .iter()
            .filter_map(|(name, seconds)| Some((name.strip_prefix(&of)?, *seconds)))
            .collect();
        let (sum, all) = (parts.values().sum::<f64>(), scrape.seconds(&disk, "read"));
        ensure!(all > 0.0 && (sum - all).abs() < 1e-6, "{parts:?} of {all} s");
        ensure!(parts.contains_key("\"device\"}") == known, "{parts:?}");
        ensure!(!parts.contains_key("\"wait\"}"), "nobody knows: {parts:?}");
    }
    Ok(())
}

/// The series of a disk end with it, and those of its successor start at 0.
fn exporter_forgets_disks_that_are_gone() -> Result<()> {
    let running = start(PORT, &[])?;
    let read = |name: &str| {
        shell(&format!("dd if=/dev/{name} of=/dev/null bs=4k count=20 iflag=direct status=none"))
    };
    for _ in 0..3 {
        let disk = NullBlk::new(&[])?;
        let name = disk.name.clone();
        read(&name)?;
        let scrape = Scrape::of(PORT)?;
        let (bios, completed) = (scrape.bios(&name, "read"), fields(&name)?[0]);
        ensure!(bios == completed, "{bios} reads, and the disk completed {completed}");
        drop(disk);
        let text = get(PORT, "/metrics")?;
        ensure!(!text.contains(&name), "{name} is gone: {text}");
    }
    running.interrupt()?;
    Ok(())
}

/// A counter must not decrease: when a partition is removed, what was counted there stays with its disk,
/// also where the next partition has the same number.
fn exporter_keeps_what_a_partition_counted() -> Result<()> {
    let disk = NullBlk::new(&[("memory_backed", "1"), ("size", "64")])?;
    let (name, partition) = (&disk.name.clone(), &disks::partition(&disk.name));
    shell(&format!("echo ',,83' | sfdisk --quiet --no-reread --force /dev/{name} 2>&1"))?;
    let (before, mut seconds) = (fields(name)?[0], 0.0);
    let running = start(PORT, &["--parts"])?;
    let mut is_all = |when: &str| -> Result<()> {
        let (scrape, completed) = (Scrape::of(PORT)?, fields(name)?[0] - before);
        let bios = scrape.bios(name, "read");
        ensure!(bios == completed, "{when}: {bios} reads, and the disk completed {completed}");
        scrape.buckets(name, "read")?;
        let parts = ["wait", "queue", "device", "end", "mapper"];
        let (sum, of_parts) = (
            scrape.seconds(name, "read"),
            parts.map(|part| scrape.part(name, "read", part)).iter().sum::<f64>(),
        );
        ensure!((sum - of_parts).abs() < 1e-6, "{when}: {sum} s, their parts {of_parts} s");
        ensure!(sum >= seconds, "{when}: {sum} s, and it was {seconds} s before");
        seconds = sum;
        scrape.is_complete()
    };
    for _ in 0..2 {
        shell(&format!("partx -u /dev/{name} && test -e /dev/{partition}"))?;
        for (path, count) in [(partition, 20), (name, 5)] {
            let dd = format!("dd if=/dev/{path} of=/dev/null bs=4k count={count} iflag=direct");
            shell(&format!("{dd} status=none"))?;
        }
        is_all("with the partition")?;
        shell(&format!("partx -d /dev/{name} && ! test -e /dev/{partition}"))?;
        is_all("in the first scrape without it")?;
        is_all("in the second scrape without it")?;
    }
    drop(disk);
    let text = get(PORT, "/metrics")?;
    ensure!(!text.contains(name), "the disk is gone: {text}");
    running.interrupt()?;
    Ok(())
}

/// A file's pages, which are read from the disk once.
fn exporter_counts_pages() -> Result<()> {
    let mounted = Mounted::new()?;
    let path = "/mnt/data/exporter";
    shell(&format!("dd if=/dev/zero of={path} bs=1M count=4 status=none; sync"))?;
    let running = start(PORT, &[])?;
    shell("echo 3 >/proc/sys/vm/drop_caches")?;
    let page = rustix::param::page_size() as u64;
    let (file, mut buffer) = (fs::File::open(path)?, vec![0; page as usize]);
    // What else is read in the guest is read once here.
    Scrape::of(PORT)?;
    let mut read = || -> Result<[u64; 3]> {
        let before = Scrape::of(PORT)?;
        for number in 0..4 << 20 >> page.ilog2() {
            file.read_exact_at(&mut buffer, number * page)?;
        }
        let after = Scrape::of(PORT)?;
        Ok(["hit", "miss", "readahead"].map(|result| after.pages(result) - before.pages(result)))
    };
    // Without readahead, each page is a miss.
    fadvise(&file, 0, None, Advice::Random)?;
    let (first, second, all) = (read()?, read()?, (4 << 20) / page);
    shell("echo 3 >/proc/sys/vm/drop_caches")?;
    fadvise(&file, 0, None, Advice::Normal)?;
    let ahead = read()?;
    let last = Scrape::of(PORT)?;
    running.interrupt()?;
    drop(file);
    drop(mounted);
    ensure!(first == [0, all, 0], "first: {first:?}, none of {all} pages was in memory");
    ensure!(second == [all, 0, 0], "second: {second:?}, all {all} pages were in memory");
    let skipped = last.0.get("storage_programs_skipped_total").context("not counted")?;
    for reason in ["dropped", "unmatched"] {
        let lost = last.get(&format!("storage_reads_not_measured_total{{reason=\"{reason}\"}}"));
        ensure!(lost == 0.0, "{lost} reads {reason}, programs were skipped {skipped} times");
    }
    // A page that was brought in too late is a miss, too.
    let [hit, miss, readahead] = ahead;
    let is_right = hit + miss == all && hit > miss && miss > 0 && readahead < all;
    ensure!(is_right && readahead + miss >= all, "with readahead: {ahead:?}, of {all} pages");
    Ok(())
}

/// A timer completes bios in the middle of other probes, whose CPU then runs no kprobe: the kernel counts
/// these with the kprobe, and shows the figure as long as the link is there.
fn exporter_counts_what_it_was_skipped_for() -> Result<()> {
    let disk =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000"), ("submit_queues", "2")])?;
    let running = start(PORT, &["--parts"])?;
    if of_the_kernel(running.id())?.is_none() {
        running.interrupt()?;
        return not_judged("this kernel does not show in /proc what a kprobe has missed");
    }
    fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=16 --thread \
         --norandommap --size=128M --numjobs=16 --number_ios=300",
        disk.name
    ))?;
    // Others may do I/O meanwhile.
    let before = of_the_kernel(running.id())?.unwrap_or_default();
    let ours = Scrape::of(PORT)?.get("storage_programs_skipped_total") as u64;
    let after = of_the_kernel(running.id())?.unwrap_or_default();
    running.interrupt()?;
    let (missed, skipped) = before;
    let (least, most) = (missed + skipped, after.0 + after.1);
    println!("{ours} skipped; the kernel: {missed} by kprobes, {skipped} by programs");
    ensure!((least..=most).contains(&ours), "{ours}; the kernel: {before:?} to {after:?}");
    if missed == 0 {
        return not_judged("no kprobe was missed");
    }
    Ok(())
}

/// What the kprobes of a process have missed, and how often its programs were skipped; `None`: the
/// kernel does not show the former.
fn of_the_kernel(process: u32) -> Result<Option<(u64, u64)>> {
    let (mut missed, mut shown, mut programs) = (0, false, Vec::new());
    for file in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
        // One that is closed meanwhile is no link.
        let Ok(info) = fs::read_to_string(file?.path()) else { continue };
        let field =
            |name| info.lines().find_map(|line: &str| line.strip_prefix(name)?.split_once('\t'));
        let (Some((_, kind)), Some((_, program))) = (field("link_type:"), field("prog_id:")) else {
            continue;
        };
        programs.push(program.trim().parse::<u64>()?);
        if let (true, Some((_, number))) = (kind.trim() == "perf", field("missed:")) {
            missed += number.trim().parse::<u64>()?;
            shown = true;
        }
    }
    let all: Value = serde_json::from_str(&shell("bpftool prog show --json")?)?;
    let all = all.as_array().context("bpftool prints no list")?;
    let ours = all.iter().filter(|one| one["id"].as_u64().is_some_and(|id| programs.contains(&id)));
    let skipped = ours.filter_map(|program| program["recursion_misses"].as_u64()).sum();
    Ok(shown.then_some((missed, skipped)))
}

/// Clients that send too little, too much, nothing, or nonsense, and many of them: somebody who asks
/// properly gets an answer.
fn exporter_survives_hostile_clients() -> Result<()> {
    let running = start(PORT, &[])?;
    let status = |request: &[u8]| -> Result<String> {
        Ok(send(PORT, request)?.lines().next().unwrap_or_default().to_owned())
    };
    for (request, expected) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP/1.1 200 OK"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"\0\x01\x02\r\n\r\n", "HTTP/1.1 400 Bad Request"),
    ] {
        let answer = status(request)?;
        ensure!(answer == expected, "{:?}: {answer}", String::from_utf8_lossy(request));
    }
    // Whether it reads the answer or not: it is disconnected.
    let mut huge = TcpStream::connect(("127.0.0.1", PORT))?;
    let headers = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(1 << 20));
    huge.write_all(headers.as_bytes()).ok();
    is_disconnected(&mut huge)?;

    // One byte a second, for ever.
    let mut slow = TcpStream::connect(("127.0.0.1", PORT))?;
    let start = Instant::now();
    let ended = loop {
        if slow.write_all(b"G").is_err() || start.elapsed() > Duration::from_secs(30) {
            break start.elapsed();
        }
        slow.set_read_timeout(Some(Duration::from_secs(1)))?;
        match slow.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => (),
            _ => break start.elapsed(),
        }
        Scrape::of(PORT)?;
    };
    ensure!(ended < Duration::from_secs(20), "a slow client was served for {ended:?}");

    // Many that say nothing, some that have gone, some that do not read.
    let mut silent = Vec::new();
    for number in 0..300 {
        let mut stream = TcpStream::connect(("127.0.0.1", PORT))?;
        match number % 3 {
            0 => stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?,
            1 => stream.shutdown(Shutdown::Both)?,
            _ => (),
        }
        silent.push(stream);
        if number % 50 == 0 {
            Scrape::of(PORT)?;
        }
    }
    Scrape::of(PORT)?;
    let files = fs::read_dir(format!("/proc/{}/fd", running.id()))?.count();
    ensure!(files < 100, "{files} open files");
    let threads = fs::read_dir(format!("/proc/{}/task", running.id()))?.count();
    ensure!(threads < 10, "{threads} threads");
    drop(silent);
    running.interrupt()?;
    Ok(())
}

fn is_disconnected(stream: &mut TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(()),
        Err(error) => bail!("{error}, after {:?}", String::from_utf8_lossy(&answer)),
    }
}

/// After SIGTERM, nobody is served, whatever clients are connected; when the process has ended,
/// nothing of it is left.
fn exporter_stops_listening_at_once() -> Result<()> {
    let running = start(PORT, &["--parts"])?;
    let clients: Vec<_> = (0..20).map(|_| TcpStream::connect(("127.0.0.1", PORT))).collect();
    running.signal(Signal::TERM)?;
    let start = Instant::now();
    wait_until("the end of listening", || Ok(TcpStream::connect(("127.0.0.1", PORT)).is_err()))?;
    let stopped = start.elapsed();
    let ended = running.end()?;
    println!("stopped listening after {stopped:?}, ended after {:?}", start.elapsed());
    ensure!(stopped < Duration::from_secs(1), "listened for {stopped:?}");
    ensure!(ended.code == Some(0) && !ended.stderr.contains("error"), "{ended:?}");
    drop(clients);
    let left = shell("bpftool prog show --json")?;
    ensure!(!left.contains("bio_start"), "{left}");
    Ok(())
}

/// Ends a test that cannot judge without this command.
fn needs(command: &str) -> Result<()> {
    match shell(&format!("command -v {command}")) {
        Ok(_) => Ok(()),
        Err(_) => not_judged(format!("the root has no {command}")),
    }
}

const PROMETHEUS: u16 = 9090;

/// What a query finds.
fn found(promql: &str) -> Result<Vec<Value>> {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => (byte as char).to_string(),
        _ => format!("%{byte:02X}"),
    };
    let encoded: String = promql.bytes().map(encode).collect();
    let answer: Value =
        serde_json::from_str(&get(PROMETHEUS, &format!("/api/v1/query?query={encoded}"))?)?;
    let found = answer["data"]["result"].as_array().cloned();
    found.with_context(|| format!("{promql}: {answer}"))
}

/// A figure of Prometheus's, a string in JSON.
fn number(figure: &Value) -> Result<f64> {
    figure.as_str().and_then(|figure| figure.parse().ok()).with_context(|| figure.to_string())
}

/// The values that a query finds.
fn query(promql: &str) -> Result<Vec<f64>> {
    found(promql)?.iter().map(|one| number(&one["value"][1])).collect()
}

/// The samples of each series that a query for a time range finds: when it was scraped, Unix time in
/// seconds, and the value.
fn samples(promql: &str) -> Result<Vec<Vec<(f64, f64)>>> {
    let sample = |sample: &Value| Ok((sample[0].as_f64().context("no time")?, number(&sample[1])?));
    let of = |one: &Value| one["values"].as_array().into_iter().flatten().map(sample).collect();
    found(promql)?.iter().map(of).collect()
}

fn unix_time() -> Result<f64> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64())
}

/// The one value that a query finds.
fn value(promql: &str) -> Result<f64> {
    match query(promql)?.as_slice() {
        [value] => Ok(*value),
        other => bail!("{promql}: {other:?}"),
    }
}

/// Waits until a query finds a value that this accepts.
fn wait_for(promql: &str, accepts: impl Fn(f64) -> bool) -> Result<f64> {
    let mut last = None;
    wait_until(promql, || {
        last = value(promql).ok();
        Ok(last.is_some_and(&accepts))
    })
    .with_context(|| format!("last: {last:?}"))?;
    last.context("no value")
}

/// Prometheus scrapes two exporters each second.
fn exporter_beside_prometheus() -> Result<()> {
    needs("prometheus")?;
    let rules = workspace().join("tools/exporter/rules.yml");
    shell(&format!("promtool check rules {}", rules.display()))?;
    let tested = rules.with_file_name("rules_test.yml");
    shell(&format!("promtool test rules {}", tested.display()))?;
    let directory = "/run/prometheus";
    fs::remove_dir_all(directory).ok();
    fs::create_dir_all(directory)?;
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{}]\n\
         scrape_configs:\n- job_name: storage\n  static_configs:\n  \
         - targets: ['127.0.0.1:{PORT}', '127.0.0.1:{}']\n",
        rules.display(),
        PORT + 1
    );
    fs::write(format!("{directory}/prometheus.yml"), config)?;
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000")])?;
    let name = &disk.name;
    // The kernel has looked for partitions.
    let before = fields(name)?[0];
    let first = start(PORT, &["--parts"])?;
    let second = start(PORT + 1, &[])?;
    shell(&format!(
        "exporter={PORT}; curl -s http://127.0.0.1:$exporter/metrics | promtool check metrics"
    ))?;
    let prometheus = Running::spawn(Command::new("prometheus").args([
        &format!("--config.file={directory}/prometheus.yml"),
        &format!("--storage.tsdb.path={directory}"),
        &format!("--web.listen-address=127.0.0.1:{PROMETHEUS}"),
    ]))?;
    wait_until("Prometheus", || Ok(get(PROMETHEUS, "/-/ready").is_ok()))?;
    wait_for("sum(up)", |up| up == 2.0)?;
    // A series that starts with its first I/O: let Prometheus see it before the load.
    let of = format!("disk=\"{name}\",op=\"read\"");
    let total = format!("sum(storage_bio_latency_seconds_count{{{of}}})");
    let dd = format!("dd if=/dev/{name} of=/dev/null bs=4k iflag=direct status=none count=");
    shell(&format!("{dd}1"))?;
    wait_for(&total, |bios| bios > 0.0)?;

    // Rates, while the disk is busy.
    let options = "--direct=1 --rw=randread --bs=4k --size=512m --thread --time_based --runtime=25";
    let mut load = Running::bash(&format!(
        "{} >/run/fio.json",
        fio_command(&format!("--filename=/dev/{name} {options}"))
    ))?;
    let (start_of_load, mut kernels) = (Instant::now(), Vec::new());
    while start_of_load.elapsed() < Duration::from_secs(20) {
        kernels.push((unix_time()?, (fields(name)?[0] - before) as f64));
        thread::sleep(Duration::from_millis(100));
    }
    let rates = query(&format!("rate(storage_bio_latency_seconds_count{{{of}}}[15s])"))?;
    let scraped = samples(&format!("storage_bio_latency_seconds_count{{{of}}}[15s]"))?;
    ensure!(rates.len() == 2 && scraped.len() == 2, "{rates:?}, {scraped:?}");
    let (from, to) = (kernels.iter().find(|(at, _)| *at >= kernels[0].0 + 4.0), kernels.last());
    let (from, to) = from.zip(to).context("the disk's counters were not read")?;
    let of_disk = (to.1 - from.1) / (to.0 - from.0);
    let right = rates.iter().all(|rate| (0.9..1.1).contains(&(rate / of_disk)));
    // A scrape that took more than a second is missing, and rate() does not make up for it at an edge.
    let is_whole = scraped.iter().all(|series| series.len() >= 14);
    ensure!(right || !is_whole, "{rates:?} a second, the disk: {of_disk}");
    if !right {
        judged_weakly(&format!("scrapes are missing: {rates:?} a second, the disk: {of_disk}"));
    }
    for series in scraped {
        let mut judged = 0;
        for (time, value) in series {
            // A scrape takes at most a second, from its time on. Of one read, the kernel's counter may
            // know while the exporter does not, or the other way round.
            let least = kernels.iter().rfind(|(noted, _)| *noted <= time);
            let most = kernels.iter().find(|(noted, _)| *noted >= time + 1.0);
            let Some((least, most)) = least.zip(most) else { continue };
            let is_within = (least.1 - 1.0..=most.1 + 1.0).contains(&value);
            ensure!(is_within, "{value} reads scraped, the disk: {least:?}, {most:?}");
            judged += 1;
        }
        ensure!(judged >= 5, "only {judged} scrapes while the disk was busy");
    }
    load.wait_at_most(Duration::from_secs(60))?;
    let report = fio_report(&fs::read_to_string("/run/fio.json")?)?;
    let ios = report["read"]["total_ios"].as_f64().context("fio's reads")?;

    // Counts, of each exporter and of both together. dd has also read.
    let kernels = (fields(name)?[0] - before) as f64;
    ensure!(ios + 1.0 == kernels, "fio {ios}, the disk {kernels}");
    let least = format!("min(storage_bio_latency_seconds_count{{{of}}})");
    ensure!(wait_for(&least, |bios| bios >= kernels)? == kernels, "more than {kernels}");
    let both = wait_for(&total, |bios| bios >= 2.0 * kernels)?;
    ensure!(both == 2.0 * kernels, "both: {both}, not 2 * {kernels}");

    // Quantiles of the sum of both histograms: in the bucket in which fio has its own.
    let percentile = &report["read"]["clat_ns"]["percentile"];
    for (q, key) in [(0.5, "50.000000"), (0.99, "99.000000")] {
        let ours = value(&format!(
            "histogram_quantile({q}, sum by (le) (rate(storage_bio_latency_seconds_bucket{{{of}}}[1m])))"
        ))?;
        let fios = percentile[key].as_f64().context("fio's percentile")? / 1e9;
        println!("quantile {q}: {ours} s, fio {fios} s, {ios} reads");
        // A bucket's limits are at most a factor of 1.5 apart, and fio's time has its own part in it.
        ensure!(ours > 0.008388608 && ours < fios * 1.5, "quantile {q}: {ours} s, fio: {fios} s");
    }
    for rule in [
        "storage:bio_latency_seconds:p99_5m",
        "storage:bios:rate5m",
        "storage:page_cache_hit:ratio5m",
    ] {
        wait_until(rule, || Ok(!query(rule)?.is_empty()))?;
    }

    // Every panel of the dashboard shows something.
    let dashboard = workspace().join("tools/exporter/dashboard.json");
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(dashboard)?)?;
    for panel in dashboard["panels"].as_array().context("no panels")? {
        for target in panel["targets"].as_array().context("no targets")? {
            let expr = target["expr"].as_str().context("no expr")?;
            let expr = expr.replace("$__rate_interval", "1m");
            let expr = expr.replace("$instance", ".*").replace("$disk", ".*");
            // After a scrape that took too long, a panel is empty until the next one.
            wait_until(&panel["title"].to_string(), || Ok(!query(&expr)?.is_empty()))?;
        }
    }

    // A restart: the counters start again, and Prometheus sees it as a reset.
    second.interrupt()?;
    let second = start(PORT + 1, &[])?;
    shell(&format!("{dd}20"))?;
    let instance = format!("instance=\"127.0.0.1:{}\"", PORT + 1);
    wait_for(&format!("storage_bio_latency_seconds_count{{{of},{instance}}}"), |n| n == 20.0)?;
    let resets = format!("resets(storage_bio_latency_seconds_count{{{of},{instance}}}[5m])");
    wait_for(&resets, |resets| resets == 1.0)?;
    let other = format!(
        "resets(storage_bio_latency_seconds_count{{{of},instance=\"127.0.0.1:{PORT}\"}}[5m])"
    );
    ensure!(value(&other)? == 0.0, "the first one was not restarted");

    // A disk that has gone: its series end.
    drop(disk);
    wait_until("the end of the series", || {
        Ok(query(&format!("storage_bio_latency_seconds_count{{{of}}}"))?.is_empty())
    })?;
    let said = prometheus.id();
    shell(&format!("kill -TERM {said}"))?;
    let ended = prometheus.end()?;
    ensure!(!ended.stderr.contains("level=error"), "{}", ended.stderr);
    first.interrupt()?;
    second.interrupt()?;
    Ok(())
}

/// The unit's user and capabilities are enough, and systemd understands the unit.
fn exporter_runs_as_its_unit_says() -> Result<()> {
    needs("systemd-analyze")?;
    let unit = workspace().join("tools/exporter/exporter.service");
    let text = fs::read_to_string(&unit)?;
    fs::create_dir_all("/usr/local/bin")?;
    fs::copy(program("exporter"), "/usr/local/bin/exporter")?;
    let said = shell(&format!("systemd-analyze verify {} 2>&1", unit.display()))?;
    ensure!(!said.contains("exporter.service"), "{said}");
    let security = format!(
        "systemd-analyze security --offline=yes --threshold=35 --no-pager {}",
        unit.display()
    );
    println!("{}", shell(&security)?.lines().last().unwrap_or_default());

    let setting = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
    let capabilities = setting("AmbientCapabilities=").context("no capabilities")?;
    let bounding = setting("CapabilityBoundingSet=").context("no bounding set")?;
    ensure!(capabilities == bounding, "{capabilities}, {bounding}");
    let names = capabilities.split_whitespace().map(|name| name.trim_start_matches("CAP_"));
    let set = names.fold("-all".to_owned(), |set, name| set + ",+" + &name.to_lowercase());
    let command = setting("ExecStart=").context("no ExecStart")?;
    let arguments: Vec<&str> = command.split_whitespace().collect();
    let with = |set: &str| {
        let sets = ["inh", "ambient", "bounding"].map(|kind| match kind {
            "bounding" => format!("--bounding-set={set}"),
            kind => format!("--{kind}-caps={set}"),
        });
        let ids = ["--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"];
        let mut setpriv = Command::new("setpriv");
        setpriv.args(ids).args(sets).args(&arguments);
        Running::spawn(&mut setpriv)
    };
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid")?;
    shell("sysctl -q kernel.perf_event_paranoid=2")?;
    let mut running = with(&set)?;
    running.wait_for(": tracing ")?;
    let answer = Scrape::of(PORT)?;
    let labels = answer.0.keys().find(|name| name.starts_with("storage_exporter_build_info"));
    ensure!(labels.is_some_and(|labels| labels.contains("kernel=\"")), "{labels:?}");
    running.interrupt()?;
    // Each of them is needed.
    for name in set.split(",+").skip(1) {
        let less = set.replace(&format!(",+{name}"), "");
        let ended = with(&less)?.end()?;
        ensure!(ended.code == Some(3), "without {name}: {ended:?}");
    }
    shell(&format!("sysctl -q kernel.perf_event_paranoid={}", paranoid.trim()))?;
    Ok(())
}
