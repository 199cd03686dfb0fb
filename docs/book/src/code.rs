//! Sources and the differences between them, as HTML that can be read without a script.

use std::{fmt::Write, fs, ops::Range, path::Path};

use anyhow::{Context, Result};
use similar::{Algorithm, DiffTag, TextDiff};

use crate::escape::escape;

/// Unchanged lines that stay visible on each side of a change.
const CONTEXT: usize = 4;

/// The two files of a program.
pub const FILES: [&str; 2] = ["trace.bpf.c", "main.rs"];

/// The difference between the sources of two programs: the directories with their `src`. `link` makes the
/// address of a page of sources.
pub fn whole_diff(
    root: &Path,
    [old, new]: [&Path; 2],
    mut link: impl FnMut(&Path) -> Result<String>,
) -> Result<String> {
    let mut html = String::new();
    for file in FILES {
        let [before, after] = [old, new].map(|place| place.join("src").join(file));
        let [before_text, after_text] = [&before, &after].map(|path| {
            fs::read_to_string(root.join(path)).with_context(|| path.display().to_string())
        });
        let (before_text, after_text) = (before_text?, after_text?);
        let _ = writeln!(
            html,
            "<figure class=\"whole\" id=\"diff-{file}\" data-language=\"{}\"><figcaption>src/{file}: <a href=\"{}\">{}</a> → \
             <a href=\"{}\">{}</a></figcaption>\n{}</figure>\n",
            language_of(file),
            link(&before)?,
            old.display(),
            link(&after)?,
            new.display(),
            diff(file, &before_text, &after_text)
        );
    }
    Ok(html)
}

/// How many lines are added to the sources of a program and removed, by file.
pub fn sizes(root: &Path, [old, new]: [&Path; 2]) -> Result<[(usize, usize); 2]> {
    let mut sizes = [(0, 0); 2];
    for (file, (added, removed)) in FILES.into_iter().zip(&mut sizes) {
        let read = |place: &Path| {
            let path = root.join(place).join("src").join(file);
            fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        let (old, new) = (read(old)?, read(new)?);
        let diff = TextDiff::configure().algorithm(Algorithm::Patience).diff_lines(&old, &new);
        for op in diff.ops().iter().filter(|op| op.tag() != DiffTag::Equal) {
            *added += op.new_range().len();
            *removed += op.old_range().len();
        }
    }
    Ok(sizes)
}

/// The rows of a difference. Each line after the change has an id, such as `main.rs-12`.
fn diff(file: &str, old: &str, new: &str) -> String {
    let diff = TextDiff::configure().algorithm(Algorithm::Patience).diff_lines(old, new);
    let (old, new) = (lines(old), lines(new));
    let mut rows = Rows { html: String::new(), is_open: false, file, old: &old, new: &new };
    let ops = diff.ops();
    for (number, op) in ops.iter().enumerate() {
        if op.tag() == DiffTag::Equal {
            rows.unchanged(op.old_range(), op.new_range(), number > 0, number + 1 < ops.len());
        } else {
            rows.changed(op.old_range(), op.new_range());
        }
    }
    rows.open(false);
    rows.html
}

fn lines(text: &str) -> Vec<&str> {
    text.split_inclusive('\n').collect()
}

/// The rows of a difference, while they are written.
struct Rows<'a> {
    html: String,
    /// Whether the last `<pre>` has no end yet.
    is_open: bool,
    file: &'a str,
    old: &'a [&'a str],
    new: &'a [&'a str],
}

impl Rows<'_> {
    /// Begins a `<pre>`, or ends it, unless that was done.
    fn open(&mut self, wanted: bool) {
        if self.is_open != wanted {
            self.html += if wanted { "<pre class=\"diff\">" } else { "</pre>" };
            self.is_open = wanted;
        }
    }

    /// Lines that did not change: those near to a change are shown, and the others folded.
    fn unchanged(&mut self, from: Range<usize>, by: Range<usize>, is_after: bool, is_before: bool) {
        let lines = by.len();
        let first = if is_after { CONTEXT.min(lines) } else { 0 };
        let last = if is_before { CONTEXT.min(lines - first) } else { 0 };
        let hidden = lines - first - last;
        // Three lines take no more room than their summary.
        if hidden <= 3 {
            self.same(from.start, by.start, lines);
            return;
        }
        self.same(from.start, by.start, first);
        self.open(false);
        let _ = write!(self.html, "<details><summary>{hidden} unchanged lines</summary>");
        self.same(from.start + first, by.start + first, hidden);
        self.open(false);
        self.html += "</details>";
        self.same(from.end - last, by.end - last, last);
    }

    /// Lines that both sides have: from `from` on in the old text, from `by` on in the new one.
    fn same(&mut self, from: usize, by: usize, lines: usize) {
        if lines > 0 {
            self.open(true);
        }
        for at in 0..lines {
            let text = self.new[by + at];
            // For the eye only: a screen reader, a search and a copy find the line once.
            let old = format!(
                "<span class=\"old line\" aria-hidden=\"true\" data-n=\"{}\" data-text=\"{}\"{}></span>",
                from + at + 1,
                escape(text.trim()),
                indent(text)
            );
            let new = line("span", "new line", Some(self.id(by + at)), Some(by + at + 1), text);
            let _ = write!(self.html, "<span class=\"same\">{old}{new}</span>");
        }
    }

    /// Lines that were removed, beside those that were added.
    fn changed(&mut self, from: Range<usize>, by: Range<usize>) {
        self.open(true);
        self.html += "<span class=\"change\"><span class=\"old\">";
        for at in from {
            self.html += &line("del", "line", None, Some(at + 1), self.old[at]);
        }
        self.html += "</span><span class=\"new\">";
        for at in by {
            self.html += &line("ins", "line", Some(self.id(at)), Some(at + 1), self.new[at]);
        }
        self.html += "</span></span>";
    }

    fn id(&self, line: usize) -> String {
        format!("{}-{}", self.file, line + 1)
    }
}

