use super::*;
use crate::{
    decode::tests::{bio, layout},
    life::Link,
    record::{End, Function},
    value::{Change, Pairs},
};

/// A trace as a table: `(time, cpu, thread, depth, function, life, is it a return)`.
pub type Row = (u64, u32, u32, u32, usize, usize, bool);

/// The lines of a trace.
#[derive(Clone, Default)]
pub struct Sample {
    pub trace: Trace,
    pub events: Vec<Event>,
    pub lives: Vec<Life>,
    pub ledger: Ledger,
}

impl Sample {
    pub fn lines(&self) -> Vec<Line> {
        let events = self.events.iter().map(|event| Line::Event(Box::new(event.clone())));
        let lives = self.lives.iter().map(|life| Line::Life(life.clone()));
        let lines = [Line::Trace(self.trace.clone())].into_iter().chain(events).chain(lives);
        let (events, lives_written) = (self.events.len() as u64, self.lives.len() as u64);
        let end = Line::End(End { events, lives: lives_written });
        lines.chain([Line::Ledger(self.ledger), end]).collect()
    }

    /// As JSON lines.
    pub fn text(&self) -> String {
        self.lines().iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect()
    }

    pub fn report(&self) -> TraceReport {
        let mut report = TraceReport::default();
        self.lines().into_iter().for_each(|line| report.add(line).unwrap());
        report.finish()
    }
}

fn address(life: usize) -> String {
    format!("{:#x}", 0xffff_8881_0000_1000 + life as u64 * 256)
}

pub fn trace(rows: &[Row]) -> Sample {
    let names = ["submit_bio", "submit_bio_noacct", "bio_alloc_clone", "bio_endio"];
    let functions = names.iter().map(|name| Function {
        name: (*name).to_owned(),
        prototype: format!("void {name}(struct bio *bio)"),
        parameters: vec!["bio".to_owned()],
        ..Function::default()
    });
    let fields = layout("bio").fields(&bio(2048));
    let (mut open, mut calls) = (HashMap::new(), 0);
    let mut known = std::collections::HashSet::new();
    let mut events = Vec::new();
    for &(time, cpu, tid, depth, function, life, is_return) in rows {
        let task = (tid, if tid == 0 { cpu } else { 0 }, depth, function);
        let is_first = known.insert(life);
        // A call's second object comes at the same time.
        let known_call = open.get(&task).copied().filter(|&(_, began)| is_return || began == time);
        let (call, began) = known_call.unwrap_or((calls, time));
        calls += usize::from(known_call.is_none());
        open.insert(task, (call, began));
        events.push(Event {
            time,
            cpu,
            tgid: tid,
            tid,
            comm: if tid == 0 { format!("swapper/{cpu}") } else { "fio".to_owned() },
            function: names[function].to_owned(),
            number: 0,
            call,
            kind: if is_return { Kind::Return } else { Kind::Entry },
            argument: 0,
            address: address(life),
            life,
            depth,
            arguments: (!is_return).then(Pairs::new),
            value: None,
            errno: None,
            duration: is_return.then(|| time - began),
            unreadable: false,
            fields: is_first.then(|| fields.clone()),
            changes: (!is_first).then(Vec::new),
        });
    }
    let lives = (0..=rows.iter().map(|row| row.5).max().unwrap_or_default()).map(|life| {
        let mut times = rows.iter().filter(|row| row.5 == life).map(|row| row.0);
        let begin = times.next().unwrap_or_default();
        let end = times.next_back();
        let duration = end.map(|end| end - begin);
        Life { life, address: address(life), begin, end, duration, ..Life::default() }
    });
    Sample {
        trace: Trace {
            type_name: "bio".to_owned(),
            release: "6.1.0-50-amd64".to_owned(),
            functions: functions.collect(),
        },
        events,
        lives: lives.collect(),
        ledger: Ledger::default(),
    }
}

/// A bio is submitted by a thread, which clones it; another CPU completes the clone, then the bio.
/// The completion of the clone begins before the first submit_bio() has returned.
pub fn sample() -> Sample {
    let mut trace = trace(&[
        (1_000, 0, 42, 0, 0, 0, false),
        (1_100, 0, 42, 1, 1, 0, false),
        (1_200, 0, 42, 2, 2, 0, false),
        (1_250, 0, 42, 2, 2, 0, true),
        (1_300, 0, 42, 2, 1, 1, false),
        (1_400, 0, 42, 2, 1, 1, true),
        (1_500, 1, 0, 0, 3, 1, false),
        (1_550, 0, 42, 1, 1, 0, true),
        (1_600, 1, 0, 1, 3, 0, false),
        (1_650, 0, 42, 0, 0, 0, true),
        (1_700, 1, 0, 1, 3, 0, true),
        (1_800, 1, 0, 0, 3, 1, true),
    ]);
    trace.ledger = Ledger { hits: 14, entries: 6, returns: 6, null: 2, ..Ledger::default() };
    (trace.lives[1].parent, trace.lives[1].link) = (Some(0), Some(Link::Clone));
    let field = "bi_iter.bi_sector".to_owned();
    let change = Change { field, before: 2048.into(), after: 4096.into() };
    trace.events[1].changes = Some(vec![change]);
    trace
}

