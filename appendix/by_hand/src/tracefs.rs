//! tracefs: where it is, and the names in it.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::message::Unsupported;

/// Where tracefs is mounted.
pub fn tracefs() -> Result<PathBuf> {
    let places = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"].map(PathBuf::from);
    let mounted = places.into_iter().find(|path| path.join("trace_pipe").exists());
    let missing = "tracefs is not mounted: mount -t tracefs tracefs /sys/kernel/tracing";
    mounted.ok_or_else(|| Unsupported(missing.into()).into())
}

/// Whether a file of this name can lie in a directory: a system call's name has letters, digits and
/// underscores.
pub fn is_name(text: &str) -> bool {
    Path::new(text).components().count() == 1
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_no_path() {
        assert!(is_name("openat") && is_name("clone3") && is_name("newfstatat"));
        assert!(!is_name("") && !is_name("..") && !is_name("a/b") && !is_name("a b"));
    }
}
