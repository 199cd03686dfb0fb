//! Attaching one program to many functions, by the best means that the running kernel has, and the
//! kernel's own counts of what the probes met.

use std::{
    collections::HashSet,
    ffi::OsStr,
    io::ErrorKind,
    os::fd::{FromRawFd, OwnedFd},
};

use anyhow::{Context, Result, ensure};
use common::{Session, btf::Btf};
use libbpf_rs::{
    Link, MapCore, MapFlags, ProgramAttachType, libbpf_sys as sys,
    query::LinkTypeInfo,
    skel::{OpenSkel, Skel},
};

use crate::{
    multi_attach::{self, At, KprobeEvents},
    record::{Function, Probe},
    trace::{OpenTraceSkel, TraceProgs, TraceSkel},
};

/// Whether a program of this name is one of the fentry programs at the functions that end a life.
fn sees_end(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"sees_end")
}

/// The means to attach, the best first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tier {
    /// kprobe.session: one program at entry and return, for all functions at once.
    Session,
    /// kprobe.multi and kretprobe.multi.
    Multi,
    /// Kprobes, one for each function.
    Single,
}

impl Tier {
    /// The best one of this kernel, which has these types.
    pub fn choose(vmlinux: &Btf) -> Tier {
        // Before 7.0, where it takes no argument, sessions miss returns: see common::has_sessions().
        let cookie = vmlinux.function("bpf_session_cookie");
        if cookie.is_some_and(|cookie| cookie.parameters().len() == 1) {
            Tier::Session
        } else if multi_attach::has_multi(vmlinux) {
            Tier::Multi
        } else {
            Tier::Single
        }
    }

    /// Chooses the programs to load.
    pub fn prepare(self, open: &mut OpenTraceSkel, functions: &[Function]) -> Result<()> {
        let has_fentry = cfg!(target_arch = "x86_64") || self != Tier::Single;
        let mut ends = functions.iter().filter(|f| has_fentry && f.probe.effect.ends());
        let mut found = Vec::new();
        for mut program in open.open_object_mut().progs_mut().filter(|p| sees_end(p.name())) {
            let end = ends.next();
            program.set_autoload(end.is_some());
            if let Some(function) = end {
                program.set_attach_target(0, Some(function.name.clone()))?;
                found.push(function.probe.cookie);
            }
        }
        common::constants(&mut open.maps.rodata_data)?.ends[..found.len()].copy_from_slice(&found);
        let pair = self != Tier::Session;
        open.progs.session.set_autoload(!pair);
        for program in [&mut open.progs.enter, &mut open.progs.leave] {
            program.set_autoload(pair);
            if self == Tier::Multi {
                program.set_attach_type(ProgramAttachType::KprobeMulti);
            }
        }
        Ok(())
    }

    /// What it is, for the user.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Session => "kprobe.session",
            Tier::Multi => "kprobe.multi and kretprobe.multi",
            Tier::Single => "single kprobes",
        }
    }
}

/// What the BPF program learns about a call of a function: the function's number, the registers with
/// objects, for one that initialises its object, the register with the block device, and what it does to
/// its object's life. See `call_begins()` in `trace.bpf.c`.
pub fn cookie(number: usize, probe: &Probe) -> u64 {
    let registers = probe.registers.iter().rev().fold(0, |all, &r| all << 4 | u64::from(r));
    let device = u64::from(probe.device.filter(|_| probe.effect.begins).unwrap_or(0));
    probe.effect.cookie() | device << 44 | registers << 32 | number as u64
}

