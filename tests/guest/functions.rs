//! Stage 12 beside the kernel's function tracer, which counts for itself.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    ctracer::finds_the_functions,
    disks::{Mapped, NullBlk},
    ftrace::TRACEFS,
    run::{Running, Setting, count, fio, not_judged, shell, stage},
};

tests![stage12_finds_the_functions, stage12_counts_every_call, stage12_asks_for_another_struct,];

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
fn beside_ftrace(load: impl FnOnce() -> Result<()>) -> Result<String> {
    let listed = stage("stage12", &["--list"])?;
    let (hookable, _) = listed.stdout.split_once("\nLeft out:\n").context("no list")?;
    let names = hookable.lines().filter_map(|line| line.split_once('('));
    let names: HashSet<String> = names.map(|(name, _)| name.to_owned()).collect();
    let ftrace = Calls::of(&names)?;
    let running = Running::stage("stage12", &[])?;
    load()?;
    let output = running.interrupt()?;
    let (theirs, ours) = (ftrace.count()?, table(&output)?);
    ensure!(counts_skips(&output) || !output.contains(" 0 skipped"), "not known: {output}");
    let skipped = if counts_skips(&output) { count(&output, "skipped")? } else { 0 };
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
    Ok(output)
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
        format!(", {} not (see --list)\n", left_out.len()),
    ] {
        ensure!(output.contains(&expected), "no {expected:?}: {output}\n{list}");
    }
    Ok(())
}

fn stage12_finds_the_functions() -> Result<()> {
    finds_the_functions("stage12")
}

const TOO_LONG: &str = "without fprobe, a real-time kernel takes a minute to remove the probes";

/// A real-time kernel waits for an ordinary grace period for each probe.
fn takes_too_long() -> Result<bool> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    Ok(release.contains("-rt") && !symbols.contains(" register_fprobe_ips\n"))
}

/// Whether the kernel counts how often it skips the program: from 6.7 on, or with kprobe.multi.
fn counts_skips(output: &str) -> bool {
    !output.contains("not counted on this kernel")
}

/// Reads, writes and a flush, also of device mapper, whose functions are in a module. The disk completes at once,
/// in the task: no interrupt comes in the middle of a program. Where the kernel counts what it skips then, a
/// disk with interrupts, too.
fn stage12_counts_every_call() -> Result<()> {
    if takes_too_long()? {
        return not_judged(TOO_LONG);
    }
    let direct = NullBlk::named("direct", &[("irqmode", "0"), ("submit_queues", "2")])?;
    let linear = Mapped::new("linear", &format!("0 65536 linear /dev/{} 0", direct.name))?;
    let threads = |disk: &str| {
        fio(&format!(
            "--direct=1 --filename=/dev/{disk} --rw=randread --bs=4k --ioengine=libaio --iodepth=16 --thread \
             --norandommap --size=128M --numjobs=16 --number_ios=25"
        ))
    };
    let output = beside_ftrace(|| {
        let random = "--rw=randrw --bs=4k --number_ios=30";
        fio(&format!("--direct=1 --filename=/dev/{} {random}", direct.name))?;
        let path = linear.path();
        fio(&format!("--direct=1 --filename={path} --rw=write --bs=1M --size=4M --fsync=1"))?;
        threads(&direct.name).map(|_| ())
    })?;
    if counts_skips(&output) {
        let timer = [("irqmode", "2"), ("completion_nsec", "10000"), ("submit_queues", "2")];
        let timer = NullBlk::named("timer", &timer)?;
        beside_ftrace(|| threads(&timer.name).map(|_| ()))?;
    }
    Ok(())
}

/// `--type`: functions of another struct. Where the kernel hides its addresses, they are counted all the same.
fn stage12_asks_for_another_struct() -> Result<()> {
    if takes_too_long()? {
        return not_judged(TOO_LONG);
    }
    let _hidden = Setting::new("/proc/sys/kernel/kptr_restrict", "2")?;
    let running = Running::stage("stage12", &["--type", "kiocb"])?;
    shell("echo one | dd bs=1 of=/dev/null status=none")?;
    let called = table(&running.interrupt()?)?;
    // `anon_pipe_read` on 7.2.
    let reads_pipes = called.keys().any(|name| name.ends_with("pipe_read"));
    ensure!(reads_pipes && !called.contains_key("submit_bio"), "{called:?}");
    let ended = stage("stage12", &["--type", "no_such_struct"])?;
    let said = ended.stderr.contains("no_such_struct") && ended.stderr.contains("--type request");
    ensure!(ended.code == Some(1) && said && ended.stdout.is_empty(), "{ended:?}");
    Ok(())
}
