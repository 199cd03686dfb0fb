//! Stage 12 beside the kernel's function tracer, which counts for itself.

use crate::{ctracer::stage12_finds_the_functions, prelude::*};

tests![
    stage12_finds_the_functions,
    stage12_counts_every_call,
    stage12_counts_the_run_only,
    stage12_asks_for_another_struct,
];

/// What a program lists: its functions, by name, each with its line; and those that it leaves out.
pub fn listed(program: &str, arguments: &[&str]) -> Result<[BTreeMap<String, String>; 2]> {
    let listed = stage(program, &[arguments, &["--list"]].concat())?;
    ensure!(listed.code == Some(0), "{listed:?}");
    let (hooked, left_out) = listed.stdout.split_once("\nLeft out:\n").context("no list")?;
    let functions = |list: &str| {
        let lines = list.lines().filter_map(|line| Some((line.split_once('(')?.0, line)));
        let name = |declaration: &str| declaration.rsplit([' ', '*']).next().map(str::to_owned);
        lines.map(|(start, line)| (name(start).unwrap_or_default(), line.to_owned())).collect()
    };
    Ok([hooked, left_out].map(functions))
}

/// How often each function was called, in what the function tracer has recorded:
/// `dd-230  [000] ...1.  39.948507: submit_bio <-submit_bio_wait`.
fn calls(trace: &str) -> Result<BTreeMap<String, u64>> {
    let mut counts = BTreeMap::new();
    for line in trace.lines().filter(|line| !line.starts_with('#')) {
        let (call, _) = line.split_once(" <-").with_context(|| line.to_owned())?;
        let function = call.rsplit(": ").next().and_then(|name| name.split(' ').next());
        *counts.entry(function.with_context(|| line.to_owned())?.to_owned()).or_default() += 1;
    }
    Ok(counts)
}

/// The rows of the table that stage 12 prints: `  128  submit_bio(bio)`.
fn table(output: &str) -> Result<BTreeMap<String, u64>> {
    let (_, text) = output
        .split_once("   calls  function\n")
        .with_context(|| format!("no table:\n{output}"))?;
    let (mut table, mut last) = (BTreeMap::new(), u64::MAX);
    for [calls, name] in rows(text, r"(\d+)  (\w+)\(") {
        let calls = calls.parse()?;
        ensure!(0 < calls && calls <= last, "{name} is not sorted: {output}");
        last = calls;
        ensure!(table.insert(name.to_owned(), calls).is_none(), "{name} twice: {output}");
    }
    Ok(table)
}

/// Runs the stage and the function tracer beside the load: a call is counted, or skipped.
fn beside_ftrace(load: impl FnOnce() -> Result<()>) -> Result<String> {
    let [hooked, left_out] = listed("stage12", &[])?;
    let ftrace = Tracer::calls(&hooked.keys().map(String::as_str).collect())?;
    let (_, output) = beside("stage12", &[], load)?;
    let (theirs, ours) = (calls(&ftrace.text()?)?, table(&output)?);
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
    compared(&format!(
        "ftrace saw {calls} calls of {functions} functions; yours: {} calls, and {skipped} skipped",
        calls - missed
    ));
    ensure!(functions >= 10, "only {functions} functions were called: {output}");
    // The lines below the table are sums of its rows and of what `--list` shows.
    let (hooked, left_out) = (hooked.len(), left_out.len());
    let (called, calls) = (ours.len(), ours.values().sum::<u64>());
    for expected in [
        format!(" {calls} calls of {called} functions; {} were not called\n", hooked - called),
        format!(" {hooked} functions hooked that take a struct "),
        format!(", {left_out} not (see --list)\n"),
    ] {
        ensure!(output.contains(&expected), "no {expected:?}: {output}");
    }
    Ok(output)
}

/// Ends a test on a real-time kernel without fprobe, which waits for an ordinary grace period for each probe.
fn ends_in_time() -> Result<()> {
    match release()?.contains("-rt") && !has_fprobe()? {
        true => {
            not_judged("without fprobe, a real-time kernel takes a minute to remove the probes")
        }
        false => Ok(()),
    }
}

/// Whether the kernel counts how often it skips the program: from 6.7 on, or with kprobe.multi.
fn counts_skips(output: &str) -> bool {
    !output.contains("not counted on this kernel")
}

/// Reads, writes and a flush, also of device mapper, whose functions are in a module. The disk completes in the
/// task: no interrupt comes in the middle of a program. Where the kernel counts what it skips, another one, too.
fn stage12_counts_every_call() -> Result<()> {
    ends_in_time()?;
    let direct = NullBlk::new("direct", "irqmode=0 submit_queues=2")?;
    let linear = Mapped::new("linear", &format!("0 65536 linear /dev/{} 0", direct.name))?;
    let threads = |disk: &str| {
        fio_direct(disk, "--iodepth=16 --size=128M --numjobs=16 --number_ios=25").map(drop)
    };
    let output = beside_ftrace(|| {
        fio_direct(&direct.name, "--rw=randrw --ioengine=psync --number_ios=30")?;
        fio_direct(&linear.path(), "--rw=write --ioengine=psync --bs=1M --size=4M --fsync=1")?;
        threads(&direct.name)
    })?;
    if counts_skips(&output) {
        let timer = NullBlk::new("timer", "irqmode=2 completion_nsec=10000 submit_queues=2")?;
        beside_ftrace(|| threads(&timer.name))?;
    }
    Ok(())
}

/// The hooks come one by one, while a disk is read: `bio_endio()` has its hook long before `submit_bio()`, and
/// each bio passes both. What the first hooks have counted before the last one was there is no part of the table.
fn stage12_counts_the_run_only() -> Result<()> {
    ends_in_time()?;
    let disk = NullBlk::timer("busy", 1, "")?;
    let forever = format!("while {}; do :; done", reads(&disk.name, 1000));
    let reading = Running::bash(&forever)?;
    let output = stage("stage12", &["--duration", "3s"])?.stdout;
    drop(reading);
    let called = table(&output)?;
    let [started, ended] = ["submit_bio", "bio_endio"].map(|name| called.get(name).copied());
    let (started, ended) = (started.unwrap_or(0), ended.unwrap_or(0));
    println!("{started} bios started, {ended} ended");
    ensure!(started >= 100, "only {started} reads in 3 s: {output}");
    // In a few ms, between the looks at the two counters, some more may begin or end; some may be skipped.
    let differ = started.abs_diff(ended);
    ensure!(differ <= started / 4, "{ended} bios ended, and {started} began: {output}");
    Ok(())
}

/// `--type`: functions of another struct. Where the kernel hides its addresses, they are counted all the same.
fn stage12_asks_for_another_struct() -> Result<()> {
    ends_in_time()?;
    let _hidden = Setting::new("/proc/sys/kernel/kptr_restrict", "2")?;
    let load = || shell("echo one | dd bs=1 of=/dev/null status=none");
    let called = table(&beside("stage12", &["--type", "kiocb"], load)?.1)?;
    // `anon_pipe_read` on 7.2.
    let reads_pipes = called.keys().any(|name| name.ends_with("pipe_read"));
    ensure!(reads_pipes && !called.contains_key("submit_bio"), "{called:?}");
    Ok(())
}
