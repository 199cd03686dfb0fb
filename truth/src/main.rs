//! `cargo truth`: our tools and others beside outside judges, in the guest.
//!
//! The others' user space is a root file system of its own in the cache, made of Debian's packages. The
//! library says which tools and cases there are; the guest tests' program runs them.

mod next;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::next::Next;
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use rustix::fs::FlockOperation;
use truth::{Badge, Case, Cell, Family, PLAN, Plan, RUNS, Report, Score, Tool, Verdict};
use vm::arch::Arch;
use vm::cargo::follow::{at_once, follow, workers};
use vm::cargo::{GUEST, build, build_all};
use vm::commands::test::in_guest;
use vm::fetch::rootfs::{self, Rootfs};
use vm::run::{For, Run, named};
use workshop::fail::{MACHINE, USAGE, fail};
use workshop::judging::Judging;
use workshop::say;

/// What is written.
const MARKDOWN: &str = "truth/TRUTH.md";
const PICTURE: &str = "truth/truth.svg";
const JSON: &str = "truth/truth.json";
/// The part of the Markdown that is written by hand ends with this line.
const GENERATED: &str = "<!-- cargo truth writes what follows -->\n";
/// How long a cell may take.
const LIMIT: Duration = Duration::from_secs(1200);
/// The same with a tool of yours, whose start takes at most 400 s.
const LIMIT_OF_YOURS: Duration = Duration::from_secs(600);
/// After so many guests that died one after the other, a tool is not run again.
const DEATHS: usize = 3;

/// The root file systems that `tools.toml` names.
const ROOTFS: [(&str, &str); 2] = [
    ("sid", include_str!("../rootfs-sid.toml")),
    ("bookworm", include_str!("../rootfs-bookworm.toml")),
];

/// Compares our tools and others with outside judges: who prints what is true.
#[derive(Parser)]
#[command(name = "cargo truth", bin_name = "cargo truth")]
struct Options {
    /// The guest's architecture: the other tools come from packages for x86-64
    #[arg(long, hide = true, env = "VM_ARCH", value_enum)]
    arch: Option<Arch>,
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
    render: bool,
    /// On the newest kernel line, which the page does not have: print what differs from the newest one that it
    /// has, functions and verdicts, as Markdown
    #[arg(long, conflicts_with_all = ["reproduce", "missing", "render", "json", "badge"])]
    next: bool,
    /// Fetch the newest version of each tool before
    #[arg(long, conflicts_with = "render")]
    newest: bool,
    /// How often a cell is judged: the worst of ours and yours counts, and the best of others [default:
    /// 3, and 1 with --reproduce or a tool of yours]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=20))]
    runs: Option<u32>,
}

fn main() {
    let options = Options::parse();
    vm::commands::main(true, || compare(&options))
}

