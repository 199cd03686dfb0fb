//! The exporter where something does not answer: a disk, a file of /sys, a client. And its audit where disks change.

use std::io::Read;

use socket2::{Domain, SockAddr, Socket, Type};

use crate::prelude::*;
use exporter::PORT;

tests![
    exporter_waits_for_nobody,
    exporter_has_a_place_for_everybody,
    exporter_audits_disks_that_change,
];

/// The longest that a client waits. Without anything in the way, it is a fifth of this in an emulated guest.
const AT_ONCE: Duration = Duration::from_secs(3);

/// How many requests of this kind the histograms of a disk have.
fn counted(scrape: &Scrape, disk: &str, op: &str) -> f64 {
    let of = format!("seconds_count{{disk=\"{disk}\",op=\"{op}\"}}");
    let ours = |name: &str| name.starts_with("storage_request_") && name.ends_with(&of);
    let counts = scrape.0.iter().filter(|(name, _)| ours(name)).map(|(_, count)| *count);
    counts.fold(0.0, f64::max)
}

/// A metric with no label but the disk.
fn of_disk(scrape: &Scrape, metric: &str, disk: &str) -> Option<f64> {
    scrape.0.get(&format!("storage_{metric}{{disk=\"{disk}\"}}")).copied()
}

/// A connection from this address of the loopback interface; `room`: how much the client's socket holds.
fn connect(from: [u8; 4], room: Option<usize>) -> Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SockAddr::from(std::net::SocketAddr::from((from, 0))))?;
    if let Some(room) = room {
        socket.set_recv_buffer_size(room)?;
    }
    let to = SockAddr::from(std::net::SocketAddr::from(([127, 0, 0, 1], PORT)));
    // A lost SYN is sent again after a second.
    socket.connect_timeout(&to, Duration::from_millis(900)).context("not connected at once")?;
    Ok(socket.into())
}

/// A disk that hangs, with a file in /sys that nobody can read until it does not.
struct Stuck<'a> {
    disk: String,
    // In this order: the processes end when the disk's requests have failed.
    _failing: Failing<'a>,
    _waiting: Vec<Running>,
}

impl Stuck<'_> {
    fn new(hung: &Mapped) -> Result<Stuck<'_>> {
        let (disk, failing) = (hung.disk()?, Failing(hung));
        let mut waiting = vec![Running::bash(&disks::reads(&hung.path(), 1))?];
        waiting[0].waits_in("blkdev_read_iter")?;
        // Whoever changes a setting keeps others from the settings until the disk has no request: before 6.14,
        // the first of these from all settings, and from then on the second one from those that are limits.
        for (file, value) in [("scheduler", "none"), ("max_sectors_kb", "64")] {
            let set = format!("echo {value} >/sys/block/{disk}/queue/{file}");
            waiting.push(Running::bash(&set)?);
        }
        let mut reader = None;
        wait_until("a file that cannot be read", || {
            let cat = format!("exec cat /sys/block/{disk}/queue/iostats");
            let mut cat = Running::bash(&cat)?;
            thread::sleep(Duration::from_secs(1));
            let is_stuck = cat.runs()?;
            reader = Some(cat);
            Ok(is_stuck)
        })?;
        waiting.extend(reader);
        Ok(Stuck { disk, _failing: failing, _waiting: waiting })
    }
}

/// At once: a disk that hangs, whose file in /sys cannot be read; 300 clients that say nothing; clients that do not
/// read an answer of more than a megabyte. Those who ask get theirs, with the figures of all other disks.
fn exporter_waits_for_nobody() -> Result<()> {
    let honest = NullBlk::new("honest", "size=16")?;
    let name = &honest.name;
    let named = |n: u32| NullBlk::new(&format!("many{n}"), "size=16");
    let many = (0..50).map(named).collect::<Result<Vec<_>>>()?;
    let hung = Mapped::hung("hangs")?;
    let server = exporter::start(&[])?;
    disks::read(name, 10)?;
    for (disk, n) in many.iter().zip(0..) {
        let file = File::options().read(true).write(n < 40).open(format!("/dev/{}", disk.name))?;
        file.read_exact_at(&mut [0; 4096], 0)?;
        if n < 40 {
            file.write_all_at(&[1; 4096], 0)?;
            file.sync_data()?;
        }
    }
    let length = exporter::get(PORT, "/metrics")?.len();
    ensure!(length > 1_000_000, "the answer is too small: {length} bytes");

    let stuck = Stuck::new(&hung)?;
    let mut readers = Vec::new();
    for last in [2, 2, 3, 3] {
        let mut reader = connect([127, 0, 0, last], Some(4096))?;
        reader.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        readers.push(reader);
    }
    let mut silent = Vec::new();
    for n in 0..300 {
        let from = [127, 0, 0, if n < 150 { 2 } else { 3 }];
        silent.push(connect(from, None).with_context(|| format!("client {n}"))?);
    }
    let mut ages = Vec::new();
    for round in 2..=5 {
        disks::read(name, 10)?;
        let start = Instant::now();
        let scrape = Scrape::now()?;
        let took = start.elapsed();
        ensure!(took < AT_ONCE, "a scrape took {took:?}");
        let (reads, gap) = (counted(&scrape, name, "read"), scrape.gap(name)?);
        ensure!(reads == f64::from(10 * round), "{name}: {reads} reads in round {round}");
        ensure!(gap == Some([0.0; 2]), "{name}: {gap:?}");
        // A look at all disks may take longer than the scrape waits for it.
        let age = of_disk(&scrape, "look_age_seconds", name).context("no age")?;
        ensure!(age < 2.0, "{name}: what the kernel says of it is {age} s old");
        ages.push(of_disk(&scrape, "look_age_seconds", &stuck.disk).context("no age")?);
        thread::sleep(Duration::from_millis(500));
    }
    let grew = ages[3] - ages[0];
    ensure!(ages.is_sorted() && grew > 1.5, "{}: {ages:?} s", stuck.disk);
    // A slow reader has what there was room for, and is still served.
    for reader in &mut readers {
        reader.read_exact(&mut [0; 1 << 10])?;
    }
    drop(stuck);
    // It is as old as all others again.
    wait_until("a look at the disk", || {
        let scrape = Scrape::now()?;
        let ages = scrape.0.iter().filter(|(name, _)| name.contains("look_age_seconds"));
        Ok(ages.clone().count() > 50 && ages.clone().all(|(_, age)| *age < 1.0))
    })?;
    drop((silent, readers));
    server.interrupt().map(drop)
}

