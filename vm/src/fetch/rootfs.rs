//! The guest's root file system where this machine's does not do: packages of Debian, unpacked into the
//! cache. Nothing of them runs here.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use workshop::fail::{USAGE, fail};
use workshop::say;

use crate::arch::Arch;
use crate::fetch::apt::Source;
use crate::fetch::cache::{self, Cache, find_tool, hex, unpack_all};
use crate::fetch::index::Index;
use crate::fetch::table::Line;

/// Free megabytes that fetching and unpacking them may take.
const ROOTFS_MB: u64 = 600;
/// What of a package no guest reads.
const LEFT_OUT: [&str; 4] =
    ["./usr/share/doc/*", "./usr/share/info/*", "./usr/share/locale/*", "./usr/share/man/*"];
/// A merged /usr, as Debian has it; packages of that release still name both.
const MERGED: [&str; 3] = ["bin", "lib", "sbin"];
/// What the packages' scripts would have made, which do not run: links, and copies.
const LINKS: [(&str, &str); 3] =
    [("usr/bin/awk", "mawk"), ("usr/bin/sh", "dash"), ("etc/mtab", "../proc/self/mounts")];
const COPIES: [(&str, &str); 2] = [
    ("usr/share/base-passwd/passwd.master", "etc/passwd"),
    ("usr/share/base-passwd/group.master", "etc/group"),
];
/// The file in it that lists its packages, a name and a version each.
const PACKAGES: &str = "packages";

/// A root file system that is made of a suite's newest packages.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rootfs {
    what: String,
    name: String,
    suite: String,
    /// Debian's name of its architecture.
    arch: String,
    /// The packages that are wanted; apt adds what these depend on.
    wanted: Vec<String>,
}

impl Rootfs {
    /// As a file describes it.
    pub fn parse(text: &str) -> Result<Rootfs> {
        toml::from_str(text).context("cannot read what a root file system consists of")
    }

    /// That of guests of another architecture.
    pub fn arm64() -> Result<Rootfs> {
        Rootfs::parse(include_str!("../../rootfs-arm64.toml")).context("vm/rootfs-arm64.toml")
    }

    /// That of the newest tracers, which `cargo truth` and `cargo vm bench` run.
    pub fn sid() -> Result<Rootfs> {
        Rootfs::parse(include_str!("../../../truth/rootfs-sid.toml"))
            .context("truth/rootfs-sid.toml")
    }

    /// Where it lies in the cache. One of other packages is another directory.
    pub fn place(&self, cache: &Cache) -> PathBuf {
        let hash = Sha256::new_with_prefix(format!(
            "{} {:?} {LEFT_OUT:?} {LINKS:?} {COPIES:?}",
            self.suite, self.wanted
        ));
        cache.path(format!("roots/{}-{}", self.name, &hex(&hash.finalize())[..12]))
    }

    /// Removes it from the cache: it is made of what is the newest then.
    pub fn remove(&self, cache: &Cache) -> Result<()> {
        let _lock = cache.lock()?;
        let place = self.place(cache);
        let removed = if place.is_dir() { fs::remove_dir_all(&place) } else { Ok(()) };
        removed.with_context(|| format!("cannot remove {}", place.display()))
    }

    /// Where it lies, made of the newest packages where it is missing.
    pub fn get(&self, source: &Source, cache: &Cache) -> Result<PathBuf> {
        let place = self.place(cache);
        let here = || cache.check(&place, None).is_ok_and(|here| here).then(|| place.clone());
        cache.once((&self.what, ROOTFS_MB), here, |temp| {
            cache.say_damage(&self.what, &place, None);
            say!("making {}", self.what);
            let index = Index::from_archives(source, &self.suite, &self.arch, temp)?;
            let packages = index.with_dependencies(&self.wanted)?;
            let names: Vec<String> = packages.iter().map(|(name, _)| name.clone()).collect();
            index.download(&names, temp)?;
            let root = merged(temp)?;
            let list = packages.iter().map(|(name, version)| format!("{name} {version}\n"));
            cache::write(&root.join(PACKAGES), list.collect::<String>().as_bytes())?;
            finish(temp, cache, &place)
        })
    }
}

/// The version of a package in a root file system that [`Rootfs::get`] has made.
pub fn version(rootfs: &Path, package: &str) -> Option<String> {
    let text = fs::read_to_string(rootfs.join(PACKAGES)).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(name, _)| *name == package).map(|(_, version)| version.to_owned())
}

/// The headers of a line's kernel, in the cache: what is compiled with those of another release would read
/// that kernel's memory wrongly. None where the suite does not have them.
pub fn headers(
    line: &Line,
    release: &str,
    source: &Source,
    cache: &Cache,
) -> Result<Option<PathBuf>> {
    let place = cache.path(format!("roots/headers-{release}"));
    let what = format!("the headers of {release}");
    let here = || cache.check(&place, None).is_ok_and(|here| here).then(|| Some(place.clone()));
    cache.once((&what, ROOTFS_MB), here, |temp| {
        cache.say_damage(&what, &place, None);
        let index = line.index(source, temp)?;
        let Some(names) = line.headers(release, &index)? else {
            say!("{} has no {what}, which bcc's tools need: these are not compared", line.suite);
            return Ok(None);
        };
        say!("making {what}");
        index.download(&names, temp)?;
        merged(temp)?;
        finish(temp, cache, &place).map(Some)
    })
}

