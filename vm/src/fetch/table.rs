//! The kernel lines of `vm/kernels.toml`: which there are, which kernel each of them stands for, and
//! fetching it.
//!
//! A *pinned* line is one file of Debian's, known by its checksum in `vm/pinned.toml`, as are the files that
//! it is unpacked to. Another line
//! *follows* its suite: what the cache has of it is taken, and where that is nothing, or older than what
//! the tests passed on, the newest of the suite's signed index is fetched.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use workshop::fail::{MACHINE, USAGE, fail};
use workshop::say;

use crate::arch::Arch;
use crate::fetch::apt::{self, Source};
use crate::fetch::cache::{Cache, hex, sha256, unpack_all};
use crate::fetch::index::Index;
use crate::fetch::kernel::{HOST, KERNEL_MB, Kernel, LAYOUT, by_version};
use crate::fetch::seal::{LIST, List};

const LINES: &str = include_str!("../../kernels.toml");
const LINES_FILE: &str = "vm/kernels.toml";
const PINNED: &str = include_str!("../../pinned.toml");
const PINNED_FILE: &str = "vm/pinned.toml";
/// What the tests said of each line, and on which release.
pub const TESTED_FILE: &str = "vm/tested.json";

/// By architecture and line, what the tests last said.
pub type Tested = BTreeMap<String, BTreeMap<String, Passed>>;

/// What the tests said of a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passed {
    /// What `uname -r` says there.
    pub release: String,
    /// By program, what its tests said. None of a line for which docs/kernels.md does not vouch.
    pub programs: BTreeMap<String, String>,
}

/// What the tests said when this launcher was built.
pub fn tested() -> Result<Tested> {
    serde_json::from_str(include_str!("../../tested.json")).context(TESTED_FILE)
}

#[derive(Debug)]
pub struct Table {
    arch: Arch,
    source: Source,
    cache: Cache,
    pub default: String,
    /// In the order of the file.
    pub lines: Vec<Line>,
}

/// A kernel line, as the file has it, and for one architecture.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// As it is named on the command line, `6.1`.
    pub name: String,
    /// The Debian suite that carries it.
    pub suite: String,
    /// The names of its packages: `linux-image-6.1.*-amd64`.
    packages: Vec<String>,
    archs: Vec<String>,
    #[serde(default)]
    extra: Vec<String>,
    #[serde(default)]
    pinned: bool,
    /// Whether it is not one of `all` lines.
    #[serde(skip)]
    pub is_extra: bool,
    /// Debian's name of the architecture.
    #[serde(skip)]
    arch: &'static str,
    /// The packages of a pinned line.
    #[serde(skip)]
    pins: Option<Vec<Pin>>,
    /// The checksum of all files of a pinned line's kernel.
    #[serde(skip)]
    files: Option<String>,
    #[serde(skip)]
    pub tested: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pin {
    line: String,
    arch: String,
    name: String,
    version: String,
    path: String,
    size: u64,
    sha256: String,
}

/// What the packages of a pinned line are unpacked to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Files {
    line: String,
    arch: String,
    /// See [`List::digest`].
    files: String,
}

#[derive(Default, Serialize, Deserialize)]
struct Pins {
    kernel: Vec<Files>,
    package: Vec<Pin>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Lines {
    default: HashMap<String, String>,
    line: Vec<Line>,
}

impl Table {
    pub fn load(arch: Arch, source: &Source, cache: &Cache) -> Result<Table> {
        let Lines { mut default, line } = toml::from_str(LINES).context(LINES_FILE)?;
        let pins: Pins = toml::from_str(PINNED).context(PINNED_FILE)?;
        let tested = tested()?.remove(arch.name()).unwrap_or_default();
        let lines = line.into_iter().filter(|line| line.is_for(arch)).map(|line| {
            let tested = tested.get(&line.name).map(|passed| passed.release.clone());
            line.for_arch(arch.debian(), &pins, tested)
        });
        let lines = lines.collect();
        let default = default.remove(arch.debian()).context(LINES_FILE)?;
        Ok(Table { arch, source: source.clone(), cache: cache.clone(), default, lines })
    }

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

