//! What a program says on stderr, and the errors that have exit codes of their own.

use std::{
    fmt,
    io::{self, Write},
};

/// This machine cannot run the program. Exit code 3.
#[derive(Debug)]
pub struct Unsupported(pub String);

/// An argument that turned out to be wrong. Exit code 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unsupported {}
impl std::error::Error for Usage {}

/// Writes to stderr. `eprint!` would panic where nobody reads it any more.
pub fn say(text: &str) {
    io::stderr().write_all(text.as_bytes()).ok();
}
