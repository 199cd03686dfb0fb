//! The book as it was built: every link leads to a page or file of the book, every anchor to an element, and
//! nothing is fetched from elsewhere.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs,
    path::{Component, Path, PathBuf},
    sync::LazyLock,
};

use regex::Regex;

use crate::built;

/// The largest page that is to be read: a record that has become a page is larger.
const PAGE: u64 = 200_000;

/// What a page has: the anchors, the links, and what it loads.
struct Html {
    ids: HashSet<String>,
    links: BTreeSet<String>,
    loads: BTreeSet<String>,
    pictures: usize,
    without_text: usize,
}

fn parse(text: &str) -> Html {
    static SCRIPT: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"(?s)(<script[^>]*>).*?</script>|<!--.*?-->").unwrap());
    static TAG: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r#"<(\w[\w-]*)((?:\s+[\w:-]+(?:=(?:"[^"]*"|'[^']*'|[^\s>]*))?)*)\s*/?>"#)
            .unwrap()
    });
    static ATTRIBUTE: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r#"\s([\w:-]+)(?:=(?:"([^"]*)"|'([^']*)'|([^\s>]*)))?"#).unwrap()
    });
    let mut html = Html {
        ids: HashSet::new(),
        links: BTreeSet::new(),
        loads: BTreeSet::new(),
        pictures: 0,
        without_text: 0,
    };
    let text = SCRIPT.replace_all(text, "$1");
    for tag in TAG.captures_iter(&text) {
        let attributes = ATTRIBUTE.captures_iter(&tag[2]).map(|it| {
            let value = [2, 3, 4].into_iter().find_map(|group| it.get(group));
            (it[1].to_owned(), value.map_or("", |value| value.as_str()).replace("&amp;", "&"))
        });
        let attributes: HashMap<String, String> = attributes.collect();
        html.ids.extend(attributes.get("id").cloned());
        match &tag[1] {
            "a" => html.links.extend(attributes.get("href").cloned()),
            "img" => {
                html.pictures += 1;
                html.without_text +=
                    usize::from(attributes.get("alt").is_none_or(|alt| alt.trim().is_empty()));
                html.loads.extend(attributes.get("src").cloned());
            }
            "link" => html.loads.extend(attributes.get("href").cloned()),
            "script" | "iframe" | "source" | "video" | "embed" => {
                html.loads.extend(attributes.get("src").cloned())
            }
            _ => {}
        }
    }
    html
}

fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => assert!(normal.pop()),
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}

#[test]
fn every_link_leads_somewhere() {
    let book = built::book();
    let mut files = Vec::new();
    built::pages(book, &mut files);
    let pages: HashMap<PathBuf, Html> = files
        .into_iter()
        .map(|file| (file.clone(), parse(&fs::read_to_string(file).unwrap())))
        .collect();
    let (mut said, mut followed, mut anchors, mut pictures) = (BTreeSet::new(), 0, 0, 0);
    for (file, html) in &pages {
        let mut wrong = |what: String| {
            said.insert(format!("{}: {what}", file.strip_prefix(book).unwrap().display()))
        };
        pictures += html.pictures;
        if html.without_text > 0 {
            wrong(format!("{} pictures without a text", html.without_text));
        }
        for load in &html.loads {
            let target = normal(&file.parent().unwrap().join(load));
            if load.contains("//") || !target.is_file() {
                wrong(format!("loads {load}"));
            }
        }
        for link in html.links.iter().filter(|link| !link.contains("://")) {
            followed += 1;
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if path.is_empty() {
                file.clone()
            } else {
                normal(&file.parent().unwrap().join(path))
            };
            if !target.starts_with(book) || !target.is_file() {
                wrong(format!("no file {link}"));
            } else if !anchor.is_empty() {
                anchors += 1;
                if !pages.get(&target).is_some_and(|page| page.ids.contains(anchor)) {
                    wrong(format!("no anchor {link}"));
                }
            }
        }
    }
    println!("{} pages, {followed} links, {anchors} anchors, {pictures} pictures", pages.len());
    assert!(said.is_empty(), "{}", Vec::from_iter(said).join("\n"));
    assert!(pages.len() > 200 && followed > 1500 && anchors > 800 && pictures > 0);
}

#[test]
fn no_page_is_a_record() {
    let book = built::book();
    let mut files = Vec::new();
    built::pages(book, &mut files);
    // Two pages with the text of many others: the one that prints them, and the slides.
    files.retain(|file| !["print.html", "slides.html"].iter().any(|name| file.ends_with(name)));
    let large: Vec<_> = files.iter().filter(|file| file.metadata().unwrap().len() > PAGE).collect();
    assert!(large.is_empty(), "more than {PAGE} bytes: {large:?}");
    for record in ["bench/results.json", "truth/truth.json", "lesson/exercises/mutants.toml"] {
        assert!(book.ancestors().nth(2).unwrap().join(record).is_file(), "{record} has moved");
        assert!(!book.join(record.to_owned() + ".html").exists(), "{record} has a page");
    }
}
