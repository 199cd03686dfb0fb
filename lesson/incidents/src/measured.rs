//! What was measured of an incident's services: usually, with the fault, and after a cure.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::plan::Service;
use crate::table::Part;

/// The kinds of requests that a service answers, as its log calls them.
pub const KINDS: [&str; 4] = ["get", "put", "page", "list"];
/// Places in [`KINDS`].
pub const GET: usize = 0;
/// A write of a block.
pub const PUT: usize = 1;
/// Many blocks, usually in memory.
pub const PAGE: usize = 2;
/// A file from its beginning to its end.
pub const LIST: usize = 3;

/// How many different latencies are told apart: eight for each power of two, in us.
pub const BUCKETS: usize = 240;

/// The place of a latency among [`BUCKETS`].
pub fn bucket(took: Duration) -> usize {
    let us = took.as_micros().min(u128::from(u64::MAX)) as u64;
    if us < 8 {
        return us as usize;
    }
    let octave = us.ilog2() as usize;
    let eighth = (us >> (octave - 3)) as usize & 7;
    ((octave - 2) * 8 + eighth).min(BUCKETS - 1)
}

/// The end of a bucket, in ms: at most an eighth more than what is in it.
fn end_ms(bucket: usize) -> f64 {
    if bucket < 8 {
        return (bucket + 1) as f64 / 1000.0;
    }
    let (octave, eighth) = (bucket / 8 + 2, bucket % 8);
    ((9 + eighth) as u64 * (1 << (octave - 3))) as f64 / 1000.0
}

/// Requests of a kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindActivity {
    /// So many were slow.
    pub slow: u64,
    /// By bucket of latencies: how many.
    pub took: BTreeMap<usize, u64>,
}

/// What a service did: by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceActivity {
    /// In the order of [`KINDS`].
    pub kinds: [KindActivity; 4],
}

impl ServiceActivity {
    /// Reads what a service writes: a line for each kind, with its name, its slow ones, and its latencies.
    pub fn parse(text: &str) -> Option<ServiceActivity> {
        let mut all = ServiceActivity::default();
        for (line, (name, kind)) in text.lines().zip(KINDS.iter().zip(&mut all.kinds)) {
            let mut words = line.strip_prefix(name)?.split_whitespace();
            kind.slow = words.next()?.parse().ok()?;
            for word in words {
                let (bucket, count) = word.split_once(':')?;
                kind.took.insert(bucket.parse().ok()?, count.parse().ok()?);
            }
        }
        (text.lines().count() == KINDS.len()).then_some(all)
    }

    /// What has come since then.
    pub fn since(&self, then: &ServiceActivity) -> ServiceActivity {
        let mut delta = self.clone();
        for (kind, before) in delta.kinds.iter_mut().zip(&then.kinds) {
            kind.slow = kind.slow.saturating_sub(before.slow);
            for (bucket, count) in &mut kind.took {
                *count -= before.took.get(bucket).copied().unwrap_or(0).min(*count);
            }
            kind.took.retain(|_, count| *count > 0);
        }
        delta
    }

    /// Requests of these kinds: all, and slow ones.
    pub fn count(&self, kinds: &[usize]) -> (u64, u64) {
        let of = kinds.iter().map(|kind| &self.kinds[*kind]);
        of.fold((0, 0), |(all, slow), kind| {
            (all + kind.took.values().sum::<u64>(), slow + kind.slow)
        })
    }

    /// All requests.
    pub fn requests(&self) -> u64 {
        self.count(&[GET, PUT, PAGE, LIST]).0
    }

    /// All slow requests.
    pub fn slow(&self) -> u64 {
        self.count(&[GET, PUT, PAGE, LIST]).1
    }

    /// So many percent of the requests of these kinds took at most so many ms.
    pub fn percentile(&self, kinds: &[usize], percent: u64) -> Option<f64> {
        let mut took = BTreeMap::new();
        for (bucket, count) in kinds.iter().flat_map(|kind| &self.kinds[*kind].took) {
            *took.entry(*bucket).or_insert(0) += count;
        }
        let wanted = (took.values().sum::<u64>() * percent).div_ceil(100);
        let mut seen = 0;
        let found = took.into_iter().find(|(_, count)| {
            seen += count;
            seen >= wanted
        });
        found.map(|(bucket, _)| end_ms(bucket))
    }

    /// The same of all requests.
    pub fn percentile_of_all(&self, percent: u64) -> Option<f64> {
        self.percentile(&[GET, PUT, PAGE, LIST], percent)
    }
}

/// What the machine did in a while.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Activity {
    /// How long it was.
    pub seconds: f64,
    /// In the order of [`Service::ALL`].
    pub services: Vec<ServiceActivity>,
    /// By process: percent of a CPU, and KiB a second that it read from disks and wrote.
    pub processes: BTreeMap<String, (u64, u64)>,
}

impl Activity {
    /// Of a service.
    pub fn of(&self, service: Service) -> ServiceActivity {
        self.services.get(service as usize).cloned().unwrap_or_default()
    }

    /// Requests of a service in a second.
    pub fn rate(&self, service: Service) -> f64 {
        self.of(service).requests() as f64 / self.seconds.max(0.001)
    }

