//! What the tests say of each kernel: kept in `vm/tested.json`, and shown in docs/kernels.md.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, ensure};
use workshop::say;

use crate::arch::Arch;
use crate::commands::test::report::NOT_TESTED;
use crate::fetch::table::{Passed, TESTED_FILE, Table, Tested};
use crate::run::Run;

/// The page with the tables.
const PAGE: &str = "docs/kernels.md";
/// The line after each of them.
const END: &str = "<!-- end of what it wrote -->";

/// Takes in what the tests have just said of these lines. Without `bless`, an error where that is not what
/// they said before; of a kernel's releases, each may be the newest.
pub fn take(run: &Run, lines: &[(String, Passed)], bless: bool) -> Result<()> {
    let (workspace, arch) = (run.workspace(), run.arch);
    let file = workspace.join(TESTED_FILE);
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let mut all: Tested = serde_json::from_str(&text).context(TESTED_FILE)?;
    let known = all.entry(arch.name().to_owned()).or_default();
    let mut news = Vec::new();
    for (name, passed) in lines {
        let mut passed = passed.clone();
        if run.table.line(name)?.is_extra {
            passed.programs.clear(); // the page has no column for it
        }
        news.extend(differences(name, known.get(name), &passed));
        known.insert(name.clone(), passed);
    }
    if bless {
        workshop::write(&file, &(serde_json::to_string_pretty(&all)? + "\n"))?;
        say!("{TESTED_FILE}: what the tests said is written");
        let page = workspace.join(PAGE);
        let text = fs::read_to_string(&page).with_context(|| page.display().to_string())?;
        return workshop::write(&page, &with_table(&text, arch, &run.table, &all)?);
    }
    ensure!(
        news.is_empty(),
        "this is not what {PAGE} says: `{} --bless` writes it there. Tested:\n{}",
        arch.table_is_by(),
        news.join("\n")
    );
    Ok(())
}

/// What the tests say now and did not say before.
fn differences(line: &str, before: Option<&Passed>, now: &Passed) -> Vec<String> {
    let is_new = |(program, cell): &(&String, &String)| {
        before.and_then(|before| before.programs.get(*program)) != Some(*cell)
    };
    now.programs
        .iter()
        .filter(is_new)
        .map(|(program, cell)| format!("{line}, {program}: {cell}"))
        .collect()
}

/// The page with the table of an architecture.
fn with_table(page: &str, arch: Arch, table: &Table, tested: &Tested) -> Result<String> {
    let begin = format!("<!-- written by: {} --bless -->\n", arch.table_is_by());
    let missing = || format!("{PAGE} has no table of kernels after {begin}");
    let (before, rest) = page.split_once(&begin).with_context(missing)?;
    let (_, after) = rest.split_once(END).with_context(missing)?;
    let none = BTreeMap::new();
    let tested = tested.get(arch.name()).unwrap_or(&none);
    let columns = table.lines.iter().filter_map(|line| tested.get(&line.name));
    Ok([before, &begin, &rendered(&columns.collect::<Vec<_>>()), END, after].concat())
}

/// A line for each program, a column for each kernel.
fn rendered(columns: &[&Passed]) -> String {
    let columns: Vec<_> = columns.iter().filter(|column| !column.programs.is_empty()).collect();
    let programs: BTreeSet<&String> = columns.iter().flat_map(|it| it.programs.keys()).collect();
    let row = |name: &str, cells: Vec<&str>| format!("| {name} | {} |\n", cells.join(" | "));
    let mut table = row("", columns.iter().map(|column| &*column.release).collect());
    table = table.replacen("|  |", "| |", 1) + &format!("|{}\n", "---|".repeat(columns.len() + 1));
    for program in programs {
        let cells = columns.iter().map(|column| column.programs.get(program));
        table += &row(program, cells.map(|cell| cell.map_or(NOT_TESTED, |cell| cell)).collect());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fetch::apt::Source;
    use crate::fetch::cache::Cache;
    use crate::fetch::table::tested;

    #[test]
    fn the_page_shows_what_was_tested() {
        let (page, tested) = (fs::read_to_string(workshop::workspace().join(PAGE)), tested());
        let (page, tested) = (page.unwrap(), tested.unwrap());
        for arch in Arch::ALL {
            let temp = tempfile::tempdir().unwrap();
            let cache = Cache::at(temp.path()).unwrap();
            let table = Table::load(arch, &Source::from_env().unwrap(), &cache).unwrap();
            let is_it = with_table(&page, arch, &table, &tested).unwrap() == page;
            assert!(
                is_it,
                "{PAGE} does not show {TESTED_FILE}: `cargo vm test --bless` writes both"
            );
        }
    }

    fn passed(release: &str, cells: &[(&str, &str)]) -> Passed {
        let programs = cells.iter().map(|(program, cell)| ((*program).into(), (*cell).into()));
        Passed { release: release.into(), programs: programs.collect() }
    }

    #[test]
    fn a_newer_release_that_says_the_same_is_no_news() {
        let before = passed("6.1.0-50", &[("stage08", "✓")]);
        let now = passed("6.1.0-51", &[("stage08", "✓")]);
        assert!(differences("6.1", Some(&before), &now).is_empty());
        let now = passed("6.1.0-51", &[("stage08", "stage08_a")]);
        assert_eq!(differences("6.1", Some(&before), &now), ["6.1, stage08: stage08_a"]);
        assert_eq!(differences("7.2", None, &before), ["7.2, stage08: ✓"]);
    }
}
