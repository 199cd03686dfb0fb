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
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use serde::{Deserialize, Serialize};
use workshop::fail::{GUEST_DIED, fail};

/// How many sessions a guest can have at once.
pub const PORTS: u32 = 16;
/// The longest file that is read from the directory which the guest can write to.
const SHARED_LIMIT: u64 = 64 * 1024;

/// How long a launcher may take to end after a signal, and how often it is looked for.
const END_PATIENCE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(50);

/// What other launchers need to know about a running guest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Info {
    /// The workspace that it runs programs of.
    pub workspace: PathBuf,
    pub arch: String,
    /// The kernel as it was named on the command line.
    pub kernel: String,
    /// What others find it by, to join it: [`SHELL`], or the name of a guest that stays.
    pub name: Option<String>,
    pub pid: u32,
}

/// The name of the guests of `cargo vm shell`. Of any other name there is one guest in a workspace.
pub const SHELL: &str = "shell";

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

/// The private directories of this user that hold run directories: this launcher's, and those of launchers
/// with another TMPDIR. `notes` is a directory in the cache with a link to each.
pub fn parents(notes: &Path) -> Result<Vec<PathBuf>> {
    parents_with(&parent()?, notes)
}

fn parents_with(own: &Path, notes: &Path) -> Result<Vec<PathBuf>> {
    let link = notes.join(own.to_string_lossy().replace('/', "-"));
    let note = || match fs::create_dir_all(notes).and_then(|()| symlink(own, link)) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => fs::read_dir(notes),
    };
    let entries = note().with_context(|| writing(notes))?;
    let mut found = Vec::new();
    for link in entries.flatten().map(|entry| entry.path()) {
        match fs::read_link(&link) {
            Ok(parent) if parent.is_dir() => found.push(parent),
            // Removed, with all that lay there.
            _ => drop(fs::remove_file(&link)),
        }
    }
    Ok(found)
}

fn writing(dir: &Path) -> String {
    format!("cannot write to {} (TMPDIR names another place)", dir.display())
}

