//! One command in a guest: its terminal, its signals, its status, and what is left when it ends.

pub mod cleanup;
pub mod death;
pub mod guest;
pub mod host;
pub mod processes;
pub mod rundir;
pub mod wire;
