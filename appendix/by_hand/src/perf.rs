//! The system call perf_event_open(2): tracepoints, and the rings that programs send records through.

use std::{
    collections::BTreeMap,
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use common_base::{available, mib};

use crate::{
    bpf::{LoadedProgram, Map, MapKind, online_cpus, possible_cpus},
    message::{Unsupported, Usage},
    tracefs::tracefs,
};

const TYPE_SOFTWARE: u32 = 1;
const TYPE_TRACEPOINT: u32 = 2;
const COUNT_SW_BPF_OUTPUT: u64 = 10;
const SAMPLE_RAW: u64 = 1 << 10;
const FLAG_FD_CLOEXEC: libc::c_ulong = 8;
// Requests of ioctl(2): _IO('$', n), and _IOW('$', 8, u32).
const IOC_ENABLE: libc::c_ulong = 0x2400;
const IOC_SET_BPF: libc::c_ulong = 0x4004_2408;

// Kinds of records in a ring.
const RECORD_LOST: u32 = 2;
const RECORD_SAMPLE: u32 = 9;

/// The first version of `struct perf_event_attr`, which every kernel takes.
#[repr(C)]
#[derive(Default)]
struct EventAttributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint: u32,
    config1: u64,
}

/// Opens an event of all processes on one CPU.
fn open_event(kind: u32, config: u64, cpu: u32) -> io::Result<OwnedFd> {
    let attributes = EventAttributes {
        kind,
        size: size_of::<EventAttributes>() as u32,
        config,
        sample_period: 1,
        sample_type: SAMPLE_RAW,
        wakeup_events: 1,
        ..Default::default()
    };
    let (every_process, no_group) = (-1, -1);
    // SAFETY: the attributes have the size that they name.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            every_process,
            cpu,
            no_group,
            FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

fn control(event: &OwnedFd, request: libc::c_ulong, argument: i32) -> io::Result<()> {
    // SAFETY: neither request takes an address.
    match unsafe { libc::ioctl(event.as_raw_fd(), request, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A program that runs whenever the kernel passes a tracepoint, until this is dropped.
pub struct Attached {
    _event: OwnedFd,
}

impl Attached {
    /// Attaches `program` to the tracepoint `sys_enter_NAME` or `sys_exit_NAME`.
    ///
    /// The event is opened on one CPU, but the program runs on all of them: it belongs to the
    /// tracepoint, not to the event.
    pub fn to_syscall(program: &LoadedProgram, side: &str, syscall: &str) -> Result<Attached> {
        let events = tracefs()?.join("events/syscalls");
        let id = events.join(format!("{side}_{syscall}/id"));
        let id = fs::read_to_string(&id).with_context(|| id.display().to_string())?;
        let id = id.trim().parse().with_context(|| format!("{syscall}: the id is {id:?}"))?;
        let cpu = online_cpus()?.first().copied().unwrap_or_default();
        let name = program.name();
        let event = open_event(TYPE_TRACEPOINT, id, cpu)
            .with_context(|| format!("perf_event_open(2) failed for {side}_{syscall}"))?;
        control(&event, IOC_SET_BPF, program.number())
            .and_then(|()| control(&event, IOC_ENABLE, 0))
            .with_context(|| format!("{name} could not be attached to {side}_{syscall}"))?;
        Ok(Attached { _event: event })
    }
}

/// Checks that the kernel has tracepoints of this system call; else names those alike.
pub fn check_syscall(name: &str) -> Result<()> {
    let directory = tracefs()?.join("events/syscalls");
    let entries = fs::read_dir(&directory).map_err(|_| {
        Unsupported(format!(
            "{} is missing: this kernel was built without CONFIG_FTRACE_SYSCALLS",
            directory.display()
        ))
    })?;
    let mut known: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|entry| entry.strip_prefix("sys_enter_").map(str::to_owned))
        .collect();
    if known.iter().any(|known| known == name) {
        return Ok(());
    }
    let likeness = |known: &String| strsim::jaro_winkler(known, name);
    known.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)).then_with(|| a.cmp(b)));
    known.truncate(5);
    Err(Usage(format!(
        "this kernel has no system call {name:?}\n  Similar names: {}\n  All names: ls -d {}/sys_enter_*",
        known.join(", "),
        directory.display()
    ))
    .into())
}

