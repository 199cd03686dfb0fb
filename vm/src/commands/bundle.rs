//! One file with all that a machine without a network needs: the kernels, the crates, the web book.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use workshop::fail::{USAGE, fail};
use workshop::say;

use crate::fetch::cache::{self, Cache, sha256};
use crate::fetch::rootfs::Rootfs;
use crate::run::{For, Run};

/// Free megabytes that the crates take while they are collected.
const CRATES_MB: u64 = 1000;
/// Cargo's configuration of the workspace.
const CONFIG: &str = ".cargo/config.toml";
/// What `cargo book` writes.
const BOOK: &str = "target/book";
/// What stands before the part of it that a bundle adds.
const MARK: &str =
    "\n# From a bundle (cargo vm bundle): the crates are in vendor/, cargo needs no network.\n";
const SOURCES: &str = "\
[source.crates-io]
replace-with = \"vendored-sources\"

[source.vendored-sources]
directory = \"vendor\"

[net]
offline = true
";

/// Writes `file`: a tar archive, compressed with zstd. Below `vendor` and `.cargo` it holds what
/// cargo needs and is unpacked into the workspace by hand, because without it cargo cannot build this
/// program; so is the web book, below `target/book`; below `kernels` and `roots`, what [`install`] puts into the cache.
pub fn write(run: &Run, file: &Path, kernel: Option<&str>) -> Result<()> {
    run.need_packages(For::Test)?;
    let cache = &run.cache;
    let mut places = Vec::new();
    for name in run.table.names(kernel)? {
        let Ok(line) = run.table.line(&name) else {
            return Err(fail(USAGE, format!("a bundle holds kernel lines, and {name} is none")));
        };
        run.table.kernel(&name)?;
        places.extend(line.here(cache).map(|(place, _)| place));
    }
    places.extend(run.rootfs()?.map(Path::to_owned));
    let file = std::path::absolute(file)?;
    let _lock = cache.lock()?;
    cache.need_space(CRATES_MB, "a bundle")?;
    let temp = cache.temp_dir()?;
    say!("collecting the crates");
    let mut vendor = run.cargo.command();
    vendor.args(["vendor", "--quiet", "--versioned-dirs", "--respect-source-config"]);
    let output = vendor.arg(temp.path().join("vendor")).output().context("cannot start cargo")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "cargo vendor failed: {}", said.trim());
    say!("making the web book");
    let status = run.cargo.command().arg("book").stdout(Stdio::null()).status();
    let is_made = status.context("cannot start cargo")?.success();
    // A machine without a network reads it and does not build it: there, one that is made already goes along.
    ensure!(is_made || run.workspace().join(BOOK).is_dir(), "cargo book failed, see above");
    let config = with_sources(&fs::read_to_string(run.workspace().join(CONFIG)).context(CONFIG)?);
    fs::create_dir(temp.path().join(".cargo"))?;
    cache::write(&temp.path().join(CONFIG), config.as_bytes())?;
    say!("writing {}", file.display());
    let mut part = file.clone().into_os_string();
    part.push(".part");
    // posix: times with nanoseconds.
    let mut args: Vec<OsString> =
        ["--create", "--zstd", "--format=posix", "--owner=0", "--group=0"]
            .map(OsString::from)
            .into();
    args.extend(["--file".into(), part.clone(), "-C".into(), temp.path().into()]);
    args.extend([".cargo", "vendor", "-C"].map(OsString::from));
    args.extend([run.workspace().into(), BOOK.into(), "-C".into(), cache.path("").into()]);
    for place in &places {
        args.push(place.strip_prefix(cache.path(""))?.into());
    }
    if let Err(error) = cache::run("tar", &args) {
        fs::remove_file(&part).ok();
        return Err(error.context(format!("cannot write {}", file.display())));
    }
    fs::rename(&part, &file).with_context(|| format!("cannot write {}", file.display()))?;
    say!("{} has {} MB", file.display(), fs::metadata(&file)?.len() >> 20);
    say!("its SHA-256 is {}: whoever takes it can compare", sha256(&file)?);
    Ok(())
}

/// The workspace's configuration, with the crates of a bundle in the place of the registry.
fn with_sources(config: &str) -> String {
    let own = config.split(MARK).next().unwrap_or(config);
    format!("{own}{MARK}{SOURCES}")
}

