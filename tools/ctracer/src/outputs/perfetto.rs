//! A trace for <https://ui.perfetto.dev>, in Chrome's trace event format, which is JSON.
//!
//! The format knows processes and their threads, and draws a track for each thread. Here, each CPU and
//! each object is such a process. An object has a track with a slice for its life, and the calls that
//! it was passed to have a track for each thread, because calls of two threads may overlap and slices
//! of one track must nest. For the same reason each CPU has a track for each thread that ran there. An
//! arrow leads from an object to each one that was made of it.
//!
//! The format's times are µs, with as many decimals as one likes. They count from the first event, so
//! that a floating point number holds them to the nanosecond; `start` is the time of that event in ns.

use std::{collections::HashSet, io::Write};

use anyhow::Result;
use serde_json::{Map, Value, json};

use crate::{
    calls::{Calls, task},
    decode::Layout,
    model::{Change, Kind, Trace},
    value::hex,
};

/// The number of the first object as a process, and of its life as a thread. The kernel's threads have
/// smaller numbers.
const OBJECTS: u64 = 1 << 22;
/// The number of CPU 0's thread 0, which each CPU has one of.
const IDLE: u64 = 1 << 30;

/// Writes the trace.
pub fn write(w: &mut dyn Write, trace: &Trace, layout: &Layout) -> Result<()> {
    let start = trace.events.first().map_or(0, |event| event.time);
    let metadata =
        json!({ "type": trace.type_name, "release": trace.release, "start": start.to_string() });
    write!(w, "{{\"metadata\":{metadata},\"traceEvents\":[")?;
    let threads = HashSet::new();
    let mut writer = Writer { w, separator: "\n", start, threads };
    writer.cpus(trace)?;
    writer.lives(trace)?;
    writer.calls(trace, layout)?;
    writeln!(w, "\n]}}")?;
    Ok(())
}

/// The numbers of a process and of one of its threads: where an event is drawn.
type Track = (u64, u64);

struct Writer<'w> {
    w: &'w mut dyn Write,
    separator: &'static str,
    /// The time of the first event.
    start: u64,
    /// Those that have a name already.
    threads: HashSet<Track>,
}

