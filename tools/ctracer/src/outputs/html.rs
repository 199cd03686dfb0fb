//! A page that shows the trace in any browser, as one file and without a network: the record as JSON,
//! and what `templates/` draws from it.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use anyhow::Result;
use serde::Serialize;
use serde_json::{Map, Serializer, Value, ser::Formatter};

use crate::{
    record::{Event, Kind, Ledger, Life, Pairs, Trace, named, plain},
    report::Report,
};

const PAGE: &str = include_str!("../../templates/page.html");
const SCRIPT: &str = concat!(
    "</script>\n<script>\n",
    include_str!("../../templates/data.js"),
    include_str!("../../templates/timeline.js"),
    include_str!("../../templates/page.js"),
    "</script>\n</body>\n</html>\n",
);

/// JSON that may stand in a page: `</script>` in a thread's name would end the script.
struct InPage;

impl Formatter for InPage {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        w: &mut W,
        text: &str,
    ) -> io::Result<()> {
        w.write_all(text.replace('<', "\\u003c").as_bytes())
    }
}

/// Writes the page.
pub fn write(mut w: &mut dyn Write, report: &Report) -> Result<()> {
    w.write_all(PAGE.as_bytes())?;
    let mut serializer = Serializer::with_formatter(&mut w, InPage);
    Data::new(report).serialize(&mut serializer)?;
    Ok(w.write_all(SCRIPT.as_bytes())?)
}

/// What the scripts read. Times are in ns from `start`, which is a text: it may be too large for a
/// number of JavaScript.
#[derive(Serialize)]
struct Data<'a> {
    #[serde(flatten)]
    trace: &'a Trace,
    start: String,
    lives: Vec<Life>,
    events: Rows<'a>,
    /// Begin, end, the time in itself, the number of its return.
    calls: Vec<(u64, u64, u64, Option<usize>)>,
    ledger: Option<Ledger>,
    /// What the ledger says, for people.
    parts: Vec<(Option<u64>, &'static str)>,
}

impl Data<'_> {
    fn new(report: &Report) -> Data<'_> {
        let start = report.start();
        let since = |time: u64| time.saturating_sub(start);
        let life = |life: &Life| Life {
            begin: since(life.begin),
            end: life.end.map(since),
            ..life.clone()
        };
        let calls = report.calls.iter();
        let parts = match report.ledger {
            None => vec![(None, "the record ends before its ledger")],
            Some(ledger) => {
                let hits = (ledger.hits, "hits of the probes, counted by the kernel");
                let lost = (ledger.objects_lost, Ledger::OBJECTS_LOST);
                let parts = [hits].into_iter().chain(ledger.lines()).chain([lost]);
                parts.map(|(count, what)| (Some(count), what)).collect()
            }
        };
        Data {
            trace: &report.trace,
            start: start.to_string(),
            lives: report.lives.iter().map(life).collect(),
            events: Rows(report),
            calls: calls
                .map(|call| (since(call.begin), since(call.end), call.own_time(), call.exit))
                .collect(),
            ledger: report.ledger,
            parts,
        }
    }
}

/// The events, each a list whose elements data.js names: the names would be most of a page.
struct Rows<'a>(&'a Report);

impl Serialize for Rows<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Rows(report) = self;
        let functions = report.trace.functions.iter().enumerate();
        let functions: HashMap<&str, usize> =
            functions.map(|(number, function)| (&*function.name, number)).collect();
        let number = |event: &Event| functions.get(&*event.function).copied();
        let events = report.events.iter().zip(&report.call_of);
        serializer.collect_seq(events.map(|(event, call)| {
            let time = event.time.saturating_sub(report.start());
            let thread = format!("{} {}", event.comm, event.tid);
            let (is_return, readable) = (event.kind == Kind::Return, !event.unreadable);
            let changes = event.changes.iter().flatten();
            let changes = changes.map(|of| (of.field.clone(), plain(&of.before), plain(&of.after)));
            (
                (time, event.cpu, thread, u8::from(is_return), number(event)),
                (event.argument, event.depth, event.life, u8::from(readable), *call),
                event.value.as_ref().map(named),
                texts(&event.arguments, named),
                texts(&event.fields, plain),
                changes.collect::<Vec<_>>(),
            )
        }))
    }
}

fn texts(pairs: &Option<Pairs>, text: fn(&Value) -> String) -> Vec<(&String, String)> {
    pairs.iter().flat_map(Map::iter).map(|(name, value)| (name, text(value))).collect()
}

#[cfg(test)]
mod tests;
