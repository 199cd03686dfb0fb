//! Starts QEMU, with KVM where a guest really boots under it, and explains why a guest died.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use host::fail::{GUEST_DIED, MACHINE, USAGE, fail};
use host::say;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::arch::{self, Arch};
use crate::cleanup;
use crate::guest::rundir::{PORTS, read_shared, shared, socket};
use crate::guest::virtiofs::{self, Share};
use crate::setup::cache::{self, Cache, tool};
use crate::setup::kernels::Kernel;

/// How long init may take to report under KVM before the guest is started without KVM.
const KVM_PATIENCE: Duration = Duration::from_secs(8);
/// The same where VM_ACCEL asks for KVM, which is not known to work.
const FORCED_KVM_PATIENCE: Duration = Duration::from_secs(12);
/// How long init may take to report otherwise.
const PATIENCE: Duration = Duration::from_secs(120);
/// How many disks the guest can have beside the data disk: each takes a PCI slot, of which there
/// are 32, and the rest of the machine needs 8.
pub const MAX_DISKS: usize = 24;
/// How much is read of the end of the console and of QEMU's messages.
const END_OF_LOG: u64 = 64 * 1024;

/// How the guest's code runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// On the processor.
    Kvm,
    /// Translated by QEMU, several times slower.
    Tcg,
}

impl Accel {
    /// How long a boot takes, where none has been measured yet.
    fn usual_boot(self) -> Duration {
        Duration::from_secs(match self {
            Accel::Kvm => 4,
            Accel::Tcg => 20,
        })
    }

    /// For a message.
    fn with(self) -> &'static str {
        match self {
            Accel::Kvm => "with KVM",
            Accel::Tcg => "without KVM",
        }
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "KVM",
            Accel::Tcg => "TCG",
        })
    }
}

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

/// Everything that a guest consists of.
#[derive(Debug)]
pub struct Machine {
    /// The kernel's name, as the user gave it.
    pub name: String,
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
    /// Disks in addition to the data disk.
    pub disks: Vec<Disk>,
    /// Directories that the guest may write to.
    pub shares: Vec<PathBuf>,
    /// Whether the guest's clock counts instructions: see [`ICOUNT`].
    pub icount: bool,
    /// Whether the kernel has 9p; else it needs virtiofs.
    pub has_9p: bool,
    /// The guest's root, where it is not this machine's.
    pub root: Option<PathBuf>,
    /// The launcher's own program, as the guest can run it.
    pub agent: PathBuf,
}

/// The guest's clock advances by 1 ns for each instruction, whatever the host does: measurements
/// repeat exactly. Needs emulation and one CPU.
const ICOUNT: &str = "shift=0,sleep=off";

/// Whether KVM works, on this boot of the host and with this QEMU.
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
        Ok(other) => {
            Err(fail(USAGE, format!("VM_ACCEL={other} is not supported: use kvm, tcg or auto")))
        }
    }
}

