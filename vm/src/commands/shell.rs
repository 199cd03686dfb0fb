//! `cargo vm shell`: a shell in the guest, or one more in the guest that runs.

use anyhow::Result;
use host::fail::{GUEST_DIED, fail};
use host::say;

use crate::commands::launch::{self, Program};
use crate::machine::qemu::Guest;
use crate::run::{For, GuestOptions, Run};
use crate::session::{cleanup, host as session, rundir};

/// Runs the command. Returns the shell's status.
pub fn main(run: &Run, options: &GuestOptions) -> Result<i32> {
    run.need_packages(For::Run)?;
    let shell = Program::other(vec!["bash".into()]);
    let (arch, kernel) = (run.arch, options.kernel());
    let running = rundir::running(run.workspace(), arch.name(), rundir::SHELL, kernel)?;
    let Some((dir, _)) = running else {
        let guest = Guest { joined_by: Some(rundir::SHELL.to_owned()), ..run.guest(options)? };
        return Ok(launch::run(run, &guest, &shell)?.status);
    };
    if options.is_usual() {
        say!("joining the running guest");
    } else {
        say!(
            "joining the running guest, without changing it: --disk, --cpus and --memory only \
             apply to a new one"
        );
    }
    if !dir.join("ready").exists() {
        say!("the guest is still booting");
    }
    let died = || fail(GUEST_DIED, "the guest has ended; the terminal that started it shows why");
    let request = launch::request(arch, &shell, None)?;
    let talk = |stream, request| session::talk(stream, request, true);
    let exit = launch::enter(&dir, request, None, talk)?.ok_or_else(died)?;
    cleanup::clean_up();
    Ok(exit.status)
}
