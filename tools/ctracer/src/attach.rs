//! Attaching one program to many functions, by the best means that the running kernel has, and the
//! kernel's own counts of what the probes met.

use std::{
    collections::HashSet,
    io::ErrorKind,
    os::fd::{FromRawFd, OwnedFd},
};

use anyhow::{Context, Result, ensure};
use common::{
    Session,
    btf::Btf,
    many::{self, At, KprobeEvents},
};
use libbpf_rs::{
    Link, MapCore, MapFlags, ProgramAttachType, ProgramMut, libbpf_sys as sys, query::LinkTypeInfo,
};

use crate::{
    discovery::{Discovery, Traceable},
    lives::Rules,
    trace::{OpenTraceSkel, TraceProgs},
};

/// In a cookie: the function completes or frees its first object.
const ENDS: u64 = 0b11 << 29;

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
        } else if many::has_multi(vmlinux) {
            Tier::Multi
        } else {
            Tier::Single
        }
    }

    /// Chooses the programs to load.
    pub fn prepare(
        self,
        open: &mut OpenTraceSkel,
        functions: &[Traceable],
        cookies: &[u64],
    ) -> Result<()> {
        let has_fentry = cfg!(target_arch = "x86_64") || self != Tier::Single;
        let ends = functions.iter().zip(cookies).filter(|(_, cookie)| **cookie & ENDS != 0);
        let mut ends = ends.filter(|_| has_fentry);
        let constants = common::constants(&mut open.maps.rodata_data)?;
        let progs = &mut open.progs;
        let again = [
            &mut progs.ends_again0,
            &mut progs.ends_again1,
            &mut progs.ends_again2,
            &mut progs.ends_again3,
            &mut progs.ends_again4,
            &mut progs.ends_again5,
        ];
        for (program, place) in again.into_iter().zip(&mut constants.ends) {
            let end = ends.next();
            program.set_autoload(end.is_some());
            if let Some((traceable, cookie)) = end {
                *place = *cookie;
                program.set_attach_target(0, Some(traceable.function.name.clone()))?;
            }
        }
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

/// What the BPF program learns about a call of each function: its number, what it does to its object's
/// life, the registers with objects, and for one that initialises its object, the register with the
/// block device. See `call_begins()` in `trace.bpf.c`.
pub fn cookies(functions: &[Traceable], rules: &Rules) -> Vec<u64> {
    let cookie = |(number, traceable): (usize, &Traceable)| {
        let name = traceable.function.name.as_str();
        let registers = traceable.registers.iter().rev().fold(0, |all, &r| all << 4 | u64::from(r));
        let device = u64::from(traceable.device.filter(|_| rules.begins(name)).unwrap_or(0));
        device << 44 | registers << 32 | rules.effects(name) | number as u64
    };
    functions.iter().enumerate().map(cookie).collect()
}

/// The places of the tables in `trace.bpf.c`, and how many of them are tried for an entry.
const PLACES: u32 = 1 << 16;
const PROBES: u32 = 8;

/// The places of an entry with this key, in the order in which they are tried.
fn places(key: u64) -> impl Iterator<Item = u32> {
    let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u32;
    (0..PROBES).map(move |probe| (first + probe) % PLACES)
}

/// Writes the table in which the program looks up the cookie of an address. Fails where too many
/// addresses have the same place.
pub fn fill(table: &impl MapCore, functions: &[Traceable], cookies: &[u64]) -> Result<()> {
    let mut taken = HashSet::new();
    for (Traceable { address, function, .. }, cookie) in functions.iter().zip(cookies) {
        let free = places(*address).find(|&place| taken.insert(place));
        let place = free.with_context(|| {
            format!("the table of functions has no place for {}(): --skip it", function.name)
        })?;
        let entry = [address.to_ne_bytes(), cookie.to_ne_bytes()].concat();
        table.update(&place.to_ne_bytes(), &entry, MapFlags::ANY)?;
    }
    Ok(())
}

/// Probes in the kernel. Dropped, they are gone.
pub struct Attached {
    links: Vec<Link>,
    events: Option<KprobeEvents>,
    /// Functions that the kernel refuses in spite of its own list: number and reason.
    refused: Vec<(usize, String)>,
}

/// What the kernel has counted, since the programs were loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelCounts {
    /// How often the programs ran.
    pub runs: u64,
    /// How often a program was skipped because another one was running on the CPU.
    pub recursion: u64,
    /// How often a call was skipped: no memory left for its return, or inside another probe.
    pub instances: u64,
}

