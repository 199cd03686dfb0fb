//! The loads of `truth/cases.toml`, and what is true of each.

use std::{
    cell::RefCell,
    rc::{Rc, Weak},
};

use truth::{
    Fact,
    Question::{self, *},
};

use crate::{
    disks::{Loop, in_flight, reads},
    pagecache::{Read, at_random},
    prelude::*,
    slow_io::{cgroup, throttle},
};

/// A load that is set up: its disks exist, and nothing uses them yet. They go when this does. Called, it runs, and
/// returns what is true of it, as judges from outside say.
pub type Ready = Box<dyn FnMut() -> Result<Vec<Fact>>>;

fn ready(run: impl FnMut() -> Result<Vec<Fact>> + 'static) -> Result<Ready> {
    Ok(Box::new(run))
}

/// Sets a load up.
pub type Load = fn() -> Result<Ready>;

const OF_64: &str = "--iodepth=16 --numjobs=64 --number_ios=79";

/// All of them, by the names of their cases.
pub const LOADS: &[(&str, Load)] = &[
    ("threads_1", || of_virtio("--number_ios=400", 400)),
    ("threads_16", || of_virtio("--iodepth=16 --numjobs=16 --number_ios=313", 5008)),
    ("threads_64", || of_virtio(OF_64, 5056)),
    ("threads_64_nvme", || plain(disks::nvme()?, &format!("{OF_64} --size=128M"), 5056)),
    // Eight threads take turns on one CPU.
    ("one_cpu", || of_virtio("--iodepth=16 --numjobs=8 --cpus_allowed=0 --number_ios=50", 400)),
    ("io_uring", || {
        of_virtio("--ioengine=io_uring --iodepth=16 --numjobs=4 --number_ios=250", 1000)
    }),
    // A thread of the kernel submits for each of them, without a system call.
    ("sqpoll", || {
        let by_kernel = "--ioengine=io_uring --sqthread_poll=1";
        of_virtio(&format!("{by_kernel} --iodepth=8 --numjobs=2 --number_ios=300"), 600)
    }),
    // Two of the same tool at once: each of them measures all.
    ("twice", || of_virtio("--iodepth=4 --numjobs=2 --number_ios=200", 400)),
    ("in_tasks", in_tasks),
    ("polled", polled),
    ("timer", || timer(10, 200, &[FastestRequest, SlowestRequest])),
    // More than 2^32 ns.
    ("seconds", || timer(5000, 4, &[SlowestRequest, SlowestBio])),
    ("minute", minute),
    ("many_disks", many_disks),
    ("slow_sector", slow_sector),
    ("far", far),
    ("split", || splitting(vec![disks::nvme()?], "--rw=read --bs=4M --size=80M", 20)),
    ("parts", parts),
    ("checksums", checksums),
    ("merge", merge),
    // scsi_debug fails every tenth command in a way that lets the kernel try again, or transfers a part of it
    // and leaves the rest to another one.
    ("requeue", || tried_again("0x10")),
    ("partial", || tried_again("0x100")),
    ("iostats_off", iostats_off),
    ("dm_linear", dm_linear),
    ("dm_crypt", dm_crypt),
    ("raid1", raid1),
    ("crypt_on_raid1", crypt_on_raid1),
    ("raid5", raid5),
    ("btrfs", btrfs),
    ("two_disks", two_disks),
    ("flush", flush),
    ("unqueued_flush", unqueued_flush),
    ("passthrough", passthrough),
    ("discard", discard),
    ("discard_gigabytes", discard_gigabytes),
    ("zoned", zoned),
    ("pulled", pulled),
    ("writeback", writeback),
    ("long_dd", || long_dd("slowly", "")),
    ("pid_namespace", || long_dd("contained", "unshare --pid --fork ")),
    ("hostile_names", hostile_names),
    ("swap", swap),
    ("one_tag", one_tag),
    ("paced", paced),
    ("io_max", io_max),
    ("cache_cold", cache_cold),
    ("cache_warm", cache_warm),
    ("cache_random", cache_random),
    ("cache_folios", cache_folios),
    ("cache_writes", cache_writes),
    ("cache_mmap", cache_mmap),
    ("cache_threads", cache_threads),
    ("sizes", sizes),
    ("partition", partition),
    ("exits", exits),
    // The loads from here on are no cases: they are the exporter's own.
    ("after_flushes", after_flushes),
    ("multipath", multipath),
];

/// What a load did to disks. All are counts of I/Os.
#[derive(Clone, Copy, Default)]
struct Did {
    /// Calls of submit_bio().
    bios: u64,
    /// Requests that the disks have completed, without flushes.
    requests: u64,
    /// Flushes that the disks have completed.
    flushes: u64,
    /// Requests that only asked for a flush: they are among `requests`, and no driver got them.
    asked: u64,
    /// Flushes are asked for by the kernel, nobody knows how often.
    asks_unseen: bool,
    /// A driver's commands, which no disk counts.
    commands: u64,
    /// Bios that device mapper, or whoever else, made and did not submit by submit_bio().
    clones: Option<u64>,
    /// Bios that were split, or that end twice: a lesson may leave them out.
    in_parts: u64,
    /// Bios that end twice: a lesson has to leave them out.
    twice: u64,
    /// Ends of bios that are a part, or the first of two ends.
    parts: u64,
    /// Requests that the driver got once more.
    again: u64,
    /// Requests without data, among `requests`: who counts sizes may leave them out.
    without_data: u64,
    /// What was read and written.
    bytes: u64,
}

impl Did {
    /// As many bios as requests, and no others.
    fn only(requests: u64) -> Did {
        Did { bios: requests, requests, clones: Some(0), ..Did::default() }
    }

    /// All of it, and more.
    fn and<const N: usize>(self, more: [Fact; N]) -> Vec<Fact> {
        [&self.facts()[..], &more].concat()
    }

