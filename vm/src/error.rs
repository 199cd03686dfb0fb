//! Errors that carry the exit code they end with.

use std::fmt;

/// The guest died, did not boot, or ran out of time.
pub const GUEST_DIED: i32 = 125;
/// This machine cannot do it as it is.
pub const MACHINE: i32 = 3;

/// A message for the user with the exit code that goes with it.
#[derive(Debug)]
pub struct Fail {
    /// Exit code of the launcher.
    pub code: i32,
    /// What happened, why, and what to do.
    pub message: String,
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fail {}

/// An error that ends the launcher with `code`.
pub fn fail(code: i32, message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Fail { code, message: message.into() })
}

/// Prints a line to standard error as every message of the launcher looks.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        // Standard error may be closed; there is nowhere to tell it.
        let _ = writeln!(std::io::stderr(), "vm: {}", format_args!($($arg)*));
    }};
}
