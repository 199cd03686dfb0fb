//! From a command line to a program that ran in a guest.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cache::Cache;
use crate::cleanup;
use crate::error::{GUEST_DIED, fail};
use crate::initramfs;
use crate::kernels::{Kernel, Table};
use crate::proto::Request;
use crate::qemu::{self, Accel, Disk, Machine};
use crate::rundir::{self, Info, RunDir};
use crate::say;
use crate::session::{self, Terminals};
use crate::setup;
use crate::workspace;

/// What a stage gets where nobody says how long and nobody sits there to press Ctrl-C.
const STAGE_DURATION: &str = "10s";

/// Where the guest mounts the data disk.
const DATA: &str = "/mnt/data";
/// Free megabytes that a guest's disks may take, for all that is usual.
const DISKS_MB: u64 = 256;

/// The guest to boot.
#[derive(Clone, Debug)]
pub struct Options {
    /// A line of the table, or a directory.
    pub kernel: Option<String>,
    /// The guest ends after this time.
    pub timeout: Option<Duration>,
    /// No workload beside a stage.
    pub idle: bool,
    /// Disks beside the data disk.
    pub disks: Vec<Disk>,
    /// Virtual CPUs.
    pub cpus: u32,
    /// As QEMU wants it.
    pub memory: String,
    /// Variables for the program, beside those of this process.
    pub env: Vec<(&'static str, PathBuf)>,
    /// Other terminals may join.
    pub shell: bool,
    /// The guest's clock counts instructions; one CPU.
    pub icount: bool,
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
            shell: false,
            icount: false,
        }
    }
}

/// What to run in the guest.
pub struct Program {
    /// Program and arguments.
    pub argv: Vec<OsString>,
    /// Whether it is a stage: gets the workload, and an end where it has none.
    pub stage: bool,
}

impl Program {
    /// A program that was built in the workspace, from its file. `stage`: it is one of the
    /// workshop's programs.
    pub fn built(file: PathBuf, args: Vec<OsString>, stage: bool) -> Program {
        let mut argv = vec![file.into_os_string()];
        argv.extend(args);
        if stage && !std::io::stdout().is_terminal() && !says_how_long(&argv[1..]) {
            argv.extend(["--duration".into(), STAGE_DURATION.into()]);
        }
        Program { argv, stage }
    }
}

/// Whether the arguments ask for nothing but text.
pub fn asks_for_help(args: &[OsString]) -> bool {
    args.iter().any(|arg| ["--help", "-h", "--version", "-V"].iter().any(|help| arg == help))
}

fn says_how_long(args: &[OsString]) -> bool {
    asks_for_help(args)
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
    /// From the start to the agent's answer.
    pub boot: Duration,
}

