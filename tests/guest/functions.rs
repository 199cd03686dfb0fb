//! Stage 12 beside the kernel's function tracer, which counts for itself.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    ctracer::finds_the_functions,
    disks::{self, Mapped, NullBlk},
    ftrace::TRACEFS,
    run::{Running, between, count, fio, not_judged, preempts, program, stage, wait_until},
};

tests![
    stage12_finds_the_functions,
    stage12_counts_every_call,
    stage12_tells_calls_from_skipped,
    stage12_needs_addresses,
    stage12_can_be_interrupted,
];

/// The function tracer in an instance of its own, for some functions.
pub struct Calls {
    instance: PathBuf,
}

impl Calls {
    /// Starts to record the calls of the functions that a stage lists.
    pub fn of(functions: &HashSet<String>) -> Result<Calls> {
        let calls = Calls { instance: Path::new(TRACEFS).join("instances/calls") };
        fs::create_dir(&calls.instance)?;
        calls.write("buffer_size_kb", "32768")?;
        // By their numbers in the list: for each name, the kernel would go through all of it.
        let list = fs::read_to_string(Path::new(TRACEFS).join("available_filter_functions"))?;
        let listed = |line: &str| functions.contains(line.split(' ').next().unwrap_or_default());
        let numbers = (1..).zip(list.lines()).filter(|(_, line)| listed(line));
        let numbers: Vec<String> = numbers.map(|(number, _)| number.to_string()).collect();
        ensure!(numbers.len() >= functions.len(), "{} of {}", numbers.len(), functions.len());
        calls.write("set_ftrace_filter", &numbers.join("\n"))?;
        calls.write("current_tracer", "function")?;
        Ok(calls)
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        fs::write(self.instance.join(file), text).with_context(|| format!("{file}: {text:.80}"))
    }

    /// How often each function was called until now.
    pub fn count(&self) -> Result<BTreeMap<String, u64>> {
        self.write("tracing_on", "0")?;
        let text = fs::read_to_string(self.instance.join("trace"))?;
        let entries =
            text.lines().find_map(|line| line.split_once("entries-in-buffer/entries-written: "));
        let entries = entries.context("odd header")?.1.split(' ').next().unwrap_or_default();
        let (kept, written) = entries.split_once('/').context("odd header")?;
        ensure!(kept == written, "ftrace lost calls: {entries}");
        let mut counts = BTreeMap::new();
        // `dd-230  [000] ...1.  39.948507: submit_bio <-submit_bio_wait`
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((call, _)) = line.split_once(" <-") else { bail!("{line}") };
            let function = call.rsplit(": ").next().and_then(|name| name.split(' ').next());
            *counts.entry(function.context(line.to_owned())?.to_owned()).or_default() += 1;
        }
        Ok(counts)
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.write("current_tracer", "nop").ok();
        fs::remove_dir(&self.instance).ok();
    }
}

/// The rows of the table that stage 12 prints: `  128  submit_bio(bio)`.
fn table(output: &str) -> Result<BTreeMap<String, u64>> {
    let (_, rows) = output.split_once("   calls  function\n").with_context(|| output.to_owned())?;
    let mut table = BTreeMap::new();
    let mut last = u64::MAX;
    for row in rows.lines().take_while(|row| row.contains("  ") && row.contains('(')) {
        let Some((calls, function)) = row.trim_start().split_once("  ") else { break };
        let calls: u64 = calls.parse().with_context(|| row.to_owned())?;
        ensure!(0 < calls && calls <= last, "{row} is not sorted: {output}");
        last = calls;
        let name = function.split('(').next().unwrap_or_default().to_owned();
        ensure!(table.insert(name, calls).is_none(), "{row} twice: {output}");
    }
    Ok(table)
}

