//! A trace for <https://ui.perfetto.dev>, in Perfetto's own format.
//!
//! Each object has a track with a slice for its life. Below it, the calls that the object was passed
//! to have a track for each thread, because calls of two threads may overlap and slices of one track
//! must nest. For the same reason each CPU has a track for each thread that ran there. An arrow leads
//! from an object to each one that was made of it.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write,
};

use anyhow::Result;
use prost::Message;

use crate::{
    calls::{Call, Calls, task},
    decode::Layout,
    json::{hex, link_name},
    model::{Kind, Trace},
};

mod messages;
use messages::{
    ChildOrdering, Clock, ClockSnapshot, DebugAnnotation, EventType, InternedData, Name,
    SiblingMerge, TracePacket, TracePacketDefaults, TrackDescriptor, TrackEvent,
};

/// `BUILTIN_CLOCK_MONOTONIC`.
const MONOTONIC: u32 = 3;
/// `SEQ_INCREMENTAL_STATE_CLEARED`: numbers for names begin here.
const CLEARED: u32 = 1;
/// `SEQ_NEEDS_INCREMENTAL_STATE`: uses numbers for names.
const NEEDS: u32 = 2;

/// Writes the trace.
pub fn write(w: &mut dyn Write, trace: &Trace, layout: &Layout) -> Result<()> {
    let calls = Calls::new(trace);
    let mut tracks = Tracks::new(trace);
    let mut marks = Vec::new();
    lives(&mut marks, &mut tracks, trace);
    slices(&mut marks, &mut tracks, trace, &calls);
    // Marks of the same time keep their order: each track is correct already, and an arrow's
    // beginning stands before its end.
    marks.sort_by_key(|mark| mark.time);

    let mut writer = Writer { w, annotation_names: HashMap::new() };
    writer.head(trace, marks.first().map_or(0, |mark| mark.time))?;
    for descriptor in tracks.descriptors {
        writer
            .packet(TracePacket { track_descriptor: Some(descriptor), ..TracePacket::default() })?;
    }
    for mark in &marks {
        writer.mark(mark, trace, layout, &calls)?;
    }
    Ok(())
}

/// A beginning, an end or a moment on a track.
struct Mark {
    time: u64,
    track: u64,
    what: What,
}

enum What {
    LifeBegins(usize),
    LifeEnds(usize),
    /// The life came from the one whose track this is.
    Link(usize),
    /// A call begins, on the track of this life or of a CPU.
    CallBegins(usize, Option<usize>),
    CallEnds(usize, Option<usize>),
}

/// The lives' slices, and the arrows between them.
fn lives(marks: &mut Vec<Mark>, tracks: &mut Tracks, trace: &Trace) {
    let last = trace.events.last().map_or(0, |event| event.time);
    let own: Vec<u64> = (0..trace.lives.len()).map(|life| tracks.life(trace, life)).collect();
    for (index, life) in trace.lives.iter().enumerate() {
        if let Some((parent, _)) = life.parent {
            marks.push(Mark { time: life.begin, track: own[parent], what: What::Link(index) });
        }
    }
    for (index, life) in trace.lives.iter().enumerate() {
        let end = life.end.unwrap_or(last).max(life.begin);
        marks.push(Mark { time: life.begin, track: own[index], what: What::LifeBegins(index) });
        marks.push(Mark { time: end, track: own[index], what: What::LifeEnds(index) });
    }
}

/// The calls' slices: on the track of each object and on that of the CPU where the call began.
fn slices(marks: &mut Vec<Mark>, tracks: &mut Tracks, trace: &Trace, calls: &Calls) {
    // For each track, its open slices, the innermost last.
    let mut open: BTreeMap<u64, (Option<usize>, Vec<usize>)> = BTreeMap::new();
    for (index, call) in calls.calls.iter().enumerate() {
        let on_lives = call.lives.iter().map(|&life| Some(life));
        for life in on_lives.chain([None]) {
            let track = tracks.thread(trace, call, life);
            let (_, stack) = open.entry(track).or_insert_with(|| (life, Vec::new()));
            while let Some(&top) = stack.last()
                && !is_within(calls, index, top)
            {
                stack.pop();
                let what = What::CallEnds(top, life);
                marks.push(Mark { time: calls.calls[top].end, track, what });
            }
            stack.push(index);
            marks.push(Mark { time: call.begin, track, what: What::CallBegins(index, life) });
        }
    }
    for (track, (life, stack)) in open {
        for call in stack.into_iter().rev() {
            let what = What::CallEnds(call, life);
            marks.push(Mark { time: calls.calls[call].end, track, what });
        }
    }
}

