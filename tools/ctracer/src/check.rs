//! What a line of a recording must agree with: the lines before it, and what a kernel can have.
//!
//! `report.rs` takes each line for granted, as it does while a trace runs. Here, nothing is.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    life::Life,
    record::{End, Event, Kind, Ledger, Line, OBJECTS, Task, Trace},
    report::TraceReport,
};

/// A thread lies in fewer calls. A kernel's stack of 16 KiB has room for 2048 return addresses; calls
/// whose returns were lost come on top.
const DEEPEST: u32 = 1 << 16;
/// Linux has no thread with this number or a higher one.
const THREADS: u32 = 1 << 22;
/// Nor a CPU with this one.
const CPUS: u32 = 1 << 16;
/// Names of symbols have fewer bytes.
const SYMBOL: usize = 512;

/// The parts of a recording, in their order. Each one is the kind of its lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
enum Part {
    #[default]
    Nothing,
    Trace,
    Events,
    Lives,
    Ledger,
    End,
}

/// What is known of the lines so far, beyond what the report knows.
#[derive(Default)]
pub struct Checker {
    /// Of the last line.
    part: Part,
    /// The call that began last, and when. They are numbered in the order in which they began: the next
    /// one has the next number or, where `--errors` has left others out, a higher one.
    last_call: Option<(usize, u64)>,
    /// Each call, each of its arguments that is an object, and whether that was its return.
    seen: HashSet<(usize, u8, bool)>,
    /// Calls whose return was seen, and nothing before.
    only_returned: HashSet<usize>,
    /// When each thread had its last event.
    last: HashMap<Task, u64>,
}

impl Checker {
    /// Fails where the next line of a recording is wrong. `report`: made of the lines before.
    pub fn check(&mut self, report: &TraceReport, line: &Line) -> Result<()> {
        self.order(line)?;
        match line {
            Line::Trace(trace) => header(trace),
            Line::Event(event) => self.event(report, event),
            Line::Life(life) => check_life(report, life),
            Line::Ledger(ledger) => self.ledger(report, ledger),
            Line::End(end) => counts(report, end),
        }
    }

    /// The memory of this, in bytes.
    pub fn memory(&self) -> usize {
        const SEEN: usize = 2 * size_of::<(usize, u8, bool)>();
        const LAST: usize = 2 * size_of::<(Task, u64)>();
        (self.seen.len() + self.only_returned.len()) * SEEN + self.last.len() * LAST
    }

    /// The parts follow each other; of the first one and the last two, there is one line.
    fn order(&mut self, line: &Line) -> Result<()> {
        let (part, what) = match line {
            Line::Trace(_) => (Part::Trace, "another trace"),
            Line::Event(_) => (Part::Events, "an event"),
            Line::Life(_) => (Part::Lives, "an object"),
            Line::Ledger(_) => (Part::Ledger, "another ledger"),
            Line::End(_) => (Part::End, "another end"),
        };
        let before = match self.part {
            Part::Nothing => "nothing",
            Part::Trace => "the first line",
            Part::Events => "the events",
            Part::Lives => "the objects",
            Part::Ledger => "the ledger",
            Part::End => "the end",
        };
        let is_begun = self.part > Part::Nothing || part == Part::Trace;
        ensure!(is_begun, "the first line of a trace is missing");
        let may_repeat = [Part::Events, Part::Lives].contains(&part);
        ensure!(
            part > self.part || (may_repeat && part == self.part),
            "{what} comes after {before}: the order is trace, events, objects, ledger, end"
        );
        let is_complete = part != Part::End || self.part == Part::Ledger;
        ensure!(is_complete, "the trace ends here, and its ledger is missing");
        self.part = part;
        Ok(())
    }

    fn event(&mut self, report: &TraceReport, event: &Event) -> Result<()> {
        report.function(event)?;
        limits(event)?;
        let (is_return, number) = (event.kind == Kind::Return, event.call);
        let address = report.lives.get(event.life).map_or("", |life| life.address.as_str());
        ensure!(
            address.is_empty() || address == event.address,
            "object {} is at {}, and was at {address} before",
            event.life,
            event.address
        );
        let is_new = self.seen.insert((number, event.argument, is_return));
        let what = if is_return { "return" } else { "begin" };
        ensure!(
            is_new,
            "call {number} would {what} twice with its argument {}: the line is doubled",
            event.argument
        );
        match (report.numbered(number), is_return) {
            (Some(call), true) => returns(report, call, event)?,
            (Some(call), false) => further(report, call, event)?,
            (None, true) => {
                self.only_returned.insert(number);
            }
            (None, false) => self.begins(event)?,
        }
        let last = self.last.entry(event.task()).or_default();
        ensure!(
            event.time >= *last,
            "its time is {} ns, and the thread has had an event at {last} ns before",
            event.time
        );
        *last = event.time;
        Ok(())
    }

