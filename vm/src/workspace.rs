//! The Cargo workspace: where it is, what it holds, building a program of it.

use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::{Artifact, Metadata, MetadataCommand};
use host::fail::{MACHINE, fail};
use host::room::{Built, Room};
use host::say;
use serde::Deserialize;

pub use host::cargo::{cargo, is_cargos};

use crate::arch;
use crate::setup::cache::{self, Cache};
use crate::setup::root as guest_root;

/// The directory that holds the root Cargo.toml.
///
/// `cargo run` names the package's directory; a binary started by hand looks upwards from
/// where it stands, and at last where it was built.
pub fn root() -> Result<PathBuf> {
    let is_root = |dir: &Path| dir.join("vm/kernels.toml").is_file();
    let by_cargo = std::env::var_os("CARGO_MANIFEST_DIR")
        .and_then(|dir| Path::new(&dir).parent().map(Path::to_owned));
    let cwd = std::env::current_dir().unwrap_or_default();
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    by_cargo
        .iter()
        .map(PathBuf::as_path)
        .chain(cwd.ancestors())
        .chain(built)
        .find(|dir| is_root(dir))
        .map(|dir| dir.canonicalize().unwrap_or(dir.to_owned()))
        .context(
            "this is not inside the workshop's workspace: no vm/kernels.toml above this directory",
        )
}

/// `--quiet` where nobody watches: a first build takes minutes and should be seen to work.
pub fn quiet() -> Option<&'static str> {
    (!std::io::stderr().is_terminal()).then_some("--quiet")
}

/// A program of the workshop: a `bin` target of a package with `[package.metadata.workshop]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The target's name, which is also the name that `cargo vm run` takes.
    pub name: String,
    /// The package that builds it.
    pub package: String,
    /// Whether the package's name stands for it, too: `default-run` in Cargo.toml.
    pub is_default: bool,
    /// Whether it reads keys on a terminal: `reads_keys`.
    pub reads_keys: bool,
    /// How `cargo vm bench` measures it.
    pub bench: BenchForms,
    /// Whether it is the learner's attempt at an exercise, in the workspace `mine/`.
    pub is_attempt: bool,
}

impl Program {
    /// Whether `cargo vm run NAME` means this program.
    pub fn is_called(&self, name: &str) -> bool {
        self.name == name || self.is_default && self.package == name
    }

    /// Builds it. Returns the executable.
    pub fn build(&self, root: &Path) -> Result<PathBuf> {
        if !self.is_attempt {
            let built = ["build", "--package", &self.package, "--bin", &self.name];
            return build(root, &built, &self.name);
        }
        let room = Room::mine(root).prepare(Some(&self.package))?;
        for directory in &room.left_out {
            say!("{} is left out: cargo cannot read its Cargo.toml", directory.display());
        }
        let what = format!("building: cargo build --package {}", self.package);
        match announced(what, || room.build(&self.package, quiet().is_some(), true))? {
            Built::Program(file) => Ok(file),
            Built::Failed(_) => bail!("cargo build --package {} failed, see above", self.package),
        }
    }
}

/// `bench` in `[package.metadata.workshop]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BenchForms {
    /// Measure with reads from the page cache instead of direct ones.
    pub cached: bool,
    /// The arguments, a form each. Default: `--quiet` where the program has that option, and none.
    pub forms: Option<Vec<String>>,
    /// At most so many reads a run: the program keeps all that it sees.
    pub most_reads: Option<u32>,
}

/// The programs of the workshop, sorted by name. Needs no network.
pub fn programs(root: &Path) -> Result<Vec<Program>> {
    programs_of(&host::cargo::metadata(root)?)
}

/// The learner's attempts at exercises. They are no part of the workspace.
pub fn attempts(root: &Path) -> Vec<Program> {
    let attempts = Room::mine(root).attempts().into_iter().map(|attempt| Program {
        name: attempt.package.clone(),
        package: attempt.package,
        is_default: false,
        reads_keys: attempt
            .workshop
            .get("reads_keys")
            .is_some_and(|keys| keys.as_bool() == Some(true)),
        bench: BenchForms::default(),
        is_attempt: true,
    });
    attempts.collect()
}

