//! The cache directory: what is fetched or made once and used by every run.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use rustix::fs::FlockOperation;
use sha2::{Digest, Sha256};
use workshop::fail::{MACHINE, fail};
use workshop::say;

/// A snapshot of QEMU's that is there for longer has no owner.
const SNAPSHOT_AGE: Duration = Duration::from_secs(60);

/// The cache directory of this user.
#[derive(Clone, Debug)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// The cache that the environment names, created where it is missing.
    pub fn open(workspace: &Path) -> Result<Cache> {
        let place = place(|name| std::env::var_os(name).map(PathBuf::from));
        let place = place.context("no cache directory: set VM_CACHE or HOME")?;
        // Wherever cargo was called.
        Cache::at(&workspace.join(place))
    }

    pub fn at(dir: &Path) -> Result<Cache> {
        let create = || -> io::Result<PathBuf> {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(dir.join("tmp"))?;
            dir.canonicalize()
        };
        let dir = create().with_context(|| {
            format!("cannot use the cache directory {} (VM_CACHE sets another)", dir.display())
        })?;
        Ok(Cache { dir })
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.join(name)
    }

    /// Takes the lock that whoever fills the cache holds; given back when dropped.
    pub fn lock(&self) -> Result<File> {
        let path = self.path("lock");
        let file =
            File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            say!("another set-up is at work, waiting for it");
            rustix::fs::flock(&file, FlockOperation::LockExclusive)
                .context("cannot lock the cache")?;
        }
        self.sweep();
        Ok(file)
    }

    /// Removes what interrupted set-ups left, and the snapshots of QEMUs that are gone: QEMU unlinks
    /// one as soon as it has opened it. Only with the lock held.
    fn sweep(&self) {
        for entry in fs::read_dir(self.path("tmp")).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let age = entry.metadata().and_then(|meta| meta.modified()).map(|time| time.elapsed());
            let is_old = matches!(age, Ok(Ok(age)) if age > SNAPSHOT_AGE);
            let name = name.to_string_lossy();
            if name.starts_with("part-") || (name.starts_with("vl.") && is_old) {
                let path = entry.path();
                let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
            }
        }
    }

    /// A temporary directory on the cache's file system, removed when dropped. Only with the
    /// lock held: whoever takes it next removes what lies there.
    pub fn temp_dir(&self) -> Result<tempfile::TempDir> {
        tempfile::Builder::new()
            .prefix("part-")
            .tempdir_in(self.path("tmp"))
            .context("cannot create a temporary directory in the cache")
    }

    /// What `here` finds in the cache; else what `make` puts there, which gets a temporary directory and may
    /// take so much space. Whoever else makes something waits.
    pub fn once<T>(
        &self,
        (what, megabytes): (&str, u64),
        here: impl Fn() -> Option<T>,
        make: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        if let Some(found) = here() {
            return Ok(found);
        }
        let _lock = self.lock()?;
        if let Some(found) = here() {
            return Ok(found);
        }
        self.need_space(megabytes, what)?;
        make(self.temp_dir()?.path())
    }

    /// A file of the cache, which `make` writes where it is missing or damaged.
    pub fn file(
        &self,
        name: &str,
        what: (&str, u64),
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let place = self.path(name);
        let here = || self.check(&place, None).is_ok_and(|here| here).then(|| place.clone());
        self.once(what, here, |temp| {
            self.say_damage(what.0, &place, None);
            say!("making {}", what.0);
            let made = temp.join("made");
            make(&made)?;
            self.keep(&made, &place, None)?;
            Ok(place.clone())
        })
    }

    fn free_mb(&self) -> Result<u64> {
        let stat = rustix::fs::statvfs(&self.dir).context("cannot read the cache's file system")?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize) >> 20)
    }

    /// Where it is and how much room it has.
    pub fn describe(&self) -> String {
        let free = self.free_mb().map_or_else(|e| format!("{e:#}"), |mb| format!("{mb} MB free"));
        format!("{}, {free}", self.dir.display())
    }

    /// An error where less than `megabytes` are free.
    pub fn need_space(&self, megabytes: u64, what: &str) -> Result<()> {
        let free = self.free_mb()?;
        if free >= megabytes {
            return Ok(());
        }
        bail!(
            "no space: {what} needs {megabytes} MB in {}, {free} MB are free; \
             make room, or set VM_CACHE to a directory elsewhere",
            self.dir.display()
        )
    }
}

