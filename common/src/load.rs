//! From a skeleton to running programs.

use std::{
    mem::MaybeUninit,
    os::fd::AsFd,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, anyhow};
use libbpf_rs::{
    Link, MapCore, MapFlags, Object, OpenObject, OpenProgramMut, PrintLevel, Program,
    query::ProgInfoIter,
    set_print,
    skel::{OpenSkel, Skel, SkelBuilder},
};

use crate::{Cli, Options, Unsupported, cli, preflight, trace_pipe};

/// Checks the machine, opens the skeleton in `object`, lets `configure` set its constants, loads
/// and attaches it, and says so on stderr. Its event lines wait for [`print_trace_pipe`].
///
/// [`print_trace_pipe`]: crate::print_trace_pipe
///
/// A hook that this kernel lacks, a user who is not root, a kernel without BTF: [`Unsupported`]
/// (exit code 3). A refusal by the verifier or by libbpf becomes one message; `--verbose` shows all
/// that they said.
pub fn load<'obj, B: SkelBuilder<'obj>, Own: Options>(
    builder: B,
    object: &'obj mut MaybeUninit<OpenObject>,
    cli: &Cli<Own>,
    configure: impl FnOnce(&mut B::Output) -> Result<()>,
) -> Result<(<B::Output as OpenSkel<'obj>>::Output, Links)> {
    preflight::root_btf_and_tracefs()?;
    set_print(Some(if cli.verbose {
        (PrintLevel::Debug, |_, line| cli::say(&line))
    } else {
        (PrintLevel::Warn, |_, line| lock_log().push_str(&line))
    }));
    let mut open = builder.open(object).map_err(|error| explain("opened", error, &[]))?;
    configure(&mut open)?;
    if let Some(most) = cli.own.in_flight() {
        let mut starts = open.open_object_mut().maps_mut().filter(|map| map.name() == "starts");
        starts.try_for_each(|mut map| map.set_max_entries(most)).context("--in-flight")?;
    }
    let hooks: Vec<String> = open
        .open_object()
        .progs()
        .map(|program| program.section().to_string_lossy().into_owned())
        .collect();
    let skel = open.load().map_err(|error| explain("loaded", error, &hooks))?;
    write_addresses(skel.object())?;
    if !cli.own.quiet() {
        trace_pipe::open_before_attach()?;
    }
    let links = Links::attach(skel.object()).map_err(|error| {
        trace_pipe::close();
        explain("attached", error, &hooks)
    })?;
    cli::say_tracing(cli);
    Ok((skel, links))
}

/// Tells a program with the map `bio_chain_endio` where the kernel's function of this name lies.
fn write_addresses(object: &Object) -> Result<()> {
    let Some(map) = object.maps().find(|map| map.name() == PART_ENDS) else { return Ok(()) };
    let address = preflight::address_of(PART_ENDS)?;
    map.update(&0_u32.to_ne_bytes(), &address.to_ne_bytes(), MapFlags::ANY).context(PART_ENDS)
}

/// The map, and the function: see common/bpf/bio.h.
const PART_ENDS: &str = "bio_chain_endio";

/// The hooks of a loaded object. Dropped, they are detached.
///
/// Hooks come into being one after the other, and so do they go. What hooks the start of an I/O
/// stands first in a program's file: it is attached last and detached first. So no start is seen
/// whose end was not hooked yet, or is hooked no more: what is in flight at exit really is.
pub struct Links(Vec<Link>);

impl Links {
    fn attach(object: &Object) -> libbpf_rs::Result<Links> {
        let programs: Vec<_> = object.progs_mut().collect();
        let attached = programs.iter().rev().map(|program| program.attach());
        let mut links: Vec<Link> = attached.collect::<libbpf_rs::Result<_>>()?;
        links.reverse();
        Ok(Links(links))
    }