/// Takes the lock under which run directories are created and removed.
fn parent_lock(parent: &Path) -> Result<File> {
    let file = File::create(parent.join("lock")).with_context(|| writing(parent))?;
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Whether the launcher of this run directory lives.
pub fn is_alive(dir: &Path) -> bool {
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

/// Creates a run directory, and removes those of launchers that have ended. Returns it with its lock, which
/// its launcher keeps.
pub fn create(info: &Info) -> Result<(PathBuf, File)> {
    create_in(&parent()?, info)
}

fn create_in(parent: &Path, info: &Info) -> Result<(PathBuf, File)> {
    let _guard = parent_lock(parent)?;
    for dir in directories(parent).filter(|dir| !is_alive(dir)) {
        let _ = fs::remove_dir_all(dir);
    }
    if let Some(name) = info.name.as_deref().filter(|name| *name != SHELL)
        && find(parent, &info.workspace, &info.arch, name, None).is_some()
    {
        bail!("another command is starting this guest: try again");
    }
    let dir = tempfile::Builder::new()
        .prefix("c")
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(parent)
        .with_context(|| writing(parent))?
        .keep();
    let lock = File::create(dir.join("lock")).with_context(|| writing(&dir))?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    fs::write(dir.join("info.json"), serde_json::to_vec(info)?).with_context(|| writing(&dir))?;
    fs::create_dir(shared(&dir)).with_context(|| writing(&dir))?;
    Ok((dir, lock))
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

/// The run directory of a running guest of this user, workspace, architecture and name, with the given
/// kernel where one is named, and what is known about it.
pub fn running(
    workspace: &Path,
    arch: &str,
    name: &str,
    kernel: Option<&str>,
) -> Result<Option<(PathBuf, Info)>> {
    let parent = parent()?;
    let _guard = parent_lock(&parent)?;
    Ok(find(&parent, workspace, arch, name, kernel))
}

fn find(
    parent: &Path,
    workspace: &Path,
    arch: &str,
    name: &str,
    kernel: Option<&str>,
) -> Option<(PathBuf, Info)> {
    directories(parent).filter(|dir| is_alive(dir)).find_map(|dir| {
        let info: Info = serde_json::from_slice(&fs::read(dir.join("info.json")).ok()?).ok()?;
        let is_it = info.name.as_deref() == Some(name)
            && info.workspace == workspace
            && info.arch == arch
            && kernel.is_none_or(|kernel| kernel == info.kernel);
        is_it.then_some((dir, info))
    })
}

/// Ends the launcher of this run directory, and with it the guest; returns when both have ended.
pub fn end(dir: &Path, info: &Info) -> Result<()> {
    let launcher = Pid::from_raw(info.pid as i32).context("the guest's launcher has no id")?;
    for signal in [Signal::TERM, Signal::KILL] {
        let start = Instant::now();
        while is_alive(dir) && start.elapsed() < END_PATIENCE {
            let _ = kill_process(launcher, signal);
            std::thread::sleep(STEP);
        }
    }
    Ok(())
}

/// The file in the run directory of a guest that stays, which is locked while a program runs there.
pub fn in_use(dir: &Path) -> Result<File> {
    File::create(dir.join("in-use")).context("cannot write to the run directory")
}

/// The socket of a port that no session uses, and a lock to hold while one does. Port 0 belongs to
/// the launcher. The others take turns: the guest may still be ending the last session of a port.
pub fn next_port(dir: &Path) -> Result<(PathBuf, File)> {
    let gone = |e| {
        let dir = dir.display();
        fail(GUEST_DIED, format!("cannot use {dir}: {e}; the guest may have just ended"))
    };
    let lock = File::create(dir.join("ports.lock")).map_err(gone)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive)?;
    let file = dir.join("ports");
    let next = fs::read_to_string(&file).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    for port in (next..next + PORTS).map(|port| port % PORTS) {
        let lock = File::create(dir.join(format!("s{port}.lock"))).map_err(gone)?;
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            fs::write(&file, (port + 1).to_string()).map_err(gone)?;
            return Ok((socket(dir, port), lock));
        }
    }
    bail!("this guest cannot have another terminal: all {PORTS} are in use. Leave one of them")
}

pub fn socket(dir: &Path, port: u32) -> PathBuf {
    dir.join(format!("s{port}.sock"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use workshop::fail::Fail;

    fn info() -> Info {
        Info {
            workspace: "/w".into(),
            arch: "arm64".into(),
            kernel: "6.1".into(),
            name: Some("n".into()),
            pid: 1,
        }
    }

    #[test]
    fn a_guest_is_found_by_workspace_name_and_kernel() {
        let parent = tempfile::tempdir().unwrap();
        let find = |workspace: &str, name, kernel| {
            let found = find(parent.path(), Path::new(workspace), "arm64", name, kernel);
            found.map(|(dir, info)| (dir, info.pid))
        };
        let (dir, lock) = create_in(parent.path(), &info()).unwrap();
        let it = Some((dir, 1));
        assert_eq!((find("/w", "n", None), find("/w", "n", Some("6.1"))), (it.clone(), it));
        for (workspace, name, kernel) in
            [("/v", "n", None), ("/w", SHELL, None), ("/w", "n", Some("7.2"))]
        {
            assert_eq!(find(workspace, name, kernel), None);
        }
        let second = create_in(parent.path(), &info()).unwrap_err();
        assert!(second.to_string().contains("try again"), "{second}");
        drop(lock);
        assert_eq!(find("/w", "n", None), None);
        create_in(parent.path(), &info()).unwrap();
    }

    #[test]
    fn every_place_of_run_directories_is_known_as_long_as_it_is_there() {
        let [temp, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let notes = temp.path().join("notes");
        assert_eq!(parents_with(temp.path(), &notes).unwrap(), [temp.path()]);
        for own in [other.path(), temp.path(), other.path()] {
            let mut all = parents_with(own, &notes).unwrap();
            all.sort();
            let mut wanted = [temp.path(), other.path()];
            wanted.sort();
            assert_eq!(all, wanted);
        }
        drop(other);
        assert_eq!(parents_with(temp.path(), &notes).unwrap(), [temp.path()]);
        assert_eq!(fs::read_dir(&notes).unwrap().count(), 1);
    }

    /// The guest's root may put anything there.
    #[test]
    fn nothing_that_the_guest_wrote_is_followed() {
        let parent = tempfile::tempdir().unwrap();
        let secret = parent.path().join("secret");
        fs::write(&secret, "secret").unwrap();
        let (dir, _lock) = create_in(parent.path(), &info()).unwrap();
        let shared = shared(&dir);
        fs::write(shared.join("file"), "text").unwrap();
        symlink(&secret, shared.join("link")).unwrap();
        fs::create_dir(shared.join("directory")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, shared.join("fifo"), fifo, 0o600.into(), 0).unwrap();
        fs::write(shared.join("long"), vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(read_shared(&dir, "file").as_deref(), Some("text"));
        for name in ["none", "link", "directory", "fifo"] {
            let read = read_shared(&dir, name);
            assert!(read.as_deref().is_none_or(str::is_empty), "{name}: {read:?}");
        }
        assert_eq!(read_shared(&dir, "long").unwrap().len() as u64, SHARED_LIMIT);
    }

    #[test]
    fn sessions_take_turns_with_the_ports_that_are_free() {
        let dir = tempfile::tempdir().unwrap();
        let mut open = Vec::new();
        for n in 0..PORTS {
            let (port, lock) = next_port(dir.path()).unwrap();
            assert_eq!(port, socket(dir.path(), n));
            open.push(lock);
        }
        assert!(next_port(dir.path()).unwrap_err().to_string().contains("all 16"));
        for n in [7, 3] {
            drop(open.remove(n));
        }
        let (three, _lock) = next_port(dir.path()).unwrap();
        let (seven, lock) = next_port(dir.path()).unwrap();
        drop(lock);
        let (again, _lock) = next_port(dir.path()).unwrap();
        assert_eq!([three, seven, again], [3, 7, 7].map(|n| socket(dir.path(), n)));
        let gone = next_port(&dir.path().join("gone")).unwrap_err();
        assert_eq!(gone.downcast_ref::<Fail>().unwrap().code, GUEST_DIED);
    }
}
