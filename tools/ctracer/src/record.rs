//! The record of a trace: what `--json` prints, line by line, and all that an output is made of.
//!
//! `trace` comes first: the struct, the kernel's release, the functions. Each `event` follows with
//! its time, task, call, function and object; the first event of a life has all `fields`, the others have
//! the `changes`. A call has its other `arguments`; a return has its `value`, and where that is an
//! error, its name as `errno`. At the end come a `life` for each object, the `ledger`, and an `end` that
//! says how many lines there are. Times are in ns, CLOCK_MONOTONIC. The kernel's type alone decides whether a value is a number, a text, or true or
//! false.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    decode::Scalar,
    life::Life,
    lives::Effect,
    value::{Change, Pairs},
};

/// How many objects of a call the BPF program records.
pub const OBJECTS: usize = 3;

/// A line of the record. The key `line` says which one it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "lowercase")]
pub enum Line {
    Trace(Trace),
    Event(Box<Event>),
    Life(Life),
    Ledger(Ledger),
    End(End),
}

/// What is traced.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The struct: `bio`.
    #[serde(rename = "type")]
    pub type_name: String,
    /// The kernel's release: `6.1.0-50-amd64`.
    pub release: String,
    pub functions: Vec<Function>,
}

/// A function of the kernel that takes a pointer to the struct.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Function {
    pub name: String,
    /// The module that it belongs to; `None`: the kernel itself.
    pub module: Option<String>,
    /// In C: `void submit_bio(struct bio *bio)`.
    pub prototype: String,
    /// Their names, `""` where the kernel gives none.
    #[serde(default)]
    pub parameters: Vec<String>,
    #[serde(skip)]
    pub probe: Probe,
}

/// What the registers hold when a function is called, and when it returns.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Probe {
    /// The function's address.
    pub address: u64,
    /// What a call does to the lives of its objects.
    pub effect: Effect,
    /// All of this that the BPF program learns: see `attach::cookie()`.
    pub cookie: u64,
    /// Which parameters point to the struct; 0 is the first one.
    pub arguments: Vec<u8>,
    /// Their registers; 1 is the first one.
    pub registers: Vec<u8>,
    /// The register of a `struct block_device *` among the parameters.
    pub device: Option<u8>,
    /// The other parameters that are passed in a register: name, register from 0 on, type.
    pub others: Vec<(String, usize, Scalar)>,
    /// Of these, the registers of those that say how a piece of work has ended: 0 for well.
    pub statuses: Vec<usize>,
    /// `None`: the function returns nothing.
    pub returns: Option<Scalar>,
}

/// Whether a function was called, or has returned.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Entry,
    Return,
}

/// One object in one call: a call with two such objects makes two events, and two when it returns, of
/// the same time and depth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub kind: Kind,
    pub time: u64,
    pub cpu: u32,
    /// Process and thread that were current, 0 where the CPU was idle, and the thread's name.
    pub tgid: u32,
    pub tid: u32,
    pub comm: String,
    pub function: String,
    /// The function's place in the list of the trace.
    #[serde(skip)]
    pub number: usize,
    /// The call that it belongs to: they are numbered in the order in which they began.
    pub call: usize,
    /// How many traced calls of the same thread this one lies in.
    pub depth: u32,
    /// Which parameter of the function the object is; 0 is the first one.
    pub argument: u8,
    pub address: String,
    pub life: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arguments: Option<Pairs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    /// From the call to the return.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration: Option<u64>,
    /// The object could not be read, or has been freed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unreadable: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fields: Option<Pairs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<Vec<Change>>,
}

/// How many lines of events and of objects were written. The ledger counts what was recorded: of that,
/// `--max-events`, `--memory` and `--errors` leave something out, and an event of a call's second object
/// is not counted there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct End {
    pub events: u64,
    pub lives: u64,
}

/// Where every hit of every probe went, entries and returns together: all but the last one add up to
/// `hits`. [`Ledger::lines`] says what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ledger {
    pub hits: u64,
    pub entries: u64,
    pub returns: u64,
    pub lost: u64,
    pub recursion: u64,
    pub instances: u64,
    pub filtered: u64,
    pub null: u64,
    pub unmatched: u64,
    pub outside: u64,
    pub objects_lost: u64,
}

impl Ledger {
    /// What `objects_lost` are.
    pub const OBJECTS_LOST: &str = "second objects of recorded calls lost (ring buffer full)";

    /// The parts of the hits, and what each of them is.
    pub fn lines(&self) -> [(u64, &'static str); 9] {
        [
            (self.entries, "calls recorded"),
            (self.returns, "returns recorded"),
            (self.lost, "lost (ring buffer or table of open calls full)"),
            (self.recursion, "missed (another BPF program was running on the CPU)"),
            (self.instances, "missed (no room to remember the call, or inside another probe)"),
            (self.filtered, "filtered (--pid, --dev, --sample, --filter)"),
            (self.null, "without an object (NULL)"),
            (self.unmatched, "returns of calls that were not recorded"),
            (self.outside, "before the start or after the end"),
        ]
    }
}

/// A thread; each CPU has an idle one of its own, and these have the number 0.
pub type Task = (u32, u32);

impl Event {
    /// The thread that was current.
    pub fn task(&self) -> Task {
        (self.tid, if self.tid == 0 { self.cpu } else { 0 })
    }

    /// The memory that it takes, in bytes: about so many, as an allocation has some of its own.
    pub fn memory(&self) -> usize {
        const ALLOCATION: usize = 16;
        let of = |value: &Value| value.as_str().map_or(0, |text| text.len() + ALLOCATION);
        let pairs = [&self.arguments, &self.fields].into_iter().flatten().flatten();
        let pairs = pairs.map(|(name, value)| name.len() + of(value));
        let changes = self.changes.iter().flatten();
        let changes = changes.map(|one| one.field.len() + of(&one.before) + of(&one.after));
        let values = pairs.chain(changes).map(|texts| size_of::<Change>() + ALLOCATION + texts);
        let texts = self.comm.len() + self.function.len() + self.address.len();
        size_of::<Event>() + 4 * ALLOCATION + texts + values.sum::<usize>()
    }
}
