//! The book as a whole: its pages, where they stand, and what they link.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fmt::Write,
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use mdbook_driver::{MDBook, config::Config};
use serde::Deserialize;

use crate::{
    code,
    escape::escape,
    exercise::Exercise,
    glossary::{self, Glossary},
    map,
    markdown::{self, Extras, Links},
    outline::{self, Part},
    slides::{self, Sources},
};

const STYLE: &str = include_str!("../book.css");
const SCRIPT: &str = include_str!("../source.js");
const CONFIG: &str = include_str!("../book.toml");

const GLOSSARY: &str = "docs/glossary.md";
const MESSAGES: &str = "docs/messages.md";

/// What directories contain that is not the workshop's.
const NOT_OURS: [&str; 2] = ["target", "vendor"];

/// Records that programs write and read: thousands of lines that nobody reads in a book. They have no pages, and
/// their names lead nowhere.
const RECORDS: [&str; 3] = ["results.json", "truth.json", "mutants.toml"];

/// The book, before it is written.
pub struct Book {
    root: PathBuf,
    exercises: Vec<Exercise>,
    glossary: Glossary,
    parts: RefCell<Vec<Part>>,
    /// Sources and directories that a page links, relative to the workspace.
    sources: RefCell<BTreeSet<PathBuf>>,
    /// Pictures, which are copied.
    pictures: RefCell<BTreeSet<PathBuf>>,
}

/// A page, as the links on it see the book.
struct Page<'a> {
    book: &'a Book,
    /// Its directory, relative to the workspace.
    place: &'a Path,
}

impl Book {
    /// Reads what the book is made of.
    pub fn read(root: &Path) -> Result<Book> {
        let exercises = Exercise::all(root)?;
        let parts = outline::parts(root, &exercises)?;
        let glossary = Glossary::read(&read(root, Path::new(GLOSSARY))?)?;
        Ok(Book {
            root: root.to_owned(),
            exercises,
            glossary,
            parts: RefCell::new(parts),
            sources: RefCell::default(),
            pictures: RefCell::default(),
        })
    }

    /// Writes it, and returns its directory.
    pub fn write(&self) -> Result<PathBuf> {
        let target = self.root.join("target");
        let (made, book) = (target.join("book-src"), target.join("book"));
        if made.exists() {
            fs::remove_dir_all(&made).with_context(|| made.display().to_string())?;
        }
        self.write_chapters(&made.join("src"))?;
        write(&made.join("book.css"), STYLE)?;
        write(&made.join("source.js"), SCRIPT)?;
        let config: Config = CONFIG.parse().context("book.toml")?;
        MDBook::load_with_config(&made, config).and_then(|book| book.build()).context("mdBook")?;
        self.write_sources(&book)?;
        self.write_slides(&book)?;
        self.copy_pictures(&book)?;
        Ok(book)
    }

    /// Writes the chapters and their table of contents, which mdBook reads.
    fn write_chapters(&self, made: &Path) -> Result<()> {
        let mut summary = "# Summary\n\n".to_owned();
        // A page may lead to another one that no part has yet: that is added to the last part.
        let (mut part, mut chapter) = (0, 0);
        loop {
            let parts = self.parts.borrow();
            let Some(current) = parts.get(part) else { break };
            if chapter == 0 && !current.title.is_empty() {
                let _ = writeln!(summary, "\n# {}\n", current.title);
            }
            let Some(next) = current.chapters.get(chapter) else {
                (part, chapter) = (part + 1, 0);
                continue;
            };
            let (path, label) = (next.path.clone(), next.label.clone());
            let bullet = match (current.title.is_empty(), next.is_nested) {
                (true, _) => "",
                (false, false) => "- ",
                (false, true) => "  - ",
            };
            drop(parts);
            let text = self.chapter(&path)?;
            let title = label.unwrap_or_else(|| markdown::title(&text).replace('`', ""));
            let file = as_index(&path);
            write(&made.join(&file), &text)?;
            let _ = writeln!(summary, "{bullet}[{title}]({})", file.display());
            chapter += 1;
        }
        write(&made.join("SUMMARY.md"), &summary)
    }

    fn copy_pictures(&self, book: &Path) -> Result<()> {
        for picture in &*self.pictures.borrow() {
            let to = book.join(picture);
            fs::create_dir_all(to.parent().unwrap_or(book))?;
            fs::copy(self.root.join(picture), &to).with_context(|| to.display().to_string())?;
        }
        Ok(())
    }

