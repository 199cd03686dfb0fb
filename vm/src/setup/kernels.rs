//! The kernels: the pinned table, download, check, unpacking, and this machine's own.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use host::fail::{MACHINE, USAGE, fail};
use host::say;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::arch;
use crate::setup::apt::{self, Refused};
use crate::setup::cache::{self, Cache, Note};
use crate::setup::root;
use crate::setup::suite::{Archives, Suite};

/// The file to edit when a pinned package is gone.
const TABLE_FILE: &str = "vm/kernels.toml";
/// Free megabytes that fetching and unpacking one kernel may take.
const KERNEL_MB: u64 = 900;
/// What `--kernel` calls this machine's own kernel.
pub const HOST: &str = "host";
/// What a directory must hold to be one that `--kernel` takes.
const LAYOUT: &str = "such a directory holds an unpacked kernel: boot/vmlinuz-RELEASE or \
                      lib/modules/RELEASE/vmlinuz, and the modules in lib/modules/RELEASE (or \
                      below usr/lib). `dpkg-deb -x linux-image-….deb DIR` makes one";
/// The file in an unpacked kernel that lists its files.
const MANIFEST: &str = "manifest";

fn amd64() -> String {
    "amd64".to_owned()
}

/// Whether `--locked` forbids every kernel but the pinned one.
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Forbids every kernel but the pinned one.
pub fn lock() {
    LOCKED.store(true, Ordering::Relaxed);
}

/// Whether only what is pinned may be taken.
pub fn is_locked() -> bool {
    LOCKED.load(Ordering::Relaxed)
}

/// No archive has a pinned file, or a suite has no kernel of a line: why.
#[derive(Debug)]
pub struct Gone(pub String);

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Gone {}

/// The table of kernels.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The line that is used where none is named, for each architecture by Debian's name.
    default: HashMap<String, String>,
    /// Lines that are `extra` on an architecture only.
    #[serde(default)]
    extra: HashMap<String, Vec<String>>,
    /// All lines.
    #[serde(rename = "line")]
    pub lines: Vec<Line>,
}

/// One kernel line.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// As it is named on the command line, `6.1`.
    pub name: String,
    /// The Debian suite that carries it.
    pub suite: String,
    /// The pinned version.
    pub version: String,
    /// The release as it stands in the names of the packages, `6.1.0-50`.
    pub release: String,
    /// Whether it is not one of `all` lines.
    #[serde(default)]
    pub extra: bool,
    /// The packages that make it up.
    #[serde(rename = "package")]
    pub packages: Vec<Package>,
}

/// A pinned package.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Debian's name of its architecture.
    #[serde(default = "amd64")]
    pub arch: String,
    /// Its file below the archive's root.
    pub path: String,
    /// The size of that file in bytes.
    pub size: u64,
    /// The checksum of that file, 64 lower-case hexadecimal digits.
    pub sha256: String,
}

impl Table {
    /// The lines of the guest's architecture.
    pub fn load() -> Result<Table> {
        Table::of(arch::guest().debian())
    }

    /// The lines of an architecture, by Debian's name.
    fn of(arch: &str) -> Result<Table> {
        let mut table = Table::parse(include_str!("../../kernels.toml"))?;
        let extra = table.extra.remove(arch).unwrap_or_default();
        for line in &mut table.lines {
            line.packages.retain(|package| package.arch == arch);
            line.extra |= extra.contains(&line.name);
        }
        table.lines.retain(|line| !line.packages.is_empty());
        Ok(table)
    }

    /// All lines, with the packages of all architectures.
    fn parse(text: &str) -> Result<Table> {
        toml::from_str(text).context(TABLE_FILE)
    }

    /// The name of the default line.
    pub fn default(&self) -> &str {
        self.default.get(arch::guest().debian()).map_or("", String::as_str)
    }

    /// The line of that name.
    pub fn line(&self, name: &str) -> Result<&Line> {
        self.lines.iter().find(|line| line.name == name).ok_or_else(|| {
            let names: Vec<&str> = self.lines.iter().map(|l| l.name.as_str()).collect();
            fail(
                USAGE,
                format!(
                    "there is no kernel line {name}: the lines are {}. `{HOST}` is this machine's \
                     own kernel, and a directory works too: {LAYOUT}",
                    names.join(", ")
                ),
            )
        })
    }

    /// The lines that `all` names.
    pub fn all(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| !line.extra)
    }

    /// The kernels that `--kernel` names: one, several lines with commas between them, `all` lines, or
    /// where it is not given, the default. An unknown one is an error.
    pub fn names(&self, kernel: Option<&str>, cache: &Cache) -> Result<Vec<String>> {
        match kernel {
            Some("all") => Ok(self.all().map(|line| line.name.clone()).collect()),
            Some(list) if list.contains(',') && self.directory(list).is_none() => {
                list.split(',').map(|name| Ok(self.line(name)?.name.clone())).collect()
            }
            Some(one) => {
                if let Some(dir) = self.directory(one) {
                    Kernel::at(dir)?;
                } else if one == HOST && arch::is_foreign() {
                    Kernel::host(cache)?;
                } else if one != HOST {
                    self.line(one)?;
                }
                Ok(vec![one.to_owned()])
            }
            None => Ok(vec![self.default_name(cache)]),
        }
    }

    /// The kernel where none is named: the default line, or this machine's own kernel where no
    /// Debian archive can have that line.
    pub fn default_name(&self, cache: &Cache) -> String {
        self.default_of(cache, apt::may_have_debian)
    }

    fn default_of(&self, cache: &Cache, may_have_debian: impl Fn() -> bool) -> String {
        let line = self.lines.iter().find(|line| line.name == self.default());
        let here = line.is_some_and(|line| !line.places(cache).is_empty());
        if here || may_have_debian() || arch::is_foreign() {
            return self.default().to_owned();
        }
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            say!(
                "no Debian archive is configured here, and only such an archive has the pinned \
                 kernel {} (VM_MIRROR=URL names one): taking this machine's own kernel",
                self.default()
            );
        });
        HOST.to_owned()
    }

    /// The directory that `--kernel` names; none where it names a line or the host.
    fn directory<'a>(&self, name: &'a str) -> Option<&'a Path> {
        let known = name == HOST || self.lines.iter().any(|line| line.name == name);
        let path = Path::new(name);
        (name.contains('/') || (!known && path.is_dir())).then_some(path)
    }
}

