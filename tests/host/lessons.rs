//! A stage is a lesson: short, a small step from the stage before, and what its README says to do
//! to it can be done.

#![allow(clippy::unwrap_used)]

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A stage, and how many lines a learner reads at most to get there from the stage before: of BPF C
/// and of main.rs. `None`: it starts afresh.
struct Lesson {
    stage: &'static str,
    before: Option<&'static str>,
    c: usize,
    rust: Option<usize>,
}

const fn after(before: &'static str, stage: &'static str, c: usize, rust: usize) -> Lesson {
    Lesson { stage, before: Some(before), c, rust: Some(rust) }
}

const fn afresh(stage: &'static str, c: usize) -> Lesson {
    Lesson { stage, before: None, c, rust: None }
}

/// In the order in which they are read. The limits are those of the design.
const LESSONS: &[Lesson] = &[
    afresh("stage01_submit_bio", 30),
    after("stage01_submit_bio", "stage02_bio_endio", 12, 4),
    after("stage02_bio_endio", "stage03_latency_map", 50, 15),
    after("stage03_latency_map", "stage04_max_latency", 35, 30),
    after("stage04_max_latency", "stage05_sector", 25, 8),
    after("stage05_sector", "stage06_stacktrace", 20, 12),
    after("stage06_stacktrace", "stage07_rq_latency", 60, 10),
    afresh("stage08_pagecache", 90),
    after("stage08_pagecache", "stage09_pid_filter", 45, 20),
    after("stage06_stacktrace", "stage10_parts", 60, 12),
    after("stage10_parts", "stage11_preemption", 30, 12),
    afresh("stage12_functions", 60),
    after("stage10_parts", "stage13_ring_buffer", 45, 80),
    after("stage13_ring_buffer", "stage14_slow_io", 45, 40),
];

/// What a learner has before a stage that starts afresh, where its README shows what is added to that.
const STARTS: &[(&str, &str)] = &[
    ("stage03_latency_map", "lesson/exercises/03_latency_map/start"),
    ("stage04_max_latency", "lesson/exercises/04_max_latency/start"),
    ("stage07_rq_latency", "lesson/exercises/07_rq_latency/start"),
    ("stage08_pagecache", "lesson/exercises/08_pagecache/start"),
    ("stage12_functions", "lesson/exercises/12_functions/start"),
    ("stage13_ring_buffer", "lesson/exercises/13_ring_buffer/start"),
    ("stage14_slow_io", "lesson/exercises/14_slow_io/start"),
];

/// Headers that a stage uses before the README of a later one explains them.
const EXPLAINED_LATER: &[(&str, &str)] = &[("bio.h", "stage10_parts")];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The directories of the stages, in order.
fn stages() -> Vec<String> {
    let entries = workspace().read_dir().unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    let mut stages: Vec<String> = names.filter(|name| name.starts_with("stage")).collect();
    stages.sort();
    stages
}

/// How many lines two versions of a file in `src/` differ in: those added and those removed.
fn changed(before: &str, stage: &str, file: &str) -> usize {
    let path = |stage: &str| workspace().join(stage).join("src").join(file);
    let diff = Command::new("diff").arg(path(before)).arg(path(stage)).output().unwrap();
    assert!(diff.stderr.is_empty(), "{}", String::from_utf8_lossy(&diff.stderr));
    let lines = String::from_utf8_lossy(&diff.stdout);
    lines.lines().filter(|line| line.starts_with(['<', '>'])).count()
}

/// The workspace's headers that a file includes, and those that they include; vmlinux.h aside.
fn headers(file: &Path, found: &mut Vec<PathBuf>) {
    for line in read(file).lines() {
        let Some(rest) = line.trim_start().strip_prefix("#include") else { continue };
        let name = rest.trim().trim_matches(['"', '<', '>']);
        let places = [file.parent().unwrap().join(name), workspace().join("common/bpf").join(name)];
        let Some(header) = places.into_iter().find(|place| place.exists()) else {
            assert!(name.starts_with("bpf/"), "{}: no header {name}", file.display());
            continue;
        };
        let header = header.canonicalize().unwrap();
        if name != "vmlinux.h" && !found.contains(&header) {
            found.push(header.clone());
            headers(&header, found);
        }
    }
}

