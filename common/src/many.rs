//! One program on many functions: [`Hooks`] for one program, and what they are made of.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Seek, Write},
    ops::Add,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    ptr::{self, NonNull},
};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{
    AsRawLibbpf, Link, OpenProgramMut, ProgramAttachType, ProgramMut, TracepointCategory,
    libbpf_sys as sys,
};

use crate::{Session, btf::Btf, error::unsupported, preflight::tracefs, program_info};

/// How many calls of one function may be waiting for their return, where the kernel wants to know.
const MAX_CALLS: u32 = 128;

/// Where in a call the program runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum At {
    /// Before the function's first instruction.
    Entry,
    /// When the function returns.
    Return,
    /// At both: kprobe.session.
    Session,
}

/// The numbers of functions that the kernel refuses in spite of its own list, and why.
pub type Refused = Vec<(usize, String)>;

/// Attaches the program to the functions of these names, with one cookie for each or none at all.
/// Needs kprobe.multi: see [`has_multi`]. Returns the links, and what the kernel refuses.
pub fn attach(
    program: &ProgramMut,
    names: &[&str],
    cookies: &[u64],
    at: At,
) -> Result<(Vec<Link>, Refused)> {
    let (mut links, mut refused) = (Vec::new(), Vec::new());
    // 6.18 takes a link without cookies, and follows a null pointer when somebody reads its fdinfo (measured
    // on 6.18.15: bpf_kprobe_multi_show_fdinfo()), as `Session::begin()` and lsof do.
    let nothing = vec![0; names.len()];
    let cookies = if cookies.is_empty() { &nothing } else { cookies };
    // The kernel refuses a list with one bad function: halve it until that one is found.
    let mut lists = vec![(0, names.len())];
    while let Some((start, end)) = lists.pop() {
        match attach_multi(program, &names[start..end], &cookies[start..end], at) {
            Ok(link) => links.push(link),
            Err(error) if end - start == 1 => refused.push((start, format!("{error:#}"))),
            Err(_) => {
                let middle = start.midpoint(end);
                lists.extend([(middle, end), (start, middle)]);
            }
        }
    }
    Ok((links, refused))
}

/// Whether this kernel has kprobe.multi: 5.18 where it is built with CONFIG_FPROBE.
pub fn has_multi(vmlinux: &Btf) -> bool {
    vmlinux.function("register_fprobe_ips").is_some()
}

/// libbpf-rs has no call for sessions.
fn attach_multi(program: &ProgramMut, names: &[&str], cookies: &[u64], at: At) -> Result<Link> {
    let names = names.iter().map(|&name| CString::new(name)).collect::<Result<Vec<_>, _>>()?;
    let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    let options = sys::bpf_kprobe_multi_opts {
        sz: size_of::<sys::bpf_kprobe_multi_opts>() as _,
        syms: pointers.as_mut_ptr(),
        cookies: cookies.as_ptr(),
        cnt: names.len() as _,
        retprobe: at == At::Return,
        session: at == At::Session,
        ..Default::default()
    };
    let program = program.as_libbpf_object().as_ptr();
    // SAFETY: the options point to two lists of `cnt` elements, which outlive the call.
    let link =
        unsafe { sys::bpf_program__attach_kprobe_multi_opts(program, ptr::null(), &options) };
    let error = std::io::Error::last_os_error();
    let link = NonNull::new(link).ok_or(error).context("the kernel refuses the probe")?;
    // SAFETY: the link is new.
    Ok(unsafe { Link::from_ptr(link) })
}

/// How often to look for a moment without a hit.
const ATTEMPTS: u32 = 20;

/// How the program gets to the functions.
#[derive(Clone, Copy, PartialEq)]
pub enum Means {
    /// kprobe.multi: one link, and one system call for all functions.
    Multi,
    /// A kernel event with a probe for each function.
    Event,
}

impl Means {
    /// The better one of this kernel.
    pub fn choose(vmlinux: &Btf) -> Means {
        if has_multi(vmlinux) { Means::Multi } else { Means::Event }
    }

    /// Makes the program one of the right type, before it is loaded.
    pub fn prepare(self, program: &mut OpenProgramMut) {
        if self == Means::Multi {
            program.set_attach_type(ProgramAttachType::KprobeMulti);
        }
    }
}

/// The program at its functions. Dropped, it is gone from them.
pub struct Hooks {
    program: OwnedFd,
    // Dropped in this order: the kernel removes no event that is in use.
    _links: Vec<Link>,
    event: Option<KprobeEvents>,
    /// How many functions were tried, from the first one: all, where the user does not end the run
    /// meanwhile. The program may be at none of them.
    pub tried: usize,
    /// Functions that the kernel refuses in spite of its own list.
    pub refused: Refused,
}

