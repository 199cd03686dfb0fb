//! One command in a guest: its terminal, its signals, its status, and what is left when it ends.

pub(crate) mod cleanup;
pub(crate) mod crash_report;
pub mod guest;
pub(crate) mod host;
pub mod processes;
pub(crate) mod protocol;
pub(crate) mod rundir;