/// Runs the command. Returns the exit code: 1 where a tool of ours is wrong or was not judged, where one of
/// yours is wrong, or where a guest failed.
fn compare(options: &Options) -> Result<i32> {
    let run = Run::new(options.arch)?;
    let workspace = run.workspace();
    if options.render {
        let _lock = lock(workspace)?;
        return write(workspace, &read(workspace)?).map(|()| 0);
    }
    if !run.arch.has_peers() {
        return Err(fail(
            MACHINE,
            "the other tools come from packages for x86-64, and so do the results in bench/: leave out \
             --arch",
        ));
    }
    let (cases, tools) = chosen(options)?;
    let yours: Vec<Tool> =
        tools.iter().filter(|tool| tool.family == Family::Yours).cloned().collect();
    if yours.is_empty() && (options.json || options.badge.is_some()) {
        return Err(fail(USAGE, "--json and --badge are for a tool of yours: --tool FILE.toml"));
    }
    if options.missing && !yours.is_empty() {
        return Err(fail(
            USAGE,
            "--missing is for the tools of the comparison: a tool of yours has no cells",
        ));
    }
    if options.next && !yours.is_empty() {
        let message = "--next is for the tools of the comparison: a tool of yours has no cells";
        return Err(fail(USAGE, message));
    }
    let kernels = match (options.next, named(options.kernel.as_deref())) {
        (true, None) => vec![run.table.newest()?.name.clone()],
        (_, kernel) => run.table.names(kernel)?,
    };
    if options.next && kernels.len() > 1 {
        return Err(fail(
            USAGE,
            "--next compares one kernel with the page's newest: name one line",
        ));
    }
    if options.reproduce.is_none() {
        // The page has a place for these lines only.
        kernels.iter().try_for_each(|kernel| run.table.line(kernel).map(|_| ()))?;
    }
    run.need_packages(For::Test)?;
    // Built as `cargo vm test` does: what it has built is not built again.
    let guest = build(&run.cargo, &["test", "--workspace", "--no-run"], GUEST)?;
    build_all(&run.cargo)?;
    let launcher = build(&run.cargo, &["build", "--package", "vm", "--bin", "vm"], "vm")?;
    let page = if options.next { read(workspace)? } else { Report::default() };
    let before = page.newest().unwrap_or_default();
    let functions = match options.next {
        true => Some([
            next::functions(&run, &launcher, before)?,
            next::functions(&run, &launcher, &kernels[0])?,
        ]),
        false => None,
    };
    let rootfs = rootfs_of(&run, &tools, options.newest)?;
    let plan = Plan {
        cells: Vec::new(),
        runs: options.runs.unwrap_or(match options.reproduce {
            None if yours.is_empty() => RUNS,
            _ => 1,
        }),
        rootfs,
        headers: None,
        yours: yours.clone(),
        shows: options.reproduce.is_some(),
    };
    // What a single cell shows is for people: guests take turns.
    let workers = if plan.shows { 1 } else { workers() };
    let mut jobs = Vec::new();
    let mut known = match options.missing {
        true => {
            let _lock = lock(workspace)?;
            read(workspace)?
        }
        false => Report::default(),
    };
    for kernel in &kernels {
        if options.missing {
            // What was judged on another release, or another version, is missing.
            let release = run.table.kernel(kernel)?.release;
            for tool in &tools {
                known.judged_on(kernel, &release, tool, version(&plan, tool).as_deref());
            }
        }
        let headers = match tools.iter().any(Tool::needs_headers) {
            true => headers(&run, kernel)?,
            false => None,
        };
        // Without its headers, none of bcc's tools says anything of a kernel. A script of yours may not
        // need them.
        let can_run = |tool: &Tool| tool.family != Family::Bcc || headers.is_some();
        if !tools.iter().any(can_run) {
            continue;
        }
        let is_wanted = |case: &Case, tool: &Tool| {
            let is_known = known.is_known(kernel, case, tool, plan.runs);
            tool.is_asked(case) && can_run(tool) && !is_known
        };
        let parts = parts(&cases, &tools, workers, is_wanted);
        if parts.is_empty() {
            say!("{kernel}: {JSON} has all of these cells");
        }
        for cells in parts {
            jobs.push((kernel.as_str(), Plan { cells, headers: headers.clone(), ..plan.clone() }));
        }
    }
    ensure!(!jobs.is_empty() || options.missing, "no cell was judged, see above");
    // What this run finds; the files keep what was found before, too.
    let results = Mutex::new((Report::default(), Vec::new()));
    let take = |kernel: &str, release: &str, cell: Cell| {
        let what = format!("{kernel}, {}, {}", cell.case, cell.tool);
        let why = match &cell.verdict {
            Verdict::NotRun { why } => format!(": {why}"),
            _ => String::new(),
        };
        say!("{what}: {}{why}", truth::shown(&cell));
        let tool = tools.iter().find(|tool| tool.name == cell.tool);
        let tool = tool.with_context(|| format!("the guest judged {what}"))?;
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        let (found, not_judged) = &mut *results;
        if !why.is_empty() && tool.family == Family::Ours {
            not_judged.push(format!("{what}{why}"));
        }
        found.releases.insert(kernel.to_owned(), release.to_owned());
        found.add(kernel, cell.clone());
        if plan.shows || options.next || !plan.yours.is_empty() {
            return Ok(());
        }
        let _lock = lock(workspace)?;
        let mut report = read(workspace)?;
        report.judged_on(kernel, release, tool, version(&plan, tool).as_deref());
        report.add(kernel, cell);
        write(workspace, &report)
    };
    // Each cell is written when it is known: what runs long may be ended at any time.
    let failed = at_once(workers, &jobs, |(kernel, plan)| {
        judge_all(&run, &launcher, &guest, kernel, plan, |release, cell| {
            take(kernel, release, cell)
        })
    });
    let (found, not_judged) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    if options.reproduce.is_some() {
        let (case, tool) = (&cases[0], &tools[0]);
        println!("tool:  {}", tool.argv.join(" "));
        println!("load:  {} (tests/guest/table/loads.rs, {}())", case.load, case.name);
        println!("judge: {}", case.judge);
        for cell in found.cells(&case.name, &tool.name) {
            println!("{cell}");
        }
    } else if !yours.is_empty() {
        let mut text = String::new();
        for tool in &tools {
            for score in Score::of(&found, &cases, tool) {
                text += &format!("{}\n{}\n", tool.name, score.text());
            }
        }
        match options.json {
            true => {
                text.lines().for_each(|line| say!("{line}"));
                println!("{}", truth::json(&found, &cases, &yours)?);
            }
            false => print!("{text}"),
        }
    } else if let Some(functions) = functions {
        let names = next::names(workspace)?;
        let reports = [&page, &found];
        let next = Next { kernels: [before, &kernels[0]], functions, names, reports };
        print!("{}", next.markdown(&cases, &tools)?);
    } else if !found.kernels.is_empty() {
        say!("{MARKDOWN}, {PICTURE} and {JSON} are written");
    }
    let scores = yours.iter().flat_map(|tool| Score::of(&found, &cases, tool));
    let scores: Vec<Score> = scores.collect();
    if let Some(file) = &options.badge {
        workshop::write(file, &(serde_json::to_string(&Badge::of(&scores))? + "\n"))?;
    }
    let is_wrong = scores.iter().any(Score::is_wrong);
    let wrong = found.wrong_of_ours()?;
    wrong.iter().for_each(|line| say!("wrong: {line}"));
    not_judged.iter().for_each(|line| say!("a tool of ours was not judged: {line}"));
    failed.iter().for_each(|error| say!("cells were not judged: {error:#}"));
    Ok(i32::from(is_wrong || !(wrong.is_empty() && not_judged.is_empty() && failed.is_empty())))
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
    if tools.is_empty() || cases.is_empty() {
        let message =
            "there is no such case or tool: truth/cases.toml and truth/tools.toml list them";
        return Err(fail(USAGE, message));
    }
    tools.retain(|tool| cases.iter().any(|case| tool.is_asked(case)));
    if tools.is_empty() {
        return Err(fail(USAGE, "such a tool answers no such case: TRUTH.md has no cell for them"));
    }
    Ok((cases, tools))
}

