//! With KVM or without: with it where a guest really boots under it, which is tried once and remembered.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use host::fail::{MACHINE, USAGE, fail};
use host::say;
use serde::{Deserialize, Serialize};

use crate::arch::{Accel, Arch};
use crate::fetch::cache::{Cache, tool};
use crate::machine::qemu::{Machine, PATIENCE, await_up};
use crate::session::cleanup;
use crate::session::death::cause;
use crate::session::rundir::{PORTS, shared, socket};

/// How long init may take to report under KVM before the guest is started without KVM.
const KVM_PATIENCE: Duration = Duration::from_secs(8);
/// The same where VM_ACCEL asks for KVM, which is not known to work.
const FORCED_KVM_PATIENCE: Duration = Duration::from_secs(12);

/// Whether KVM works, on this boot of the host and with this QEMU.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    boot_id: String,
    qemu: String,
    pub works: bool,
}

pub fn forced() -> Result<Option<Accel>> {
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
pub fn is_accessible() -> bool {
    File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// What is known about KVM here, and the note to write where something is learnt.
pub fn known(arch: Arch, cache: &Cache) -> Result<(Option<Note>, Note)> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let output = Command::new(tool(arch.qemu())?).arg("--version").output()?;
    let version = String::from_utf8_lossy(&output.stdout);
    let now = Note {
        boot_id: boot_id.trim().to_owned(),
        qemu: version.lines().next().unwrap_or_default().to_owned(),
        works: false,
    };
    let old = fs::read(cache.path("kvm.json")).ok();
    let old: Option<Note> = old.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let old = old.filter(|old| old.boot_id == now.boot_id && old.qemu == now.qemu);
    Ok((old, now))
}

/// Boots the machine until init reports, and returns how it runs.
pub fn boot(machine: &Machine, cache: &Cache, dir: &Path) -> Result<Accel> {
    machine.write_conf(dir)?;
    let accel = match machine.accel {
        _ if machine.guest.icount => Accel::Tcg,
        Some(Accel::Kvm) => return boot_with_kvm(machine, cache, dir).map(|()| Accel::Kvm),
        Some(Accel::Tcg) => Accel::Tcg,
        None if machine.arch.is_foreign() => Accel::Tcg,
        None if is_accessible() => match known(machine.arch, cache)? {
            (Some(Note { works: true, .. }), _) => Accel::Kvm,
            (Some(_), _) => Accel::Tcg,
            (None, note) => return try_kvm(machine, cache, dir, note),
        },
        None => {
            if Path::new("/dev/kvm").exists() {
                say!(
                    "/dev/kvm is not open to this user: as a member of the group kvm it is faster"
                );
            }
            Accel::Tcg
        }
    };
    machine.say_boot(accel, cache);
    machine.start(accel, cache, dir)?;
    await_up(dir, PATIENCE)?;
    Ok(accel)
}

/// Boots with KVM, because VM_ACCEL says so.
fn boot_with_kvm(machine: &Machine, cache: &Cache, dir: &Path) -> Result<()> {
    let otherwise = "unset VM_ACCEL, or set it to tcg, to run the guest without KVM";
    if machine.arch.is_foreign() {
        let message = "VM_ACCEL=kvm, but this machine has another architecture than the guest";
        return Err(fail(MACHINE, format!("{message}; {otherwise}")));
    }
    if !is_accessible() {
        return Err(fail(
            MACHINE,
            format!("VM_ACCEL=kvm, but this user cannot open /dev/kvm; {otherwise}"),
        ));
    }
    let (old, mut note) = known(machine.arch, cache)?;
    let works = old.is_some_and(|note| note.works);
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
        write_note(cache, &note);
    }
    Ok(())
}

/// Boots with KVM, about which nothing is known yet, or else without it, and remembers the result.
/// A machine that boots only without KVM shows that KVM does not work here, unless another
/// virtual machine keeps it busy. One that never boots shows nothing: the guest may be at fault.
fn try_kvm(machine: &Machine, cache: &Cache, dir: &Path, mut note: Note) -> Result<Accel> {
    let seconds = KVM_PATIENCE.as_secs();
    say!("booting {} with KVM, for the first time here ({seconds} s at most)", machine.guest.name);
    machine.start(Accel::Kvm, cache, dir)?;
    if await_up(dir, KVM_PATIENCE).is_ok() {
        note.works = true;
        write_note(cache, &note);
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
        write_note(cache, &note);
    }
    Ok(Accel::Tcg)
}

/// Remembers what was learnt about KVM. Without the note, it is learnt again.
fn write_note(cache: &Cache, note: &Note) {
    let write = || host::write(&cache.path("kvm.json"), &serde_json::to_string(note)?);
    if let Err(error) = write() {
        say!("the result of trying KVM could not be stored: {error:#}");
    }
}