/// `$VM_CACHE`, else `$XDG_CACHE_HOME/bpf-vm`, else `~/.cache/bpf-vm`. XDG's specification has a relative
/// path ignored; a relative VM_CACHE is relative to the workspace.
fn place(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let variable = |name| variable(name).filter(|value| !value.as_os_str().is_empty());
    let xdg = || variable("XDG_CACHE_HOME").filter(|dir| dir.is_absolute());
    let cache = || xdg().or_else(|| variable("HOME").map(|home| home.join(".cache")));
    variable("VM_CACHE").or_else(|| cache().map(|dir| dir.join("bpf-vm")))
}

/// The message where writing to `path` failed for lack of space.
pub fn no_space(path: &Path, why: &str) -> String {
    let path = path.display();
    format!(
        "no space left while writing {path}: {why}; make room there, or set VM_CACHE to a \
         directory elsewhere"
    )
}

/// Writes a file; where there is no space, the error says so.
pub fn write(path: &Path, content: &[u8]) -> Result<()> {
    match fs::write(path, content) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => {
            bail!(no_space(path, &error.to_string()))
        }
        result => result.with_context(|| format!("cannot write {}", path.display())),
    }
}

/// The path with this at its end. What follows a dot in it may be a version, so it is no extension that
/// another could replace.
pub fn beside(path: &Path, end: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(end);
    path.into()
}

/// The checksum of a file, of any size.
pub fn sha256(path: &Path) -> Result<String> {
    let digest = || -> io::Result<String> {
        let (mut file, mut sum) = (File::open(path)?, Sha256::new());
        let mut part = vec![0; 1 << 20];
        loop {
            match file.read(&mut part)? {
                0 => return Ok(hex(&sum.finalize())),
                count => sum.update(&part[..count]),
            }
        }
    };
    digest().with_context(|| format!("cannot read {}", path.display()))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Unpacks the packages in a directory, in the order of their names and through the links that lie in `root`
/// already, and removes them; nothing of them is installed. `left_out`: patterns of files that nobody needs.
pub fn unpack_all(dir: &Path, root: &Path, left_out: &[&str]) -> Result<()> {
    fs::create_dir_all(root)?;
    let unpack = |deb: &Path| -> Result<()> {
        let mut files = Command::new(tool("dpkg-deb")?);
        let mut files = files.arg("--fsys-tarfile").arg(deb).stdout(Stdio::piped()).spawn()?;
        let mut tar = Command::new(tool("tar")?);
        tar.args(["--extract", "--keep-directory-symlink", "--no-same-owner", "--directory"]);
        tar.arg(root).args(left_out.iter().map(|pattern| format!("--exclude={pattern}")));
        let output = tar.stdin(files.stdout.take().context("no pipe")?).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let why = shortened(&said);
        if said.contains("No space left") {
            bail!(no_space(root, &why));
        }
        if !files.wait()?.success() || !output.status.success() {
            bail!("{why}");
        }
        Ok(())
    };
    let entries = fs::read_dir(dir).with_context(|| dir.display().to_string())?;
    let mut debs = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    debs.retain(|file| file.extension().is_some_and(|end| end == "deb"));
    debs.sort();
    for deb in debs {
        unpack(&deb).with_context(|| format!("cannot unpack {}", deb.display()))?;
        fs::remove_file(deb)?;
    }
    Ok(())
}

/// Moves a finished file or directory to its place, with its content on the disk before. A
/// directory that is there already moves to where the new one was, with `.old` at its name's end.
pub fn put(made: &Path, place: &Path) -> Result<()> {
    let flush = || -> io::Result<()> {
        let file = File::open(made)?;
        if file.metadata()?.is_dir() {
            rustix::fs::syncfs(&file)?;
        } else {
            file.sync_all()?;
        }
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)?;
        }
        if place.is_dir() {
            fs::rename(place, beside(made, ".old"))?;
        }
        fs::rename(made, place)
    };
    flush().with_context(|| format!("cannot put {} in its place", place.display()))
}

/// What changes with a file's content: its size and time of modification.
pub fn stamp(place: &Path) -> Result<String> {
    let meta = place.metadata().with_context(|| format!("cannot read {}", place.display()))?;
    let since = meta.modified()?.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(format!("{} bytes, {} ns", meta.len(), since.as_nanos()))
}

