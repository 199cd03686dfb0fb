//! With KVM or without: with it where a guest really boots under it, which is tried once and remembered.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use workshop::fail::{MACHINE, USAGE, fail};
use workshop::say;

use crate::arch::{Accel, Arch};
use crate::fetch::cache::{Cache, tool};
use crate::machine::qemu::{Machine, PATIENCE, await_up};
use crate::session::cleanup;
use crate::session::crash_report::cause;
use crate::session::rundir::{PORTS, shared, socket};

/// How long init may take to report under KVM before the guest is started without KVM.
const KVM_PATIENCE: Duration = Duration::from_secs(8);
/// The same where VM_ACCEL asks for KVM, which is not known to work.
const FORCED_KVM_PATIENCE: Duration = Duration::from_secs(12);
const OTHERWISE: &str = "unset VM_ACCEL, or set it to tcg, to run the guest without KVM";

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

/// Whether to boot with KVM, and the note to write once it is known whether that works.
fn choose(machine: &Machine, cache: &Cache) -> Result<(Accel, Option<Note>)> {
    let asked = machine.accel == Some(Accel::Kvm);
    let why_not = match () {
        () if machine.guest.icount || machine.accel == Some(Accel::Tcg) => "",
        () if machine.arch.is_foreign() => "this machine has another architecture than the guest",
        () if !is_accessible() => {
            if !asked && Path::new("/dev/kvm").exists() {
                say!(
                    "/dev/kvm is not open to this user: as a member of the group kvm it is faster"
                );
            }
            "this user cannot open /dev/kvm"
        }
        () => match known(machine.arch, cache)? {
            (Some(note), _) if note.works => return Ok((Accel::Kvm, None)),
            (Some(_), _) if !asked => "",
            (_, note) => return Ok((Accel::Kvm, Some(note))),
        },
    };
    if asked && !why_not.is_empty() {
        return Err(fail(MACHINE, format!("VM_ACCEL=kvm, but {why_not}; {OTHERWISE}")));
    }
    Ok((Accel::Tcg, None))
}

/// Boots the machine until init reports, and returns how it runs: with KVM, about which nothing is known
/// yet, or else without it, unless VM_ACCEL asks for KVM. The result is remembered.
///
/// A machine that boots only without KVM shows that KVM does not work here, unless another virtual
/// machine keeps it busy. One that never boots shows nothing: the guest may be at fault.
pub fn boot(machine: &Machine, cache: &Cache, dir: &Path) -> Result<Accel> {
    machine.write_conf(cache, dir)?;
    let (accel, unknown) = choose(machine, cache)?;
    let asked = machine.accel == Some(accel);
    let patience = match unknown {
        None => PATIENCE,
        Some(_) if asked => FORCED_KVM_PATIENCE,
        Some(_) => KVM_PATIENCE,
    };
    let seconds = patience.as_secs();
    if unknown.is_some() && !asked {
        let name = &machine.guest.name;
        say!("booting {name} with KVM, for the first time here ({seconds} s at most)");
    } else {
        machine.say_boot(accel, cache);
    }
    machine.start(accel, cache, dir)?;
    let up = await_up(dir, patience);
    let Some(mut note) = unknown else { return up.map(|()| accel) };
    if up.is_ok() {
        note.works = true;
        write_note(cache, &note);
        return Ok(accel);
    }
    let hung = cleanup::qemu_ended().is_none();
    if asked && hung {
        let message = format!(
            "VM_ACCEL=kvm, but under KVM the guest has not started within {seconds} s: KVM is \
             accessible on this machine, but does not work (this is common in nested virtual \
             machines); {OTHERWISE}"
        );
        return Err(fail(MACHINE, message));
    } else if asked {
        return up.map(|()| accel);
    }
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
    let write = || workshop::write(&cache.path("kvm.json"), &serde_json::to_string(note)?);
    if let Err(error) = write() {
        say!("the result of trying KVM could not be stored: {error:#}");
    }
}