impl Line {
    /// Where the unpacked kernel lies. Another pin is another directory.
    pub fn dir(&self, cache: &Cache) -> PathBuf {
        // Older versions kept no manifest.
        let mut hash = Sha256::new_with_prefix(MANIFEST);
        for package in &self.packages {
            hash.update(&package.sha256);
        }
        let key = &hex(&hash.finalize())[..12];
        cache.path(format!("kernels/{}-{key}", self.name))
    }

    /// The note in the cache of the kernel that takes the pinned one's place.
    fn note(&self, cache: &Cache) -> Note {
        Note::of(&self.dir(cache))
    }

    /// The kernel that takes the pinned one's place, where the cache has such a note; none where the
    /// mirror was not asked for the pinned one.
    fn moved(&self, mirror: Option<&str>, cache: &Cache) -> Option<Line> {
        toml::from_str(&self.note(cache).read(mirror)?).ok()
    }

    /// All that the cache has of it: the pinned kernel, or the one that takes its place, with the note.
    pub fn places(&self, cache: &Cache) -> Vec<PathBuf> {
        let mut places = vec![self.dir(cache)];
        places.retain(|place| place.exists());
        let moved = self.moved(None, cache).map(|moved| moved.dir(cache));
        if let Some(moved) = moved.filter(|moved| moved.exists()) {
            places.extend([moved, self.note(cache).path().to_owned()]);
        }
        places
    }

    /// Its version and what the cache has of it, for `cargo vm doctor`.
    pub fn describe(&self, cache: &Cache) -> String {
        let state = |line: &Line| match line.state(cache) {
            State::Here(_) => "here, intact".to_owned(),
            State::Damaged(why) => format!("damaged ({why}); the next run fetches it again"),
            State::Missing => format!("not fetched (cargo vm setup --kernel {} does)", line.name),
        };
        let moved = if is_locked() { None } else { self.moved(None, cache) };
        let state = match moved {
            Some(moved) if !matches!(self.state(cache), State::Here(_)) => {
                format!("gone from the archive; {} in its place: {}", moved.version, state(&moved))
            }
            _ => state(self),
        };
        format!("{} {state}", self.version)
    }

    /// What the cache has of it.
    pub fn state(&self, cache: &Cache) -> State {
        State::of(&self.dir(cache))
    }

    /// The kernel, fetched and unpacked where that is still to be done, or done again where its
    /// files are damaged. Where no archive has the pinned one any more: the newest of the line.
    pub fn get(&self, cache: &Cache) -> Result<Kernel> {
        self.get_from(cache, is_locked(), apt::mirror().as_deref(), Archives::here)
    }

    fn get_from(
        &self,
        cache: &Cache,
        locked: bool,
        mirror: Option<&str>,
        archives: impl Fn() -> Result<Archives>,
    ) -> Result<Kernel> {
        if let State::Here(kernel) = self.state(cache) {
            return Ok(kernel);
        }
        let moved = if locked { None } else { self.moved(mirror, cache) };
        if let Some(moved) = &moved {
            self.say_once(moved);
        }
        let gone = match moved.as_ref().unwrap_or(self).get_pinned(cache, &archives) {
            Err(gone) if gone.is::<Gone>() && !locked => gone,
            result => return result,
        };
        let archives = archives()?;
        let newest = self.newest(&archives, cache).with_context(|| {
            format!("{gone}\nThe newest kernel of the line cannot be taken in its place")
        });
        let extra = |error| fail(MACHINE, format!("{error:#}"));
        // Another failure is one, also of such a line.
        let newest = newest.map_err(|error| match self.extra && error.is::<Gone>() {
            true => extra(error),
            false => error,
        })?;
        self.say_once(&newest);
        let roots = archives.roots.clone();
        let kernel = newest.get_pinned(cache, || Ok(archives))?;
        self.note(cache).write(&roots, &toml::to_string(&newest)?)?;
        Ok(kernel)
    }

    /// Says that another kernel takes the place of the pinned one.
    fn say_once(&self, moved: &Line) {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
        let key = format!("{} {}", self.name, moved.release);
        if !said.contains(&key) {
            said.push(key);
            say!(
                "{} is gone from the archive: using {}, not tested by us; `cargo vm repin {}` pins it",
                self.release,
                moved.release,
                self.name
            );
        }
    }

    /// Its lines in kernels.toml.
    fn pin(&self) -> String {
        let Line { name, suite, version, release, .. } = self;
        format!(
            "name = \"{name}\"\nsuite = \"{suite}\"\nversion = \"{version}\"\nrelease = \"{release}\"\n"
        )
    }

