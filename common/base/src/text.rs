//! Text that others have written, to be shown on a terminal.

/// Characters that turn the direction of reading.
const TURNS: [std::ops::RangeInclusive<char>; 3] =
    ['\u{200e}'..='\u{200f}', '\u{202a}'..='\u{202e}', '\u{2066}'..='\u{2069}'];

/// A name that anybody may give to a thread, a file or a disk: what would move a terminal's cursor, or turn its
/// direction, is replaced by `?`.
pub fn printable(name: &str) -> String {
    without(name, "")
}

/// As [`printable`], for the output of a program or a console: lines and tabs stay.
pub fn printable_lines(text: &str) -> String {
    without(text, "\n\t")
}

/// `text` without control characters, but for those of `kept`.
fn without(text: &str, kept: &str) -> String {
    let moves = |c: char| c.is_control() && !kept.contains(c);
    text.replace(|c: char| moves(c) || TURNS.iter().any(|turn| turn.contains(&c)), "?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_program_moves_no_cursor() {
        let hostile = "a\tb\n\x1b[31mc\r\u{7f}\u{9b}\u{202e}d\u{2066}é";
        assert_eq!(printable_lines(hostile), "a\tb\n?[31mc????d?é");
        assert_eq!(printable(hostile), "a?b??[31mc????d?é");
    }
}