#[test]
fn lessons_are_small_steps() {
    let mut known = HashSet::new();
    let mut said = String::new();
    for Lesson { stage, before, c, rust } in LESSONS {
        let source = workspace().join(stage).join("src/trace.bpf.c");
        let own = match before {
            Some(before) => changed(before, stage, "trace.bpf.c"),
            None => read(&source).lines().count(),
        };
        let mut included = Vec::new();
        headers(&source, &mut included);
        let later = |header: &Path| {
            let explained = EXPLAINED_LATER.iter().find(|(name, _)| header.ends_with(name));
            explained.is_some_and(|(_, by)| *by > *stage)
        };
        included.retain(|header| !later(header) && known.insert(header.clone()));
        let new: usize = included.iter().map(|header| read(header).lines().count()).sum();
        println!("{stage}: {own} lines of trace.bpf.c, {new} of new headers, {c} allowed");
        if own == 0 || own + new > *c {
            said += &format!("{stage}: {own} + {new} lines of BPF C, {c} allowed\n");
        }
        if let (Some(before), Some(most)) = (before, rust) {
            let lines = changed(before, stage, "main.rs");
            println!("{stage}: {lines} lines of main.rs, {most} allowed");
            if lines == 0 || lines > *most {
                said += &format!("{stage}: {lines} lines of main.rs, {most} allowed\n");
            }
        }
    }
    assert!(said.is_empty(), "{said}");
}

#[test]
fn every_stage_is_a_lesson() {
    let lessons: Vec<&str> = LESSONS.iter().map(|lesson| lesson.stage).collect();
    let stages = stages();
    // Stage 00 is a finished tool to run.
    let stages = stages.iter().filter(|stage| &stage[5..7] != "00");
    assert!(stages.eq(lessons.iter()), "the stages are not {lessons:?}");
}

#[test]
fn stages_are_short() {
    for stage in stages() {
        let (c, rust) = match &stage[..7] {
            "stage12" | "stage14" => (130, 120), // much of the work is in user space
            _ => (130, 80),
        };
        for (file, most) in [("src/trace.bpf.c", c), ("src/main.rs", rust)] {
            let lines = read(&workspace().join(&stage).join(file)).lines().count();
            assert!(lines <= most, "{stage}/{file} has {lines} lines, {most} allowed");
        }
    }
}

/// The sections of a stage's README, in this order.
const FORM: [&str; 8] = [
    "What you will be able to do",
    "The idea",
    "Your turn",
    "The answer",
    "Break it",
    "The same with bpftrace",
    "Check yourself",
    "Limits",
];

/// The sections of a page below its headings of the second level, with those headings.
fn sections(text: &str) -> Vec<(&str, &str)> {
    let (mut sections, mut in_code, mut from, mut at) = (Vec::new(), false, None, 0);
    for line in text.split_inclusive('\n') {
        in_code ^= line.starts_with("```");
        if let Some(title) = line.strip_prefix("## ").filter(|_| !in_code) {
            sections.extend(from.map(|(title, start)| (title, &text[start..at])));
            from = Some((title.trim(), at + line.len()));
        }
        at += line.len();
    }
    sections.extend(from.map(|(title, start)| (title, &text[start..])));
    sections
}

/// The READMEs of the stages: stage, text.
fn lessons_readmes() -> Vec<(String, String)> {
    let readme = |stage: &str| read(&workspace().join(stage).join("README.md"));
    stages().into_iter().map(|stage| (stage.clone(), readme(&stage))).collect()
}