    /// The row of a service in the table of [`cured`]: its name, and what was measured.
    fn row(&self, name: &str, service: Service) -> String {
        let of = self.of(service);
        let ms = |percent| match of.percentile_of_all(percent) {
            Some(ms) => format!("{} ms", shown(ms)),
            None => "-".to_owned(),
        };
        format!(
            "  {name:<16}{:>10.0}{:>7} %{:>12}{:>12}",
            self.rate(service),
            of.slow() * 100 / of.requests().max(1),
            ms(50),
            ms(99)
        )
    }
}

/// Milliseconds: whole ones where they are many.
pub fn shown(ms: f64) -> String {
    if ms < 10.0 { format!("{ms:.1}") } else { format!("{ms:.0}") }
}

/// What was recorded while the incident was made.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Record {
    /// Without the fault.
    pub usual: Activity,
    /// With it.
    pub fault: Activity,
    /// What slow_io printed of the service's disk with the fault, if the way begins with it.
    pub parts: Vec<Part>,
    /// By setting: its value, with the fault.
    pub settings: BTreeMap<String, String>,
}

/// Whether a service is cured: less than a quarter of the slow requests that it had with the fault, in percent of all,
/// and at least half of its usual requests. One that was killed is not cured.
pub fn is_cured(record: &Record, now: &Activity, service: Service) -> bool {
    let (with, of) = (record.fault.of(service), now.of(service));
    let is_quick = of.slow() * with.requests() * 4 < with.slow() * of.requests();
    is_quick && now.rate(service) * 2.0 >= record.usual.rate(service)
}

/// The table of what was usual, what was with the fault, and what is now; and what that comes to.
pub fn cured(record: &Record, now: &Activity, service: Service) -> (String, bool) {
    let is_cured = is_cured(record, now, service);
    let p99 = |activity: &Activity| {
        activity.of(service).percentile_of_all(99).map_or_else(|| "-".to_owned(), shown)
    };
    let (usual, rate) = (record.usual.rate(service), now.rate(service));
    let says = match is_cured {
        true => format!("Cured: p99 {} → {} ms.", p99(&record.fault), p99(now)),
        false if rate * 2.0 < usual => format!(
            "Not cured: {rate:.0} requests a second are less than half of the usual {usual:.0}."
        ),
        false => "Not cured: a quarter of the slow requests, or more, is still slow.".to_owned(),
    };
    let text = format!(
        "  {:<16}{:>10}{:>9}{:>12}{:>12}\n{}\n{}\n{}\n\n{says}",
        service.process(),
        "requests/s",
        "slow",
        "p50",
        "p99",
        record.usual.row("usual", service),
        record.fault.row("with the fault", service),
        now.row("now", service),
    );
    (text, is_cured)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second in which so many requests took 5 ms, and so many 600 ms and were slow.
    pub(crate) fn second(quick: u64, slow: u64) -> Activity {
        let took = [(5, quick), (600, slow)].into_iter().filter(|(_, count)| *count > 0);
        let took = took.map(|(ms, count)| (bucket(Duration::from_millis(ms)), count)).collect();
        let mut service = ServiceActivity::default();
        service.kinds[GET] = KindActivity { slow, took };
        Activity { seconds: 1.0, services: vec![service; 3], ..Activity::default() }
    }

    #[test]
    fn a_bucket_ends_little_above_what_is_in_it() {
        for us in [0, 1, 7, 8, 9, 250, 1000, 123_456, 7_654_321, 600_000_000] {
            let end = end_ms(bucket(Duration::from_micros(us))) * 1000.0;
            assert!(end > us as f64 && end <= us as f64 * 1.126 + 1.0, "{us} us: {end}");
        }
    }

    #[test]
    fn latencies_are_read_and_subtracted() {
        let parse = |text: &str| ServiceActivity::parse(text);
        let first = parse("get 1 8:2 30:1\nput 0\npage 0 7:1\nlist 0\n").expect("right");
        let last = parse("get 3 8:4 30:2 40:1\nput 0 9:1\npage 0 7:1\nlist 0\n").expect("right");
        let delta = last.since(&first);
        assert_eq!((delta.requests(), delta.slow()), (5, 2));
        assert_eq!(delta.count(&[PUT]), (1, 0));
        assert_eq!(delta.percentile(&[PAGE], 50), None);
        assert_eq!(delta.percentile_of_all(99), Some(end_ms(40)));
        assert_eq!(parse("get 1\nput 1\n"), None);
        assert_eq!(parse("get 1 8\nput 1\npage 0\nlist 0\n"), None);
    }

    #[test]
    fn a_service_is_cured_that_is_quick_and_alive() {
        let record = Record { usual: second(50, 0), fault: second(2, 8), ..Record::default() };
        let says = |now: Activity| cured(&record, &now, Service::Web);
        let (text, is_cured) = says(second(49, 1));
        assert!(is_cured && text.contains("p99 655 → 655 ms"), "{text}");
        for (quick, slow, why) in [
            (0, 0, "less than half"),
            (24, 0, "less than half"),
            (40, 10, "still slow"),
            (2, 8, "less than half"),
        ] {
            let (text, is_cured) = says(second(quick, slow));
            assert!(!is_cured && text.contains(why), "{text}");
        }
        let (text, is_cured) = says(second(25, 0));
        assert!(is_cured && text.contains("p99 655 → 5.1 ms"), "{text}");
    }
}
