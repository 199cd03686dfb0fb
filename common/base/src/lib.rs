//! What the programs, which need libbpf, and the launcher, which is built without it, both need.

pub mod colours;
mod memory;
mod mounted;
pub mod root;
mod stdout;
mod text;
mod time;

pub use memory::{Limit, available, cgroup_lacks, limit, mib};
pub use mounted::unmounted;
pub use stdout::closed_stdout;
pub use text::{printable, printable_lines};
pub use time::duration;

/// The variable with which a program of the workshop only checks its command line: it exits with 0 where
/// that is right, else with its usual message and status. The launcher sets it before it boots a guest.
pub const PARSE_ONLY: &str = "WORKSHOP_PARSE_ONLY";

/// In the guest, what a shell that joins it says and waits for, until whoever has begun it removes that file.
pub const NOT_YET: &str = "/run/not-yet";

/// Whether `cargo run` set this variable to describe the package that it runs.
pub fn is_cargos(name: &std::ffi::OsStr) -> bool {
    let name = name.to_string_lossy();
    name.starts_with("CARGO_PKG_")
        || name.starts_with("CARGO_MANIFEST_")
        || name.starts_with("CARGO_BIN_")
        || ["CARGO_CRATE_NAME", "CARGO_PRIMARY_PACKAGE", "OUT_DIR"].contains(&&*name)
}
