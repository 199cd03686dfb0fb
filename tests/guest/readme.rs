//! What a stage's README shows is what the stage prints.

use std::{
    collections::HashSet,
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    Test,
    disks::{self, Mounted},
    pagecache,
    run::{self, Running, wait_until},
};

pub const TESTS: &[Test] = &[("readmes_show_real_output", readmes_show_real_output)];

fn readmes_show_real_output() -> Result<()> {
    let mounted = Mounted::new()?;
    let workload = run::workspace().join("vm/workload.sh");
    let workload = Running::spawn(&mut Command::new(workload))?;
    let result = run::stages()?.into_iter().try_for_each(|directory| {
        let package = directory.split('_').next().unwrap_or_default();
        let readme = fs::read_to_string(run::workspace().join(&directory).join("README.md"))?;
        let (_, rest) = readme.split_once("## What you see\n```\n").context(directory.clone())?;
        let (shown, _) = rest.split_once("\n```\n").context("the block has no end")?;
        fs::remove_file("/run/go").ok();
        // Stage 09's shows one process: one that waits for the stage, and then reads 1 MiB.
        let wanted = match package {
            "stage09" => Some(Running::bash(&pagecache::reader("file"))?),
            _ => None,
        };
        let pid = wanted.as_ref().map(|process| process.id().to_string());
        let running = Running::stage(package, &pid.as_deref().into_iter().collect::<Vec<_>>())?;
        let (start, before) = (Instant::now(), disks::bios(&mounted.disk)?);
        fs::write("/run/go", "")?;
        match wanted {
            Some(process) => ensure!(process.end()?.code == Some(0), "dd failed"),
            // A row of the heatmap takes 2 s, a round of the workload some 40 bios.
            None => wait_until("the workload", || {
                let round = disks::bios(&mounted.disk)? > before + 100;
                Ok(round && (package != "stage00" || start.elapsed() > Duration::from_secs(2)))
            })?,
        }
        let output = running.interrupt()?;
        let mut printed: HashSet<String> = output.lines().map(shape).collect();
        // Before 5.16 a read's event has three lines.
        if ["stage08", "stage09"].contains(&package) {
            printed.extend(pagecache::events(&output)?.iter().map(|event| shape(event)));
        }
        for line in shown.lines().filter(|line| *line != "...") {
            ensure!(
                printed.contains(&shape(line)),
                "{directory}/README.md: nothing like {line:?} was printed:\n{output}"
            );
        }
        Ok(())
    });
    workload.signal(rustix::process::Signal::KILL)?;
    workload.end()?;
    result
}

/// A line without what differs from run to run: numbers, addresses, tasks, functions, the cells of
/// a heatmap, the name of a partition.
fn shape(line: &str) -> String {
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
    let mut shape = String::new();
    for word in line.split_whitespace() {
        let word: String = word.chars().map(|c| if c.is_ascii_digit() { 'N' } else { c }).collect();
        let hex = word.contains("=Nx");
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
