//! A page that shows the trace in any browser, as one file and without a network.
//!
//! The trace is in the page as JSON, in columns: the first number of every column belongs to the
//! first event, and so on. Texts that come often are listed once and named by their position. The
//! scripts in `templates/` draw from it.

use std::{collections::HashMap, io::Write};

use anyhow::Result;
use askama::Template;
use serde_json::{Map, Value, json};

use super::json::ledger_line;
use crate::{
    calls::Calls,
    decode::Layout,
    model::{Event, Function, Kind, Trace},
    value::hex,
};

#[derive(Template)]
#[template(path = "page.html")]
struct Page<'a> {
    title: String,
    style: &'a str,
    script: &'a str,
    data: String,
}

/// Writes the page.
pub fn write(w: &mut dyn Write, trace: &Trace, layout: &Layout) -> Result<()> {
    let page = Page {
        title: format!("struct {} on Linux {}", trace.type_name, trace.release),
        style: include_str!("../../templates/page.css"),
        script: concat!(
            include_str!("../../templates/data.js"),
            include_str!("../../templates/timeline.js"),
            include_str!("../../templates/page.js"),
        ),
        // `</script>` in a thread's name would end the script.
        data: data(trace, layout).to_string().replace('<', "\\u003c"),
    };
    Ok(page.write_into(w)?)
}

/// The trace as the script wants it. Times are in ns from the first event; `start` is the time of
/// that event as a text, because it may be too large for a number of JavaScript.
fn data(trace: &Trace, layout: &Layout) -> Value {
    let calls = Calls::new(trace);
    let start = trace.events.first().map_or(0, |event| event.time);
    let since = |time: u64| time.saturating_sub(start);
    let (mut strings, mut names, mut threads) =
        (Texts::default(), Texts::default(), Texts::default());
    // By the event's position, as text: its fields, its changes and its other arguments, each as pairs
    // of a name's and a value's position; its return value.
    let (mut fields, mut changes) = (Map::new(), Map::new());
    let (mut arguments, mut values) = (Map::new(), Map::new());
    let mut thread_of = Vec::with_capacity(trace.events.len());
    let mut is_known = vec![false; trace.lives.len()];
    for (index, event) in trace.events.iter().enumerate() {
        thread_of.push(threads.position(&format!("{} {}", event.comm, event.tid)));
        if !is_known[event.life] && !event.bytes.is_empty() {
            is_known[event.life] = true;
            let found = layout.fields(&event.bytes);
            let pairs = found
                .iter()
                .flat_map(|(n, v)| [names.position(n), strings.position(&v.to_string())]);
            fields.insert(index.to_string(), pairs.collect());
        } else if !event.changes.is_empty() {
            let found = event.changes.iter();
            let pairs = found
                .flat_map(|c| [names.position(&c.field), strings.position(&c.after.to_string())]);
            changes.insert(index.to_string(), pairs.collect());
        }
        let function = &trace.functions[event.function];
        if let Kind::Return { value } = event.kind
            && let Some(value) = function.returns.text(value)
        {
            values.insert(index.to_string(), value.into());
        }
        let others = function.others(event);
        if !others.is_empty() {
            let pairs =
                others.iter().flat_map(|(o, v)| [names.position(&o.name), strings.position(v)]);
            arguments.insert(index.to_string(), pairs.collect());
        }
    }
    let column = |of: &dyn Fn(&Event) -> u64| -> Value { trace.events.iter().map(of).collect() };
    let function = |found: &Function| json!([found.name, found.prototype, found.parameters]);
    json!({
        "type": trace.type_name,
        "start": start.to_string(),
        "functions": trace.functions.iter().map(function).collect::<Vec<_>>(),
        "threads": threads.list,
        "names": names.list,
        "strings": strings.list,
        "lives": {
            "address": trace.lives.iter().map(|life| hex(life.address)).collect::<Vec<_>>(),
            "generation": trace.lives.iter().map(|life| life.generation).collect::<Vec<_>>(),
            "parent": trace.lives.iter().map(|l| l.parent.map(|(parent, _)| parent)).collect::<Vec<_>>(),
            "link": trace.lives.iter().map(|l| l.parent.map(|(_, link)| link.name())).collect::<Vec<_>>(),
            "begin": trace.lives.iter().map(|life| since(life.begin)).collect::<Vec<_>>(),
            "end": trace.lives.iter().map(|life| life.end.map(since)).collect::<Vec<_>>(),
        },
        "events": {
            "time": column(&|event| since(event.time)),
            "cpu": column(&|event| event.cpu.into()),
            "thread": thread_of,
            "isReturn": column(&|event| (event.kind != Kind::Entry).into()),
            "function": column(&|event| event.function as u64),
            "argument": column(&|event| event.argument.into()),
            "depth": column(&|event| event.depth.into()),
            "life": column(&|event| event.life as u64),
            "readable": column(&|event| event.readable.into()),
            "call": calls.of_event,
        },
        "fields": fields,
        "changes": changes,
        "arguments": arguments,
        "values": values,
        "calls": {
            "begin": calls.calls.iter().map(|call| since(call.begin)).collect::<Vec<_>>(),
            "end": calls.calls.iter().map(|call| since(call.end)).collect::<Vec<_>>(),
            "own": calls.calls.iter().map(|call| calls.own_time(call)).collect::<Vec<_>>(),
            "returned": calls.calls.iter().map(|call| u8::from(call.exit.is_some())).collect::<Vec<_>>(),
        },
        "ledger": ledger_line(&trace.ledger),
    })
}

/// Texts, each once, and where they stand.
#[derive(Default)]
struct Texts {
    list: Vec<String>,
    positions: HashMap<String, usize>,
}

impl Texts {
    fn position(&mut self, text: &str) -> usize {
        if let Some(&position) = self.positions.get(text) {
            return position;
        }
        self.positions.insert(text.to_owned(), self.list.len());
        self.list.push(text.to_owned());
        self.list.len() - 1
    }
}

#[cfg(test)]
mod tests;
