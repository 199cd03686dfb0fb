//! Text as HTML.

/// `text`, to stand in HTML: also in an attribute, and in a row of a table in Markdown.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '|' => escaped += "&#124;",
            other => escaped.push(other),
        }
    }
    escaped
}
