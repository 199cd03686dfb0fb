//! The kernels: the pinned table, the archive, download, check, unpacking.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::cache::{self, Cache};
use crate::error::{MACHINE, fail};
use crate::say;
use crate::setup;

/// The file to edit when a pinned package is gone.
const TABLE_FILE: &str = "vm/kernels.toml";
/// Free megabytes that fetching and unpacking one kernel may take.
const KERNEL_MB: u64 = 900;
/// What fetches with apt's settings, proxies and all.
pub const APT_HELPER: &str = "/usr/lib/apt/apt-helper";
/// What to do where apt names no archive.
const SET_MIRROR: &str =
    "set VM_MIRROR to the root of a Debian archive (the URL that has dists/ and pool/ below it)";

/// The table of kernels.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The line that is used where none is named.
    pub default: String,
    /// All lines.
    #[serde(rename = "line")]
    pub lines: Vec<Line>,
}

/// One kernel line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// As it is named on the command line, `6.1`.
    pub name: String,
    /// The Debian suite that carries it.
    pub suite: String,
    /// The pinned version.
    pub version: String,
    /// The packages that make it up.
    #[serde(rename = "package")]
    pub packages: Vec<Package>,
}

/// A pinned package.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its file below the archive's root.
    pub path: String,
    /// The checksum of that file, 64 lower-case hexadecimal digits.
    pub sha256: String,
}

impl Table {
    /// The table that is built in.
    pub fn load() -> Result<Table> {
        toml::from_str(include_str!("../kernels.toml")).context("vm/kernels.toml")
    }

    /// The line of that name.
    pub fn line(&self, name: &str) -> Result<&Line> {
        self.lines.iter().find(|line| line.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.lines.iter().map(|l| l.name.as_str()).collect();
            fail(
                2,
                format!(
                    "there is no kernel line {name}: the lines are {}, and any directory with an \
                     unpacked kernel (boot/vmlinuz-*, lib/modules/*)",
                    names.join(", ")
                ),
            )
        })
    }

    /// The kernels that `--kernel` names: one, `all` lines, or where it is not given, the default.
    pub fn names(&self, kernel: Option<&str>) -> Vec<String> {
        match kernel {
            Some("all") => self.lines.iter().map(|line| line.name.clone()).collect(),
            one => vec![one.unwrap_or(&self.default).to_owned()],
        }
    }
}

impl Line {
    /// Where the unpacked kernel lies. Another pin is another directory.
    fn dir(&self, cache: &Cache) -> PathBuf {
        let mut hash = Sha256::new();
        for package in &self.packages {
            hash.update(&package.sha256);
        }
        let key = &hex(&hash.finalize())[..12];
        cache.path(format!("kernels/{}-{key}", self.name))
    }

    /// Whether it is fetched and unpacked.
    pub fn is_here(&self, cache: &Cache) -> bool {
        self.dir(cache).is_dir()
    }

    /// The kernel, fetched and unpacked where that is still to be done.
    pub fn get(&self, cache: &Cache) -> Result<Kernel> {
        let dir = self.dir(cache);
        if !dir.is_dir() {
            let _lock = cache.lock()?;
            if !dir.is_dir() {
                if mirror().is_none()
                    && cache::find_tool("apt-get").is_some()
                    && !setup::have_lists()
                {
                    say!("apt knows no archive here before it has its lists");
                    if !setup::apt_get("update")? && !setup::have_lists() {
                        bail!(
                            "apt-get update failed, see above, and without its lists apt names no \
                             archive: try again, or {SET_MIRROR}"
                        );
                    }
                }
                self.unpack(cache, &dir, &archives()?)?;
            }
        }
        Kernel::at(&dir)
    }

    /// Asks an archive for the suite of this line.
    pub fn reach(&self, archive: &str) -> Result<()> {
        let temp = tempfile::tempdir().context("cannot create a temporary directory")?;
        let url = format!("{}/dists/{}/Release", archive.trim_end_matches('/'), self.suite);
        download(&url, &temp.path().join("Release"))?
            .map_err(|why| anyhow!("does not answer for {}: {why}", self.suite))
    }