    fn facts(self) -> Vec<Fact> {
        let Did { bios, requests, flushes, asked, commands, in_parts, twice, .. } = self;
        let with_data = requests - self.without_data;
        let others = self.clones.map_or((0, u64::MAX >> 8), |clones| (clones, clones));
        let unseen = if self.asks_unseen { flushes } else { 0 };
        let driver = requests - asked + flushes + commands;
        vec![
            // Who counts I/Os may count either, and those that were merged or not.
            Fact::between(Ios, with_data.min(bios), bios.max(requests)),
            Fact::exactly(Bios, bios).with_left_out(in_parts, twice),
            // Who counts a flush is right, and who does not.
            Fact::between(Requests, with_data - asked - unseen, requests + flushes + commands)
                .with_again(self.again),
            Fact::between(DriverRequests, driver - 2 * unseen, driver),
            Fact::between(UnissuedRequests, asked, asked + 2 * unseen),
            Fact::exactly(Bytes, self.bytes),
            Fact::between(OtherBios, others.0, others.1),
            Fact::between(OtherBiosAndParts, others.0 + self.parts, others.1 + self.parts),
        ]
    }
}

/// What disks have completed during a load, by the block layer's counters, taking every bio of these disks for
/// one that was submitted; and what the load returns.
fn counted<T>(disks: &[impl AsRef<str>], load: impl FnOnce() -> Result<T>) -> Result<(Did, T)> {
    let disks: Vec<&str> = disks.iter().map(AsRef::as_ref).collect();
    // Where QEMU's disk loses a command, the driver aborts it after 30 s by commands of its own, which carry no
    // data. After a minute it resets the controller, and the next load often loses commands at once.
    let own = disks.iter().any(|disk| disk.starts_with("nvme"));
    let own = own.then(|| Ftrace::new(&[Hook::Tracepoint("block/block_rq_issue", "dev == 0")]));
    let (own, before) = (own.transpose()?, now(&disks)?);
    let report = load()?;
    wait_until("idle disks", || {
        Ok(disks.iter().map(|disk| in_flight(disk)).sum::<Result<u64>>()? == 0)
    })?;
    let now = now(&disks)?;
    let [requests, bios, flushes, bytes] = [0, 1, 2, 3].map(|n| now[n] - before[n]);
    let own = own.map_or(Ok(Vec::new()), |own| own.events())?;
    if own.iter().any(|command| !command.text.contains(" 0 ()")) {
        return not_judged(
            "QEMU's nvme lost a command, and the driver reset it: not the I/O that was meant",
        );
    }
    let commands = own.len() as u64;
    let did = Did { bios, requests, flushes, bytes, commands, clones: Some(0), ..Did::default() };
    Ok((did, report))
}

fn now(disks: &[&str]) -> Result<[u64; 4]> {
    let sum = |of: fn(&str) -> Result<u64>| disks.iter().map(|disk| of(disk)).sum::<Result<u64>>();
    let bytes = |disk: &str| disks::stat(disk).map(|stat| (stat[2] + stat[6]) * 512);
    Ok([sum(disks::requests)?, sum(disks::bios)?, sum(disks::flushes)?, sum(bytes)?])
}

/// The slowest I/O of fio's report, from its submission until fio has seen its end, ns.
pub fn slowest(report: &Value) -> Result<u64> {
    figure(report, "/read/lat_ns/max")
}

fn total(report: &Value) -> Result<u64> {
    figure(report, "/read/total_ios")
}

fn synced(report: &Value) -> Result<u64> {
    figure(report, "/sync/total_ios")
}

fn figure(report: &Value, path: &str) -> Result<u64> {
    report.pointer(path).and_then(Value::as_u64).with_context(|| format!("no {path}: {report}"))
}

/// fio on one disk: what is true then, by the disk's counters and fio's report.
fn by_fio(
    disk: impl AsRef<str> + 'static,
    options: impl Into<String>,
    facts: impl Fn(Did, &Value) -> Result<Vec<Fact>> + 'static,
) -> Result<Ready> {
    let options = options.into();
    ready(move || {
        let (did, report) = counted(&[&disk], || fio_direct(disk.as_ref(), &options))?;
        facts(did, &report)
    })
}

/// Reads of one disk, each of them one bio and one request.
fn plain(disk: impl AsRef<str> + 'static, options: &str, least: u64) -> Result<Ready> {
    by_fio(disk, options, move |did, _| {
        let Did { bios, requests, .. } = did;
        ensure!(requests >= least && bios == requests, "{requests} requests, {bios} bios");
        Ok(did.facts())
    })
}

fn of_virtio(options: &str, least: u64) -> Result<Ready> {
    plain(disks::virtio()?, &format!("{options} --size=128M"), least)
}

/// Four reads at a time of a disk that takes so many ms for each. The timer can only be late, and fio sees an end
/// after the kernel has.
fn timer(ms: u64, reads: u64, of_timer: &'static [Question]) -> Result<Ready> {
    let least = ms * 1_000_000;
    let disk = NullBlk::timer(&format!("timer{ms}"), ms, "")?;
    by_fio(disk, format!("--iodepth=4 --number_ios={reads}"), move |did, report| {
        let slowest = slowest(report)?;
        ensure!(did.requests >= reads && slowest >= least, "{} requests", did.requests);
        let of_timer = of_timer.iter().map(|question| Fact::between(*question, least, slowest));
        Ok(did.facts().into_iter().chain(of_timer).collect())
    })
}

/// A disk that takes 80 s for a read, longer than the kernel waits for one where nobody tells it to. It counts in ticks
/// of 4 ms, of which the first one is not whole.
fn minute() -> Result<Ready> {
    const TICKS: u64 = 20_000;
    let disk = ScsiDebug::new("dev_size_mb=64")?;
    fs::write(format!("/sys/block/{}/device/timeout", disk.name), "200")?;
    ready(move || {
        let delay = Setting::new("/sys/bus/pseudo/drivers/scsi_debug/delay", &TICKS.to_string())?;
        let report = fio_direct(&disk.name, "--iodepth=2 --number_ios=2 --size=16M")?;
        drop(delay);
        let (slowest, least) = (slowest(&report)?, (TICKS - 1) * 4_000_000);
        ensure!(slowest >= least, "{slowest} ns");
        Ok([SlowestRequest, SlowestBio]
            .map(|question| Fact::between(question, least, slowest))
            .into())
    })
}