impl Attached {
    /// Attaches to all functions that the kernel lets it. `None`: the user has ended the run meanwhile.
    pub fn attach(
        tier: Tier,
        progs: &TraceProgs,
        functions: &[Traceable],
        cookies: &[u64],
        session: &Session,
    ) -> Result<Option<Attached>> {
        let mut attached = Attached { links: Vec::new(), events: None, refused: Vec::new() };
        let names: Vec<&str> = functions.iter().map(|f| f.function.name.as_str()).collect();
        let multi = |attached: &mut Attached, program: &ProgramMut, at: At| -> Result<()> {
            let (links, refused) = many::attach(program, &names, cookies, at)?;
            attached.links.extend(links);
            attached.refused.extend(refused);
            Ok(())
        };
        match tier {
            Tier::Session => multi(&mut attached, &progs.session, At::Session)?,
            Tier::Multi => {
                multi(&mut attached, &progs.leave, At::Return)?;
                multi(&mut attached, &progs.enter, At::Entry)?;
            }
            Tier::Single => {
                let mut events = KprobeEvents::new(&[At::Entry, At::Return])?;
                for (number, traceable) in functions.iter().enumerate() {
                    if let Err(error) =
                        events.add(&traceable.function.name, traceable.function.module.as_deref())
                    {
                        attached.refused.push((number, format!("{error:#}")));
                    }
                    if session.is_over() {
                        return Ok(None);
                    }
                }
                attached.links.push(events.attach(&progs.leave, At::Return)?);
                if session.is_over() {
                    return Ok(None);
                }
                attached.links.push(events.attach(&progs.enter, At::Entry)?);
                attached.events = Some(events);
            }
        }
        for program in [
            &progs.ends_again0,
            &progs.ends_again1,
            &progs.ends_again2,
            &progs.ends_again3,
            &progs.ends_again4,
            &progs.ends_again5,
        ] {
            if program.autoload() {
                let link = program.attach_trace();
                attached.links.push(link.context("the second hook at an end")?);
            }
        }
        attached.refused.sort();
        attached.refused.dedup_by_key(|(number, _)| *number);
        ensure!(!attached.links.is_empty(), "the kernel refuses a probe at every function");
        Ok(Some(attached))
    }

    /// How many functions are traced, by which means, and which are not.
    pub fn describe(&self, tier: Tier, found: &Discovery) -> String {
        let traced = found.functions.len() - self.refused.len();
        let mut text = format!("ctracer: {traced} functions traced with {}\n", tier.name());
        for (number, why) in &self.refused {
            let name = &found.functions[*number].function.name;
            text += &format!("ctracer: {name}() is not traced: {why}\n");
        }
        text
    }

    /// Reads the kernel's counters.
    pub fn counts(&self, progs: &TraceProgs) -> Result<KernelCounts> {
        let mut counts = KernelCounts::default();
        for program in [&progs.enter, &progs.leave, &progs.session] {
            if !program.autoload() {
                continue;
            }
            let info = common::program_info(program)?;
            counts.runs += info.run_cnt;
            counts.recursion += info.recursion_misses;
        }
        for link in &self.links {
            if let LinkTypeInfo::KprobeMulti(info) = link.info().context("a link")?.info {
                counts.instances += info.missed;
            }
        }
        if let Some(events) = &self.events {
            let (hits, missed) = events.profile()?;
            // Before 6.7 the kernel does not count the runs that it skips, but the hits.
            counts.recursion = hits.saturating_sub(counts.runs);
            counts.instances = missed;
        }
        Ok(counts)
    }
}

impl Drop for Attached {
    /// The probes first: a kernel event that is in use cannot be removed.
    fn drop(&mut self) {
        self.links.clear();
        drop(self.events.take());
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
    use crate::{lives, model::Function};

    #[test]
    fn a_cookie_holds_the_registers() {
        let function = |name: &str, registers: &[u8]| Traceable {
            function: Function { name: name.to_owned(), ..Function::default() },
            address: 0,
            registers: registers.to_vec(),
            device: Some(3),
        };
        let functions = [
            function("submit_bio", &[1]),
            function("bio_init", &[2, 5]),
            function("bio_free", &[1]),
            function("bio_endio", &[1]),
        ];
        let expected = [0x1_1c00_0000, 0x3052_8000_0001, 0x1_4000_0002, 0x1_2000_0003];
        assert_eq!(cookies(&functions, lives::rules("bio")), expected);
    }
}
