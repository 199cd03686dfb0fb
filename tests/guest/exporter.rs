//! The exporter, beside the kernel's counters, fio, and a real Prometheus.

use std::{
    collections::HashMap,
    fs,
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    os::unix::fs::FileExt,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    disks::{self, Mapped, Mounted, NullBlk},
    run::{Running, fio, judged_weakly, not_judged, program, shell, wait_until, workspace},
};

tests![
    exporter_counts_what_the_disks_count,
    exporter_survives_hostile_clients,
    exporter_beside_prometheus,
    exporter_runs_as_its_unit_says,
];

const PORT: u16 = 9435;

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
fn get(port: u16, path: &str) -> Result<String> {
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

    pub fn bios(&self, disk: &str, op: &str) -> u64 {
        let labels = format!("{{disk=\"{disk}\",op=\"{op}\"}}");
        self.get(&format!("storage_bio_latency_seconds_count{labels}")) as u64
    }

    fn seconds(&self, disk: &str, op: &str) -> f64 {
        self.get(&format!("storage_bio_latency_seconds_sum{{disk=\"{disk}\",op=\"{op}\"}}"))
    }

    /// The parts of the reads of a disk, whose sum is all of their latency.
    fn parts(&self, disk: &str) -> Result<HashMap<&str, f64>> {
        let of = format!("storage_bio_part_seconds_total{{disk=\"{disk}\",op=\"read\",part=\"");
        let parts: HashMap<&str, f64> = self
            .0
            .iter()
            .filter_map(|(name, seconds)| {
                Some((name.strip_prefix(&of)?.strip_suffix("\"}")?, *seconds))
            })
            .collect();
        let (sum, all) = (parts.values().sum::<f64>(), self.seconds(disk, "read"));
        ensure!(all > 0.0 && (sum - all).abs() < 1e-6, "{disk}: parts {parts:?} of {all} s");
        Ok(parts)
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
    pub fn is_complete(&self) -> Result<()> {
        let missing = ["storage_bios_not_measured_total", "storage_reads_not_measured_total"];
        let is_missing = |name: &&String| missing.iter().any(|missing| name.starts_with(missing));
        for name in self.0.keys().filter(is_missing) {
            ensure!(self.get(name) == 0.0, "{name}: {}", self.get(name));
        }
        Ok(())
    }
}

/// One exporter, and loads of which the kernel's counters, fio and timers know. Each disk is the successor of
/// the one before, and has its name: the series of a disk end with it.
fn exporter_counts_what_the_disks_count() -> Result<()> {
    // 8.4 ms is just above the limit of a bucket, 8,388,608 ns: none may be below it. No program sees how the
    // kernel looks for partitions.
    let late = NullBlk::named("late", &[("irqmode", "2"), ("completion_nsec", "8400000")])?;
    let silent = NullBlk::named("silent", &[])?;
    fs::write(format!("/sys/block/{}/queue/iostats", silent.name), "0")?;
    let running = start(&["--parts"])?;
    has_fios_latencies(&late.name)?;
    counts_operations()?;
    keeps_what_a_partition_counted()?;
    divides_into_slow_ios_parts()?;
    says_what_is_in_no_part(&silent.name)?;
    // Before a virtio disk is looked for: to read its serial number, the driver makes a bio that nobody submits.
    Scrape::now()?.is_complete()?;
    counts_pages()?;
    counts_what_it_was_skipped_for(running.id())?;
    running.interrupt().map(drop)
}

/// Reads, writes, flushes and discards of the whole disk and of a partition, on two CPUs: the
/// disk's counters say how many there were.
fn counts_operations() -> Result<()> {
    let disk = NullBlk::new(&[
        ("memory_backed", "1"),
        ("size", "64"),
        ("discard", "1"),
        ("cache_size", "8"),
        ("submit_queues", "2"),
    ])?;
    let (name, partition) = (&disk.name, disks::partition(&disk.name));
    shell(&format!(
        "echo ',,83' | sfdisk --quiet --no-reread --force /dev/{name} 2>&1; \
         partx -u /dev/{name}; test -e /dev/{partition}; sync"
    ))?;
    let (before, scrape_before) = (fields(name)?, Scrape::now()?);
    let load = |file: &str, options: &str| {
        fio(&format!("--direct=1 --bs=4k --thread --size=32m --filename=/dev/{file} {options}"))
    };
    let loads = [
        load(name, "--rw=randrw --numjobs=4 --number_ios=250")?,
        load(&partition, "--rw=randread --number_ios=200")?,
        load(name, "--rw=randtrim --number_ios=100 --ioengine=sync")?,
        load(name, "--rw=write --fsync=1 --number_ios=100")?,
    ];
    let written: u64 = loads.iter().filter_map(|load| load["write"]["total_ios"].as_u64()).sum();
    let (scrape, after) = (Scrape::now()?, fields(name)?);
    let completed = |field: usize| after[field] - before[field];
    // The kernel counts a flush also as a write: fio knows how much it wrote.
    for (op, kernels) in [
        ("read", completed(0)),
        ("write", written),
        ("discard", completed(11)),
        ("flush", completed(15)),
    ] {
        let ours = scrape.bios(name, op) - scrape_before.bios(name, op);
        ensure!(ours == kernels && ours >= 90, "{op}: {ours}, and there were {kernels}");
        scrape.buckets(name, op)?;
    }
    ensure!(scrape.bios(&partition, "read") == 0, "a partition is no disk");
    ends_with(disk)
}

fn fields(disk: &str) -> Result<Vec<u64>> {
    let text = fs::read_to_string(format!("/sys/block/{disk}/stat"))?;
    text.split_whitespace().map(|field| Ok(field.parse()?)).collect()
}

/// The series of a disk end with it.
fn ends_with(disk: NullBlk) -> Result<()> {
    let name = disk.name.clone();
    drop(disk);
    let text = get(PORT, "/metrics")?;
    ensure!(!text.contains(&name), "{name} is gone: {text}");
    Ok(())
}

/// Every bio takes at least as long as the delay that the disk has, and no longer than fio waited.
fn has_fios_latencies(disk: &str) -> Result<()> {
    const DELAY: f64 = 0.0084;
    let options = "--direct=1 --rw=randread --bs=4k --number_ios=100 --size=512m --thread \
                   --output-format=json+";
    let report = fio(&format!("--filename=/dev/{disk} {options}"))?;
    let scrape = Scrape::now()?;
    let (ios, clat) = (&report["read"]["total_ios"], &report["read"]["clat_ns"]);
    let bios = scrape.bios(disk, "read");
    ensure!(*ios == bios, "fio: {ios}, we: {bios}");
    let (mean, fios) = (scrape.seconds(disk, "read") / bios as f64, &clat["mean"]);
    let most = fios.as_f64().unwrap_or(0.0) / 1e9;
    ensure!((DELAY..=most).contains(&mean), "mean {mean} s, delay {DELAY} s, fio {fios} ns");
    // A bin of fio's is at most 1.6 % wide, and is known by its middle.
    let bins = clat["bins"].as_object().context("no bins")?;
    let fios_up_to = |limit: f64| -> u64 {
        let within = |ns: &String| ns.parse::<f64>().unwrap_or(f64::MAX) * 1.016 / 1e9 <= limit;
        bins.iter().filter(|bin| within(bin.0)).filter_map(|bin| bin.1.as_u64()).sum()
    };
    for (limit, count) in scrape.buckets(disk, "read")? {
        ensure!(
            limit >= DELAY || count == 0,
            "{count} bios took {limit} s, the delay is {DELAY} s"
        );
        let fios = fios_up_to(limit);
        ensure!(count >= fios, "up to {limit} s: {count} bios, and fio saw {fios}");
    }
    Ok(())
}

/// A counter must not decrease: when a partition is removed, what was counted there stays with its disk,
/// also where the next partition has the same number. The series of a disk end with it.
fn keeps_what_a_partition_counted() -> Result<()> {
    let disk = NullBlk::new(&[("memory_backed", "1"), ("size", "64")])?;
    let (name, partition) = (&disk.name, &disks::partition(&disk.name));
    shell(&format!("echo ',,83' | sfdisk --quiet --no-reread --force /dev/{name} 2>&1"))?;
    let (uncounted, mut seconds) = (fields(name)?[0] - Scrape::now()?.bios(name, "read"), 0.0);
    ensure!(uncounted < 5, "{uncounted} reads before the first scrape are not counted");
    let mut is_all = |when: &str| -> Result<()> {
        let (scrape, completed) = (Scrape::now()?, fields(name)?[0] - uncounted);
        let bios = scrape.bios(name, "read");
        ensure!(bios == completed, "{when}: {bios} reads, and the disk completed {completed}");
        scrape.buckets(name, "read")?;
        scrape.parts(name).context(when.to_owned())?;
        let now = scrape.seconds(name, "read");
        ensure!(now >= seconds, "{when}: {now} s, and it was {seconds} s before");
        seconds = now;
        Ok(())
    };
    for _ in 0..2 {
        let dd = |file, count| {
            format!("dd if=/dev/{file} of=/dev/null bs=4k count={count} iflag=direct status=none")
        };
        shell(&format!(
            "partx -u /dev/{name} && test -e /dev/{partition}; {}; {}",
            dd(partition, 20),
            dd(name, 5)
        ))?;
        is_all("with the partition")?;
        shell(&format!("partx -d /dev/{name} && ! test -e /dev/{partition}"))?;
        is_all("in the first scrape without it")?;
        is_all("in the second scrape without it")?;
    }
    ends_with(disk)
}

/// A disk that takes one request at a time, and 10 ms for it: of four readers, three wait for a request.
fn divides_into_slow_ios_parts() -> Result<()> {
    let disk = NullBlk::new(&[
        ("irqmode", "2"),
        ("completion_nsec", "10000000"),
        ("hw_queue_depth", "1"),
        ("submit_queues", "1"),
    ])?;
    let name = &disk.name;
    fio(&format!(
        "--filename=/dev/{name} --direct=1 --rw=randread --bs=4k --numjobs=4 --number_ios=15 --size=64m --thread"
    ))?;
    let scrape = Scrape::now()?;
    let (bios, completed) = (scrape.bios(name, "read"), fields(name)?[0]);
    ensure!(bios == completed, "a disk's successor: {bios} reads, the disk completed {completed}");
    let parts = scrape.parts(name)?;
    let (device, wait) = (parts["device"], parts["wait"]);
    ensure!(device >= 0.6, "60 reads of 10 ms took {device} s");
    ensure!(
        wait > device,
        "four readers, one request: {wait} s of waiting, {device} s at the disk"
    );
    ends_with(disk)
}

/// A disk without statistics, of which nobody knows how long bios waited for a request, and one without
/// requests: what is unknown is not 0.
fn says_what_is_in_no_part(silent: &str) -> Result<()> {
    shell("modprobe dm_zero")?;
    let without_requests = Mapped::new("zeros", "0 65536 zero")?;
    for path in [format!("/dev/{silent}"), without_requests.path()] {
        shell(&format!("dd if={path} of=/dev/null bs=4k count=20 iflag=direct status=none"))?;
    }
    let scrape = Scrape::now()?;
    let parts = scrape.parts(&without_requests.disk()?)?;
    ensure!(!parts.contains_key("device") && !parts.contains_key("wait"), "no request: {parts:?}");
    let parts = scrape.parts(silent)?;
    ensure!(parts.contains_key("device"), "without statistics: {parts:?}");
    ensure!(!parts.contains_key("wait"), "without statistics: {parts:?}");
    Ok(())
}

/// A file's pages, brought in ahead: a page that was brought in too late is a miss, too.
fn counts_pages() -> Result<()> {
    let _mounted = Mounted::new()?;
    let path = "/mnt/data/exporter";
    shell(&format!(
        "dd if=/dev/zero of={path} bs=1M count=4 status=none; sync; echo 3 >/proc/sys/vm/drop_caches"
    ))?;
    let page = rustix::param::page_size() as u64;
    let (file, mut buffer, all) = (fs::File::open(path)?, vec![0; page as usize], (4 << 20) / page);
    // What else is read in the guest is read once here.
    Scrape::now()?;
    let before = Scrape::now()?;
    (0..all).try_for_each(|number| file.read_exact_at(&mut buffer, number * page))?;
    let after = Scrape::now()?;
    let [hit, miss, readahead] = ["hit", "miss", "readahead"]
        .map(|result| after.pages(result).saturating_sub(before.pages(result)));
    ensure!(
        hit + miss == all && hit > miss && miss > 0 && readahead < all && readahead + miss >= all,
        "with readahead: {hit} hits, {miss} misses, {readahead} ahead, of {all} pages"
    );
    Ok(())
}

/// A timer completes bios in the middle of other probes, whose CPU then runs no kprobe: the kernel counts
/// these with the kprobe, and shows the figure as long as the link is there.
fn counts_what_it_was_skipped_for(process: u32) -> Result<()> {
    if of_the_kernel(process)?.is_none() {
        judged_weakly("this kernel does not show in /proc what a kprobe has missed");
        return Ok(());
    }
    let disk =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000"), ("submit_queues", "2")])?;
    fio(&format!(
        "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=16 --thread \
         --norandommap --size=128M --numjobs=16 --number_ios=300",
        disk.name
    ))?;
    // Others may do I/O meanwhile.
    let before = of_the_kernel(process)?.unwrap_or_default();
    let ours = Scrape::now()?.get("storage_programs_skipped_total") as u64;
    let after = of_the_kernel(process)?.unwrap_or_default();
    println!("{ours} skipped; the kernel: {} by kprobes, {} by programs", before.0, before.1);
    let allowed = before.0 + before.1..=after.0 + after.1;
    ensure!(allowed.contains(&ours), "{ours}; the kernel: {before:?} to {after:?}");
    if before.0 == 0 {
        judged_weakly("no kprobe was missed");
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
/// properly gets an answer. After SIGTERM, nobody is served, and when the process has ended, nothing of it
/// is left.
fn exporter_survives_hostile_clients() -> Result<()> {
    let running = start(&[])?;
    for (request, expected) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "HTTP/1.1 200 OK"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 Method Not Allowed"),
        (b"\0\x01\x02\r\n\r\n", "HTTP/1.1 400 Bad Request"),
    ] {
        let answer = send(PORT, request)?;
        ensure!(
            answer.starts_with(&format!("{expected}\r\n")),
            "{:?}: {answer}",
            String::from_utf8_lossy(request)
        );
    }
    // Whether it reads the answer or not: it is disconnected.
    let mut huge = TcpStream::connect(("127.0.0.1", PORT))?;
    let headers = format!("GET /metrics HTTP/1.1\r\nA: {}", "a".repeat(1 << 20));
    huge.write_all(headers.as_bytes()).ok();
    huge.set_read_timeout(Some(Duration::from_secs(20)))?;
    let closed = huge.read_to_end(&mut Vec::new());
    ensure!(!closed.is_err_and(|error| error.kind() == ErrorKind::WouldBlock), "still connected");

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
        Scrape::now()?;
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

/// The values that a query finds.
fn query(promql: &str) -> Result<Vec<f64>> {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => (byte as char).to_string(),
        _ => format!("%{byte:02X}"),
    };
    let encoded: String = promql.bytes().map(encode).collect();
    let answer: Value =
        serde_json::from_str(&get(PROMETHEUS, &format!("/api/v1/query?query={encoded}"))?)?;
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

/// Prometheus scrapes an exporter each second: it finds what fio did, and rules and panels find something.
fn exporter_beside_prometheus() -> Result<()> {
    needs("prometheus")?;
    let rules = fs::canonicalize(workspace().join("tools/exporter/rules.yml"))?;
    shell(&format!("promtool test rules {}", rules.with_file_name("rules_test.yml").display()))?;
    let directory = "/run/prometheus";
    fs::remove_dir_all(directory).ok();
    fs::create_dir_all(directory)?;
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{}]\n\
         scrape_configs:\n- job_name: storage\n  static_configs:\n  - targets: ['127.0.0.1:{PORT}']\n",
        rules.display()
    );
    fs::write(format!("{directory}/prometheus.yml"), config)?;
    let disk = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000000")])?;
    let name = &disk.name;
    let exporter = start(&["--parts"])?;
    let prometheus = Running::spawn(Command::new("prometheus").args([
        &format!("--config.file={directory}/prometheus.yml"),
        &format!("--storage.tsdb.path={directory}"),
        &format!("--web.listen-address=127.0.0.1:{PROMETHEUS}"),
    ]))?;
    shell(&format!("curl -s http://127.0.0.1:{PORT}/metrics | promtool check metrics"))?;
    wait_until("Prometheus", || Ok(get(PROMETHEUS, "/-/ready").is_ok()))?;
    // A series starts with its first I/O: let Prometheus see it before the load.
    let of = format!("disk=\"{name}\",op=\"read\"");
    let total = format!("storage_bio_latency_seconds_count{{{of}}}");
    shell(&format!("dd if=/dev/{name} of=/dev/null bs=4k iflag=direct status=none count=1"))?;
    wait_for(&total, |bios| bios == [1.0])?;
    let report = fio(&format!(
        "--filename=/dev/{name} --direct=1 --rw=randread --bs=4k --size=512m --thread --number_ios=150"
    ))?;
    let ios = report["read"]["total_ios"].as_f64().context("fio's reads")?;
    let bios = wait_for(&total, |bios| bios.iter().any(|bios| *bios > ios))?;
    ensure!(bios == [ios + 1.0], "fio {ios}, dd 1, Prometheus {bios:?}");

    for rule in ["bio_latency_seconds:p99_5m", "bios:rate5m", "page_cache_hit:ratio5m"] {
        wait_for(&format!("storage:{rule}"), |found| !found.is_empty())?;
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
            wait_for(&expr, |found| !found.is_empty())
                .with_context(|| panel["title"].to_string())?;
        }
    }
    prometheus.signal(Signal::TERM)?;
    let ended = prometheus.end()?;
    ensure!(!ended.stderr.contains("level=error"), "{}", ended.stderr);
    exporter.interrupt().map(drop)
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
    let answer = Scrape::now()?;
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