/// Ten reads of each of forty disks.
fn many_disks() -> Result<Ready> {
    let disk = |n| NullBlk::timer(&format!("many{n}"), 1, "submit_queues=1");
    let disks = (0..40).map(disk).collect::<Result<Vec<_>>>()?;
    let names: Vec<_> = disks.iter().map(|disk| disk.name.clone()).collect();
    let paths = names.join(":/dev/");
    let requests =
        move || disks.iter().map(|disk| disks::requests(&disk.name)).collect::<Result<Vec<_>>>();
    ready(move || {
        let options = "--file_service_type=roundrobin --number_ios=400 --size=40M --iodepth=8";
        let before = requests()?;
        let (did, _) = counted(&names, || fio_direct(&paths, options))?;
        let of_each = requests()?.into_iter().zip(before).map(|(now, before)| now - before);
        let fewest = of_each.min();
        ensure!(fewest >= Some(10), "a disk was read {fewest:?} times");
        Ok(did.facts())
    })
}

/// A sector that 32 bits do not hold, and the size of a disk that has it, in MiB.
const FAR: u64 = 1 << 32;
const SIZE: &str = "size=3145728";

fn far() -> Result<Ready> {
    const READS: u32 = 20;
    let disk = NullBlk::timer("far", 1, SIZE)?;
    ready(move || {
        shell(&format!("{} skip={}", reads(&disk.name, READS), FAR / 8))?;
        let highest = Fact::exactly(HighestSector, FAR + 8 * u64::from(READS - 1));
        Ok(of_dd(READS.into()).into_iter().chain([highest]).collect())
    })
}

/// dm-delay counts ticks of 4 ms, and in an emulated machine some come early: 193 ms were measured.
fn slow_sector() -> Result<Ready> {
    const SECTOR: u64 = FAR + 80_000;
    const DELAY: u64 = 1_000_000_000;
    const LEAST: u64 = 950_000_000;
    let null = NullBlk::timer("slow", 1, SIZE)?;
    let below = format!("/dev/{}", null.name);
    let table = format!(
        "0 {SECTOR} linear {below} 0;{SECTOR} 8 delay {below} {SECTOR} {};{} 80000 linear {below} {}",
        DELAY / 1_000_000,
        SECTOR + 8,
        SECTOR + 8
    );
    let slow = Mapped::new("slow", &table)?;
    let disk = slow.disk()?;
    ready(move || {
        let read = |offset, ios| {
            let options = format!("--rw=read --offset={offset} --size=32M --number_ios={ios}");
            slowest(&fio_direct(&slow.path(), &options)?)
        };
        // The slow one comes neither first nor last.
        let reads = || Ok(read(0, 200)?.max(read(SECTOR * 512, 1)?).max(read(0, 200)?));
        let (below, (above, slowest)) = counted(&[&null.name], || counted(&[&disk], reads))?;
        let bios = above.bios;
        ensure!(bios >= 401 && slowest >= LEAST, "{bios} bios, {slowest} ns");
        let did = Did { bios, clones: Some(below.bios), ..below };
        let slow = Fact::between(SlowestBio, LEAST, slowest);
        Ok(did.and([slow, Fact::exactly(SlowSector, SECTOR)]))
    })
}

/// Reads that the block layer splits: each part is a request, and ends as a bio, the last as the whole.
fn splitting(disks: Vec<String>, options: &str, reads: u64) -> Result<Ready> {
    let options = options.to_owned();
    ready(move || {
        let submitted = Ftrace::new(&[Hook::Function("submit_bio")])?;
        let read = || disks.iter().try_for_each(|disk| fio_direct(disk, &options).map(drop));
        let (did, ()) = counted(&disks, read)?;
        let did = Did { bios: submitted.events()?.len() as u64, ..did };
        let Did { bios, requests, .. } = did;
        ensure!(bios >= reads && requests >= 2 * bios, "{bios} bios, {requests} requests");
        Ok(Did { in_parts: bios, parts: requests - bios, ..did }.facts())
    })
}

/// Small requests, eight reads at a time of each of two threads, of disks of three drivers.
fn parts() -> Result<Ready> {
    // First: to read a virtio disk's serial number, the driver makes a bio that is never submitted.
    let disks = vec![disks::virtio()?, disks::nvme()?, disks::scsi()?];
    let small =
        |disk: &String| Setting::new(format!("/sys/block/{disk}/queue/max_sectors_kb"), "64");
    let small = disks.iter().map(small).collect::<Result<Vec<_>>>()?;
    let mut load = splitting(disks, "--bs=1M --iodepth=8 --numjobs=2 --size=64M", 384)?;
    ready(move || {
        let _small = &small;
        load()
    })
}

/// A disk with checksums (T10 PI): the kernel verifies what was read, and calls bio_endio() again.
fn checksums() -> Result<Ready> {
    let disk = ScsiDebug::new("dif=1 dix=1 dev_size_mb=64")?;
    let verify = fs::read_to_string(format!("/sys/block/{}/integrity/read_verify", disk.name))?;
    ensure!(verify.trim() == "1", "nothing is verified: {verify}");
    ready(move || {
        let load = |rw| fio_direct(&disk.name, &format!("--rw={rw} --number_ios=100 --size=32M"));
        let (did, _) = counted(&[&disk.name], || load("randwrite").and(load("randread")))?;
        ensure!(did.bios == 200, "{} bios", did.bios);
        Ok(Did { in_parts: 100, twice: 100, parts: 100, ..did }.facts())
    })
}