/// The program `name` in the PATH or in an sbin directory: a Debian user's PATH has none of those.
pub fn find_tool(name: &str) -> Option<PathBuf> {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin");
    which::which_in(name, Some(path), "/").ok()
}

/// The busybox of this machine that needs no libraries. openSUSE's has another name.
pub fn static_busybox() -> Option<PathBuf> {
    ["busybox", "busybox-static"].into_iter().filter_map(find_tool).find(|file| {
        let bytes = fs::read(file).unwrap_or_default();
        let head = &bytes[..bytes.len().min(4096)];
        let interpreter = |name: &[u8]| head.windows(name.len()).any(|w| w == name);
        !head.is_empty() && !interpreter(b"/ld-linux") && !interpreter(b"/ld-musl")
    })
}

/// As [`find_tool`], with an error that says how to get it.
pub fn tool(name: &str) -> Result<PathBuf> {
    find_tool(name).ok_or_else(|| {
        fail(
            MACHINE,
            format!(
                "{name} is not here: install the package that has it (`cargo vm setup` does where \
                 there is apt)"
            ),
        )
    })
}

/// Runs a tool and returns its output; where it fails, an error with what it said.
pub fn run(name: &str, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Result<Vec<u8>> {
    let mut command = Command::new(tool(name)?);
    let output = command.args(args).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{name} failed ({}): {}", output.status, shortened(&text));
    }
    Ok(output.stdout)
}

/// What a tool said, cut after three lines: tar has one for each file that it cannot write.
fn shortened(said: &str) -> String {
    let lines: Vec<&str> = said.trim().lines().collect();
    match lines.len() {
        0..=3 => lines.join("\n"),
        more => format!("{}\n… ({} more lines)", lines[..3].join("\n"), more - 3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use workshop::fail::Fail;

    #[test]
    fn the_environment_names_a_place() {
        let place = |vm: &str, xdg: &str, home: &str| {
            let all = [("VM_CACHE", vm), ("XDG_CACHE_HOME", xdg), ("HOME", home)];
            let place = place(|name| Some(all.iter().find(|(it, _)| *it == name)?.1.into()));
            place.map(|place| place.display().to_string())
        };
        assert_eq!(place("cache", "/xdg", "/home").as_deref(), Some("cache"));
        assert_eq!(place("", "/xdg", "/home").as_deref(), Some("/xdg/bpf-vm"));
        for ignored in ["", "xdg", "./xdg"] {
            assert_eq!(place("", ignored, "/home").as_deref(), Some("/home/.cache/bpf-vm"));
        }
        assert_eq!(place("", "xdg", ""), None);
    }

    #[test]
    fn no_space_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        assert!(cache.need_space(1, "a test").is_ok());
        let error = cache.need_space(1 << 40, "a test").unwrap_err().to_string();
        assert!(error.starts_with("no space: a test needs"), "{error}");
    }

    #[test]
    fn a_tool_that_fails_says_why() {
        assert_eq!(run("echo", ["a"]).unwrap(), b"a\n");
        let error = run("sh", ["-c", "echo why >&2; exit 4"]).unwrap_err().to_string();
        assert_eq!(error, "sh failed (exit status: 4): why");
        let error = run("sh", ["-c", "seq 1000 >&2; exit 2"]).unwrap_err().to_string();
        assert_eq!(error, "sh failed (exit status: 2): 1\n2\n3\n… (997 more lines)");
        let missing = run("no-such-tool", [""]).context("what for").unwrap_err();
        assert_eq!(missing.downcast_ref::<Fail>().unwrap().code, MACHINE);
    }

    #[test]
    fn leftovers_of_an_interrupted_set_up_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        fs::create_dir(cache.path("tmp/part-x")).unwrap();
        fs::write(cache.path("tmp/part-x/half.deb"), "half").unwrap();
        let snapshots = ["tmp/vl.old", "tmp/vl.new"].map(|name| cache.path(name));
        snapshots.iter().for_each(|path| fs::write(path, "").unwrap());
        let old = std::time::SystemTime::now() - 2 * SNAPSHOT_AGE;
        File::options().write(true).open(&snapshots[0]).unwrap().set_modified(old).unwrap();
        drop(cache.lock().unwrap());
        assert!(!cache.path("tmp/part-x").exists());
        assert_eq!(snapshots.map(|path| path.exists()), [false, true]);
    }
}