/// Whether a call was made in another one, directly or not.
fn is_within(calls: &Calls, call: usize, outer: usize) -> bool {
    let mut parents = std::iter::successors(calls.calls[call].parent, |&p| calls.calls[p].parent);
    parents.any(|parent| parent == outer)
}

/// What a track of calls is below: an object or a CPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Group {
    Life(usize),
    Cpu(u32),
}

/// The tracks, made when they are first needed.
struct Tracks {
    descriptors: Vec<TrackDescriptor>,
    objects: u64,
    groups: HashMap<Group, u64>,
    threads: HashMap<(Group, u32, u32), u64>,
}

impl Tracks {
    /// The tracks of the CPUs, in order, and the one above all objects.
    fn new(trace: &Trace) -> Self {
        let mut tracks = Self {
            descriptors: Vec::new(),
            objects: 0,
            groups: HashMap::new(),
            threads: HashMap::new(),
        };
        let mut cpus: Vec<u32> = trace.events.iter().map(|event| event.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        for cpu in cpus {
            let track = tracks.add(format!("CPU {cpu}"), None);
            tracks.groups.insert(Group::Cpu(cpu), track);
        }
        tracks.objects = tracks.add(format!("struct {}", trace.type_name), None);
        tracks
    }

    /// An object's track.
    fn life(&mut self, trace: &Trace, index: usize) -> u64 {
        let life = &trace.lives[index];
        let name = format!("{} {:#x} #{}", trace.type_name, life.address, life.generation);
        let track = self.add(name, Some(self.objects));
        self.groups.insert(Group::Life(index), track);
        track
    }

    /// The track for a call's thread, below that of a life, or below that of the CPU.
    fn thread(&mut self, trace: &Trace, call: &Call, life: Option<usize>) -> u64 {
        let event = &trace.events[call.entry];
        let group = life.map_or(Group::Cpu(event.cpu), Group::Life);
        let (tid, idle_cpu) = task(event);
        let key = (group, tid, idle_cpu);
        if let Some(&track) = self.threads.get(&key) {
            return track;
        }
        let name = if tid == 0 { event.comm.clone() } else { format!("{} {tid}", event.comm) };
        let parent = self.groups.get(&group).copied();
        let track = self.add(name, parent);
        self.threads.insert(key, track);
        track
    }

    fn add(&mut self, name: String, parent: Option<u64>) -> u64 {
        let uuid = self.descriptors.len() as u64 + 1;
        self.descriptors.push(TrackDescriptor {
            uuid: Some(uuid),
            name: Some(name),
            parent_uuid: parent,
            child_ordering: Some(ChildOrdering::Chronological.into()),
            sibling_merge_behavior: Some(SiblingMerge::None.into()),
        });
        uuid
    }
}

struct Writer<'w> {
    w: &'w mut dyn Write,
    annotation_names: HashMap<String, u64>,
}

