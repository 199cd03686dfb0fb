//! What a guest test program prints: libtest-mimic's JSON, and lines of our own between.

use std::mem;

use serde::{Deserialize, Serialize};

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// So many tests begin.
    Begins(u32),
    /// A test begins.
    Started(String),
    /// A test has ended.
    Ended(Ended),
    /// The release of the kernel: `6.1.0-50-amd64`.
    Kernel(String),
    /// A program cannot run on this kernel, and why.
    Unsupported(String, String),
    /// What a judge waits for, where that lasts long.
    Waiting(String),
    /// Nothing by itself: it belongs to the test that ends next, or to an event of no interest.
    Noted,
    /// Anything else.
    Text,
}

/// What came out of a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The test's name.
    pub name: String,
    /// What it says.
    pub verdict: Verdict,
    /// What was compared with what: for a learner.
    pub compared: Vec<String>,
    /// Why the test could have seen less than on another kernel.
    pub weakly: Option<String>,
    /// Where its time went.
    pub cost: Option<Cost>,
}

/// Where a test's time went. A guest test program prints it as a line `cost: {…}` before the test's
/// event, which has no time of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// From its start to its end, ms.
    pub took: u64,
    /// Programs under test that were started.
    pub starts: u64,
    /// Until they were attached, ms; of several at once, until the last one was.
    pub starting: u64,
    /// From the last signal to their ends, ms.
    pub ending: u64,
}

impl Cost {
    /// Adds what another test has cost.
    pub fn add(&mut self, other: &Cost) {
        self.took += other.took;
        self.starts += other.starts;
        self.starting += other.starting;
        self.ending += other.ending;
    }
}

/// What a test says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As expected.
    Passed,
    /// Not so: why.
    Failed(String),
    /// This kernel or machine cannot judge it: why.
    NotJudged(String),
    /// An earlier judge said no.
    NotRun,
}

/// What a guest test says of itself where an earlier judge of an attempt said no.
pub const NOT_RUN: &str = "not run";

/// Reads the lines of a test program, in their order.
#[derive(Debug, Default)]
pub struct Reader {
    compared: Vec<String>,
    weakly: Option<String>,
    not_judged: Option<String>,
    cost: Option<Cost>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    event: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    test_count: u32,
    #[serde(default)]
    stdout: String,
}

impl Reader {
    /// What the next line says.
    pub fn read(&mut self, line: &str) -> Said {
        let Ok(event) = serde_json::from_str::<Event>(line) else { return self.read_ours(line) };
        let verdict = match (&*event.kind, &*event.event) {
            ("suite", "started") => return Said::Begins(event.test_count),
            ("test", "started") => return Said::Started(event.name),
            ("test", "ok") => Verdict::Passed,
            ("test", "failed") => {
                let said = event.stdout.trim_end();
                // As libtest-mimic puts it.
                let inner = said.strip_prefix("Error: \"").and_then(|said| said.strip_suffix('"'));
                match inner.unwrap_or(said) {
                    NOT_RUN => Verdict::NotRun,
                    why => Verdict::Failed(why.to_owned()),
                }
            }
            // Its reason is not in the event.
            ("test", "ignored") => Verdict::NotJudged(self.not_judged.take().unwrap_or_default()),
            _ => return Said::Noted,
        };
        let Reader { compared, weakly, cost, .. } = mem::take(self);
        Said::Ended(Ended { name: event.name, verdict, compared, weakly, cost })
    }

    fn read_ours(&mut self, line: &str) -> Said {
        let (what, rest) = line.split_once(": ").unwrap_or((line, ""));
        match what {
            "compared" => self.compared.push(rest.to_owned()),
            "judged weakly" => {
                let before = self.weakly.take().map(|why| why + "; ");
                self.weakly = Some(before.unwrap_or_default() + rest);
            }
            "not judged" => self.not_judged = Some(rest.to_owned()),
            "waiting" => return Said::Waiting(rest.to_owned()),
            "cost" => self.cost = serde_json::from_str(rest).ok(),
            _ => {
                if let Some(program) = what.strip_prefix("unsupported ") {
                    return Said::Unsupported(program.to_owned(), rest.to_owned());
                }
                let release = line.strip_prefix("kernel ");
                return release.map_or(Said::Text, |release| Said::Kernel(release.to_owned()));
            }
        }
        Said::Noted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let mut reader = Reader::default();
        let mut read = |line: &str| reader.read(line);
        assert_eq!(read("kernel 6.1.0"), Said::Kernel("6.1.0".into()));
        assert_eq!(read("unsupported x: no y: z"), Said::Unsupported("x".into(), "no y: z".into()));
        let begins = r#"{ "type": "suite", "event": "started", "test_count": 4 }"#;
        assert_eq!(read(begins), Said::Begins(4));
        let started = r#"{ "type": "test", "event": "started", "name": "a" }"#;
        assert_eq!(read(started), Said::Started("a".into()));
        assert_eq!(read("a line"), Said::Text);
        assert_eq!(read("compared: 1 with 2: equal"), Said::Noted);
        assert_eq!(read("judged weakly: skips"), Said::Noted);
        assert_eq!(read("judged weakly: one CPU"), Said::Noted);
        let cost = Cost { took: 4, starts: 1, starting: 2, ending: 1 };
        let line = format!("cost: {}", serde_json::to_string(&cost).unwrap());
        assert_eq!(read(&line), Said::Noted);
        let ended = |name: &str, verdict| Ended {
            name: name.into(),
            verdict,
            compared: Vec::new(),
            weakly: None,
            cost: None,
        };
        let ok = r#"{ "type": "test", "name": "a", "event": "ok" }"#;
        let compared = vec!["1 with 2: equal".to_owned()];
        let first = Ended {
            compared,
            weakly: Some("skips; one CPU".into()),
            cost: Some(cost),
            ..ended("a", Verdict::Passed)
        };
        assert_eq!(read(ok), Said::Ended(first));
        assert_eq!(read(ok), Said::Ended(ended("a", Verdict::Passed)));
        let bad = r#"{ "type": "test", "name": "b", "event": "failed", "stdout": "Error: \"0 lines,\n500\"\n" }"#;
        assert_eq!(read(bad), Said::Ended(ended("b", Verdict::Failed("0 lines,\n500".into()))));
        let not = bad.replace("0 lines,\\n500", "not run");
        assert_eq!(read(&not), Said::Ended(ended("b", Verdict::NotRun)));
        assert_eq!(read("not judged: no fentry here"), Said::Noted);
        let ignored = ok.replace("ok", "ignored");
        let reason = |why: &str| Said::Ended(ended("a", Verdict::NotJudged(why.into())));
        assert_eq!(read(&ignored), reason("no fentry here"));
        assert_eq!(read(&ignored), reason(""));
    }
}