    fn get_pinned(
        &self,
        cache: &Cache,
        archives: impl FnOnce() -> Result<Archives>,
    ) -> Result<Kernel> {
        let dir = self.dir(cache);
        State::here(&dir, &self.name, cache, || self.unpack(cache, &dir, &archives()?.roots))
    }

    /// This line with the newest kernel that an archive has of it, by the suite's own signed index.
    fn newest(&self, archives: &Archives, cache: &Cache) -> Result<Line> {
        let arch = self.packages.first().map_or("amd64", |package| &package.arch);
        archives.find(&self.suite, arch, cache, |index| self.newest_in(index))
    }

    /// The same, from one index: its packages of that architecture.
    pub fn newest_in(&self, suite: &Suite) -> Result<Line> {
        let mut packages = self.packages.iter().filter(|package| package.arch == suite.arch());
        let first =
            packages.clone().next().context("the line has no package of this architecture")?;
        let (before, after) = first
            .name
            .split_once(&self.release)
            .with_context(|| format!("{TABLE_FILE}: {} is not in {}", self.release, first.name))?;
        // 6.1. of 6.1.0-50
        let base: Vec<&str> = self.release.splitn(3, '.').collect();
        let base = format!("{before}{}.", base[..2.min(base.len())].join("."));
        let names = suite.names(&base)?;
        let releases =
            names.iter().filter_map(|name| name.strip_prefix(before)?.strip_suffix(after));
        // Not 6.1.0-51-rt, which is another line's.
        let plain = |release: &&str| {
            release.split('-').all(|piece| piece.starts_with(|c: char| c.is_ascii_digit()))
        };
        let newest = releases.filter(plain).max_by(|a, b| by_version(a, b));
        let release =
            newest.ok_or_else(|| Gone(format!("{} has no kernel {}", self.suite, self.name)))?;
        let mut line = Line { release: release.to_owned(), packages: Vec::new(), ..self.clone() };
        packages.try_for_each(|package| {
            let (package, version) =
                suite.package(&package.name.replace(&self.release, release))?;
            line.packages.push(package);
            line.version = version;
            anyhow::Ok(())
        })?;
        ensure!(
            !is_older(&line.version, &self.version)?,
            "the newest kernel {} in {}, {}, is older than {}, the pinned one: this archive is behind. \
             Try again later, or set VM_MIRROR to another archive",
            self.name,
            self.suite,
            line.version,
            self.version
        );
        Ok(line)
    }

    /// The line with the packages of all architectures, each of which has found its newest kernel.
    fn of_all(lines: &[Line]) -> Result<Line> {
        let first = lines.first().context("the line has no package")?;
        let one = |line: &Line| (line.release.clone(), line.version.clone());
        if lines.iter().any(|line| one(line) != one(first)) {
            let each = lines.iter().map(|line| {
                let arch = line.packages.first().map_or("", |package| &package.arch);
                format!("{arch} {} ({})", line.release, line.version)
            });
            bail!(
                "{}: the archive does not have the same kernel for all architectures yet: {}. Nothing is \
                 written; try again in some hours",
                first.name,
                each.collect::<Vec<_>>().join(", ")
            );
        }
        let packages = lines.iter().flat_map(|line| line.packages.clone()).collect();
        Ok(Line { packages, ..first.clone() })
    }

    /// Asks an archive for the suite of this line.
    pub fn reach(&self, archive: &str) -> Result<()> {
        let temp = tempfile::tempdir().context("cannot create a temporary directory")?;
        let url = format!("{}/dists/{}/Release", archive.trim_end_matches('/'), self.suite);
        apt::download(&url, &temp.path().join("Release"))?
            .map_err(|refused| anyhow!("does not answer for {}: {}", self.suite, refused.why))
    }

    fn unpack(&self, cache: &Cache, dir: &Path, archives: &[String]) -> Result<()> {
        cache.need_space(KERNEL_MB, &format!("kernel {}", self.name))?;
        let temp = cache.temp_dir()?;
        let root = temp.path().join("root");
        for package in &self.packages {
            let deb = temp.path().join("package.deb");
            let megabytes = package.size.div_ceil(1_000_000);
            say!("fetching {} {} ({megabytes} MB)", package.name, self.version);
            self.fetch(package, archives, &deb)?;
            say!("unpacking {}", package.name);
            unpack_deb(&deb, &root)?;
        }
        finish(&root, dir)
    }

    /// Downloads one package to `deb`, with its checksum checked.
    fn fetch(&self, package: &Package, archives: &[String], deb: &Path) -> Result<()> {
        let Err(refused) = package.fetch(archives, deb)? else { return Ok(()) };
        let Line { suite, version, name, .. } = self;
        let why = format!("{} {version} cannot be fetched:\n  {}\n", package.name, refused.why);
        let host = format!("`--kernel {HOST}` runs this machine's own kernel.");
        let mirror =
            format!("set VM_MIRROR to the root of a Debian archive that has the suite {suite}");
        ensure!(
            refused.is_gone,
            "{why}This may pass, so no other kernel takes its place: try again when the network and the \
             archive answer, or {mirror}. {host}"
        );
        let gone = format!(
            "{why}The archive does not have this file: {mirror}, or pin the newest kernel of that suite: \
             `cargo vm repin {name}` writes it to {TABLE_FILE}. {host}"
        );
        Err(Gone(gone).into())
    }
}

/// What is written when pins change.
#[derive(Default)]
pub struct Changes {
    /// The files, and their new texts.
    pub files: Vec<(PathBuf, String)>,
    /// What to say when they are written.
    pub said: Vec<String>,
}