impl Hooks {
    /// Attaches the program to these functions, which may have a module; where the user ends the run
    /// meanwhile, to as many as were [tried](Hooks::tried).
    pub fn attach(
        means: Means,
        program: &ProgramMut,
        at: At,
        functions: &[(&str, Option<&str>)],
        session: &Session,
    ) -> Result<Hooks> {
        let fd = program.as_fd().try_clone_to_owned().context("a loaded program")?;
        if means == Means::Multi {
            let names: Vec<&str> = functions.iter().map(|(name, _)| *name).collect();
            let (links, mut refused) = attach(program, &names, &[], at)?;
            refused.sort();
            let tried = functions.len();
            return Ok(Hooks { program: fd, _links: links, event: None, tried, refused });
        }
        let (mut event, mut refused, mut tried) = (KprobeEvents::new(&[at])?, Vec::new(), 0);
        for (name, module) in functions.iter().take_while(|_| !session.is_over()) {
            if let Err(error) = event.add(name, *module) {
                refused.push((tried, format!("{error:#}")));
            }
            tried += 1;
        }
        let links = match refused.len() == tried && session.is_over() {
            true => Vec::new(),
            false => vec![event.attach(program, at)?],
        };
        Ok(Hooks { program: fd, _links: links, event: Some(event), tried, refused })
    }

    /// Reads what the program has counted for each function, and how many calls it was skipped for:
    /// see [`Skipped::since`].
    ///
    /// Of an event, the kernel counts the hits of its probes, also those before the program was there.
    /// A hit between the two readings of the hits may be counted or not; the moment with the fewest
    /// of them is taken.
    pub fn read(&self, calls: impl Fn() -> Result<Vec<u64>>) -> Result<(Vec<u64>, Skipped)> {
        let Some(event) = &self.event else {
            let (calls, times) = (calls()?, program_info(&self.program)?.recursion_misses);
            return Ok((calls, Skipped { least: times, most: times }));
        };
        let (mut before, mut best) = (event.profile()?, None::<(Vec<u64>, Skipped)>);
        for _ in 0..ATTEMPTS {
            let (calls, now) = (calls()?, event.profile()?);
            let skipped = Skipped::of(before, now, calls.iter().sum());
            before = now;
            if best.as_ref().is_none_or(|(_, least)| skipped.open() < least.open()) {
                best = Some((calls, skipped));
            }
            if skipped.open() == 0 {
                break;
            }
        }
        best.context("nothing was read")
    }
}

/// How many calls a program was skipped for: at least so many, and at most. The two differ where
/// functions were called while the program's count was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Skipped {
    least: u64,
    most: u64,
}

impl Skipped {
    /// By the hits and misses of the kernel, before and after the program's count was read.
    fn of(before: (u64, u64), after: (u64, u64), counted: u64) -> Skipped {
        let skipped = |(hits, missed): (u64, u64)| missed + hits.saturating_sub(counted);
        Skipped { least: skipped(before), most: skipped(after) }
    }

    /// How many calls may have been skipped or counted.
    fn open(self) -> u64 {
        self.most - self.least
    }

    /// From an earlier reading to this one.
    #[must_use]
    pub fn since(self, before: Skipped) -> Skipped {
        Skipped {
            least: self.least.saturating_sub(before.most),
            most: self.most.saturating_sub(before.least),
        }
    }

    /// Prints the last lines of a summary. `program`: which one was skipped.
    pub fn print(self, program: &str) {
        println!("{:>8} skipped ({program} already running on this CPU)", self.least);
        if self.open() > 0 {
            println!(
                "{:>8} more calls may have been skipped: functions were called while the calls were read",
                self.open()
            );
        }
    }
}

impl Add for Skipped {
    type Output = Skipped;

    fn add(self, other: Skipped) -> Skipped {
        Skipped { least: self.least + other.least, most: self.most + other.most }
    }
}

/// Kernel events of this process, for kernels without kprobe.multi: one for all entries, one for all
/// returns. The kernel attaches a program to an event at once, whatever its number of probes, and
/// counts the hits of each probe. Dropped, they are gone; their links have to be dropped before.
pub struct KprobeEvents {
    /// Removes the events when its stdin is closed: also where this process is killed.
    guard: Child,
    events: Vec<(At, String)>,
    probes: usize,
    /// Opened once: looking its path up hits probes, of inodes for instance.
    profile: File,
}

