//! A trace for <https://ui.perfetto.dev>, in Chrome's trace event format, which is JSON.
//!
//! The format knows processes and their threads, and draws a track for each thread. Here, each CPU and
//! each object is such a process. An object has a track with a slice for its life, and the calls that
//! it was passed to have a track for each thread, because calls of two threads may overlap and slices
//! of one track must nest. For the same reason each CPU has a track for each thread that ran there. An
//! arrow leads from an object to each one that was made of it. In the slice of a life lie those of the
//! parts of an I/O's time, by their names: the format's `cname`, a colour's name, is one that Perfetto
//! does not take, and the parts' own colours have no such name. Perfetto gives slices of one name one
//! colour.
//!
//! The format's times are µs, with as many decimals as one likes. They count from the earliest one, so
//! that a floating point number holds them to the nanosecond; `start` is that one, in ns.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io::Write,
};

use anyhow::Result;
use common::colours::PARTS;
use serde_json::{Map, Value, json};

use crate::{
    gaps,
    record::{Event, Kind},
    report::TraceReport,
    value::{Change, named, plain},
};

/// The number of the first object as a process, and of its life as a thread. The kernel's threads have
/// smaller numbers.
const OBJECTS: u64 = 1 << 22;
/// The number of CPU 0's thread 0, which each CPU has one of.
const IDLE: u64 = 1 << 30;

/// The numbers of a process and of one of its threads: where an event is drawn.
type Track = (u64, u64);

/// Writes the trace.
pub fn write(w: &mut dyn Write, report: &TraceReport) -> Result<()> {
    let (trace, start) = (&report.trace, report.start().to_string());
    let metadata = json!({ "type": trace.type_name, "release": trace.release, "start": start });
    write!(w, "{{\"metadata\":{metadata},\"traceEvents\":[")?;
    let mut separator = "\n";
    each_event(report, |event| {
        write!(w, "{separator}{event}")?;
        separator = ",\n";
        Ok(())
    })?;
    Ok(writeln!(w, "\n]}}")?)
}

/// Hands the events over, in the order of the file.
fn each_event(report: &TraceReport, mut write: impl FnMut(Value) -> Result<()>) -> Result<()> {
    let (type_name, start) = (&report.trace.type_name, report.start());
    let cpus: BTreeSet<u32> = report.events.iter().map(|event| event.cpu).collect();
    for cpu in cpus {
        process(of_cpu(cpu), &format!("CPU {cpu}")).into_iter().try_for_each(&mut write)?;
    }
    let (last, parts) = (report.last.max(start), parts(report));
    for life in &report.lives {
        let (track, address, generation) = (of_life(life.life), &life.address, life.generation);
        let name = format!("{type_name} #{} {address}", life.life);
        process(track.0, &name).into_iter().try_for_each(&mut write)?;
        write(describe("thread_name", track, json!({ "name": "life" })))?;
        let mut args = json!({ "address": address, "generation": generation });
        if life.end.is_none() {
            args["end"] = "not seen".into();
        }
        let times = (life.begin, life.end.unwrap_or(last));
        write(slice(start, track, json!(type_name), times, args))?;
        for (part, from, to) in &parts[life.life] {
            let [from, to] = [from, to].map(|&time| time.min(times.1).max(times.0));
            if from < to {
                let mut slice =
                    slice(start, track, json!(PARTS[*part].name), (from, to), json!({}));
                slice["cat"] = "part".into();
                write(slice)?;
            }
        }
    }
    // An arrow begins and ends at the innermost slice that is open on a track at its time. Readers
    // take events of the same time in the order of the file, but longer slices first: so the
    // beginning is a slice of its own, and stands before the end.
    for life in &report.lives {
        let Some((parent, link)) = life.origin() else { continue };
        let ts = microseconds(start, life.begin);
        write(slice(start, of_life(parent), json!(link), (life.begin, life.begin), json!({})))?;
        for (phase, (pid, tid)) in [("s", of_life(parent)), ("f", of_life(life.life))] {
            write(json!({
                "ph": phase, "bp": "e", "cat": "link", "name": link, "id": life.life,
                "pid": pid, "tid": tid, "ts": ts,
            }))?;
        }
    }
    // The calls: on the track of each object, and on that of the CPU where the call began.
    let (mut threads, places) = (HashSet::new(), Places::of(report));
    for (number, call) in report.calls.iter().enumerate() {
        let Event { cpu, tid, comm, function, .. } = &report.events[call.entry];
        let tid = if *tid == 0 { IDLE + u64::from(*cpu) } else { u64::from(*tid) };
        for life in call.lives.iter().copied().map(Some).chain([None]) {
            let track = (life.map_or(of_cpu(*cpu), |life| of_life(life).0), tid);
            if threads.insert(track) {
                write(describe("thread_name", track, json!({ "name": comm })))?;
            }
            let mut args = places.details(number, call.entry, life);
            let returned = call.exit.map(|exit| places.details(number, exit, life));
            args.insert("return".to_owned(), returned.map_or("not seen".into(), Value::from));
            write(slice(start, track, json!(function), (call.begin, call.end), args.into()))?;
        }
    }
    Ok(())
}

