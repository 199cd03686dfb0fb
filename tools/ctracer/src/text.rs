//! The call graph on the terminal.
//!
//! ```text
//!    time (s)      CPU thread                 duration   function
//!   137.330123456   0 dd-1234                          | submit_bio(struct bio *bio) #3 {
//! ```

use crate::record::{CallKey, Event, Function, Kind, Life, Link, Trace, named, plain};

/// Turns events into lines. A call without calls of its own becomes one line.
#[derive(Default)]
pub struct Text {
    pending: Option<Pending>,
    lives: usize,
}

/// A call whose next event tells whether it has calls of its own.
struct Pending {
    key: CallKey<String>,
    start: String,
    call: String,
    notes: String,
}

/// The heading of the columns.
pub const HEADING: &str = "   time (s)      CPU thread                 duration   function";

impl Text {
    /// The lines that can be printed now. `lives`: all that have begun.
    pub fn event(&mut self, trace: &Trace, number: usize, lives: &[Life], event: &Event) -> String {
        let function = &trace.functions[number];
        let is_first = function.probe.arguments.first().is_none_or(|&at| at == event.argument);
        let notes = self.notes(trace, function, lives, event, is_first);
        let indent = "  ".repeat(event.depth as usize);
        let key = event.call();
        if let Some(mut pending) = self.pending.take_if(|pending| is_same(&pending.key, key)) {
            if event.kind == Kind::Entry {
                pending.notes += &notes;
                self.pending = Some(pending);
                return String::new();
            }
            let call = pending.call + &result(event) + ";";
            return line(&pending.start, event.duration, &call) + &pending.notes + &notes;
        }
        let before = self.rest();
        if event.kind == Kind::Entry {
            let (task, depth, begin, name) = key;
            let (_, parameters) = function.prototype.split_once('(').unwrap_or_default();
            let call = format!("{indent}{name}({parameters} #{}", event.life);
            let key = (task, depth, begin, name.to_owned());
            self.pending = Some(Pending { key, start: start(event), call, notes });
            return before;
        }
        // The return of a call's second object says nothing new.
        if !is_first {
            return before + &notes;
        }
        let end = format!("{indent}}} /* {}{} */", function.name, result(event));
        before + &line(&start(event), event.duration, &end) + &notes
    }

    /// The call that still waits for its next event.
    pub fn rest(&mut self) -> String {
        let open =
            |pending: Pending| line(&pending.start, None, &(pending.call + " {")) + &pending.notes;
        self.pending.take().map_or(String::new(), open)
    }

    /// What an event says about its object: that it is new, and which fields have changed.
    fn notes(
        &mut self,
        trace: &Trace,
        function: &Function,
        lives: &[Life],
        event: &Event,
        is_first: bool,
    ) -> String {
        let mut notes = String::new();
        let indent = "  ".repeat(event.depth as usize);
        let mut note = |text: &str| notes += &format!("{:53}| {indent}    {text}\n", "");
        while self.lives < lives.len() {
            note(&introduction(trace, &lives[self.lives]));
            self.lives += 1;
        }
        let others = event.arguments.iter().flatten();
        let others = others.map(|(name, value)| format!("{name} = {}", named(value)));
        let others: Vec<String> = others.filter(|_| is_first).collect();
        if !others.is_empty() {
            note(&format!("with {}", others.join(", ")));
        }
        let which = match function.probe.arguments.len() {
            0 | 1 => String::new(),
            _ => format!("#{} ", event.life),
        };
        for change in event.changes.iter().flatten() {
            let (before, after) = (plain(&change.before), plain(&change.after));
            note(&format!("{which}{}: {before} -> {after}", change.field));
        }
        notes
    }
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

fn is_same((task, depth, begin, name): &CallKey<String>, other: CallKey<&str>) -> bool {
    (*task, *depth, *begin, name.as_str()) == other
}

fn result(event: &Event) -> String {
    event.value.as_ref().map_or(String::new(), |value| format!(" = {}", named(value)))
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

fn line(start: &str, duration: Option<u64>, text: &str) -> String {
    let duration =
        duration.map_or(String::new(), |ns| format!("{}.{:03} us", ns / 1000, ns % 1000));
    format!("{start} {duration:>14} | {text}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Change, Probe};

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
        event.function = trace().functions[depth as usize].name.clone();
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
        let print = |event: &Event| text.event(&trace, event.depth as usize, &lives, event);
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
}
