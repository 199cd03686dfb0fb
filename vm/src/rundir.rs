//! The run directory of a launch: private to the user, removed when the launcher ends.
//!
//! All run directories of a user lie in one private directory. Each holds a `lock` that its
//! launcher keeps for as long as it lives: this is how another launcher distinguishes a running
//! guest from the remains of a killed launcher.
//!
//! The guest sees only the subdirectory `guest` of it, and its root can write there: a file may
//! be gone, or be a link to a file of the host. [`read_shared`] is the only way to read there.

use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use host::fail::{GUEST_DIED, fail};
use rustix::fs::{FlockOperation, OFlags};
use serde::{Deserialize, Serialize};

/// How many sessions a guest can have in its life.
pub const PORTS: u32 = 16;
/// The longest file that is read from the directory which the guest can write to.
const SHARED_LIMIT: u64 = 64 * 1024;

/// What other launchers need to know about a running guest.
#[derive(Debug, Serialize, Deserialize)]
pub struct Info {
    /// The workspace that it runs programs of.
    pub workspace: PathBuf,
    /// The kernel as it was named on the command line.
    pub kernel: String,
    /// Whether `cargo vm shell` started it, so that another one may join.
    pub shell: bool,
}

/// A run directory that this process owns.
#[derive(Debug)]
pub struct RunDir {
    dir: PathBuf,
    _lock: File,
}

/// The private directory of this user that holds the run directories.
fn parent() -> Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let dir = std::env::temp_dir().join(format!("bpf-vm-{uid}"));
    match DirBuilder::new().mode(0o700).create(&dir) {
        Ok(()) => {}
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
        Err(e) => return Err(e).with_context(|| format!("cannot create {}", dir.display())),
    }
    let meta = fs::symlink_metadata(&dir)?;
    if !meta.is_dir() || meta.uid() != uid || meta.mode() & 0o077 != 0 {
        bail!(
            "{} is not a directory that only this user can enter; remove it, or set TMPDIR to \
             another directory",
            dir.display()
        );
    }
    // A Unix socket's path is limited to 107 bytes.
    if dir.as_os_str().len() > 80 {
        bail!("{} is too long for sockets; set TMPDIR to a shorter path", dir.display());
    }
    Ok(dir.canonicalize()?)
}

/// Takes the lock under which run directories are created and removed.
fn parent_lock(parent: &Path) -> Result<File> {
    let file = File::create(parent.join("lock")).context("cannot lock the run directories")?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

fn is_alive(dir: &Path) -> bool {
    let Ok(lock) = File::open(dir.join("lock")) else {
        return false;
    };
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockShared).is_err()
}

fn directories(parent: &Path) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
}

impl RunDir {
    /// Creates a run directory, and removes those of launchers that have ended.
    pub fn create(info: &Info) -> Result<RunDir> {
        RunDir::create_in(&parent()?, info)
    }

