//! Loads for the judges of the exercises: a bio of every kind, and two CPUs that collide.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    disks::{self, Mapped, NullBlk},
    ftrace::{Event, Ftrace, Hook},
    run::{Running, shell, wait_until},
};

/// A disk that takes 1 ms for a request of at most 32 KiB, fails at one place, and has one partition.
pub struct Mixed {
    pub disk: NullBlk,
    /// `nullb0p1`, or `test1`.
    pub partition: String,
    /// Another disk, which is read once. Found beforehand: who asks for a serial number sends a bio.
    other: String,
}

/// What a load has done.
pub struct Did {
    /// Calls of submit_bio(), by ftrace.
    pub submitted: Vec<Event>,
    /// Parts beyond the first one of bios that the block layer has split, by the disk's counters.
    pub parts: u64,
}

/// A tracer of what a bio begins and ends with: to make one takes a second.
pub fn bios() -> Result<Ftrace> {
    Ftrace::new(&[Hook::Function("submit_bio"), Hook::Function("bio_endio")])
}

impl Mixed {
    /// Bios of the whole disk, a discard and a read that fails among them, and how many of them the block
    /// layer splits.
    pub const OF_DISK: u64 = 27;
    pub const SPLIT: u64 = 5;
    /// Bios of the partition, with a flush.
    pub const OF_PARTITION: u64 = 22;

    /// `directory` is the disk's in configfs: two disks need two.
    pub fn new(directory: &'static str) -> Result<Mixed> {
        let disk = NullBlk::named(
            directory,
            &[
                ("size", "64"),
                ("memory_backed", "1"),
                ("discard", "1"),
                ("badblocks", "+100000-100007"),
                ("irqmode", "2"),
                ("completion_nsec", "1000000"),
                ("submit_queues", "2"),
            ],
        )?;
        let name = &disk.name;
        fs::write(format!("/sys/block/{name}/queue/max_sectors_kb"), "32")?;
        shell(&format!(
            "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{name}; \
             partx -u /dev/{name} || true"
        ))?;
        let partition = disks::partition(name);
        ensure!(Path::new("/dev").join(&partition).exists(), "{name} has no partition");
        Ok(Mixed { disk, partition, other: disks::data()? })
    }

    /// Reads of the disk on one CPU, and writes to the partition on the other one; a read that fails, a
    /// discard, and one of another disk by a thread that is not its process's first; reads that the block
    /// layer splits in three; at last, with nothing beside it, a write and a flush.
    pub fn run(&self) -> Result<Did> {
        self.run_under(&bios()?)
    }

    /// The same, with a tracer of [`bios`] that other loads use, too.
    pub fn run_under(&self, ftrace: &Ftrace) -> Result<Did> {
        let before = disks::bios(&self.disk.name)?;
        let (disk, partition) = (&self.disk.name, &self.partition);
        shell(&format!(
            "direct='iflag=direct status=none'
             taskset -c 0 dd if=/dev/{disk} of=/dev/null bs=4k count=20 $direct &
             taskset -c 1 dd if=/dev/zero of=/dev/{partition} bs=4k count=20 oflag=direct \
               conv=notrunc status=none
             wait $!
             if dd if=/dev/{disk} of=/dev/null bs=4k count=1 skip=12500 $direct 2>&1; then exit 1; fi
             blkdiscard --force --offset 40MiB --length 1MiB /dev/{disk}
             dd if=/dev/{disk} of=/dev/null bs=96k count={} $direct
             dd if=/dev/zero of=/dev/{partition} bs=4k count=1 oflag=direct conv=notrunc,fsync \
               status=none",
            Self::SPLIT
        ))?;
        let mut other = Direct::open(&self.other)?;
        thread::scope(|scope| scope.spawn(|| other.read(4096, 0)).join().expect("a reader"))?;
        let done = disks::bios(disk)? - before;
        let events = ftrace.events()?.into_iter();
        let submitted: Vec<Event> = events.filter(|event| event.name == "submit_bio").collect();
        let bios = submitted.len() as u64;
        ensure!(bios == Self::OF_DISK + Self::OF_PARTITION + 1, "the load did {bios} bios");
        // The disk has no cache: the flush does not reach it. Its counters have no discards.
        let parts = (done + 3).checked_sub(bios).context("fewer requests than bios")?;
        ensure!(parts == 2 * Self::SPLIT, "{parts} parts: nothing was split in three");
        Ok(Did { submitted, parts })
    }
}

