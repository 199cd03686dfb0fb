//! One run of a program: from a skeleton to hooks in the kernel and back.

use std::{
    env, fs,
    io::{self, IsTerminal},
    mem::MaybeUninit,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use libbpf_rs::{
    Link, MapCore, MapFlags, MapHandle, MapType, Object, OpenObject, Program as Loaded, ProgramMut,
    libbpf_sys::bpf_map_create_opts,
    skel::{OpenSkel, Skel, SkelBuilder},
};
use std::os::fd::{AsFd, AsRawFd};

use crate::{
    addresses,
    cli::Cli,
    message::say,
    preflight,
    refusal::{self, Step},
    results, room, switches,
    trace_pipe::{self, TracePipe},
};

/// What lasts as long as a run: its hooks, and when it is to end.
///
/// The steps are those of any libbpf program: [`open`](Session::open), set constants and the sizes of
/// maps, [`load`](Session::load), [`attach`](Session::attach), [`trace`](Session::trace) until it
/// ends, [`detach`](Session::detach). Dropped, a session leaves nothing behind.
pub struct Session {
    name: &'static str,
    /// The directory of the package's sources.
    directory: &'static str,
    duration: Option<Duration>,
    verbose: bool,
    /// The options that say how much room maps have.
    sizes: Vec<String>,
    /// The columns of the terminal at stdout, if it is one.
    terminal: Option<usize>,
    stop: Arc<AtomicBool>,
    start: Option<Instant>,
    hooks: Vec<String>,
    /// Of these hooks, since they are loaded.
    switches: Option<switches::Watch>,
    /// How the trace lines of the programs begin.
    formats: Vec<Vec<u8>>,
    /// The programs that are loaded: their names, and the kernel's ids.
    loaded: Vec<(String, u32)>,
    /// And whether it is that of a kprobe.
    links: Vec<(Link, bool)>,
}

impl Session {
    pub(crate) fn new<Own: Args>(
        name: &'static str,
        directory: &'static str,
        cli: &Cli<Own>,
        stop: Arc<AtomicBool>,
        terminal: Option<usize>,
    ) -> Session {
        Session {
            name,
            directory,
            duration: cli.duration,
            verbose: cli.verbose,
            sizes: room::options::<Own>(),
            terminal,
            stop,
            start: None,
            hooks: Vec::new(),
            switches: None,
            formats: Vec::new(),
            loaded: Vec::new(),
            links: Vec::new(),
        }
    }

    /// Checks the machine, and opens the skeleton in `object`: its constants and the sizes of its maps
    /// can be set now.
    ///
    /// A user who is not root, an old kernel, one without BTF, no tracefs: [`Unsupported`] (exit code 3).
    ///
    /// [`Unsupported`]: crate::Unsupported
    pub fn open<'obj, B: SkelBuilder<'obj>>(
        &mut self,
        builder: B,
        object: &'obj mut MaybeUninit<OpenObject>,
    ) -> Result<B::Output> {
        preflight::machine()?;
        refusal::keep_messages(self.verbose);
        builder.open(object).map_err(|error| self.explain(Step::Open, error))
    }

    /// Loads the programs into the kernel, where the verifier checks them. From here on, the constants
    /// are constant.
    ///
    /// Where the kernel lacks a function to hook: [`Unsupported`](crate::Unsupported) (exit code 3).
    /// A refusal by the verifier is one message, which names the line of C; `--verbose` shows all.
    pub fn load<'obj, O: OpenSkel<'obj>>(&mut self, open: O) -> Result<O::Output> {
        let programs = open.open_object().progs().filter(|program| program.autoload());
        self.hooks =
            programs.map(|program| program.section().to_string_lossy().into_owned()).collect();
        self.switches = Some(switches::Watch::new(self.name, &self.hooks)?);
        switches::hooks_run(&self.hooks)?;
        for map in open.open_object().maps().filter(|map| map.map_type() == MapType::StackTrace) {
            preflight::stacks_have(map.value_size() as usize / size_of::<u64>())?;
            addresses::functions_have_names()?;
        }
        self.formats = trace_pipe::formats(open.open_object());
        room::check(open.open_object(), &self.sizes)?;
        let maps = room::of_maps(open.open_object())?;
        let skel = open.load().map_err(|error| match refusal::for_lack_of_memory() {
            true => room::too_little(maps, &self.sizes),
            false => self.explain(Step::Load, error),
        })?;
        for program in skel.object().progs().filter(|program| program.autoload()) {
            let id = Loaded::id_from_fd(program.as_fd()).context("a loaded program has no id")?;
            self.loaded.push((program.name().to_string_lossy().into_owned(), id));
        }
        if self.verbose {
            for (name, info) in results::programs(skel.object())? {
                let verified = info.verified_insns;
                let bytes = info.jited_prog_len;
                let stage = self.name;
                say(&format!(
                    "{stage}: {name}(): {verified} instructions verified, {bytes} bytes of machine code\n"
                ));
            }
        }
        Ok(skel)
    }

    /// Fails, with exit code 3, where a cgroup leaves too little memory for the maps as they are now: for a program
    /// that needs much before it is loaded. [`load`](Session::load) checks them, too.
    pub fn has_room<'obj>(&self, open: &impl OpenSkel<'obj>) -> Result<()> {
        room::cgroup_leaves(room::of_maps(open.open_object())?, &self.sizes)
    }

    /// The name that stands before the program's messages.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Attaches those of the programs that are loaded to their hooks, in this order.
    pub fn attach<'a, 'obj: 'a>(
        &mut self,
        programs: impl IntoIterator<Item = &'a ProgramMut<'obj>>,
    ) -> Result<()> {
        for program in programs.into_iter().filter(|program| program.autoload()) {
            let link = program.attach().map_err(|error| {
                let refused = error.kind() == libbpf_rs::ErrorKind::PermissionDenied;
                let why = refused.then(|| preflight::perf_events(&self.hooks).err()).flatten();
                why.unwrap_or_else(|| self.explain(Step::Attach, error))
            })?;
            self.links.push((link, program.section().as_encoded_bytes().starts_with(b"kprobe/")));
        }
        Ok(())
    }

    /// Says on stderr that the run has begun: `--duration` counts from here.
    ///
    /// A program that is loaded, and that nothing has attached, is an error: it would never run.
    pub fn begin(&mut self) -> Result<()> {
        if let Some(attached) = attached()
            && let Some((name, _)) = self.loaded.iter().find(|(_, id)| !attached.contains(id))
        {
            bail!(
                "{name}() was loaded but never attached, so the kernel never runs it: attach it \
                 in main.rs; most programs are named in session.attach()"
            );
        }
        self.start = Some(Instant::now());
        let name = self.name;
        say(&match self.duration {
            Some(time) => format!("{name}: tracing for {}\n", humantime::format_duration(time)),
            None => format!("{name}: tracing until Ctrl-C\n"),
        });
        Ok(())
    }

    /// Begins the run, and prints the lines that the programs write, until the run ends.
    pub fn trace(&mut self, pipe: &mut TracePipe) -> Result<()> {
        pipe.only(&self.formats);
        self.begin()?;
        while !self.is_over() {
            pipe.print()?;
        }
        Ok(())
    }

    /// Begins the run, and waits until it ends. A terminal shows meanwhile for how long it has run.
    pub fn wait(&mut self) -> Result<()> {
        self.begin()?;
        let mut shown = String::new();
        while !self.is_over() {
            thread::sleep(Duration::from_millis(50));
            let seconds = self.start.map_or(0, |start| start.elapsed().as_secs());
            let text = format!("{}: {seconds} s", self.name);
            if seconds > 0 && text != shown && io::stderr().is_terminal() {
                say(&format!("\r{text}"));
                shown = text;
            }
        }
        if !shown.is_empty() {
            say(&format!("\r{:1$}\r", "", shown.len()));
        }
        Ok(())
    }

    /// Whether the program's stdout is a terminal.
    pub fn stdout_is_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// How many columns the terminal at the program's stdout has; none if it is no terminal.
    pub fn terminal_columns(&self) -> Option<usize> {
        self.terminal
    }

    /// Whether the program's stdout is a terminal that has colours, and the user wants them: neither `NO_COLOR` nor
    /// `TERM=dumb` is set.
    pub fn has_colours(&self) -> bool {
        let is_unwanted = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        self.terminal.is_some()
            && !is_unwanted
            && env::var_os("TERM").is_none_or(|term| term != "dumb")
    }

    /// Whether `--duration` has passed since the run began, or Ctrl-C, SIGTERM or
    /// SIGHUP has come.
    pub fn is_over(&self) -> bool {
        let passed = self.start.map_or(Duration::ZERO, |start| start.elapsed());
        self.stop.load(Ordering::SeqCst) || self.duration.is_some_and(|duration| passed >= duration)
    }

    /// Detaches the programs, the last one attached first. When this returns, none of them is
    /// running any more: their maps and variables stand still.
    pub fn detach(&mut self) -> Result<()> {
        while let Some((link, _)) = self.links.pop() {
            results::remember_missed(&link);
        }
        wait_for_programs().context("the programs that are still running could not be waited for")
    }

    /// Fails, with exit code 3, where somebody has switched the hooks off after they were loaded, also for a
    /// moment.
    pub fn hooks_still_run(&self) -> Result<()> {
        if self.start.is_none() {
            return Ok(());
        }
        self.hooks_check()()
    }

    /// The same for another thread, once the programs are loaded: whoever reads the switches has to wait while the
    /// kernel hooks functions for somebody else.
    pub fn hooks_check(&self) -> impl Fn() -> Result<()> + Send + Sync + use<> {
        let (hooks, switches) = (self.hooks.clone(), self.switches.clone());
        move || {
            switches::hooks_run(&hooks).context(
                "the hooks were switched off during the run: what came after that is not counted",
            )?;
            switches.as_ref().map_or(Ok(()), switches::Watch::hooks_ran).context(
                "the hooks were switched off during the run: what came meanwhile is not counted",
            )
        }
    }

    /// How often the kernel skipped each of the object's programs that are loaded, also while they are attached.
    /// Unlike a look at a map, this keeps no program from running.
    pub fn skips(&self, object: &Object) -> Result<Vec<(String, u64)>> {
        let kprobes = self.links.iter().filter(|(_, is_kprobe)| *is_kprobe);
        results::skips(object, kprobes.map(|(link, _)| link))
    }

    /// Detaches the programs all at once: for a run that reads nothing after that. The kernel waits before
    /// it frees a link; here it waits for several at a time.
    pub fn detach_at_once(&mut self) {
        thread::scope(|scope| {
            for (link, _) in self.links.drain(..) {
                // Where there is no thread to be had, it is dropped here.
                thread::Builder::new().spawn_scoped(scope, move || drop(link)).ok();
            }
        });
    }

    fn explain(&self, step: Step, error: libbpf_rs::Error) -> anyhow::Error {
        let missing = || {
            // Only now: it takes the kernel seconds to list the functions that can be hooked.
            let mut problems = self.hooks.iter().filter_map(|hook| preflight::hook(hook).err());
            problems.find(|problem| problem.is::<crate::Unsupported>())
        };
        let missing = if refusal::by_verifier() { None } else { missing() };
        missing.unwrap_or_else(|| refusal::explain(step, &error, self.directory, self.verbose))
    }
}

/// The ids of the programs that this process has attached, in whatever way: each link is one of its
/// file descriptors. `None` where /proc does not tell.
fn attached() -> Option<Vec<u32>> {
    let mut attached = Vec::new();
    for file in fs::read_dir("/proc/self/fdinfo").ok()? {
        // That of the directory itself is closed by then.
        let info = fs::read_to_string(file.ok()?.path()).unwrap_or_default();
        let id = info.lines().find_map(|line| line.strip_prefix("prog_id:"));
        attached.extend(
            id.filter(|_| info.contains("link_id:")).and_then(|id| id.trim().parse::<u32>().ok()),
        );
    }
    Some(attached)
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
