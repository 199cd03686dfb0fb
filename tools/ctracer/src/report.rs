//! What the outputs at the end are made of: the record, line by line, as it is traced or out of a
//! file of JSON lines.
//!
//! It is kept in columns, as the page carries it: the first number of every column belongs to the
//! first event, and so on. Texts that come often are listed once and named by their position. Times
//! are in ns from the first event.

use std::{
    collections::{BTreeMap, HashMap},
    io::BufRead,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;

use crate::record::{Change, Event, Kind, Ledger, Life, Line, Pairs, Trace, named, plain};

/// Names and values, by their positions.
type Positions = Vec<(u32, u32)>;

/// A trace. What is by event, or by call, is in the order of their times.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    #[serde(flatten)]
    pub trace: Trace,
    /// The time of the first event, as a text: it may be too large for a number of JavaScript.
    pub start: String,
    /// Names and numbers: `dd 1234`.
    pub threads: Texts,
    pub names: Texts,
    pub strings: Texts,
    pub lives: Vec<Life>,
    pub events: Events,
    pub calls: Calls,
    /// By event, as positions: of the first of a life all fields, of others the changes (name, before,
    /// after); the other arguments of a call.
    pub fields: BTreeMap<usize, Positions>,
    pub changes: BTreeMap<usize, Vec<(u32, u32, u32)>>,
    pub arguments: BTreeMap<usize, Positions>,
    /// By event: what it returned.
    pub values: BTreeMap<usize, u32>,
    pub ledger: Option<Ledger>,
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

/// The events.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Events {
    pub time: Vec<u64>,
    pub cpu: Vec<u32>,
    pub thread: Vec<u32>,
    pub is_return: Vec<u8>,
    pub function: Vec<u32>,
    pub argument: Vec<u8>,
    pub depth: Vec<u32>,
    pub life: Vec<usize>,
    pub readable: Vec<u8>,
    /// `None`: a return whose call was not seen.
    pub call: Vec<Option<usize>>,
}

/// The calls. Where one has several objects, its events are those of the first one.
#[derive(Default, Serialize)]
pub struct Calls {
    pub begin: Vec<u64>,
    /// When it returned; where that was not seen, the last time at which it still ran.
    pub end: Vec<u64>,
    /// The time in traced functions that it called.
    pub children: Vec<u64>,
    pub exit: Vec<Option<usize>>,
    #[serde(skip)]
    pub entry: Vec<usize>,
    #[serde(skip)]
    pub parent: Vec<Option<usize>>,
    /// The lives of its objects.
    #[serde(skip)]
    pub lives: Vec<Vec<usize>>,
}

