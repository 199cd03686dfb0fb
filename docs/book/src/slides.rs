//! A class's slides, and its handout of one page: made of what the READMEs, the glossary and docs/class.md have.

use std::fmt::Write;

use anyhow::{Context, Result};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::{code, drawing, escape::escape, markdown};

const STYLE: &str = include_str!("../slides.css");
const SCRIPT: &str = include_str!("../slides.js");

/// The lines of a difference that fit on a slide, and on how many slides it has to fit.
const LINES: usize = 22;
const STEPS: usize = 3;
/// The columns of a block of code before it wraps.
const COLUMNS: usize = 100;

/// The pages that the slides are made of.
pub struct Sources {
    /// The README at the root.
    pub readme: String,
    /// docs/class.md: what to say, to ask, and where people get stuck.
    pub class: String,
    /// docs/glossary.md.
    pub glossary: String,
    /// Directory and README of each stage, in order.
    pub stages: Vec<(String, String)>,
}

/// A block of code of a page.
struct Block<'a> {
    /// What is named after the fence.
    language: String,
    text: &'a str,
    /// The heading above it, if its section has any.
    heading: &'a str,
    /// The paragraph above it.
    before: &'a str,
}

/// What a slide shows, and what is said there.
struct Slide {
    title: String,
    body: String,
    notes: String,
}

