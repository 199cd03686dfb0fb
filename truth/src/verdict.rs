//! What a tool printed, beside what is true.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::{Family, Question, Tool};

/// How the reason begins if a tool never gets ready, which is so in each case.
pub const NOT_READY: &str = "it was not ready";

/// What is true, as an outside judge says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// Of what.
    pub question: Question,
    /// The figure.
    pub expected: Expected,
    /// What other processes may add, for a tool that counts theirs, too.
    pub others: u64,
    /// How many of them the driver got once more, for a tool that counts what it gets.
    pub again: u64,
    /// How many of them a lesson may leave out.
    pub left_out: u64,
    /// How many of them a lesson leaves out at least.
    pub min_left_out: u64,
}

/// The figures that are right, both included. They differ where the judge does not know better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// The smallest.
    pub least: u64,
    /// The largest.
    pub most: u64,
}

/// The outcome of a case for a tool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "verdict")]
pub enum Verdict {
    /// It answers none of the case's questions.
    NotAsked,
    /// Every figure is right.
    Right,
    /// A count is too small, and the tool says so: it admits at least as many as are missing.
    Admitted {
        /// What is wrong.
        question: Question,
        /// What it printed.
        printed: Expected,
        /// What is true.
        expected: Expected,
    },
    /// A figure is wrong, or absent.
    Wrong {
        /// Which one.
        question: Question,
        /// What it printed, if anything.
        printed: Option<Expected>,
        /// What is true.
        expected: Expected,
    },
    /// It ended without an answer, or never got ready: what it said.
    Refused {
        /// The last line, or the exit status.
        said: String,
    },
    /// It hung, flooded, or killed the guest: how. Nothing else is known of that cell.
    Broke {
        /// What it did.
        how: String,
    },
    /// The case could not be set up on this kernel, or the tool ran out of time.
    NotRun {
        /// Why.
        why: String,
    },
}

impl Expected {
    /// One figure.
    pub fn exactly(figure: u64) -> Expected {
        Expected { least: figure, most: figure }
    }

    fn meets(self, other: Expected) -> bool {
        self.least <= other.most && other.least <= self.most
    }
}

impl Verdict {
    /// Whether the tool did not start, as in each other case.
    pub fn is_of_start(&self) -> bool {
        match self {
            Verdict::Refused { .. } => true,
            Verdict::Broke { how } => how.starts_with(NOT_READY),
            _ => false,
        }
    }

    /// Whether another run of the tool changes nothing: one right run is enough for others, and what hangs
    /// does so for minutes.
    pub fn is_final(&self, tool: &Tool) -> bool {
        match self {
            Verdict::Right => !tool.is_strict(),
            Verdict::Broke { .. } => true,
            _ => false,
        }
    }

    /// How bad it is: for the worst or the best of several.
    pub fn rank(&self) -> (u8, u64) {
        match self {
            Verdict::NotAsked => (0, 0),
            Verdict::Right => (1, 0),
            Verdict::Admitted { printed, expected, .. } => {
                (2, printed.least.abs_diff(expected.least))
            }
            Verdict::Wrong { printed: Some(printed), expected, .. } => {
                (3, printed.least.abs_diff(expected.least))
            }
            Verdict::Wrong { printed: None, .. } => (4, 0),
            Verdict::Refused { .. } => (5, 0),
            Verdict::Broke { .. } => (5, 1),
            Verdict::NotRun { .. } => (6, 0),
        }
    }
}

impl Fact {
    /// One figure is right.
    pub fn exactly(question: Question, figure: u64) -> Fact {
        Fact::between(question, figure, figure)
    }

    /// Every figure from `least` to `most` is.
    pub fn between(question: Question, least: u64, most: u64) -> Fact {
        Fact {
            question,
            expected: Expected { least, most },
            others: 0,
            again: 0,
            left_out: 0,
            min_left_out: 0,
        }
    }

    /// This fact, of which other processes did so much at most.
    pub fn with_others(self, others: u64) -> Fact {
        Fact { others, ..self }
    }

    /// This fact, of which a lesson may leave out so many, and leaves out so many at least.
    pub fn with_left_out(self, left_out: u64, min_left_out: u64) -> Fact {
        Fact { left_out, min_left_out, ..self }
    }

    /// This fact, with so many requests that were handed to the driver once more.
    pub fn with_again(self, again: u64) -> Fact {
        Fact { again, ..self }
    }
}

/// What is true of several loads that ran one after the other. Each has to answer the questions of the
/// others whose answers add up. Of the slowest I/Os, only the least time is known: in a busy machine, any may be
/// slower.
pub fn together(loads: &[(String, Vec<Fact>)]) -> Result<Vec<Fact>> {
    let mut all: Vec<Fact> = Vec::new();
    let is_slowest = |question| matches!(question, Question::SlowestBio | Question::SlowestRequest);
    for (number, (name, facts)) in loads.iter().enumerate() {
        for fact in facts {
            let so_far = all.iter_mut().find(|so_far| so_far.question == fact.question);
            match so_far {
                None if number > 0 && fact.question.adds_up() => {
                    bail!(
                        "{name} says {:?}, and the loads of its group before it do not",
                        fact.question
                    )
                }
                None => all.push(*fact),
                Some(so_far) if fact.question.adds_up() => {
                    so_far.expected.least += fact.expected.least;
                    so_far.expected.most += fact.expected.most;
                    so_far.others += fact.others;
                    so_far.again += fact.again;
                    so_far.left_out += fact.left_out;
                    so_far.min_left_out += fact.min_left_out;
                }
                Some(so_far) => {
                    let question = fact.question;
                    if !is_slowest(question) {
                        bail!("{name}: {question:?} of several loads has no meaning");
                    }
                    so_far.expected.least = so_far.expected.least.max(fact.expected.least);
                }
            }
        }
        let silent = all.iter().find(|so_far| {
            so_far.question.adds_up() && !facts.iter().any(|fact| fact.question == so_far.question)
        });
        if let Some(silent) = silent {
            bail!("{name} does not say {:?}, as other loads of its group do", silent.question);
        }
    }
    if loads.len() > 1 {
        for fact in all.iter_mut().filter(|fact| is_slowest(fact.question)) {
            fact.expected.most = u64::MAX;
        }
    }
    Ok(all)
}

