//! The file systems in which the kernel shows what it knows.

use rustix::fs::{FsWord, PROC_SUPER_MAGIC, statfs};

const SYSFS_MAGIC: FsWord = 0x6265_6572;

/// What is not mounted, and how to mount it; `None`: all is. Another file system may lie below, with files of the same
/// names: in a container, or where somebody has copied a root.
pub fn unmounted() -> Option<&'static str> {
    let is = |path: &str, magic| statfs(path).is_ok_and(|found| found.f_type == magic);
    if !is("/proc", PROC_SUPER_MAGIC) {
        return Some(
            "/proc, where the kernel shows processes, is not mounted: mount -t proc proc /proc",
        );
    }
    if !is("/sys", SYSFS_MAGIC) {
        return Some("sysfs is not mounted: mount -t sysfs sysfs /sys");
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_mounted_here() {
        assert_eq!(unmounted(), None);
    }
}
