//! The machine that `.devcontainer/devcontainer.json` describes is the one in which CI runs.

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeMap, fs, process::Command};

use serde::Deserialize;

/// What the specification of development containers has, as far as we use it: another field is a mistake.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[allow(dead_code)]
struct Container {
    name: String,
    image: String,
    run_args: Vec<String>,
    host_requirements: Requirements,
    post_create_command: String,
    post_start_command: String,
    /// By tool.
    customizations: BTreeMap<String, Tool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct Requirements {
    cpus: u32,
    memory: String,
    storage: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code)]
struct Tool {
    extensions: Vec<String>,
}

#[test]
fn the_devcontainer_is_the_machine_of_ci() {
    let workspace = host::workspace();
    let read = |file: &str| fs::read_to_string(workspace.join(file)).unwrap();
    let container: Container =
        serde_json::from_str(&read(".devcontainer/devcontainer.json")).unwrap();
    let ci = read(".github/workflows/ci.yml");
    let run = ci.split("\n  run:\n").nth(1).unwrap();
    let image = run.lines().find_map(|line| line.trim().strip_prefix("container: ")).unwrap();
    assert_eq!(container.image, image);
    // What CI prepares, and then what the workshop does by itself.
    let commands = run.lines().find(|line| line.contains("apt-get update")).unwrap();
    let commands = commands.trim().trim_start_matches("- run: ").split(" && ");
    for command in commands.chain(["cargo vm setup"]) {
        assert!(container.post_create_command.contains(command), "{command}");
    }
    // The numbers of /dev/kvm: a container has no such file, and may not open it.
    assert_eq!(container.run_args, ["--device-cgroup-rule=c 10:232 rwm"]);
    assert!(container.post_start_command.contains("mknod /dev/kvm c 10 232"));
    for command in [container.post_create_command, container.post_start_command] {
        assert!(Command::new("sh").args(["-n", "-c", &command]).status().unwrap().success());
    }
}
