//! The loads of `truth/cases.toml`, and what is true of each.

use std::{
    fs,
    os::unix::fs::FileExt,
    sync::{
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use truth::{Fact, Question::*};

use super::{Beside, Load};
use crate::{
    disks::{self, Mapped, Mounted, NullBlk, ScsiDebug},
    pagecache::{Read, Watched, new_file, page_size, random},
    run::{Running, fio, fio_command, fio_report, shell, wait_until},
    slow_io::throttle,
};

/// The cases, and a test of each for our own tools.
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub const CASES: &[(&str, Load)] = &[$((stringify!($name), $name)),*];
        pub const TESTS: &[crate::Test] =
            &[$((concat!("truth_", stringify!($name)), || super::ours(stringify!($name), $name))),*];
    };
}

cases![
    threads_1,
    threads_16,
    threads_64,
    timer,
    slow_sector,
    split,
    merge,
    requeue,
    partial,
    iostats_off,
    dm_linear,
    dm_crypt,
    raid1,
    crypt_on_raid1,
    two_disks,
    flush,
    discard,
    io_uring,
    polled,
    writeback,
    one_tag,
    io_max,
    cache_cold,
    cache_warm,
    cache_random,
    cache_folios,
    cache_writes,
    cache_mmap,
    sizes,
    partition,
    twice,
    exits,
];

const MIB: u64 = 1 << 20;
/// Random reads of 4 KiB past the page cache.
const READS: &str = "--rw=randread --bs=4k --direct=1 --ioengine=libaio --thread --norandommap";

/// The block layer's counters of some disks, from now on.
struct Counters {
    disks: Vec<String>,
    before: [u64; 3],
}

impl Counters {
    fn of(disks: &[&str]) -> Result<Counters> {
        let disks: Vec<String> = disks.iter().map(|disk| disk.to_string()).collect();
        Ok(Counters { before: now(&disks)?, disks })
    }

    /// Requests without flushes, those with the bios that were merged into them, and flushes.
    fn since(&self) -> Result<[u64; 3]> {
        wait_until("idle disks", || Ok(super::in_flight()? == 0))?;
        let now = now(&self.disks)?;
        Ok([0, 1, 2].map(|n| now[n] - self.before[n]))
    }
}

fn now(disks: &[String]) -> Result<[u64; 3]> {
    let sum = |of: fn(&str) -> Result<u64>| disks.iter().map(|disk| of(disk)).sum::<Result<u64>>();
    Ok([sum(disks::requests)?, sum(disks::bios)?, sum(disks::flushes)?])
}

/// The slowest I/O of fio's report, from its submission until fio has seen its end, ns.
fn slowest(report: &Value) -> Result<u64> {
    report["read"]["lat_ns"]["max"].as_u64().with_context(|| format!("no latency: {report}"))
}

fn total(report: &Value) -> Result<u64> {
    report["read"]["total_ios"].as_u64().with_context(|| format!("no count: {report}"))
}

/// A disk whose timer ends each I/O, after this time in ms.
fn timed(directory: &str, ms: u64, more: &[(&str, &str)]) -> Result<NullBlk> {
    let time = (ms * 1_000_000).to_string();
    let settings = [("irqmode", "2"), ("completion_nsec", &*time), ("submit_queues", "2")];
    NullBlk::named(directory, &[&settings, more].concat())
}

/// As many bios and requests; who counts I/Os may count either, and those that were merged or not.
fn ios(bios: u64, requests: u64) -> Vec<Fact> {
    vec![
        Fact::between(Ios, requests, bios),
        Fact::exactly(Bios, bios),
        Fact::exactly(Requests, requests),
    ]
}

/// Reads of one disk, each of them one bio and one request.
fn plain(beside: &mut Beside, disk: &str, options: &str, least: u64) -> Result<Vec<Fact>> {
    let [requests, bios, _] = beside.run(|| {
        let counters = Counters::of(&[disk])?;
        fio(&format!("--filename=/dev/{disk} {READS} {options}"))?;
        counters.since()
    })?;
    ensure!(requests >= least && bios == requests, "{requests} requests, {bios} bios of {least}");
    Ok(ios(bios, requests))
}

fn threads_1(beside: &mut Beside) -> Result<Vec<Fact>> {
    plain(beside, &disks::virtio()?, "--number_ios=400 --size=128M", 400)
}

