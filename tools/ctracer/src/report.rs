//! What the outputs at the end are made of: the record, line by line, as it is traced or out of a
//! file of JSON lines.
//!
//! It is kept as the page carries it: texts that come often are listed once and named by their
//! position, and times are in ns from the first event.

use std::{collections::HashMap, io::BufRead};

use anyhow::{Context, Result, bail, ensure};
use serde::{Serialize, Serializer};
use serde_json::Value;

use crate::record::{Change, Event, Kind, Ledger, Life, Line, Pairs, Trace, named, plain};

/// Names and values, by their positions.
type Positions = Vec<(u32, u32)>;

/// A trace. Events, lives and calls are in the order of their times.
#[derive(Default, Serialize)]
pub struct Report {
    #[serde(flatten)]
    pub trace: Trace,
    /// The time of the first event, as a text: it may be too large for a number of JavaScript.
    pub start: String,
    /// Names and numbers: `dd 1234`.
    threads: Texts,
    names: Texts,
    strings: Texts,
    pub lives: Vec<Life>,
    pub events: Vec<Row>,
    pub calls: Vec<Call>,
    ledger: Option<Ledger>,
    /// What the ledger says, for people.
    parts: Vec<(Option<u64>, &'static str)>,
    /// By name.
    #[serde(skip)]
    functions: HashMap<String, u32>,
    /// The open calls of each task, the innermost last.
    #[serde(skip)]
    open: HashMap<(u32, u32), Vec<usize>>,
    /// How many lives had their line, and when the first event was.
    #[serde(skip)]
    described: usize,
    #[serde(skip)]
    began: Option<u64>,
    /// What all this takes, but for the texts, in bytes.
    #[serde(skip)]
    memory: usize,
}

/// An event.
pub struct Row {
    pub time: u64,
    pub cpu: u32,
    thread: u32,
    pub is_return: bool,
    function: u32,
    argument: u8,
    depth: u32,
    pub life: usize,
    readable: bool,
    /// `None`: a return whose call was not seen.
    pub call: Option<usize>,
    value: Option<u32>,
    arguments: Positions,
    /// Of the first event of a life.
    fields: Positions,
    /// Name, value before, value.
    changes: Vec<(u32, u32, u32)>,
}

/// A call. Where it has several objects, its events are those of the first one.
pub struct Call {
    pub entry: usize,
    pub exit: Option<usize>,
    /// The call that it was made in.
    pub parent: Option<usize>,
    pub begin: u64,
    /// When it returned; where that was not seen, the last time at which it still ran.
    pub end: u64,
    /// The time in traced functions that it called.
    children: u64,
    pub lives: Vec<usize>,
}

// As lists, whose elements data.js names: the names would be most of a page.
impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (is_return, readable) = (u8::from(self.is_return), u8::from(self.readable));
        let place = (self.time, self.cpu, self.thread, is_return, self.function, self.argument);
        let object = (self.depth, self.life, readable, self.call, self.value);
        (place, object, &self.arguments, &self.fields, &self.changes).serialize(serializer)
    }
}

impl Serialize for Call {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.begin, self.end, self.own_time(), self.exit).serialize(serializer)
    }
}

impl Call {
    /// The time in the call itself, without the traced functions that it called.
    pub fn own_time(&self) -> u64 {
        (self.end - self.begin).saturating_sub(self.children)
    }
}

/// Texts, each once.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub struct Texts {
    list: Vec<String>,
    #[serde(skip)]
    positions: HashMap<String, u32>,
    #[serde(skip)]
    memory: usize,
}

impl Texts {
    /// Where a text stands.
    fn add(&mut self, text: String) -> u32 {
        if let Some(&position) = self.positions.get(&text) {
            return position;
        }
        let position = self.list.len() as u32;
        self.memory += 2 * (text.len() + 64);
        self.list.push(text.clone());
        self.positions.insert(text, position);
        position
    }
}

