//! A class's slides, and its handout of one page: made of what the READMEs, the glossary and docs/class.md have.

use std::fmt::Write;

use anyhow::{Context, Result};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::{code, drawing, escape::escape, markdown};

const STYLE: &str = include_str!("../slides.css");
/// The colours of code, and what leads from slide to slide.
const SCRIPTS: [&str; 2] = [include_str!("../source.js"), include_str!("../slides.js")];

/// The lines of a difference that fit on a slide.
const LINES: usize = 22;
/// The columns of a block of code before it wraps: with more, its letters would be too small for the last row.
const COLUMNS: usize = 118;

/// The pages that the slides are made of.
pub struct Sources {
    /// The README at the root.
    pub readme: String,
    /// docs/class.md: what to say, to ask, and where people get stuck.
    pub class: String,
    /// docs/glossary.md.
    pub glossary: String,
    /// docs/incidents.md: what a class ends with.
    pub incidents: String,
    /// docs/slow-disk.md: how to look for it.
    pub slow_disk: String,
    /// The file of mdBook's highlight.js, beside the slides.
    pub highlighter: String,
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
        ("index.html", front(readme)?),
        ("index.html", Slide::new("Where the stages look", drawing::figure(stack, |_| false))),
    ];
    for (directory, text) in stages {
        let number = directory.get(5..7).context("a stage without a number")?;
        let made = stage(number, text, stack, class).with_context(|| directory.clone())?;
        slides.extend(made.into_iter().map(|slide| (directory.as_str(), slide)));
    }
    let end = finale(&sources.incidents, class)?;
    slides.extend(end.into_iter().map(|slide| ("docs/incidents.html", slide)));
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
    let scripts = SCRIPTS.map(|script| format!("<script>{script}</script>")).concat();
    let deck = format!(
        "<main>{deck}</main>\n{CONTROLS}\n<script src=\"{}\"></script>{scripts}",
        sources.highlighter
    );
    Ok([
        ("slides.html", page("Slides", title, style, &deck)),
        ("handout.html", page("Handout", title, style, &handout(sources, stack)?)),
    ])
}

/// Buttons for what keys do, the presenter's clock, and where the deck leads.
const CONTROLS: &str = "<nav>\
    <button data-do=\"back\" aria-label=\"Back\" title=\"← ↑ Page up\">‹</button>\
    <button data-do=\"next\" aria-label=\"Next\" title=\"→ ↓ Page down, space, Enter\">›</button>\
    <button class=\"screen\" data-do=\"present\" title=\"P: notes, next slide and clock in a window of their own\">Present</button>\
    <button data-do=\"blank\" title=\"B\">Blank</button>\
    <button class=\"screen\" data-do=\"full\" title=\"F\">Full screen</button>\
    <button data-do=\"theme\" title=\"D\">Light or dark</button>\
    <span class=\"links\"><a href=\"docs/class.html\">In a class</a> · <a href=\"handout.html\">Handout</a></span>\
    <span class=\"clock\"><output id=\"clock\" aria-label=\"Time since the start\"></output> \
    <button data-do=\"clock\" title=\"R\">Start again</button> <output id=\"time\" aria-label=\"Time of day\"></output></span>\
    </nav>";

/// The first slide: what the workshop is, in a sentence, and what its reader will have made.
fn front(readme: &str) -> Result<Slide> {
    let picture = readme.lines().find_map(|line| {
        let (text, rest) = line.strip_prefix("![")?.split_once("](")?;
        Some((text, rest.strip_suffix(')')?))
    });
    let (text, file) = picture.context("README.md has no picture")?;
    let body = format!(
        "<div class=\"front\">{}<img src=\"{}\" alt=\"{}\"></div>",
        html(sentence(intro(readme))),
        escape(file),
        escape(text)
    );
    Ok(Slide::new(markdown::title(readme), body))
}

/// The last slides: something is wrong with a machine, and how to look for it.
fn finale(incidents: &str, class: &str) -> Result<Vec<Slide>> {
    let [say, ask, stuck] = notes(class, "Incident")?;
    let command = blocks(incidents).first().context("docs/incidents.md names no command")?.text;
    let after = incidents.split("```\n").nth(2).context("nothing after the command")?;
    let after = after.trim_start().split("\n\n").next().unwrap_or(after);
    let mut begin = Slide::new(
        markdown::title(incidents),
        html(intro(incidents)) + &shell(command) + &html(after),
    );
    begin.notes = say + &stuck;
    let mut list = String::from("<ol>");
    for item in section(incidents, "How to look")?.split("\n").filter_map(item) {
        let _ = write!(list, "<li>{}</li>", inline(item));
    }
    let mut look = Slide::new("How to look", list + "</ol>");
    look.notes = ask;
    Ok(vec![begin, look])
}

