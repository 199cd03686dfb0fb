//! What a Debian suite carries now, as its own signed index says: for kernels that the archive no longer
//! has in the pinned version.
//!
//! apt fetches and verifies the index, in directories of its own: nothing on this machine changes, and
//! any architecture will do.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::setup::apt;
use crate::setup::cache::{Cache, find_tool};
use crate::setup::kernels::Package;

/// Clears what this machine's settings make apt run when it has fetched an index: `-o` can only add to it.
const CLEARED: &str = "#clear APT::Update::Pre-Invoke;\n#clear APT::Update::Post-Invoke;\n\
                       #clear APT::Update::Post-Invoke-Success;\n";
/// The keys that Debian signs its suites with; VM_KEYRING names others, for an archive of one's own.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The archives to ask.
pub struct Archives {
    /// Their roots.
    pub roots: Vec<String>,
    /// The keys that their suites are signed with.
    pub keyring: String,
}

impl Archives {
    /// Those of this machine.
    pub fn here() -> Result<Archives> {
        if apt::mirror().is_none() {
            apt::need_lists()?;
        }
        let keyring = std::env::var("VM_KEYRING").ok().filter(|keyring| !keyring.is_empty());
        Ok(Archives {
            roots: apt::archives()?,
            keyring: keyring.unwrap_or_else(|| KEYRING.to_owned()),
        })
    }

    /// What the first one finds whose index of the suite has it.
    pub fn find<T>(
        &self,
        suite: &str,
        arch: &str,
        cache: &Cache,
        find: impl Fn(&Suite) -> Result<T>,
    ) -> Result<T> {
        let mut tried = Vec::new();
        for archive in &self.roots {
            let index = Suite::fetch(&self.keyring, archive, suite, arch, cache);
            match index.and_then(|index| find(&index)) {
                Ok(found) => return Ok(found),
                Err(error) => tried.push(format!("{error:#}")),
            }
        }
        bail!("{}", tried.join("\n  "))
    }
}

/// The index of a suite for one architecture.
pub struct Suite {
    dir: tempfile::TempDir,
    arch: String,
}

