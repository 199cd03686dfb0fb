//! The wall clock's time of what the kernel's clock has timed.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::{Timestamp, tz::TimeZone};
use rustix::time::{ClockId, clock_gettime};

/// Time since 1970 of a time of the kernel's clock, by how far the two are apart now. Where the wall clock was set
/// since, it is the time by the new setting.
pub fn wall(ended: u64) -> Duration {
    let offset = (0..3).map(|_| offset()).min_by_key(|(doubt, _)| *doubt);
    Duration::from_nanos(ended.saturating_add(offset.map_or(0, |(_, offset)| offset)))
}

/// `2026-11-27T07:37:09.123Z`
pub fn text(wall: Duration) -> String {
    let time: SystemTime = UNIX_EPOCH + wall;
    humantime::format_rfc3339_millis(time).to_string()
}

/// `07:37:09.123`, the time of day in this zone.
pub fn of_day(wall: Duration, zone: &TimeZone) -> String {
    let time = Timestamp::from_nanosecond(wall.as_nanos() as i128).unwrap_or_default();
    zone.to_datetime(time).strftime("%H:%M:%S.%3f").to_string()
}

/// In ns: how long it took to read both clocks, and the wall clock's time when the kernel's was 0.
fn offset() -> (u64, u64) {
    let before = common::kernel_clock();
    let wall = clock_gettime(ClockId::Realtime);
    let wall = wall.tv_sec as u64 * 1_000_000_000 + wall.tv_nsec as u64;
    let after = common::kernel_clock();
    (after - before, wall.saturating_sub(before.midpoint(after)))
}
