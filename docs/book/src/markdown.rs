//! What a page of the repository becomes in the book. The words stay; links lead to pages of the book,
//! differences get colours, drawings lines, the answer is folded, and words of the glossary show their meaning.

use std::{ops::Range, path::Path};

use anyhow::Result;
use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, LinkType, Options, Parser, Tag, TagEnd};

use crate::{code, drawing, glossary::Glossary};

/// What the transformation asks of the book.
pub trait Links {
    /// The address of what a relative link leads to; `None`: the book does not have it.
    fn link(&self, target: &str) -> Result<Option<String>>;
    /// The address of a source that the text names, such as `src/main.rs`.
    fn source(&self, name: &str) -> Result<Option<String>>;
}

/// What the book adds to a page.
#[derive(Default)]
pub struct Extras<'a> {
    /// The words that it explains.
    pub glossary: Option<&'a Glossary>,
    /// The address of the glossary's page.
    pub glossary_page: String,
    /// At the end of each *Your turn*.
    pub turns: Vec<String>,
    /// At the end of *The answer*, which is folded.
    pub answer: Option<String>,
    /// Names and texts of the sources whose pieces the page shows.
    pub sources: Vec<(&'static str, String)>,
}

/// Makes a page of the book out of Markdown.
pub fn page(text: &str, links: &impl Links, extras: &Extras) -> Result<String> {
    let mut editor = Editor {
        text,
        links,
        extras,
        edits: Vec::new(),
        seen: Vec::new(),
        sections: Vec::new(),
        quiet: 0,
        code_block: false,
        table: false,
    };
    for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
        editor.handle(event, range)?;
    }
    editor.extend_sections();
    Ok(editor.edited())
}

/// Collects what changes in a page.
struct Editor<'a, L> {
    text: &'a str,
    links: &'a L,
    extras: &'a Extras<'a>,
    /// The places that change, and their new text.
    edits: Vec<(Range<usize>, String)>,
    /// The meanings that the page shows already.
    seen: Vec<String>,
    /// The headings of sections.
    sections: Vec<Range<usize>>,
    /// How many elements are open in which no word is marked: links, headings, emphasis.
    quiet: usize,
    code_block: bool,
    table: bool,
}

