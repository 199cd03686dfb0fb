//! What test programs reported: a line for each test, and the sum.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use workshop::events::{Cost, Ended, NOT_RUN, Reader, TestEvent, Verdict};

use crate::commands::test::timings::{Guest, Test, Timings};
use crate::fetch::table::Passed;

/// How many lines of a failure the end of a run repeats: a log of CI may hold no more than its end.
const SHOWN: usize = 20;

/// What stands in the table for a program without tests.
pub const NOT_TESTED: &str = "not tested";

/// What test programs reported.
#[derive(Debug, Default)]
pub struct TestReport {
    /// Where they run: a kernel, or the host.
    place: String,
    /// Stands before the lines that they print, unless they run alone: with the part of the tests.
    pub label: String,
    alone: bool,
    /// The programs of the workshop.
    known: Vec<String>,
    reader: Reader,
    /// The tests, with the places where they ran.
    ended: Vec<(String, Ended)>,
    /// The tests that failed, and what failed beside.
    pub failed: Vec<String>,
    /// The release of the kernel that they ran on: `6.1.0-50-amd64`.
    release: Option<String>,
    /// To be printed.
    lines: Vec<String>,
    /// How many tests the guest has not begun, once it has said how many there are.
    to_come: Option<u32>,
    running: Option<String>,
    /// Where the time went.
    pub timings: Timings,
}

impl TestReport {
    /// `part` is shown behind the place; `known` are the programs of the workshop.
    pub fn new(place: &str, part: &str, alone: bool, known: &[String]) -> TestReport {
        let label = format!("{place}{part}");
        let (place, known) = (place.to_owned(), known.to_vec());
        TestReport { place, label, alone, known, ..TestReport::default() }
    }

    /// Prints the lines that have accumulated. Where nobody reads them any more, the tests
    /// continue: the exit code remains.
    pub fn flush(&mut self) {
        let prefix = if self.alone { String::new() } else { format!("{}: ", self.label) };
        for line in self.lines.drain(..) {
            let _ = writeln!(std::io::stdout(), "{prefix}{line}");
        }
    }

    /// Takes in a line of a guest test program, and prints what it means. True where the tests
    /// begin.
    pub fn guest_line(&mut self, line: &str) -> bool {
        match self.reader.read(line) {
            TestEvent::Begins(tests) => {
                self.to_come = Some(tests);
                return true;
            }
            TestEvent::Started(name) => {
                self.to_come = self.to_come.map(|n| n.saturating_sub(1));
                self.running = Some(name);
            }
            TestEvent::Ended(ended) => {
                self.running = None;
                self.ended(ended);
            }
            TestEvent::Kernel(release) => {
                self.lines.push(format!("kernel {release}"));
                self.release = Some(release);
            }
            TestEvent::Text if !line.is_empty() => self.lines.push(line.to_owned()),
            TestEvent::Text | TestEvent::Noted | TestEvent::Waiting(_) | TestEvent::Left(_) => {}
        }
        false
    }

    /// Takes in a line of libtest's, and prints it unless it says nothing. `took` is the time since the
    /// last one, where the tests run one after the other.
    pub fn host_line(&mut self, line: &str, took: Option<Duration>) {
        if let Some((name, result)) =
            line.strip_prefix("test ").and_then(|test| test.rsplit_once(" ... "))
        {
            let verdict = match result {
                "ok" => Verdict::Passed,
                "FAILED" => Verdict::Failed(String::new()),
                other => Verdict::NotJudged(other.to_owned()),
            };
            let took = took.map(|took| took.as_millis() as u64);
            let cost = took.map(|took| Cost { took, ..Cost::default() });
            return self.ended(Ended { cost, ..ended(name.trim(), verdict) });
        }
        let empty = ["", "successes:", "failures:"].contains(&line.trim())
            || line.starts_with("running ")
            || line.starts_with("test result: ");
        if !empty {
            self.lines.push(line.to_owned());
        }
    }

    /// Counts a test and prints what came out.
    pub fn result(&mut self, name: &str, verdict: Verdict) {
        self.ended(ended(name, verdict));
    }

    fn ended(&mut self, ended: Ended) {
        let (name, place) = (&ended.name, self.place.clone());
        if let Some(cost) = ended.cost {
            let (place, name) = (place.clone(), name.clone());
            self.timings.tests.push(Test { place, name, cost });
        }
        let came_out = match &ended.verdict {
            Verdict::Passed => {
                let weakly = ended.weakly.as_ref().map(|why| format!(" (judged weakly: {why})"));
                format!("ok{}", weakly.unwrap_or_default())
            }
            Verdict::NotJudged(why) => format!("not judged: {why}"),
            Verdict::Failed(_) | Verdict::NotRun => "FAILED".to_owned(),
        };
        self.lines.push(format!("test {name} ... {came_out}"));
        if let Some(why) = failure(&ended.verdict) {
            self.lines.extend(why.lines().map(|line| format!("    {line}")));
            let colon = if why.is_empty() { "" } else { ": " };
            let shown: Vec<&str> = why.lines().take(SHOWN).collect();
            self.broken(format!("{name}{colon}{}", shown.join("\n")));
        }
        self.ended.push((place, ended));
    }