fn threads_16(beside: &mut Beside) -> Result<Vec<Fact>> {
    let load = "--iodepth=16 --numjobs=16 --number_ios=313 --size=128M";
    plain(beside, &disks::virtio()?, load, 5008)
}

fn threads_64(beside: &mut Beside) -> Result<Vec<Fact>> {
    let load = "--iodepth=16 --numjobs=64 --number_ios=79 --size=128M";
    plain(beside, &disks::virtio()?, load, 5056)
}

/// The timer can only be late, and fio sees an end after the kernel has.
fn timer(beside: &mut Beside) -> Result<Vec<Fact>> {
    const TIMER: u64 = 10_000_000;
    let disk = timed("test", 10, &[])?;
    let (requests, slowest) = beside.run(|| {
        let counters = Counters::of(&[&disk.name])?;
        let report =
            fio(&format!("--filename=/dev/{} {READS} --iodepth=4 --number_ios=200", disk.name))?;
        Ok((counters.since()?[0], slowest(&report)?))
    })?;
    ensure!(requests >= 200 && slowest >= TIMER, "{requests} requests, {slowest} ns");
    Ok(vec![
        Fact::exactly(Ios, requests),
        Fact::exactly(Requests, requests),
        Fact::between(FastestRequest, TIMER, slowest),
        Fact::between(SlowestRequest, TIMER, slowest),
    ])
}

/// dm-delay counts ticks of 4 ms, and in an emulated machine some come early: 193 ms were measured.
fn slow_sector(beside: &mut Beside) -> Result<Vec<Fact>> {
    const SECTOR: u64 = 80_000;
    const DELAY: u64 = 1_000_000_000;
    const LEAST: u64 = 950_000_000;
    let null = timed("test", 1, &[])?;
    let below = format!("/dev/{}", null.name);
    let table = format!(
        "0 {SECTOR} linear {below} 0;{SECTOR} 8 delay {below} {SECTOR} {};{} 80000 linear {below} {}",
        DELAY / 1_000_000,
        SECTOR + 8,
        SECTOR + 8
    );
    let slow = Mapped::new("slow", &table)?;
    let disk = slow.disk()?;
    let (bios, slowest) = beside.run(|| {
        let counters = Counters::of(&[&disk])?;
        let [reads, one] = [(0, 400), (SECTOR * 512, 1)].map(|(offset, ios)| {
            let path = slow.path();
            fio(&format!(
                "--filename={path} {READS} --offset={offset} --size=32M --number_ios={ios} --rw=read"
            ))
        });
        Ok((counters.since()?[1], slowest(&reads?)?.max(slowest(&one?)?)))
    })?;
    ensure!(bios >= 401 && slowest >= LEAST, "{bios} bios, {slowest} ns");
    Ok(vec![
        Fact::exactly(Bios, bios),
        Fact::between(SlowestBio, LEAST, slowest),
        Fact::exactly(SlowSector, SECTOR),
    ])
}

fn split(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = disks::nvme()?;
    let requests = beside.run(|| {
        let counters = Counters::of(&[&disk])?;
        fio(&format!("--filename=/dev/{disk} {READS} --rw=read --bs=4M --size=80M"))?;
        Ok(counters.since()?[0])
    })?;
    ensure!(requests > 80, "{requests} requests: nothing was split");
    Ok(vec![Fact::exactly(Requests, requests)])
}

/// A plug collects 32 neighbouring writes, and the block layer merges them.
fn merge(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = disks::virtio()?;
    let [requests, bios, _] = beside.run(|| {
        let counters = Counters::of(&[&disk])?;
        let report = fio(&format!(
            "--filename=/dev/{disk} --rw=write --bs=4k --direct=1 --ioengine=libaio --thread --size=8M \
             --iodepth=32 --iodepth_batch=32 --iodepth_batch_complete_min=32"
        ))?;
        let since = counters.since()?;
        let writes = report["write"]["total_ios"].as_u64();
        ensure!(writes == Some(since[1]), "fio wrote {writes:?} times, and there are {since:?}");
        Ok(since)
    })?;
    ensure!(requests * 4 < bios, "{requests} requests of {bios} bios: few were merged");
    Ok(ios(bios, requests))
}

/// scsi_debug fails every tenth command in a way that lets the kernel try again.
fn requeue(beside: &mut Beside) -> Result<Vec<Fact>> {
    tried_again(beside, "0x10")
}

