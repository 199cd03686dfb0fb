//! Making the machine ready: packages, kernels, disk images.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use host::fail::{MACHINE, fail};
use host::say;

use crate::apt::{self, APT_HELPER};
use crate::cache::{self, Cache, find_tool};
use crate::initramfs::static_busybox;

/// Size of the data disk.
const DATA_MB: u64 = 1024;
/// Size of each disk beside it.
const BLANK_MB: u64 = 256;

/// How to tell that a package is here.
enum Sign {
    /// A program in the PATH or an sbin directory.
    Tool(&'static str),
    /// A header.
    Header(&'static str),
    /// A busybox that needs no libraries.
    StaticBusybox,
    /// apt's helper or curl.
    Fetcher,
    /// A bpftool that works in the guest too.
    Bpftool,
}

use Sign::{Bpftool, Fetcher, Header, StaticBusybox, Tool};

/// A package: its name in Debian and Ubuntu, how to tell that it is here, and its names for dnf,
/// pacman and zypper.
type Package = (&'static str, Sign, [&'static str; 3]);

/// What building the stages, running the guest and the READMEs need.
const TO_RUN: [Package; 14] = [
    (
        "qemu-system-x86",
        Tool("qemu-system-x86_64"),
        ["qemu-system-x86-core", "qemu-system-x86", "qemu-x86"],
    ),
    ("busybox-static", StaticBusybox, ["busybox", "busybox", "busybox-static"]),
    ("kmod", Tool("depmod"), ["kmod"; 3]),
    ("xz-utils", Tool("xz"), ["xz"; 3]),
    ("zstd", Tool("zstd"), ["zstd"; 3]),
    ("e2fsprogs", Tool("mkfs.ext4"), ["e2fsprogs"; 3]),
    ("gcc", Tool("cc"), ["gcc"; 3]),
    ("clang", Tool("clang"), ["clang"; 3]),
    ("libelf-dev", Header("libelf.h"), ["elfutils-libelf-devel", "libelf", "libelf-devel"]),
    ("zlib1g-dev", Header("zlib.h"), ["zlib-devel", "zlib", "zlib-devel"]),
    ("pkg-config", Tool("pkg-config"), ["pkgconf-pkg-config", "pkgconf", "pkg-config"]),
    ("make", Tool("make"), ["make"; 3]),
    ("bpftool", Bpftool, ["bpftool", "bpf", "bpftool"]),
    ("fdisk", Tool("sfdisk"), ["util-linux"; 3]),
];

/// What fetching a pinned kernel needs beside.
const TO_FETCH: [Package; 2] =
    [("dpkg", Tool("dpkg-deb"), ["dpkg"; 3]), ("curl", Fetcher, ["curl"; 3])];

/// What the guest tests use beside, from the host's root.
const TO_TEST: [Package; 4] = [
    ("fio", Tool("fio"), ["fio"; 3]),
    ("dmsetup", Tool("dmsetup"), ["device-mapper"; 3]),
    ("btrfs-progs", Tool("mkfs.btrfs"), ["btrfs-progs"; 3]),
    ("strace", Tool("strace"), ["strace"; 3]),
];

/// How other distributions than Debian install packages.
const MANAGERS: [(&str, &str); 3] =
    [("dnf", "dnf install"), ("pacman", "pacman -S --needed"), ("zypper", "zypper install")];

impl Sign {
    fn is_here(&self) -> bool {
        match self {
            Tool(name) => find_tool(name).is_some(),
            Header(name) => ["/usr/include", "/usr/local/include"]
                .iter()
                .any(|dir| Path::new(dir).join(name).is_file()),
            StaticBusybox => static_busybox().is_some(),
            Fetcher => Path::new(APT_HELPER).is_file() || find_tool("curl").is_some(),
            Bpftool => find_tool("bpftool")
                .and_then(|file| fs::read(file).ok())
                .is_some_and(|content| !is_ubuntus_wrapper(&content)),
        }
    }
}

/// Whether a bpftool is Ubuntu's script, which looks for one made for the kernel that runs, and
/// finds none for the guest's.
fn is_ubuntus_wrapper(content: &[u8]) -> bool {
    content.starts_with(b"#!") && String::from_utf8_lossy(content).contains("linux-tools")
}

/// The packages that are missing here.
fn absent(for_test: bool) -> Vec<Package> {
    let to_test = TO_TEST.into_iter().filter(|_| for_test);
    let fetches = apt::mirror().is_some() || find_tool("apt-get").is_some();
    let to_fetch = TO_FETCH.into_iter().filter(|_| fetches);
    let all = TO_RUN.into_iter().chain(to_fetch).chain(to_test);
    let absent = all.filter(|(_, sign, _)| !sign.is_here());
    // Not every Ubuntu has a package bpftool, and a stage runs without.
    absent.filter(|(name, ..)| for_test || *name != "bpftool" || !is_ubuntu()).collect()
}

/// What is missing here, by Debian's names where this machine has apt, else by those of its own
/// package manager.
pub fn missing(for_test: bool) -> Vec<&'static str> {
    let manager = MANAGERS.iter().position(|(tool, _)| find_tool(tool).is_some());
    let manager = manager.filter(|_| find_tool("apt-get").is_none());
    named_by(manager, &absent(for_test))
}

