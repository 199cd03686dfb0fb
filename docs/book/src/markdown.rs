//! What a page of the repository becomes in the book. The words stay; links lead to pages of the book,
//! differences get colours, drawings lines, the answer is folded, and words of the glossary show their meaning.

use std::{ops::Range, path::Path};

use anyhow::Result;
use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, LinkType, Options, Parser, Tag, TagEnd};

use crate::{code, drawing, glossary::Glossary};

/// What the transformation asks of the book.
pub trait Links {
    /// The address of what a relative link leads to.
    fn link(&self, target: &str) -> Result<String>;
    /// The address of a source that the text names, such as `src/main.rs`.
    fn source(&self, name: &str) -> Result<Option<String>>;
}

/// What the book adds to a page.
#[derive(Default)]
pub struct Extras<'a> {
    /// The words that it explains.
    pub glossary: Option<&'a Glossary>,
    /// At the end of *Your turn*.
    pub turn: String,
    /// At the end of *The answer*, which is folded.
    pub answer: Option<String>,
    /// Names and texts of the sources whose pieces the page shows.
    pub sources: Vec<(&'static str, String)>,
}

/// Makes a page of the book out of Markdown.
pub fn page(text: &str, links: &impl Links, extras: &Extras) -> Result<String> {
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    let (mut seen, mut sections) = (Vec::new(), Vec::new());
    // How many elements are open in which no word is marked: links, headings, emphasis.
    let mut quiet = 0_usize;
    let (mut code_block, mut table) = (false, false);
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Link { link_type: LinkType::Inline, dest_url, .. }) => {
                quiet += 1;
                edits.extend(retargeted(&text[range.clone()], &dest_url, links, range.start)?);
            }
            Event::Start(Tag::Image { dest_url, .. }) => {
                quiet += 1;
                edits.extend(retargeted(&text[range.clone()], &dest_url, links, range.start)?);
            }
            Event::Start(Tag::Heading { level, .. }) => {
                quiet += 1;
                if level == HeadingLevel::H2 {
                    sections.push(range);
                }
            }
            Event::Start(Tag::Link { .. } | Tag::Emphasis | Tag::Strong) => quiet += 1,
            Event::End(
                TagEnd::Link
                | TagEnd::Image
                | TagEnd::Heading(_)
                | TagEnd::Emphasis
                | TagEnd::Strong,
            ) => quiet -= 1,
            Event::Start(Tag::CodeBlock(kind)) => {
                code_block = true;
                let CodeBlockKind::Fenced(name) = kind else { continue };
                let block = text[range.clone()].split_once('\n');
                let inner = block.map_or("", |(_, inner)| inner.trim_end_matches('`'));
                if &*name == "diff" {
                    edits.push((range, code::piece(inner, &extras.sources) + "\n"));
                } else if name.is_empty() && drawing::is_one(inner) {
                    edits.push((range, drawing::figure(inner, |_| false) + "\n"));
                }
            }
            Event::End(TagEnd::CodeBlock) => code_block = false,
            Event::Start(Tag::Table(_)) => table = true,
            Event::End(TagEnd::Table) => table = false,
            Event::Text(_) if quiet == 0 && !code_block && !table => {
                if let Some(glossary) = extras.glossary {
                    let marks = glossary.mark(&text[range.clone()], &mut seen);
                    edits.extend(
                        marks
                            .into_iter()
                            .map(|(at, html)| (range.start + at.start..range.start + at.end, html)),
                    );
                }
            }
            Event::Code(name) if quiet == 0 => {
                let shown = &text[range.clone()];
                if let Some(link) = links.source(&name)? {
                    edits.push((range, format!("[{shown}]({link})")));
                } else if let Some(glossary) = extras.glossary.filter(|_| !table) {
                    let word = name.split('(').next().unwrap_or(&name);
                    edits.extend(
                        glossary.mark_one(word, shown, &mut seen).map(|html| (range, html)),
                    );
                }
            }
            _ => {}
        }
    }
    for (number, heading) in sections.iter().enumerate() {
        let end = sections.get(number + 1).map_or(text.len(), |next| next.start);
        match (text[heading.clone()].trim(), &extras.answer) {
            ("## Your turn", _) => edits.push((end..end, format!("\n{}", extras.turn))),
            ("## The answer", Some(answer)) => {
                let open =
                    "\n<details class=\"fold answer\"><summary>Show the answer</summary>\n\n";
                edits.push((heading.end..heading.end, open.to_owned()));
                edits.push((end..end, format!("\n{answer}\n</details>\n\n")));
            }
            _ => {}
        }
    }
    edits.sort_by_key(|(range, _)| (range.start, range.end));
    let (mut made, mut at) = (String::new(), 0);
    for (range, new) in edits {
        made.push_str(&text[at..range.start]);
        made += &new;
        at = range.end;
    }
    Ok(made + &text[at..])
}

