//! `cargo vm`: boots a pinned kernel in QEMU and runs the stages in it.

mod arch;
mod bench;
mod cleanup;
mod doctor;
mod follow;
mod guest;
mod kept;
mod launch;
mod processes;
mod setup;
mod test;
mod truth;
mod workspace;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::builder::FalseyValueParser;
use clap::{Args, Parser, Subcommand};
use host::fail::{GUEST_DIED, USAGE, fail};
use host::judging::Judging;
use host::say;

use crate::guest::qemu::Disk;
use crate::guest::{agent, initramfs, rundir, session};
use crate::launch::{Options, Program};
use crate::setup::{bundle, cache, kernels, packages, root};

/// Boots a pinned kernel in QEMU and runs the stages in it.
#[derive(Parser)]
#[command(name = "cargo vm", bin_name = "cargo vm")]
struct Cli {
    /// Take no kernel but the pinned ones, also where the archive has only later ones
    #[arg(long, global = true, env = "VM_LOCKED", value_parser = FalseyValueParser::new())]
    locked: bool,
    /// The guest's architecture [default: this machine's]
    #[arg(long, global = true, env = "VM_ARCH", value_enum)]
    arch: Option<arch::Arch>,
    #[command(subcommand)]
    command: Cmd,
}

#[derive(Subcommand)]
enum Cmd {
    /// Run a stage, or any command, in the guest
    Run(Run),
    /// Open a shell in the guest; called again, a second terminal in the same guest
    Shell(Guest),
    /// Run the unit tests on the host and the guest tests in the VM
    Test(Test),
    /// Measure what the programs cost, in guest instructions per I/O, beside bpftrace and bcc
    Bench(bench::Bench),
    /// Compare our tools and others with outside judges: who prints what is true
    Truth(truth::Options),
    /// Report what is installed, what is missing, and how long a boot takes
    #[command(mut_arg("kernel", |kernel| kernel.value_name("LINE|all|DIR").help(LINES)))]
    Doctor(Guest),
    /// Install, fetch and prepare everything that the other commands need
    Setup(Setup),
    /// Pin the newest kernels of these lines, or of all, in vm/kernels.toml
    Repin {
        /// Kernel lines: 6.1, 7.2
        lines: Vec<String>,
    },
    /// Write one file with the kernels and the crates, for machines without a network
    Bundle(Bundle),
    /// Started by `cargo run` and `cargo test` for a program of the workspace
    #[command(hide = true)]
    Runner(Runner),
    /// A guest that stays, for `cargo lesson`
    #[command(hide = true)]
    Kept {
        /// Its name: there is one of each in a workspace
        name: String,
        #[command(subcommand)]
        what: Kept,
    },
    /// Print what cargo is told where it builds for guests, for `cargo lesson`
    #[command(hide = true)]
    BuildEnv,
    /// Runs in the guest and starts programs there
    #[command(hide = true)]
    Agent,
    /// Cleans up when the launcher is killed
    #[command(hide = true)]
    Guard {
        /// The run directory to remove
        run_dir: Option<PathBuf>,
    },
}

/// What to do with a guest that stays.
#[derive(Subcommand)]
enum Kept {
    /// Boot it, print a line when it is ready, and keep it
    Boot {
        #[command(flatten)]
        guest: Guest,
        /// End it after this time without a program
        #[arg(long, value_parser = duration, default_value = "15m")]
        idle: Duration,
    },
    /// Exit with 0 where it runs or boots, on this kernel, else with 1
    Runs {
        #[arg(long)]
        kernel: Option<String>,
    },
    /// Run a program in it, when those before have ended. Exits with 125 where the guest has ended
    Run {
        /// End the guest after this time without output
        #[arg(long, value_parser = duration, default_value = "10m")]
        patience: Duration,
        #[arg(required = true, trailing_var_arg = true)]
        program: Vec<OsString>,
    },
    /// End it; exit with 1 where it does not run
    Stop,
}

/// The help of --kernel, where it may be `all`.
const LINES: &str = "Kernel line, several (6.1,7.2), `all`, `host` (this machine's own), or a \
                     directory with an unpacked kernel [default: 6.1; arm64: 6.12]";

#[derive(Args)]
struct Guest {
    /// Kernel line (6.1, 6.1-rt, 6.12, 6.18, 7.2, 7.3), `host`, or a directory with an unpacked kernel
    /// [default: 6.1; arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|DIR")]
    kernel: Option<String>,
    /// Add an empty disk of 256 MiB; may be given several times
    #[arg(long = "disk", value_name = "KIND")]
    disks: Vec<Disk>,
    /// Virtual CPUs
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    cpus: u32,
    /// Memory of the guest: 512M, 2G
    #[arg(long, default_value = "2G", value_parser = memory)]
    memory: String,
    /// A directory with the guest's root file system [default: this machine's root, read-only]
    #[arg(long, env = "VM_ROOT", value_name = "DIR")]
    root: Option<PathBuf>,
}

