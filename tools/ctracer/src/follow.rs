//! From raw events to the record: calls, lives, changes; and what is done with every event.

use std::{
    io::{BufWriter, StdoutLock, Write},
    mem,
};

use anyhow::{Context, Result};

use crate::{
    cli::Ctracer,
    decode::{Layout, Scalar},
    errors::Held,
    events::{Calls, Place, Raw},
    gaps::Step,
    life::Life,
    lives::{Lives, Rules},
    record::{End, Event, Kind, Ledger, Line, Trace},
    report::TraceReport,
    summary::Summary,
    text::{HEADING, Text},
    value::hex,
};

/// Everything that is known about the objects so far.
pub struct Follower<'a> {
    layout: &'a Layout,
    calls: Calls,
    lives: Lives,
    /// Where an object says when it was made, and where a bio has its status.
    made_at: Option<usize>,
    status_at: Option<usize>,
    /// What waits for an error, with `--errors`.
    held: Option<Held>,
    outlet: Outlet<'a>,
}

/// Where events go.
struct Outlet<'a> {
    cli: &'a Ctracer,
    trace: &'a Trace,
    text: Text,
    summary: Summary,
    /// For the outputs at the end, where there are any.
    report: Option<TraceReport>,
    out: BufWriter<StdoutLock<'static>>,
}

impl<'a> Follower<'a> {
    pub fn new(
        cli: &'a Ctracer,
        layout: &'a Layout,
        trace: &'a Trace,
        has_colours: bool,
    ) -> Result<Follower<'a>> {
        let mut outlet = Outlet {
            cli,
            trace,
            text: Text::new(has_colours),
            summary: Summary::new(trace, has_colours),
            report: cli.files.any().then(TraceReport::default),
            out: BufWriter::new(std::io::stdout().lock()),
        };
        if outlet.prints_graph() {
            writeln!(outlet.out, "{HEADING}")?;
        }
        outlet.line(Line::Trace(trace.clone()))?;
        outlet.out.flush().context("stdout")?;
        Ok(Follower {
            layout,
            calls: Calls::default(),
            lives: Lives::new(
                trace.functions.iter().map(|function| function.probe.effect).collect(),
            ),
            made_at: Rules(&cli.type_name).made().and_then(|field| layout.position(field)),
            status_at: layout.position("bi_status"),
            held: cli.errors.then(Held::default),
            outlet,
        })
    }

    /// The option that ends the trace now: so many events have come as were asked for, or the memory is
    /// used up.
    pub fn bound(&self) -> Option<&'static str> {
        let report = self.outlet.report.as_ref().map_or(0, |report| report.memory);
        let held = self.held.as_ref().map_or(0, |held| held.memory);
        let used = report + held + self.lives.memory() + self.outlet.summary.memory();
        let is_full = used >= self.outlet.cli.memory;
        is_full.then_some("--memory").or(self.outlet.is_full().then_some("--max-events"))
    }

    /// Takes events in the order of their times.
    pub fn take(&mut self, events: Vec<Raw>) -> Result<()> {
        for raw in events {
            if let Some(bound) = self.bound() {
                // The end that an fentry program has seen is no event.
                self.outlet.summary.beyond += u64::from(!raw.is_end());
                self.outlet.summary.bound = bound;
                continue;
            }
            self.event(&raw).context("stdout")?;
        }
        self.outlet.out.flush().context("stdout")
    }

    fn event(&mut self, raw: &Raw) -> Result<()> {
        if raw.is_end() {
            let is_new = self.lives.end_again(raw.address, raw.time);
            self.outlet.summary.ends_again += u64::from(is_new);
            return Ok(());
        }
        let (number, is_entry) = (raw.function as usize, raw.kind() == Kind::Entry);
        let placed = if is_entry { Some(self.enter(raw)) } else { self.leave(raw) };
        let Some(Place { call, depth, began, life }) = placed else { return Ok(()) };
        // After its end, the memory holds something else.
        let before = self.lives.replace_bytes(raw.address, life, &raw.bytes);
        let (layout, function) = (self.layout, &self.outlet.trace.functions[number]);
        let probe = &function.probe;
        let argument = probe.arguments.get(raw.object as usize).copied().unwrap_or(0);
        if !self.outlet.wants_events() {
            self.outlet.summary.event(Step {
                function: number,
                life,
                kind: raw.kind(),
                time: raw.time,
                task: raw.task(),
                depth,
                argument,
            });
            return Ok(());
        }
        let in_register =
            |scalar: &Scalar, register: u64| scalar.value(register.into(), &layout.functions);
        let arguments = probe.others.iter().map(|(name, register, scalar)| {
            (name.clone(), in_register(scalar, raw.registers[*register]))
        });
        let returns = probe.returns.as_ref().filter(|_| !is_entry);
        let event = Event {
            kind: raw.kind(),
            time: raw.time,
            cpu: raw.cpu,
            tgid: raw.tgid,
            tid: raw.tid,
            comm: raw.comm(),
            function: function.name.clone(),
            number,
            call,
            depth,
            argument,
            address: hex(raw.address),
            life,
            arguments: is_entry.then(|| arguments.collect()),
            value: returns.map(|scalar| in_register(scalar, raw.value)),
            errno: returns.and_then(|scalar| scalar.error(raw.value)),
            duration: (!is_entry).then(|| raw.time.saturating_sub(began)),
            unreadable: before.is_none(),
            fields: matches!(before, Some(None)).then(|| layout.fields(&raw.bytes)),
            changes: before.flatten().map(|before| layout.changes(&before, &raw.bytes)),
        };
        let is_error = self.is_error(raw, &event);
        match &mut self.held {
            Some(held) => held.add(event, is_error, || self.lives.present().collect()),
            None => self.outlet.event(event, &self.lives.lives)?,
        }
        Ok(())
    }

    fn enter(&mut self, raw: &Raw) -> Place {
        let made = self.made_at.and_then(|at| raw.bytes.get(at..at + 8)?.try_into().ok());
        let (number, made) = (raw.function as usize, made.map_or(0, u64::from_le_bytes));
        let life = self.lives.enter(number, raw.object as usize, raw.address, raw.time, made);
        let (place, objects) = self.calls.enter(raw, life);
        self.lives.tie(number, objects);
        place
    }

    /// `None`: the return of a call that is not known.
    fn leave(&mut self, raw: &Raw) -> Option<Place> {
        let place = self.calls.leave(raw)?;
        let (object, times) = ((raw.address, place.life), (place.began, raw.time));
        self.lives.leave(raw.function as usize, object, raw.value, times);
        Some(place)
    }

    /// Whether an event says that something failed: a negative error number or an error in place of a
    /// pointer is returned, a status other than 0 is passed on, or a bio is completed with one. At
    /// other times, a bio's memory may still hold the status of the one before.
    fn is_error(&self, raw: &Raw, event: &Event) -> bool {
        let statuses = &self.outlet.trace.functions[event.number].probe.statuses;
        let is_passed = statuses.iter().any(|&register| raw.registers[register] & 0xff != 0);
        let completes = self.lives.completes(event.number) && !event.unreadable;
        let status = self.status_at.filter(|_| completes).and_then(|at| raw.bytes.get(at));
        event.errno.is_some() || is_passed || status.is_some_and(|&byte| byte != 0)
    }

    /// Prints what is left: lives and ledger, or the summary. Returns what the outputs are made of.
    pub fn finish(mut self, ledger: Ledger) -> Result<TraceReport> {
        if self.bound() == Some("--memory") {
            let megabytes = self.outlet.cli.memory / 1_000_000;
            eprintln!("ctracer: the trace has ended, since it takes {megabytes} MB (--memory)");
        }
        let (mut outlet, mut lives) = (self.outlet, mem::take(&mut self.lives.lives));
        if let Some(held) = self.held {
            // Now it is known which lives have an error.
            let (events, failed) = held.take(&lives);
            outlet.summary.without_error = Some(lives.len() - failed.len());
            lives = failed;
            let mut known = 0;
            for event in events {
                if outlet.is_full() {
                    outlet.summary.bound = "--max-events";
                    outlet.summary.beyond += 1;
                    continue;
                }
                // Each life comes with its first event, as it does without --errors.
                known = known.max(event.life + 1);
                outlet.event(event, &lives[..known]).context("stdout")?;
            }
            lives.truncate(known);
            // A parent may begin after its child, in the same call.
            for life in &mut lives {
                life.parent = life.parent.filter(|&parent| parent < known);
                life.link = life.link.filter(|_| life.parent.is_some());
            }
        }
        outlet.finish(&lives, &ledger, self.calls.open()).context("stdout")?;
        Ok(outlet.report.unwrap_or_default())
    }
}