    /// The text of a chapter, as mdBook gets it.
    fn chapter(&self, path: &Path) -> Result<String> {
        let place = path.parent().unwrap_or(path);
        let page = Page { book: self, place };
        if let Some(exercise) = self.own_exercise(place) {
            let pair = [&*exercise.start, &*exercise.solution];
            let diff = code::whole_diff(&self.root, pair, |file| page.address(file))?;
            return markdown::page(&exercise.page(&diff), &page, &Extras::default());
        }
        if path == Path::new(outline::DIFFERENCES) {
            return self.differences(&page);
        }
        let text = read(&self.root, path)?;
        let teaches =
            ["stage", "tools", "appendix"].iter().any(|it| path.to_string_lossy().starts_with(it));
        let text = match path.to_str() {
            Some("README.md") => self.with_map(&text, &page)?,
            Some(GLOSSARY) => glossary::with_headings(&text),
            Some(MESSAGES) => text + &self.refusals()?,
            _ => text,
        };
        let glossary_page = page.address(Path::new(GLOSSARY))?;
        let glossary = teaches.then_some(&self.glossary);
        let mut extras = Extras { glossary, glossary_page, ..Extras::default() };
        if let Some(exercise) = self.exercises.iter().find(|exercise| exercise.solution == place) {
            let pair = compared(&text, exercise);
            let diff = code::whole_diff(&self.root, pair, |file| page.address(file))?;
            extras.turns = exercise.below_turns();
            extras.answer = Some(diff);
            for file in code::FILES {
                extras.sources.push((file, read(&self.root, &place.join("src").join(file))?));
            }
        }
        Ok(markdown::page(&text, &page, &extras)? + &self.sources_of(place, &page)?)
    }

    /// The front page, with the map of the stages before their table.
    fn with_map(&self, text: &str, page: &Page) -> Result<String> {
        const HEADING: &str = "\n## The stages\n";
        let (before, after) = text.split_once(HEADING).context("README.md has no stages")?;
        let parts = self.parts.borrow();
        let stages =
            parts.iter().find(|part| part.title == outline::STAGES).context("no stages")?;
        let stages: Vec<PathBuf> = stages
            .chapters
            .iter()
            .filter(|chapter| chapter.path != Path::new(outline::DIFFERENCES))
            .filter_map(|chapter| Some(chapter.path.parent()?.to_owned()))
            .collect();
        drop(parts);
        let mut places = Vec::new();
        for stage in &stages {
            let about = read(&self.root, &stage.join("README.md"))?;
            let exercise = self.exercises.iter().find(|exercise| exercise.solution == *stage);
            // A task that begins with more than the stage before has that stage in its second difference.
            let bases = markdown::all_compared(&about).map(|[old, _]| old);
            let bases = bases.chain(exercise.map(|exercise| exercise.start.as_path()));
            let base = bases.filter_map(|base| stages.iter().position(|it| it == base)).next();
            places.push((stage.display().to_string(), page.address(stage)?, base));
        }
        Ok(format!("{before}{HEADING}\n{}\n{after}", map::figure(&places)))
    }

    /// The page that leads to each stage's difference.
    fn differences(&self, page: &Page) -> Result<String> {
        let mut text = "# All differences\n\n\
            What each stage adds to the one before, or to the program that its task begins with. \
            Each difference stands at the end of its stage's answer.\n\n\
            | stage | compared with | BPF C | Rust |\n|---|---|---|---|\n"
            .to_owned();
        for exercise in self.exercises.iter().filter(|exercise| !exercise.is_own()) {
            let readme = exercise.solution.join("README.md");
            let about = read(&self.root, &readme)?;
            let pair = compared(&about, exercise);
            let (address, before) = (page.address(&readme)?, page.address(&pair[0].join("src"))?);
            let (stage, old) = (exercise.solution.display(), pair[0].display());
            let _ = write!(text, "| [{stage}]({address}) | [{old}]({before}) |");
            for (file, (added, removed)) in
                code::FILES.into_iter().zip(code::sizes(&self.root, pair)?)
            {
                let _ = write!(text, " [+{added} −{removed}]({address}#diff-{file}) |");
            }
            text += "\n";
        }
        Ok(text)
    }

    /// What the verifier's refusals mean, for the page of messages.
    fn refusals(&self) -> Result<String> {
        #[derive(Deserialize)]
        struct Refusal {
            says: Vec<String>,
            means: String,
        }
        #[derive(Deserialize)]
        struct Refusals {
            refusal: Vec<Refusal>,
        }
        let all: Refusals = toml::from_str(&read(&self.root, Path::new("lesson/refusals.toml"))?)?;
        let mut text = "\n## What the verifier says\n".to_owned();
        for Refusal { says, means } in all.refusal {
            let _ = write!(text, "\n### `{}`\n\n{}\n", says.join(" … "), means.trim());
        }
        Ok(text)
    }