/// Writes the table in which the program looks up the cookie of an address. Fails where too many
/// addresses have the same place.
pub fn fill(table: &impl MapCore, functions: &[Function]) -> Result<()> {
    let mut taken = HashSet::new();
    for function in functions {
        // As place() in trace.bpf.c has it, with its PLACES and PROBES.
        let address = match function.probe.address {
            0 => common::kernel_function(&function.name)?, // says why it is hidden
            address => address,
        };
        let first = (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u32;
        let mut places = (0..8).map(|probe| (first + probe) % (1 << 16));
        let place = places.find(|&place| taken.insert(place)).with_context(|| {
            format!("the table of functions has no place for {}(): --skip it", function.name)
        })?;
        let entry = [address.to_ne_bytes(), function.probe.cookie.to_ne_bytes()].concat();
        table.update(&place.to_ne_bytes(), &entry, MapFlags::ANY)?;
    }
    Ok(())
}

/// Probes in the kernel. Dropped, they are gone, and then the events: one that is in use cannot be removed.
pub struct Attached {
    links: Vec<Link>,
    events: Option<KprobeEvents>,
}

/// What the kernel has counted, since the programs were loaded: how often they ran; how often one was
/// skipped because another one was running on the CPU; how often a call was skipped, because no memory
/// was left for its return, or inside another probe.
pub type KernelCounts = [u64; 3];

impl Attached {
    /// Attaches to all functions that the kernel lets it, and says to how many, by which means, and to
    /// which not. `None`: the user has ended the run meanwhile.
    ///
    /// One by one, that takes seconds: for each kprobe at the entry of a function, the kernel walks over
    /// its list of 40,000 functions several times, under one lock; to remove one, it also waits for an
    /// RCU grace period. Of 117 functions, entry and return, in an emulated machine with two CPUs, on
    /// 6.1, it takes 3.4 s to attach and 2.0 s to remove them as [`KprobeEvents`] does it; 3.4 s and 5.5 s
    /// without expedited grace periods; 3.2 s and 7.4 s behind the ftrace location (`function+5`); 4.0 s
    /// and 10.3 s with `perf_event_open()` for each, 4.1 s and 3.2 s by eight threads with expedited grace
    /// periods; 1.7 s and 0.5 s with `kernel.ftrace_enabled=0` meanwhile, but this switches every other
    /// user of ftrace off, who would lose events without being told.
    pub fn attach(
        tier: Tier,
        skel: &mut TraceSkel,
        functions: &[Function],
        session: &Session,
    ) -> Result<Option<Attached>> {
        let (progs, mut links, mut refused) = (&skel.progs, Vec::new(), Vec::new());
        let mut events = None;
        let names: Vec<&str> = functions.iter().map(|function| &*function.name).collect();
        let cookies: Vec<u64> = functions.iter().map(|function| function.probe.cookie).collect();
        let multi = match tier {
            Tier::Session => vec![(&progs.session, At::Session)],
            // The returns first: then no call is seen whose return is not.
            Tier::Multi => vec![(&progs.leave, At::Return), (&progs.enter, At::Entry)],
            Tier::Single => Vec::new(),
        };
        for (program, at) in multi {
            let (attached, not) = multi_attach::attach(program, &names, &cookies, at)?;
            links.extend(attached);
            refused.extend(not);
        }
        if tier == Tier::Single {
            let new = KprobeEvents::new()?;
            for (number, function) in functions.iter().enumerate() {
                if let Err(error) = new.add(&function.name, function.module.as_deref()) {
                    refused.push((number, format!("{error:#}")));
                }
                if session.is_over() {
                    return Ok(None);
                }
            }
            for (program, at) in [(&progs.leave, At::Return), (&progs.enter, At::Entry)] {
                if refused.len() < functions.len() && !session.is_over() {
                    links.push(new.attach(program, at)?);
                }
            }
            if session.is_over() {
                return Ok(None);
            }
            events = Some(new);
        }
        refused.sort();
        refused.dedup_by_key(|(number, _)| *number);
        ensure!(refused.len() < functions.len(), "the kernel refuses a probe at every function");
        let ends = skel.object_mut().progs_mut();
        for program in ends.filter(|program| program.autoload() && sees_end(program.name())) {
            links.push(program.attach_trace().context("the second hook at an end")?);
        }
        let traced = functions.len() - refused.len();
        eprintln!("ctracer: {traced} functions traced with {}", tier.name());
        for (number, why) in refused {
            eprintln!("ctracer: {}() is not traced: {why}", functions[number].name);
        }
        Ok(Some(Attached { links, events }))
    }

    /// Reads the kernel's counters.
    pub fn counts(&self, progs: &TraceProgs) -> Result<KernelCounts> {
        let [mut runs, mut recursion, mut instances] = [0; 3];
        let programs = [&progs.enter, &progs.leave, &progs.session];
        for program in programs.into_iter().filter(|program| program.autoload()) {
            let info = common::program_info(program)?;
            runs += info.run_cnt;
            recursion += info.recursion_misses;
        }
        for link in &self.links {
            if let LinkTypeInfo::KprobeMulti(info) = link.info().context("a link")?.info {
                instances += info.missed;
            }
        }
        if let Some(events) = &self.events {
            let (hits, missed) = events.profile()?;
            // Before 6.7 the kernel does not count the runs that it skips, but the hits.
            (recursion, instances) = (hits.saturating_sub(runs), missed);
        }
        Ok([runs, recursion, instances])
    }
}

/// Lets the kernel count how often programs run, as long as the result is alive.
pub fn count_runs() -> Result<OwnedFd> {
    // SAFETY: it takes a number and returns a file descriptor or an error.
    let fd = unsafe { sys::bpf_enable_stats(sys::BPF_STATS_RUN_TIME) };
    let error = std::io::Error::from_raw_os_error(-fd);
    if fd < 0 && error.kind() == ErrorKind::PermissionDenied {
        return common::unsupported(
            "the capability CAP_SYS_ADMIN is missing: nobody else may let the kernel count how often \
             programs run: start it with sudo",
        );
    }
    ensure!(fd >= 0, "the kernel does not count runs: {error}");
    // SAFETY: the descriptor is new, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lives::Rules;

    #[test]
    fn a_cookie_holds_the_registers() {
        for (number, (name, registers, expected)) in [
            ("submit_bio", &[1][..], 0x8001_0000_0000),
            ("bio_init", &[2, 5], 0xb052_0000_0001),
            ("bio_free", &[1], 0x1_0000_0002),
            ("bio_endio", &[1], 0x1_0000_0003),
        ]
        .into_iter()
        .enumerate()
        {
            let (registers, effect) = (registers.to_vec(), Rules("bio").effect(name));
            let probe = Probe { registers, effect, device: Some(3), ..Probe::default() };
            assert_eq!(cookie(number, &probe), expected | effect.cookie(), "{name}");
        }
    }
}
