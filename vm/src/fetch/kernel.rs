//! A kernel: unpacked in a directory, in the cache, or this machine's own.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use workshop::fail::{MACHINE, USAGE, fail};
use workshop::say;

use crate::arch::Arch;
use crate::fetch::apt;
use crate::fetch::cache::{self, Cache, unpack_all};

/// Free megabytes that fetching and unpacking one kernel may take.
pub const KERNEL_MB: u64 = 900;
/// What `--kernel` calls this machine's own kernel.
pub const HOST: &str = "host";
/// What a directory must hold to be one that `--kernel` takes.
pub const LAYOUT: &str = "such a directory holds an unpacked kernel: boot/vmlinuz-RELEASE or \
                          lib/modules/RELEASE/vmlinuz, and the modules in lib/modules/RELEASE (or \
                          below usr/lib). `dpkg-deb -x linux-image-….deb DIR` makes one";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kernel {
    /// What `uname -r` says in the guest.
    pub release: String,
    pub image: PathBuf,
    pub modules: PathBuf,
}

impl Kernel {
    /// The newest kernel in a directory where packages were unpacked.
    pub fn at(dir: &Path) -> Result<Kernel> {
        let usage = |what: String| fail(USAGE, format!("{what}; {LAYOUT}"));
        let dir = dir.canonicalize().map_err(|error| {
            usage(format!("cannot use the kernel in {}: {error}", dir.display()))
        })?;
        let newest = kernels(&dir).max_by(|a, b| by_version(&a.release, &b.release));
        newest.ok_or_else(|| {
            usage(match releases(&dir).first() {
                None => format!("{} has no modules in lib/modules/RELEASE", dir.display()),
                Some((release, _)) => format!("{} has no boot/vmlinuz-{release}", dir.display()),
            })
        })
    }

    /// The same, of a directory that a user names.
    pub fn of_user(dir: &Path, arch: Arch) -> Result<Kernel> {
        let kernel = Kernel::at(dir)?;
        let mut head = Vec::new();
        let image = kernel.image.display();
        File::open(&kernel.image).and_then(|file| file.take(1024).read_to_end(&mut head)).map_err(
            |error| fail(USAGE, format!("cannot read the kernel's image {image}: {error}")),
        )?;
        if !arch.is_image(&head) {
            let arch = arch.name();
            let message =
                format!("{image} is no kernel that QEMU boots for {arch} (a bzImage, or Image)");
            return Err(fail(USAGE, message));
        }
        if !kernel.modules.join("modules.dep").is_file() {
            kernel.depmod()?;
        }
        Ok(kernel)
    }

    /// This machine's own kernel: the one that runs, if its image is installed and this user may
    /// read it; else the newest such; else the distribution's, from its apt archive.
    pub fn host(arch: Arch, cache: &Cache) -> Result<Kernel> {
        if arch.is_foreign() {
            let arch = arch.name();
            return Err(fail(USAGE, format!("this machine's own kernel is not one for {arch}")));
        }
        let kernel = match Kernel::installed(Path::new("/")) {
            Some(kernel) => kernel,
            None => Kernel::of_distribution(cache)?,
        };
        say!(
            "kernel {}, this machine's own ({}): not one of the kernels that the tests cover",
            kernel.release,
            kernel.image.display()
        );
        Ok(kernel)
    }

    fn installed(root: &Path) -> Option<Kernel> {
        let running = rustix::system::uname().release().to_string_lossy().into_owned();
        let kernels = kernels(root).filter(|kernel| {
            File::open(&kernel.image).is_ok() && kernel.modules.join("modules.dep").is_file()
        });
        kernels.max_by(|a, b| {
            let runs = |kernel: &Kernel| kernel.release == running;
            runs(a).cmp(&runs(b)).then_with(|| by_version(&a.release, &b.release))
        })
    }

    /// The distribution's kernel in the cache, fetched where it is not there or damaged.
    fn of_distribution(cache: &Cache) -> Result<Kernel> {
        let place = cache.path("kernels/host");
        let what = "this distribution's kernel";
        let here = || Kernel::in_cache(cache, &place, None).ok().flatten();
        cache.once((what, KERNEL_MB), here, |temp| {
            cache.say_damage(what, &place, None);
            if cache::find_tool("apt-get").is_none() {
                let message = "this machine has no kernel that this user can read (/lib/modules/*/vmlinuz, \
                               /boot/vmlinuz-*), and no apt to fetch one with: install this \
                               distribution's kernel package, or set VM_MIRROR to the root of a Debian \
                               archive";
                return Err(fail(MACHINE, message));
            }
            apt::need_lists()?;
            apt::fetch_own_kernel(temp)?;
            Kernel::unpack(what, temp, (cache, &place, None))
        })
    }