    /// Links to the sources of a program, for the end of its page.
    fn sources_of(&self, place: &Path, page: &Page) -> Result<String> {
        let src = place.join("src");
        if place == Path::new("") || !self.root.join(&src).is_dir() {
            return Ok(String::new());
        }
        let mut links = Vec::new();
        for name in self.names(&src)? {
            links.push(format!("<a href=\"{}\">{name}</a>", page.address(&src.join(&name))?));
        }
        Ok(format!("\n\n<p class=\"sources\">Sources: {}</p>\n", links.join(" · ")))
    }

    /// What the workshop has in a directory.
    fn names(&self, path: &Path) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.root.join(path))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if !name.starts_with('.') && !NOT_OURS.contains(&&*name) {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn own_exercise(&self, place: &Path) -> Option<&Exercise> {
        self.exercises.iter().find(|exercise| exercise.is_own() && exercise.place == place)
    }

    fn ensure_exists(&self, path: &Path) -> Result<()> {
        let exists = self.root.join(path).exists();
        ensure!(exists, "{} does not exist, and a page links it", path.display());
        Ok(())
    }

    /// Where the book has a file or directory of the workspace.
    fn place(&self, path: &Path) -> Result<PathBuf> {
        self.ensure_exists(path)?;
        if self.root.join(path).is_dir() {
            if self.own_exercise(path).is_none() {
                let readme = path.join("README.md");
                if self.root.join(&readme).exists() {
                    return self.place(&readme);
                }
                self.sources.borrow_mut().insert(path.to_owned());
            }
            return Ok(path.join("index.html"));
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("md") => {
                let mut parts = self.parts.borrow_mut();
                let known = parts.iter().flat_map(|part| &part.chapters).any(|it| it.path == path);
                if let Some(last) = parts.last_mut().filter(|_| !known) {
                    last.push(path, false);
                }
                Ok(as_index(path).with_extension("html"))
            }
            Some("svg" | "png") => {
                self.pictures.borrow_mut().insert(path.to_owned());
                Ok(path.to_owned())
            }
            _ => {
                self.sources.borrow_mut().insert(path.to_owned());
                let mut name = path.as_os_str().to_owned();
                name.push(".html");
                Ok(name.into())
            }
        }
    }

    /// Writes the pages of sources and of directories, in the frame that mdBook has made for another page: they
    /// are in no table of contents, in no search, and not in print.
    fn write_sources(&self, book: &Path) -> Result<()> {
        let frame = read(book, Path::new("docs/glossary.html"))?;
        let (head, rest) = frame.split_once("<main>").context("mdBook's page has no <main>")?;
        let (_, tail) = rest.split_once("<nav class=\"nav-wrapper\"").context("no navigation")?;
        let (_, tail) = tail.split_once("</nav>").context("no end of the navigation")?;
        let (before, tail) =
            tail.split_once("<nav class=\"nav-wide-wrapper\"").context("no wide navigation")?;
        let (_, tail) = tail.split_once("</nav>").context("no end of the wide navigation")?;
        let title = head.split("<title>").nth(1).and_then(|rest| rest.split("</title>").next());
        let title = title.context("mdBook's page has no title")?;
        let mut done = BTreeSet::new();
        loop {
            let next = self.sources.borrow().iter().find(|path| !done.contains(*path)).cloned();
            let Some(path) = next else { return Ok(()) };
            let place = self.place(&path)?;
            let shown = path.display().to_string();
            let body = self.source(&path)?;
            // The frame's page is one directory below the book.
            let up = "../".repeat(place.components().count() - 1);
            let frame = |text: &str| text.replace("\"../", &format!("\"{up}"));
            let head = frame(head).replace(title, &escape(&shown));
            let page = format!("{head}<main>{body}</main>{}{}", frame(before), frame(tail));
            write(&book.join(place), &page)?;
            done.insert(path);
        }
    }

    /// Writes the slides and the handout of a class.
    fn write_slides(&self, book: &Path) -> Result<()> {
        let page = |name: &str| read(&self.root, Path::new(name));
        let stages = self.parts.borrow();
        let stages =
            stages.iter().find(|part| part.title == outline::STAGES).context("no stages")?;
        let stage = |chapter: &outline::Chapter| -> Result<(String, String)> {
            let directory = chapter.path.parent().unwrap_or(&chapter.path).display().to_string();
            Ok((directory, read(&self.root, &chapter.path)?))
        };
        let sources = Sources {
            readme: page("README.md")?,
            class: page("docs/class.md")?,
            glossary: page(GLOSSARY)?,
            incidents: page("docs/incidents.md")?,
            slow_disk: page("docs/slow-disk.md")?,
            highlighter: file_of(book, "highlight-", ".js")?,
            stages: stages
                .chapters
                .iter()
                .filter(|chapter| chapter.path != Path::new(outline::DIFFERENCES))
                .map(stage)
                .collect::<Result<_>>()?,
        };
        for (name, html) in slides::pages(&sources, STYLE)? {
            write(&book.join(name), &html)?;
        }
        Ok(())
    }

    /// What the page of a source or of a directory shows.
    fn source(&self, path: &Path) -> Result<String> {
        let here = self.place(path)?;
        let page = Page { book: self, place: here.parent().unwrap_or(&here) };
        let mut body = format!("<h1>{}</h1>\n", escape(&path.display().to_string()));
        let file = self.root.join(path);
        if !file.is_dir() {
            let text = read(&self.root, path)?;
            let of = |exercise: &&Exercise| path.parent() == Some(&exercise.solution.join("src"));
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
            if let Some(exercise) =
                self.exercises.iter().find(of).filter(|_| code::FILES.contains(&name))
            {
                // An exercise of its own has its difference on its page.
                let of = if exercise.is_own() { &exercise.place } else { &exercise.solution };
                let address = page.address(of)?;
                let _ = writeln!(
                    body,
                    "<p class=\"sources\"><a href=\"{address}#diff-{name}\">What was changed</a> · \
                     <a href=\"{address}\">{}</a></p>",
                    escape(&of.display().to_string())
                );
            }
            return Ok(body + &code::numbered(&path.display().to_string(), &text));
        }
        body += "<ul>\n";
        for name in self.names(path)? {
            let (file, shown) = (path.join(&name), escape(&name));
            let _ = if is_record(&file) {
                writeln!(body, "<li>{shown}</li>")
            } else {
                writeln!(body, "<li><a href=\"{}\">{shown}</a></li>", page.address(&file)?)
            };
        }
        Ok(body + "</ul>\n")
    }
}

