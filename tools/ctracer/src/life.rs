//! The life of an object: from its first event to its end, and the life that it came from.

use serde::{Deserialize, Serialize};

/// How an object came from another one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
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
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Life {
    /// Its number: they are numbered in the order in which they began.
    pub life: usize,
    pub address: String,
    /// How many lives at this address were seen before.
    pub generation: u32,
    /// The life that it came from, and how.
    pub parent: Option<usize>,
    pub link: Option<Link>,
    pub begin: u64,
    /// The last call that completed or freed the object; `None`: it was alive at the end of the trace,
    /// or the type has no known end function.
    pub end: Option<u64>,
    pub duration: Option<u64>,
}

impl Life {
    /// The life that it came from, and how.
    pub fn origin(&self) -> Option<(usize, Link)> {
        self.parent.zip(self.link)
    }
}
