//! The initramfs: busybox, the modules that a boot needs, and our init.

use std::collections::HashMap;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cpio::NewcBuilder;
use host::fail::{MACHINE, fail};
use sha2::{Digest, Sha256};

use crate::fetch::cache::{self, Cache, hex};
use crate::fetch::kernel::Kernel;

const INIT: &str = include_str!("../../init.sh");

/// What init loads: must be there, as a module or built in.
const NEEDED: [&str; 5] = ["virtio_pci", "virtio_blk", "virtio_console", "overlay", "ext4"];
/// How the guest sees this machine's files.
const BY_9P: [&str; 2] = ["9p", "9pnet_virtio"];
/// The same for kernels without 9p.
const BY_VIRTIOFS: [&str; 1] = ["virtiofs"];
/// What ext4 and btrfs ask the kernel for by an alias; absent where it is built in or has gone.
const WANTED: [&str; 3] = ["crc32c_generic", "crc32c_intel", "crc32c_cryptoapi"];

#[derive(Debug)]
pub struct Initramfs {
    pub file: PathBuf,
    /// Whether the kernel has 9p; else the guest sees this machine's files through virtiofs.
    pub has_9p: bool,
}

/// The initramfs for `kernel`, made where it is missing or where init has changed. `rootfs`: where the
/// guest's busybox is, if it is not this machine's.
pub fn get(kernel: &Kernel, rootfs: Option<&Path>, cache: &Cache) -> Result<Initramfs> {
    let busybox = match rootfs {
        Some(rootfs) => Some(rootfs.join("usr/bin/busybox")),
        None => cache::static_busybox(),
    };
    let busybox = busybox.ok_or_else(|| {
        fail(
            MACHINE,
            "a static busybox is not here: install one (Debian's busybox-static; `cargo vm setup` \
                 does where there is apt)",
        )
    })?;
    let mut hash = Sha256::new();
    hash.update(INIT);
    hash.update(format!("{WANTED:?} {}", kernel.release));
    let known = Modules::read(&kernel.modules)?;
    let modules = known.load_order(&kernel.release)?;
    for file in modules.iter().chain([&kernel.image, &busybox]) {
        hash.update(format!("{} {}", file.display(), cache::stamp(file)?));
    }
    let key = &hex(&hash.finalize())[..16];
    let name = format!("initramfs/{}-{key}.cpio", kernel.release);
    let what = format!("the initramfs of {}", kernel.release);
    let make = |file: &Path| cache::write(file, &build(&modules, &busybox)?);
    Ok(Initramfs { file: cache.file(&name, (&what, 64), make)?, has_9p: known.have(&BY_9P) })
}