/// Whether sections are those of [`FORM`]: bpftrace only where it teaches, and the idea and its task once for each
/// step, with a title of their own: `The idea: the account`, `Your turn: the account`.
fn has_the_form(titles: &[&str]) -> bool {
    let kind = |title: &&str| title.split(": ").next().unwrap_or_default().to_owned();
    let steps = titles.iter().filter(|title| title.starts_with("Your turn")).count();
    let titled = titles.iter().filter(|title| title.starts_with("Your turn: ")).count();
    let [able, idea, turn, rest @ ..] = FORM;
    let rest = rest.iter().filter(|it| !it.contains("bpftrace") || titles.contains(it));
    let form = [able].into_iter().chain([idea, turn].repeat(steps)).chain(rest.copied());
    titles.iter().map(kind).eq(form.map(str::to_owned)) && (steps == 1 || titled == steps)
}

/// The task stands between the idea and its answer, and a README leads to the next stage.
#[test]
fn readmes_have_one_form() {
    let (readmes, stages) = (lessons_readmes(), stages());
    let experts = anchors(&read(&workspace().join("docs/limits.md")));
    for (stage, text) in &readmes {
        let sections = sections(text);
        let titles: Vec<&str> = sections.iter().map(|(title, _)| *title).collect();
        assert!(has_the_form(&titles), "{stage}/README.md: {titles:?}");
        let limits = sections[sections.len() - 1].1;
        let items = limits.lines().filter(|line| line.starts_with("- ")).count();
        assert!(items <= 5, "{stage}/README.md: {items} limits, 5 allowed");
        let section = stage[..7].replace("stage", "stage-");
        let page = format!("](../docs/limits.md#{section})");
        assert!(experts.contains(&section), "docs/limits.md has no {section}");
        assert!(limits.contains(&page), "{stage}/README.md: no {page}");
        let next = stages.iter().find(|next| *next > stage);
        let last = text.trim_end().rsplit("\n\n").next().unwrap();
        let leads = next.is_none_or(|next| last.contains(&format!("](../{next})")));
        assert!(leads, "{stage}/README.md does not end with a link to {next:?}");
    }
    assert!(readmes.len() >= 14, "only {} were found", readmes.len());
}

/// A program of bpftrace can be pasted: its block has the command and nothing else, the next one its output.
#[test]
fn bpftrace_can_be_pasted() {
    let mut said = String::new();
    let pages =
        lessons_readmes().into_iter().map(|(stage, text)| (format!("{stage}/README.md"), text));
    let others = ["tools/slow_io/README.md", "docs/bpftrace.md"];
    let others = others.map(|page| (page.to_owned(), read(&workspace().join(page))));
    for (page, text) in pages.chain(others) {
        let mut blocks = text.split("```").skip(1).step_by(2).peekable();
        while let Some(block) = blocks.next() {
            if !block.contains("bpftrace -") {
                continue;
            }
            // By the launcher, which installs it, or in the shell, which says how to.
            let is_run = block.contains("\ncargo vm run") && block.contains(" bpftrace ")
                || block.contains("\nbpftrace ") && text.contains("`cargo vm shell`");
            if !is_run || !block.ends_with("'\n") || block.contains("\n@") {
                said += &format!("{page}: not one command, or nowhere to type it:{block}");
            }
            if blocks.peek().is_none_or(|shown| !shown.contains('@')) {
                said += &format!("{page}: no block with the output below:{block}");
            }
        }
    }
    assert!(said.is_empty(), "{said}");
}

/// The lines that a diff adds and removes. What every stage has of its own is left out: the first line of
/// main.rs, which says what the stage is.
fn changes<'a>(diff: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let lines = diff.filter(|line| line.starts_with(['+', '-']) && line.len() > 1);
    let mut lines: Vec<&str> = lines
        .filter(|line| !["+++ ", "--- ", "+//! ", "-//! "].iter().any(|it| line.starts_with(it)))
        .collect();
    lines.sort_unstable();
    lines
}

