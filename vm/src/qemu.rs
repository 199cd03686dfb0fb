//! Starting QEMU, with KVM where a guest really boots under it, and telling why a guest
//! died.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::cache::{self, Cache, tool};
use crate::cleanup;
use crate::error::{GUEST_DIED, fail};
use crate::initramfs;
use crate::kernels::Kernel;
use crate::rundir::{PORTS, socket};
use crate::say;
use crate::virtiofs;

/// How long init may take to report under KVM before KVM is given up.
const KVM_PATIENCE: Duration = Duration::from_secs(8);
/// How long it may take where there is nothing to fall back to.
const PATIENCE: Duration = Duration::from_secs(120);

/// How QEMU runs the guest's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// The processor does.
    Kvm,
    /// QEMU translates it.
    Tcg,
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "KVM",
            Accel::Tcg => "TCG",
        })
    }
}

/// A disk beside the data disk, empty, 256 MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Disk {
    /// virtio-blk: /dev/vd*
    Virtio,
    /// nvme: /dev/nvme*n1
    Nvme,
    /// virtio-scsi: /dev/sd*
    Scsi,
}

/// What a guest is made of.
#[derive(Debug)]
pub struct Machine {
    /// The kernel to boot.
    pub kernel: Kernel,
    /// Its initramfs.
    pub initramfs: PathBuf,
    /// Image of the data disk.
    pub data: PathBuf,
    /// Image of an empty disk.
    pub blank: PathBuf,
    /// Virtual CPUs.
    pub cpus: u32,
    /// As QEMU wants it, `2G`.
    pub memory: String,
    /// Disks beside the data disk.
    pub disks: Vec<Disk>,
    /// Directories that the guest may write to.
    pub shares: Vec<PathBuf>,
    /// Let the guest's clock count instructions: see [`ICOUNT`].
    pub icount: bool,
}

/// The guest's clock advances by 1 ns for each instruction, whatever the host does: what is measured
/// with it repeats exactly. Needs emulation and one CPU.
const ICOUNT: &str = "shift=0,sleep=off";

/// What was learnt about KVM on this boot of the host, with this QEMU.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvmNote {
    boot_id: String,
    qemu: String,
    /// Whether a guest booted.
    pub works: bool,
}

/// The accelerator that VM_ACCEL forces.
pub fn forced_accel() -> Result<Option<Accel>> {
    match std::env::var("VM_ACCEL").as_deref() {
        Err(_) | Ok("" | "auto") => Ok(None),
        Ok("kvm") => Ok(Some(Accel::Kvm)),
        Ok("tcg") => Ok(Some(Accel::Tcg)),
        Ok(other) => Err(fail(2, format!("VM_ACCEL={other}: it takes kvm, tcg or auto"))),
    }
}

/// Whether this user may use KVM.
pub fn kvm_is_accessible() -> bool {
    File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// What is known of KVM here; the second is the note to write.
pub fn kvm_note(cache: &Cache) -> Result<(Option<KvmNote>, KvmNote)> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let output = Command::new(tool("qemu-system-x86_64")?).arg("--version").output()?;
    let version = String::from_utf8_lossy(&output.stdout);
    let now = KvmNote {
        boot_id: boot_id.trim().to_owned(),
        qemu: version.lines().next().unwrap_or_default().to_owned(),
        works: false,
    };
    let old = fs::read(cache.path("kvm.json")).ok();
    let old: Option<KvmNote> = old.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let old = old.filter(|old| old.boot_id == now.boot_id && old.qemu == now.qemu);
    Ok((old, now))
}

fn remember(cache: &Cache, note: &KvmNote) -> Result<()> {
    let _lock = cache.lock()?;
    let temp = cache.temp_dir()?;
    let made = temp.path().join("kvm.json");
    fs::write(&made, serde_json::to_vec(note)?)?;
    cache::put(&made, &cache.path("kvm.json"))
}

