//! Stages 08 and 09: every read that they print, judged by mincore() before that read. (Where no page is on
//! its way from the disk, the pages that a read adds are those that mincore() does not see.)

use std::{
    hint::black_box,
    io::{IoSliceMut, Seek, SeekFrom},
    num::NonZeroU64,
};

use io_uring::{IoUring, opcode, squeue, types};
use memmap2::{Mmap, MmapMut, MmapOptions};
use regex_lite::Regex;
use rustix::{
    fs::{fadvise, major, minor},
    io::{ReadWriteFlags, preadv2},
};

use crate::{cachetop::CachetopReport, exercises, prelude::*};

tests![
    stage08_agrees_with_mincore,
    stage08_judges_no_asynchronous_read,
    stage08_judges_no_rest_of_a_direct_read,
    stage08_knows_the_end_of_a_file,
    others_know_the_end_of_a_file,
    stage09_threads,
    stage09_leaves_other_processes_out,
    stage09_knows_pid_namespaces,
    stage09_without_a_process_is_stage08,
];

/// The size of a page in bytes: 4 KiB, or 16 KiB with some kernels for arm64.
pub fn page_size() -> u64 {
    rustix::param::page_size() as u64
}
pub const MIB: u64 = 1 << 20;
/// So many pages behind the end of a file are looked at.
const BEHIND: u64 = 32;

/// A read as it was asked for, its pages that were resident and that were not, and what it returned.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
pub struct Read {
    offset: u64,
    bytes: u64,
    pub hit: u64,
    pub miss: u64,
    got: i64,
}

/// A file whose pages in memory can be counted.
pub struct Watched {
    file: File,
    map: Mmap,
    pub size: u64,
    /// Of the disk below: how many requests are on their way.
    inflight: File,
    pub path: String,
    /// The inode of these pages; a disk's is one of the kernel's own, with the device's number.
    inode: u64,
}

