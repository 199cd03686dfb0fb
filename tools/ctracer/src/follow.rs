//! From raw events to the model: depth, lives, changes; and what is done with every event.

use std::io::{BufWriter, StdoutLock, Write};

use anyhow::{Context, Result};

use crate::{
    cli::Ctracer,
    decode::Layout,
    errors::Held,
    events::{Calls, Raw},
    lives::{Lives, Rules},
    model::{Event, Kind, Ledger, Life, Trace},
    outputs::{
        json,
        summary::Summary,
        text::{HEADING, Text},
    },
};

/// What the outputs at the end need for an event beside it, in bytes: a page holds it as JSON, and then
/// as text.
const OUTPUT: usize = 1_000;

/// Everything that is known about the objects so far.
pub struct Follower<'a> {
    cli: &'a Ctracer,
    layout: &'a Layout,
    calls: Calls,
    lives: Lives,
    /// Where an object says when it was made.
    made_at: Option<usize>,
    text: Text,
    summary: Summary,
    /// With events only where an output at the end needs them.
    trace: Trace,
    /// The memory of those events, in bytes.
    kept: usize,
    /// What waits for an error.
    held: Option<Held>,
    /// Which lives have had an event with all fields.
    described: Vec<bool>,
    out: BufWriter<StdoutLock<'static>>,
}

