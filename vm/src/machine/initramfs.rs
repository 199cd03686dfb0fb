//! The initramfs: busybox, the modules that a boot needs, and our init.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cpio::NewcBuilder;
use sha2::{Digest, Sha256};
use workshop::fail::{MACHINE, fail};

use crate::fetch::cache::{self, Cache, hex};
use crate::fetch::kernel::Kernel;

const INIT: &str = include_str!("../../init.sh");

/// What init loads: must be there, as a module or built in.
const NEEDED: [&str; 5] = ["virtio_pci", "virtio_blk", "virtio_console", "overlay", "ext4"];
/// How the guest sees this machine's files.
const BY_9P: [&str; 2] = ["9p", "9pnet_virtio"];
/// The same for kernels without 9p.
const BY_VIRTIOFS: [&str; 1] = ["virtiofs"];

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
    hash.update(&kernel.release);
    let (modules, has_9p) = modules_of(kernel)?;
    for file in modules.iter().chain([&kernel.image, &busybox]) {
        hash.update(format!("{} {}", file.display(), cache::stamp(file)?));
    }
    let key = &hex(&hash.finalize())[..16];
    let name = format!("initramfs/{}-{key}.cpio", kernel.release);
    let what = format!("the initramfs of {}", kernel.release);
    let make = |file: &Path| cache::write(file, &build(&modules, &busybox)?);
    Ok(Initramfs { file: cache.file(&name, (&what, 64), make)?, has_9p })
}

/// The modules to load, in order, and whether the kernel has 9p.
fn modules_of(kernel: &Kernel) -> Result<(Vec<PathBuf>, bool)> {
    let release = &kernel.release;
    let mut modules = load_order(kernel, &NEEDED)
        .with_context(|| format!("kernel {release} has not all modules that the guest needs"))?;
    let by_9p = load_order(kernel, &BY_9P);
    let has_9p = by_9p.is_ok();
    let shares = by_9p.or_else(|_| load_order(kernel, &BY_VIRTIOFS)).with_context(|| {
        format!(
            "kernel {release} has neither 9p (the modules 9p and 9pnet_virtio) nor virtiofs, and the \
             guest needs one of them to see this machine's files: take another kernel, or install the \
             package with the rest of its modules (Ubuntu: linux-modules-extra-{release}, Fedora: \
             kernel-modules)"
        )
    })?;
    modules.extend(shares);
    let mut known = HashSet::new();
    modules.retain(|file| known.insert(file.clone()));
    Ok((modules, has_9p))
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
        // Its name there is the kernel's: of `virtio-pci.ko.xz`, `virtio_pci`.
        let name = file.file_name().unwrap_or_default().to_string_lossy().replace('-', "_");
        let name = name.split(".ko").next().unwrap_or_default();
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

/// The files that modprobe would load for these modules, each after those that it depends on: of what is
/// built in, none.
fn load_order(kernel: &Kernel, modules: &[&str]) -> Result<Vec<PathBuf>> {
    let mut args =
        vec![OsStr::new("--config=/dev/null"), "--show-depends".as_ref(), "--all".as_ref()];
    args.extend(["--set-version", &kernel.release, "--dirname"].map(OsStr::new));
    args.push(kernel.base().as_os_str());
    args.extend(modules.iter().map(OsStr::new));
    // By this machine's settings, it might do something else.
    let output = String::from_utf8(cache::run("modprobe", args)?)?;
    let files = output.lines().filter_map(|line| {
        let (stem, end) = line.strip_prefix("insmod ")?.split_once(".ko")?;
        Some(format!("{stem}.ko{}", end.split(' ').next()?).into())
    });
    Ok(files.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_module_is_named_and_what_is_built_in_is_not_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("lib/modules/6.1");
        let order = |builtin: &str| {
            fs::create_dir_all(modules.join("kernel")).unwrap();
            fs::write(modules.join("modules.builtin"), builtin).unwrap();
            let kernel =
                Kernel { release: "6.1".into(), modules: modules.clone(), ..Kernel::default() };
            kernel.depmod().unwrap();
            modules_of(&kernel).map_err(|error| format!("{error:#}"))
        };
        let most = "kernel/virtio-pci.ko\nkernel/virtio_blk.ko\nkernel/virtio_console.ko\nkernel/overlay.ko\n\
                    kernel/virtiofs.ko\n";
        let error = order(most).unwrap_err();
        assert!(error.starts_with("kernel 6.1 has not all modules"), "{error}");
        assert!(error.contains("Module ext4 not found"), "{error}");
        let most = most.to_owned() + "kernel/ext4.ko\n";
        assert_eq!(order(&most), Ok((Vec::new(), false)));
        let with_9p = most.clone() + "kernel/9p.ko\nkernel/9pnet_virtio.ko\n";
        assert_eq!(order(&with_9p), Ok((Vec::new(), true)));
        let error = order(&most.replace("virtiofs", "other")).unwrap_err();
        assert!(error.starts_with("kernel 6.1 has neither 9p (the modules"), "{error}");
    }
}
