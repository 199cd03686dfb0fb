//! The guest's root where this machine's does not do: packages of Debian, pinned by checksum, unpacked
//! into the cache. Nothing of them runs here.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use host::fail::{USAGE, fail};
use host::say;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::arch;
use crate::setup::apt;
use crate::setup::cache::{self, Cache, Note, tool};
use crate::setup::kernels::{Changes, Gone, Kernel, Line, Package, hex, is_locked};
use crate::setup::suite::{Archives, Suite};

/// A root that is made of pinned packages.
pub struct Root {
    /// Its name in the cache.
    name: &'static str,
    /// Debian's name of its architecture.
    arch: &'static str,
    /// What it is, in a message.
    what: &'static str,
    /// The file with the pinned packages, and its text.
    file: &'static str,
    text: &'static str,
}

/// The root of guests of another architecture.
static ARM64: Root = Root {
    name: "arm64",
    arch: "arm64",
    what: "the root of arm64 guests",
    file: "vm/root-arm64.toml",
    text: include_str!("../../root-arm64.toml"),
};
/// What `cargo vm truth` compares with: Debian sid's tracers.
static SID: Root = Root {
    name: "sid",
    arch: "amd64",
    what: "the root with Debian sid's tracers",
    file: "vm/root-sid.toml",
    text: include_str!("../../root-sid.toml"),
};
/// And Debian 12's.
static BOOKWORM: Root = Root {
    name: "bookworm",
    arch: "amd64",
    what: "the root with Debian 12's tracers",
    file: "vm/root-bookworm.toml",
    text: include_str!("../../root-bookworm.toml"),
};
/// The kernels' headers, by line.
const HEADERS: [(&str, Root); 3] = [
    (
        "6.1",
        Root {
            name: "headers-6.1",
            arch: "amd64",
            what: "the headers of 6.1",
            file: "vm/headers-6.1.toml",
            text: include_str!("../../headers-6.1.toml"),
        },
    ),
    (
        "6.12",
        Root {
            name: "headers-6.12",
            arch: "amd64",
            what: "the headers of 6.12",
            file: "vm/headers-6.12.toml",
            text: include_str!("../../headers-6.12.toml"),
        },
    ),
    (
        "7.2",
        Root {
            name: "headers-7.2",
            arch: "amd64",
            what: "the headers of 7.2",
            file: "vm/headers-7.2.toml",
            text: include_str!("../../headers-7.2.toml"),
        },
    ),
];

/// What the packages with a kernel's headers are called before its release.
const HEADERS_OF: &str = "linux-headers-";

/// The root of a kernel line's headers. None where none are pinned, and where the kernel in use is not
/// the one that they belong to: what is compiled with them would read that kernel's memory wrongly.
pub fn headers(line: &str, cache: &Cache) -> Result<Option<PathBuf>> {
    let Some((_, root)) = HEADERS.iter().find(|(name, _)| *name == line) else {
        say!("there are no headers of {line} for bcc's tools: these are not compared");
        return Ok(None);
    };
    let kernel = Kernel::named(line, cache)?;
    if let Err(why) = root.fit(&kernel.release) {
        say!("{why}");
        return Ok(None);
    }
    root.place(cache).map(Some)
}

/// The root with tracers that `truth/tools.toml` names.
pub fn of_tracers(name: &str) -> Result<&'static Root> {
    let found = [&SID, &BOOKWORM].into_iter().find(|root| root.name == name);
    found.with_context(|| format!("truth/tools.toml: there is no root {name}"))
}

/// What stands before their list in it.
const LIST: &str = "packages = '''\n";
/// Free megabytes that fetching and unpacking them may take.
const ROOT_MB: u64 = 600;
/// What of a package no guest reads.
const LEFT_OUT: [&str; 4] = ["doc/*", "info/*", "locale/*", "man/*"];
/// A merged /usr, as Debian has it; packages of that release still name both.
const MERGED: [&str; 3] = ["bin", "lib", "sbin"];
/// What the packages' scripts would have made, which do not run: links, and copies.
const LINKS: [(&str, &str); 3] =
    [("usr/bin/awk", "mawk"), ("usr/bin/sh", "dash"), ("etc/mtab", "../proc/self/mounts")];