/// The programs whose names stand in a command's arguments as whole words, each once. A shell's
/// script is such an argument: `bash -c 'stage05 | head'`.
pub fn named_in<'p>(programs: &'p [Program], args: &[OsString]) -> Vec<&'p Program> {
    let mut named: Vec<&Program> = Vec::new();
    for arg in args {
        let text = arg.to_string_lossy();
        let in_a_name = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        for word in text.split(|c| !in_a_name(c)) {
            let program = programs.iter().find(|program| program.is_called(word));
            named.extend(program.filter(|program| !named.contains(program)));
        }
    }
    named
}

/// The target of the guest tests.
pub const GUEST: &str = "guest";

/// The first line of `.clangd`.
const WRITTEN: &str = "# Written by `cargo vm setup`.";

/// Prepares the BPF programs for clangd, the language server of editors: copies libbpf's headers below
/// the target directory, from the sources of the crate libbpf-sys, which cargo has fetched, and writes
/// clangd's flags to `.clangd`. Builds use headers of their own.
pub fn copy_headers(root: &Path) -> Result<()> {
    let mut command = MetadataCommand::new();
    // Of the other platforms' crates, a build has fetched none.
    let platform = arch::host_target();
    let options = ["--offline".to_owned(), "--filter-platform".to_owned(), platform];
    command.current_dir(root).other_options(options);
    let metadata = command.exec().context("cargo metadata failed")?;
    let sys = metadata.packages.iter().find(|package| package.name == "libbpf-sys");
    let manifest = &sys.context("no crate libbpf-sys among the dependencies")?.manifest_path;
    let source = manifest.with_file_name("libbpf").join("src");
    let include = metadata.target_directory.as_std_path().join("bpf/include");
    let target = include.join("bpf");
    fs::create_dir_all(&target).with_context(|| target.display().to_string())?;
    for entry in fs::read_dir(&source).with_context(|| source.to_string())? {
        let name = entry?.file_name();
        let text = name.to_string_lossy();
        if text.starts_with("bpf_") && text.ends_with(".h") {
            fs::copy(source.as_std_path().join(&name), target.join(&name))
                .with_context(|| format!("cannot copy {text} to {}", target.display()))?;
        }
    }
    // A list of texts in JSON is one in YAML.
    let flags = serde_json::to_string(&clang_flags(root, &include))?;
    let file = root.join(".clangd");
    if fs::read_to_string(&file).is_ok_and(|old| !old.starts_with(WRITTEN)) {
        return Ok(()); // the user's own
    }
    fs::write(file, format!("{WRITTEN}\nCompileFlags:\n  Add: {flags}\n")).context(".clangd")
}

/// The flags that the BPF programs are compiled with, where libbpf's headers are in `include`.
fn clang_flags(root: &Path, include: &Path) -> Vec<String> {
    let arch = crate::arch::guest().bpf();
    let mut flags: Vec<String> =
        ["-xc", "-g", "-O2", "-target", "bpf", "-mcpu=v2", "-Wall"].map(str::to_owned).into();
    flags.push(format!("-D__TARGET_ARCH_{arch}"));
    let places = [&root.join("common/bpf"), &root.join("tools/bpf"), include];
    flags.extend(places.map(|place| format!("-I{}", place.display())));
    flags
}

