//! What a command line of `cargo truth` comes to: chosen once, in one place, and passed on.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Parser;
use truth::{Case, Family, RUNS, Tool};
use vm::arch::Arch;
use vm::run::{Run, named};
use workshop::fail::{MACHINE, USAGE, fail};

/// Compares our tools and others with outside judges: who prints what is true.
#[derive(Parser)]
#[command(name = "cargo truth", bin_name = "cargo truth")]
pub struct Options {
    /// The guest's architecture: the other tools come from packages for x86-64
    #[arg(long, hide = true, env = "VM_ARCH", value_enum)]
    pub arch: Option<Arch>,
    /// Kernel lines of x86-64: 6.1,7.2 [default: 6.1]
    #[arg(long, env = "VM_KERNEL", value_name = "LINE,…")]
    kernel: Option<String>,
    /// Only these cases, as in truth/cases.toml
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    case: Vec<String>,
    /// Only these tools, as in truth/tools.toml; or one of yours, which such a file declares: then the
    /// cells are printed, and bench/ stays as it is
    #[arg(long, value_name = "NAME|FILE.toml,…", value_delimiter = ',')]
    tool: Vec<String>,
    /// Print the cells of a tool of yours as JSON
    #[arg(long, requires = "tool", conflicts_with_all = ["missing", "render"])]
    json: bool,
    /// Write how many cells of a tool of yours are right to this file, as shields.io reads it
    #[arg(long, value_name = "FILE", requires = "tool", conflicts_with_all = ["missing", "render"])]
    badge: Option<PathBuf>,
    /// Only tools of these families
    #[arg(long, value_name = "FAMILY,…", value_delimiter = ',', conflicts_with = "tool")]
    family: Vec<String>,
    /// Run this one cell, print its commands and its verdict, and write nothing
    #[arg(long, value_name = "CASE/TOOL", conflicts_with_all = ["case", "tool", "family"])]
    reproduce: Option<String>,
    /// Only what an interrupted run left out: cells that truth/truth.json does not have, or has with too
    /// few runs
    #[arg(long, conflicts_with = "reproduce")]
    missing: bool,
    /// Run nothing: write the page and the picture of the cells in truth/truth.json again
    #[arg(long, conflicts_with_all = ["case", "tool", "family", "reproduce", "missing"])]
    pub render: bool,
    /// On the newest kernel line, which the page does not have: print what differs from the newest one that it
    /// has, functions and verdicts, as Markdown
    #[arg(long, conflicts_with_all = ["reproduce", "missing", "render", "json", "badge"])]
    next: bool,
    /// Fetch the newest version of each tool before
    #[arg(long, conflicts_with = "render")]
    newest: bool,
    /// How often a cell is judged: the worst of ours and yours counts, and the best of others [default:
    /// 3, and 1 with --reproduce or a tool of yours]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=20), allow_hyphen_values = true)]
    runs: Option<u32>,
}

/// What a comparison is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// All cells of the page.
    Page,
    /// Those cells of the page that are not known.
    Missing,
    /// One cell, with its commands.
    Cell,
    /// What a newer kernel changes.
    KernelDiff,
}

/// Which tools are compared, in which cases, on which kernels, and what for.
pub struct Comparison {
    /// Where all of it runs.
    pub run: Run,
    /// What it is for.
    pub purpose: Purpose,
    /// The cases.
    pub cases: Vec<Case>,
    /// All tools, each of which is asked in one of the cases at least.
    pub tools: Vec<Tool>,
    /// Those of the tools that the user declares.
    pub yours: Vec<Tool>,
    /// The names of the kernel lines.
    pub kernels: Vec<String>,
    /// How often a cell is judged.
    pub runs: u32,
    /// Whether each tool's newest version is fetched before.
    pub newest: bool,
    /// Whether the cells of a tool of yours are printed as JSON.
    pub json: bool,
    /// The file that says how many cells of a tool of yours are right.
    pub badge: Option<PathBuf>,
}

impl Comparison {
    /// What these options come to. An error where they do not fit together.
    pub fn choose(run: Run, options: Options) -> Result<Comparison> {
        if !run.arch.has_peers() {
            return Err(fail(
                MACHINE,
                "the other tools come from packages for x86-64, and so do the results in truth/: leave \
                 out --arch",
            ));
        }
        let (cases, tools) = chosen(&options)?;
        let yours: Vec<Tool> =
            tools.iter().filter(|tool| tool.family == Family::Yours).cloned().collect();
        check_yours(&options, !yours.is_empty())?;
        let purpose = options.purpose();
        let kernels = kernels(&run, purpose, options.kernel.as_deref())?;
        let usual_runs = if purpose != Purpose::Cell && yours.is_empty() { RUNS } else { 1 };
        Ok(Comparison {
            run,
            purpose,
            cases,
            tools,
            yours,
            kernels,
            runs: options.runs.unwrap_or(usual_runs),
            newest: options.newest,
            json: options.json,
            badge: options.badge,
        })
    }

    /// Whether the cells become a part of the page.
    pub fn is_kept(&self) -> bool {
        matches!(self.purpose, Purpose::Page | Purpose::Missing) && self.yours.is_empty()
    }
}