/// What a ring gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Record {
    /// What a program sent, with up to seven bytes behind it that fill the record.
    Sample(Vec<u8>),
    /// So many samples found no room.
    Lost(u64),
}

/// A ring for each CPU that is on, and the map through which programs find theirs.
pub struct Rings {
    /// For `bpf_perf_event_output()`.
    pub map: Map,
    rings: BTreeMap<u32, Ring>,
}

impl Rings {
    /// Makes rings of `pages` pages; that must be a power of two.
    pub fn new(pages: usize) -> Result<Rings> {
        let map = Map::new(MapKind::PerfEventArray, "rings", 4, 4, possible_cpus()? as u32)?;
        let mut rings = BTreeMap::new();
        let cpus = online_cpus()?;
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        let (needed, available) = (cpus.len() as u64 * pages as u64 * page, available());
        if let Some(available) = available.filter(|available| needed > *available) {
            return Err(Usage(format!(
                "rings of {pages} pages for {} CPUs need {}, and {} of memory are available: give fewer with \
                 --pages",
                cpus.len(),
                mib(needed),
                mib(available)
            ))
            .into());
        }
        for cpu in cpus {
            let ring = Ring::new(cpu, pages).with_context(|| format!("the ring of CPU {cpu}"))?;
            map.update(cpu, ring.event.as_raw_fd() as u32)?;
            rings.insert(cpu, ring);
        }
        Ok(Rings { map, rings })
    }

    /// Waits until a ring has records, at most `limit`.
    pub fn wait(&self, limit: Duration) -> Result<()> {
        let mut events: Vec<libc::pollfd> = self
            .rings
            .values()
            .map(|ring| libc::pollfd {
                fd: ring.event.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        let limit = limit.as_millis() as i32;
        // SAFETY: the array has the length that is given.
        let ready = unsafe { libc::poll(events.as_mut_ptr(), events.len() as libc::nfds_t, limit) };
        let error = io::Error::last_os_error();
        ensure!(ready >= 0 || error.kind() == io::ErrorKind::Interrupted, "poll(2): {error}");
        Ok(())
    }

    /// Takes what is in the rings now, each ring's records in the order in which they were sent.
    pub fn take(&mut self) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for ring in self.rings.values_mut() {
            records.extend(ring.take()?);
        }
        Ok(records)
    }
}

/// Memory that the kernel and this process share: a page that says how far each has come, and the
/// ring itself. The kernel writes at `head`, we read at `tail`; both only ever grow, and the place in
/// the ring is what remains after a division by its size.
struct Ring {
    event: OwnedFd,
    memory: *mut u8,
    page: usize,
    size: usize,
}

// In the first page, `struct perf_event_mmap_page`.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

impl Ring {
    fn new(cpu: u32, pages: usize) -> Result<Ring> {
        let event = open_event(TYPE_SOFTWARE, COUNT_SW_BPF_OUTPUT, cpu)
            .context("perf_event_open(2) failed")?;
        // SAFETY: asks for a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let size = page * pages;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let memory = unsafe {
            libc::mmap(
                ptr::null_mut(),
                page + size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("it could not be mapped");
        }
        let ring = Ring { event, memory: memory.cast(), page, size };
        control(&ring.event, IOC_ENABLE, 0).context("it could not be enabled")?;
        Ok(ring)
    }

    fn position(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: an aligned number in the first page, which lives as long as `self`.
        unsafe { AtomicU64::from_ptr(self.memory.add(offset).cast()) }
    }