    /// The line that a directory of this name, in the cache's directory of kernels, may stand for; or why
    /// there is none.
    pub fn line_of(&self, name: &str) -> Result<&Line, String> {
        let line = self.lines.iter().find(|line| line.is_named(name, &self.cache));
        let line = line.ok_or_else(|| {
            format!("no kernel line of this version has it for {} guests", self.arch.debian())
        })?;
        match star(line.first(), name).filter(|star| line.pins.is_none() && line.is_old(star)) {
            Some(_) => Err(format!(
                "it is older than {}, on which the tests of kernel {} passed",
                line.tested.as_deref().unwrap_or_default(),
                line.name
            )),
            None => Ok(line),
        }
    }

    /// The last line of the table, the newest kernel.
    pub fn newest(&self) -> Result<&Line> {
        self.lines.last().context(LINES_FILE)
    }

    pub fn all(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| !line.is_extra)
    }

    /// The kernels that `--kernel` names: one, several lines with commas between them, `all` lines, or
    /// where it is not given, the default. An unknown one is an error.
    pub fn names(&self, kernel: Option<&str>) -> Result<Vec<String>> {
        match kernel {
            Some("all") => Ok(self.all().map(|line| line.name.clone()).collect()),
            Some(list) if list.contains(',') && self.directory(list).is_none() => {
                list.split(',').map(|name| Ok(self.line(name)?.name.clone())).collect()
            }
            Some(one) => {
                if let Some(dir) = self.directory(one) {
                    Kernel::at(dir)?;
                } else if one == HOST && self.arch.is_foreign() {
                    Kernel::host(self.arch, &self.cache)?;
                } else if one != HOST {
                    self.line(one)?;
                }
                Ok(vec![one.to_owned()])
            }
            None => Ok(vec![self.default_name()]),
        }
    }

    /// The kernel where none is named: the default line, or this machine's own kernel where no
    /// Debian archive can have that line.
    pub fn default_name(&self) -> String {
        self.default_where(|| self.source.has_debian())
    }

    fn default_where(&self, has_debian: impl Fn() -> bool) -> String {
        let line = self.lines.iter().find(|line| line.name == self.default);
        let here = line.is_some_and(|line| !line.places(&self.cache).is_empty());
        if here || has_debian() || self.arch.is_foreign() {
            return self.default.clone();
        }
        say!(
            "no Debian archive is configured here, and only such an archive has the kernel {} \
             (VM_MIRROR=URL names one): taking this machine's own kernel",
            self.default
        );
        HOST.to_owned()
    }

    /// The kernel of that name: a line, `host`, or a directory. Fetched where it is missing.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        if let Some(dir) = self.directory(name) {
            return Kernel::of_user(dir, self.arch);
        }
        if name == HOST {
            return Kernel::host(self.arch, &self.cache);
        }
        let line = self.line(name)?;
        let kernel = line.get(&self.source, &self.cache)?;
        match &line.tested {
            Some(tested) if *tested == kernel.release => {}
            Some(tested) => {
                say!("kernel {name} is {} here; the tests last passed on {tested}", kernel.release)
            }
            None => say!("kernel {name} is {}: not all tests have run there", kernel.release),
        }
        Ok(kernel)
    }

    /// The directory that `--kernel` names; none where it names a line or the host.
    fn directory<'a>(&self, name: &'a str) -> Option<&'a Path> {
        let known = name == HOST || self.lines.iter().any(|line| line.name == name);
        let path = Path::new(name);
        (name.contains('/') || (!known && path.is_dir())).then_some(path)
    }
}

/// What stands for the `*` of a package's name: `6.12.*-amd64` of 6.12.107+deb13-amd64. Not of
/// 6.1.0-51-rt-amd64, which is another line's.
fn star<'n>(pattern: &str, name: &'n str) -> Option<&'n str> {
    let (before, after) = pattern.split_once('*')?;
    let star = name.strip_prefix(before)?.strip_suffix(after)?;
    let is_plain = star.split('-').all(|piece| piece.starts_with(|c: char| c.is_ascii_digit()));
    is_plain.then_some(star)
}

impl Line {
    fn is_for(&self, arch: Arch) -> bool {
        self.archs.iter().any(|it| it == arch.debian())
    }

    fn for_arch(self, arch: &'static str, pins: &Pins, tested: Option<String>) -> Line {
        let is_its = |pin: &&Pin| pin.line == self.name && pin.arch == arch;
        let files = pins.kernel.iter().find(|it| it.line == self.name && it.arch == arch);
        Line {
            is_extra: self.extra.iter().any(|extra| extra == arch),
            packages: self.packages.iter().map(|name| name.replace("ARCH", arch)).collect(),
            arch,
            pins: self.pinned.then(|| pins.package.iter().filter(is_its).cloned().collect()),
            files: files.map(|it| it.files.clone()),
            tested,
            ..self
        }
    }

