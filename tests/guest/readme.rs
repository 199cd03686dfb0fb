//! A README shows what its program prints (the root's: stage 06), and names what exists.

use std::env;

use crate::prelude::*;

tests![readmes_show_real_output, readmes_name_what_exists];

/// What stands in backticks in a page like a name of C or Rust, and is none of this kernel or of the
/// sources: programs, words of their output, names in other kernels.
const WORDS: &str = "
    LIBBPF_SYS_LIBRARY_PATH NSpid O_DIRECT RWF_NOWAIT ___old account_page_dirtied arg0 lhist map_value ptr_bio
    blk_account_io_completion blk_start_request blktrace cpid dm_crypt folio_account_dirtied
    histogram_quantile inline kcryptd ksoftirqd libelf libz llvm lvm map_value_or_null memlock nvme
    perf_event_max_stack printf smartctl stageNN start_request taskset trace_bp umount vda vda2 xlated";

/// The tools whose READMEs show what they print.
const SHOWN_TOOLS: [&str; 2] = ["tools/ctracer", "tools/slow_io"];

/// Whether this is the kernel that the READMEs were written with.
fn is_default_kernel() -> Result<bool> {
    Ok(cfg!(target_arch = "x86_64") && run::release()?.starts_with("6.1."))
}

/// A name in backticks is one of the sources, of their files and directories, or of the kernel: its BTF, its
/// symbols and its counters.
fn readmes_name_what_exists() -> Result<()> {
    if !is_default_kernel()? {
        return not_judged("the READMEs name functions of x86-64's default kernel");
    }
    let sources = shell(&format!(
        "cd {}; sources=$(ls -d */ | grep -vx target/)
         find $sources; cat .ci/*; grep -hr --include=*.rs --include=*.[ch] --include=rules.yml '' $sources",
        workspace().display()
    ))?;
    // A system call is called by the name that users know.
    let kernel = shell("cat /proc/kallsyms /proc/vmstat")?.replace("_sys_", " ");
    let mut known: HashSet<&str> =
        [&sources, &kernel, WORDS].into_iter().flat_map(identifiers).collect();
    // Names of BTF end with a NUL. The numbers before them are no names, and do no harm.
    let btf = fs::read_dir("/sys/kernel/btf")?.map(|file| Ok(fs::read(file?.path())?));
    let btf = btf.collect::<Result<Vec<_>>>()?.concat();
    known.extend(btf.split(|byte| *byte == 0).filter_map(|name| str::from_utf8(name).ok()));
    let pages = "ls *.md {docs,vm,appendix,tools}/*.md stage*/*.md {appendix,tools}/*/*.md";
    let pages = Running::bash(&format!("cd {}; {pages}", workspace().display()))?.end()?.stdout;
    let (mut unknown, mut found) = (String::new(), 0);
    for page in pages.lines() {
        let text = fs::read_to_string(workspace().join(page))?;
        for span in in_backticks(&text) {
            let names = names(span);
            found += names.len();
            for name in names.iter().filter(|name| !known.contains(*name)) {
                unknown += &format!("\n{page}: {name}, in `{span}`");
            }
        }
    }
    ensure!(unknown.is_empty(), "no such name in the sources or the kernel:{unknown}");
    ensure!(found > 300, "only {found} names were found");
    Ok(())
}

/// What stands between single backticks in a page, outside of its blocks of code.
fn in_backticks(page: &str) -> impl Iterator<Item = &str> {
    page.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2))
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
/// with each other. And what it shows of bpftrace is what that prints.
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
    let disk = &mounted.disk;
    let workload = run::workspace().join("vm/workload.sh");
    let _workload = Running::spawn(&mut Command::new(workload))?;
    let directories: Vec<_> =
        run::stages()?.into_iter().chain(SHOWN_TOOLS.map(str::to_owned)).collect();
    let mut packages = Vec::new();
    for directory in &directories {
        let package = workshop::package_in(directory).context("odd directory")?;
        if cfg!(not(target_arch = "x86_64")) && ["stage12", "ctracer"].contains(&package) {
            judged_weakly(&format!("{directory}/README.md shows functions of 6.1 on x86-64"));
        } else if is_subject(package) {
            packages.push((directory, package));
        }
    }
    let (alone, together): (Vec<_>, Vec<_>) =
        packages.into_iter().partition(|(_, package)| ALONE.contains(package));
    let mut outputs = Vec::new();
    for some in together.chunks(if bless { 1 } else { together.len().max(1) }) {
        let names: Vec<&str> = some.iter().map(|(_, package)| *package).collect();
        outputs.extend(captured(&names, disk)?);
    }
    for (_, package) in &alone {
        outputs.push(captured_alone(package, disk)?);
    }
    let mut wrong = Vec::new();
    for ((directory, package), output) in together.into_iter().chain(alone).zip(outputs) {
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
                consistent(package, shown)?;
                if is_default_kernel()? {
                    without_workload(disk, || bpftrace(&readme))
                } else {
                    Ok(())
                }
            });
            wrong.extend(agrees.err().map(|error| format!("{page}: {error:#}")));
        }
    }
    if is_default_kernel()? && !bless {
        wrong.extend(bpftrace_page(disk).err().map(|error| format!("docs/bpftrace.md: {error:#}")));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// The section about bpftrace, where there is one, is short; its command, run, counts what is shown.
fn bpftrace(readme: &str) -> Result<()> {
    let title = "## The same with bpftrace";
    let Some((_, rest)) = readme.split_once(&format!("\n{title}\n\n")) else { return Ok(()) };
    let section = rest.split("\n## ").next().unwrap_or(rest).trim_end();
    let said = section.lines().filter(|line| !line.is_empty() && !line.starts_with("```"));
    ensure!(said.clone().count() <= 9, "{title}: {} lines", said.count());
    for (program, shown) in bpftrace_programs(section)? {
        bpftrace_counts(&program, shown)?;
    }
    Ok(())
}

/// What docs/bpftrace.md shows is true, too.
fn bpftrace_page(disk: &str) -> Result<()> {
    let page = fs::read_to_string(run::workspace().join("docs/bpftrace.md"))?;
    let programs = bpftrace_programs(&page)?;
    ensure!(programs.len() >= 3, "docs/bpftrace.md shows only {} programs", programs.len());
    let agrees = |(program, shown): &(String, &str)| {
        without_workload(disk, || bpftrace_counts(program, shown)).with_context(|| program.clone())
    };
    programs.iter().try_for_each(agrees)
}

/// The programs of bpftrace in a text, as the guest runs them, each with the block below it: what it prints.
/// A reader starts them by `cargo vm run`, or in `cargo vm shell`.
fn bpftrace_programs(text: &str) -> Result<Vec<(String, &str)>> {
    let blocks: Vec<&str> = text.split("```").skip(1).step_by(2).collect();
    let mut programs = Vec::new();
    for (block, shown) in blocks.iter().zip(blocks.iter().skip(1)) {
        if !block.contains("bpftrace -c") {
            continue;
        }
        ensure!(block.ends_with("}'\n"), "this block has more than commands: {block}");
        programs.push((block.trim_start().replace("cargo vm run bpftrace", "bpftrace"), *shown));
    }
    ensure!(!programs.is_empty(), "no block has a program of bpftrace, with its output below");
    Ok(programs)
}

/// Runs it: it counts what is shown.
fn bpftrace_counts(program: &str, shown: &str) -> Result<()> {
    shell("sync")?;
    let ended = Running::bash(program)?.end_well()?;
    // A count stands there as it is; a time, and a row of a histogram, have other figures.
    let is_count = |line: &&str| {
        let is_whole = !line.trim_end().ends_with(['[', ':']);
        line.starts_with(['@', ']']) && is_whole && !line.contains("_ns: ")
    };
    let [claimed, counted] =
        [shown, &ended.stdout].map(|text| -> Vec<&str> { text.lines().filter(is_count).collect() });
    let agree = match shown.lines().any(is_left_out) {
        true => claimed.iter().all(|count| counted.contains(count)),
        false => claimed == counted,
    };
    ensure!(agree, "it shows {claimed:?}, and bpftrace prints {}", ended.stdout);
    let rows = |text: &str| -> u64 {
        let rows = text.lines().filter_map(|line| line.split_once(')')?.1.split_once('|'));
        rows.filter_map(|(count, _)| count.trim().parse::<u64>().ok()).sum()
    };
    ensure!(rows(shown) == rows(&ended.stdout), "another sum of rows: {}", ended.stdout);
    let is_other = |line: &&str| !is_count(line) && !line.starts_with('[');
    let others: Vec<&str> = shown.lines().filter(is_other).collect();
    printable(&others.join("\n"), &ended.stdout)
}

/// What programs print beside the workload of `cargo vm run`, which runs on this disk.
fn captured(packages: &[&str], disk: &str) -> Result<Vec<String>> {
    let running = Running::stages(packages.iter().map(|package| (*package, vec![])))?;
    let (start, before) = (Instant::now(), disks::bios(disk)?);
    // A row of the heatmap takes 2 s, a round of the workload some 40 bios.
    wait_until("the workload", || {
        Ok(disks::bios(disk)? > before + 100 && start.elapsed() > Duration::from_secs(2))
    })?;
    without_workload(disk, || Running::interrupt_all(running))
}

/// Does something while the workload stands still. An I/O that is on its way when a stage ends is not measured, and
/// the stage says so: the READMEs show none.
fn without_workload<T>(disk: &str, then: impl FnOnce() -> Result<T>) -> Result<T> {
    shell("pkill -STOP -f vm/[w]orkload.sh")?;
    let result = wait_until("an idle workload", || {
        Ok(shell("pgrep -x -r R,S,D dd || true")?.is_empty() && disks::in_flight(disk)? == 0)
    })
    .and_then(|()| then());
    shell("pkill -CONT -f vm/[w]orkload.sh")?;
    result
}

/// What these print beside loads of their own.
const ALONE: [&str; 5] = ["stage09", "stage13", "stage14", "ctracer", "slow_io"];

fn captured_alone(package: &str, disk: &str) -> Result<String> {
    match package {
        // One process, which waits for the stage, and then reads 1 MiB.
        "stage09" => {
            let (gate, reader) = (Gate::new()?, Running::bash(&pagecache::reader("file"))?);
            let running = Running::stage(package, &[&reader.id().to_string()])?;
            gate.open()?;
            reader.end_well()?;
            running.interrupt()
        }
        // Four readers of a disk that takes one request at a time.
        "stage13" | "stage14" => without_workload(disk, || {
            let _disk = NullBlk::one_tag("nullb0", 50)?;
            let load = format!("for i in 1 2 3 4; do {} & done; wait", reads("nullb0", 2));
            Ok(beside(package, &[], || shell(&load))?.1)
        }),
        // One read, and all that happens to its bio.
        "ctracer" => {
            let dd = format!("dd if=/dev/{disk} of=/dev/null bs=64k count=1 iflag=direct 2>&1");
            Ok(beside(package, &["--only=submit_bio*", "--only=*rq_qos*", "--only=bio_*"], || {
                shell(&dd)
            })?
            .1)
        }
        // The reads of a process that may do 20 a second.
        _ => {
            let disk = disks::virtio()?;
            let cgroup = slow_io::throttle(&disk)?;
            let load = || slow_io::read_throttled(&cgroup, &disk, 10);
            let ended = beside(package, &[], load);
            shell(&format!("rmdir {cgroup}"))?;
            Ok(ended?.1)
        }
    }
}

/// The first output that a README shows: in "The answer" (stages), "What you see" (tools), "Start".
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
