//! One set of features: what one command has built, the next one does not build again.

#![allow(missing_docs, clippy::unwrap_used, clippy::too_many_lines)]

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
};

use serde_json::Value;

/// What build scripts use, and no command names: with the features of the rest, all of that would be built
/// for build scripts, too.
const BUILD_SCRIPTS: &str = "common-build";

/// What cargo prints, in the workspace.
fn cargo(args: &[&str]) -> String {
    let mut cargo = Command::new(std::env::var("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(workshop::workspace()).args(args).arg("--offline");
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The crates of other people that these packages need, each with the features that cargo builds it with: in
/// two ways, where it is needed at build time, too.
fn crates(packages: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let tree = ["tree", "--prefix", "none", "--format", "{p}|{f}"];
    let mut crates: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in cargo(&[&tree, packages].concat()).lines() {
        // A blank line stands between two packages; what has been shown before is marked.
        let line = line.trim_end_matches(" (*)");
        let Some((name, features)) = line.split_once('|') else { continue };
        // Those of the workspace have the path of their directory.
        if !name.contains(" (/") {
            crates
                .entry(name.trim_end_matches(" (proc-macro)").into())
                .or_default()
                .insert(features.into());
        }
    }
    crates
}

#[test]
fn every_command_builds_a_crate_with_the_same_features() {
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 40, "{packages:?}");
    let all = crates(&["--workspace"]);
    let mut others = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap();
        if name == BUILD_SCRIPTS {
            continue;
        }
        let mut targets = package["targets"].as_array().unwrap().iter();
        let is_program = targets.any(|target| target["kind"][0] == "bin");
        // What `cargo build` needs, of which a program is made, and what `cargo test` needs.
        for edges in ["normal,build", "all"].iter().skip(usize::from(!is_program)) {
            for (it, features) in crates(&["--package", name, "--edges", edges]) {
                for less in features.difference(&all[&it]) {
                    others.push(format!("{name} ({edges}): {it} with {less}, not {:?}", all[&it]));
                }
            }
        }
    }
    let list = others.join("\n");
    assert!(
        list.is_empty(),
        "add the features to [workspace.dependencies], or to common/features:\n{list}"
    );
}