/// A call with two objects, and two calls beside it.
pub fn two_objects() -> Sample {
    let mut trace = trace(&[
        (10, 0, 1, 0, 0, 0, false),
        (10, 0, 1, 0, 0, 1, false),
        (12, 1, 2, 0, 1, 2, false),
        (15, 0, 1, 1, 2, 1, false),
        (18, 0, 1, 1, 2, 1, true),
        (20, 0, 1, 0, 0, 0, true),
        (20, 0, 1, 0, 0, 1, true),
        (30, 1, 2, 0, 1, 2, true),
    ]);
    trace.events[1].argument = 1;
    trace.events[6].argument = 1;
    trace.ledger = Ledger { hits: 6, entries: 3, returns: 3, ..Ledger::default() };
    trace
}

/// Function, begin, end, caller and time of its own of each call.
pub fn calls(report: &TraceReport) -> Vec<(&str, u64, u64, Option<usize>, u64)> {
    let call = |call: &Call| {
        let function = &*report.events[call.entry].function;
        (function, call.begin, call.end, call.parent, call.own_time())
    };
    report.calls.iter().map(call).collect()
}

#[test]
fn calls_nest_by_thread_and_cpu() {
    let report = sample().report();
    let expected = [
        ("submit_bio", 1_000, 1_650, None, 200),
        ("submit_bio_noacct", 1_100, 1_550, Some(0), 300),
        ("bio_alloc_clone", 1_200, 1_250, Some(1), 50),
        ("submit_bio_noacct", 1_300, 1_400, Some(1), 100),
        ("bio_endio", 1_500, 1_800, None, 200),
        ("bio_endio", 1_600, 1_700, Some(4), 100),
    ];
    assert_eq!(calls(&report), expected);
    assert!(report.calls.iter().all(|call| call.exit.is_some()));
}

#[test]
fn a_lost_return_ends_with_what_is_seen_next() {
    // The return of the inner call is lost, then that of a call on its own.
    let report = trace(&[
        (10, 0, 1, 0, 0, 0, false),
        (20, 0, 1, 1, 1, 0, false),
        (25, 0, 1, 2, 2, 0, false),
        (28, 0, 1, 2, 2, 0, true),
        (40, 0, 1, 0, 0, 0, true),
        (50, 0, 1, 0, 0, 0, false),
        (60, 0, 1, 0, 3, 0, false),
        (70, 0, 1, 0, 3, 0, true),
        (80, 0, 1, 0, 2, 0, true),
    ])
    .report();
    let ends: Vec<_> = report.calls.iter().map(|call| (call.end, call.exit.is_some())).collect();
    assert_eq!(ends, [(40, true), (28, false), (28, true), (50, false), (70, true)]);
    assert_eq!(report.call_of[8], None);
}

#[test]
fn two_objects_make_one_call() {
    let mut trace = trace(&[
        (10, 0, 1, 0, 0, 0, false),
        (10, 0, 1, 0, 0, 1, false),
        (20, 0, 1, 0, 0, 0, true),
        (20, 0, 1, 0, 0, 1, true),
    ]);
    trace.events[1].argument = 1;
    trace.events[3].argument = 1;
    let report = trace.report();
    assert_eq!((report.calls.len(), &report.calls[0].lives), (1, &vec![0, 1]));
    assert_eq!(report.call_of, [Some(0); 4]);
}

#[test]
fn idle_cpus_are_tasks_of_their_own() {
    let report = trace(&[
        (10, 0, 0, 0, 0, 0, false),
        (20, 1, 0, 0, 0, 1, false),
        (30, 0, 0, 0, 0, 0, true),
        (40, 1, 0, 0, 0, 1, true),
    ])
    .report();
    let times: Vec<_> = calls(&report).iter().map(|call| (call.1, call.2)).collect();
    assert_eq!(times, [(10, 30), (20, 40)]);
}

/// Events of two CPUs may come in the wrong order, and an object may begin before all events.
#[test]
fn times_count_from_the_earliest() {
    let mut trace = trace(&[
        (20, 0, 1, 0, 0, 0, false),
        (15, 1, 2, 0, 0, 1, false),
        (30, 1, 2, 0, 0, 1, true),
        (25, 0, 1, 0, 0, 0, true),
    ]);
    let report = trace.report();
    assert_eq!((report.start(), report.last), (15, 30));
    trace.lives[0].begin = 10;
    assert_eq!(trace.report().start(), 10);
    // Cut off before its own events: another one names it.
    let mut report = TraceReport::default();
    let events: Vec<Line> = trace.lines().drain(..3).collect();
    let mut lines = events.into_iter();
    report.add(lines.next().unwrap()).unwrap();
    report.add(lines.nth(1).unwrap()).unwrap();
    let report = report.finish();
    let lives: Vec<_> = report.lives.iter().map(|life| (&*life.address, life.begin)).collect();
    assert_eq!(lives, [("?", 15), ("0xffff888100001100", 15)]);
}
