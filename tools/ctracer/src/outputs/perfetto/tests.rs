use std::collections::HashMap;

use super::*;
use crate::report::tests::{Sample, sample, trace};

/// What was written, read back: the metadata and the events.
fn read_back(sample: &Sample) -> (Value, Vec<Value>) {
    let mut written = Vec::new();
    write(&mut written, &sample.report()).unwrap();
    let read: Value = serde_json::from_slice(&written).unwrap();
    (read["metadata"].clone(), read["traceEvents"].as_array().unwrap().clone())
}

fn of_phase<'a>(events: &'a [Value], phase: &str) -> impl Iterator<Item = &'a Value> {
    events.iter().filter(move |event| event["ph"] == phase)
}

/// Nanoseconds, as Perfetto reads them.
fn ns(microseconds: &Value) -> u64 {
    (microseconds.as_f64().unwrap() * 1000.0).round() as u64
}

fn track(event: &Value) -> Track {
    (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap())
}

/// Each slice has the times of its call, and slices of one track are disjoint or nest.
fn check(sample: &Sample) {
    let (metadata, events) = read_back(sample);
    let start: u64 = metadata["start"].as_str().unwrap().parse().unwrap();
    let named: HashSet<Track> =
        of_phase(&events, "M").filter(|e| e["name"] == "thread_name").map(track).collect();
    let mut tracks: HashMap<Track, Vec<(u64, u64)>> = HashMap::new();
    let mut slices = Vec::new();
    for event in of_phase(&events, "X") {
        let begin = start + ns(&event["ts"]);
        let end = begin + ns(&event["dur"]);
        assert!(named.contains(&track(event)), "{event}");
        tracks.entry(track(event)).or_default().push((begin, end));
        if event["cat"] == "part" {
            continue;
        }
        slices.push((event["name"].as_str().unwrap().to_owned(), begin, end));
    }
    for (track, slices) in tracks {
        for (index, a) in slices.iter().enumerate() {
            for b in &slices[index + 1..] {
                let nest = a.0 <= b.0 && b.1 <= a.1 || b.0 <= a.0 && a.1 <= b.1;
                assert!(nest || a.1 <= b.0 || b.1 <= a.0, "{track:?}: {a:?}, {b:?}");
            }
        }
    }
    let lives = slices.iter().filter(|(name, ..)| *name == sample.trace.type_name).count();
    assert_eq!(lives, sample.lives.len());
    slices.retain(|(name, ..)| *name != sample.trace.type_name && name != "clone");
    let report = sample.report();
    let expected = report.calls.iter().flat_map(|call| {
        let function = report.events[call.entry].function.clone();
        let slice = (function, call.begin, call.end);
        // Once for each object, and once for the CPU.
        std::iter::repeat_n(slice, call.lives.len() + 1)
    });
    let mut expected: Vec<_> = expected.collect();
    expected.sort();
    slices.sort();
    assert_eq!(slices, expected);
}

#[test]
fn slices_are_those_of_the_calls() {
    check(&sample());
    // After a year, a floating point number of µs is no longer exact.
    let mut old = sample();
    let year = 365 * 86_400 * 1_000_000_000;
    for (index, event) in old.events.iter_mut().enumerate() {
        event.time += year + index as u64;
    }
    for (index, life) in old.lives.iter_mut().enumerate() {
        let of_life = old.events.iter().filter(|event| event.life == index);
        let times: Vec<u64> = of_life.map(|event| event.time).collect();
        (life.begin, life.end) = (times[0], times.last().copied());
    }
    check(&old);
}

#[test]
fn slices_nest_where_events_are_missing() {
    let whole = sample();
    for mask in 0..1_u32 << whole.events.len() {
        let mut trace = whole.clone();
        let mut index = 0;
        trace.events.retain(|_| {
            index += 1;
            mask >> (index - 1) & 1 == 1
        });
        check(&trace);
    }
}

