//! Verdicts as a learner sees them.

use textwrap::{Options, WordSplitter, indent};
use workshop::events::{Ended, Verdict};

use crate::{exercise::Judge, explain};

/// A paragraph in lines of at most so many columns.
pub fn wrapped(text: &str, columns: usize) -> String {
    let options = Options::new(columns).word_splitter(WordSplitter::NoHyphenation);
    let words: Vec<&str> = text.split_whitespace().collect();
    textwrap::fill(&words.join(" "), options)
}

/// What a learner sees of a judge.
pub fn shown(judge: &Judge, ended: &Ended) -> String {
    let title = &judge.title;
    match &ended.verdict {
        Verdict::Passed => {
            let compared = ended.compared.iter().map(|figures| format!("\n      {figures}"));
            format!("  ✓ {title}{}", compared.collect::<String>())
        }
        Verdict::NotJudged(why) => format!("  – {title} (not judged: {why})"),
        Verdict::NotRun => format!("  – {title} (not run)"),
        Verdict::Failed(why) => {
            format!("  ✗ {title}\n{}", failure(&judge.expected, &events_last(why)))
        }
    }
}

/// How many lines of a judge's message are shown; the others are in the log.
const SHOWN: usize = 12;

/// A judge's message, with the lines of the trace pipe that it quotes behind all others: the program
/// prints its summary after them, and the summary says more.
pub fn events_last(why: &str) -> String {
    let (mut lines, mut events) = (Vec::new(), Vec::new());
    for line in why.lines() {
        let (text, event) = line.split_at(event(line).unwrap_or(line.len()));
        lines.extend(Some(text.trim_end()).filter(|text| event.is_empty() || !text.is_empty()));
        events.extend(Some(event).filter(|event| !event.is_empty()));
    }
    lines.extend(events);
    lines.join("\n")
}

/// Where an event of the trace pipe begins in this line: 24 columns for the task, then the CPU.
fn event(line: &str) -> Option<usize> {
    let (task_and_cpu, _) = line.split_once(": bpf_trace_printk: ")?;
    let start = task_and_cpu.rfind(" [")?.checked_sub(24)?;
    line.is_char_boundary(start).then_some(start)
}

/// What a learner sees of a judge that says no.
fn failure(expected: &str, why: &str) -> String {
    let lines: Vec<&str> = why.lines().collect();
    let mut shown = lines[..lines.len().min(SHOWN)].join("\n");
    if lines.len() > SHOWN {
        shown += &format!("\n… and {} more lines", lines.len() - SHOWN);
    }
    let mut text = match explain::is_about_itself(why) {
        true => String::new(),
        false => format!("      expected:\n{}\n", indent(expected.trim_end(), "        ")),
    };
    text += &format!("      yours:\n{}", indent(&shown, "        "));
    if explain::is_refused(why)
        && let Some(meaning) = explain::refusal(why)
    {
        let meaning = indent(&wrapped(meaning, 80), "        ");
        text += &format!("\n      what this means:\n{meaning}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_short_and_explained() {
        let long = format!("0 lines, 500 reads\n{}", "x\n".repeat(100));
        let shown = failure("a line for every bio", &long);
        assert!(shown.starts_with("      expected:\n        a line for every bio\n"), "{shown}");
        assert!(shown.contains("… and 89 more lines") && shown.lines().count() < 20, "{shown}");
        let shown =
            failure("x", "the verifier rejects y(): R0 invalid mem access 'map_value_or_null'");
        assert!(shown.contains("what this means:\n        A look-up"), "{shown}");
    }

    #[test]
    fn what_is_expected_is_shown_only_where_it_explains_something() {
        for why in [
            "your program does not start: it has ended with exit code 0, and said nothing",
            "mine-03: the verifier rejects io_end(): something new",
            "after Ctrl-C: your program: exit code 101, and it said: thread 'main' panicked at \
             mine/03/src/main.rs:9:5:\nboom\n",
            "your program: no exit code, and it said: ",
        ] {
            let shown = failure("a line for every bio", why);
            assert!(shown.starts_with("      yours:\n"), "{shown}");
            assert!(!shown.contains("expected") && !shown.contains("every bio"), "{shown}");
        }
        assert!(failure("a line for every bio", "0 lines").contains("a line for every bio"));
    }

    #[test]
    fn a_judge_that_could_not_judge_is_not_a_good_one() {
        let judge = Judge { test: "a".into(), title: "title".into(), expected: "x".into() };
        let ended = |verdict| Ended {
            name: "a".into(),
            verdict,
            compared: vec!["1 with 1".into()],
            weakly: None,
            cost: None,
        };
        assert_eq!(shown(&judge, &ended(Verdict::Passed)), "  ✓ title\n      1 with 1");
        let why = Verdict::NotJudged("no fentry".into());
        assert_eq!(shown(&judge, &ended(why)), "  – title (not judged: no fentry)");
    }

    #[test]
    fn a_summary_comes_before_events() {
        let event =
            "              dd-550     [001] ...21   229.544672: bpf_trace_printk: submit_bio(";
        let why = format!("1 of 500: {event}\n{event}\n\n2 trace lines, 0 lost\n       1 bios");
        let shown = format!("1 of 500:\n\n2 trace lines, 0 lost\n       1 bios\n{event}\n{event}");
        assert_eq!(events_last(&why), shown);
        // The name of a task has 15 characters at most, and any of them.
        let odd = event.replace("             dd-", "[x] y-z: [0000]-");
        assert_eq!(events_last(&format!("no: {odd}\nlast")), format!("no:\nlast\n{odd}"));
    }
}
