use serde_json::{Value, json};

use super::*;
use crate::report::tests::{calls, sample, two_objects};

const MEMORY: usize = 1_000_000_000;

#[test]
fn a_record_is_read_back() {
    let sample = sample();
    let text = sample.text();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1 + sample.events.len() + sample.lives.len() + 2);
    assert_eq!((&lines[0]["line"], &lines[0]["type"]), (&json!("trace"), &json!("bio")));
    assert_eq!(lines[0]["functions"][3]["name"], "bio_endio");
    let first = &lines[1];
    assert_eq!(first["kind"], "entry");
    assert_eq!(first["fields"]["bi_iter.bi_sector"], 2048);
    assert_eq!(first["fields"]["bi_opf"], "REQ_OP_WRITE|REQ_SYNC|REQ_IDLE");
    assert_eq!((first.get("changes"), first.get("unreadable")), (None, None));
    let changes = json!([{ "field": "bi_iter.bi_sector", "before": 2048, "after": 4096 }]);
    assert_eq!(lines[2]["changes"], changes);
    assert_eq!((&lines[10]["kind"], &lines[10]["duration"]), (&json!("return"), &json!(650)));
    assert_eq!(lines[10].get("value"), None, "submit_bio() returns nothing");
    let clone = &lines[1 + sample.events.len() + 1];
    assert_eq!((&clone["parent"], &clone["link"]), (&json!(0), &json!("clone")));
    assert_eq!(lines[lines.len() - 2]["null"], 2);
    assert_eq!(lines.last().unwrap(), &json!({ "line": "end", "events": 12, "lives": 2 }));
    for (line, expected) in text.lines().zip(sample.lines()) {
        assert_eq!(serde_json::from_str::<Line>(line).unwrap(), expected);
    }
    let (report, damage) = read(text.as_bytes(), MEMORY).unwrap();
    assert_eq!(damage, None);
    let (report, expected) = (report.finish(), sample.report());
    assert_eq!((&report.trace, &report.events), (&expected.trace, &expected.events));
    assert_eq!((&report.lives, report.ledger), (&sample.lives, Some(sample.ledger)));
    assert_eq!(calls(&report), calls(&expected));
}

#[test]
fn a_damaged_record_is_read_as_far_as_it_goes() {
    let text = sample().text();
    let read_all = |text: &str| {
        let (report, damage) = read(text.as_bytes(), MEMORY).unwrap();
        let report = report.finish();
        (report.events.len(), report.lives.len(), report.ledger, damage.unwrap())
    };
    let lines: Vec<&str> = text.lines().collect();
    // Cut off within a line, and at the end of one.
    let (events, lives, ledger, why) = read_all(&text[..text.find("1500").unwrap()]);
    assert_eq!((events, lives, ledger), (6, 2, None));
    assert!(why.starts_with("line 8 is damaged"), "{why}");
    let (events, lives, ledger, why) = read_all(&lines[..9].join("\n"));
    assert_eq!((events, lives, ledger), (8, 2, None));
    assert!(why.starts_with("it ends with line 9"), "{why}");
    // Its lives begin with their first events, and have no end.
    let (report, _) = read(lines[..9].join("\n").as_bytes(), MEMORY).unwrap();
    let lives: Vec<_> = report.lives.iter().map(|life| (life.begin, life.end)).collect();
    assert_eq!(lives, [(1_000, None), (1_300, None)]);
    // A line that does not follow from those before.
    for (at, from, to, expected) in [
        (4, "bio_alloc_clone", "nonesuch", "no function nonesuch()"),
        (4, "\"life\":0", "\"life\":900000", "no object has the number 900000"),
        (4, "\"time\":1250", "\"time\":-1", "invalid value"),
        (13, lines[13], lines[14], "life 1 where 0 comes next"),
        (9, lines[9], lines[0], "another trace comes after"),
    ] {
        let mut lines: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
        assert!(lines[at].contains(from), "{from}: {}", lines[at]);
        lines[at] = lines[at].replace(from, to);
        let (events, .., why) = read_all(&lines.join("\n"));
        assert_eq!(events, (at - 1).min(12), "{why}");
        assert!(why.starts_with(&format!("line {} is damaged", at + 1)), "{why}");
        assert!(why.contains(expected), "{why}");
    }
    for (text, expected) in
        [("", "empty"), ("x", "Give a file that ctracer --json"), (lines[3], "first line")]
    {
        let error = read(text.as_bytes(), MEMORY).err().unwrap();
        assert!(format!("{error:#}").contains(expected), "{error:#}");
    }
}