/// The blocks `diff` of a README are the whole difference from the stage before: a learner has seen
/// every line.
#[test]
fn readmes_show_every_line_that_changed() {
    for Lesson { stage, before, .. } in LESSONS {
        let start = STARTS.iter().find(|(of, _)| of == stage).map(|(_, start)| *start);
        // The way from the stage before to where a learner begins, and on from there.
        let steps: Vec<&str> = before.iter().copied().chain(start).chain([*stage]).collect();
        let readme = read(&workspace().join(stage).join("README.md"));
        let mut diff = String::new();
        for step in steps.windows(2) {
            for file in ["src/trace.bpf.c", "src/main.rs"] {
                let [old, new] = [step[0], step[1]].map(|of| workspace().join(of).join(file));
                let output = Command::new("diff").arg("-u").args([old, new]).output().unwrap();
                diff += &String::from_utf8(output.stdout).unwrap();
            }
        }
        let (mut missing, shown) = (changes(diff.lines()), readme.split("```diff\n").skip(1));
        let shown = shown.map(|block| block.split("\n```").next().unwrap_or(block));
        let mut invented = changes(shown.flat_map(str::lines));
        missing.retain(|line| match invented.iter().position(|shown| shown == line) {
            Some(at) => {
                invented.remove(at);
                false
            }
            None => true,
        });
        // What goes before a learner begins is left out.
        let goes_before = start.is_some() && before.is_some();
        missing.retain(|line| !goes_before || line.starts_with('+'));
        assert!(
            missing.is_empty() && invented.is_empty(),
            "{stage}/README.md does not show:\n{}\nand shows what does not change:\n{}",
            missing.join("\n"),
            invented.join("\n")
        );
    }
}

/// The stages whose README ends its answer with the whole of `src/trace.bpf.c`: where a chain of differences has
/// become a program that a learner wants to see in one piece.
const WHOLE: &[&str] = &["stage04_max_latency", "stage06_stacktrace", "stage14_slow_io"];

/// A whole program in a README is the stage's, line by line. With `BLESS=1` in the environment, it is written there.
#[test]
fn readmes_show_whole_programs() {
    let bless = std::env::var_os("BLESS").is_some_and(|bless| bless == "1");
    for (stage, text) in lessons_readmes() {
        let source = read(&workspace().join(&stage).join("src/trace.bpf.c"));
        let first = source.lines().next().unwrap();
        let place = text.split_once(&format!("```c\n{first}\n"));
        let is_to_have_one = WHOLE.contains(&&*stage);
        assert_eq!(place.is_some(), is_to_have_one, "{stage}/README.md: all of trace.bpf.c?");
        let Some((before, rest)) = place else { continue };
        let (shown, after) = rest.split_once("```\n").unwrap();
        if bless {
            let text = format!("{before}```c\n{source}```\n{after}");
            fs::write(workspace().join(&stage).join("README.md"), text).unwrap();
            continue;
        }
        let shown = format!("{first}\n{shown}");
        let differs = || shown.lines().zip(source.lines()).find(|(shown, line)| shown != line);
        assert!(
            shown == source,
            "{stage}/README.md shows another trace.bpf.c than the stage has: {:?}; \
             BLESS=1 cargo test -p guest_tests --test lessons writes it",
            differs()
        );
        let folds = before.rfind("<details>") > before.rfind("</details>");
        assert!(folds, "{stage}/README.md: a whole program is folded up");
    }
}

/// The minutes of each stage that a page's table has, without and with its task; those of "all".
fn minutes(page: &str) -> (BTreeMap<String, [u32; 2]>, Option<String>) {
    let (mut stages, mut sum) = (BTreeMap::new(), None);
    for row in page.lines().filter_map(|line| line.strip_prefix("| ")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let number = cells[0].trim_start_matches('[').split(' ').next().unwrap();
        let [Some(without), Some(with)] = [cells.get(1), cells.get(2)] else { continue };
        if number == "all" {
            sum = Some(format!("{without}, {with}"));
        } else if let Ok(minutes) = without.parse().and_then(|n| Ok([n, with.parse()?])) {
            assert!(stages.insert(number.to_owned(), minutes).is_none(), "two rows of {number}");
        }
    }
    (stages, sum)
}

