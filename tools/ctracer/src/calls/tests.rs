use super::*;
use crate::{
    decode::tests::bio,
    model::{Change, Function, Ledger, Life, Link},
    value::Value,
};

/// A trace as a table: `(time, cpu, thread, depth, function, life, is it a return)`.
pub type Row = (u64, u32, u32, u32, usize, usize, bool);

pub fn trace(rows: &[Row]) -> Trace {
    let names = ["submit_bio", "submit_bio_noacct", "bio_alloc_clone", "bio_endio"];
    let functions = names.iter().map(|name| Function {
        name: (*name).to_owned(),
        prototype: format!("void {name}(struct bio *bio)"),
        parameters: vec!["bio".to_owned()],
        arguments: vec![0],
        ..Function::default()
    });
    let event = |&(time, cpu, tid, depth, function, life, is_return): &Row| Event {
        time,
        cpu,
        tgid: tid,
        tid,
        comm: if tid == 0 { format!("swapper/{cpu}") } else { "fio".to_owned() },
        function,
        kind: if is_return { Kind::Return { value: 7 } } else { Kind::Entry },
        argument: 0,
        address: 0xffff_8881_0000_1000 + life as u64 * 256,
        registers: [0; 6],
        life,
        depth,
        readable: true,
        bytes: bio(2048).into(),
        changes: Vec::new(),
    };
    let mut trace = Trace {
        type_name: "bio".to_owned(),
        release: "6.1.0-50-amd64".to_owned(),
        functions: functions.collect(),
        events: rows.iter().map(event).collect(),
        ..Trace::default()
    };
    for life in 0..=rows.iter().map(|row| row.5).max().unwrap_or_default() {
        let mut times = rows.iter().filter(|row| row.5 == life).map(|row| row.0);
        let begin = times.next().unwrap_or_default();
        trace.lives.push(Life {
            address: 0xffff_8881_0000_1000 + life as u64 * 256,
            begin,
            end: times.next_back(),
            ..Life::default()
        });
    }
    trace
}

/// A bio is submitted by a thread, which clones it; another CPU completes the clone, then the bio.
/// The completion of the clone begins before the first submit_bio() has returned.
pub fn sample() -> Trace {
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
    trace.lives[1].parent = Some((0, Link::Clone));
    let change = |field: &str, before, after| Change {
        field: field.to_owned(),
        before: Value::Number(before),
        after: Value::Number(after),
    };
    trace.events[1].bytes = bio(4096).into();
    trace.events[1].changes = vec![change("bi_iter.bi_sector", 2048, 4096)];
    trace
}

#[test]
fn calls_nest_by_thread_and_cpu() {
    let calls = Calls::new(&sample());
    let found: Vec<_> = calls
        .calls
        .iter()
        .map(|call| (call.function, call.begin, call.end, call.parent, calls.own_time(call)))
        .collect();
    let expected = [
        (0, 1_000, 1_650, None, 200),
        (1, 1_100, 1_550, Some(0), 300),
        (2, 1_200, 1_250, Some(1), 50),
        (1, 1_300, 1_400, Some(1), 100),
        (3, 1_500, 1_800, None, 200),
        (3, 1_600, 1_700, Some(4), 100),
    ];
    assert_eq!(found, expected);
    assert!(calls.calls.iter().all(|call| call.exit.is_some()));
}

#[test]
fn a_lost_return_ends_with_what_is_seen_next() {
    // The return of the inner call is lost, then that of a call on its own.
    let calls = Calls::new(&trace(&[
        (10, 0, 1, 0, 0, 0, false),
        (20, 0, 1, 1, 1, 0, false),
        (25, 0, 1, 2, 2, 0, false),
        (28, 0, 1, 2, 2, 0, true),
        (40, 0, 1, 0, 0, 0, true),
        (50, 0, 1, 0, 0, 0, false),
        (60, 0, 1, 0, 3, 0, false),
        (70, 0, 1, 0, 3, 0, true),
        (80, 0, 1, 0, 2, 0, true),
    ]));
    let ends: Vec<_> = calls.calls.iter().map(|call| (call.end, call.exit.is_some())).collect();
    assert_eq!(ends, [(40, true), (28, false), (28, true), (50, false), (70, true)]);
    assert_eq!(calls.of_event[8], None);
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
    let calls = Calls::new(&trace);
    assert_eq!(calls.calls.len(), 1);
    assert_eq!(calls.calls[0].lives, [0, 1]);
    assert_eq!(calls.of_event, [Some(0); 4]);
}

#[test]
fn idle_cpus_are_tasks_of_their_own() {
    let calls = Calls::new(&trace(&[
        (10, 0, 0, 0, 0, 0, false),
        (20, 1, 0, 0, 0, 1, false),
        (30, 0, 0, 0, 0, 0, true),
        (40, 1, 0, 0, 0, 1, true),
    ]));
    let times: Vec<_> = calls.calls.iter().map(|call| (call.begin, call.end)).collect();
    assert_eq!(times, [(10, 30), (20, 40)]);
}
