//! The status with which a bio completes.

use std::sync::OnceLock;

use crate::preflight;

/// The error numbers that the kernel makes of a status, from 1 on: block/blk-core.c, blk_errors.
const ERRORS: [&str; 13] = [
    "EOPNOTSUPP",
    "ETIMEDOUT",
    "ENOSPC",
    "ENOLINK",
    "EREMOTEIO",
    "EBADE",
    "ENODATA",
    "EILSEQ",
    "ENOMEM",
    "EIO",
    "device mapper's requeue",
    "EAGAIN",
    "EBUSY",
];

/// From 14 on, since 6.10: too many open or active zones, a disk that is offline, a time limit of a command, an
/// argument that the driver does not take.
const LATER: [&str; 6] = ["ETOOMANYREFS", "EOVERFLOW", "ENODEV", "ETIME", "", "EINVAL"];

/// Before 6.10: a zone's lock is 14, which no bio completes with.
const EARLIER: [&str; 5] = ["a locked zone", "ETOOMANYREFS", "EOVERFLOW", "ENODEV", "ETIME"];

/// The error number that the running kernel makes of a bio's status, by its name: `ENODEV`. `None`: no error.
pub fn block_status(status: u32) -> Option<String> {
    static IS_EARLIER: OnceLock<bool> = OnceLock::new();
    // Where the release is odd, it is a new one.
    let is_earlier = IS_EARLIER.get_or_init(|| preflight::is_before((6, 10)).unwrap_or(false));
    name(status, *is_earlier)
}

fn name(status: u32, is_earlier: bool) -> Option<String> {
    let place = status.checked_sub(1)? as usize;
    let others = if is_earlier { &EARLIER[..] } else { &LATER };
    let known = ERRORS.get(place).or_else(|| others.get(place - ERRORS.len()));
    let known = known.filter(|name| !name.is_empty());
    Some(known.map_or_else(|| format!("status {status}"), |name| (*name).to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_an_error_number() {
        let names = |is_earlier| {
            [0, 1, 10, 13, 16, 17, 18, 19, 255]
                .map(|status| name(status, is_earlier).unwrap_or_default())
                .join(" ")
        };
        let earlier = " EOPNOTSUPP EIO EBUSY EOVERFLOW ENODEV ETIME status 19 status 255";
        let later = " EOPNOTSUPP EIO EBUSY ENODEV ETIME status 18 EINVAL status 255";
        assert_eq!((names(true).as_str(), names(false).as_str()), (earlier, later));
    }
}