/// Both pages, by the names of their files. `style` is the book's: the colours of differences and drawings.
pub fn pages(sources: &Sources, style: &str) -> Result<[(&'static str, String); 2]> {
    let Sources { readme, class, stages, .. } = sources;
    let title = markdown::title(readme);
    let place = section(readme, "Where the stages look")?;
    let stack = blocks(place).into_iter().next().context("README.md draws no storage stack")?.text;
    let mut slides = vec![
        ("index.html", Slide::new(title, html(intro(readme)))),
        ("index.html", Slide::new("Where the stages look", drawing::figure(stack, |_| false))),
    ];
    for (directory, text) in stages {
        let number = directory.get(5..7).context("a stage without a number")?;
        let made = stage(number, text, stack, class).with_context(|| directory.clone())?;
        slides.extend(made.into_iter().map(|slide| (directory.as_str(), slide)));
    }
    let mut deck = String::new();
    for (number, (of, slide)) in (1..).zip(&slides) {
        let Slide { title, body, notes } = slide;
        let link =
            if of.ends_with(".html") { (*of).to_owned() } else { format!("{of}/index.html") };
        let _ = writeln!(
            deck,
            "<section class=\"slide\" id=\"{number}\"><div class=\"face\"><h2>{title}</h2>\n\
             <div class=\"body\">{body}</div><footer><a href=\"{link}\">{of}</a> {number} / {}</footer>\
             </div><aside>{notes}</aside></section>",
            slides.len()
        );
    }
    let deck = format!(
        "<main>{deck}</main><nav><kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd> · <kbd>F</kbd> full screen · \
         printed, two to a page · <a href=\"docs/class.html\">In a class</a> · <a href=\"handout.html\">Handout</a></nav>\n\
         <script>{SCRIPT}</script>"
    );
    Ok([
        ("slides.html", page("Slides", title, style, &deck)),
        ("handout.html", page("Handout", title, style, &handout(sources, stack)?)),
    ])
}

/// What lies beside the keyboard: commands, the storage stack, the words.
fn handout(sources: &Sources, stack: &str) -> Result<String> {
    let Sources { readme, glossary, .. } = sources;
    let title = html(&format!("# {}", markdown::title(readme)));
    let mut commands = Vec::new();
    for place in ["Start", "The exercises"] {
        commands.extend(blocks(section(readme, place)?).iter().map(|block| block.text));
    }
    commands.retain(|text| is_command(text));
    let (mut words, mut depth) = (String::new(), 0);
    for (event, range) in Parser::new_ext(glossary, Options::ENABLE_TABLES).into_offset_iter() {
        let text = &glossary[range];
        let is_kept = match event {
            Event::Start(Tag::Heading { .. } | Tag::List(_)) => true,
            // A word that needs more than an item of a list.
            Event::Start(Tag::Paragraph) => text.starts_with("A **"),
            _ => false,
        };
        if is_kept && depth == 0 {
            let _ = writeln!(words, "{text}\n");
        }
        match event {
            Event::Start(_) => depth += 1,
            Event::End(_) => depth -= 1,
            _ => {}
        }
    }
    let (commands, stack) = (escape(&commands.join("\n")), drawing::figure(stack, |_| false));
    let words = html(words.trim_start_matches("# Glossary"));
    Ok(format!(
        "<main class=\"handout\">{title}<div class=\"beside\"><pre>{commands}</pre>{stack}</div>\n\
         <div class=\"words\">{words}</div></main>"
    ))
}

/// The slides of a stage.
fn stage(number: &str, text: &str, stack: &str, class: &str) -> Result<Vec<Slide>> {
    let [say, ask, stuck] = notes(class, number)?;
    let able = section(text, "What you will be able to do")?;
    let mut slides = vec![Slide::new(markdown::title(text), html(intro(text)) + &html(able))];
    let is_here = |row: &str| names(row, number);
    if stack.lines().any(is_here) {
        slides.push(Slide::new("Where the stages look", drawing::figure(stack, is_here)));
    }
    slides[0].notes = say;
    for (title, section) in sections(text) {
        if title.starts_with("The idea") {
            let pictures = blocks(section).into_iter();
            let are_drawn = |it: &Block| it.language.is_empty() && it.text.lines().count() > 2;
            let pictures = pictures.filter(are_drawn);
            slides.extend(pictures.map(|it| Slide::new(it.heading, drawn(it.text))));
        } else if title.starts_with("Your turn") {
            slides.push(Slide::new(title, html(section)));
        }
    }
    slides.last_mut().context("no turn")?.notes = stuck;
    let answer = blocks(section(text, "The answer")?);
    slides.extend(steps(text, &answer));
    let mut command = "";
    for block in answer.iter().filter(|block| block.language.is_empty()) {
        if is_command(block.text) {
            command = block.text;
        } else {
            let body =
                if command.is_empty() { drawn(block.text) } else { fit(&[command, block.text]) };
            slides.push(Slide::new("What you should see", body));
            command = "";
        }
    }
    slides.last_mut().context("no slides")?.notes += &ask;
    Ok(slides)
}

/// The difference to the stage before, or the whole program, in a few steps.
fn steps(text: &str, answer: &[Block]) -> Vec<Slide> {
    let title = match markdown::compared(text) {
        Some([old, new]) => format!("{} → {}", old.display(), new.display()),
        None => "src/trace.bpf.c".to_owned(),
    };
    let has_diff = answer.iter().any(|block| block.language == "diff");
    let mut pieces = Vec::new();
    for block in answer {
        if has_diff && block.language == "diff" {
            let hunks = block.text.split("...\n").filter(|hunk| !hunk.is_empty());
            pieces.extend(hunks.enumerate().map(|(number, hunk)| {
                (if number == 0 { sentence(block.before) } else { "" }, hunk.to_owned())
            }));
        } else if !has_diff && block.language == "c" {
            let lines = block.text.lines().map(|line| format!(" {line}\n"));
            pieces.push((sentence(block.before), lines.collect()));
        }
    }
    // A sentence takes the room of two lines or three.
    let cost =
        |piece: &(&str, String)| piece.1.lines().count() + if piece.0.is_empty() { 1 } else { 3 };
    let costs: Vec<usize> = pieces.iter().map(cost).collect();
    let groups = packed(&costs, costs.iter().sum::<usize>().div_ceil(LINES).clamp(1, STEPS));
    let of = groups.len();
    let mut rest = &pieces[..];
    let mut slides = Vec::new();
    for (number, size) in (1..).zip(groups) {
        let (here, after) = rest.split_at(size);
        rest = after;
        let lines: usize = here.iter().map(cost).sum();
        let mut body = format!("<div class=\"fit\" style=\"--lines:{lines};--cols:{COLUMNS}\">");
        for (sentence, hunk) in here {
            body += &html(sentence);
            body += &code::piece(hunk, &[]);
        }
        let title = if of > 1 { format!("{title}, {number} of {of}") } else { title.clone() };
        slides.push(Slide::new(&title, body + "</div>"));
    }
    slides
}

/// How many pieces each of at most `parts` groups takes, so that the largest group is as small as can be.
fn packed(costs: &[usize], parts: usize) -> Vec<usize> {
    let mut limit = costs.iter().copied().max().unwrap_or(0);
    loop {
        let (mut groups, mut used) = (Vec::new(), limit);
        for cost in costs {
            if used + cost > limit {
                (used, _) = (0, groups.push(0));
            }
            used += cost;
            if let Some(last) = groups.last_mut() {
                *last += 1;
            }
        }
        if groups.len() <= parts {
            return groups;
        }
        limit += 1;
    }
}

impl Slide {
    fn new(title: &str, body: String) -> Slide {
        let title = html(title);
        let title = title.trim().trim_start_matches("<p>").trim_end_matches("</p>").to_owned();
        Slide { title, body, notes: String::new() }
    }
}

fn page(kind: &str, title: &str, style: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{kind}: {}</title>\n\
         <style>\n{style}{STYLE}</style>\n<script>if (matchMedia('(prefers-color-scheme: dark)').matches) \
         document.documentElement.classList.add('navy');</script></head>\n<body>{body}</body></html>\n",
        escape(title)
    )
}

/// What stands between a page's title and its first section.
fn intro(text: &str) -> &str {
    let text = text.split("\n## ").next().unwrap_or(text);
    let text = text.split_once('\n').map_or("", |(_, text)| text).trim_start();
    text.split("\n\n").next().unwrap_or(text)
}

/// The sections of a page, with their titles.
fn sections(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("\n## ").skip(1).map(|section| section.split_once('\n').unwrap_or((section, "")))
}

fn section<'a>(text: &'a str, title: &str) -> Result<&'a str> {
    let found = sections(text).find(|(of, _)| *of == title);
    found.map(|(_, section)| section).with_context(|| format!("no section {title}"))
}

