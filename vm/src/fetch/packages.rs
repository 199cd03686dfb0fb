//! Making the machine ready: packages, kernels, disk images.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use workshop::fail::{MACHINE, fail};
use workshop::say;

use crate::arch::Arch;
use crate::fetch::apt::{self, APT_HELPER, Source};
use crate::fetch::cache::{self, Cache, find_tool, static_busybox, unpack_all};
use crate::fetch::rootfs;

/// The images of the data disk and of each disk beside it, with their sizes in MiB.
const DATA: &str = "data-1024.ext4";
const BLANK: &str = "blank-256";

/// Free megabytes that unpacking a package may take.
const UNPACKED_MB: u64 = 300;

/// The variable that skips the look for packages.
const SKIP: &str = "VM_SKIP_PACKAGES";
const SKIP_ADVICE: &str = "If they are here, where this does not find them, set VM_SKIP_PACKAGES=1: then it does not look";

/// How to tell that a package is here.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Sign {
    /// A program in the PATH or an sbin directory.
    Tool(String),
    /// A header, or the name by which pkg-config knows its library.
    Library(String, String),
    /// A compiler for the guest's architecture.
    CrossCompiler,
    /// A busybox that needs no libraries.
    StaticBusybox,
    /// apt's helper or curl.
    Fetcher,
    /// A bpftool that works in the guest too.
    Bpftool,
}

use Sign::{Bpftool, CrossCompiler, Fetcher, Library, StaticBusybox, Tool};

/// What needs a package, from what needs few to what needs all.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum For {
    /// Running a program in the guest.
    Run,
    /// Fetching a kernel, which may precede a run.
    Fetch,
    /// The judges of the exercises.
    Judge,
    /// All guest tests, and what compares tracers.
    Test,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Package {
    debian: String,
    r#for: For,
    sign: Sign,
    others: Option<[String; 3]>,
    /// The architecture of guests that need it, by Debian's name; else all.
    guest: Option<String>,
    /// Whether it is needed only for a guest of another architecture than this machine.
    #[serde(default)]
    cross: bool,
    /// Its commands that pages have a reader type in the guest.
    #[serde(default)]
    typed: Vec<String>,
    /// Whether apt must not install it, because that would start a service on this machine.
    #[serde(default)]
    unpack: bool,
}

impl Package {
    /// Where it is unpacked.
    fn place(&self, cache: &Cache) -> PathBuf {
        cache.path("packages").join(&self.debian)
    }

    fn is_here(&self, arch: Arch, cache: &Cache) -> bool {
        self.sign.is_here(arch) || self.is_unpacked(cache)
    }

    fn is_unpacked(&self, cache: &Cache) -> bool {
        let Tool(name) = &self.sign else { return false };
        let place = self.place(cache);
        self.unpack
            && cache.check(&place, None).is_ok_and(|here| here)
            && place.join("usr/bin").join(name).is_file()
    }

    /// Unpacks it into the cache, as apt fetches it.
    fn unpack(&self, cache: &Cache) -> Result<()> {
        apt::need_lists()?;
        let here = || self.is_unpacked(cache).then_some(());
        cache.once((&self.debian, UNPACKED_MB), here, |temp| {
            cache.say_damage(&self.debian, &self.place(cache), None);
            let name = std::slice::from_ref(&self.debian);
            apt::fetch_packages(|| Command::new("apt-get"), name, temp)?;
            say!("unpacking {} for guests; it is not installed here", self.debian);
            let root = temp.join("root");
            unpack_all(temp, &root, &[])?;
            cache.keep(&root, &self.place(cache), None)
        })
    }
}

/// The directories with the programs of packages that are unpacked in the cache: for a guest's PATH.
pub fn unpacked(cache: &Cache) -> Result<Vec<PathBuf>> {
    let packages = all()?.into_iter().filter(|package| package.is_unpacked(cache));
    Ok(packages.map(|package| package.place(cache).join("usr/bin")).collect())
}

fn all() -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Packages {
        package: Vec<Package>,
    }
    let packages = toml::from_str::<Packages>(include_str!("../../packages.toml"));
    Ok(packages.context("vm/packages.toml")?.package)
}

/// How other distributions than Debian install packages.
const MANAGERS: [(&str, &str); 3] =
    [("dnf", "dnf install"), ("pacman", "pacman -S --needed"), ("zypper", "zypper install")];

