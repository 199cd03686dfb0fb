//! Messages to the user, on stderr.

use std::io::Write;

/// Writes to stderr. `eprint!` would panic where nobody reads it any more (`2>&1 | head`).
pub(crate) fn say(text: &str) {
    std::io::stderr().write_all(text.as_bytes()).ok();
}
