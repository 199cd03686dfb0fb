//! What a program's figures have to be, beside the truth about a load and beside one another.

use truth::{Fact, Family, Question, Tool};

use crate::prelude::*;

/// How many of a hundred I/Os a tool may leave out where the kernel skips a program that an interrupt or another
/// task finds at work on its CPU, if it says so. Most lessons have no second program for that.
const LEFT_OUT_BY_SKIPS: u64 = 3;

/// How many of a hundred bios in parts a lesson may leave out because two parts end at one instant, on two CPUs, and
/// each finds the other one still in flight.
const LEFT_OUT_BY_INSTANTS: u64 = 3;

/// How many pages at most are not counted where a program that sees reads was skipped: most loads read 64 KiB
/// at a time, and those with many threads a page.
const PAGES_OF_A_READ: u64 = 16;

/// Checks everything that a program printed.
pub fn hold(tool: &Tool, facts: &[Fact], text: &str) -> Result<()> {
    let mut answered = false;
    for fact in facts {
        if let Some(answer) = tool.answers.get(&fact.question) {
            let printed = answer.read(text)?;
            let printed = printed.with_context(|| format!("no {:?}", fact.question))?;
            is_true(tool, *fact, printed, text).with_context(|| format!("{:?}", fact.question))?;
            answered = true;
        }
    }
    ensure!(answered, "it answers nothing of {facts:?}: the test does not test");
    agree(&tool.argv[0], text)
}

/// A figure is right; or too small, where a lesson may leave I/Os out, or the kernel skips programs: then what
/// is left out is counted, each I/O once.
fn is_true(tool: &Tool, fact: Fact, printed: truth::Expected, text: &str) -> Result<()> {
    let mut expected = fact.expected;
    let skipped = skipped(text);
    if tool.system_wide {
        expected.most += fact.others;
    }
    if !is_main(tool, fact.question) {
        // An end whose start was skipped has none, and what else was made of it has not, either.
        expected.most = expected.most.saturating_add(2 * skipped);
    }
    let wrong = || format!("printed {}, true {}", figures(printed), figures(expected));
    ensure!(printed.least <= expected.most, wrong());
    let missing = expected.least.saturating_sub(printed.most);
    let is_pages = [Question::Hits, Question::Misses].contains(&fact.question);
    // What a tool leaves out are I/Os: how many reads of the page cache, no law asks.
    let Some(leaves_out) = tool.leaves_out.as_ref().filter(|_| !is_pages) else {
        let by_skips = if is_pages { skipped * PAGES_OF_A_READ } else { 0 };
        ensure!(missing <= by_skips, wrong());
        if missing > 0 {
            judged_weakly(&format!("{} counted {missing} of {} less", tool.name, expected.least));
        }
        return Ok(());
    };
    let left_out = leaves_out.read(text)?.with_context(|| format!("no {leaves_out:?}"))?.least;
    // But for the lesson whose idea that is, a lesson has one program at the end.
    let has_one_program = tool.family == Family::Lessons && tool.name != "stage11";
    let by_skips = match skipped {
        0 => 0,
        _ if has_one_program => u64::MAX,
        _ => expected.least * LEFT_OUT_BY_SKIPS / 100,
    };
    let leaves_split_bios_out = tool.answers.contains_key(&Question::OtherBiosAndParts);
    let by_design = match tool.family {
        _ if leaves_split_bios_out => fact.left_out,
        // In pairs: the next bio at that address is dropped with it.
        Family::Lessons => (fact.left_out * LEFT_OUT_BY_INSTANTS).div_ceil(100).next_multiple_of(2),
        _ => 0,
    };
    let at_least = if leaves_split_bios_out { fact.min_left_out } else { 0 };
    ensure!(missing >= at_least, "{missing} of {at_least} that end twice are left out");
    if is_main(tool, fact.question) {
        let is_counted =
            left_out == missing || by_skips > 0 && left_out.abs_diff(missing) <= skipped;
        ensure!(is_counted, "{}, {left_out} left out", wrong());
    }
    ensure!(missing <= by_skips.saturating_add(by_design), "{}, {left_out} left out", wrong());
    if missing > 0 && !leaves_split_bios_out || missing > by_design {
        judged_weakly(&format!("{} left out {missing} of {}", tool.name, expected.least));
    }
    Ok(())
}