/// How long it takes to read a stage's README and to run what it says: 200 words a minute, those of blocks at a
/// third of that, half a minute for each run (10 s to build, to boot, and to trace). To the nearest 5 minutes.
/// What is folded up is there to be looked up: its blocks are not counted.
fn minutes_to_read(readme: &str) -> u32 {
    let (mut words, mut words_of_blocks, mut runs) = (0, 0, 0);
    let (mut in_block, mut is_folded) = (false, false);
    for line in readme.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        let count = line.split_whitespace().filter(|word| word.contains(char::is_alphanumeric));
        match (is_fence, in_block) {
            (true, _) => {}
            (false, true) if is_folded => {}
            (false, true) => {
                words_of_blocks += line.split_whitespace().count();
                runs += line.matches("cargo vm run").count();
            }
            (false, false) => words += count.count(),
        }
        is_folded = line.starts_with("<details>") || is_folded && !line.starts_with("</details>");
    }
    let seconds = (words + 3 * words_of_blocks) * 60 / 200 + 30 * runs;
    ((seconds + 150) / 300 * 5) as u32
}

#[test]
fn words_of_blocks_take_three_times_as_long() {
    let words = |count: usize| "word ".repeat(count);
    let block = |count: usize| format!("\n```\n{}\n```\n", words(count));
    assert_eq!(minutes_to_read(&words(2000)), 10);
    assert_eq!(minutes_to_read(&(words(1000) + &block(1000))), 20);
    let folded = format!("\n<details>\n{}</details>\n", block(2000));
    assert_eq!(minutes_to_read(&(words(2000) + &folded)), 10);
    let runs = "```\n".to_owned() + &"cargo vm run\n".repeat(10) + "```\n";
    assert_eq!(minutes_to_read(&(words(1000) + "\n" + &runs)), 10);
}

/// How long a stage takes: to read and run it, and with the tasks of its "Your turn".
fn measured(readme: &str) -> [u32; 2] {
    let sections = sections(readme);
    let turns = sections.iter().filter(|(title, _)| title.starts_with("Your turn"));
    let minutes = |(title, turn): &(&str, &str)| -> u32 {
        let said = turn.split_once("Allow ").and_then(|(_, rest)| rest.split_once(" minutes"));
        let minutes = said.and_then(|(minutes, _)| minutes.parse().ok());
        minutes.unwrap_or_else(|| panic!("{title} does not say: Allow N minutes"))
    };
    let read = minutes_to_read(readme);
    [read, read + turns.map(minutes).sum::<u32>()]
}

/// What is read at one go: each step begins with its idea, and the last one ends with the answer.
fn sittings(readme: &str) -> Vec<&str> {
    let ideas = readme.match_indices("\n## The idea").skip(1).map(|(at, _)| at + 1);
    let ends: Vec<usize> = ideas.chain([readme.len()]).collect();
    let starts = [0].into_iter().chain(ends.iter().copied());
    starts.zip(&ends).map(|(start, &end)| &readme[start..end]).collect()
}

/// The minutes of several stages, as "all" has them.
fn hours(minutes: u32) -> String {
    format!("{} h {:02} min", minutes / 60, minutes % 60)
}

