//! The system call bpf(2): maps and programs.

use std::{
    ffi::CStr,
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use anyhow::{Context, Result, bail};

use crate::{
    insn::Code,
    message::{Unsupported, say},
};

// Commands of bpf(2).
const MAP_CREATE: i32 = 0;
const MAP_LOOKUP_ELEM: i32 = 1;
const MAP_UPDATE_ELEM: i32 = 2;
const MAP_GET_NEXT_KEY: i32 = 4;
const PROG_LOAD: i32 = 5;
const OBJ_GET_INFO_BY_FD: i32 = 15;
const ENABLE_STATS: i32 = 32;

/// The type of our programs: attached to a tracepoint of perf.
const PROG_TYPE_TRACEPOINT: u32 = 5;
/// Allows the helpers that only programs under the GPL may call, like bpf_trace_printk().
const LICENSE: &CStr = c"GPL";
/// Room for the verifier's log, in bytes; a longer one would be an error of its own.
const LOG_SIZE: usize = 1 << 20;

/// The attributes of a command are the first members of `union bpf_attr`; the kernel takes those
/// that it is not given for zero.
#[repr(C)]
struct MapAttributes {
    kind: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    inner_map: u32,
    numa_node: u32,
    name: [u8; 16],
}

#[repr(C)]
struct ElementAttributes {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgramAttributes {
    kind: u32,
    instructions: u32,
    address: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

#[repr(C)]
struct InfoAttributes {
    object: u32,
    length: u32,
    info: u64,
}

/// The beginning of `struct bpf_prog_info`.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    unused: [u64; 23],
    run_time_ns: u64,
    run_count: u64,
    recursion_misses: u64,
}

/// Calls bpf(2).
///
/// # Safety
/// `Attributes` must have the layout of this command's part of `union bpf_attr`, and its addresses
/// must be valid for what the command reads and writes there.
unsafe fn bpf<Attributes>(command: i32, attributes: &mut Attributes) -> io::Result<i32> {
    // SAFETY: the kernel reads and writes no more than the given size; the caller vouches for the rest.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size_of::<Attributes>())
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

/// Calls bpf(2) with a command that returns a new file descriptor.
///
/// # Safety
/// As for `bpf`.
unsafe fn bpf_open<Attributes>(command: i32, attributes: &mut Attributes) -> io::Result<OwnedFd> {
    // SAFETY: the caller vouches for the attributes; a new descriptor has no other owner.
    unsafe { bpf(command, attributes).map(|fd| OwnedFd::from_raw_fd(fd)) }
}

/// At most 15 characters of a name, for bpftool; the rest are zeroes.
fn name_of(name: &str) -> [u8; 16] {
    let mut field = [0; 16];
    field.iter_mut().take(15).zip(name.bytes()).for_each(|(to, from)| *to = from);
    field
}

/// The kinds of maps that our programs use, by their numbers in linux/bpf.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum MapKind {
    Hash = 1,
    PerfEventArray = 4,
    PerCpuArray = 6,
}

/// A map: memory that the kernel's programs and this process share. All keys and values have a fixed
/// size.
pub struct Map {
    fd: OwnedFd,
    key_size: usize,
}

impl Map {
    /// Makes a map with room for `entries` entries; sizes in bytes.
    pub fn new(
        kind: MapKind,
        name: &str,
        key_size: u32,
        value_size: u32,
        entries: u32,
    ) -> Result<Map> {
        let mut attributes = MapAttributes {
            kind: kind as u32,
            key_size,
            value_size,
            max_entries: entries,
            flags: 0,
            inner_map: 0,
            numa_node: 0,
            name: name_of(name),
        };
        // SAFETY: the attributes are those of the command, without addresses.
        let made = unsafe { bpf_open(MAP_CREATE, &mut attributes) };
        let fd =
            made.map_err(permission).with_context(|| format!("the map {name} was not made"))?;
        Ok(Map { fd, key_size: key_size as usize })
    }

    fn element(&self, key: &[u8], value: u64) -> ElementAttributes {
        assert_eq!(key.len(), self.key_size, "the key has another size");
        let map = self.as_raw_fd() as u32;
        ElementAttributes { map, padding: 0, key: key.as_ptr() as u64, value, flags: 0 }
    }

    /// Reads the values of `index` in a per-CPU array of 64-bit values: one for each possible CPU.
    ///
    /// The kernel writes that many, however many CPUs are online: a shorter buffer would be overrun.
    pub fn per_cpu(&self, index: u32) -> Result<Vec<u64>> {
        let mut values = vec![0_u64; possible_cpus()?];
        let key = index.to_ne_bytes();
        let mut attributes = self.element(&key, values.as_mut_ptr() as u64);
        // SAFETY: the key has its size, and there is room for a value of each possible CPU.
        unsafe { bpf(MAP_LOOKUP_ELEM, &mut attributes) }.context("a map could not be read")?;
        Ok(values)
    }

    /// The sum over all CPUs.
    pub fn sum(&self, index: u32) -> Result<u64> {
        Ok(self.per_cpu(index)?.iter().sum())
    }

    /// Writes a 32-bit value.
    pub fn update(&self, key: u32, value: u32) -> Result<()> {
        let key = key.to_ne_bytes();
        let mut attributes = self.element(&key, &raw const value as u64);
        // SAFETY: key and value have their sizes.
        unsafe { bpf(MAP_UPDATE_ELEM, &mut attributes) }.context("a map could not be written")?;
        Ok(())
    }

    /// How many entries a hash map with 64-bit keys has.
    pub fn entries(&self) -> Result<usize> {
        let (mut key, mut next, mut count) = (u64::MAX.to_ne_bytes(), [0; 8], 0);
        loop {
            // A key that is not in the map makes the kernel begin with the first one.
            let mut attributes = self.element(&key, next.as_mut_ptr() as u64);
            // SAFETY: there is room for a key where the next one is written to.
            match unsafe { bpf(MAP_GET_NEXT_KEY, &mut attributes) } {
                Ok(_) => (key, count) = (next, count + 1),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(count),
                Err(error) => return Err(error).context("the keys of a map could not be read"),
            }
        }
    }
}

impl AsRawFd for Map {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A program in the kernel. It is unloaded when the last file descriptor that refers to it is closed:
/// ours, and those of the events it is attached to.
pub struct LoadedProgram {
    fd: OwnedFd,
    name: &'static str,
}

impl LoadedProgram {
    /// Loads a program. Where the verifier rejects it, the error holds the verifier's log; with
    /// `verbose`, the log of a program that it accepts is printed.
    pub fn load(name: &'static str, code: &Code, verbose: bool) -> Result<LoadedProgram> {
        let mut log = Vec::new();
        let mut loaded = try_load(name, code, &mut log);
        if verbose || loaded.is_err() {
            log.resize(LOG_SIZE, 0);
            loaded = try_load(name, code, &mut log);
        }
        let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
        let fd = match loaded {
            Ok(fd) => fd,
            Err(error) if log.is_empty() => {
                return Err(permission(error)).context(format!("{name} was not loaded"));
            }
            Err(error) => bail!("the verifier rejects {name} ({error}):\n{}", log.trim_end()),
        };
        if verbose {
            say(&format!("the verifier accepts {name}:\n{log}"));
        }
        Ok(LoadedProgram { fd, name })
    }

    /// The name under which bpftool lists it.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The number of its file descriptor.
    pub fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn info(&self) -> Result<ProgramInfo> {
        let mut info = ProgramInfo::default();
        let mut attributes = InfoAttributes {
            object: self.number() as u32,
            length: size_of::<ProgramInfo>() as u32,
            info: &raw mut info as u64,
        };
        // SAFETY: the kernel writes at most `length` bytes to `info`.
        unsafe { bpf(OBJ_GET_INFO_BY_FD, &mut attributes) }
            .context("the kernel gives no information about a program")?;
        Ok(info)
    }

    /// The number by which `bpftool prog show id` finds it.
    pub fn id(&self) -> Result<u32> {
        Ok(self.info()?.id)
    }

    /// How often it ran since [`enable_stats`], and for how long in all, in ns.
    pub fn runs(&self) -> Result<(u64, u64)> {
        self.info().map(|info| (info.run_count, info.run_time_ns))
    }

    /// How often the kernel skipped it, because another program of this kind was running on the same
    /// CPU. Kernels count that from 6.7 on; before, it is 0.
    pub fn skipped(&self) -> Result<u64> {
        Ok(self.info()?.recursion_misses)
    }
}

fn try_load(name: &str, code: &Code, log: &mut [u8]) -> io::Result<OwnedFd> {
    let instructions = code.instructions();
    let mut attributes = ProgramAttributes {
        kind: PROG_TYPE_TRACEPOINT,
        instructions: instructions.len() as u32,
        address: instructions.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        log_level: u32::from(!log.is_empty()),
        log_size: log.len() as u32,
        log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
        kernel_version: 0,
        flags: 0,
        name: name_of(name),
    };
    // SAFETY: the instructions and the log have their sizes; the license ends with a zero.
    unsafe { bpf_open(PROG_LOAD, &mut attributes) }
}

/// Lets the kernel count how often programs run, for as long as the file descriptor is open.
pub fn enable_stats() -> Result<OwnedFd> {
    let mut run_time = 0_u32;
    // SAFETY: the attribute of this command is one number, 0 for the count and time of runs.
    unsafe { bpf_open(ENABLE_STATS, &mut run_time) }.context("the kernel counts no runs")
}

/// How many CPUs this machine may ever have. The values of a per-CPU map are that many: more than
/// there are now, where CPUs can be added or are switched off.
pub fn possible_cpus() -> Result<usize> {
    Ok(cpus("possible")?.into_iter().max().map_or(0, |last| last as usize + 1))
}

/// The CPUs that are on now.
pub fn online_cpus() -> Result<Vec<u32>> {
    cpus("online")
}

fn cpus(which: &str) -> Result<Vec<u32>> {
    let path = format!("/sys/devices/system/cpu/{which}");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    cpu_list(text.trim()).with_context(|| format!("{path} holds {text:?}"))
}

/// `0-2,5`: 0, 1, 2, 5.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse().ok()?..=last.parse::<u32>().ok()?);
    }
    Some(cpus)
}

/// EPERM has one reason for us, who are root: a container, or a kernel that is locked down.
fn permission(error: io::Error) -> anyhow::Error {
    if error.raw_os_error() == Some(libc::EPERM) {
        return Unsupported(
            "the kernel does not let this user call bpf(2). A container takes away the capability \
             CAP_SYS_ADMIN: start it outside, or in the VM with cargo vm run"
                .into(),
        )
        .into();
    }
    error.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_cpus_has_ranges() {
        assert_eq!(cpu_list("0"), Some(vec![0]));
        assert_eq!(cpu_list("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list(""), None);
        assert!(possible_cpus().unwrap() >= online_cpus().unwrap().len());
    }

    #[test]
    fn the_attributes_have_the_kernels_layout() {
        assert_eq!(size_of::<MapAttributes>(), 44);
        assert_eq!(size_of::<ElementAttributes>(), 32);
        assert_eq!(std::mem::offset_of!(ProgramAttributes, name), 48);
        assert_eq!(std::mem::offset_of!(ProgramInfo, run_time_ns), 192);
        assert_eq!(size_of::<InfoAttributes>(), 16);
        assert_eq!(&name_of("a_very_long_name_indeed"), b"a_very_long_nam\0");
    }
}