/// scsi_debug transfers a part of every tenth command, and leaves the rest to another one.
fn partial(beside: &mut Beside) -> Result<Vec<Fact>> {
    tried_again(beside, "0x100")
}

fn tried_again(beside: &mut Beside, opts: &str) -> Result<Vec<Fact>> {
    let options = format!("ndelay=20000000 opts={opts} every_nth=10 dev_size_mb=64");
    let disk = ScsiDebug::new(&options)?;
    let commands = || -> Result<u64> {
        let path = format!("/sys/block/{}/device/iodone_cnt", disk.name);
        let text = fs::read_to_string(path)?;
        Ok(u64::from_str_radix(text.trim().trim_start_matches("0x"), 16)?)
    };
    let (requests, commands) = beside.run(|| {
        let (counters, before) = (Counters::of(&[&disk.name])?, commands()?);
        fio(&format!(
            "--filename=/dev/{} {READS} --rw=read --bs=64k --number_ios=60 --size=4M",
            disk.name
        ))?;
        Ok((counters.since()?[0], commands()? - before))
    })?;
    ensure!(requests >= 60 && commands >= requests + 5, "{requests} requests, {commands} commands");
    Ok(vec![Fact::exactly(Requests, requests).with_again(commands - requests)])
}

/// The block layer keeps no counters of this disk: fio counts.
fn iostats_off(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = timed("test", 1, &[])?;
    fs::write(format!("/sys/block/{}/queue/iostats", disk.name), "0")?;
    let reads = beside.run(|| {
        let counters = Counters::of(&[&disk.name])?;
        let report =
            fio(&format!("--filename=/dev/{} {READS} --iodepth=8 --number_ios=400", disk.name))?;
        ensure!(counters.since()?[0] == 0, "the kernel still counts");
        total(&report)
    })?;
    Ok(ios(reads, reads))
}

/// Bios of a device that device mapper or md makes, by fio's count, and requests of the disks below. The
/// counters of a RAID count some bios twice on newer kernels.
fn stacked(beside: &mut Beside, above: &Mapped, below: &[&str], load: &str) -> Result<Vec<Fact>> {
    let (reads, requests) = beside.run(|| {
        let bottom = Counters::of(below)?;
        let report = fio(&format!("--filename={} {READS} {load}", above.path()))?;
        Ok((total(&report)?, bottom.since()?[0]))
    })?;
    ensure!(reads >= 640 && requests >= reads, "{reads} reads, {requests} requests");
    Ok(vec![Fact::exactly(Bios, reads), Fact::exactly(Requests, requests)])
}

fn dm_linear(beside: &mut Beside) -> Result<Vec<Fact>> {
    let virtio = disks::virtio()?;
    let linear = Mapped::new("lin", &format!("0 262144 linear /dev/{virtio} 0"))?;
    stacked(beside, &linear, &[&virtio], "--iodepth=8 --numjobs=4 --number_ios=250 --size=100M")
}

/// 32 MiB of a device, encrypted.
fn crypt(below: &str) -> Result<Mapped> {
    shell("modprobe -a dm_crypt xts || true")?;
    let key = "0123456789abcdef".repeat(8);
    Mapped::new("crypt", &format!("0 65536 crypt aes-xts-plain64 {key} 0 {below} 0"))
}

/// 32 MiB of two disks, mirrored; before it what is below, to be dropped last.
fn mirror(virtio: &str, nvme: &str) -> Result<([Mapped; 2], Mapped)> {
    shell("modprobe -a dm_raid raid1 || true")?;
    let slice =
        |name: &str, disk: &str| Mapped::new(name, &format!("0 65536 linear /dev/{disk} 0"));
    let (a, b) = (slice("a", virtio)?, slice("b", nvme)?);
    let table = format!("0 65536 raid raid1 2 0 nosync 2 - {} - {}", a.path(), b.path());
    let raid = Mapped::new("raid", &table)?;
    Ok(([a, b], raid))
}

/// What was read is decrypted by the kernel's workers: its bios complete in a task.
fn dm_crypt(beside: &mut Beside) -> Result<Vec<Fact>> {
    let virtio = disks::virtio()?;
    let crypt = crypt(&format!("/dev/{virtio}"))?;
    stacked(beside, &crypt, &[&virtio], "--iodepth=4 --numjobs=16 --number_ios=40 --size=32M")
}

fn raid1(beside: &mut Beside) -> Result<Vec<Fact>> {
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    let (_below, raid) = mirror(&virtio, &nvme)?;
    let load = "--iodepth=4 --numjobs=8 --number_ios=80 --size=32M";
    stacked(beside, &raid, &[&virtio, &nvme], load)
}