#[derive(Args)]
struct Run {
    #[command(flatten)]
    guest: Guest,
    /// Stop the guest after this time and exit with 125 (10s, 2m, 1h)
    #[arg(long, value_parser = duration)]
    timeout: Option<Duration>,
    /// Run no workload beside a stage
    #[arg(long)]
    idle: bool,
    /// Emulate one CPU whose clock advances by 1 ns for each instruction: exact costs
    #[arg(long, hide = true)]
    icount: bool,
    /// A program of the workspace (stage06, mine-04), or a command of the guest, with its arguments.
    /// Programs that a command's arguments name (bash -c 'stage06 | head') are built before
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

#[derive(Args)]
struct Setup {
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|all|DIR", help = LINES)]
    kernel: Option<String>,
    /// Take the kernels from a file of `cargo vm bundle` instead of the network
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
}

#[derive(Args)]
struct Bundle {
    /// Kernel line, or `all` [default: 6.1; arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|all")]
    kernel: Option<String>,
    /// The file to write: workshop.tar.zst
    file: PathBuf,
}

#[derive(Args)]
struct Test {
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|all|DIR", help = LINES)]
    kernel: Option<String>,
    /// More kernel lines, which divide the guest tests among them; the tests under load run on each.
    /// Without --kernel, these are all that runs
    #[arg(long, value_name = "LINES", conflicts_with_all = ["filter", "bless"])]
    share: Option<String>,
    /// Divide the tests by so many, where others run the remaining shares
    #[arg(long, value_name = "N", requires = "share", value_parser = clap::value_parser!(u16).range(1..))]
    shares: Option<u16>,
    /// Write the table of docs/kernels.md, which a plain run only compares
    #[arg(long)]
    bless: bool,
    /// Write to this file, as JSON, what each test, boot and build took, in ms
    #[arg(long, value_name = "FILE")]
    timings: Option<PathBuf>,
    /// Run only the tests whose names contain this
    filter: Option<String>,
}

#[derive(Args)]
struct Runner {
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

impl Guest {
    fn options(self) -> Options {
        Options {
            kernel: named(self.kernel),
            disks: self.disks,
            cpus: self.cpus,
            memory: self.memory,
            root: self.root.filter(|root| !root.as_os_str().is_empty()),
            ..Options::default()
        }
    }
}

/// The kernel that the user names: an empty VM_KERNEL names none.
fn named(kernel: Option<String>) -> Option<String> {
    kernel.filter(|kernel| !kernel.is_empty())
}

/// A duration as people write it; a plain number is seconds.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed = match text.parse::<u64>() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => humantime::parse_duration(text).map_err(|e| format!("{e} (10s, 2m, 1h)"))?,
    };
    if parsed.is_zero() || parsed > Duration::from_secs(365 * 24 * 3600) {
        return Err("the time must be longer than zero and at most a year".into());
    }
    Ok(parsed)
}

/// A size that QEMU takes for `-m`, large enough to boot the guest.
fn memory(text: &str) -> Result<String, String> {
    let (digits, unit) = match text.strip_suffix('G') {
        Some(digits) => (digits, 1024),
        None => (text.strip_suffix('M').unwrap_or(text), 1),
    };
    match digits.parse::<u32>() {
        Ok(n) if u64::from(n) * unit >= 256 => Ok(text.to_owned()),
        Ok(_) => Err("the guest needs at least 256M".into()),
        Err(_) => Err("give a number with M or G, or a number of megabytes (512M, 2G)".into()),
    }
}

fn main() {
    cleanup::restore_on_panic();
    let cli = Cli::parse();
    if cli.locked {
        kernels::lock();
    }
    cli.arch.into_iter().for_each(arch::set);
    match dispatch(cli.command) {
        Ok(status) => cleanup::exit(status, None),
        Err(error) => cleanup::exit(host::fail::code(&error), Some(&format!("{error:#}"))),
    }
}

