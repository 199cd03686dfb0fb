//! This machine's apt: installing through it, the Debian archives that its settings name, and fetching
//! from them.

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use workshop::fail::{MACHINE, USAGE, fail};
use workshop::say;

use crate::fetch::cache::{self, find_tool};
use crate::session::cleanup;

/// What fetches with apt's settings, proxies and all.
pub const APT_HELPER: &str = "/usr/lib/apt/apt-helper";
/// What to do where apt names no archive.
const SET_MIRROR: &str =
    "set VM_MIRROR to the root of a Debian archive (the URL that has dists/ and pool/ below it)";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

#[derive(Clone, Debug)]
pub struct Source {
    /// The archive that VM_MIRROR names; else those of apt's settings.
    pub mirror: Option<String>,
    /// The keys that its suites are signed with: VM_KEYRING names others, for an archive of one's own.
    pub keyring: String,
}

impl Source {
    /// As this process's environment says.
    pub fn from_env() -> Result<Source> {
        let var = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let mirror = var("VM_MIRROR");
        if let Some(path) = mirror.as_ref().filter(|mirror| !mirror.contains(":/")) {
            let message =
                format!("VM_MIRROR={path} is no URL: it begins with http://, https:// or file:/");
            return Err(fail(USAGE, message));
        }
        Ok(Source { mirror, keyring: var("VM_KEYRING").unwrap_or_else(|| KEYRING.to_owned()) })
    }

    /// The roots of the archives to ask.
    pub fn archives(&self) -> Result<Vec<String>> {
        match &self.mirror {
            Some(mirror) => Ok(vec![mirror.clone()]),
            None => archives(),
        }
    }

    /// The same, after fetching apt's lists where this machine has apt and never fetched them.
    pub fn need_archives(&self) -> Result<Vec<String>> {
        if self.mirror.is_none() {
            need_lists()?;
        }
        self.archives()
    }

    /// Whether this machine can have a Debian archive: one is set or configured, or it is a Debian
    /// whose apt has no lists yet.
    pub fn has_debian(&self) -> bool {
        self.archives().is_ok() || (!have_lists() && os_release().contains("ID=debian\n"))
    }
}

/// Installs packages, after fetching apt's lists where there are none or they are too old.
pub fn install(names: &str) -> Result<()> {
    let install = format!("install -y --no-install-recommends {names}");
    let by_hand = format!("apt-get update\n  apt-get {install}");
    let mut updated = false;
    if !have_lists() {
        updated = apt_get("update", &by_hand)?;
    }
    let mut done = apt_get(&install, &by_hand)?;
    if !done && is_dpkg_interrupted() {
        let message = format!(
            "dpkg was interrupted before, and apt refuses to continue; as root run:\n  \
             dpkg --configure -a\n  {by_hand}"
        );
        return Err(fail(MACHINE, message));
    }
    if !done && !updated {
        say!("apt-get failed; its lists may be too old, fetching them");
        done = apt_get("update", &by_hand)? && apt_get(&install, &by_hand)?;
    }
    ensure!(
        done,
        "apt-get could not install the packages, see above. To do it by hand, run as root:\n  {by_hand}"
    );
    Ok(())
}

/// Runs apt-get as root, announcing it first; returns whether it succeeded. `by_hand` is what
/// root can run instead, for the message where this user cannot become root.
fn apt_get(arguments: &str, by_hand: &str) -> Result<bool> {
    let is_superuser = rustix::process::geteuid().is_root();
    if !is_superuser && find_tool("sudo").is_none() {
        let message = format!("this user is not root and has no sudo; as root run:\n  {by_hand}");
        return Err(fail(MACHINE, message));
    }
    say!("running: {}apt-get {arguments}", if is_superuser { "" } else { "sudo " });
    // Our standard output belongs to the program that is run.
    let run = |command: &mut Command| -> Result<bool> {
        let stderr = std::os::fd::AsFd::as_fd(&std::io::stderr()).try_clone_to_owned()?;
        Ok(command.stdout(stderr).status().context("cannot start apt-get")?.success())
    };
    // A wrong password is not apt's failure. (`sudo -v` asks for one where none is needed.)
    if !is_superuser && !run(Command::new("sudo").arg("true"))? {
        let message = format!("sudo refused, see above; as root run:\n  {by_hand}");
        return Err(fail(MACHINE, message));
    }
    let mut command = Command::new(if is_superuser { "env" } else { "sudo" });
    if !is_superuser {
        command.arg("env");
    }
    command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "Dpkg::Use-Pty=0"]);
    // Another apt may be running, as it often is just after a machine has started.
    command.args(["-o", "DPkg::Lock::Timeout=300"]).args(arguments.split(' '));
    // In a group of its own, where the terminal's Ctrl-C does not reach it: it would end dpkg, and leave
    // packages half installed. (Not where sudo has to ask again, which needs the terminal.)
    let asks_nothing = || {
        let mut sudo = Command::new("sudo");
        sudo.args(["-n", "true"]).stderr(Stdio::null()).status().is_ok_and(|done| done.success())
    };
    if is_superuser || asks_nothing() {
        command.process_group(0).stdin(Stdio::null());
    }
    let done = run(&mut command)?;
    cleanup::end_if_asked();
    Ok(done)
}

