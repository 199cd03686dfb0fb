//! The way from a command line to a program that runs in a guest.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use host::fail::{GUEST_DIED, USAGE, fail};
use host::say;
use rustix::fs::{FlockOperation, flock};

use crate::arch;
use crate::cleanup;
use crate::guest::initramfs;
use crate::guest::proto::{Exit, Request};
use crate::guest::qemu::{self, Accel, Disk, Machine};
use crate::guest::rundir::{self, Info, RunDir};
use crate::guest::session::{self, Terminals};
use crate::setup::cache::Cache;
use crate::setup::kernels::{Kernel, Table};
use crate::setup::{packages, root};
use crate::workspace;

/// How long a stage runs where no duration is given and there is no terminal for a Ctrl-C.
const STAGE_DURATION: &str = "10s";

/// The variable with which a program of the workshop only checks its command line: it exits with 0
/// where that is right, else with its usual message and status.
const PARSE_ONLY: &str = "WORKSHOP_PARSE_ONLY";

/// How often it is looked whether a guest that stays is in use.
const STEP: Duration = Duration::from_millis(200);

/// Where the guest mounts the data disk.
const DATA: &str = "/mnt/data";
/// Free megabytes that a guest's disks usually need.
const DISKS_MB: u64 = 256;

/// The guest to boot.
#[derive(Clone, Debug)]
pub struct Options {
    /// A kernel line, or a directory.
    pub kernel: Option<String>,
    /// The guest is stopped after this time.
    pub timeout: Option<Duration>,
    /// No workload while a stage runs.
    pub idle: bool,
    /// Disks in addition to the data disk.
    pub disks: Vec<Disk>,
    /// Virtual CPUs.
    pub cpus: u32,
    /// The memory, as QEMU's `-m` takes it.
    pub memory: String,
    /// Variables for the program, in addition to those of this process.
    pub env: Vec<(&'static str, String)>,
    /// What others find it by, to join it.
    pub name: Option<String>,
    /// It runs the programs of those who join, instead of one, until there was none for this time.
    pub stays: Option<Duration>,
    /// The guest's clock counts instructions; one CPU.
    pub icount: bool,
    /// A directory with the guest's root, in place of this machine's.
    pub root: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            kernel: None,
            timeout: None,
            idle: false,
            disks: Vec::new(),
            cpus: 2,
            memory: "2G".into(),
            env: Vec::new(),
            name: None,
            stays: None,
            icount: false,
            root: None,
        }
    }
}

/// What to run in the guest.
pub struct Program {
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// Whether it is a stage: it gets the workload, a duration where it has none, and no standard
    /// input, which it would not read.
    pub stage: bool,
    /// Whether, on a terminal, it gets keys all the same.
    pub reads_keys: bool,
}

impl Program {
    /// Any program of the guest.
    pub fn other(argv: Vec<OsString>) -> Program {
        Program { argv, stage: false, reads_keys: false }
    }

    /// A program that was built in the workspace, from its file. `known`: it is one of the
    /// workshop's.
    pub fn built(
        file: PathBuf,
        args: Vec<OsString>,
        known: Option<&workspace::Program>,
    ) -> Program {
        let stage = known.is_some();
        let mut argv = vec![file.into_os_string()];
        argv.extend(args);
        if stage && !std::io::stdout().is_terminal() && !says_how_long(&argv[1..]) {
            argv.extend(["--duration".into(), STAGE_DURATION.into()]);
        }
        Program { argv, stage, reads_keys: known.is_some_and(|known| known.reads_keys) }
    }
}

