//! What a stage's README shows is what the stage prints, and what it names exists. The root README
//! shows stage 06.

use std::{
    collections::{BTreeMap, HashSet},
    env,
    time::{Duration, Instant},
};

use crate::{
    pagecache,
    prelude::*,
    slow_io::{self, reads},
    table::laws,
};

tests![readmes_show_real_output, readmes_show_what_bpftrace_counts, readmes_name_what_exists,];

/// What stands in backticks in a page like a name of C or Rust, and is none of this kernel or of the
/// sources: programs, words of their output, names in other kernels. Sorted.
const WORDS: &[&str] = &[
    "LIBBPF_SYS_LIBRARY_PATH",
    "NSpid",
    "O_DIRECT",
    "RWF_NOWAIT",
    "___old",
    "account_page_dirtied",
    "blk_account_io_completion",
    "blk_start_request",
    "blktrace",
    "dm_crypt",
    "folio_account_dirtied",
    "histogram_quantile",
    "inline",
    "ksoftirqd",
    "libelf",
    "libz",
    "llvm",
    "map_value_or_null",
    "memlock",
    "nvme",
    "perf_event_max_stack",
    "printf",
    "smartctl",
    "stageNN",
    "start_request",
    "taskset",
    "trace_bp",
    "umount",
    "vda",
    "xlated",
];

/// The tools whose READMEs show what they print.
const SHOWN_TOOLS: [&str; 2] = ["tools/ctracer", "tools/slow_io"];

/// Whether this is the kernel that the READMEs were written with.
fn is_default_kernel() -> Result<bool> {
    Ok(cfg!(target_arch = "x86_64") && run::release()?.starts_with("6.1."))
}

/// A name in backticks, or of a function in a block of code, is one of the sources that the page is about,
/// or of the kernel: its BTF and its symbols. For a stage, the sources are its own, those of the stage
/// before, and what all share. The tests are no programs, and no block of code shows one.
fn readmes_name_what_exists() -> Result<()> {
    if !is_default_kernel()? {
        return not_judged("the READMEs name functions of x86-64's default kernel");
    }
    ensure!(WORDS.is_sorted(), "the words are not sorted");
    let root = run::workspace();
    let mut kernel: HashSet<String> = HashSet::new();
    // `ffffffffc0a5d2c0 t kjournald2	[jbd2]`; a system call is called by the name that users know.
    for line in fs::read_to_string("/proc/kallsyms")?.lines() {
        for name in line.split_whitespace().skip(2) {
            let name = name.trim_matches(['[', ']']);
            let call = name.split_once("_sys_").map_or(name, |(_, call)| call);
            kernel.extend([name, call].map(str::to_owned));
        }
    }
    for file in fs::read_dir("/sys/kernel/btf")? {
        // Names end with a NUL. The numbers before them are no names, and do no harm.
        let btf = fs::read(file?.path())?;
        let names = btf.split(|byte| *byte == 0).filter_map(|name| std::str::from_utf8(name).ok());
        kernel.extend(names.map(str::to_owned));
    }
    let stages = run::stages()?;
    let mut pages = Vec::new();
    for (number, stage) in stages.iter().enumerate() {
        let places = ["common", &stages[number.saturating_sub(1)], stage];
        let known = sources(&root, &places)?;
        pages.push((root.join(stage).join("README.md"), known.clone(), known));
    }
    let others = ["common", "appendix", "tools", "lesson", "vm", "exercises", "bench"];
    let places: Vec<&str> = others.into_iter().chain(stages.iter().map(String::as_str)).collect();
    let all = sources(&root, &places)?;
    let with_tests = &all | &sources(&root, &["tests"])?;
    for directory in ["", "docs", "appendix", "tools", "vm", "mine"] {
        for file in fs::read_dir(root.join(directory))? {
            let path = file?.path();
            let is_program = ["appendix", "tools"].contains(&directory) && path.is_dir();
            let path = if is_program { path.join("README.md") } else { path };
            if path.is_file() && path.extension().is_some_and(|extension| extension == "md") {
                pages.push((path, with_tests.clone(), all.clone()));
            }
        }
    }
    let (mut unknown, mut found) = (Vec::new(), 0);
    for (page, known, known_in_code) in pages {
        let text = fs::read_to_string(&page)?;
        let in_prose = in_backticks(&text).map(|span| (span, names(span), &known));
        let in_code = in_blocks(&text).map(|line| (line, called(line), &known_in_code));
        for (span, names, known) in in_prose.chain(in_code) {
            for name in names {
                found += 1;
                let is_stage = stages.iter().any(|stage| stage.split('_').next() == Some(name));
                let is_known =
                    known.contains(name) || known.contains(span) || kernel.contains(name);
                if !is_known && !is_stage && WORDS.binary_search(&name).is_err() {
                    unknown.push(format!("{}: {name}, in `{span}`", page.display()));
                }
            }
        }
    }
    ensure!(
        unknown.is_empty(),
        "no such name in the sources or the kernel:\n{}",
        unknown.join("\n")
    );
    ensure!(found > 300, "only {found} names were found");
    Ok(())
}