/// Pins the newest kernel of these lines, or of all: writes it to kernels.toml. With all, the packages
/// of the guest's root, too. A line's headers belong to it. Nothing is written before all is found.
pub fn repin(workspace: &Path, names: &[String], cache: &Cache) -> Result<()> {
    let changes = changes(workspace, names, &Archives::here()?, cache)?;
    cache::replace(&changes.files)?;
    changes.said.iter().for_each(|what| say!("{what}"));
    Ok(())
}

fn changes(
    workspace: &Path,
    names: &[String],
    archives: &Archives,
    cache: &Cache,
) -> Result<Changes> {
    let file = workspace.join(TABLE_FILE);
    let reading = || file.display().to_string();
    let mut text = fs::read_to_string(&file).with_context(reading)?;
    let table = Table::parse(&text)?;
    let wanted: Vec<&Line> = match names {
        [] => table.lines.iter().collect(),
        names => names.iter().map(|name| table.line(name)).collect::<Result<_>>()?,
    };
    let mut changes = Changes::default();
    if names.is_empty() {
        root::repin(workspace, archives, cache, &mut changes)?;
    }
    for line in wanted {
        let mut all = Vec::new();
        for arch in line.packages.chunk_by(|a, b| a.arch == b.arch) {
            let own = Line { packages: arch.to_vec(), ..line.clone() };
            all.push(own.newest(archives, cache)?);
        }
        let new = Line::of_all(&all)?;
        root::repin_headers(workspace, &new, archives, cache, &mut changes)?;
        if new.release == line.release && new.packages == line.packages {
            changes.said.push(format!("{}: {} is the newest", line.name, line.release));
            continue;
        }
        for (old, new) in line.packages.iter().zip(&new.packages) {
            text = replaced(&text, &old.pin(), &new.pin())?;
        }
        text = replaced(&text, &line.pin(), &new.pin())?;
        let (new, old) = (&new.release, &line.release);
        changes.said.push(format!("{}: {new} is pinned in place of {old}", line.name));
    }
    changes.files.push((file, text));
    Ok(changes)
}

/// The text of kernels.toml with these lines in place of those.
fn replaced(text: &str, old: &str, new: &str) -> Result<String> {
    ensure!(text.matches(old).count() == 1, "{TABLE_FILE} should have these lines once:\n{old}");
    Ok(text.replacen(old, new, 1))
}

impl Package {
    /// Its lines in kernels.toml.
    fn pin(&self) -> String {
        let Package { name, path, size, sha256, .. } = self;
        format!("name = \"{name}\"\npath = \"{path}\"\nsize = {size}\nsha256 = \"{sha256}\"\n")
    }

    /// Downloads it to `deb`, with its checksum checked. The inner error: no archive gives it, and what
    /// each of them says. It is gone where all of them say that they do not have it.
    pub fn fetch(&self, archives: &[String], deb: &Path) -> Result<Result<(), Refused>> {
        let (mut tried, mut is_gone) = (Vec::new(), true);
        for archive in archives {
            let url = format!("{}/{}", archive.trim_end_matches('/'), self.path);
            match apt::download(&url, deb)? {
                Ok(()) => return check(deb, self).map(Ok),
                Err(refused) => {
                    tried.push(format!("{url}\n      {}", refused.why));
                    is_gone &= refused.is_gone;
                }
            }
        }
        Ok(Err(Refused { why: tried.join("\n  "), is_gone }))
    }
}