/// While the exporter cannot accept anybody, 300 connect, which are more than the standard library has a queue for.
/// An address that has taken all places keeps nobody else out.
fn exporter_has_a_place_for_everybody() -> Result<()> {
    let server = exporter::start(&[])?;
    server.signal(Signal::STOP)?;
    let mut silent = Vec::new();
    for n in 0..300 {
        silent.push(connect([127, 0, 0, 2], None).with_context(|| format!("client {n}"))?);
    }
    let mut honest = connect([127, 0, 0, 1], None)?;
    honest.write_all(b"GET / HT")?;
    server.signal(Signal::CONT)?;
    honest.set_read_timeout(Some(AT_ONCE))?;
    // By now, all of them have been accepted.
    Scrape::now()?;
    for n in 0..100 {
        silent.push(connect([127, 0, 0, 2], None).with_context(|| format!("client {n}"))?);
    }
    let start = Instant::now();
    Scrape::now()?;
    let took = start.elapsed();
    ensure!(took < AT_ONCE, "a scrape took {took:?}");
    // It came before all others, and has said half of what it wants.
    honest.write_all(b"TP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    honest.read_to_string(&mut answer).context("an honest client lost its place")?;
    ensure!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    server.interrupt().map(drop)
}

/// The gap of a disk as soon as it can be compared.
fn gap(disk: &str) -> Result<[f64; 2]> {
    let mut gap = None;
    wait_until("a comparison", || {
        gap = Scrape::now()?.gap(disk)?;
        Ok(gap.is_some())
    })?;
    gap.context("no gap")
}

/// A loop device that is attached again has a new diskseq, and keeps its counters: there is no gap. A new disk
/// begins with 0: what is missing of it is in its gap. And whether a disk has statistics is said also where it has
/// done nothing yet.
fn exporter_audits_disks_that_change() -> Result<()> {
    let attached = disks::Loop::new("one", 8 << 20)?;
    let disk = &*attached.name;
    shell("truncate -s 8M /run/two")?;
    let attach = |file: &str| {
        let path = format!("/dev/{disk}");
        shell(&format!("losetup --detach {path}; losetup {path} /run/{file}"))
    };
    disks::read(disk, 100)?;
    let [silent, unused] = ["silent", "unused"].map(|name| NullBlk::new(name, "size=16"));
    let (silent, unused) = (silent?, unused?);
    fs::write(silent.queue("iostats"), "0")?;
    let server = exporter::start(&[])?;
    let scrape = Scrape::now()?;
    for (disk, expected) in [(&silent.name, 0.0), (&unused.name, 1.0)] {
        for metric in ["disk_statistics", "disk_audited"] {
            let found = of_disk(&scrape, metric, disk);
            ensure!(found == Some(expected), "{metric} of {disk}: {found:?}");
        }
    }
    // Again while it is not compared yet: what the first scrape knows is of another number.
    attach("two")?;
    disks::read(disk, 30)?;
    Scrape::now()?;
    for (file, reads) in [("one", 7), ("two", 30), ("one", 1)] {
        let before = fs::read_to_string(format!("/sys/block/{disk}/diskseq"))?;
        attach(file)?;
        let after = fs::read_to_string(format!("/sys/block/{disk}/diskseq"))?;
        ensure!(before != after, "the diskseq of {disk} stays: the test does not test");
        disks::read(disk, reads)?;
        let found = gap(disk)?;
        ensure!(found == [0.0; 2], "{disk} attached to {file}, {reads} reads: {found:?}");
        // Long enough for the other side of the gap.
        thread::sleep(Duration::from_millis(1100));
        disks::read(disk, 5)?;
        let (found, scrape) = (gap(disk)?, Scrape::now()?);
        let ours = counted(&scrape, disk, "read");
        ensure!(found == [0.0; 2], "{disk}, 5 reads later: {found:?}");
        ensure!(ours >= f64::from(reads + 5), "{disk}: {ours} reads since it is attached");
    }

    exporter::close_the_hook(server.id())?;
    let new = NullBlk::new("new", "size=16")?;
    disks::read(&new.name, 20)?;
    let (found, did) = (gap(&new.name)?, disks::requests(&new.name)?);
    ensure!(did >= 20 && found == [did as f64, 0.0], "of {did} reads, none was seen: {found:?}");
    server.interrupt().map(drop)
}