impl Report {
    /// Reads a file of JSON lines up to its end, or to a line that is damaged: what comes after such a
    /// one is about objects of which something is not known. Returns what is wrong, if anything.
    pub fn read(file: impl BufRead) -> Result<(Report, Option<String>)> {
        let (mut report, mut number) = (Report::default(), 0);
        for line in file.split(b'\n') {
            let line = line.with_context(|| format!("after line {number}"))?;
            number += 1;
            let read = serde_json::from_slice(&line).map_err(Into::into);
            if let Err(error) = read.and_then(|line| report.add(line)) {
                let why =
                    format!("line {number} is damaged, and what follows is not read: {error:#}");
                ensure!(number > 1, "this is no file of ctracer --json: {why}");
                return Ok((report, Some(why)));
            }
        }
        ensure!(number > 0, "the file is empty: give one of ctracer --json");
        let cut =
            format!("it ends with line {number}, and the trace does not: the ledger is missing");
        let cut = report.ledger.is_none().then_some(cut);
        Ok((report, cut))
    }

    /// Takes the next line. Fails where it does not follow from those before.
    pub fn add(&mut self, line: Line) -> Result<()> {
        let is_first = self.trace.type_name.is_empty();
        match line {
            Line::Trace(trace) if is_first => {
                let numbered = (0..).zip(&trace.functions);
                self.functions = numbered.map(|(n, function)| (function.name.clone(), n)).collect();
                self.trace = trace;
            }
            Line::Trace(_) => bail!("another trace begins here"),
            _ if is_first => bail!("the first line of a trace is missing"),
            Line::Event(event) => self.event(*event)?,
            Line::Life(mut life) => {
                let expected = self.described;
                ensure!(life.life == expected, "life {} where {expected} comes next", life.life);
                life.begin = self.since(life.begin);
                life.end = life.end.map(|end| self.since(end));
                self.lives.resize(self.lives.len().max(expected + 1), Life::default());
                self.lives[expected] = life;
                self.described += 1;
            }
            Line::Ledger(ledger) => self.ledger = Some(ledger),
        }
        Ok(())
    }

    fn since(&self, time: u64) -> u64 {
        time.saturating_sub(self.began.unwrap_or(time))
    }

    fn event(&mut self, event: Event) -> Result<()> {
        let index = self.events.len();
        let known = self.functions.get(&event.function).copied();
        let function = known
            .with_context(|| format!("the first line has no function {}()", event.function))?;
        // With an event, two lives begin at most: the object's, and one that is made of it.
        let most = 2 * index + AHEAD;
        ensure!(event.life <= most, "no object has the number {}", event.life);
        self.began.get_or_insert(event.time);
        let time = self.since(event.time);
        while self.lives.len() <= event.life {
            // Until its line comes, which a file that is cut off does not have.
            let (life, address) = (self.lives.len(), event.address.clone());
            self.lives.push(Life { life, address, begin: time, ..Life::default() });
        }
        let call = self.call(&event, function, time);
        let (names, strings) = (&mut self.names, &mut self.strings);
        let value = event.value.map(|value| strings.add(named(&value)));
        let mut add = |pairs: Option<Pairs>, text: fn(&Value) -> String| -> Positions {
            let pair = |(name, value)| (names.add(name), strings.add(text(&value)));
            pairs.into_iter().flatten().map(pair).collect()
        };
        let (arguments, fields) = (add(event.arguments, named), add(event.fields, plain));
        let change = |Change { field, before, after }| {
            let [before, after] = [before, after].map(|value| strings.add(plain(&value)));
            (names.add(field), before, after)
        };
        let changes: Vec<_> = event.changes.into_iter().flatten().map(change).collect();
        self.memory += ROW + PAIR * (arguments.len() + fields.len() + 2 * changes.len());
        self.events.push(Row {
            time,
            cpu: event.cpu,
            thread: self.threads.add(format!("{} {}", event.comm, event.tid)),
            is_return: event.kind == Kind::Return,
            function,
            argument: event.argument,
            depth: event.depth,
            life: event.life,
            readable: !event.unreadable,
            call,
            value,
            arguments,
            fields,
            changes,
        });
        Ok(())
    }

