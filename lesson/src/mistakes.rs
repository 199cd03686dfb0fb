//! Which mistake an attempt makes: what a judge says of it is compared with what the judges said of the wrong
//! answers of `lesson/exercises/mutants.toml`. `cargo lesson prove --record` notes that in `lesson/exercises/mistakes.toml`.

use std::{collections::BTreeMap, fs, path::Path, sync::LazyLock};

use anyhow::{Context, Result, bail};
use regex_lite::Regex;
use serde::{Deserialize, Serialize};

const FILE: &str = "lesson/exercises/mistakes.toml";

/// The most characters of a sentence: some judges list what they saw.
const LENGTH: usize = 300;

/// What a summary counts that is no sign of a mistake. Which bios are taken for complete, and which for split,
/// differs from run to run: that depends on the order in which the parts of a split one end.
const NOISE: [&str; 4] = ["skipped", "trace lines", "bios completed", "split or checksummed"];

/// From here on, and where it has decimals, a figure is a time, or of a load that differs from run to run.
const LARGE: f64 = 20_000.0;

/// What is wrong with the start of an exercise: nothing that has a name.
pub const START: &str = "";

/// What the judges have said of the wrong answers.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mistakes {
    /// By exercise and by what is wrong: what [`said`] keeps, from runs that differ.
    said: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

/// Keeps, of what a judge says, its sentence, and what the program's summary counts: no addresses, no numbers of
/// processes, no events and stacks.
pub fn said(judge: &str, why: &str) -> String {
    let mut lines = why.lines().map(|line| &line[..crate::event(line).unwrap_or(line.len())]);
    let first = lines.next().unwrap_or_default();
    // Behind the sentence comes what the program prints: its figures are on the right.
    let (sentence, count) = first.split_once("  ").unwrap_or((first, ""));
    let sentence: String = sentence.trim_end_matches([':', ' ']).chars().take(LENGTH).collect();
    let mut kept = format!("{judge}: {sentence}");
    for line in [count].into_iter().chain(lines) {
        let count = line.trim().split(" (").next().unwrap_or_default();
        let is_count = count.split_once(' ').is_some_and(|(number, what)| {
            let is_ours = |what: &str| !NOISE.iter().any(|noise| what.starts_with(noise));
            let is_word = what.starts_with(|c: char| c.is_ascii_lowercase());
            number.parse::<u64>().is_ok() && is_word && is_ours(what)
        });
        if is_count {
            kept += &format!(" | {count}");
        }
    }
    static NAME: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"\b(0x|(?:process|thread|pid|tid|judge,) )[0-9a-f]+").ok());
    NAME.as_ref().map_or(kept.clone(), |name| name.replace_all(&kept, "$1…").into_owned())
}

/// The words of what was said, and its figures: a sentence's by their places, a summary's by what they count.
struct Shape {
    words: String,
    figures: BTreeMap<String, f64>,
}

impl Shape {
    fn of(said: &str) -> Shape {
        static FIGURE: LazyLock<Option<Regex>> =
            LazyLock::new(|| Regex::new(r"\b[0-9]+(\.[0-9]+)?").ok());
        let figure = FIGURE.as_ref();
        let without =
            |text: &str| figure.map_or(text.into(), |it| it.replace_all(text, "#").into_owned());
        let (sentence, counts) = said.split_once(" | ").unwrap_or((said, ""));
        let found = figure.into_iter().flat_map(|it| it.find_iter(sentence));
        let found = found.filter_map(|it| it.as_str().parse().ok()).enumerate();
        let mut figures: BTreeMap<_, _> =
            found.map(|(place, it)| (format!("{place:02}"), it)).collect();
        for (count, what) in counts.split(" | ").filter_map(|part| part.split_once(' ')) {
            figures.entry(without(what)).or_insert(count.parse().unwrap_or_default());
        }
        let words = without(sentence);
        Shape { words, figures }
    }
}