impl Suite {
    /// Fetches the index from an archive; an error where its signature is not right.
    fn fetch(
        keyring: &str,
        archive: &str,
        suite: &str,
        arch: &str,
        cache: &Cache,
    ) -> Result<Suite> {
        ensure!(find_tool("apt-get").is_some(), "only apt can verify the index of {suite}");
        ensure!(
            Path::new(keyring).is_file(),
            "{keyring} is not here, by which {suite} could be verified: install debian-archive-keyring"
        );
        let made = Suite { dir: cache.index_dir()?, arch: arch.to_owned() };
        for sub in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(made.dir.path().join(sub))?;
        }
        let archive = archive.trim_end_matches('/');
        let source = format!("deb [signed-by={keyring}] {archive} {suite} main\n");
        fs::write(made.dir.path().join("sources.list"), source)?;
        fs::write(made.dir.path().join("apt.conf"), CLEARED)?;
        let output = made.apt("apt-get", &["-q", "update"])?;
        let said = String::from_utf8_lossy(&output.stderr);
        // An index without a signature is a warning for some versions of apt.
        let wrong = said.lines().find(|line| line.starts_with("E:") || line.starts_with("W:"));
        match wrong {
            Some(line) => Err(anyhow!("{archive}: the index of {suite} cannot be used: {line}")),
            None if output.status.success() => Ok(made),
            None => Err(anyhow!("{archive}: apt-get update failed: {}", said.trim())),
        }
    }

    /// The architecture, by Debian's name.
    pub fn arch(&self) -> &str {
        &self.arch
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

    fn apt(&self, program: &str, args: &[&str]) -> Result<Output> {
        let output = self.command(program).args(args).output();
        output.with_context(|| format!("cannot start {program}"))
    }

    /// What a program of apt printed; where it failed, an error with what it said.
    fn ask(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self.apt(program, args)?;
        let why = String::from_utf8_lossy(&output.stderr);
        let what = args.first().unwrap_or(&"");
        ensure!(output.status.success(), "{program} {what} failed: {}", why.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The names of all packages that begin with this.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let text = self.ask("apt-cache", &["pkgnames", prefix])?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// The newest version of a package, and that version.
    pub fn package(&self, name: &str) -> Result<(Package, String)> {
        let found = self
            .packages(&[name])
            .with_context(|| format!("cannot look up the package {name}"))?
            .pop();
        found.with_context(|| format!("the index has no package {name}"))
    }

    /// The newest version of each of these packages, in the index's order.
    pub fn packages(&self, names: &[&str]) -> Result<Vec<(Package, String)>> {
        let text = self.ask("apt-cache", &[&["show", "--no-all-versions"], names].concat())?;
        let blocks = text.split("\n\n").filter(|block| !block.trim().is_empty());
        blocks.map(|block| self.block(block)).collect()
    }

    /// A package as the index describes it.
    fn block(&self, text: &str) -> Result<(Package, String)> {
        let field = |key: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once(": "));
            let found = lines.find(|(name, _)| *name == key).map(|(_, value)| value.to_owned());
            found.with_context(|| format!("the index has a package without {key}"))
        };
        let name = field("Package")?;
        let package = Package {
            arch: self.arch.clone(),
            path: field("Filename")?,
            size: field("Size")?.parse().with_context(|| format!("the size of {name}"))?,
            sha256: field("SHA256")?,
            name,
        };
        Ok((package, field("Version")?))
    }

    /// These packages, and all that they depend on.
    pub fn with_dependencies(&self, names: &[String]) -> Result<Vec<Package>> {
        let options = ["install", "--print-uris", "--yes", "--no-install-recommends"];
        let args: Vec<&str> = options.into_iter().chain(names.iter().map(String::as_str)).collect();
        let output = self.apt("apt-get", &args)?;
        let why = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "apt cannot tell what they depend on: {}", why.trim());
        // 'URL' FILE SIZE HASH
        let text = String::from_utf8_lossy(&output.stdout);
        let files = text.lines().filter(|line| line.starts_with('\''));
        let names: Vec<&str> =
            files.filter_map(|line| line.split(' ').nth(1)?.split('_').next()).collect();
        let packages = self.packages(&names)?.into_iter().map(|(package, _)| package);
        Ok(packages.collect())
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::setup::cache;
    use crate::setup::kernels::{Line, sha256};

    /// An archive with one suite, `moving`, and the key that its index is signed with.
    pub struct Archive {
        dir: tempfile::TempDir,
    }

    impl Archive {
        pub fn new() -> Archive {
            let archive = Archive { dir: tempfile::tempdir().unwrap() };
            archive.gpg(&["--quick-gen-key", "archive@example.org", "default", "default", "never"]);
            let key = archive.gpg(&["--export"]);
            fs::write(archive.keyring(), key).unwrap();
            archive
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
            self.dir.path().join("dists/moving")
        }

        fn index(&self) -> std::path::PathBuf {
            self.index_of("amd64")
        }

        fn index_of(&self, arch: &str) -> std::path::PathBuf {
            self.suite().join(format!("main/binary-{arch}/Packages"))
        }

        /// Where its packages lie.
        pub fn pool(&self) -> std::path::PathBuf {
            self.dir.path().join("pool")
        }

        /// The file of a kernel's package.
        pub fn deb(&self, release: &str) -> std::path::PathBuf {
            self.pool().join(format!("linux-image-{release}-amd64.deb"))
        }

        /// Makes the package of a kernel.
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
            fs::create_dir_all(self.pool()).unwrap();
            let deb = self.pool().join(format!("{name}.deb"));
            cache::run("dpkg-deb", ["--build".as_ref(), tree.as_os_str(), deb.as_os_str()])
                .unwrap();
            fs::remove_dir_all(tree).unwrap();
        }

        /// Itself, as the only archive to ask.
        pub fn archives(&self) -> Archives {
            let url = format!("file://{}", self.dir.path().display());
            Archives { roots: vec![url], keyring: self.keyring() }
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
                let file = self.index_of(arch);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(&file, &text).unwrap();
                let (size, hash) = (text.len(), sha256(&file).unwrap());
                sums += &format!(" {hash} {size} main/binary-{arch}/Packages\n");
            }
            let names: Vec<&str> = archs.iter().map(|(arch, _)| *arch).collect();
            let release = format!(
                "Origin: Test\nSuite: moving\nCodename: moving\nArchitectures: {}\nComponents: main\n\
                 Date: Mon, 01 Jan 2024 00:00:00 UTC\nSHA256:\n{sums}",
                names.join(" ")
            );
            fs::write(self.suite().join("Release"), release).unwrap();
            let release = self.suite().join("Release").display().to_string();
            let signed = self.gpg(&["--clearsign", "--output", "-", &release]);
            fs::write(self.suite().join("InRelease"), signed).unwrap();
        }

        fn fetch(&self, cache: &Cache) -> Result<Suite> {
            let Archives { roots, keyring } = self.archives();
            Suite::fetch(&keyring, &roots[0], "moving", "amd64", cache)
        }
    }

    impl Drop for Archive {
        fn drop(&mut self) {
            // The agent ends when its directory is gone.
            let _ = fs::remove_dir_all(self.dir.path());
        }
    }

    #[test]
    fn the_newest_kernel_of_a_line_is_found_and_nothing_unsigned_is_believed() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(temp.path()).unwrap();
        let archive = Archive::new();
        archive.carries(&["6.1.0-51", "6.1.0-9", "6.1.0-52-rt", "6.1.0-53-cloud", "6.12.9"]);
        let line: Line = toml::from_str(
            "name = \"6.1\"\nsuite = \"moving\"\nversion = \"1\"\nrelease = \"6.1.0-50\"\n[[package]]\n\
             name = \"linux-image-6.1.0-50-amd64\"\npath = \"pool/p.deb\"\nsize = 1\nsha256 = \"0\"\n",
        )
        .unwrap();
        let newest = line.newest_in(&archive.fetch(&cache).unwrap()).unwrap();
        assert_eq!((newest.release.as_str(), newest.version.as_str()), ("6.1.0-51", "6.1.0-51"));
        let package = &newest.packages[0];
        assert_eq!(package.path, "pool/linux-image-6.1.0-51-amd64.deb");
        assert_eq!((package.size, package.sha256.as_str()), (7, &*"a".repeat(64)));

        let suite = archive.fetch(&cache).unwrap();
        // Another set-up begins, and sweeps: the index is fetched without the lock.
        drop(cache.lock().unwrap());
        let image = |release: &str| format!("linux-image-{release}-amd64");
        assert_eq!(suite.with_dependencies(&[image("6.1.0-51")]).unwrap(), newest.packages);
        let error = suite.with_dependencies(&[image("9")]).unwrap_err().to_string();
        assert!(error.contains("cannot tell what they depend on"), "{error}");

        let error = format!("{:#}", suite.package("no-such").unwrap_err());
        assert!(error.contains("apt-cache show failed: ") && error.contains("E: "), "{error}");

        archive.carries(&["6.12.9"]);
        let error = line.newest_in(&archive.fetch(&cache).unwrap()).unwrap_err().to_string();
        assert!(error.contains("moving has no kernel 6.1"), "{error}");

        // Another content than the signed one.
        fs::write(archive.index(), "Package: linux-image-6.1.0-99-amd64\n").unwrap();
        let error = archive.fetch(&cache).err().unwrap().to_string();
        assert!(error.contains("the index of moving cannot be used"), "{error}");
        archive.carries(&["6.1.0-51"]);
        assert!(archive.fetch(&cache).is_ok());
        // No signature at all; one of somebody else.
        fs::remove_file(archive.suite().join("InRelease")).unwrap();
        assert!(archive.fetch(&cache).is_err());
        let other = Archive::new();
        other.carries(&["6.1.0-51"]);
        fs::copy(other.suite().join("InRelease"), archive.suite().join("InRelease")).unwrap();
        assert!(archive.fetch(&cache).is_err());
    }

    #[test]
    fn this_machines_settings_of_apt_do_not_count() {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(temp.path()).unwrap();
        let archive = Archive::new();
        archive.carries(&["6.1.0-51"]);
        let suite = archive.fetch(&cache).unwrap();
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
            let mut command = suite.command(program);
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