impl<L: Links> Editor<'_, L> {
    fn handle(&mut self, event: Event, range: Range<usize>) -> Result<()> {
        match event {
            Event::Start(Tag::Link { link_type: LinkType::Inline, dest_url, .. })
            | Event::Start(Tag::Image { dest_url, .. }) => {
                self.quiet += 1;
                self.retarget(range, &dest_url)?;
            }
            Event::Start(Tag::Heading { level, .. }) => {
                self.quiet += 1;
                if level == HeadingLevel::H2 {
                    self.sections.push(range);
                }
            }
            Event::Start(Tag::Link { .. } | Tag::Emphasis | Tag::Strong) => self.quiet += 1,
            Event::End(
                TagEnd::Link
                | TagEnd::Image
                | TagEnd::Heading(_)
                | TagEnd::Emphasis
                | TagEnd::Strong,
            ) => self.quiet -= 1,
            Event::Start(Tag::CodeBlock(kind)) => {
                self.code_block = true;
                if let CodeBlockKind::Fenced(language) = kind {
                    self.draw(range, &language);
                }
            }
            Event::End(TagEnd::CodeBlock) => self.code_block = false,
            Event::Start(Tag::Table(_)) => self.table = true,
            Event::End(TagEnd::Table) => self.table = false,
            Event::Text(_) if self.quiet == 0 && !self.code_block && !self.table => {
                self.mark(range);
            }
            Event::Code(name) if self.quiet == 0 => self.link_or_mark(range, &name)?,
            _ => {}
        }
        Ok(())
    }

    /// Makes a link lead to a page of the book: `](target)` becomes `](address)`. What the book does not have is no
    /// link there.
    fn retarget(&mut self, range: Range<usize>, target: &str) -> Result<()> {
        let (shown, written) = (&self.text[range.clone()], format!("]({target}"));
        let Some(at) = shown.rfind(&written).filter(|_| !is_elsewhere(target)) else {
            return Ok(());
        };
        match self.links.link(target)? {
            Some(address) => {
                let (start, end) = (range.start + at + 2, range.start + at + written.len());
                self.edits.push((start..end, address));
            }
            None => self.edits.push((range, shown[..at].trim_start_matches('[').to_owned())),
        }
        Ok(())
    }

    /// Gives a difference its colours, and a drawing its lines.
    fn draw(&mut self, range: Range<usize>, language: &str) {
        let block = self.text[range.clone()].split_once('\n');
        let inner = block.map_or("", |(_, inner)| inner.trim_end_matches('`'));
        if language == "diff" {
            self.edits.push((range, code::piece(inner, &self.extras.sources) + "\n"));
        } else if language.is_empty() && drawing::is_one(inner) {
            self.edits.push((range, drawing::figure(inner, |_| false) + "\n"));
        } else if let Some(table) = drawing::table(inner).filter(|_| language.is_empty()) {
            self.edits.push((range, table + "\n"));
        }
    }

    /// Marks the words of the glossary in a text.
    fn mark(&mut self, range: Range<usize>) {
        let Some(glossary) = self.extras.glossary else { return };
        let text = &self.text[range.clone()];
        for (at, html) in glossary.mark(text, &self.extras.glossary_page, &mut self.seen) {
            self.edits.push((range.start + at.start..range.start + at.end, html));
        }
    }

    /// Links the name of a source, or marks a word of the glossary that is written as code.
    fn link_or_mark(&mut self, range: Range<usize>, name: &str) -> Result<()> {
        let shown = &self.text[range.clone()];
        if let Some(link) = self.links.source(name)? {
            self.edits.push((range, format!("[{shown}]({link})")));
        } else if let Some(glossary) = self.extras.glossary.filter(|_| !self.table) {
            let word = name.split('(').next().unwrap_or(name);
            let page = &self.extras.glossary_page;
            let html = glossary.mark_one(word, shown, page, &mut self.seen);
            self.edits.extend(html.map(|html| (range, html)));
        }
        Ok(())
    }

    /// Adds what *Your turn* ends with, and folds *The answer*.
    fn extend_sections(&mut self) {
        let mut turns = self.extras.turns.iter();
        for (number, heading) in self.sections.iter().enumerate() {
            let end = self.sections.get(number + 1).map_or(self.text.len(), |next| next.start);
            match (self.text[heading.clone()].trim(), &self.extras.answer) {
                (title, _) if title.starts_with("## Your turn") => {
                    let turn = turns.next().map_or("", String::as_str);
                    self.edits.push((end..end, format!("\n{turn}")));
                }
                ("## The answer", Some(answer)) => {
                    let open =
                        "\n<details class=\"fold answer\"><summary>Show the answer</summary>\n\n";
                    self.edits.push((heading.end..heading.end, open.to_owned()));
                    self.edits.push((end..end, format!("\n{answer}\n</details>\n\n")));
                }
                _ => {}
            }
        }
    }

    /// The page with all changes.
    fn edited(mut self) -> String {
        self.edits.sort_by_key(|(range, _)| (range.start, range.end));
        let (mut made, mut at) = (String::new(), 0);
        for (range, new) in self.edits {
            made.push_str(&self.text[at..range.start]);
            made += &new;
            at = range.end;
        }
        made + &self.text[at..]
    }
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
    all_compared(text).next()
}

/// All pairs that it compares, those of folds, too.
pub fn all_compared(text: &str) -> impl Iterator<Item = [&Path; 2]> {
    text.split("diff -u").skip(1).filter_map(|rest| {
        let words = rest.trim_start().split([' ', '\n', '`', ')', '<']);
        let mut words = words.map(|word| word.strip_suffix("/src"));
        Some([words.next()??, words.next()??].map(Path::new))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Upper;

    impl Links for Upper {
        fn link(&self, target: &str) -> Result<Option<String>> {
            Ok((target != "r.json").then(|| target.to_uppercase()))
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
    fn what_the_book_does_not_have_is_no_link() {
        let made = page("[`r`](r.json), [a](b)", &Upper, &Extras::default()).unwrap();
        assert_eq!(made, "`r`, [a](B)");
    }

    #[test]
    fn the_answer_is_folded() {
        let text = "# T\n## Your turn: one\nDo.\n## The idea: more\n## Your turn: two\nDo.\n## The answer\n\
                    ```diff\n+a <b\n```\nx\n## Limits\ny\n";
        let turns = vec!["FIRST\n".into(), "TURN\n".into()];
        let extras = Extras { turns, answer: Some("DIFF".into()), ..Extras::default() };
        let made = page(text, &Upper, &extras).unwrap();
        let parts = [
            "Do.\n\nFIRST\n## The idea: more",
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
