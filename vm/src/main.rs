//! `cargo vm`.
fn main() {}
