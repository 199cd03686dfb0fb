//! The index of a Debian suite, and its newest packages: apt fetches both and checks the signature and
//! the checksums, in directories of its own. Nothing on this machine changes, and any architecture will do.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::fetch::apt::{self, Source};
use crate::fetch::cache::find_tool;

/// Clears what this machine's settings make apt run when it has fetched an index: `-o` can only add to it.
const CLEARED: &str = "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n\
                       #clear APT::Update::Post-Invoke-Success;\n";

/// The index of a suite for one architecture.
pub struct Index {
    dir: tempfile::TempDir,
    /// Debian's name of the architecture.
    arch: String,
}

impl Index {
    /// The first that an archive has whose signature is right, fetched into a directory in `place`.
    pub fn from_archives(source: &Source, suite: &str, arch: &str, place: &Path) -> Result<Index> {
        let mut tried = Vec::new();
        for archive in source.need_archives()? {
            match Index::fetch(&source.keyring, &archive, suite, arch, place) {
                Ok(index) => return Ok(index),
                Err(error) => tried.push(format!("{error:#}")),
            }
        }
        bail!("{}", tried.join("\n  "))
    }

    fn fetch(keyring: &str, archive: &str, suite: &str, arch: &str, place: &Path) -> Result<Index> {
        ensure!(find_tool("apt-get").is_some(), "only apt can verify the index of {suite}");
        ensure!(
            Path::new(keyring).is_file(),
            "{keyring} is not here, by which {suite} could be verified: install debian-archive-keyring"
        );
        let made = Index { dir: tempfile::tempdir_in(place)?, arch: arch.to_owned() };
        for sub in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(made.dir.path().join(sub))?;
        }
        let archive = archive.trim_end_matches('/');
        let source = format!("deb [signed-by={keyring}] {archive} {suite} main\n");
        fs::write(made.dir.path().join("sources.list"), source)?;
        fs::write(made.dir.path().join("apt.conf"), CLEARED)?;
        let output = made.command("apt-get").args(["-q", "update"]).output();
        let output = output.context("cannot start apt-get")?;
        let said = String::from_utf8_lossy(&output.stderr);
        // An index without a signature is a warning for some versions of apt.
        let wrong = said.lines().find(|line| line.starts_with("E:") || line.starts_with("W:"));
        match wrong {
            Some(line) => Err(anyhow!("{archive}: the index of {suite} cannot be used: {line}")),
            None if output.status.success() => Ok(made),
            None => Err(anyhow!("{archive}: apt-get update failed: {}", said.trim())),
        }
    }

    /// A program of apt that knows this index alone: of this machine's settings, those of its network
    /// stay, and not those by which it prefers a version to another.
    fn command(&self, program: &str) -> Command {
        let dir = self.dir.path().display();
        let mut command = Command::new(program);
        // Read after this machine's settings; a file that APT_CONFIG names is read before them.
        command.arg("-c").arg(self.dir.path().join("apt.conf"));
        for option in [
            format!("Dir::State::Lists={dir}/lists"),
            format!("Dir::Cache={dir}/cache"),
            format!("Dir::Etc::SourceList={dir}/sources.list"),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            "Dir::Etc::Preferences=/dev/null".to_owned(),
            "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
            "Dir::State::status=/dev/null".to_owned(),
            "APT::Default-Release=".to_owned(),
            format!("APT::Architecture={}", self.arch),
            format!("APT::Architectures::={}", self.arch),
            "Acquire::Languages=none".to_owned(),
            "Debug::NoLocking=true".to_owned(),
            // As root, apt would fetch as a user who may not write there.
            "APT::Sandbox::User=root".to_owned(),
        ] {
            command.args(["-o", &option]);
        }
        command.env("LC_ALL", "C").stdin(Stdio::null());
        command
    }

    /// What a program of apt printed; where it failed, an error with what it said.
    fn ask(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self.command(program).args(args).output();
        let output = output.with_context(|| format!("cannot start {program}"))?;
        let why = String::from_utf8_lossy(&output.stderr);
        let what = args.first().unwrap_or(&"");
        ensure!(output.status.success(), "{program} {what} failed: {}", why.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let text = self.ask("apt-cache", &["pkgnames", prefix])?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// What the index says of the newest version of a package, a field in each line.
    pub fn package(&self, name: &str) -> Result<String> {
        self.ask("apt-cache", &["show", "--no-all-versions", name])
    }

    /// These packages, and all that they depend on: name and version of each, by name.
    pub fn with_dependencies(&self, names: &[String]) -> Result<Vec<(String, String)>> {
        let options = ["install", "--print-uris", "--yes", "--no-install-recommends"];
        let args: Vec<&str> = options.into_iter().chain(names.iter().map(String::as_str)).collect();
        let text = self.ask("apt-get", &args)?;
        // 'URL' NAME_VERSION_ARCH.deb SIZE HASH
        let files = text.lines().filter(|line| line.starts_with('\''));
        let packages = files.filter_map(|line| {
            let mut parts = line.split(' ').nth(1)?.split('_');
            Some((parts.next()?.to_owned(), parts.next()?.replace("%3a", ":")))
        });
        let mut packages: Vec<_> = packages.collect();
        packages.sort();
        Ok(packages)
    }

    /// Fetches the newest version of each of these packages into `dir`.
    pub fn download(&self, names: &[String], dir: &Path) -> Result<()> {
        apt::fetch_packages(|| self.command("apt-get"), names, dir)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::fetch::cache::{self, Cache, sha256};

    /// The suite of the pinned lines.
    pub const SUITE: &str = "bookworm";

    /// An archive with this suite, and the key that its index is signed with.
    pub struct Archive {
        pub dir: tempfile::TempDir,
    }

    impl Archive {
        /// With nothing in it; and an empty cache beside.
        pub fn new() -> (Archive, Cache) {
            let archive = Archive { dir: tempfile::tempdir().unwrap() };
            archive.gpg(&["--quick-gen-key", "archive@example.org", "default", "default", "never"]);
            let key = archive.gpg(&["--export"]);
            fs::write(archive.keyring(), key).unwrap();
            let cache = Cache::at(&archive.dir.path().join("cache")).unwrap();
            (archive, cache)
        }

        fn gpg(&self, args: &[&str]) -> Vec<u8> {
            // A socket's path is short, so the keys lie in a directory of their own.
            let home = self.dir.path().join("g").display().to_string();
            fs::create_dir_all(&home).unwrap();
            let own = ["--homedir", &home, "--batch", "--quiet", "--passphrase", ""];
            let args = own.iter().chain(args);
            cache::run("gpg", args).unwrap()
        }

        fn keyring(&self) -> String {
            self.dir.path().join("keyring.gpg").display().to_string()
        }

        fn suite(&self) -> std::path::PathBuf {
            self.dir.path().join("dists").join(SUITE)
        }

        fn index(&self, arch: &str) -> std::path::PathBuf {
            self.suite().join(format!("main/binary-{arch}/Packages"))
        }

        pub fn deb(&self, release: &str) -> std::path::PathBuf {
            self.dir.path().join(format!("pool/linux-image-{release}-amd64.deb"))
        }

        pub fn build(&self, release: &str) {
            let image = format!("boot/vmlinuz-{release}-amd64");
            let module = format!("lib/modules/{release}-amd64/kernel/module");
            let name = format!("linux-image-{release}-amd64");
            self.pack(&name, &[(&image, release), (&module, "")]);
        }

        /// Makes a package with these files and their texts.
        pub fn pack(&self, name: &str, files: &[(&str, &str)]) {
            let tree = self.dir.path().join("tree");
            let control =
                "Package: p\nVersion: 1\nArchitecture: amd64\nMaintainer: m\nDescription: d\n";
            for (file, text) in files.iter().chain(&[("DEBIAN/control", control)]) {
                fs::create_dir_all(tree.join(file).parent().unwrap()).unwrap();
                fs::write(tree.join(file), text).unwrap();
            }
            let deb = self.dir.path().join(format!("pool/{name}.deb"));
            fs::create_dir_all(deb.parent().unwrap()).unwrap();
            cache::run("dpkg-deb", ["--build".as_ref(), tree.as_os_str(), deb.as_os_str()])
                .unwrap();
            fs::remove_dir_all(tree).unwrap();
        }

        /// Itself, as the only archive to ask.
        pub fn source(&self) -> Source {
            let url = format!("file://{}", self.dir.path().display());
            Source { mirror: Some(url), keyring: self.keyring() }
        }

        /// No archive: nothing is fetched there.
        pub fn none(&self) -> Source {
            Source { mirror: Some("http://127.0.0.1:9".into()), ..self.source() }
        }

        /// Writes the index, with the kernels of these releases, and signs it.
        pub fn carries(&self, releases: &[&str]) {
            self.carries_in(&[("amd64", releases)]);
        }

        /// The same, for each of these architectures. The headers are there, too. Another package, `tool`, depends on `part`.
        pub fn carries_in(&self, archs: &[(&str, &[&str])]) {
            let mut sums = String::new();
            for (arch, releases) in archs {
                let package = |name: &str, version: &str, more: &str| {
                    let path = format!("pool/{name}.deb");
                    let deb = self.dir.path().join(&path);
                    let size = deb.metadata().map_or(7, |meta| meta.len());
                    let hash = sha256(&deb).unwrap_or_else(|_| "a".repeat(64));
                    format!(
                        "Package: {name}\nVersion: {version}\nArchitecture: {arch}\nMaintainer: m\n{more}\
                         Filename: {path}\nSize: {size}\nSHA256: {hash}\nDescription: d\n\n",
                    )
                };
                let mut text = String::new();
                for release in *releases {
                    text += &package(&format!("linux-image-{release}-{arch}"), release, "");
                    text += &package(&format!("linux-headers-{release}-{arch}"), release, "");
                    text += &package(&format!("linux-headers-{release}-common"), release, "");
                }
                text += &package("tool", "2", "Depends: part\n");
                text += &package("part", "2", "");
                let file = self.index(arch);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(&file, &text).unwrap();
                let (size, hash) = (text.len(), sha256(&file).unwrap());
                sums += &format!(" {hash} {size} main/binary-{arch}/Packages\n");
            }
            let names: Vec<&str> = archs.iter().map(|(arch, _)| *arch).collect();
            let release = format!(
                "Origin: Test\nSuite: {SUITE}\nCodename: {SUITE}\nArchitectures: {}\nComponents: main\n\
                 Date: Mon, 01 Jan 2024 00:00:00 UTC\nSHA256:\n{sums}",
                names.join(" ")
            );
            fs::write(self.suite().join("Release"), release).unwrap();
            let release = self.suite().join("Release").display().to_string();
            let signed = self.gpg(&["--clearsign", "--output", "-", &release]);
            fs::write(self.suite().join("InRelease"), signed).unwrap();
        }

        fn fetch(&self) -> Result<Index> {
            Index::from_archives(&self.source(), SUITE, "amd64", self.dir.path())
        }
    }

    impl Drop for Archive {
        fn drop(&mut self) {
            // The agent ends when its directory is gone.
            let _ = fs::remove_dir_all(self.dir.path());
        }
    }

    #[test]
    fn nothing_unsigned_is_believed() {
        let (archive, _) = Archive::new();
        archive.pack("tool", &[("usr/bin/tool", "new")]);
        archive.pack("part", &[("usr/bin/part", "new")]);
        archive.carries(&["6.1.0-51"]);
        let index = archive.fetch().unwrap();
        assert_eq!(index.names("linux-image-6.1.").unwrap(), ["linux-image-6.1.0-51-amd64"]);
        let tool = ["tool".to_owned()];
        let error = index.with_dependencies(&["no-such".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("apt-get install failed"), "{error}");
        let error = format!("{:#}", index.package("no-such").unwrap_err());
        assert!(error.contains("apt-cache show failed: ") && error.contains("E: "), "{error}");

        // A package is what the index says, or nothing.
        let [got, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        index.download(&tool, got.path()).unwrap();
        assert_eq!(fs::read_dir(got.path()).unwrap().count(), 1);
        archive.pack("tool", &[("usr/bin/tool", "NEW")]);
        let error = index.download(&tool, other.path()).unwrap_err().to_string();
        assert!(error.contains("apt-get download failed"), "{error}");

        // Another content than the signed one.
        fs::write(archive.index("amd64"), "Package: linux-image-6.1.0-99-amd64\n").unwrap();
        let error = archive.fetch().err().unwrap().to_string();
        assert!(error.contains("the index of bookworm cannot be used"), "{error}");
        archive.carries(&["6.1.0-51"]);
        assert!(archive.fetch().is_ok());
        // No signature at all; one of somebody else.
        fs::remove_file(archive.suite().join("InRelease")).unwrap();
        assert!(archive.fetch().is_err());
        let (other, _) = Archive::new();
        other.carries(&["6.1.0-51"]);
        fs::copy(other.suite().join("InRelease"), archive.suite().join("InRelease")).unwrap();
        assert!(archive.fetch().is_err());
    }

    #[test]
    fn this_machines_settings_of_apt_do_not_count() {
        let temp = tempfile::tempdir().unwrap();
        let (archive, _) = Archive::new();
        archive.carries(&["6.1.0-51"]);
        let index = archive.fetch().unwrap();
        let preferences = temp.path().join("preferences");
        fs::write(&preferences, "Package: *\nPin: release *\nPin-Priority: -1\n").unwrap();
        let settings = temp.path().join("settings");
        let text = format!(
            "APT::Default-Release \"stable\";\nDir::Etc::Preferences \"{}\";\n\
             APT::Update::Pre-Invoke {{ \"a\"; }};\nAPT::Update::Post-Invoke {{ \"b\"; }};\n\
             APT::Update::Post-Invoke-Success {{ \"c\"; }};\n",
            preferences.display()
        );
        fs::write(&settings, text).unwrap();
        let asked = |program: &str, args: &[&str]| {
            let mut command = index.command(program);
            let output = command.args(args).env("APT_CONFIG", &settings).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let image = "linux-image-6.1.0-51-amd64";
        assert!(asked("apt-cache", &["show", image]).contains(image));
        let policy = asked("apt-cache", &["policy", image]);
        assert!(policy.contains("Candidate: 6.1.0-51"), "{policy}");
        let run: Vec<String> = asked("apt-config", &["dump"])
            .lines()
            .filter(|line| line.starts_with("APT::Update::P") && line.contains("Invoke"))
            .filter(|line| !line.ends_with(" \"\";"))
            .map(str::to_owned)
            .collect();
        assert!(run.is_empty(), "{run:?}");
    }
}