    fn unpack(&self, cache: &Cache, dir: &Path, archives: &[String]) -> Result<()> {
        cache.need_space(KERNEL_MB, &format!("kernel {}", self.name))?;
        let temp = cache.temp_dir()?;
        let root = temp.path().join("root");
        for package in &self.packages {
            let deb = temp.path().join("package.deb");
            say!("fetching {} {}", package.name, self.version);
            self.fetch(package, archives, &deb)?;
            cache::run("dpkg-deb", ["-x".as_ref(), deb.as_os_str(), root.as_os_str()])
                .with_context(|| format!("cannot unpack {}", package.name))?;
        }
        Kernel::at(&root)?.depmod()?;
        cache::put(&root, dir)
    }

    /// Downloads one package to `deb`, with its checksum checked.
    fn fetch(&self, package: &Package, archives: &[String], deb: &Path) -> Result<()> {
        let mut tried = Vec::new();
        for archive in archives {
            let url = format!("{}/{}", archive.trim_end_matches('/'), package.path);
            match download(&url, deb)? {
                Ok(()) => return check(deb, package),
                Err(why) => tried.push(format!("{url}\n      {why}")),
            }
        }
        bail!(
            "{} {} cannot be fetched:\n  {}\n\
             If the network is down, try again. If the archive does not carry this file: set \
             VM_MIRROR to the root of a Debian archive that has the suite {}, or re-pin the line \
             {} in {TABLE_FILE} (version, and name, path, sha256 of each package) to the newest \
             kernel of that suite; the head of that file says how.",
            package.name,
            self.version,
            tried.join("\n  "),
            self.suite,
            self.name,
        )
    }
}

/// Fetches `url`. The inner result is an archive that doesn't have it; the outer one is an
/// error that another archive won't cure.
fn download(url: &str, to: &Path) -> Result<Result<(), String>> {
    let helper = Path::new(APT_HELPER);
    let mut command;
    if helper.is_file() {
        command = Command::new(helper);
        command.args(["-o", "Acquire::Retries=2", "download-file", url]).arg(to);
    } else if let Some(curl) = cache::find_tool("curl") {
        command = Command::new(curl);
        command.args(["--fail", "--location", "--silent", "--show-error", "--retry", "2"]);
        command.arg("--output").arg(to).arg(url);
    } else {
        let message = "neither apt nor curl is here to fetch a kernel with; install curl";
        return Err(fail(MACHINE, message));
    }
    let output = command.stdin(Stdio::null()).output().context("cannot start the download")?;
    if output.status.success() && to.is_file() {
        return Ok(Ok(()));
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let lines = text.lines().map(str::trim);
    let why: Vec<&str> = lines.filter(|l| !l.is_empty() && !l.starts_with("W:")).collect();
    if why.iter().any(|line| line.contains("No space left")) {
        bail!("no space: {}", why.join(" "));
    }
    Ok(Err(if why.is_empty() { format!("{}", output.status) } else { why.join(" ") }))
}

/// Compares a file with the pinned checksum.
fn check(deb: &Path, package: &Package) -> Result<()> {
    let got = sha256(deb)?;
    if got == package.sha256 {
        return Ok(());
    }
    bail!(
        "wrong checksum: {} is not the file that {TABLE_FILE} pins\n  expected {}\n  got      {got}\n\
         Nothing of it was kept. A proxy may have answered in the archive's place: try again, or \
         set VM_MIRROR to another archive.",
        package.name,
        package.sha256
    )
}

/// The SHA-256 of a file's content in hexadecimal.
pub fn sha256(path: &Path) -> Result<String> {
    let reading = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(reading)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let n = file.read(&mut buffer).with_context(reading)?;
        if n == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..n]);
    }
}

/// Bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn mirror() -> Option<String> {
    std::env::var("VM_MIRROR").ok().filter(|mirror| !mirror.is_empty())
}