/// The names in the sources below these directories, without comments and unit tests, and the names of
/// the files and directories.
fn sources(root: &Path, directories: &[&str]) -> Result<HashSet<String>> {
    let mut names = HashSet::new();
    let mut paths: Vec<_> = directories.iter().map(|directory| root.join(directory)).collect();
    while let Some(path) = paths.pop() {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            for file in fs::read_dir(&path)? {
                paths.push(file?.path());
            }
        } else if [".rs", ".c", ".h"].iter().any(|extension| name.ends_with(extension)) {
            let text = fs::read_to_string(&path)?;
            let program = text.split("#[cfg(test)]").next().unwrap_or(&text);
            let code: Vec<&str> = match name.ends_with(".rs") {
                true => program.lines().filter_map(|line| line.split("//").next()).collect(),
                false => text.split("/*").filter_map(|part| part.split("*/").last()).collect(),
            };
            names.extend(code.into_iter().flat_map(identifiers).map(str::to_owned));
        }
        names.insert(name);
    }
    Ok(names)
}

/// What stands between single backticks in a page, outside of its blocks of code.
fn in_backticks(page: &str) -> impl Iterator<Item = &str> {
    page.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2))
}

/// The lines of a page's blocks of code.
fn in_blocks(page: &str) -> impl Iterator<Item = &str> {
    page.split("\n```").skip(1).step_by(2).flat_map(|block| block.lines().skip(1))
}

/// The functions that a line of code, or of output, names: what stands before a bracket, with an underscore
/// in it. Others are words of a shell or of bpftrace.
fn called(line: &str) -> Vec<&str> {
    let words = line.split('(').rev().skip(1);
    let names =
        words.filter_map(|before| identifiers(before).last().filter(|it| before.ends_with(it)));
    names.filter(|name| name.trim_matches('_').contains('_')).collect()
}

/// The names in a piece of code like `io_end()`, `struct bio *`, `iter->count` or `f(&skel.maps)`; none in
/// a command, a path, a line of output.
fn names(span: &str) -> Vec<&str> {
    let code = span.strip_prefix("struct ").unwrap_or(span);
    let code = code.strip_suffix(" *").unwrap_or(code);
    let function = code.split('(').next().unwrap_or(code).replace("->", ".").replace("::", ".");
    let is_name = function.starts_with(|c: char| c.is_ascii_alphabetic() || "_&".contains(c))
        && function.chars().all(|c| c.is_ascii_alphanumeric() || "_.&".contains(c))
        && !code.contains('…');
    // A letter or two stand for something: `bio_endio(P1)`.
    if is_name { identifiers(code).filter(|name| name.len() > 2).collect() } else { Vec::new() }
}

fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(|c: char| !c.is_ascii_digit()))
}