/// A plug collects 32 neighbouring writes, and the block layer merges them.
fn merge() -> Result<Ready> {
    let batch = "--iodepth=32 --iodepth_batch=32 --iodepth_batch_complete_min=32";
    by_fio(disks::virtio()?, format!("--rw=write --size=8M {batch}"), |did, report| {
        let (Did { bios, requests, .. }, writes) = (did, report["write"]["total_ios"].as_u64());
        ensure!(writes == Some(bios), "fio wrote {writes:?} times, and there are {bios} bios");
        ensure!(requests * 4 < bios, "{requests} requests of {bios} bios: few were merged");
        let merges = bios - requests;
        let share = Fact::between(MergedShare, 100 * merges / bios, 100 * merges / bios + 1);
        Ok(did.and([Fact::exactly(Merges, merges), share]))
    })
}

fn tried_again(opts: &str) -> Result<Ready> {
    let options = format!("ndelay=20000000 opts={opts} every_nth=10 dev_size_mb=64");
    let disk = ScsiDebug::new(&options)?;
    ready(move || {
        let commands = || -> Result<u64> {
            let path = format!("/sys/block/{}/device/iodone_cnt", disk.name);
            let text = fs::read_to_string(path)?;
            Ok(u64::from_str_radix(text.trim().trim_start_matches("0x"), 16)?)
        };
        let (before, load) = (commands()?, "--rw=read --bs=64k --number_ios=60 --size=4M");
        let (did, _) = counted(&[&disk.name], || fio_direct(&disk.name, load))?;
        let commands = commands()? - before;
        let requests = did.requests;
        ensure!(requests >= 60 && commands >= requests + 5, "{requests} requests, {commands}");
        Ok(Did { again: commands - requests, ..did }.facts())
    })
}

/// The block layer keeps no counters of this disk: fio counts.
fn iostats_off() -> Result<Ready> {
    let disk = NullBlk::timer("silent", 1, "")?;
    fs::write(disk.queue("iostats"), "0")?;
    by_fio(disk, "--iodepth=8 --number_ios=400", |did, report| {
        ensure!(did.requests == 0, "the kernel still counts");
        let reads = total(report)?;
        Ok(Did { bytes: reads * 4096, ..Did::only(reads) }.facts())
    })
}

/// Reads of a device that device mapper or md makes: bios by fio's count, and requests of the disks below.
/// The counters of a RAID count some bios twice on newer kernels. What it lies on lives as long as the load.
fn stacked<T: 'static>(stack: (Mapped, T), below: Vec<String>, load: &str) -> Result<Ready> {
    let load = load.to_owned();
    ready(move || {
        // All of the stack: what is below goes last.
        let (mapped, _) = &stack;
        let (did, report) = counted(&below, || fio_direct(&mapped.path(), &load))?;
        let bios = total(&report)?;
        ensure!(bios >= 640 && did.requests >= bios, "{bios} reads, {} requests", did.requests);
        Ok(Did { bios, clones: None, ..did }.facts())
    })
}

fn dm_linear() -> Result<Ready> {
    let virtio = disks::virtio()?;
    let linear = Mapped::new("lin", &format!("0 262144 linear /dev/{virtio} 0"))?;
    stacked((linear, ()), vec![virtio], "--iodepth=8 --numjobs=4 --number_ios=250 --size=100M")
}

/// 32 MiB of a device, encrypted.
pub fn crypt(name: &str, below: &str) -> Result<Mapped> {
    shell("modprobe -a dm_crypt xts || true")?;
    let key = "0123456789abcdef".repeat(8);
    Mapped::new(name, &format!("0 65536 crypt aes-xts-plain64 {key} 0 {below} 0"))
}

/// 32 MiB of a disk, from this sector on.
fn slice(name: &str, disk: &str, at: u64) -> Result<Mapped> {
    Mapped::new(name, &format!("0 65536 linear /dev/{disk} {at}"))
}

/// 32 MiB of two disks, mirrored; behind it what is below, to be dropped last.
fn mirror(name: &str, virtio: &str, nvme: &str) -> Result<(Mapped, [Mapped; 2])> {
    shell("modprobe -a dm_raid raid1 || true")?;
    let (a, b) = (slice(&format!("{name}-a"), virtio, 0)?, slice(&format!("{name}-b"), nvme, 0)?);
    let table = format!("0 65536 raid raid1 2 0 nosync 2 - {} - {}", a.path(), b.path());
    Ok((Mapped::new(name, &table)?, [a, b]))
}

/// What was read is decrypted by the kernel's workers: its bios complete in a task.
fn dm_crypt() -> Result<Ready> {
    let virtio = disks::virtio()?;
    let crypt = crypt("crypt", &format!("/dev/{virtio}"))?;
    stacked((crypt, ()), vec![virtio], "--iodepth=4 --numjobs=16 --number_ios=40 --size=32M")
}

fn raid1() -> Result<Ready> {
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    let mirror = mirror("raid1", &virtio, &nvme)?;
    stacked(mirror, vec![virtio, nvme], "--iodepth=4 --numjobs=8 --number_ios=80 --size=32M")
}

fn crypt_on_raid1() -> Result<Ready> {
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    let mirror = mirror("below-crypt", &virtio, &nvme)?;
    let crypt = crypt("crypt-on-raid1", &mirror.0.path())?;
    let load = "--iodepth=4 --numjobs=8 --number_ios=80 --size=32M";
    stacked((crypt, mirror), vec![virtio, nvme], load)
}

/// 64 threads that read and write 64 KiB: bios by ftrace, since what is made of them submits bios, too.
const MIXED_BY_64: &str =
    "--rw=randrw --bs=64k --iodepth=4 --size=32M --numjobs=64 --number_ios=12";

/// A load whose bios end in tasks of the kernel.
fn in_workers<T: 'static>(
    kept: T,
    below: Vec<String>,
    mut load: impl FnMut(&T) -> Result<()> + 'static,
) -> Result<Ready> {
    ready(move || {
        let submitted = Ftrace::new(&[Hook::Function("submit_bio")])?;
        // Whoever writes behind may write more at once than a disk takes: at most so many bios are in parts.
        let splits = Ftrace::new(&[Hook::Tracepoint("block/block_split", "")])?;
        let (did, ()) = counted(&below, || load(&kept))?;
        let [bios, in_parts] =
            [submitted, splits].map(|ftrace| ftrace.events().map(|all| all.len() as u64));
        let (bios, in_parts) = (bios?, in_parts?);
        ensure!(bios >= 640 && did.requests >= 640, "{bios} bios, {} requests", did.requests);
        Ok(Did { bios, clones: None, asks_unseen: true, in_parts, ..did }.facts())
    })
}