/// The wanted cells, in as many parts as guests run at once. Neighbours in a row or a column of the table
/// are in different parts: some cases take long beside all tools, and some tools in all cases.
fn parts(
    cases: &[Case],
    tools: &[Tool],
    parts: usize,
    wanted: impl Fn(&Case, &Tool) -> bool,
) -> Vec<Vec<(String, String)>> {
    let mut cells = vec![Vec::new(); parts];
    for (row, case) in cases.iter().enumerate() {
        for tool in tools.iter().filter(|tool| wanted(case, tool)) {
            let order = (0..parts).map(|part| (row + part) % parts);
            let shortest = order.min_by_key(|&part| cells[part].len()).unwrap_or(0);
            cells[shortest].push((case.name.clone(), tool.name.clone()));
        }
    }
    cells.retain(|part| !part.is_empty());
    cells
}

/// The root file systems that these tools need, by name; `newest`: made anew.
fn rootfs_of(run: &Run, tools: &[Tool], newest: bool) -> Result<BTreeMap<String, PathBuf>> {
    let names: BTreeSet<&str> = tools.iter().filter_map(|tool| tool.rootfs.as_deref()).collect();
    let made = |name: &str| {
        let found = ROOTFS.iter().find(|(known, _)| *known == name);
        let (_, text) = found.with_context(|| format!("truth/tools.toml: there is no {name}"))?;
        let rootfs = Rootfs::parse(text)?;
        if newest {
            rootfs.remove(&run.cache)?;
        }
        Ok((name.to_owned(), rootfs.get(&run.source, &run.cache)?))
    };
    names.into_iter().map(made).collect()
}

/// The version of a tool's package there. None for ours.
fn version(plan: &Plan, tool: &Tool) -> Option<String> {
    rootfs::version(plan.rootfs.get(tool.rootfs.as_ref()?)?, tool.package.as_ref()?)
}

/// The headers of a kernel line, for bcc's tools.
fn headers(run: &Run, kernel: &str) -> Result<Option<PathBuf>> {
    let Ok(line) = run.table.line(kernel) else {
        say!("{kernel} is no kernel line, so there are no headers of it, which bcc's tools need");
        return Ok(None);
    };
    rootfs::headers(line, &run.table.kernel(kernel)?.release, &run.source, &run.cache)
}

/// Boots a guest that judges the cells, and hands over each. Where the guest dies, what ran in it is the first
/// cell without a verdict: the others are judged in another guest.
fn judge_all(
    run: &Run,
    launcher: &Path,
    guest: &Path,
    kernel: &str,
    plan: &Plan,
    on_cell: impl Fn(&str, Cell) -> Result<()>,
) -> Result<()> {
    let (mut plan, mut deaths, mut release) = (plan.clone(), 0, String::new());
    while !plan.cells.is_empty() {
        let mut judged = 0;
        let ended = judge(run, launcher, guest, kernel, &plan, |of, cell| {
            judged += 1;
            release = of.to_owned();
            on_cell(of, cell)
        });
        plan.cells.drain(..judged.min(plan.cells.len()));
        let Err(error) = ended else { return Ok(()) };
        let died = error.downcast::<Died>()?;
        let Some((_, name)) = plan.cells.first().cloned() else { return Err(died.into()) };
        deaths = if judged == 0 { deaths + 1 } else { 1 };
        release.clone_from(&died.release);
        let is_yours = plan.yours.iter().any(|tool| tool.name == name);
        let how = format!("the guest died while it ran: {}", died.how);
        let verdict = |how| match is_yours {
            true => Verdict::Broke { how },
            // Of a package that many use, the emulation is the likelier reason.
            false => Verdict::NotRun { why: how },
        };
        let lost = |(case, tool): (String, String), how: String| {
            let verdict = verdict(how);
            Cell { case, tool, verdict, skipped: 0, runs: 1, exit: None, silent: false }
        };
        on_cell(&release, lost(plan.cells.remove(0), how))?;
        if deaths == DEATHS {
            for cell in std::mem::take(&mut plan.cells) {
                let how = format!("not run: {DEATHS} guests died before, one after the other");
                on_cell(&release, lost(cell, how))?;
            }
        }
    }
    Ok(())
}