/// What is wrong with a recording, and how many events are in the report.
fn wrong(text: &str) -> (String, usize) {
    match read(text.as_bytes(), MEMORY) {
        Ok((report, damage)) => (damage.unwrap_or_default(), report.finish().events.len()),
        Err(error) => (format!("{error:#}"), 0),
    }
}

#[test]
fn a_return_is_not_earlier_than_its_call() {
    let (why, events) = wrong(include_str!("return_before_call.jsonl"));
    let expected = "line 3 is damaged, and what follows is not read: call 0 returns at 50 ns, earlier \
                    than it began (100 ns). The report is made of the lines before: ";
    assert!(why.starts_with(expected), "{why}");
    assert_eq!(events, 1);
}

#[test]
fn a_line_that_is_missing_or_doubled_is_noticed() {
    for sample in [sample(), two_objects()] {
        let text = sample.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(wrong(&text), (String::new(), sample.events.len()));
        for at in 0..lines.len() {
            let mut doubled = lines.clone();
            doubled.insert(at, lines[at]);
            let (why, _) = wrong(&doubled.join("\n"));
            assert!(why.starts_with(&format!("line {} is damaged", at + 2)), "{at}: {why}");
            let mut missing = lines.clone();
            missing.remove(at);
            let (why, _) = wrong(&missing.join("\n"));
            // Without its last line, all that was recorded is there.
            assert_eq!(why.contains("line "), at + 1 < lines.len(), "{at}: {why}");
        }
    }
}

#[test]
fn the_lines_are_counted() {
    let text = sample().text();
    let lines: Vec<&str> = text.lines().collect();
    // A return whose call is not there, and a call whose return is not there, are no contradiction.
    let without = |from: usize, to: usize| [&lines[..from], &lines[to..]].concat().join("\n");
    let (why, events) = wrong(&without(9, 13));
    assert!(why.starts_with("line 13 is damaged"), "{why}");
    assert!(why.contains("12 events and 2 objects were written, and 8 and 2 are here"), "{why}");
    assert_eq!(events, 8);
    // Without the last line, the ledger tells.
    let (why, _) = wrong(&[&lines[..9], &lines[13..16]].concat().join("\n"));
    assert!(why.starts_with("it ends with line 12, and the trace does not"), "{why}");
    assert!(why.contains("counts 12 calls and returns, and 8 are here"), "{why}");
    assert_eq!(wrong(&[&lines[..16]].concat().join("\n")), (String::new(), 12));
}

#[test]
fn the_parts_are_in_order() {
    let text = sample().text();
    let lines: Vec<&str> = text.lines().collect();
    for (order, expected) in [
        (
            vec![0, 1, 13, 2],
            "line 4 is damaged, and what follows is not read: an event comes after the objects",
        ),
        (
            vec![0, 15, 1],
            "line 3 is damaged, and what follows is not read: an event comes after the ledger",
        ),
        (vec![0, 15, 16], "line 3 is damaged, and what follows is not read: 12 events"),
        (vec![0, 1, 16], "line 3 is damaged, and what follows is not read: the trace ends here"),
        (vec![0, 15, 15], "another ledger comes after the ledger"),
        (vec![0, 15, 13], "an object comes after the ledger"),
        (vec![0, 0], "line 2 is damaged, and what follows is not read: another trace comes after"),
        (vec![0, 1, 2, 4, 3], "call 2 begins here, and has returned before"),
        (vec![1], "line 1 is damaged: the first line of a trace is missing"),
    ] {
        let text: Vec<&str> = order.iter().map(|&at: &usize| lines[at]).collect();
        let (why, _) = wrong(&text.join("\n"));
        assert!(why.contains(expected), "{order:?}: {why}");
    }
    let after = [&text, lines[1]].concat();
    assert!(wrong(&after).0.contains("an event comes after the end"), "{}", wrong(&after).0);
    let unknown = [lines[0], &lines[1].replace("\"event\"", "\"even\\u001b[2J\"")].join("\n");
    let (why, _) = wrong(&unknown);
    assert!(why.contains("unknown variant") && !why.contains('\u{1b}'), "{why:?}");
}