const COPIES: [(&str, &str); 2] = [
    ("usr/share/base-passwd/passwd.master", "etc/passwd"),
    ("usr/share/base-passwd/group.master", "etc/group"),
];

/// The pinned packages.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pins {
    /// Their suite.
    suite: String,
    /// The packages that are wanted; the others are what these depend on.
    wanted: Vec<String>,
    /// All of them, a line each: checksum, size, path in the archive.
    packages: String,
}

impl Root {
    /// The releases that its headers belong to, by the packages' names.
    fn releases<'a>(&self, pins: &'a Pins) -> impl Iterator<Item = &'a str> {
        pins.wanted.iter().filter_map(|name| name.strip_prefix(HEADERS_OF))
    }

    /// An error where its headers are not those of the kernel with this release.
    fn fit(&self, release: &str) -> Result<()> {
        let pins = self.pins()?;
        let mut releases = self.releases(&pins);
        let own = self.releases(&pins).next().unwrap_or_default();
        ensure!(
            releases.any(|one| one == release),
            "bcc's headers are those of {own}, the kernel is {release}: bcc's tools are not compared"
        );
        Ok(())
    }

    fn pins(&self) -> Result<Pins> {
        toml::from_str(self.text).context(self.file)
    }

    fn packages(&self, list: &str) -> Result<Vec<Package>> {
        let package = |line: &str| {
            let mut words = line.split(' ');
            let (sha256, size, path) = (words.next()?, words.next()?, words.next()?);
            Some(Package {
                name: path.rsplit('/').next()?.split('_').next()?.to_owned(),
                arch: self.arch.to_owned(),
                path: path.to_owned(),
                size: size.parse().ok()?,
                sha256: sha256.to_owned(),
            })
        };
        list.lines()
            .map(|line| package(line).with_context(|| format!("{}: {line}", self.file)))
            .collect()
    }

    /// Where the root of these packages lies. Others are another directory.
    fn dir(&self, list: &str, cache: &Cache) -> PathBuf {
        let mut hash = Sha256::new_with_prefix(list);
        hash.update(format!("{LEFT_OUT:?} {LINKS:?} {COPIES:?}"));
        cache.path(format!("roots/{}-{}", self.name, &hex(&hash.finalize())[..12]))
    }

    /// The note in the cache of the packages that take the pinned ones' place.
    fn note(&self, pins: &Pins, cache: &Cache) -> Note {
        Note::of(&self.dir(&pins.packages, cache))
    }

    /// Where the cache has it: as it is pinned, or what takes its place.
    fn here(
        &self,
        pins: &Pins,
        locked: bool,
        mirror: Option<&str>,
        cache: &Cache,
    ) -> Option<PathBuf> {
        let pinned = self.dir(&pins.packages, cache);
        if pinned.is_dir() {
            return Some(pinned);
        }
        let moved = if locked { None } else { self.note(pins, cache).read(mirror) };
        moved.map(|list| self.dir(&list, cache)).filter(|moved| moved.is_dir())
    }

    /// Where it lies in the cache; made where it is missing.
    pub fn place(&self, cache: &Cache) -> Result<PathBuf> {
        self.place_from(cache, is_locked(), apt::mirror().as_deref(), Archives::here)
    }

    fn place_from(
        &self,
        cache: &Cache,
        locked: bool,
        mirror: Option<&str>,
        archives: impl FnOnce() -> Result<Archives>,
    ) -> Result<PathBuf> {
        let pins = self.pins()?;
        let mut here = self.here(&pins, locked, mirror, cache);
        if here.is_none() {
            let _lock = cache.lock()?;
            here = self.here(&pins, locked, mirror, cache);
            if here.is_none() {
                here = Some(self.fetch(&pins, locked, mirror, &archives()?, cache)?);
            }
        }
        let place = here.context("no root")?;
        if place != self.dir(&pins.packages, cache) {
            self.say_once();
        }
        Ok(place)
    }

    /// Says that other packages take the place of the pinned ones.
    fn say_once(&self) {
        static SAID: Mutex<Vec<&str>> = Mutex::new(Vec::new());
        let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
        if !said.contains(&self.name) {
            said.push(self.name);
            say!(
                "{}: packages are gone from the archive as they are pinned; using the newest, not \
                 tested by us; `cargo vm repin` pins them",
                self.what
            );
        }
    }
}

