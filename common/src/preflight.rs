//! What must be there before a program is loaded, said in one sentence where it is not.

use std::{
    env::consts,
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use libbpf_rs::btf::{
    Btf,
    types::{Func, FuncProto, Typedef},
};
use rustix::{
    io::Errno,
    process::{Resource, getrlimit},
};

use crate::{error::unsupported, kallsyms, mounted::mounted, room};

/// How many files a program has open at a time, where it attaches no hook for each of many functions: each BPF
/// program, map and hook is one. `exporter --parts` has 51 on 7.2, by /proc/PID/fd.
const FILES: u64 = 64;

/// Fails, with exit code 3, where the kernel is older than 6.1, this process may not load BPF
/// programs or open as many files as they are, the kernel describes no types (BTF), tracefs is not mounted, or the
/// kernel is locked down.
pub fn machine() -> Result<()> {
    mounted()?;
    if let Some(most) = getrlimit(Resource::Nofile).current.filter(|most| *most < FILES) {
        return unsupported(format!(
            "this process may have {most} files open at a time, and needs {FILES}: each BPF program, map and \
             hook is one. `ulimit -n 1024` allows more"
        ));
    }
    let release = release()?;
    if version(&release).is_some_and(|version| version < (6, 1)) {
        return unsupported(format!(
            "this kernel ({release}) is older than 6.1, the oldest one that the workshop supports: boot a \
             newer one, or start the program in the VM with cargo vm run"
        ));
    }
    let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    if let Some(lack) = lacks(&status, rustix::process::geteuid().is_root()) {
        return unsupported(lack);
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return unsupported(
            "this kernel has no BTF, the description of its types: /sys/kernel/btf/vmlinux is missing. \
             A kernel built with CONFIG_DEBUG_INFO_BTF=y has it (Debian from 11, Fedora, Ubuntu from 20.10); \
             so has the VM's: cargo vm run",
        );
    }
    room::cgroup_leaves(0, &[])?;
    tracefs().map(|_| ())
}

/// Fails, with exit code 3, where a stack may not have as many functions as a map of stacks has room for.
pub fn stacks_have(functions: usize) -> Result<()> {
    let setting = "/proc/sys/kernel/perf_event_max_stack";
    let most = fs::read_to_string(setting).unwrap_or_default().trim().parse().unwrap_or(usize::MAX);
    if most >= functions {
        return Ok(());
    }
    unsupported(format!(
        "kernel.perf_event_max_stack is {most}, and this program keeps stacks of {functions} functions. As \
         root, sysctl kernel.perf_event_max_stack={functions} allows that"
    ))
}

/// Fails, with exit code 3, where the kernel's pages have another size, in bytes.
pub fn pages_have(bytes: usize) -> Result<()> {
    mounted()?; // or the size is not known
    match rustix::param::page_size() {
        size if size == bytes => Ok(()),
        size => unsupported(format!(
            "this kernel's pages have {size} bytes, and this program counts pages of {bytes}: take a kernel \
             with such pages, as the VM's is: cargo vm run"
        )),
    }
}

/// Whether the running kernel is older than this release: (6, 7).
pub(crate) fn is_before(first: (u32, u32)) -> Result<bool> {
    Ok(version(&release()?).is_some_and(|version| version < first))
}

/// The running kernel's release: `6.1.0-50-amd64`.
fn release() -> Result<String> {
    let path = "/proc/sys/kernel/osrelease";
    Ok(fs::read_to_string(path).context(path)?.trim().to_owned())
}

/// The first two numbers of a release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// Whether the kernel may take the CPU away from a task in the middle of a BPF program: a real-time
/// kernel, one whose preemption is full or lazy, hence any from 7.0 on (kernel/Kconfig.preempt).
pub fn preempts() -> Result<bool> {
    let path = "/proc/version";
    let version = fs::read_to_string(path).context(path)?;
    let model = version.split_whitespace().find(|word| word.starts_with("PREEMPT"));
    Ok(match model {
        None => false,
        // `none (voluntary) full`. Where debugfs is not mounted, assume that it does.
        Some("PREEMPT_DYNAMIC") => {
            let now = fs::read_to_string("/sys/kernel/debug/sched/preempt").unwrap_or_default();
            !["(none)", "(voluntary)"].iter().any(|model| now.contains(model))
        }
        Some(_) => true,
    })
}

/// What the process of this `/proc/PID/status` lacks to load BPF programs. `None`: nothing.
fn lacks(status: &str, is_root: bool) -> Option<String> {
    let effective = effective(status)?;
    let has = |number: u32| effective >> number & 1 == 1;
    if has(SYS_ADMIN) {
        return None; // the kernel takes it for both
    }
    let missing: Vec<&str> = [(39, "CAP_BPF"), (38, "CAP_PERFMON")]
        .iter()
        .filter(|(n, _)| !has(*n))
        .map(|c| c.1)
        .collect();
    let names = missing.join(" and ");
    Some(match (missing.len(), is_root) {
        (0, _) => return None,
        (_, true) => format!(
            "this user is root, but without {names}: BPF programs cannot be loaded. Containers take \
             such capabilities away: start it outside, in a privileged container (--privileged), or in the \
             VM with cargo vm run"
        ),
        (2, false) => format!(
            "only root, or a user with the capabilities {names}, may load BPF programs: start it with \
             sudo, or in the VM with cargo vm run"
        ),
        (_, false) => format!(
            "the capability {names} is missing: BPF programs cannot be loaded. --help lists all that \
             are needed; sudo gives the program all of them"
        ),
    })
}

/// The capability that stands for all that BPF needs, but for CAP_SYSLOG and access to files.
const SYS_ADMIN: u32 = 21;

/// The effective capabilities. `None`: this /proc does not tell, and the kernel has the answer.
fn effective(status: &str) -> Option<u64> {
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(set.trim(), 16).ok()
}

/// Why the kernel refuses perf events in spite of CAP_PERFMON, with exit code 3, if this is why: kprobes and
/// tracepoints are such events. Debian has patched its kernels to do so where the setting is above 2.
pub fn perf_events(hooks: &[String]) -> Result<()> {
    let kinds = ["kprobe/", "kretprobe/", "tp/"];
    let Some(hook) = hooks.iter().find(|hook| kinds.iter().any(|kind| hook.starts_with(kind)))
    else {
        return Ok(());
    };
    let status = fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let setting = "/proc/sys/kernel/perf_event_paranoid";
    let level = fs::read_to_string(setting).unwrap_or_default().trim().parse().unwrap_or(0);
    if level <= 2 || effective(&status).is_none_or(|set| set >> SYS_ADMIN & 1 == 1) {
        return Ok(());
    }
    unsupported(format!(
        "the capability CAP_SYS_ADMIN is missing: this kernel demands it for {hook} while \
         kernel.perf_event_paranoid is {level}. As root, sysctl kernel.perf_event_paranoid=2 makes \
         CAP_PERFMON enough"
    ))
}

/// Where tracefs is mounted. Fails, with exit code 3, where it is not, or where the kernel lets nobody read it.
pub fn tracefs() -> Result<PathBuf> {
    mounted()?;
    let mut hidden = false;
    for path in ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"].map(PathBuf::from) {
        match path.join("trace_pipe").try_exists() {
            Ok(true) => return unlocked(path),
            Ok(false) => {}
            Err(error) => hidden |= error.kind() == ErrorKind::PermissionDenied,
        }
    }
    unsupported(match hidden {
        true => {
            "the capability CAP_DAC_READ_SEARCH is missing: only root may read tracefs, \
             /sys/kernel/tracing. --help lists all that are needed; sudo gives the program all of them"
        }
        false => "tracefs is not mounted: mount -t tracefs tracefs /sys/kernel/tracing",
    })
}