fn crypt_on_raid1(beside: &mut Beside) -> Result<Vec<Fact>> {
    let (virtio, nvme) = (disks::virtio()?, disks::nvme()?);
    let (_below, raid) = mirror(&virtio, &nvme)?;
    let crypt = crypt(&raid.path())?;
    let load = "--iodepth=4 --numjobs=8 --number_ios=80 --size=32M";
    stacked(beside, &crypt, &[&virtio, &nvme], load)
}

/// Two disks that are read at the same sectors at the same time, one of them slow.
fn two_disks(beside: &mut Beside) -> Result<Vec<Fact>> {
    let (fast, slow) = (timed("fast", 2, &[])?, timed("slow", 250, &[])?);
    let reads = |disk: &NullBlk, reads: u64| {
        fio_command(&format!(
            "--filename=/dev/{} {READS} --rw=read --iodepth=4 --number_ios={reads} --size=80k",
            disk.name
        ))
    };
    let (requests, slowest) = beside.run(|| {
        let both = [fast.name.as_str(), slow.name.as_str()];
        let counters = Counters::of(&both)?;
        let fast = format!("for i in 1 2 3 4 5 6 7 8; do {} >/dev/null; done", reads(&fast, 20));
        let report = shell(&format!("{fast} & {}; wait $!", reads(&slow, 20)))?;
        Ok((counters.since()?[0], slowest(&fio_report(&report)?)?))
    })?;
    ensure!(requests >= 180, "{requests} requests");
    Ok(vec![Fact::exactly(Requests, requests), Fact::between(SlowestRequest, 250_000_000, slowest)])
}

/// A bio that only flushes is a write for the counters, and reaches the driver as a request of the block
/// layer's own, for all that ask at the time. Who counts either is right.
fn flush(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = disks::virtio()?;
    let (requests, asked, flushes) = beside.run(|| {
        let counters = Counters::of(&[&disk])?;
        let report = fio(&format!(
            "--filename=/dev/{disk} --rw=write --bs=4k --direct=1 --ioengine=libaio --thread --fsync=4 \
             --number_ios=200 --size=128M"
        ))?;
        let [requests, _, flushes] = counters.since()?;
        Ok((requests, report["sync"]["total_ios"].as_u64().context("no fsync")?, flushes))
    })?;
    ensure!(flushes >= 20 && asked >= 20, "{flushes} flushes, {asked} asked for");
    Ok(vec![Fact::between(Requests, requests - asked, requests + flushes)])
}

fn discard(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = timed("test", 1, &[("memory_backed", "1"), ("discard", "1"), ("size", "64")])?;
    let requests = beside.run(|| {
        let counters = Counters::of(&[&disk.name])?;
        shell(&format!(
            "for i in 0 1 2 3 4 5 6 7 8 9; do blkdiscard -f -o $((i * 1048576)) -l 1048576 /dev/{}; done",
            disk.name
        ))?;
        Ok(counters.since()?[0])
    })?;
    ensure!(requests == 10, "{requests} requests of ten discards");
    Ok(ios(requests, requests))
}

fn io_uring(beside: &mut Beside) -> Result<Vec<Fact>> {
    let load = "--ioengine=io_uring --iodepth=16 --numjobs=4 --number_ios=250 --size=128M";
    plain(beside, &disks::virtio()?, load, 1000)
}

/// The application asks the driver whether an I/O has completed: there is no interrupt.
fn polled(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = NullBlk::new(&[("irqmode", "0"), ("submit_queues", "2"), ("poll_queues", "1")])?;
    let polls = fs::read_to_string(format!("/sys/block/{}/queue/io_poll", disk.name))?;
    ensure!(polls.trim() == "1", "{} does not poll: {polls}", disk.name);
    let load = "--ioengine=io_uring --hipri=1 --iodepth=8 --numjobs=2 --number_ios=400";
    plain(beside, &disk.name, load, 800)
}

/// fio's writes reach the disk in the kernel's own threads, while dd reads.
fn writeback(beside: &mut Beside) -> Result<Vec<Fact>> {
    const READS_OF_DD: u64 = 100;
    let mounted = Mounted::new()?;
    beside.run(|| {
        shell(&format!(
            "fio --name=writer --filename=/mnt/data/written --rw=write --bs=64k --size=8M --ioengine=psync \
               --fsync_on_close=1 --thread --output-format=terse >/dev/null &
             dd if=/dev/{} of=/dev/null bs=4k count={READS_OF_DD} iflag=direct status=none
             wait $!",
            mounted.disk
        ))
    })?;
    Ok(vec![Fact::exactly(BiosOfDd, READS_OF_DD)])
}

