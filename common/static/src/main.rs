//! `cargo static -p slow_io`: builds a program as one file that needs no library. Its arguments are those of
//! `cargo build`.
//!
//! Before it builds, it looks for what ends in an error of the linker that names no remedy: archives that are
//! not here, and a libelf.a that needs what no package has.

use std::{
    env, fs,
    path::PathBuf,
    process::{Command, ExitCode},
};

/// The exit code where this machine lacks something that is needed.
const MACHINE: u8 = 3;

const PAGE: &str = "docs/on-your-servers.md";
/// A function of libeu.a, which elfutils has since 0.190, and no package of Debian's.
const HIDDEN: &[u8] = b"eu_tsearch";

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match run(&arguments) {
        Ok(code) => ExitCode::from(code),
        Err(message) => {
            eprintln!("cargo static: {message}");
            ExitCode::from(MACHINE)
        }
    }
}

/// The exit code of cargo.
fn run(arguments: &[String]) -> Result<u8, String> {
    let triple = match value(arguments, "--target") {
        Some(triple) => triple.to_owned(),
        None => host()?,
    };
    let variable = format!("LIBBPF_SYS_LIBRARY_PATH_{}", triple.replace('-', "_"));
    let variable = env::var(variable).or_else(|_| env::var("LIBBPF_SYS_LIBRARY_PATH"));
    let directories: Vec<PathBuf> = env::split_paths(&variable.unwrap_or_default()).collect();
    // libbpf then builds its own, whatever is here.
    if !arguments.iter().any(|it| it.contains("vendored")) {
        check(&directories, arguments)?;
    }
    let mut command = Command::new(env::var_os("CARGO").unwrap_or("cargo".into()));
    for (name, _) in env::vars_os().filter(|(name, _)| common_base::is_cargos(name)) {
        command.env_remove(name);
    }
    command.args(["build", "--release", "--features", "static"]);
    // Where a target is named, flags are not for build scripts and macros, which are programs of this machine.
    if value(arguments, "--target").is_none() {
        command.args(["--target", &triple]);
    }
    let flags = "target.'cfg(all())'.rustflags = ['-C', 'target-feature=+crt-static']";
    command.args(["--config", flags]).args(arguments);
    let status = command.status().map_err(|error| format!("cannot start cargo: {error}"))?;
    Ok(status.code().unwrap_or(1) as u8)
}

/// What follows an option: `--target T` or `--target=T`.
fn value<'a>(arguments: &'a [String], option: &str) -> Option<&'a str> {
    let place = arguments.iter().position(|it| it == option);
    let next = place.and_then(|place| arguments.get(place + 1)).map(String::as_str);
    next.or_else(|| arguments.iter().find_map(|it| it.strip_prefix(option)?.strip_prefix('=')))
}

/// This machine, as rustc calls it. (Cargo's own word for it, `host-tuple`, is of 1.91.)
fn host() -> Result<String, String> {
    let rustc = env::var_os("RUSTC").unwrap_or("rustc".into());
    let output = Command::new(rustc).arg("-vV").output();
    let output = output.map_err(|error| format!("cannot start rustc: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).ok_or_else(|| "rustc -vV names no host".to_owned())
}

/// Whether the archives are here, and libelf.a is one that can be linked.
fn check(directories: &[PathBuf], arguments: &[String]) -> Result<(), String> {
    let find = |name: &str| directories.iter().map(|it| it.join(name)).find(|it| it.is_file());
    for (name, package) in [("libelf.a", "libelf-dev"), ("libz.a", "zlib1g-dev")] {
        if find(name).is_none() {
            let places: Vec<_> = directories.iter().map(|it| it.display().to_string()).collect();
            return Err(format!(
                "{name} is not in {}. On Debian and Ubuntu, run as root:\n  apt-get install {package}\n\
                 {PAGE} names the packages of Fedora, and says how to name another directory",
                places.join(" or ")
            ));
        }
    }
    let libelf = find("libelf.a").unwrap_or_default();
    let bytes = fs::read(&libelf).map_err(|error| format!("{}: {error}", libelf.display()))?;
    let needs_libeu = bytes.windows(HIDDEN.len()).any(|it| it == HIDDEN);
    if needs_libeu && find("libeu.a").is_none() {
        return Err(format!(
            "{} needs a library of elfutils, libeu.a, which no package has. It is so on Debian 13. Let \
             libbpf build its own libelf:\n  apt-get install autoconf automake autopoint bison flex gawk \
             gettext libtool\n  cargo static {} --features libbpf-rs/vendored\n{PAGE} has more",
            libelf.display(),
            arguments.join(" ")
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_linked_is_said_with_what_to_do() {
        let directory = tempfile::tempdir().unwrap();
        let directories = [directory.path().join("none"), directory.path().to_owned()];
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        let arguments = ["-p".to_owned(), "slow_io".to_owned()];
        let said = || check(&directories, &arguments).unwrap_err();
        assert!(
            said().contains("libelf.a is not in ") && said().contains("apt-get install libelf-dev")
        );
        write("libelf.a", "!<arch>\nelf_begin");
        assert!(said().contains("apt-get install zlib1g-dev"));
        write("libz.a", "!<arch>\n");
        check(&directories, &arguments).unwrap();
        write("libelf.a", "!<arch>\nelf_begin\0eu_tsearch\0");
        assert!(said().contains("\n  cargo static -p slow_io --features libbpf-rs/vendored\n"));
        write("libeu.a", "!<arch>\n");
        check(&directories, &arguments).unwrap();
    }

    #[test]
    fn the_target_is_the_users_or_this_machine() {
        let of = |text: &str| {
            let arguments: Vec<String> = text.split(' ').map(str::to_owned).collect();
            value(&arguments, "--target").map(str::to_owned)
        };
        assert_eq!(of("-p slow_io"), None);
        assert_eq!(of("-p slow_io --target-dir x"), None);
        assert_eq!(of("--target a-b-c -p slow_io").as_deref(), Some("a-b-c"));
        assert_eq!(of("--target=a-b-c").as_deref(), Some("a-b-c"));
        assert!(host().unwrap().starts_with(env::consts::ARCH));
    }
}