#[test]
fn slices_have_names_times_and_tracks() {
    let (metadata, events) = read_back(&sample());
    let expected = json!({ "type": "bio", "release": "6.1.0-50-amd64", "start": "1000" });
    assert_eq!(metadata, expected);
    let name = |what: &str, of: &dyn Fn(Track) -> bool| {
        let mut names = of_phase(&events, "M").filter(|event| event["name"] == what);
        let found = names.find(|event| of(track(event))).unwrap();
        found["args"]["name"].as_str().unwrap().to_owned()
    };
    let slice = |event: &Value| {
        let at = track(event);
        format!(
            "{} {} {} < {} < {}",
            event["ts"],
            event["dur"],
            event["name"].as_str().unwrap(),
            name("thread_name", &|found| found == at),
            name("process_name", &|found| found.0 == at.0)
        )
    };
    let slices: Vec<String> = of_phase(&events, "X").map(slice).collect();
    let expected = [
        "0.0 0.7 bio < life < bio #0 0xffff888100001000",
        "0.0 0.55 wait < life < bio #0 0xffff888100001000",
        "0.3 0.5 bio < life < bio #1 0xffff888100001100",
        "0.3 0.1 wait < life < bio #1 0xffff888100001100",
        "0.3 0.0 clone < life < bio #0 0xffff888100001000",
        "0.0 0.65 submit_bio < fio < bio #0 0xffff888100001000",
        "0.0 0.65 submit_bio < fio < CPU 0",
        "0.1 0.45 submit_bio_noacct < fio < bio #0 0xffff888100001000",
        "0.1 0.45 submit_bio_noacct < fio < CPU 0",
        "0.2 0.05 bio_alloc_clone < fio < bio #0 0xffff888100001000",
        "0.2 0.05 bio_alloc_clone < fio < CPU 0",
        "0.3 0.1 submit_bio_noacct < fio < bio #1 0xffff888100001100",
        "0.3 0.1 submit_bio_noacct < fio < CPU 0",
        "0.5 0.3 bio_endio < swapper/1 < bio #1 0xffff888100001100",
        "0.5 0.3 bio_endio < swapper/1 < CPU 1",
        "0.6 0.1 bio_endio < swapper/1 < bio #0 0xffff888100001000",
        "0.6 0.1 bio_endio < swapper/1 < CPU 1",
    ];
    assert_eq!(slices, expected);
    // The first event of a life has its fields, later ones their changes; a CPU's have the object.
    let calls = of_phase(&events, "X").filter(|event| event["cat"] != "part");
    let args: Vec<&Value> = calls.map(|event| &event["args"]).collect();
    assert_eq!(args[0], &json!({ "address": "0xffff888100001000", "generation": 0 }));
    assert_eq!(args[3]["bi_iter.bi_sector"], "2048");
    assert_eq!(args[4], &json!({ "bio": "0xffff888100001000", "return": {} }));
    assert_eq!(args[5], &json!({ "bi_iter.bi_sector": "2048 → 4096", "return": {} }));
}

#[test]
fn an_arrow_leads_from_the_parent_to_the_clone() {
    let (_, events) = read_back(&sample());
    let position = |phase| events.iter().position(|event| event["ph"] == phase).unwrap();
    let (clone, from, to) = (
        events.iter().position(|event| event["name"] == "clone").unwrap(),
        position("s"),
        position("f"),
    );
    assert!(clone < from && from < to);
    assert_eq!((track(&events[from]), track(&events[to])), (of_life(0), of_life(1)));
    for event in &events[from..=to] {
        assert_eq!(
            (&event["name"], &event["id"], ns(&event["ts"])),
            (&json!("clone"), &json!(1), 300)
        );
    }
}

#[test]
fn a_return_that_was_not_seen_is_said() {
    let (_, events) = read_back(&trace(&[(10, 0, 1, 0, 0, 0, false)]));
    let call = of_phase(&events, "X").last().unwrap();
    assert_eq!(call["args"]["return"], "not seen");
}