impl Page<'_> {
    /// The address of a file of the workspace, relative to this page.
    fn address(&self, path: &Path) -> Result<String> {
        let place = self.book.place(&normal(path))?;
        let (mut from, mut to) =
            (self.place.components().peekable(), place.components().peekable());
        while from.peek().is_some() && from.peek() == to.peek() {
            from.next();
            to.next();
        }
        let up = "../".repeat(from.count());
        Ok(up + &to.collect::<PathBuf>().display().to_string())
    }
}

impl Links for Page<'_> {
    fn link(&self, target: &str) -> Result<Option<String>> {
        let (file, anchor) = match target.split_once('#') {
            Some((file, anchor)) => (file, format!("#{anchor}")),
            None => (target, String::new()),
        };
        if file.is_empty() {
            return Ok(Some(anchor));
        }
        let path = normal(&self.place.join(file));
        if is_record(&path) {
            self.book.ensure_exists(&path)?;
            return Ok(None);
        }
        Ok(Some(self.address(&path)? + &anchor))
    }

    fn source(&self, name: &str) -> Result<Option<String>> {
        // A page that the workspace does not have, because it is made with the book.
        if let Some(page) = name.strip_prefix("target/book/").filter(|page| page.ends_with(".html"))
        {
            return Ok(Some("../".repeat(self.place.components().count()) + page));
        }
        let is_path = name.contains('/') && !name.contains([' ', '*']) && !name.starts_with('/');
        if !is_path || is_record(Path::new(name)) {
            return Ok(None);
        }
        let places = [self.place.join(name), PathBuf::from(name)];
        let found = places.iter().find(|path| self.book.root.join(path).is_file());
        found.map(|path| self.address(path)).transpose()
    }
}

/// The programs that a stage's README compares, or else those that its exercise begins and ends with.
fn compared<'a>(text: &'a str, exercise: &'a Exercise) -> [&'a Path; 2] {
    markdown::compared(text).unwrap_or([&exercise.start, &exercise.solution])
}

/// Whether a file is a record that programs write and read.
fn is_record(path: &Path) -> bool {
    RECORDS.iter().any(|name| path.ends_with(name))
}

/// mdBook's name of a page: that of a directory is its `index.html`.
fn as_index(path: &Path) -> PathBuf {
    if path.ends_with("README.md") { path.with_file_name("index.md") } else { path.to_owned() }
}

/// A path without `.` and `..`, as far as they can be resolved without a look at the disk.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(normal.pop()),
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

fn read(root: &Path, path: &Path) -> Result<String> {
    fs::read_to_string(root.join(path)).with_context(|| format!("cannot read {}", path.display()))
}

/// The file of the book that mdBook has named so, with a hash of what it contains.
fn file_of(book: &Path, begin: &str, end: &str) -> Result<String> {
    let files = fs::read_dir(book).with_context(|| book.display().to_string())?.flatten();
    let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    let found = names.find(|name| name.starts_with(begin) && name.ends_with(end));
    found.with_context(|| format!("mdBook has written no {begin}…{end}"))
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::create_dir_all(file.parent().unwrap_or(file))
        .and_then(|()| fs::write(file, text))
        .with_context(|| format!("cannot write {}", file.display()))
}