/// md writes parity in a thread of its own, raid5d.
fn raid5() -> Result<Ready> {
    shell("modprobe -a dm_raid raid456 || true")?;
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    let [a, b] = [("raid5-a", 0), ("raid5-b", 65536)].map(|(name, at)| slice(name, &virtio, at));
    let slices = [a?, b?, slice("raid5-c", &nvme, 0)?];
    let [a, b, c] = slices.each_ref().map(Mapped::path);
    let table = format!("0 131072 raid raid5_ls 2 64 nosync 3 - {a} - {b} - {c}");
    let raid = Mapped::new("raid5", &table)?;
    in_workers((raid, slices), vec![virtio, nvme], |(raid, _)| {
        fio_direct(&raid.path(), MIXED_BY_64).map(drop)
    })
}

/// btrfs completes the bios of a null_blk in its own workers, and in the tasks that submit.
fn btrfs() -> Result<Ready> {
    let disk = NullBlk::new("btrfs", "irqmode=1 memory_backed=1 submit_queues=2")?;
    let mounted = Mounted::made("btrfs", &disk.name, "commit=1000")?;
    shell("sync -f /run/btrfs")?;
    let below = vec![disk.name.clone()];
    in_workers((mounted, disk), below, |(mounted, _)| {
        fio_direct("/run/btrfs/file", MIXED_BY_64)?;
        mounted.unmount()
    })
}

/// null_blk that completes in the task that submits.
fn in_tasks() -> Result<Ready> {
    let disk = NullBlk::new("tasks", "irqmode=1 submit_queues=2")?;
    let batch = "--iodepth=32 --iodepth_batch=8 --iodepth_batch_complete_min=8";
    plain(disk, &format!("{batch} --numjobs=16 --number_ios=500"), 8000)
}

/// Two disks that are read at the same sectors at the same time, one of them slow.
fn two_disks() -> Result<Ready> {
    let (fast, slow) = (NullBlk::timer("fast", 2, "")?, NullBlk::timer("late", 250, "")?);
    ready(move || {
        let reads = |disk: &NullBlk, more: &str| {
            fio_direct_command(&disk.name, &format!("--rw=read --iodepth=4 --size=80k {more}"))
        };
        // Of the fast one eight times as many, in as long.
        let fast_ones = reads(&fast, "--io_size=640k --rate_iops=100");
        let load = format!("{fast_ones} >/dev/null & {}; wait $!", reads(&slow, ""));
        let (did, report) = counted(&[&fast.name, &slow.name], || shell(&load))?;
        ensure!(did.requests >= 180, "{} requests", did.requests);
        let slowest = slowest(&fio_report(&report)?)?;
        Ok(did.and([Fact::between(SlowestRequest, 250_000_000, slowest)]))
    })
}

/// A bio that only flushes is a write for the counters, and reaches the driver as a request of the block
/// layer's own, for all that ask at the time.
fn flush() -> Result<Ready> {
    let load = "--rw=write --fsync=4 --number_ios=200 --size=128M";
    by_fio(disks::virtio()?, load, |did, report| {
        let asked = synced(report)?;
        ensure!(did.flushes >= 20 && asked >= 20, "{} flushes, {asked} asked for", did.flushes);
        Ok(Did { asked, ..did }.facts())
    })
}

/// A flush of a disk without a cache reaches no queue: its bio passes bio_endio(), and no tracepoint.
fn unqueued_flush() -> Result<Ready> {
    let disk = NullBlk::new("uncached", "")?;
    let cache = fs::read_to_string(disk.queue("write_cache"))?;
    ensure!(cache.trim() == "write through", "null_blk has a cache: {cache}");
    let load = "--rw=randwrite --ioengine=psync --fsync=1 --number_ios=200 --size=64M";
    by_fio(disk, load, |did, report| {
        let flushes = synced(report)?;
        ensure!(did.bios == 200 && flushes > 190, "{} writes, {flushes} flushes", did.bios);
        Ok(Did { bios: did.bios + flushes, ..did }.facts())
    })
}

/// The nvme driver makes the bio of a command that an application gives it, and never submits it. Its
/// request starts and completes as others do.
fn passthrough() -> Result<Ready> {
    const READS: u64 = 20;
    let path = disks::nvme()?.replace("nvme", "/dev/ng");
    ready(move || {
        let commands = Ftrace::new(&[Hook::Tracepoint("nvme/nvme_setup_cmd", "")])?;
        fio(&format!(
            "--filename={path} --ioengine=io_uring_cmd --cmd_type=nvme --rw=randread --bs=4k --thread \
             --number_ios={READS} --size=16M"
        ))?;
        // At its start, fio asks which disk that is.
        let commands = commands.events()?.len() as u64;
        ensure!((READS..READS + 5).contains(&commands), "{commands} commands");
        Ok(Did { commands, clones: Some(commands), ..Did::default() }.facts())
    })
}

fn discard() -> Result<Ready> {
    let disk = NullBlk::timer("discard", 1, "memory_backed=1 discard=1 size=64")?;
    ready(move || {
        let load = format!(
            "for i in 0 1 2 3 4 5 6 7 8 9; do blkdiscard -f -o $((i * 1048576)) -l 1048576 /dev/{}; done",
            disk.name
        );
        let (did, _) = counted(&[&disk.name], || shell(&load))?;
        ensure!(did.requests == 10, "{} requests of ten discards", did.requests);
        // The counters have no discard among the bios.
        Ok(Did::only(did.requests).facts())
    })
}