/// Whether a tool has printed a word of an error or of a loss, of which its user learns that a figure
/// may be wrong.
pub fn warns(tool: &Tool, output: &str) -> Result<bool> {
    let admitted = tool.admits.as_ref().map(|admits| admits.read(output)).transpose()?.flatten();
    if tool.family == Family::Ours || admitted.is_some_and(|sum| sum.least > 0) {
        return Ok(admitted.is_some_and(|sum| sum.least > 0));
    }
    // What bpftrace says of a script's text, it says in each run.
    let mut lines = output.lines().filter(|line| !line.contains(".bt:")).map(str::to_lowercase);
    const WORDS: [&str; 6] = ["error", "warn", "fail", "lost", "skipped", "missed"];
    Ok(lines.any(|line| WORDS.iter().any(|word| line.contains(word))))
}

/// Judges what a tool has printed. The first wrong figure decides.
pub fn judge(tool: &Tool, facts: &[Fact], output: &str) -> Result<Verdict> {
    let mut verdict = Verdict::NotAsked;
    for &Fact { question, mut expected, others, again, .. } in facts {
        if tool.system_wide {
            expected.most += others;
        }
        if tool.counts_mappings {
            expected.most = u64::MAX;
        }
        if tool.at_issue {
            expected.most += again;
        }
        let Some(answer) = tool.answers.get(&question) else { continue };
        let printed = tool.figure(answer, output)?;
        if printed.is_some_and(|figure| figure.meets(expected)) {
            if verdict == Verdict::NotAsked {
                verdict = Verdict::Right;
            }
            continue;
        }
        let admitted = match &tool.admits {
            Some(admits) => admits.read(output)?.map_or(0, |figure| figure.least),
            None => 0,
        };
        let missing = |printed: Expected| expected.least.saturating_sub(printed.most);
        match printed {
            Some(printed) if (1..=admitted).contains(&missing(printed)) => {
                verdict = Verdict::Admitted { question, printed, expected };
            }
            _ => return Ok(Verdict::Wrong { question, printed, expected }),
        }
    }
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOL: &str = r#"
        name = "t"
        family = "ours"
        argv = ["t"]
        ready = "r"
        answers.requests = { how = "sum", lines = '(\d+) requests' }
        answers.hits = { how = "max", lines = '(\d+) hits' }
        admits = { how = "sum", lines = '(\d+) dropped' }
    "#;

    #[test]
    fn a_figure_is_right_wrong_or_admitted() {
        let tool: Tool = toml::from_str(TOOL).unwrap();
        let facts = [Fact::exactly(Question::Requests, 10)];
        let of = |output| judge(&tool, &facts, output).unwrap();
        assert_eq!(of("10 requests"), Verdict::Right);
        let expected = Expected { least: 10, most: 10 };
        let question = Question::Requests;
        let wrong = |printed| Verdict::Wrong {
            question,
            printed: Some(Expected::exactly(printed)),
            expected,
        };
        assert_eq!(of("9 requests, 0 dropped"), wrong(9));
        assert_eq!(of("8 requests, 1 dropped"), wrong(8));
        assert_eq!(of("11 requests, 1 dropped"), wrong(11));
        assert_eq!(
            of("9 requests, 1 dropped"),
            Verdict::Admitted { question, printed: Expected::exactly(9), expected }
        );
        assert!(warns(&tool, "9 requests, 1 dropped").unwrap());
        assert!(!warns(&tool, "9 requests, 0 dropped").unwrap());
        let peer = Tool { family: Family::Bpftrace, ..tool.clone() };
        assert!(warns(&peer, "9 requests\nWARNING: no BTF").unwrap());
        assert!(!warns(&peer, "9 requests").unwrap());
        assert!(!warns(&peer, "t.bt:26:3-30: WARNING: Return value discarded.").unwrap());
        let facts = [Fact::exactly(Question::Bios, 1)];
        assert_eq!(judge(&tool, &facts, "").unwrap(), Verdict::NotAsked);
        let facts = [Fact::between(Question::Hits, 1, 2)];
        let absent = Verdict::Wrong {
            question: Question::Hits,
            printed: None,
            expected: Expected { least: 1, most: 2 },
        };
        assert_eq!(judge(&tool, &facts, "").unwrap(), absent);
        assert_eq!(judge(&tool, &facts, "2 hits").unwrap(), Verdict::Right);
        let too_many = judge(&tool, &facts, "3 hits").unwrap();
        assert!(matches!(too_many, Verdict::Wrong { .. }), "{too_many:?}");
        let system_wide = Tool { counts_mappings: true, ..tool.clone() };
        assert_eq!(judge(&system_wide, &facts, "3 hits").unwrap(), Verdict::Right);
        let again = [Fact::exactly(Question::Hits, 2).with_again(1)];
        let at_issue = Tool { at_issue: true, ..tool.clone() };
        assert_eq!(judge(&at_issue, &again, "3 hits").unwrap(), Verdict::Right);
    }
}