    fn begins(&mut self, event: &Event) -> Result<()> {
        let Event { call, depth, .. } = event;
        ensure!(
            !self.only_returned.contains(call),
            "call {call} begins here, and has returned before"
        );
        if let Some((last, time)) = self.last_call {
            ensure!(
                *call > last || event.time == time, // of two at once, either may come first
                "call {call} begins after call {last}: they are numbered in the order in which they begin"
            );
        }
        ensure!(
            *depth as usize <= *call,
            "call {call} lies in {depth} calls, which are more than began"
        );
        self.last_call = self.last_call.max(Some((*call, event.time)));
        Ok(())
    }

    /// Each object that was named has its line, and no more is here than was recorded.
    fn ledger(&self, report: &TraceReport, ledger: &Ledger) -> Result<()> {
        lives(report)?;
        let (here, recorded) =
            (self.recorded(report), ledger.entries.saturating_add(ledger.returns));
        ensure!(
            here <= recorded,
            "the ledger counts {recorded} calls and returns, and {here} are here"
        );
        Ok(())
    }

    /// How many calls and returns have a line, whatever the number of their objects.
    fn recorded(&self, report: &TraceReport) -> u64 {
        let returned = report.calls.iter().filter(|call| call.exit.is_some()).count();
        (report.calls.len() + returned + self.only_returned.len()) as u64
    }

    /// What is missing at the end of the file. Without its last line, nothing is where each call and
    /// return that the ledger counts has a line.
    pub fn missing(&self, report: &TraceReport) -> Option<String> {
        if self.part == Part::End {
            return None;
        }
        let Some(ledger) = report.ledger else { return Some("the ledger is missing".to_owned()) };
        let (here, recorded) =
            (self.recorded(report), ledger.entries.saturating_add(ledger.returns));
        (here != recorded).then(|| {
            format!(
                "the ledger counts {recorded} calls and returns, and {here} are here; the others are \
                 missing, or were never written (--max-events, --memory, --errors)"
            )
        })
    }
}

/// What no kernel has.
fn limits(event: &Event) -> Result<()> {
    let Event { depth, cpu, tid, tgid, arguments, fields, changes, value, .. } = event;
    ensure!(*depth < DEEPEST, "a call lies in fewer than {DEEPEST} others, and not in {depth}");
    ensure!(*cpu < CPUS, "there is no CPU {cpu}: Linux has fewer than {CPUS}");
    for thread in [tid, tgid] {
        ensure!(*thread < THREADS, "there is no thread {thread}: Linux has fewer than {THREADS}");
    }
    let is_return = event.kind == Kind::Return;
    ensure!(
        event.duration.is_some() == is_return,
        "a return must have a duration, and a call none"
    );
    address(&event.address)?;
    let pairs = [arguments, fields].into_iter().flatten().flatten();
    let changes = changes.iter().flatten();
    let changes = changes.flat_map(|of| [(&of.field, &of.before), (&of.field, &of.after)]);
    for (name, value) in pairs.chain(changes) {
        scalar(value).with_context(|| name.clone())?;
    }
    value.as_ref().map_or(Ok(()), scalar)
}

/// Numbers of the kernel have no fraction.
fn scalar(value: &Value) -> Result<()> {
    let is_one = match value {
        Value::Number(number) => !number.is_f64(),
        Value::String(_) | Value::Bool(_) => true,
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    };
    ensure!(is_one, "the value must be a whole number, a text, true or false");
    Ok(())
}

fn address(text: &str) -> Result<()> {
    let digits = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
    ensure!(matches!(digits, Some(Ok(_))), "{text:?} is not an address like 0xffff888100001000");
    Ok(())
}

fn header(trace: &Trace) -> Result<()> {
    ensure!(!trace.type_name.is_empty(), "it does not say which struct was traced");
    let breaks = |c: char| c.is_control() || c.is_whitespace() || c == ';';
    let is_one = |name: &str| !name.is_empty() && name.len() < SYMBOL && !name.contains(breaks);
    let odd = trace.functions.iter().find(|function| !is_one(&function.name));
    ensure!(odd.is_none(), "{:?} is not the name of a function", odd.map_or("", |odd| &odd.name));
    Ok(())
}