/// A disk of 3 TiB, of device mapper, that takes more than 2^32 ns for each bio.
pub struct Long {
    mapped: Mapped,
    _below: NullBlk,
}

impl Long {
    /// What it takes at least: dm-delay counts coarse ticks.
    pub const NS: u64 = 4_350_000_000;
    /// What is written.
    pub const SECTOR: u64 = (1 << 32) + 8000;

    pub fn new() -> Result<Long> {
        let below = NullBlk::named("long", &[("size", "3145728")])?;
        let table = format!("0 {0} delay /dev/{1} 0 4400 /dev/{1} 0 4400", 3_u64 << 31, below.name);
        Ok(Long { mapped: Mapped::new("long", &table)?, _below: below })
    }

    /// `dm-0`.
    pub fn disk(&self) -> Result<String> {
        self.mapped.disk()
    }

    /// Writes once, to stay (REQ_FUA), beside what comes next.
    pub fn write(&self) -> Result<Running> {
        let disk = self.disk()?;
        let fio = Running::bash(&format!(
            "exec fio --name=t --filename=/dev/{disk} --ioengine=libaio --direct=1 --sync=dsync --thread \
             --rw=write --bs=4k --number_ios=1 --size=1M --offset={} --output-format=terse",
            Self::SECTOR * 512
        ))?;
        // Reads, writes and flushes on their way.
        wait_until("the long write", || Ok(shell("dmsetup status long")?.contains("delay 0 1 0")))?;
        Ok(fio)
    }
}

/// The line about such a bio, in the form of stage 05.
pub fn bio_info(disk: &str, sector: u64) -> Result<String> {
    Ok(format!("Bio Info : Sector ({sector}) of {disk} ({})", disks::numbers(disk)?))
}

/// Reads of 512 KiB that the block layer splits in 64, until the last part of one was not the last to
/// complete: then bio_endio() is called for the whole while it has other parts in flight. The disk must
/// not complete in order; virtio's completes as QEMU's threads do.
pub fn split_out_of_order(disk: &str, ftrace: &Ftrace) -> Result<Did> {
    let largest = format!("/sys/block/{disk}/queue/max_sectors_kb");
    let usual = fs::read_to_string(&largest)?;
    fs::write(&largest, "8")?;
    let did = until_out_of_order(disk, ftrace);
    fs::write(&largest, usual.trim())?;
    did
}

fn until_out_of_order(disk: &str, ftrace: &Ftrace) -> Result<Did> {
    let before = disks::bios(disk)?;
    let mut direct = Direct::open(disk)?;
    let mut submitted = Vec::new();
    let mut out_of_order = false;
    while !out_of_order {
        ensure!(submitted.len() < 400, "{disk} completes in order: the test does not test");
        // ftrace's buffers take longer than the reads.
        for _ in 0..8 {
            direct.read(512 << 10, 0)?;
        }
        let mut last: Option<(Event, String)> = None;
        let mut ended = |read: Option<(Event, String)>| {
            if let Some((read, end)) = read {
                out_of_order |= read.argument != end;
                submitted.push(read);
            }
        };
        for event in ftrace.events()? {
            if event.name == "submit_bio" {
                ended(last.take());
                last = Some((event, String::new()));
            } else if let Some((_, end)) = last.as_mut().filter(|_| event.interrupt != '.') {
                // What ends in a task is another bio, of device mapper.
                *end = event.argument;
            }
        }
        ended(last.take());
        ensure!(submitted.len() % 8 == 0, "{} bios of 8 reads at a time", submitted.len());
    }
    let parts = disks::bios(disk)? - before - submitted.len() as u64;
    Ok(Did { submitted, parts })
}

