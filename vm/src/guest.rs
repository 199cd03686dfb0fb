//! The guest: what it boots from, QEMU, and the sessions with the programs in it.

pub mod agent;
pub mod initramfs;
pub mod proto;
pub mod qemu;
pub mod rundir;
pub mod session;
pub mod virtiofs;

/// Where the guest has its control groups.
pub const GROUPS: &str = "/sys/fs/cgroup";