fn programs_of(metadata: &Metadata) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    for package in metadata.workspace_packages() {
        let Some(workshop) = package.metadata.get("workshop") else { continue };
        let reads_keys = workshop.get("reads_keys").and_then(serde_json::Value::as_bool);
        let bench = workshop.get("bench").cloned().map(serde_json::from_value::<BenchForms>);
        let bench = bench.transpose();
        let bench = bench.with_context(|| format!("{}: `bench`", package.manifest_path))?;
        for bin in package.targets.iter().filter(|target| target.is_bin()) {
            programs.push(Program {
                name: bin.name.clone(),
                package: package.name.clone(),
                is_default: package.default_run.as_ref() == Some(&bin.name),
                reads_keys: reads_keys.unwrap_or(false),
                bench: bench.clone().unwrap_or_default(),
                is_attempt: false,
            });
        }
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

/// Does a piece of work, and says what it is once it has taken two seconds; on a terminal cargo
/// shows its own progress.
fn announced<T>(what: String, work: impl FnOnce() -> T) -> T {
    let (done, wait) = channel::<()>();
    if quiet().is_some() {
        thread::spawn(move || {
            if wait.recv_timeout(Duration::from_secs(2)) == Err(RecvTimeoutError::Timeout) {
                say!("{what}");
            }
        });
    }
    let result = work();
    drop(done);
    result
}

/// Makes builds be for the guest, also where it has another architecture than this machine: with Rust's
/// library for that, and linked with the guest's root.
/// Returns the variables that cargo is given.
pub fn for_guests(root: &Path, cache: &Cache) -> Result<Vec<(String, String)>> {
    let Some(guest) = guest_root::get(cache)? else { return Ok(Vec::new()) };
    need_rust_target(root)?;
    let variables = cross(&guest_root::compiler(&guest)?);
    host::cargo::build_for_guests(variables.clone());
    Ok(variables)
}

/// The variables with which cargo builds for the guest's architecture.
fn cross(compiler: &Path) -> Vec<(String, String)> {
    let target = arch::guest().rust_target();
    let (lower, compiler) = (target.replace('-', "_"), compiler.display().to_string());
    let ar = format!("{}-ar", arch::guest().gnu());
    vec![
        ("CARGO_BUILD_TARGET".into(), target.into()),
        (format!("CARGO_TARGET_{}_LINKER", lower.to_uppercase()), compiler.clone()),
        (format!("CC_{lower}"), compiler),
        (format!("AR_{lower}"), ar),
    ]
}

/// Adds Rust's library for the guest's architecture where it is missing.
fn need_rust_target(root: &Path) -> Result<()> {
    let target = arch::guest().rust_target();
    if has_rust_target(root) {
        return Ok(());
    }
    if cache::find_tool("rustup").is_none() {
        let message = format!(
            "Rust's library for {target} is not here, and no rustup that adds it: install the package \
             of your distribution that has it (Debian: libstd-rust-dev:{}), or Rust by rustup",
            arch::guest().debian()
        );
        return Err(fail(MACHINE, message));
    }
    say!("running: rustup target add {target}");
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", target]).current_dir(root).stdin(Stdio::null());
    // Our standard output belongs to the program that is run.
    let output = rustup.stderr(Stdio::inherit()).output().context("cannot start rustup")?;
    ensure!(
        output.status.success() && has_rust_target(root),
        "rustup could not add {target}, see above"
    );
    Ok(())
}

/// Whether Rust can build for the guest's architecture.
pub fn has_rust_target(root: &Path) -> bool {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    rustc.args(["--print", "target-libdir", "--target", arch::guest().rust_target()]);
    let output = rustc.current_dir(root).stdin(Stdio::null()).output();
    output.is_ok_and(|output| {
        let text = String::from_utf8_lossy(&output.stdout);
        output.status.success() && Path::new(text.trim()).is_dir()
    })
}

/// The directory with the programs that are built for guests. `None`: this program was copied elsewhere.
pub fn programs_of_guests() -> Option<PathBuf> {
    // The stages are in the same directory as this program.
    let own = std::env::current_exe().ok()?.parent()?.to_owned();
    if !arch::is_foreign() {
        return Some(own);
    }
    Some(own.parent()?.join(arch::guest().rust_target()).join(own.file_name()?))
}

/// Builds every program of the workspace, for guests.
pub fn build_all(root: &Path) -> Result<()> {
    let mut command = host::cargo::cargo_for_guests(root);
    command.args(["build", "--workspace"]).args(quiet());
    let built = announced("building all programs".to_owned(), || command.status());
    let built = built.context("cannot start cargo")?;
    ensure!(built.success(), "cargo could not build the programs of the workspace, see above");
    Ok(())
}

/// Builds the guest tests, for guests. Returns the executable.
pub fn build_guest_tests(root: &Path) -> Result<PathBuf> {
    build(root, &["test", "--package", "guest_tests", "--test", GUEST, "--no-run"], GUEST)
}

/// Runs a cargo command that builds and returns the executable of the target `name`.
/// `args` begins with cargo's subcommand.
pub fn build(root: &Path, args: &[&str], name: &str) -> Result<PathBuf> {
    host::cargo::executable(&artifacts(root, args)?, name)
}

/// Runs a cargo command that builds for guests and returns what it has made. `args` begins with
/// cargo's subcommand.
pub fn artifacts(root: &Path, args: &[&str]) -> Result<Vec<Artifact>> {
    let what = format!("building: cargo {}", args.join(" "));
    announced(what, || host::cargo::artifacts_for_guests(root, args, quiet().is_some()))
}

/// The same for this machine.
pub fn artifacts_here(root: &Path, args: &[&str]) -> Result<Vec<Artifact>> {
    let what = format!("building: cargo {}", args.join(" "));
    announced(what, || host::cargo::artifacts(root, args, quiet().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clangd_finds_the_headers() {
        let root = root().unwrap();
        copy_headers(&root).unwrap();
        let text = fs::read_to_string(root.join(".clangd")).unwrap();
        let (_, flags) = text.split_once("CompileFlags:\n  Add: ").unwrap();
        let flags: Vec<String> = serde_json::from_str(flags).unwrap();
        let mut clang = Command::new("clang");
        clang.args(flags).arg("-fsyntax-only").arg(root.join("stage06_stacktrace/src/trace.bpf.c"));
        let output = clang.current_dir("/").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn programs_are_found_in_a_commands_arguments() {
        let program = |package: &str, name: &str, is_default, is_attempt| Program {
            name: name.to_owned(),
            package: package.to_owned(),
            is_default,
            reads_keys: false,
            bench: BenchForms::default(),
            is_attempt,
        };
        let programs = [
            program("by_hand", "syscall_profiler", true, false),
            program("stage04", "stage04", false, false),
            program("stage05", "stage05", false, false),
            program("mine-04", "mine-04", false, true),
        ];
        let names = |args: &[&str]| -> Vec<&str> {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            named_in(&programs, &args).into_iter().map(|program| &*program.name).collect()
        };
        let script =
            "\n  stage05 --quiet 2> /run/log & until grep -qs tracing /run/log; do sleep 1; done\n";
        assert_eq!(names(&["-c", script]), ["stage05"]);
        assert_eq!(names(&["-c", "(stage04&stage05;stage04)|tail"]), ["stage04", "stage05"]);
        assert_eq!(names(&["-c", "n=$(mine-04 --quiet)"]), ["mine-04"]);
        assert_eq!(names(&["-p", "stage05", "mine-04"]), ["stage05", "mine-04"]);
        assert_eq!(names(&["target/debug/stage05", "-v"]), ["stage05"]);
        assert_eq!(names(&["-c", "by_hand"]), ["syscall_profiler"]);
        for other in
            ["ls stage05_sector", "cat /tmp/stage05.log", "mine-04b", "xstage05", "-stage05"]
        {
            assert_eq!(names(&[other]), <[&str; 0]>::default(), "{other}");
        }
    }

    #[test]
    fn an_attempt_is_a_program_though_its_manifest_is_damaged() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(attempts(dir.path()), []);
        for (name, text) in [
            (
                "04",
                "[package]\nname = \"mine-04\"\n[package.metadata.workshop]\nreads_keys = true\n",
            ),
            ("05", "[package\n"),
        ] {
            fs::create_dir_all(dir.path().join("mine").join(name)).unwrap();
            fs::write(dir.path().join("mine").join(name).join("Cargo.toml"), text).unwrap();
        }
        let attempts = attempts(dir.path());
        let seen: Vec<_> =
            attempts.iter().map(|p| (&*p.name, p.reads_keys, p.is_attempt)).collect();
        assert_eq!(seen, [("mine-04", true, true), ("mine-05", false, true)]);
    }

    #[test]
    fn every_stage_is_a_program() {
        let root = root().unwrap();
        let programs = programs(&root).unwrap();
        let packages: Vec<&str> = programs.iter().map(|p| p.package.as_str()).collect();
        let names = |directory: &Path| {
            let entries = fs::read_dir(directory).unwrap().map(Result::unwrap);
            let directories = entries.filter(|entry| entry.path().is_dir());
            let names = directories.map(|entry| entry.file_name().to_string_lossy().into_owned());
            names.collect::<Vec<String>>()
        };
        for name in names(&root).iter().filter(|name| name.starts_with("stage")) {
            let stage = name.split('_').next().unwrap();
            assert!(packages.contains(&stage), "{stage}: {programs:?}");
        }
        for name in ["tools", "appendix"].into_iter().flat_map(|place| names(&root.join(place))) {
            assert!(packages.contains(&name.as_str()), "{name}: {programs:?}");
        }
        assert!(!packages.contains(&"vm"));
        let default = programs.iter().find(|p| p.package == "by_hand" && p.is_default).unwrap();
        assert_eq!(default.name, "syscall_profiler");
    }
}