/// Texts, each once.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub struct Texts {
    pub list: Vec<String>,
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
        let index = self.events.time.len();
        let known = self.functions.get(&event.function).copied();
        let function = known
            .with_context(|| format!("the first line has no function {}()", event.function))?;
        // With an event, two lives begin at most: the object's, and one that is made of it.
        ensure!(event.life <= 2 * index + 1, "no object has the number {}", event.life);
        self.began.get_or_insert(event.time);
        let time = self.since(event.time);
        while self.lives.len() <= event.life {
            // Until its line comes, which a file that is cut off does not have.
            let (life, address) = (self.lives.len(), event.address.clone());
            self.lives.push(Life { life, address, begin: time, ..Life::default() });
        }
        let call = self.call(&event, function, time);
        self.memory += EVENT;
        let columns = &mut self.events;
        columns.time.push(time);
        columns.cpu.push(event.cpu);
        columns.thread.push(self.threads.add(format!("{} {}", event.comm, event.tid)));
        columns.is_return.push((event.kind == Kind::Return).into());
        columns.function.push(function);
        columns.argument.push(event.argument);
        columns.depth.push(event.depth);
        columns.life.push(event.life);
        columns.readable.push((!event.unreadable).into());
        columns.call.push(call);
        let mut number = |of: Pairs, text: fn(&Value) -> String| -> Positions {
            self.memory += PAIR * (4 + of.0.len());
            let pair = |(name, value)| (self.names.add(name), self.strings.add(text(&value)));
            of.0.into_iter().map(pair).collect()
        };
        if let Some(fields) = event.fields {
            self.fields.insert(index, number(fields, plain));
        }
        if let Some(arguments) = event.arguments.filter(|arguments| !arguments.0.is_empty()) {
            self.arguments.insert(index, number(arguments, named));
        }
        if let Some(changes) = event.changes.filter(|changes| !changes.is_empty()) {
            self.memory += PAIR * (4 + changes.len());
            let number = |change: Change| {
                let before = self.strings.add(plain(&change.before));
                (self.names.add(change.field), before, self.strings.add(plain(&change.after)))
            };
            self.changes.insert(index, changes.into_iter().map(number).collect());
        }
        if let Some(value) = event.value {
            self.memory += PAIR;
            self.values.insert(index, self.strings.add(named(&value)));
        }
        Ok(())
    }

    /// The call of the next event.
    fn call(&mut self, event: &Event, function: u32, time: u64) -> Option<usize> {
        let (task, depth, begin, _) = event.call();
        let (begin, index, life) = (self.since(begin), self.events.time.len(), event.life);
        let (calls, events) = (&mut self.calls, &self.events);
        let open = self.open.entry(task).or_default();
        let depth_of = |calls: &Calls, call: usize| events.depth[calls.entry[call]];
        let found = open.iter().rposition(|&call| {
            calls.begin[call] == begin
                && events.function[calls.entry[call]] == function
                && depth_of(calls, call) == depth
        });
        if let Some(found) = found {
            let call = open[found];
            if event.kind == Kind::Return {
                // Those within it have returned, too. It stays, for the returns of its other objects.
                open.truncate(found + 1);
                calls.exit[call].get_or_insert(index);
                calls.end[call] = time;
            } else if !calls.lives[call].contains(&life) {
                calls.lives[call].push(life);
            }
            return Some(call);
        }
        if event.kind == Kind::Return {
            return None;
        }
        // Calls that are not within this one's caller have returned, seen or not.
        let is_over = |&call: &usize| calls.exit[call].is_some() || depth_of(calls, call) >= depth;
        while open.last().is_some_and(is_over) {
            open.pop();
        }
        let call = calls.begin.len();
        calls.parent.push(open.last().copied());
        open.push(call);
        calls.begin.push(time);
        calls.end.push(time);
        calls.children.push(0);
        calls.exit.push(None);
        calls.entry.push(index);
        calls.lives.push(vec![life]);
        self.memory += CALL;
        Some(call)
    }

    /// Completes what is known at the end only.
    pub fn finish(mut self) -> Report {
        let calls = &mut self.calls;
        for call in (0..calls.begin.len()).rev() {
            let Some(parent) = calls.parent[call] else { continue };
            calls.end[parent] = calls.end[parent].max(calls.end[call]);
            calls.children[parent] += calls.end[call] - calls.begin[call];
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

    /// The time in a call itself, without the traced functions that it called.
    pub fn own_time(&self, call: usize) -> u64 {
        let calls = &self.calls;
        (calls.end[call] - calls.begin[call]).saturating_sub(calls.children[call])
    }

    /// The name of a call's function.
    pub fn function(&self, call: usize) -> &str {
        let function = self.events.function[self.calls.entry[call]];
        &self.trace.functions[function as usize].name
    }

    /// The name and the number of a call's thread.
    pub fn thread(&self, call: usize) -> (&str, u64) {
        let thread = &self.threads.list[self.events.thread[self.calls.entry[call]] as usize];
        let (name, number) = thread.rsplit_once(' ').unwrap_or_default();
        (name, number.parse().unwrap_or(0))
    }

    /// What all this takes, in bytes.
    pub fn memory(&self) -> usize {
        self.memory + self.threads.memory + self.names.memory + self.strings.memory
    }
}

/// What an event takes in the columns, a call, and a pair of positions, in bytes: a vector that grows
/// may have twice the room that it needs.
const EVENT: usize = 2 * 52;
const CALL: usize = 2 * 120;
const PAIR: usize = 16;

#[cfg(test)]
pub mod tests;
