//! JSON that git can compare: each object of a list in a line of its own.

use std::io::{Result, Write};

use serde::Serialize;
use serde_json::{Serializer, ser::Formatter};

/// Writes as `serde_json` does, with a line break between two objects of a list.
#[derive(Default)]
struct ALineEach {
    after_object: bool,
}

impl Formatter for ALineEach {
    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> Result<()> {
        self.after_object = true;
        writer.write_all(b"}")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> Result<()> {
        match (first, std::mem::take(&mut self.after_object)) {
            (true, _) => Ok(()),
            (false, true) => writer.write_all(b",\n"),
            (false, false) => writer.write_all(b","),
        }
    }
}

/// `value` as JSON that ends with a line break: each object of a list in a line of its own.
pub fn to_lines(value: &impl Serialize) -> anyhow::Result<String> {
    let mut json = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut json, ALineEach::default()))?;
    json.push(b'\n');
    Ok(String::from_utf8(json)?)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    #[test]
    fn each_object_of_a_list_has_a_line() {
        let value = json!({"a": [{"said": "},{"}, {"b": [1, 2]}, {}], "c": [[1], [2]]});
        let text = super::to_lines(&value).unwrap();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }
}
