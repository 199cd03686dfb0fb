//! What lies in the cache is what was put there: each thing has a list of its files, with their checksums. That
//! of a directory lies in it, that of a file beside it.
//!
//! A check reads everything and compares. It leaves a note of all sizes and times of change: as long as these
//! stay the same, a later check looks at them only. Whoever wants all to be read removes the notes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use workshop::say;

use crate::fetch::cache::{self, Cache, beside, hex, sha256};

/// The list in a directory.
pub const LIST: &str = "manifest";
/// What the name of the list ends with that lies beside a file.
const LIST_BESIDE: &str = ".sum";
/// Where the notes of checks lie in the cache.
const NOTES: &str = "checked";
/// What a kernel's package has of the files `modules.*`; the others are depmod's, made on this machine.
const SHIPPED: [&str; 4] =
    ["modules.order", "modules.builtin", "modules.builtin.modinfo", "modules.builtin.ranges"];

/// The files of one thing: of each its checksum, by its name. As for `ls -F`, the name of a directory ends
/// with `/`, that of a program with `*`, and that of a link, whose checksum is that of its target, with `@`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct List(BTreeMap<Vec<u8>, String>);

impl List {
    /// Reads all that lies at `place`.
    pub fn of(place: &Path) -> Result<List> {
        let mut list = List::default();
        for (name, meta) in walk(place)? {
            let file = if name.as_os_str().is_empty() { place.into() } else { place.join(&name) };
            let (sum, kind) = if meta.is_dir() {
                ("-".to_owned(), "/")
            } else if meta.is_symlink() {
                let target = fs::read_link(&file).with_context(|| file.display().to_string())?;
                (hex(&Sha256::digest(target.as_os_str().as_bytes())), "@")
            } else if meta.permissions().mode() & 0o100 != 0 {
                (sha256(&file)?, "*")
            } else {
                (sha256(&file)?, "")
            };
            let name = if name.as_os_str().is_empty() { base(place) } else { name.as_os_str() };
            ensure!(!name.as_bytes().contains(&b'\n'), "{name:?} has a line break in its name");
            list.0.insert([name.as_bytes(), kind.as_bytes()].concat(), sum);
        }
        Ok(list)
    }

    /// The list that belongs to what lies at `place`.
    fn read(place: &Path) -> Result<List> {
        let text = match fs::read(list_file(place)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("it was not made to its end: it has no list of its files")
            }
            text => text.context("the list of its files")?,
        };
        let mut list = List::default();
        for line in text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let space = line.iter().position(|byte| *byte == b' ');
            let (sum, name) = line.split_at(space.context("the list of its files is damaged")?);
            list.0.insert(name[1..].to_vec(), String::from_utf8_lossy(sum).into_owned());
        }
        Ok(list)
    }

    /// Writes it. A kernel's image is first: older launchers read no other line.
    fn write(&self, file: &Path) -> Result<()> {
        let is_image = |name: &[u8]| String::from_utf8_lossy(name).contains("/vmlinuz");
        let (first, rest): (Vec<_>, Vec<_>) = self.0.iter().partition(|(name, _)| is_image(name));
        let lines = first.into_iter().chain(rest);
        let text: Vec<u8> = lines.flat_map(|(name, sum)| line(name, sum)).collect();
        cache::write(file, &text)
    }

    /// One checksum for all, whoever unpacks the packages: without what depmod has made of them.
    pub fn digest(&self) -> String {
        let shipped = self.0.iter().filter(|(name, _)| !is_depmods(name));
        let hash =
            shipped.fold(Sha256::new(), |hash, (name, sum)| hash.chain_update(line(name, sum)));
        hex(&hash.finalize())
    }

    fn is_pinned(&self, pin: Option<&str>) -> bool {
        pin.is_none_or(|pin| pin == self.digest())
    }

    /// An error that names the first file in which what is here differs from this list.
    fn compare(&self, here: &List) -> Result<()> {
        let shown = |name: &[u8]| workshop::printable(&String::from_utf8_lossy(name));
        for (name, sum) in &self.0 {
            match here.0.get(name) {
                Some(got) => ensure!(got == sum, "{} has the wrong checksum", shown(name)),
                None => bail!("{} is missing", shown(name)),
            }
        }
        let more = here.0.keys().find(|name| !self.0.contains_key(*name));
        more.map_or(Ok(()), |name| bail!("{} does not belong there", shown(name)))
    }
}