/// The roots of Debian archives to ask: VM_MIRROR, else those that apt uses here.
pub fn archives() -> Result<Vec<String>> {
    if let Some(mirror) = mirror() {
        return Ok(vec![mirror]);
    }
    let apt = cache::find_tool("apt-get")
        .with_context(|| format!("no apt on this machine tells a Debian archive: {SET_MIRROR}"))?;
    let output = Command::new(apt)
        .args(["indextargets", "--format", "$(CREATED_BY)|$(ORIGIN)|$(RELEASE)|$(REPO_URI)"])
        .output()
        .context("cannot start apt-get")?;
    let found = archives_of(&String::from_utf8_lossy(&output.stdout));
    if found.is_empty() && !setup::have_lists() {
        bail!(
            "apt has not fetched its lists here, which name the archives: `cargo vm setup` does \
             where it needs them, or {SET_MIRROR}"
        );
    }
    ensure!(!found.is_empty(), "apt on this machine names no Debian archive: {SET_MIRROR}");
    Ok(found)
}

/// The archive roots in what `apt-get indextargets` printed, Debian's own first; none where
/// none is Debian's: no other has its kernels.
fn archives_of(text: &str) -> Vec<String> {
    let mut found: Vec<(bool, String)> = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(4, '|');
        let mut next = || fields.next().unwrap_or("");
        let (made_by, origin, release, uri) = (next(), next(), next(), next());
        let security = release.contains("-security") || uri.contains("-security");
        if made_by == "Packages" && !security && !uri.is_empty() {
            for uri in roots(uri) {
                let entry = (origin != "Debian", uri);
                if !found.contains(&entry) {
                    found.push(entry);
                }
            }
        }
    }
    if found.iter().all(|(other, _)| *other) {
        return Vec::new();
    }
    found.sort_by_key(|(other, _)| *other);
    found.into_iter().map(|(_, uri)| uri).collect()
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

/// An unpacked kernel.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// What `uname -r` says in the guest.
    pub release: String,
    /// The bootable image.
    pub image: PathBuf,
    /// The directory of its modules.
    pub modules: PathBuf,
}

impl Kernel {
    /// Finds image and modules in a directory where packages were unpacked.
    pub fn at(dir: &Path) -> Result<Kernel> {
        let none = |what: &str| {
            anyhow!("{} holds no {what}: it is not an unpacked kernel package", dir.display())
        };
        let dir = dir.canonicalize().with_context(|| dir.display().to_string())?;
        let (release, modules) = ["lib/modules", "usr/lib/modules"]
            .iter()
            .flat_map(|sub| fs::read_dir(dir.join(sub)).into_iter().flatten().flatten())
            .filter(|entry| entry.path().join("kernel").is_dir())
            .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
            .next()
            .ok_or_else(|| none("lib/modules/*/kernel"))?;
        let image = [dir.join(format!("boot/vmlinuz-{release}")), modules.join("vmlinuz")]
            .into_iter()
            .find(|image| image.is_file())
            .ok_or_else(|| none(&format!("boot/vmlinuz-{release}")))?;
        Ok(Kernel { release, image, modules })
    }

    /// The kernel that `--kernel` names: a line of the table, or a directory.
    pub fn named(name: &str, cache: &Cache) -> Result<Kernel> {
        let table = Table::load()?;
        if name.contains('/') || (table.line(name).is_err() && Path::new(name).is_dir()) {
            let kernel = Kernel::at(Path::new(name))?;
            if !kernel.modules.join("modules.dep").is_file() {
                kernel.depmod()?;
            }
            return Ok(kernel);
        }
        table.line(name)?.get(cache)
    }

