//! The call graph on the terminal.
//!
//! ```text
//!    time (s)      CPU thread                 duration   function
//!   137.330123456   0 dd-1234                          | submit_bio(struct bio *bio) #3 {
//! ```

use common::colours::{self, PARTS};
use serde_json::Value;

use crate::{
    gaps::Left,
    life::{Life, Link},
    record::{Event, Kind, Trace},
    value::{Change, named, plain},
};

/// Turns events into lines. A call without calls of its own becomes one line.
#[derive(Default)]
pub struct Text {
    pending: Option<Pending>,
    /// How many lives have been introduced.
    lives: usize,
    has_colours: bool,
}

/// A call whose next event tells whether it has calls of its own.
struct Pending {
    call: usize,
    start: String,
    text: String,
    notes: String,
}

/// The heading of the columns.
pub const HEADING: &str = "   time (s)      CPU thread                 duration   function";

impl Text {
    /// For a terminal with colours, or not.
    pub fn new(has_colours: bool) -> Text {
        Text { has_colours, ..Text::default() }
    }

    /// The lines that can be printed now. `lives`: all that have begun; `left`: the part of an I/O's time
    /// that the event's object leaves.
    pub fn event(
        &mut self,
        trace: &Trace,
        lives: &[Life],
        event: &Event,
        left: Option<Left>,
    ) -> String {
        let (is_entry, indent) = (event.kind == Kind::Entry, "  ".repeat(event.depth as usize));
        let left = left.map(|left| self.left(trace, event, left));
        let notes: String = self
            .notes(trace, lives, event)
            .iter()
            .chain(&left)
            .map(|note| format!("{:53}| {indent}    {note}\n", ""))
            .collect();
        let value =
            event.value.as_ref().map_or(String::new(), |value| format!(" = {}", named(value)));
        if let Some(mut pending) = self.pending.take_if(|pending| pending.call == event.call) {
            pending.notes += &notes;
            if is_entry {
                self.pending = Some(pending);
                return String::new();
            }
            let call = pending.text + &value + ";";
            return line(&pending.start, event.duration, &call) + &pending.notes;
        }
        let (before, function) = (self.rest(), &trace.functions[event.number]);
        if is_entry {
            let (_, parameters) = function.prototype.split_once('(').unwrap_or_default();
            let text = format!("{indent}{}({parameters} #{}", function.name, event.life);
            self.pending = Some(Pending { call: event.call, start: start(event), text, notes });
            return before;
        }
        // The return of a call's second object says nothing new.
        let end = format!("{indent}}} /* {}{value} */", function.name);
        let end = is_first(trace, event).then(|| line(&start(event), event.duration, &end));
        before + &end.unwrap_or_default() + &notes
    }

    /// The call that still waits for its next event.
    pub fn rest(&mut self) -> String {
        let open =
            |pending: Pending| line(&pending.start, None, &(pending.text + " {")) + &pending.notes;
        self.pending.take().map_or(String::new(), open)
    }

    /// What an event says about its object: that it is new, and which fields have changed.
    fn notes(&mut self, trace: &Trace, lives: &[Life], event: &Event) -> Vec<String> {
        let new = &lives[self.lives.min(lives.len())..];
        let mut notes: Vec<String> = new.iter().map(|life| introduction(trace, life)).collect();
        self.lives = self.lives.max(lives.len());
        let others = event.arguments.iter().flatten().filter(|_| is_first(trace, event));
        let others: Vec<_> =
            others.map(|(name, value)| format!("{name} = {}", named(value))).collect();
        if !others.is_empty() {
            notes.push(format!("with {}", others.join(", ")));
        }
        let which = which(trace, event);
        notes.extend(event.changes.iter().flatten().map(|change| {
            let [before, after] = [&change.before, &change.after].map(|value| field(change, value));
            format!("{which}{}: {before} -> {after}", change.field)
        }));
        notes
    }

    /// What the object has behind it: `device: 848.070 us since submit_bio()`.
    fn left(&self, trace: &Trace, event: &Event, left: Left) -> String {
        let part = &PARTS[left.part];
        let name = match self.has_colours {
            true => colours::painted(part, part.name),
            false => part.name.to_owned(),
        };
        let since = &trace.functions[left.since].name;
        format!("{}{name}: {} since {since}()", which(trace, event), microseconds(left.time))
    }
}

/// Which object a note is about, where a call has several.
fn which(trace: &Trace, event: &Event) -> String {
    match trace.functions[event.number].probe.arguments.len() {
        0 | 1 => String::new(),
        _ => format!("#{} ", event.life),
    }
}