fn dispatch(command: Cmd) -> Result<i32> {
    if !matches!(command, Cmd::Agent | Cmd::Guard { .. }) {
        arch::check()?;
        processes::note_inherited();
        session::watch_signals()?;
    }
    match command {
        Cmd::Run(run) => cmd_run(run),
        Cmd::Shell(guest) => cmd_shell(guest),
        Cmd::Setup(setup) => cmd_setup(setup),
        Cmd::Repin { lines } => {
            kernels::repin(&workspace::root()?, &lines, &cache::Cache::open()?).map(|()| 0)
        }
        Cmd::Bundle(options) => {
            packages::need(true)?;
            bundle::write(&options.file, named(options.kernel).as_deref()).map(|()| 0)
        }
        Cmd::Test(Test { kernel, share, shares, bless, timings, filter }) => {
            let (kernel, share) = (named(kernel), share.as_deref());
            let share = share.map(|lines| (lines, usize::from(shares.unwrap_or(1))));
            test::main(kernel.as_deref(), share, filter.as_deref(), bless, timings.as_deref())
        }
        Cmd::Bench(options) => bench::main(&options),
        Cmd::Truth(options) => truth::main(&options),
        Cmd::Doctor(guest) => doctor::main(&guest.options()),
        Cmd::Runner(runner) => cmd_runner(runner),
        Cmd::Kept { name, what } => cmd_kept(name, what),
        Cmd::BuildEnv => cmd_build_env(),
        Cmd::Agent => agent::main().map(|()| 0),
        Cmd::Guard { run_dir } => cleanup::guard(run_dir.as_deref()).map(|()| 0),
    }
}

fn cmd_run(run: Run) -> Result<i32> {
    let mut options = run.guest.options();
    options.timeout = run.timeout;
    options.idle = run.idle;
    options.icount = run.icount;
    if run.icount {
        options.cpus = 1;
    }
    let mut argv = run.program;
    let root = workspace::root()?;
    let name = argv[0].to_string_lossy().into_owned();
    let is_path = name.contains('/');
    // A file that cargo has built, like the guest tests, comes from one of our own commands.
    let programs = if is_path && launch::is_built(&name) {
        Vec::new()
    } else {
        let mut programs = workspace::programs(&root)?;
        programs.extend(workspace::attempts(&root));
        programs
    };
    let Some(program) = programs.iter().find(|program| program.is_called(&name)) else {
        if !is_path && (name.starts_with("stage") || name.starts_with("mine-")) {
            return Err(no_program(&name, &programs));
        }
        packages::need(false)?;
        let named = workspace::named_in(&programs, &argv[1..]);
        if !named.is_empty() {
            launch::prepare(&options)?;
        }
        // Or the guest would run what was built before the last edit.
        for program in named {
            program.build(&root)?;
        }
        return Ok(launch::run(&options, &Program::other(argv))?.status);
    };
    let mut args = argv.split_off(1);
    // As with cargo, `run stage06 -- --quiet` is `run stage06 --quiet`.
    if args.first().is_some_and(|argument| argument == "--") {
        args.remove(0);
    }
    packages::need(false)?;
    let help = launch::asks_for_help(&args);
    // Help is printed here, by a program for this machine.
    if !help {
        launch::prepare(&options)?;
    }
    let file = program.build(&root)?;
    if help {
        return here(file, &args);
    }
    checked(&options, &Program::built(file, args, Some(program)))
}

/// Wrong usage: a name that a stage or an attempt could have, and none has.
fn no_program(name: &str, programs: &[workspace::Program]) -> anyhow::Error {
    let is_attempt = name.starts_with("mine-");
    let programs = programs.iter().filter(|program| program.is_attempt == is_attempt);
    let names: Vec<&str> = programs.map(|program| program.name.as_str()).collect();
    let message = match (is_attempt, &*names) {
        (false, _) => format!("the programs of this workspace are {}", names.join(", ")),
        (true, []) => "you have no attempts yet: cargo lesson start".to_owned(),
        (true, _) => format!("your attempts are {}", names.join(", ")),
    };
    fail(USAGE, format!("there is no program {name}; {message}"))
}

/// Runs a program of the workshop in the guest, if its command line is right.
fn checked(options: &Options, program: &Program) -> Result<i32> {
    match launch::check_usage(program)? {
        Some(status) => Ok(status),
        None => Ok(launch::run(options, program)?.status),
    }
}

/// Runs a program on the host, in place of this process.
fn here(file: PathBuf, args: &[OsString]) -> Result<i32> {
    use std::os::unix::process::CommandExt;
    let error = std::process::Command::new(&file).args(args).exec();
    Err(error).with_context(|| format!("cannot start {}", file.display()))
}

