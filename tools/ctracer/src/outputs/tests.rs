//! Damaged recordings: each one is read, or its error names a line, and no output panics or breaks.

use serde_json::Value;

use super::*;
use crate::{
    report::tests::{sample, trace, two_objects},
    summary::Summary,
    text::Text,
};

/// Random numbers, the same each time (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

/// Numbers that code may trip over.
const NUMBERS: [&str; 8] = [
    "0",
    "-1",
    "1",
    "4294967295",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e300",
];

/// Replaces one of the line's numbers.
fn number(line: &mut String, random: &mut Random) {
    let is_digit = |at: usize| line.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
    let begins = |&at: &usize| is_digit(at) && line.as_bytes()[at - 1] == b':';
    let found: Vec<usize> = (1..line.len()).filter(begins).collect();
    if found.is_empty() {
        return;
    }
    let from = found[random.below(found.len())];
    let to = (from..).find(|&at| !is_digit(at)).unwrap();
    line.replace_range(from..to, NUMBERS[random.below(NUMBERS.len())]);
}

/// Removes one of the line's keys.
fn key(line: &mut String, random: &mut Random) {
    let mut value: Value = serde_json::from_str(line).unwrap();
    let keys = value.as_object_mut().unwrap();
    let name = keys.keys().nth(random.below(keys.len())).unwrap().clone();
    keys.remove(&name);
    *line = value.to_string();
}

/// A damaged file.
fn damaged(text: &str, random: &mut Random) -> Vec<u8> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let at = random.below(lines.len());
    match random.below(8) {
        0 => drop(lines.remove(at)),
        1 => lines.insert(at, lines[at].clone()),
        2 => {
            let line = lines.remove(at);
            lines.insert(random.below(lines.len() + 1), line);
        }
        3 => {
            let length = lines[at].len();
            lines[at].truncate(random.below(length));
        }
        4 => key(&mut lines[at], random),
        5 => {
            let mut bytes = text.as_bytes().to_vec();
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
            return bytes;
        }
        _ => number(&mut lines[at], random),
    }
    lines.join("\n").into_bytes()
}

/// Makes all outputs of a file. Returns what is wrong with it.
fn outputs(file: &[u8]) -> Option<String> {
    let (report, damage) = match recording::read(file, 1_000_000_000) {
        Ok((report, damage)) => (report.finish(), damage),
        Err(error) => return Some(error.to_string()),
    };
    let written = |write: WriteReport| {
        let mut written = Vec::new();
        write(&mut written, &report).unwrap();
        String::from_utf8(written).unwrap()
    };
    let trace: Value = serde_json::from_str(&written(perfetto::write)).unwrap();
    assert!(trace["traceEvents"].is_array());
    let page = written(html::write);
    let (_, data) = page.split_once("type=\"application/json\">").unwrap();
    let (data, _) = data.split_once("</script>").unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["events"].as_array().unwrap().len(), report.events.len());
    assert!(!written(folded::write).contains('\u{1b}'));
    // The call graph and the summary are made while a trace runs; they take the same lines.
    let (mut text, mut summary) = (Text::new(true), Summary::new(&report.trace, true));
    for event in &report.events {
        let left = summary.event(event.into());
        text.event(&report.trace, &report.lives, event, left);
    }
    text.rest();
    summary.print(&report.trace, &report.lives, &report.ledger.unwrap_or_default(), 0);
    damage
}

#[test]
fn damaged_recordings_break_no_output() {
    let texts = [sample().text(), two_objects().text()];
    texts.iter().for_each(|text| assert_eq!(outputs(text.as_bytes()), None));
    let (mut random, mut found) = (Random(0x9e37_79b9_7f4a_7c15), 0);
    for text in texts.iter().cycle().take(1200) {
        let file = damaged(text, &mut random);
        let shown = || String::from_utf8_lossy(&file).into_owned();
        let Some(why) = outputs(&file) else { continue };
        assert!(why.contains("line "), "{why} in {}", shown());
        assert!(!why.contains(|c: char| c.is_control()), "{why:?} in {}", shown());
        found += 1;
    }
    // The others are as good as undamaged: of a field, there may be any value.
    assert!(found > 850, "{found}");
}

#[test]
fn a_name_moves_no_cursor() {
    let mut sample = sample();
    sample.events[0].comm = "\u{1b}[2J\r\n;</script>".to_owned();
    sample.trace.type_name = "constructor".to_owned();
    sample.trace.release = "\u{1b}[2J</script>\u{2028}".to_owned();
    sample.trace.functions[0].prototype = "\u{1b}<!--<script>".to_owned();
    assert_eq!(outputs(sample.text().as_bytes()), None);
}

/// Calls that each lie in the one before: the time and memory to write them stay small.
#[test]
fn deep_calls_are_written() {
    let rows: Vec<_> = (0..2048).map(|at| (at, 0, 1, at as u32, 0, 0, false)).collect();
    let mut trace = trace(&rows);
    trace.ledger.entries = 2048;
    assert_eq!(outputs(trace.text().as_bytes()), None);
}