/// A page whose tables have these minutes: those of the stages, their sums, and the times of a timetable.
fn with_minutes(page: &str, measured: &BTreeMap<String, [u32; 2]>) -> String {
    let (mut written, mut clock) = (String::new(), None::<u32>);
    let sums = [0, 1].map(|column| hours(measured.values().map(|it| it[column]).sum()));
    for line in page.lines() {
        let mut cells: Vec<String> = line.split('|').map(|cell| cell.trim().to_owned()).collect();
        let number = cells.get(1).map_or("", |cell| cell.trim_start_matches('[')).to_owned();
        let minutes = measured.get(number.split(' ').next().unwrap_or_default());
        if let Some([without, with]) = minutes.filter(|_| line.starts_with("| [")) {
            (cells[2], cells[3]) = (without.to_string(), with.to_string());
        } else if line.starts_with("| all |") {
            [cells[2], cells[3]] = sums.clone();
        } else if let Some((hour, minute)) = number.split_once(':').filter(|_| cells.len() == 5) {
            let said = hour.parse::<u32>().unwrap() * 60 + minute.parse::<u32>().unwrap();
            let begins = clock.unwrap_or(said);
            cells[1] = format!("{:02}:{:02}", begins / 60, begins % 60);
            if let Some([_, with]) = cells[3].strip_prefix("stage ").and_then(|it| measured.get(it))
            {
                cells[2] = with.to_string();
            }
            clock = cells[2].parse::<u32>().ok().map(|minutes| begins + minutes);
        } else {
            written += line;
            written.push('\n');
            continue;
        }
        let row = cells[1..cells.len() - 1].join(" | ").replace("|  |", "| |");
        written += &format!("| {row} |\n").replace("|  |", "| |");
    }
    written
}

/// How long a stage takes is measured by its words, and said in three places. `BLESS=1` in the environment writes
/// it there: `BLESS=1 cargo test -p guest_tests --test lessons minutes`.
#[test]
fn minutes_are_those_of_the_words() {
    let measured: BTreeMap<String, [u32; 2]> = lessons_readmes()
        .iter()
        .map(|(stage, text)| (stage[5..7].to_owned(), measured(text)))
        .collect();
    let bless = std::env::var_os("BLESS").is_some_and(|bless| bless == "1");
    let mut said = String::new();
    for name in ["README.md", "docs/class.md"] {
        let path = workspace().join(name);
        let page = read(&path);
        let right = with_minutes(&page, &measured);
        if bless {
            fs::write(&path, right).unwrap();
            continue;
        }
        let wrong = page.lines().zip(right.lines()).filter(|(line, right)| line != right);
        said.extend(wrong.map(|(line, right)| format!("{name}: {line}\n     has to be {right}\n")));
    }
    assert!(said.is_empty(), "BLESS=1 writes the right minutes:\n{said}");
}

/// How long a stage takes is said in three places, which agree, and so do the sums. A stage takes 45 minutes at
/// most; one with two tasks is two sittings.
#[test]
fn minutes_add_up() {
    let [front, class] = ["README.md", "docs/class.md"].map(|page| read(&workspace().join(page)));
    let (rows, sum) = minutes(&front);
    assert_eq!((rows.clone(), sum.clone()), minutes(&class), "README.md and docs/class.md");
    let numbers: Vec<String> = stages().iter().map(|stage| stage[5..7].to_owned()).collect();
    assert!(rows.keys().eq(numbers.iter()), "{:?}", rows.keys());
    let total = [0, 1].map(|column| hours(rows.values().map(|minutes| minutes[column]).sum()));
    assert_eq!(sum, Some(total.join(", ")));
    for (stage, text) in lessons_readmes() {
        for sitting in sittings(&text) {
            let [_, with] = measured(sitting);
            let title = sitting.lines().next().unwrap_or_default();
            assert!((10..=45).contains(&with), "{stage}, from {title:?} on: {with} minutes");
        }
    }
}

/// In a timetable, each row begins when the one before has ended, and a stage has its minutes.
#[test]
fn timetables_add_up() {
    let class = read(&workspace().join("docs/class.md"));
    let (stages, _) = minutes(&class);
    let time = |cell: &str| -> Option<u32> {
        let (hours, minutes) = cell.split_once(':')?;
        Some(hours.parse::<u32>().ok()? * 60 + minutes.parse::<u32>().ok()?)
    };
    let (mut expected, mut tables) = (None, 0);
    for row in class.lines().filter_map(|line| line.strip_prefix("| ")) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let Some(begins) = time(cells[0]) else { continue };
        assert!(
            expected.is_none_or(|expected| expected == begins),
            "{row}: it should be {expected:?}"
        );
        expected = cells[1].parse::<u32>().ok().map(|minutes| begins + minutes);
        tables += u32::from(expected.is_none());
        if let Some(number) = cells[2].strip_prefix("stage ") {
            assert_eq!(cells[1], stages[number][1].to_string(), "{row}");
        }
    }
    assert_eq!((expected, tables), (None, 3));
}

