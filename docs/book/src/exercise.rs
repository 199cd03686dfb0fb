//! The exercises: `lesson/exercises/ID_name/exercise.toml`, as far as the book shows them.

use std::{
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::escape::escape;

/// An exercise. `cargo lesson` reads the same file, and refuses fields that it does not know.
#[derive(Deserialize)]
pub struct Exercise {
    /// Its directory, relative to the workspace.
    #[serde(skip)]
    pub place: PathBuf,
    /// The part of the directory's name before the first `_`.
    #[serde(default)]
    pub id: String,
    pub title: String,
    /// Whether it comes before the others beside the stages.
    #[serde(default)]
    first: bool,
    /// The directory that an attempt starts from.
    pub start: PathBuf,
    /// The directory with the answer.
    pub solution: PathBuf,
    #[serde(rename = "step")]
    steps: Vec<Step>,
}

/// One of the things to do, one after the other.
#[derive(Deserialize)]
struct Step {
    /// Empty where it is the only one.
    #[serde(default)]
    title: String,
    task: String,
    read: String,
    hints: Vec<String>,
    #[serde(rename = "judge")]
    judges: Vec<Judge>,
}

#[derive(Deserialize)]
struct Judge {
    title: String,
    expected: String,
}

impl Exercise {
    /// All exercises, by their directories' names.
    pub fn all(root: &Path) -> Result<Vec<Exercise>> {
        let mut exercises = Vec::new();
        for entry in fs::read_dir(root.join("lesson/exercises")).context("lesson/exercises/")? {
            let file = entry?.path().join("exercise.toml");
            let Ok(text) = fs::read_to_string(&file) else { continue };
            let mut exercise: Exercise =
                toml::from_str(&text).with_context(|| file.display().to_string())?;
            let place = file.parent().unwrap_or(&file).strip_prefix(root)?;
            let name = place.file_name().unwrap_or_default().to_string_lossy();
            if exercise.id.is_empty() {
                exercise.id = name.split('_').next().unwrap_or_default().to_owned();
            }
            exercise.place = place.to_owned();
            exercises.push(exercise);
        }
        exercises.sort_by(|one, other| (!one.first, &one.place).cmp(&(!other.first, &other.place)));
        Ok(exercises)
    }

    /// Whether it has a page of its own, because no stage has it in its text.
    pub fn is_own(&self) -> bool {
        !self.id.starts_with(|first: char| first.is_ascii_digit())
    }

    /// The page of an exercise that is in no stage's text; `diff` is the difference between start and answer.
    pub fn page(&self, diff: &str) -> String {
        let turns = self.steps.iter().map(|step| {
            let of = if step.title.is_empty() { "" } else { ": " };
            let (read, task, folded) = (linked(&step.read), prose(&step.task), step.folded());
            format!("Read: {read}\n\n## Your turn{of}{}\n\n{task}\n\n{folded}\n", step.title)
        });
        format!(
            "# {}: {}\n\n```\ncargo lesson start {}     # a copy of {}\ncargo lesson check\n```\n\n\
             {}## The answer\n\n{}",
            self.id,
            self.title,
            self.id,
            self.start.display(),
            turns.collect::<String>(),
            folded("Show the answer", diff),
        )
    }

    /// For each *Your turn* of a stage the task, as `cargo lesson start` prints it, and what may help.
    pub fn below_turns(&self) -> Vec<String> {
        let task = format!("The whole task (<code>cargo lesson start {}</code>)", self.id);
        self.steps.iter().map(|step| folded(&task, &prose(&step.task)) + &step.folded()).collect()
    }
}

impl Step {
    fn folded(&self) -> String {
        let mut text = String::new();
        for (number, hint) in (1..).zip(&self.hints) {
            text += &folded(
                &format!("Hint {number} of {}", self.hints.len()),
                &if hint.trim().contains('\n') { plain(hint) } else { prose(hint) },
            );
        }
        let mut judges = String::new();
        for judge in &self.judges {
            let _ =
                writeln!(judges, "**{}**\n\n{}\n", escape(&judge.title), prose(&judge.expected));
        }
        text + &folded("What the judges expect", &judges)
    }
}

/// Text whose spaces and line ends are its form.
fn plain(text: &str) -> String {
    format!("<pre class=\"plain\">{}</pre>\n", escape(text.trim_matches('\n')))
}

/// What lines of a text are.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Paragraph,
    /// Lines that keep their form.
    Plain,
    /// `- one`, or `1. one`: an item continues in indented lines.
    List(&'static str),
}

/// What kind of text a line begins, where it continues none, and the line without its mark.
fn begins(line: &str) -> (Kind, &str) {
    let digits = line.trim_start_matches(|c: char| c.is_ascii_digit());
    if let Some(item) = line.strip_prefix("- ") {
        (Kind::List("ul"), item)
    } else if let Some(item) = digits.strip_prefix(". ").filter(|_| digits.len() < line.len()) {
        (Kind::List("ol"), item)
    } else if line.starts_with([' ', '\t']) {
        (Kind::Plain, line)
    } else {
        (Kind::Paragraph, line)
    }
}

/// Whether a line of a kind is part of the one before, which belongs to an open block.
fn continues(open: Kind, kind: Kind) -> bool {
    match open {
        Kind::List(_) => kind == Kind::Plain,
        Kind::Paragraph => kind == Kind::Paragraph,
        Kind::Plain => false,
    }
}

/// Lines that wrap, as paragraphs and lists; those that are indented below a paragraph keep their form.
fn prose(text: &str) -> String {
    let mut blocks: Vec<(Kind, Vec<String>)> = Vec::new();
    let mut is_new = true;
    for line in text.trim_matches('\n').lines() {
        if line.is_empty() {
            is_new = true;
            continue;
        }
        let (kind, text) = begins(line);
        match blocks.last_mut().filter(|_| !is_new) {
            // It continues the line before.
            Some((open, lines)) if continues(*open, kind) => {
                if let Some(last) = lines.last_mut() {
                    *last += " ";
                    *last += text.trim_start();
                }
            }
            Some((open, lines)) if *open == kind => lines.push(text.to_owned()),
            _ => blocks.push((kind, vec![text.to_owned()])),
        }
        is_new = false;
    }
    blocks.into_iter().map(|(kind, lines)| block(kind, &lines)).collect()
}

fn block(kind: Kind, lines: &[String]) -> String {
    match kind {
        Kind::Plain => plain(&lines.join("\n")),
        Kind::Paragraph => format!("<p>{}</p>\n", inline(&lines.join(" "))),
        Kind::List(tag) => {
            let items = lines.iter().map(|item| format!("<li>{}</li>\n", inline(item)));
            format!("<{tag}>\n{}</{tag}>\n", items.collect::<String>())
        }
    }
}

/// The text of a line: what stands between backticks is code.
fn inline(text: &str) -> String {
    let parts = escape(text);
    let mut parts = parts.split('`');
    let mut line = parts.next().unwrap_or_default().to_owned();
    for (number, part) in parts.enumerate() {
        line += if number % 2 == 0 { "<code>" } else { "</code>" };
        line += part;
    }
    line
}

/// What to read, with links.
fn linked(text: &str) -> String {
    let words = text.split_inclusive(' ').map(|word| match word.split_once("/README.md") {
        Some((place, rest)) => format!("[{place}](../../../{place}){rest}"),
        None => word.to_owned(),
    });
    words.collect()
}

/// Something that is shown when the reader asks for it.
pub fn folded(summary: &str, text: &str) -> String {
    format!("<details class=\"fold\"><summary>{summary}</summary>\n\n{text}\n\n</details>\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_lists_and_code_keeps_its_form() {
        let text = "Two\nlines, `a<b`:\n- one\n  continues\n- two\nMore:\n  x = 1;\n    y\n\n1. first\n2. second\n";
        let expected = "<p>Two lines, <code>a&lt;b</code>:</p>\n<ul>\n<li>one continues</li>\n<li>two</li>\n</ul>\n\
                        <p>More:</p>\n<pre class=\"plain\">  x = 1;\n    y</pre>\n\
                        <ol>\n<li>first</li>\n<li>second</li>\n</ol>\n";
        assert_eq!(prose(text), expected);
        assert_eq!(prose("a\n\nb\n16,384 - c"), "<p>a</p>\n<p>b 16,384 - c</p>\n");
    }
}
