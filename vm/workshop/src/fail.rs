//! Errors that carry an exit code.

use std::fmt;

/// Wrong usage.
pub const USAGE: i32 = 2;
/// This machine lacks something that is needed.
pub const MACHINE: i32 = 3;
/// The guest died, did not boot, or ran out of time.
pub const GUEST_DIED: i32 = 125;

/// A message for the user, and the exit code that goes with it.
#[derive(Debug)]
pub struct Fail {
    /// The exit code.
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

/// An error that ends the program with `code`.
pub fn fail(code: i32, message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Fail { code, message: message.into() })
}

/// The exit code that goes with an error: 1 where it names none.
pub fn code(error: &anyhow::Error) -> i32 {
    error.downcast_ref::<Fail>().map_or(1, |fail| fail.code)
}

/// Prints a message of the program that calls it: a line on standard error.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write as _;
        // Standard error may be closed, and there is nowhere else to report that.
        let _ = writeln!(std::io::stderr(), "{}: {}", env!("CARGO_PKG_NAME"), format_args!($($arg)*));
    }};
}
