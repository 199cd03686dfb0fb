//! What an incident is, and what the right answer is: for the guest, which makes it, and for `cargo lesson answer`.

pub mod plan;

/// Where the ticket stands in the guest, from when on the incident is the learner's.
pub const TICKET: &str = "/run/ticket";

pub use common_base::NOT_YET;