/// The language of a file, by its name: what follows the last dot.
fn language_of(name: &str) -> &str {
    Path::new(name).extension().and_then(|extension| extension.to_str()).unwrap_or("")
}

/// The language of a piece of one of the two files, which READMEs do not name: Rust has words that C lacks.
pub fn language_of_piece(text: &str) -> &'static str {
    const RUST: [&str; 13] = [
        "println!",
        "//",
        "constants.",
        "let ",
        "fn ",
        "use ",
        "impl ",
        "::",
        "=> ",
        "?;",
        "for (",
        "Some(",
        "&mut",
    ];
    const C: [&str; 9] =
        ["SEC(", "BPF_", "bpf_", "->", "u64 ", "static ", "struct start", "__type", "#include"];
    let of = |words: &[&str]| words.iter().filter(|word| text.contains(**word)).count();
    if of(&RUST) > of(&C) { "rs" } else { "c" }
}

/// A block `diff` of a README, with a link to its place in the whole difference.
pub fn piece(block: &str, sources: &[(&str, String)]) -> String {
    piece_in(language_of_piece(block), block, sources)
}

/// The same for one in this language.
pub fn piece_in(language: &str, block: &str, sources: &[(&str, String)]) -> String {
    let mut html = format!("<pre class=\"diff piece\" data-language=\"{language}\">");
    for row in block.trim_end_matches('\n').lines() {
        let (tag, text) = match row.split_at_checked(1) {
            Some(("+", text)) => ("ins", text),
            Some(("-", text)) => ("del", text),
            _ => ("span", row.strip_prefix(' ').unwrap_or(row)),
        };
        html += &line(tag, "line", None, None, text);
    }
    html += "</pre>\n";
    let added = block.lines().skip_while(|line| !line.starts_with('+'));
    let added: Vec<&str> = added.map_while(|line| line.strip_prefix('+')).collect();
    for (file, source) in sources {
        let lines: Vec<&str> = source.lines().collect();
        let at = lines.windows(added.len().max(1)).position(|window| window == added);
        if let Some(line) = at.map(|at| at + 1) {
            let _ = writeln!(
                html,
                "<p class=\"where\"><a href=\"#{file}-{line}\">{file}, line {line}</a></p>"
            );
            break;
        }
    }
    html
}

/// A line of code. Where it wraps, it stays right of its indentation.
fn line(tag: &str, class: &str, id: Option<String>, number: Option<usize>, text: &str) -> String {
    let text = text.trim_end_matches('\n');
    let code = text.trim_start_matches(['\t', ' ']);
    let space = &text[..text.len() - code.len()];
    let id = id.map_or(String::new(), |id| format!(" id=\"{id}\""));
    let number = number.map_or(String::new(), |number| format!(" data-n=\"{number}\""));
    let (shift, code) = (indent(space), escape(code));
    format!("<{tag} class=\"{class}\"{id}{number}{shift}><i>{space}</i>{code}\n</{tag}>")
}

/// The columns that a line is indented by, for the style sheet.
fn indent(text: &str) -> String {
    let spaces = text.chars().map_while(|c| match c {
        '\t' => Some(4),
        ' ' => Some(1),
        _ => None,
    });
    match spaces.sum::<usize>() {
        0 => String::new(),
        columns => format!(" style=\"--i:{columns}\""),
    }
}

/// A source with line numbers. source.js gives it its colours.
pub fn numbered(name: &str, text: &str) -> String {
    let language = match language_of(name) {
        "" if text.starts_with("#!") => "sh",
        language => language,
    };
    let mut html = format!("<pre class=\"source\" data-language=\"{}\">", escape(language));
    for (number, row) in (1..).zip(text.lines()) {
        html += &line("span", "line", Some(format!("L{number}")), Some(number), row);
    }
    html + "</pre>\n"
}
