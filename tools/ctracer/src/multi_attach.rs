//! One program on many functions.

use std::{
    ffi::CString,
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Seek, Write},
    os::unix::process::CommandExt,
    process::{Child, Command, Stdio},
    ptr::{self, NonNull},
};

use anyhow::{Context, Result};
use libbpf_rs::{AsRawLibbpf, Link, ProgramMut, TracepointCategory, libbpf_sys as sys};

use common::{btf::Btf, tracefs, unsupported};

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

/// Attaches the program to the functions of these names, with a cookie for each. Needs kprobe.multi: see
/// [`has_multi`]. Returns the links, and what the kernel refuses.
pub fn attach(
    program: &ProgramMut,
    names: &[&str],
    cookies: &[u64],
    at: At,
) -> Result<(Vec<Link>, Refused)> {
    let (mut links, mut refused) = (Vec::new(), Vec::new());
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

/// Kernel events of this process, for kernels without kprobe.multi: one for all entries, one for all
/// returns. The kernel attaches a program to an event at once, whatever its number of probes, and
/// counts the hits of each probe. Dropped, they are gone; their links have to be dropped before.
pub struct KprobeEvents {
    /// Removes the events when its stdin is closed: also where this process is killed.
    guard: Child,
    list: File,
    /// Opened once: looking its path up hits probes, of inodes for instance.
    profile: File,
}

/// The group of the events.
const GROUP: &str = "ctracer";

/// The name of an event.
fn event(at: At) -> String {
    format!("{at:?}_{}", std::process::id())
}

impl KprobeEvents {
    /// The events, still without a function.
    pub fn new() -> Result<KprobeEvents> {
        let tracefs = tracefs()?;
        let list = OpenOptions::new().append(true).open(tracefs.join("kprobe_events"));
        if list.as_ref().is_err_and(|error| error.kind() == ErrorKind::PermissionDenied) {
            return unsupported(
                "the capability CAP_DAC_OVERRIDE is missing: without kprobe.multi, which this kernel lacks, \
                 the functions are hooked by kernel events, which only root may define: start it with sudo",
            );
        }
        // Not in this process group: Ctrl-C must not end it. The kernel refuses to remove an event
        // until the last program is detached. Its RCU grace periods take 4 s, expedited ones 10 ms.
        let script = format!(
            "cd {} && cat >/dev/null; rcu=/sys/kernel/rcu_expedited
             remove() {{
                 read expedited <$rcu
                 [ \"$expedited\" = 0 ] && echo 1 >$rcu
                 echo \"-:{GROUP}/$1\" >>kprobe_events; done=$?
                 [ \"$expedited\" = 0 ] && echo 0 >$rcu
                 return $done
             }} 2>/dev/null
             for event in {} {}
             do until remove $event || ! grep -q \"/$event \" kprobe_events; do sleep 0.1; done
             done",
            tracefs.display(),
            event(At::Entry),
            event(At::Return)
        );
        let guard = Command::new("sh")
            .args(["-c", &script])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("the process that removes the kernel events could not be started: sh")?;
        let profile = File::open(tracefs.join("kprobe_profile")).context("kprobe_profile")?;
        Ok(KprobeEvents { guard, list: list.context("kprobe_events")?, profile })
    }

    /// Adds a function of vmlinux or of a module.
    pub fn add(&self, name: &str, module: Option<&str>) -> Result<()> {
        let module = module.map_or(String::new(), |module| format!("{module}:"));
        // The return first: then no call is seen whose return is not.
        for (at, kind) in [(At::Return, format!("r{MAX_CALLS}")), (At::Entry, "p".to_owned())] {
            let probe = format!("{kind}:{GROUP}/{} {module}{name}", event(at));
            let written = (&self.list).write_all(format!("{probe}\n").as_bytes());
            written.with_context(|| format!("the kernel refuses the probe {probe}"))?;
        }
        Ok(())
    }

    /// Attaches the program to all functions of an event at once.
    pub fn attach(&self, program: &ProgramMut, at: At) -> Result<Link> {
        let group = TracepointCategory::Custom(GROUP.to_owned());
        let link = program.attach_tracepoint(group, event(at));
        link.with_context(|| format!("the probes {GROUP}/{} could not be attached", event(at)))
    }

    /// How often the probes were hit, and how often they were missed: in the handler of another probe.
    pub fn profile(&self) -> Result<(u64, u64)> {
        let (mut file, mut text) = (&self.profile, String::new());
        // Not File's own: it asks for the size first, a hit where lookups of names are traced.
        let read = file.rewind().and_then(|()| file.take(u64::MAX).read_to_string(&mut text));
        read.context("kprobe_profile")?;
        let sums = sum_profile(&text, &[At::Entry, At::Return].map(event));
        sums.context("kprobe_profile has an odd line")
    }
}

impl Drop for KprobeEvents {
    fn drop(&mut self) {
        drop(self.guard.stdin.take());
        self.guard.wait().ok();
    }
}

/// The sums of the two numbers that stand behind each of these names.
fn sum_profile(text: &str, names: &[String]) -> Option<(u64, u64)> {
    let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut own = lines.filter(|words| names.iter().any(|name| words.first() == Some(&&**name)));
    own.try_fold((0, 0), |(hits, missed), words| {
        let number = |at: usize| words.get(at)?.parse::<u64>().ok();
        Some((hits + number(1)?, missed + number(2)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_summed() {
        let text = "  enter_7   16   0\n  enter_7   2  1\n  leave_7  3  4\n  enter_8  9 9\n";
        let names = ["enter_7", "leave_7"].map(str::to_owned);
        assert_eq!(sum_profile(text, &names), Some((21, 5)));
        assert_eq!(sum_profile("leave_7 3", &names), None);
    }
}
