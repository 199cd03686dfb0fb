use super::*;
use crate::{
    calls::tests::{sample, trace},
    decode::tests::layout,
    model::Event,
};

type Rows = HashMap<u64, TrackDescriptor>;
/// Time, event and name.
type Events = Vec<(u64, TrackEvent, String)>;

/// What was written, read back: the descriptors by track, and the events with their names.
fn read_back(trace: &Trace, layout: &Layout) -> (Rows, Events) {
    let mut written = Vec::new();
    write(&mut written, trace, layout).unwrap();
    let packets = messages::Trace::decode(written.as_slice()).unwrap().packet;
    let mut names = HashMap::new();
    let (mut tracks, mut events) = (HashMap::new(), Vec::new());
    for packet in packets {
        for found in packet.interned_data.unwrap_or_default().event_names {
            names.insert(found.iid, found.name.unwrap());
        }
        if let Some(track) = packet.track_descriptor {
            tracks.insert(track.uuid.unwrap(), track);
        }
        if let Some(event) = packet.track_event {
            let name = event.name_iid.map(|iid| names[&Some(iid)].clone()).unwrap_or_default();
            events.push((packet.timestamp.unwrap(), event, name));
        }
    }
    (tracks, events)
}

/// Every track is balanced and nested, no time runs backwards, every parent exists, and each slice
/// has the times of its call.
fn check(trace: &Trace, layout: &Layout) {
    let (tracks, events) = read_back(trace, layout);
    assert!(events.is_sorted_by_key(|(time, ..)| *time));
    let mut open: HashMap<u64, Vec<(u64, String)>> = HashMap::new();
    let mut slices = Vec::new();
    for (time, event, name) in &events {
        let track = event.track_uuid.unwrap();
        assert!(tracks.contains_key(&track));
        let open = open.entry(track).or_default();
        match event.r#type() {
            EventType::SliceBegin => open.push((*time, name.clone())),
            EventType::SliceEnd => {
                let (begin, name) = open.pop().expect("an end without a beginning");
                slices.push((name, begin, *time));
            }
            _ => {}
        }
    }
    assert!(open.values().all(Vec::is_empty), "{open:?}");
    slices.retain(|(name, ..)| *name != trace.type_name);
    let calls = Calls::new(trace).calls;
    let expected = calls.iter().flat_map(|call| {
        let name = &trace.functions[call.function].name;
        // Once for each object, and once for the CPU.
        std::iter::repeat_n((name.clone(), call.begin, call.end), call.lives.len() + 1)
    });
    let mut expected: Vec<_> = expected.collect();
    expected.sort();
    slices.sort();
    assert_eq!(slices, expected);
    for track in tracks.values() {
        assert!(track.parent_uuid.is_none_or(|parent| tracks.contains_key(&parent)), "{track:?}");
    }
}

#[test]
fn a_trace_is_balanced_and_in_order() {
    let layout = layout("bio");
    check(&sample(), &layout);
    check(&Trace::default(), &layout);
}

#[test]
fn a_trace_without_some_events_is_balanced_too() {
    let (whole, layout) = (sample(), layout("bio"));
    for mask in 0..1_u32 << whole.events.len() {
        let mut trace = whole.clone();
        let mut index = 0;
        trace.events.retain(|_: &Event| {
            index += 1;
            mask >> (index - 1) & 1 == 1
        });
        check(&trace, &layout);
    }
}

#[test]
fn slices_have_names_times_and_tracks() {
    let (tracks, events) = read_back(&sample(), &layout("bio"));
    let path = |mut track: u64| {
        let mut path = Vec::new();
        loop {
            path.push(tracks[&track].name.clone().unwrap());
            match tracks[&track].parent_uuid {
                Some(parent) => track = parent,
                None => break path.join(" < "),
            }
        }
    };
    let begins: Vec<String> = events
        .iter()
        .filter(|(_, event, _)| event.r#type() == EventType::SliceBegin)
        .map(|(time, event, name)| format!("{time} {name} < {}", path(event.track_uuid.unwrap())))
        .collect();
    let expected = [
        "1000 bio < bio 0xffff888100001000 #0 < struct bio",
        "1000 submit_bio < fio 42 < bio 0xffff888100001000 #0 < struct bio",
        "1000 submit_bio < fio 42 < CPU 0",
        "1100 submit_bio_noacct < fio 42 < bio 0xffff888100001000 #0 < struct bio",
        "1100 submit_bio_noacct < fio 42 < CPU 0",
        "1200 bio_alloc_clone < fio 42 < bio 0xffff888100001000 #0 < struct bio",
        "1200 bio_alloc_clone < fio 42 < CPU 0",
        "1300 bio < bio 0xffff888100001100 #0 < struct bio",
        "1300 submit_bio_noacct < fio 42 < bio 0xffff888100001100 #0 < struct bio",
        "1300 submit_bio_noacct < fio 42 < CPU 0",
        "1500 bio_endio < swapper/1 < bio 0xffff888100001100 #0 < struct bio",
        "1500 bio_endio < swapper/1 < CPU 1",
        "1600 bio_endio < swapper/1 < bio 0xffff888100001000 #0 < struct bio",
        "1600 bio_endio < swapper/1 < CPU 1",
    ];
    assert_eq!(begins, expected);
}

#[test]
fn an_arrow_leads_from_the_parent_to_the_clone() {
    let (_, events) = read_back(&sample(), &layout("bio"));
    let from = events.iter().position(|(_, event, _)| !event.flow_ids.is_empty()).unwrap();
    let to =
        events.iter().position(|(_, event, _)| !event.terminating_flow_ids.is_empty()).unwrap();
    assert!(from < to);
    let ((begin, from, link), (end, to, name)) = (&events[from], &events[to]);
    assert_eq!((*begin, *end), (1_300, 1_300));
    assert_eq!((link.as_str(), name.as_str()), ("clone", "bio"));
    assert_eq!(from.flow_ids, to.terminating_flow_ids);
}

#[test]
fn calls_that_touch_do_not_nest() {
    let trace = trace(&[
        (10, 0, 1, 0, 0, 0, false),
        (20, 0, 1, 0, 0, 0, true),
        (20, 0, 1, 0, 1, 0, false),
        (20, 0, 1, 0, 1, 0, true),
        (20, 0, 1, 0, 2, 0, false),
        (30, 0, 1, 0, 2, 0, true),
    ]);
    let (tracks, events) = read_back(&trace, &layout("bio"));
    let on_cpu = |event: &TrackEvent| {
        let parent = tracks[&event.track_uuid.unwrap()].parent_uuid;
        parent.is_some_and(|parent| tracks[&parent].name.as_deref() == Some("CPU 0"))
    };
    let kinds = events.iter().filter(|(_, event, _)| on_cpu(event));
    let kinds: Vec<_> = kinds.map(|(time, event, _)| (*time, event.r#type())).collect();
    let (begin, end) = (EventType::SliceBegin, EventType::SliceEnd);
    assert_eq!(kinds, [(10, begin), (20, end), (20, begin), (20, end), (20, begin), (30, end)]);
}
