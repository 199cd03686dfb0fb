//! A stage is a lesson: its difference from the stage before stays small.

use std::{env, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};

use crate::Test;

pub const TESTS: &[Test] =
    &[("lessons_are_small_steps", lessons_are_small_steps), ("stages_are_short", stages_are_short)];

/// A stage, and how many lines of its trace.bpf.c and main.rs may differ from the stage before.
const STAGES: &[(&str, Option<(usize, usize)>)] = &[
    ("stage01_submit_bio", None),
    ("stage02_bio_endio", Some((12, 4))),
    ("stage03_latency_map", Some((50, 15))),
    ("stage04_max_latency", Some((25, 35))),
    ("stage05_sector", Some((12, 8))),
    ("stage06_stacktrace", Some((20, 20))),
    // Names and types of another layer take 25; a request may be issued more than once.
    ("stage07_rq_latency", Some((35, 10))),
    ("stage08_pagecache", None),
    ("stage09_pid_filter", Some((12, 20))),
];

/// The directories of the stages that have a budget, and stage 00.
pub fn stages() -> impl Iterator<Item = &'static str> {
    ["stage00_tracex3"].into_iter().chain(STAGES.iter().map(|(stage, _)| *stage))
}

/// The workspace's root.
pub fn workspace() -> PathBuf {
    env::var_os("VM_WORKSPACE").map_or_else(|| ".".into(), PathBuf::from)
}

fn lessons_are_small_steps() -> Result<()> {
    for pair in STAGES.windows(2) {
        let [(before, _), (stage, Some((bpf, rust)))] = pair else { continue };
        for (file, most) in [("trace.bpf.c", bpf), ("main.rs", rust)] {
            let path = |stage: &str| workspace().join(stage).join("src").join(file);
            let diff =
                Command::new("diff").arg(path(before)).arg(path(stage)).output().context("diff")?;
            let lines = String::from_utf8_lossy(&diff.stdout);
            let changed = lines.lines().filter(|line| line.starts_with(['<', '>'])).count();
            ensure!(
                changed > 0 && changed <= *most,
                "{before} to {stage}: {changed} lines of {file}, {most} allowed"
            );
        }
    }
    Ok(())
}

fn stages_are_short() -> Result<()> {
    for stage in stages() {
        for (file, most) in [("src/trace.bpf.c", 100), ("src/main.rs", 80), ("README.md", 90)] {
            let path = workspace().join(stage).join(file);
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            ensure!(
                text.lines().count() <= most,
                "{stage}/{file} has {} lines, {most} allowed",
                text.lines().count()
            );
        }
    }
    Ok(())
}
