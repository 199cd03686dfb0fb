//! The clock of `bpf_ktime_get_ns()`, read in user space.

use std::{fs, sync::OnceLock};

use rustix::time::{ClockId, clock_gettime};

/// What `bpf_ktime_get_ns()` would return now, in ns: CLOCK_MONOTONIC as the kernel has it. In a time namespace, the
/// clock that programs read is set off from that (time_namespaces(7)).
#[must_use]
pub fn kernel_clock() -> u64 {
    static OFFSET: OnceLock<i128> = OnceLock::new();
    let offset = OFFSET.get_or_init(|| namespace_offset("monotonic"));
    let time = clock_gettime(ClockId::Monotonic);
    let here = i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec);
    u64::try_from(here - offset).unwrap_or(0)
}

/// How far this clock, `monotonic` or `boottime`, is ahead of the kernel's in this time namespace, in ns.
pub(crate) fn namespace_offset(clock: &str) -> i128 {
    // The file has the offsets of the namespace of children, which may be another one.
    let namespace = |name| fs::read_link(format!("/proc/self/ns/{name}")).ok();
    let offsets = fs::read_to_string("/proc/self/timens_offsets").unwrap_or_default();
    let is_ours = namespace("time") == namespace("time_for_children");
    if is_ours { offset(&offsets, clock).unwrap_or(0) } else { 0 }
}

/// The offset of a clock, in ns: `monotonic SECONDS NANOSECONDS` in /proc/PID/timens_offsets.
fn offset(offsets: &str, clock: &str) -> Option<i128> {
    let mut words = offsets.lines().find(|line| line.starts_with(clock))?.split_whitespace();
    let (seconds, ns) = (words.nth(1)?.parse::<i128>().ok()?, words.next()?.parse::<i128>().ok()?);
    Some(seconds * 1_000_000_000 + ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_seconds_and_nanoseconds() {
        let offsets = "monotonic      -86400         5\nboottime        7         0\n";
        assert_eq!(offset(offsets, "monotonic"), Some(-86_399_999_999_995));
        assert_eq!(offset(offsets, "boottime"), Some(7_000_000_000));
        assert_eq!(offset("", "monotonic"), None);
    }
}
