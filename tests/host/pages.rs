//! The pages beside what they are about: the calls of `common`, the commands that a reader types.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use common_base::colours::PARTS;
use serde_json::Value;

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(workspace().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The directories in `place`, relative to the workspace.
fn directories(place: &str) -> Vec<String> {
    let entries = workspace().join(place).read_dir().unwrap().map(Result::unwrap);
    let directories = entries.filter(|entry| entry.path().is_dir());
    let name = |entry: fs::DirEntry| Path::new(place).join(entry.file_name()).display().to_string();
    directories.map(name).collect()
}

/// The name that ends before anything but letters, digits, `_` and `::`.
fn name(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
    text[..end.unwrap_or(text.len())].trim_end_matches(':')
}

/// What a stage calls of common: `common::counters`, `session.attach`, `pipe.finish`, `Btf::read`.
fn calls(source: &str) -> BTreeSet<String> {
    let mut calls = BTreeSet::new();
    // `use common::{PidCli as Cli, Session, btf::Btf, btf::modules};`
    for line in source.lines().filter_map(|line| line.strip_prefix("use common::")) {
        for item in line.trim_end_matches(';').trim_matches(['{', '}']).split(", ") {
            let item = item.split(" as ").next().unwrap_or(item);
            calls.insert(item.rsplit("::").next().unwrap_or(item).to_owned());
        }
    }
    for prefix in ["common::", "session.", "pipe.", "TracePipe::", "Btf::", "Kernel::"] {
        for (at, _) in source.match_indices(prefix) {
            let is_whole = !source[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let called = name(&source[at + prefix.len()..]);
            if is_whole && !called.is_empty() && !source[..at].ends_with("use ") {
                calls.insert(format!("{prefix}{called}"));
            }
        }
    }
    // What is called by its path is what is imported elsewhere.
    let bare = |call: String| match call.strip_prefix("common::") {
        Some(name) if name.starts_with(char::is_uppercase) => name.to_owned(),
        _ => call,
    };
    calls.into_iter().map(bare).collect()
}

/// docs/common.md has an item for each call of common that a stage makes, and for no other one.
#[test]
fn the_page_on_common_has_every_call() {
    let mut called: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for stage in directories(".").into_iter().filter(|it| it.starts_with("./stage")) {
        for call in calls(&read(&format!("{stage}/src/main.rs"))) {
            called.entry(call).or_default().push(stage.clone());
        }
    }
    // A type whose functions have items of their own.
    for made in ["TracePipe", "Btf", "Kernel"] {
        assert!(called.remove(made).is_some(), "no stage imports {made}");
    }
    let page = read("docs/common.md");
    let items = page.split("\n- **`").skip(1).map(|item| name_of_item(item).to_owned());
    let items: BTreeSet<String> = items.collect();
    let mut said = String::new();
    for (call, stages) in called.iter().filter(|(call, _)| !items.contains(*call)) {
        said += &format!("has no item for {call}, which {} calls\n", stages.join(" and "));
    }
    for item in items.iter().filter(|item| !called.contains_key(*item)) {
        said += &format!("has an item for {item}, which no stage calls\n");
    }
    assert!(said.is_empty(), "docs/common.md\n{said}");
    assert!(called.len() >= 25, "only {} calls were found", called.len());
}

/// `session.open` of `session.open(builder, &mut object)`.
fn name_of_item(item: &str) -> &str {
    let end = item.find(|c: char| !c.is_alphanumeric() && !"_:.".contains(c));
    item[..end.unwrap_or(item.len())].trim_end_matches(':')
}

/// Whether a stage is one of `00, 03 to 11, 13`, as a table of the glossary has them.
fn is_listed(stages: &str, stage: u32) -> bool {
    stages.split(", ").any(|item| {
        let (first, last) = item.split_once(" to ").unwrap_or((item, item));
        let [first, last] = [first, last].map(|it| it.trim().parse::<u32>());
        first.is_ok_and(|first| first <= stage) && last.is_ok_and(|last| stage <= last)
    })
}

/// The glossary says which stages use a kind of hook or map.
#[test]
fn the_glossary_knows_who_uses_what() {
    // A row, and what stands in the C of a stage that uses it. 12's kprobe program is that of kprobe.multi, too.
    let rows = [
        ("kprobe", "SEC(\"kprobe"),
        ("fentry", "SEC(\"fentry/"),
        ("fexit", "SEC(\"fexit/"),
        ("kprobe.session", "SEC(\"kprobe.session"),
        ("tracepoint (`tp`)", "SEC(\"tp/"),
        ("`tp_btf`", "SEC(\"tp_btf/"),
        ("hash", "BPF_MAP_TYPE_HASH"),
        ("per-CPU hash", "BPF_MAP_TYPE_PERCPU_HASH"),
        ("LRU hash", "BPF_MAP_TYPE_LRU_HASH"),
        ("per-CPU array", "BPF_MAP_TYPE_PERCPU_ARRAY"),
        ("stack trace", "BPF_MAP_TYPE_STACK_TRACE"),
        ("ring buffer", "BPF_MAP_TYPE_RINGBUF"),
    ];
    let (page, mut said) = (read("docs/glossary.md"), String::new());
    let mut stages = directories(".");
    stages.retain(|stage| stage.starts_with("./stage"));
    for (title, sign) in rows {
        let row = page.lines().find(|line| line.starts_with(&format!("| {title} | ")));
        let row = row.unwrap_or_else(|| panic!("docs/glossary.md has no row {title}"));
        let used_in = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        for stage in &stages {
            let number = stage["./stage".len()..][..2].parse().unwrap();
            let uses = read(&format!("{stage}/src/trace.bpf.c")).contains(sign);
            if uses != is_listed(used_in, number) {
                let not = if uses { "" } else { "not " };
                said += &format!("{title}: {used_in}: stage {number:02} does {not}use it\n");
            }
        }
    }
    assert!(said.is_empty(), "docs/glossary.md:\n{said}");
    assert!(is_listed("00, 03 to 11, `slow_io`", 11) && !is_listed("00, 03 to 11, `slow_io`", 12));
}

/// The commands that pages type, by Debian's name of the package that has them. Those of other packages than
/// [`EVERYWHERE`] stand in vm/packages.toml, with what brings them.
const COMMANDS: &[(&str, &str)] = &[
    ("bash", "bash sh"),
    ("bpftool", "bpftool"),
    ("bpftrace", "bpftrace"),
    ("clang", "clang"),
    (
        "coreutils",
        "cat cp cut date dd echo env head ls mkdir mv nproc rm seq sha256sum sleep sort \
                   stat sync tail taskset tee timeout touch tr true uniq wc",
    ),
    ("curl", "curl"),
    ("diffutils", "cmp diff"),
    ("dmsetup", "dmsetup"),
    ("e2fsprogs", "mkfs.ext4"),
    ("fdisk", "sfdisk"),
    ("findutils", "find xargs"),
    ("fio", "fio"),
    ("git", "git"),
    ("grep", "grep"),
    ("kmod", "lsmod modprobe rmmod"),
    ("llvm", "llvm-objdump"),
    ("mount", "losetup mount umount"),
    ("procps", "top"),
    ("rust", "cargo"),
    ("sed", "sed"),
    ("tar", "tar"),
    ("util-linux", "blkdiscard findmnt lsblk partx unshare"),
];

/// What every Debian has (essential, or part of a base system), and what there is no clone without.
const EVERYWHERE: &[&str] = &[
    "bash",
    "coreutils",
    "diffutils",
    "findutils",
    "git",
    "grep",
    "mount",
    "rust",
    "sed",
    "tar",
    "util-linux",
];

/// Words of the shell, and its own commands.
const SHELL: &str = "! . : [ [[ case cd continue break do done echo elif else esac eval exec exit export fi for \
    function if in jobs kill printf read set shift test then time trap true ulimit umask until wait while { }";

/// Pages about servers and other machines than the one with the clone: commands there are those of its system.
const ELSEWHERE: &[&str] = &["docs/on-your-servers.md", "docs/real-machine.md", "vm/README.md"];

/// A word of a command line: its text without quotes.
type Words = Vec<String>;

/// The simple commands of a script, as the shell divides it: at newlines, `;`, `&`, `|` and parentheses.
fn commands(script: &str) -> Vec<Words> {
    let (mut found, mut words, mut word) = (Vec::new(), Vec::new(), None::<String>);
    let mut chars = script.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.peek() == Some(&'\n') => {
                chars.next();
            }
            '\\' => word.get_or_insert_default().extend(chars.next()),
            '\'' | '"' => {
                let text: String = chars.by_ref().take_while(|&next| next != c).collect();
                word.get_or_insert_default().push_str(&text);
            }
            '#' if word.is_none() => while chars.next_if(|&c| c != '\n').is_some() {},
            // `2>&1`, `>/dev/null`: to the end of the word, nothing of a command.
            '&' if word.as_deref().is_some_and(|word| word.ends_with(['>', '<'])) => {
                word.get_or_insert_default().push('&');
            }
            '\n' | ';' | '&' | '|' | '(' | ')' | ' ' | '\t' => {
                words.extend(word.take());
                if c != ' ' && c != '\t' {
                    found.push(std::mem::take(&mut words));
                }
            }
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    found.push(words);
    found.retain(|words: &Words| !words.is_empty());
    found
}

/// Whether a word is one that stands before a command: of the shell, an assignment, a redirection.
fn is_before(word: &str) -> bool {
    let is_name = |text: &str| text.chars().all(|c| c.is_alphanumeric() || c == '_');
    let assigns = word.split_once('=').is_some_and(|(name, _)| is_name(name));
    let keywords =
        ["!", "do", "done", "else", "fi", "if", "then", "time", "until", "while", "{", "}"];
    assigns || keywords.contains(&word) || word.contains(['<', '>']) || word == "$"
}

/// The programs that a simple command starts, each with whether the guest runs it: itself, and what it is
/// given to start (`sudo`, `timeout`, `bash -c`, `cargo vm run`).
fn started(words: &[String], in_guest: bool, found: &mut Vec<(String, bool)>) {
    let skipped = words.iter().position(|word| !is_before(word));
    let Some(words) = skipped.map(|skipped| &words[skipped..]) else { return };
    // After `$(...)`, the words of a command continue with its options.
    if ["for", "case"].contains(&words[0].as_str()) || words[0].starts_with('-') {
        return;
    }
    found.push((words[0].clone(), in_guest));
    // The values of options are words of their own: `--kernel 7.2`, `-s INT`.
    let with_values = ["--kernel", "--disk", "--timeout", "--cpus", "--memory", "-s", "-k"];
    let after_options = |mut rest: &[String]| -> usize {
        let all = rest.len();
        while let Some(word) = rest.first().filter(|word| word.starts_with('-')) {
            rest =
                &rest[1 + usize::from(with_values.contains(&word.as_str())).min(rest.len() - 1)..];
        }
        all - rest.len()
    };
    let next = match words[0].as_str() {
        "cargo" if words.len() > 3 && words[1..3] == ["vm", "run"] => {
            3 + after_options(&words[3..])
        }
        "sudo" | "exec" | "env" | "unshare" | "nohup" => 1 + after_options(&words[1..]),
        "timeout" => 2 + after_options(&words[1..]),
        "bash" | "sh" => {
            if let Some(at) = words.iter().position(|word| word == "-c") {
                let script = words.get(at + 1).map_or("", String::as_str);
                commands(script).iter().for_each(|it| started(it, in_guest, found));
            }
            return;
        }
        "bpftrace" => {
            if let Some(at) = words.iter().position(|word| word == "-c") {
                commands(&words[at + 1]).iter().for_each(|it| started(it, in_guest, found));
            }
            return;
        }
        _ => return,
    };
    if let Some(rest) = words.get(next..).filter(|rest| !rest.is_empty()) {
        started(rest, in_guest || words[0] == "cargo", found);
    }
}

/// Whether a block of a page without a language is one that a reader types: it begins with a command that is known,
/// or that looks like one by its options, paths and pipes.
fn is_typed(block: &str, known: impl Fn(&str) -> bool) -> bool {
    let first = block.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let words: Vec<&str> = first.split_whitespace().collect();
    let Some(&word) = words.first() else { return false };
    let is_name = word.starts_with(|c: char| c.is_ascii_lowercase())
        && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+".contains(c));
    let has_options = words[1..].iter().any(|word| {
        let option = word.trim_start_matches('-');
        let dashes = word.len() - option.len();
        (1..=2).contains(&dashes) && option.starts_with(|c: char| c.is_ascii_lowercase())
    });
    let builtin = ["cd", "export", "for", "until", "kill", "exec"].contains(&word);
    // Not `    wait      158.861    1 %`, which a tool prints, and not `cachetop  15 s, every 2s`.
    !first.contains("  ") && is_name && (builtin || known(word) || has_options)
}

/// The pages, relative to the workspace.
fn pages() -> Vec<String> {
    let mut pages: Vec<String> =
        ["README.md", "CONTRIBUTING.md", "vm/README.md"].map(str::to_owned).into();
    for place in ["docs", "appendix", "tools"] {
        let entries = workspace().join(place).read_dir().unwrap().map(Result::unwrap);
        let names = entries.map(|entry| format!("{place}/{}", entry.file_name().display()));
        pages.extend(names.filter(|name| name.ends_with(".md")));
    }
    let readmes = [".", "appendix", "tools"].into_iter().flat_map(directories);
    let readmes =
        readmes.map(|directory| format!("{}/README.md", directory.trim_start_matches("./")));
    let is_page = |page: &String| {
        let place = page.split('/').next().unwrap_or_default();
        let is_one = place.starts_with("stage") || ["appendix", "tools"].contains(&place);
        is_one && workspace().join(page).exists()
    };
    pages.extend(readmes.filter(is_page));
    pages
}

/// What installs a package: `run`: with the first run; `typed`: by the command line that names one of these commands.
struct Brought {
    with_a_run: bool,
    typed: Vec<String>,
}

/// The packages of vm/packages.toml.
fn packages() -> BTreeMap<String, Brought> {
    let table: Value = toml::from_str(&read("vm/packages.toml")).unwrap();
    let packages = table["package"].as_array().unwrap().iter();
    let brought = packages.map(|package| {
        let typed = package["typed"].as_array().into_iter().flatten();
        let typed = typed.map(|it| it.as_str().unwrap().to_owned()).collect();
        let with_a_run = package["for"] == "run";
        (package["debian"].as_str().unwrap().to_owned(), Brought { with_a_run, typed })
    });
    brought.collect()
}

/// Why a command of a page does not work as typed on a machine that has nothing but a clone and cargo; `None`: it
/// does, or the page says which package it is of.
fn not_there(command: &str, page: &str, packages: &BTreeMap<String, Brought>) -> Option<String> {
    let has = |(_, commands): &&(&str, &str)| commands.split(' ').any(|it| it == command);
    let Some((package, _)) = COMMANDS.iter().find(has) else {
        return Some(
            "of no package that is known here: see COMMANDS in tests/host/pages.rs".into(),
        );
    };
    if EVERYWHERE.contains(package) || page.contains(&format!("package `{package}`")) {
        return None;
    }
    match packages.get(*package) {
        None => Some(format!("of {package}, which vm/packages.toml does not have")),
        Some(it) if it.with_a_run || it.typed.iter().any(|typed| typed == command) => None,
        Some(_) => Some(format!("of {package}, which nothing installs: vm/packages.toml, `typed`")),
    }
}

/// What a page has a reader type works on a fresh machine: each command is one of every Debian, or of a package
/// that the run brings, or that the command line or the shell asks for by its name.
#[test]
fn what_a_page_types_is_installed() {
    let packages = packages();
    let programs = ["appendix", "tools"].into_iter().flat_map(directories);
    let programs: Vec<String> =
        programs.map(|place| place.rsplit('/').next().unwrap_or_default().to_owned()).collect();
    let binaries = ["empty", "hello_open", "syscall_counter", "syscall_profiler", "mytool"];
    let is_ours = |word: &str| {
        let names = word.starts_with("stage") || word.starts_with("mine-") || word.contains('/');
        names || binaries.contains(&word) || programs.iter().any(|program| program == word)
    };
    let is_known = |word: &str| {
        is_ours(word) || COMMANDS.iter().any(|(_, all)| all.split(' ').any(|it| it == word))
    };
    let (mut said, mut judged, mut used) = (String::new(), 0, BTreeSet::new());
    for page in pages() {
        let text = read(&page);
        let blocks = text.split("\n```").skip(1).step_by(2);
        for block in blocks.filter_map(|block| block.strip_prefix('\n')) {
            if !is_typed(block, is_known) || ELSEWHERE.contains(&page.as_str()) {
                continue;
            }
            let mut found = Vec::new();
            commands(block).iter().for_each(|words| started(words, false, &mut found));
            for (command, _) in found {
                judged += 1;
                let command = command.strip_prefix("/bin/").unwrap_or(&command).to_owned();
                let is_shells = SHELL.split_whitespace().any(|it| it == command);
                if is_shells || is_ours(&command) {
                    continue;
                }
                if let Some(why) = not_there(&command, &text, &packages) {
                    said += &format!("{page}: {command}: {why}\n");
                }
                used.insert(command);
            }
        }
    }
    assert!(said.is_empty(), "this does not work as typed on a fresh machine:\n{said}");
    assert!(judged >= 200, "only {judged} commands were found");
    for typed in packages.values().flat_map(|package| &package.typed) {
        assert!(used.contains(typed), "no page types {typed}: vm/packages.toml, `typed`");
    }
}

#[test]
fn commands_are_found_as_the_shell_finds_them() {
    let found = |script: &str| {
        let mut found = Vec::new();
        commands(script).iter().for_each(|words| started(words, false, &mut found));
        let shown = |(command, in_guest)| format!("{command}{}", if in_guest { "*" } else { "" });
        found.into_iter().map(shown).collect::<Vec<_>>().join(" ")
    };
    let run = "cargo vm run --idle --disk virtio bash -c '\n  umount /mnt/data; modprobe -a dm_crypt\n  \
               stage11 >/tmp/out 2>&1 & until grep -q x /f; do sleep 1; done\n  kill $!; wait'";
    assert_eq!(found(run), "cargo bash* umount* modprobe* stage11* grep* sleep* kill* wait*");
    assert_eq!(
        found("sudo timeout -s INT 20 bpftrace -e 'a { b; c }' # d"),
        "sudo timeout bpftrace"
    );
    assert_eq!(found("for i in 1 2; do X=1 fio --a=b \\\n  --c >/dev/null & done"), "fio");
    let packages = packages();
    assert!(
        not_there("stress-ng", "", &packages).is_some() && not_there("dd", "", &packages).is_none()
    );
    assert!(is_typed("stress-ng --cpu 4", |_| false) && !is_typed("the answer: 4 - 2", |_| false));
}

/// The dashboard draws the parts of an I/O's time in the colours that slow_io and the book have.
#[test]
fn the_dashboard_has_the_colours_of_the_parts() {
    let dashboard: Value = serde_json::from_str(&read("tools/exporter/dashboard.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let colours: Vec<[&str; 2]> = panels
        .iter()
        .flat_map(|panel| panel["fieldConfig"]["overrides"].as_array().into_iter().flatten())
        .filter_map(|of| {
            let colour = of["properties"][0]["value"]["fixedColor"].as_str()?;
            Some([of["matcher"]["options"].as_str()?, colour])
        })
        .collect();
    // Two phases of a request, and all parts of a bio.
    assert_eq!(colours.len(), 2 + PARTS.len(), "{colours:?}");
    for part in PARTS {
        assert!(colours.contains(&[part.name, part.rgb]), "{part:?}: {colours:?}");
    }
    let known = PARTS.map(|part| [part.name, part.rgb]);
    assert!(colours.iter().all(|colour| known.contains(colour)), "{colours:?}");
}