impl Options {
    fn purpose(&self) -> Purpose {
        match (self.reproduce.is_some(), self.missing, self.next) {
            (true, ..) => Purpose::Cell,
            (_, true, _) => Purpose::Missing,
            (.., true) => Purpose::KernelDiff,
            _ => Purpose::Page,
        }
    }
}

/// Whether the options are for tools of the comparison, or for one of yours.
fn check_yours(options: &Options, has_yours: bool) -> Result<()> {
    let message = match has_yours {
        false if options.json || options.badge.is_some() => {
            "--json and --badge are for a tool of yours: --tool FILE.toml"
        }
        true if options.missing => {
            "--missing is for the tools of the comparison: a tool of yours has no cells"
        }
        true if options.next => {
            "--next is for the tools of the comparison: a tool of yours has no cells"
        }
        _ => return Ok(()),
    };
    Err(fail(USAGE, message))
}

/// The kernel lines that `kernel` names.
fn kernels(run: &Run, purpose: Purpose, kernel: Option<&str>) -> Result<Vec<String>> {
    let kernels = match (purpose, named(kernel)) {
        (Purpose::KernelDiff, None) => vec![run.table.newest()?.name.clone()],
        (_, kernel) => run.table.names(kernel)?,
    };
    if purpose == Purpose::KernelDiff && kernels.len() > 1 {
        let message = "--next compares one kernel with the page's newest: name one line";
        return Err(fail(USAGE, message));
    }
    if purpose != Purpose::Cell {
        // The page has a place for these lines only.
        kernels.iter().try_for_each(|kernel| run.table.line(kernel).map(|_| ()))?;
    }
    Ok(kernels)
}

/// Fails where a name is that of no case, or of no tool and no file that declares one.
fn check_names(
    wanted_cases: &[String],
    wanted_tools: &[String],
    cases: &[Case],
    tools: &[Tool],
) -> Result<()> {
    let is_case = |name: &&String| cases.iter().any(|case| case.name == **name);
    if let Some(name) = wanted_cases.iter().find(|name| !is_case(name)) {
        return Err(fail(USAGE, format!("there is no case {name:?}: truth/cases.toml lists them")));
    }
    let is_tool =
        |name: &&String| name.ends_with(".toml") || tools.iter().any(|tool| tool.name == **name);
    if let Some(name) = wanted_tools.iter().find(|name| !is_tool(name)) {
        let message = format!(
            "there is no tool {name:?}: truth/tools.toml lists them, and a tool of yours is declared in a \
             file, FILE.toml: see docs/truth-for-yours.md"
        );
        return Err(fail(USAGE, message));
    }
    Ok(())
}

/// The cases and tools that the options name.
fn chosen(options: &Options) -> Result<(Vec<Case>, Vec<Tool>)> {
    let (wanted_cases, wanted_tools) = match options.reproduce.as_deref().map(|c| c.split_once('/'))
    {
        None => (options.case.clone(), options.tool.clone()),
        Some(Some((case, tool))) => (vec![case.to_owned()], vec![tool.to_owned()]),
        Some(None) => {
            return Err(fail(USAGE, "a cell is a case and a tool: threads_16/biolatency"));
        }
    };
    let is_in = |names: &[String], name: &str| names.is_empty() || names.iter().any(|n| n == name);
    let (mut cases, mut tools) = (truth::cases()?, truth::tools()?);
    check_names(&wanted_cases, &wanted_tools, &cases, &tools)?;
    cases.retain(|case| is_in(&wanted_cases, &case.name));
    let is_known = |name: &str| tools.iter().any(|tool| tool.name == *name);
    let mut yours = Vec::new();
    for file in wanted_tools.iter().filter(|name| name.ends_with(".toml")) {
        let tool =
            truth::yours(Path::new(file)).map_err(|error| fail(USAGE, format!("{error:#}")))?;
        if is_known(&tool.name) {
            let message =
                format!("{file}: the comparison has a tool {:?}: choose another name", tool.name);
            return Err(fail(USAGE, message));
        }
        yours.push(tool);
    }
    tools.retain(|tool| {
        is_in(&wanted_tools, &tool.name) && is_in(&options.family, tool.family.name())
    });
    tools.extend(yours);
    if tools.is_empty() {
        let families = options.family.join(", ");
        let message = format!("no tool is of the family {families}: truth/tools.toml lists them");
        return Err(fail(USAGE, message));
    }
    tools.retain(|tool| cases.iter().any(|case| tool.is_asked(case)));
    if tools.is_empty() {
        return Err(fail(USAGE, "such a tool answers no such case: TRUTH.md has no cell for them"));
    }
    Ok((cases, tools))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_none_is_said() {
        let (cases, tools) = (truth::cases().unwrap(), truth::tools().unwrap());
        let said = |case: &[&str], tool: &[&str]| {
            let [case, tool] = [case, tool].map(|names| -> Vec<String> {
                names.iter().map(|name| (*name).to_owned()).collect()
            });
            check_names(&case, &tool, &cases, &tools).err().map(|error| format!("{error:#}"))
        };
        let known = (cases[0].name.as_str(), tools[0].name.as_str());
        assert_eq!(said(&[known.0], &[known.1, "mine.toml"]), None);
        let tool = said(&[], &[known.1, "."]).unwrap();
        assert!(tool.contains("there is no tool \".\"") && tool.contains("FILE.toml"), "{tool}");
        assert!(said(&["."], &[known.1]).unwrap().contains("there is no case \".\""));
    }
}
