//! What an incident is, and what the right answer is: for the guest, which makes it, and for `cargo lesson answer`.

pub mod measured;
pub mod plan;
pub mod table;
pub mod why;

/// Where the ticket stands in the guest, from when on the incident is the learner's.
pub const TICKET: &str = "/run/ticket";

/// Where the guest keeps what was measured while the incident was made.
pub const RECORD: &str = "/run/incident.json";
/// Where it keeps the way to the answer.
pub const WAY: &str = "/run/incident.way";

pub use common_base::NOT_YET;
