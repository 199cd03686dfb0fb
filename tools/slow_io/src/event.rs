//! The records that the BPF program sends.

pub use crate::trace::types::{completed as Completed, event as Event};

// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Completed {}
// SAFETY: the C struct holds integers only: any bytes are a value of it.
unsafe impl plain::Plain for Event {}
