//! The texts of the workshop, and the comments and messages in its sources, are plain technical
//! English: words that make a reader stop have a plainer one.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// What is not written, and what to write in its place. An underscore belongs to a word.
const WORDS: &[(&str, &str)] = &[
    ("acquaintance", "name what it is"),
    ("acquaintances", "name what it is"),
    ("are over", "have ended"),
    ("does not react", "has stopped responding"),
    ("go on", "continue"),
    ("goes on", "continues"),
    ("goes_on", "continues"),
    ("going on", "continuing"),
    ("in no time", "immediately"),
    ("is dear", "is expensive"),
    ("is over", "has ended, completes"),
    ("is told by", "is identified by"),
    ("let go", "released, freed"),
    ("lets go", "releases, frees"),
    ("letting go", "releasing, freeing"),
    ("mend", "repair, undo"),
    ("mended", "repaired, undone"),
    ("mending", "repairing, undoing"),
    ("mends", "repairs, undoes"),
    ("react any more", "has stopped responding"),
    ("tell of", "say that, are about"),
    ("tells of", "says that, is about"),
    ("tells the options", "lists the options"),
    ("to whom", "whose"),
    ("wakes nobody", "does not wake up the reader"),
    ("was over", "had ended"),
    ("went on", "continued"),
    ("whom it belongs to", "whose it is"),
];

/// A phrase that is fine although it begins with one of the above.
const FINE: &[&str] = &["go on to"];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The workspace's own texts and sources: nothing hidden, nothing built, no learner's attempt, and not
/// this list.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in directory.read_dir().expect("a directory of the workspace") {
        let path = entry.expect("an entry of it").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        let extension = path.extension().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            let is_other = ["target", "vendor", "mine", "mine.old"].contains(&name.as_str());
            if !is_other && !name.starts_with('.') {
                files(&path, found);
            }
        } else if ["c", "h", "js", "md", "rs", "sh", "toml"].contains(&extension.as_str())
            && name != "words.rs"
        {
            found.push(path);
        }
    }
}

/// The words of a text with their lines. What begins a line of a comment is no word, so that a phrase
/// is found where it is broken, too; what ends a sentence is one.
fn words(text: &str) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let is_of_word = |c: char| c.is_alphanumeric() || c == '_';
        for part in line.split_inclusive(|c: char| !is_of_word(c)) {
            let word = part.trim_end_matches(|c: char| !is_of_word(c));
            if !word.is_empty() {
                words.push((number, word.to_lowercase()));
            }
            if part.ends_with(['.', ':', ';', '"', '(', ')', '|', '`']) {
                words.push((number, String::new()));
            }
        }
    }
    words
}

/// The unwanted phrases of a text: their lines, the phrases, and what to write.
fn unwanted(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let words = words(text);
    let mut found = Vec::new();
    for (index, (line, _)) in words.iter().enumerate() {
        let is_here = |phrase: &str| {
            let mut rest = words[index..].iter().map(|(_, word)| word.as_str());
            phrase.split(' ').all(|word| rest.next() == Some(word))
        };
        if FINE.iter().any(|phrase| is_here(phrase)) {
            continue;
        }
        let here = WORDS.iter().filter(|(phrase, _)| is_here(phrase));
        found.extend(here.map(|(phrase, better)| (*line, *phrase, *better)));
    }
    found
}

#[test]
fn texts_are_plain() {
    let mut paths = Vec::new();
    files(&workspace(), &mut paths);
    let mut said = String::new();
    for path in &paths {
        let text = fs::read_to_string(path).unwrap();
        for (line, phrase, better) in unwanted(&text) {
            let path = path.strip_prefix(workspace()).unwrap_or(path).display();
            said += &format!("{path}:{line}: \"{phrase}\": write: {better}\n");
        }
    }
    assert!(said.is_empty(), "these words make a reader stop:\n{said}");
    assert!(paths.len() > 200, "only {} files were found", paths.len());
}

#[test]
fn phrases_are_found_where_a_line_is_broken() {
    let found = |text: &str| unwanted(text).into_iter().map(|found| found.1).collect::<Vec<_>>();
    assert_eq!(
        found("/// The kernel lets\n    /// go of it, and Goes on."),
        ["lets go", "goes on"]
    );
    assert_eq!(found("let goes_on = 1;"), ["goes_on"]);
    assert_eq!(found("session.is_over(), is_none(), amend; lets. Go on to stage 08"), [""; 0]);
}