/// A part of a life, and its times.
type Stretch = (usize, u64, u64);

/// Of each life, the parts of an I/O's time; gaps of one part that follow each other are one.
fn parts(report: &TraceReport) -> Vec<Vec<Stretch>> {
    let mut parts = vec![Vec::<Stretch>::new(); report.lives.len()];
    let mut before: Vec<u64> = report.lives.iter().map(|life| life.begin).collect();
    for (event, gap) in report.events.iter().zip(gaps::of(&report.trace, &report.events).0) {
        // Events of two CPUs may stand in the wrong order.
        let (from, to) = (before[event.life], event.time.max(before[event.life]));
        before[event.life] = to;
        let own = &mut parts[event.life];
        match (gap, own.last_mut()) {
            (Some(part), Some(last)) if (last.0, last.2) == (part, from) => last.2 = to,
            (Some(part), _) => own.push((part, from, to)),
            _ => {}
        }
    }
    parts
}

fn process(pid: u64, name: &str) -> [Value; 2] {
    let track = (pid, pid);
    let order = describe("process_sort_index", track, json!({ "sort_index": pid }));
    [describe("process_name", track, json!({ "name": name })), order]
}

fn describe(what: &str, (pid, tid): Track, args: Value) -> Value {
    json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": args })
}

fn slice(start: u64, (pid, tid): Track, name: Value, times: (u64, u64), args: Value) -> Value {
    json!({
        "ph": "X", "name": name, "pid": pid, "tid": tid, "args": args,
        "ts": microseconds(start, times.0), "dur": microseconds(times.0, times.1),
    })
}

fn microseconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1000.0
}

/// A CPU's number as a process, which must not be 0.
fn of_cpu(cpu: u32) -> u64 {
    u64::from(cpu) + 1
}

fn of_life(life: usize) -> Track {
    (OBJECTS + life as u64, OBJECTS + life as u64)
}

/// Where the events of each call and object are: its call and its return.
struct Places<'a> {
    report: &'a TraceReport,
    events: HashMap<(usize, usize, bool), usize>,
}

impl Places<'_> {
    fn of(report: &TraceReport) -> Places<'_> {
        let mut events = HashMap::new();
        for (at, (event, call)) in report.events.iter().zip(&report.call_of).enumerate() {
            let Some(call) = call else { continue };
            events.entry((*call, event.life, event.kind == Kind::Return)).or_insert(at);
        }
        Places { report, events }
    }

    /// What an event of a call says: on an object's track its fields or their changes, on a CPU's track
    /// the object. `at`: the event of the call's first object.
    fn details(&self, call: usize, at: usize, life: Option<usize>) -> Map<String, Value> {
        let event = &self.report.events[at];
        let value = event.value.iter().map(|value| ("value".to_owned(), named(value).into()));
        let arguments = event.arguments.iter().flatten();
        let arguments = arguments.map(|(name, value)| (name.clone(), named(value).into()));
        let mut values: Map<String, Value> = value.chain(arguments).collect();
        let Some(life) = life else {
            if event.kind == Kind::Entry {
                let type_name = &self.report.trace.type_name;
                values.insert(type_name.clone(), event.address.as_str().into());
            }
            return values;
        };
        let own = self.events.get(&(call, life, event.kind == Kind::Return));
        if let Some(own) = own.map(|&at| &self.report.events[at]) {
            let fields = own.fields.iter().flatten();
            values.extend(fields.map(|(name, value)| (name.clone(), plain(value).into())));
            let change =
                |of: &Change| format!("{} → {}", plain(&of.before), plain(&of.after)).into();
            let changes = own.changes.iter().flatten();
            values.extend(changes.map(|of| (of.field.clone(), change(of))));
        }
        values
    }
}

#[cfg(test)]
mod tests;