    /// Its first package, whose name tells the kernels of a line apart.
    fn first(&self) -> &str {
        self.packages.first().map_or("", String::as_str)
    }

    /// The places in the cache with kernels that may stand for the line, the best first: of a pinned one,
    /// that of its files; else the newest, and none that is older than what the tests passed on.
    fn places(&self, cache: &Cache) -> Vec<PathBuf> {
        let kernels = cache.path("kernels");
        let mut places = match &self.pins {
            Some(pins) => vec![pinned_place(&self.name, pins, cache)],
            None => {
                let entries = fs::read_dir(&kernels).into_iter().flatten().flatten();
                let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
                let stars = names.filter_map(|name| Some(star(self.first(), &name)?.to_owned()));
                let mut stars: Vec<_> = stars.filter(|star| !self.is_old(star)).collect();
                stars.sort_by(|a, b| by_version(b, a));
                stars.iter().map(|star| kernels.join(self.first().replace('*', star))).collect()
            }
        };
        places.retain(|place| place.is_dir());
        places
    }

    /// Whether it is the name of its kernel's directory in the cache.
    fn is_named(&self, name: &str, cache: &Cache) -> bool {
        match &self.pins {
            Some(pins) => pinned_place(&self.name, pins, cache).ends_with(name),
            None => star(self.first(), name).is_some(),
        }
    }

    /// The kernel of the cache that stands for the line, and its place.
    pub fn here(&self, cache: &Cache) -> Option<(PathBuf, Kernel)> {
        self.places(cache).into_iter().find_map(|place| {
            let kernel = Kernel::in_cache(cache, &place, self.pin()).ok().flatten()?;
            Some((place, kernel))
        })
    }

    /// The checksum of its kernel's files, where it is pinned.
    pub fn pin(&self) -> Option<&str> {
        self.files.as_deref()
    }

    /// Whether a kernel is older than the one that the tests passed on.
    fn is_old(&self, star: &str) -> bool {
        // `linux-image-6.12.107+deb13-amd64` ends with the release.
        let name = self.first().replace('*', star);
        let release = name.trim_start_matches(|c: char| !c.is_ascii_digit());
        self.tested.as_ref().is_some_and(|tested| by_version(release, tested).is_lt())
    }

    /// Its kernel, fetched where it is missing or damaged.
    pub fn get(&self, source: &Source, cache: &Cache) -> Result<Kernel> {
        let what = format!("kernel {}", self.name);
        let here = || self.here(cache).map(|(_, kernel)| kernel);
        cache.once((&what, KERNEL_MB), here, |temp| {
            if let Some(place) = self.places(cache).first() {
                cache.say_damage(&what, place, self.pin());
            }
            let place = self.fetch(source, cache, temp)?;
            Kernel::unpack(&what, temp, (cache, &place, self.pin()))
        })
    }

    /// Fetches its packages into `temp`. Returns the place of the kernel in the cache.
    fn fetch(&self, source: &Source, cache: &Cache, temp: &Path) -> Result<PathBuf> {
        if let Some(pins) = &self.pins {
            let archives = source.need_archives()?;
            pins.iter().try_for_each(|pin| pin.fetch(self, &archives, temp))?;
            return Ok(pinned_place(&self.name, pins, cache));
        }
        let index = self.index(source, temp);
        let index =
            index.with_context(|| format!("the newest kernel {} cannot be found", self.name))?;
        let star = self.newest(&index)?;
        let names = self.packages.iter().map(|name| name.replace('*', &star));
        index.download(&names.collect::<Vec<_>>(), temp)?;
        Ok(cache.path("kernels").join(self.first().replace('*', &star)))
    }

    /// The index of its suite, fetched into a directory in `temp`.
    pub fn index(&self, source: &Source, temp: &Path) -> Result<Index> {
        Index::from_archives(source, &self.suite, self.arch, temp)
    }