/// The root for guests of another architecture than this machine's, from the cache; made where it is
/// missing. None where the guest has this machine's own root.
pub fn get(cache: &Cache) -> Result<Option<PathBuf>> {
    if !arch::is_foreign() {
        return Ok(None);
    }
    ARM64.place(cache).map(Some)
}

/// Where it lies, and whether it is there.
pub fn state(cache: &Cache) -> Result<(PathBuf, bool)> {
    let pins = ARM64.pins()?;
    let here = ARM64.here(&pins, is_locked(), None, cache);
    let is_here = here.is_some();
    Ok((here.unwrap_or_else(|| ARM64.dir(&pins.packages, cache)), is_here))
}

/// All that the cache has to have of it, for another machine: where it is not the pinned one, the note
/// that says so, too.
pub fn places(cache: &Cache) -> Result<Vec<PathBuf>> {
    let mut places = Vec::from_iter(get(cache)?);
    let pins = ARM64.pins()?;
    if places.iter().any(|place| *place != ARM64.dir(&pins.packages, cache)) {
        places.push(ARM64.note(&pins, cache).path().to_owned());
    }
    Ok(places)
}

/// A directory that `--root` names: one with a root of the guest's architecture in it.
pub fn named(dir: &Path) -> Result<PathBuf> {
    let found = dir.canonicalize().ok().filter(|dir| dir.join("usr/bin").is_dir());
    found.with_context(|| format!("{} holds no root of a Linux system", dir.display())).map_err(
        |error| fail(USAGE, format!("{error}: there is no usr/bin in it. debootstrap makes one")),
    )
}

impl Root {
    /// Makes it of the pinned packages. Where one of them is gone: of the newest ones, all of them, as a
    /// new version may depend on what the others do not have. Returns where it lies.
    fn fetch(
        &self,
        pins: &Pins,
        locked: bool,
        mirror: Option<&str>,
        archives: &Archives,
        cache: &Cache,
    ) -> Result<PathBuf> {
        let note = self.note(pins, cache);
        let moved = if locked { None } else { note.read(mirror) };
        let list = moved.as_ref().unwrap_or(&pins.packages);
        let gone = match self.make(&pins.suite, list, archives, cache) {
            Err(gone) if gone.is::<Gone>() && !locked => gone,
            result => return result,
        };
        let newest = archives.find(&pins.suite, self.arch, cache, |index| self.newest(pins, index));
        let list = listed(&newest.with_context(|| {
            format!("{gone}\nThe newest packages cannot be taken in their place")
        })?);
        let place = self.make(&pins.suite, &list, archives, cache)?;
        note.write(&archives.roots, &list)?;
        Ok(place)
    }

    /// The newest packages of an index, in the order of their names.
    fn newest(&self, pins: &Pins, index: &Suite) -> Result<Vec<Package>> {
        let mut packages = if self.releases(pins).next().is_some() {
            // A kernel's headers are unpacked without the compiler that they depend on.
            let names: Vec<&str> = pins.wanted.iter().map(String::as_str).collect();
            index.packages(&names)?.into_iter().map(|(package, _)| package).collect()
        } else {
            index.with_dependencies(&pins.wanted)?
        };
        packages.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(packages)
    }

