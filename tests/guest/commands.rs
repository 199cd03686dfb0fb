//! The command line of every stage, its exit codes, and what is left behind.

use std::{collections::HashSet, fs, process::Command};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::{
    disks::{self, Mounted, NullBlk, requests},
    run::{
        Ended, Running, count, fio_command, program, shell, stage, submitted, wait_until, workspace,
    },
};

tests![
    help_needs_no_root,
    wrong_usage_is_2,
    without_root_is_3,
    without_btf_is_3,
    without_tracefs_is_3,
    without_capabilities_is_3,
    capabilities_are_enough,
    a_missing_capability_is_named,
    a_vanished_hook_is_3,
    a_detach_waits_for_programs,
    a_refused_program_names_its_line,
    a_value_that_is_too_small_is_named,
    a_program_that_is_not_attached_is_named,
    a_signal_leaves_nothing,
    a_killed_run_leaves_an_instance_until_the_next,
    a_reader_may_go,
    a_full_disk_is_1,
    one_file_takes_both_streams,
    a_pipe_of_both_streams_may_close,
    two_stages_at_once_see_every_line,
    lost_lines_are_counted,
];

/// All programs begin with the same function, `common::main`, which a test of the sources checks: one of them
/// shows what it says where it cannot run.
const ONE: &str = "stage06";
const INSTANCES: &str = "/sys/kernel/tracing/instances";

fn help_needs_no_root() -> Result<()> {
    let path = program(ONE);
    let help = shell(&format!("setpriv --reuid 65534 --clear-groups {} --help", path.display()))?;
    ensure!(help.contains("Usage: ") && help.contains("--duration"), "{help}");
    Ok(())
}

fn wrong_usage_is_2() -> Result<()> {
    let durations = ["-5s", "0s", "5", "99999y"].map(|wrong| format!("--duration={wrong}"));
    for wrong in durations.iter().map(String::as_str).chain(["--no-such-option"]) {
        let ended = stage(ONE, &[wrong])?;
        let said = ended.stderr.contains(wrong.split('=').next().unwrap_or(wrong));
        ensure!(ended.code == Some(2) && said && ended.stdout.is_empty(), "{wrong}: {ended:?}");
    }
    Ok(())
}

