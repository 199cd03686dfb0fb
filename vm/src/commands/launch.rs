//! The way from a guest's description to a program that runs in it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use common_base::PARSE_ONLY;
use rustix::fs::{FlockOperation, flock};
use workshop::cargo::is_cargos;
use workshop::fail::{GUEST_DIED, USAGE, fail};
use workshop::say;

use crate::arch::{Accel, Arch};
use crate::cargo::{build, programs, programs_of_guests};
use crate::fetch::cache::Cache;
use crate::fetch::packages;
use crate::machine::qemu::{Guest, Machine};
use crate::machine::{initramfs, kvm};
use crate::run::{DATA, Run};
use crate::session::cleanup;
use crate::session::crash_report::{crash_report, tail};
use crate::session::host as session;
use crate::session::protocol::{Exit, Request};
use crate::session::rundir::{self, Info};

/// How long a stage runs where no duration is given and there is no terminal for a Ctrl-C.
const STAGE_DURATION: &str = "10s";

/// How often it is looked whether a guest that stays is in use.
const STEP: Duration = Duration::from_millis(200);

/// Free megabytes that a guest's disks usually need.
const DISKS_MB: u64 = 256;

/// What it means that this user is root.
pub const AS_ROOT: &str = "root: what the guest's root writes to the workspace, it writes as this machine's root \
                           (another user lends the guest fewer rights)";

/// Whether QEMU runs as root here.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Says once for each cache that this user is root, not at every start.
fn say_root(cache: &Cache) {
    if is_root() && File::create_new(cache.path("root-was-said")).is_ok() {
        say!("this user is {AS_ROOT}");
    }
}

/// What to run in the guest.
pub struct GuestProgram {
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// Whether it is a stage: it gets a duration where it has none, and no standard input, which it
    /// would not read.
    pub stage: bool,
    /// Whether, on a terminal, it gets keys all the same.
    pub reads_keys: bool,
    /// Whether it can check its command line alone, see [`PARSE_ONLY`].
    pub checks_usage: bool,
    /// Whether the workload runs beside it.
    pub workload: bool,
    /// Variables, in addition to those of this process.
    pub env: Vec<(&'static str, String)>,
}

impl GuestProgram {
    /// Any program of the guest.
    pub fn other(argv: Vec<OsString>) -> GuestProgram {
        GuestProgram {
            argv,
            stage: false,
            reads_keys: false,
            checks_usage: false,
            workload: false,
            env: Vec::new(),
        }
    }