/// One more object of a call: its event comes at once.
fn further(report: &TraceReport, call: usize, event: &Event) -> Result<()> {
    let (known, first) = report.begin_of(call);
    same_call(first, event)?;
    let is_now = known.exit.is_none() && first.time == event.time;
    ensure!(
        is_now && report.is_open(call, event),
        "call {} began at {} ns, and begins here again",
        event.call,
        first.time
    );
    let is_known = known.lives.contains(&event.life);
    ensure!(is_known || known.lives.len() < OBJECTS, "call {} has too many objects", event.call);
    Ok(())
}

/// A return agrees with its call.
fn returns(report: &TraceReport, call: usize, event: &Event) -> Result<()> {
    let (known, first) = report.begin_of(call);
    let (number, time) = (event.call, event.time);
    let took = time.checked_sub(first.time).with_context(|| {
        format!("call {number} returns at {time} ns, earlier than it began ({} ns)", first.time)
    })?;
    same_call(first, event)?;
    let life = event.life;
    ensure!(known.lives.contains(&life), "object {life} was not passed to call {number}");
    let duration = event.duration.unwrap_or_default();
    ensure!(
        duration == took,
        "the duration is {duration} ns, and call {number} began {took} ns before its return"
    );
    if let Some(exit) = known.exit {
        let before = report.events[exit].time;
        ensure!(before == time, "call {number} has returned at {before} ns, and returns again");
    }
    ensure!(
        report.is_open(call, event),
        "call {number} returns here, and the one that it was made in has returned before"
    );
    Ok(())
}

fn same_call(first: &Event, event: &Event) -> Result<()> {
    let of = |event: &Event| {
        let Event { function, tid, cpu, depth, .. } = event;
        let thread = if *tid == 0 { format!("idle CPU {cpu}") } else { format!("thread {tid}") };
        format!("{function}() by {thread} at depth {depth}")
    };
    let (began, here) = (of(first), of(event));
    ensure!(began == here, "call {} is {here}, and began as {began}", event.call);
    Ok(())
}

fn check_life(report: &TraceReport, life: &Life) -> Result<()> {
    let Life { life: number, begin, end, duration, parent, link, .. } = life;
    report.is_next(life)?;
    address(&life.address)?;
    let seen = report.lives.get(*number).map_or("", |life| life.address.as_str());
    ensure!(
        seen.is_empty() || seen == life.address,
        "object {number} is at {}, and was at {seen} in its events",
        life.address
    );
    let took = end.map(|end| {
        let took = end.checked_sub(*begin);
        took.with_context(|| format!("object {number} ends at {end} ns, and begins at {begin} ns"))
    });
    let took = took.transpose()?;
    let ns = |time: &Option<u64>| time.map_or("not known".to_owned(), |time| format!("{time} ns"));
    ensure!(
        *duration == took,
        "the duration of object {number} is {}, and from its begin to its end it is {}",
        ns(duration),
        ns(&took)
    );
    let last = report.last;
    ensure!(
        *begin <= last,
        "object {number} begins at {begin} ns, after the last event ({last} ns)"
    );
    ensure!(*parent != Some(*number), "object {number} comes from itself");
    let both = parent.is_some() == link.is_some();
    ensure!(both, "object {number} has a parent or a link, and not both");
    Ok(())
}

/// Each object that an event or another object names has its line.
fn lives(report: &TraceReport) -> Result<()> {
    let (described, count) = (report.described(), report.lives.len());
    ensure!(described == count, "object {described} has no line, but events");
    let named = report.lives.iter().filter_map(|life| Some((life.life, life.parent?)));
    for (life, parent) in named {
        ensure!(parent < count, "object {life} comes from object {parent}, which has no line");
    }
    Ok(())
}

/// The tracer has counted the lines that it wrote.
fn counts(report: &TraceReport, end: &End) -> Result<()> {
    let (events, lives) = (report.events.len() as u64, report.lives.len() as u64);
    ensure!(
        events == end.events && lives == end.lives,
        "{} events and {} objects were written, and {events} and {lives} are here: lines are missing, or \
         were added",
        end.events,
        end.lives
    );
    Ok(())
}