    /// What the cache has of it, for `cargo vm doctor`.
    pub fn describe(&self, cache: &Cache) -> String {
        if let Some((_, kernel)) = self.here(cache) {
            let pinned = match self.pin() {
                Some(_) => "",
                None => " since it was unpacked (not pinned)",
            };
            return format!("{} here, intact{pinned}", kernel.release);
        }
        let best = self.places(cache).into_iter().next();
        match best.map(|place| Kernel::in_cache(cache, &place, self.pin())) {
            Some(Err(why)) => format!("damaged ({why:#}); the next run fetches it again"),
            _ => format!("not fetched (cargo vm setup --kernel {} does)", self.name),
        }
    }

    /// The newest kernel of the line that the suite has: what stands for the `*`.
    fn newest(&self, index: &Index) -> Result<String> {
        let names = index.names(self.first().split('*').next().unwrap_or_default())?;
        let newest = names
            .iter()
            .filter_map(|name| star(self.first(), name))
            .max_by(|a, b| by_version(a, b));
        let newest = newest.ok_or_else(|| {
            let message = format!(
                "{} has no kernel {} any more: take another line, or set VM_MIRROR to an archive that \
                 has it. `--kernel {HOST}` runs this machine's own kernel",
                self.suite, self.name
            );
            fail(MACHINE, message)
        })?;
        ensure!(
            !self.is_old(newest),
            "the newest kernel {} in {}, {}, is older than {}, which the tests passed on: this archive \
             is behind. Try again later, or set VM_MIRROR to another archive",
            self.name,
            self.suite,
            self.first().replace('*', newest),
            self.tested.as_deref().unwrap_or_default()
        );
        Ok(newest.to_owned())
    }

    /// The packages with the headers of the line's kernel: fetched without the compiler that they
    /// depend on. None where the suite has none of this release.
    pub fn headers(&self, release: &str, index: &Index) -> Result<Option<Vec<String>>> {
        let common = release.strip_suffix(self.arch).map(|of| format!("linux-headers-{of}common"));
        let names = [Some(format!("linux-headers-{release}")), common];
        let names: Vec<String> = names.into_iter().flatten().collect();
        let known = index.names("linux-headers-")?;
        Ok(names.iter().all(|name| known.contains(name)).then_some(names))
    }

    /// The files of its newest kernel, to be pinned.
    fn newest_pins(&self, source: &Source, temp: &Path) -> Result<Vec<Pin>> {
        let index = self.index(source, temp)?;
        let star = self.newest(&index)?;
        let pin = |pattern: &String| {
            let name = pattern.replace('*', &star);
            let fields = index.package(&name)?;
            let field = |field: &str| {
                let mut values = fields.lines().filter_map(|line| line.strip_prefix(field));
                values.next().with_context(|| format!("the index has {name} without {field}"))
            };
            Ok(Pin {
                line: self.name.clone(),
                arch: self.arch.to_owned(),
                version: field("Version: ")?.to_owned(),
                path: field("Filename: ")?.to_owned(),
                size: field("Size: ")?.parse()?,
                sha256: field("SHA256: ")?.to_owned(),
                name,
            })
        };
        self.packages.iter().map(pin).collect()
    }

    /// The checksum of what these packages of it are unpacked to.
    fn unpacked(&self, pins: &[Pin], source: &Source, temp: &Path) -> Result<Files> {
        let temp = tempfile::tempdir_in(temp).context("cannot create a temporary directory")?;
        let archives = source.need_archives()?;
        pins.iter().try_for_each(|pin| pin.fetch(self, &archives, temp.path()))?;
        let root = temp.path().join("root");
        unpack_all(temp.path(), &root, &[])?;
        let files = List::of(&root)?.digest();
        Ok(Files { line: self.name.clone(), arch: self.arch.to_owned(), files })
    }
}

/// Where the kernel of these files lies. Others are another directory.
fn pinned_place(line: &str, pins: &[Pin], cache: &Cache) -> PathBuf {
    let mut hash = Sha256::new_with_prefix(LIST);
    pins.iter().for_each(|pin| hash.update(&pin.sha256));
    cache.path(format!("kernels/{line}-{}", &hex(&hash.finalize())[..12]))
}

