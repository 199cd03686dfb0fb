//! Loads for the judges of the exercises: a bio of every kind, and two CPUs that collide.

use crate::prelude::*;

/// A disk that takes 1 ms for a request of at most 32 KiB, fails at one place, and has one partition.
pub struct Mixed {
    /// One whose writes are noted on the partition, see [`noting`]; the first to go.
    noting: Mapped,
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

/// A disk of device mapper that notes on this other one where each write to a new place goes: by a
/// write with REQ_PREFLUSH and REQ_FUA, as file systems write their journals.
pub fn noting(name: &str, on: &str) -> Result<Mapped> {
    shell("modprobe dm_snapshot")?;
    Mapped::new(name, &format!("0 8 snapshot /dev/{} /dev/{on} P 8", disks::virtio()?))
}

/// The command that writes there for the first time: two bios, beside a clone that ends twice.
pub fn writes_a_note(noting: &Mapped) -> String {
    format!("dd if=/dev/zero of={} bs=4k count=1 oflag=direct status=none", noting.path())
}

/// A tracer of what a bio begins and ends with: to make one takes a second.
pub fn bios() -> Result<Ftrace> {
    Ftrace::new(&[Hook::Function("submit_bio"), Hook::Function("bio_endio")])
}

impl Mixed {
    /// Bios of the whole disk, with a discard and a read that fails; how many the block layer splits.
    pub const OF_DISK: u64 = 27;
    pub const SPLIT: u64 = 5;
    /// Bios of the partition, with a flush and a note; and of a clone there, how many ends.
    pub const OF_PARTITION: u64 = 23;
    pub const ENDS_OF_CLONE: u64 = 2;

    /// `directory` is the disk's in configfs: two disks need two.
    pub fn new(directory: &'static str) -> Result<Mixed> {
        let more = "size=64 memory_backed=1 discard=1 badblocks=+100000-100007";
        let disk = NullBlk::timer(directory, 1, more)?;
        let name = &disk.name;
        fs::write(format!("/sys/block/{name}/queue/max_sectors_kb"), "32")?;
        let partition = disks::partitioned(name)?;
        ensure!(Path::new("/dev").join(&partition).exists(), "{name} has no partition");
        let noting = noting(&format!("{directory}-notes"), &partition)?;
        Ok(Mixed { disk, partition, noting, other: disks::data()? })
    }

    /// Reads of the disk on one CPU, and writes to the partition on the other one; a read that fails, a
    /// discard, and one of another disk by a thread that is not its process's first; reads that the block
    /// layer splits in three; with nothing beside it, a write that is to stay (REQ_FUA), and a flush; a note.
    /// Under a tracer of [`bios`].
    pub fn run(&self, ftrace: &Ftrace) -> Result<Did> {
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
             dd if=/dev/zero of=/dev/{partition} bs=4k count=1 oflag=direct,dsync conv=notrunc \
               status=none
             {}",
            Self::SPLIT,
            writes_a_note(&self.noting)
        ))?;
        let mut other = Direct::open(&self.other)?;
        thread::scope(|scope| scope.spawn(|| other.read(4096, 0)).join().expect("a reader"))?;
        let done = disks::bios(disk)? - before;
        let events = ftrace.events()?.into_iter();
        let submitted: Vec<Event> = events.filter(|event| event.name == "submit_bio").collect();
        let bios = submitted.len() as u64;
        ensure!(bios == Self::OF_DISK + Self::OF_PARTITION + 2, "the load did {bios} bios");
        // The disk has no cache: the flush does not reach it. Its counters have no discards.
        let parts = (done + 3).checked_sub(bios).context("fewer requests than bios")?;
        ensure!(parts == 2 * Self::SPLIT, "{parts} parts: nothing was split in three");
        Ok(Did { submitted, parts })
    }
}

/// A disk of 3 TiB, of device mapper, that takes more than 2^32 ns for each bio.
pub struct Long {
    pub mapped: Mapped,
    _below: NullBlk,
}

impl Long {
    /// What it takes at least: dm-delay counts coarse ticks.
    pub const NS: u64 = 4_350_000_000;
    /// What is written.
    pub const SECTOR: u64 = (1 << 32) + 8000;

    pub fn new() -> Result<Long> {
        let below = NullBlk::new("long", "size=3145728")?;
        let table = format!("0 {0} delay /dev/{1} 0 4400 /dev/{1} 0 4400", 3_u64 << 31, below.name);
        Ok(Long { mapped: Mapped::new("long", &table)?, _below: below })
    }

