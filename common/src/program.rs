//! The `main` of a program: command line, signals, messages, exit codes.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::SystemTime,
};

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, FromArgMatches};
use common_base::PARSE_ONLY;

#[cfg(feature = "pages")]
use crate::pages;
use crate::{
    cli::{self, Cli, EXIT_STATUS, NOTES, UNSUPPORTED, USAGE},
    error::{Unsupported, Usage},
    message::say,
    session::Session,
    stdout,
};

/// EMFILE, as libbpf and the C library say it.
const TOO_MANY_FILES: [&str; 2] = ["EMFILE", "Too many open files"];

/// Names a program. [`program!`](crate::program!) makes it from the package that calls it.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// Stands before messages: `stage06`.
    pub name: &'static str,
    /// The first line of `--help`.
    pub about: &'static str,
    /// The directory of the package's sources, where they lay when it was built.
    pub directory: &'static str,
}

/// The [`Program`] that the calling package builds.
#[macro_export]
macro_rules! program {
    () => {
        $crate::Program {
            name: env!("CARGO_BIN_NAME"),
            about: env!("CARGO_PKG_DESCRIPTION"),
            directory: env!("CARGO_MANIFEST_DIR"),
        }
    };
}

/// The `main` of a program: reads the command line, lets Ctrl-C, SIGTERM and SIGHUP end the run in
/// good order, runs, and turns an error into one message and an exit code.
pub fn main<Own: Args>(
    program: Program,
    run: impl FnOnce(&Cli<Own>, &mut Session) -> Result<()>,
) -> ExitCode {
    let package = program.name;
    let program = Program { name: started_as(package), ..program };
    let codes = EXIT_STATUS.map(|(code, meaning)| format!("{code} {meaning}")).join(", ");
    let mut command = cli::with_negative_values(Cli::<Own>::command())
        .name(program.name)
        .about(program.about)
        .after_help(format!("{NOTES}\nExit codes: {codes}."))
        .version(env!("CARGO_PKG_VERSION"));
    #[cfg(feature = "pages")]
    if let Some(directory) = std::env::var_os(pages::DIRECTORY) {
        let written = pages::write(command, Path::new(&directory));
        return written.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let parsed = command
        .try_get_matches_from_mut(std::env::args_os())
        .and_then(|matches| Cli::<Own>::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are "errors" too, on stdout. Nobody may be reading.
            error.print().ok();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    if std::env::var_os(PARSE_ONLY).is_some() {
        return ExitCode::SUCCESS;
    }
    if let Some(file) = newer_source(&program) {
        say(&format!(
            "{}: {} was edited after this program was built: build it with cargo build -p {package}\n",
            program.name,
            file.display()
        ));
    }
    match start(&program, &cli, run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (why, code) = (format!("{error:#}"), code(&error));
            let out_of_files = TOO_MANY_FILES.iter().any(|words| why.contains(words));
            let hint =
                if out_of_files { "\n  `ulimit -n 4096` allows more open files" } else { "" };
            say(&format!("{}: {why}{hint}\n", program.name));
            code
        }
    }
}

/// The name of the file that was started: a package installs the exporter as `storage-exporter`. The given one
/// where that is none.
fn started_as(name: &'static str) -> &'static str {
    let first = std::env::args_os().next().unwrap_or_default();
    let file = Path::new(&first).file_name().and_then(|it| it.to_str()).unwrap_or_default();
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    match !file.is_empty() && file.bytes().all(is_plain) {
        true => file.to_owned().leak(),
        false => name,
    }
}

/// The exit code for an error.
fn code(error: &anyhow::Error) -> ExitCode {
    match error.downcast_ref::<Usage>() {
        Some(_) => ExitCode::from(USAGE),
        None if error.is::<Unsupported>() => ExitCode::from(UNSUPPORTED),
        None => ExitCode::FAILURE,
    }
}

fn start<Own: Args>(
    program: &Program,
    cli: &Cli<Own>,
    run: impl FnOnce(&Cli<Own>, &mut Session) -> Result<()>,
) -> Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let handler = Arc::clone(&stop);
    ctrlc::set_handler(move || handler.store(true, Ordering::SeqCst))
        .context("no handler for Ctrl-C could be installed")?;
    let terminal = stdout::columns();
    stdout::passed_on(&stop, || {
        let Program { name, directory, .. } = *program;
        let mut session = Session::new(name, directory, cli, Arc::clone(&stop), terminal);
        run(cli, &mut session)?;
        session.hooks_still_run()
    })
}

/// A source of the program that is newer than the program: in a shell of the VM, where nothing is
/// built, it is easy to run yesterday's.
fn newer_source(program: &Program) -> Option<PathBuf> {
    if common_base::unmounted().is_some() {
        return None; // another /proc has another program
    }
    let modified = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    let built: SystemTime = modified(&std::env::current_exe().ok()?)?;
    let package = Path::new(program.directory);
    let directories = [package.join("src"), Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf")];
    let files = directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten();
    files
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.is_file() && modified(path).is_some_and(|time| time > built))
}