/// Boots the machine until init reports, and says how it runs.
pub fn boot(machine: &Machine, cache: &Cache, dir: &Path) -> Result<Accel> {
    machine.write_conf(dir)?;
    let accel = match forced_accel()? {
        _ if machine.icount => Accel::Tcg,
        Some(accel) => accel,
        None if kvm_is_accessible() => match kvm_note(cache)? {
            (Some(KvmNote { works: true, .. }), _) => Accel::Kvm,
            (Some(_), _) => Accel::Tcg,
            (None, note) => return try_kvm(machine, cache, dir, note),
        },
        None => Accel::Tcg,
    };
    machine.start(accel, cache, dir)?;
    await_up(dir, PATIENCE)?;
    Ok(accel)
}

/// Boots with KVM, of which nothing is known yet, or else without, and notes what this says
/// of KVM. A machine that comes up only without says that KVM is broken here, unless another
/// virtual machine has it; one that never comes up says nothing: it may be the guest.
fn try_kvm(machine: &Machine, cache: &Cache, dir: &Path, mut note: KvmNote) -> Result<Accel> {
    machine.start(Accel::Kvm, cache, dir)?;
    let up = await_up(dir, KVM_PATIENCE);
    let accel = if up.is_ok() {
        note.works = true;
        Accel::Kvm
    } else {
        let hung = cleanup::qemu_ended().is_none();
        let why = if hung { "no guest boots under it".into() } else { cause(dir) };
        say!("KVM is there but {why}; going on without (slower; VM_ACCEL=kvm or tcg decides)");
        cleanup::kill_qemu();
        for port in 0..PORTS {
            let _ = fs::remove_file(socket(dir, port));
        }
        for left in ["up", "failed"] {
            let _ = fs::remove_file(dir.join(left));
        }
        machine.start(Accel::Tcg, cache, dir)?;
        await_up(dir, PATIENCE)?;
        if why.contains("busy") {
            return Ok(Accel::Tcg);
        }
        say!("without KVM it boots; remembering that until this machine restarts");
        Accel::Tcg
    };
    if let Err(error) = remember(cache, &note) {
        say!("what was learnt about KVM could not be noted: {error:#}");
    }
    Ok(accel)
}