/// Every line of a README's block is one that the stage prints, and the block is one run's: its figures agree
/// with each other.
///
/// With `BLESS=1` in the environment, nothing is compared: what the stages print is written to
/// `target/readme/STAGE.txt` in the workspace, to be copied into the READMEs, shortened with `...`:
/// `BLESS=1 cargo vm test --kernel 6.1 readmes_show_real_output`.
fn readmes_show_real_output() -> Result<()> {
    if cfg!(target_arch = "x86_64") && !is_default_kernel()? {
        return not_judged("the READMEs show the output of x86-64's default kernel");
    }
    let bless = env::var_os("BLESS").is_some_and(|bless| bless == "1");
    let mounted = Mounted::new()?;
    let workload = run::workspace().join("vm/workload.sh");
    let _workload = Running::spawn(&mut Command::new(workload))?;
    let mut wrong = Vec::new();
    for directory in run::stages()?.into_iter().chain(SHOWN_TOOLS.map(str::to_owned)) {
        let package = host::package_in(&directory).context("odd directory")?;
        if cfg!(not(target_arch = "x86_64")) && ["stage12", "ctracer"].contains(&package) {
            judged_weakly(&format!("{directory}/README.md shows functions of 6.1 on x86-64"));
            continue;
        }
        if !is_subject(package) {
            continue;
        }
        let output = captured(package, &mounted.disk)?;
        if bless {
            let target = run::workspace().join("target/readme");
            fs::create_dir_all(&target)?;
            fs::write(target.join(format!("{package}.txt")), output)?;
            continue;
        }
        let front_door = (package == "stage06").then(|| "README.md".to_owned());
        for page in front_door.into_iter().chain([format!("{directory}/README.md")]) {
            let readme = fs::read_to_string(run::workspace().join(&page))?;
            let agrees = block(&readme).and_then(|shown| {
                // `ctracer`'s slowest life, here, is one of the workload's.
                let (lines, _) = shown.split_once("\nSlowest life: ").unwrap_or((shown, ""));
                printable(lines, &output)?;
                consistent(package, shown)
            });
            wrong.extend(agrees.err().map(|error| format!("{page}: {error:#}")));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The section of a stage's README that shows bpftrace is short, and its command, run as it stands there,
/// counts what the README shows.
fn readmes_show_what_bpftrace_counts() -> Result<()> {
    if !is_default_kernel()? {
        return not_judged("the READMEs show what bpftrace prints on x86-64's default kernel");
    }
    let mounted = Mounted::new()?;
    ensure!(mounted.disk == "vda", "the READMEs read vda, and the data disk is {}", mounted.disk);
    let mut wrong = Vec::new();
    let directories = run::stages()?.into_iter().chain(["tools/slow_io".to_owned()]);
    for stage in directories {
        let readme = fs::read_to_string(run::workspace().join(&stage).join("README.md"))?;
        if let Err(error) = bpftrace(&readme) {
            wrong.push(format!("{stage}/README.md: {error:#}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Runs the command of a README's section about bpftrace, and compares what it prints.
fn bpftrace(readme: &str) -> Result<()> {
    let title = "## The same with bpftrace";
    let (_, rest) =
        readme.split_once(&format!("\n{title}\n\n")).with_context(|| title.to_owned())?;
    let section = rest.split("\n## ").next().unwrap_or(rest).trim_end();
    // The heading and the line below it, too.
    let lines = 2 + section.lines().count();
    ensure!(lines <= 14, "{title}: {lines} lines");
    let block = section.split("```\n").nth(1).context("no block")?;
    let (program, shown) = block.split_once("}'\n").context("no program ends with }'")?;
    shell("sync")?;
    let ended = Running::bash(&format!("{program}}}'"))?.end_well()?;
    let ((claimed, other), (counted, _)) = (counts(shown)?, counts(&ended.stdout)?);
    ensure!(!claimed.is_empty(), "no count");
    let agree = match shown.lines().any(is_left_out) {
        true => claimed.iter().all(|(name, count)| counted.get(name) == Some(count)),
        false => claimed == counted,
    };
    ensure!(agree, "it shows {claimed:?}, and bpftrace prints {}", ended.stdout);
    printable(&other.join("\n"), &ended.stdout)
}

/// What bpftrace prints at its end: each count by its name and key, of a histogram the sum, of a stack
/// without offsets; that a time is not 0. And the other lines.
fn counts(printed: &str) -> Result<(BTreeMap<String, u64>, Vec<&str>)> {
    let (mut counts, mut others) = (BTreeMap::new(), Vec::new());
    let mut lines = printed.lines().filter(|line| !line.trim().is_empty()).peekable();
    while let Some(line) = lines.next() {
        if !line.starts_with('@') {
            others.push(line);
            continue;
        }
        let mut name = line.to_owned();
        if line.ends_with('[') {
            // A stack: `function+12` in lines of their own, then `]: 3`.
            for line in lines.by_ref() {
                name += line.trim().split('+').next().unwrap_or_default();
                if line.starts_with(']') {
                    break;
                }
                name += "\n";
            }
        }
        let (name, count) = name.rsplit_once(':').with_context(|| line.to_owned())?;
        let count = match count.trim() {
            // `[256, 512)   20 |@@@   |`
            "" => {
                let mut sum = 0;
                while let Some(row) = lines.next_if(|line| line.starts_with(['[', '('])) {
                    let number = row.split_once([')', ']']).map(|(_, rest)| rest.trim());
                    let number =
                        number.and_then(|rest| rest.split(' ').next()?.parse::<u64>().ok());
                    sum += number.with_context(|| row.to_owned())?;
                }
                sum
            }
            count => count.parse().with_context(|| line.to_owned())?,
        };
        let count = if name.ends_with("_ns") { u64::from(count > 0) } else { count };
        ensure!(counts.insert(name.to_owned(), count).is_none(), "{name} stands there twice");
    }
    Ok((counts, others))
}

/// What a stage prints beside the workload of `cargo vm run`, which runs on this disk.
fn captured(package: &str, disk: &str) -> Result<String> {
    let gate = Gate::new()?;
    // Stage 09's shows one process: one that waits for the stage, and then reads 1 MiB.
    let wanted = match package {
        "stage09" => Some(Running::bash(&pagecache::reader("file"))?),
        _ => None,
    };
    if package == "ctracer" {
        // Its README shows one read, and all that happens to its bio.
        let running = Running::stage(package, &["--only=submit_bio*", "--only=bio_*"])?;
        shell(&format!("dd if=/dev/{disk} of=/dev/null bs=64k count=1 iflag=direct 2>&1"))?;
        return running.interrupt();
    }
    if package == "slow_io" {
        // Its README shows the reads of a process that may do 20 a second.
        return slow_io::throttled();
    }
    if package == "stage13" {
        // Its README shows four readers of a disk that takes one request at a time.
        let _disk = disks::NullBlk::one_tag("nullb0", 50)?;
        shell("pkill -STOP -f vm/[w]orkload.sh")?;
        let output = Running::stage(package, &[]).and_then(|running| {
            shell(&format!("for i in 1 2 3 4; do {} & done; wait", reads("/dev/nullb0", 2)))?;
            running.interrupt()
        });
        shell("pkill -CONT -f vm/[w]orkload.sh")?;
        return output;
    }
    let pid = wanted.as_ref().map(|process| process.id().to_string());
    let running = Running::stage(package, &pid.as_deref().into_iter().collect::<Vec<_>>())?;
    let (start, before) = (Instant::now(), disks::bios(disk)?);
    match wanted {
        Some(process) => {
            gate.open()?;
            process.end_well()?;
        }
        // A row of the heatmap takes 2 s, a round of the workload some 40 bios.
        None => wait_until("the workload", || {
            let round = disks::bios(disk)? > before + 100;
            Ok(round && (package != "stage00" || start.elapsed() > Duration::from_secs(2)))
        })?,
    }
    // An I/O that is on its way when a stage ends is not measured, and the stage says so: the READMEs
    // show none.
    shell("pkill -STOP -f vm/[w]orkload.sh")?;
    let output = wait_until("an idle workload", || {
        Ok(shell("pgrep -x -r R,S,D dd || true")?.is_empty() && disks::in_flight(disk)? == 0)
    })
    .and_then(|()| running.interrupt());
    shell("pkill -CONT -f vm/[w]orkload.sh")?;
    output
}

/// The first output that a README shows: of a stage in "The answer", of a tool below "What you see", of the root's
/// below "Start".
pub fn block(readme: &str) -> Result<&str> {
    let titles = ["\n## The answer", "\n## What you see", "\n## Start"];
    let section = titles.iter().find_map(|title| Some(readme.split_once(title)?.1));
    let section = section.context("no such section")?;
    let mut blocks = section.split("\n```").skip(1).step_by(2);
    let shown = blocks.find_map(|block| {
        // Not a command.
        block.strip_prefix('\n').filter(|block| !block.starts_with("cargo "))
    });
    shown.context("no output in it")
}

/// Whether a line of a README stands for others: `...` or `…`.
fn is_left_out(line: &str) -> bool {
    ["...", "…"].contains(&line.trim())
}

/// Checks that every line has the shape of one that was printed. A line may be cut with `…`.
fn printable(shown: &str, output: &str) -> Result<()> {
    let printed: HashSet<String> = output.lines().map(shape).collect();
    for line in shown.lines().filter(|line| !is_left_out(line)) {
        let found = match line.split_once('…') {
            Some((start, _)) if !start.trim().is_empty() => {
                let start = shape(start);
                printed.iter().any(|printed| printed.starts_with(start.trim_end()))
            }
            _ => printed.contains(&shape(line)),
        };
        ensure!(found, "nothing like {line:?} was printed:\n{output}");
    }
    Ok(())
}

/// Checks the figures of a block against each other, as those of a run; where lines are left out, the block of the
/// slowest I/O. Stage 11's README shows the counts alone.
fn consistent(package: &str, shown: &str) -> Result<()> {
    let has_all = ["stage07", "stage08", "stage09", "slow_io"].contains(&package);
    if has_all || package != "stage11" && !shown.lines().any(is_left_out) {
        return laws::agree(package, shown);
    }
    if shown.contains(BIO[0]) { slowest(shown, BIO).map(drop) } else { Ok(()) }
}

/// A line without what differs from run to run: numbers, addresses, tasks, functions, the cells of
/// a heatmap, the name of a partition.
pub fn shape(line: &str) -> String {
    if line.starts_with("=> ") {
        return "=> a function".into();
    }
    if line.starts_with("Bio Info : ") {
        return "where".into();
    }
    if let Some((_, count)) = line.split_once("# ") {
        return if count == "no I/O" { "no row".into() } else { "a row".into() };
    }
    // A line of the trace pipe: the task, the CPU and the flags stand before the time.
    let line = line.split_once(": bpf_trace_printk: ").map_or(line, |(_, event)| event);
    // Of `ctracer`'s call graph, what was called: a completion finds any thread at work.
    let line = line.split_once(" | ").map_or(line, |(_, called)| called);
    let mut shape = String::new();
    // A bar is as long as the figure wants.
    for word in line.split_whitespace().filter(|word| word.contains(|c| c != '#')) {
        let word: String = word.chars().map(|c| if c.is_ascii_digit() { 'N' } else { c }).collect();
        let hex = word.contains("=Nx") || word.starts_with("Nx");
        let end = if hex { word.find("Nx").unwrap_or(word.len()) } else { word.len() };
        let rest = word[end..].trim_start_matches(|c: char| c.is_ascii_alphanumeric());
        shape.push_str(&word[..end]);
        shape.push_str(rest);
        shape.push(' ');
    }
    while shape.contains("NN") || shape.contains("N.N") {
        shape = shape.replace("NN", "N").replace("N.N", "N");
    }
    // Times are given in the unit that fits.
    shape.replace(" us ", " ms ").replace(" s ", " ms ")
}