fn build(modules: &[PathBuf], busybox: &Path) -> Result<Vec<u8>> {
    let mut entries = Vec::new();
    let mut add = |name: &str, mode, content| {
        entries.push((NewcBuilder::new(name).mode(mode), Cursor::new(content)));
    };
    for dir in ["bin", "proc", "sys", "dev", "ctl", "lower", "up", "root", "mods"] {
        add(dir, 0o040_755, Vec::new());
    }
    let program =
        fs::read(busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    add("bin/busybox", 0o100_755, program);
    add("init", 0o100_755, INIT.into());
    for (n, file) in modules.iter().enumerate() {
        let name = module_name(&file.to_string_lossy());
        add(&format!("mods/{n:03}_{name}.ko"), 0o100_644, module_content(file)?);
    }
    Ok(cpio::write_cpio(entries.into_iter(), Vec::new())?)
}

/// A module's object code, decompressed.
fn module_content(file: &Path) -> Result<Vec<u8>> {
    let unpacker = match file.extension().and_then(|e| e.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(file).with_context(|| format!("cannot read {}", file.display())),
    };
    cache::run(unpacker, ["-dc".as_ref(), file.as_os_str()])
        .with_context(|| format!("cannot unpack {}", file.display()))
}

/// What depmod wrote about a kernel's modules.
struct Modules {
    dir: PathBuf,
    /// Module name to its file and the files it depends on, both below `dir`.
    deps: HashMap<String, (String, Vec<String>)>,
    builtin: Vec<String>,
}

impl Modules {
    fn read(dir: &Path) -> Result<Modules> {
        let read = |name: &str| {
            let path = dir.join(name);
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        Ok(Modules::parse(dir, &read("modules.dep")?, &read("modules.builtin").unwrap_or_default()))
    }

    fn parse(dir: &Path, dep: &str, builtin: &str) -> Modules {
        let deps = dep
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(file, deps)| {
                let deps = deps.split_whitespace().map(str::to_owned).collect();
                (module_name(file), (file.to_owned(), deps))
            })
            .collect();
        Modules { dir: dir.to_owned(), deps, builtin: builtin.lines().map(module_name).collect() }
    }

    fn has(&self, name: &str) -> bool {
        self.deps.contains_key(name) || self.builtin.iter().any(|builtin| builtin == name)
    }

    fn have(&self, names: &[&str]) -> bool {
        names.iter().all(|name| self.has(name))
    }

    /// The files to load, each after those it depends on.
    fn load_order(&self, release: &str) -> Result<Vec<PathBuf>> {
        let shares = match (self.have(&BY_9P), self.have(&BY_VIRTIOFS)) {
            (true, _) => &BY_9P[..],
            (_, true) => &BY_VIRTIOFS,
            _ => bail!(
                "kernel {release} has neither 9p (the modules 9p and 9pnet_virtio) nor virtiofs, \
                 and the guest needs one of them to see this machine's files: take another kernel, \
                 or install the package with the rest of its modules (Ubuntu: linux-modules-extra-\
                 {release}, Fedora: kernel-modules)"
            ),
        };
        if let Some(name) = NEEDED.iter().find(|name| !self.has(name)) {
            bail!("kernel {release} has no {name}, as a module or built in, which the guest needs");
        }
        let mut order: Vec<&str> = Vec::new();
        for name in NEEDED.iter().chain(shares).chain(&WANTED) {
            let Some((file, deps)) = self.deps.get(*name) else {
                continue; // built in
            };
            // modules.dep lists the last one to load first.
            for file in deps.iter().rev().chain([file]) {
                if !order.contains(&file.as_str()) {
                    order.push(file);
                }
            }
        }
        Ok(order.into_iter().map(|file| self.dir.join(file)).collect())
    }
}

/// A module's name from its file: `a/virtio-pci.ko.xz` is `virtio_pci`.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUILTIN: &str = "kernel/virtio-pci.ko\nkernel/virtio_console.ko\n";

    fn order(dep: &str) -> Result<Vec<String>> {
        let order = Modules::parse(Path::new("/m"), dep, BUILTIN).load_order("6.1")?;
        Ok(order.iter().map(|file| module_name(&file.to_string_lossy())).collect())
    }

    /// Without what the guest's files come through.
    const MOST: &str = "k/virtio_blk.ko.xz:\nk/overlay.ko:\nk/ext4.ko.zst: k/jbd2.ko\nk/jbd2.ko:\n";

    #[test]
    fn modules_load_after_what_they_need() {
        let dep = "k/9p.ko: k/netfs.ko k/9pnet.ko\nk/netfs.ko:\nk/9pnet.ko:\n\
                   k/9pnet_virtio.ko: k/9pnet.ko\n";
        assert_eq!(
            order(&(MOST.to_owned() + dep)).unwrap(),
            ["virtio_blk", "overlay", "jbd2", "ext4", "9pnet", "netfs", "9p", "9pnet_virtio"]
        );
        let dep = "k/virtiofs.ko: k/fuse.ko\nk/fuse.ko:\n";
        assert_eq!(order(&(MOST.to_owned() + dep)).unwrap()[4..], ["fuse", "virtiofs"]);
    }

    #[test]
    fn what_is_built_in_is_not_loaded() {
        let builtin = "kernel/virtio_pci.ko\nkernel/virtio_blk.ko\nkernel/virtio_console.ko\n\
                       kernel/ext4.ko\nkernel/overlay.ko\nkernel/9p.ko\nkernel/9pnet_virtio.ko\n";
        let modules = Modules::parse(Path::new("/m"), "", builtin);
        assert!(modules.load_order("6.1").unwrap().is_empty());
    }

    #[test]
    fn a_missing_module_is_named() {
        let error = order(MOST).unwrap_err().to_string();
        assert!(error.starts_with("kernel 6.1 has neither 9p (the modules"), "{error}");
        let error = order("k/virtiofs.ko:\n").unwrap_err().to_string();
        assert!(error.starts_with("kernel 6.1 has no virtio_blk"), "{error}");
    }
}
