//! A stage is a lesson: short, a small step from the stage before, and what its README says to do
//! to it can be done.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A stage, and how many lines of its trace.bpf.c and main.rs may differ from the stage before.
const STAGES: &[(&str, Option<(usize, usize)>)] = &[
    ("stage00_tracex3", None),
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

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn lessons_are_small_steps() {
    for pair in STAGES.windows(2) {
        let [(before, _), (stage, Some((bpf, rust)))] = pair else { continue };
        for (file, most) in [("trace.bpf.c", bpf), ("main.rs", rust)] {
            let path = |stage: &str| workspace().join(stage).join("src").join(file);
            let diff = Command::new("diff").arg(path(before)).arg(path(stage)).output().unwrap();
            let lines = String::from_utf8_lossy(&diff.stdout);
            let changed = lines.lines().filter(|line| line.starts_with(['<', '>'])).count();
            assert!(
                changed > 0 && changed <= *most,
                "{before} to {stage}: {changed} lines of {file}, {most} allowed"
            );
        }
    }
}

#[test]
fn stages_are_short() {
    for (stage, _) in STAGES {
        for (file, most) in [("src/trace.bpf.c", 100), ("src/main.rs", 80), ("README.md", 90)] {
            let lines =
                fs::read_to_string(workspace().join(stage).join(file)).unwrap().lines().count();
            assert!(lines <= most, "{stage}/{file} has {lines} lines, {most} allowed");
        }
    }
}

/// Every `sed -i` of a README finds what it is to change.
#[test]
fn readmes_edits_change_something() {
    let mut edits = 0;
    for (stage, _) in STAGES {
        let readme = fs::read_to_string(workspace().join(stage).join("README.md")).unwrap();
        for (before, _) in readme.match_indices("sed -i") {
            let edit = &readme[before..];
            let edit = if readme[..before].ends_with('`') {
                edit.split('`').next().unwrap().to_owned()
            } else {
                let last = edit.lines().position(|line| !line.ends_with('\\')).unwrap();
                edit.lines().take(last + 1).collect::<Vec<_>>().join("\n")
            };
            let copy = tempfile::tempdir().unwrap();
            let script = format!(
                "set -e; mkdir {0}/common; cp -r {stage} {0}; cp -r common/bpf {0}/common
                 (cd {0}; {edit})
                 ! (diff -r {stage} {0}/{stage} && diff -r common/bpf {0}/common/bpf) >/dev/null",
                copy.path().display()
            );
            let status =
                Command::new("bash").args(["-c", &script]).current_dir(workspace()).status();
            assert!(status.unwrap().success(), "{stage}/README.md: this changes nothing: {edit}");
            edits += 1;
        }
    }
    assert!(edits >= 5, "only {edits} were found");
}
