//! A trace: what the kernel did to the objects of one struct type. The outputs read nothing else.

use crate::value::{Scalar, Value};

/// A function of the kernel that takes a pointer to the struct.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The module that it belongs to; `None`: the kernel itself.
    pub module: Option<String>,
    /// Its C prototype: `void submit_bio(struct bio *bio)`.
    pub prototype: String,
    /// The names of all its parameters, `""` where the kernel gives none.
    pub parameters: Vec<String>,
    /// Which of its parameters point to the struct; 0 is the first one.
    pub arguments: Vec<u8>,
    /// Its other parameters, those that are passed in a register.
    pub others: Vec<Parameter>,
    /// What it returns.
    pub returns: Scalar,
}

/// A parameter that is none of a function's objects.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Its register; 0 is the first one.
    pub register: usize,
    /// What the register holds.
    pub kind: Scalar,
    /// It says how a piece of work has ended: 0 for well (`blk_status_t`).
    pub is_status: bool,
}

/// The registers of a call's arguments.
pub type Registers = [u64; 6];

/// What happened to a function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// It was called.
    Entry,
    /// It returned; the value means nothing where the function returns none.
    Return {
        /// The register of the return value.
        value: u64,
    },
}

/// A field whose value differs from that of the object's event before.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The field's path: `bi_iter.bi_sector`.
    pub field: String,
    /// The value before.
    pub before: Value,
    /// The value now.
    pub after: Value,
}

/// One object in one call: a call with two such objects makes two entry events and two return
/// events, of the same time and depth.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    /// The CPU.
    pub cpu: u32,
    /// The process that was current, 0 where the CPU was idle.
    pub tgid: u32,
    /// The thread that was current, 0 where the CPU was idle.
    pub tid: u32,
    /// The name of that thread.
    pub comm: String,
    /// The function: an index into [`Trace::functions`].
    pub function: usize,
    /// Call or return.
    pub kind: Kind,
    /// Which parameter of the function the object is; 0 is the first one.
    pub argument: u8,
    /// The object's address.
    pub address: u64,
    /// The object's life: an index into [`Trace::lives`].
    pub life: usize,
    /// How many traced calls of the same thread this one lies in.
    pub depth: u32,
    /// What the registers of the arguments held at the call; of a return, 0.
    pub registers: Registers,
    /// Whether the object could be read.
    pub readable: bool,
    /// The object's bytes. In a [`Trace`], only a life's first ones are kept.
    pub bytes: Box<[u8]>,
    /// What differs from the event before of the same life.
    pub changes: Vec<Change>,
}

impl Event {
    /// The memory that it takes, in bytes.
    pub fn memory(&self) -> usize {
        let of = |value: &Value| match value {
            Value::Text(text) => text.len(),
            Value::Bool(_) | Value::Number(_) => 0,
        };
        let change = |change: &Change| {
            size_of::<Change>() + change.field.len() + of(&change.before) + of(&change.after)
        };
        let changes: usize = self.changes.iter().map(change).sum();
        size_of::<Event>() + self.comm.len() + self.bytes.len() + changes
    }
}

/// How an object came from another one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Link {
    /// A copy for a device below.
    Clone,
    /// A part that was split off.
    Split,
    /// The parent completes when this one has.
    Chain,
}

/// An object from its first event to its end. Another object at the same address later is another
/// life.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Life {
    /// The object's address.
    pub address: u64,
    /// How many lives at this address were seen before.
    pub generation: u32,
    /// The life that it came from (an index into [`Trace::lives`]), and how.
    pub parent: Option<(usize, Link)>,
    /// The first event, ns.
    pub begin: u64,
    /// The last call that completed or freed the object, ns; `None`: it was alive at the end of the
    /// trace, or the type has no known end function.
    pub end: Option<u64>,
}

/// Where every hit of every probe went, entries and returns together. The fields from
/// `entries` to `outside` add up to `hits`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ledger {
    /// How often the kernel came to a probe, by the kernel's own counters.
    pub hits: u64,
    /// Calls recorded.
    pub entries: u64,
    /// Returns recorded.
    pub returns: u64,
    /// Not recorded: the ring buffer was full.
    pub lost: u64,
    /// Not recorded: the kernel skipped the program, because another one was running on the CPU.
    pub recursion: u64,
    /// Not recorded: the kernel had no room to remember the call until its return, or another
    /// probe was running on the CPU.
    pub instances: u64,
    /// Not recorded: `--pid`, `--dev`, `--sample` or `--filter` leaves the object out.
    pub filtered: u64,
    /// Not recorded: the pointer was NULL.
    pub null: u64,
    /// Not recorded: returns of calls that are not recorded.
    pub unmatched: u64,
    /// Not recorded: before the start or after the end of the trace.
    pub outside: u64,
    /// Objects of calls that are recorded without them, because the ring buffer was full: not part
    /// of the sum.
    pub objects_lost: u64,
}

/// Everything that was seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// The struct: `bio`.
    pub type_name: String,
    /// The kernel's release: `6.1.0-50-amd64`.
    pub release: String,
    /// The functions that were traced.
    pub functions: Vec<Function>,
    /// The lives, in the order in which they began.
    pub lives: Vec<Life>,
    /// The events, in the order of their times.
    pub events: Vec<Event>,
    /// Where every hit went.
    pub ledger: Ledger,
}

impl Link {
    /// `clone`, `split` or `chain`.
    pub fn name(self) -> &'static str {
        match self {
            Link::Clone => "clone",
            Link::Split => "split",
            Link::Chain => "chain",
        }
    }
}

impl Function {
    /// The arguments of a call that are no objects, as people read them; of a return, none.
    pub fn others(&self, event: &Event) -> Vec<(&Parameter, String)> {
        let others = self.others.iter().filter(|_| event.kind == Kind::Entry);
        let value = |other: &Parameter| other.kind.text(event.registers[other.register]);
        others.filter_map(|other| Some((other, value(other)?))).collect()
    }
}