impl Writer<'_> {
    /// The clock, and the names of the events: the functions, then the struct, then the links.
    fn head(&mut self, trace: &Trace, time: u64) -> Result<()> {
        let functions = trace.functions.iter().map(|function| function.name.as_str());
        let names = functions.chain([trace.type_name.as_str(), "clone", "split", "chain"]);
        let names = names.zip(1..).map(|(name, iid)| self::name(name, iid)).collect();
        self.packet(TracePacket {
            timestamp: Some(time),
            sequence_flags: Some(CLEARED),
            trace_packet_defaults: Some(TracePacketDefaults {
                timestamp_clock_id: Some(MONOTONIC),
            }),
            interned_data: Some(InternedData { event_names: names, ..InternedData::default() }),
            clock_snapshot: Some(ClockSnapshot {
                clocks: vec![Clock { clock_id: Some(MONOTONIC), timestamp: Some(time) }],
                primary_trace_clock: Some(MONOTONIC),
            }),
            ..TracePacket::default()
        })
    }

    fn mark(&mut self, mark: &Mark, trace: &Trace, layout: &Layout, calls: &Calls) -> Result<()> {
        let function = |call: usize| calls.calls[call].function as u64 + 1;
        let type_name = trace.functions.len() as u64 + 1;
        let mut event = TrackEvent { track_uuid: Some(mark.track), ..TrackEvent::default() };
        let mut values = Vec::new();
        let kind = match mark.what {
            What::LifeBegins(life) => {
                event.name_iid = Some(type_name);
                let found = &trace.lives[life];
                values.push(("address".to_owned(), hex(found.address)));
                values.push(("generation".to_owned(), found.generation.to_string()));
                if found.parent.is_some() {
                    event.terminating_flow_ids.push(life as u64 + 1);
                }
                EventType::SliceBegin
            }
            What::LifeEnds(life) => {
                if trace.lives[life].end.is_none() {
                    values.push(("end".to_owned(), "not seen".to_owned()));
                }
                EventType::SliceEnd
            }
            What::Link(life) => {
                let links = ["clone", "split", "chain"];
                let link = trace.lives[life].parent.map(|(_, link)| link_name(link));
                let index = links.iter().position(|&name| Some(name) == link).unwrap_or_default();
                event.name_iid = Some(type_name + 1 + index as u64);
                event.flow_ids.push(life as u64 + 1);
                EventType::Instant
            }
            What::CallBegins(call, life) => {
                event.name_iid = Some(function(call));
                let entry = calls.calls[call].entry;
                details(&mut values, trace, layout, calls, (call, entry, life));
                EventType::SliceBegin
            }
            What::CallEnds(call, life) => {
                match calls.calls[call].exit {
                    Some(exit) => details(&mut values, trace, layout, calls, (call, exit, life)),
                    None => values.push(("return".to_owned(), "not seen".to_owned())),
                }
                EventType::SliceEnd
            }
        };
        event.r#type = Some(kind.into());
        let mut new_names = Vec::new();
        for (key, value) in values {
            let next = self.annotation_names.len() as u64 + 1;
            let iid = *self.annotation_names.entry(key).or_insert_with_key(|key| {
                new_names.push(name(key, next));
                next
            });
            event
                .debug_annotations
                .push(DebugAnnotation { name_iid: Some(iid), string_value: Some(value) });
        }
        let interned =
            InternedData { debug_annotation_names: new_names, ..InternedData::default() };
        self.packet(TracePacket {
            timestamp: Some(mark.time),
            sequence_flags: Some(NEEDS),
            interned_data: (!interned.debug_annotation_names.is_empty()).then_some(interned),
            track_event: Some(event),
            ..TracePacket::default()
        })
    }

    fn packet(&mut self, mut packet: TracePacket) -> Result<()> {
        packet.trusted_packet_sequence_id = Some(1);
        let trace = messages::Trace { packet: vec![packet] };
        self.w.write_all(&trace.encode_to_vec())?;
        Ok(())
    }
}

/// What an event of a call says: on an object's track its fields or their changes, on a CPU's track
/// the object.
fn details(
    values: &mut Vec<(String, String)>,
    trace: &Trace,
    layout: &Layout,
    calls: &Calls,
    (call, at, life): (usize, usize, Option<usize>),
) {
    let first = &trace.events[at];
    if let Kind::Return { value } = first.kind
        && let Some(value) = trace.functions[first.function].returns.text(value)
    {
        values.push(("return value".to_owned(), value));
    }
    let others = trace.functions[first.function].others(first);
    values.extend(others.into_iter().map(|(other, value)| (other.name.clone(), value)));
    let Some(life) = life else {
        if first.kind == Kind::Entry {
            values.push((trace.type_name.clone(), hex(first.address)));
        }
        return;
    };
    // The events of a call's further objects follow the first one's.
    let of_call = trace.events[at..].iter().zip(&calls.of_event[at..]);
    let of_call = of_call.take_while(|(event, _)| event.time == first.time);
    let own = of_call.filter(|(event, of)| event.life == life && **of == Some(call));
    for (event, _) in own.take(1) {
        if event.time == trace.lives[life].begin && event.kind == Kind::Entry {
            let fields = layout.fields(&event.bytes).into_iter();
            values.extend(fields.map(|(name, value)| (name, value.to_string())));
        }
        let changes = event.changes.iter();
        values.extend(changes.map(|c| (c.field.clone(), format!("{} → {}", c.before, c.after))));
    }
}

fn name(name: &str, iid: u64) -> Name {
    Name { iid: Some(iid), name: Some(name.to_owned()) }
}

#[cfg(test)]
mod tests;