/// Lets a program of the workshop check its command line, on the host: wrong usage needs no guest.
/// Returns the status to exit with where something is wrong.
/// Where the program is not one for this machine, it checks that in the guest.
pub fn check_usage(program: &Program) -> Result<Option<i32>> {
    let (file, args) = program.argv.split_first().context("no program")?;
    if arch::is_foreign() || !knows_parse_only(Path::new(file))? {
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

/// Whether a program contains the variable's name. One that does not would start its work here.
fn knows_parse_only(file: &Path) -> Result<bool> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(bytes.windows(PARSE_ONLY.len()).any(|window| window == PARSE_ONLY.as_bytes()))
}

/// Whether the arguments only ask for help or the version.
pub fn asks_for_help(args: &[OsString]) -> bool {
    args.iter().any(|arg| ["--help", "-h", "--version", "-V"].iter().any(|help| arg == help))
}

/// `ctracer report` reads a file, and ends with it.
fn says_how_long(args: &[OsString]) -> bool {
    asks_for_help(args)
        || args.first().is_some_and(|command| command == "report")
        || args.iter().any(|arg| {
            let arg = arg.to_string_lossy();
            arg == "--duration" || arg.starts_with("--duration=")
        })
}

/// How a launch went.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Exit code of the program.
    pub status: i32,
    /// What the guest ran on.
    pub accel: Accel,
    /// From QEMU's start to the agent's first message.
    pub boot: Duration,
}

/// Boots a guest, runs the program there, or keeps it for others, and takes the guest down.
pub fn run(options: &Options, program: &Program) -> Result<Outcome> {
    let root = workspace::root()?;
    let cache = Cache::open()?;
    let machine = machine(options, &root, &cache)?;
    let workload = (program.stage && !options.idle).then(|| root.join("vm/workload.sh"));

    let (kernel, pid) = (kernel_name(options)?, std::process::id());
    let arch = arch::guest().name().to_owned();
    let info = Info { workspace: root, arch, kernel, name: options.name.clone(), pid };
    let run_dir = RunDir::create(&info)?;
    let dir = run_dir.dir().to_owned();
    cleanup::own_run_dir(&dir);
    if let Some(share) = machine.shares.iter().find(|share| dir.starts_with(share)) {
        let (dir, share) = (dir.display(), share.display());
        let message = format!(
            "{dir}, the directory for the launcher's own files, lies in {share}, which the guest \
             can write to; set TMPDIR to a directory elsewhere"
        );
        return Err(fail(USAGE, message));
    }
    cleanup::start_guard(Some(&dir))?;
    if let Some(limit) = options.timeout {
        let dir = dir.clone();
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            let limit = humantime::format_duration(limit);
            let message = format!(
                "the program has not ended within {limit} (--timeout): stopping the guest{}",
                qemu::tail(&dir)
            );
            cleanup::exit(GUEST_DIED, Some(&message));
        });
    }

    let start = Instant::now();
    let (socket, _port) = rundir::next_port(&dir)?;
    let accel = qemu::boot(&machine, &cache, &dir)?;
    let died = || fail(GUEST_DIED, qemu::death(&dir));
    let stream = session::open(&socket, &dir)?.ok_or_else(died)?;
    let boot = start.elapsed();
    machine.remember_boot(accel, boot, &cache);
    fs::write(dir.join("ready"), "").context("cannot write to the run directory")?;

    if let Some(idle) = options.stays {
        let _in_use = stay(&dir, idle)?;
        cleanup::clean_up();
        return Ok(Outcome { status: 0, accel, boot });
    }
    if let Some(workload) = &workload {
        let shown = workload.strip_prefix(&info.workspace).unwrap_or(workload).display();
        say!("running {shown} on {DATA} as the workload (--idle: none)");
    }
    let request = request(program, workload, &options.env)?;
    let stdin = !program.stage || request.stdin_tty;
    let exit = session::talk(stream, request, stdin)?.ok_or_else(died)?;
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
    Ok(Outcome { status: exit.status, accel, boot })
}