/// Waits for init's sign of life.
fn await_up(dir: &Path, patience: Duration) -> Result<()> {
    let start = Instant::now();
    let up = dir.join("up");
    while !up.exists() {
        if cleanup::qemu_ended().is_some() {
            return Err(fail(GUEST_DIED, death(dir)));
        }
        if start.elapsed() > patience {
            return Err(fail(
                GUEST_DIED,
                format!("the guest has not reported after {} s{}", patience.as_secs(), tail(dir)),
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

impl Machine {
    /// Tells the guest's init what it needs to know.
    fn write_conf(&self, dir: &Path) -> Result<()> {
        // A copy: cargo may replace the file while the guest runs.
        let agent = dir.join("agent");
        fs::copy(cleanup::OWN_FILE, &agent).context("cannot copy this program for the guest")?;
        let mut conf: Vec<u8> = Vec::new();
        let mut line = |key: &str, value: &OsStr| -> Result<()> {
            if value.as_bytes().contains(&b'\n') {
                bail!("{value:?}: a path with a line break does not work");
            }
            conf.extend_from_slice(key.as_bytes());
            conf.push(b' ');
            conf.extend_from_slice(value.as_bytes());
            conf.push(b'\n');
            Ok(())
        };
        line("modules", self.kernel.modules.as_os_str())?;
        line("agent", agent.as_os_str())?;
        for (n, share) in self.shares.iter().enumerate() {
            let mut value = OsString::from(format!("share{n} "));
            value.push(share);
            line("share", &value)?;
        }
        let count = |kind: Disk| self.disks.iter().filter(|d| **d == kind).count();
        // The data disk is vda.
        for n in 0..=count(Disk::Virtio) {
            line("disk", format!("vd{}", letter(n)).as_ref())?;
        }
        for n in 0..count(Disk::Nvme) {
            line("disk", format!("nvme{n}n1").as_ref())?;
        }
        for n in 0..count(Disk::Scsi) {
            line("disk", format!("sd{}", letter(n)).as_ref())?;
        }
        if count(Disk::Nvme) > 0 {
            line("modprobe", "nvme".as_ref())?;
        }
        if count(Disk::Scsi) > 0 {
            line("modprobe", "virtio_scsi".as_ref())?;
            line("modprobe", "sd_mod".as_ref())?;
        }
        fs::write(dir.join("conf"), conf).context("cannot write to the control directory")
    }

    /// Starts QEMU. It is no child of the terminal, and dies with this thread, the main one.
    fn start(&self, accel: Accel, cache: &Cache, dir: &Path) -> Result<()> {
        let log =
            File::create(dir.join("qemu.log")).context("cannot write to the control directory")?;
        let mut command = Command::new(tool("qemu-system-x86_64")?);
        command
            .args(self.arguments(accel, dir))
            .env("TMPDIR", cache.path("tmp"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if !initramfs::has_9p(&self.kernel)? {
            let mut shares = vec![("hostroot".to_owned(), Path::new("/")), ("ctl".to_owned(), dir)];
            let own = self.shares.iter().enumerate();
            shares.extend(own.map(|(n, path)| (format!("share{n}"), path.as_path())));
            command.args(virtiofs::serve(&self.memory, dir, &shares)?);
        }
        let parent = rustix::process::getpid();
        // SAFETY: three system calls, all async-signal-safe, no memory of the parent touched.
        unsafe {
            command.pre_exec(move || {
                rustix::process::setsid()?;
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
                if rustix::process::getppid() != Some(parent) {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
                Ok(())
            });
        }
        cleanup::owns_qemu(command.spawn().context("cannot start QEMU")?);
        Ok(())
    }

    fn arguments(&self, accel: Accel, dir: &Path) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |option: &str, value: OsString| args.extend([option.into(), value]);
        // Emulated CPUs have time stamp counters that differ: a clock made of them would show
        // latencies that never were. The kernel takes the HPET instead, at once and for good.
        // And they take turns on one thread: before 8.1, QEMU could run code on one CPU that another
        // had just changed, for ever (fixed by its commit deba78709a), and attaching a program to
        // a function of the kernel changes code. It costs nothing: the tests take as long.
        let (accel, cpu, clock) = match accel {
            Accel::Kvm => ("kvm", "host", ""),
            Accel::Tcg => ("tcg,thread=single", "max", " tsc=unstable"),
        };
        if self.icount {
            add("-icount", ICOUNT.into());
        }
        add("-name", "bpf-vm".into());
        add("-accel", accel.into());
        add("-cpu", cpu.into());
        add("-smp", self.cpus.to_string().into());
        add("-m", self.memory.clone().into());
        add("-display", "none".into());
        add("-vga", "none".into());
        add("-nic", "none".into());
        add("-kernel", self.kernel.image.clone().into());
        add("-initrd", self.initramfs.clone().into());
        add("-append", format!("console=ttyS0 quiet loglevel=4 panic=-1{clock}").into());
        add("-chardev", with_path("file,id=console,path=", &dir.join("console"), ""));
        add("-serial", "chardev:console".into());

        let has_9p = initramfs::has_9p(&self.kernel).unwrap_or(true);
        let mut share = |tag: &str, path: &Path, more: &str| {
            if !has_9p {
                return;
            }
            let options = format!(",mount_tag={tag},security_model=none{more}");
            add("-virtfs", with_path("local,path=", path, &options));
        };
        share("hostroot", Path::new("/"), ",readonly=on,multidevs=remap");
        share("ctl", dir, "");
        for (n, path) in self.shares.iter().enumerate() {
            share(&format!("share{n}"), path, ",multidevs=remap");
        }

        add("-device", "virtio-serial-pci,max_ports=31".into());
        for port in 0..PORTS {
            let path = socket(dir, port);
            let head = format!("socket,id=port{port},server=on,wait=off,path=");
            add("-chardev", with_path(&head, &path, ""));
            add("-device", format!("virtserialport,chardev=port{port},name=bpfvm.{port}").into());
        }

        // Where the cache is full, the guest gets an error: QEMU would make it wait for ever.
        let mut disk = |id: &str, image: &Path, device: &str| {
            let head =
                format!("if=none,id={id},format=raw,snapshot=on,werror=report,rerror=report,file=");
            add("-drive", with_path(&head, image, ""));
            add("-device", format!("{device},drive={id},serial=bpfvm-{id}").into());
        };
        disk("data", &self.data, "virtio-blk-pci");
        for (n, kind) in self.disks.iter().enumerate() {
            let id = format!("disk{n}");
            match kind {
                Disk::Virtio => disk(&id, &self.blank, "virtio-blk-pci"),
                Disk::Nvme => disk(&id, &self.blank, "nvme"),
                Disk::Scsi => disk(&id, &self.blank, "scsi-hd,bus=scsi.0"),
            }
        }
        if self.disks.contains(&Disk::Scsi) {
            // Before the disks that sit on it.
            args.splice(0..0, ["-device".into(), "virtio-scsi-pci,id=scsi".into()]);
        }
        args.extend(["-nodefaults".into(), "-no-user-config".into(), "-no-reboot".into()]);
        args
    }
}

fn letter(n: usize) -> char {
    char::from(b'a' + (n % 26) as u8)
}

/// An option of QEMU's with a path in it, where a comma is written twice.
fn with_path(head: &str, path: &Path, rest: &str) -> OsString {
    let mut option = head.as_bytes().to_vec();
    for &byte in path.as_os_str().as_bytes() {
        option.push(byte);
        if byte == b',' {
            option.push(byte);
        }
    }
    option.extend_from_slice(rest.as_bytes());
    OsString::from_vec(option)
}

/// Why the guest is gone, with the last lines of its console.
pub fn death(dir: &Path) -> String {
    cause(dir) + &tail(dir)
}

fn cause(dir: &Path) -> String {
    let start = Instant::now();
    let mut status = cleanup::qemu_ended();
    while status.is_none() && start.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(20));
        status = cleanup::qemu_ended();
    }
    let console = fs::read(dir.join("console")).unwrap_or_default();
    let console = String::from_utf8_lossy(&console);
    let panic = console.lines().find_map(|line| line.split_once("Kernel panic - not syncing: "));
    if let Ok(what) = fs::read_to_string(dir.join("failed")) {
        format!("the guest could not be set up: {}", what.trim())
    } else if let Some((_, what)) = panic {
        format!("the guest's kernel panicked: {}", what.trim())
    } else {
        match status {
            Some(status) if status.signal().is_some() => {
                format!("QEMU was killed by signal {}{}", status.signal().unwrap_or(0), log(dir))
            }
            Some(status) if !status.success() => {
                format!("QEMU could not run the guest{}", log(dir))
            }
            Some(_) => "the guest went down before the program had ended".to_owned(),
            None => "the connection to the guest broke".to_owned(),
        }
    }
}

/// What QEMU said, to be put behind a message.
fn log(dir: &Path) -> String {
    let log = fs::read(dir.join("qemu.log")).unwrap_or_default();
    let lines = last_lines(&log, 3);
    if lines.is_empty() { String::new() } else { format!(" ({})", lines.join("; ")) }
}

/// The console's last lines, to be put behind a message.
pub fn tail(dir: &Path) -> String {
    let console = fs::read(dir.join("console")).unwrap_or_default();
    let lines = last_lines(&console, 20);
    if lines.is_empty() {
        return "; its console is empty".to_owned();
    }
    format!("; its console's last lines:\n  {}", lines.join("\n  "))
}

/// The last `n` lines that are not empty, without control characters.
fn last_lines(text: &[u8], n: usize) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().map(|line| line.replace(|c: char| c.is_control() && c != '\t', ""));
    let lines: Vec<String> = lines.filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(n)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_path_is_doubled() {
        assert_eq!(with_path("path=", Path::new("/a,b"), ",x"), "path=/a,,b,x");
    }

    #[test]
    fn the_consoles_last_lines_are_clean() {
        let text = b"one\r\n\r\n\x1b[0mtwo\r\nthree";
        assert_eq!(last_lines(text, 2), ["[0mtwo", "three"]);
        assert_eq!(last_lines(b"", 2), Vec::<String>::new());
    }

    #[test]
    fn a_dead_guest_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("console"), "a\nKernel panic - not syncing: x\n").unwrap();
        let text = death(dir.path());
        assert!(
            text.starts_with("the guest's kernel panicked: x; its console's last lines:\n  a\n"),
            "{text}"
        );
        fs::write(dir.path().join("failed"), "mount: no\n").unwrap();
        assert!(death(dir.path()).starts_with("the guest could not be set up: mount: no;"));
    }
}
