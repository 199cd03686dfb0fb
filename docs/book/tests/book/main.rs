//! The book as it was built: its links, and how it looks in a real browser, Chromium, driven through chromedriver's WebDriver protocol.
//!
//! `BOOK_SHOTS=DIRECTORY` writes pictures of some pages there, to be looked at.

#![allow(clippy::too_many_lines, clippy::unwrap_used)]

mod built;
mod driver;
mod links;
mod slides;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
};

use built::{book, pages, url};
use driver::{CHECK, Driver, WAYS, requests, wait};
use serde_json::{Value, json};

/// A laptop's and a phone's width.
const WIDTHS: [u32; 2] = [1280, 390];

#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn pages_can_be_read() {
    let mut files = Vec::new();
    pages(book(), &mut files);
    // All pages in one, which prints itself, and a frame that replaces the script's table of contents.
    files.retain(|file| !file.ends_with("print.html") && !file.ends_with("toc.html"));
    files.sort();
    assert!(files.len() > 200, "{} pages", files.len());
    // Two browsers, for two CPUs.
    let said: Vec<String> = thread::scope(|scope| {
        let halves = [0, 1].map(|half| {
            let files = files.iter().enumerate().skip(half).step_by(2);
            scope.spawn(move || what_is_wrong(files))
        });
        halves.into_iter().flat_map(|half| half.join().unwrap()).collect()
    });
    assert!(said.is_empty(), "{} are wrong:\n{}", said.len(), said.join("\n"));
}

fn what_is_wrong<'a>(files: impl Iterator<Item = (usize, &'a PathBuf)>) -> Vec<String> {
    let (book, driver, mut said) = (book(), Driver::start(), Vec::new());
    let made = book.with_file_name("book-src/src");
    for (number, file) in files {
        // Pages of sources and directories differ in their text only: each is judged in one way of the four.
        let name = file.strip_prefix(book).unwrap();
        let is_chapter = made.join(name).with_extension("md").exists();
        for (way, (width, scheme)) in WAYS.into_iter().enumerate() {
            if !is_chapter && way != number / 2 % WAYS.len() {
                continue;
            }
            driver.size(width, 844);
            driver.scheme(scheme);
            driver.open(&url(file));
            for what in driver.run(CHECK).as_array().unwrap() {
                said.push(format!("{} {width} {scheme}: {what}", name.display()));
            }
        }
    }
    said.extend(driver.log("browser").iter().map(|entry| format!("console: {entry}")));
    let elsewhere = requests(&driver)
        .into_iter()
        .filter(|request| !request.starts_with(&url(book)) && !request.starts_with("data:"));
    said.extend(elsewhere.map(|request| format!("asks for {request}")));
    said
}

#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn a_reader_finds_the_way() {
    let (book, driver) = (book(), Driver::start());
    for (width, scheme) in [(1280, "light"), (390, "dark")] {
        driver.size(width, 844);
        driver.scheme(scheme);
        driver.open(&url(&book.join("index.html")));
        search(&driver);
        driver.open(&url(&book.join("stage00_tracex3/index.html")));
        for (direction, last) in [("next", "stage14_slow_io"), ("prev", "stage00_tracex3")] {
            let mut passed = 0;
            while !driver.address().contains(last) {
                let before = driver.address();
                let script = format!(
                    "const link = [...document.querySelectorAll('a[rel~={direction}]')].find(it => it.checkVisibility());
                     link.click(); return true;"
                );
                driver.run(&script);
                wait(
                    &driver,
                    "another page",
                    &format!(
                        "return location.href !== {} && document.readyState === 'complete';",
                        json!(before)
                    ),
                );
                passed += 1;
                assert!(
                    driver.address().contains("/stage") && passed <= 14,
                    "{direction} leads from {before} to {}",
                    driver.address()
                );
            }
            assert_eq!(passed, 14);
        }
    }
    assert_eq!(driver.log("browser"), Vec::<Value>::new());
}

/// What a learner asks, and the page that has to come first.
const SEARCHES: [(&str, &str); 12] = [
    ("bio_endio", "stage02_bio_endio"),
    ("what is a bio", "docs/glossary.html#bio"),
    ("request", "docs/glossary.html#request"),
    ("sector", "docs/glossary.html#sector"),
    ("verifier", "docs/glossary.html#verifier"),
    ("permission denied", "docs/messages.html#permission-denied-operation-not-permitted"),
    ("not counted", "docs/messages.html#not-counted-on-this-kernel"),
    ("skipped", "docs/messages.html#skipped"),
    ("unmatched", "docs/messages.html#unmatched"),
    ("hash map", "stage03_latency_map"),
    ("pid namespace", "stage09_pid_filter"),
    ("KVM", "vm/index.html#kvm"),
];

