//! The commands, a file each; `launch` boots what they run.

pub mod background;
pub mod bench;
pub mod bundle;
pub mod doctor;
pub mod launch;
pub mod run;
pub mod setup;
pub mod shell;
pub mod test;

use anyhow::Result;

use crate::session::{cleanup, host, processes};

/// The main of a program that boots guests, or runs in one: whatever ends it, nothing that it has started
/// is left. `on_host`: not in a guest.
pub fn main(on_host: bool, work: impl FnOnce() -> Result<i32>) -> ! {
    cleanup::restore_on_panic();
    let ready = || {
        processes::note_inherited();
        host::watch_signals()
    };
    let done = if on_host { ready() } else { Ok(()) }.and_then(|()| work());
    match done {
        Ok(status) => cleanup::exit(status, None),
        Err(error) => {
            // Ctrl-C ends cargo as well as this program: where both are on their way, 130 is the status.
            std::thread::sleep(std::time::Duration::from_millis(50));
            cleanup::exit(::workshop::fail::code(&error), Some(&format!("{error:#}")))
        }
    }
}

/// The help of --kernel, where it may be `all`.
pub const LINES: &str = "Kernel line, several (6.1,7.2), `all`, `host` (this machine's own), or a \
                         directory with an unpacked kernel [default: 6.1; arm64: 6.12]";
