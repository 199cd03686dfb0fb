//! The call graph on the terminal.
//!
//! ```text
//!    time (s)      CPU thread                 duration   function
//!   137.330123456   0 dd-1234                          | submit_bio(struct bio *bio) #3 {
//! ```

use crate::model::{Event, Function, Kind, Life, Link, Trace};

/// Turns events into lines. A call without calls of its own becomes one line.
#[derive(Default)]
pub struct Text {
    pending: Option<Pending>,
    lives: usize,
}

/// A call whose next event tells whether it has calls of its own.
struct Pending {
    call: Event,
    notes: String,
}

/// The heading of the columns.
pub const HEADING: &str = "   time (s)      CPU thread                 duration   function";

impl Text {
    /// The lines that can be printed now. `began`: when the call began whose return this is.
    pub fn event(&mut self, trace: &Trace, event: &Event, began: Option<u64>) -> String {
        let function = &trace.functions[event.function];
        let notes = self.notes(trace, event, function);
        match (event.kind, self.pending.take()) {
            (_, Some(mut pending)) if is_other_object(&pending.call, event) => {
                pending.notes += &notes;
                self.pending = Some(pending);
                String::new()
            }
            (Kind::Entry, pending) => {
                let before = pending.map(|pending| open(trace, pending));
                self.pending = Some(Pending { call: event.clone(), notes });
                before.unwrap_or_default()
            }
            (Kind::Return { value }, Some(pending)) if is_return(&pending.call, event) => {
                let duration = event.time - pending.call.time;
                let result = result(function, value);
                let line = line(
                    &pending.call,
                    Some(duration),
                    &(call(trace, &pending.call) + &result + ";"),
                );
                line + &pending.notes + &notes
            }
            // The return of a call's second object says nothing new.
            (Kind::Return { .. }, pending)
                if function.arguments.first() != Some(&event.argument) =>
            {
                let before = pending.map(|pending| open(trace, pending));
                before.unwrap_or_default() + &notes
            }
            (Kind::Return { value }, pending) => {
                let before = pending.map(|pending| open(trace, pending));
                let duration = began.map(|began| event.time - began);
                let end = format!("}} /* {}{} */", function.name, result(function, value));
                before.unwrap_or_default() + &line(event, duration, &end) + &notes
            }
        }
    }

    /// The call that still waits for its next event.
    pub fn rest(&mut self, trace: &Trace) -> String {
        self.pending.take().map_or(String::new(), |pending| open(trace, pending))
    }

    /// What an event says about its object: that it is new, and which fields have changed.
    fn notes(&mut self, trace: &Trace, event: &Event, function: &Function) -> String {
        let mut notes = String::new();
        let mut note = |text: &str| notes += &line_at(event, &format!("    {text}"));
        while self.lives < trace.lives.len() {
            note(&introduction(trace, self.lives));
            self.lives += 1;
        }
        let others = match function.arguments.first() == Some(&event.argument) {
            true => function.others(event),
            false => Vec::new(),
        };
        if !others.is_empty() {
            let others: Vec<String> =
                others.iter().map(|(other, value)| format!("{} = {value}", other.name)).collect();
            note(&format!("with {}", others.join(", ")));
        }
        let which = match function.arguments.len() {
            0 | 1 => String::new(),
            _ => format!("#{} ", event.life),
        };
        for change in &event.changes {
            note(&format!("{which}{}: {} -> {}", change.field, change.before, change.after));
        }
        notes
    }
}

fn introduction(trace: &Trace, number: usize) -> String {
    let Life { address, generation, parent, .. } = &trace.lives[number];
    let again = match generation {
        0 => String::new(),
        times => format!(", where {times} others were before"),
    };
    let from = parent.map_or(String::new(), |(parent, link)| {
        let how = match link {
            Link::Clone => "a clone of",
            Link::Split => "split from",
            Link::Chain => "chained to",
        };
        format!(", {how} #{parent}")
    });
    format!("#{number} is the {} at {address:#x}{again}{from}", trace.type_name)
}