impl Sign {
    fn is_here(&self, arch: Arch) -> bool {
        match self {
            Tool(name) => find_tool(name).is_some(),
            Library(header, name) => {
                let dirs =
                    ["/usr/include", "/usr/local/include"].map(|dir| Path::new(dir).join(header));
                dirs.iter().any(|file| file.is_file())
                    || cache::run("pkg-config", ["--exists", name]).is_ok()
            }
            CrossCompiler => find_tool(&rootfs::cross_tool(arch, "gcc")).is_some(),
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

/// What is missing here, by Debian's names where this machine has apt, else by those of its own
/// package manager.
pub fn missing(arch: Arch, source: &Source, cache: &Cache, purpose: For) -> Result<Vec<String>> {
    Ok(names(&missing_packages(arch, source, cache, purpose)?))
}

fn missing_packages(
    arch: Arch,
    source: &Source,
    cache: &Cache,
    purpose: For,
) -> Result<Vec<Package>> {
    let fetches = source.mirror.is_some() || find_tool("apt-get").is_some();
    let mut packages = needed(arch, fetches, purpose)?;
    packages.retain(|package| !package.is_here(arch, cache));
    Ok(packages)
}

/// Those that this purpose needs, here or not.
fn needed(arch: Arch, fetches: bool, purpose: For) -> Result<Vec<Package>> {
    let mut packages = all()?;
    let (guest, cross) = (arch.debian(), arch.is_foreign());
    packages.retain(|package| package.guest.as_ref().is_none_or(|arch| arch == guest));
    packages.retain(|package| match package.r#for {
        _ if package.cross && !cross => false,
        For::Run => true,
        For::Fetch => fetches,
        // They run in the guest, from its root.
        needs => purpose >= needs && !cross,
    });
    // Not every Ubuntu has a package bpftool, and a stage runs without.
    packages.retain(|package| purpose > For::Fetch || package.debian != "bpftool" || !is_ubuntu());
    Ok(packages)
}

/// Those whose commands a reader types, in these texts or in any, and that are not here.
fn missing_typed(arch: Arch, texts: Option<&[String]>) -> Result<Vec<Package>> {
    let mut packages = typed(arch, texts)?;
    packages.retain(|it| it.typed.iter().any(|command| find_tool(command).is_none()));
    Ok(packages)
}

/// Those whose commands a reader types: in these texts, or in any.
fn typed(arch: Arch, texts: Option<&[String]>) -> Result<Vec<Package>> {
    let mut packages = all()?;
    // A guest of another architecture has a root of its own.
    packages.retain(|package| !arch.is_foreign() && !package.typed.is_empty());
    if let Some(texts) = texts {
        let in_a_name = |c: char| c.is_alphanumeric() || "_-.".contains(c);
        let words: Vec<&str> = texts.iter().flat_map(|it| it.split(|c| !in_a_name(c))).collect();
        packages.retain(|package| package.typed.iter().any(|it| words.contains(&it.as_str())));
    }
    Ok(packages)
}

/// What to do about commands that some pages type in the guest, and that are not here: one line.
pub fn missing_to_type(arch: Arch) -> Result<Option<String>> {
    Ok(not_here(&missing_typed(arch, None)?))
}

/// How to bring the commands of these packages.
fn not_here(packages: &[Package]) -> Option<String> {
    let commands: Vec<&str> =
        packages.iter().flat_map(|it| &it.typed).map(String::as_str).collect();
    let manager = MANAGERS.iter().find(|(tool, _)| find_tool(tool).is_some());
    let install = match manager {
        _ if find_tool("apt-get").is_some() => "apt-get install --no-install-recommends",
        Some((_, install)) => install,
        None => "<the package manager>",
    };
    (!packages.is_empty()).then(|| {
        format!(
            "not installed here, and typed on some pages: {}. Outside of the guest, this brings it, for the \
             next shell: sudo {install} {}",
            commands.join(", "),
            names(packages).join(" ")
        )
    })
}

/// The Debian names of what this purpose needs, here or not.
#[cfg(test)]
pub fn named_for(arch: Arch, purpose: For) -> Result<Vec<String>> {
    Ok(named_by(None, &needed(arch, true, purpose)?))
}

/// The names of packages here: Debian's where this machine has apt.
fn names(packages: &[Package]) -> Vec<String> {
    let manager = MANAGERS.iter().position(|(tool, _)| find_tool(tool).is_some());
    named_by(manager.filter(|_| find_tool("apt-get").is_none()), packages)
}

/// The names of packages for one of [`MANAGERS`]; Debian's where it is none of these.
fn named_by(manager: Option<usize>, packages: &[Package]) -> Vec<String> {
    let name = |package: &Package| match (manager, &package.others) {
        (Some(manager), Some(others)) => others[manager].clone(),
        _ => package.debian.clone(),
    };
    packages.iter().map(name).collect()
}

/// Installs what is missing for a command with these texts, see [`need`].
pub fn need_typed(arch: Arch, cache: &Cache, texts: &[String]) -> Result<()> {
    bring(cache, || missing_typed(arch, Some(texts)))
}

/// Installs what is missing, or unpacks it into the cache, saying so first: nothing where VM_SKIP_PACKAGES says
/// that all is here.
pub fn need(arch: Arch, source: &Source, cache: &Cache, purpose: For) -> Result<()> {
    if std::env::var_os(SKIP).is_some_and(|value| !value.is_empty()) {
        return Ok(());
    }
    if is_ubuntu() && !Bpftool.is_here(arch) {
        let advice = "bpftool is not here, or is Ubuntu's, which works under its own kernel only. \
                      Install bpftool where this Ubuntu has a package of that name; else \
                      linux-tools-generic, and link one of /usr/lib/linux-tools/*/bpftool to \
                      /usr/local/bin/bpftool";
        if purpose > For::Fetch {
            return Err(fail(MACHINE, advice));
        }
        say!("{advice}");
    }
    bring(cache, || missing_packages(arch, source, cache, purpose))
}

/// Installs the packages that are found missing, which they are not afterwards.
fn bring(cache: &Cache, look: impl Fn() -> Result<Vec<Package>>) -> Result<()> {
    let skips = std::env::var_os(SKIP).is_some_and(|value| !value.is_empty());
    let missing = if skips { Vec::new() } else { look()? };
    if missing.is_empty() {
        return Ok(());
    }
    let names = names(&missing).join(" ");
    if find_tool("apt-get").is_none() {
        let manager = MANAGERS.iter().find(|(tool, _)| find_tool(tool).is_some());
        let advice = match manager {
            Some((_, install)) => format!("as root run:\n  {install} {names}"),
            None => "these are Debian's names: install them by those that they have here".into(),
        };
        let message = format!("packages are missing here: {names}; {advice}\n{SKIP_ADVICE}");
        return Err(fail(MACHINE, message));
    }
    say!("missing here: {names}");
    if missing.iter().any(|it| it.debian == "busybox-static") && find_tool("busybox").is_some() {
        say!("busybox-static replaces the installed busybox: Debian has one or the other");
    }
    let (to_unpack, to_install): (Vec<_>, Vec<_>) = missing.into_iter().partition(|it| it.unpack);
    if !to_install.is_empty() {
        apt::install(&named_by(None, &to_install).join(" "))?;
    }
    to_unpack.iter().try_for_each(|package| package.unpack(cache))?;
    match self::names(&look()?).as_slice() {
        [] => Ok(()),
        still => bail!("installed, but still not found: {}. {SKIP_ADVICE}", still.join(" ")),
    }
}

fn is_ubuntu() -> bool {
    apt::os_release().contains("ubuntu")
}

/// The image of the data disk: ext4, empty, made once. Guests write to a snapshot of it.
pub fn data_disk(cache: &Cache) -> Result<PathBuf> {
    image(cache, DATA, 1024, |file| {
        // Nothing is left for the kernel to initialise later: that would be I/O nobody asked for.
        let lazy = "lazy_itable_init=0,lazy_journal_init=0";
        let options = ["-q", "-F", "-L", "data", "-m", "0", "-N", "16384", "-E", lazy];
        let args = options.iter().map(OsStr::new).chain([file.as_os_str()]);
        cache::run("mkfs.ext4", args).map(|_| ())
    })
}

pub fn blank_disk(cache: &Cache) -> Result<PathBuf> {
    image(cache, BLANK, 256, |_| Ok(()))
}

fn image(
    cache: &Cache,
    name: &str,
    megabytes: u64,
    fill: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    cache.file(name, (&format!("the disk image {name}"), 100), |made| {
        File::create(made)
            .and_then(|file| file.set_len(megabytes << 20))
            .with_context(|| format!("cannot create a disk image at {}", made.display()))?;
        fill(made)
    })
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
    fn packages_have_the_names_of_the_manager() {
        let names = |manager| named_by(manager, &all().unwrap());
        assert_eq!(names(None)[0], "qemu-system-x86");
        let libelf: Vec<String> =
            (0..MANAGERS.len()).map(|manager| names(Some(manager)).swap_remove(10)).collect();
        assert_eq!(libelf, ["elfutils-libelf-devel", "libelf", "libelf-devel"]);
        assert_eq!(names(Some(0))[5], "xz");
    }

    /// A package that starts a service when it is installed is unpacked instead. What every Debian has is left
    /// out. fio has a service, too, which its package leaves switched off.
    #[test]
    fn no_package_that_is_installed_starts_a_service() {
        let mut read = 0;
        for package in all().unwrap().iter().filter(|package| !package.unpack) {
            let query = ["--show", "--showformat=${Priority}", &package.debian];
            let priority = cache::run("dpkg-query", query).unwrap_or_default();
            let script = format!("/var/lib/dpkg/info/{}.postinst", package.debian);
            let Ok(text) = fs::read_to_string(&script) else { continue };
            if priority != b"required" && priority != b"important" {
                let starts = ["deb-systemd-invoke", "invoke-rc.d"].map(|word| text.contains(word));
                assert_eq!(starts, [false; 2], "{}: `unpack = true` is missing", package.debian);
                read += 1;
            }
        }
        assert!(read > 0 || !Path::new("/var/lib/dpkg/info/fio.list").exists());
    }

    #[test]
    fn what_is_unpacked_is_here_and_in_the_path_of_guests() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let all = all().unwrap();
        let prometheus = all.iter().find(|package| package.debian == "prometheus").unwrap();
        assert!(prometheus.unpack && !prometheus.is_unpacked(&cache));
        assert!(unpacked(&cache).unwrap().is_empty());
        let bin = prometheus.place(&cache).join("usr/bin");
        let made = dir.path().join("made");
        fs::create_dir_all(made.join("usr/bin")).unwrap();
        fs::write(made.join("usr/bin/prometheus"), "program").unwrap();
        cache.keep(&made, &prometheus.place(&cache), None).unwrap();
        assert!(prometheus.is_here(Arch::X86_64, &cache));
        assert_eq!(unpacked(&cache).unwrap(), std::slice::from_ref(&bin));
        // A damaged one is none.
        fs::write(bin.join("prometheus"), "pro").unwrap();
        assert!(!prometheus.is_unpacked(&cache) && unpacked(&cache).unwrap().is_empty());
    }

    /// A command line brings what it names, also in a script; a word that only contains a name brings nothing.
    #[test]
    fn a_command_brings_what_it_names() {
        let brings = |texts: &[&str]| {
            let texts: Vec<String> = texts.iter().map(|&text| text.to_owned()).collect();
            named_by(None, &typed(Arch::of_guest(None).unwrap(), Some(&texts)).unwrap())
        };
        assert_eq!(brings(&["bpftrace", "-e", "kprobe:f { @ = count(); }"]), ["bpftrace"]);
        assert_eq!(
            brings(&["bash", "-c", "umount /mnt/data\ndmsetup create x; fio --name=t"]),
            ["fio", "dmsetup"]
        );
        assert_eq!(brings(&["timeout", "-s", "INT", "20", "top", "-b"]), ["procps"]);
        assert_eq!(brings(&["grep", "-v", "fiord my_dmsetup stop"]), [""; 0]);
    }

    #[test]
    fn a_shell_says_what_brings_the_commands_of_the_pages() {
        let all = typed(Arch::of_guest(None).unwrap(), None).unwrap();
        let said = not_here(&all).unwrap();
        for word in ["bpftrace", "fio", "dmsetup", "top", "install"] {
            assert!(said.contains(word), "{word}: {said}");
        }
        assert_eq!(not_here(&[]), None);
    }

    #[test]
    fn ubuntus_bpftool_is_none() {
        let script = "#!/bin/bash\nfull_version=`uname -r`\nexec \"/usr/lib/linux-tools/$full_version/bpftool\"";
        assert!(is_ubuntus_wrapper(script.as_bytes()));
        assert!(!is_ubuntus_wrapper(b"\x7fELF /usr/lib/linux-tools"));
        assert!(!is_ubuntus_wrapper(b"#!/bin/sh\nexec /opt/bpftool"));
    }
}