impl Pin {
    /// Downloads it into `dir`, with its checksum checked.
    fn fetch(&self, line: &Line, archives: &[String], dir: &Path) -> Result<()> {
        let Pin { name, version, size, .. } = self;
        say!("fetching {name} {version} ({} MB)", size.div_ceil(1_000_000));
        let deb = dir.join(format!("{name}.deb"));
        let mut tried = Vec::new();
        for archive in archives {
            let url = format!("{}/{}", archive.trim_end_matches('/'), self.path);
            match apt::download(&url, &deb)? {
                Ok(()) => {
                    let got = sha256(&deb)?;
                    ensure!(
                        got == self.sha256,
                        "wrong checksum: {name} is not the file that is pinned\n  expected {}\n  got      {got}\n\
                         Nothing of it was kept. A proxy may have answered in the archive's place: try again, \
                         or set VM_MIRROR to another archive.",
                        self.sha256
                    );
                    return Ok(());
                }
                Err(why) => tried.push(format!("{url}\n      {why}")),
            }
        }
        bail!(
            "{name} {version} cannot be fetched:\n  {}\nTry again when the network and the archive \
             answer, or set VM_MIRROR to the root of a Debian archive that has the suite {} (a snapshot of an \
             older day has what was replaced since). Where the archive has a newer file in its place, \
             `cargo vm repin {}` pins that in {PINNED_FILE}, on a machine with apt. \
             `--kernel {HOST}` runs this machine's own kernel.",
            tried.join("\n  "),
            line.suite,
            line.name
        )
    }
}

