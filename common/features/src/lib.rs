//! Nothing but dependencies: whoever depends on this package builds the crates that they are with the
//! features that the whole workspace needs.
//!
//! Cargo adds up a crate's features over the packages that a command names. A command for another
//! package would else build the crate again, and all that depend on it.