    /// Fetches and unpacks these packages. Returns where they lie.
    fn make(&self, suite: &str, list: &str, archives: &Archives, cache: &Cache) -> Result<PathBuf> {
        let place = self.dir(list, cache);
        let packages = self.packages(list)?;
        cache.need_space(ROOT_MB, self.what)?;
        let temp = cache.temp_dir()?;
        let root = temp.path().join("root");
        for dir in MERGED {
            fs::create_dir_all(root.join("usr").join(dir))?;
            symlink(Path::new("usr").join(dir), root.join(dir))?;
        }
        let megabytes =
            packages.iter().map(|package| package.size).sum::<u64>().div_ceil(1_000_000);
        say!(
            "fetching {}: {} packages of Debian {suite} ({megabytes} MB)",
            self.what,
            packages.len()
        );
        for package in &packages {
            let deb = temp.path().join("package.deb");
            if let Err(refused) = package.fetch(&archives.roots, &deb)? {
                let why = format!(
                    "{}: {} cannot be fetched:\n  {}\n",
                    self.what, package.name, refused.why
                );
                let mirror = format!(
                    "set VM_MIRROR to the root of a Debian archive that has the suite {suite}"
                );
                ensure!(
                    refused.is_gone,
                    "{why}This may pass, so no other package takes its place: try again when the \
                     network and the archive answer, or {mirror}"
                );
                let gone = format!(
                    "{why}The archive does not have this file: {mirror}, or pin the newest packages: \
                     `cargo vm repin`"
                );
                return Err(Gone(gone).into());
            }
            unpack(&deb, &root).with_context(|| format!("cannot unpack {}", package.name))?;
        }
        complete(&root)?;
        cache::put(&root, &place)?;
        Ok(place)
    }
}

/// Unpacks a package through the links that lie in the root already.
fn unpack(deb: &Path, root: &Path) -> Result<()> {
    let mut files = Command::new(tool("dpkg-deb")?);
    let mut files = files.arg("--fsys-tarfile").arg(deb).stdout(Stdio::piped()).spawn()?;
    let mut tar = Command::new(tool("tar")?);
    tar.args(["--extract", "--keep-directory-symlink", "--no-same-owner", "--directory"]).arg(root);
    tar.args(LEFT_OUT.map(|part| format!("--exclude=./usr/share/{part}")));
    let output = tar.stdin(files.stdout.take().context("no pipe")?).output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(!why.contains("No space left"), cache::no_space(root, why.trim()));
    ensure!(files.wait()?.success() && output.status.success(), "{}", why.trim());
    Ok(())
}

/// Makes what the packages' scripts would have made.
fn complete(root: &Path) -> Result<()> {
    if !root.join("etc").is_dir() {
        return Ok(()); // a kernel's headers are no system
    }
    for (link, to) in LINKS {
        if root.join(link).symlink_metadata().is_err() {
            symlink(to, root.join(link)).context(link)?;
        }
    }
    for (from, to) in COPIES {
        fs::copy(root.join(from), root.join(to)).context(to)?;
    }
    Ok(())
}

/// Writes a script that calls the cross compiler with this root's headers and libraries: those of this
/// machine's own cross compiler, where it has any, may be too new for the guest. Returns its path.
pub fn compiler(root: &Path) -> Result<PathBuf> {
    let file = root.with_extension("cc");
    let gnu = arch::guest().gnu();
    let quoted = root.to_str().filter(|root| !root.contains('\''));
    let root = quoted.with_context(|| format!("{} cannot be quoted", root.display()))?;
    let lib = format!("{root}/usr/lib/{gnu}");
    let include = format!("{root}/usr/include");
    let text = format!(
        "#!/bin/sh\nexec {gnu}-gcc --sysroot='{root}' -B'{lib}' -isystem '{include}/{gnu}' \
         -isystem '{include}' \"$@\" -L'{lib}'\n"
    );
    if fs::read_to_string(&file).is_ok_and(|old| old == text) {
        return Ok(file);
    }
    let made = tempfile::NamedTempFile::new_in(file.parent().context("no directory")?)?;
    cache::write(made.path(), text.as_bytes())?;
    fs::set_permissions(made.path(), fs::Permissions::from_mode(0o755))?;
    made.persist(&file).with_context(|| format!("cannot write {}", file.display()))?;
    Ok(file)
}