/// The first line of an item of a numbered list.
fn item(line: &str) -> Option<&str> {
    let (number, text) = line.split_once(". ")?;
    number.parse::<u32>().ok().map(|_| text)
}

/// What lies beside the keyboard: commands, the storage stack, the words.
fn handout(sources: &Sources, stack: &str) -> Result<String> {
    let Sources { readme, glossary, incidents, slow_disk, .. } = sources;
    let title = html(&format!("# {}", markdown::title(readme)));
    let mut commands = Vec::new();
    for place in ["Start", "The exercises"] {
        commands.extend(blocks(section(readme, place)?).iter().map(|block| block.text));
    }
    commands.extend(blocks(incidents).iter().map(|block| block.text));
    commands.retain(|text| is_command(text));
    // The method's steps, and the parts of an I/O's time.
    let mut method = String::new();
    for line in slow_disk.lines() {
        if let Some(step) = line.strip_prefix("## ").filter(|step| step.contains(". ")) {
            let _ = writeln!(method, "{step}");
        } else if let Some((part, what)) =
            line.strip_prefix("### ").and_then(|line| line.split_once(": "))
        {
            let _ = writeln!(method, "   - **{part}**: {what}");
        }
    }
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
    let method = format!("## {}\n\n{method}\n", markdown::title(slow_disk));
    let words = html(&(method + words.trim_start_matches("# Glossary")));
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
    let answer = without_folds(section(text, "The answer")?);
    let answer = blocks(&answer);
    slides.extend(steps(text, &answer));
    slides.extend(outputs(&answer));
    slides.last_mut().context("no slides")?.notes += &ask;
    Ok(slides)
}

/// What the programs print, each with its command.
fn outputs(answer: &[Block]) -> Vec<Slide> {
    let (mut command, mut slides) = ("", Vec::new());
    for block in answer.iter().filter(|block| block.language.is_empty()) {
        if is_command(block.text) {
            command = block.text;
            continue;
        }
        let parts = halves(command, &shortened(block.text));
        let of = parts.len();
        for (number, text) in (1..).zip(parts) {
            let body = match number {
                1 if command.is_empty() => drawn(&text),
                1 => fit(&[command, &text]),
                _ => fit(&[&text]),
            };
            let more = if of > 1 { format!(", {number} of {of}") } else { String::new() };
            slides.push(Slide::new(&format!("What you should see{more}"), body));
        }
        command = "";
    }
    slides
}

/// Lines of the trace pipe without what each of them has: the CPU, flags, and the kernel's function that writes them.
fn shortened(text: &str) -> String {
    let line = |line: &str| {
        let short = line.split_once(" bpf_trace_printk: ").and_then(|(before, event)| {
            let mut words = before.split_whitespace();
            let (task, time) = (words.next()?, words.next_back()?);
            Some(format!("{task:>16} {time} {event}\n"))
        });
        short.unwrap_or_else(|| format!("{line}\n"))
    };
    text.lines().map(line).collect()
}

/// An output that is too long for a slide with its command in two parts: the second begins with the counters at its end.
fn halves(command: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    if height(command) + height(text) <= LINES {
        return vec![text.to_owned()];
    }
    let is_counter = |line: &&&str| {
        let mut words = line.split_whitespace();
        let number = words.next().unwrap_or("");
        line.starts_with(' ') && (number == "-" || number.parse::<u64>().is_ok())
    };
    let counters = lines.iter().rev().take_while(is_counter).count();
    let at = if counters > 2 { lines.len() - counters } else { lines.len() / 2 };
    [&lines[..at], &lines[at..]].map(|part| part.join("\n")).to_vec()
}

/// A piece of a difference, and the sentence above it.
struct Piece<'a> {
    sentence: &'a str,
    language: &'static str,
    text: String,
}

impl Piece<'_> {
    /// The lines that it takes on a slide: a sentence takes the room of two, and what is below has a margin.
    fn cost(&self) -> usize {
        height(&self.text) + if self.sentence.is_empty() { 1 } else { 3 }
    }

    /// The same in pieces that fit on a slide, divided at empty lines where there are some.
    fn divided(self) -> Vec<Self> {
        let Piece { mut sentence, language, text } = self;
        let (mut pieces, mut rest) = (Vec::new(), &*text);
        while height(rest) + 3 > LINES {
            let starts: Vec<usize> =
                rest.match_indices('\n').map(|(at, _)| at + 1).take(LINES - 3).collect();
            let is_end = |at: &&usize| matches!(rest[..**at].lines().last(), Some(" " | "+" | "-"));
            let at = starts.iter().skip(LINES / 2).rev().find(is_end).or(starts.last());
            let (here, after) = rest.split_at(at.copied().unwrap_or(rest.len()));
            pieces.push(Piece { sentence, language, text: here.to_owned() });
            (sentence, rest) = ("", after);
        }
        if !rest.is_empty() {
            pieces.push(Piece { sentence, language, text: rest.to_owned() });
        }
        pieces
    }
}

