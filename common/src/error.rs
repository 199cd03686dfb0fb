//! The errors that end a program with exit codes of their own.

use std::fmt;

use anyhow::Result;

/// This machine cannot run the program; says what is missing and what to do. Exit code 3.
#[derive(Debug)]
pub struct Unsupported(pub String);

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unsupported {}

/// An error that ends the program with exit code 3. The message says what this machine lacks, and what to do.
pub fn unsupported<T>(message: impl Into<String>) -> Result<T> {
    Err(Unsupported(message.into()).into())
}

/// An argument that this machine turns out not to have room for. Exit code 2.
#[derive(Debug)]
pub struct Usage(pub String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}