/// Each is one bio, whose size 32 bits just hold, in bytes.
fn discard_gigabytes() -> Result<Ready> {
    const GIB: u64 = 1 << 30;
    let disk = Loop::new("large", 12 * GIB)?;
    ready(move || {
        let discard = |at: u64| {
            let range = format!("-o {} -l {}", at * 3 * GIB, 3 * GIB);
            shell(&format!("blkdiscard -f {range} /dev/{}", disk.name)).map(drop)
        };
        let sectors = || disks::stat(&disk.name).map(|stat| stat[13]);
        let before = sectors()?;
        let (did, ()) = counted(&[&disk.name], || (0..4).try_for_each(discard))?;
        let discarded = (sectors()? - before) * 512;
        ensure!(did.requests == 4 && discarded == 12 * GIB, "{} requests", did.requests);
        Ok(Did::only(did.requests).facts())
    })
}

/// Four zones are written to, some writes at a time, which the kernel keeps in their order; then they are emptied, by
/// a chain of bios: each one is in flight until the one before has ended, and on 7.2 the first one ends last. All end
/// on one CPU: where two end at one instant, on two, a lesson loses all that come after them in the chain.
fn zoned() -> Result<Ready> {
    let disk = NullBlk::timer("zones", 1, "zoned=1 zone_size=4 size=64")?;
    disk.queues()?;
    ready(move || {
        let write = "--rw=write --zonemode=zbd --iodepth=4 --numjobs=4 --number_ios=100 --size=4M \
                     --offset_increment=4M";
        let reset = format!("taskset -c 0 blkzone reset -o 0 -l 32768 /dev/{}", disk.name);
        let load = || fio_direct(&disk.name, write).and(shell(&reset));
        let (did, _) = counted(&[&disk.name], load)?;
        ensure!(did.requests == 404, "{} requests of 400 writes and 4 resets", did.requests);
        Ok(Did { without_data: 4, in_parts: 3, ..did }.facts())
    })
}

/// A disk that goes while fio reads it. Its counters go with it: ftrace counts.
fn pulled() -> Result<Ready> {
    let disk = NullBlk::timer("pulled", 20, "")?;
    ready(move || {
        let submitted = Ftrace::new(&[Hook::Function("submit_bio")])?;
        let completed = Ftrace::new(&[Hook::Tracepoint("block/block_rq_complete", "")])?;
        // No sector twice: of two reads of one at once, some tools count one.
        let reads = "--rw=read --iodepth=8 --number_ios=4000 --size=64M";
        let fio = fio_direct_command(&disk.name, reads);
        shell(&format!(
            "({fio} >/dev/null 2>&1 || true) &
             while read -r n rest </sys/block/{}/stat && [ $n -lt 100 ]; do sleep 0.1; done
             {}; wait $!",
            disk.name,
            disk.pull()
        ))?;
        let [bios, requests] =
            [submitted, completed].map(|ftrace| ftrace.events().map(|all| all.len() as u64));
        let (bios, requests) = (bios?, requests?);
        ensure!((100..4000).contains(&requests), "{requests} requests, {bios} bios");
        Ok(Did { bios, bytes: requests * 4096, ..Did::only(requests) }.facts())
    })
}

/// The application asks the driver whether an I/O has completed: there is no interrupt.
fn polled() -> Result<Ready> {
    let disk = NullBlk::new("polled", "irqmode=0 submit_queues=2 poll_queues=1")?;
    let polls = fs::read_to_string(disk.queue("io_poll"))?;
    ensure!(polls.trim() == "1", "{} does not poll: {polls}", disk.name);
    let load = "--ioengine=io_uring --hipri=1 --iodepth=8 --numjobs=2 --number_ios=400";
    plain(disk, load, 800)
}

/// fio's writes reach the disk in the kernel's own threads, while dd reads.
fn writeback() -> Result<Ready> {
    const READS_OF_DD: u64 = 100;
    let mounted = mounted()?;
    ready(move || {
        shell(&format!(
            "fio --name=writer --filename=/mnt/data/written --rw=write --bs=64k --size=8M --ioengine=psync \
               --fsync_on_close=1 --thread --output-format=terse >/dev/null &
             dd if=/dev/{} of=/dev/null bs=4k count={READS_OF_DD} iflag=direct status=none
             wait $!",
            mounted.disk
        ))?;
        Ok(of_dd(READS_OF_DD))
    })
}

/// What is true of so many reads by dd, of 4 KiB each.
fn of_dd(reads: u64) -> Vec<Fact> {
    vec![Fact::exactly(BiosOfDd, reads), Fact::exactly(BytesOfDd, reads * 4096)]
}

/// Whoever looks once a second sees this dd, which another program may run.
fn long_dd(disk: &str, by: &str) -> Result<Ready> {
    const READS: u32 = 100;
    let disk = NullBlk::timer(disk, 50, "")?;
    let load = by.to_owned() + &reads(&disk.name, READS);
    ready(move || {
        let _disk = &disk;
        shell(&load)?;
        Ok(of_dd(READS.into()))
    })
}

/// A kernel's name for a process is that of its file. These print as lines of slow_io and biosnoop, and of
/// biosnoop.bt.
fn hostile_names() -> Result<Ready> {
    const READS: u64 = 10;
    const NAMES: [&str; 3] = ["dd", "\n1.0 dd 1 dd", "\n1 1 1 dd 1"];
    let disk = NullBlk::timer("hostile", 1, "")?;
    let dir = Path::new("/run/hostile");
    fs::create_dir_all(dir)?;
    for name in NAMES {
        fs::copy("/usr/bin/dd", dir.join(name))?;
    }
    ready(move || {
        for name in NAMES {
            let mut command = Command::new(dir.join(name));
            command.args(["of=/dev/null", "bs=4k", "iflag=direct", "status=none"]);
            command.args([format!("if=/dev/{}", disk.name), format!("count={READS}")]);
            ensure!(command.status().context("dd")?.success(), "dd fails");
        }
        Ok(of_dd(READS))
    })
}