/// The edit that makes a link lead to a page of the book: `](target)` becomes `](address)`.
fn retargeted(
    link: &str,
    target: &str,
    links: &impl Links,
    offset: usize,
) -> Result<Option<(Range<usize>, String)>> {
    let written = format!("]({target}");
    let Some(at) = link.rfind(&written).filter(|_| !is_elsewhere(target)) else { return Ok(None) };
    let (start, end) = (offset + at + 2, offset + at + written.len());
    Ok(Some((start..end, links.link(target)?)))
}

/// Whether a link leads out of the repository.
fn is_elsewhere(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:")
}

/// The first heading of a page.
pub fn title(text: &str) -> &str {
    text.lines().find_map(|line| line.strip_prefix("# ")).unwrap_or("")
}

/// The two directories that the README of a stage compares: `diff -u OLD/src NEW/src`.
pub fn compared(text: &str) -> Option<[&Path; 2]> {
    text.split("diff -u ").skip(1).find_map(|rest| {
        let mut words = rest.split([' ', '\n', '`', ')']).map(|word| word.strip_suffix("/src"));
        Some([words.next()??, words.next()??].map(Path::new))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Upper;

    impl Links for Upper {
        fn link(&self, target: &str) -> Result<String> {
            Ok(target.to_uppercase())
        }
        fn source(&self, name: &str) -> Result<Option<String>> {
            Ok((name == "src/main.rs").then(|| "M".to_owned()))
        }
    }

    #[test]
    fn the_words_stay_and_the_links_lead_into_the_book() {
        let text = "# T\n[a](b#c) `[a](b)` [x](https://d/e) [![i](j.svg)](k) `src/main.rs`\n\n```\n[a](b)\n```\n";
        let made = page(text, &Upper, &Extras::default()).unwrap();
        assert_eq!(
            made,
            "# T\n[a](B#C) `[a](b)` [x](https://d/e) [![i](J.SVG)](K) [`src/main.rs`](M)\n\n```\n[a](b)\n```\n"
        );
    }

    #[test]
    fn the_answer_is_folded() {
        let text = "# T\n## Your turn\nDo.\n## The answer\n```diff\n+a <b\n```\nx\n## Limits\ny\n";
        let extras =
            Extras { turn: "TURN\n".into(), answer: Some("DIFF".into()), ..Extras::default() };
        let made = page(text, &Upper, &extras).unwrap();
        let parts = [
            "Do.\n\nTURN\n## The answer",
            "<details",
            "<ins class=\"line\"><i></i>a &lt;b\n</ins>",
            "x\n\nDIFF\n</details>\n\n## Limits",
        ];
        let places: Vec<_> = parts.iter().map(|part| made.find(part).expect(part)).collect();
        assert!(places.is_sorted(), "{made}");
    }

    #[test]
    fn a_readme_says_what_it_compares() {
        assert_eq!(compared("so (`diff -u a/src b_c/src`). x"), Some(["a", "b_c"].map(Path::new)));
        assert_eq!(
            compared("`diff -u` of yours\n```\ndiff -u a/src b/src\n```"),
            Some(["a", "b"].map(Path::new))
        );
    }
}
