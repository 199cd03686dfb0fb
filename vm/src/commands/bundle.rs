//! One file with all that a machine without a network needs: the kernels, the crates, the web book.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use workshop::fail::{USAGE, fail};
use workshop::say;

use crate::fetch::cache::{self, Cache, sha256};
use crate::fetch::kernel::Kernel;
use crate::fetch::rootfs::Rootfs;
use crate::fetch::seal;
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
    // What is damaged here is not to be copied.
    cache.forget_checks()?;
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
/// roots, with the files that are in their lists; of a pinned kernel, with the pinned files. Owners, and modes
/// that the user's own mask forbids, stay behind.
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
        let pin = |sub: &str, name: &str| match sub {
            "kernels" => run.table.line_of(name).map(|line| line.pin().map(str::to_owned)),
            _ if root.as_ref().is_some_and(|root| root.ends_with(name)) => Ok(None),
            _ => {
                let arch = run.arch.debian();
                Err(format!("no root file system of this version is that of {arch} guests"))
            }
        };
        let taken = Taken::of(temp.path(), pin)
            .and_then(|taken| taken.put(cache).map(|()| taken))
            .with_context(|| format!("nothing of {} was taken", file.display()))?;
        taken.describe();
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
    // Anchored: a kernel has a directory `target`, too.
    let options = ["--extract", "--no-same-owner", "--no-same-permissions", "--anchored"];
    let left_out = ["--exclude=vendor", "--exclude=.cargo", "--exclude=target", "--file"];
    let args = options.into_iter().chain(left_out).map(OsStr::new);
    let into = ["-C".as_ref(), into.as_os_str()];
    cache::run("tar", args.chain([file.as_os_str()]).chain(into))
        .map(drop)
        .with_context(|| format!("{} is no bundle, or is damaged: copy it again", file.display()))
}

/// What a bundle holds for the cache.
struct Taken {
    /// Where each thing lies, its place in the cache, and the checksum of its files where it is pinned.
    things: Vec<(PathBuf, PathBuf, Option<String>)>,
    /// What is not taken, and why.
    left_out: Vec<String>,
}

impl Taken {
    /// Looks through what was unpacked into `from`. `pin`: the checksum of a thing that the cache has a place
    /// for, where it is pinned; or why there is no place for it. An error where something is not what
    /// [`write()`] wrote, such as a link out of the bundle.
    fn of(
        from: &Path,
        pin: impl Fn(&str, &str) -> std::result::Result<Option<String>, String>,
    ) -> Result<Taken> {
        let mut taken = Taken { things: Vec::new(), left_out: Vec::new() };
        for sub in ["kernels", "roots"] {
            let directory = from.join(sub);
            if directory.symlink_metadata().is_err() {
                continue;
            }
            need_directory(&directory)?;
            for entry in fs::read_dir(&directory)? {
                let made = entry?.path();
                let name = made.file_name().unwrap_or_default().to_string_lossy().into_owned();
                match pin(sub, &name) {
                    Ok(pin) => {
                        need_directory(&made)?;
                        taken.things.push((made, Path::new(sub).join(name), pin));
                    }
                    Err(why) => {
                        let name = workshop::printable(&name);
                        taken.left_out.push(format!("{sub}/{name} is left out: {why}"));
                    }
                }
            }
        }
        for (made, place, pin) in &taken.things {
            seal::check(made, pin.as_deref()).with_context(|| {
                format!(
                    "{} in it is damaged or changed: copy it again, or make a new one with \
                     `cargo vm bundle` of this version",
                    place.display()
                )
            })?;
        }
        Ok(taken)
    }

    /// Moves all to its place. What depmod wrote is no file of a package, so it is written anew.
    fn put(&self, cache: &Cache) -> Result<()> {
        for (made, place, pin) in &self.things {
            if place.starts_with("kernels") {
                let kernel = Kernel::at(made)?;
                let modules = kernel.modules.canonicalize()?;
                ensure!(
                    modules.starts_with(made.canonicalize()?),
                    "the modules of {} in it are a link to {}",
                    place.display(),
                    modules.display()
                );
                kernel.depmod()?;
            }
            cache.keep(made, &cache.path(place), pin.as_deref())?;
        }
        Ok(())
    }

