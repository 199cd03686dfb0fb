//! What a stage's README shows is what the stage prints.

use std::{collections::HashSet, fs, process::Command};

use anyhow::{Context, Result, ensure};

use crate::{Test, budget, disks::Mounted, pagecache, run::Running};

pub const TESTS: &[Test] = &[("readmes_show_real_output", readmes_show_real_output)];

fn readmes_show_real_output() -> Result<()> {
    let _mounted = Mounted::new()?;
    let workload = budget::workspace().join("vm/workload.sh");
    let workload = Running::spawn(&mut Command::new(workload))?;
    let result = budget::stages().try_for_each(|directory| {
        let package = directory.split('_').next().unwrap_or_default();
        let readme = fs::read_to_string(budget::workspace().join(directory).join("README.md"))?;
        let (_, rest) =
            readme.split_once("## What you see\n```\n").context(directory.to_owned())?;
        let (shown, _) = rest.split_once("\n```\n").context("the block has no end")?;
        fs::remove_file("/run/go").ok();
        // Stage 09's shows one process: one that waits for the stage, and then reads 1 MiB.
        let wanted = match package {
            "stage09" => Some(Running::spawn(Command::new("sh").args(["-c", READER]))?),
            _ => None,
        };
        let pid = wanted.as_ref().map(|process| process.id().to_string());
        let arguments = ["--duration", "2s"].into_iter().chain(pid.as_deref());
        let running = Running::stage(package, &arguments.collect::<Vec<_>>())?;
        fs::write("/run/go", "")?;
        let ended = running.end()?;
        ensure!(ended.code == Some(0), "{package}: {ended:?}");
        let mut printed: HashSet<String> = ended.stdout.lines().map(shape).collect();
        // Before 5.16 a read's event has three lines.
        if ["stage08", "stage09"].contains(&package) {
            printed.extend(pagecache::events(&ended.stdout)?.iter().map(|event| shape(event)));
        }
        for line in shown.lines().filter(|line| *line != "...") {
            ensure!(
                printed.contains(&shape(line)),
                "{directory}/README.md: nothing like {line:?} was printed:\n{}",
                ended.stdout
            );
        }
        Ok(())
    });
    workload.signal(rustix::process::Signal::KILL)?;
    workload.end()?;
    result
}

/// As in stage 09's README, but it waits for the stage, not for a time.
const READER: &str = "while [ ! -e /run/go ]; do sleep 0.1; done; \
                      exec dd if=/mnt/data/file of=/dev/null bs=64k count=16 status=none";

/// A line without what differs from run to run: numbers, addresses, tasks, functions, the cells of
/// a heatmap, the name of a partition.
fn shape(line: &str) -> String {
    if line.starts_with("=> ") {
        return "=> a function".into();
    }
    if line.starts_with("Bio Info : Sector (") {
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