/// The names of packages for one of [`MANAGERS`]; Debian's where it is none of these.
fn named_by(manager: Option<usize>, packages: &[Package]) -> Vec<&'static str> {
    let names = packages.iter().map(|(debian, _, names)| manager.map_or(*debian, |m| names[m]));
    names.collect()
}

/// Installs what is missing, saying so first.
pub fn packages(for_test: bool) -> Result<()> {
    if is_ubuntu() && !Bpftool.is_here() {
        let advice = "bpftool is not here, or is Ubuntu's, which works under its own kernel only. \
                      Install bpftool where this Ubuntu has a package of that name; else \
                      linux-tools-generic, and link one of /usr/lib/linux-tools/*/bpftool to \
                      /usr/local/bin/bpftool";
        if for_test {
            return Err(fail(MACHINE, advice));
        }
        say!("{advice}");
    }
    let missing = missing(for_test);
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if find_tool("apt-get").is_none() {
        let manager = MANAGERS.iter().find(|(tool, _)| find_tool(tool).is_some());
        let advice = match manager {
            Some((_, install)) => format!("as root run:\n  {install} {names}"),
            None => "these are Debian's names: install them by those that they have here".into(),
        };
        return Err(fail(MACHINE, format!("packages are missing here: {names}; {advice}")));
    }
    say!("missing here: {names}");
    if missing.contains(&"busybox-static") && find_tool("busybox").is_some() {
        say!("busybox-static replaces the installed busybox: Debian has one or the other");
    }
    apt::install(&names)?;
    match self::missing(for_test).as_slice() {
        [] => Ok(()),
        still => bail!("installed, but still not found: {}", still.join(" ")),
    }
}

fn is_ubuntu() -> bool {
    apt::os_release().contains("ubuntu")
}

fn data_name() -> String {
    format!("data-{DATA_MB}.ext4")
}

fn blank_name() -> String {
    format!("blank-{BLANK_MB}")
}

/// The disk images that are missing from the cache, or changed since they were made.
pub fn disks_to_make(cache: &Cache) -> Vec<String> {
    let names = [data_name(), blank_name()];
    names.into_iter().filter(|name| !cache::is_sealed(&cache.path(name))).collect()
}

/// The image of the data disk: ext4, empty, made once. Guests write to a snapshot of it.
pub fn data_disk(cache: &Cache) -> Result<PathBuf> {
    image(cache, &data_name(), DATA_MB, |file| {
        // Nothing is left for the kernel to initialise later: that would be I/O nobody asked for.
        let lazy = "lazy_itable_init=0,lazy_journal_init=0";
        let options = ["-q", "-F", "-L", "data", "-m", "0", "-N", "16384", "-E", lazy];
        let args = options.iter().map(OsStr::new).chain([file.as_os_str()]);
        cache::run("mkfs.ext4", args).map(|_| ())
    })
}

/// The image of an empty disk.
pub fn blank_disk(cache: &Cache) -> Result<PathBuf> {
    image(cache, &blank_name(), BLANK_MB, |_| Ok(()))
}

fn image(
    cache: &Cache,
    name: &str,
    megabytes: u64,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let place = cache.path(name);
    if cache::is_sealed(&place) {
        return Ok(place);
    }
    let _lock = cache.lock()?;
    if cache::is_sealed(&place) {
        return Ok(place);
    }
    say!("making the disk image {name}");
    cache.need_space(100, "a disk image")?;
    let temp = cache.temp_dir()?;
    let made = temp.path().join("image");
    File::create(&made)
        .and_then(|file| file.set_len(megabytes << 20))
        .with_context(|| format!("cannot create a disk image in {}", temp.path().display()))?;
    fill(&made)?;
    cache::put_sealed(&made, &place)?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_appears_only_when_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        assert!(image(&cache, "disk", 1, |_| anyhow::bail!("interrupted")).is_err());
        assert!(!cache.path("disk").exists());
        let file = image(&cache, "disk", 1, |_| Ok(())).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
        // One that was truncated is made again.
        File::create(&file).unwrap();
        let file = image(&cache, "disk", 1, |_| Ok(())).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    }

    #[test]
    fn packages_have_the_names_of_the_manager() {
        let packages = || TO_RUN.into_iter().chain(TO_FETCH).chain(TO_TEST).collect::<Vec<_>>();
        assert_eq!(named_by(None, &packages())[0], "qemu-system-x86");
        let libelf: Vec<&str> =
            (0..MANAGERS.len()).map(|manager| named_by(Some(manager), &packages())[8]).collect();
        assert_eq!(libelf, ["elfutils-libelf-devel", "libelf", "libelf-devel"]);
    }

    #[test]
    fn a_sign_is_seen() {
        assert!(Tool("sh").is_here());
        assert!(!Tool("no-such-program").is_here());
        assert!(!Header("no-such-header.h").is_here());
    }

    #[test]
    fn ubuntus_bpftool_is_none() {
        let script = "#!/bin/bash\nfull_version=`uname -r`\nexec \"/usr/lib/linux-tools/$full_version/bpftool\"";
        assert!(is_ubuntus_wrapper(script.as_bytes()));
        assert!(!is_ubuntus_wrapper(b"\x7fELF /usr/lib/linux-tools"));
        assert!(!is_ubuntus_wrapper(b"#!/bin/sh\nexec /opt/bpftool"));
    }
}