/// The difference to the stage before, or the whole program, in as many steps as it needs to be read from the last row.
fn steps(text: &str, answer: &[Block]) -> Vec<Slide> {
    let has_diff = answer.iter().any(|block| block.language == "diff");
    let title = match markdown::compared(text) {
        Some([old, new]) if has_diff => format!("{} → {}", old.display(), new.display()),
        _ => "src/trace.bpf.c".to_owned(),
    };
    let mut pieces = Vec::new();
    for block in answer {
        let language = code::language_of_piece(block.text);
        if has_diff && block.language == "diff" {
            let hunks = block.text.split("...\n").filter(|hunk| !hunk.is_empty());
            pieces.extend(hunks.enumerate().map(|(number, hunk)| Piece {
                sentence: if number == 0 { sentence(block.before) } else { "" },
                language,
                text: hunk.to_owned(),
            }));
        } else if !has_diff && block.language == "c" {
            let text = block.text.lines().map(|line| format!(" {line}\n")).collect();
            pieces.push(Piece { sentence: sentence(block.before), language: "c", text });
        }
    }
    let pieces: Vec<Piece> = pieces.into_iter().flat_map(Piece::divided).collect();
    let costs: Vec<usize> = pieces.iter().map(Piece::cost).collect();
    let mut rest = &pieces[..];
    let mut slides = Vec::new();
    let groups = packed(&costs);
    let of = groups.len();
    for (number, size) in (1..).zip(groups) {
        let (here, after) = rest.split_at(size);
        rest = after;
        let lines: usize = here.iter().map(Piece::cost).sum();
        let width = here.iter().flat_map(|piece| piece.text.lines()).map(columns).max();
        let mut body = open_fit(lines, width.unwrap_or(0));
        for piece in here {
            body += &html(piece.sentence);
            body += &code::piece_in(piece.language, &piece.text, &[]);
        }
        let title = if of > 1 { format!("{title}, {number} of {of}") } else { title.clone() };
        slides.push(Slide::new(&title, body + "</div>"));
    }
    slides
}

/// The columns of a line, whose tabs have four.
fn columns(line: &str) -> usize {
    line.chars().map(|c| if c == '\t' { 4 } else { 1 }).sum()
}

/// The rows of a text, whose long lines wrap.
fn height(text: &str) -> usize {
    text.lines().map(|line| columns(line).div_ceil(COLUMNS - 4).max(1)).sum()
}

/// What stands outside of folds.
fn without_folds(section: &str) -> String {
    let mut parts = section.split("<details>");
    let first = parts.next().unwrap_or("").to_owned();
    first + &parts.filter_map(|part| Some(part.split_once("</details>")?.1)).collect::<String>()
}

/// How many pieces each group takes: as few groups as there can be, and the largest as small as can be then.
fn packed(costs: &[usize]) -> Vec<usize> {
    let grouped = |limit: usize| {
        let (mut groups, mut used) = (Vec::new(), usize::MAX);
        for cost in costs {
            if used.saturating_add(*cost) > limit {
                (used, _) = (0, groups.push(0));
            }
            used += cost;
            if let Some(last) = groups.last_mut() {
                *last += 1;
            }
        }
        groups
    };
    let largest = costs.iter().copied().max().unwrap_or(0);
    let few = grouped(largest.max(LINES));
    let mut limits = largest..=largest.max(LINES);
    limits.find_map(|limit| Some(grouped(limit)).filter(|it| it.len() == few.len())).unwrap_or(few)
}

impl Slide {
    fn new(title: &str, body: String) -> Slide {
        Slide { title: inline(title), body, notes: String::new() }
    }
}

fn page(kind: &str, title: &str, style: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>{kind}: {}</title>\n\
         <style>\n{style}{STYLE}</style>\n<script>let chosen;try {{ chosen = localStorage.getItem('slides-theme'); }} catch {{ }}\n\
         if (chosen ? chosen === 'navy' : matchMedia('(prefers-color-scheme: dark)').matches) \
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
    Ok(notes.map(|(what, text)| match text.split_once("? ").filter(|_| what == "Ask") {
        // The answer is folded: the notes may stand below the slide, on the projector.
        Some((question, answer)) => {
            let question = html(&format!("**{what}:** {}?", question.trim()));
            let answer = html(answer.trim());
            format!("{question}<details><summary>Answer</summary>{answer}</details>")
        }
        None => html(&format!("**{what}:** {}", text.trim())),
    }))
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
    if drawing::is_one(text) { drawing::figure(text, |_| false) } else { fit(&[&shortened(text)]) }
}

