//! A page that shows the trace in any browser, as one file and without a network: the record as JSON,
//! and what `templates/` draws from it.

use std::io::{self, Write};

use anyhow::Result;
use common::colours::PARTS;
use serde::{Serialize, Serializer as _, ser::SerializeMap};
use serde_json::{Map, Serializer, Value, ser::Formatter};

use crate::{
    gaps,
    life::Life,
    record::{Kind, Ledger},
    report::TraceReport,
    value::{Pairs, named, plain},
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

/// Writes the page. In its data, times are in ns from `start`, which is a text: it may be too large for a
/// number of JavaScript.
pub fn write(mut w: &mut dyn Write, report: &TraceReport) -> Result<()> {
    let (trace, start) = (&report.trace, report.start());
    let since = |time: u64| time.saturating_sub(start);
    let lives = report.lives.iter().map(|life| {
        let (begin, end) = (since(life.begin), life.end.map(since));
        Life { begin, end, ..life.clone() }
    });
    // Begin, end, the time in itself, the numbers of its first event and of its return.
    let calls = report
        .calls
        .iter()
        .map(|call| (since(call.begin), since(call.end), call.own_time(), call.entry, call.exit));
    // What the ledger says, for people.
    let parts = match report.ledger {
        None => vec![(None, "the record ends before its ledger")],
        Some(ledger) => {
            let hits = (ledger.hits, "hits of the probes, counted by the kernel");
            let lost = (ledger.objects_lost, Ledger::OBJECTS_LOST);
            let parts = [hits].into_iter().chain(ledger.lines()).chain([lost]);
            parts.map(|(count, what)| (Some(count), what)).collect()
        }
    };
    let (gaps, still) = gaps::of(trace, &report.events);
    w.write_all(PAGE.as_bytes())?;
    let mut serializer = Serializer::with_formatter(&mut w, InPage);
    let mut data = serializer.serialize_map(None)?;
    data.serialize_entry("type", &trace.type_name)?;
    data.serialize_entry("release", &trace.release)?;
    data.serialize_entry("functions", &trace.functions)?;
    let colours = PARTS.map(|part| (part.name, part.letter, part.rgb));
    data.serialize_entry("colours", &colours)?;
    data.serialize_entry("start", &start.to_string())?;
    data.serialize_entry("lives", &lives.collect::<Vec<_>>())?;
    data.serialize_entry("events", &Rows(report, gaps))?;
    data.serialize_entry("still", &still)?;
    data.serialize_entry("calls", &calls.collect::<Vec<_>>())?;
    data.serialize_entry("ledger", &report.ledger)?;
    data.serialize_entry("parts", &parts)?;
    data.end()?;
    Ok(w.write_all(SCRIPT.as_bytes())?)
}

/// The events, with their gaps, each a list whose elements data.js names: the names would be most of a page.
struct Rows<'a>(&'a TraceReport, Vec<Option<usize>>);

impl Serialize for Rows<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Rows(report, gaps) = self;
        let events = report.events.iter().zip(&report.call_of);
        serializer.collect_seq(events.zip(gaps).map(|((event, call), gap)| {
            let time = event.time.saturating_sub(report.start());
            let thread = format!("{} {}", event.comm, event.tid);
            let (is_return, readable) = (event.kind == Kind::Return, !event.unreadable);
            let changes = event.changes.iter().flatten();
            let changes = changes.map(|of| (of.field.clone(), plain(&of.before), plain(&of.after)));
            (
                (time, event.cpu, thread, u8::from(is_return), event.number),
                (event.argument, event.depth, event.life, u8::from(readable), *call, gap),
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
