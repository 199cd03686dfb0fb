//! Starts QEMU: a virtual machine, from values.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::process::Signal;
use workshop::fail::{GUEST_DIED, USAGE, fail};
use workshop::say;

use crate::arch::{Accel, Arch};
use crate::fetch::cache::{Cache, tool};
use crate::fetch::kernel::Kernel;
use crate::machine::initramfs::Initramfs;
use crate::machine::sandbox;
use crate::machine::virtiofs::{self, Share};
use crate::session::cleanup;
use crate::session::crash_report::{crash_report, tail};
use crate::session::processes::end_with_us;
use crate::session::rundir::{self, PORTS, read_shared, shared, socket};

pub const PATIENCE: Duration = Duration::from_secs(120);
/// How many disks the guest can have beside the data disk: each takes a PCI slot, of which there
/// are 32, and the rest of the machine needs 8.
pub const MAX_DISKS: usize = 24;

/// A disk in addition to the data disk, empty, 256 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Disk {
    /// virtio-blk: /dev/vd*
    Virtio,
    /// nvme: /dev/nvme*n1
    Nvme,
    /// virtio-scsi: /dev/sd*
    Scsi,
}

/// A guest, as the command line describes it.
#[derive(Clone, Debug, Default)]
pub struct Guest {
    /// The kernel's name, as the user gave it.
    pub name: String,
    pub kernel: Kernel,
    pub shares: Vec<PathBuf>,
    /// Its root file system, where that is not this machine's.
    pub rootfs: Option<PathBuf>,
    pub cpus: u32,
    /// As QEMU wants it, `2G`.
    pub memory: String,
    pub disks: Vec<Disk>,
    /// Whether its clock counts instructions.
    pub icount: bool,
    /// What others find it by, to join it.
    pub joined_by: Option<String>,
    pub timeout: Option<Duration>,
}

impl Guest {
    /// Where the guest would see these directories of this machine: in its root, and in what is shared besides.
    fn hidden(&self, directories: &[PathBuf]) -> Vec<PathBuf> {
        let rootfs = self.rootfs.as_deref().unwrap_or(Path::new("/"));
        let is_shared = |dir: &&PathBuf| self.shares.iter().any(|share| dir.starts_with(share));
        let in_root = |dir: &PathBuf| Some(Path::new("/").join(dir.strip_prefix(rootfs).ok()?));
        let mut hidden: Vec<_> = directories.iter().filter_map(in_root).collect();
        hidden.extend(directories.iter().filter(is_shared).cloned());
        hidden.sort();
        hidden.dedup();
        hidden
    }
}

/// A guest with the files that it is made of.
#[derive(Debug)]
pub struct Machine<'g> {
    pub guest: &'g Guest,
    pub initramfs: Initramfs,
    pub data: PathBuf,
    pub blank: PathBuf,
    /// The launcher's own program, as the guest can run it.
    pub agent: PathBuf,
    pub arch: Arch,
    /// How its code has to run; else KVM is used where it works.
    pub accel: Option<Accel>,
}

/// The guest's clock advances by 1 ns for each instruction, whatever the host does: measurements
/// repeat exactly. Needs emulation and one CPU.
const ICOUNT: &str = "-icount shift=0,sleep=off";

pub fn check_disks(disks: &[Disk]) -> Result<()> {
    if disks.len() <= MAX_DISKS {
        return Ok(());
    }
    let given = disks.len();
    Err(fail(USAGE, format!("too many disks: {given} times --disk, the guest takes {MAX_DISKS}")))
}