/// Code as large as the slide has room for.
fn fit(texts: &[&str]) -> String {
    let lines = || texts.iter().flat_map(|text| text.trim_end().lines());
    let height: usize = lines().map(|line| columns(line).div_ceil(COLUMNS).max(1)).sum();
    let width = lines().map(columns).max().unwrap_or(0);
    let mut html = open_fit(height + texts.len(), width);
    for text in texts {
        let _ = write!(html, "<pre class=\"plain\">{}</pre>", escape(text.trim_end()));
    }
    html + "</div>"
}

/// Begins a box for so many lines of so many columns.
fn open_fit(lines: usize, columns: usize) -> String {
    format!("<div class=\"fit\" style=\"--lines:{lines};--cols:{}\">", columns.clamp(40, COLUMNS))
}

/// A command, as large as its longest line lets it be.
fn shell(text: &str) -> String {
    let width = text.lines().map(columns).max().unwrap_or(0).max(40);
    format!("<pre style=\"--cols:{width}\"><code>{}</code></pre>", escape(text))
}

/// Markdown without its links: nobody clicks on a slide.
fn html(text: &str) -> String {
    let is_shown = |event: &Event| {
        !matches!(
            event,
            Event::Start(Tag::Link { .. }) | Event::End(TagEnd::Link) | Event::InlineHtml(_)
        )
    };
    let (mut html, mut code) = (String::new(), None::<String>);
    let events = Parser::new(text).filter(is_shown).filter_map(|event| match event {
        Event::Start(Tag::CodeBlock(_)) => {
            code = Some(String::new());
            None
        }
        Event::End(TagEnd::CodeBlock) => {
            Some(Event::Html(shell(&code.take().unwrap_or_default()).into()))
        }
        Event::Text(text) if code.is_some() => {
            code.as_mut()?.push_str(&text);
            None
        }
        other => Some(other),
    });
    let events: Vec<Event> = events.collect();
    pulldown_cmark::html::push_html(&mut html, events.into_iter());
    html
}

/// The same for text without a paragraph around it.
fn inline(text: &str) -> String {
    let html = html(text);
    html.trim().trim_start_matches("<p>").trim_end_matches("</p>").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_slide_is_as_small_as_can_be() {
        assert_eq!(packed(&[9, 1, 8, 2, 8]), [3, 2]);
        assert_eq!(packed(&[9, 1]), [2]);
        assert_eq!(packed(&[LINES, LINES, 1]), [1, 1, 1]);
        assert!(packed(&[]).is_empty());
    }

    #[test]
    fn long_pieces_are_divided_and_nothing_is_lost() {
        let text: String =
            (0..50).map(|n| if n % 7 == 6 { " \n".into() } else { format!("+{n}\n") }).collect();
        let whole = Piece { sentence: "One.", language: "c", text: text.clone() };
        let pieces = whole.divided();
        assert!(pieces.iter().all(|piece| piece.cost() <= LINES));
        assert_eq!(pieces.iter().map(|piece| &*piece.text).collect::<String>(), text);
        assert!(pieces[0].text.ends_with(" \n") && pieces[1].sentence.is_empty());
    }

    #[test]
    fn trace_lines_lose_what_all_have_and_long_outputs_are_divided() {
        let line =
            "    dd-195     [000] ...21    12.238614: bpf_trace_printk: submit_bio() called: 7\n";
        assert_eq!(shortened(line), "          dd-195 12.238614: submit_bio() called: 7\n");
        let counted: String = (0..4).map(|n| format!("       {n} of them\n")).collect();
        let long = "an event\n".repeat(LINES) + &counted;
        let parts = halves("cargo x", &long);
        assert!(parts.len() == 2 && parts[1].lines().count() == 4);
        assert_eq!(parts.join("\n") + "\n", long);
        assert_eq!(halves("cargo x", &counted), std::slice::from_ref(&counted));
    }

    #[test]
    fn what_is_folded_is_left_out() {
        let text = "a\n<details>\n<summary>b</summary>\nc\n</details>\nd\n";
        assert_eq!(without_folds(text), "a\n\nd\n");
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
        assert_eq!(
            ask,
            "<p><strong>Ask:</strong> Why?</p>\n<details><summary>Answer</summary><p>So.</p>\n</details>"
        );
        assert!(stuck.contains("which."));
        assert!(notes(class, "08").is_err());
    }
}