    fn take(&mut self) -> Result<Vec<Record>> {
        // What the kernel wrote before it moved `head` is read after `head` is.
        let head = self.position(DATA_HEAD).load(Ordering::Acquire);
        let tail = self.position(DATA_TAIL).load(Ordering::Relaxed);
        let length = (head - tail) as usize;
        ensure!(length <= self.size, "a ring holds {length} of {} bytes", self.size);
        let start = tail as usize % self.size;
        let first = length.min(self.size - start);
        let mut bytes = vec![0_u8; length];
        // SAFETY: both parts lie in the ring, behind the first page; the kernel writes to neither
        // before `tail` moves. The second part begins where the ring does: it wraps around.
        unsafe {
            let data = self.memory.add(self.page);
            ptr::copy_nonoverlapping(data.add(start), bytes.as_mut_ptr(), first);
            ptr::copy_nonoverlapping(data, bytes.as_mut_ptr().add(first), length - first);
        }
        // What we have read may be overwritten only now.
        self.position(DATA_TAIL).store(head, Ordering::Release);
        records(&bytes)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: our own mapping, of which there are no references.
        unsafe { libc::munmap(self.memory.cast(), self.page + self.size) };
    }
}

/// The records of a part of a ring. Each begins with a header of eight bytes: the kind, flags, and the
/// size of the record with its header.
fn records(mut bytes: &[u8]) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    let number = |bytes: &[u8], at| u32_at(bytes, at).context("a record is cut short");
    while !bytes.is_empty() {
        let (kind, size) = (number(bytes, 0)?, (number(bytes, 4)? >> 16) as usize);
        ensure!(size >= 8 && size <= bytes.len(), "a record of {size} bytes in {}", bytes.len());
        let (record, rest) = bytes.split_at(size);
        match kind {
            // Four bytes with the length of what follows, then what the program sent.
            RECORD_SAMPLE => {
                let length = number(record, 8)? as usize;
                let sample = record.get(12..12 + length).context("a sample is cut short")?;
                records.push(Record::Sample(sample.to_vec()));
            }
            // Eight bytes with the event's number, then how many were lost.
            RECORD_LOST => {
                let (low, high) = (number(record, 16)?, number(record, 20)?);
                records.push(Record::Lost(u64::from(low) | u64::from(high) << 32));
            }
            _ => {}
        }
        bytes = rest;
    }
    Ok(records)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(content: &[u8]) -> Vec<u8> {
        let size = 12 + content.len() as u16;
        let mut record = RECORD_SAMPLE.to_ne_bytes().to_vec();
        record.extend([[0, 0], size.to_ne_bytes()].concat());
        record.extend((content.len() as u32).to_ne_bytes());
        record.extend(content);
        record
    }

    #[test]
    fn records_follow_each_other() {
        let mut lost = RECORD_LOST.to_ne_bytes().to_vec();
        lost.extend([[0, 0], 24_u16.to_ne_bytes()].concat());
        lost.extend([7_u64.to_ne_bytes(), 3_u64.to_ne_bytes()].concat());
        let other = [5_u32.to_ne_bytes(), [0, 0, 8, 0]].concat();
        let bytes = [sample(b"first"), lost, other, sample(b"second")].concat();
        let expected = [
            Record::Sample(b"first".to_vec()),
            Record::Lost(3),
            Record::Sample(b"second".to_vec()),
        ];
        assert_eq!(records(&bytes).unwrap(), expected);
        assert_eq!(records(&[]).unwrap(), []);
        assert!(records(&bytes[..bytes.len() - 1]).is_err());
        assert!(records(&[0; 8]).is_err(), "a record of no bytes would never end");
    }

    /// A ring in memory of our own.
    #[test]
    fn a_ring_wraps_around() {
        let (page, size) = (4096, 64);
        let mut memory = vec![0_u64; (page + size) / 8];
        let bytes = memory.as_mut_ptr().cast::<u8>();
        let event = OwnedFd::from(fs::File::open("/dev/null").unwrap());
        let mut ring = std::mem::ManuallyDrop::new(Ring { event, memory: bytes, page, size });
        let (mut head, mut sent) = (0_u64, 0_u8);
        for _ in 0..100 {
            for byte in sample(&[sent; 12]) {
                // SAFETY: within the ring.
                unsafe { bytes.add(page + head as usize % size).write(byte) };
                head += 1;
            }
            ring.position(DATA_HEAD).store(head, Ordering::Release);
            assert_eq!(ring.take().unwrap(), [Record::Sample(vec![sent; 12])]);
            assert_eq!(ring.position(DATA_TAIL).load(Ordering::Relaxed), head);
            sent += 1;
        }
        assert_eq!(ring.take().unwrap(), []);
    }
}