/// The least and the most that a figure was; `None` where it never was.
fn range(shapes: &[Shape], figure: &str) -> Option<(f64, f64)> {
    let mut all = shapes.iter().filter_map(|shape| shape.figures.get(figure)).copied();
    let first = all.next()?;
    Some(all.fold((first, first), |(least, most), it| (least.min(it), most.max(it))))
}

impl Mistakes {
    pub fn read(workspace: &Path) -> Result<Mistakes> {
        let text = fs::read_to_string(workspace.join(FILE)).context(FILE)?;
        toml::from_str(&text).context(FILE)
    }

    pub fn write(&self, workspace: &Path) -> Result<()> {
        workshop::write(&workspace.join(FILE), &toml::to_string_pretty(self)?)?;
        Ok(())
    }

    /// All mistakes of which a judge has said the same, but for figures that differ from run to run: such a one
    /// has to be near the noted ones. It is one if it differs between runs of this mistake, or of two others:
    /// then it is the load's.
    fn alike(&self, exercise: &str, said: &str) -> Vec<&str> {
        let yours = Shape::of(said);
        let shapes = |all: &[String]| -> Vec<Shape> {
            all.iter().map(|it| Shape::of(it)).filter(|it| it.words == yours.words).collect()
        };
        let all: Vec<_> = self.said.get(exercise).into_iter().flatten().collect();
        let all: Vec<_> = all.into_iter().map(|(what, said)| (what, shapes(said))).collect();
        let differs = |shapes: &[Shape], figure: &str| {
            range(shapes, figure).is_some_and(|(least, most)| least != most)
        };
        let is_loads =
            |figure: &str| all.iter().filter(|(_, shapes)| differs(shapes, figure)).count() > 1;
        let is_same = |shapes: &[Shape], figure: &str| {
            let (Some((least, most)), Some(&yours)) =
                (range(shapes, figure), yours.figures.get(figure))
            else {
                return false;
            };
            let is_time = least.fract() != 0.0 || least > LARGE;
            let varies = is_time || differs(shapes, figure) || is_loads(figure);
            let is_near = least / 2.0 < yours && yours < most * 2.0;
            yours == least || varies && is_near
        };
        let is_it = |shapes: &[Shape]| {
            let first = shapes.first();
            first.is_some_and(|it| it.figures.keys().all(|figure| is_same(shapes, figure)))
        };
        let alike = all.iter().filter(|(_, shapes)| is_it(shapes));
        alike.map(|(what, _)| what.as_str()).collect()
    }

    /// The mistake that an attempt makes, or the two of which it may be one. None where more look like that.
    pub fn of(&self, exercise: &str, said: &str) -> Vec<&str> {
        let alike = self.alike(exercise, said);
        if alike.len() > 2 || alike.contains(&START) { Vec::new() } else { alike }
    }

    pub fn has(&self, exercise: &str, what: &str) -> bool {
        what != START && self.said.get(exercise).is_some_and(|all| all.contains_key(what))
    }

    /// Checks that a wrong answer is taken for no other one. One that has said something new, as where a time
    /// differs, is taken for none: then the learner is told nothing.
    pub fn check(&self, exercise: &str, what: &str, said: &str) -> Result<()> {
        let alike = self.alike(exercise, said);
        if alike.contains(&what) || alike.is_empty() {
            return Ok(());
        }
        bail!("taken for {alike:?}, see `prove --record`: {said}")
    }

    /// Notes what was said of a wrong answer, unless that is known.
    pub fn note(&mut self, exercise: &str, what: &str, said: String) {
        if !self.alike(exercise, &said).contains(&what) {
            let all = self.said.entry(exercise.to_owned()).or_default();
            all.entry(what.to_owned()).or_default().push(said);
        }
    }
}

