//! Times on a command line.

use std::time::Duration;

/// The longest time that is accepted: a longer one is a typing error.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// What to write instead of a time that is none.
const HINT: &str = "give a number and a unit, like 10s, 500ms or 2m";

/// Reads a time like `10s`: longer than zero, a year at most; else says what is wrong with it.
pub fn duration(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text).map_err(|error| format!("{error}; {HINT}"))? {
        Duration::ZERO => Err(format!("the duration must be longer than zero; {HINT}")),
        long if long > LONGEST => Err(format!("the duration must be at most a year; {HINT}")),
        duration => Ok(duration),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_unit_and_an_end() {
        assert_eq!(duration("10s"), Ok(Duration::from_secs(10)));
        assert_eq!(duration("1m 500ms"), Ok(Duration::from_millis(60_500)));
        for wrong in ["", "10", "-5s", "0s", "9999999y", "99999999999999999999999s", "ten"] {
            let error = duration(wrong).unwrap_err();
            assert!(error.contains("10s"), "{wrong}: {error}");
        }
    }
}
