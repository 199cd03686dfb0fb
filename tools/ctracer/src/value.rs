//! Values of fields, arguments and results, and how people read them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::errno;

/// Names and values, in their order.
pub type Pairs = Map<String, Value>;

/// A field whose value differs from that of the object's event before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Its path: `bi_iter.bi_sector`.
    pub field: String,
    pub before: Value,
    pub after: Value,
}

/// An address as a text: JSON's numbers are too small for it in many programs.
pub fn hex(address: u64) -> String {
    format!("{address:#x}")
}

/// A field's value as people read it.
pub fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// An argument or a result as people read it: an error by its name.
pub fn named(value: &Value) -> String {
    let error = value.as_i64().and_then(errno::name);
    error.map_or_else(|| plain(value), |name| format!("-{name}"))
}