/// Whether dpkg keeps notes of what it has not ended: then apt does nothing before
/// `dpkg --configure -a`.
fn is_dpkg_interrupted() -> bool {
    let notes = fs::read_dir("/var/lib/dpkg/updates").into_iter().flatten().flatten();
    notes.map(|note| note.file_name()).any(|name| name.as_encoded_bytes()[0].is_ascii_digit())
}

/// Whether apt has ever fetched its lists here.
fn have_lists() -> bool {
    let lists = fs::read_dir("/var/lib/apt/lists").into_iter().flatten().flatten();
    lists.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().contains("_Packages"))
}

/// Fetches apt's lists where this machine has apt and never fetched them.
pub fn need_lists() -> Result<()> {
    if find_tool("apt-get").is_none() || have_lists() {
        return Ok(());
    }
    say!("apt has no lists of packages yet, fetching them");
    ensure!(
        apt_get("update", "apt-get update")? || have_lists(),
        "apt-get update failed, see above; without its lists apt names no archive: try again, or \
         {SET_MIRROR}"
    );
    Ok(())
}

pub fn os_release() -> String {
    fs::read_to_string("/etc/os-release").unwrap_or_default()
}

/// The roots of the Debian archives that apt uses here.
fn archives() -> Result<Vec<String>> {
    let apt = find_tool("apt-get").with_context(|| {
        format!("this machine has no apt whose settings name a Debian archive: {SET_MIRROR}")
    })?;
    let output = Command::new(apt)
        .args(["indextargets", "--format", "$(CREATED_BY)|$(ORIGIN)|$(RELEASE)|$(REPO_URI)"])
        .output()
        .context("cannot start apt-get")?;
    let found = archives_of(&String::from_utf8_lossy(&output.stdout));
    if found.is_empty() && !have_lists() {
        bail!(
            "apt has not fetched its lists, which name the archives: run `cargo vm setup`, or \
             {SET_MIRROR}"
        );
    }
    ensure!(!found.is_empty(), "apt on this machine names no Debian archive: {SET_MIRROR}");
    Ok(found)
}

/// The archive roots in what `apt-get indextargets` printed, Debian's own first; none where
/// none is Debian's: no other has its kernels.
fn archives_of(text: &str) -> Vec<String> {
    let fields = text.lines().map(|line| line.splitn(4, '|').collect::<Vec<_>>());
    let is_security = |text: &str| text.contains("-security");
    let packages = fields.filter_map(|fields| match fields[..] {
        [_, _, release, uri] if uri.is_empty() || is_security(release) || is_security(uri) => None,
        ["Packages", origin, _, uri] => Some((origin, uri)),
        _ => None,
    });
    let (debian, others): (Vec<_>, Vec<_>) = packages.partition(|(origin, _)| *origin == "Debian");
    if debian.is_empty() {
        return Vec::new();
    }
    let mut known = HashSet::new();
    let found = debian.into_iter().chain(others).flat_map(|(_, uri)| roots(uri));
    found.filter(|uri| known.insert(uri.clone())).collect()
}

/// What apt's address of an archive stands for: itself, or those in a file of mirrors.
fn roots(uri: &str) -> Vec<String> {
    let Some(file) = uri.strip_prefix("mirror+file:") else {
        return vec![uri.to_owned()];
    };
    let text = fs::read_to_string(file.trim_end_matches('/')).unwrap_or_default();
    let first = text.lines().filter_map(|line| line.split_whitespace().next());
    first.filter(|uri| !uri.starts_with('#')).map(str::to_owned).collect()
}