    /// The guest has ended, whose first test began `boot` after its start.
    pub fn guest_took(&mut self, boot: Duration, took: Duration) {
        let (place, label) = (self.place.clone(), self.label.clone());
        let [boot, took] = [boot, took].map(|time| time.as_millis() as u64);
        self.timings.guests.push(Guest { place, label, boot, took });
    }

    /// The guest has ended: what did not run is a failure.
    pub fn end_of_guest(&mut self, how: &str, success: bool) {
        match (self.running.take(), self.to_come.take()) {
            (_, None) => self.broken(format!("the guest tests did not begin ({how})")),
            (Some(test), Some(n)) => {
                self.broken(format!("{test}: the guest ended while it ran ({how})"));
                if n > 0 {
                    self.broken(format!("{n} more tests did not run"));
                }
            }
            (None, Some(n)) if n > 0 => {
                self.broken(format!("{n} tests did not run: the guest ended before ({how})"));
            }
            _ if !success && self.failed.is_empty() => {
                self.broken(format!("the guest tests ended with {how}"));
            }
            _ => {}
        }
    }

    /// Notes a failure, with the place.
    pub fn broken(&mut self, what: String) {
        let place = if self.label.is_empty() { String::new() } else { format!("{}: ", self.label) };
        self.failed.push(place + &what);
    }

    /// What it says of a kernel, for the table in docs/kernels.md.
    pub fn passed(&self) -> Passed {
        let of = |program: &String| {
            let is_its = |(_, ended): &&(String, Ended)| self.program(&ended.name) == Some(program);
            let tests = || self.ended.iter().filter(is_its).map(|(_, ended)| ended);
            let failed = tests().find(|test| failure(&test.verdict).is_some());
            if let Some(test) = failed {
                return test.name.clone();
            }
            let has_passed = tests().any(|test| test.verdict == Verdict::Passed);
            let not_judged = tests().filter(|test| matches!(test.verdict, Verdict::NotJudged(_)));
            let mut not_judged: Vec<&str> = not_judged.map(|test| &*test.name).collect();
            not_judged.sort_unstable();
            match (has_passed, not_judged.join(", ")) {
                (true, tests) if tests.is_empty() => "✓".to_owned(),
                (true, tests) => format!("✓, not judged: {tests}"),
                (false, tests) if tests.is_empty() => NOT_TESTED.to_owned(),
                (false, tests) => format!("not judged: {tests}"),
            }
        };
        let programs = self.known.iter().map(|program| (program.clone(), of(program)));
        let release = self.release.clone().unwrap_or_default();
        Passed { release, programs: programs.collect() }
    }

    /// The program that a test is about: `stage08_threads` is about stage08.
    fn program(&self, test: &str) -> Option<&String> {
        let is_of = |program: &&String| {
            let rest = test.strip_prefix(&program.replace('-', "_"));
            rest.is_some_and(|rest| rest.starts_with('_'))
        };
        self.known.iter().filter(is_of).max_by_key(|program| program.len())
    }

    /// Adds what another one has counted.
    pub fn add(&mut self, other: &TestReport) {
        self.timings.guests.extend_from_slice(&other.timings.guests);
        self.timings.tests.extend_from_slice(&other.timings.tests);
        self.ended.extend_from_slice(&other.ended);
        self.failed.extend_from_slice(&other.failed);
        self.release = self.release.take().or_else(|| other.release.clone());
        if self.known.is_empty() {
            self.known.clone_from(&other.known);
        }
    }

    /// What to print at the end: what failed, what could not be judged, and the sum.
    pub fn closing(&self) -> String {
        let mut text = String::new();
        if !self.failed.is_empty() {
            text += "\nfailed:\n";
            for line in self.failed.iter().flat_map(|failure| failure.lines()) {
                text += &format!("    {line}\n");
            }
        }
        let (mut passed, mut skipped) = (0, 0);
        let mut weak: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (place, Ended { name, verdict, weakly, .. }) in &self.ended {
            match verdict {
                Verdict::Passed => {
                    passed += 1;
                    weakly.iter().for_each(|_| weak.entry(place).or_default().push(name));
                }
                Verdict::NotJudged(why) => {
                    skipped += 1;
                    text += &format!("not judged on {place}: {name}: {why}\n");
                }
                _ => {}
            }
        }
        for (place, tests) in weak {
            let s = if tests.len() == 1 { "" } else { "s" };
            text +=
                &format!("{place}: {} test{s} judged weakly: {}\n", tests.len(), tests.join(", "));
        }
        text + &format!("{passed} passed, {} failed, {skipped} skipped", self.failed.len())
    }
}