/// Compares a file with the pinned checksum.
fn check(deb: &Path, package: &Package) -> Result<()> {
    let got = sha256(deb)?;
    if got == package.sha256 {
        return Ok(());
    }
    bail!(
        "wrong checksum: {} is not the file that is pinned\n  expected {}\n  got      {got}\n\
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

/// Unpacks a package; nothing is installed.
fn unpack_deb(deb: &Path, root: &Path) -> Result<()> {
    let args = ["-x".as_ref(), deb.as_os_str(), root.as_os_str()];
    match cache::run("dpkg-deb", args) {
        Err(error) if format!("{error:#}").contains("No space left") => {
            bail!(cache::no_space(root, &format!("{error:#}")))
        }
        result => result.map(|_| ()).with_context(|| format!("cannot unpack {}", deb.display())),
    }
}

/// Indexes an unpacked kernel, notes what it consists of, and moves it to its place.
fn finish(root: &Path, place: &Path) -> Result<()> {
    let kernel = Kernel::at(root)?;
    kernel.depmod()?;
    let manifest = manifest(root, &kernel.image)?;
    fs::write(root.join(MANIFEST), manifest).context("cannot write the kernel's manifest")?;
    cache::put(root, place)
}

/// A line for each file: its checksum, or `-` for all but the image, which is the only one that
/// is read as a whole at each start; its size; its path.
fn manifest(root: &Path, image: &Path) -> Result<String> {
    let image = sha256(image)? + " " + &image.strip_prefix(root.canonicalize()?)?.to_string_lossy();
    let mut lines = vec![image];
    for entry in walkdir::WalkDir::new(root).sort_by_file_name() {
        let entry = entry.context("cannot read the unpacked kernel")?;
        if entry.file_type().is_file() {
            let path = entry.path().strip_prefix(root)?.to_string_lossy();
            lines.push(format!("{} {path}", entry.metadata()?.len()));
        }
    }
    Ok(lines.join("\n"))
}

/// Compares an unpacked kernel with its manifest.
fn check_manifest(dir: &Path) -> Result<()> {
    let text = fs::read_to_string(dir.join(MANIFEST)).context(MANIFEST)?;
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (expected, image) = lines.next().context("its manifest is empty")?;
    for (size, path) in lines {
        let found = fs::metadata(dir.join(path)).map(|meta| meta.len());
        let found = found.with_context(|| path.to_owned())?;
        ensure!(size.parse() == Ok(found), "{path} has {found} bytes instead of {size}");
    }
    ensure!(sha256(&dir.join(image))? == expected, "{image} has the wrong checksum");
    Ok(())
}

/// What the cache has of a kernel.
pub enum State {
    /// All of it.
    Here(Kernel),
    /// Not what was unpacked there: why.
    Damaged(String),
    /// Nothing.
    Missing,
}

impl State {
    /// The kernel in `dir` of the cache; `fetch` puts it there where it is missing or damaged.
    fn here(
        dir: &Path,
        name: &str,
        cache: &Cache,
        fetch: impl FnOnce() -> Result<()>,
    ) -> Result<Kernel> {
        if let State::Here(kernel) = State::of(dir) {
            return Ok(kernel);
        }
        let _lock = cache.lock()?;
        match State::of(dir) {
            State::Here(kernel) => return Ok(kernel),
            State::Damaged(why) => {
                say!("the cached kernel {name} is damaged ({why}); fetching it again");
            }
            State::Missing => {}
        }
        fetch()?;
        Kernel::at(dir)
    }

    fn of(dir: &Path) -> State {
        if !dir.is_dir() {
            return State::Missing;
        }
        match check_manifest(dir).and_then(|()| Kernel::at(dir)) {
            Ok(kernel) => State::Here(kernel),
            Err(why) => State::Damaged(format!("{why:#}")),
        }
    }
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
    /// The newest kernel in a directory where packages were unpacked.
    pub fn at(dir: &Path) -> Result<Kernel> {
        let usage = |what: String| fail(USAGE, format!("{what}; {LAYOUT}"));
        let dir = dir.canonicalize().map_err(|error| {
            usage(format!("cannot use the kernel in {}: {error}", dir.display()))
        })?;
        let releases = releases(&dir);
        let kernels = releases.iter().filter_map(|(release, modules)| {
            let image = image(&dir, release, modules)?;
            Some(Kernel { release: release.clone(), image, modules: modules.clone() })
        });
        kernels.max_by(|a, b| by_version(&a.release, &b.release)).ok_or_else(|| {
            let dir = dir.display();
            usage(match releases.first() {
                None => format!("{dir} has no modules in lib/modules/RELEASE"),
                Some((release, _)) => format!("{dir} has no boot/vmlinuz-{release}"),
            })
        })
    }

    /// The kernel that `--kernel` names: a line of the table, `host`, or a directory.
    pub fn named(name: &str, cache: &Cache) -> Result<Kernel> {
        let table = Table::load()?;
        if let Some(dir) = table.directory(name) {
            let kernel = Kernel::at(dir)?;
            if !kernel.modules.join("modules.dep").is_file() {
                kernel.depmod()?;
            }
            return Ok(kernel);
        }
        if name == HOST {
            return Kernel::host(cache);
        }
        table.line(name)?.get(cache)
    }

    /// This machine's own kernel: the one that runs, if its image is installed and this user may
    /// read it; else the newest such; else the distribution's, from its apt archive.
    fn host(cache: &Cache) -> Result<Kernel> {
        if arch::is_foreign() {
            let arch = arch::guest().name();
            return Err(fail(USAGE, format!("this machine's own kernel is not one for {arch}")));
        }
        let kernel = match Kernel::installed(Path::new("/")) {
            Some(kernel) => kernel,
            None => Kernel::fetched(cache)?,
        };
        static SAID: Once = Once::new();
        SAID.call_once(|| {
            say!(
                "kernel {}, this machine's own ({}): not one of the pinned kernels, which the \
                 tests cover",
                kernel.release,
                kernel.image.display()
            );
        });
        Ok(kernel)
    }

    fn installed(root: &Path) -> Option<Kernel> {
        let running = rustix::system::uname().release().to_string_lossy().into_owned();
        let kernels = releases(root).into_iter().filter_map(|(release, modules)| {
            let image = image(root, &release, &modules)?;
            let usable = File::open(&image).is_ok() && modules.join("modules.dep").is_file();
            usable.then_some(Kernel { release, image, modules })
        });
        kernels.max_by(|a, b| {
            let runs = |kernel: &Kernel| kernel.release == running;
            runs(a).cmp(&runs(b)).then_with(|| by_version(&a.release, &b.release))
        })
    }

    /// The distribution's kernel in the cache, fetched where it is not there or damaged.
    fn fetched(cache: &Cache) -> Result<Kernel> {
        let place = cache.path("kernels/host");
        State::here(&place, HOST, cache, || {
            ensure!(
                cache::find_tool("apt-get").is_some(),
                "this machine has no kernel that this user can read (/lib/modules/*/vmlinuz, \
                 /boot/vmlinuz-*), and no apt to fetch one with: install this distribution's kernel \
                 package, or set VM_MIRROR to the root of a Debian archive"
            );
            apt::need_lists()?;
            cache.need_space(KERNEL_MB, "this distribution's kernel")?;
            let temp = cache.temp_dir()?;
            apt::download_kernel(temp.path())?;
            let root = temp.path().join("root");
            for entry in fs::read_dir(temp.path()).context("cannot read the cache")? {
                let deb = entry.context("cannot read the cache")?.path();
                if deb.extension().is_some_and(|extension| extension == "deb") {
                    say!("unpacking {}", deb.file_name().unwrap_or_default().to_string_lossy());
                    unpack_deb(&deb, &root)?;
                }
            }
            finish(&root, &place)
        })
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

/// The releases whose modules lie below `root`, with the directories of these.
fn releases(root: &Path) -> Vec<(String, PathBuf)> {
    let subs = ["lib/modules", "usr/lib/modules"];
    let entries =
        subs.iter().flat_map(|sub| fs::read_dir(root.join(sub)).into_iter().flatten().flatten());
    entries
        .filter(|entry| entry.path().join("kernel").is_dir())
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .collect()
}

/// The image that belongs to a release: Debian's and Ubuntu's place, Fedora's and Arch's.
fn image(root: &Path, release: &str, modules: &Path) -> Option<PathBuf> {
    let places = [root.join(format!("boot/vmlinuz-{release}")), modules.join("vmlinuz")];
    places.into_iter().find(|image| image.is_file())
}

/// Whether a version of a package is older than another, in Debian's order.
fn is_older(version: &str, than: &str) -> Result<bool> {
    let mut compare = Command::new(cache::tool("dpkg")?);
    let compare = compare.args(["--compare-versions", version, "lt", than]);
    let status = compare.stdin(Stdio::null()).status().context("cannot start dpkg")?;
    match status.code() {
        Some(code @ 0..=1) => Ok(code == 0),
        _ => bail!("dpkg cannot compare the versions {version} and {than}: {status}"),
    }
}

/// Compares releases by the numbers in them: 6.12 is newer than 6.9.
fn by_version(a: &str, b: &str) -> std::cmp::Ordering {
    let numbers = |release: &str| -> Vec<u64> {
        release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    numbers(a).cmp(&numbers(b)).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setup::suite::tests::Archive;

    #[test]
    fn the_table_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let table = Table::load().unwrap();
        let names = table.names(Some("all"), &cache).unwrap();
        assert_eq!(names, ["6.1", "6.1-rt", "6.12", "7.2"]);
        assert_eq!(table.names(Some("6.12"), &cache).unwrap(), ["6.12"]);
        assert_eq!(table.names(Some(HOST), &cache).unwrap(), [HOST]);
        assert_eq!(table.names(Some("6.1,7.2"), &cache).unwrap(), ["6.1", "7.2"]);
        assert_eq!(table.names(Some("6.1,7.3"), &cache).unwrap(), ["6.1", "7.3"]);
        assert!(table.names(Some("6.1,7.4"), &cache).is_err());
        let arm64 = Table::of("arm64").unwrap();
        assert_eq!(arm64.names(Some("all"), &cache).unwrap(), ["6.12", "7.2"]);
        assert_eq!(arm64.line("6.1").unwrap().packages.len(), 1);
        for line in &Table::parse(include_str!("../../kernels.toml")).unwrap().lines {
            assert!(!line.packages.is_empty());
            for p in &line.packages {
                assert_eq!(p.sha256.len(), 64, "{}", p.name);
                assert!(p.sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
                assert!(p.path.starts_with("pool/main/"), "{}", p.path);
                assert!(p.path.ends_with(&format!("_{}.deb", p.arch)), "{}", p.path);
                assert!(p.name.contains(&line.release), "{}: {}", p.name, line.release);
                assert!(p.path.contains(&format!("/{}_{}_", p.name, line.version)), "{}", p.path);
            }
        }
    }

    #[test]
    fn what_is_no_kernel_is_wrong_usage() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let table = Table::load().unwrap();
        for name in ["4.4", "/nonexistent", dir.path().to_str().unwrap()] {
            let error = table.names(Some(name), &cache).unwrap_err();
            assert_eq!(error.downcast_ref::<host::fail::Fail>().unwrap().code, 2, "{error}");
            assert!(error.to_string().contains("lib/modules/RELEASE"), "{error}");
        }
    }

    #[test]
    fn an_unknown_line_lists_the_lines() {
        let error = Table::load().unwrap().line("4.4").unwrap_err().to_string();
        assert!(
            error.contains("no kernel line 4.4") && error.contains("6.1, 6.1-rt, 6.12, 6.18, 7.2"),
            "{error}"
        );
    }

    fn package(sha256: &str) -> Package {
        Package {
            name: "p".into(),
            arch: amd64(),
            path: "p.deb".into(),
            size: 1,
            sha256: sha256.into(),
        }
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
            release: "1.0".into(),
            extra: false,
            packages: vec![package(&sha256(&deb).unwrap())],
        };
        let cache = Cache::at(&dir.path().join("cache")).unwrap();
        let archives = [format!("file://{}", dir.path().display())];
        let whole = fs::read(&deb).unwrap();
        fs::write(&deb, &whole[..whole.len() - 1]).unwrap();
        let error = line.unpack(&cache, &line.dir(&cache), &archives).unwrap_err().to_string();
        assert!(error.contains("wrong checksum"), "{error}");
        assert!(matches!(line.state(&cache), State::Missing));

        fs::write(&deb, &whole).unwrap();
        line.unpack(&cache, &line.dir(&cache), &archives).unwrap();
        assert_eq!(line.get(&cache).unwrap().release, "1.0");

        // Whatever happens to it in the cache is noticed, and unpacking it again repairs it.
        let image = line.dir(&cache).join("boot/vmlinuz-1.0");
        type Damage = fn(&Path) -> std::io::Result<()>;
        let damages: [(Damage, &str); 3] = [
            (|image| fs::write(image, "A kernel"), "boot/vmlinuz-1.0 has the wrong checksum"),
            (|image| fs::write(image, "a"), "boot/vmlinuz-1.0 has 1 bytes instead of 8"),
            (|image| fs::remove_file(image), "boot/vmlinuz-1.0: No such file"),
        ];
        for (damage, expected) in damages {
            damage(&image).unwrap();
            let State::Damaged(why) = line.state(&cache) else { panic!("not damaged: {expected}") };
            assert!(why.contains(expected), "{why}");
            line.unpack(&cache, &line.dir(&cache), &archives).unwrap();
            assert!(matches!(line.state(&cache), State::Here(_)));
        }
    }

    /// The line 1.0 with the kernel that the archive has built.
    fn line_of(archive: &Archive, release: &str) -> Line {
        let deb = archive.deb(release);
        let name = format!("linux-image-{release}-amd64");
        let package = Package {
            path: format!("pool/{name}.deb"),
            name,
            arch: amd64(),
            size: deb.metadata().unwrap().len(),
            sha256: sha256(&deb).unwrap(),
        };
        Line {
            name: "1.0".into(),
            suite: "moving".into(),
            version: release.into(),
            release: release.into(),
            extra: false,
            packages: vec![package],
        }
    }

    fn no_network() -> Result<Archives> {
        bail!("no network")
    }

    #[test]
    fn another_kernel_takes_the_place_of_one_that_is_gone_and_of_no_other() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(temp.path()).unwrap();
        let archive = Archive::new();
        let here = || Ok(archive.archives());
        ["1.0.0-8", "1.0.0-9", "1.0.0-10"].into_iter().for_each(|release| archive.build(release));
        archive.carries(&["1.0.0-9", "1.0.0-10"]);
        let line = line_of(&archive, "1.0.0-9");
        let note = line.note(&cache).path().to_owned();

        // An archive that does not answer, alone and beside one that does not have it.
        let pinned = temp.path().join("pinned.deb");
        fs::rename(archive.deb("1.0.0-9"), &pinned).unwrap();
        let down = "http://127.0.0.1:9".to_owned();
        for others in [vec![], archive.archives().roots] {
            let roots = [others, vec![down.clone()]].concat();
            let down = || Ok(Archives { roots: roots.clone(), ..archive.archives() });
            let error = line.get_from(&cache, false, None, down).unwrap_err();
            assert!(!error.is::<Gone>(), "{error}");
            assert!(!note.exists());
        }

        let error = line.get_from(&cache, true, None, here).unwrap_err();
        assert!(error.is::<Gone>() && !note.exists(), "{error}");
        assert_eq!(line.get_from(&cache, false, None, here).unwrap().release, "1.0.0-10-amd64");
        assert_eq!(
            line.describe(&cache),
            "1.0.0-9 gone from the archive; 1.0.0-10 in its place: here, intact"
        );
        let default = HashMap::from([(arch::guest().debian().to_owned(), line.name.clone())]);
        let table = Table { default, extra: HashMap::new(), lines: vec![line.clone()] };
        assert_eq!(table.default_of(&cache, || false), "1.0");
        // From now on without the network, and nothing is written.
        let written = fs::metadata(&note).unwrap().modified().unwrap();
        let again = |mirror| line.get_from(&cache, false, mirror, no_network);
        assert_eq!(again(None).unwrap().release, "1.0.0-10-amd64");
        let own = archive.archives().roots.remove(0);
        assert_eq!(again(Some(&own)).unwrap().release, "1.0.0-10-amd64");
        // Also where something is left of the pinned one.
        fs::create_dir(line.dir(&cache)).unwrap();
        assert_eq!(again(None).unwrap().release, "1.0.0-10-amd64");
        fs::remove_dir(line.dir(&cache)).unwrap();
        assert_eq!(fs::metadata(&note).unwrap().modified().unwrap(), written);
        assert!(again(Some("http://other")).is_err());

        // That one is gone, too.
        fs::remove_dir_all(line.moved(None, &cache).unwrap().dir(&cache)).unwrap();
        assert!(line.places(&cache).is_empty());
        assert_eq!(table.default_of(&cache, || false), HOST);
        fs::remove_file(archive.deb("1.0.0-10")).unwrap();
        archive.build("1.0.0-11");
        archive.carries(&["1.0.0-11"]);
        assert_eq!(line.get_from(&cache, false, None, here).unwrap().release, "1.0.0-11-amd64");
        assert_eq!(line.moved(None, &cache).unwrap().release, "1.0.0-11");

        // Another archive has the pinned one.
        fs::rename(&pinned, archive.deb("1.0.0-9")).unwrap();
        let found = line.get_from(&cache, false, Some("http://other"), here).unwrap();
        assert_eq!(found.release, "1.0.0-9-amd64");
        assert_eq!(again(None).unwrap().release, "1.0.0-9-amd64");
    }

    /// A workspace whose pins are of this release, in the archive's suite.
    fn workspace(release: &str) -> tempfile::TempDir {
        let workspace = tempfile::tempdir().unwrap();
        fs::create_dir(workspace.path().join("vm")).unwrap();
        let hash = "0".repeat(64);
        let package = |arch| {
            let name = format!("linux-image-{release}-{arch}");
            format!(
                "\n[[line.package]]\narch = \"{arch}\"\nname = \"{name}\"\npath = \"pool/{name}.deb\"\n\
                 size = 1\nsha256 = \"{hash}\"\n"
            )
        };
        let table = format!(
            "[default]\n\n[[line]]\nname = \"6.1\"\nsuite = \"moving\"\nversion = \"{release}\"\n\
             release = \"{release}\"\n{}{}",
            package("amd64"),
            package("arm64")
        );
        fs::write(workspace.path().join(TABLE_FILE), table).unwrap();
        let headers =
            [format!("linux-headers-{release}-amd64"), format!("linux-headers-{release}-common")];
        let tool = ["tool".to_owned()];
        for (root, wanted) in [
            ("root-arm64", tool.as_slice()),
            ("root-sid", &tool),
            ("root-bookworm", &tool),
            ("headers-6.1", &headers),
        ] {
            let list: String =
                wanted.iter().map(|name| format!("{hash} 1 pool/{name}_1_amd64.deb\n")).collect();
            let text =
                format!("suite = \"moving\"\nwanted = {wanted:?}\n\npackages = '''\n{list}'''\n");
            fs::write(workspace.path().join(format!("vm/{root}.toml")), text).unwrap();
        }
        workspace
    }

    /// The files of a workspace and their texts.
    fn texts(workspace: &Path) -> Vec<(PathBuf, String)> {
        let files = fs::read_dir(workspace.join("vm")).unwrap().map(|entry| entry.unwrap().path());
        let mut texts: Vec<_> =
            files.map(|file| (file.clone(), fs::read_to_string(file).unwrap())).collect();
        texts.sort();
        texts
    }

    #[test]
    fn all_that_is_pinned_anew_is_written_or_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(temp.path()).unwrap();
        let archive = Archive::new();
        let workspace = workspace("6.1.0-50");
        let before = texts(workspace.path());

        // One architecture's is there before the other's.
        archive.carries_in(&[("amd64", &["6.1.0-50", "6.1.0-51"]), ("arm64", &["6.1.0-50"])]);
        let repin = |names: &[String]| {
            let changes = changes(workspace.path(), names, &archive.archives(), &cache)?;
            cache::replace(&changes.files)
        };
        for names in [vec![], vec!["6.1".to_owned()]] {
            let error = format!("{:#}", repin(&names).unwrap_err());
            assert!(error.contains("amd64 6.1.0-51 (6.1.0-51), arm64 6.1.0-50 "), "{error}");
            assert_eq!(texts(workspace.path()), before);
        }

        archive.carries_in(&[("amd64", &["6.1.0-51"]), ("arm64", &["6.1.0-51"])]);
        repin(&[]).unwrap();
        let after = texts(workspace.path());
        assert_eq!(after.len(), before.len());
        for ((file, after), (_, before)) in after.iter().zip(&before) {
            assert!(after != before, "{}", file.display());
        }
        let table = fs::read_to_string(workspace.path().join(TABLE_FILE)).unwrap();
        assert!(!table.contains("6.1.0-50"), "{table}");
        let line = &Table::parse(&table).unwrap().lines[0];
        assert_eq!((line.version.as_str(), line.packages.len()), ("6.1.0-51", 2));
        let headers = fs::read_to_string(workspace.path().join("vm/headers-6.1.toml")).unwrap();
        for name in ["linux-headers-6.1.0-51-amd64", "linux-headers-6.1.0-51-common"] {
            assert!(headers.contains(&format!("\"{name}\"")), "{headers}");
            assert!(headers.contains(&format!(" 7 pool/{name}.deb\n")), "{headers}");
        }
        assert!(!headers.contains("6.1.0-50"), "{headers}");
        // The kernel is the newest, and its headers are not: of the line alone, too.
        fs::write(workspace.path().join("vm/headers-6.1.toml"), headers.replace("-51-", "-50-"))
            .unwrap();
        repin(&["6.1".to_owned()]).unwrap();
        assert_eq!(texts(workspace.path()), after);
    }

    #[test]
    fn an_older_kernel_is_not_the_newest() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(temp.path()).unwrap();
        let archive = Archive::new();
        ["1.0.0-9", "1.0.0-10"].into_iter().for_each(|release| archive.build(release));
        archive.carries(&["1.0.0-9"]);
        let line = line_of(&archive, "1.0.0-10");
        fs::remove_file(archive.deb("1.0.0-10")).unwrap();
        let here = || Ok(archive.archives());
        let error = format!("{:#}", line.get_from(&cache, false, None, here).unwrap_err());
        assert!(error.contains("1.0.0-9, is older than 1.0.0-10, the pinned one"), "{error}");
        assert!(!line.note(&cache).path().exists());
        assert!(is_older("6.1.9-1~bpo12+1", "6.1.9-1").unwrap());
        assert!(!is_older("6.1.10-1", "6.1.9-1").unwrap());
        assert!(!is_older("6.1.9-1", "6.1.9-1").unwrap());
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
        assert!(Kernel::at(empty.path()).unwrap_err().to_string().contains("has no modules"));
    }

    #[test]
    fn the_newest_installed_kernel_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        // Fedora's and Arch's layout, and one whose modules are there without an image.
        for release in ["6.9.4-200.fc40.x86_64", "6.12.1-arch1-1", "7.0.0"] {
            let modules = dir.path().join("usr/lib/modules").join(release);
            fs::create_dir_all(modules.join("kernel")).unwrap();
            fs::write(modules.join("modules.dep"), "").unwrap();
            if release != "7.0.0" {
                fs::write(modules.join("vmlinuz"), "").unwrap();
            }
        }
        assert_eq!(Kernel::installed(dir.path()).unwrap().release, "6.12.1-arch1-1");
        assert_eq!(Kernel::at(dir.path()).unwrap().release, "6.12.1-arch1-1");
        assert!(Kernel::installed(&dir.path().join("nowhere")).is_none());
    }
}
