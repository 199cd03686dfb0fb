//! The memory that is left.

use std::fs;

/// How many bytes programs can still have without others losing theirs. `None`: the kernel does not say.
pub fn available() -> Option<u64> {
    read(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Of `/proc/meminfo`.
fn read(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes as `1536 MiB`, rounded up.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let meminfo = "MemTotal:        2012116 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(read(meminfo), Some(1 << 20));
        assert_eq!(read("MemTotal: 1 kB\n"), None);
        assert_eq!(mib((3 << 20) + 1), "4 MiB");
        assert!(available().is_some());
    }
}
