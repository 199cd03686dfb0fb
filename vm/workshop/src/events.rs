//! What a guest test program prints: libtest-mimic's JSON, and messages of our own between, as JSON, too.

use std::{fmt, mem};

use serde::{Deserialize, Serialize};

/// A message of a guest test program, in a line of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestMessage {
    /// The release of the kernel: `6.1.0-50-amd64`.
    Kernel(String),
    /// What an attempt was compared with, and its figure.
    Compared(String),
    /// Why a test could see less than on another kernel.
    JudgedWeakly(String),
    /// Why a test could not judge.
    NotJudged(String),
    /// What a judge waits for, where that lasts long.
    Waiting(String),
    /// Where the time of the test went that ends next: libtest-mimic's event has no time of its own.
    Cost(Cost),
    /// Where the guest stays for others: what is not as it was after its boot, nothing included.
    Left(Vec<String>),
}

impl GuestMessage {
    /// The message as a line of JSON. A line break in a text is escaped, so no text can pass for a message.
    pub fn to_line(&self) -> String {
        // Texts and numbers can always be written.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Prints the message, for whoever reads this program's output.
    pub fn print(&self) {
        println!("{}", self.to_line());
    }

    /// The message in this line, if it is one.
    pub fn parse(line: &str) -> Option<GuestMessage> {
        serde_json::from_str(line).ok()
    }
}

/// In words, for people.
impl fmt::Display for GuestMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestMessage::Kernel(release) => write!(f, "kernel {release}"),
            GuestMessage::Compared(figures) => write!(f, "compared: {figures}"),
            GuestMessage::JudgedWeakly(why) => write!(f, "judged weakly: {why}"),
            GuestMessage::NotJudged(why) => write!(f, "not judged: {why}"),
            GuestMessage::Waiting(what) => write!(f, "waiting: {what}"),
            GuestMessage::Cost(cost) => write!(f, "cost: {} ms", cost.took),
            GuestMessage::Left(what) => write!(f, "left: {}", what.join(", ")),
        }
    }
}

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TestEvent {
    /// So many tests begin.
    Begins(u32),
    /// A test begins.
    Started(String),
    /// A test has ended.
    Ended(Ended),
    /// The release of the kernel: `6.1.0-50-amd64`.
    Kernel(String),
    /// What a judge waits for, where that lasts long.
    Waiting(String),
    /// What is not as it was after the guest's boot, nothing included.
    Left(Vec<String>),
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

impl Ended {
    /// What comes out of a test that has not begun, because an earlier one said no.
    pub fn not_run(name: &str) -> Ended {
        let (verdict, compared) = (Verdict::NotRun, Vec::new());
        Ended { name: name.to_owned(), verdict, compared, weakly: None, cost: None }
    }
}

/// Where a test's time went.
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
struct LibtestEvent {
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
    pub fn read(&mut self, line: &str) -> TestEvent {
        let Ok(event) = serde_json::from_str::<LibtestEvent>(line) else {
            return GuestMessage::parse(line).map_or(TestEvent::Text, |message| self.take(message));
        };
        let verdict = match (&*event.kind, &*event.event) {
            ("suite", "started") => return TestEvent::Begins(event.test_count),
            ("test", "started") => return TestEvent::Started(event.name),
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
            _ => return TestEvent::Noted,
        };
        let Reader { compared, weakly, cost, .. } = mem::take(self);
        TestEvent::Ended(Ended { name: event.name, verdict, compared, weakly, cost })
    }

    fn take(&mut self, message: GuestMessage) -> TestEvent {
        match message {
            GuestMessage::Kernel(release) => return TestEvent::Kernel(release),
            GuestMessage::Waiting(what) => return TestEvent::Waiting(what),
            GuestMessage::Left(what) => return TestEvent::Left(what),
            GuestMessage::Compared(figures) => self.compared.push(figures),
            GuestMessage::JudgedWeakly(why) => {
                let before = self.weakly.take().map(|why| why + "; ");
                self.weakly = Some(before.unwrap_or_default() + &why);
            }
            GuestMessage::NotJudged(why) => self.not_judged = Some(why),
            GuestMessage::Cost(cost) => self.cost = Some(cost),
        }
        TestEvent::Noted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let mut reader = Reader::default();
        let mut read = |line: &str| reader.read(line);
        let line = |message: GuestMessage| message.to_line();
        let kernel = line(GuestMessage::Kernel("6.1.0".into()));
        assert_eq!(read(&kernel), TestEvent::Kernel("6.1.0".into()));
        let begins = r#"{ "type": "suite", "event": "started", "test_count": 4 }"#;
        assert_eq!(read(begins), TestEvent::Begins(4));
        let started = r#"{ "type": "test", "event": "started", "name": "a" }"#;
        assert_eq!(read(started), TestEvent::Started("a".into()));
        assert_eq!(read("a line"), TestEvent::Text);
        let left = vec!["disk dm-0".to_owned()];
        assert_eq!(read(&line(GuestMessage::Left(left.clone()))), TestEvent::Left(left));
        assert_eq!(read(&line(GuestMessage::Compared("1 with 2: equal".into()))), TestEvent::Noted);
        assert_eq!(read(&line(GuestMessage::JudgedWeakly("skips".into()))), TestEvent::Noted);
        assert_eq!(read(&line(GuestMessage::JudgedWeakly("one CPU".into()))), TestEvent::Noted);
        let cost = Cost { took: 4, starts: 1, starting: 2, ending: 1 };
        assert_eq!(read(&line(GuestMessage::Cost(cost))), TestEvent::Noted);
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
        assert_eq!(read(ok), TestEvent::Ended(first));
        assert_eq!(read(ok), TestEvent::Ended(ended("a", Verdict::Passed)));
        let bad = r#"{ "type": "test", "name": "b", "event": "failed", "stdout": "Error: \"0 lines,\n500\"\n" }"#;
        assert_eq!(
            read(bad),
            TestEvent::Ended(ended("b", Verdict::Failed("0 lines,\n500".into())))
        );
        let not = bad.replace("0 lines,\\n500", "not run");
        assert_eq!(read(&not), TestEvent::Ended(ended("b", Verdict::NotRun)));
        assert_eq!(read(&line(GuestMessage::NotJudged("no fentry here".into()))), TestEvent::Noted);
        let ignored = ok.replace("ok", "ignored");
        let reason = |why: &str| TestEvent::Ended(ended("a", Verdict::NotJudged(why.into())));
        assert_eq!(read(&ignored), reason("no fentry here"));
        assert_eq!(read(&ignored), reason(""));
    }

    #[test]
    fn a_text_cannot_pass_for_a_message() {
        let forged = GuestMessage::Kernel("1.0".into()).to_line();
        let message = GuestMessage::Compared(format!("1 with 2\n{forged}"));
        let line = message.to_line();
        assert_eq!(line.lines().count(), 1, "{line}");
        assert_eq!(GuestMessage::parse(&line), Some(message));
    }
}