/// Keeps the guest until it has run nothing for `idle`. Returns the lock, without which no program
/// starts in it.
fn stay(dir: &Path, idle: Duration) -> Result<File> {
    // Whoever started this may have been interrupted, and read nothing more.
    let _ = writeln!(std::io::stdout(), "ready");
    let in_use = rundir::in_use(dir)?;
    let mut used = Instant::now();
    while cleanup::qemu_ended().is_none() {
        match flock(&in_use, FlockOperation::NonBlockingLockShared) {
            Err(_) => used = Instant::now(),
            Ok(()) if used.elapsed() > idle => return Ok(in_use),
            Ok(()) => flock(&in_use, FlockOperation::Unlock)?,
        }
        std::thread::sleep(STEP);
    }
    Err(fail(GUEST_DIED, qemu::death(dir)))
}

/// Opens another terminal in the running guest of `cargo vm shell`. `None`: no such guest runs.
pub fn join(options: &Options, program: &Program) -> Result<Option<i32>> {
    let root = workspace::root()?;
    let running = rundir::running(&root, rundir::SHELL, options.kernel.as_deref())?;
    let Some((dir, _)) = running else { return Ok(None) };
    let new = Options::default();
    if (&options.disks, options.cpus, &options.memory) == (&new.disks, new.cpus, &new.memory) {
        say!("joining the running guest");
    } else {
        say!(
            "joining the running guest, without changing it: --disk, --cpus and --memory only \
             apply to a new one"
        );
    }
    if !dir.join("ready").exists() {
        say!("the guest is still booting");
    }
    cleanup::start_guard(None)?;
    let died = || fail(GUEST_DIED, "the guest has ended; the terminal that started it shows why");
    let exit = enter(&dir, program, true, None)?.ok_or_else(died)?;
    cleanup::clean_up();
    Ok(Some(exit.status))
}

/// Runs a program in the running guest of this directory, connected to this process's standard
/// descriptors, without `stdin` to the others. `patience`: how long its next output may take, or else
/// the guest counts as dead. `None`: the guest has died.
pub fn enter(
    dir: &Path,
    program: &Program,
    stdin: bool,
    patience: Option<Duration>,
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
    session::talk(stream, request(program, None, &[])?, stdin)
}

/// Checks the options and fetches the kernel, before anything is built.
pub fn prepare(options: &Options) -> Result<()> {
    qemu::forced_accel()?;
    qemu::check_disks(&options.disks)?;
    let (root, cache) = (workspace::root()?, Cache::open()?);
    shares(&root)?;
    options.root.as_deref().map(root::named).transpose()?;
    Kernel::named(&kernel_name(options)?, &cache)?;
    workspace::for_guests(&root, &cache).map(|_| ())
}

/// The kernel as the user names it.
pub fn kernel_name(options: &Options) -> Result<String> {
    Ok(match &options.kernel {
        Some(name) => name.clone(),
        None => Table::load()?.default_name(&Cache::open()?),
    })
}

/// The directories that the guest may write to: the workspace, and the target directory, so that
/// the guest sees what is built while it runs.
fn shares(root: &Path) -> Result<Vec<PathBuf>> {
    let mut shares = vec![root.to_owned()];
    if let Some(target) = target_dir()
        && !target.starts_with(root)
    {
        shares.push(target);
    }
    if let Some(hidden) = shares.iter().find(|share| share.starts_with(DATA)) {
        bail!(
            "the guest would not see {}: it mounts its data disk at {DATA}. Move the workspace, or \
             CARGO_TARGET_DIR, elsewhere",
            hidden.display()
        );
    }
    Ok(shares)
}

/// The target directory, where this program was built, and where cargo keeps a file of its own.
/// `None`: the program was copied elsewhere.
fn target_dir() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?.canonicalize().ok()?;
    let mut above = own.ancestors().skip(1);
    above.find(|dir| dir.join(".rustc_info.json").is_file()).map(Path::to_owned)
}

