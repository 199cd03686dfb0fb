//! The experiments of the READMEs ("Break it") and of one page: edits of a program, and what the text says that
//! there is to see then.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use regex_lite::Regex;
use workshop::{stages, tools};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Experiment {
    /// The directory of the stage or tool.
    pub stage: String,
    /// The commands, with those of earlier experiments that are not undone yet.
    pub edits: String,
    /// The block that comes next: what the README says that there is to see.
    pub promised: String,
    /// Lines of the verifier's log, where a block shows them.
    pub log: Vec<String>,
}

/// The page that reads logs of the verifier, of programs that it has the reader edit.
const LOGS: &str = "docs/look-inside.md";

/// Whether a program's message has these lines of a README.
pub fn is_shown(said: &str, lines: &[String]) -> Result<()> {
    // But for the number of a type in the object, the release of the kernel, and which register it is: the
    // compiler's choice, and READMEs show the default kernel's.
    let left_out = Regex::new(r"\[\d*\]|(this kernel) \([^)]*\)|\b([Rr])\d+(_w)?\b")?;
    let bare = |text: &str| {
        let words: Vec<&str> = text.split_whitespace().collect();
        left_out.replace_all(&words.join(" "), "$1$2").into_owned()
    };
    let said: Vec<String> = said.lines().map(bare).collect();
    for line in lines {
        // `…` stands for what differs from boot to boot.
        let words = bare(line);
        let has_them = |of: &str| {
            words.split('…').try_fold(of, |rest, words| Some(rest.split_once(words)?.1)).is_some()
        };
        let is_said = said.iter().any(|of| has_them(of));
        ensure!(is_said, "it does not say {line:?}, but:\n{}", said.join("\n"));
    }
    Ok(())
}

/// Whether a block shows what the verifier noted, instruction by instruction.
fn is_log(block: &str) -> bool {
    let is_instruction = |line: &str| {
        let number = line.split_once(": (").map_or("", |(number, _)| number);
        !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
    };
    block.lines().any(is_instruction)
}

pub fn experiments(workspace: &Path) -> Result<Vec<Experiment>> {
    let mut experiments = Vec::new();
    for stage in stages(workspace)?.into_iter().chain(tools(workspace)?) {
        let readme = fs::read_to_string(workspace.join(&stage).join("README.md"))?;
        experiments.extend(of_readme(&stage, &readme));
    }
    let page = fs::read_to_string(workspace.join(LOGS)).context(LOGS)?;
    for experiment in of_readme("", &page) {
        // `sed -i COMMAND stage03_latency_map/src/trace.bpf.c`
        let file = experiment.edits.split_whitespace().last().unwrap_or_default();
        let stage = file.split('/').next().unwrap_or_default().to_owned();
        ensure!(!experiment.log.is_empty(), "{LOGS}: no log below {}", experiment.edits);
        experiments.push(Experiment { stage, ..experiment });
    }
    Ok(experiments)
}

fn of_readme(stage: &str, readme: &str) -> Vec<Experiment> {
    let mut experiments: Vec<Experiment> = Vec::new();
    let mut edits = String::new();
    // Every second piece is a block of code.
    for block in readme.split("\n```").skip(1).step_by(2) {
        let block = block.split_once('\n').map_or("", |(_, block)| block);
        let commands = commands(block);
        if block.contains("git restore") {
            edits.clear();
        } else if !commands.is_empty() {
            edits += &commands;
            let (stage, edits) = (stage.to_owned(), edits.clone());
            experiments.push(Experiment { stage, edits, promised: String::new(), log: Vec::new() });
        } else if is_log(block) && !edits.is_empty() {
            let log = experiments.last_mut().map(|last| &mut last.log);
            log.into_iter().for_each(|log| log.extend(block.lines().map(str::to_owned)));
        } else if let Some(last) = experiments.last_mut().filter(|last| last.promised.is_empty()) {
            last.promised = block.to_owned();
        }
    }
    experiments
}

/// The `sed` commands of a block, with their continuation lines.
fn commands(block: &str) -> String {
    let mut commands = String::new();
    let mut continues = false;
    for line in block.lines() {
        if continues || line.starts_with("sed -i") {
            commands += &format!("{line}\n");
            continues = line.ends_with('\\');
        }
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::*;
    use workshop::workspace;

    #[test]
    fn experiments_are_cumulative_until_they_are_undone() {
        let readme = "# x\n```\nsed -i a f\nrun\n```\nthen\n```\nerror 1\n```\n```\nsed -i b \\\n  g\n```\n\
                      ```\nerror 2\n```\n```\ngit restore f\n```\n```\nsed -i c h\n```\n```\nseen\n```\n";
        let expected = [
            ("sed -i a f\n", "error 1"),
            ("sed -i a f\nsed -i b \\\n  g\n", "error 2"),
            ("sed -i c h\n", "seen"),
        ];
        let found = of_readme("stage01_x", readme);
        let found: Vec<_> = found.iter().map(|e| (e.edits.as_str(), e.promised.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn a_log_of_the_verifier_is_no_message() {
        let readme = "# x\n```\nsed -i a f\n```\n```\nx: the verifier rejects y()\n```\nIts log:\n```\n\
                      0: R1=ctx(off=0)\n12: (79) r1 = *(u64 *)(r0 +0)\n```\n```\ngit restore f\n```\n";
        let found = of_readme("stage01_x", readme);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].promised, "x: the verifier rejects y()");
        assert_eq!(found[0].log, ["0: R1=ctx(off=0)", "12: (79) r1 = *(u64 *)(r0 +0)"]);
        let shown =
            |line: &str| is_shown("4: (18) r1 = 0xff18 ; R1_w=map\nend", &[line.to_owned()]);
        assert!(shown("4: (18) r2 = 0x… ; R2=map").is_ok() && shown("= 0x… ; R1_w=fp").is_err());
        assert!(shown("R1_w=map…end").is_err(), "of one line");
    }

    #[test]
    fn every_experiment_of_the_readmes_is_found() {
        let experiments = experiments(&workspace()).unwrap();
        assert!(experiments.len() >= 12, "{} experiments", experiments.len());
    }
}