pub fn await_up(dir: &Path, patience: Duration) -> Result<()> {
    let start = Instant::now();
    while read_shared(dir, "up").is_none() {
        if cleanup::qemu_ended().is_some() {
            return Err(fail(GUEST_DIED, crash_report(dir)));
        }
        if start.elapsed() > patience {
            return Err(fail(
                GUEST_DIED,
                format!("the guest has not started within {} s{}", patience.as_secs(), tail(dir)),
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

impl Machine<'_> {
    /// Announces the boot, with the time that it will take.
    pub fn say_boot(&self, accel: Accel, cache: &Cache) {
        let measured = fs::read_to_string(self.boot_time(accel, cache)).ok();
        let measured = measured.and_then(|text| text.trim().parse().ok());
        let (usual, with) = match accel {
            Accel::Kvm => (4, "with KVM"),
            Accel::Tcg => (20, "without KVM"),
        };
        let seconds: u64 = measured.unwrap_or(usual).max(1);
        say!("booting {}, about {seconds} s {with}", self.guest.name);
    }

    /// Remembers how long the boot took, for the next one's announcement.
    pub fn remember_boot(&self, accel: Accel, took: Duration, cache: &Cache) {
        let file = self.boot_time(accel, cache);
        if let Some(dir) = file.parent() {
            // Without the file, the next announcement is less precise.
            let _ = fs::create_dir_all(dir);
            let _ = fs::write(&file, took.as_secs_f64().ceil().to_string());
        }
    }

    /// The file with the seconds that the last boot took.
    fn boot_time(&self, accel: Accel, cache: &Cache) -> PathBuf {
        let icount = if self.guest.icount { "-icount" } else { "" };
        cache.path(format!("boot-times/{}-{accel}{icount}", self.guest.kernel.release))
    }

    /// Writes down what the guest's init needs to know.
    pub fn write_conf(&self, cache: &Cache, dir: &Path) -> Result<()> {
        let shared = shared(dir);
        // A copy: cargo may replace the file while the guest runs.
        let agent = shared.join("agent");
        fs::copy(&self.agent, &agent)
            .with_context(|| format!("cannot write {}", agent.display()))?;
        let mut conf = OsString::new();
        let mut line = |key: &str, value: &OsStr| -> Result<()> {
            if value.as_bytes().contains(&b'\n') {
                bail!("the path {value:?} contains a line break, which the guest cannot handle");
            }
            conf.extend([key.as_ref(), " ".as_ref(), value, "\n".as_ref()]);
            Ok(())
        };
        // Where the guest sees this machine's files, they are there.
        if self.guest.rootfs.is_none() {
            line("modules", self.guest.kernel.modules.as_os_str())?;
            line("agent", agent.as_os_str())?;
        }
        for (n, share) in self.guest.shares.iter().enumerate() {
            let mut value = OsString::from(format!("share{n} "));
            value.push(share);
            line("share", &value)?;
        }
        for place in self.guest.hidden(&rundir::parents(&cache.path("run-dirs"))?) {
            line("hide", place.as_os_str())?;
        }
        let count = |kind: Disk| self.guest.disks.iter().filter(|d| **d == kind).count();
        // The data disk is vda.
        let virtio = (0..=count(Disk::Virtio)).map(|n| format!("vd{}", letter(n)));
        let nvme = (0..count(Disk::Nvme)).map(|n| format!("nvme{n}n1"));
        let scsi = (0..count(Disk::Scsi)).map(|n| format!("sd{}", letter(n)));
        for disk in virtio.chain(nvme).chain(scsi) {
            line("disk", disk.as_ref())?;
        }
        let drivers = [(Disk::Nvme, "nvme"), (Disk::Scsi, "virtio_scsi"), (Disk::Scsi, "sd_mod")];
        for (_, driver) in drivers.into_iter().filter(|(kind, _)| count(*kind) > 0) {
            line("modprobe", driver.as_ref())?;
        }
        fs::write(shared.join("conf"), conf.as_bytes()).context("cannot write to the run directory")
    }

    /// Starts QEMU. The terminal's signals do not reach it, and it dies with this thread, which is the main one.
    pub fn start(&self, accel: Accel, cache: &Cache, dir: &Path) -> Result<()> {
        let log =
            File::create(dir.join("qemu.log")).context("cannot write to the run directory")?;
        let mut command = Command::new(tool(self.arch.qemu())?);
        command
            .args(self.arguments(accel, dir))
            .env("TMPDIR", cache.path("tmp"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if sandbox::is_used(self.arch, cache)? {
            command.args(["-sandbox", sandbox::OPTIONS]);
        }
        if !self.initramfs.has_9p {
            command.args(virtiofs::serve(&self.guest.memory, dir, &self.all_shares(dir))?);
        }
        end_with_us(command.process_group(0), Signal::KILL);
        cleanup::own_qemu(command.spawn().context("cannot start QEMU")?);
        Ok(())
    }

    /// What the guest sees of this machine's files.
    fn all_shares(&self, dir: &Path) -> Vec<Share> {
        let share = |tag: &str, path: &Path, read_only| Share {
            tag: tag.to_owned(),
            path: path.to_owned(),
            read_only,
        };
        let rootfs = self.guest.rootfs.as_deref().unwrap_or(Path::new("/"));
        let mut shares = vec![share("hostroot", rootfs, true), share("ctl", &shared(dir), false)];
        let own = self.guest.shares.iter().enumerate();
        shares.extend(own.map(|(n, path)| share(&format!("share{n}"), path, false)));
        // In this machine's root, they lie with the rest.
        if self.guest.rootfs.is_some() {
            shares.push(share("modules", &self.guest.kernel.modules, true));
        }
        shares
    }

    fn arguments(&self, accel: Accel, dir: &Path) -> Vec<OsString> {
        let ([machine, accel, cpu], append) = self.arch.machine(accel, self.guest.icount);
        let Guest { kernel, cpus, memory, disks, icount, .. } = self.guest;
        let words = format!(
            "-name bpf-vm -machine {machine} -accel {accel} -cpu {cpu} -smp {cpus} -m {memory} \
             -nodefaults -no-user-config -no-reboot -display none -nic none -serial chardev:console \
             -device virtio-serial-pci,max_ports=31"
        );
        let more = [
            (self.arch.has_vga(), "-vga none"),
            (*icount, ICOUNT),
            // The controller stands before its disks.
            (disks.contains(&Disk::Scsi), "-device virtio-scsi-pci,id=scsi"),
        ];
        let more = more.iter().filter(|(is_wanted, _)| *is_wanted).map(|(_, words)| *words);
        let words = std::iter::once(&*words).chain(more).flat_map(|words| words.split(' '));
        let mut args: Vec<OsString> = words.map(OsString::from).collect();
        let mut add = |option: &str, value: OsString| args.extend([option.into(), value]);
        add("-kernel", kernel.image.clone().into());
        add("-initrd", self.initramfs.file.clone().into());
        add("-append", format!("{append} quiet loglevel=4 panic=-1").into());
        add("-chardev", with_path("file,id=console,path=", &dir.join("console"), ""));

        let shares = if self.initramfs.has_9p { self.all_shares(dir) } else { Vec::new() };
        for Share { tag, path, read_only } in shares {
            let read_only = if read_only { ",readonly=on" } else { "" };
            // The run directory is one of this program's own, with no other file system in it.
            let remap = if tag == "ctl" { "" } else { ",multidevs=remap" };
            let options = format!(",mount_tag={tag},security_model=none{read_only}{remap}");
            add("-virtfs", with_path("local,path=", &path, &options));
        }

        for port in 0..PORTS {
            let path = socket(dir, port);
            let head = format!("socket,id=port{port},server=on,wait=off,path=");
            add("-chardev", with_path(&head, &path, ""));
            add("-device", format!("virtserialport,chardev=port{port},name=bpfvm.{port}").into());
        }

        // If the disk that holds the cache is full, the guest gets an I/O error. By default, QEMU
        // would stop the guest.
        let mut disk = |id: &str, image: &Path, device: &str| {
            let head =
                format!("if=none,id={id},format=raw,snapshot=on,werror=report,rerror=report,file=");
            add("-drive", with_path(&head, image, ""));
            add("-device", format!("{device},drive={id},serial=bpfvm-{id}").into());
        };
        disk("data", &self.data, "virtio-blk-pci");
        for (n, kind) in disks.iter().enumerate() {
            let device = match kind {
                Disk::Virtio => "virtio-blk-pci",
                Disk::Nvme => "nvme",
                Disk::Scsi => "scsi-hd,bus=scsi.0",
            };
            disk(&format!("disk{n}"), &self.blank, device);
        }
        args
    }
}

fn letter(n: usize) -> char {
    char::from(b'a' + (n % 26) as u8)
}

/// An option of QEMU with a path in it, where each comma has to be doubled.
fn with_path(head: &str, path: &Path, rest: &str) -> OsString {
    let path = path.as_os_str().as_bytes().split(|&byte| byte == b',').collect::<Vec<_>>();
    OsString::from_vec([head.as_bytes(), &path.join(&b",,"[..]), rest.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of an arm64 machine with KVM, which the authors do not have; and on another machine, where the
    /// guest's root and the kernel's modules are in the cache.
    #[test]
    fn a_guest_of_an_arm64_machine() {
        let common = "-smp 2 -m 2G -nodefaults|-kernel /k/vmlinuz|\
             path=/run/guest,mount_tag=ctl,security_model=none -virtfs|-device virtio-scsi-pci,id=scsi -kernel|\
             path=/w,mount_tag=share0,security_model=none,multidevs=remap|-device virtio-blk-pci,drive=data|\
             -device scsi-hd,bus=scsi.0,drive=disk0|snapshot=on,werror=report,rerror=report,file=/b,,b";
        let modules = "path=/k/lib/modules/6.12,mount_tag=modules,security_model=none,readonly=on";
        for (accel, rootfs, wanted) in [
            (
                Accel::Kvm,
                None,
                "-machine virt,gic-version=host -accel kvm -cpu host|-append console=ttyAMA0 quiet|\
                 path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap",
            ),
            (
                Accel::Tcg,
                Some("/r"),
                "-machine virt,gic-version=3 -accel tcg,thread=single -cpu max,pauth=off|\
                 -append console=ttyAMA0 norandmaps quiet|\
                 path=/r,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap",
            ),
        ] {
            let kernel = Kernel {
                image: "/k/vmlinuz".into(),
                modules: "/k/lib/modules/6.12".into(),
                ..Kernel::default()
            };
            let guest = Guest {
                kernel,
                shares: vec!["/w".into()],
                rootfs: rootfs.map(PathBuf::from),
                cpus: 2,
                memory: "2G".into(),
                disks: vec![Disk::Scsi],
                ..Guest::default()
            };
            let machine = Machine {
                guest: &guest,
                initramfs: Initramfs { file: "/i".into(), has_9p: true },
                data: "/d".into(),
                blank: "/b,b".into(),
                agent: "/vm".into(),
                arch: Arch::Arm64,
                accel: None,
            };
            let line = machine.arguments(accel, Path::new("/run"));
            let line = line.join(" ".as_ref()).into_string().unwrap();
            for wanted in common.split('|').chain(wanted.split('|')) {
                assert!(line.contains(wanted), "{wanted}: {line}");
            }
            assert_eq!(line.contains(modules), rootfs.is_some(), "{line}");
            assert!(!line.contains("-vga"), "{line}");
        }
    }

    #[test]
    fn what_is_hidden_lies_where_the_guest_sees_it() {
        let places = ["/r/tmp/b", "/tmp/a", "/w/c"].map(PathBuf::from);
        for (rootfs, wanted) in [
            (None, places.to_vec()),
            (Some("/r"), vec!["/tmp/b".into(), "/w/c".into()]),
            (Some("/"), places.to_vec()),
        ] {
            let rootfs = rootfs.map(PathBuf::from);
            let guest = Guest { shares: vec!["/w".into()], rootfs, ..Guest::default() };
            assert_eq!(guest.hidden(&places), wanted);
        }
    }
}