/// One request at a time, which takes 20 ms, and eight bios: seven of them wait in the scheduler.
fn one_tag(beside: &mut Beside) -> Result<Vec<Fact>> {
    const TIMER: u64 = 20_000_000;
    let disk = timed("test", 20, &[("hw_queue_depth", "1"), ("submit_queues", "1")])?;
    shell(&format!(
        "modprobe -q mq-deadline; cd /sys/block/{}/queue; echo mq-deadline >scheduler; echo 64 >nr_requests",
        disk.name
    ))?;
    let (requests, slowest) = beside.run(|| {
        let counters = Counters::of(&[&disk.name])?;
        let report = fio(&format!(
            "--filename=/dev/{} {READS} --iodepth=8 --number_ios=40 --size=16M",
            disk.name
        ))?;
        Ok((counters.since()?[0], slowest(&report)?))
    })?;
    ensure!(slowest >= 4 * TIMER, "{slowest} ns: nothing has waited");
    Ok(vec![
        Fact::exactly(Requests, requests),
        Fact::between(QueuedShare, 50, 99),
        Fact::between(SlowestBio, 4 * TIMER, slowest),
    ])
}

/// A cgroup that may read 20 times a second: its bios wait before they have a request.
fn io_max(beside: &mut Beside) -> Result<Vec<Fact>> {
    const READS: u64 = 20;
    let disk = timed("test", 1, &[])?;
    let cgroup = throttle(&disk.name)?;
    let report = beside.run(|| {
        let fio = fio_command(&format!(
            "--filename=/dev/{} --rw=randread --bs=4k --direct=1 --ioengine=psync --thread \
             --number_ios={READS} --size=16M",
            disk.name
        ));
        fio_report(&shell(&format!("sh -c 'echo $$ >{cgroup}/cgroup.procs; exec {fio}'"))?)
    });
    shell(&format!("rmdir {cgroup}"))?;
    let report = report?;
    let mean = report["read"]["lat_ns"]["mean"].as_f64().context("no mean")? as u64;
    ensure!(mean >= 25_000_000, "{mean} ns: nothing was throttled");
    // fio reads one after the other: half of the mean is far below the slowest one.
    Ok(vec![
        Fact::exactly(Bios, total(&report)?),
        Fact::between(SlowestThrottled, mean / 2, slowest(&report)?),
        Fact::between(QueuedShare, 50, 100),
    ])
}

/// What mincore() said of these reads, and what other processes may add to it.
fn resident(reads: &[Read]) -> Vec<Fact> {
    let (hit, miss) = (reads.iter().map(|r| r.hit).sum(), reads.iter().map(|r| r.miss).sum());
    let others = |pages: u64| 64 + pages / 20;
    vec![
        Fact::exactly(Hits, hit).with_others(others(hit)),
        Fact::exactly(Misses, miss).with_others(others(miss)),
    ]
}

/// A file of 16 MiB without a page in memory, or with all.
fn file(mounted: &Mounted, warm: bool) -> Result<Watched> {
    let file = new_file(mounted, "truth", 16 * MIB)?;
    if warm {
        file.read_all(MIB)?;
    }
    Ok(file)
}

fn cache_cold(beside: &mut Beside) -> Result<Vec<Fact>> {
    let mounted = Mounted::new()?;
    let file = file(&mounted, false)?;
    file.advise(libc::POSIX_FADV_RANDOM, 0, 0)?;
    let reads = beside.run(|| file.read_all(64 << 10))?;
    let hits: u64 = reads.iter().map(|read| read.hit).sum();
    ensure!(hits == 0, "{hits} pages were resident");
    Ok(resident(&reads))
}

fn cache_warm(beside: &mut Beside) -> Result<Vec<Fact>> {
    let mounted = Mounted::new()?;
    let file = file(&mounted, true)?;
    let reads = beside.run(|| file.read_all(64 << 10))?;
    let misses: u64 = reads.iter().map(|read| read.miss).sum();
    ensure!(misses == 0, "{misses} pages were not resident");
    Ok(resident(&reads))
}