/// Makes `root` there, in which /lib is /usr/lib, as all that use it expect; older suites have both.
fn merged(temp: &Path) -> Result<PathBuf> {
    let root = temp.join("root");
    for dir in MERGED {
        fs::create_dir_all(root.join("usr").join(dir))?;
        symlink(Path::new("usr").join(dir), root.join(dir))?;
    }
    Ok(root)
}

/// Unpacks the packages in a temporary directory to `root` there, and puts that into its place.
fn finish(temp: &Path, cache: &Cache, place: &Path) -> Result<PathBuf> {
    let root = temp.join("root");
    unpack_all(temp, &root, &LEFT_OUT)?;
    if root.join("etc").is_dir() {
        for (link, to) in LINKS {
            if root.join(link).symlink_metadata().is_err() {
                symlink(to, root.join(link)).context(link)?;
            }
        }
        for (from, to) in COPIES {
            fs::copy(root.join(from), root.join(to)).context(to)?;
        }
    }
    cache.keep(&root, place, None)?;
    Ok(place.to_owned())
}

/// A directory that `--rootfs` names: one with a system of the guest's architecture in it.
pub fn named(dir: &Path) -> Result<PathBuf> {
    let found = dir.canonicalize().ok().filter(|dir| dir.join("usr/bin").is_dir());
    found.ok_or_else(|| {
        let what = format!("{} holds no root of a Linux system", dir.display());
        fail(USAGE, format!("{what}: there is no usr/bin in it. debootstrap makes one"))
    })
}

/// The name of gcc, or of another tool that builds for an architecture which is not this machine's:
/// Debian's, Fedora's and Arch's; or openSUSE's, whose gcc has its version at the end.
pub fn cross_tool(arch: Arch, tool: &str) -> String {
    named_tool(arch, tool, |name| find_tool(name).is_some())
}

fn named_tool(arch: Arch, tool: &str, is_here: impl Fn(&str) -> bool) -> String {
    let machine = arch.gnu().split('-').next().unwrap_or_default();
    let usual = format!("{machine}-linux-gnu-{tool}");
    let suse = format!("{machine}-suse-linux-{tool}");
    let versions = (10..30).rev().map(|version| format!("{suse}-{version}"));
    let mut names = [usual.clone(), suse.clone()].into_iter().chain(versions);
    names.find(|name| is_here(name)).unwrap_or(usual)
}

/// Writes a script that calls the cross compiler with this root's headers and libraries: those of this
/// machine's own cross compiler, where it has any, may be too new for the guest. Returns its path.
pub fn compiler(root: &Path, arch: Arch) -> Result<PathBuf> {
    let file = root.with_extension("cc");
    let gnu = arch.gnu();
    let gcc = cross_tool(arch, "gcc");
    let quoted = root.to_str().filter(|root| !root.contains('\''));
    let root = quoted.with_context(|| format!("{} cannot be quoted", root.display()))?;
    let lib = format!("{root}/usr/lib/{gnu}");
    let include = format!("{root}/usr/include");
    let text = format!(
        "#!/bin/sh\nexec {gcc} --sysroot='{root}' -B'{lib}' -isystem '{include}/{gnu}' \
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::index::tests::Archive;

    #[test]
    fn a_rootfs_is_made_once_with_what_it_depends_on() {
        let (archive, cache) = Archive::new();
        archive.pack("tool", &[("usr/bin/tool", "new"), ("usr/share/doc/tool", "text")]);
        archive.pack("part", &[("bin/part", "new")]);
        archive.carries(&[]);
        let text = "what = \"a test\"\nname = \"test\"\nsuite = \"bookworm\"\narch = \"amd64\"\n";
        let rootfs = Rootfs::parse(&format!("{text}wanted = [\"tool\"]\n")).unwrap();
        assert!(rootfs.get(&archive.none(), &cache).is_err() && !rootfs.place(&cache).exists());
        let place = rootfs.get(&archive.source(), &cache).unwrap();
        assert_eq!(rootfs.get(&archive.none(), &cache).unwrap(), place);
        assert_eq!(fs::read_to_string(place.join("usr/bin/part")).unwrap(), "new");
        assert!(place.join("usr/bin/tool").is_file() && !place.join("usr/share/doc/tool").exists());
        assert_eq!(version(&place, "part").as_deref(), Some("2"));
        let other = Rootfs::parse(&format!("{text}wanted = [\"part\"]\n")).unwrap();
        assert_ne!(other.place(&cache), place);
    }

    #[test]
    fn a_cross_compiler_has_the_distributions_name() {
        let named = |here: &[&str]| named_tool(Arch::Arm64, "gcc", |name| here.contains(&name));
        assert_eq!(named(&[]), "aarch64-linux-gnu-gcc");
        assert_eq!(named(&["aarch64-linux-gnu-gcc"]), "aarch64-linux-gnu-gcc");
        let suse = ["aarch64-suse-linux-gcc-13", "aarch64-suse-linux-gcc-14"];
        assert_eq!(named(&suse), suse[1]);
        assert_eq!(named(&["aarch64-suse-linux-ar"]), "aarch64-linux-gnu-gcc");
    }

    #[test]
    fn a_rootfs_is_a_system() {
        let dir = tempfile::tempdir().unwrap();
        let error = named(dir.path()).unwrap_err();
        assert_eq!(error.downcast_ref::<workshop::fail::Fail>().unwrap().code, USAGE);
        fs::create_dir_all(dir.path().join("usr/bin")).unwrap();
        assert!(named(dir.path()).is_ok());
    }
}
