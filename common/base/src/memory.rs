//! The memory that is left.

use std::{fs, path::Path};

/// How many bytes programs can still have without others losing theirs. `None`: the kernel does not say.
pub fn available() -> Option<u64> {
    read(&fs::read_to_string("/proc/meminfo").ok()?)
}

/// Of `/proc/meminfo`.
fn read(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// How much memory a cgroup lets its processes have. The kernel's for their BPF maps is included.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit {
    /// The file that holds it: `/sys/fs/cgroup/a/memory.max`.
    pub file: String,
    /// In bytes.
    pub most: u64,
    /// What of that is left, in bytes: the cgroup's share of the page cache is given back where it is needed.
    pub left: u64,
}

/// The limit that leaves this process the least, of its cgroup and of those above it. `None`: there is none.
pub fn limit() -> Option<Limit> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let root = mounts.lines().find_map(|line| {
        let fields: Vec<&str> = line.split(' ').collect();
        (fields.get(2) == Some(&"cgroup2")).then(|| fields[1].to_owned())
    })?;
    let cgroups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let own = Path::new(&root).join(own.trim_start_matches('/'));
    let within = own.ancestors().take_while(|cgroup| cgroup.starts_with(&root));
    within.filter_map(limit_of).min_by_key(|limit| limit.left)
}

impl Limit {
    /// What to say where a program needs more than that leaves, in bytes.
    pub fn lacks(&self, needs: u64) -> String {
        let Limit { file, most, left } = self;
        format!(
            "a cgroup leaves this program {} of the {} in {file}, and it needs about {}: write more into that \
             file (a service of systemd has MemoryMax=)",
            mib(*left),
            mib(*most),
            mib(needs)
        )
    }
}

/// What to say where a cgroup leaves a program less memory than it needs, in bytes: the kernel would end it.
/// `None`: there is enough.
pub fn cgroup_lacks(needs: u64) -> Option<String> {
    limit().filter(|limit| limit.left < needs).map(|limit| limit.lacks(needs))
}

/// That of one cgroup.
fn limit_of(cgroup: &Path) -> Option<Limit> {
    let file = cgroup.join("memory.max");
    let most = fs::read_to_string(&file).ok()?.trim().parse().ok()?; // "max": none
    let used: u64 = fs::read_to_string(cgroup.join("memory.current")).ok()?.trim().parse().ok()?;
    let stat = fs::read_to_string(cgroup.join("memory.stat")).ok()?;
    let cached = ["inactive_file ", "active_file "].map(|name| {
        let found = stat.lines().find_map(|line| line.strip_prefix(name));
        found.and_then(|bytes| bytes.parse::<u64>().ok()).unwrap_or(0)
    });
    let used = used.saturating_sub(cached.iter().sum());
    Some(Limit { file: file.display().to_string(), most, left: most.saturating_sub(used) })
}

/// Bytes as `1536 MiB`, rounded up.
pub fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_leaves_what_is_not_used() {
        let place = std::env::temp_dir().join(format!("limit-{}", std::process::id()));
        fs::create_dir(&place).unwrap();
        let limit = || {
            for (file, text) in [
                ("memory.current", "7000\n"),
                ("memory.stat", "anon 500\ninactive_file 1000\nactive_file 2000\nfile 3000\n"),
            ] {
                fs::write(place.join(file), text).unwrap();
            }
            limit_of(&place).map(|limit| (limit.most, limit.left))
        };
        assert_eq!(limit(), None);
        fs::write(place.join("memory.max"), "9000\n").unwrap();
        assert_eq!(limit(), Some((9000, 5000)));
        fs::write(place.join("memory.max"), "max\n").unwrap();
        assert_eq!(limit(), None);
        fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let meminfo = "MemTotal:        2012116 kB\nMemAvailable:    1024 kB\n";
        assert_eq!(read(meminfo), Some(1 << 20));
        assert_eq!(read("MemTotal: 1 kB\n"), None);
        assert_eq!(mib((3 << 20) + 1), "4 MiB");
        assert!(available().is_some());
    }
}
