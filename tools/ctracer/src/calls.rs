//! From events to calls: which return belongs to which entry, and what calls what.

use std::collections::HashMap;

use crate::model::{Event, Kind, Trace};

/// A call of a traced function.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The function: an index into [`Trace::functions`].
    pub function: usize,
    /// The entry event: an index into [`Trace::events`]. Where a call has several objects, the first
    /// one's.
    pub entry: usize,
    /// The return event; `None`: it was not seen.
    pub exit: Option<usize>,
    /// The call that this one was made in.
    pub parent: Option<usize>,
    /// When it began, ns.
    pub begin: u64,
    /// When it returned, ns; where that was not seen, the last time at which it still ran.
    pub end: u64,
    /// The time spent in traced functions that it called, ns.
    pub children: u64,
    /// The lives of its objects.
    pub lives: Vec<usize>,
}

/// All calls, in the order of their beginning, and what could not be paired.
#[derive(Debug, Default, PartialEq)]
pub struct Calls {
    /// The calls.
    pub calls: Vec<Call>,
    /// The call of each event; `None`: a return whose entry was not seen.
    pub of_event: Vec<Option<usize>>,
}

impl Calls {
    /// Pairs the events of a trace.
    pub fn new(trace: &Trace) -> Self {
        let mut calls = Self::default();
        // The open calls of each task, the innermost last.
        let mut open: HashMap<(u32, u32), Vec<usize>> = HashMap::new();
        for (index, event) in trace.events.iter().enumerate() {
            let stack = open.entry(task(event)).or_default();
            let call = match event.kind {
                Kind::Entry => Some(calls.enter(stack, trace, index)),
                Kind::Return { .. } => calls.leave(stack, trace, index),
            };
            calls.of_event.push(call);
        }
        for mut stack in open.into_values() {
            while let Some(call) = stack.pop() {
                calls.close(call);
            }
        }
        calls
    }

    /// The time in the call itself, without the traced functions that it called, ns.
    pub fn own_time(&self, call: &Call) -> u64 {
        (call.end - call.begin).saturating_sub(call.children)
    }

    fn enter(&mut self, stack: &mut Vec<usize>, trace: &Trace, index: usize) -> usize {
        let event = &trace.events[index];
        if let Some(&top) = stack.last()
            && is_same(&trace.events[self.calls[top].entry], event)
            && !self.calls[top].lives.contains(&event.life)
        {
            self.calls[top].lives.push(event.life);
            return top;
        }
        // The returns of deeper calls were not seen: those calls have ended.
        while stack.last().is_some_and(|&top| self.depth(trace, top) >= event.depth) {
            stack.pop().into_iter().for_each(|call| self.close(call));
        }
        let parent = stack.last().copied();
        stack.push(self.calls.len());
        self.calls.push(Call {
            function: event.function,
            entry: index,
            exit: None,
            parent,
            begin: event.time,
            end: event.time,
            children: 0,
            lives: vec![event.life],
        });
        self.seen(parent, event.time);
        self.calls.len() - 1
    }

    fn leave(&mut self, stack: &mut Vec<usize>, trace: &Trace, index: usize) -> Option<usize> {
        let event = &trace.events[index];
        // The second object of a call that has just been closed.
        let last = index.checked_sub(1).and_then(|before| self.of_event[before]);
        if let Some(last) = last
            && let Some(exit) = self.calls[last].exit
            && is_same(&trace.events[exit], event)
            && task(&trace.events[exit]) == task(event)
            && trace.events[exit].argument != event.argument
        {
            return Some(last);
        }
        while stack.last().is_some_and(|&top| self.depth(trace, top) > event.depth) {
            stack.pop().into_iter().for_each(|call| self.close(call));
        }
        let &top = stack.last()?;
        let call = &mut self.calls[top];
        if call.function != event.function || trace.events[call.entry].depth != event.depth {
            return None;
        }
        call.exit = Some(index);
        call.end = event.time;
        stack.pop();
        self.close(top);
        Some(top)
    }

    /// Accounts a call that has ended to the one that it was made in.
    fn close(&mut self, call: usize) {
        let Call { parent, begin, end, .. } = self.calls[call];
        if let Some(parent) = parent {
            self.calls[parent].children += end - begin;
        }
        self.seen(parent, end);
    }

    /// A call was still running at this time.
    fn seen(&mut self, call: Option<usize>, time: u64) {
        if let Some(call) = call {
            self.calls[call].end = self.calls[call].end.max(time);
        }
    }

    fn depth(&self, trace: &Trace, call: usize) -> u32 {
        trace.events[self.calls[call].entry].depth
    }
}

/// What a stack of calls belongs to: a thread, or a CPU that is idle, where all have thread 0.
pub fn task(event: &Event) -> (u32, u32) {
    (event.tid, if event.tid == 0 { event.cpu } else { 0 })
}

/// Whether two events are of the same call: one with several objects has an event for each.
fn is_same(first: &Event, second: &Event) -> bool {
    (first.time, first.depth, first.function) == (second.time, second.depth, second.function)
}

#[cfg(test)]
pub mod tests;