/// The mistakes in a sentence, for who has made one of them.
pub fn sentence(mistakes: &[impl AsRef<str>]) -> Option<String> {
    match mistakes {
        [one] => Some(format!("A known mistake looks like this: {}.", one.as_ref())),
        [one, other] => Some(format!(
            "Two known mistakes look like this: {}; or: {}.",
            one.as_ref(),
            other.as_ref()
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{exercise::Exercise, prove::mutants};

    /// Wrong answers that get no name, for their figures are those of two others, or of the start of the exercise
    /// (05, 06, histogram). A judge that finds a record which CPUs share says so itself.
    const UNNAMED: [&str; 19] = [
        "04: all CPUs share one record in a hash map, changed in place",
        "04: all CPUs share one record in a hash map, which the last one replaces",
        "04: all CPUs share one record in an array",
        "04: all CPUs share three entries of an array",
        "05: all CPUs share one record in a hash map, changed in place",
        "05: all CPUs share one record in a hash map, which the last one replaces",
        "05: all CPUs share one record in an array",
        "05: sectors of 4 KiB",
        "06: the 10 innermost functions of a deep stack",
        "06: the stack of the application",
        "disk: no discards",
        "disk: reads only",
        "disk: what has failed is not measured",
        "histogram: one histogram for all disks",
        "retransmit: both ends have the address of one",
        "retransmit: every sender that is this machine has the address 127.0.0.1",
        "retransmit: the other side's port in the order of the network",
        "runqueue: forgets the threads that have ended",
        "runqueue: the first thread only",
    ];

    #[test]
    fn every_wrong_answer_is_taken_for_itself() {
        let workspace = workshop::workspace();
        let known = Mistakes::read(&workspace).unwrap();
        let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for exercise in Exercise::all(&workspace).unwrap() {
            all.insert(exercise.id, [START.to_owned()].into());
        }
        for wrong in mutants(&workspace).unwrap().wrong {
            let of_it = wrong.exercise.and_then(|exercise| all.get_mut(&exercise));
            of_it.map(|of_it| of_it.insert(wrong.what));
        }
        let mut unnamed = BTreeSet::new();
        for (exercise, all) in &all {
            let said = &known.said[exercise];
            assert!(
                said.keys().eq(all),
                "{exercise}: not all is noted, or too much: see prove --record"
            );
            for (what, said) in
                said.iter().flat_map(|(what, all)| all.iter().map(move |it| (what, it)))
            {
                assert!(
                    !said.contains(":  |"),
                    "{exercise}, {what}: a judge has no sentence for it"
                );
                assert!(known.alike(exercise, said).contains(&what.as_str()), "{exercise}, {said}");
                let named = known.of(exercise, said);
                assert!(named.is_empty() || named.contains(&what.as_str()), "{exercise}, {said}");
                if named.is_empty() && what != START {
                    unnamed.insert(format!("{exercise}: {what}"));
                }
            }
        }
        assert!(unnamed.iter().eq(UNNAMED), "{unnamed:#?}");
    }

    #[test]
    fn figures_may_differ_as_far_as_the_loads_do() {
        let why = |bios: u64, few: u64| {
            format!("process 5 (dd) did {bios} bios:  {few} too few\n  0x7f: x\n {few} split (y)\n")
        };
        let said = |bios, few| said("judge", &why(bios, few));
        assert_eq!(said(8, 2), "judge: process … (dd) did 8 bios | 2 too few | 2 split");
        let mut known = Mistakes::default();
        for (what, bios, few) in
            [("a", 66, 1), ("a", 74, 1), ("b", 66, 9), ("b", 82, 9), ("c", 66, 3), ("", 66, 0)]
        {
            known.note("03", what, said(bios, few));
        }
        assert_eq!(known.of("03", &said(74, 3)), ["c"]);
        assert_eq!(known.of("03", &said(130, 9)), ["b"]);
        for (bios, few) in [(66, 2), (660, 1), (66, 0)] {
            assert!(known.of("03", &said(bios, few)).is_empty(), "{bios}, {few}");
        }
        assert!(known.of("03", "judge: something else").is_empty());
        assert!(known.check("03", "a", &said(66, 3)).is_err());
        known.check("03", "a", &said(66, 5)).unwrap();
    }
}
