//! What the outputs at the end are made of: the record, line by line, as it is traced or out of a
//! file of JSON lines, as recording.rs reads it.

use std::collections::HashMap;

use anyhow::{Context, Result, bail, ensure};

use crate::{
    life::Life,
    record::{Event, Kind, Ledger, Line, Task, Trace},
};

/// A trace. Events, lives and calls are in the order of their times.
#[derive(Default)]
pub struct TraceReport {
    pub trace: Trace,
    pub events: Vec<Event>,
    /// The call of each event; `None`: a return whose call was not seen.
    pub call_of: Vec<Option<usize>>,
    pub calls: Vec<Call>,
    pub lives: Vec<Life>,
    pub ledger: Option<Ledger>,
    /// The places of the functions in their list, and those of the calls by their numbers.
    functions: HashMap<String, usize>,
    numbers: HashMap<usize, usize>,
    /// The open calls of each task, the innermost last.
    open: HashMap<Task, Vec<usize>>,
    /// How many lives had their line, and how many were seen at each address.
    described: usize,
    generations: HashMap<String, u32>,
    /// The earliest time in it, known when it is complete, and that of its latest event. Events of two
    /// CPUs may come in the wrong order: see events.rs.
    start: u64,
    pub last: u64,
    /// What all this takes, in bytes.
    pub memory: usize,
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

impl Call {
    /// The time in the call itself, without the traced functions that it called.
    pub fn own_time(&self) -> u64 {
        self.end.saturating_sub(self.begin).saturating_sub(self.children)
    }
}

impl TraceReport {
    /// Takes the next line. Fails where it does not follow from those before.
    pub fn add(&mut self, line: Line) -> Result<()> {
        let is_first = self.trace.type_name.is_empty();
        match line {
            Line::Trace(trace) if is_first => {
                let names = trace.functions.iter().map(|function| function.name.clone());
                self.functions = names.zip(0..).collect();
                self.trace = trace;
            }
            Line::Trace(_) => bail!("another trace begins here"),
            _ if is_first => bail!("the first line of a trace is missing"),
            Line::Event(event) => self.event(*event)?,
            Line::Life(life) => {
                self.is_next(&life)?;
                let next = self.described;
                self.described += 1;
                self.lives.resize(self.lives.len().max(self.described), Life::default());
                self.memory += 2 * size_of::<Life>() + life.address.len();
                self.lives[next] = life;
            }
            Line::Ledger(ledger) => self.ledger = Some(ledger),
            Line::End(_) => {}
        }
        Ok(())
    }

    fn event(&mut self, mut event: Event) -> Result<()> {
        event.number = self.function(&event)?;
        event.comm = common::printable(&event.comm); // a file may say anything
        let new = self.lives.len()..event.life + 1;
        self.lives.extend(new.map(|life| Life { life, ..Life::default() }));
        self.last = self.last.max(event.time);
        let life = &mut self.lives[event.life];
        if life.address.is_empty() {
            // Until its line comes, which a file that is cut off does not have.
            let generation = self.generations.entry(event.address.clone()).or_default();
            (life.address, life.begin) = (event.address.clone(), event.time);
            life.generation = *generation;
            *generation += 1;
        }
        let call = self.call(&event);
        self.call_of.push(call);
        // A vector that grows may have twice the room that it needs.
        self.memory += event.memory() + size_of::<Event>() + CALL;
        self.events.push(event);
        Ok(())
    }

    /// The call of the next event.
    fn call(&mut self, event: &Event) -> Option<usize> {
        let (calls, index) = (&mut self.calls, self.events.len());
        let open = self.open.entry(event.task()).or_default();
        if let Some(&found) = self.numbers.get(&event.call) {
            let call = &mut calls[found];
            if event.kind == Kind::Return {
                call.exit.get_or_insert(index);
                call.end = event.time;
            } else if !call.lives.contains(&event.life) {
                call.lives.push(event.life);
            }
            // The calls within it have returned, too. It stays, for its other objects.
            open.truncate(open.partition_point(|&call| call <= found));
            return Some(found);
        }
        if event.kind == Kind::Return {
            return None;
        }
        // Calls that are not within this one's caller have returned, seen or not.
        let is_over = |&call: &usize| {
            calls[call].exit.is_some() || self.events[calls[call].entry].depth >= event.depth
        };
        while open.last().is_some_and(is_over) {
            open.pop();
        }
        let (parent, begin, lives) = (open.last().copied(), event.time, vec![event.life]);
        open.push(calls.len());
        self.numbers.insert(event.call, calls.len());
        calls.push(Call {
            entry: index,
            exit: None,
            parent,
            begin,
            end: begin,
            children: 0,
            lives,
        });
        open.last().copied()
    }

    /// Completes what is known at the end only.
    pub fn finish(mut self) -> TraceReport {
        for call in (0..self.calls.len()).rev() {
            let Call { parent, begin, end, .. } = self.calls[call];
            if let Some(parent) = parent.map(|parent| &mut self.calls[parent]) {
                parent.end = parent.end.max(end);
                parent.children = parent.children.saturating_add(end.saturating_sub(begin));
            }
        }
        let count = self.lives.len();
        for life in &mut self.lives {
            life.parent = life.parent.filter(|&parent| parent < count);
            life.link = life.link.filter(|_| life.parent.is_some());
        }
        // With --errors, an object may begin before the first event that is shown.
        let (known, unknown): (Vec<&mut Life>, Vec<&mut Life>) =
            self.lives.iter_mut().partition(|life| !life.address.is_empty());
        let times = self.events.iter().map(|event| event.time);
        let times = times.chain(known.iter().map(|life| life.begin));
        self.start = times.min().unwrap_or_default();
        // Another one names it, and a file that is cut off ends before its own events.
        for life in unknown {
            (life.begin, life.address) = (self.start, "?".to_owned());
        }
        self
    }

    /// The earliest time in it.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// The place of an event's function in the list. Fails where that has no such function, or where
    /// there can be no object with the event's number.
    pub fn function(&self, event: &Event) -> Result<usize> {
        let number = self.functions.get(&event.function);
        let number = number
            .with_context(|| format!("the first line has no function {}()", event.function))?;
        // With an event, two lives begin at most: the object's, and one that is made of it.
        let most = 2 * self.events.len() + AHEAD;
        ensure!(event.life <= most, "no object has the number {}", event.life);
        Ok(*number)
    }

    /// Fails where another life's line comes next.
    pub fn is_next(&self, life: &Life) -> Result<()> {
        let next = self.described;
        ensure!(life.life == next, "life {} where {next} comes next", life.life);
        Ok(())
    }

    /// How many lives had their line.
    pub fn described(&self) -> usize {
        self.described
    }

    /// The place of a call, by its number.
    pub fn numbered(&self, call: usize) -> Option<usize> {
        self.numbers.get(&call).copied()
    }

    /// A call, and the event that it began with.
    pub fn begin_of(&self, call: usize) -> (&Call, &Event) {
        let call = &self.calls[call];
        (call, &self.events[call.entry])
    }

    /// Whether a call is one of those that an event's thread is in.
    pub fn is_open(&self, call: usize, event: &Event) -> bool {
        self.open.get(&event.task()).is_some_and(|open| open.binary_search(&call).is_ok())
    }
}

/// So many objects may begin before the first event of any, where others are left out (`--errors`).
const AHEAD: usize = 1 << 16;
/// What a call and its number take, in bytes.
const CALL: usize = 2 * size_of::<Call>() + 96;

#[cfg(test)]
pub mod tests;