/// Each line's number, what to replace in it, and the message.
#[test]
fn what_no_kernel_has_is_damage() {
    for (at, from, to, expected) in [
        (1, "\"depth\":0", "\"depth\":4294967295", "and not in 4294967295"),
        (1, "\"depth\":0", "\"depth\":4294967296", "invalid value"),
        (1, "\"depth\":0", "\"depth\":2", "lies in 2 calls, which are more than began"),
        (1, "\"cpu\":0", "\"cpu\":70000", "no CPU 70000"),
        (1, "\"tid\":42", "\"tid\":4194304", "no thread 4194304"),
        (1, "0xffff", "0xg", "is not an address"),
        (1, "\"kind\"", "\"duration\":1,\"kind\"", "a return must have a duration"),
        (1, "2048", "1e300", "bi_iter.bi_sector: the value must be a whole number"),
        (1, "2048", "[[]]", "the value must be a whole number"),
        (1, "2048", "1e999", "number out of range"),
        (1, "2048", "NaN", "expected value"),
        (1, "\"time\":1000", "\"time\":18446744073709551616", "invalid type"),
        (3, "\"call\":2", "\"call\":0", "call 0 would begin twice"),
        (3, "\"call\":2", "\"call\":99", "call 3 begins after call 99"),
        (4, "\"call\":2", "\"call\":1", "by thread 42 at depth 2, and began as"),
        (4, "\"life\":0", "\"life\":1", "object 1 was not passed to call 2"),
        (4, "\"duration\":50", "\"duration\":51", "the duration is 51 ns, and call 2 began 50 ns"),
        (5, "\"time\":1300", "\"time\":1249", "the thread has had an event at 1250 ns before"),
        (
            5,
            "\"call\":3",
            "\"call\":18446744073709551615",
            "call 4 begins after call 18446744073709551615",
        ),
        (
            9,
            "\"address\":\"0xffff888100001000\"",
            "\"address\":\"0x1\"",
            "and was at 0xffff888100001000",
        ),
        (13, "\"end\":1700", "\"end\":999", "object 0 ends at 999 ns, and begins at 1000 ns"),
        (13, "\"duration\":700", "\"duration\":701", "the duration of object 0 is 701 ns"),
        (
            13,
            "\"begin\":1000,\"end\":1700,\"duration\":700",
            "\"begin\":9000,\"end\":null,\"duration\":null",
            "after the last event",
        ),
        (13, "\"parent\":null", "\"parent\":0", "object 0 comes from itself"),
        (14, "\"parent\":0", "\"parent\":7", "object 1 comes from object 7, which has no line"),
        (14, "\"link\":\"clone\"", "\"link\":null", "has a parent or a link, and not both"),
        (15, "\"entries\":6", "\"entries\":5", "counts 11 calls and returns, and 12 are here"),
        (0, "bio_endio", "bio;endio", "is not the name of a function"),
        (0, "\"type\":\"bio\"", "\"type\":\"\"", "which struct was traced"),
    ] {
        let text = sample().text();
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        assert!(lines[at].contains(from), "{from}: {}", lines[at]);
        lines[at] = lines[at].replacen(from, to, 1);
        let (why, _) = wrong(&lines.join("\n"));
        assert!(why.contains(expected) && why.contains("line "), "{at}, {to}: {why}");
    }
}

/// A line without an end is read up to the bound, and what is quoted of one does not fill the screen.
#[test]
fn a_line_has_a_bound() {
    let zeros = std::io::BufReader::new(std::io::repeat(0));
    let error = read(zeros, MEMORY).err().unwrap().to_string();
    assert!(error.starts_with("line 1 is damaged: it is longer than 16 MiB"), "{error}");
    let text = sample().text();
    let first = text.lines().next().unwrap();
    let quotes = format!("{first}\n{{\"line\":\"{}\"}}", "x".repeat(1 << 20));
    let (why, _) = wrong(&quotes);
    assert!(why.starts_with("line 2 is damaged") && why.len() < 1000, "{}", why.len());
}

#[test]
fn a_report_keeps_to_its_memory() {
    let text = sample().text();
    let (whole, _) = read(text.as_bytes(), MEMORY).unwrap();
    let (report, why) = read(text.as_bytes(), whole.memory / 2).unwrap();
    let (why, events) = (why.unwrap(), report.finish().events.len());
    assert!((1..12).contains(&events), "{events}");
    assert!(why.starts_with(&format!("line {} is the last one that is read", events + 1)), "{why}");
    assert!(why.contains("--memory"), "{why}");
}
