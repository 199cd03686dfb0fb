//! One command in a guest: its terminal, its signals, its status, and what is left when it ends.

pub(crate) mod cleanup;
pub(crate) mod death;
pub mod guest;
pub(crate) mod host;
pub mod processes;
pub(crate) mod rundir;
pub(crate) mod wire;