/// Why a test failed, where it did.
fn failure(verdict: &Verdict) -> Option<&str> {
    match verdict {
        Verdict::Failed(why) => Some(why),
        Verdict::NotRun => Some(NOT_RUN),
        _ => None,
    }
}

fn ended(name: &str, verdict: Verdict) -> Ended {
    Ended { name: name.to_owned(), verdict, compared: Vec::new(), weakly: None, cost: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> TestReport {
        TestReport::new("6.1", "", true, &["stage08", "stage09", "bio-life"].map(str::to_owned))
    }

    fn of_guest(lines: &[&str]) -> TestReport {
        let mut report = report();
        lines.iter().for_each(|line| {
            report.guest_line(line);
        });
        report
    }

    const START: &str = r#"{ "type": "suite", "event": "started", "test_count": 4 }"#;
    const A: &str = r#"{ "type": "test", "event": "started", "name": "stage08_a" }"#;
    const A_OK: &str = r#"{ "type": "test", "name": "stage08_a", "event": "ok" }"#;
    const B: &str = r#"{ "type": "test", "event": "started", "name": "stage08_b" }"#;
    const B_FAILED: &str = r#"{ "type": "test", "name": "stage08_b", "event": "failed", "stdout": "Error: \"one\ntwo\"\n" }"#;

    #[test]
    fn failures_are_named_with_their_reasons() {
        let mut report = of_guest(&[r#"{"kernel":"6.1.0-50-amd64"}"#, START, A, A_OK, B, B_FAILED]);
        assert_eq!(report.release.as_deref(), Some("6.1.0-50-amd64"));
        assert!(report.closing().ends_with("1 passed, 1 failed, 0 skipped"));
        assert_eq!(report.failed, ["6.1: stage08_b: one\ntwo"]);
        let shown = ["test stage08_b ... FAILED", "    one", "    two"];
        assert_eq!(report.lines[2..], shown);
        report.end_of_guest("exit status: 1", false);
        assert_eq!(
            report.failed[1],
            "6.1: 2 tests did not run: the guest ended before (exit status: 1)"
        );
    }

    #[test]
    fn a_guest_that_dies_loses_no_result() {
        let mut report = of_guest(&[START, A, A_OK, B]);
        report.end_of_guest("exit status: 125", false);
        assert!(report.closing().ends_with("1 passed, 2 failed, 0 skipped"));
        let lost = "6.1: stage08_b: the guest ended while it ran (exit status: 125)";
        assert_eq!(report.failed, [lost, "6.1: 2 more tests did not run"]);

        let mut report = of_guest(&[]);
        report.end_of_guest("exit status: 125", false);
        assert_eq!(report.failed, ["6.1: the guest tests did not begin (exit status: 125)"]);
    }

    #[test]
    fn the_hosts_tests_are_counted_by_their_lines() {
        let mut report = report();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test c ... FAILED",
            "test d - should panic ... FAILED",
            "test e ... ignored, why",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
        ] {
            report.host_line(line, None);
        }
        assert_eq!(report.failed, ["6.1: c", "6.1: d - should panic"]);
        let skipped = "not judged on 6.1: e: ignored, why\n1 passed, 2 failed, 1 skipped";
        assert!(report.closing().ends_with(skipped));
    }

    #[test]
    fn what_was_not_judged_is_told_apart() {
        let ignored = A_OK.replace("ok", "ignored");
        let mut report = of_guest(&[START, A, r#"{"not_judged":"no fentry: here"}"#, &ignored]);
        let weak = [r#"{"judged_weakly":"skips"}"#, &A_OK.replace("08_a", "09_b"), B_FAILED];
        report.add(&of_guest(&weak));
        report.add(&TestReport { place: "7.2".into(), ..of_guest(&[A_OK]) });
        let expected = "\
\nfailed:
    6.1: stage08_b: one
    two
not judged on 6.1: stage08_a: no fentry: here
6.1: 1 test judged weakly: stage09_b
2 passed, 1 failed, 1 skipped";
        assert_eq!(report.closing(), expected);
    }

    #[test]
    fn the_table_says_what_the_tests_said() {
        let ignored = B_FAILED.replace("failed", "ignored");
        for (lines, stage08, bio_life) in [
            (&[A_OK, &A_OK.replace("stage08_a", "bio_life_x")][..], "✓", "✓"),
            (&[A_OK, B_FAILED], "stage08_b", NOT_TESTED),
            (&[A_OK, &ignored], "✓, not judged: stage08_b", NOT_TESTED),
        ] {
            // The sum of two parts of a kernel's tests.
            let mut sum = TestReport::default();
            sum.add(&of_guest(lines));
            let said = sum.passed().programs;
            assert_eq!((&*said["stage08"], &*said["bio-life"]), (stage08, bio_life));
            assert_eq!(said["stage09"], NOT_TESTED);
        }
    }
}