/// Whether this user may use KVM.
pub fn kvm_is_accessible() -> bool {
    File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// What is known about KVM here, and the note to write where something is learnt.
pub fn kvm_note(cache: &Cache) -> Result<(Option<KvmNote>, KvmNote)> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let output = Command::new(tool(arch::guest().qemu())?).arg("--version").output()?;
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

/// Refuses more disks than the guest has slots for.
pub fn check_disks(disks: &[Disk]) -> Result<()> {
    if disks.len() <= MAX_DISKS {
        return Ok(());
    }
    let given = disks.len();
    Err(fail(USAGE, format!("too many disks: {given} times --disk, the guest takes {MAX_DISKS}")))
}

fn remember(cache: &Cache, note: &KvmNote) -> Result<()> {
    let _lock = cache.lock()?;
    let temp = cache.temp_dir()?;
    let made = temp.path().join("kvm.json");
    fs::write(&made, serde_json::to_vec(note)?)?;
    cache::put(&made, &cache.path("kvm.json"))
}

/// Boots the machine until init reports, and returns how it runs.
pub fn boot(machine: &Machine, cache: &Cache, dir: &Path) -> Result<Accel> {
    machine.write_conf(dir)?;
    let accel = match forced_accel()? {
        _ if machine.icount => Accel::Tcg,
        Some(Accel::Kvm) => return boot_with_kvm(machine, cache, dir).map(|()| Accel::Kvm),
        Some(Accel::Tcg) => Accel::Tcg,
        None if arch::is_foreign() => Accel::Tcg,
        None if kvm_is_accessible() => match kvm_note(cache)? {
            (Some(KvmNote { works: true, .. }), _) => Accel::Kvm,
            (Some(_), _) => Accel::Tcg,
            (None, note) => return try_kvm(machine, cache, dir, note),
        },
        None => Accel::Tcg,
    };
    machine.say_boot(accel, cache);
    machine.start(accel, cache, dir)?;
    await_up(dir, PATIENCE)?;
    Ok(accel)
}

/// Boots with KVM, because VM_ACCEL says so.
fn boot_with_kvm(machine: &Machine, cache: &Cache, dir: &Path) -> Result<()> {
    let otherwise = "unset VM_ACCEL, or set it to tcg, to run the guest without KVM";
    if arch::is_foreign() {
        let message = "VM_ACCEL=kvm, but this machine has another architecture than the guest";
        return Err(fail(MACHINE, format!("{message}; {otherwise}")));
    }
    if !kvm_is_accessible() {
        return Err(fail(
            MACHINE,
            format!("VM_ACCEL=kvm, but this user cannot open /dev/kvm; {otherwise}"),
        ));
    }
    let (known, mut note) = kvm_note(cache)?;
    let works = known.is_some_and(|note| note.works);
    let patience = if works { PATIENCE } else { FORCED_KVM_PATIENCE };
    machine.say_boot(Accel::Kvm, cache);
    machine.start(Accel::Kvm, cache, dir)?;
    match await_up(dir, patience) {
        Err(_) if !works && cleanup::qemu_ended().is_none() => {
            let seconds = patience.as_secs();
            let message = format!(
                "VM_ACCEL=kvm, but under KVM the guest has not started within {seconds} s: KVM \
                 is accessible on this machine, but does not work (this is common in nested \
                 virtual machines); {otherwise}"
            );
            return Err(fail(MACHINE, message));
        }
        result => result?,
    }
    if !works {
        note.works = true;
        note_kvm(cache, &note);
    }
    Ok(())
}

/// Boots with KVM, about which nothing is known yet, or else without it, and remembers the result.
/// A machine that boots only without KVM shows that KVM does not work here, unless another
/// virtual machine keeps it busy. One that never boots shows nothing: the guest may be at fault.
fn try_kvm(machine: &Machine, cache: &Cache, dir: &Path, mut note: KvmNote) -> Result<Accel> {
    let seconds = KVM_PATIENCE.as_secs();
    say!("booting {} with KVM, for the first time here ({seconds} s at most)", machine.name);
    machine.start(Accel::Kvm, cache, dir)?;
    if await_up(dir, KVM_PATIENCE).is_ok() {
        note.works = true;
        note_kvm(cache, &note);
        return Ok(Accel::Kvm);
    }
    let hung = cleanup::qemu_ended().is_none();
    let why = if hung { "no guest boots under it".into() } else { cause(dir) };
    say!("KVM is accessible, but {why}; continuing without it (VM_ACCEL=kvm or tcg decides)");
    cleanup::kill_qemu();
    for port in 0..PORTS {
        let _ = fs::remove_file(socket(dir, port));
    }
    for left in ["up", "failed"] {
        let _ = fs::remove_file(shared(dir).join(left));
    }
    machine.say_boot(Accel::Tcg, cache);
    machine.start(Accel::Tcg, cache, dir)?;
    await_up(dir, PATIENCE)?;
    if !why.contains("busy") {
        say!("the guest boots without KVM; KVM is not tried again until this machine restarts");
        note_kvm(cache, &note);
    }
    Ok(Accel::Tcg)
}

/// Remembers what was learnt about KVM. Without the note, it is learnt again.
fn note_kvm(cache: &Cache, note: &KvmNote) {
    if let Err(error) = remember(cache, note) {
        say!("the result of trying KVM could not be stored: {error:#}");
    }
}

/// Waits until init reports.
fn await_up(dir: &Path, patience: Duration) -> Result<()> {
    let start = Instant::now();
    while read_shared(dir, "up").is_none() {
        if cleanup::qemu_ended().is_some() {
            return Err(fail(GUEST_DIED, death(dir)));
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

impl Machine {
    /// Announces the boot, with the time that it will take.
    fn say_boot(&self, accel: Accel, cache: &Cache) {
        let measured = fs::read_to_string(self.boot_time(accel, cache)).ok();
        let measured = measured.and_then(|text| text.trim().parse().ok());
        let seconds = measured.unwrap_or(accel.usual_boot().as_secs()).max(1);
        say!("booting {}, about {seconds} s {}", self.name, accel.with());
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
        let icount = if self.icount { "-icount" } else { "" };
        cache.path(format!("boot-times/{}-{accel}{icount}", self.kernel.release))
    }

    /// Writes down what the guest's init needs to know.
    fn write_conf(&self, dir: &Path) -> Result<()> {
        let shared = shared(dir);
        // A copy: cargo may replace the file while the guest runs.
        let agent = shared.join("agent");
        fs::copy(&self.agent, &agent).context("cannot copy this program for the guest")?;
        let mut conf: Vec<u8> = Vec::new();
        let mut line = |key: &str, value: &OsStr| -> Result<()> {
            if value.as_bytes().contains(&b'\n') {
                bail!("the path {value:?} contains a line break, which the guest cannot handle");
            }
            conf.extend_from_slice(key.as_bytes());
            conf.push(b' ');
            conf.extend_from_slice(value.as_bytes());
            conf.push(b'\n');
            Ok(())
        };
        // Where the guest sees this machine's files, they are there.
        if self.root.is_none() {
            line("modules", self.kernel.modules.as_os_str())?;
            line("agent", agent.as_os_str())?;
        }
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
        fs::write(shared.join("conf"), conf).context("cannot write to the run directory")
    }

    /// Starts QEMU. It has no terminal, and dies with this thread, which is the main one.
    fn start(&self, accel: Accel, cache: &Cache, dir: &Path) -> Result<()> {
        let log =
            File::create(dir.join("qemu.log")).context("cannot write to the run directory")?;
        let mut command = Command::new(tool(arch::guest().qemu())?);
        command
            .args(self.arguments(arch::guest(), accel, dir))
            .env("TMPDIR", cache.path("tmp"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        if !self.has_9p {
            command.args(virtiofs::serve(&self.memory, dir, &self.all_shares(dir))?);
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
        let root = self.root.as_deref().unwrap_or(Path::new("/"));
        let mut shares = vec![share("hostroot", root, true), share("ctl", &shared(dir), false)];
        let own = self.shares.iter().enumerate();
        shares.extend(own.map(|(n, path)| share(&format!("share{n}"), path, false)));
        // In this machine's root, they lie with the rest.
        if self.root.is_some() {
            shares.push(share("modules", &self.kernel.modules, true));
        }
        shares
    }

    fn arguments(&self, arch: Arch, accel: Accel, dir: &Path) -> Vec<OsString> {
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |option: &str, value: OsString| args.extend([option.into(), value]);
        let ([machine, accel, cpu], append) = arch.machine(accel, self.icount);
        if self.icount {
            add("-icount", ICOUNT.into());
        }
        add("-name", "bpf-vm".into());
        add("-machine", machine.into());
        add("-accel", accel.into());
        add("-cpu", cpu.into());
        add("-smp", self.cpus.to_string().into());
        add("-m", self.memory.clone().into());
        add("-display", "none".into());
        if arch.has_vga() {
            add("-vga", "none".into());
        }
        add("-nic", "none".into());
        add("-kernel", self.kernel.image.clone().into());
        add("-initrd", self.initramfs.clone().into());
        add("-append", format!("{append} quiet loglevel=4 panic=-1").into());
        add("-chardev", with_path("file,id=console,path=", &dir.join("console"), ""));
        add("-serial", "chardev:console".into());

        let shares = if self.has_9p { self.all_shares(dir) } else { Vec::new() };
        for Share { tag, path, read_only } in shares {
            let read_only = if read_only { ",readonly=on" } else { "" };
            // The run directory is one of this program's own, with no other file system in it.
            let remap = if tag == "ctl" { "" } else { ",multidevs=remap" };
            let options = format!(",mount_tag={tag},security_model=none{read_only}{remap}");
            add("-virtfs", with_path("local,path=", &path, &options));
        }

        add("-device", "virtio-serial-pci,max_ports=31".into());
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
        for (n, kind) in self.disks.iter().enumerate() {
            let id = format!("disk{n}");
            match kind {
                Disk::Virtio => disk(&id, &self.blank, "virtio-blk-pci"),
                Disk::Nvme => disk(&id, &self.blank, "nvme"),
                Disk::Scsi => disk(&id, &self.blank, "scsi-hd,bus=scsi.0"),
            }
        }
        if self.disks.contains(&Disk::Scsi) {
            // The controller stands before its disks.
            args.splice(0..0, ["-device".into(), "virtio-scsi-pci,id=scsi".into()]);
        }
        args.extend(["-nodefaults".into(), "-no-user-config".into(), "-no-reboot".into()]);
        args
    }
}

fn letter(n: usize) -> char {
    char::from(b'a' + (n % 26) as u8)
}

/// An option of QEMU with a path in it, where each comma has to be doubled.
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

/// Why the guest died, with the last lines of its console.
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
    let console = end_of(&dir.join("console"));
    let panic = console.lines().find_map(|line| line.split_once("Kernel panic - not syncing: "));
    if let Some(what) = read_shared(dir, "failed") {
        let what = last_lines(&what, 20).join("\n  ");
        format!("the guest could not be set up: {what}")
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
            Some(_) => "the guest shut down before the program had ended".to_owned(),
            None => "the connection to the guest broke".to_owned(),
        }
    }
}

/// QEMU's last messages, to append to a message.
fn log(dir: &Path) -> String {
    let lines = last_lines(&end_of(&dir.join("qemu.log")), 3);
    if lines.is_empty() { String::new() } else { format!(" ({})", lines.join("; ")) }
}

/// The console's last lines, to append to a message.
pub fn tail(dir: &Path) -> String {
    let lines = last_lines(&end_of(&dir.join("console")), 20);
    if lines.is_empty() {
        return "; its console is empty".to_owned();
    }
    format!("; the last lines of its console:\n  {}", lines.join("\n  "))
}

/// The end of a file that may have grown to any size.
fn end_of(path: &Path) -> String {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(END_OF_LOG)))?;
        let mut bytes = Vec::new();
        file.take(END_OF_LOG).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// The last `n` lines that are not empty, without control characters.
fn last_lines(text: &str, n: usize) -> Vec<String> {
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
        let text = "one\r\n\r\n\x1b[0mtwo\r\nthree";
        assert_eq!(last_lines(text, 2), ["[0mtwo", "three"]);
        assert_eq!(last_lines("", 2), Vec::<String>::new());
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("console");
        fs::write(&file, "x".repeat(1 << 20) + "\nlast").unwrap();
        assert_eq!(end_of(&file).len() as u64, END_OF_LOG);
        assert_eq!(last_lines(&end_of(&file), 1), ["last"]);
    }

    #[test]
    fn a_dead_guest_is_explained() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("console"), "a\nKernel panic - not syncing: x\n").unwrap();
        let text = death(dir.path());
        let wanted = "the guest's kernel panicked: x; the last lines of its console:\n  a\n";
        assert!(text.starts_with(wanted), "{text}");
        fs::create_dir(shared(dir.path())).unwrap();
        fs::write(shared(dir.path()).join("failed"), "mount: no\n").unwrap();
        assert!(death(dir.path()).starts_with("the guest could not be set up: mount: no;"));
    }

    /// A guest, with a root of its own or without, as QEMU is told of it.
    fn command_line(arch: Arch, accel: Accel, root: Option<&str>) -> String {
        let modules = "/k/lib/modules/6.12".into();
        let machine = Machine {
            name: "6.12".into(),
            kernel: Kernel { release: "6.12".into(), image: "/k/vmlinuz".into(), modules },
            initramfs: "/i".into(),
            data: "/d".into(),
            blank: "/b".into(),
            cpus: 2,
            memory: "2G".into(),
            disks: vec![Disk::Scsi],
            shares: vec!["/w".into()],
            icount: false,
            has_9p: true,
            root: root.map(PathBuf::from),
            agent: "/vm".into(),
        };
        let arguments = machine.arguments(arch, accel, Path::new("/run"));
        let arguments = arguments.into_iter().map(|argument| argument.into_string().unwrap());
        let is_of_a_port =
            |argument: &String| argument.contains("bpfvm.") || argument.contains(",id=port");
        let mut kept: Vec<String> = Vec::new();
        for argument in arguments {
            if is_of_a_port(&argument) {
                kept.pop();
            } else {
                kept.push(argument);
            }
        }
        kept.join(" ")
    }

    /// Of an arm64 machine with KVM, which the authors do not have.
    #[test]
    fn a_guest_of_an_arm64_machine() {
        let share = |path: &str, tag: &str, more: &str| {
            format!("-virtfs local,path={path},mount_tag={tag},security_model=none{more} ")
        };
        let read_only = ",readonly=on,multidevs=remap";
        let disk = |id: &str, image: &str, device: &str| {
            format!(
                "-drive if=none,id={id},format=raw,snapshot=on,werror=report,rerror=report,file={image} \
                 -device {device},drive={id},serial=bpfvm-{id} "
            )
        };
        let expected = |machine: &str, shares: &str| {
            format!(
                "-device virtio-scsi-pci,id=scsi -name bpf-vm {machine} -smp 2 -m 2G -display none \
                 -nic none -kernel /k/vmlinuz -initrd /i -append console=ttyAMA0 quiet loglevel=4 panic=-1 \
                 -chardev file,id=console,path=/run/console -serial chardev:console {shares}\
                 -device virtio-serial-pci,max_ports=31 {}{}-nodefaults -no-user-config -no-reboot",
                disk("data", "/d", "virtio-blk-pci"),
                disk("disk0", "/b", "scsi-hd,bus=scsi.0"),
            )
        };
        let ctl = share("/run/guest", "ctl", "") + &share("/w", "share0", ",multidevs=remap");
        let host = share("/", "hostroot", read_only) + &ctl;
        let machine = "-machine virt,gic-version=host -accel kvm -cpu host";
        assert_eq!(command_line(Arch::Arm64, Accel::Kvm, None), expected(machine, &host));
        let machine = "-machine virt,gic-version=3 -accel tcg,thread=single -cpu max,pauth=off";
        assert_eq!(command_line(Arch::Arm64, Accel::Tcg, None), expected(machine, &host));
        // On another machine, the guest's root and the kernel's modules are in the cache.
        let own = share("/r", "hostroot", read_only)
            + &ctl
            + &share("/k/lib/modules/6.12", "modules", read_only);
        assert_eq!(command_line(Arch::Arm64, Accel::Tcg, Some("/r")), expected(machine, &own));
        assert!(
            command_line(Arch::X86_64, Accel::Kvm, None)
                .contains("-cpu host -smp 2 -m 2G -display none -vga none")
        );
    }

    #[test]
    fn more_disks_than_slots_are_refused() {
        assert!(check_disks(&[Disk::Nvme; MAX_DISKS]).is_ok());
        let error = check_disks(&[Disk::Scsi; MAX_DISKS + 1]).unwrap_err();
        assert_eq!(error.downcast_ref::<host::fail::Fail>().unwrap().code, USAGE);
        assert_eq!(error.to_string(), "too many disks: 25 times --disk, the guest takes 24");
    }
}
