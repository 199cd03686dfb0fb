//! Reads a recording: the file of JSON lines that `--json` has written.
//!
//! A recording comes from another machine, and may be cut off, edited or not be one at all. Each line
//! is read within a bound, and checked against those before it. At the first one that is wrong, reading
//! ends: the report is made of the lines before it, and the caller tells the user which line it was.

use std::io::{BufRead, Read};

use anyhow::{Context, Result, anyhow, ensure};

use crate::{check::Checker, record::Line, report::TraceReport};

/// The longest line that is read, in MiB. The tracer's longest is the first one, of all functions: that
/// of a struct that a thousand functions take has 300 kB. An event has the bytes of one object, which
/// the ring buffer of 16 MiB has room for.
const LONGEST: usize = 16;
/// How much of an error is shown: it may quote the line.
const SHOWN: usize = 300;

/// Reads a file of JSON lines up to its end, or to a line that is wrong: what comes after such a one is
/// about objects of which something is not known. `memory`: the bytes that the report may take.
///
/// Returns what is wrong, if anything. Fails where not even the first line can be used.
pub fn read(mut file: impl BufRead, memory: usize) -> Result<(TraceReport, Option<String>)> {
    let (mut report, mut checker) = (TraceReport::default(), Checker::default());
    let (mut line, mut number) = (Vec::new(), 0_usize);
    loop {
        let next = number + 1;
        let added = match next_line(&mut file, &mut line) {
            Ok(false) => break,
            Ok(true) => add(&line, &mut report, &mut checker),
            Err(error) => Err(error),
        };
        if let Err(error) = added {
            let error = shown(&format!("{error:#}"));
            ensure!(
                number > 0,
                "line 1 is damaged: {error}. Give a file that ctracer --json has written"
            );
            let why = format!(
                "line {next} is damaged, and what follows is not read: {error}. The report is made of the \
                 lines before: copy the file again, or record again"
            );
            return Ok((report, Some(why)));
        }
        number = next;
        let taken = report.memory.saturating_add(checker.memory());
        if taken > memory {
            let megabytes = memory / 1_000_000;
            let why = format!(
                "line {number} is the last one that is read, since the report takes {megabytes} MB: give it \
                 more (--memory), or record fewer events (--max-events)"
            );
            return Ok((report, Some(why)));
        }
    }
    ensure!(number > 0, "the file is empty: give one that ctracer --json has written");
    let missing = checker.missing(&report).map(|why| {
        format!(
            "it ends with line {number}, and the trace does not: {why}. The report is made of what is \
             here: copy the file again, or record again"
        )
    });
    Ok((report, missing))
}

/// Reads the next line, without its end. False at the end of the file.
fn next_line(file: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool> {
    line.clear();
    let most = LONGEST << 20;
    let taken = file.by_ref().take(most as u64 + 2).read_until(b'\n', line);
    let taken = taken.context("it cannot be read")?;
    if line.last() == Some(&b'\n') {
        line.pop();
    }
    ensure!(
        line.len() <= most,
        "it is longer than {LONGEST} MiB, and ctracer writes no line that is"
    );
    Ok(taken > 0)
}

fn add(line: &[u8], report: &mut TraceReport, checker: &mut Checker) -> Result<()> {
    let line: Line = serde_json::from_slice(line).map_err(|error| unreadable(&error))?;
    checker.check(report, &line)?;
    report.add(line)
}

/// Why a line is not JSON of ours. Each line is a text of its own to the parser: where it says that
/// this is line 1, that would only confuse.
fn unreadable(error: &serde_json::Error) -> anyhow::Error {
    let (text, column) = (error.to_string(), error.column());
    let text =
        text.strip_suffix(&format!(" at line {} column {column}", error.line())).unwrap_or(&text);
    if column > 0 { anyhow!("{text}, at byte {column} of it") } else { anyhow!("{text}") }
}

/// A text that may come from the file: it must not move the cursor, nor fill the screen.
fn shown(text: &str) -> String {
    let start: String = text.chars().take(SHOWN).collect();
    let dots = if start.len() < text.len() { "…" } else { "" };
    common::printable(&start) + dots
}

#[cfg(test)]
mod tests;
