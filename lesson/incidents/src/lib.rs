//! What an incident is, and what the right answer is: for the guest, which makes it, and for `cargo lesson answer`.

pub mod plan;

/// Where the ticket stands in the guest, from when on the incident is the learner's.
pub const TICKET: &str = "/run/ticket";

/// A shell that joins the guest waits until this is gone: `vm::commands::shell::NOT_YET`.
pub const NOT_YET: &str = "/run/not-yet";