/// Whether a file is one that cargo has built here.
pub fn is_built(file: &str) -> bool {
    let file = Path::new(file).canonicalize();
    file.is_ok_and(|file| target_dir().is_some_and(|target| file.starts_with(target)))
}

/// Gets everything ready that the guest consists of.
fn machine(options: &Options, root: &Path, cache: &Cache) -> Result<Machine> {
    qemu::check_disks(&options.disks)?;
    let name = kernel_name(options)?;
    let kernel = Kernel::named(&name, cache)?;
    cache.need_space(DISKS_MB, "what the guest writes to its disks")?;
    workspace::for_guests(root, cache)?;
    let (own, agent) = match root::get(cache)? {
        None => (None, cleanup::OWN_FILE.into()),
        Some(own) => {
            let build = ["build", "--package", "vm", "--bin", "vm"];
            (Some(own), workspace::build(root, &build, "vm")?)
        }
    };
    let initramfs = initramfs::get(&kernel, own.as_deref(), cache)?;
    Ok(Machine {
        name,
        agent,
        root: options.root.as_deref().map(root::named).transpose()?.or(own),
        has_9p: initramfs::has_9p(&kernel)?,
        kernel,
        initramfs,
        data: packages::data_disk(cache)?,
        blank: packages::blank_disk(cache)?,
        cpus: options.cpus,
        memory: options.memory.clone(),
        disks: options.disks.clone(),
        shares: shares(root)?,
        icount: options.icount,
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

fn request(
    program: &Program,
    workload: Option<PathBuf>,
    more: &[(&str, String)],
) -> Result<Request> {
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| {
            !workspace::is_cargos(name) && !HOST_ONLY.iter().any(|only| name == only)
        })
        .filter(|(name, _)| name != "PATH")
        .collect();
    env.push(("PATH".into(), path(std::env::var_os("PATH"), workspace::programs_of_guests())));
    env.extend(more.iter().map(|(name, value)| (OsString::from(name), value.into())));
    let terminals = Terminals::look();
    Ok(Request {
        argv: program.argv.clone(),
        env,
        cwd: std::env::current_dir().context("cannot determine the working directory")?.into(),
        stdin_tty: terminals.raw && (!program.stage || program.reads_keys),
        stdout_tty: terminals.stdout,
        stderr_tty: terminals.stderr,
        size: terminals.size,
        workload: workload.map(PathBuf::into_os_string),
    })
}

/// The PATH for root in the guest: the host's, the sbin directories that it may lack, and `more`.
fn path(host: Option<OsString>, more: Option<PathBuf>) -> OsString {
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
        for told in ["--duration 3s", "-v --duration=3s", "--help", "-V", "report a --html b"] {
            assert!(says_how_long(&args(told)), "{told}");
        }
        for not in ["-v --durations", "1234 --quiet"] {
            assert!(!says_how_long(&args(not)), "{not}");
        }
    }

    #[test]
    fn only_a_program_that_knows_the_variable_checks_its_usage_here() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let program = |text: &str| {
            let file = dir.path().join("program");
            fs::write(&file, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
            Program { stage: true, ..Program::other(vec![file.into(), "a b".into()]) }
        };
        let status = |text: &str| check_usage(&program(text)).unwrap();
        assert_eq!(status("exit 5"), None);
        assert_eq!(status("[ $WORKSHOP_PARSE_ONLY = 1 ] && [ \"$*\" = 'a b' ]"), None);
        assert_eq!(status("[ -z $WORKSHOP_PARSE_ONLY ] || exit 2"), Some(2));
        assert_eq!(status("kill -9 $$ # WORKSHOP_PARSE_ONLY"), Some(137));
    }

    #[test]
    fn what_the_data_disk_would_hide_is_refused() {
        let error = shares(Path::new("/mnt/data/workshop")).unwrap_err().to_string();
        assert!(error.contains("would not see /mnt/data/workshop"), "{error}");
        assert!(shares(Path::new("/mnt/database")).is_ok());
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
