//! Whether the kernel's file systems are there, which nearly everything here reads.

use anyhow::Result;

use crate::error::unsupported;

/// Fails, with exit code 3, where /proc or /sys is not mounted.
pub(crate) fn mounted() -> Result<()> {
    common_base::unmounted().map_or(Ok(()), unsupported)
}
