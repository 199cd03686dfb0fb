//! Sources and the differences between them, as HTML that needs no script.

use std::{fmt::Write, fs, path::Path, sync::LazyLock};

use anyhow::{Context, Result};
use regex::Regex;
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
            "<figure class=\"whole\" id=\"diff-{file}\"><figcaption>src/{file}: <a href=\"{}\">{}</a> → \
             <a href=\"{}\">{}</a></figcaption>\n{}</figure>\n",
            link(&before)?,
            old.display(),
            link(&after)?,
            new.display(),
            diff(file, &before_text, &after_text)
        );
    }
    Ok(html)
}

/// The rows of a difference. Each line after the change has an id, such as `main.rs-12`.
fn diff(file: &str, old: &str, new: &str) -> String {
    let (mut html, mut open) = (String::new(), false);
    let diff = TextDiff::configure().algorithm(Algorithm::Patience).diff_lines(old, new);
    let (old, new) = (diff.old_slices().to_vec(), diff.new_slices().to_vec());
    let ops = diff.ops();
    let mut pre = |html: &mut String, wanted: bool| {
        if open != wanted {
            *html += if wanted { "<pre class=\"diff\">" } else { "</pre>" };
            open = wanted;
        }
    };
    let same = |html: &mut String, from: usize, by: usize, lines: usize| {
        for at in 0..lines {
            let text = &new[by + at];
            // For the eye only: a screen reader, a search and a copy find the line once.
            let old = format!(
                "<span class=\"old line\" aria-hidden=\"true\" data-n=\"{}\" data-text=\"{}\"{}></span>",
                from + at + 1,
                escape(text.trim()),
                indent(text)
            );
            let id = Some(format!("{file}-{}", by + at + 1));
            let new = line("span", "new line", id, Some(by + at + 1), text);
            let _ = write!(html, "<span class=\"same\">{old}{new}</span>");
        }
    };
    for (number, op) in ops.iter().enumerate() {
        let (from, by) = (op.old_range(), op.new_range());
        if op.tag() == DiffTag::Equal {
            let first = if number == 0 { 0 } else { CONTEXT.min(by.len()) };
            let last = if number + 1 == ops.len() { 0 } else { CONTEXT.min(by.len() - first) };
            let hidden = by.len() - first - last;
            // Three lines take no more room than their summary.
            if hidden <= 3 {
                pre(&mut html, true);
                same(&mut html, from.start, by.start, by.len());
                continue;
            }
            if first > 0 {
                pre(&mut html, true);
                same(&mut html, from.start, by.start, first);
            }
            pre(&mut html, false);
            let _ = write!(
                html,
                "<details><summary>{hidden} unchanged lines</summary><pre class=\"diff\">"
            );
            same(&mut html, from.start + first, by.start + first, hidden);
            html += "</pre></details>";
            if last > 0 {
                pre(&mut html, true);
                same(&mut html, from.end - last, by.end - last, last);
            }
            continue;
        }
        pre(&mut html, true);
        html += "<span class=\"change\"><span class=\"old\">";
        for at in from {
            html += &line("del", "line", None, Some(at + 1), old[at]);
        }
        html += "</span><span class=\"new\">";
        for at in by {
            let id = Some(format!("{file}-{}", at + 1));
            html += &line("ins", "line", id, Some(at + 1), new[at]);
        }
        html += "</span></span>";
    }
    pre(&mut html, false);
    html
}

/// A block `diff` of a README, with a link to its place in the whole difference.
pub fn piece(block: &str, sources: &[(&str, String)]) -> String {
    let mut html = "<pre class=\"diff piece\">".to_owned();
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
    let html = escape(code);
    framed(tag, class, id, number, &text[..text.len() - code.len()], &html)
}

fn framed(
    tag: &str,
    class: &str,
    id: Option<String>,
    number: Option<usize>,
    space: &str,
    html: &str,
) -> String {
    let id = id.map_or(String::new(), |id| format!(" id=\"{id}\""));
    let number = number.map_or(String::new(), |number| format!(" data-n=\"{number}\""));
    let shift = indent(space);
    format!("<{tag} class=\"{class}\"{id}{number}{shift}><i>{space}</i>{html}\n</{tag}>")
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

/// A source with line numbers and colours.
pub fn numbered(name: &str, text: &str) -> String {
    let mut html = "<pre class=\"source\">".to_owned();
    let coloured = coloured(name, text);
    for ((number, plain), row) in (1..).zip(text.lines()).zip(coloured.lines()) {
        let space = &plain[..plain.len() - plain.trim_start_matches(['\t', ' ']).len()];
        // A comment that began before may begin with the spaces of its line.
        let row = row.replacen(space, "", 1);
        html += &framed("span", "line", Some(format!("L{number}")), Some(number), space, &row);
    }
    html + "</pre>\n"
}

/// Comments, strings and keywords, with the class names that highlight.js has. A span ends with its line.
fn coloured(name: &str, text: &str) -> String {
    static C_LIKE: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r#"(?<comment>//[^\n]*|/\*(?s:.*?)\*/)|(?<string>"(?:\\.|[^"\\\n])*")|(?<meta>#\[[^\n]*\]|#!\[[^\n]*\]|(?m:^#\w+))|(?<keyword>\b(?:as|bool|break|char|const|continue|crate|default|else|enum|extern|fn|for|if|impl|in|int|let|long|loop|match|mod|mut|pub|return|self|Self|short|sizeof|static|struct|super|switch|trait|type|typedef|union|unsafe|unsigned|use|void|volatile|where|while|[us](?:8|16|32|64)|[iu](?:8|16|32|64|size))\b)"#,
        )
    });
    static SCRIPT: LazyLock<Regex> = LazyLock::new(|| {
        pattern(
            r#"(?<comment>(?m:(?:^|\s)#[^\n]*))|(?<string>"(?:\\.|[^"\\\n])*"|'[^'\n]*')|(?<meta>(?m:^\[[^\n]*\]))|(?<keyword>(?m:^[\w.-]+(?:\s*=)))"#,
        )
    });
    let pattern = match Path::new(name).extension().and_then(|extension| extension.to_str()) {
        Some("c" | "h" | "rs") => &*C_LIKE,
        Some("toml" | "sh" | "yml" | "service") | None if !name.contains("LICENSE") => &*SCRIPT,
        _ => return escape(text),
    };
    let (mut html, mut at) = (String::new(), 0);
    for found in pattern.captures_iter(text) {
        for class in ["comment", "string", "meta", "keyword"] {
            let Some(part) = found.name(class) else { continue };
            html += &escape(&text[at..part.start()]);
            at = part.end();
            for piece in part.as_str().split_inclusive('\n') {
                let line = piece.trim_end_matches('\n');
                let _ = write!(html, "<span class=\"hljs-{class}\">{}</span>", escape(line));
                html += &piece[line.len()..];
            }
        }
    }
    html + &escape(&text[at..])
}

fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the pattern is one of ours")
}