/// Runs the stage and the function tracer beside the load: a call is counted, or skipped.
fn beside_ftrace(load: impl FnOnce() -> Result<()>) -> Result<()> {
    let listed = stage("stage12", &["--list"])?;
    let (hookable, _) = listed.stdout.split_once("\nLeft out:\n").context("no list")?;
    let names = hookable.lines().filter_map(|line| line.split_once('('));
    let names: HashSet<String> = names.map(|(name, _)| name.to_owned()).collect();
    let ftrace = Calls::of(&names)?;
    let running = Running::stage("stage12", &[])?;
    load()?;
    let output = running.interrupt()?;
    let (theirs, ours) = (ftrace.count()?, table(&output)?);
    let skipped = count(&output, "skipped")?;
    ensure!(ours.keys().all(|name| theirs.contains_key(name)), "{theirs:?}: {output}");
    let mut missed = 0;
    for (name, &calls) in &theirs {
        let counted = ours.get(name).copied().unwrap_or(0);
        ensure!(counted <= calls, "{name}: {counted} of {calls} calls: {output}");
        ensure!(skipped > 0 || counted == calls, "{name}: {counted} of {calls} calls: {output}");
        missed += calls - counted;
    }
    ensure!(missed == skipped, "{missed} calls are missing: {output}");
    let (calls, functions) = (theirs.values().sum::<u64>(), theirs.len());
    println!("{calls} calls of {functions} functions, {skipped} skipped");
    closes_with(&output, &listed.stdout, &ours)?;
    ensure!(functions >= 10, "only {functions} functions were called: {output}");
    Ok(())
}

/// The lines below the table are sums of its rows and of what `--list` shows.
fn closes_with(output: &str, list: &str, table: &BTreeMap<String, u64>) -> Result<()> {
    let (hooked, left_out) = list.split_once("\nLeft out:\n").context("no list")?;
    let hooked = hooked.lines().filter(|line| line.contains('(')).count();
    let left_out: Vec<&str> = left_out.lines().filter(|line| line.contains('(')).collect();
    let (called, calls) = (table.len(), table.values().sum::<u64>());
    for expected in [
        format!(" {calls} calls of {called} functions; {} were not called\n", hooked - called),
        format!(" {hooked} functions hooked that take a struct "),
        format!(", {} not (see --list):\n", left_out.len()),
    ] {
        ensure!(output.contains(&expected), "no {expected:?}: {output}\n{list}");
    }
    let (_, reasons) = output.split_once("not (see --list):\n").context("no reasons")?;
    let mut sum = 0;
    for line in reasons.lines().take_while(|line| !line.contains(" skipped (")) {
        let (number, why) = line.trim().split_once(' ').with_context(|| line.to_owned())?;
        let why = why.trim_start_matches("several "); // in the list: `2 functions have this name`
        let listed = left_out.iter().filter(|line| line.contains(why)).count();
        ensure!(number.parse() == Ok(listed), "{listed} in the list: {line}");
        sum += listed;
    }
    ensure!(sum == left_out.len(), "{sum} of {}: {output}", left_out.len());
    Ok(())
}

fn stage12_finds_the_functions() -> Result<()> {
    finds_the_functions("stage12")
}

/// Reads, writes and a flush, also of device mapper, whose functions are in a module. What completes while a
/// program runs on the same CPU is skipped, and counted.
fn stage12_counts_every_call() -> Result<()> {
    let null =
        NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "10000"), ("submit_queues", "2")])?;
    let linear = Mapped::new("linear", &format!("0 65536 linear /dev/{} 0", disks::virtio()?))?;
    beside_ftrace(|| {
        for options in [
            format!("--filename=/dev/{} --rw=randrw --bs=4k --number_ios=30", disks::nvme()?),
            format!("--filename={} --rw=write --bs=1M --size=4M --fsync=1", linear.path()),
            format!(
                "--filename=/dev/{} --rw=randread --bs=4k --ioengine=libaio --iodepth=16 --thread \
                 --norandommap --size=128M --numjobs=16 --number_ios=25",
                null.name
            ),
        ] {
            fio(&format!("--direct=1 {options}"))?;
        }
        Ok(())
    })
}