impl Writer<'_> {
    fn cpus(&mut self, trace: &Trace) -> Result<()> {
        let mut cpus: Vec<u32> = trace.events.iter().map(|event| event.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus.into_iter().try_for_each(|cpu| self.process(of_cpu(cpu), &format!("CPU {cpu}")))
    }

    /// The lives' slices, and the arrows between them.
    fn lives(&mut self, trace: &Trace) -> Result<()> {
        let last = trace.events.last().map_or(0, |event| event.time);
        for (index, life) in trace.lives.iter().enumerate() {
            let (pid, tid) = of_life(index);
            let name = format!("{} {:#x} #{}", trace.type_name, life.address, life.generation);
            self.process(pid, &name)?;
            self.thread((pid, tid), "life")?;
            let mut args = json!({ "address": hex(life.address), "generation": life.generation });
            if life.end.is_none() {
                args["end"] = "not seen".into();
            }
            let times = (life.begin, life.end.unwrap_or(last));
            self.slice((pid, tid), &trace.type_name, times, args)?;
        }
        // An arrow begins and ends at the innermost slice that is open on a track at its time. Readers
        // take events of the same time in the order of the file, but longer slices first: so the
        // beginning is a slice of its own, and stands before the end.
        for (index, life) in trace.lives.iter().enumerate() {
            let Some((parent, link)) = life.parent else { continue };
            self.slice(of_life(parent), link.name(), (life.begin, life.begin), json!({}))?;
            for (phase, (pid, tid)) in [("s", of_life(parent)), ("f", of_life(index))] {
                self.event(json!({
                    "ph": phase, "bp": "e", "cat": "link", "name": link.name(), "id": index,
                    "pid": pid, "tid": tid, "ts": self.microseconds(life.begin),
                }))?;
            }
        }
        Ok(())
    }

    /// The calls' slices: on the track of each object and on that of the CPU where the call began.
    fn calls(&mut self, trace: &Trace, layout: &Layout) -> Result<()> {
        let calls = Calls::new(trace);
        for (index, call) in calls.calls.iter().enumerate() {
            let entry = &trace.events[call.entry];
            let tid = match task(entry) {
                (0, cpu) => IDLE + u64::from(cpu),
                (tid, _) => tid.into(),
            };
            for life in call.lives.iter().copied().map(Some).chain([None]) {
                let track = (life.map_or(of_cpu(entry.cpu), |life| of_life(life).0), tid);
                self.thread(track, &entry.comm)?;
                let mut args = details(trace, layout, &calls, (index, call.entry, life));
                let returned = match call.exit {
                    Some(exit) => details(trace, layout, &calls, (index, exit, life)).into(),
                    None => Value::from("not seen"),
                };
                args.insert("return".to_owned(), returned);
                let name = &trace.functions[call.function].name;
                self.slice(track, name, (call.begin, call.end), args.into())?;
            }
        }
        Ok(())
    }

    fn process(&mut self, pid: u64, name: &str) -> Result<()> {
        self.describe("process_name", (pid, pid), json!({ "name": name }))?;
        self.describe("process_sort_index", (pid, pid), json!({ "sort_index": pid }))
    }

    /// Names a thread, where this is its first event.
    fn thread(&mut self, track: Track, name: &str) -> Result<()> {
        if !self.threads.insert(track) {
            return Ok(());
        }
        self.describe("thread_name", track, json!({ "name": name }))
    }

    fn describe(&mut self, what: &str, (pid, tid): Track, args: Value) -> Result<()> {
        self.event(json!({ "ph": "M", "name": what, "pid": pid, "tid": tid, "args": args }))
    }

    fn slice(
        &mut self,
        (pid, tid): Track,
        name: &str,
        (begin, end): (u64, u64),
        args: Value,
    ) -> Result<()> {
        self.event(json!({
            "ph": "X", "name": name, "pid": pid, "tid": tid, "args": args,
            "ts": self.microseconds(begin), "dur": end.saturating_sub(begin) as f64 / 1000.0,
        }))
    }

    fn microseconds(&self, time: u64) -> f64 {
        time.saturating_sub(self.start) as f64 / 1000.0
    }

    fn event(&mut self, event: Value) -> Result<()> {
        write!(self.w, "{}{event}", self.separator)?;
        self.separator = ",\n";
        Ok(())
    }
}

/// A CPU's number as a process, which must not be 0.
fn of_cpu(cpu: u32) -> u64 {
    u64::from(cpu) + 1
}

fn of_life(life: usize) -> Track {
    (OBJECTS + life as u64, OBJECTS + life as u64)
}

/// What an event of a call says: on an object's track its fields or their changes, on a CPU's track
/// the object.
fn details(
    trace: &Trace,
    layout: &Layout,
    calls: &Calls,
    (call, at, life): (usize, usize, Option<usize>),
) -> Map<String, Value> {
    let mut values = Map::new();
    let first = &trace.events[at];
    if let Kind::Return { value } = first.kind
        && let Some(value) = trace.functions[first.function].returns.text(value)
    {
        values.insert("value".to_owned(), value.into());
    }
    let others = trace.functions[first.function].others(first);
    values.extend(others.into_iter().map(|(other, value)| (other.name.clone(), value.into())));
    let Some(life) = life else {
        if first.kind == Kind::Entry {
            values.insert(trace.type_name.clone(), hex(first.address).into());
        }
        return values;
    };
    // The events of a call's further objects follow the first one's.
    let of_call = trace.events[at..].iter().zip(&calls.of_event[at..]);
    let of_call = of_call.take_while(|(event, _)| event.time == first.time);
    let own = of_call.filter(|(event, of)| event.life == life && **of == Some(call));
    for (event, _) in own.take(1) {
        if event.time == trace.lives[life].begin && event.kind == Kind::Entry {
            let fields = layout.fields(&event.bytes).into_iter();
            values.extend(fields.map(|(name, value)| (name, value.to_string().into())));
        }
        let change = |c: &Change| format!("{} → {}", c.before, c.after).into();
        values.extend(event.changes.iter().map(|c| (c.field.clone(), change(c))));
    }
    values
}

#[cfg(test)]
mod tests;