fn blocks(section: &str) -> Vec<Block<'_>> {
    let (mut heading, mut before, mut found) = ("The idea", "", Vec::new());
    for (event, range) in Parser::new_ext(section, Options::ENABLE_TABLES).into_offset_iter() {
        match event {
            Event::Start(Tag::Heading { .. }) => {
                heading = section[range].trim_start_matches('#').trim();
            }
            Event::Start(Tag::Paragraph) => before = &section[range],
            Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                let text = section[range].split_once('\n').map_or("", |(_, text)| text);
                let text = text.trim_end_matches('`');
                found.push(Block { language: language.to_string(), text, heading, before });
            }
            _ => {}
        }
    }
    found
}

/// The first sentence of a paragraph that says something of the code below it.
fn sentence(paragraph: &str) -> &str {
    let mut rest = paragraph.trim();
    if rest.starts_with("This is ")
        && let Some((_, after)) = rest.split_once("`). ").or(rest.split_once("`).\n"))
    {
        rest = after;
    }
    let ends =
        [". ", ".\n", ".** "].into_iter().filter_map(|end| Some(rest.find(end)? + end.len()));
    rest[..ends.min().unwrap_or(rest.len())].trim()
}

/// What docs/class.md has for a stage: to say, to ask, and where people get stuck.
fn notes(class: &str, number: &str) -> Result<[String; 3]> {
    let notes = || {
        let (_, rest) = class.split_once(&format!("\n**{number}** "))?;
        let (say, rest) = rest.split("\n\n").next()?.split_once("*Ask:*")?;
        let (ask, stuck) = rest.split_once("*Stuck:*")?;
        Some([("Say", say), ("Ask", ask), ("Stuck", stuck)])
    };
    let notes =
        notes().with_context(|| format!("docs/class.md does not say what to do at {number}"))?;
    Ok(notes.map(|(what, text)| html(&format!("**{what}:** {}", text.trim()))))
}

/// Whether a row of the storage stack names a stage: `01-06 10 11`.
fn names(row: &str, number: &str) -> bool {
    let mut words = row.split(|c: char| !c.is_ascii_digit() && c != '-');
    words.any(|word| match word.split_once('-') {
        Some((from, to)) => from.len() == 2 && (from..=to).contains(&number),
        None => word == number,
    })
}

fn is_command(text: &str) -> bool {
    ["cargo ", "diff "].iter().any(|word| text.starts_with(word))
}

fn drawn(text: &str) -> String {
    if drawing::is_one(text) { drawing::figure(text, |_| false) } else { fit(&[text]) }
}

/// Code as large as the slide has room for.
fn fit(texts: &[&str]) -> String {
    let lines = || texts.iter().flat_map(|text| text.trim_end().lines());
    let length = |line: &str| line.chars().count();
    let height: usize = lines().map(|line| length(line).div_ceil(COLUMNS).max(1)).sum();
    let width = lines().map(length).max().unwrap_or(0).min(COLUMNS);
    let mut html =
        format!("<div class=\"fit\" style=\"--lines:{};--cols:{width}\">", height + texts.len());
    for text in texts {
        let _ = write!(html, "<pre class=\"plain\">{}</pre>", escape(text.trim_end()));
    }
    html + "</div>"
}

/// Markdown without its links: nobody clicks on a slide.
fn html(text: &str) -> String {
    let is_shown = |event: &Event| {
        !matches!(
            event,
            Event::Start(Tag::Link { .. }) | Event::End(TagEnd::Link) | Event::InlineHtml(_)
        )
    };
    let mut html = String::new();
    pulldown_cmark::html::push_html(&mut html, Parser::new(text).filter(is_shown));
    html
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_slide_is_as_small_as_can_be() {
        assert_eq!(packed(&[9, 1, 8, 2, 8], 3), [2, 2, 1]);
        assert_eq!(packed(&[9, 1], 1), [2]);
        assert!(packed(&[], 1).is_empty());
    }

    #[test]
    fn a_row_of_the_stack_names_stages() {
        let row = "   |  v   submit_bio() .......... 01-06 10 11 13   kprobe";
        assert!(["01", "04", "06", "11"].iter().all(|number| names(row, number)));
        assert!(["00", "07", "12"].iter().all(|number| !names(row, number)));
    }

    #[test]
    fn a_sentence_is_about_the_code() {
        let text =
            "This is everything that changed\n(`diff -u a/src b/src`). First the header. Then x:";
        assert_eq!(sentence(text), "First the header.");
        assert_eq!(sentence("**Simple.** The hooks move:"), "**Simple.**");
        assert_eq!(sentence("`main.rs` prints:"), "`main.rs` prints:");
    }

    #[test]
    fn notes_have_three_parts() {
        let class = "x\n\n**07** One\nlayer. *Ask:* Why? So. *Stuck:* which.\n\n**08** y\n";
        let [say, ask, stuck] = notes(class, "07").unwrap();
        assert_eq!(say, "<p><strong>Say:</strong> One\nlayer.</p>\n");
        assert!(ask.contains("Why? So.") && stuck.contains("which."));
        assert!(notes(class, "08").is_err());
    }
}
