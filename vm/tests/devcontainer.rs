//! The machine that `.devcontainer/devcontainer.json` describes is the one in which CI runs.

#![allow(clippy::unwrap_used)]

use std::{fs, process::Command};

use serde_json::Value;

#[test]
fn the_devcontainer_is_the_machine_of_ci() {
    let workspace = workshop::workspace();
    let read = |file: &str| fs::read_to_string(workspace.join(file)).unwrap();
    let container: Value = serde_json::from_str(&read(".devcontainer/devcontainer.json")).unwrap();
    // What the specification of development containers has, as far as we use it: another field is a mistake.
    let has = |place: &str, fields: &[&str]| {
        assert!(container.pointer(place).unwrap().as_object().unwrap().keys().eq(fields));
    };
    has("/hostRequirements", &["cpus", "memory", "storage"]);
    has("/customizations/vscode", &["extensions"]);
    let commands = ["postCreateCommand", "postStartCommand"];
    has(
        "",
        &[
            "name",
            "image",
            "runArgs",
            "hostRequirements",
            commands[0],
            commands[1],
            "customizations",
        ],
    );
    let ci = read(".github/workflows/ci.yml");
    let run = ci.split("\n  run:\n").nth(1).unwrap();
    let image = run.lines().find_map(|line| line.trim().strip_prefix("container: ")).unwrap();
    assert_eq!(container["image"], image);
    // What CI prepares, and then what the workshop does by itself.
    let [create, start] = commands.map(|name| container[name].as_str().unwrap());
    let prepared = run.lines().find(|line| line.contains("apt-get update")).unwrap();
    let prepared = prepared.trim().trim_start_matches("- run: ").split(" && ");
    for command in prepared.chain(["cargo vm setup"]) {
        assert!(create.contains(command), "{command}");
    }
    // The numbers of /dev/kvm: a container has no such file, and may not open it.
    assert_eq!(container["runArgs"], serde_json::json!(["--device-cgroup-rule=c 10:232 rwm"]));
    assert!(start.contains("mknod /dev/kvm c 10 232"));
    for command in [create, start] {
        assert!(Command::new("sh").args(["-n", "-c", command]).status().unwrap().success());
    }
}

/// What runs in a workflow is the same tomorrow: an action is a commit, an image has a version, and so has what
/// cargo installs. A tag or a branch may be moved by whoever owns it.
#[test]
fn workflows_name_versions() {
    let workflows = workshop::workspace().join(".github/workflows");
    let (mut uses, mut images) = (0, 0);
    for file in workflows.read_dir().unwrap() {
        for line in fs::read_to_string(file.unwrap().path()).unwrap().lines() {
            let line = line.trim().trim_start_matches("- ");
            if let Some(action) = line.strip_prefix("uses: ") {
                let (_, commit) = action.split_once('@').unwrap();
                let (commit, version) = commit.split_once(" # v").unwrap();
                let is_hash = commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit());
                assert!(is_hash && version.contains('.'), "{line}");
                uses += 1;
            } else if let Some(image) = line.strip_prefix("container: ") {
                assert!(image.split_once(':').unwrap().1.contains('.'), "{line}");
                images += 1;
            } else if let Some((_, installed)) = line.split_once("cargo install --locked ") {
                assert!(installed.contains('@'), "{line}");
            }
        }
    }
    assert!(uses > 5 && images > 3, "{uses} actions, {images} images");
}