fn cache_random(beside: &mut Beside) -> Result<Vec<Fact>> {
    let mounted = Mounted::new()?;
    let file = file(&mounted, false)?;
    file.advise(libc::POSIX_FADV_RANDOM, 0, 0)?;
    let mut seed = 1;
    let reads = beside.run(|| {
        let page = |seed: &mut u64| random(seed) % (file.size / page_size()) * page_size();
        (0..2000).map(|_| file.read(page(&mut seed), page_size())).collect::<Result<Vec<_>>>()
    })?;
    Ok(resident(&reads))
}

/// Readahead makes large folios on 7.2, where ext4 takes them; a read of a page of one is a hit of a page.
fn cache_folios(beside: &mut Beside) -> Result<Vec<Fact>> {
    let mounted = Mounted::new()?;
    let file = file(&mounted, false)?;
    let reads = beside.run(|| Ok([file.read_all(MIB)?, file.read_all(page_size())?].concat()))?;
    let large = file.pages_of_large_folios()?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(large > 0 || !release.starts_with("7."), "no large folio holds this file");
    Ok(resident(&reads))
}

/// Pages that are overwritten are not read.
fn cache_writes(beside: &mut Beside) -> Result<Vec<Fact>> {
    let mounted = Mounted::new()?;
    let file = file(&mounted, true)?;
    let writer = fs::OpenOptions::new().write(true).open(&file.path)?;
    let (writer, is_read) = (&writer, &AtomicBool::new(false));
    let (round, rounds) = mpsc::channel();
    let reads = beside.run(|| {
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
    })?;
    Ok(resident(&reads))
}

/// Faults of a mapped file are no reads; a tool that counts them says so.
fn cache_mmap(beside: &mut Beside) -> Result<Vec<Fact>> {
    let mounted = Mounted::new()?;
    let file = file(&mounted, true)?;
    let reads = beside.run(|| {
        file.touch(1024);
        file.read_all(64 << 10)
    })?;
    Ok(resident(&reads))
}

fn sizes(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = disks::virtio()?;
    let [small, large] = beside.run(|| {
        let read = |options: &str| -> Result<u64> {
            let counters = Counters::of(&[&disk])?;
            fio(&format!("--filename=/dev/{disk} {READS} {options} --iodepth=8 --size=128M"))?;
            Ok(counters.since()?[0])
        };
        Ok([read("--bs=4k --number_ios=300")?, read("--bs=64k --number_ios=150")?])
    })?;
    ensure!(small >= 300 && large >= 150, "{small} small, {large} large");
    Ok(vec![Fact::exactly(Requests, small + large), Fact::exactly(LargeRequests, large)])
}

/// The sectors of a partition count from its start, those of the disk from the disk's.
fn partition(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = timed("test", 1, &[("memory_backed", "1"), ("size", "64")])?;
    let name = &disk.name;
    shell(&format!(
        "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{name}; \
         partx -u /dev/{name} || true"
    ))?;
    let partition = disks::partition(name);
    // The kernel counts a bio of a partition for the disk, too.
    let [requests, bios, _] = beside.run(|| {
        let counters = Counters::of(&[name])?;
        fio(&format!("--filename=/dev/{partition} {READS} --iodepth=4 --number_ios=300"))?;
        counters.since()
    })?;
    ensure!(requests >= 300, "{requests} requests");
    Ok(ios(bios, requests))
}

/// Two of the same tool at once: each of them measures all.
fn twice(beside: &mut Beside) -> Result<Vec<Fact>> {
    beside.copies(2);
    plain(beside, &disks::virtio()?, "--iodepth=4 --numjobs=2 --number_ios=200 --size=128M", 400)
}

/// Processes that end while the readahead that they have caused is in flight.
fn exits(beside: &mut Beside) -> Result<Vec<Fact>> {
    let disk = timed("test", 50, &[])?;
    let [requests, ..] = beside.run(|| {
        let counters = Counters::of(&[&disk.name])?;
        let read = format!("dd if=/dev/{} of=/dev/null bs=64k count=1 status=none", disk.name);
        for at in 0..10 {
            let dd = Running::bash(&format!("exec {read} skip={}", at * 64))?.end()?;
            ensure!(dd.code == Some(0), "{dd:?}");
        }
        counters.since()
    })?;
    ensure!(requests > 10, "{requests} requests: nothing was read ahead");
    Ok(vec![Fact::exactly(Requests, requests)])
}