/// How often programs were skipped because they, or another one, ran on that CPU already.
pub fn skipped(text: &str) -> u64 {
    let number = |line: &str| -> Option<u64> {
        let line = line.trim_start();
        let printed = line.split_once(" skipped (").map(|(number, _)| number);
        let served =
            || Some(line.strip_prefix("storage_programs_skipped_total{")?.rsplit_once(' ')?.1);
        Some(printed.or_else(served)?.parse::<f64>().ok()? as u64)
    };
    text.lines().filter_map(number).sum()
}

/// Whether what a program leaves out belongs to this figure.
fn is_main(tool: &Tool, question: Question) -> bool {
    let mains = [Question::Bios, Question::DriverRequests, Question::Requests];
    mains.into_iter().find(|main| tool.answers.contains_key(main)) == Some(question)
}

fn figures(truth::Expected { least, most }: truth::Expected) -> String {
    if least == most { least.to_string() } else { format!("{least} to {most}") }
}

/// Checks that the figures of one program agree with one another.
pub fn agree(program: &str, text: &str) -> Result<()> {
    match program {
        "stage03" => {
            let durations = run::durations(text)?.len() as u64;
            ensure!(
                !text.contains(" trace lines, 0 lost")
                    || durations == count(text, "bios completed")?,
                "{durations} durations"
            );
        }
        "stage04" | "stage05" | "stage06" | "stage10" | "stage11" => {
            block(text, "bios completed", BIO)?
        }
        "stage07" => block(text, "requests completed", REQUEST)?,
        "stage00" => {
            let rows = sum(&rows(text, r".* # (\d+)$"));
            ensure!(rows == count(text, "requests completed")?, "{rows} requests in the rows");
        }
        "stage08" | "stage09" => {
            let line = text.lines().find(|line| line.starts_with("[Total ")).context("no total")?;
            let totals = rows(line, r"\[Total (\d+) Hit (\d+) miss (\d+)\]");
            let [total, hit, miss] =
                totals.first().context(line.to_owned())?.map(|it| sum(&[[it]]));
            ensure!(total == hit + miss, "{total} are not {hit} and {miss}");
        }
        "slow_io" => parts_are_the_total(text)?,
        "exporter" => {
            let gaps = sum(&rows(text, r"storage_unaccounted_requests_total\{.*\} (\d+)"));
            ensure!(gaps <= skipped(text), "the kernel has {gaps} more");
        }
        "bitehist" => {
            let rows = sum(&rows(text, r".* : (\d+) "));
            // Beside them, commands of a driver: they have no size.
            let all = count(text, "I/Os completed")?;
            ensure!(rows == all, "{rows} in the rows, {all} in all");
        }
        _ => {}
    }
    Ok(())
}

fn sum(numbers: &[[&str; 1]]) -> u64 {
    numbers.iter().filter_map(|[number]| number.parse::<u64>().ok()).sum()
}

/// The slowest I/O is one I/O, and whether all were measured is said beside it.
fn block(text: &str, what: &str, lines: [&str; 2]) -> Result<()> {
    let (completed, lost) = (count(text, what)?, not_measured(text)?);
    if completed == 0 {
        ensure!(!text.contains("Max latency"), "a maximum of nothing");
        return Ok(());
    }
    slowest(text, lines)?;
    let all = !text.contains(" measured, ");
    let said = format!(" ns (of {completed} measured, {lost} not)\n");
    ensure!(if lost == 0 { all } else { text.contains(&said) }, "not {said:?}: {lost} are missing");
    Ok(())
}

fn not_measured(text: &str) -> Result<u64> {
    Ok(count(text, "in flight")? + count(text, "dropped")? + count(text, "split").unwrap_or(0))
}

/// In each disk's table, the parts are no more than the total, but for what is rounded to 0.001 ms. They are less
/// where the kernel does not say a part of a bio.
fn parts_are_the_total(text: &str) -> Result<()> {
    let sum = |line: &str| line.split_whitespace().nth(1)?.parse::<f64>().ok();
    let mut parts = Vec::new();
    for line in text.lines().filter(|line| line.starts_with(' ')) {
        match line.split_whitespace().next() {
            Some("wait" | "queue" | "device" | "end" | "mapper") => parts.extend(sum(line)),
            Some("total") => {
                let total = sum(line).with_context(|| line.to_owned())?;
                let (all, rounded) = (parts.iter().sum::<f64>(), 0.001 * (parts.len() + 1) as f64);
                ensure!(all < total + rounded, "parts of {all} ms, {total} ms in all: {parts:?}");
                parts.clear();
            }
            _ => {}
        }
    }
    Ok(())
}

/// The part of an output that says what is wrong with it: no event lines.
pub fn summary(text: &str) -> &str {
    let text = run::summary(text);
    &text[text.len().saturating_sub(4000)..]
}