/// Boots a guest, runs the program there, and takes the guest down.
pub fn run(options: &Options, program: &Program) -> Result<Outcome> {
    let root = workspace::root()?;
    let cache = Cache::open()?;
    let machine = machine(options, &root, &cache)?;
    let workload = (program.stage && !options.idle).then(|| root.join("vm/workload.sh"));

    session::watch_signals()?;
    let info = Info { workspace: root, kernel: kernel_name(options)?, shell: options.shell };
    let control = RunDir::create(&info)?;
    let dir = control.dir().to_owned();
    cleanup::owns_control(&dir);
    cleanup::start_guard(Some(&dir))?;
    if let Some(limit) = options.timeout {
        let dir = dir.clone();
        std::thread::spawn(move || {
            std::thread::sleep(limit);
            let limit = humantime::format_duration(limit);
            let message =
                format!("stopped: not done after {limit} (--timeout){}", qemu::tail(&dir));
            cleanup::end(GUEST_DIED, Some(&message));
        });
    }

    let start = Instant::now();
    let socket = rundir::next_port(&dir)?;
    let accel = qemu::boot(&machine, &cache, &dir)?;
    let died = || fail(GUEST_DIED, qemu::death(&dir));
    let stream = session::open(&socket, &dir)?.ok_or_else(died)?;
    let boot = start.elapsed();
    fs::write(dir.join("ready"), "").context("cannot write to the control directory")?;

    if let Some(workload) = &workload {
        let shown = workload.strip_prefix(&info.workspace).unwrap_or(workload).display();
        say!("workload: {shown} on {DATA} (--idle leaves it out)");
    }
    let exit =
        session::talk(stream, &request(program, workload, &options.env)?)?.ok_or_else(died)?;
    if exit.others > 0 {
        let (n, s) = (exit.others, if exit.others == 1 { "" } else { "s" });
        say!(
            "the guest goes on for {n} other terminal{s}, and ends with the last (Ctrl-C ends it now)"
        );
        while cleanup::qemu_ended().is_none() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    cleanup::clean_up();
    Ok(Outcome { status: exit.status, accel, boot })
}

/// Opens another terminal in the running guest of `cargo vm shell`. `None`: there is none.
pub fn join(options: &Options, program: &Program) -> Result<Option<i32>> {
    let root = workspace::root()?;
    let Some(dir) = rundir::running_shell(&root, options.kernel.as_deref())? else {
        return Ok(None);
    };
    let new = Options::default();
    if (&options.disks, options.cpus, &options.memory) == (&new.disks, new.cpus, &new.memory) {
        say!("joining the guest that runs");
    } else {
        say!(
            "joining the guest that runs, as it is: --disk, --cpus and --memory are for a new one"
        );
    }
    while !dir.join("ready").exists() {
        if !dir.exists() {
            return Err(fail(GUEST_DIED, "the guest ended before it was up"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    session::watch_signals()?;
    cleanup::start_guard(None)?;
    let died = || fail(GUEST_DIED, "the guest has ended; the terminal that started it says why");
    let stream = session::open(&rundir::next_port(&dir)?, &dir)?.ok_or_else(died)?;
    let exit = session::talk(stream, &request(program, None, &options.env)?)?.ok_or_else(died)?;
    cleanup::clean_up();
    Ok(Some(exit.status))
}

/// Finds out what is wrong with the options, and fetches the kernel: before anything is built.
pub fn prepare(options: &Options) -> Result<()> {
    qemu::forced_accel()?;
    shares(&workspace::root()?)?;
    Kernel::named(&kernel_name(options)?, &Cache::open()?).map(|_| ())
}

/// The kernel as the user names it.
fn kernel_name(options: &Options) -> Result<String> {
    Ok(match &options.kernel {
        Some(name) => name.clone(),
        None => Table::load()?.default_name(&Cache::open()?),
    })
}

/// The directories that the guest may write to: the workspace, and where cargo builds, to see
/// there too what is built while it runs.
fn shares(root: &Path) -> Result<Vec<PathBuf>> {
    let mut shares = vec![root.to_owned()];
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    if let Some(target) = target.and_then(|dir| dir.canonicalize().ok())
        && !target.starts_with(root)
    {
        shares.push(target);
    }
    if let Some(hidden) = shares.iter().find(|share| share.starts_with(DATA)) {
        bail!(
            "the guest would not see {}: it has its data disk at {DATA}. Move the workspace, or \
             CARGO_TARGET_DIR, elsewhere",
            hidden.display()
        );
    }
    Ok(shares)
}

/// Makes everything ready that the guest consists of.
fn machine(options: &Options, root: &Path, cache: &Cache) -> Result<Machine> {
    let name = kernel_name(options)?;
    let kernel = Kernel::named(&name, cache)?;
    cache.need_space(DISKS_MB, "what the guest writes to its disks")?;
    let initramfs = initramfs::get(&kernel, cache)?;
    Ok(Machine {
        kernel,
        initramfs,
        data: setup::data_disk(cache)?,
        blank: setup::blank_disk(cache)?,
        cpus: options.cpus,
        memory: options.memory.clone(),
        disks: options.disks.clone(),
        shares: shares(root)?,
        icount: options.icount,
    })
}

/// Variables that mean something on the host only.
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
    more: &[(&str, PathBuf)],
) -> Result<Request> {
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os()
        .filter(|(name, _)| {
            !workspace::is_cargos(name) && !HOST_ONLY.iter().any(|only| name == only)
        })
        .filter(|(name, _)| name != "PATH")
        .collect();
    // Beside this program lie the stages.
    let stages = std::env::current_exe().ok().and_then(|own| own.parent().map(Path::to_owned));
    env.push(("PATH".into(), path(std::env::var_os("PATH"), stages)));
    env.extend(more.iter().map(|(name, value)| (OsString::from(name), value.into())));
    let terminals = Terminals::look();
    Ok(Request {
        argv: program.argv.clone(),
        env,
        cwd: std::env::current_dir().context("cannot tell the working directory")?.into(),
        stdin_tty: terminals.raw,
        stdout_tty: terminals.stdout,
        stderr_tty: terminals.stderr,
        size: terminals.size,
        workload: workload.map(PathBuf::into_os_string),
    })
}

/// The PATH for root in the guest: with the sbin directories that a user's lacks, and `more`.
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
        for told in ["--duration 3s", "-v --duration=3s", "--help", "-V"] {
            assert!(says_how_long(&args(told)), "{told}");
        }
        assert!(!says_how_long(&args("-v --durations")));
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