/// A locked kernel refuses tracefs even to root, so this needs no securityfs, where the lock could be looked up.
fn unlocked(tracefs: PathBuf) -> Result<PathBuf> {
    match File::open(tracefs.join("README")) {
        Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => unsupported(
            "this kernel is locked down (lockdown=confidentiality): no BPF program may read its memory. Boot \
             it with lockdown=integrity or without Secure Boot, or start the program in the VM with cargo vm run",
        ),
        _ => Ok(tracefs),
    }
}

/// Fails, with exit code 3, where the running kernel has no such hook; `section` is the ELF section
/// that names it: `kprobe/submit_bio`, `fentry/bio_endio`, `tp_btf/block_rq_issue`.
pub fn hook(section: &str) -> Result<()> {
    let Some((kind, name)) = section.split_once('/') else { return Ok(()) };
    match kind {
        "fentry" | "fexit" if lacks_fentry(consts::ARCH, &release()?) => {
            unsupported("this kernel has no fentry on arm64: take 6.12 (`--kernel 6.12`)")
        }
        "kprobe" | "kretprobe" | "fentry" | "fexit" => function(name),
        "tp_btf" => {
            let btf = Btf::from_vmlinux().context("the kernel's BTF could not be read")?;
            match btf.type_by_name::<Typedef>(&format!("btf_trace_{name}")) {
                Some(_) => Ok(()),
                None => unsupported(format!(
                    "this kernel has no tracepoint {name}: ls /sys/kernel/tracing/events/* shows those it has"
                )),
            }
        }
        _ => Ok(()),
    }
}

/// Whether a kernel loads fentry programs and cannot attach them: on arm64, functions have no place for
/// them before 6.4.
fn lacks_fentry(arch: &str, release: &str) -> bool {
    arch == "aarch64" && version(release).is_some_and(|version| version < (6, 4))
}