    /// Detaches the programs; their maps and variables then stand still.
    pub fn detach(&mut self) {
        self.0.clear();
        // One may still be at work, in a preemptible kernel for long: all of them are RCU readers,
        // for which this waits. It has no arguments that could be wrong, and fails only on kernels
        // that were told not to interrupt some CPUs (nohz_full).
        // SAFETY: a system call without pointers.
        unsafe { libc::syscall(libc::SYS_membarrier, libc::MEMBARRIER_CMD_GLOBAL, 0, 0) };
    }
}

/// Moves fentry and fexit programs to the first of `functions` that the running kernel has: a
/// function that was renamed, its arguments at the same places. For [`load`]'s `configure`.
///
/// Fails with [`Unsupported`] where the kernel has none of them.
pub fn hook_first_of<'a, 'obj: 'a>(
    functions: &[&str],
    programs: impl IntoIterator<Item = &'a mut OpenProgramMut<'obj>>,
) -> Result<()> {
    let function = preflight::first_function(functions)?;
    for program in programs {
        program
            .set_attach_target(0, Some(function.to_owned()))
            .with_context(|| format!("{function}() could not be hooked"))?;
    }
    Ok(())
}

static LOG: Mutex<String> = Mutex::new(String::new());

fn lock_log() -> std::sync::MutexGuard<'static, String> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why it did not work: one of the hooks is not there, or what the log tells.
fn explain(what: &str, error: libbpf_rs::Error, hooks: &[String]) -> anyhow::Error {
    // Only now: it takes the kernel seconds to list the functions that can be hooked.
    let mut problems = hooks.iter().filter_map(|hook| preflight::hook(hook).err());
    if let Some(missing) = problems.find(|problem| problem.is::<Unsupported>()) {
        return missing;
    }
    let reason = reason(&lock_log()).unwrap_or_else(|| format!("{error:#}"));
    anyhow!(
        "the BPF program could not be {what}: {reason}\n  \
         --verbose shows all that libbpf and the kernel said"
    )
}

/// The line of libbpf's log that tells most: the verifier's last word, else libbpf's first warning.
fn reason(log: &str) -> Option<String> {
    let verifier = log.split_once("-- BEGIN PROG LOAD LOG --").and_then(|(before, rest)| {
        let program = before.rsplit("prog '").next()?.split('\'').next()?;
        let (said, _) = rest.split_once("-- END PROG LOAD LOG --").unwrap_or((rest, ""));
        let last = said
            .lines()
            .rfind(|line| !line.trim().is_empty() && !line.starts_with("processed "))?;
        Some(format!("the verifier refused {program}(): {}", last.trim()))
    });
    let warning = || log.lines().next().map(|line| line.trim_start_matches("libbpf: ").to_owned());
    verifier.or_else(warning)
}

/// How often the kernel skipped each of the object's programs because an interrupt or another task
/// had caught the same program at work on the same CPU; only those that it did skip. The kernel
/// counts it from 5.12 on; before, the list is empty.
pub fn missed(object: &Object) -> Result<Vec<(String, u64)>> {
    let mut missed = Vec::new();
    for program in object.progs() {
        let id = Program::id_from_fd(program.as_fd()).context("a loaded program has no id")?;
        let info = ProgInfoIter::default().find(|info| info.id == id);
        let times = info.map_or(0, |info| info.recursion_misses);
        if times > 0 {
            missed.push((program.name().to_string_lossy().into_owned(), times));
        }
    }
    Ok(missed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_the_verifiers_last_word() {
        let log = "libbpf: prog 'submit_bio_entry': BPF program load failed: Permission denied\n\
                   libbpf: prog 'submit_bio_entry': -- BEGIN PROG LOAD LOG --\n\
                   0: R1=ctx(off=0,imm=0)\nR2 invalid mem access 'scalar'\n\
                   processed 12 insns (limit 1000000)\n-- END PROG LOAD LOG --\n";
        assert_eq!(
            reason(log).unwrap(),
            "the verifier refused submit_bio_entry(): R2 invalid mem access 'scalar'"
        );
        assert_eq!(
            reason("libbpf: failed to find BTF\nlibbpf: more\n").unwrap(),
            "failed to find BTF"
        );
        assert_eq!(reason(""), None);
    }
}