/// dd fills its buffer twice: of the pages that are not in memory any more, each is read before. The kernel writes none
/// that holds zeros only, and a huge one, which an RT kernel does not have, in parts, which are more than the bio.
fn swap() -> Result<Ready> {
    let disk = NullBlk::new("swap", "memory_backed=1 size=64")?;
    shell(&format!("mkswap /dev/{}", disk.name))?;
    // Else swapon reads 128 KiB with the header, which is split.
    fs::write(disk.queue("read_ahead_kb"), "4")?;
    let cgroup = cgroup("swapping", "memory.max", "4M")?;
    ready(move || {
        let name = &disk.name;
        let load = format!(
            "huge=/sys/kernel/mm/transparent_hugepage/enabled; [ -e $huge ] || huge=/dev/null
             was=$(sed 's/.*\\[//; s/\\].*//' $huge); echo never >$huge
             swapon /dev/{name}
             (echo 0 >{cgroup}/cgroup.procs; exec dd if=/dev/urandom of=/dev/null bs=5M count=2 iflag=fullblock status=none)
             swapoff /dev/{name}; rmdir {cgroup}; echo $was >$huge"
        );
        let (did, _) = counted(&[name], || shell(&load))?;
        let stat = disks::stat(name)?;
        let (read, written) = (stat[2] / 2048, stat[6] / 2048);
        ensure!(read >= 2 && written >= 2, "{read} MiB read and {written} MiB written");
        Ok(did.facts())
    })
}

/// One request at a time, which takes 20 ms, and eight bios: seven of them wait in the scheduler.
fn one_tag() -> Result<Ready> {
    const TIMER: u64 = 20_000_000;
    let disk = NullBlk::one_tag("one-tag", 20)?;
    disk.queues()?;
    by_fio(disk, "--iodepth=8 --number_ios=40 --size=16M", |did, report| {
        let slowest = slowest(report)?;
        ensure!(slowest >= 4 * TIMER, "{slowest} ns: nothing has waited");
        let slowest = Fact::between(SlowestBio, 4 * TIMER, slowest);
        Ok(did.and([Fact::between(QueuedShare, 50, 99), slowest]))
    })
}

/// A disk that is mostly idle. The kernel samples that, in ticks of up to 4 ms: a fifth less is right.
fn paced() -> Result<Ready> {
    const TIMER: u64 = 2_000_000;
    let disk = NullBlk::timer("paced", 2, "")?;
    by_fio(disk, "--number_ios=100 --thinktime=98000 --size=16M", |did, report| {
        let (reads, passed) = (total(report)?, figure(report, "/read/runtime")? * 1_000_000);
        let mean = report["read"]["lat_ns"]["mean"].as_f64().context("no mean")? as u64 + 1;
        ensure!(passed > 3 * reads * mean, "it was busy: {reads} of {mean} ns in {passed} ns");
        let (least, most) = (reads * TIMER, reads * mean);
        Ok(did.and([
            Fact::between(TimeInFlight, least, most),
            Fact::between(BusyTime, least * 4 / 5, most),
            Fact::between(Utilisation, 80 * least / passed, 100 * most / passed + 1),
            Fact::between(MeanLatency, TIMER, mean),
        ]))
    })
}

/// A cgroup that may read 20 times a second: its bios wait before they have a request.
fn io_max() -> Result<Ready> {
    const READS: u64 = 20;
    let disk = NullBlk::timer("throttled", 1, "")?;
    let cgroup = throttle(&disk.name)?;
    ready(move || {
        let load = format!("--ioengine=psync --number_ios={READS} --size=16M");
        let fio = fio_direct_command(&disk.name, &load);
        let report = shell(&format!("sh -c 'echo $$ >{cgroup}/cgroup.procs; exec {fio}'"));
        shell(&format!("rmdir {cgroup}"))?;
        let report = fio_report(&report?)?;
        let mean = report["read"]["lat_ns"]["mean"].as_f64().context("no mean")? as u64;
        ensure!(mean >= 25_000_000, "{mean} ns: nothing was throttled");
        // fio reads one after the other: half of the mean is far below the slowest one.
        Ok(vec![
            Fact::exactly(Bios, total(&report)?),
            Fact::between(SlowestThrottled, mean / 2, slowest(&report)?),
            Fact::between(QueuedShare, 50, 100),
        ])
    })
}

/// The data disk's file system, which all loads of a group share.
fn mounted() -> Result<Rc<Mounted>> {
    thread_local! {
        static MOUNTED: RefCell<Weak<Mounted>> = const { RefCell::new(Weak::new()) };
    }
    MOUNTED.with_borrow_mut(|known| match known.upgrade() {
        Some(mounted) => Ok(mounted),
        None => {
            let mounted = Rc::new(Mounted::new()?);
            *known = Rc::downgrade(&mounted);
            Ok(mounted)
        }
    })
}

/// What mincore() said of these reads, and what other processes may add to it.
fn resident(reads: &[Read]) -> Vec<Fact> {
    let (hit, miss) = (reads.iter().map(|r| r.hit).sum(), reads.iter().map(|r| r.miss).sum());
    let others = |pages: u64| 64 + pages / 20;
    vec![
        Fact::exactly(Hits, hit).with_others(others(hit)),
        Fact::exactly(Misses, miss).with_others(others(miss)),
        Fact::exactly(FileReads, reads.len() as u64),
    ]
}

/// A file of 16 MiB without a page in memory, or with all, and the load that reads it.
fn cached(
    name: &str,
    warm: bool,
    mut read: impl FnMut(&Watched) -> Result<Vec<Read>> + 'static,
) -> Result<Ready> {
    let mounted = mounted()?;
    let file = new_file(&mounted, name, 16 * MIB)?;
    if warm {
        file.read_all(MIB)?;
    }
    ready(move || {
        let _mounted = &mounted;
        Ok(resident(&read(&file)?))
    })
}

