//! Making the machine ready: packages, kernels, disk images.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::cache::{self, Cache, find_tool};
use crate::error::{MACHINE, fail};
use crate::initramfs::static_busybox;
use crate::kernels::APT_HELPER;
use crate::say;

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

/// Packages by their names in Debian: what building the stages, running the guest and the
/// READMEs need.
const TO_RUN: [(&str, Sign); 16] = [
    ("qemu-system-x86", Tool("qemu-system-x86_64")),
    ("busybox-static", StaticBusybox),
    ("kmod", Tool("depmod")),
    ("xz-utils", Tool("xz")),
    ("zstd", Tool("zstd")),
    ("e2fsprogs", Tool("mkfs.ext4")),
    ("gcc", Tool("cc")),
    ("clang", Tool("clang")),
    ("libelf-dev", Header("libelf.h")),
    ("zlib1g-dev", Header("zlib.h")),
    ("pkg-config", Tool("pkg-config")),
    ("make", Tool("make")),
    ("dpkg", Tool("dpkg-deb")),
    ("curl", Fetcher),
    ("bpftool", Bpftool),
    ("fdisk", Tool("sfdisk")),
];

/// What the guest tests use beside, from the host's root.
const TO_TEST: [(&str, Sign); 2] = [("fio", Tool("fio")), ("dmsetup", Tool("dmsetup"))];

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

/// What is missing here, as Debian's package names.
pub fn missing(for_test: bool) -> Vec<&'static str> {
    let to_test = TO_TEST.iter().filter(|_| for_test);
    let absent = TO_RUN.iter().chain(to_test).filter(|(_, sign)| !sign.is_here());
    let absent = absent.map(|(package, _)| *package);
    // Not every Ubuntu has a package bpftool, and a stage runs without.
    absent.filter(|package| for_test || *package != "bpftool" || !is_ubuntu()).collect()
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
        return Err(fail(
            MACHINE,
            format!(
                "missing here: {names} (Debian's names). This machine has no apt: install them under \
                 the names that they have here"
            ),
        ));
    }
    say!("missing here: {names}");
    if missing.contains(&"busybox-static") && find_tool("busybox").is_some() {
        say!(
            "busybox-static takes the place of the busybox that is here: Debian has one or the other"
        );
    }
    let install = format!("install -y --no-install-recommends {names}");
    let mut updated = false;
    if !have_lists() {
        updated = apt_get("update")?;
    }
    let mut done = apt_get(&install)?;
    if !done && !updated {
        say!("apt-get failed; its lists may be too old, fetching them");
        done = apt_get("update")? && apt_get(&install)?;
    }
    if !done {
        bail!("apt-get could not install the packages, see above; by hand: apt-get {install}");
    }
    match self::missing(for_test).as_slice() {
        [] => Ok(()),
        still => bail!("installed, but still not found: {}", still.join(" ")),
    }
}

fn is_ubuntu() -> bool {
    fs::read_to_string("/etc/os-release").is_ok_and(|text| text.contains("ubuntu"))
}

/// Runs apt-get as root, saying so first. Whether it succeeded.
pub fn apt_get(arguments: &str) -> Result<bool> {
    let root = rustix::process::geteuid().is_root();
    if !root && find_tool("sudo").is_none() {
        return Err(fail(
            MACHINE,
            format!("this user is not root and has no sudo; as root run:\n  apt-get {arguments}"),
        ));
    }
    say!("running: {}apt-get {arguments}", if root { "" } else { "sudo " });
    // Our standard output belongs to the program that is run.
    let run = |command: &mut Command| -> Result<bool> {
        let stderr = std::os::fd::AsFd::as_fd(&std::io::stderr()).try_clone_to_owned()?;
        Ok(command.stdout(stderr).status().context("cannot start apt-get")?.success())
    };
    // A wrong password is not apt's failure. (`sudo -v` asks for one where none is needed.)
    if !root && !run(Command::new("sudo").arg("true"))? {
        return Err(fail(
            MACHINE,
            format!("sudo refused, see above; as root run:\n  apt-get {arguments}"),
        ));
    }
    let mut command = Command::new(if root { "env" } else { "sudo" });
    if !root {
        command.arg("env");
    }
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "Dpkg::Use-Pty=0"]);
    // Another apt may be at work, as after a machine's start.
    command.args(["-o", "DPkg::Lock::Timeout=300"]).args(arguments.split(' '));
    run(&mut command)
}

/// Whether apt has ever fetched its lists here.
pub fn have_lists() -> bool {
    let lists = fs::read_dir("/var/lib/apt/lists").into_iter().flatten().flatten();
    lists.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().contains("_Packages"))
}

/// The image of the data disk: ext4, empty, made once. Guests write to a snapshot of it.
pub fn data_disk(cache: &Cache) -> Result<PathBuf> {
    image(cache, &format!("data-{DATA_MB}.ext4"), DATA_MB, |file| {
        // Nothing is left for the kernel to initialise later: that would be I/O nobody asked for.
        let lazy = "lazy_itable_init=0,lazy_journal_init=0";
        let options = ["-q", "-F", "-L", "data", "-m", "0", "-N", "16384", "-E", lazy];
        let args = options.iter().map(OsStr::new).chain([file.as_os_str()]);
        cache::run("mkfs.ext4", args).map(|_| ())
    })
}

/// The image of an empty disk.
pub fn blank_disk(cache: &Cache) -> Result<PathBuf> {
    image(cache, &format!("blank-{BLANK_MB}"), BLANK_MB, |_| Ok(()))
}

fn image(
    cache: &Cache,
    name: &str,
    megabytes: u64,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let place = cache.path(name);
    if place.is_file() {
        return Ok(place);
    }
    let _lock = cache.lock()?;
    if place.is_file() {
        return Ok(place);
    }
    cache.need_space(100, "a disk image")?;
    let temp = cache.temp_dir()?;
    let made = temp.path().join("image");
    File::create(&made)
        .and_then(|file| file.set_len(megabytes << 20))
        .context("cannot create a disk image")?;
    fill(&made)?;
    cache::put(&made, &place)?;
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
