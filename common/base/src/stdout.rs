//! Whether there is a stdout.

use std::{
    hint::black_box,
    os::fd::BorrowedFd,
    sync::atomic::{AtomicBool, Ordering},
};

use rustix::io::fcntl_getfd;

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// The C library calls it before `main()`, where Rust's runtime opens /dev/null in the place of a closed stream.
// SAFETY: .init_array holds addresses of functions; this one makes a system call and sets a flag.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    // SAFETY: the descriptor is only asked about, open or not.
    let stdout = unsafe { BorrowedFd::borrow_raw(rustix::stdio::raw_stdout()) };
    WAS_CLOSED.store(fcntl_getfd(stdout).is_err(), Ordering::Relaxed);
}

/// What a program says whose stdout was closed (`>&-`) when it started.
pub fn closed_stdout() -> Option<&'static str> {
    // Whoever links this function links what the C library calls, too.
    black_box(&LOOK);
    WAS_CLOSED.load(Ordering::Relaxed).then_some("stdout is closed: nobody would see the results")
}
