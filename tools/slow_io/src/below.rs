//! The disks below a disk that is made of others: where the requests are that it has none of.

use std::{collections::BTreeSet, fs, path::Path};

/// Those that have requests of their own, by name: the disks below them are not looked for. None where the disk is made
/// of no others, or is gone.
pub fn leaves(name: &str) -> BTreeSet<String> {
    let class = Path::new("/sys/class/block");
    let (mut found, name) = (BTreeSet::new(), whole(class, name));
    look(class, &name, 8, &mut found);
    found.remove(&name);
    found
}

/// Of a partition, its disk.
fn whole(class: &Path, name: &str) -> String {
    let directory = class.join(name);
    let is_partition = directory.join("partition").exists();
    let disk = fs::canonicalize(directory).ok().filter(|_| is_partition);
    let disk = disk.and_then(|path| Some(path.parent()?.file_name()?.to_str()?.to_owned()));
    disk.unwrap_or_else(|| name.to_owned())
}

fn look(class: &Path, name: &str, levels: u32, found: &mut BTreeSet<String>) {
    let below = if levels == 0 { BTreeSet::new() } else { below(&class.join(name)) };
    if below.is_empty() {
        found.insert(name.to_owned());
    }
    below.iter().for_each(|name| look(class, name, levels - 1, found));
}

/// The kernel links a disk to those that it is made of; only bcache does that for its cache in a way of its own.
fn below(disk: &Path) -> BTreeSet<String> {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let entries =
        |directory: &str| fs::read_dir(disk.join(directory)).into_iter().flatten().flatten();
    let slaves = entries("slaves").filter_map(|entry| name(&entry.path()));
    let caches = entries("bcache/cache").filter_map(|entry| {
        let is_cache = entry.file_name().to_string_lossy().starts_with("cache");
        // /sys/block/sdb/bcache
        let cache = fs::canonicalize(entry.path()).ok().filter(|_| is_cache)?;
        cache.ends_with("bcache").then(|| cache.parent().and_then(name))?
    });
    slaves.chain(caches).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_cache_on_an_array_is_made_of_its_disks() {
        let class = std::env::temp_dir().join(format!("below-{}", std::process::id()));
        for directory in [
            "bcache0/slaves/md0",
            "md0/slaves/sda1",
            "md0/slaves/sdb1",
            "bcache0/bcache",
            "sdc/bcache",
            "set",
        ] {
            fs::create_dir_all(class.join(directory)).unwrap();
        }
        symlink(class.join("set"), class.join("bcache0/bcache/cache")).unwrap();
        symlink(class.join("sdc/bcache"), class.join("set/cache0")).unwrap();
        let mut found = BTreeSet::new();
        look(&class, "bcache0", 8, &mut found);
        fs::remove_dir_all(&class).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["sda1", "sdb1", "sdc"]);
        assert!(leaves("no such disk").is_empty());
    }
}