impl Outlet<'_> {
    fn is_full(&self) -> bool {
        self.summary.events >= self.cli.max_events
    }

    fn prints_graph(&self) -> bool {
        !self.cli.json && !self.cli.quiet
    }

    /// Whether anybody looks at more than where and when an event was.
    fn wants_events(&self) -> bool {
        !self.cli.quiet || self.cli.errors || self.report.is_some()
    }

    fn event(&mut self, event: Event, lives: &[Life]) -> Result<()> {
        let left = self.summary.event(Step::from(&event));
        if self.prints_graph() {
            let lines = self.text.event(self.trace, lives, &event, left);
            self.out.write_all(lines.as_bytes())?;
        }
        self.line(Line::Event(Box::new(event)))
    }

    fn line(&mut self, line: Line) -> Result<()> {
        if self.cli.json {
            serde_json::to_writer(&mut self.out, &line)?;
            self.out.write_all(b"\n")?;
        }
        self.report.as_mut().map_or(Ok(()), |report| report.add(line))
    }

    fn finish(&mut self, lives: &[Life], ledger: &Ledger, open: usize) -> Result<()> {
        self.out.write_all(self.text.rest().as_bytes())?;
        for life in lives {
            self.line(Line::Life(life.clone()))?;
        }
        self.line(Line::Ledger(*ledger))?;
        let (events, lives_written) = (self.summary.events, lives.len() as u64);
        self.line(Line::End(End { events, lives: lives_written }))?;
        let summary = self.summary.print(self.trace, lives, ledger, open);
        if self.cli.json {
            std::io::stderr().write_all(summary.as_bytes()).ok();
        } else {
            self.out.write_all(summary.as_bytes())?;
        }
        Ok(self.out.flush()?)
    }
}