impl Watched {
    /// Opens `path`, which lies on (or is) the disk `disk`, with the cache empty of it.
    pub fn cold(path: &str, disk: &str) -> Result<Watched> {
        let mut file = File::open(path).with_context(|| path.to_owned())?;
        let (size, metadata) = (file.seek(SeekFrom::End(0))?, file.metadata()?);
        let inode = match metadata.rdev() {
            0 => metadata.ino(),
            device => u64::from(major(device) << 20 | minor(device)),
        };
        // SAFETY: the bytes are asked about; they are read only of a file that does not change.
        let length = size + BEHIND * page_size();
        let map = unsafe { MmapOptions::new().len(length as usize).map(&file)? };
        let inflight = File::open(format!("/sys/class/block/{disk}/inflight"))?;
        let watched = Watched { file, map, size, inflight, path: path.to_owned(), inode };
        watched.chill()?;
        Ok(watched)
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Empties the cache of this file.
    fn chill(&self) -> Result<()> {
        // A page that another CPU has just used is released later.
        wait_until("an empty cache", || {
            rustix::fs::sync();
            self.advise(Advice::DontNeed, 0, 0)?;
            Ok(self.resident(0, self.size)? == 0)
        })
    }

    pub fn advise(&self, advice: Advice, offset: u64, bytes: u64) -> Result<()> {
        Ok(fadvise(&self.file, offset, NonZeroU64::new(bytes), advice)?)
    }

    /// How many pages of the range are resident: mincore().
    pub fn resident(&self, offset: u64, bytes: u64) -> Result<u64> {
        self.mincore(offset / page_size(), pages(offset, bytes, self.size))
    }

    /// How many pages behind the end of the file are resident.
    pub fn behind(&self) -> Result<u64> {
        self.mincore(self.size.div_ceil(page_size()), BEHIND)
    }

    /// How many of `all` pages from `first` on are resident.
    fn mincore(&self, first: u64, all: u64) -> Result<u64> {
        if all == 0 {
            return Ok(0);
        }
        let mut pages = vec![0; all as usize];
        let start = self.map[(first * page_size()) as usize..].as_ptr().cast_mut().cast();
        let length = (all * page_size()) as usize;
        // SAFETY: the range lies in the mapping, and `pages` has a byte for each of its pages.
        let answer = unsafe { libc::mincore(start, length, pages.as_mut_ptr()) };
        ensure!(answer == 0, "mincore: {}", std::io::Error::last_os_error());
        Ok(pages.iter().filter(|page| **page & 1 == 1).count() as u64)
    }

    /// Waits until no page of the range is on its way from the disk; how many are resident then.
    pub fn settled(&self, offset: u64, bytes: u64) -> Result<u64> {
        let all = pages(offset, bytes, self.size);
        let mut before = u64::MAX;
        let start = Instant::now();
        loop {
            ensure!(start.elapsed() < LIMIT, "the disk does not come to rest");
            let mut idle = [0; 64];
            let n = self.inflight.read_at(&mut idle, 0)?;
            let idle = String::from_utf8_lossy(&idle[..n]).split_whitespace().all(|n| n == "0");
            let resident = self.resident(offset, bytes)?;
            // A request counts as done a moment before its pages are: look twice.
            if resident == all || idle && resident == before {
                return Ok(resident);
            }
            before = if idle { resident } else { u64::MAX };
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Reads, and says what mincore() said before.
    pub fn read(&self, offset: u64, bytes: u64) -> Result<Read> {
        let hit = self.settled(offset, bytes)?;
        self.read_now(offset, bytes, hit)
    }

    pub fn read_now(&self, offset: u64, bytes: u64, hit: u64) -> Result<Read> {
        self.read_into(&mut vec![0; bytes as usize], offset, hit)
    }

    /// Reads into this memory, and says what mincore() said before.
    fn read_into(&self, buffer: &mut [u8], offset: u64, hit: u64) -> Result<Read> {
        let (bytes, got) = (buffer.len() as u64, self.file.read_at(buffer, offset)? as i64);
        Ok(Read { offset, bytes, hit, miss: pages(offset, bytes, self.size) - hit, got })
    }

    /// Faults so many pages of the mapping in, from the first one.
    pub fn touch(&self, pages: u64) {
        for page in 0..pages.min(self.size / page_size()) {
            black_box(self.map[(page * page_size()) as usize]);
        }
    }

    /// Reads the whole file and once more at its end, as `cat` does.
    pub fn read_all(&self, bytes: u64) -> Result<Vec<Read>> {
        (0..=self.size / bytes).map(|n| self.read(n * bytes, bytes)).collect()
    }
}

/// How many pages of a file of that size the range touches.
fn pages(offset: u64, bytes: u64, size: u64) -> u64 {
    let end = (offset + bytes).min(size);
    if offset < end { end.div_ceil(page_size()) - offset / page_size() } else { 0 }
}

/// A new file on the data disk, no page of which is in memory.
pub fn new_file(mounted: &Mounted, name: &str, size: u64) -> Result<Watched> {
    let path = format!("{}/pagecache-{name}", mounted.path);
    fs::write(&path, vec![1; size as usize])?;
    Watched::cold(&path, &mounted.disk)
}

/// What the stage has printed about the reads of a file, in this order, and their readahead.
fn printed(output: &str, file: &Watched) -> Result<(Vec<Read>, u64)> {
    let (mut reads, mut readahead, behind) = (Vec::new(), 0, file.behind()?);
    for event in events(output)?.into_iter().filter(|event| event.inode == file.inode) {
        let is_within = event.read.offset + event.read.bytes <= file.size;
        ensure!(
            is_within || event.readahead <= behind,
            "readahead past the end of the file: {event:?}"
        );
        readahead += event.readahead;
        reads.push(event.read);
    }
    Ok((reads, readahead))
}

/// An event line, one for each read.
#[derive(Debug)]
struct Printed {
    inode: u64,
    read: Read,
    readahead: u64,
}

impl Printed {
    /// Whether this read would have had to wait: EAGAIN, EIOCBQUEUED.
    fn was_refused(&self) -> bool {
        [-11, -529].contains(&self.read.got)
    }
}

/// The event lines. Whether they come by the trace pipe or by a ring buffer is the program's affair.
fn events(output: &str) -> Result<Vec<Printed>> {
    events_of(output, ".*readahead (\\d+)")
}

/// The event lines, which end so. Without a number, they say nothing of readahead.
fn events_of(output: &str, end: &str) -> Result<Vec<Printed>> {
    let complete = ["trace lines, 0 lost", "No event was seen"];
    let has_ring = subject().is_some() && !output.contains(" trace lines, ");
    let is_whole = has_ring || complete.iter().any(|end| output.contains(end));
    ensure!(is_whole, "lines were lost: {output}");
    let pages = r"inode=(\d+).*offset=(\d+).*bytes=(\d+).*\) = (-?\d+):.*hit (\d+).*miss (\d+)";
    let line = Regex::new(&format!("{pages}{end}"))?;
    let begin = if has_ring { "read(" } else { "bpf_trace_printk: " };
    let events = output.lines().filter_map(|line| line.split_once(begin));
    let event = |(_, text): (&str, &str)| {
        let groups = line.captures(text).with_context(|| format!("odd: {text}"))?;
        let number = |group: usize| groups[group].parse::<u64>().with_context(|| text.to_owned());
        let (offset, bytes, got) = (number(2)?, number(3)?, groups[4].parse()?);
        let read = Read { offset, bytes, got, hit: number(5)?, miss: number(6)? };
        let readahead = if groups.len() > 7 { number(7)? } else { 0 };
        Ok(Printed { inode: number(1)?, read, readahead })
    };
    events.map(event).collect()
}

/// Starts stage 09 with a filter for this process.
fn start_for_me() -> Result<Running> {
    Running::stage("stage09", &[&std::process::id().to_string()])
}

/// A file whose pages were not in memory, and the reads of it, as mincore() judged them before each.
type Judged = (&'static str, Watched, Vec<Read>);

/// Reads of files and of a disk, in order and at random, of odd ranges, cold and warm: each one has the line
/// that mincore() says, and the pages that are resident then were missed or are readahead. One that has not
/// ended yet has no line, and is not in the total.
fn stage08_agrees_with_mincore() -> Result<()> {
    let mounted = Mounted::new()?;
    let disk = disks::virtio()?;
    let new = |name, size| new_file(&mounted, name, size);
    let (random, odd) = (new("random", 64 * MIB)?, new("odd", MIB + 100)?);
    odd.advise(Advice::Random, 0, 0)?;
    let sequential = [
        ("page by page", new("pages", MIB)?, page_size()),
        ("64 KiB at a time", new("64k", 16 * MIB)?, 64 * 1024),
        ("1000 bytes at a time", new("1000", MIB / 4)?, 1000),
        ("more than there is", new("more", MIB)?, 4 * MIB),
        ("16 MiB at once", new("once", 16 * MIB)?, 16 * MIB),
        ("a part of a page", new("page", 10)?, MIB),
    ];
    let device = Watched::cold(&format!("/dev/{disk}"), &disk)?;
    device.advise(Advice::Random, 0, 0)?;
    // While it is open, blocks of four pages, where a kernel has them: folios lie half inside a range.
    shell(&format!("blockdev --setbsz {} /dev/{disk} || true", 4 * page_size()))?;
    let late = NullBlk::timer("test", 2000, "")?;
    let unread = Watched::cold(&format!("/dev/{}", late.name), &late.name)?;
    let (_disk, cut) = cut()?;
    let resized = Resized::new()?;
    let running = Running::stage("stage08", &[])?;
    let mut judged: Vec<Judged> = Vec::new();
    for (what, file, bytes) in sequential {
        let reads = [file.read_all(bytes)?, file.read_all(bytes)?].concat();
        judged.push((what, file, reads));
    }
    let reads = [at_random(&random, 300, (0, 1))?, at_random(&random, 300, (0, 1))?].concat();
    judged.push(("at random", random, reads));
    let reads = odd_ranges(&odd)?;
    judged.push(("odd ranges", odd, reads));
    let read = |n: u64| device.read(n % 64 * 16 * page_size() + 512, 16 * page_size());
    let reads = (0..128).map(read).collect::<Result<_>>()?;
    judged.push(("a disk", device, reads));
    for (_, file, _) in &judged {
        file.settled(0, file.size)?;
    }
    // The last read of this thread ends well: it is not in flight any more, either.
    let [first, short, again] = [12, 16, 12].map(|pages| cut.read(0, pages * page_size()));
    ensure!(short?.got == 12 * page_size() as i64, "the read was not ended by an error");
    let before_it_is_cut = resized.read_and_cut()?;
    // Not at the disk's start: a page there would bring others with it.
    let dd = format!("exec dd if={} of=/dev/null bs=4k skip=4096 count=1 status=none", unread.path);
    let dd = Running::bash(&dd)?;
    wait_until("a read in flight", || Ok(disks::in_flight(&late.name)? == 1))?;
    let output = running.interrupt();
    dd.end_well()?;
    let output = output?;
    let (mut all_reads, mut all_misses) = (0, 0);
    for (what, file, judged) in judged {
        let (reads, readahead) = printed(&output, &file)?;
        same(what, &judged, &reads)?;
        let misses: u64 = judged.iter().map(|read| read.miss).sum();
        (all_reads, all_misses) = (all_reads + judged.len(), all_misses + misses);
        let resident = file.resident(0, file.size)?;
        ensure!(
            misses > 0 && judged.last().is_some_and(|last| last.miss == 0),
            "{what}: {judged:?}"
        );
        ensure!(
            misses + readahead == resident,
            "{what}: {misses} misses, readahead {readahead}, {resident} pages are resident"
        );
    }
    ensure!(printed(&output, &unread)?.0.is_empty(), "it has not ended: {output}");
    same("beside an error", &[first?, again?], &printed(&output, &cut)?.0)?;
    let reads = printed(&output, &resized.file)?.0;
    same("before it is cut", &[before_it_is_cut], &reads)?;
    let not_judged = count(&output, "not judged")?;
    ensure!(not_judged == 2, "an error has ended one read, a new size another: {output}");
    ensure!(count(&output, "in flight")? == 1, "one read has not returned:\n{output}");
    sums(&output, events(&output)?.len())?;
    ensure_none(&output, &["dropped"])?;
    compared(&format!(
        "mincore() agrees with each of your {all_reads} reads of 7 files and a disk: {all_misses} misses"
    ));
    Ok(())
}

/// A file that comes in while another one is read, because the memory that this read fills is a mapping of it.
struct MappedFile {
    file: Watched,
    map: MmapMut,
}

impl MappedFile {
    const PAGES: u64 = 8;

    /// A new one at this path, on this disk.
    fn new(path: &str, disk: &str) -> Result<MappedFile> {
        fs::write(path, vec![1; (Self::PAGES * page_size()) as usize])?;
        let file = Watched::cold(path, disk)?;
        let writable = OpenOptions::new().read(true).write(true).open(path)?;
        // SAFETY: nobody else uses this file.
        let map = unsafe { MmapMut::map_mut(&writable)? };
        Ok(MappedFile { file, map })
    }

    /// Reads what is in memory by then from the start of another file: all hits, while as many pages of this one
    /// come in.
    fn read(&mut self, from: &Watched) -> Result<Read> {
        let MappedFile { file, map } = self;
        ensure!(file.resident(0, file.size)? == 0, "{} is in memory", file.path);
        let read = from.read_into(map, 0, from.settled(0, file.size)?)?;
        let came = file.resident(0, file.size)?;
        ensure!(read.hit == Self::PAGES && came == Self::PAGES, "{came} pages came in: {read:?}");
        Ok(read)
    }
}

/// The first step of 08: nothing is read ahead, so each page of the file that a read adds is one that it asks for.
/// Several threads read at once, and pages of other files come in.
pub fn exercise_hits_and_misses() -> Result<()> {
    let mounted = Mounted::new()?;
    let new = |name, size| new_file(&mounted, name, size);
    let _spare = ["spare1", "spare2", "spare3"].map(|name| new(name, page_size()));
    let (random, odd, shared) =
        (new("random", 64 * MIB)?, new("odd", MIB + 100)?, new("shared", 16 * MIB)?);
    [&odd, &shared].into_iter().try_for_each(|file| file.advise(Advice::Random, 0, 0))?;
    // One on the same file system, and one with the same inode number on another.
    let near = MappedFile::new(&format!("{}/pagecache-mapped", mounted.path), &mounted.disk)?;
    let disk = disks::virtio()?;
    let _elsewhere = Mounted::made("ext4", &disk, "noatime")?;
    let mut mapped = [near, MappedFile::new(&twin(odd.inode)?, &disk)?];
    let running = Running::stage("stage08", &[])?;
    let mut judged = vec![("at random", &random, at_random(&random, 300, (0, 1))?)];
    let mut of_odd = vec![odd.read(0, MappedFile::PAGES * page_size())?];
    for file in &mut mapped {
        of_odd.push(file.read(&odd)?);
    }
    of_odd.extend(odd_ranges(&odd)?);
    judged.push(("odd ranges", &odd, of_odd));
    let threads = in_threads(0..2, |n| {
        stay_on(n as usize)?;
        at_random(&shared, 200, (n, 2))
    })?;
    let output = running.interrupt()?;
    let events = events_of(&output, "")?;
    let of = |file: &Watched| -> Vec<Read> {
        events.iter().filter(|it| it.inode == file.inode).map(|it| it.read).collect()
    };
    // On a kernel that preempts, programs may be skipped while threads read at once.
    let is_skipped = skipped_some(&output)?;
    for (n, judged) in threads.iter().enumerate() {
        let is_here = |read: &Read| (read.offset >= shared.size / 2) == (n == 1);
        let printed: Vec<Read> = of(&shared).into_iter().filter(is_here).collect();
        let odd = printed.iter().find(|read| !judged.contains(read));
        ensure!(odd.is_none(), "thread {n}: mincore says nothing like {odd:?}");
        ensure!(
            is_skipped || printed == *judged,
            "thread {n}: {} reads, {printed:?}",
            judged.len()
        );
    }
    for (what, file, judged) in &judged {
        if !is_skipped || of(file).len() == judged.len() {
            same(what, judged, &of(file))?;
        }
    }
    let (hit, miss) = events
        .iter()
        .fold((0, 0), |(hit, miss), event| (hit + event.read.hit, miss + event.read.miss));
    let total = format!("[Total {} Hit {hit} miss {miss}]", hit + miss);
    ensure!(output.contains(&total), "the sums of your lines are {total}: {output}");
    let reads = judged.iter().map(|(_, _, reads)| reads.len()).sum::<usize>() + 400;
    compared(&format!("mincore agrees with your {reads} reads"));
    ensure_none(&output, if is_skipped { &["dropped"] } else { &["dropped", "in flight"] })
}

/// A disk whose page 12 and some behind it cannot be read.
fn cut() -> Result<(NullBlk, Watched)> {
    let page = page_size() / 512;
    let disk = NullBlk::new("bad", &format!("badblocks=+{}-{}", 12 * page, 24 * page))?;
    let cut = Watched::cold(&format!("/dev/{}", disk.name), &disk.name)?;
    cut.advise(Advice::Random, 0, 0)?;
    Ok((disk, cut))
}

/// Uses up the inode numbers of a new file system that files of the data disk may have: lines name those.
fn other_inodes(mounted: &Mounted) -> Result<()> {
    (0..40).try_for_each(|n| Ok(fs::write(format!("{}/spare{n}", mounted.path), "")?))
}

/// A file of 32 pages, which is cut to twelve while it is read.
struct Resized {
    file: Watched,
    _mounted: Mounted,
    disk: Mapped,
    below: NullBlk,
}

impl Resized {
    fn new() -> Result<Resized> {
        let below = NullBlk::new("resized", "memory_backed=1 size=64")?;
        let disk = Mapped::new("resized", &format!("0 131072 linear /dev/{} 0", below.name))?;
        let mounted = Mounted::made("ext4", &disk.disk()?, "noatime")?;
        other_inodes(&mounted)?;
        let path = format!("{}/resized", mounted.path);
        fs::write(&path, vec![1; 32 * page_size() as usize])?;
        let file = Watched::cold(&path, &disk.disk()?)?;
        file.advise(Advice::Random, 0, 0)?;
        Ok(Resized { file, _mounted: mounted, disk, below })
    }

    /// From here on, a read takes so many ms. (A disk that is suspended would end readahead at once.)
    fn slow_down(&self, ms: u64) -> Result<()> {
        let below = format!("/dev/{} 0", self.below.name);
        shell(&format!(
            "modprobe dm-delay; dmsetup reload resized --table '0 131072 delay {below} {ms} {below} 0'"
        ))?;
        self.disk.suspend(true)?;
        self.disk.suspend(false)
    }

    /// Reads ten pages, and lets dd read all of them: it gets these, and two of the 22 that it adds.
    fn read_and_cut(&self) -> Result<Read> {
        let (page, path, copy) = (page_size(), &self.file.path, "/run/resized");
        let first = self.file.read(0, 10 * page)?;
        self.slow_down(2000)?;
        let dd = format!("exec dd if={path} of={copy} bs={} count=1 status=none", 32 * page);
        let dd = Running::bash(&dd)?;
        // It waits for pages of its program before, in a fault.
        wait_until("a read that waits for a page", || {
            let stack = dd.stack()?;
            Ok(stack.contains("folio_wait_bit_common")
                && stack.contains("filemap_read")
                && fs::read_link(format!("/proc/{}/fd/0", dd.id()))? == Path::new(path))
        })?;
        OpenOptions::new().write(true).open(path)?.set_len(12 * page)?;
        dd.end_well()?;
        ensure!(
            fs::metadata(copy)?.len() == 12 * page,
            "the read has ended before the file was cut"
        );
        fs::remove_file(copy)?;
        Ok(first)
    }
}

/// So many reads of random pages of a part of a file, the same in every run: `(0, 1)` is all of it. Nothing is read
/// ahead, and nobody else reads this part: no page is on its way.
pub fn at_random(file: &Watched, reads: u64, (part, of): (u64, u64)) -> Result<Vec<Read>> {
    file.advise(Advice::Random, 0, 0)?;
    let (mut seed, size) = (part + 1, file.size / of);
    let mut page = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        part * size + (seed >> 33) % (size / page_size()) * page_size()
    };
    let read = |offset| file.read_now(offset, page_size(), file.resident(offset, page_size())?);
    (0..reads).map(|_| read(page())).collect()
}

fn odd_ranges(file: &Watched) -> Result<Vec<Read>> {
    [
        (10 * page_size(), 10 * page_size()),        // cold
        (5 * page_size(), 10 * page_size()),         // the second half is there
        (15 * page_size(), 10 * page_size()),        // the first half is
        (30 * page_size(), page_size()),             // an island
        (26 * page_size(), 9 * page_size()),         // around it
        (40 * page_size() + 1, 1),                   // a byte
        (42 * page_size() - 1, 2),                   // two pages for two bytes
        (44 * page_size() + 7, 3 * page_size()),     // unaligned: four pages
        (60 * page_size(), 70 * page_size()),        // many
        (file.size - 50, 10 * page_size()),          // past the end
        (file.size, page_size()),                    // at the end
        (file.size + 10 * page_size(), page_size()), // beyond it
        (0, 2 * MIB),                                // all of it, and more
        (0, 2 * MIB),
    ]
    .into_iter()
    .map(|(offset, bytes)| file.read(offset, bytes))
    .collect()
}

fn same(what: &str, judged: &[Read], printed: &[Read]) -> Result<()> {
    let (reads, lines) = (judged.len(), printed.len());
    ensure!(reads == lines, "{what}: {reads} reads, {lines} printed: {printed:?}");
    for (n, (judged, printed)) in judged.iter().zip(printed).enumerate() {
        ensure!(
            judged == printed,
            "{what}, read {n}: mincore says {judged:?}, printed {printed:?}"
        );
    }
    Ok(())
}

/// The total is the sum of the lines, and nothing was lost.
fn totals(output: &str) -> Result<()> {
    sums(output, events(output)?.iter().filter(|event| !event.was_refused()).count())?;
    ensure_none(output, &["dropped", "in flight"])
}

/// So many reads, and the sums of the lines: those that were refused are not in the total.
fn sums(output: &str, reads: usize) -> Result<()> {
    let (refused, counted): (Vec<_>, Vec<_>) =
        events(output)?.into_iter().partition(Printed::was_refused);
    let hit: u64 = counted.iter().map(|event| event.read.hit).sum();
    let miss: u64 = counted.iter().map(|event| event.read.miss).sum();
    let total = format!("[Total {} Hit {hit} miss {miss}]", hit + miss);
    ensure!(output.contains(&total), "not {total}: {output}");
    let readahead: u64 = refused.iter().chain(&counted).map(|event| event.readahead).sum();
    ensure!(count(output, "readahead")? == readahead, "readahead is not {readahead}: {output}");
    // Only the answer to the exercise io_uring prints such reads.
    let said = count(output, "refused").unwrap_or(0);
    ensure!(said == refused.len() as u64, "refused: {output}");
    let reads = format!(" {reads} reads through");
    ensure!(output.contains(&reads), "not {reads}: {output}");
    Ok(())
}

/// Whether a program was skipped: then the sums of what it has seen are judged, and that it has seen all reads but
/// one for each time.
fn has_skipped_reads(output: &str, reads: usize) -> Result<bool> {
    let is_so = skipped_some(output)?;
    if is_so {
        let counted = count(output, "reads through the page cache")? as usize;
        sums(output, counted)?;
        let skipped = laws::skipped(output) as usize;
        ensure!(counted + skipped >= reads, "{counted} reads of {reads}: {output}");
        compared(&format!(
            "{counted} of {reads} reads, and the kernel skipped programs {skipped} times"
        ));
    }
    Ok(is_so)
}

/// io_uring may ask twice for one read, and find the second time what the first one has brought in. A
/// stage that sees each call alone judges none of them, and says of how many.
fn stage08_judges_no_asynchronous_read() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = new_file(&mounted, "asynchronous", MIB)?;
    file.advise(Advice::Random, 0, 0)?;
    let running = Running::stage("stage08", &[])?;
    for engine in ["io_uring", "libaio"] {
        let report = fio(&format!(
            "--filename={} --ioengine={engine} --rw=randread --bs=4k --iodepth=4 --thread --size=1M \
             --fadvise_hint=random --invalidate=0",
            file.path
        ))?;
        ensure!(report["read"]["total_ios"].as_u64() == Some(256), "{engine}: {report}");
    }
    let output = running.interrupt()?;
    let not_judged = count(&output, "not judged")?;
    ensure!(not_judged >= 2 * 256, "{not_judged} of 512 reads: {output}");
    let (reads, readahead) = printed(&output, &file)?;
    ensure!(reads.is_empty() && readahead == 0, "{reads:?}");
    sums(&output, events(&output)?.len())?;
    ensure_none(&output, &["dropped", "in flight"])
}

/// io_uring asks again for what it did not get: a read counts once, by what was there at its begin.
pub fn exercise_io_uring() -> Result<()> {
    // One that takes its time: else a page is there before the kernel looks, and nothing is refused.
    let slow = NullBlk::timer("slow", 5, "memory_backed=1 size=64")?;
    let mounted = Mounted::made("ext4", &slow.name, "no_prefetch_block_bitmaps")?;
    let file = new_file(&mounted, "uring", 4 * MIB)?;
    for (bytes, depth, jobs) in cases([(4, 4, 1), (64, 4, 2)], 1) {
        let orders = [("randread", "random"), ("read", "sequential")];
        // Where a kernel that preempts skips a program, twice more.
        let mut tries = orders.map(|order| [order; 3]).concat();
        while let Some((order, hint)) = tries.pop() {
            file.chill()?;
            file.advise(Advice::Random, 0, 0)?;
            for n in (0..64).step_by(2) {
                let some = (n as usize % 16 + 1) * page_size() as usize;
                file.file.read_at(&mut vec![0; some], n * 64 * 1024)?;
            }
            let all = file.size / page_size();
            let hit = file.settled(0, file.size)?;
            ensure!(hit < all, "all {all} pages are in memory");
            // Threads, so that they are all one process.
            let gate = Gate::new()?;
            let fio = Running::bash(&after_go(&fio_command(&format!(
                "--filename={} --ioengine=io_uring --rw={order} --bs={bytes}k --iodepth={depth} --thread \
                 --numjobs={jobs} --size={} --offset_increment={} --fadvise_hint={hint} --invalidate=0",
                file.path,
                file.size / jobs,
                file.size / jobs
            ))))?;
            let running = Running::stage(EXERCISE, &[])?;
            gate.open()?;
            let report = fio.end_well()?;
            let output = running.interrupt()?;
            let ios = fio_report(&report.stdout)?["read"]["total_ios"].as_u64();
            let ios = ios.with_context(|| format!("{report:?}"))? as usize;
            if has_skipped_reads(&output, ios)? {
                continue;
            }
            let counted = events(&output)?.into_iter().filter(|event| !event.was_refused());
            let (ours, others): (Vec<_>, Vec<_>) =
                counted.partition(|event| event.inode == file.inode);
            let hits: u64 = ours.iter().map(|event| event.read.hit).sum();
            let misses: u64 = ours.iter().map(|event| event.read.miss).sum();
            let readahead = printed(&output, &file)?.1;
            let what = format!("{bytes} KiB, {depth} at once, {jobs} jobs, {order}");
            // All pages are asked for once, and those that were not there come once, with or without readahead.
            let is_right = hits + misses == all && misses + readahead == all - hit;
            ensure!(
                is_right && (hint != "random" || hits == hit),
                "{what}: {} lines, {hits} hits, {misses} misses, {readahead} readahead, of {all} pages, {hit} \
                 of which were in memory: {output}",
                ours.len()
            );
            sums(&output, ios + others.len()).with_context(|| format!("{what}, {ios} reads"))?;
            ensure_none(&output, &["dropped", "in flight"])?;
            let refused = count(&output, "refused")?;
            compared(&format!("{what}: mincore saw {hit} of {all} pages; you printed {hits} hits"));
            ensure!(refused > 0, "{what}: nothing was refused: {output}");
            tries.retain(|other| *other != (order, hint));
        }
    }
    // What an error has ended, beside pages that were in memory, and what the end of the file has.
    let ((_disk, cut), page, mut ring) = (cut()?, page_size(), IoUring::new(4)?);
    let (end, mut buffer) = (file.size - 4 * page, vec![0; 16 * page as usize]);
    cut.read(3 * page, 3 * page)?;
    let (past, mut more) = (PastTheEnd::new()?, vec![0; 512 * page as usize]);
    let way = Way::Ring(ReadWriteFlags::empty(), squeue::Flags::empty());
    let running = Running::stage(EXERCISE, &[])?;
    let mut past_the_end = Vec::new();
    for (name, file, _) in &past.files {
        let (first, bytes) = (file.read(0, page)?, more.len() as u64);
        let hit = file.settled(0, file.size)?;
        let got = way.read(&file.file, &mut ring, &mut more, 0)?;
        let miss = pages(0, file.size, file.size) - hit;
        past_the_end.push((*name, file, [first, Read { offset: 0, bytes, hit, miss, got }]));
    }
    for (file, offset, pages) in [(&cut, 0, 12), (&file, end, 4)] {
        let got = way.read(&file.file, &mut ring, &mut buffer, offset)?;
        ensure!(got == pages * page as i64, "{got} bytes at {offset} of {}", file.path);
    }
    let output = running.interrupt()?;
    let whole = Read { offset: end, bytes: 16 * page, hit: 4, miss: 0, got: 4 * page as i64 };
    for (file, expected) in [(&cut, &[][..]), (&file, &[whole])] {
        let mut printed = printed(&output, file)?.0;
        printed.retain(|read| read.got > 0);
        same(&file.path, expected, &printed)?;
    }
    for (name, file, expected) in past_the_end {
        let mut printed = printed(&output, file)?.0;
        printed.retain(|read| read.got > 0);
        same(name, &expected, &printed)?;
    }
    ensure!(count(&output, "not judged")? == 1, "an error has ended one read: {output}");
    totals(&output)
}

/// Several threads at once, each on a file of its own: one for each CPU, and more of them than CPUs.
fn stage09_threads() -> Result<()> {
    let mounted = Mounted::new()?;
    // Where a kernel that preempts skips a program, twice more.
    let all = cases([&["t0", "t1"][..], &["t2", "t3", "t4", "t5"]], 1);
    let mut tries: Vec<_> = all.iter().flat_map(|names| [names; 3]).collect();
    while let Some(names) = tries.pop() {
        let files: Vec<Watched> =
            names.iter().map(|name| new_file(&mounted, name, 4 * MIB)).collect::<Result<_>>()?;
        let running = start_for_me()?;
        let judged = in_threads(files.iter().enumerate(), |(cpu, file)| {
            if names.len() == 2 {
                stay_on(cpu)?;
            }
            Ok([file.read_all(3 * page_size())?, file.read_all(64 * page_size())?].concat())
        })?;
        let output = running.interrupt()?;
        if has_skipped_reads(&output, judged.iter().map(Vec::len).sum())? {
            continue;
        }
        for ((file, judged), name) in files.iter().zip(&judged).zip(*names) {
            same(name, judged, &printed(&output, file)?.0)?;
        }
        compared(&format!("mincore agrees with your reads of {} threads", names.len()));
        totals(&output)?;
        tries.retain(|other| other.len() != names.len());
    }
    Ok(())
}

/// A way to ask for a page: by preadv2(), or by io_uring, with the flags of an entry.
#[derive(Clone, Copy)]
enum Way {
    Preadv2(ReadWriteFlags),
    Ring(ReadWriteFlags, squeue::Flags),
}

impl Way {
    /// Returns what the kernel does, an error as a negative number.
    fn read(self, file: &File, ring: &mut IoUring, page: &mut [u8], offset: u64) -> Result<i64> {
        let (flags, sqe) = match self {
            Way::Ring(flags, sqe) => (flags, sqe),
            Way::Preadv2(flags) => {
                let got = preadv2(file, &mut [IoSliceMut::new(page)], offset, flags);
                return Ok(got.map_or_else(|it| -i64::from(it.raw_os_error()), |got| got as i64));
            }
        };
        let file = types::Fd(file.as_raw_fd());
        let entry = opcode::Read::new(file, page.as_mut_ptr(), page.len() as u32).offset(offset);
        let entry = entry.rw_flags(flags.bits() as i32).build().flags(sqe);
        // SAFETY: the buffer lives until the completion, which is waited for.
        unsafe { ring.submission().push(&entry) }?;
        ring.submit_and_wait(1)?;
        Ok(ring.completion().next().context("no completion")?.result().into())
    }
}

/// An application asks for a page without waiting, and is refused; somebody reads the page; the
/// application asks again, for the same bytes of the same file into the same buffer. That is a read
/// of its own, and a hit.
pub fn exercise_may_ask_again() -> Result<()> {
    const NOTHING: ReadWriteFlags = ReadWriteFlags::empty();
    const NO_FLAGS: squeue::Flags = squeue::Flags::empty();
    let preadv2 = Way::Preadv2(ReadWriteFlags::NOWAIT);
    let ring = Way::Ring(ReadWriteFlags::NOWAIT, NO_FLAGS);
    let ways = [
        ("preadv2", preadv2, preadv2),
        ("preadv2, then waiting", preadv2, Way::Preadv2(NOTHING)),
        ("io_uring", ring, ring),
        ("io_uring, then waiting", ring, Way::Ring(NOTHING, NO_FLAGS)),
        ("io_uring, then by a worker", ring, Way::Ring(NOTHING, squeue::Flags::ASYNC)),
        ("io_uring, then preadv2", ring, preadv2),
    ];
    // So slow that it cannot have the page there before the first call returns.
    let disk = NullBlk::timer("test", 300, "")?;
    let device = Watched::cold(&format!("/dev/{}", disk.name), &disk.name)?;
    device.advise(Advice::Random, 0, 0)?;
    let (mut ring, mut page) = (IoUring::new(4)?, vec![0; page_size() as usize]);
    let mut read = |way: Way, offset| way.read(&device.file, &mut ring, &mut page, offset);
    let running = Running::stage(EXERCISE, &[])?;
    let mut expected = Vec::new();
    for (n, (name, first, again)) in (16..).zip(&ways) {
        let offset = n * MIB;
        let refused = read(*first, offset)?;
        ensure!(refused == -i64::from(libc::EAGAIN), "{name}: {refused}");
        // A hit where the refused call has already sent for the page, as on 7.2.
        let second = device.read(offset, page_size())?;
        let got = read(*again, offset)?;
        ensure!(got == page_size() as i64, "{name}: {got}");
        let printed = |got, hit, miss| Read { offset, bytes: page_size(), hit, miss, got };
        expected.push((name, [printed(refused, 0, 0), second, printed(got, 1, 0)]));
    }
    let output = running.interrupt()?;
    let (printed, _) = printed(&output, &device)?;
    for (name, expected) in expected {
        let shown = printed.iter().filter(|read| read.offset == expected[0].offset);
        let shown: Vec<Read> = shown.copied().collect();
        ensure!(shown == expected, "{name}: {shown:?}, not {expected:?}: {output}");
    }
    compared(&format!(
        "{} pages were asked for twice, and refused once: you printed what each call returned",
        ways.len()
    ));
    totals(&output)
}

/// While a file is read, pages of another one come in, by the same thread: where the bytes go to is a mapped file
/// that is not in memory. And two threads of a process have reads of one file in flight at once, beside a third one
/// that reads another file.
pub fn exercise_readers() -> Result<()> {
    let (subject, _) = subject().context("there is no attempt to judge")?;
    let (page, mounted) = (page_size(), Mounted::new()?);
    let other = new_file(&mounted, "other", MIB)?;
    let mut into = MappedFile::new(&format!("{}/pagecache-into", mounted.path), &mounted.disk)?;
    let slow = Resized::new()?;
    slow.file.read(0, MappedFile::PAGES * page)?;
    let (_, running) = exercises::start_with(&subject, &[&[], &[&slow.file.path]])?;
    let mut judged = vec![into.read(&slow.file)?];
    slow.slow_down(5000)?;
    let read_slowly = |number: u64| -> Result<Vec<Read>> {
        match number {
            // The third one, when both of the others wait.
            2 => {
                // Reads, writes and flushes on their way.
                let both = || Ok(shell("dmsetup status resized")?.contains("delay 2 0 0"));
                wait_until("two reads in flight", both)?;
                other.read_all(64 << 10)
            }
            _ => Ok(vec![slow.file.read_now((20 + 4 * number) * page, page, 0)?]),
        }
    };
    let [first, second, third] =
        in_threads([0, 1, 2], read_slowly)?.try_into().map_err(|_| anyhow!("three threads"))?;
    judged.extend([first, second].concat());
    let output = whole(running.interrupt()?)?;
    let mut printed_slowly = printed(&output, &slow.file)?.0;
    printed_slowly.sort_by_key(|read| read.offset);
    same("one file", &judged, &printed_slowly)?;
    let of_other = printed(&output, &other)?.0;
    // The exercise with a filter by file leaves it out.
    if !of_other.is_empty() || subject != EXERCISE {
        same("another file", &third, &of_other)?;
    }
    let into = printed(&output, &into.file)?.0;
    ensure!(into.is_empty(), "nobody reads the file that is mapped: {into:?}");
    compared("mincore agrees with your reads of several threads, beside pages of another file");
    totals(&output)
}

/// btrfs reads past the page cache only what it has not compressed; the rest of a read comes through it. A stage that
/// takes the result for the bytes of that rest would print a wrong line: it has none.
fn stage08_judges_no_rest_of_a_direct_read() -> Result<()> {
    let (part, disk) = (16 * page_size(), disks::virtio()?);
    let _mounted = Mounted::made("btrfs", &disk, "noatime")?;
    shell(&format!(
        "cd /run/btrfs; head -c {part} /dev/urandom >file; sync; \
         mount -o remount,compress-force=zlib /run/btrfs; head -c {} /dev/zero >>file; sync",
        3 * part
    ))?;
    let file = Watched::cold("/run/btrfs/file", &disk)?;
    let mut direct = Direct::open(&file.path)?;
    let running = Running::stage("stage08", &[])?;
    for _ in 0..2 {
        direct.read(2 * part as usize, 0)?;
    }
    ensure!(file.settled(part, part)? > 0, "the rest did not come through the page cache");
    let output = running.interrupt()?;
    let (reads, readahead) = printed(&output, &file)?;
    ensure!(reads.is_empty() && readahead == 0, "{reads:?}");
    let not_judged = count(&output, "not judged")?;
    ensure!(not_judged == 2, "{not_judged} of 2 direct reads with a rest are not judged: {output}");
    compared("2 direct reads leave a rest to the page cache: you print neither, and judge neither");
    totals(&output)
}

/// Files with pages behind their end, which are not theirs: the rest of a folio, where a block of the file
/// system is larger than a page; and, with fs-verity, the tree of hashes, which the reader itself brings in where
/// the file has no data. None of them is in memory but what open() has read.
struct PastTheEnd {
    files: [(&'static str, Watched, u64); 2],
    _mounted: Mounted,
}

impl PastTheEnd {
    fn new() -> Result<PastTheEnd> {
        let (page, disk) = (page_size(), disks::virtio()?);
        let made =
            |block: u64| Mounted::made(&format!("ext4 -O verity -b {block}"), &disk, "noatime");
        let mounted = match made(4 * page) {
            Ok(mounted) => mounted,
            Err(error) if release()?.starts_with("7.") => return Err(error),
            Err(_) => {
                judged_weakly("ext4 has no blocks larger than a page here");
                made(page)?
            }
        };
        other_inodes(&mounted)?;
        let [tail, sparse] = ["tail", "sparse"].map(|name| format!("{}/{name}", mounted.path));
        fs::write(&tail, vec![1; 5 * page as usize - 480])?;
        File::create(&sparse)?.set_len(245 * page - 480)?;
        enable_verity(&sparse)?;
        let cold = |name, path: &str| {
            let file = Watched::cold(path, &disk)?;
            file.advise(Advice::Random, 0, 0)?;
            let behind = file.behind()?;
            Ok::<_, anyhow::Error>((name, file, behind))
        };
        Ok(PastTheEnd {
            files: [cold("tail", &tail)?, cold("sparse", &sparse)?],
            _mounted: mounted,
        })
    }

    /// Reads a page of each file, and then past its end; what mincore() says of each read.
    fn read(&self) -> Result<Vec<Vec<Read>>> {
        let page = page_size();
        let read = |(name, file, behind): &(&str, Watched, u64)| {
            let middle = file.size / page / 2 * page;
            let ranges = [(0, page), (0, 512 * page), (middle, 512 * page)];
            let reads = ranges.map(|(offset, bytes)| file.read(offset, bytes));
            let reads = reads.into_iter().collect::<Result<Vec<_>>>()?;
            let has_more = *name == "sparse" || fs::metadata(&file.path)?.blksize() > page;
            let added = file.behind()? - behind;
            ensure!(
                (added > 0) == has_more && reads[1].hit > 0 && reads[1].miss > 0,
                "{name} does not test: {added} pages behind its end, {reads:?}"
            );
            Ok(reads)
        };
        self.files.iter().map(read).collect()
    }

    /// What reads have brought in besides their misses: all of what is in memory by now.
    fn readahead(&self, reads: &[Vec<Read>]) -> Result<Vec<u64>> {
        let of = |((_, file, behind), reads): (&(_, Watched, u64), &Vec<Read>)| {
            let added = file.resident(0, file.size)? + file.behind()? - behind;
            Ok(added - sum(reads, |read| read.miss))
        };
        self.files.iter().zip(reads).map(of).collect()
    }

    /// A stage has a line for each of these reads, with these figures.
    fn judge(&self, output: &str, judged: &[Vec<Read>]) -> Result<()> {
        let expected = judged.iter().zip(self.readahead(judged)?);
        for ((name, file, _), (judged, expected)) in self.files.iter().zip(expected) {
            let (reads, readahead) = printed(output, file)?;
            same(name, judged, &reads)?;
            ensure!(
                readahead == expected,
                "{name}: {readahead} readahead, not {expected}: {output}"
            );
        }
        ensure!(count(output, "not judged")? == 0, "all of them ended well: {output}");
        totals(output)
    }
}

fn sum(reads: &[Read], of: fn(&Read) -> u64) -> u64 {
    reads.iter().map(of).sum()
}

/// FS_IOC_ENABLE_VERITY, with SHA-256 and blocks of a page.
fn enable_verity(path: &str) -> Result<()> {
    const ENABLE: libc::Ioctl = 0x4080_6685;
    let mut argument = [0_u32; 32];
    argument[..3].copy_from_slice(&[1, 1, page_size() as u32]);
    let file = File::open(path)?;
    // SAFETY: the kernel reads a struct fsverity_enable_arg, of 128 bytes.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), ENABLE, argument.as_ptr()) };
    ensure!(answer == 0, "fs-verity: {}", std::io::Error::last_os_error());
    Ok(())
}

/// A page behind the end of a file is no miss, whoever has brought it in.
fn stage08_knows_the_end_of_a_file() -> Result<()> {
    let files = PastTheEnd::new()?;
    let running = Running::stage("stage08", &[])?;
    let judged = files.read()?;
    files.judge(&running.interrupt()?, &judged)?;
    compared("mincore agrees with your reads past the end of two files");
    Ok(())
}

/// Nor is it one for the other programs that count hits and misses.
fn others_know_the_end_of_a_file() -> Result<()> {
    let files = PastTheEnd::new()?;
    let me = std::process::id().to_string();
    let listen = format!("127.0.0.1:{}", exporter::PORT);
    // cachetop looks up the names of users when it prints, and the exporter counts these reads, too.
    let [stage, top, server] = Running::stages([
        ("stage09", vec![&*me]),
        ("cachetop", vec!["--json", "--interval", "1h"]),
        ("exporter", vec!["--listen", &listen]),
    ])?
    .try_into()
    .map_err(|_| anyhow!("three programs"))?;
    let scraped = || -> Result<[u64; 3]> {
        let scrape = Scrape::now()?;
        let figure = |result| format!("storage_page_cache_pages_total{{result=\"{result}\"}}");
        Ok(["hit", "miss", "readahead"].map(|result| scrape.get(&figure(result)) as u64))
    };
    let before = scraped()?;
    let judged = files.read()?;
    let after = scraped()?;
    let reads = judged.concat();
    let readahead: u64 = files.readahead(&judged)?.iter().sum();
    let expected = [sum(&reads, |read| read.hit), sum(&reads, |read| read.miss), readahead];
    let counted = [0, 1, 2].map(|n| after[n] - before[n]);
    ensure!(counted == expected, "exporter: {counted:?}, not {expected:?}");
    server.interrupt()?;
    let output = top.interrupt()?;
    let report = CachetopReport::parse(&output)?;
    let counted = ["hits", "misses", "readahead"].map(|what| report.own(what));
    ensure!(counted == expected, "cachetop: {counted:?}, not {expected:?}: {output}");
    files.judge(&stage.interrupt()?, &judged)
}

fn stage09_leaves_other_processes_out() -> Result<()> {
    let mounted = Mounted::new()?;
    let (mine, theirs) = (new_file(&mounted, "mine", MIB)?, new_file(&mounted, "theirs", MIB)?);
    let running = start_for_me()?;
    shell("dd if=/mnt/data/pagecache-theirs of=/dev/null bs=4k status=none")?;
    let judged = mine.read_all(5 * page_size())?;
    shell("dd if=/mnt/data/pagecache-mine of=/dev/null bs=4k status=none")?;
    let output = running.interrupt()?;
    same("mine", &judged, &printed(&output, &mine)?.0)?;
    let (reads, _) = printed(&output, &theirs)?;
    ensure!(reads.is_empty(), "read by dd: {reads:?}");
    let reads = judged.len();
    compared(&format!("mincore agrees with your {reads} reads; of dd's you printed none"));
    let named = output.contains(&format!("Filtered PID : {}\n", std::process::id()));
    ensure!(named, "no line \"Filtered PID\" with the process:\n{output}");
    ensure!(
        count(&output, "unmatched")? == 0,
        "reads of other processes count as unmatched:\n{output}"
    );
    totals(&output)
}

/// A file of another file system that has a given inode number: it gives them one after the other.
fn twin(inode: u64) -> Result<String> {
    for number in 0..10_000 {
        let path = format!("/run/ext4/{number}");
        fs::write(&path, [1; 5000])?;
        if fs::metadata(&path)?.ino() == inode {
            return Ok(path);
        }
    }
    bail!("no file there has the inode number {inode}")
}

/// Judges the exercise with a filter by file, for `cargo lesson`.
pub fn exercise_inode() -> Result<()> {
    let mounted = Mounted::new()?;
    // The first inodes of a file system are its own, such as that of lost+found.
    let _spare = ["spare1", "spare2", "spare3"].map(|name| new_file(&mounted, name, page_size()));
    let (this, other) = (new_file(&mounted, "this", MIB)?, new_file(&mounted, "other", MIB)?);
    let running = Running::stage(EXERCISE, &[&this.path])?;
    // On a disk of another driver with the same minor number, and on another disk of this driver.
    let same_minor = NullBlk::new("same", "memory_backed=1 size=64")?;
    let minors = [&mounted.disk, &same_minor.name].map(|disk| disks::numbers(disk));
    let minor =
        |numbers: &Result<String>| Some(numbers.as_ref().ok()?.split_once(':')?.1.to_owned());
    ensure!(minor(&minors[0]) == minor(&minors[1]), "{minors:?}: the test does not test");
    let of_driver = Mounted::made("ext4", &same_minor.name, "noatime")?;
    shell(&format!("cat {} >/dev/null", twin(this.inode)?))?;
    drop(of_driver);
    let _other = Mounted::made("ext4", &disks::virtio()?, "noatime")?;
    let twin = twin(this.inode)?;
    // A file of the same name elsewhere, and another name of this file.
    shell(&format!(
        "mkdir -p /mnt/data/elsewhere; cp {0} /mnt/data/elsewhere/pagecache-this; ln {1} /mnt/data/link
         cat {0} {2} /mnt/data/elsewhere/* >/dev/null",
        other.path, this.path, twin
    ))?;
    let mut judged = this.read_all(5 * page_size())?;
    shell("dd if=/mnt/data/link of=/dev/null bs=512k status=none")?;
    // dd's reads: all of it is there by now, and it asks once more at the end.
    for (n, got) in [512 << 10, 512 << 10, 0].into_iter().enumerate() {
        let (offset, hit) = (n as u64 * (512 << 10), got as u64 / page_size());
        judged.push(Read { offset, bytes: 512 << 10, hit, miss: 0, got });
    }
    let resident = this.settled(0, this.size)?;
    let output = running.interrupt()?;
    let (reads, readahead) = printed(&output, &this)?;
    same("the file", &judged, &reads)?;
    let misses: u64 = judged.iter().map(|read| read.miss).sum();
    ensure!(
        misses + readahead == resident && readahead > 0,
        "{readahead} readahead; {resident} pages are in memory, of which {misses} were missed: {output}"
    );
    let (reads, _) = printed(&output, &other)?;
    ensure!(reads.is_empty(), "reads of another file: {reads:?}");
    let reads = judged.len();
    compared(&format!(
        "{reads} reads, 3 of them dd's: yours have the same hits and misses; of two other files you \
         printed none"
    ));
    sums(&output, judged.len())?;
    ensure_none(&output, &["dropped", "in flight", "unmatched"])
}

/// 1 MiB of a file on the data disk, 64 KiB at a time, by dd, which first waits for the [`Gate`].
pub fn reader(name: &str) -> String {
    after_go(&format!("dd if=/mnt/data/{name} of=/dev/null bs=64k count=16 status=none"))
}

/// The script of a process that waits for the [`Gate`], and then becomes `command`.
fn after_go(command: &str) -> String {
    format!("{}; exec {command}", Gate::WAIT)
}

/// A process has a number in its own PID namespace, and another one outside: two runs of the program filter
/// by the same reader, one on each side.
fn stage09_knows_pid_namespaces() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = new_file(&mounted, "one", MIB)?;
    let unshare = ["--pid", "--fork", "--mount-proc", "bash", "-c"];
    // The reader is process 2 there, as another process is outside.
    let gate = Gate::new()?;
    let stage = program("stage09");
    let inside = format!(
        "({}) & reader=$!; {} $reader & stage=$!; wait $reader; kill $stage; wait $stage",
        reader("pagecache-one"),
        stage.display()
    );
    let mut running = Running::spawn(Command::new("unshare").args(unshare).arg(&inside))?;
    running.wait_for("tracing")?;
    let first_child = |process: &str| -> Result<String> {
        let children = fs::read_to_string(format!("/proc/{process}/task/{process}/children"))?;
        Ok(children.split(' ').next().context("no child")?.to_owned())
    };
    let reader = first_child(&first_child(&running.id().to_string())?)?;
    let outside = Running::stage("stage09", &[&reader])?;
    gate.open()?;
    let ended = running.end_well()?;
    for (output, process) in [(ended.stdout, "2"), (outside.interrupt()?, &*reader)] {
        let is_named = output.contains(&format!("Filtered PID : {process}\n"));
        ensure!(is_named, "no line `Filtered PID : {process}`: {output}");
        // Each run has the lines of both, but for those of a ring buffer of its own.
        let (lines, all) = (printed(&output, &file)?.0.len(), events(&output)?.len() as u64);
        let runs = if output.contains(" trace lines, ") { 2 } else { 1 };
        let yours = count(&output, "reads through the page cache")?;
        let figures = format!(
            "dd, process {process} here, reads 16 times, and both runs print that; {lines} lines, and \
             {yours} of {all} reads are counted"
        );
        judge(lines == 16 * runs && runs as u64 * yours == all, &figures, &output)?;
    }
    Ok(())
}

fn stage09_without_a_process_is_stage08() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = new_file(&mounted, "all", MIB)?;
    let dd = "dd if=/mnt/data/pagecache-all of=/dev/null bs=4k status=none";
    let (_, output) = beside("stage09", &[], || shell(dd))?;
    let lines = printed(&output, &file)?.0.len();
    ensure!(lines == 257, "dd read 257 times, you printed {lines} reads:\n{output}");
    ensure!(
        !output.contains("Filtered"),
        "there is no process, and a line \"Filtered\":\n{output}"
    );
    compared("dd read 257 times; you printed 257 reads");
    totals(&output)
}