/// What a stage hooks stands in its own file.
#[test]
fn headers_hook_nothing() {
    let shared = ["common/bpf", "tools/bpf"];
    for header in shared.into_iter().flat_map(|place| workspace().join(place).read_dir().unwrap()) {
        let header = header.unwrap().path();
        let programs = ["SEC(\"kprobe", "SEC(\"fentry", "SEC(\"fexit", "SEC(\"tp"];
        let text = read(&header);
        for program in programs {
            assert!(!text.contains(program), "{} has a program", header.display());
        }
    }
}

/// The lines of a text that are prose: no code, no tables.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence && !line.trim_start().starts_with('|')
    })
}

/// The Markdown that people read: every README, the pages of docs/ and of appendix/, CONTRIBUTING.md and
/// CHANGELOG.md.
fn pages() -> Vec<PathBuf> {
    let entries = |place: &str| {
        let directory = workspace().join(place).read_dir().unwrap();
        directory.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    let mut pages: Vec<_> =
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|page| workspace().join(page)).into();
    let readmes = [".", "appendix", "tools"].into_iter().flat_map(entries);
    pages.extend(readmes.map(|path| path.join("README.md")).filter(|path| path.exists()));
    let flat = ["docs", "appendix", "tools"].into_iter().flat_map(entries);
    pages.extend(flat.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    pages
}

#[test]
fn pages_have_short_lines() {
    let mut said = String::new();
    for page in pages() {
        for (number, line) in prose(&read(&page)) {
            let columns = line.chars().count();
            if columns > 100 {
                said += &format!("{}:{number}: {columns} columns\n", page.display());
            }
        }
    }
    assert!(said.is_empty(), "more than 100 columns:\n{said}");
}

/// The front door is one page: what needs more room stands in docs/.
#[test]
fn the_root_readme_is_one_page() {
    let lines = read(&workspace().join("README.md")).lines().count();
    assert!(lines <= 180, "README.md has {lines} lines, 180 allowed");
}

/// Nothing is added that no page leads to: the front door has every stage, docs/exercises.md every
/// exercise.
#[test]
fn stages_and_exercises_are_listed() {
    let readme = read(&workspace().join("README.md"));
    for stage in stages() {
        assert!(readme.contains(&format!("]({stage})")), "README.md does not list {stage}");
    }
    let page = read(&workspace().join("docs/exercises.md"));
    let entries = workspace().join("lesson/exercises").read_dir().unwrap().map(Result::unwrap);
    for name in entries.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
        let mut rows = page.lines().filter_map(|line| line.strip_prefix("| "));
        let is_listed = rows.any(|row| {
            row.split(' ').next().is_some_and(|id| {
                name == id || name.strip_prefix(id).is_some_and(|rest| rest.starts_with('_'))
            })
        });
        assert!(is_listed || name.ends_with(".toml"), "docs/exercises.md does not list {name}");
    }
}

/// The lines of a text that Markdown interprets: all but its blocks of code.
fn marked_up(text: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    })
}

/// The anchors of a page, as GitHub makes them from its headings: `## What it costs` is
/// `what-it-costs`, and a second one is `what-it-costs-1`.
fn anchors(text: &str) -> HashSet<String> {
    let mut anchors = HashSet::new();
    for line in marked_up(text) {
        let title = line.trim_start_matches('#');
        let level = line.len() - title.len();
        let Some(title) = title.strip_prefix(' ').filter(|_| (1..=6).contains(&level)) else {
            continue;
        };
        let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let again = (1..).map(|number| format!("{anchor}-{number}"));
        let new = [anchor.clone()].into_iter().chain(again).find(|new| !anchors.contains(new));
        anchors.extend(new);
    }
    anchors
}

