//! JSON lines: one object a line, for jq and for programs. The key `line` says what a line is.
//!
//! `trace` comes first: the struct, the kernel's release, the functions. Each `event` follows with
//! its time, task, function and object; the first event of a life has all `fields`, the others have
//! the `changes`. A call has its other `arguments`; a return has its `value`, and where that is an
//! error, its name as `errno`. At the end come a `life` for each object and the `ledger`. Times are in
//! ns.

use std::io::Write;

use anyhow::Result;
use serde_json::{Map, Value, json};

#[cfg(test)]
use crate::calls::Calls;
use crate::{
    decode::Layout,
    model::{Event, Kind, Ledger, Life, Parameter, Trace},
    value::hex,
};

/// Writes a whole trace, as the program does event by event.
#[cfg(test)]
pub fn write(w: &mut dyn Write, trace: &Trace, layout: &Layout) -> Result<()> {
    let calls = Calls::new(trace);
    writeln!(w, "{}", trace_line(trace))?;
    let mut is_known = vec![false; trace.lives.len()];
    for (event, call) in trace.events.iter().zip(&calls.of_event) {
        // An object whose bytes could not be read at first has its fields with the next event.
        let is_first = !is_known[event.life] && !event.bytes.is_empty();
        is_known[event.life] |= is_first;
        let begin = call.map(|call| calls.calls[call].begin);
        writeln!(w, "{}", event_line(trace, event, layout, is_first, begin))?;
    }
    end(w, trace)
}

/// Writes the lines that come last.
pub fn end(w: &mut dyn Write, trace: &Trace) -> Result<()> {
    for (index, life) in trace.lives.iter().enumerate() {
        writeln!(w, "{}", life_line(index, life))?;
    }
    writeln!(w, "{}", ledger_line(&trace.ledger))?;
    Ok(())
}

/// The line that comes first.
pub fn trace_line(trace: &Trace) -> Value {
    let functions: Vec<Value> = trace
        .functions
        .iter()
        .map(|function| {
            json!({
                "name": function.name,
                "module": function.module,
                "prototype": function.prototype,
            })
        })
        .collect();
    json!({
        "line": "trace",
        "type": trace.type_name,
        "release": trace.release,
        "functions": functions,
    })
}

/// An event's line: with all fields where it is the first of its life, else with the changes. A
/// return has its duration where it is known when the call began.
pub fn event_line(
    trace: &Trace,
    event: &Event,
    layout: &Layout,
    is_first: bool,
    begin: Option<u64>,
) -> Value {
    let function = &trace.functions[event.function];
    let mut line = json!({
        "line": "event",
        "time": event.time,
        "cpu": event.cpu,
        "tgid": event.tgid,
        "tid": event.tid,
        "comm": event.comm,
        "function": function.name,
        "argument": event.argument,
        "address": hex(event.address),
        "life": event.life,
        "depth": event.depth,
    });
    match event.kind {
        Kind::Entry => {
            line["kind"] = "entry".into();
            let value = |other: &Parameter| other.kind.value(event.registers[other.register]);
            let others = function.others.iter();
            let others =
                others.filter_map(|other| Some((other.name.clone(), value(other)?.json())));
            line["arguments"] = others.collect::<Map<_, _>>().into();
        }
        Kind::Return { value } => {
            line["kind"] = "return".into();
            if let Some(returned) = function.returns.value(value) {
                line["value"] = returned.json();
            }
            if let Some(error) = function.returns.error(value) {
                line["errno"] = error.into();
            }
            if let Some(begin) = begin {
                line["duration"] = (event.time - begin).into();
            }
        }
    }
    if is_first {
        let fields = layout.fields(&event.bytes).into_iter();
        line["fields"] =
            fields.map(|(name, value)| (name, value.json())).collect::<Map<_, _>>().into();
    } else if !event.readable {
        line["unreadable"] = true.into();
    } else {
        let change = |change: &crate::model::Change| {
            json!({
                "field": change.field,
                "before": change.before.json(),
                "after": change.after.json(),
            })
        };
        line["changes"] = event.changes.iter().map(change).collect();
    }
    line
}

fn life_line(index: usize, life: &Life) -> Value {
    json!({
        "line": "life",
        "life": index,
        "address": hex(life.address),
        "generation": life.generation,
        "parent": life.parent.map(|(parent, _)| parent),
        "link": life.parent.map(|(_, link)| link.name()),
        "begin": life.begin,
        "end": life.end,
        "duration": life.end.map(|end| end - life.begin),
    })
}

/// The line that comes last.
pub fn ledger_line(ledger: &Ledger) -> Value {
    json!({
        "line": "ledger",
        "hits": ledger.hits,
        "entries": ledger.entries,
        "returns": ledger.returns,
        "lost": ledger.lost,
        "recursion": ledger.recursion,
        "instances": ledger.instances,
        "filtered": ledger.filtered,
        "null": ledger.null,
        "unmatched": ledger.unmatched,
        "outside": ledger.outside,
        "objects_lost": ledger.objects_lost,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{calls::tests::sample, decode::tests::layout};

    #[test]
    fn a_trace_is_read_back_line_by_line() {
        let trace = sample();
        let mut written = Vec::new();
        write(&mut written, &trace, &layout("bio")).unwrap();
        let lines = serde_json::Deserializer::from_slice(&written).into_iter::<Value>();
        let lines: Vec<Value> = lines.map(Result::unwrap).collect();
        assert_eq!(lines.len(), 1 + trace.events.len() + trace.lives.len() + 1);
        assert_eq!(lines[0]["type"], "bio");
        assert_eq!(lines[0]["functions"][3]["name"], "bio_endio");
        let first = &lines[1];
        assert_eq!(first["kind"], "entry");
        assert_eq!(first["function"], "submit_bio");
        assert_eq!(first["address"], "0xffff888100001000");
        assert_eq!(first["fields"]["bi_iter.bi_sector"], 2048);
        assert_eq!(first["fields"]["bi_opf"], "REQ_OP_WRITE|REQ_SYNC|REQ_IDLE");
        assert_eq!(first.get("changes"), None);
        let changes = json!([{ "field": "bi_iter.bi_sector", "before": 2048, "after": 4096 }]);
        assert_eq!(lines[2]["changes"], changes);
        assert_eq!(lines[10]["kind"], "return");
        assert_eq!(lines[10]["duration"], 650);
        assert_eq!(lines[10].get("value"), None, "submit_bio() returns nothing");
        let clone = &lines[1 + trace.events.len() + 1];
        assert_eq!((&clone["parent"], &clone["link"]), (&json!(0), &json!("clone")));
        assert_eq!(clone["duration"], 500);
        let ledger = lines.last().unwrap();
        assert_eq!(
            (&ledger["line"], &ledger["hits"], &ledger["null"]),
            (&json!("ledger"), &json!(14), &json!(2))
        );
    }
}
