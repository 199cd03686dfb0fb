//! What `cargo vm`, `cargo lesson` and the guest tests share.

pub mod cargo;
pub mod events;
pub mod fail;
pub mod judging;
pub mod room;