impl KprobeEvents {
    /// Events of these kinds, still without a function.
    pub fn new(kinds: &[At]) -> Result<KprobeEvents> {
        let list = tracefs()?.join("kprobe_events");
        if let Err(error) = OpenOptions::new().append(true).open(&list)
            && error.kind() == ErrorKind::PermissionDenied
        {
            return unsupported(
                "the capability CAP_DAC_OVERRIDE is missing: without kprobe.multi, which this kernel lacks, \
                 the functions are hooked by kernel events, which only root may define: start it with sudo",
            );
        }
        let name = |&at: &At| (at, format!("{at:?}_{}", std::process::id()));
        let events: Vec<_> = kinds.iter().map(name).collect();
        let names = events.iter().map(|(_, name)| name.as_str()).collect::<Vec<_>>().join(" ");
        // Not in this process group: Ctrl-C must not end it. The kernel refuses to remove an event
        // until the last program is detached. Its RCU grace periods take 4 s, expedited ones 10 ms.
        let script = format!(
            "cd {} && cat >/dev/null; rcu=/sys/kernel/rcu_expedited
             remove() {{
                 read expedited <$rcu
                 [ \"$expedited\" = 0 ] && echo 1 >$rcu
                 echo \"-:workshop/$1\" >>kprobe_events; done=$?
                 [ \"$expedited\" = 0 ] && echo 0 >$rcu
                 return $done
             }} 2>/dev/null
             for event in {names}
             do until remove $event || ! grep -q \"/$event \" kprobe_events; do sleep 0.1; done
             done",
            tracefs()?.display()
        );
        let guard = Command::new("sh")
            .args(["-c", &script])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("the process that removes the kernel events could not be started: sh")?;
        let profile = File::open(tracefs()?.join("kprobe_profile")).context("kprobe_profile")?;
        Ok(KprobeEvents { guard, events, probes: 0, profile })
    }

    /// Adds a function of vmlinux or of a module.
    pub fn add(&mut self, name: &str, module: Option<&str>) -> Result<()> {
        let module = module.map_or(String::new(), |module| format!("{module}:"));
        let path = tracefs()?.join("kprobe_events");
        // The return first: then no call is seen whose return is not.
        for (at, event) in self.events.iter().rev() {
            let kind = if *at == At::Return { format!("r{MAX_CALLS}") } else { "p".to_owned() };
            let probe = format!("{kind}:workshop/{event} {module}{name}\n");
            OpenOptions::new()
                .append(true)
                .open(&path)
                .and_then(|mut file| file.write_all(probe.as_bytes()))
                .with_context(|| format!("the kernel refuses the probe {}", probe.trim_end()))?;
        }
        self.probes += 1;
        Ok(())
    }

    /// Attaches the program to all functions of an event at once.
    pub fn attach(&self, program: &ProgramMut, at: At) -> Result<Link> {
        ensure!(self.probes > 0, "the kernel refuses a probe at every one of the functions");
        let name = self.events.iter().find(|(kind, _)| *kind == at).map(|(_, name)| name);
        let name = name.context("there is no event of this kind")?;
        let group = TracepointCategory::Custom("workshop".to_owned());
        program
            .attach_tracepoint(group, name)
            .with_context(|| format!("the probes workshop/{name} could not be attached"))
    }

    /// How often the probes were hit, and how often they were missed: in the handler of another probe.
    pub fn profile(&self) -> Result<(u64, u64)> {
        let (mut file, mut text) = (&self.profile, String::new());
        file.rewind().and_then(|()| file.read_to_string(&mut text)).context("kprobe_profile")?;
        parse_profile(&text, self.events.iter().map(|(_, name)| name.as_str()))
    }
}

impl Drop for KprobeEvents {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        self.guard.wait().ok();
    }
}

fn parse_profile<'a>(
    text: &str,
    names: impl Iterator<Item = &'a str> + Clone,
) -> Result<(u64, u64)> {
    let (mut hits, mut missed) = (0, 0);
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, hit, miss] = words[..] else { bail!("kprobe_profile has the line {line:?}") };
        if names.clone().any(|known| known == name) {
            hits += hit.parse::<u64>().with_context(|| line.to_owned())?;
            missed += miss.parse::<u64>().with_context(|| line.to_owned())?;
        }
    }
    Ok((hits, missed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_summed() {
        let text = "  enter_7   16   0\n  enter_7   2  1\n  leave_7  3  4\n  enter_8  9 9\n";
        let names = ["enter_7", "leave_7"].into_iter();
        assert_eq!(parse_profile(text, names).unwrap(), (21, 5));
    }

    #[test]
    fn what_was_skipped_is_within_its_bounds() {
        let exact = Skipped::of((10, 2), (10, 2), 7);
        assert_eq!((exact.least, exact.most), (5, 5));
        // All that was hit meanwhile is counted: nothing is open.
        assert_eq!(Skipped::of((10, 0), (30, 0), 30).open(), 0);
        let busy = Skipped::of((100, 0), (130, 1), 110);
        assert_eq!((busy.least, busy.most), (0, 21));
        assert_eq!(exact.since(exact).open(), 0);
        assert_eq!(busy.since(exact), Skipped { least: 0, most: 16 });
        // A busy reading before a quiet one.
        assert_eq!(exact.since(busy), Skipped { least: 0, most: 5 });
        assert_eq!(busy + exact, Skipped { least: 5, most: 26 });
    }
}
