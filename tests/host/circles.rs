//! The files of a package have an order: none imports, directly or by others, from one that imports from it,
//! and none from main.rs.

#![allow(missing_docs, clippy::unwrap_used, clippy::too_many_lines)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, mem,
    path::{Path, PathBuf},
    process::Command,
};

use regex_lite::Regex;
use serde_json::Value;

/// A module's path in its crate, `commands::test`; empty for the root.
type Module = String;

/// The directories of the workspace's packages.
fn packages() -> Vec<PathBuf> {
    let mut cargo = Command::new(std::env::var("CARGO").unwrap_or("cargo".into()));
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
    let output = cargo.current_dir(workshop::workspace()).output().unwrap();
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap().iter();
    let manifest = |package: &Value| PathBuf::from(package["manifest_path"].as_str().unwrap());
    packages.map(|package| manifest(package).parent().unwrap().to_owned()).collect()
}

/// Rust files in a directory, and in those below.
fn sources(place: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(place).into_iter().flatten().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = entries
        .flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect();
    files.sort();
    files
}

/// The text without comments, and with nothing in texts and characters.
fn code(text: &str) -> String {
    let tokens = Regex::new(
        r##"(?s)//[^\n]*|/\*.*?\*/|r#".*?"#|r"[^"]*"|"(?:\\.|[^"\\])*"|'(?:\\[^u]|\\u\{\w+\}|[^'\\])'"##,
    );
    tokens.unwrap().replace_all(text, "\"\"").into_owned()
}