    /// A kernel of the cache: none where nothing is there, an error where it is not what was unpacked; or not
    /// what is pinned, of which `pin` is the checksum.
    pub fn in_cache(cache: &Cache, place: &Path, pin: Option<&str>) -> Result<Option<Kernel>> {
        cache.check(place, pin)?.then(|| Kernel::at(place)).transpose()
    }

    /// Unpacks the packages in a temporary directory, and puts what comes out into its place in the cache.
    pub fn unpack(
        what: &str,
        temp: &Path,
        (cache, place, pin): (&Cache, &Path, Option<&str>),
    ) -> Result<Kernel> {
        let root = temp.join("root");
        say!("unpacking {what}");
        unpack_all(temp, &root, &[])?;
        Kernel::at(&root)?.depmod()?;
        cache.keep(&root, place, pin)?;
        Kernel::at(place)
    }

    /// The directory that depmod and modprobe know its modules by.
    pub fn base(&self) -> &Path {
        self.modules.ancestors().nth(3).unwrap_or(Path::new("/"))
    }

    /// Writes the modules' dependencies, which no package carries.
    pub fn depmod(&self) -> Result<()> {
        cache::run("depmod", ["-b".as_ref(), self.base().as_os_str(), self.release.as_ref()])
            .and_then(|_| {
                // Where it cannot write, depmod says so and succeeds.
                let written = self.modules.join("modules.dep").is_file();
                ensure!(written, "depmod wrote no modules.dep; is the directory read-only?");
                Ok(())
            })
            .with_context(|| format!("cannot index {}", self.modules.display()))?;
        Ok(())
    }
}

/// The releases whose modules lie below `root`, with the directories of these.
fn releases(root: &Path) -> Vec<(String, PathBuf)> {
    let subs = ["lib/modules", "usr/lib/modules"];
    let entries =
        subs.iter().flat_map(|sub| fs::read_dir(root.join(sub)).into_iter().flatten().flatten());
    entries
        .filter(|entry| entry.path().join("kernel").is_dir())
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .collect()
}

/// Those of which the image is there, too: in Debian's and Ubuntu's place, or in Fedora's and Arch's.
fn kernels(root: &Path) -> impl Iterator<Item = Kernel> {
    releases(root).into_iter().filter_map(move |(release, modules)| {
        let places = [root.join(format!("boot/vmlinuz-{release}")), modules.join("vmlinuz")];
        let image = places.into_iter().find(|image| image.is_file())?;
        Some(Kernel { release, image, modules })
    })
}

/// Compares releases by the numbers in them: 6.12 is newer than 6.9.
pub fn by_version(a: &str, b: &str) -> std::cmp::Ordering {
    let numbers = |release: &str| -> Vec<u64> {
        release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
    };
    numbers(a).cmp(&numbers(b)).then_with(|| a.cmp(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_kernel_is_taken_in_any_layout() {
        let dir = tempfile::tempdir().unwrap();
        let error = |text: &str| Kernel::at(dir.path()).unwrap_err().to_string().contains(text);
        assert!(error("has no modules") && Kernel::installed(dir.path()).is_none());
        // Debian's layouts, Fedora's and Arch's; and modules without an image.
        for (modules, release, image) in [
            ("lib/modules", "6.1", "boot/vmlinuz-6.1"),
            ("usr/lib/modules", "6.9.4-200.fc40.x86_64", "boot/vmlinuz-6.9.4-200.fc40.x86_64"),
            ("usr/lib/modules", "6.12.1-arch1-1", "usr/lib/modules/6.12.1-arch1-1/vmlinuz"),
            ("usr/lib/modules", "7.0.0", ""),
        ] {
            let modules = Path::new(modules).join(release);
            fs::create_dir_all(dir.path().join(&modules).join("kernel")).unwrap();
            fs::create_dir_all(dir.path().join("boot")).unwrap();
            fs::write(dir.path().join(&modules).join("modules.dep"), "").unwrap();
            if release == "6.1" {
                assert!(error("has no boot/vmlinuz-6.1"));
            }
            if !image.is_empty() {
                fs::write(dir.path().join(image), "").unwrap();
                let kernel = Kernel::at(dir.path()).unwrap();
                assert_eq!(kernel.release, release);
                assert!(kernel.image.ends_with(image) && kernel.modules.ends_with(modules));
            }
        }
        assert_eq!(Kernel::installed(dir.path()).unwrap().release, "6.12.1-arch1-1");
        assert_eq!(Kernel::at(dir.path()).unwrap().release, "6.12.1-arch1-1");
    }
}