/// Pins the newest kernels of these pinned lines, or of all, for all architectures, and what they are
/// unpacked to. Nothing is written before all is found.
pub fn repin(workspace: &Path, names: &[String], source: &Source, cache: &Cache) -> Result<()> {
    let Lines { line, .. } = toml::from_str(LINES).context(LINES_FILE)?;
    let lines: Vec<_> = line.into_iter().filter(|line| line.pinned).collect();
    if let Some(name) = names.iter().find(|name| lines.iter().all(|line| line.name != **name)) {
        let message = format!(
            "{name} is no pinned line: `cargo vm test --kernel {name} --bless` writes what the tests \
             say of the others"
        );
        return Err(fail(USAGE, message));
    }
    let file = workspace.join(PINNED_FILE);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let mut pins: Pins = toml::from_str(&text).context(PINNED_FILE)?;
    let before = pins.package.clone();
    let _lock = cache.lock()?;
    cache.need_space(KERNEL_MB, "a kernel that is to be pinned")?;
    let temp = cache.temp_dir()?;
    for declared in lines.iter().filter(|line| names.is_empty() || names.contains(&line.name)) {
        let mut found = Vec::new();
        for arch in Arch::ALL.into_iter().filter(|arch| declared.is_for(*arch)) {
            let line = declared.clone().for_arch(arch.debian(), &Pins::default(), None);
            let newest = line.newest_pins(source, temp.path())?;
            found.push((line, newest));
        }
        need_one_version(&declared.name, found.iter().flat_map(|(_, newest)| newest))?;
        pins.package.retain(|pin| pin.line != declared.name);
        for (line, newest) in found {
            let is_its = |files: &Files| files.line == line.name && files.arch == line.arch;
            let is_known = newest.iter().all(|pin| before.contains(pin));
            if !is_known || !pins.kernel.iter().any(is_its) {
                let files = line.unpacked(&newest, source, temp.path())?;
                pins.kernel.retain(|it| !is_its(it));
                pins.kernel.push(files);
            }
            pins.package.extend(newest);
        }
    }
    let head: String = text
        .lines()
        .take_while(|line| line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect();
    workshop::write(&file, &format!("{head}\n{}", toml::to_string(&pins)?))?;
    for pin in pins.package {
        let what = if before.contains(&pin) { "is the newest" } else { "is pinned now" };
        say!("{} {}: {} {what}", pin.line, pin.arch, pin.version);
    }
    Ok(())
}

/// An error where a line's packages have not all the same version.
fn need_one_version<'p>(line: &str, pins: impl Iterator<Item = &'p Pin> + Clone) -> Result<()> {
    let mut versions = pins.clone().map(|pin| &pin.version);
    let first = versions.next();
    let all: Vec<_> = pins.map(|pin| format!("{} {}", pin.arch, pin.version)).collect();
    ensure!(
        versions.all(|version| Some(version) == first),
        "{line}: the archive does not have the same kernel for all architectures yet: {}. Nothing is \
         written; try again in some hours",
        all.join(", ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::index::tests::{Archive, SUITE};
    use crate::fetch::rootfs;

    #[test]
    fn the_table_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let source = Source::from_env().unwrap();
        let [table, arm64] = Arch::ALL.map(|arch| Table::load(arch, &source, &cache).unwrap());
        let names = |table: &Table, kernel| table.names(Some(kernel));
        assert_eq!(names(&table, "all").unwrap(), ["6.1", "6.1-rt", "6.12", "7.2"]);
        assert_eq!(names(&table, "6.12").unwrap(), ["6.12"]);
        assert_eq!(names(&table, "6.1,7.3").unwrap(), ["6.1", "7.3"]);
        assert!(names(&table, "6.1,7.4").is_err());
        assert_eq!(names(&arm64, "all").unwrap(), ["6.12", "7.2"]);
        assert!(table.line("6.12-16k").is_err() && arm64.line("6.1").unwrap().is_extra);
        for line in table.lines.iter().chain(&arm64.lines) {
            assert!(line.packages.iter().all(|name| name.contains('*')), "{line:?}");
            assert!(!line.packages.is_empty() && (line.is_extra || line.tested.is_some()));
            for pin in line.pins.iter().flatten() {
                let file = format!("/{}_{}_{}.deb", pin.name, pin.version, pin.arch);
                assert!(pin.sha256.len() == 64 && pin.path.starts_with("pool/main/"), "{pin:?}");
                assert!(pin.path.ends_with(&file) && star(line.first(), &pin.name).is_some());
            }
            assert!(line.pins.as_ref().is_none_or(|pins| pins.len() == line.packages.len()));
            assert_eq!(
                line.pins.is_some(),
                line.pin().is_some_and(|pin| pin.len() == 64),
                "{line:?}"
            );
        }
    }

    #[test]
    fn a_name_is_of_one_line() {
        let plain = "linux-image-6.1.*-amd64";
        assert_eq!(star(plain, "linux-image-6.1.0-51-amd64"), Some("0-51"));
        for other in ["6.1.0-52-rt-amd64", "6.1.0-53-cloud-amd64", "6.12.9-amd64", "6.1.0-51-arm64"]
        {
            assert_eq!(star(plain, &format!("linux-image-{other}")), None, "{other}");
        }
        assert_eq!(
            star("linux-image-6.1.*-rt-amd64", "linux-image-6.1.0-52-rt-amd64"),
            Some("0-52")
        );
    }

    /// A line 1.0 of the archive's suite, which follows it.
    fn following(tested: Option<&str>) -> Line {
        Line {
            name: "1.0".into(),
            suite: SUITE.into(),
            packages: vec!["linux-image-1.0.*-amd64".into()],
            arch: "amd64",
            tested: tested.map(|star| format!("1.0.{star}-amd64")),
            ..Line::default()
        }
    }

    #[test]
    fn a_pinned_line_is_these_files_and_no_others() {
        let (archive, cache) = Archive::new();
        archive.build("1.0.0-9");
        archive.carries(&["1.0.0-9"]);
        let newest = || following(None).newest_pins(&archive.source(), archive.dir.path()).unwrap();
        let line = Line { pins: Some(newest()), ..following(None) };
        assert!(line.describe(&cache).starts_with("not fetched"));
        let whole = fs::read(archive.deb("1.0.0-9")).unwrap();
        fs::write(archive.deb("1.0.0-9"), &whole[..whole.len() - 1]).unwrap();
        let error = line.get(&archive.source(), &cache).unwrap_err().to_string();
        let right = &line.pins.as_ref().unwrap()[0].sha256;
        assert!(error.contains("wrong checksum") && error.contains(right), "{error}");
        assert!(line.places(&cache).is_empty());

        fs::write(archive.deb("1.0.0-9"), &whole).unwrap();
        let kernel = line.get(&archive.source(), &cache).unwrap();
        assert_eq!(kernel.release, "1.0.0-9-amd64");
        assert_eq!(line.get(&archive.none(), &cache).unwrap(), kernel);
        let unpinned = "1.0.0-9-amd64 here, intact since it was unpacked (not pinned)";
        assert_eq!(line.describe(&cache), unpinned);

        // Damage is noticed, and fetching it again repairs it.
        let place = line.here(&cache).unwrap().0;
        let module = kernel.modules.join("kernel/module");
        for (file, text, expected) in [
            (&kernel.image, "another kernel", "boot/vmlinuz-1.0.0-9-amd64 has the wrong checksum"),
            (&module, "changed", "kernel/module has the wrong checksum"),
            (&kernel.modules.join("modules.dep"), "other", "modules.dep has the wrong checksum"),
            (&place.join(LIST), "", "boot/ does not belong there"),
        ] {
            fs::write(file, text).unwrap();
            assert!(line.describe(&cache).contains(expected), "{}", line.describe(&cache));
            assert!(line.get(&archive.none(), &cache).is_err());
            assert_eq!(line.get(&archive.source(), &cache).unwrap(), kernel);
        }

        // Its own list says what its files are, but not which are pinned.
        let pinned = Line { files: Some(List::of(&place).unwrap().digest()), ..line.clone() };
        assert_eq!(pinned.describe(&cache), "1.0.0-9-amd64 here, intact");
        fs::remove_file(place.join(LIST)).unwrap();
        fs::write(&kernel.image, "another kernel").unwrap();
        let aside = archive.dir.path().join("aside");
        fs::rename(&place, &aside).unwrap();
        cache.keep(&aside, &place, None).unwrap();
        assert!(line.describe(&cache).contains("intact since it was unpacked (not pinned)"));
        let wrong = pinned.describe(&cache);
        assert!(wrong.contains("its list of files was changed, too"), "{wrong}");
        assert!(pinned.get(&archive.none(), &cache).is_err());
        assert_eq!(pinned.get(&archive.source(), &cache).unwrap(), kernel);
        // Packages that unpack to something else than what is pinned.
        let other = Line { files: Some("0".repeat(64)), ..line.clone() };
        let error = other.get(&archive.source(), &cache).unwrap_err().to_string();
        assert!(error.contains("have not the checksum that vm/pinned.toml gives"), "{error}");

        // A newer one takes the place of none: another pin has to say so.
        fs::remove_dir_all(&place).unwrap();
        fs::remove_file(archive.deb("1.0.0-9")).unwrap();
        archive.build("1.0.0-10");
        archive.carries(&["1.0.0-10"]);
        let error = line.get(&archive.source(), &cache).unwrap_err().to_string();
        assert!(error.contains("`cargo vm repin 1.0` pins that"), "{error}");
        assert!(line.places(&cache).is_empty());
        assert_eq!(newest()[0].path, "pool/linux-image-1.0.0-10-amd64.deb");
    }

    #[test]
    fn headers_of_a_suite_without_merged_usr_are_in_usr() {
        let (archive, cache) = Archive::new();
        let modules = "lib/modules/1.0.0-9-amd64/build";
        archive.pack("linux-headers-1.0.0-9-amd64", &[(modules, "headers")]);
        archive.pack("linux-headers-1.0.0-9-common", &[("usr/src/common", "headers")]);
        archive.carries(&["1.0.0-9"]);
        let get = |source: &Source| {
            rootfs::headers(&following(None), "1.0.0-9-amd64", source, &cache).map(Option::unwrap)
        };
        let place = get(&archive.source()).unwrap();
        assert_eq!(get(&archive.none()).unwrap(), place);
        for file in [&format!("usr/{modules}"), "usr/src/common"] {
            assert_eq!(fs::read_to_string(place.join(file)).unwrap(), "headers");
        }
    }

    #[test]
    fn a_line_follows_its_suite_and_believes_nothing_else() {
        let (archive, cache) = Archive::new();
        ["1.0.0-9", "1.0.0-10", "1.0.0-11"].into_iter().for_each(|release| archive.build(release));
        archive.carries(&["1.0.0-9", "1.0.0-10"]);
        let line = following(Some("0-9"));
        // A failure that may pass changes nothing.
        let error = line.get(&archive.none(), &cache).unwrap_err();
        assert!(!error.is::<workshop::fail::Fail>() && line.places(&cache).is_empty(), "{error}");
        let release =
            |line: &Line, source| Ok::<_, anyhow::Error>(line.get(&source, &cache)?.release);
        assert_eq!(release(&line, archive.source()).unwrap(), "1.0.0-10-amd64");
        let table = Table {
            arch: Arch::of_guest(None).unwrap(),
            source: archive.source(),
            cache: cache.clone(),
            default: "1.0".into(),
            lines: vec![line.clone()],
        };
        assert_eq!(table.default_where(|| false), "1.0");

        // From now on without the network, also where the suite has a newer one.
        archive.carries(&["1.0.0-11"]);
        assert_eq!(release(&line, archive.none()).unwrap(), "1.0.0-10-amd64");
        // The tests have passed on a newer one: that is fetched, and is not forgotten.
        let later = following(Some("0-11"));
        assert!(release(&later, archive.none()).is_err());
        assert_eq!(release(&later, archive.source()).unwrap(), "1.0.0-11-amd64");
        assert_eq!(release(&line, archive.none()).unwrap(), "1.0.0-11-amd64");
        // Where the newest is damaged, the one before stands for the line.
        fs::remove_file(cache.path("kernels/linux-image-1.0.0-11-amd64").join(LIST)).unwrap();
        assert_eq!(release(&line, archive.none()).unwrap(), "1.0.0-10-amd64");
        fs::remove_dir_all(cache.path("kernels")).unwrap();
        assert_eq!(table.default_where(|| false), HOST);

        // An archive that is behind, and one that has none.
        archive.carries(&["1.0.0-9"]);
        let error = release(&later, archive.source()).unwrap_err().to_string();
        assert!(error.contains("is older than 1.0.0-11-amd64, which the tests"), "{error}");
        archive.carries(&["2.0.0-1"]);
        let error = line.get(&archive.source(), &cache).unwrap_err();
        assert_eq!(error.downcast_ref::<workshop::fail::Fail>().unwrap().code, MACHINE, "{error}");
        // A file that is not what the signed index says.
        archive.carries(&["1.0.0-10"]);
        archive.build("1.0.0-10");
        fs::write(archive.deb("1.0.0-10"), "half a kernel").unwrap();
        assert!(line.get(&archive.source(), &cache).is_err() && line.places(&cache).is_empty());
    }

    #[test]
    fn all_that_is_pinned_anew_is_written_or_nothing() {
        let (archive, cache) = Archive::new();
        fs::create_dir(archive.dir.path().join("vm")).unwrap();
        let file = archive.dir.path().join(PINNED_FILE);
        fs::write(&file, PINNED).unwrap();
        let repin = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            let source = archive.source();
            super::repin(archive.dir.path(), &names, &source, &cache)
        };
        // One architecture's is there before the other's.
        archive.carries_in(&[("amd64", &["6.1.9-51"]), ("arm64", &["6.1.9-50"])]);
        let error = format!("{:#}", repin(&["6.1"]).unwrap_err());
        assert!(error.contains("amd64 6.1.9-51, arm64 6.1.9-50"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), PINNED);
        let error = repin(&["6.12"]).unwrap_err();
        assert_eq!(error.downcast_ref::<workshop::fail::Fail>().unwrap().code, USAGE, "{error}");

        // What the packages are unpacked to is pinned with them.
        let pack = |arch: &str, image: &str| {
            let name = format!("linux-image-6.1.9-51-{arch}");
            archive.pack(&name, &[(&format!("boot/vmlinuz-6.1.9-51-{arch}"), image)]);
            archive.carries_in(&[("amd64", &["6.1.9-51"]), ("arm64", &["6.1.9-51"])]);
        };
        pack("amd64", "image");
        let error = format!("{:#}", repin(&["6.1"]).unwrap_err());
        assert!(error.contains("linux-image-6.1.9-51-arm64 6.1.9-51 cannot be fetched"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), PINNED);
        pack("arm64", "image");
        repin(&["6.1"]).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let pins: Pins = toml::from_str(&text).unwrap();
        let of = |line: &str| pins.package.iter().filter(|pin| pin.line == line).count();
        assert!(of("6.1") == 2 && of("6.1-rt") == 1 && text.starts_with("# The pinned"), "{text}");
        assert_eq!(text.matches("6.1.9-51").count(), 6, "{text}");
        let old: Pins = toml::from_str(PINNED).unwrap();
        let files = |pins: &Pins, line: &str, arch: &str| {
            let is_its = |it: &&Files| it.line == line && it.arch == arch;
            let mut its = pins.kernel.iter().filter(is_its);
            (its.next().unwrap().files.clone(), its.count())
        };
        assert_eq!(files(&pins, "6.1-rt", "amd64"), files(&old, "6.1-rt", "amd64"));
        let [amd64, arm64] = ["amd64", "arm64"].map(|arch| files(&pins, "6.1", arch));
        assert!(amd64 != arm64 && amd64 != files(&old, "6.1", "amd64") && amd64.1 == 0);
        // It is not fetched again where nothing is newer.
        fs::remove_dir_all(archive.dir.path().join("pool")).unwrap();
        repin(&["6.1"]).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), text);
    }
}
