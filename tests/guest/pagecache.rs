//! Stages 08 and 09: every read that they print, judged by mincore() before that read.

use std::{
    fs::{self, File, OpenOptions},
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt},
    },
    ptr, thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    disks::{self, Mapped},
    run::{Running, count, shell, wait_until},
};

pub const TESTS: &[Test] = &[
    ("stage08_sequential_reads", stage08_sequential_reads),
    ("stage08_random_reads", stage08_random_reads),
    ("stage08_odd_ranges", stage08_odd_ranges),
    ("stage08_pages_on_their_way_are_misses", stage08_pages_on_their_way_are_misses),
    ("stage08_block_device", stage08_block_device),
    ("stage08_threads", stage08_threads),
    ("stage08_other_ways_to_data_are_no_reads", stage08_other_ways_to_data_are_no_reads),
];

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A read, as it was asked for, and its pages that were resident and those that were not.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
struct Read {
    offset: u64,
    bytes: u64,
    hit: u64,
    miss: u64,
}

/// A file whose pages in memory can be counted.
struct Watched {
    file: File,
    map: *mut libc::c_void,
    size: u64,
    /// Of the disk below: how many requests are on their way.
    inflight: File,
    inode: u64,
    /// `254:0`
    device: String,
}

// SAFETY: the mapping is never read or written, only asked about, from any thread.
unsafe impl Sync for Watched {}