    /// The call of the next event.
    fn call(&mut self, event: &Event, function: u32, time: u64) -> Option<usize> {
        let (task, depth, begin, _) = event.call();
        let (begin, index, life) = (self.since(begin), self.events.len(), event.life);
        let (calls, events) = (&mut self.calls, &self.events);
        let open = self.open.entry(task).or_default();
        let found = open.iter().rposition(|&call| {
            let (call, entry) = (&calls[call], &events[calls[call].entry]);
            (call.begin, entry.function, entry.depth) == (begin, function, depth)
        });
        if let Some(found) = found {
            let call = &mut calls[open[found]];
            if event.kind == Kind::Return {
                call.exit.get_or_insert(index);
                call.end = time;
            } else if !call.lives.contains(&life) {
                call.lives.push(life);
            }
            // Those within it have returned, too. It stays, for its other objects.
            open.truncate(found + 1);
            return open.last().copied();
        }
        if event.kind == Kind::Return {
            return None;
        }
        // Calls that are not within this one's caller have returned, seen or not.
        let is_over =
            |&call: &usize| calls[call].exit.is_some() || events[calls[call].entry].depth >= depth;
        while open.last().is_some_and(is_over) {
            open.pop();
        }
        let parent = open.last().copied();
        open.push(calls.len());
        let (entry, begin, end) = (index, time, time);
        calls.push(Call { entry, exit: None, parent, begin, end, children: 0, lives: vec![life] });
        self.memory += CALL;
        open.last().copied()
    }

    /// Completes what is known at the end only.
    pub fn finish(mut self) -> Report {
        for call in (0..self.calls.len()).rev() {
            let Call { parent, begin, end, .. } = self.calls[call];
            if let Some(parent) = parent.map(|parent| &mut self.calls[parent]) {
                parent.end = parent.end.max(end);
                parent.children += end - begin;
            }
        }
        let mut generations = HashMap::<&str, u32>::new();
        let (known, others) = self.lives.split_at_mut(self.described);
        known.iter().for_each(|life| *generations.entry(&life.address).or_default() += 1);
        for life in others {
            let generation = generations.entry(&life.address).or_default();
            life.generation = *generation;
            *generation += 1;
        }
        let count = self.lives.len();
        for life in &mut self.lives {
            life.parent = life.parent.filter(|&parent| parent < count);
            life.link = life.link.filter(|_| life.parent.is_some());
        }
        self.start = self.began.unwrap_or(0).to_string();
        self.parts = match self.ledger {
            None => vec![(None, "the record ends before its ledger")],
            Some(ledger) => {
                let hits = (ledger.hits, "hits of the probes, counted by the kernel");
                let lost = (ledger.objects_lost, Ledger::OBJECTS_LOST);
                let parts = [hits].into_iter().chain(ledger.lines()).chain([lost]);
                parts.map(|(count, what)| (Some(count), what)).collect()
            }
        };
        self
    }

    /// The name of a call's function.
    pub fn function(&self, call: &Call) -> &str {
        &self.trace.functions[self.events[call.entry].function as usize].name
    }

    /// The name and the number of a call's thread.
    pub fn thread(&self, call: &Call) -> (&str, u64) {
        let thread = &self.threads.list[self.events[call.entry].thread as usize];
        let (name, number) = thread.rsplit_once(' ').unwrap_or_default();
        (name, number.parse().unwrap_or(0))
    }

    /// What an event says: its value, its other arguments.
    pub fn said(&self, event: &Row) -> Pairs {
        let text = |position: u32| Value::from(self.strings.list[position as usize].as_str());
        let value = event.value.map(|value| ("value".to_owned(), text(value)));
        let pair =
            |&(name, value): &(u32, u32)| (self.names.list[name as usize].clone(), text(value));
        value.into_iter().chain(event.arguments.iter().map(pair)).collect()
    }

    /// What an event says of its object: all fields, or their changes.
    pub fn shown(&self, event: &Row) -> Pairs {
        let text = |position: u32| self.strings.list[position as usize].as_str();
        let name = |position: u32| self.names.list[position as usize].clone();
        let fields = event.fields.iter().map(|&(of, value)| (name(of), text(value).into()));
        let changes = event.changes.iter().map(|&(of, before, after)| {
            (name(of), format!("{} → {}", text(before), text(after)).into())
        });
        fields.chain(changes).collect()
    }

    /// What all this takes, in bytes.
    pub fn memory(&self) -> usize {
        self.memory + self.threads.memory + self.names.memory + self.strings.memory
    }
}

/// So many objects may begin before the first event of any, where others are left out (`--errors`).
const AHEAD: usize = 1 << 16;
/// What an event, a call, and a pair of positions take, in bytes: a vector that grows may have twice the
/// room that it needs.
const ROW: usize = 2 * size_of::<Row>();
const CALL: usize = 2 * size_of::<Call>() + 24;
const PAIR: usize = 12;

#[cfg(test)]
pub mod tests;
