//! The command line of every stage, its exit codes, and what is left behind.

use std::{collections::HashSet, fs, process::Command};

use anyhow::{Context, Result, ensure};
use common::{Cli, NoOptions};
use rustix::process::Signal;

use crate::{
    Test, disks,
    run::{Running, count, program, shell, stage, submitted, wait_until},
};

pub const TESTS: &[Test] = &[
    ("help_needs_no_root", help_needs_no_root),
    ("wrong_usage_is_2", wrong_usage_is_2),
    ("without_root_is_3", without_root_is_3),
    ("without_btf_is_3", without_btf_is_3),
    ("without_tracefs_is_3", without_tracefs_is_3),
    ("a_vanished_hook_is_3", a_vanished_hook_is_3),
    ("no_io_is_said_so", no_io_is_said_so),
    ("a_signal_leaves_nothing", a_signal_leaves_nothing),
    (
        "a_killed_run_leaves_an_instance_until_the_next",
        a_killed_run_leaves_an_instance_until_the_next,
    ),
    ("a_reader_may_go", a_reader_may_go),
    ("a_full_disk_is_1", a_full_disk_is_1),
    ("two_stages_at_once_see_every_line", two_stages_at_once_see_every_line),
    ("lost_lines_are_counted", lost_lines_are_counted),
];

const ALL: &[&str] = &[
    "stage00", "stage01", "stage02", "stage03", "stage04", "stage05", "stage06", "stage07",
    "stage08", "stage09",
];
const INSTANCES: &str = "/sys/kernel/tracing/instances";

fn help_needs_no_root() -> Result<()> {
    for name in ALL {
        let path = program(name);
        let help =
            shell(&format!("setpriv --reuid 65534 --clear-groups {} --help", path.display()))?;
        ensure!(help.contains("Usage: ") && help.contains("--duration"), "{name}: {help}");
    }
    Ok(())
}

fn wrong_usage_is_2() -> Result<()> {
    for name in ALL {
        for wrong in [
            "--no-such-option",
            "--duration=-5s",
            "--duration=0s",
            "--duration=5",
            "--duration=99999y",
        ] {
            let ended = stage(name, &[wrong])?;
            let option = wrong.split('=').next().unwrap_or(wrong);
            let said = ended.stderr.contains(option);
            ensure!(ended.code == Some(2) && said, "{name} {wrong}: {ended:?}");
            ensure!(ended.stdout.is_empty(), "{name} {wrong}: {ended:?}");
        }
    }
    Ok(())
}

/// Runs every stage after `preparation`, in a mount namespace of its own: all must exit with 3 and
/// say `words`.
fn unsupported(preparation: &str, words: &[&str]) -> Result<()> {
    for name in ALL {
        let path = program(name);
        let script = format!("{preparation} {} --duration 1s", path.display());
        let ended =
            Running::spawn(Command::new("unshare").args(["-m", "bash", "-c", &script]))?.end()?;
        ensure!(ended.code == Some(3), "{name}: {ended:?}");
        for word in words {
            ensure!(ended.stderr.contains(word), "{name} does not say {word:?}: {ended:?}");
        }
    }
    Ok(())
}

fn without_root_is_3() -> Result<()> {
    unsupported("setpriv --reuid 65534 --clear-groups", &["root", "sudo"])
}

fn without_btf_is_3() -> Result<()> {
    unsupported("mount -t tmpfs none /sys/kernel/btf;", &["BTF", "/sys/kernel/btf/vmlinux"])
}

fn without_tracefs_is_3() -> Result<()> {
    let unmount = "umount -R /sys/kernel/tracing; umount -R /sys/kernel/debug;";
    unsupported(unmount, &["mount -t tracefs"])
}

mod gone {
    include!(concat!(env!("OUT_DIR"), "/gone.skel.rs"));
}

fn a_vanished_hook_is_3() -> Result<()> {
    let mut object = std::mem::MaybeUninit::uninit();
    let cli = Cli { duration: None, verbose: false, own: NoOptions {} };
    let error = common::load(gone::GoneSkelBuilder::default(), &mut object, &cli, |_| Ok(())).err();
    let error = error.context("a function that is gone was hooked")?;
    ensure!(error.downcast_ref::<common::Unsupported>().is_some(), "another error: {error:#}");
    let message = format!("{error:#}");
    for word in ["blk_start_request", "blk_mq_start_request", "available_filter_functions"] {
        ensure!(message.contains(word), "no {word} in {message}");
    }
    Ok(())
}

fn no_io_is_said_so() -> Result<()> {
    for name in ALL {
        let ended = stage(name, &["--duration", "200ms"])?;
        ensure!(ended.code == Some(0), "{name}: {ended:?}");
        ensure!(
            ended.stdout.contains("No ") && ended.stdout.contains(" was seen"),
            "{name}: {ended:?}"
        );
        ensure!(
            !ended.stdout.contains("=>") && !ended.stdout.contains("Max latency"),
            "{name}: {ended:?}"
        );
    }
    Ok(())
}

/// The programs, maps and links that are loaded, by kind and id; an id never comes again.
pub fn loaded() -> Result<HashSet<String>> {
    let lists = shell(r"printf '%s list\n' prog map link | bpftool --json batch file -")?;
    let lists: serde_json::Value = serde_json::from_str(&lists)?;
    let mut loaded = HashSet::new();
    for list in lists.as_array().with_context(|| format!("bpftool: {lists}"))? {
        let kind = &list["command"][0];
        let objects = list["output"].as_array().with_context(|| format!("bpftool: {list}"))?;
        loaded.extend(objects.iter().map(|object| format!("{kind} {}", object["id"])));
    }
    Ok(loaded)
}