    /// A program that was built in the workspace, from its file. `known`: it is one of the
    /// workshop's.
    pub fn built(
        file: PathBuf,
        args: Vec<OsString>,
        known: Option<&programs::WorkshopProgram>,
    ) -> GuestProgram {
        let stage = known.is_some();
        let mut argv = vec![file.into_os_string()];
        argv.extend(args);
        // One that begins with a word is another command of the program, as `ctracer report`.
        let begins_with_a_word = argv
            .get(1)
            .is_some_and(|arg| arg.as_encoded_bytes().first().is_some_and(u8::is_ascii_alphabetic));
        let is_run = stage && !begins_with_a_word;
        if is_run && !std::io::stdout().is_terminal() && !says_how_long(&argv[1..]) {
            argv.extend(["--duration".into(), STAGE_DURATION.into()]);
        }
        let reads_keys = known.is_some_and(|known| known.reads_keys);
        // Of an attempt, nobody knows what it does with PARSE_ONLY.
        let checks_usage = known.is_some_and(|known| !known.is_attempt);
        GuestProgram { stage, reads_keys, checks_usage, ..GuestProgram::other(argv) }
    }
}

/// Lets a program of the workshop check its command line, on the host: wrong usage needs no guest.
/// Returns the status to exit with where something is wrong.
/// Any other program would start its work here: it checks that in the guest, and so does one that is not
/// for this machine.
pub fn check_usage(program: &GuestProgram, arch: Arch) -> Result<Option<i32>> {
    let (file, args) = program.argv.split_first().context("no program")?;
    if arch.is_foreign() || !program.checks_usage {
        return Ok(None);
    }
    let status = Command::new(file)
        .args(args)
        .env(PARSE_ONLY, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .with_context(|| format!("cannot start {}", file.display()))?;
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok((code != 0).then_some(code))
}

/// Whether the arguments only ask for help or the version.
pub fn asks_for_help(args: &[OsString]) -> bool {
    args.iter().any(|arg| ["--help", "-h", "--version", "-V"].iter().any(|help| arg == help))
}

fn says_how_long(args: &[OsString]) -> bool {
    let says = |arg: &OsString| arg.to_string_lossy().split('=').next() == Some("--duration");
    asks_for_help(args) || args.iter().any(says)
}

/// How a launch went.
#[derive(Clone, Copy, Debug)]
pub struct LaunchOutcome {
    /// Exit code of the program.
    pub status: i32,
    /// What the guest ran on.
    pub accel: Accel,
    /// From QEMU's start to the agent's first message.
    pub boot: Duration,
}

/// Boots a guest, runs the program there, and takes the guest down.
pub fn run(run: &Run, guest: &Guest, program: &GuestProgram) -> Result<LaunchOutcome> {
    let booted = Booted::new(run, guest)?;
    let workload = program.workload.then(|| run.workspace().join("vm/workload.sh"));
    if workload.is_some() {
        say!("running vm/workload.sh on {DATA} as the workload (--idle: none)");
    }
    let request = request(run, program, workload)?;
    let stdin = !program.stage || request.stdin_tty;
    let exit = session::talk(booted.stream, request, stdin)?;
    let exit = exit.ok_or_else(|| fail(GUEST_DIED, crash_report(&booted.dir)))?;
    if exit.others > 0 {
        let (n, s) = (exit.others, if exit.others == 1 { "" } else { "s" });
        say!(
            "the guest keeps running for {n} other terminal{s} and stops with the last one; press \
             Ctrl-C to stop it now"
        );
        while cleanup::qemu_ended().is_none() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    cleanup::clean_up();
    Ok(LaunchOutcome { status: exit.status, accel: booted.accel, boot: booted.took })
}

/// Boots a guest and keeps it for others, until it has run nothing for `idle`.
pub fn keep(run: &Run, guest: &Guest, idle: Duration) -> Result<()> {
    let Booted { dir, .. } = &Booted::new(run, guest)?;
    // Whoever started this may have been interrupted, and read nothing more.
    let _ = writeln!(std::io::stdout(), "ready");
    let in_use = rundir::in_use(dir)?;
    let mut used = Instant::now();
    while cleanup::qemu_ended().is_none() {
        match flock(&in_use, FlockOperation::NonBlockingLockShared) {
            Err(_) => used = Instant::now(),
            // With the lock, without which no program starts in it.
            Ok(()) if used.elapsed() > idle => {
                cleanup::clean_up();
                return Ok(());
            }
            Ok(()) => flock(&in_use, FlockOperation::Unlock)?,
        }
        std::thread::sleep(STEP);
    }
    Err(fail(GUEST_DIED, crash_report(dir)))
}

/// A guest that has booted.
struct Booted {
    dir: PathBuf,
    _lock: File,
    stream: UnixStream,
    _port: File,
    accel: Accel,
    took: Duration,
}

impl Booted {
    fn new(run: &Run, guest: &Guest) -> Result<Booted> {
        let machine = machine(run, guest)?;
        let info = Info {
            workspace: run.workspace().to_owned(),
            arch: run.arch.name().to_owned(),
            kernel: guest.name.clone(),
            name: guest.joined_by.clone(),
            pid: std::process::id(),
        };
        let (dir, lock) = rundir::create(&info)?;
        cleanup::own_run_dir(&dir);
        if let Some(share) = guest.shares.iter().find(|share| dir.starts_with(share)) {
            let (dir, share) = (dir.display(), share.display());
            let message = format!(
                "{dir}, the directory for the launcher's own files, lies in {share}, which the guest \
                 can write to; set TMPDIR to a directory elsewhere"
            );
            return Err(fail(USAGE, message));
        }
        if let Some(limit) = guest.timeout {
            let dir = dir.clone();
            std::thread::spawn(move || {
                std::thread::sleep(limit);
                let limit = humantime::format_duration(limit);
                let message = format!(
                    "the program has not ended within {limit} (--timeout): stopping the guest{}",
                    tail(&dir)
                );
                cleanup::exit(GUEST_DIED, Some(&message));
            });
        }
        say_root(&run.cache);
        let start = Instant::now();
        let (socket, port) = rundir::next_port(&dir)?;
        let accel = kvm::boot(&machine, &run.cache, &dir)?;
        let stream = session::open(&socket, &dir)?;
        let stream = stream.ok_or_else(|| fail(GUEST_DIED, crash_report(&dir)))?;
        let took = start.elapsed();
        machine.remember_boot(accel, took, &run.cache);
        fs::write(dir.join("ready"), "").context("cannot write to the run directory")?;
        Ok(Booted { dir, _lock: lock, stream, _port: port, accel, took })
    }
}

/// Connects to the running guest of this directory for one session, which `talk` holds. `patience`: how
/// long its next output may take, or else the guest counts as dead. `None`: the guest has died.
pub fn enter(
    dir: &Path,
    request: Request,
    patience: Option<Duration>,
    talk: impl FnOnce(UnixStream, Request) -> Result<Option<Exit>>,
) -> Result<Option<Exit>> {
    while !dir.join("ready").exists() {
        if !dir.exists() {
            return Err(fail(GUEST_DIED, "the guest ended before it was ready"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let (socket, _port) = rundir::next_port(dir)?;
    let Some(stream) = session::open(&socket, dir)? else { return Ok(None) };
    stream.set_read_timeout(patience)?;
    talk(stream, request)
}

/// Gets everything ready that the guest consists of.
fn machine<'g>(run: &Run, guest: &'g Guest) -> Result<Machine<'g>> {
    let cache = &run.cache;
    cache.need_space(DISKS_MB, "what the guest writes to its disks")?;
    let own = run.rootfs()?;
    let agent = match own {
        None => cleanup::OWN_FILE.into(),
        Some(_) => build(run.guests()?, &["build", "--package", "vm", "--bin", "vm"], "vm")?,
    };
    Ok(Machine {
        guest,
        initramfs: initramfs::get(&guest.kernel, own, cache)?,
        data: packages::data_disk(cache)?,
        blank: packages::blank_disk(cache)?,
        agent,
        arch: run.arch,
        accel: run.accel,
    })
}

/// Variables that only make sense on the host.
const HOST_ONLY: [&str; 9] = [
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "LD_LIBRARY_PATH",
    "SSH_AUTH_SOCK",
    "STY",
    "TMUX",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "XDG_RUNTIME_DIR",
];

/// What the agent is asked to run.
pub fn request(run: &Run, program: &GuestProgram, workload: Option<PathBuf>) -> Result<Request> {
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| !is_cargos(name) && !HOST_ONLY.iter().any(|only| name == only))
        .filter(|(name, _)| name != "PATH")
        .collect();
    let more = programs_of_guests(run.arch).into_iter().chain(packages::unpacked(&run.cache)?);
    env.push(("PATH".into(), path(std::env::var_os("PATH"), more)));
    env.extend(program.env.iter().map(|(name, value)| (OsString::from(name), value.into())));
    let (stdin, stdout) = (std::io::stdin().is_terminal(), std::io::stdout().is_terminal());
    // Whether this process may put its terminal into raw mode.
    let raw = stdin && stdout && cleanup::in_foreground();
    Ok(Request {
        argv: program.argv.clone(),
        env,
        cwd: std::env::current_dir().context("cannot determine the working directory")?.into(),
        stdin_tty: raw && (!program.stage || program.reads_keys),
        stdout_tty: stdout,
        stderr_tty: std::io::stderr().is_terminal(),
        size: session::size(),
        workload: workload.map(PathBuf::into_os_string),
    })
}

/// The PATH for root in the guest: the host's, the sbin directories that it may lack, and `more`.
fn path(host: Option<OsString>, more: impl IntoIterator<Item = PathBuf>) -> OsString {
    let mut dirs: Vec<PathBuf> = std::env::split_paths(&host.unwrap_or_default()).collect();
    for dir in ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"] {
        if !dirs.iter().any(|d| d == Path::new(dir)) {
            dirs.push(dir.into());
        }
    }
    dirs.extend(more);
    std::env::join_paths(dirs).unwrap_or_else(|_| "/usr/sbin:/usr/bin:/sbin:/bin".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(text: &str) -> Vec<OsString> {
        text.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn a_stage_that_is_told_how_long_keeps_it() {
        for told in ["--duration 3s", "-v --duration=3s", "--help", "-V"] {
            assert!(says_how_long(&args(told)), "{told}");
        }
        assert!(!says_how_long(&args("-v --durations")));
    }

    #[test]
    fn the_guests_path_has_sbin_once() {
        let path = path(Some("/usr/sbin:/x".into()), Some("/w/debug".into()));
        assert_eq!(
            path,
            "/usr/sbin:/x:/usr/local/sbin:/usr/local/bin:/usr/bin:/sbin:/bin:/w/debug"
        );
    }
}
