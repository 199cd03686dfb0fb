//! One run of a program: from a skeleton to hooks in the kernel and back.

use std::{
    mem::MaybeUninit,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, MapType, OpenObject, ProgramMut,
    libbpf_sys::bpf_map_create_opts,
    skel::{OpenSkel, Skel, SkelBuilder},
};
use std::os::fd::{AsFd, AsRawFd};

use crate::{
    addresses,
    cli::{Cli, Options},
    preflight,
    program::{Program, say},
    refusal::{self, Step},
    results,
    trace_pipe::TracePipe,
};

/// What lasts as long as a run: its hooks, its trace pipe, and when it is to end.
///
/// The steps are those of any libbpf program: [`open`](Session::open), set constants,
/// [`load`](Session::load), [`attach`](Session::attach), then
/// [`trace_until_done`](Session::trace_until_done). Dropped, a session leaves nothing behind.
pub struct Session {
    program: Program,
    duration: Option<Duration>,
    verbose: bool,
    in_flight: Option<u32>,
    prints_events: bool,
    on_terminal: bool,
    stop: Arc<AtomicBool>,
    start: Option<Instant>,
    hooks: Vec<String>,
    links: Vec<Link>,
    pipe: Option<TracePipe>,
}

impl Session {
    pub(crate) fn new<Own: Options>(
        program: Program,
        cli: &Cli<Own>,
        stop: Arc<AtomicBool>,
        on_terminal: bool,
    ) -> Session {
        Session {
            program,
            duration: cli.duration,
            verbose: cli.verbose,
            in_flight: cli.own.in_flight(),
            prints_events: cli.own.prints_events(),
            on_terminal,
            stop,
            start: None,
            hooks: Vec::new(),
            links: Vec::new(),
            pipe: None,
        }
    }

    /// Checks the machine, and opens the skeleton in `object`: its constants can be set now. With
    /// `--in-flight N`, its map `starts` gets N entries.
    ///
    /// A user who is not root, a kernel without BTF, no tracefs: [`Unsupported`] (exit code 3).
    ///
    /// [`Unsupported`]: crate::Unsupported
    pub fn open<'obj, B: SkelBuilder<'obj>>(
        &mut self,
        builder: B,
        object: &'obj mut MaybeUninit<OpenObject>,
    ) -> Result<B::Output> {
        preflight::root_btf_and_tracefs()?;
        refusal::keep_messages(self.verbose);
        let mut open = builder.open(object).map_err(|error| self.explain(Step::Open, error))?;
        if let Some(entries) = self.in_flight {
            let mut starts = open.open_object_mut().maps_mut().filter(|map| map.name() == "starts");
            starts.try_for_each(|mut map| map.set_max_entries(entries)).context("--in-flight")?;
        }
        Ok(open)
    }

    /// Sets the constants `address_of_FUNCTION`, and loads the programs into the kernel, where the
    /// verifier checks them. From here on, the constants are constant.
    ///
    /// Where the kernel lacks a function to hook: [`Unsupported`](crate::Unsupported) (exit code 3).
    /// A refusal by the verifier is one message, which names the line of C; `--verbose` shows all.
    pub fn load<'obj, O: OpenSkel<'obj>>(&mut self, mut open: O) -> Result<O::Output> {
        addresses::set(open.open_object_mut())?;
        let programs = open.open_object().progs().filter(|program| program.autoload());
        self.hooks =
            programs.map(|program| program.section().to_string_lossy().into_owned()).collect();
        let skel = open.load().map_err(|error| self.explain(Step::Load, error))?;
        if self.verbose {
            for (name, info) in results::programs(skel.object())? {
                let verified = match info.verified_insns {
                    0 => "? (known from 5.16 on)".to_owned(),
                    known => known.to_string(),
                };
                let bytes = info.jited_prog_insns.len();
                let stage = self.program.name;
                say(&format!(
                    "{stage}: {name}(): {verified} instructions verified, {bytes} bytes of machine code\n"
                ));
            }
        }
        Ok(skel)
    }

    /// Attaches the programs to their hooks, in this order, and says on stderr that the run has
    /// begun: `--duration` counts from here. They are detached in the opposite order.
    pub fn attach<'a, 'obj: 'a>(
        &mut self,
        programs: impl IntoIterator<Item = &'a ProgramMut<'obj>>,
    ) -> Result<()> {
        if self.prints_events {
            self.pipe = Some(TracePipe::open()?);
        }
        for program in programs {
            let link = program.attach().map_err(|error| self.explain(Step::Attach, error))?;
            self.links.push(link);
        }
        self.start = Some(Instant::now());
        let name = self.program.name;
        say(&match self.duration {
            Some(time) => format!("{name}: tracing for {}\n", humantime::format_duration(time)),
            None => format!("{name}: tracing until Ctrl-C\n"),
        });
        Ok(())
    }

    /// Waits until the run is over, and prints the lines that the programs write meanwhile. Then
    /// detaches the programs, prints the rest, and how many lines there were and how many were lost.
    pub fn trace_until_done(&mut self) -> Result<()> {
        while !self.is_over() {
            match &mut self.pipe {
                Some(pipe) => pipe.print()?,
                None => thread::sleep(Duration::from_millis(50)),
            }
        }
        self.detach()?;
        self.pipe.take().map_or(Ok(()), TracePipe::finish)
    }

    /// Whether the program's stdout is a terminal.
    pub fn stdout_is_terminal(&self) -> bool {
        self.on_terminal
    }

    /// Whether `--duration` has passed since the programs were attached, or Ctrl-C, SIGTERM or
    /// SIGHUP has come.
    pub fn is_over(&self) -> bool {
        let passed = self.start.map_or(Duration::ZERO, |start| start.elapsed());
        self.stop.load(Ordering::SeqCst) || self.duration.is_some_and(|duration| passed >= duration)
    }

    /// Detaches the programs, the last one attached first. When this returns, none of them is
    /// running any more: their maps and variables stand still.
    pub fn detach(&mut self) -> Result<()> {
        while self.links.pop().is_some() {}
        wait_for_programs().context("the programs that are still running could not be waited for")
    }

    fn explain(&self, step: Step, error: libbpf_rs::Error) -> anyhow::Error {
        let missing = || {
            // Only now: it takes the kernel seconds to list the functions that can be hooked.
            let mut problems = self.hooks.iter().filter_map(|hook| preflight::hook(hook).err());
            problems.find(|problem| problem.is::<crate::Unsupported>())
        };
        let missing = if refusal::by_verifier() { None } else { missing() };
        missing
            .unwrap_or_else(|| refusal::explain(step, &error, self.program.directory, self.verbose))
    }
}

/// Waits until every BPF program that runs now has ended. The kernel promises that for a change of a
/// map of maps: kernel/bpf/syscall.c, maybe_wait_bpf_programs(). membarrier(2) does not wait where
/// there is only one CPU.
fn wait_for_programs() -> libbpf_rs::Result<()> {
    let opts = |inner_map_fd| bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as libbpf_rs::libbpf_sys::size_t,
        inner_map_fd,
        ..Default::default()
    };
    let inner = MapHandle::create(MapType::Array, Some("inner"), 4, 4, 1, &opts(0))?;
    let fd = inner.as_fd().as_raw_fd();
    let outer = MapHandle::create(MapType::ArrayOfMaps, Some("outer"), 4, 4, 1, &opts(fd as u32))?;
    outer.update(&0_u32.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY)
}