fn same_call(a: &Event, b: &Event) -> bool {
    (a.tid, a.function, a.depth) == (b.tid, b.function, b.depth) && (a.tid != 0 || a.cpu == b.cpu)
}

fn is_other_object(call: &Event, event: &Event) -> bool {
    event.kind == Kind::Entry && same_call(call, event) && call.time == event.time
}

fn is_return(call: &Event, event: &Event) -> bool {
    same_call(call, event) && matches!(event.kind, Kind::Return { .. })
}

fn open(trace: &Trace, pending: Pending) -> String {
    line(&pending.call, None, &(call(trace, &pending.call) + " {")) + &pending.notes
}

/// `submit_bio(struct bio *bio) #3`
fn call(trace: &Trace, event: &Event) -> String {
    let function = &trace.functions[event.function];
    let (_, parameters) = function.prototype.split_once('(').unwrap_or_default();
    format!("{}({parameters} #{}", function.name, event.life)
}

fn result(function: &Function, value: u64) -> String {
    function.returns.text(value).map_or(String::new(), |value| format!(" = {value}"))
}

fn line(event: &Event, duration: Option<u64>, text: &str) -> String {
    let thread = match event.tid {
        0 => "idle".to_owned(),
        tid => format!("{}-{tid}", event.comm),
    };
    let duration =
        duration.map_or(String::new(), |ns| format!("{}.{:03} us", ns / 1000, ns % 1000));
    let (seconds, ns) = (event.time / 1_000_000_000, event.time % 1_000_000_000);
    let indent = "  ".repeat(event.depth as usize);
    format!("{seconds:>6}.{ns:09} {:>3} {thread:<16} {duration:>14} | {indent}{text}\n", event.cpu)
}

/// A line that belongs to the one above.
fn line_at(event: &Event, text: &str) -> String {
    format!("{:53}| {}{text}\n", "", "  ".repeat(event.depth as usize))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        model::Change,
        value::{Scalar, Value},
    };

    fn trace() -> Trace {
        let function = |name: &str, returns: Scalar| Function {
            name: name.to_owned(),
            prototype: format!("int {name}(struct bio *bio)"),
            arguments: vec![0],
            returns,
            ..Function::default()
        };
        Trace {
            type_name: "bio".to_owned(),
            functions: vec![
                function("submit_bio", Scalar::Nothing),
                function("bio_put", Scalar::Signed(32)),
            ],
            lives: vec![Life { address: 0xff00, ..Life::default() }],
            ..Trace::default()
        }
    }

    fn event(time: u64, function: usize, kind: Kind, depth: u32) -> Event {
        Event {
            time,
            cpu: 1,
            tgid: 7,
            tid: 7,
            comm: "dd".to_owned(),
            function,
            kind,
            argument: 0,
            address: 0xff00,
            registers: [0; 6],
            life: 0,
            depth,
            readable: false,
            bytes: Box::default(),
            changes: Vec::new(),
        }
    }

    #[test]
    fn a_leaf_is_one_line() {
        let (trace, mut text) = (trace(), Text::default());
        let mut inner = event(2_000_001_000, 1, Kind::Entry, 1);
        let field = Change { field: "f".into(), before: Value::Number(1), after: Value::Number(2) };
        inner.changes = vec![field];
        let lines: String = [
            (event(2_000_000_000, 0, Kind::Entry, 0), None),
            (inner, None),
            (event(2_000_002_500, 1, Kind::Return { value: 0xffff_ffea }, 1), Some(2_000_001_000)),
            (event(2_000_009_000, 0, Kind::Return { value: 0 }, 0), Some(2_000_000_000)),
        ]
        .iter()
        .map(|(event, began)| text.event(&trace, event, *began))
        .collect();
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
        assert_eq!(text.rest(&trace), "");
    }
}
