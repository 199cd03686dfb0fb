//! `cargo vm shell`: a shell in the guest, or one more in the guest that runs.

use anyhow::Result;
use common_base::NOT_YET;
use workshop::fail::{GUEST_DIED, fail};
use workshop::say;

use crate::commands::launch::{self, GuestProgram};
use crate::machine::qemu::Guest;
use crate::run::{For, GuestOptions, Run};
use crate::session::{cleanup, host as session, rundir};

/// Runs the command. Returns the shell's status.
pub fn main(run: &Run, options: &GuestOptions) -> Result<i32> {
    if !is_running(run, options.kernel())? {
        return begin(run, options, &GuestProgram::other(vec!["bash".into()]));
    }
    let wait = format!("cat {NOT_YET} 2>&-; while [ -e {NOT_YET} ]; do sleep 0.2; done; exec bash");
    let shell = GuestProgram::other(["sh", "-c", &wait].map(Into::into).into());
    if options.is_usual() {
        say!("joining the running guest");
    } else {
        say!(
            "joining the running guest, without changing it: --disk, --cpus and --memory only \
             apply to a new one"
        );
    }
    let ended = || fail(GUEST_DIED, "the guest has ended; the terminal that started it shows why");
    join(run, options.kernel(), &shell)?.ok_or_else(ended)
}

/// Whether a guest runs that [`join`] finds.
pub fn is_running(run: &Run, kernel: Option<&str>) -> Result<bool> {
    Ok(rundir::running(run.workspace(), run.arch.name(), rundir::SHELL, kernel)?.is_some())
}

/// Boots a guest that others can join, and runs a program there. Returns its status.
pub fn begin(run: &Run, options: &GuestOptions, program: &GuestProgram) -> Result<i32> {
    run.need_packages(For::Run)?;
    if options.rootfs.is_none() {
        run.say_missing_to_type()?;
    }
    let guest = Guest { joined_by: Some(rundir::SHELL.to_owned()), ..run.guest(options)? };
    Ok(launch::run(run, &guest, program)?.status)
}

/// Runs a program in the guest that [`begin`] has booted. Returns its status; `None`: no guest runs, or it ended.
pub fn join(run: &Run, kernel: Option<&str>, program: &GuestProgram) -> Result<Option<i32>> {
    let running = rundir::running(run.workspace(), run.arch.name(), rundir::SHELL, kernel)?;
    let Some((dir, _)) = running else { return Ok(None) };
    if !dir.join("ready").exists() {
        say!("the guest is still booting");
    }
    let request = launch::request(run, program, None)?;
    let talk = |stream, request| session::talk(stream, request, true);
    let exit = launch::enter(&dir, request, None, talk)?;
    cleanup::clean_up();
    Ok(exit.map(|exit| exit.status))
}
