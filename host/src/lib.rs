//! What `cargo vm`, `cargo lesson` and the guest tests share.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod cargo;
pub mod events;
pub mod fail;
pub mod judging;
pub mod room;