/// Where the block ends that begins at or after `start`, or the item that has none.
fn end_of_item(text: &str, start: usize) -> usize {
    let mut depth = 0;
    for (at, c) in text[start..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth <= 1 => return start + at + 1,
            '}' => depth -= 1,
            ';' if depth == 0 => return start + at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The code without what is for tests only.
fn program(mut text: String) -> String {
    while let Some(start) = text.find("#[cfg(test)]") {
        text.replace_range(start..end_of_item(&text, start), "");
    }
    // In a module inside of the file, `super` is the file.
    for start in Regex::new(r"\bmod \w+ \{").unwrap().find_iter(&text.clone()).map(|it| it.start())
    {
        let end = end_of_item(&text, start);
        let inner = text[start..end].replace("super::", "self ::");
        text.replace_range(start..end, &inner);
    }
    text
}

/// The paths of an import, each in full: `a::{b, c::d}` is `a::b` and `a::c::d`.
fn paths(tree: &str) -> Vec<String> {
    let Some((before, rest)) = tree.split_once('{') else {
        return vec![tree.split(" as ").next().unwrap().trim().to_owned()];
    };
    let inner = rest.trim_end().strip_suffix('}').unwrap_or(rest);
    let (mut depth, mut one, mut all) = (0, String::new(), Vec::new());
    for c in inner.chars().chain([',']) {
        match c {
            ',' if depth == 0 => all.push(mem::take(&mut one)),
            _ => one.push(c),
        }
        depth += i32::from(c == '{') - i32::from(c == '}');
    }
    let all = all.iter().filter(|one| !one.trim().is_empty());
    all.flat_map(|one| paths(one)).map(|path| before.trim().to_owned() + &path).collect()
}

/// The files of a crate.
struct Crate {
    /// The text of each module, as [`program`] has it, and its file.
    modules: BTreeMap<Module, (String, PathBuf)>,
}

impl Crate {
    fn read(src: &Path) -> Crate {
        let has_lib = src.join("lib.rs").exists();
        let made = Regex::new(r"\bmod (\w+) \{[^{}]*\binclude!").unwrap();
        let mut modules = BTreeMap::new();
        for file in sources(src) {
            let place = file.strip_prefix(src).unwrap().with_extension("");
            let mut names: Vec<String> =
                place.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
            // A program beside a library is a crate of its own, which uses the library by its name.
            let is_beside = names[0] == "bin" || names == ["main"] && has_lib;
            if is_beside {
                continue;
            }
            if names == ["main"] || names == ["lib"] || names.last().unwrap() == "mod" {
                names.pop();
            }
            let text = program(code(&fs::read_to_string(&file).unwrap()));
            // What a build script has made, `mod trace { include!(…) }`, imports nothing.
            for made in made.captures_iter(&text) {
                let module = names.iter().map(String::as_str).chain([&made[1]]);
                let module = module.collect::<Vec<_>>().join("::");
                modules.insert(module, (String::new(), file.clone()));
            }
            modules.insert(names.join("::"), (text, file));
        }
        Crate { modules }
    }

    fn is_module(&self, module: &str) -> bool {
        self.modules.contains_key(module)
    }

    /// The module that has what this path names, from the root.
    fn owner(&self, path: &[&str]) -> Module {
        let lengths = (0..=path.len()).rev().map(|length| path[..length].join("::"));
        lengths.into_iter().find(|module| self.is_module(module)).unwrap_or_default()
    }

    /// What a module's re-exports name, by name: `use crate::printable` imports from where that stands.
    fn exported(&self, module: &str) -> BTreeMap<String, Module> {
        let text = &self.modules[module].0;
        let exports = Regex::new(r"(?s)\bpub(?:\([\w ]+\))? use ([^;]+);").unwrap();
        let trees = exports.captures_iter(text).flat_map(|it| paths(&it[1]));
        let from = |path: String| {
            let parts: Vec<&str> = path.split("::").map(str::trim).collect();
            let whole = self.absolute(module, &parts)?;
            let whole: Vec<&str> = whole.iter().map(String::as_str).collect();
            Some((parts.last()?.to_string(), self.owner(&whole)))
        };
        trees.filter_map(from).collect()
    }

    /// A path as the root sees it. `None`: it leads out of the crate.
    fn absolute(&self, module: &str, path: &[&str]) -> Option<Vec<String>> {
        let mut place: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
        let mut rest = path;
        match path.first().copied()? {
            "crate" => {
                place.clear();
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while let ["super", more @ ..] = rest {
                    place.pop()?;
                    rest = more;
                }
            }
            // A module of its own, or another crate.
            first => {
                let child = [&place[..], &[first]].concat().join("::");
                if !self.is_module(&child) {
                    return None;
                }
            }
        }
        Some(place.into_iter().chain(rest.iter().copied()).map(str::to_owned).collect())
    }

    /// From which modules this one imports. What it only passes on (`pub use`) is no import.
    fn imports(&self, module: &str) -> BTreeSet<Module> {
        let passed_on = Regex::new(r"(?s)\bpub(?:\([\w ]+\))? use [^;]+;").unwrap();
        let uses = Regex::new(r"(?s)\buse ([^;]+);").unwrap();
        let text = passed_on.replace_all(&self.modules[module].0, "");
        let mut all: Vec<String> = uses.captures_iter(&text).flat_map(|it| paths(&it[1])).collect();
        // Paths in the code. Macros of the root are no import of what it uses.
        let text = uses.replace_all(&text, "");
        let inline = Regex::new(r"(?:^|[^\w:])((?:\w+\s*::\s*)+\w+)(!?)").unwrap();
        let inline = inline.captures_iter(&text).filter(|it| it[2].is_empty());
        all.extend(inline.map(|it| it[1].to_owned()));
        let owners = all.iter().filter_map(|path| {
            let parts: Vec<&str> = path.split("::").map(str::trim).collect();
            let whole = self.absolute(module, &parts)?;
            let whole: Vec<&str> = whole.iter().map(String::as_str).collect();
            let owner = self.owner(&whole);
            let depth = owner.split("::").filter(|part| !part.is_empty()).count();
            let exported = whole.get(depth).and_then(|name| self.exported(&owner).remove(*name));
            Some(exported.unwrap_or(owner))
        });
        owners.filter(|owner| owner != module).collect()
    }

    fn all_imports(&self) -> BTreeMap<Module, BTreeSet<Module>> {
        self.modules.keys().map(|module| (module.clone(), self.imports(module))).collect()
    }

    fn file(&self, module: &str) -> String {
        let file = &self.modules[module].1;
        file.strip_prefix(workshop::workspace()).unwrap_or(file).display().to_string()
    }
}

/// The modules that this one needs, directly or by others.
fn needs(imports: &BTreeMap<Module, BTreeSet<Module>>, module: &str) -> BTreeSet<Module> {
    let (mut found, mut new) = (BTreeSet::new(), vec![module.to_owned()]);
    while let Some(module) = new.pop() {
        for import in &imports[&module] {
            if found.insert(import.clone()) {
                new.push(import.clone());
            }
        }
    }
    found
}

/// What is wrong with the order of a crate's files.
fn faults(it: &Crate) -> Vec<String> {
    let imports = it.all_imports();
    let all: BTreeMap<&Module, BTreeSet<Module>> =
        imports.keys().map(|module| (module, needs(&imports, module))).collect();
    let mut faults = BTreeSet::new();
    for (module, needed) in &all {
        if needed.contains(*module) {
            let circle = needed.iter().filter(|other| all[other].contains(*module));
            let files: Vec<String> = circle.map(|module| it.file(module)).collect();
            faults.insert(format!("a circle of {}", files.join(", ")));
        }
        let root = imports[*module].contains("").then(|| it.file(""));
        if let Some(root) = root.filter(|root| root.ends_with("main.rs")) {
            faults.insert(format!("{} imports from {root}", it.file(module)));
        }
    }
    faults.into_iter().collect()
}

#[test]
fn no_file_imports_from_one_that_imports_from_it() {
    let mut files = 0;
    let mut faulty = Vec::new();
    for package in packages() {
        let it = Crate::read(&package.join("src"));
        files += it.modules.len();
        if it.is_module("") {
            faulty.extend(faults(&it));
        }
    }
    assert!(files > 150, "{files} files");
    assert!(faulty.is_empty(), "\n{}", faulty.join("\n"));
}

#[test]
fn a_circle_is_found() {
    let faults_of = |texts: &[(&str, &str)]| {
        let module = |(name, text): &(&str, &str)| {
            let file = if name.is_empty() { "main" } else { name }.to_owned() + ".rs";
            (name.to_string(), (program(code(text)), file.into()))
        };
        faults(&Crate { modules: texts.iter().map(module).collect() })
    };
    let none: [&str; 0] = [];
    let root = ("", "mod a;\nmod b;\nuse a::{A, x::{self, Y as Z}};\nfn main() { b::f() }");
    let b =
        ("b", "use crate::a::A;\n#[cfg(test)]\nmod tests {\n    use super::*; use crate::c;\n}");
    assert_eq!(faults_of(&[root, ("a", "// crate::b\nconst A: &str = \"crate::b\";"), b]), none);
    for text in [
        "use crate::b;",
        "use super::{b::f};",
        "fn f() -> crate::b::B {}",
        "fn g() { super::b::f() }",
    ] {
        assert_eq!(faults_of(&[root, ("a", text), b]), ["a circle of a.rs, b.rs"], "{text}");
    }
    assert_eq!(
        faults_of(&[root, ("a", "use crate::main;"), ("b", "")]),
        ["a circle of main.rs, a.rs", "a.rs imports from main.rs"]
    );
    // A parent that only names its children, one that passes their names on, and one that uses them.
    let child = ("a::c", "use super::A;");
    for text in ["mod c;\nstruct A;", "mod c;\npub use c::C;\nstruct A;"] {
        assert_eq!(faults_of(&[("", "mod a;"), ("a", text), child]), none, "{text}");
    }
    let uses = ("a", "mod c;\nstruct A(c::C);");
    assert_eq!(faults_of(&[("", "mod a;"), uses, child]), ["a circle of a.rs, a::c.rs"]);
    let inner = ("a", "struct A; mod inner { use super::A; }");
    assert_eq!(faults_of(&[("", "mod a;"), inner]), none);
}