impl Watched {
    /// Opens `path`, which lies on (or is) the disk `disk`, with the cache empty of it.
    fn cold(path: &str, disk: &str) -> Result<Watched> {
        let file = File::open(path).with_context(|| path.to_owned())?;
        let metadata = file.metadata()?;
        let (size, device) = if metadata.file_type().is_block_device() {
            let sectors = fs::read_to_string(format!("/sys/class/block/{disk}/size"))?;
            (sectors.trim().parse::<u64>()? * 512, metadata.rdev())
        } else {
            (metadata.size(), metadata.dev())
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let map = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size as usize,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        ensure!(map != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let inflight = File::open(format!("/sys/class/block/{disk}/inflight"))?;
        let watched = Watched { file, map, size, inflight, inode: metadata.ino(), device };
        watched.chill()?;
        Ok(watched)
    }

    /// Empties the cache of this file.
    fn chill(&self) -> Result<()> {
        // A page that another CPU has just used is let go of later.
        wait_until("an empty cache", || {
            shell("sync")?;
            self.advise(libc::POSIX_FADV_DONTNEED, 0, 0)?;
            Ok(self.resident(0, self.size)? == 0)
        })
    }

    fn advise(&self, advice: i32, offset: u64, bytes: u64) -> Result<()> {
        // SAFETY: a system call without pointers.
        let error = unsafe {
            libc::posix_fadvise(self.file.as_raw_fd(), offset as i64, bytes as i64, advice)
        };
        ensure!(error == 0, "posix_fadvise: {error}");
        Ok(())
    }

    /// How many pages of the range are resident: mincore().
    fn resident(&self, offset: u64, bytes: u64) -> Result<u64> {
        let first = offset / PAGE;
        let all = pages(offset, bytes, self.size);
        if all == 0 {
            return Ok(0);
        }
        let mut pages = vec![0; all as usize];
        // SAFETY: the range lies in the mapping, and `pages` has a byte for each of its pages.
        let answer = unsafe {
            let start = self.map.byte_add((first * PAGE) as usize);
            libc::mincore(start, (all * PAGE) as usize, pages.as_mut_ptr())
        };
        ensure!(answer == 0, "mincore: {}", std::io::Error::last_os_error());
        Ok(pages.iter().filter(|page| **page & 1 == 1).count() as u64)
    }

    /// Waits until no page of the range is on its way from the disk; how many are resident then.
    fn settled(&self, offset: u64, bytes: u64) -> Result<u64> {
        let all = pages(offset, bytes, self.size);
        let mut before = u64::MAX;
        loop {
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
    fn read(&self, offset: u64, bytes: u64) -> Result<Read> {
        let hit = self.settled(offset, bytes)?;
        self.read_now(offset, bytes, hit)
    }

    fn read_now(&self, offset: u64, bytes: u64, hit: u64) -> Result<Read> {
        let mut buffer = vec![0; bytes as usize];
        self.file.read_at(&mut buffer, offset)?;
        Ok(Read { offset, bytes, hit, miss: pages(offset, bytes, self.size) - hit })
    }

    /// Reads the whole file and once more at its end, as `cat` does.
    fn read_all(&self, bytes: u64) -> Result<Vec<Read>> {
        (0..=self.size / bytes).map(|n| self.read(n * bytes, bytes)).collect()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which there are no references.
        unsafe { libc::munmap(self.map, self.size as usize) };
    }
}

/// How many pages of a file of that size the range touches.
fn pages(offset: u64, bytes: u64, size: u64) -> u64 {
    let end = (offset + bytes).min(size);
    if offset < end { end.div_ceil(PAGE) - offset / PAGE } else { 0 }
}

/// The ext4 file system of the data disk, as long as it is needed.
struct Mounted {
    disk: String,
}

impl Mounted {
    fn new() -> Result<Mounted> {
        let disk = disks::data()?;
        shell(&format!("mkdir -p /mnt/data; mount -t ext4 /dev/{disk} /mnt/data"))?;
        Ok(Mounted { disk })
    }

    /// A new file, no page of which is in memory.
    fn file(&self, name: &str, size: u64) -> Result<Watched> {
        let path = format!("/mnt/data/pagecache-{name}");
        fs::write(&path, vec![1; size as usize])?;
        Watched::cold(&path, &self.disk)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        shell("rm -f /mnt/data/pagecache-*; umount /mnt/data").ok();
    }
}

/// What the stage has printed about the reads of a file, in this order, and their readahead.
fn printed(output: &str, file: &Watched) -> Result<(Vec<Read>, u64)> {
    let (mut reads, mut readahead) = (Vec::new(), 0);
    for event in events(output)? {
        if number(&event, "inode=")? == file.inode
            && event.contains(&format!(" dev={} ", file.device))
        {
            // 5.10 makes a page of zeroes past the end of a file that is read there.
            if number(&event, "offset=")? < file.size {
                readahead += number(&event, "readahead ")?;
            }
            reads.push(Read {
                offset: number(&event, "offset=")?,
                bytes: number(&event, "bytes=")?,
                hit: number(&event, "hit ")?,
                miss: number(&event, "miss ")?,
            });
        }
    }
    Ok((reads, readahead))
}

/// The event lines, one for each read; where bpf_printk() takes few values, a read has three.
fn events(output: &str) -> Result<Vec<String>> {
    let complete = ["trace lines, 0 lost", "No event was seen"];
    ensure!(complete.iter().any(|end| output.contains(end)), "lines were lost: {output}");
    let mut events = Vec::new();
    let mut begun = std::collections::HashMap::<String, String>::new();
    for line in output.lines() {
        let Some((prefix, said)) = line.split_once("bpf_trace_printk: ") else { continue };
        let thread = prefix.split(" [").next().unwrap_or_default().trim().to_owned();
        let event = begun.entry(thread.clone()).or_default();
        *event = format!("{event} {}", said.trim());
        if said.contains("readahead ") {
            events.extend(begun.remove(&thread));
        }
    }
    Ok(events)
}

fn number(event: &str, name: &str) -> Result<u64> {
    let (_, rest) = event.split_once(name).with_context(|| format!("no {name} in {event}"))?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().with_context(|| event.to_owned())
}

/// Traces `work`, and compares what the stage says of the file with what the judge has said.
fn check(what: &str, file: &Watched, work: impl FnOnce() -> Result<Vec<Read>>) -> Result<String> {
    let running = Running::stage("stage08", &[])?;
    let before = file.resident(0, file.size)?;
    let judged = work()?;
    file.settled(0, file.size)?;
    let output = running.interrupt()?;
    let after = file.resident(0, file.size)?;
    let (printed, readahead) = printed(&output, file)?;
    same(what, &judged, &printed)?;
    let misses: u64 = judged.iter().map(|read| read.miss).sum();
    ensure!(
        before + misses + readahead == after,
        "{what}: {before} pages, {misses} misses, readahead {readahead}, then {after} pages{}",
        if std::env::var_os("DBG").is_some() { output.clone() } else { String::new() }
    );
    totals(&output)?;
    Ok(output)
}

fn same(what: &str, judged: &[Read], printed: &[Read]) -> Result<()> {
    ensure!(
        judged.len() == printed.len(),
        "{what}: {} reads, {} printed",
        judged.len(),
        printed.len()
    );
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
    let events = events(output)?;
    let sum = |name| events.iter().map(|event| number(event, name)).sum::<Result<u64>>();
    let (hit, miss) = (sum("hit ")?, sum("miss ")?);
    let total = format!("[Total {} Hit {hit} miss {miss}]", hit + miss);
    ensure!(output.contains(&total), "not {total}: {output}");
    ensure!(count(output, "readahead")? == sum("readahead ")?, "readahead: {output}");
    let reads =
        if events.is_empty() { "No ".into() } else { format!(" {} reads through", events.len()) };
    ensure!(output.contains(&reads), "{reads}: {output}");
    for nothing in ["dropped", "missed", "in flight"] {
        ensure!(count(output, nothing)? == 0, "{output}");
    }
    Ok(())
}

fn stage08_sequential_reads() -> Result<()> {
    let mounted = Mounted::new()?;
    for (size, bytes) in [
        (MIB, PAGE),
        (MIB, 1000),
        (MIB, 4 * MIB),
        (64 * MIB, 64 * 1024),
        (64 * MIB, MIB + PAGE),
        (64 * MIB, 64 * MIB),
    ] {
        let what = format!("{size} bytes, {bytes} at a time");
        let file = mounted.file("sequential", size)?;
        check(&format!("{what}, cold"), &file, || file.read_all(bytes))?;
        let output = check(&format!("{what}, warm"), &file, || file.read_all(bytes))?;
        let (reads, _) = printed(&output, &file)?;
        ensure!(reads.iter().all(|read| read.miss == 0), "{what}: a second read misses: {output}");
    }
    Ok(())
}

fn stage08_random_reads() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = mounted.file("random", 64 * MIB)?;
    file.advise(libc::POSIX_FADV_RANDOM, 0, 0)?;
    let mut seed = 1_u64;
    let offsets: Vec<u64> = (0..500)
        .map(|_| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % (file.size / PAGE) * PAGE
        })
        .collect();
    let read = || offsets.iter().map(|offset| file.read(*offset, PAGE)).collect();
    check("random, cold", &file, read)?;
    let output = check("random, warm", &file, read)?;
    ensure!(printed(&output, &file)?.0.iter().all(|read| read.miss == 0), "{output}");
    Ok(())
}

fn stage08_odd_ranges() -> Result<()> {
    let mounted = Mounted::new()?;
    let size = MIB + 100;
    let file = mounted.file("odd", size)?;
    file.advise(libc::POSIX_FADV_RANDOM, 0, 0)?;
    check("odd", &file, || {
        [
            (10 * PAGE, 10 * PAGE),    // cold
            (5 * PAGE, 10 * PAGE),     // the second half is there
            (15 * PAGE, 10 * PAGE),    // the first half is
            (30 * PAGE, PAGE),         // an island
            (26 * PAGE, 9 * PAGE),     // around it
            (40 * PAGE + 1, 1),        // a byte
            (42 * PAGE - 1, 2),        // two pages for two bytes
            (44 * PAGE + 7, 3 * PAGE), // unaligned: four pages
            (60 * PAGE, 70 * PAGE),    // over the border of a node of the tree
            (size - 50, 10 * PAGE),    // past the end
            (size, PAGE),              // at the end
            (size + 10 * PAGE, PAGE),  // beyond it
            (0, 2 * MIB),              // all of it, and more
        ]
        .into_iter()
        .map(|(offset, bytes)| file.read(offset, bytes))
        .collect()
    })?;
    // A file of one page, which needs no tree, and one of none.
    for (name, size) in [("page", 10), ("node", 64 * PAGE), ("nodes", 64 * PAGE + 1)] {
        let file = mounted.file(name, size)?;
        check(name, &file, || Ok([file.read_all(MIB)?, file.read_all(MIB)?].concat()))?;
    }
    Ok(())
}

/// A page that is in the cache, but waits for its data, is not resident: the reader waits too.
fn stage08_pages_on_their_way_are_misses() -> Result<()> {
    let disk = disks::virtio()?;
    let slow = Mapped::new("slow", &format!("0 131072 delay /dev/{disk} 0 500"))?;
    let file = Watched::cold(&slow.path(), &slow.disk()?)?;
    let running = Running::stage("stage08", &[])?;
    let mut judged = vec![file.read(0, 4 * PAGE)?];
    file.advise(libc::POSIX_FADV_WILLNEED, 8 * MIB, 16 * PAGE)?;
    let hit = file.resident(8 * MIB, 16 * PAGE)?;
    ensure!(hit == 0, "the delayed pages are there: the test does not test");
    judged.push(file.read_now(8 * MIB, 8 * PAGE, hit)?);
    judged.push(file.read(8 * MIB, 8 * PAGE)?);
    let output = running.interrupt()?;
    same("on their way", &judged, &printed(&output, &file)?.0)?;
    totals(&output)
}

fn stage08_block_device() -> Result<()> {
    let disk = disks::virtio()?;
    let device = Watched::cold(&format!("/dev/{disk}"), &disk)?;
    let read = || (0..64).map(|n| device.read(n * 16 * PAGE + 512, 16 * PAGE)).collect();
    check("block device, cold", &device, read)?;
    let output = check("block device, warm", &device, read)?;
    ensure!(printed(&output, &device)?.0.iter().all(|read| read.miss == 0), "{output}");
    Ok(())
}

fn stage08_threads() -> Result<()> {
    let mounted = Mounted::new()?;
    let names = ["t0", "t1", "t2", "t3"];
    let files: Vec<Watched> =
        names.iter().map(|name| mounted.file(name, 4 * MIB)).collect::<Result<_>>()?;
    let running = Running::stage("stage08", &[])?;
    let judged: Vec<Vec<Read>> = thread::scope(|scope| {
        let threads: Vec<_> = files
            .iter()
            .map(|file| {
                scope.spawn(|| Ok([file.read_all(3 * PAGE)?, file.read_all(64 * PAGE)?].concat()))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect::<Result<_>>()
    })?;
    let output = running.interrupt()?;
    for ((file, judged), name) in files.iter().zip(&judged).zip(names) {
        same(name, judged, &printed(&output, file)?.0).with_context(|| output.clone())?;
    }
    totals(&output)
}

fn stage08_other_ways_to_data_are_no_reads() -> Result<()> {
    let mounted = Mounted::new()?;
    let file = mounted.file("other", MIB)?;
    let path = "/mnt/data/pagecache-other";
    let running = Running::stage("stage08", &[])?;
    // Faults.
    for page in 0..16 {
        // SAFETY: within the mapping; the file is not shortened meanwhile.
        unsafe { self::ptr::read_volatile(file.map.byte_add(page * PAGE as usize) as *const u8) };
    }
    // Writes, of whole pages and of a part, which reads the page first.
    let writable = OpenOptions::new().write(true).open(path)?;
    writable.write_all_at(&[1; 8192], 64 * PAGE)?;
    writable.write_all_at(&[1; 100], 80 * PAGE)?;
    writable.sync_all()?;
    // Past the page cache.
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)?;
    let mut buffer = vec![0; 2 * 65536];
    let start = buffer.as_ptr().align_offset(4096);
    direct.read_exact_at(&mut buffer[start..start + 65536], 0)?;
    let output = running.interrupt()?;
    let (reads, _) = printed(&output, &file)?;
    ensure!(reads.is_empty(), "no reads: {reads:?}");
    totals(&output)
}