/// Fetches `url`. The inner error is an archive that does not have it, or does not answer; the outer one
/// is an error that another archive will not cure.
pub fn download(url: &str, to: &Path) -> Result<Result<(), String>> {
    let helper = Path::new(APT_HELPER);
    let mut command;
    if helper.is_file() {
        command = Command::new(helper);
        command.args(["-o", "Acquire::Retries=2", "download-file", url]).arg(to);
    } else if let Some(curl) = find_tool("curl") {
        command = Command::new(curl);
        command.args(["--fail", "--location", "--silent", "--show-error", "--retry", "2"]);
        command.arg("--output").arg(to).arg(url);
    } else {
        let message = "neither apt nor curl is here to fetch a kernel with; install curl";
        return Err(fail(MACHINE, message));
    }
    command.env("LC_ALL", "C").stdin(Stdio::null());
    let output = command.output().context("cannot start the download")?;
    if output.status.success() && to.is_file() {
        return Ok(Ok(()));
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = text.lines().map(str::trim);
    let why: Vec<&str> = lines.filter(|l| !l.is_empty() && !l.starts_with("W:")).collect();
    let why = if why.is_empty() { output.status.to_string() } else { why.join(" ") };
    ensure!(!why.contains("No space left"), cache::no_space(to, &why));
    Ok(Err(why))
}

/// Lets an apt-get fetch packages into `dir`, by its own check of their signed index.
pub fn fetch_packages(apt_get: impl Fn() -> Command, names: &[String], dir: &Path) -> Result<()> {
    let download = |option: Option<&str>| {
        let mut command = apt_get();
        command.args(["-q", "download"]).args(option).args(names);
        command.current_dir(dir).stdin(Stdio::null()).output().context("cannot start apt-get")
    };
    let uris = download(Some("--print-uris"))?.stdout;
    let what = match names {
        [] | [_] | [_, _] | [_, _, _] => names.join(", "),
        names => format!("{} packages", names.len()),
    };
    say!("fetching {what} ({} MB)", megabytes(&String::from_utf8_lossy(&uris)));
    let output = download(None)?;
    let why = String::from_utf8_lossy(&output.stderr);
    ensure!(!why.contains("No space left"), cache::no_space(dir, why.trim()));
    ensure!(output.status.success(), "apt-get download failed: {}", why.trim());
    Ok(())
}

/// The packages that make up this distribution's own kernel, from its archive, downloaded into
/// `dir`. Nothing is installed.
pub fn fetch_own_kernel(dir: &Path) -> Result<()> {
    // Ubuntu's, Debian's.
    for meta in ["linux-image-generic", "linux-image-amd64"] {
        // A package that the archive does not know is an error of apt-cache.
        let args = ["depends", "--recurse", "--important", meta];
        let text = cache::run("apt-cache", args).unwrap_or_default();
        let names = kernel_packages(&String::from_utf8_lossy(&text));
        if names.is_empty() {
            continue;
        }
        return fetch_packages(|| Command::new("apt-get"), &names, dir);
    }
    bail!(
        "the archives of this machine's apt have neither linux-image-generic nor linux-image-amd64"
    )
}

/// The packages with the image and the modules in what `apt-cache depends --recurse` printed.
fn kernel_packages(text: &str) -> Vec<String> {
    const PARTS: [&str; 5] =
        ["linux-image-", "linux-modules-extra-", "linux-modules-", "linux-binary-", "linux-base-"];
    let is_part = |name: &&str| {
        let version = PARTS.iter().find_map(|part| name.strip_prefix(part));
        version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
    };
    let mut names: Vec<String> = text.lines().filter(is_part).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}

/// The sum of the sizes that `apt-get download --print-uris` printed: `'URL' FILE SIZE HASH`.
fn megabytes(uris: &str) -> u64 {
    let size = |line: &str| line.split(' ').nth(2).and_then(|size| size.parse::<u64>().ok());
    uris.lines().filter_map(size).sum::<u64>().div_ceil(1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_read_from_apt() {
        let text = "Packages|Other|stable|http://b/other/\n\
                    Packages|Debian|bookworm|http://a/debian/\n\
                    DEP-11|Debian|bookworm|http://a/dep11/\n\
                    Packages|Debian|bookworm-updates|http://a/debian/\n\
                    Packages|Debian|bookworm-security|http://a/debian-security/\n\n";
        assert_eq!(archives_of(text), ["http://a/debian/", "http://b/other/"]);
        assert!(archives_of("").is_empty());
        assert!(archives_of("Packages|Ubuntu|noble|http://c/ubuntu/\n").is_empty());
        let list = tempfile::NamedTempFile::new().unwrap();
        fs::write(&list, "# of the cloud\nhttp://d/debian\tpriority:1\nhttp://e/debian\n").unwrap();
        let text = format!("Packages|Debian|bookworm|mirror+file:{}/\n", list.path().display());
        assert_eq!(archives_of(&text), ["http://d/debian", "http://e/debian"]);
    }

    #[test]
    fn a_distributions_kernel_is_its_image_and_modules() {
        let ubuntu = "linux-image-generic\n  Depends: linux-image-6.8.0-40-generic\n\
            linux-image-6.8.0-40-generic\n |Depends: x\nlinux-modules-6.8.0-40-generic\n\
            linux-modules-extra-6.8.0-40-generic\nlinux-firmware\nlinux-base\nwireless-regdb\n\
            linux-modules-6.8.0-40-generic\n";
        assert_eq!(
            kernel_packages(ubuntu),
            [
                "linux-image-6.8.0-40-generic",
                "linux-modules-6.8.0-40-generic",
                "linux-modules-extra-6.8.0-40-generic"
            ]
        );
        let debian = "linux-image-amd64\nlinux-image-7.2.13+deb14-amd64\n\
            linux-binary-7.2.13+deb14-amd64\nlinux-modules-7.2.13+deb14-amd64\n\
            linux-base-7.2.13+deb14-amd64\nlinux-base\n";
        assert_eq!(kernel_packages(debian).len(), 4);
        assert!(kernel_packages("").is_empty());
        let uris = "'http://a/x.deb' x.deb 1500000 SHA256:0\n'http://a/y.deb' y.deb 1 SHA256:0\n";
        assert_eq!(megabytes(uris), 2);
    }
}