/// Finds the newest version of each package, and of all that they depend on now, to pin them.
pub fn repin(
    workspace: &Path,
    archives: &Archives,
    cache: &Cache,
    changes: &mut Changes,
) -> Result<()> {
    for root in [&ARM64, &SID, &BOOKWORM] {
        let file = workspace.join(root.file);
        let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let pins: Pins = toml::from_str(&text).context(root.file)?;
        let find = |index: &Suite| root.newest(&pins, index);
        let packages = archives.find(&pins.suite, root.arch, cache, find)?;
        let head = text.split_once(LIST).map(|(head, _)| head);
        let head = head.with_context(|| format!("{}: no packages", root.file))?;
        let list = listed(&packages);
        if list == pins.packages {
            let said = format!("{}: its {} packages are the newest", root.what, packages.len());
            changes.said.push(said);
            continue;
        }
        changes.said.push(format!("{}: {} packages are pinned", root.what, packages.len()));
        changes.files.push((file, format!("{head}{LIST}{list}'''\n")));
    }
    Ok(())
}

/// Finds a line's headers, of the version that the line is to have, to pin them.
pub fn repin_headers(
    workspace: &Path,
    line: &Line,
    archives: &Archives,
    cache: &Cache,
    changes: &mut Changes,
) -> Result<()> {
    let Some((_, root)) = HEADERS.iter().find(|(name, _)| *name == line.name) else {
        return Ok(());
    };
    let file = workspace.join(root.file);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let pins: Pins = toml::from_str(&text).context(root.file)?;
    let arch = format!("-{}", root.arch);
    let old = root.releases(&pins).find_map(|release| release.strip_suffix(&arch));
    let old = old.with_context(|| format!("{}: no package for {}", root.file, root.arch))?;
    let wanted: Vec<String> =
        pins.wanted.iter().map(|name| name.replace(old, &line.release)).collect();
    let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
    let packages = archives.find(&pins.suite, root.arch, cache, |index| {
        let found = index.packages(&names)?;
        ensure!(
            found.len() == names.len() && found.iter().all(|(_, version)| *version == line.version),
            "the archive does not have {} {} yet, of {}. Nothing is written; try again in some hours",
            root.what,
            line.version,
            names.join(", ")
        );
        Ok(found.into_iter().map(|(package, _)| package).collect::<Vec<_>>())
    })?;
    let (head, _) = text.split_once(LIST).with_context(|| format!("{}: no packages", root.file))?;
    let new = format!("{}{LIST}{}'''\n", head.replace(old, &line.release), listed(&packages));
    if new != text {
        changes.said.push(format!("{} are those of {}", root.what, line.release));
        changes.files.push((file, new));
    }
    Ok(())
}