/// Runs the program after `preparation`, in a mount namespace of its own: it must exit with 3 and say `words`.
fn unsupported(preparation: &str, words: &[&str]) -> Result<()> {
    let script = format!("{preparation} {} --duration 1s", program(ONE).display());
    let ended =
        Running::spawn(Command::new("unshare").args(["-m", "bash", "-c", &script]))?.end()?;
    ensure!(ended.code == Some(3), "{ended:?}");
    for word in words {
        ensure!(ended.stderr.contains(word), "it does not say {word:?}: {ended:?}");
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

/// Root as in a container: without its capabilities.
fn without_capabilities_is_3() -> Result<()> {
    let setpriv = "setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all";
    unsupported(setpriv, &["is root", "CAP_BPF and CAP_PERFMON", "cargo vm run"])
}

/// What a command has to begin with to run as a user with these capabilities. `capsh` could do it, too.
fn with(capabilities: &[&str]) -> String {
    let set: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    format!(
        "setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all{set} \
         --inh-caps=-all{set} --ambient-caps=-all{set}"
    )
}

const ENOUGH: [&str; 4] = ["bpf", "perfmon", "dac_read_search", "syslog"];
const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";

/// The capabilities that --help names are enough.
fn capabilities_are_enough() -> Result<()> {
    let disk = disks::virtio()?;
    let paranoid = fs::read_to_string(PARANOID)?;
    fs::write(PARANOID, "2")?;
    let judge = || -> Result<()> {
        let before = loaded()?;
        // Of each kind: a tracepoint with BTF, event lines, stacks, the page cache, a ring buffer.
        let programs = [
            ("stage00", "--text"),
            ("stage03", ""),
            ("stage06", ""),
            ("stage09", "1"),
            ("slow_io", "--min 1us"),
        ];
        for (name, arguments) in programs {
            let mut set = ENOUGH.to_vec();
            set.extend(["stage03", "stage09"].contains(&name).then_some("dac_override"));
            let path = program(name);
            let script = format!("exec {} {} {arguments}", with(&set), path.display());
            let mut running = Running::bash(&script)?;
            running.wait_for(": tracing ")?;
            shell(&format!(
                "dd if=/dev/{disk} of=/dev/null bs=4k count=20 iflag=direct status=none"
            ))?;
            running.signal(Signal::INT)?;
            let ended = running.end()?;
            ensure!(ended.code == Some(0), "{name} with {set:?}: {ended:?}");
            ensure!(ended.stderr.lines().count() == 1, "{name} with {set:?}: {ended:?}");
            let seen = match name {
                "stage03" | "stage06" => count(&ended.stdout, "bios completed")?,
                "stage00" => count(&ended.stdout, "requests completed")?,
                "slow_io" => {
                    ended.stdout.lines().filter(|line| line.ends_with(" dd")).count() as u64
                }
                _ => continue,
            };
            ensure!(seen >= 20, "{name} with {set:?} has seen {seen} of 20 reads: {ended:?}");
        }
        wait_until_unloaded(&before)
    };
    let judged = judge();
    fs::write(PARANOID, paranoid.trim())?;
    judged
}

/// The message names the capability that is missing.
fn a_missing_capability_is_named() -> Result<()> {
    let say = |name: &str, set: &[&str], word: &str| -> Result<()> {
        let script = format!("exec {} {} --duration 1s", with(set), program(name).display());
        let ended = Running::bash(&script)?.end()?;
        let said = ended.code == Some(3) && ended.stderr.contains(word);
        ensure!(said, "{name} with {set:?} does not say {word}: {ended:?}");
        Ok(())
    };
    for missing in ENOUGH {
        let set: Vec<&str> = ENOUGH.into_iter().filter(|name| *name != missing).collect();
        say("stage10", &set, &format!("CAP_{} is missing", missing.to_uppercase()))?;
    }
    let paranoid = fs::read_to_string(PARANOID)?;
    fs::write(PARANOID, "3")?;
    let judged = say("stage06", &ENOUGH, "sysctl kernel.perf_event_paranoid=2").and_then(|()| {
        fs::write(PARANOID, "2")?;
        say("stage01", &ENOUGH, "CAP_DAC_OVERRIDE is missing")?;
        say("ctracer", &ENOUGH, "CAP_SYS_ADMIN is missing")
    });
    fs::write(PARANOID, paranoid.trim())?;
    judged
}

/// Starts a program that belongs to no stage, from the workspace's root.
fn start_broken(which: &str, arguments: &[&str]) -> Result<Running> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_broken"));
    Running::spawn(command.args(arguments).env("BROKEN", which).current_dir(workspace()))
}

fn broken(which: &str, arguments: &[&str]) -> Result<Ended> {
    start_broken(which, arguments)?.end()
}

/// A stage reads its counters only after its last running program has ended.
fn a_detach_waits_for_programs() -> Result<()> {
    let disk = NullBlk::new(&[])?;
    for _ in 0..3 {
        let mut slow = start_broken("slow", &[])?;
        slow.wait_for(": tracing ")?;
        let reads = format!(
            "--filename=/dev/{} --direct=1 --rw=randread --bs=4k --ioengine=psync --numjobs=4 \
             --thread --time_based --runtime=100",
            disk.name
        );
        let load = Running::bash(&format!("exec {}", fio_command(&reads)))?;
        let read = requests(&disk.name)?;
        wait_until("reads", || Ok(requests(&disk.name)? > read + 20))?;
        let output = slow.interrupt()?;
        drop(load);
        let (begun, ended) = (count(&output, "begun")?, count(&output, "ended")?);
        ensure!(begun > 0 && begun == ended, "{begun} begun, {ended} ended: {output}");
    }
    Ok(())
}

fn a_vanished_hook_is_3() -> Result<()> {
    let ended = broken("gone", &[])?;
    ensure!(ended.code == Some(3) && ended.stdout.is_empty(), "{ended:?}");
    for word in ["blk_start_request", "blk_mq_start_request", "available_filter_functions"] {
        ensure!(ended.stderr.contains(word), "no {word}: {ended:?}");
    }
    Ok(())
}

/// The verifier says "R0 min value is outside of the allowed memory range", and the sizes in a line
/// before it.
fn a_value_that_is_too_small_is_named() -> Result<()> {
    let ended = broken("value", &[])?;
    let sizes = "8 bytes at offset 0 of a map's value, which has 4 bytes";
    ensure!(ended.code == Some(1) && ended.stderr.contains(sizes), "no {sizes}: {ended:?}");
    ensure!(ended.stderr.contains("*found"), "no line of C: {ended:?}");
    Ok(())
}

/// It would run for as long as the user waits, and print nothing.
fn a_program_that_is_not_attached_is_named() -> Result<()> {
    let ended = broken("unattached", &[])?;
    let message = "broken: block_rq_issue() was loaded but never attached";
    ensure!(ended.code == Some(1) && ended.stdout.is_empty(), "{ended:?}");
    ensure!(ended.stderr.starts_with(message), "no {message}: {ended:?}");
    ensure!(ended.stderr.contains("session.attach()"), "{ended:?}");
    Ok(())
}

/// The message names the line that the verifier rejects, on every kernel; with --verbose, behind all
/// that libbpf says.
fn a_refused_program_names_its_line() -> Result<()> {
    let file = "tests/src/refused.bpf.c";
    let source = fs::read_to_string(workspace().join(file))?;
    let line =
        source.lines().position(|line| line.trim() == "start = *found;").context("line")? + 1;
    let message = format!(
        "broken: the verifier rejects io_end(): R0 invalid mem access 'map_value_or_null'\n  \
         {file}:{line}: start = *found;\n"
    );
    let ended = broken("refused", &[])?;
    ensure!(ended.code == Some(1) && ended.stdout.is_empty(), "{ended:?}");
    let hint = "  --verbose shows all that libbpf and the verifier say\n";
    ensure!(ended.stderr == format!("{message}{hint}"), "{ended:?}, not {message}{hint}");
    for verbose in ["-v", "--verbose"] {
        let ended = broken("refused", &[verbose])?;
        ensure!(ended.code == Some(1) && ended.stdout.is_empty(), "{ended:?}");
        ensure!(ended.stderr.ends_with(&message), "{ended:?}");
        ensure!(ended.stderr.contains("-- BEGIN PROG LOAD LOG --"), "{ended:?}");
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

/// No hook, no map, no trace instance; and a run that saw nothing says so.
fn a_signal_leaves_nothing() -> Result<()> {
    let before = loaded()?;
    let ends = [("stage00", Signal::TERM), ("stage06", Signal::INT), ("stage08", Signal::HUP)];
    let running = Running::stages(ends.map(|(name, _)| (name, vec![])))?;
    ensure!(!loaded()?.is_subset(&before), "nothing is loaded: the test does not test");
    ensure!(!instances().is_empty(), "no instance: the test does not test");
    for (running, (_, signal)) in running.iter().zip(ends) {
        running.signal(signal)?;
    }
    for (running, (name, _)) in running.into_iter().zip(ends) {
        let ended = running.end()?;
        // Stage 08 has seen bpftool being read.
        let said = match name {
            "stage08" => ended.stdout.contains("[Total "),
            _ => ["No event was seen", "was anything read or written?"]
                .iter()
                .any(|hint| ended.stdout.contains(hint)),
        };
        ensure!(ended.code == Some(0) && said, "{name}: {ended:?}");
        let figures = ended.stdout.contains("=>") || ended.stdout.contains("Max latency");
        ensure!(!figures, "{name}: {ended:?}");
    }
    wait_until_unloaded(&before)?;
    ensure!(instances().is_empty(), "left: {:?}", instances());
    Ok(())
}

fn a_killed_run_leaves_an_instance_until_the_next() -> Result<()> {
    let before = loaded()?;
    let running = Running::stage("stage01", &[])?;
    running.signal(Signal::KILL)?;
    running.end()?;
    wait_until_unloaded(&before)?;
    ensure!(instances().len() == 1, "{:?}", instances());
    stage("stage08", &["--duration", "100ms"])?;
    ensure!(instances().is_empty(), "after the next one: {:?}", instances());
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
        program("stage03").display()
    );
    let output = Running::bash(&script)?.end()?.stdout;
    ensure!(output.lines().count() == 4 && output.ends_with("\n0\n"), "{output}");
    // Before the summary; before the first word; the reader of what libbpf says.
    let pipes = [
        ("stage04", "--duration 1s | head -n 1"),
        ("stage04", "--verbose --duration 1s 2>&1 | head -n 1"),
        ("stage00", "--duration 1s | true"),
        ("stage02", "--duration 1s | true"),
        ("ctracer", "--only submit_bio --duration 1s | head -n 1"),
        ("ctracer", "--only submit_bio --json --duration 1s | true"),
    ];
    let running = pipes.map(|(name, pipe)| {
        let path = program(name);
        Running::bash(&format!("{} {pipe} >/dev/null; echo ${{PIPESTATUS[0]}}", path.display()))
    });
    for (running, (name, pipe)) in running.into_iter().zip(pipes) {
        let ended = running?.end()?;
        ensure!(ended.stdout == "0\n", "{name} {pipe}: {ended:?}");
        ensure!(!ended.stderr.contains("panicked"), "{name} {pipe}: {ended:?}");
    }
    ensure!(instances().is_empty(), "{:?}", instances());
    wait_until_unloaded(&before)
}

/// A disk that is full is no reader that has gone.
fn a_full_disk_is_1() -> Result<()> {
    for (name, options) in [("stage06", ""), ("ctracer", "--quiet --only submit_bio")] {
        let path = program(name);
        let script = format!("{} {options} --duration 1s >/dev/full", path.display());
        let ended = Running::bash(&script)?.end()?;
        ensure!(ended.code == Some(1), "{name}: {ended:?}");
        let said = format!("{name}: stdout: No space left on device");
        ensure!(ended.stderr.contains(&said), "{ended:?}");
    }
    Ok(())
}

/// Keeps something going that every stage sees, until it is dropped.
fn something_to_see(disk: &str) -> Result<Running> {
    Running::bash(&format!(
        "while :; do dd if=/dev/{disk} of=/dev/null bs=4k count=5 iflag=direct status=none; \
         dd if=/dev/{disk} of=/dev/null bs=4k count=2 status=none; sleep 0.2; done"
    ))
}

/// `stageNN >file 2>&1` and `>>file`: what stdout and stderr get is in the file, whole and in order,
/// behind what was there before. On overlay and on ext4, which lock a file in their own ways.
fn one_file_takes_both_streams() -> Result<()> {
    let mounted = Mounted::new()?;
    let load = something_to_see(&disks::virtio()?)?;
    // Not /root: where QEMU runs as a user, this is closed to it.
    for (directory, kind) in [("/var/tmp", "overlayfs"), ("/mnt/data", "ext2/ext3")] {
        let found = shell(&format!("stat -f -c %T {directory}"))?;
        ensure!(found.trim() == kind, "{directory} is {found:?}, not {kind}");
    }
    let ways = [
        ("stage00", "/var/tmp", ">", ""),
        ("stage01", "/var/tmp", ">>", "before\n"),
        ("stage03", "/mnt/data", ">", ""),
        ("stage08", "/mnt/data", ">>", "before\n"),
    ];
    let mut running = Vec::new();
    for (name, directory, redirection, before) in ways {
        let file = format!("{directory}/{name}.log");
        fs::write(&file, "before\n")?;
        let path = program(name);
        let script = format!("exec {} {redirection}{file} 2>&1", path.display());
        running.push((name, file, before, Running::bash(&script)?));
    }
    let event = |name: &str| if name == "stage00" { " # " } else { "bpf_trace_printk: " };
    for (name, file, ..) in &running {
        let has_event = || Ok(fs::read_to_string(file)?.contains(event(name)));
        wait_until("an event", has_event).with_context(|| file.clone())?;
    }
    for (name, file, before, running) in running {
        running.signal(Signal::INT)?;
        let ended = running.end().with_context(|| file.clone())?;
        ensure!(ended.code == Some(0), "{file}: {ended:?}");
        let text = fs::read_to_string(&file)?;
        whole(name, before, &text).with_context(|| file.clone())?;
        fs::remove_file(&file)?;
    }
    drop(load);
    drop(mounted);
    Ok(())
}

/// Checks what a stage has written to one file: what was there before, what it says at the start,
/// its event lines in the order of their times, and its summary.
fn whole(name: &str, before: &str, text: &str) -> Result<()> {
    let start = format!("{before}{name}: tracing until Ctrl-C\n");
    let rest = text.strip_prefix(&start).with_context(|| format!("not {start:?} first: {text}"))?;
    if name != "stage00" {
        let (events, _) = rest.split_once(" lost\n").with_context(|| format!("no end: {text}"))?;
        let (events, said) = events.rsplit_once('\n').with_context(|| format!("none: {text}"))?;
        let mut last = 0.0;
        for line in events.lines() {
            let time = line
                .split_once(": bpf_trace_printk: ")
                .and_then(|(prefix, _)| prefix.rsplit(' ').next()?.parse::<f64>().ok());
            let time = time.with_context(|| format!("odd: {line}: {text}"))?;
            // The kernel merges its CPUs' buffers by time, as far as they are filled.
            ensure!(time > last - 0.1, "out of order: {line}: {text}");
            last = time;
        }
        let lines = events.lines().count();
        ensure!(said == format!("{lines} trace lines, 0"), "{lines} lines, {said:?}: {text}");
    }
    // Stages 01 and 02 count nothing, stage 00 ends with its percentiles.
    let end = rest.lines().next_back().unwrap_or_default();
    let ends = match name {
        "stage00" => end.starts_with("     max "),
        "stage01" | "stage02" => end.ends_with(" trace lines, 0 lost"),
        _ => end.contains("skipped"),
    };
    ensure!(ends, "odd end: {text}");
    Ok(())
}

fn a_pipe_of_both_streams_may_close() -> Result<()> {
    let before = loaded()?;
    let load = something_to_see(&disks::virtio()?)?;
    let names = ["stage00", "stage01", "stage04", "stage08"];
    let running = names.map(|name| {
        let program = program(name);
        let pipe = "--duration 3s 2>&1 | head -n 1; echo ${PIPESTATUS[0]}";
        Running::bash(&format!("{} {pipe}", program.display()))
    });
    for (running, name) in running.into_iter().zip(names) {
        let ended = running?.end().context(name)?;
        let said = format!("{name}: tracing for 3s\n0\n");
        ensure!(ended.stdout == said && ended.stderr.is_empty(), "{name}: {ended:?}");
    }
    drop(load);
    ensure!(instances().is_empty(), "{:?}", instances());
    wait_until_unloaded(&before)
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
        "taskset -c 0 dd if=/dev/{disk} of=/dev/null bs=512 count=20000 iflag=direct status=none"
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