/// Whether the running kernel has this function, by its BTF: reading the list of those that can be
/// hooked takes seconds.
pub fn has_function(name: &str) -> Result<bool> {
    let btf = Btf::from_vmlinux().context("the kernel's BTF could not be read")?;
    Ok(btf.type_by_name::<Func>(name).is_some())
}

/// Whether the kernel has kprobe.session programs that see every return: from 7.0 on, where
/// `bpf_session_cookie()` takes an argument.
///
/// Before 6.14 such a program has few places to remember calls in, and silently misses the rest: of
/// 19,270 reads by 64 threads on 6.12, it saw 2,632.
pub fn has_sessions() -> Result<bool> {
    let btf = Btf::from_vmlinux().context("the kernel's BTF could not be read")?;
    let function = btf.type_by_name::<Func>("bpf_session_cookie");
    let prototype = function.and_then(|function| function.next_type());
    let prototype = prototype.and_then(|prototype| FuncProto::try_from(prototype).ok());
    Ok(prototype.is_some_and(|prototype| prototype.iter().len() == 1))
}

fn function(name: &str) -> Result<()> {
    let list = tracefs()?.join("available_filter_functions");
    let text = fs::read_to_string(&list)
        .with_context(|| format!("{} could not be read", list.display()))?;
    let names = || text.lines().filter_map(|line| line.split_whitespace().next());
    if names().any(|known| known == name) {
        return Ok(());
    }
    let known = kallsyms::read().unwrap_or_default();
    let present = kallsyms::symbols(&known).any(|symbol| symbol.name == name);
    let why = if present {
        format!("has the function {name}(), but does not let it be traced")
    } else {
        format!("has no function {name}(): it was renamed, inlined or removed")
    };
    let alike = match similar(name, names()) {
        names if names.is_empty() => "none".into(),
        names => names.join(", "),
    };
    unsupported(format!(
        "this kernel ({}) {why}\n  Similar names that can be traced: {alike}\n  All names: {}",
        release()?,
        list.display()
    ))
}

/// The names most like `name`, the best first, at most three: how to find the successor of a
/// function that is gone. `blk_start_request` gives `blk_mq_start_request`.
pub fn similar<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut scored: Vec<(f64, &str)> = names
        .map(|candidate| (strsim::sorensen_dice(name, candidate), candidate))
        .filter(|(score, _)| *score > 0.6)
        .collect();
    scored.sort_by(|(a, left), (b, right)| b.total_cmp(a).then(left.cmp(right)));
    scored.dedup();
    scored.truncate(3);
    scored.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_capability_is_named() {
        let lacks = |bits: &[u32], is_root| {
            let set = bits.iter().fold(0_u64, |set, bit| set | 1 << bit);
            lacks(&format!("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t{set:016x}\n"), is_root)
        };
        assert_eq!(lacks(&[21], true), None);
        assert_eq!(lacks(&[38, 39], false), None);
        assert!(lacks(&[], true).unwrap().contains("is root, but without CAP_BPF and CAP_PERFMON"));
        assert!(lacks(&[], false).unwrap().starts_with("only root, or a user with"));
        assert!(lacks(&[39], false).unwrap().starts_with("the capability CAP_PERFMON is missing"));
        assert!(lacks(&[38, 2], false).unwrap().starts_with("the capability CAP_BPF is missing"));
        assert_eq!(super::lacks("Name:\tx\n", false), None);
    }

    #[test]
    fn a_release_begins_with_its_version() {
        assert_eq!(version("6.1.0-50-amd64"), Some((6, 1)));
        assert_eq!(version("6.12.107+deb13-amd64"), Some((6, 12)));
        assert_eq!(version("7.3-rc1"), Some((7, 3)));
        assert!(version("5.10.0-32-amd64") < Some((6, 1)));
        assert_eq!(version("odd"), None);
    }

    #[test]
    fn fentry_came_later_to_arm64() {
        let lacks = |release| lacks_fentry("aarch64", release);
        assert!(lacks("6.1.0-50-arm64") && lacks("6.3.0-rc1"));
        assert!(!lacks("6.4.0") && !lacks("6.12.107+deb13-arm64"));
        assert!(!lacks_fentry("x86_64", "6.1.0-50-amd64"));
    }

    #[test]
    fn the_successor_of_a_vanished_hook_is_named() {
        let names =
            ["blk_mq_start_request", "blk_mq_end_request", "vfs_read", "blk_mq_start_request"];
        assert_eq!(similar("blk_start_request", names.into_iter())[0], "blk_mq_start_request");
        assert!(similar("blk_start_request", ["vfs_read"].into_iter()).is_empty());
    }
}