    fn create_in(parent: &Path, info: &Info) -> Result<RunDir> {
        let _guard = parent_lock(parent)?;
        for dir in directories(parent).filter(|dir| !is_alive(dir)) {
            let _ = fs::remove_dir_all(dir);
        }
        let dir = tempfile::Builder::new()
            .prefix("c")
            .permissions(fs::Permissions::from_mode(0o700))
            .tempdir_in(parent)
            .context("cannot create a run directory")?
            .keep();
        let lock = File::create(dir.join("lock"))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fs::write(dir.join("info.json"), serde_json::to_vec(info)?)?;
        fs::create_dir(shared(&dir))?;
        Ok(RunDir { dir, _lock: lock })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// The subdirectory that the guest sees and writes to.
pub fn shared(dir: &Path) -> PathBuf {
    dir.join("guest")
}

/// What the guest has written to the file `name` in the directory that it shares; `None` where
/// there is no such file, or something else of that name. Follows no link, waits for no writer.
pub fn read_shared(dir: &Path, name: &str) -> Option<String> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::options()
        .read(true)
        .custom_flags(flags.bits() as i32)
        .open(shared(dir).join(name))
        .ok()
        .filter(|file| file.metadata().is_ok_and(|meta| meta.is_file()))?;
    let mut bytes = Vec::new();
    file.take(SHARED_LIMIT).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// The run directory of a running `cargo vm shell` guest of this user and workspace, with the
/// given kernel where one is named.
pub fn running_shell(workspace: &Path, kernel: Option<&str>) -> Result<Option<PathBuf>> {
    let parent = parent()?;
    let _guard = parent_lock(&parent)?;
    Ok(directories(&parent).filter(|dir| is_alive(dir)).find(|dir| {
        let info = fs::read(dir.join("info.json")).ok();
        let info: Option<Info> = info.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        info.is_some_and(|info| {
            info.shell && info.workspace == workspace && kernel.is_none_or(|k| k == info.kernel)
        })
    }))
}

/// The socket of the next port that no session has used yet. Port 0 belongs to the launcher.
pub fn next_port(dir: &Path) -> Result<PathBuf> {
    let gone = |e| {
        let dir = dir.display();
        fail(GUEST_DIED, format!("cannot use {dir}: {e}; the guest may have just ended"))
    };
    let lock = File::create(dir.join("ports.lock")).map_err(gone)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let file = dir.join("ports");
    let next = fs::read_to_string(&file).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    if next >= PORTS {
        bail!(
            "this guest cannot have another terminal: it has had all {PORTS}. Leave its shells and \
             start a new one"
        );
    }
    fs::write(&file, (next + 1).to_string()).map_err(gone)?;
    Ok(socket(dir, next))
}

/// The socket of a port.
pub fn socket(dir: &Path, port: u32) -> PathBuf {
    dir.join(format!("s{port}.sock"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::fail::Fail;

    fn info() -> Info {
        Info { workspace: "/w".into(), kernel: "6.1".into(), shell: true }
    }

    #[test]
    fn what_a_killed_launcher_left_is_removed_by_the_next() {
        let parent = tempfile::tempdir().unwrap();
        let first = RunDir::create_in(parent.path(), &info()).unwrap();
        let dead = parent.path().join("dead");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("lock"), "").unwrap();
        let second = RunDir::create_in(parent.path(), &info()).unwrap();
        assert!(first.dir().is_dir() && second.dir().is_dir() && !dead.exists());
        assert!(is_alive(first.dir()));
        let gone = first.dir().to_owned();
        drop(first);
        assert!(!is_alive(&gone));
    }

    /// The guest's root may put anything there.
    #[test]
    fn nothing_that_the_guest_wrote_is_followed() {
        let parent = tempfile::tempdir().unwrap();
        let secret = parent.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        let dir = RunDir::create_in(parent.path(), &info()).unwrap();
        let shared = shared(dir.dir());
        fs::write(shared.join("file"), "text").unwrap();
        std::os::unix::fs::symlink(&secret, shared.join("link")).unwrap();
        fs::create_dir(shared.join("directory")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, shared.join("fifo"), fifo, 0o600.into(), 0).unwrap();
        fs::write(shared.join("long"), vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(read_shared(dir.dir(), "file").as_deref(), Some("text"));
        for name in ["none", "link", "directory", "fifo"] {
            let read = read_shared(dir.dir(), name);
            assert!(read.as_deref().is_none_or(str::is_empty), "{name}: {read:?}");
        }
        assert_eq!(read_shared(dir.dir(), "long").unwrap().len() as u64, SHARED_LIMIT);
    }

    #[test]
    fn each_session_takes_a_port_of_its_own_until_there_are_none() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..PORTS {
            assert_eq!(next_port(dir.path()).unwrap(), socket(dir.path(), n));
        }
        assert!(next_port(dir.path()).unwrap_err().to_string().contains("all 16"));
        let gone = next_port(&dir.path().join("gone")).unwrap_err();
        assert_eq!(gone.downcast_ref::<Fail>().unwrap().code, GUEST_DIED);
    }
}
