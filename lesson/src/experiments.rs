//! The experiments of the READMEs ("Break it"): edits of a program, and what the README says that there is
//! to see then.

use std::{fs, path::Path};

use anyhow::{Result, ensure};
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
}

/// Whether a program's message has these lines of a README.
pub fn is_shown(said: &str, lines: &[String]) -> Result<()> {
    // But for the number of a type in the object, the release of the kernel, and which register it is: the
    // compiler's choice, and READMEs show the default kernel's.
    let left_out = Regex::new(r"\[\d*\]|(this kernel) \([^)]*\)|\b(R)\d+\b")?;
    let bare = |text: &str| left_out.replace_all(text, "$1$2").into_owned();
    let said = bare(said);
    for line in lines {
        ensure!(said.contains(&bare(line)), "it does not say {line:?}, but:\n{said}");
    }
    Ok(())
}

pub fn experiments(workspace: &Path) -> Result<Vec<Experiment>> {
    let mut experiments = Vec::new();
    for stage in stages(workspace)?.into_iter().chain(tools(workspace)?) {
        let readme = fs::read_to_string(workspace.join(&stage).join("README.md"))?;
        experiments.extend(of_readme(&stage, &readme));
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
            experiments.push(Experiment { stage, edits, promised: String::new() });
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
    fn every_experiment_of_the_readmes_is_found() {
        let experiments = experiments(&workspace()).unwrap();
        assert!(experiments.len() >= 12, "{} experiments", experiments.len());
    }
}