/// A guest that had begun to judge, and died.
#[derive(Debug)]
struct Died {
    release: String,
    how: String,
}

impl std::fmt::Display for Died {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the guest died: {}", self.how)
    }
}

impl std::error::Error for Died {}

/// Boots a guest that judges the cells, and hands over each.
fn judge(
    run: &Run,
    launcher: &Path,
    guest: &Path,
    kernel: &str,
    plan: &Plan,
    mut on_cell: impl FnMut(&str, Cell) -> Result<()>,
) -> Result<()> {
    let mut command = in_guest(run, launcher, guest, kernel);
    command.current_dir(run.workspace());
    command.envs([Judging::by(guest, run.workspace()).to_env()?]);
    command.env(PLAN, serde_json::to_string(plan)?);
    let (mut taken, mut release) = (Ok(()), String::new());
    let limit = if plan.yours.is_empty() { LIMIT } else { LIMIT_OF_YOURS };
    let (success, how) = follow(command, limit, |line| {
        match serde_json::from_str(line) {
            Ok(cell) if taken.is_ok() => taken = on_cell(&release, cell),
            Ok(_) => {}
            Err(_) => match line.strip_prefix("kernel ") {
                Some(of) if release.is_empty() => release = of.to_owned(),
                _ if plan.shows => println!("{line}"),
                _ => say!("{kernel}, {line}"),
            },
        }
        limit
    })?;
    taken?;
    match success {
        true => Ok(()),
        false if release.is_empty() => bail!("{kernel}: the guest ended with {how}"),
        false => Err(Died { release, how }.into()),
    }
}

/// Keeps other runs of the command from reading and writing the results until it is dropped.
fn lock(workspace: &Path) -> Result<File> {
    let directory = workspace.join("truth");
    let lock = File::open(&directory).with_context(|| directory.display().to_string())?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).context("truth")?;
    Ok(lock)
}

/// The cells that were judged before.
fn read(workspace: &Path) -> Result<Report> {
    match fs::read_to_string(workspace.join(JSON)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Report::default()),
        text => serde_json::from_str(&text.context(JSON)?).context(JSON),
    }
}

fn write(workspace: &Path, report: &Report) -> Result<()> {
    let file = workspace.join(MARKDOWN);
    let text = fs::read_to_string(&file).with_context(|| MARKDOWN)?;
    let (head, _) =
        text.split_once(GENERATED).with_context(|| format!("{MARKDOWN}: no {GENERATED}"))?;
    workshop::write(&file, &format!("{head}{GENERATED}{}", report.markdown()?))?;
    workshop::write(&workspace.join(PICTURE), &report.picture()?)?;
    workshop::write(&workspace.join(JSON), &workshop::json::to_lines(report)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wanted_cell_is_in_one_part() {
        let (cases, tools) = (truth::cases().unwrap(), truth::tools().unwrap());
        let one = parts(&cases, &tools, 1, |case, tool| tool.is_asked(case)).remove(0);
        for count in 2..5 {
            let parts = parts(&cases, &tools, count, |case, tool| tool.is_asked(case));
            assert_eq!(parts.len(), count);
            assert!(parts.iter().all(|part| part.len() >= one.len() / count), "{parts:?}");
            let mut all: Vec<_> = parts.concat();
            all.sort();
            let mut sorted = one.clone();
            sorted.sort();
            assert_eq!(all, sorted);
        }
        // The tools that take longest are in all parts.
        let bcc = |case: &Case, tool: &Tool| tool.is_asked(case) && tool.family == Family::Bcc;
        for part in parts(&cases, &tools, 2, bcc) {
            let of = |name| part.iter().filter(|(_, tool)| tool == name).count();
            assert!(of("biolatency-bpfcc") > 5 && of("biosnoop-bpfcc") > 5, "{part:?}");
        }
        assert!(parts(&cases, &tools, 2, |_, _| false).is_empty());
    }
}