fn cmd_runner(runner: Runner) -> Result<i32> {
    let mut argv = runner.program;
    let file = PathBuf::from(&argv[0]);
    let file = file.canonicalize().with_context(|| file.display().to_string())?;
    let args = argv.split_off(1);
    if launch::asks_for_help(&args) {
        return here(file, &args);
    }
    // Cargo has built for this machine.
    let is_foreign = arch::is_foreign();
    let is_test = file.parent().is_some_and(|dir| dir.ends_with("deps"));
    packages::need(is_test)?;
    let mut options =
        Options { kernel: named(std::env::var("VM_KERNEL").ok()), ..Options::default() };
    let root = workspace::root()?;
    let name = file.file_name().unwrap_or_default();
    let mut programs = workspace::programs(&root)?;
    programs.extend(workspace::attempts(&root));
    if is_test {
        launch::prepare(&options)?;
        workspace::build_all(&root)?;
        let file = if is_foreign { workspace::build_guest_tests(&root)? } else { file };
        options.disks = test::DISKS.to_vec();
        options.env = vec![Judging::by(&file, &root).to_env()?];
        return Ok(launch::run(&options, &Program::built(file, args, None))?.status);
    }
    let known = programs.iter().find(|program| name == program.name.as_str());
    let file = match known {
        Some(program) if is_foreign => {
            launch::prepare(&options)?;
            program.build(&root)?
        }
        _ => file,
    };
    checked(&options, &Program::built(file, args, known))
}

fn cmd_shell(guest: Guest) -> Result<i32> {
    let mut options = guest.options();
    options.name = Some(rundir::SHELL.to_owned());
    packages::need(false)?;
    let shell = Program::other(vec!["bash".into()]);
    if let Some(status) = launch::join(&options, &shell)? {
        return Ok(status);
    }
    Ok(launch::run(&options, &shell)?.status)
}

fn cmd_kept(name: String, what: Kept) -> Result<i32> {
    let find = |kernel| rundir::running(&workspace::root()?, &name, kernel);
    match what {
        Kept::Boot { guest, idle } => {
            let options = Options { name: Some(name), stays: Some(idle), ..guest.options() };
            Ok(launch::run(&options, &Program::other(Vec::new()))?.status)
        }
        Kept::Runs { kernel } => {
            let options = Options { kernel: named(kernel), ..Options::default() };
            Ok(i32::from(find(Some(&launch::kernel_name(&options)?))?.is_none()))
        }
        Kept::Run { patience, program } => match find(None)? {
            Some((dir, info)) => kept::run(&dir, &info, patience, &Program::other(program)),
            None => Ok(GUEST_DIED),
        },
        Kept::Stop => match find(None)? {
            Some((dir, info)) => kept::stop(&dir, &info).map(|()| 0),
            None => Ok(1),
        },
    }
}

fn cmd_build_env() -> Result<i32> {
    packages::need(false)?;
    let variables = workspace::for_guests(&workspace::root()?, &cache::Cache::open()?)?;
    println!("{}", serde_json::to_string(&variables)?);
    Ok(0)
}

fn cmd_setup(setup: Setup) -> Result<i32> {
    packages::need(true)?;
    let workspace = workspace::root()?;
    let cache = cache::Cache::open()?;
    let names = match &setup.from {
        Some(file) => bundle::install(file)?,
        None => kernels::Table::load()?.names(named(setup.kernel).as_deref(), &cache)?,
    };
    for name in names {
        let kernel = kernels::Kernel::named(&name, &cache)?;
        initramfs::get(&kernel, root::get(&cache)?.as_deref(), &cache)?;
        say!("kernel {name}: {} is ready", kernel.release);
    }
    workspace::for_guests(&workspace, &cache)?;
    packages::data_disk(&cache)?;
    packages::blank_disk(&cache)?;
    if !workspace::cargo(&workspace).arg("fetch").status()?.success() {
        bail!("cargo could not fetch the crates; its message is above");
    }
    workspace::copy_headers(&workspace)
        .context("libbpf's headers could not be copied for clangd")?;
    say!("everything is ready: no command but `cargo vm truth` needs a network now");
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn a_programs_arguments_are_its_own() {
        let cli =
            Cli::try_parse_from(["vm", "run", "--idle", "stage06", "--quiet", "--timeout", "1"]);
        let Cmd::Run(run) = cli.unwrap().command else { panic!("not run") };
        assert!(run.idle && run.timeout.is_none());
        assert_eq!(run.program, ["stage06", "--quiet", "--timeout", "1"]);
        assert!(Cli::try_parse_from(["vm", "run", "--no-such", "stage06"]).is_err());
        assert!(Cli::try_parse_from(["vm", "run"]).is_err());
        let cli = Cli::try_parse_from(["vm", "run", "grep", "--", "-v"]);
        let Cmd::Run(run) = cli.unwrap().command else { panic!("not run") };
        assert_eq!(run.program, ["grep", "--", "-v"]);
    }

    #[test]
    fn durations() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
        for bad in ["", "0", "-1", "x", "1000y", "99999999999999999999"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_of_memory() {
        for good in ["2G", "512M", "2048"] {
            assert!(memory(good).is_ok(), "{good}");
        }
        for bad in ["", "G", "0G", "2GG", "2,x=y", "-1", "64M"] {
            assert!(memory(bad).is_err(), "{bad}");
        }
    }
}