    /// Writes once, to stay (REQ_FUA), beside what comes next.
    pub fn write(&self) -> Result<Running> {
        let disk = self.mapped.disk()?;
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

/// A disk with a checksum beside each sector: the kernel verifies what it has read, and then ends the bio once
/// more. None where the kernel has no module for it.
pub struct Checksummed(Option<ScsiDebug>);

/// What [`Checksummed`] has done: so many bios, of which so many are reads, which were verified.
pub struct Verified {
    pub bios: u64,
    pub reads: u64,
}

impl Checksummed {
    pub fn new() -> Result<Checksummed> {
        match ScsiDebug::new("dif=1 dix=1 dev_size_mb=16") {
            Ok(disk) => {
                let verify = format!("/sys/block/{}/integrity/read_verify", disk.name);
                let verify = fs::read_to_string(verify)?;
                ensure!(verify.trim() == "1", "nothing is verified: {verify}");
                Ok(Checksummed(Some(disk)))
            }
            Err(error) if error.is::<NotJudged>() => {
                judged_weakly("without a disk that has checksums");
                Ok(Checksummed(None))
            }
            Err(error) => Err(error),
        }
    }

    /// Writes, and reads that. Under a tracer of [`bios`].
    pub fn run(&self, ftrace: &Ftrace) -> Result<Verified> {
        const READS: u64 = 4;
        let Some(ScsiDebug { name }) = &self.0 else { return Ok(Verified { bios: 0, reads: 0 }) };
        ftrace.events()?;
        shell(&format!(
            "dd if=/dev/zero of=/dev/{name} bs=4k count={READS} oflag=direct conv=notrunc status=none
             {}",
            reads(name, READS as u32)
        ))?;
        let idle = || Ok(disks::in_flight(name)? == 0);
        wait_until("the last bio is verified", idle)?;
        let events = ftrace.events()?;
        let bios = events.iter().filter(|event| event.name == "submit_bio").count() as u64;
        ensure!(bios == 2 * READS, "{bios} bios of {READS} writes and reads");
        Ok(Verified { bios, reads: READS })
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
    let _small = Setting::new(format!("/sys/block/{disk}/queue/max_sectors_kb"), "8")?;
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

/// Takes the addresses, in the map `starts`, that this thread's next bio may have (on its stack, whose start
/// changes by up to 1 KiB), until one has one of them. Returns how many are taken, and the number of reads.
pub fn take_an_address(disk: &str, ftrace: &Ftrace, maps: &Maps) -> Result<(u64, u64)> {
    let mut direct = Direct::open(disk)?;
    let mut read = || -> Result<u64> {
        direct.read(4096, 0)?;
        let events = ftrace.events()?;
        let submitted: Vec<_> = events.iter().filter(|event| event.name == "submit_bio").collect();
        ensure!(submitted.len() == 1, "{} bios of a read", submitted.len());
        submitted[0].address()
    };
    let near = read()?;
    let taken: Vec<u64> = (-64..=64).map(|n| near.wrapping_add_signed(16 * n)).collect();
    insert(&maps.named("starts")?[0], &taken)?;
    let mut reads = 2;
    while !taken.contains(&read()?) {
        reads += 1;
        ensure!(reads < 20, "no read has its bio near {near:#x}: the test does not test");
    }
    Ok((taken.len() as u64, reads))
}

/// The event lines of a function, `submit_bio(` or `bio_endio (`: the addresses and the times, sorted. Whether
/// they come by the trace pipe or by a ring buffer is the program's affair.
pub fn calls(output: &str, function: &str) -> Result<Vec<(String, u64)>> {
    let mut calls = Vec::new();
    for line in output.lines() {
        let Some((_, call)) = line.split_once(&format!("{function}bio=")) else { continue };
        let odd = || format!("not of the form `{function}bio=0x…) called: TIME`: {line}");
        let (bio, time) = call.split_once(") called: ").with_context(odd)?;
        let time = time.trim().parse().with_context(odd)?;
        calls.push((bio.to_owned(), time));
    }
    calls.sort_unstable();
    Ok(calls)
}

/// Which calls have no line: all of one CPU, or so many of bios that these programs have submitted.
fn without_a_line(printed: &[(String, u64)], events: &[Event], submitted: &[Event]) -> String {
    // An address is used again: a line is that of the call that is next to it.
    let mut without: Vec<&Event> = events.iter().collect();
    for (bio, time) in printed {
        let its = without.iter().enumerate().filter(|(_, event)| event.argument == *bio);
        if let Some((at, _)) = its.min_by_key(|(_, event)| event.time.abs_diff(*time)) {
            without.remove(at);
        }
    }
    let cpu = without.first().map_or(0, |event| event.cpu);
    let of_cpu = events.iter().filter(|event| event.cpu == cpu).count();
    if without.len() == of_cpu && without.iter().all(|event| event.cpu == cpu) {
        return format!("; those of CPU {cpu} have no line");
    }
    let mut names = BTreeMap::<&str, usize>::new();
    for event in without {
        let is_its = |it: &&Event| it.argument == event.argument && it.time <= event.time;
        let name = submitted.iter().rfind(is_its).map_or("nobody", |it| &it.task);
        *names.entry(name.split(['/', '-']).next().unwrap_or(name)).or_default() += 1;
    }
    let names: Vec<_> = names.iter().map(|(name, number)| format!("{number} of {name}")).collect();
    format!("; no line for {}", names.join(", "))
}

/// The lines of a function are the calls that ftrace saw: as many of each bio, at about those times.
pub fn same_calls(
    output: &str,
    function: &str,
    events: &[Event],
    submitted: &[Event],
) -> Result<()> {
    let printed = calls(output, function)?;
    let (lines, what) = (printed.len(), format!("{function}bio=0x…) called: …"));
    let mut seen: Vec<_> = events.iter().map(|event| (&event.argument, event.time)).collect();
    seen.sort_unstable();
    let calls = seen.len();
    if lines == 0 && calls > 0 {
        let name = function.trim_end_matches([' ', '(']);
        let yours = output.lines().find(|line| line.contains(name)).map(|line| {
            let line = line.rsplit("printk: ").next().unwrap_or_default();
            let space = if line.contains("bio_endio(") { "; put a space before `(`" } else { "" };
            format!("; yours: `{line}`{space}")
        });
        bail!("no line `{what}`, and ftrace saw {calls} calls{}", yours.unwrap_or_default());
    }
    let without = match lines {
        some if some < calls => without_a_line(&printed, events, submitted),
        _ => String::new(),
    };
    ensure!(
        lines == calls,
        "{lines} lines `{what}`, and ftrace saw {calls} calls{without}: {output}"
    );
    for ((bio, time), (seen, at)) in printed.iter().zip(seen) {
        ensure!(
            bio == seen,
            "a line `{what}` with the bio {bio}, and a call with {seen}: {output}"
        );
        let is_near = time.abs_diff(at) <= 500_000_000;
        // The share is the same in each run.
        let share = *time as f64 / at as f64;
        let odd = "has a line with another time";
        ensure!(is_near, "a call with the bio {bio} {odd}, {share:.3} of its own: {output}");
    }
    Ok(())
}

/// A disk, or a file with its path, to be read past the page cache, one bio for each read.
pub struct Direct {
    file: File,
    buffer: Vec<u8>,
}

impl Direct {
    pub fn open(disk: &str) -> Result<Direct> {
        let path = Path::new("/dev").join(disk);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(&path);
        Ok(Direct {
            file: file.with_context(|| path.display().to_string())?,
            buffer: vec![0; 4096 + (512 << 10)],
        })
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

    /// Reads 512 bytes at a time on both CPUs at once: what is not added atomically gets lost. Where they are
    /// preempted, another thread takes the CPU from each of them, again and again, to read once: as bios complete
    /// in the call that submits them, it finds any program half done. Returns the number of reads.
    pub fn race(&self, time: Duration, are_preempted: bool) -> Result<u64> {
        let end = Instant::now() + time;
        let reader = |cpu: usize, takes_the_cpu: bool| -> Result<u64> {
            stay_on(cpu)?;
            if takes_the_cpu {
                set_realtime(1)?;
            }
            let (mut disk, mut reads) = (Direct::open(Self::NAME)?, 0);
            while Instant::now() < end {
                if takes_the_cpu {
                    thread::sleep(Duration::from_micros(200));
                }
                disk.read(512, 0)?;
                reads += 1;
            }
            Ok(reads)
        };
        let readers = [(0, false), (1, false), (0, true), (1, true)];
        let readers = &readers[..if are_preempted { 4 } else { 2 }];
        Ok(in_threads(readers, |(cpu, takes)| reader(*cpu, *takes))?.into_iter().sum())
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        shell("rmmod brd").ok();
    }
}
