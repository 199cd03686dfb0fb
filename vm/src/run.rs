//! What a command line comes to: resolved once, in one place, and passed on.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};
use clap::Args;
use workshop::cargo::Cargo;
use workshop::fail::{USAGE, fail};
use workshop::say;

use crate::arch::{Accel, Arch};
use crate::cargo::programs::{self, WorkshopProgram};
use crate::cargo::target_dir;
use crate::fetch::apt::Source;
use crate::fetch::cache::Cache;
use crate::fetch::packages;
pub use crate::fetch::packages::For;
use crate::fetch::rootfs::{self, Rootfs};
use crate::fetch::table::Table;
use crate::machine::kvm;
use crate::machine::qemu::{self, Guest};

/// Where the guest mounts the data disk.
pub const DATA: &str = "/mnt/data";

/// Where all commands work, and for which guests.
#[derive(Debug)]
pub struct Run {
    /// Cargo in the workspace, for this machine.
    pub cargo: Cargo,
    /// What is fetched or made once.
    pub cache: Cache,
    /// The guest's architecture.
    pub arch: Arch,
    /// How its code has to run, where the user says so.
    pub accel: Option<Accel>,
    /// The kernel lines of that architecture.
    pub table: Table,
    /// Where packages come from.
    pub source: Source,
    /// What follows takes time, and not every command needs it: made when it is asked for, once.
    rootfs: OnceLock<Option<PathBuf>>,
    guests: OnceLock<Cargo>,
    programs: OnceLock<Vec<WorkshopProgram>>,
}

/// What cannot fail, or is there already; else what `make` returns.
fn once<T>(cell: &OnceLock<T>, make: impl FnOnce() -> Result<T>) -> Result<&T> {
    match cell.get() {
        Some(made) => Ok(made),
        None => make().map(|made| cell.get_or_init(|| made)),
    }
}

impl Run {
    /// Looks at the environment, for guests of this architecture, or of this machine's.
    pub fn new(arch: Option<Arch>) -> Result<Run> {
        let arch = Arch::of_guest(arch)?;
        let cargo = crate::cargo::here()?;
        check_target(target_dir().as_deref())?;
        let (source, cache) = (Source::from_env()?, Cache::open(&cargo.workspace)?);
        Ok(Run {
            table: Table::load(arch, &source, &cache)?,
            source,
            cache,
            cargo,
            arch,
            accel: kvm::forced()?,
            rootfs: OnceLock::new(),
            guests: OnceLock::new(),
            programs: OnceLock::new(),
        })
    }

    /// The directory that holds the workspace's Cargo.toml.
    pub fn workspace(&self) -> &Path {
        &self.cargo.workspace
    }

    /// Installs the packages that are missing, saying so first.
    pub fn need_packages(&self, purpose: For) -> Result<()> {
        packages::need(self.arch, &self.source, &self.cache, purpose)
    }

    /// Installs the packages of the commands that these texts name, where a page has a reader type them.
    pub fn need_typed(&self, texts: &[String]) -> Result<()> {
        packages::need_typed(self.arch, &self.cache, texts)
    }

    /// Says which commands some pages type in a guest's shell that are not here, and what brings them.
    pub fn say_missing_to_type(&self) -> Result<()> {
        if let Some(missing) = packages::missing_to_type(self.arch)? {
            say!("{missing}");
        }
        Ok(())
    }

    /// The root file system of guests, where they have another architecture than this machine.
    pub fn rootfs(&self) -> Result<Option<&Path>> {
        let rootfs = once(&self.rootfs, || match self.arch.is_foreign() {
            true => Rootfs::arm64()?.get(&self.source, &self.cache).map(Some),
            false => Ok(None),
        });
        Ok(rootfs?.as_deref())
    }

    /// Cargo that builds for guests.
    pub fn guests(&self) -> Result<&Cargo> {
        once(&self.guests, || match self.rootfs()? {
            Some(rootfs) => crate::cargo::for_guests(&self.cargo, self.arch, rootfs),
            None => Ok(self.cargo.clone()),
        })
    }

    /// The programs of the workshop, and the learner's attempts.
    pub fn programs(&self) -> Result<&[WorkshopProgram]> {
        let all = once(&self.programs, || {
            let mut all = programs::programs(&self.cargo)?;
            all.extend(programs::attempts(&self.cargo));
            Ok(all)
        });
        Ok(all?)
    }

    /// The guest that these options describe, with its kernel fetched: before anything is built.
    pub fn guest(&self, options: &GuestOptions) -> Result<Guest> {
        qemu::check_disks(&options.disks)?;
        let shares = self.shares()?;
        let named = options.rootfs.as_deref().filter(|dir| !dir.as_os_str().is_empty());
        let named = named.map(rootfs::named).transpose()?;
        let name = options.kernel().map_or_else(|| self.table.default_name(), str::to_owned);
        let kernel = self.table.kernel(&name)?;
        self.guests()?;
        let own = self.rootfs()?.map(Path::to_owned);
        let GuestOptions { disks, cpus, memory, .. } = options.clone();
        let rootfs = named.or(own);
        Ok(Guest { name, kernel, shares, rootfs, cpus, memory, disks, ..Guest::default() })
    }