fn line(name: &[u8], sum: &str) -> Vec<u8> {
    [sum.as_bytes(), b" ", name, b"\n"].concat()
}

/// Whether it is one of the files that depmod writes.
fn is_depmods(name: &[u8]) -> bool {
    let name = String::from_utf8_lossy(name);
    let path = Path::new(&*name);
    let file = base(path).to_string_lossy();
    let dir = path.parent().and_then(Path::parent).unwrap_or(path);
    dir.ends_with("lib/modules") && file.starts_with("modules.") && !SHIPPED.contains(&&*file)
}

fn base(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

/// Where the list of what lies at `place` is.
fn list_file(place: &Path) -> PathBuf {
    if place.is_dir() { place.join(LIST) } else { beside(place, LIST_BESIDE) }
}

/// All files and directories at `place`, but for its list, with their names there: of a file, only the file,
/// with an empty name.
fn walk(place: &Path) -> Result<BTreeMap<PathBuf, Metadata>> {
    let meta = place.metadata().with_context(|| place.display().to_string())?;
    let mut found = BTreeMap::new();
    let mut directories = Vec::new();
    if meta.is_dir() {
        directories.push(PathBuf::new());
    } else {
        found.insert(PathBuf::new(), meta);
    }
    while let Some(directory) = directories.pop() {
        let inside = place.join(&directory);
        let entries = fs::read_dir(&inside).with_context(|| inside.display().to_string())?;
        for entry in entries {
            let entry = entry?;
            let (name, meta) = (directory.join(entry.file_name()), entry.metadata()?);
            ensure!(
                meta.is_dir() || meta.is_file() || meta.is_symlink(),
                "{} is neither a file nor a directory nor a link",
                name.display()
            );
            if meta.is_dir() {
                directories.push(name.clone());
            }
            if name != Path::new(LIST) {
                found.insert(name, meta);
            }
        }
    }
    Ok(found)
}

/// What changes whenever a file there changes, is added or is removed.
fn stamp(place: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut add = |name: &Path, meta: &Metadata| {
        // The time of a directory changes with the names in it, which are seen anyway.
        let time = if meta.is_dir() { (0, 0) } else { (meta.ctime(), meta.ctime_nsec()) };
        let size = if meta.is_dir() { 0 } else { meta.len() };
        hash.update(format!("{name:?} {:o} {size} {time:?}\n", meta.mode()));
    };
    walk(place)?.iter().for_each(|(name, meta)| add(name, meta));
    if let Ok(meta) = list_file(place).metadata() {
        add(Path::new(LIST), &meta);
    }
    Ok(hex(&hash.finalize()))
}

/// Writes the list of what lies in a directory.
#[cfg(test)]
pub fn seal(directory: &Path) -> List {
    let list = List::of(directory).unwrap();
    list.write(&list_file(directory)).unwrap();
    list
}

/// An error where what lies at `place` is not what its list says, or where that list is not the one of which
/// `pin` is the checksum.
pub fn check(place: &Path, pin: Option<&str>) -> Result<()> {
    let list = List::read(place)?;
    list.compare(&List::of(place)?)?;
    ensure!(
        list.is_pinned(pin),
        "its list of files was changed, too: they are not those of the package that vm/pinned.toml names"
    );
    Ok(())
}

impl Cache {
    /// Whether something lies at this place of the cache. An error where it is not what was put there.
    pub fn check(&self, place: &Path, pin: Option<&str>) -> Result<bool> {
        if !place.exists() {
            return Ok(false);
        }
        let now = note(place, pin)?;
        if fs::read_to_string(self.note_of(place)).is_ok_and(|note| note == now) {
            return Ok(true);
        }
        check(place, pin)?;
        self.remember(place, &now);
        Ok(true)
    }

    /// Puts what was made into its place, with the list of its files.
    pub fn keep(&self, made: &Path, place: &Path, pin: Option<&str>) -> Result<()> {
        let list = List::of(made)?;
        ensure!(
            list.is_pinned(pin),
            "the files of {} have not the checksum that vm/pinned.toml gives for all of them, but {}",
            base(place).to_string_lossy(),
            list.digest()
        );
        if made.is_dir() {
            list.write(&list_file(made))?;
        } else {
            // By the name that it has in its place. The list comes first: without the file, it says nothing.
            let sums = List(
                list.0.into_values().map(|sum| (base(place).as_bytes().into(), sum)).collect(),
            );
            let written = beside(made, LIST_BESIDE);
            sums.write(&written)?;
            cache::put(&written, &beside(place, LIST_BESIDE))?;
        }
        cache::put(made, place)?;
        self.remember(place, &note(place, pin)?);
        Ok(())
    }

    /// Says why something is made again, if it is there.
    pub fn say_damage(&self, what: &str, place: &Path, pin: Option<&str>) {
        if let Err(why) = self.check(place, pin) {
            say!("{what} was damaged in the cache ({why:#}): it is made again");
        }
    }

    /// From now on, everything is read again before it is used.
    pub fn forget_checks(&self) -> Result<()> {
        // One by one: others write such notes at the same time.
        for note in fs::read_dir(self.path(NOTES)).into_iter().flatten().flatten() {
            match fs::remove_file(note.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(error).context("cannot remove the notes of earlier checks");
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes damaged files that nobody has made again: an initramfs of an earlier launcher, for example.
    pub fn drop_damaged(&self) -> Result<()> {
        let _lock = self.lock()?;
        for place in self.kept().into_iter().filter(|place| place.is_file()) {
            if let Err(why) = self.check(&place, None) {
                say!("{} is damaged ({why:#}): it is removed", place.display());
                for file in [&place, &beside(&place, LIST_BESIDE)] {
                    fs::remove_file(file).with_context(|| file.display().to_string())?;
                }
            }
        }
        Ok(())
    }

    /// All that lies in the cache and has a list, but for kernels.
    pub fn kept(&self) -> Vec<PathBuf> {
        let inside = |sub: &str| fs::read_dir(self.path(sub)).into_iter().flatten().flatten();
        let all = inside("").chain(inside("initramfs")).map(|entry| entry.path());
        let files = all.filter(|path| path.is_file() && beside(path, LIST_BESIDE).is_file());
        let dirs = inside("packages").chain(inside("roots")).map(|entry| entry.path());
        let mut kept: Vec<PathBuf> = files.chain(dirs.filter(|path| path.is_dir())).collect();
        kept.sort();
        kept
    }

    fn note_of(&self, place: &Path) -> PathBuf {
        let name = place.strip_prefix(self.path("")).unwrap_or(place);
        self.path(NOTES).join(name.to_string_lossy().replace('/', "-"))
    }

    /// Without the note, all is read once more.
    fn remember(&self, place: &Path, note: &str) {
        let file = self.note_of(place);
        let _ = file.parent().map(fs::create_dir_all);
        let _ = fs::write(file, note);
    }
}

fn note(place: &Path, pin: Option<&str>) -> Result<String> {
    Ok(format!("{} {}", stamp(place)?, pin.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Seek, SeekFrom, Write};
    use std::os::unix::fs::symlink;

    /// A cache with a directory and a file.
    fn filled() -> (tempfile::TempDir, Cache, [PathBuf; 2]) {
        let temp = tempfile::tempdir().unwrap();
        let cache = Cache::at(&temp.path().join("cache")).unwrap();
        let (made, file) = (temp.path().join("made"), temp.path().join("file"));
        fs::create_dir_all(made.join("usr/lib/modules/6/kernel/empty")).unwrap();
        for name in
            ["usr/vmlinuz", "usr/lib/modules/6/modules.dep", "usr/lib/modules/6/modules.order"]
        {
            fs::write(made.join(name), "text").unwrap();
        }
        symlink("vmlinuz", made.join("usr/link")).unwrap();
        fs::write(&file, vec![b'x'; 5000]).unwrap();
        let places = ["kernels/6", "disk"].map(|name| cache.path(name));
        cache.keep(&made, &places[0], None).unwrap();
        cache.keep(&file, &places[1], None).unwrap();
        (temp, cache, places)
    }

    #[test]
    fn whatever_changes_is_noticed_and_named() {
        type Damage = fn(&Path);
        let ways: [(&str, Damage); 10] = [
            ("usr/vmlinuz is missing", |at| fs::remove_file(at.join("usr/vmlinuz")).unwrap()),
            ("usr/vmlinuz has the wrong checksum", |at| {
                fs::write(at.join("usr/vmlinuz"), "t3xt").unwrap()
            }),
            ("usr/vmlinuz has the wrong checksum", |at| {
                fs::write(at.join("usr/vmlinuz"), "").unwrap()
            }),
            ("usr/new does not belong there", |at| fs::write(at.join("usr/new"), "").unwrap()),
            ("usr/link@ has the wrong checksum", |at| {
                fs::remove_file(at.join("usr/link")).unwrap();
                symlink("elsewhere", at.join("usr/link")).unwrap();
            }),
            ("usr/vmlinuz is missing", |at| {
                let mode = std::fs::Permissions::from_mode(0o755);
                fs::set_permissions(at.join("usr/vmlinuz"), mode).unwrap();
            }),
            ("usr/lib/modules/6/kernel/empty/ is missing", |at| {
                fs::remove_dir(at.join("usr/lib/modules/6/kernel/empty")).unwrap();
            }),
            ("usr/lib/modules/6/modules.dep has the wrong", |at| {
                fs::write(at.join("usr/lib/modules/6/modules.dep"), "t3xt").unwrap();
            }),
            ("it has no list of its files", |at| fs::remove_file(at.join(LIST)).unwrap()),
            ("usr/vmlinuz has the wrong checksum", |at| {
                let text = fs::read_to_string(at.join(LIST)).unwrap();
                fs::write(at.join(LIST), text.replacen(|c: char| c != '0', "0", 1)).unwrap();
            }),
        ];
        for (wanted, damage) in ways {
            let (_temp, cache, [place, _]) = filled();
            assert!(cache.check(&place, None).unwrap());
            damage(&place);
            let error = cache.check(&place, None).unwrap_err().to_string();
            assert!(error.contains(wanted), "{wanted}: {error}");
        }
        type Change = fn(&File);
        let changes: [Change; 3] = [
            |file| file.set_len(0).unwrap(),
            |file| file.set_len(100).unwrap(),
            |mut file| {
                file.seek(SeekFrom::Start(100)).unwrap();
                file.write_all(b"y").unwrap();
            },
        ];
        for change in changes {
            let (_temp, cache, [_, place]) = filled();
            assert!(cache.check(&place, None).unwrap());
            change(&File::options().write(true).open(&place).unwrap());
            let error = cache.check(&place, None).unwrap_err().to_string();
            assert_eq!(error, "disk has the wrong checksum");
            fs::remove_file(beside(&place, LIST_BESIDE)).unwrap();
            assert!(cache.check(&place, None).unwrap_err().to_string().contains("no list"));
            fs::remove_file(&place).unwrap();
            assert!(!cache.check(&place, None).unwrap());
        }
    }

    /// What was read once is not read again, unless it changes or the notes are removed: as root, this could
    /// not be seen by taking the right to read, so the note is given to damage that left no trace.
    #[test]
    fn what_has_not_changed_is_not_read_again() {
        let (_temp, cache, places) = filled();
        for place in places {
            let file = if place.is_dir() { place.join("usr/vmlinuz") } else { place.clone() };
            fs::write(file, "t3xt").unwrap();
            assert!(cache.check(&place, None).is_err());
            cache.remember(&place, &note(&place, None).unwrap());
            assert!(cache.check(&place, None).unwrap());
            cache.forget_checks().unwrap();
            assert!(cache.check(&place, None).is_err());
        }
        cache.forget_checks().unwrap();
    }

    #[test]
    fn a_damaged_file_that_nobody_makes_again_is_removed() {
        let (_temp, cache, [_, place]) = filled();
        cache.drop_damaged().unwrap();
        assert_eq!(cache.kept(), std::slice::from_ref(&place));
        fs::write(&place, "").unwrap();
        cache.drop_damaged().unwrap();
        assert!(cache.kept().is_empty() && !place.exists());
    }

    /// A list that was changed together with a file is not the pinned one. What depmod has made is of this
    /// machine, and is not pinned.
    #[test]
    fn a_changed_list_is_not_the_pinned_one() {
        let (_temp, cache, [place, _]) = filled();
        let pin = List::read(&place).unwrap().digest();
        assert!(cache.check(&place, Some(&pin)).unwrap());
        assert!(cache.check(&place, Some(&"0".repeat(64))).is_err());
        let change = |name: &str| {
            fs::write(place.join("usr").join(name), "other").unwrap();
            seal(&place);
            cache.check(&place, Some(&pin))
        };
        assert!(change("lib/modules/6/modules.dep").unwrap());
        for name in ["vmlinuz", "lib/modules/6/modules.order"] {
            let error = change(name).unwrap_err().to_string();
            assert!(error.contains("not those of the package"), "{name}: {error}");
            assert!(cache.check(&place, None).unwrap());
        }
    }
}