/// Puts the kernels of a bundle into the cache. Returns their names.
///
/// Only what [`write()`] writes is taken: real directories, under the names of this workshop's kernels and
/// roots. Owners, and modes that the user's own mask forbids, stay behind.
pub fn install(run: &Run, file: &Path) -> Result<Vec<String>> {
    let file = std::path::absolute(file)?;
    if !file.is_file() {
        return Err(fail(USAGE, format!("there is no file {}", file.display())));
    }
    let cache = &run.cache;
    {
        let _lock = cache.lock()?;
        let temp = cache.temp_dir()?;
        say!("the SHA-256 of {} is {}", file.display(), sha256(&file)?);
        say!("unpacking its kernels");
        unpack(&file, temp.path())?;
        let root = if run.arch.is_foreign() { Some(Rootfs::arm64()?.place(cache)) } else { None };
        let is_known = |sub: &str, name: &str| match sub {
            "kernels" => run.table.lines.iter().any(|line| line.is_named(name, cache)),
            _ => root.as_ref().is_some_and(|root| root.ends_with(name)),
        };
        put_all(temp.path(), cache, is_known)
            .with_context(|| format!("nothing of {} was taken", file.display()))?;
    }
    let here = run.table.lines.iter().filter(|line| line.here(cache).is_some());
    let names: Vec<String> = here.map(|line| line.name.clone()).collect();
    if names.is_empty() {
        bail!(
            "{} has none of the kernels that this version of the workshop uses: it was made from \
             another version. Make a new one with cargo vm bundle",
            file.display()
        );
    }
    Ok(names)
}

/// Unpacks the part of a bundle that the cache may take.
fn unpack(file: &Path, into: &Path) -> Result<()> {
    let options = ["--extract", "--no-same-owner", "--no-same-permissions"];
    let left_out = ["--exclude=vendor", "--exclude=.cargo", "--exclude=target", "--file"];
    let args = options.into_iter().chain(left_out).map(OsStr::new);
    let into = ["-C".as_ref(), into.as_os_str()];
    cache::run("tar", args.chain([file.as_os_str()]).chain(into))
        .map(drop)
        .with_context(|| format!("{} is no bundle, or is damaged: copy it again", file.display()))
}

/// Moves what was unpacked into `from` to its places in the cache: directories of known names. An error,
/// before anything is moved, where one of them is something else, such as a link out of the bundle.
fn put_all(from: &Path, cache: &Cache, is_known: impl Fn(&str, &str) -> bool) -> Result<()> {
    let mut moves = Vec::new();
    for sub in ["kernels", "roots"] {
        let directory = from.join(sub);
        if directory.symlink_metadata().is_err() {
            continue;
        }
        need_directory(&directory)?;
        for entry in fs::read_dir(&directory)? {
            let made = entry?.path();
            let name = made.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if is_known(sub, &name) {
                need_directory(&made)?;
                moves.push((made, cache.path(sub).join(name)));
            }
        }
    }
    moves.iter().try_for_each(|(made, place)| cache::put(made, place))
}