    /// The directories that the guest may write to: the workspace, and the target directory, so that
    /// the guest sees what is built while it runs.
    fn shares(&self) -> Result<Vec<PathBuf>> {
        let mut shares = vec![self.workspace().to_owned()];
        shares.extend(target_dir().filter(|target| !target.starts_with(self.workspace())));
        check_shares(&shares)?;
        Ok(shares)
    }
}

/// libbpf is built in the target directory, by make, which takes no path with a space.
fn check_target(target: Option<&Path>) -> Result<()> {
    let has_space = |dir: &&Path| dir.to_string_lossy().contains(char::is_whitespace);
    if let Some(target) = target.filter(has_space) {
        let message = format!(
            "the target directory, {}, has a space in its path, with which make cannot build libbpf: \
             set CARGO_TARGET_DIR to a directory without one (export CARGO_TARGET_DIR=/var/tmp/workshop)",
            target.display()
        );
        return Err(fail(USAGE, message));
    }
    Ok(())
}

fn check_shares(shares: &[PathBuf]) -> Result<()> {
    if let Some(hidden) = shares.iter().find(|share| share.starts_with(DATA)) {
        bail!(
            "the guest would not see {}: it mounts its data disk at {DATA}. Move the workspace, or \
             CARGO_TARGET_DIR, elsewhere",
            hidden.display()
        );
    }
    Ok(())
}

/// The options of a guest.
#[derive(Args, Clone, Debug)]
pub struct GuestOptions {
    /// Kernel line (6.1, 6.1-rt, 6.12, 6.18, 7.2, 7.3), `host`, or a directory with an unpacked kernel
    /// [default: 6.1; arm64: 6.12]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE|DIR")]
    pub kernel: Option<String>,
    /// Add an empty disk of 256 MiB; may be given several times
    #[arg(long = "disk", value_name = "KIND")]
    pub disks: Vec<qemu::Disk>,
    /// Virtual CPUs
    #[arg(long, default_value_t = CPUS, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: u32,
    /// Memory of the guest: 512M, 2G
    #[arg(long, default_value = MEMORY, value_parser = memory)]
    pub memory: String,
    /// A directory with the guest's root file system [default: this machine's, read-only]
    #[arg(long, alias = "root", env = "VM_ROOT", value_name = "DIR")]
    pub rootfs: Option<PathBuf>,
}

const CPUS: u32 = 2;
const MEMORY: &str = "2G";

impl GuestOptions {
    /// The usual guest, with this kernel.
    pub fn with_kernel(kernel: Option<String>) -> GuestOptions {
        GuestOptions { kernel, disks: Vec::new(), cpus: CPUS, memory: MEMORY.into(), rootfs: None }
    }

    /// The kernel that the user names: an empty VM_KERNEL names none.
    pub fn kernel(&self) -> Option<&str> {
        named(self.kernel.as_deref())
    }

    /// Whether it is the usual guest but for the kernel.
    pub fn is_usual(&self) -> bool {
        (self.disks.is_empty(), self.cpus, &*self.memory) == (true, CPUS, MEMORY)
    }
}

/// A kernel that is named: an empty text names none.
pub fn named(kernel: Option<&str>) -> Option<&str> {
    kernel.filter(|kernel| !kernel.is_empty())
}

/// A size that QEMU takes for `-m`, large enough to boot the guest.
fn memory(text: &str) -> Result<String, String> {
    let (digits, unit) = match text.strip_suffix('G') {
        Some(digits) => (digits, 1024),
        None => (text.strip_suffix('M').unwrap_or(text), 1),
    };
    match digits.parse::<u32>() {
        Ok(n) if u64::from(n) * unit >= 256 => Ok(text.to_owned()),
        Ok(_) => Err("the guest needs at least 256M".into()),
        Err(_) => Err("give a number with M or G, or a number of megabytes (512M, 2G)".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory() {
        for good in ["2G", "512M", "2048"] {
            assert!(memory(good).is_ok(), "{good}");
        }
        for bad in ["", "G", "0G", "2GG", "2,x=y", "-1", "64M"] {
            assert!(memory(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_the_data_disk_would_hide_is_refused() {
        let error = check_shares(&["/mnt/data/workshop".into()]).unwrap_err().to_string();
        assert!(error.contains("would not see /mnt/data/workshop"), "{error}");
        assert!(check_shares(&["/mnt/database".into()]).is_ok());
        assert!(check_target(Some(Path::new("/a b/target"))).is_err());
        assert!(check_target(Some(Path::new("/a-b/target"))).is_ok());
    }
}