/// The event lines of a function, `submit_bio(` or `bio_endio (`: the times for each address. Whether they
/// come by the trace pipe or by a ring buffer is the program's affair.
pub fn calls(output: &str, function: &str) -> Result<BTreeMap<String, Vec<u64>>> {
    let mut calls = BTreeMap::<_, Vec<u64>>::new();
    for line in output.lines() {
        let Some((_, call)) = line.split_once(&format!("{function}bio=")) else { continue };
        let (bio, time) = call.split_once(") called: ").with_context(|| format!("odd: {line}"))?;
        let time = time.trim().parse().with_context(|| format!("odd: {line}"))?;
        calls.entry(bio.to_owned()).or_default().push(time);
    }
    calls.values_mut().for_each(|times| times.sort_unstable());
    Ok(calls)
}

/// Checks that the lines of a function are the calls that ftrace saw: as many of each bio, at about
/// the same times.
pub fn same_calls(output: &str, function: &str, events: &[Event]) -> Result<()> {
    let printed = calls(output, function)?;
    let number: usize = printed.values().map(Vec::len).sum();
    let what = format!("{function}bio=0x…) called: …");
    // Without the output, which asks whether anything was read or written.
    ensure!(
        number > 0 || events.is_empty(),
        "no line `{what}`, and ftrace saw {} calls",
        events.len()
    );
    ensure!(
        number == events.len(),
        "{number} lines `{what}`, and ftrace saw {} calls: {output}",
        events.len()
    );
    let mut seen = BTreeMap::<&str, Vec<u64>>::new();
    for event in events {
        seen.entry(&event.argument).or_default().push(event.time);
    }
    for (bio, times) in &seen {
        let yours = printed.get(*bio).map_or(&[][..], Vec::as_slice);
        ensure!(
            yours.len() == times.len(),
            "{} lines `{what}` with the bio {bio}, and ftrace saw {} calls with it: {output}",
            yours.len(),
            times.len()
        );
        let far =
            yours.iter().zip(times).find(|(yours, time)| yours.abs_diff(**time) > 500_000_000);
        ensure!(
            far.is_none(),
            "a call with the bio {bio} was at another time (yours, ftrace's): {far:?}: {output}"
        );
    }
    Ok(())
}

/// A file to be read past the page cache, one bio for each read.
pub struct Direct {
    file: File,
    buffer: Vec<u8>,
}

impl Direct {
    pub fn open(disk: &str) -> Result<Direct> {
        let path = format!("/dev/{disk}");
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
        Ok(Direct { file: file.context(path)?, buffer: vec![0; 4096 + (512 << 10)] })
    }

    pub fn read(&mut self, bytes: usize, offset: u64) -> Result<()> {
        let start = self.buffer.as_ptr().align_offset(4096);
        self.file.read_exact_at(&mut self.buffer[start..start + bytes], offset).context("read")
    }
}

/// A disk in memory, whose bios complete at once, in the call that submits them. Gone when dropped.
pub struct Ram;

impl Ram {
    pub const NAME: &str = "ram0";

    pub fn new() -> Result<Ram> {
        shell("modprobe brd rd_nr=1 rd_size=4096")?;
        Ok(Ram)
    }

    /// Reads 512 bytes at a time on both CPUs at once: what is not added atomically gets lost. Returns
    /// the number of reads.
    pub fn race(&self, time: Duration) -> Result<u64> {
        let end = Instant::now() + time;
        let reader = |cpu: usize| -> Result<u64> {
            let mut only = rustix::thread::CpuSet::new();
            only.set(cpu);
            rustix::thread::sched_setaffinity(None, &only)?;
            let mut disk = Direct::open(Self::NAME)?;
            let mut reads = 0;
            while Instant::now() < end {
                for _ in 0..100 {
                    disk.read(512, 0)?;
                }
                reads += 100;
            }
            Ok(reads)
        };
        thread::scope(|scope| {
            let readers = [0, 1].map(|cpu| scope.spawn(move || reader(cpu)));
            readers.into_iter().map(|reader| reader.join().expect("a reader")).sum()
        })
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        shell("rmmod brd").ok();
    }
}