/// Where the links of a text lead: `](target)`, outside of code.
fn links(text: &str) -> Vec<String> {
    let text = marked_up(text).collect::<Vec<_>>().join("\n");
    // What stands between backticks is code, too.
    let text = text.split('`').step_by(2).collect::<Vec<_>>().join("`");
    let targets = text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap_or(rest));
    targets.map(str::to_owned).collect()
}

#[test]
fn anchors_are_those_of_github() {
    let text = "# A & b\n```\n# no\n```\n## `c d()`, e\n## x\n## x\n#!no\n";
    let expected = ["a--b", "c-d-e", "x", "x-1"].map(str::to_owned);
    assert_eq!(anchors(text), HashSet::from(expected));
    assert_eq!(
        links("[a](b.md#c) `[x](y)`\n```\n[d](e)\n```\n[`f`](g) ![h](i.svg)"),
        ["b.md#c", "g", "i.svg"]
    );
}

/// Every relative link leads to a file or directory of the workspace, and its anchor to a heading.
#[test]
fn links_lead_somewhere() {
    let (mut said, mut followed) = (String::new(), 0);
    for page in pages() {
        for link in links(&read(&page)).iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            // A directory shows its README.
            let shown = if target.is_dir() { target.join("README.md") } else { target.clone() };
            if !target.exists() || !anchor.is_empty() && !anchors(&read(&shown)).contains(anchor) {
                said += &format!("{}: {link}\n", page.display());
            }
            followed += 1;
        }
    }
    assert!(said.is_empty(), "these lead nowhere:\n{said}");
    assert!(followed >= 50, "only {followed} links were found");
}

/// Every `sed -i` of a README finds what it is to change.
#[test]
fn readmes_edits_change_something() {
    let mut edits = 0;
    for stage in
        stages().into_iter().chain(["ctracer", "slow_io"].map(|tool| format!("tools/{tool}")))
    {
        let readme = read(&workspace().join(&stage).join("README.md"));
        for (before, _) in readme.match_indices("sed -i") {
            let edit = &readme[before..];
            let edit = if readme[..before].ends_with('`') {
                edit.split('`').next().unwrap().to_owned()
            } else {
                let last = edit.lines().position(|line| !line.ends_with('\\')).unwrap();
                edit.lines().take(last + 1).collect::<Vec<_>>().join("\n")
            };
            let copy = tempfile::tempdir().unwrap();
            let script = format!(
                "set -e; cp -r --parents stage* tools common/bpf {0}
                 (cd {0}; {edit})
                 ! (for directory in stage* tools common/bpf
                    do diff -r $directory {0}/$directory; done) | grep -q . && exit 1; true",
                copy.path().display()
            );
            let status =
                Command::new("bash").args(["-c", &script]).current_dir(workspace()).status();
            assert!(status.unwrap().success(), "{stage}/README.md: this changes nothing: {edit}");
            edits += 1;
        }
    }
    assert!(edits >= 5, "only {edits} were found");
}

/// What one program says where it cannot run, or at its end, all say: each begins with the same function. The
/// guest tests judge it with one of them.
#[test]
fn every_program_begins_with_the_same_function() {
    let others = ["tools", "appendix"].into_iter().flat_map(|place| {
        let entries = workspace().join(place).read_dir().unwrap();
        entries.map(move |entry| format!("{place}/{}", entry.unwrap().file_name().display()))
    });
    let programs = stages().into_iter().chain(others);
    let sources = programs.map(|dir| workspace().join(dir).join("src/main.rs"));
    let mut judged = 0;
    // `by_hand` has no such file: it shows what the libraries do. The template needs nothing of the workshop.
    let is_judged =
        |file: &PathBuf| file.exists() && !file.starts_with(workspace().join("tools/template"));
    for file in sources.filter(is_judged) {
        let main = "fn main() -> ExitCode {\n    common::main(common::program!(), run)\n}\n";
        assert!(read(&file).contains(main), "{} has another main", file.display());
        judged += 1;
    }
    assert!(judged >= 18, "{judged} programs");
}