/// Types words into the search field, sees the right page first, follows it, and sees the words marked.
fn search(driver: &Driver) {
    driver.run("document.getElementById('mdbook-search-toggle').click(); return true;");
    wait(
        driver,
        "the search field",
        "return !!document.activeElement.closest('#mdbook-searchbar');",
    );
    let first = "return document.querySelector('#mdbook-searchresults a')?.href ?? null;";
    for (words, page) in SEARCHES.into_iter().rev() {
        driver.run("document.getElementById('mdbook-searchbar').value = ''; return true;");
        driver.type_into("#mdbook-searchbar", words);
        // The results come while the words are typed.
        let leads = format!(
            "const link = document.querySelector('#mdbook-searchresults a');
             return link?.href.replace(/\\?[^#]*/, '').includes({});",
            json!(page)
        );
        wait(driver, &format!("{page} for {words:?}, not {}", driver.run(first)), &leads);
    }
    driver.run("document.querySelector('#mdbook-searchresults a').click(); return true;");
    wait(
        driver,
        "the page",
        "return document.readyState === 'complete' && !!document.querySelector('main mark');",
    );
    let seen = "const marks = [...document.querySelectorAll('main mark')];
                return marks.length > 0 && marks.every(mark => /bio_endio/i.test(mark.textContent));";
    assert_eq!(driver.run(seen), json!(true));
}

/// The meaning of a word appears where it has the focus, inside of the window, until Escape; it is a link, and no stop
/// of the Tab key.
#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn a_word_shows_its_meaning() {
    let (book, driver) = (book(), Driver::start());
    for width in WIDTHS {
        driver.size(width, 844);
        driver.open(&url(&book.join("stage03_latency_map/index.html")));
        let shown = driver.run(
            "const term = document.querySelector('.term');
             const height = () => getComputedStyle(term, '::after').content;
             const before = height();
             term.focus();
             return [before, height(), term.getAttribute('data-def'), document.documentElement.scrollWidth <= innerWidth];",
        );
        assert_eq!(shown[0], "none");
        assert!(
            shown[1].as_str().unwrap().contains("one I/O as a file system submits it"),
            "{shown}"
        );
        assert_eq!(shown[3], true);
        let after = driver.run(
            "const term = document.querySelector('.term');
             dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }));
             return [getComputedStyle(term, '::after').display, term.tabIndex, term.href];",
        );
        assert_eq!((&after[0], &after[1]), (&json!("none"), &json!(-1)));
        assert!(after[2].as_str().unwrap().ends_with("/docs/glossary.html#bio"), "{after}");
    }
}

#[test]
#[ignore = "needs Chromium and chromedriver: .ci/book"]
fn pictures_to_look_at() {
    let Some(to) = std::env::var_os("BOOK_SHOTS") else { return };
    let (book, driver) = (book(), Driver::start());
    let shots = [
        ("index.html", ""),
        ("docs/glossary.html", ""),
        ("stage03_latency_map/index.html", "#stage-03-a-hash-map-joins-the-two-ends"),
        ("stage03_latency_map/index.html", "#your-turn"),
        ("stage03_latency_map/index.html", "#diff-trace.bpf.c"),
        ("stage03_latency_map/src/trace.bpf.c.html", "#L30"),
        ("stage03_latency_map/src/main.rs.html", ""),
        ("lesson/exercises/index.html", ""),
        ("lesson/exercises/bytes/index.html", ""),
        ("truth/TRUTH.html", ""),
        ("docs/class.html", "#timetable"),
        ("slides.html", "#23"),
        ("slides.html", "#28"),
        ("slides.html", "#30"),
        ("handout.html", ""),
    ];
    for (number, (page, anchor)) in shots.into_iter().enumerate() {
        {
            for (width, scheme) in WAYS {
                driver.size(width, 1100);
                driver.scheme(scheme);
                // From another page: an anchor alone loads nothing.
                driver.open("about:blank");
                driver.open(&(url(&book.join(page)) + anchor));
                if !anchor.is_empty() {
                    driver.run("document.querySelectorAll('details').forEach(it => { it.open = true; });
                                document.getElementById(location.hash.slice(1)).scrollIntoView(); return true;");
                    driver.run("document.querySelector('.term')?.focus({ preventScroll: true }); return true;");
                }
                let file = format!("{number:02}-{}-{width}-{scheme}.png", page.replace('/', "_"));
                fs::write(Path::new(&to).join(file), driver.picture()).unwrap();
            }
        }
    }
    for (width, scheme) in WAYS {
        driver.size(width, 844);
        driver.scheme(scheme);
        driver.open(&(url(&book.join("index.html")) + "?search=bio_endio"));
        wait(&driver, "results", "return !!document.querySelector('#mdbook-searchresults a');");
        let file = Path::new(&to).join(format!("search-{width}-{scheme}.png"));
        fs::write(file, driver.picture()).unwrap();
    }
}