impl<'a> Follower<'a> {
    /// For this trace, which has its functions and no events yet.
    pub fn new(
        cli: &'a Ctracer,
        layout: &'a Layout,
        rules: &Rules,
        trace: Trace,
    ) -> Result<Follower<'a>> {
        let lives = Lives::new(rules, trace.functions.iter());
        let made_at = rules.made.and_then(|field| layout.position(field));
        let mut out = BufWriter::new(std::io::stdout().lock());
        if cli.json {
            writeln!(out, "{}", json::trace_line(&trace))?;
        } else if !cli.quiet {
            writeln!(out, "{HEADING}")?;
        }
        out.flush().context("stdout")?;
        let held = cli.errors.then(|| Held::new(layout, rules, &trace));
        Ok(Follower {
            cli,
            layout,
            calls: Calls::default(),
            lives,
            made_at,
            text: Text::default(),
            summary: Summary::default(),
            trace,
            kept: 0,
            held,
            described: Vec::new(),
            out,
        })
    }

    /// Whether so many events have come as were asked for, or the memory is used up.
    pub fn is_full(&self) -> bool {
        self.summary.events() >= self.cli.max_events || self.has_no_memory()
    }

    fn has_no_memory(&self) -> bool {
        self.kept + self.held() + self.lives.memory() + self.summary.memory() >= self.cli.memory
    }

    /// The memory of what waits for an error, and of all lives until then.
    fn held(&self) -> usize {
        let lives = self.trace.lives.len() * size_of::<Life>();
        self.held.as_ref().map_or(0, |held| held.memory + lives)
    }

    /// Takes events in the order of their times.
    pub fn take(&mut self, events: Vec<Raw>) -> Result<()> {
        for raw in events {
            if self.is_full() {
                // The end that an fentry program has seen is no event.
                self.summary.beyond += u64::from(!raw.is_end);
                self.summary.no_memory = self.has_no_memory();
                continue;
            }
            self.event(raw).context("stdout")?;
        }
        self.out.flush().context("stdout")
    }

    fn event(&mut self, raw: Raw) -> std::io::Result<()> {
        let function = raw.function;
        if raw.is_end {
            let is_new = self.lives.end_again(&mut self.trace.lives, raw.address, raw.time);
            self.summary.ends_again += u64::from(is_new);
            return Ok(());
        }
        // The lives are in the trace whenever it is read, and with their rules while they change.
        std::mem::swap(&mut self.lives.lives, &mut self.trace.lives);
        let found = self.place(&raw);
        let bytes = match found {
            // After its end, the memory holds something else.
            Some((life, ..)) if self.lives.is_there(life) => raw.bytes,
            _ => Box::default(),
        };
        let before = found.and_then(|(life, ..)| self.lives.replace_bytes(life, &bytes));
        std::mem::swap(&mut self.lives.lives, &mut self.trace.lives);
        let Some((life, depth, began)) = found else { return Ok(()) };
        let changes = before.map(|before| self.layout.changes(&before, &bytes)).unwrap_or_default();
        let argument = self.trace.functions[function].arguments.get(raw.object).copied();
        let event = Event {
            time: raw.time,
            cpu: raw.cpu,
            tgid: raw.tgid,
            tid: raw.tid,
            comm: raw.comm,
            function,
            kind: raw.kind,
            argument: argument.unwrap_or(0),
            address: raw.address,
            registers: raw.registers,
            life,
            depth,
            readable: !bytes.is_empty(),
            bytes,
            changes,
        };
        if let Some(held) = &mut self.held {
            held.add(&self.trace, event, began, |life| self.lives.is_last(&self.trace.lives, life));
            return Ok(());
        }
        self.pass_on(event, began)
    }

    /// Passes on what has waited, now that it is known which lives have an error.
    fn release(&mut self, mut held: Held) -> std::io::Result<()> {
        let (events, lives, others) = held.take(&std::mem::take(&mut self.trace.lives));
        self.summary.without_error = Some(others);
        for (event, began) in events {
            // Each life comes with its first event, as it does without --errors.
            let known = self.trace.lives.len();
            self.trace.lives.extend_from_slice(lives.get(known..=event.life).unwrap_or_default());
            if self.summary.events() < self.cli.max_events {
                self.pass_on(event, began)?;
            } else {
                self.summary.beyond += 1;
            }
        }
        Ok(())
    }

    /// The life and the depth of an event, and for a return, when the call began. `None`: the return
    /// of a call that is not known.
    fn place(&mut self, raw: &Raw) -> Option<(usize, u32, Option<u64>)> {
        match raw.kind {
            Kind::Entry => {
                let made = self.made_at.and_then(|at| raw.bytes.get(at..at + 8)?.try_into().ok());
                let made = made.map_or(0, u64::from_le_bytes);
                let life = self.lives.enter(raw.function, raw.object, raw.address, raw.time, made);
                let (depth, objects) = self.calls.enter(raw, life);
                self.lives.tie(raw.function, objects);
                Some((life, depth, None))
            }
            Kind::Return { value } => {
                let (call, depth) = self.calls.leave(raw)?;
                let (_, life) = call.objects.iter().find(|(address, _)| *address == raw.address)?;
                self.lives.leave(raw.function, *life, value, call.time, raw.time);
                Some((*life, depth, Some(call.time)))
            }
        }
    }

    fn pass_on(&mut self, mut event: Event, began: Option<u64>) -> std::io::Result<()> {
        self.summary.event(&event);
        self.described.resize(self.trace.lives.len(), false);
        let is_first = !self.described[event.life] && event.readable;
        self.described[event.life] |= is_first;
        if self.cli.json {
            let line = json::event_line(&self.trace, &event, self.layout, is_first, began);
            writeln!(self.out, "{line}")?;
        } else if !self.cli.quiet {
            let lines = self.text.event(&self.trace, &event, began);
            self.out.write_all(lines.as_bytes())?;
        }
        if self.cli.files.any() {
            if !is_first {
                event.bytes = Box::default();
            }
            self.kept += event.memory() + OUTPUT;
            self.trace.events.push(event);
        }
        Ok(())
    }

    /// Prints what is left: lives and ledger, or the summary.
    pub fn finish(mut self, ledger: Ledger) -> Result<Trace> {
        self.trace.ledger = ledger;
        let has_no_memory = self.has_no_memory();
        if let Some(held) = self.held.take() {
            self.release(held).context("stdout")?;
        }
        if has_no_memory {
            let megabytes = self.cli.memory / 1_000_000;
            eprintln!("ctracer: the trace has ended, since it takes {megabytes} MB (--memory)");
        }
        if self.cli.json {
            json::end(&mut self.out, &self.trace)?;
            self.summary.print(&mut std::io::stderr(), &self.trace, self.calls.open()).ok();
        } else {
            self.out.write_all(self.text.rest(&self.trace).as_bytes()).context("stdout")?;
            self.summary.print(&mut self.out, &self.trace, self.calls.open()).context("stdout")?;
        }
        self.out.flush().context("stdout")?;
        Ok(self.trace)
    }
}