    /// Writes the modules' dependencies, which no package carries.
    fn depmod(&self) -> Result<()> {
        let base = self.modules.ancestors().nth(3).unwrap_or(Path::new("/"));
        cache::run("depmod", ["-b".as_ref(), base.as_os_str(), self.release.as_ref()])
            .and_then(|_| self.modules.join("modules.dep").metadata().context("modules.dep"))
            .with_context(|| format!("cannot index {}", self.modules.display()))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_holds_the_four_lines() {
        let table = Table::load().unwrap();
        assert_eq!(table.names(Some("all")), ["5.10", "6.1", "6.12", "7.2"]);
        assert_eq!(table.names(None), ["6.1"]);
        assert_eq!(table.names(Some("./a")), ["./a"]);
        for line in &table.lines {
            assert!(!line.packages.is_empty());
            for p in &line.packages {
                assert_eq!(p.sha256.len(), 64, "{}", p.name);
                assert!(p.sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
                assert!(p.path.starts_with("pool/main/") && p.path.ends_with("_amd64.deb"));
                assert!(p.path.contains(&format!("/{}_{}_", p.name, line.version)), "{}", p.path);
            }
        }
    }

    #[test]
    fn an_unknown_line_lists_the_lines() {
        let error = Table::load().unwrap().line("4.4").unwrap_err().to_string();
        assert!(
            error.contains("no kernel line 4.4") && error.contains("5.10, 6.1, 6.12, 7.2"),
            "{error}"
        );
    }

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

    fn package(sha256: &str) -> Package {
        Package { name: "p".into(), path: "p.deb".into(), sha256: sha256.into() }
    }

    #[test]
    fn a_wrong_checksum_names_both() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.deb");
        fs::write(&file, "abc").unwrap();
        let right = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert!(check(&file, &package(right)).is_ok());
        let error = check(&file, &package(&"0".repeat(64))).unwrap_err().to_string();
        assert!(error.contains(right) && error.contains(&"0".repeat(64)), "{error}");
    }

    #[test]
    fn an_interrupted_download_is_not_taken_for_a_kernel() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        for sub in ["DEBIAN", "boot", "lib/modules/1.0/kernel"] {
            fs::create_dir_all(tree.join(sub)).unwrap();
        }
        fs::write(tree.join("boot/vmlinuz-1.0"), "a kernel").unwrap();
        let control = "Package: p\nVersion: 1\nArchitecture: all\nMaintainer: m\nDescription: d\n";
        fs::write(tree.join("DEBIAN/control"), control).unwrap();
        let deb = dir.path().join("p.deb");
        let mut pack = Command::new("dpkg-deb");
        let output = pack.arg("--build").arg(&tree).arg(&deb).output().unwrap();
        assert!(output.status.success(), "{output:?}");

        let line = Line {
            name: "1.0".into(),
            suite: "s".into(),
            version: "1".into(),
            packages: vec![package(&sha256(&deb).unwrap())],
        };
        let cache = Cache::at(&dir.path().join("cache")).unwrap();
        let archives = [format!("file://{}", dir.path().display())];
        let whole = fs::read(&deb).unwrap();
        fs::write(&deb, &whole[..whole.len() - 1]).unwrap();
        let error = line.unpack(&cache, &line.dir(&cache), &archives).unwrap_err().to_string();
        assert!(error.contains("wrong checksum"), "{error}");
        assert!(!line.is_here(&cache));

        fs::write(&deb, &whole).unwrap();
        line.unpack(&cache, &line.dir(&cache), &archives).unwrap();
        assert!(line.is_here(&cache));
        assert_eq!(line.get(&cache).unwrap().release, "1.0");
    }

    #[test]
    fn image_and_modules_are_found_in_both_layouts() {
        for (modules, image) in [
            ("lib/modules/6.1", "boot/vmlinuz-6.1"),
            ("usr/lib/modules/6.1", "boot/vmlinuz-6.1"),
            ("usr/lib/modules/6.1", "usr/lib/modules/6.1/vmlinuz"),
        ] {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join(modules).join("kernel")).unwrap();
            fs::create_dir_all(dir.path().join("boot")).unwrap();
            assert!(Kernel::at(dir.path()).unwrap_err().to_string().contains("vmlinuz"));
            fs::write(dir.path().join(image), "").unwrap();
            let kernel = Kernel::at(dir.path()).unwrap();
            assert_eq!(kernel.release, "6.1");
            assert!(kernel.image.ends_with(image) && kernel.modules.ends_with(modules));
        }
        let empty = tempfile::tempdir().unwrap();
        assert!(
            Kernel::at(empty.path()).unwrap_err().to_string().contains("not an unpacked kernel")
        );
    }
}