    /// Says what is not taken, and for what nobody but the maker of the bundle vouches.
    fn describe(&self) {
        self.left_out.iter().for_each(|what| say!("{what}"));
        let unpinned = self.things.iter().filter(|(_, _, pin)| pin.is_none());
        let names: Vec<_> = unpinned.map(|(_, place, _)| place.display().to_string()).collect();
        if !names.is_empty() {
            say!(
                "not pinned: {}. Only the maker of the file vouches for what is in there: compare the \
                 file's SHA-256 with theirs",
                names.join(", ")
            );
        }
    }
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

    /// A kernel with its list, as it lies in a cache. Returns the checksum of its files.
    fn kernel(dir: &Path, image: &str) -> String {
        // It has directories with the names of what is left out at the top.
        fs::create_dir_all(dir.join("lib/modules/6.1/kernel/target/vendor")).unwrap();
        fs::create_dir_all(dir.join("boot")).unwrap();
        fs::write(dir.join("boot/vmlinuz-6.1"), image).unwrap();
        seal::seal(dir).digest()
    }

    #[test]
    fn a_bundle_is_installed_again() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(&temp.path().join("cache")).unwrap();
        let kernels = ["6.1-0a", "6.1-rt-0b", "6.12-0c"];
        for time in ["first", "second"] {
            let from = temp.path().join(time);
            for name in kernels.into_iter().chain(["6.1-0d.old"]) {
                kernel(&from.join("kernels").join(name), time);
            }
            kernel(&from.join("roots/arm64-0a"), time);
            let pin = |_: &str, name: &str| match kernels.contains(&name) {
                true => Ok(None),
                false => Err("why".to_owned()),
            };
            let taken = Taken::of(&from, pin).unwrap();
            taken.put(&cache).unwrap();
            let wanted = ["kernels/6.1-0d.old is left out: why", "roots/arm64-0a is left out: why"];
            assert_eq!(taken.left_out, wanted);
        }
        let mut here: Vec<_> =
            fs::read_dir(cache.path("kernels")).unwrap().map(|e| e.unwrap().file_name()).collect();
        here.sort();
        assert_eq!(here, kernels);
        for kernel in kernels {
            let place = cache.path("kernels").join(kernel);
            assert!(cache.check(&place, None).unwrap());
            assert_eq!(fs::read_to_string(place.join("boot/vmlinuz-6.1")).unwrap(), "second");
            assert!(place.join("lib/modules/6.1/modules.dep").is_file());
        }
    }

    const IMAGE: &str = "kernels/6.1-0a/boot/vmlinuz-6.1";

    /// Name, script that makes it, and how many kernels are taken of it or why none is.
    type Way = (&'static str, String, Result<usize, &'static str>);

    /// Archives that would move files of the user whose directory this is, leave something in the cache that
    /// is none of ours, or bring another kernel than the pinned one. Returns the checksum of that, too.
    fn hostile(temp: &Path, users: &Path) -> (String, Vec<Way>) {
        let [real, other, link] = ["real", "other", "link"].map(|name| temp.join(name));
        let pin = kernel(&real, "theirs");
        kernel(&other, "changed, and its list as well");
        kernel(&link, "theirs");
        fs::remove_dir_all(link.join("lib")).unwrap();
        std::os::unix::fs::symlink(users, link.join("lib")).unwrap();
        seal::seal(&link);
        let copy =
            |kernel: &Path| format!("mkdir kernels; cp -a {} kernels/6.1-0a", kernel.display());
        let (real, other, link) = (copy(&real), copy(&other), copy(&link));
        let users = users.display();
        let damaged = Err("kernels/6.1-0a in it is damaged or changed");
        let extra = format!("{real}; echo >kernels/6.1-0a/lib/modules/6.1/evil.ko");
        let elsewhere = Err("the modules of kernels/7-0a in it are a link to");
        let linked = Err("6.1-0a in it is no directory");
        let ways = vec![
            ("a link", format!("ln -s {users} kernels"), Err("kernels in it is no directory")),
            ("a link to a kernel", format!("mkdir kernels; ln -s {users} kernels/6.1-0a"), linked),
            ("a file", "echo no >roots".into(), Err("roots in it is no directory")),
            ("a hard link", format!("{real}; ln {users}/file kernels/x"), Ok(1)),
            ("another name", "mkdir -p kernels/tmp kernels/..6.1-0a".into(), Ok(0)),
            ("a mode", format!("{real}; chmod 6666 {IMAGE}"), Ok(1)),
            ("a changed image", format!("{real}; echo changed >{IMAGE}"), damaged),
            ("a file more", extra, damaged),
            ("no list", format!("{real}; rm kernels/6.1-0a/manifest"), damaged),
            ("a changed list", other, damaged),
            ("pinned modules elsewhere", link.clone(), damaged),
            ("modules elsewhere", format!("{link}; mv kernels/6.1-0a kernels/7-0a"), elsewhere),
        ];
        (pin, ways)
    }

    #[test]
    fn a_hostile_bundle_moves_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let users = temp.path().join("users");
        fs::create_dir_all(users.join("modules/6.1/kernel")).unwrap();
        fs::write(users.join("file"), "mine").unwrap();
        let (pinned, ways) = hostile(temp.path(), &users);
        for (name, make, taken) in ways {
            let place = temp.path().join(name.replace(' ', "-"));
            let made = place.join("made");
            fs::create_dir_all(&made).unwrap();
            let bundle = place.join("bundle.tar");
            let pack = format!("mkdir vendor target; tar -cf {} -- *", bundle.display());
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", &format!("set -e; {make}; {pack}")]).current_dir(&made);
            assert!(shell.status().unwrap().success(), "{name}");
            let (cache, into) = (Cache::at(&place.join("cache")).unwrap(), place.join("into"));
            fs::create_dir(&into).unwrap();
            unpack(&bundle, &into).unwrap();
            assert!(!into.join("vendor").exists() && !into.join("target").exists());
            let pin = |sub: &str, name: &str| match (sub, name) {
                ("kernels", "6.1-0a") => Ok(Some(pinned.clone())),
                ("kernels", "7-0a") => Ok(None),
                _ => Err("no such kernel".to_owned()),
            };
            let put = Taken::of(&into, pin).and_then(|taken| taken.put(&cache));
            match (put, taken) {
                (Err(error), Err(why)) => assert!(error.to_string().starts_with(why), "{error:#}"),
                (put, Ok(_)) => put.unwrap(),
                (put, Err(why)) => panic!("{name}: {put:?}, not {why}"),
            }
            let here: Vec<_> = fs::read_dir(cache.path("kernels")).into_iter().flatten().collect();
            assert_eq!(here.len(), taken.unwrap_or(0), "{name}");
            if let Ok(meta) = cache.path(IMAGE).metadata() {
                use std::os::unix::fs::PermissionsExt;
                assert_eq!(meta.permissions().mode() & 0o7022, 0, "{name}: a mode of the archive");
            }
            assert_eq!(fs::read_to_string(users.join("file")).unwrap(), "mine", "{name}");
            assert_eq!(fs::read_dir(users.join("modules/6.1")).unwrap().count(), 1, "{name}");
        }
    }

    /// Names that lead out of the directory are tar's to refuse.
    #[test]
    fn nothing_is_unpacked_elsewhere() {
        let temp = tempfile::tempdir().unwrap();
        let place = temp.path();
        fs::create_dir_all(place.join("into/deep")).unwrap();
        fs::write(place.join("x"), "x").unwrap();
        for transform in ["s,x,../escaped,", "s,x,/proc/escaped,"] {
            let bundle = place.join("names.tar");
            let mut tar = std::process::Command::new("tar");
            tar.arg("-Pcf").arg(&bundle).arg(format!("--transform={transform}")).arg("x");
            assert!(tar.current_dir(place).status().unwrap().success());
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
