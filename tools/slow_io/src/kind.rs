//! What kind of disk it is: where to look next depends on that.

use std::{fs, path::PathBuf};

/// A disk by what makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its driver talks to hardware, or to the host.
    Disk,
    /// The same, and it has to be written in order.
    Zoned,
    /// A file as a disk.
    Loop,
    /// md, software RAID.
    Md,
    /// Device mapper: LVM, encryption, a delay.
    Mapper,
    /// Device mapper's multipath.
    Multipath,
    /// A cache before a disk.
    Bcache,
}

impl Kind {
    /// Of a disk, or of a partition's disk. One that is gone is like any other.
    pub fn of(name: &str) -> Kind {
        let Ok(directory) = fs::canonicalize(format!("/sys/class/block/{name}")) else {
            return Kind::Disk;
        };
        let disk = match directory.join("partition").exists() {
            true => directory.parent().map(PathBuf::from).unwrap_or_default(),
            false => directory,
        };
        let has = |entry: &str| disk.join(entry).exists();
        let text = |entry: &str| fs::read_to_string(disk.join(entry)).unwrap_or_default();
        match () {
            () if text("dm/uuid").starts_with("mpath-") => Kind::Multipath,
            () if has("dm") => Kind::Mapper,
            () if has("md") => Kind::Md,
            () if has("bcache/cache_mode") => Kind::Bcache,
            () if has("loop") => Kind::Loop,
            () if !["none", ""].contains(&text("queue/zoned").trim()) => Kind::Zoned,
            () => Kind::Disk,
        }
    }

    /// What it usually means that slow I/Os spend their time in this part, and what to look at. `requests`: how many
    /// an I/O was cut into.
    pub fn next(self, part: &str, requests: u64) -> String {
        let cut = match requests {
            0 | 1 => String::new(),
            many => format!(
                "behind requests of the same I/O, which was cut into {many} (queue/max_sectors_kb), or "
            ),
        };
        match (part, self) {
            ("wait", _) => format!(
                "{cut}before a request: a cgroup's limit (io.max, io.cost), no free request (nr_requests), a queue that \
                 was frozen (its scheduler was changed); if p50 is small, a thread that lost its CPU (cpu.max)"
            ),
            ("queue", Kind::Multipath) => "no path took it (multipath -ll), or a scheduler had it".to_owned(),
            ("queue", Kind::Zoned) => {
                "writes to a zone wait for each other; the scheduler; a flush".to_owned()
            }
            ("queue", _) => format!(
                "{cut}in the scheduler, for a disk that was busy, or for a flush (queue/scheduler, queue depth)"
            ),
            ("device", Kind::Loop) => "the file behind the loop device, and its disk (losetup)".to_owned(),
            ("device", _) => "the disk itself (its load, its health; fewer or larger I/Os)".to_owned(),
            ("end", _) => {
                "after the disk (parts of a split I/O, checksums, a flush after a write, a busy CPU)".to_owned()
            }
            (_, Kind::Md) => "md: a resync, a busy stripe, the bitmap (/proc/mdstat), or a limit on its disk".to_owned(),
            (_, Kind::Bcache) => "bcache: the cache, or the disk behind it".to_owned(),
            (_, _) => "device mapper (dmsetup table: encryption, delay, a snapshot), or a cgroup's limit on its disk \
                       (io.max)"
                .to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hint_is_for_the_kind_of_disk() {
        assert!(Kind::Md.next("mapper", 1).contains("/proc/mdstat"));
        assert!(Kind::Mapper.next("mapper", 1).contains("dmsetup"));
        assert!(
            Kind::Disk
                .next("wait", 16)
                .starts_with("behind requests of the same I/O, which was cut into 16")
        );
        assert!(Kind::Disk.next("wait", 1).starts_with("before a request"));
        assert!(Kind::Disk.next("wait", 1).contains("cpu.max"));
        assert_eq!(Kind::of("no such disk"), Kind::Disk);
    }
}