/// Packages as they are pinned, a line each.
fn listed(packages: &[Package]) -> String {
    packages.iter().map(|p| format!("{} {} {}\n", p.sha256, p.size, p.path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::kernels::{Table, sha256};
    use crate::setup::suite::tests::Archive;

    #[test]
    fn the_list_is_complete() {
        let complete = |root: &Root| {
            let pins = root.pins().unwrap();
            let packages = root.packages(&pins.packages).unwrap();
            for package in &packages {
                assert_eq!(package.sha256.len(), 64, "{}", package.name);
                let path = &package.path;
                assert!(path.starts_with("pool/main/"), "{path}");
                let arch = format!("_{}.deb", root.arch);
                assert!(path.ends_with(&arch) || path.ends_with("_all.deb"), "{path}");
            }
            let has = |name: &String| packages.iter().any(|package| package.name == *name);
            assert!(pins.wanted.iter().all(has), "{}", root.file);
            packages
        };
        for root in [&SID, &BOOKWORM].into_iter().chain(HEADERS.iter().map(|(_, root)| root)) {
            complete(root);
        }
        let packages = complete(&ARM64);
        let has = |name: &String| packages.iter().any(|package| package.name == *name);
        // What links the programs, and what their guest tests find on this machine otherwise.
        for name in ["libc6-dev", "libelf-dev", "zlib1g-dev", "fio", "strace", "btrfs-progs"] {
            assert!(has(&name.to_owned()), "{name}");
        }
    }

    #[test]
    fn a_root_of_other_packages_is_not_taken_for_the_pinned_one() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(&temp.path().join("cache")).unwrap();
        let archive = Archive::new();
        archive.pack("tool_1_amd64", &[("usr/bin/tool", "old")]);
        archive.pack("tool", &[("usr/bin/tool", "new")]);
        archive.pack("part", &[("usr/bin/part", "new")]);
        archive.carries(&[]);
        let pinned = archive.pool().join("tool_1_amd64.deb");
        let text = format!(
            "suite = \"moving\"\nwanted = [\"tool\"]\npackages = '''\n{} 1 pool/tool_1_amd64.deb\n'''\n",
            sha256(&pinned).unwrap()
        );
        let root = Root {
            name: "test",
            arch: "amd64",
            what: "the root of a test",
            file: "vm/root-test.toml",
            text: text.leak(),
        };
        let pins = root.pins().unwrap();
        let as_pinned = root.dir(&pins.packages, &cache);
        let note = root.note(&pins, &cache).path().to_owned();
        let get =
            |locked, mirror| root.place_from(&cache, locked, mirror, || Ok(archive.archives()));
        let no_network = || -> Result<Archives> { anyhow::bail!("no network") };
        let read = |place: &Path| fs::read_to_string(place.join("usr/bin/tool")).unwrap();

        assert_eq!(get(true, None).unwrap(), as_pinned);
        assert_eq!(read(&as_pinned), "old");
        fs::remove_dir_all(&as_pinned).unwrap();

        // An archive does not have it any more, and another one does not answer; it is alone.
        let kept = temp.path().join("kept.deb");
        fs::rename(&pinned, &kept).unwrap();
        let down = [archive.archives().roots, vec!["http://127.0.0.1:9".to_owned()]].concat();
        let down = || Ok(Archives { roots: down, ..archive.archives() });
        let error = root.place_from(&cache, false, None, down).unwrap_err();
        assert!(!error.is::<Gone>(), "{error}");
        assert!(get(true, None).unwrap_err().is::<Gone>());
        assert!(!as_pinned.exists() && !note.exists());
        let other = get(false, None).unwrap();
        assert_ne!(other, as_pinned);
        assert_eq!(read(&other), "new");
        assert!(other.join("usr/bin/part").exists(), "what the new version depends on");
        assert!(!as_pinned.exists() && note.exists());

        // That is remembered, and it is not what is pinned.
        assert_eq!(root.place_from(&cache, false, None, no_network).unwrap(), other);
        assert!(root.place_from(&cache, true, None, no_network).is_err());
        fs::rename(&kept, &pinned).unwrap();
        assert_eq!(get(false, Some("http://other")).unwrap(), as_pinned);
        assert_eq!(root.place_from(&cache, true, None, no_network).unwrap(), as_pinned);
    }

    #[test]
    fn headers_belong_to_one_kernel() {
        let table = Table::load().unwrap();
        for (name, root) in &HEADERS {
            let release = &table.line(name).unwrap().release;
            root.fit(&format!("{release}-amd64")).unwrap();
        }
        let error = HEADERS[0].1.fit("6.1.0-99-amd64").unwrap_err().to_string();
        assert!(error.starts_with("bcc's headers are those of 6.1.0-"), "{error}");
        assert!(
            error.ends_with("the kernel is 6.1.0-99-amd64: bcc's tools are not compared"),
            "{error}"
        );
    }

    #[test]
    fn a_root_is_a_system() {
        let dir = tempfile::tempdir().unwrap();
        let error = named(dir.path()).unwrap_err();
        assert_eq!(error.downcast_ref::<host::fail::Fail>().unwrap().code, USAGE);
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        assert!(named(dir.path()).is_ok());
    }
}
