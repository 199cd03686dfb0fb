//! What the programs, which need libbpf, and the launcher, which is built without it, both need.

pub mod root;
mod text;
mod time;

pub use text::{printable, printable_lines};
pub use time::duration;

/// The variable with which a program of the workshop only checks its command line: it exits with 0 where
/// that is right, else with its usual message and status. The launcher sets it before it boots a guest.
pub const PARSE_ONLY: &str = "WORKSHOP_PARSE_ONLY";

/// In the guest, what a shell that joins it says and waits for, until whoever has begun it removes that file.
pub const NOT_YET: &str = "/run/not-yet";