/// `--type`, and functions that are called all the time, also while their calls and the kernel's hits are read:
/// the calls in between were not skipped. A pipe's functions run in tasks only, whose calls interrupt no
/// program.
fn stage12_tells_calls_from_skipped() -> Result<()> {
    let dd = "dd bs=1 of=/dev/null status=none";
    let mut load = Running::bash(&format!("yes | ({dd} count=1000; echo going >&2; {dd})"))?;
    load.wait_for("going")?;
    let output = Running::stage("stage12", &["--type", "kiocb"])?.interrupt()?;
    drop(load);
    let skipped = count(&output, "skipped")?;
    ensure!(skipped == 0 || preempts()?, "{skipped} skipped: {output}");
    let called = table(&output)?;
    // `anon_pipe_read` on 7.2.
    let reads_pipes = called.keys().any(|name| name.ends_with("pipe_read"));
    ensure!(reads_pipes && !called.contains_key("submit_bio"), "{called:?}");
    if !has_multi()? {
        let more = count(&output, "more calls may have been skipped")?;
        ensure!(more > 0, "the calls while both were read: {output}");
    }
    let ended = stage("stage12", &["--type", "no_such_struct"])?;
    let said = ended.stderr.contains("no_such_struct") && ended.stderr.contains("--type request");
    ensure!(ended.code == Some(1) && said && ended.stdout.is_empty(), "{ended:?}");
    Ok(())
}

/// Whether the kernel hooks all functions at once: else, it takes a probe after the other.
fn has_multi() -> Result<bool> {
    Ok(fs::read_to_string("/proc/kallsyms")?.contains(" register_fprobe_ips\n"))
}

/// Where the kernel hides its addresses, no function can be told from the other.
fn stage12_needs_addresses() -> Result<()> {
    let restrict = "/proc/sys/kernel/kptr_restrict";
    let before = fs::read_to_string(restrict)?;
    fs::write(restrict, "2")?;
    let ended = stage("stage12", &["--duration", "1s"]);
    let listed = stage("stage12", &["--list"]);
    fs::write(restrict, before.trim())?;
    let (ended, listed) = (ended?, listed?);
    let said = ended.stderr.contains("kernel.kptr_restrict is 2") && ended.stdout.is_empty();
    ensure!(ended.code == Some(3) && said, "{ended:?}");
    ensure!(listed.code == Some(0) && listed.stdout.contains("submit_bio(bio)"), "{listed:?}");
    Ok(())
}

/// Ctrl-C while the probes are added, one after the other: only those that were are counted.
fn stage12_can_be_interrupted() -> Result<()> {
    if has_multi()? {
        return not_judged("this kernel hooks all functions at once");
    }
    let interrupted = |is_time: &dyn Fn(u32) -> Result<bool>| -> Result<String> {
        let running = Running::spawn(Command::new(program("stage12")).args(["--duration", "60s"]))?;
        wait_until("the moment to interrupt", || is_time(running.id()))?;
        running.interrupt()
    };
    let output = interrupted(&|_| {
        let probes = fs::read_to_string(Path::new(TRACEFS).join("kprobe_events"))?;
        Ok(probes.matches("workshop/").count() >= 5)
    })?;
    let tried = between(&output, "attaching was interrupted after ", " functions")?;
    let (tried, all) = tried.split_once(" of ").context("odd")?;
    let (tried, all): (u64, u64) = (tried.parse()?, all.parse()?);
    ensure!((5..all).contains(&tried), "{output}");
    ensure!(count(&output, "functions hooked")? == tried, "{output}");
    ensure!(count(&output, "more were not tried")? == all - tried, "{output}");
    let (called, not_called) = between(&output, "calls of ", " were not called")?
        .split_once(" functions; ")
        .context("odd")?;
    ensure!(called.parse::<u64>()? + not_called.parse::<u64>()? == tried, "{output}");

    // Before the first of them: while the lists of functions are read.
    let output = interrupted(&|id| {
        let files = fs::read_dir(format!("/proc/{id}/fd"))?.flatten();
        let mut paths = files.filter_map(|file| fs::read_link(file.path()).ok());
        Ok(paths.any(|path| path.ends_with("kallsyms")))
    })?;
    ensure!(output.is_empty(), "{output}");
    Ok(())
}
