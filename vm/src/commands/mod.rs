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
    let done = if on_host { end_in_order() } else { Ok(()) }.and_then(|()| work());
    match done {
        Ok(status) => cleanup::exit(status, None),
        Err(error) => {
            end_if_interrupted();
            cleanup::exit(::workshop::fail::code(&error), Some(&format!("{error:#}")))
        }
    }
}

/// From now on, a signal that ends this process also ends what it has started, and a terminal in raw mode is
/// restored.
pub fn end_in_order() -> Result<()> {
    cleanup::restore_on_panic();
    processes::note_inherited();
    host::watch_signals()
}

/// Does not return where a signal ends this process: Ctrl-C ends cargo as well, and what has failed because of
/// that is no news.
pub fn end_if_interrupted() {
    std::thread::sleep(std::time::Duration::from_millis(50));
    cleanup::end_if_asked();
}

/// The help of --kernel, where it may be `all`.
pub const LINES: &str = "Kernel line, several (6.1,7.2), `all`, `host` (this machine's own), or a \
                         directory with an unpacked kernel [default: 6.1; arm64: 6.12]";
