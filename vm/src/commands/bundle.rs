//! One file with all that a machine without a network needs: the kernels, the crates, the web book.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use workshop::fail::{USAGE, fail};
use workshop::say;

use crate::fetch::cache::{self, Cache};
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
    Ok(())
}

/// The workspace's configuration, with the crates of a bundle in the place of the registry.
fn with_sources(config: &str) -> String {
    let own = config.split(MARK).next().unwrap_or(config);
    format!("{own}{MARK}{SOURCES}")
}

/// Puts the kernels of a bundle into the cache. Returns their names.
pub fn install(run: &Run, file: &Path) -> Result<Vec<String>> {
    let file = std::path::absolute(file)?;
    if !file.is_file() {
        return Err(fail(USAGE, format!("there is no file {}", file.display())));
    }
    let cache = &run.cache;
    {
        let _lock = cache.lock()?;
        let temp = cache.temp_dir()?;
        say!("unpacking the kernels of {}", file.display());
        let args =
            ["--extract", "--exclude=vendor", "--exclude=.cargo", "--exclude=target", "--file"]
                .map(OsStr::new);
        let into = ["-C".as_ref(), temp.path().as_os_str()];
        let args = args.into_iter().chain([file.as_os_str()]).chain(into);
        cache::run("tar", args).with_context(|| {
            format!("{} is no bundle, or is damaged: copy it again", file.display())
        })?;
        put_all(temp.path(), cache)?;
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

/// Moves what was unpacked into `from` to its places in the cache.
fn put_all(from: &Path, cache: &Cache) -> Result<()> {
    for sub in ["kernels", "roots"] {
        // All names first: what the cache had before moves into this directory.
        let entries: Vec<_> = fs::read_dir(from.join(sub)).into_iter().flatten().collect();
        for entry in entries {
            let made = entry?.path();
            if made.extension().is_some_and(|extension| extension == "old") {
                continue;
            }
            let place = cache.path(sub).join(made.file_name().context("no name")?);
            cache::put(&made, &place)?;
        }
    }
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
            put_all(&from, &cache).unwrap();
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
