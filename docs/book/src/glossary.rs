//! The words of docs/glossary.md, and where they stand in a text.

use std::{collections::HashMap, ops::Range};

use anyhow::{Context, Result};
use regex::Regex;

use crate::escape::escape;

/// Words with a second meaning, which the texts also use: a page of a book, the task of an exercise, the storage
/// stack, bpftrace's name for fentry.
const AMBIGUOUS: [&str; 7] = ["page", "task", "issue", "tag", "object", "stack", "kfunc"];

/// The words, and what they mean.
pub struct Glossary {
    /// By word: its meaning, and its anchor on the glossary's page.
    meanings: HashMap<String, (String, String)>,
    /// Any of the words, the longest first; `None`: there are none.
    words: Regex,
}

impl Glossary {
    /// Reads the items of a list that begin with words in bold, and continue with `:` and their meaning.
    pub fn read(text: &str) -> Result<Glossary> {
        let mut meanings = HashMap::new();
        for item in text.split("\n- ").skip(1) {
            let item = item.split("\n\n").next().unwrap_or(item).replace("\n  ", " ");
            let Some((words, rest)) = item.strip_prefix("**").and_then(|it| it.split_once("**"))
            else {
                continue;
            };
            let Some((aside, meaning)) = rest.split_once(':') else { continue };
            let meaning = format!("{}{}: {}", words, aside, meaning.trim()).replace(['`', '*'], "");
            let anchor = anchor(&format!("{words}{aside}"));
            let code = words.strip_prefix('`').map(|code| code.split(['`', '(']).next());
            for word in code.map_or(words.split(", ").collect(), Vec::from_iter) {
                let word = word.trim_end_matches("()");
                if !AMBIGUOUS.contains(&word) {
                    meanings.insert(word.to_owned(), (meaning.clone(), anchor.clone()));
                }
            }
        }
        let mut words: Vec<String> = meanings.keys().map(|word| any_case(word)).collect();
        words.sort_by_key(|word| (std::cmp::Reverse(word.len()), word.clone()));
        let words =
            Regex::new(&format!(r"\b({})s?\b", words.join("|"))).context("the glossary's words")?;
        Ok(Glossary { meanings, words })
    }

    /// The words in a text that `seen` does not have, with their HTML.
    /// `page` is the address of the glossary's page.
    pub fn mark(
        &self,
        text: &str,
        page: &str,
        seen: &mut Vec<String>,
    ) -> Vec<(Range<usize>, String)> {
        let mut marks = Vec::new();
        for found in self.words.captures_iter(text) {
            let (Some(all), Some(word)) = (found.get(0), found.get(1)) else { continue };
            // `bio` in `bio_endio`, in `/dev/bio` or in `sub-bio` is another word.
            let around =
                [text[..all.start()].chars().next_back(), text[all.end()..].chars().next()];
            if around.into_iter().flatten().any(|c| "_-/.\\".contains(c) && c != '.') {
                continue;
            }
            marks.extend(
                self.mark_one(word.as_str(), all.as_str(), page, seen)
                    .map(|html| (all.range(), html)),
            );
        }
        marks
    }

    /// `text` with the meaning of `word`, if the glossary has it and `seen` does not.
    pub fn mark_one(
        &self,
        word: &str,
        text: &str,
        page: &str,
        seen: &mut Vec<String>,
    ) -> Option<String> {
        let lower = lower_first(word);
        let word = if self.meanings.contains_key(word) { word } else { &lower };
        let (meaning, anchor) = self.meanings.get(word)?;
        if seen.contains(meaning) {
            return None;
        }
        seen.push(meaning.clone());
        let meaning = escape(meaning);
        // No stop of the Tab key: a page has up to a hundred of these words.
        Some(format!(
            "<a class=\"term\" href=\"{page}#{anchor}\" tabindex=\"-1\" data-def=\"{meaning}\" \
             aria-description=\"{meaning}\">{text}</a>"
        ))
    }
}

/// The glossary's page as the book has it: each word is a heading, so that a search finds it first.
pub fn with_headings(text: &str) -> String {
    let mut page = String::new();
    for (number, item) in text.split("\n- **").enumerate() {
        let parts = item.split_once("**").and_then(|(words, rest)| {
            let (aside, meaning) = rest.split_once(':')?;
            Some((words, aside, meaning))
        });
        match parts.filter(|_| number > 0) {
            Some((words, aside, meaning)) => {
                // The item's end, and what stands between this list and the next one.
                let (meaning, after) = meaning.split_once("\n\n").unwrap_or((meaning, ""));
                let meaning = meaning.trim().replace("\n  ", "\n");
                page += &format!("\n### {words}{aside}\n\n{meaning}\n\n{after}");
            }
            None => page += item,
        }
    }
    page
}

/// mdBook's anchor of a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || "_- ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

fn lower_first(word: &str) -> String {
    let mut chars = word.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

/// A pattern for a word that may begin a sentence.
fn any_case(word: &str) -> String {
    let mut chars = word.chars();
    match chars.next().filter(char::is_ascii_lowercase) {
        Some(first) => {
            format!("[{first}{}]{}", first.to_ascii_uppercase(), regex::escape(chars.as_str()))
        }
        None => regex::escape(word),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_marked_once() {
        let text = "# G\n\n- **bio**: `struct bio`, one I/O\n  of a file system.\n- **pid, tgid**: numbers.\n\
                    - **`iov_iter`**: memory.\n- **page**: 4 KiB.\n- **page cache** (big): memory.\n\nEnd: x.\n";
        let glossary = Glossary::read(text).unwrap();
        let mut seen = Vec::new();
        let text = "Two bios, bio_endio, a bio, the tgid, a page of the Page cache.";
        let marks = glossary.mark(text, "g.html", &mut seen);
        let found: Vec<&str> = marks.iter().map(|(range, _)| &text[range.clone()]).collect();
        assert_eq!(found, ["bios", "tgid", "Page cache"]);
        assert!(marks[2].1.contains("href=\"g.html#page-cache-big\""), "{marks:?}");
        assert!(
            marks[0].1.contains("data-def=\"bio: struct bio, one I/O of a file system.\""),
            "{marks:?}"
        );
        assert!(glossary.mark_one("iov_iter", "x", "g.html", &mut seen).is_some());
        assert!(glossary.mark_one("iov_iter", "x", "g.html", &mut seen).is_none());
    }

    #[test]
    fn words_are_headings_of_the_page() {
        let text = "# G\n\n## I/O\n\n- **bio**: one I/O\n  of it.\n- **`O_DIRECT`** (x): past it.\n\n## Pages\n\nEnd: x.\n";
        assert_eq!(
            with_headings(text),
            "# G\n\n## I/O\n\n### bio\n\none I/O\nof it.\n\n\n### `O_DIRECT` (x)\n\npast it.\n\n## Pages\n\nEnd: x.\n"
        );
    }
}