pub fn instances() -> Vec<String> {
    let entries = fs::read_dir(INSTANCES).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until nothing is loaded but what was before: the kernel frees programs and maps a moment
/// after their last user has gone.
pub fn wait_until_unloaded(before: &HashSet<String>) -> Result<()> {
    wait_until("the end of what was loaded", || Ok(loaded()?.is_subset(before)))
        .with_context(|| shell("bpftool prog list; bpftool map list").unwrap_or_default())
}

fn a_signal_leaves_nothing() -> Result<()> {
    let before = loaded()?;
    // One handler serves both, in all.
    for (signal, names) in [(Signal::INT, ALL), (Signal::TERM, &["stage00", "stage06"])] {
        for name in names {
            let running = Running::stage(name, &[])?;
            ensure!(
                !loaded()?.is_subset(&before),
                "{name} has nothing loaded: the test does not test"
            );
            running.signal(signal)?;
            let ended = running.end()?;
            ensure!(ended.code == Some(0) && !ended.stdout.is_empty(), "{name}: {ended:?}");
            wait_until_unloaded(&before)?;
            ensure!(instances().is_empty(), "{name} left {:?}", instances());
        }
    }
    Ok(())
}

fn a_killed_run_leaves_an_instance_until_the_next() -> Result<()> {
    let before = loaded()?;
    for name in ["stage01", "stage04", "stage08"] {
        let running = Running::stage(name, &[])?;
        running.signal(Signal::KILL)?;
        running.end()?;
        wait_until_unloaded(&before)?;
        ensure!(instances().len() == 1, "{name}: {:?}", instances());
        stage(name, &["--duration", "100ms"])?;
        ensure!(instances().is_empty(), "after the next {name}: {:?}", instances());
    }
    Ok(())
}

fn a_reader_may_go() -> Result<()> {
    let before = loaded()?;
    let disk = disks::virtio()?;
    let read = format!(
        "sleep 2; while :; do dd if=/dev/{disk} of=/dev/null bs=4k count=50 iflag=direct status=none; done"
    );
    let script = format!(
        "({read}) & reader=$!; {} --duration 60s | head -n 3; echo ${{PIPESTATUS[0]}}; kill $reader",
        program("stage06").display()
    );
    let output = shell(&script)?;
    ensure!(output.lines().count() == 4 && output.ends_with("\n0\n"), "{output}");
    // Before the summary; before the first word; the reader of what libbpf says.
    let mut pipes = vec![("stage06", "--quiet --duration 1s | head -n 1")];
    pipes.push(("stage06", "--verbose --quiet --duration 1s 2>&1 | head -n 1"));
    pipes.extend(["stage00", "stage06"].map(|name| (name, "--duration 1s | true")));
    for (name, pipe) in pipes {
        let script =
            format!("{} {pipe} >/dev/null; echo ${{PIPESTATUS[0]}}", program(name).display());
        let ended = Running::bash(&script)?.end()?;
        ensure!(ended.stdout == "0\n", "{name} {pipe}: {ended:?}");
        ensure!(!ended.stderr.contains("panicked"), "{name} {pipe}: {ended:?}");
        ensure!(instances().is_empty(), "{name} {pipe}: {:?}", instances());
    }
    wait_until_unloaded(&before)
}

/// A disk that is full is no reader that has gone.
fn a_full_disk_is_1() -> Result<()> {
    let script = format!("{} --quiet --duration 1s >/dev/full", program("stage06").display());
    let ended = Running::bash(&script)?.end()?;
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(ended.stderr.contains("stage06: stdout: No space left on device"), "{ended:?}");
    Ok(())
}

fn two_stages_at_once_see_every_line() -> Result<()> {
    let disk = disks::virtio()?;
    let (one, other) = (Running::stage("stage01", &[])?, Running::stage("stage01", &[])?);
    let before = disks::bios(&disk)?;
    shell(&format!("dd if=/dev/{disk} of=/dev/null bs=4k count=300 iflag=direct status=none"))?;
    let reads = disks::bios(&disk)? - before;
    ensure!(reads == 300, "{reads} reads");
    for running in [one, other] {
        let output = running.interrupt()?;
        // Every bio runs both program, and each writes a line that both see.
        ensure!(submitted(&output) == 600, "{} lines for 300 reads", submitted(&output));
        ensure!(count(&output, "trace lines, 0 lost")? >= 600, "{output}");
    }
    Ok(())
}

fn lost_lines_are_counted() -> Result<()> {
    let disk = disks::virtio()?;
    let running = Running::stage("stage01", &[])?;
    // Stopped, it empties no pipe: the kernel's buffer overflows, 1.4 MB for each CPU.
    running.signal(Signal::STOP)?;
    let before = disks::bios(&disk)?;
    shell(&format!(
        "taskset -c 0 dd if=/dev/{disk} of=/dev/null bs=512 count=30000 iflag=direct status=none"
    ))?;
    let reads = disks::bios(&disk)? - before;
    running.signal(Signal::CONT)?;
    let output = running.interrupt()?;
    let printed = submitted(&output);
    let summary = output.lines().last().context("no summary")?;
    let lost = summary.split(", ").nth(1).and_then(|lost| lost.split(' ').next());
    let lost: u64 = lost.context("no count")?.parse()?;
    ensure!(lost > 0, "nothing was lost: {summary}");
    ensure!(printed + lost == reads, "{printed} printed + {lost} lost, {reads} bios: {summary}");
    Ok(())
}
