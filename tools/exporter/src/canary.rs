//! A read of a known kind, which the exporter looks for in its own figures.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    os::{
        linux::fs::MetadataExt,
        unix::fs::{FileExt, FileTypeExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use common::Device;
use memmap2::MmapMut;

/// How much it reads: as much as any disk reads at once.
const BYTES: usize = 4096;
/// No more than one in this time.
const PAUSE: Duration = Duration::from_secs(1);

/// What is known of the reads so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sight {
    /// The disk that has the file.
    pub disk: String,
    /// How many were made.
    pub made: u64,
    /// How many of the reads made are in the figures.
    pub seen: u64,
    /// How many of them got no data: those are not looked for.
    pub failed: u64,
    /// How long the last read took by the figures, in seconds, if it was the only one of its time. Nothing while
    /// another one is pending: that may take longer.
    pub latency: Option<f64>,
    /// How long the last read took by the thread that made it, in seconds. Nothing while another one is pending.
    pub waited: Option<f64>,
    /// When the read was made that is pending.
    pub pending: Option<Instant>,
}

impl Sight {
    /// For how long a read has been pending, in seconds.
    pub fn pending_for(&self) -> f64 {
        self.pending.map_or(0.0, |since| since.elapsed().as_secs_f64())
    }

    /// Takes what has come of the read that was pending: whether it got data, how long it took, and the reads that
    /// the figures have had since, and their sum in ns.
    fn ends(&mut self, is_good: bool, waited: Duration, [count, ns]: [u64; 2]) {
        self.pending = None;
        if !is_good {
            self.failed += 1;
            return;
        }
        // A time that is longer than the read itself is not its time.
        let is_its = count == 1 && u128::from(ns) <= waited.as_nanos();
        self.seen += u64::from(is_its || count > 1);
        self.latency = is_its.then_some(ns as f64 / 1e9);
        self.waited = Some(waited.as_secs_f64());
    }
}

/// The thread that reads. A disk may let it wait for ever, and the exporter must not.
pub struct Canary {
    go: SyncSender<()>,
    sight: Arc<Mutex<Sight>>,
    last: Option<Instant>,
}

/// How many reads of these disks the figures have, and their sum in ns.
pub type Reads = Box<dyn Fn(&BTreeSet<u64>) -> [u64; 2] + Send>;

impl Canary {
    /// Opens the file or the block device. `bios`: the figures are of bios, which a disk without requests has,
    /// too.
    pub fn new(path: &Path, bios: bool, reads: Reads) -> Result<Canary> {
        let about = || format!("--canary {}", path.display());
        let mut options = OpenOptions::new();
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = options.read(true).custom_flags(direct).open(path).with_context(about)?;
        let disk = disk_of(&file).with_context(about)?;
        ensure!(
            !disks_seen(&disk, bios).is_empty(),
            "{}: its disk has no requests, and no disk below it has; with --bios, its bios are measured",
            about()
        );
        let mut buffer = MmapMut::map_anon(BYTES).context("no memory")?;
        let name = disk.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sight = Arc::new(Mutex::new(Sight { disk: name, ..Sight::default() }));
        let (go, gone) = sync_channel(0);
        let written = Arc::clone(&sight);
        let mut fly = move || {
            let disks = disks_seen(&disk, bios);
            let (before, start) = (reads(&disks), Instant::now());
            let length = file.read_at(&mut buffer, 0);
            let waited = start.elapsed();
            let after = reads(&disks);
            let since = [0, 1].map(|n| after[n].wrapping_sub(before[n]));
            let is_good = length.is_ok_and(|length| length > 0); // 0: the file has been emptied
            let mut sight = written.lock().unwrap_or_else(PoisonError::into_inner);
            sight.ends(is_good, waited, since);
        };
        let thread = thread::Builder::new().name("canary".to_owned());
        thread
            .spawn(move || gone.into_iter().for_each(|()| fly()))
            .context("no thread for --canary")?;
        Ok(Canary { go, sight, last: None })
    }

    /// Lets it read once, if the last read has ended, and was made some time ago.
    pub fn fly(&mut self) {
        let rests = self.last.is_some_and(|last| last.elapsed() < PAUSE);
        // The thread does not take the end of its read down before the start is.
        let mut sight = self.sight.lock().unwrap_or_else(PoisonError::into_inner);
        if !rests && self.go.try_send(()).is_ok() {
            self.last = Some(Instant::now());
            sight.made += 1;
            sight.pending = self.last;
            (sight.latency, sight.waited) = (None, None);
        }
    }

    /// What is known.
    pub fn sight(&self) -> Sight {
        self.sight.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The disk that has a file, or is one, in /sys.
fn disk_of(file: &File) -> Result<PathBuf> {
    let metadata = file.metadata()?;
    let is_device = metadata.file_type().is_block_device();
    let device = if is_device { metadata.st_rdev() } else { metadata.st_dev() };
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let device: Device = numbers.parse().ok().context("odd device numbers")?;
    let name = device.name().context(
        "its file system is on no disk alone: name a block device, or a file of ext4 or xfs",
    )?;
    whole(&Path::new("/sys/class/block").join(name)).context("its disk has gone")
}

/// From a partition to its disk.
fn whole(device: &Path) -> Option<PathBuf> {
    let path = fs::canonicalize(device).ok()?;
    if path.join("partition").exists() { Some(path.parent()?.to_owned()) } else { Some(path) }
}

/// The disks that the figures have its reads of, by their diskseq: itself; of requests, those below it where it
/// has none.
fn disks_seen(disk: &Path, bios: bool) -> BTreeSet<u64> {
    if bios || disk.join("mq").exists() {
        let number = fs::read_to_string(disk.join("diskseq"));
        return number.ok().and_then(|text| text.trim().parse().ok()).into_iter().collect();
    }
    let below = fs::read_dir(disk.join("slaves")).into_iter().flatten().flatten();
    let below = below.filter_map(|entry| whole(&entry.path()));
    below.flat_map(|disk| disks_seen(&disk, false)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_seen_or_failed_or_pending_or_lost() {
        let pending = Sight {
            pending: Instant::now().checked_sub(Duration::from_secs(8)),
            ..Sight::default()
        };
        assert!(pending.pending_for() >= 8.0 && Sight::default().pending_for() == 0.0);
        let ms = Duration::from_millis(1);
        for (is_good, reads, seen, failed, latency) in [
            (true, [1, 900_000], 1, 0, Some(0.0009)),
            (true, [1, 1_100_000], 0, 0, None), // somebody else's
            (true, [2, 1_100_000], 1, 0, None),
            (true, [0, 0], 0, 0, None),
            (false, [1, 900_000], 0, 1, None),
        ] {
            let mut sight = pending.clone();
            sight.ends(is_good, ms, reads);
            assert_eq!((sight.seen, sight.failed, sight.latency), (seen, failed, latency));
            let is_waited = sight.waited == is_good.then_some(0.001);
            assert!(is_waited && sight.pending.is_none(), "{sight:?}");
        }
    }
}