/// 64 KiB at a time, where all pages are of one kind.
fn all_are(file: &Watched, what: &str, other: fn(&Read) -> u64) -> Result<Vec<Read>> {
    let reads = file.read_all(64 << 10)?;
    let others: u64 = reads.iter().map(other).sum();
    ensure!(others == 0, "{others} pages were not {what}");
    Ok(reads)
}

fn cache_cold() -> Result<Ready> {
    cached("cold", false, |file| {
        file.advise(Advice::Random, 0, 0)?;
        all_are(file, "missing", |read| read.hit)
    })
}

fn cache_warm() -> Result<Ready> {
    cached("warm", true, |file| all_are(file, "resident", |read| read.miss))
}

fn cache_random() -> Result<Ready> {
    cached("random", false, |file| at_random(file, 2000, (0, 1)))
}

/// Readahead makes large folios on 7.2, where ext4 takes them; a read of a page of one is a hit of a page.
fn cache_folios() -> Result<Ready> {
    cached("folios", false, |file| {
        let added = Hook::Tracepoint("filemap/mm_filemap_add_to_page_cache", "order > 0");
        let added = Ftrace::new(&[added])?;
        let reads = [file.read_all(MIB)?, file.read_all(page_size())?].concat();
        let large = added.events()?.len();
        ensure!(large > 0 || !release()?.starts_with("7."), "no large folio holds this file");
        Ok(reads)
    })
}

/// Pages that are overwritten are not read.
fn cache_writes() -> Result<Ready> {
    cached("writes", true, |file| {
        let writer = fs::OpenOptions::new().write(true).open(&file.path)?;
        let (writer, is_read) = (&writer, &AtomicBool::new(false));
        let (round, rounds) = mpsc::channel();
        thread::scope(|scope| {
            let writing = scope.spawn(move || -> Result<()> {
                while !is_read.load(Relaxed) {
                    for page in 0..1024 {
                        writer.write_all_at(&[2; 4096], page * 4096)?;
                    }
                    round.send(())?;
                }
                Ok(())
            });
            // Without a first round, the writer says why.
            rounds.recv().ok();
            let reads = file.read_all(64 << 10);
            is_read.store(true, Relaxed);
            writing.join().map_err(|_| anyhow!("the writer panicked"))??;
            reads
        })
    })
}

/// Faults of a mapped file are no reads; a tool that counts them says so.
fn cache_mmap() -> Result<Ready> {
    cached("mmap", true, |file| {
        file.touch(1024);
        file.read_all(64 << 10)
    })
}

/// 64 threads, each with a part of the file of its own: a page is missed once, and stays.
fn cache_threads() -> Result<Ready> {
    let part = |file: &Watched, n| at_random(file, 100, (n, 64));
    cached("threads", false, move |file| Ok(in_threads(0..64, |n| part(file, n))?.concat()))
}

fn sizes() -> Result<Ready> {
    let disk = disks::virtio()?;
    ready(move || {
        let read = |options: &str| -> Result<u64> {
            let options = format!("{options} --iodepth=8 --size=128M");
            Ok(counted(&[&disk], || fio_direct(&disk, &options))?.0.requests)
        };
        let small = read("--bs=4k --number_ios=300")?;
        let large = read("--bs=64k --number_ios=150")?;
        ensure!(small >= 300 && large >= 150, "{small} small, {large} large");
        Ok(vec![Fact::exactly(Requests, small + large), Fact::exactly(LargeRequests, large)])
    })
}

/// The sectors of a partition count from its start, those of the disk from the disk's.
fn partition() -> Result<Ready> {
    let disk = NullBlk::timer("parted", 1, "memory_backed=1 size=64")?;
    let partition = disks::partitioned(&disk.name)?;
    // The kernel counts a bio of a partition for the disk, too.
    ready(move || {
        let load = || fio_direct(&partition, "--iodepth=4 --number_ios=300");
        let (did, _) = counted(&[&disk.name], load)?;
        ensure!(did.requests >= 300, "{} requests", did.requests);
        Ok(did.facts())
    })
}

/// Processes that end while the readahead that they have caused is in flight.
fn exits() -> Result<Ready> {
    // Else a readahead of 128 KiB is split.
    let disk = NullBlk::timer("exits", 50, "max_sectors=1024")?;
    ready(move || {
        let read = format!("dd if=/dev/{} of=/dev/null bs=64k count=1 status=none", disk.name);
        let load =
            || (0..10).try_for_each(|at| shell(&format!("{read} skip={}", at * 64)).map(drop));
        let (did, ()) = counted(&[&disk.name], load)?;
        let sectors = disks::stat(&disk.name)?[2];
        ensure!(did.requests >= 10 && sectors > 10 * 128, "{sectors} sectors: none was read ahead");
        Ok(did.facts())
    })
}

/// The block layer flushes after each write that has to be on the disk: the request completes twice.
fn after_flushes() -> Result<Ready> {
    let load = "--rw=write --ioengine=psync --sync=dsync --number_ios=50 --size=16M";
    by_fio(disks::virtio()?, load, |did, _| {
        ensure!(did.flushes >= 50, "{} flushes: the test does not test", did.flushes);
        Ok(did.facts())
    })
}

/// dm-multipath completes a request with its data, and once more; what it flushes is a clone of a flush.
fn multipath() -> Result<Ready> {
    shell("modprobe -a dm_multipath dm_round_robin")?;
    let disk = ScsiDebug::new("dev_size_mb=64 ndelay=2000000")?;
    let table = format!("0 131072 multipath 0 0 1 1 round-robin 0 1 1 /dev/{} 1000", disk.name);
    // They go in this order: the disk stays as long as something is mapped to it.
    let disks = (Mapped::new("multipath", &table)?, disk);
    ready(move || {
        let (mapped, _) = &disks;
        let path = mapped.path();
        fio_direct(&path, "--bs=64k --iodepth=4 --number_ios=100 --size=16M")?;
        let flushed = "--rw=randwrite --ioengine=psync --fsync=1 --number_ios=20 --size=16M";
        fio_direct(&path, flushed)?;
        Ok(Vec::new())
    })
}