/// An error where this is no directory itself: a link to one is none.
fn need_directory(path: &Path) -> Result<()> {
    let meta = path.symlink_metadata().with_context(|| path.display().to_string())?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    ensure!(
        meta.is_dir(),
        "{name} in it is no directory: `cargo vm bundle` writes no such file, so somebody else has made or \
         changed it"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_is_installed_again() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(&temp.path().join("cache")).unwrap();
        let kernels = ["6.1-0a", "6.1-rt-0b", "6.12-0c"];
        for time in ["first", "second"] {
            let from = temp.path().join(time);
            for kernel in kernels.into_iter().chain(["6.1-0d.old"]) {
                fs::create_dir_all(from.join("kernels").join(kernel)).unwrap();
                fs::write(from.join("kernels").join(kernel).join("manifest"), time).unwrap();
            }
            put_all(&from, &cache, |_, name| kernels.contains(&name)).unwrap();
        }
        let mut here: Vec<_> =
            fs::read_dir(cache.path("kernels")).unwrap().map(|e| e.unwrap().file_name()).collect();
        here.sort();
        assert_eq!(here, kernels);
        for kernel in kernels {
            let manifest = cache.path("kernels").join(kernel).join("manifest");
            assert_eq!(fs::read_to_string(manifest).unwrap(), "second");
        }
    }

    /// Archives that would move a user's files, or leave something in the cache that is none of ours.
    #[test]
    fn a_hostile_bundle_moves_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let users = temp.path().join("users");
        fs::create_dir_all(users.join("6.1-0a")).unwrap();
        fs::write(users.join("6.1-0a/manifest"), "mine").unwrap();
        let victim = users.display();
        let kernel = "mkdir -p kernels/6.1-0a; echo theirs >kernels/6.1-0a/manifest";
        for (name, make, taken) in [
            ("a link", format!("ln -s {victim} kernels"), Err("kernels in it is no directory")),
            (
                "a link to a kernel",
                format!("mkdir kernels; ln -s {victim}/6.1-0a kernels/6.1-0a"),
                Err("6.1-0a in it is no directory"),
            ),
            ("a file", "echo no >roots".into(), Err("roots in it is no directory")),
            ("a hard link", format!("{kernel}; ln {victim}/6.1-0a/manifest kernels/x"), Ok(1)),
            ("another name", "mkdir -p kernels/tmp kernels/..6.1-0a".into(), Ok(0)),
            ("a mode", format!("{kernel}; chmod 6777 kernels/6.1-0a/manifest"), Ok(1)),
        ] {
            let place = temp.path().join(name.replace(' ', "-"));
            let made = place.join("made");
            fs::create_dir_all(&made).unwrap();
            let bundle = place.join("bundle.tar");
            let script = format!("set -e; {make}; tar -cf {} -- *", bundle.display());
            let mut shell = std::process::Command::new("sh");
            let status = shell.args(["-c", &script]).current_dir(&made).status();
            assert!(status.unwrap().success(), "{name}");
            let (cache, into) = (Cache::at(&place.join("cache")).unwrap(), place.join("into"));
            fs::create_dir(&into).unwrap();
            unpack(&bundle, &into).unwrap();
            let put = put_all(&into, &cache, |sub, name| sub == "kernels" && name == "6.1-0a");
            match (put, taken) {
                (Err(error), Err(why)) => assert!(error.to_string().starts_with(why), "{error}"),
                (put, Ok(_)) => put.unwrap(),
                (put, Err(why)) => panic!("{name}: {put:?}, not {why}"),
            }
            let here: Vec<_> = fs::read_dir(cache.path("kernels")).into_iter().flatten().collect();
            assert_eq!(here.len(), taken.unwrap_or(0), "{name}");
            let manifest = cache.path("kernels/6.1-0a/manifest");
            if let Ok(meta) = manifest.metadata() {
                use std::os::unix::fs::PermissionsExt;
                assert_eq!(meta.permissions().mode() & 0o7022, 0, "{name}: a mode of the archive");
            }
            let mine = fs::read_to_string(users.join("6.1-0a/manifest")).unwrap();
            assert_eq!(mine, "mine", "{name}");
        }
        // Names that lead out of the directory are tar's to refuse.
        let place = temp.path().join("names");
        fs::create_dir_all(place.join("into/deep")).unwrap();
        fs::write(place.join("x"), "x").unwrap();
        for transform in ["s,x,../escaped,", "s,x,/proc/escaped,"] {
            let bundle = place.join("names.tar");
            let mut tar = std::process::Command::new("tar");
            tar.arg("-Pcf").arg(&bundle).arg(format!("--transform={transform}")).arg("x");
            assert!(tar.current_dir(&place).status().unwrap().success());
            unpack(&bundle, &place.join("into/deep")).ok();
            assert!(!place.join("into/escaped").exists(), "{transform}");
        }
    }

    #[test]
    fn the_sources_are_added_once() {
        let workspace = workshop::workspace();
        let config = fs::read_to_string(workspace.join(CONFIG)).unwrap();
        let once = with_sources(&config);
        assert!(once.contains("directory = \"vendor\"") && once.contains("vm = \"run"));
        assert_eq!(with_sources(&once), once);
        let parsed: toml::Table = toml::from_str(&once).unwrap();
        assert!(parsed.contains_key("target") && parsed.contains_key("source"));
    }
}