/// A field's value: a bio's status with the error that it stands for, `10 (EIO)`.
fn field(change: &Change, value: &Value) -> String {
    let is_status = change.field.rsplit('.').next() == Some("bi_status");
    let number = value.as_u64().filter(|_| is_status).and_then(|number| number.try_into().ok());
    match number.and_then(common::block_status) {
        Some(error) => format!("{} ({error})", plain(value)),
        None => plain(value),
    }
}

/// Whether an event is of its call's first object.
fn is_first(trace: &Trace, event: &Event) -> bool {
    let arguments = &trace.functions[event.number].probe.arguments;
    arguments.first().is_none_or(|&at| at == event.argument)
}

fn introduction(trace: &Trace, life: &Life) -> String {
    let Life { life: number, address, generation, .. } = life;
    let again = match generation {
        0 => String::new(),
        times => format!(", where {times} others were before"),
    };
    let from = life.origin().map_or(String::new(), |(parent, link)| {
        let how = match link {
            Link::Clone => "a clone of",
            Link::Split => "split from",
            Link::Chain => "chained to",
        };
        format!(", {how} #{parent}")
    });
    format!("#{number} is the {} at {address}{again}{from}", trace.type_name)
}

/// What stands before the duration.
fn start(event: &Event) -> String {
    let thread = match event.tid {
        0 => "idle".to_owned(),
        tid => format!("{}-{tid}", event.comm),
    };
    let (seconds, ns) = (event.time / 1_000_000_000, event.time % 1_000_000_000);
    format!("{seconds:>6}.{ns:09} {:>3} {thread:<16}", event.cpu)
}

fn microseconds(ns: u64) -> String {
    format!("{}.{:03} us", ns / 1000, ns % 1000)
}

fn line(start: &str, duration: Option<u64>, text: &str) -> String {
    let duration = duration.map_or(String::new(), microseconds);
    format!("{start} {duration:>14} | {text}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        record::{Function, Probe},
        value::Change,
    };

    fn trace() -> Trace {
        let function = |name: &str| Function {
            name: name.to_owned(),
            prototype: format!("int {name}(struct bio *bio)"),
            probe: Probe { arguments: vec![0], ..Probe::default() },
            ..Function::default()
        };
        Trace {
            type_name: "bio".to_owned(),
            functions: ["submit_bio", "bio_put"].map(function).to_vec(),
            ..Trace::default()
        }
    }

    fn event(time: u64, depth: u32, duration: Option<u64>) -> Event {
        let mut event = crate::report::tests::sample().events[0].clone();
        event.kind = if duration.is_some() { Kind::Return } else { Kind::Entry };
        (event.number, event.call) = (depth as usize, depth as usize);
        (event.time, event.depth, event.duration) = (time, depth, duration);
        event
    }

    #[test]
    fn a_leaf_is_one_line() {
        let (trace, mut text) = (trace(), Text::default());
        let lives = [Life { address: "0xff00".to_owned(), ..Life::default() }];
        let mut call = event(2_000_001_000, 1, None);
        let change = Change { field: "f".to_owned(), before: 1.into(), after: 2.into() };
        call.changes = Some(vec![change]);
        let mut end = event(2_000_002_500, 1, Some(1_500));
        end.value = Some((-22).into());
        let events =
            [event(2_000_000_000, 0, None), call, end, event(2_000_009_000, 0, Some(9_000))];
        let print = |event: &Event| text.event(&trace, &lives, event, None);
        let lines: String = events.iter().map(print).collect();
        let graph: Vec<&str> = lines.lines().map(|line| line.split_once("| ").unwrap().1).collect();
        assert_eq!(
            graph,
            [
                "submit_bio(struct bio *bio) #0 {",
                "    #0 is the bio at 0xff00",
                "  bio_put(struct bio *bio) #0 = -EINVAL;",
                "      f: 1 -> 2",
                "} /* submit_bio */",
            ]
        );
        assert!(lines.contains("1.500 us | "), "{lines}");
        assert!(lines.lines().all(|line| line.find('|') == Some(53)), "{lines}");
        assert_eq!(text.rest(), "");
    }
    #[test]
    fn a_part_that_an_object_leaves_has_its_colour() {
        let (trace, lives) = (trace(), [Life::default()]);
        let left = Some(Left { part: 2, time: 1_500_250, since: 0 });
        for (has_colours, name) in
            [(false, "device"), (true, "\x1b[48;5;75m\x1b[38;5;16mdevice\x1b[0m")]
        {
            let mut text = Text::new(has_colours);
            let lines = text.event(&trace, &lives, &event(0, 0, Some(1)), left);
            let expected = format!("{:53}|     {name}: 1500.250 us since submit_bio()\n", "");
            assert!(lines.ends_with(&expected), "{lines:?}");
        }
    }
}
