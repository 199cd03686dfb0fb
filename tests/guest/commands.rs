//! The command line of every stage, its exit codes, and what is left behind.

use crate::prelude::*;

tests![
    refusals_say_why,
    capabilities_are_enough,
    a_signal_leaves_nothing,
    a_killed_run_leaves_an_instance_until_the_next,
    a_reader_may_go,
    one_file_takes_both_streams,
    lost_lines_are_counted,
    lines_are_those_of_their_program,
    a_moment_without_hooks_is_noticed,
];

const INSTANCES: &str = "/sys/kernel/tracing/instances";
const NO_PROC: &str = "mount -t tmpfs none /proc;";
const NOBODY: &str = "setpriv --reuid 65534 --clear-groups";
pub const PARANOID: &str = "/proc/sys/kernel/perf_event_paranoid";
/// The capabilities that --help names.
const ENOUGH: [&str; 4] = ["bpf", "perfmon", "dac_read_search", "syslog"];

/// What a command has to begin with to run as a user with these capabilities. `capsh` could do it, too.
pub fn with(capabilities: &[&str]) -> String {
    let set: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let sets = format!("--bounding-set=-all{set} --inh-caps=-all{set} --ambient-caps=-all{set}");
    format!("{NOBODY} --regid 65534 {sets}")
}

/// What a program says that cannot run, or need not, and its exit code. All begin with the same function,
/// `common::main`, which a test of the sources checks: so a few of them show it. Each runs in a mount namespace
/// of its own, after a command of the shell.
fn refusals_say_why() -> Result<()> {
    let untraced = "umount -R /sys/kernel/tracing; umount -R /sys/kernel/debug;";
    // A locked kernel answers EPERM where README is opened, as /dev/mem does here.
    let locked =
        "mount --bind /dev/mem /sys/kernel/tracing/README; setpriv --bounding-set=-sys_rawio";
    let helpless = "setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all";
    let as_if = |file: &str, value: &str| {
        let name = file.rsplit('/').next().unwrap_or_default();
        format!("echo {value} >/run/{name}; mount --bind /run/{name} {file};")
    };
    let release = as_if("/proc/sys/kernel/osrelease", "5.10.0-32-amd64");
    let no_stacks = as_if("/proc/sys/kernel/perf_event_max_stack", "16");
    let no_kprobes = as_if("/sys/kernel/debug/kprobes/enabled", "0");
    let no_ftrace = as_if("/proc/sys/kernel/ftrace_enabled", "0");
    // As if all programs were loaded, and none of them attached.
    let unattached = "mount -t tmpfs none /proc/$$/fdinfo; \
                      for id in $(seq 600); do echo prog_id: $id >/proc/$$/fdinfo/$id; done; exec";
    let small = slow_io::cgroup("small", "memory.max", "12M")?;
    let smaller = slow_io::cgroup("smaller", "memory.max", "7M")?;
    let middle = slow_io::cgroup("middle", "memory.max", "24M")?;
    let [small, smaller, middle] =
        [small, smaller, middle].map(|cgroup| format!("echo $$ >{cgroup}/cgroup.procs;"));
    let of_small = "of the 12 MiB in /sys/fs/cgroup/small/memory.max, and it needs about";
    let of_middle = "of the 24 MiB in /sys/fs/cgroup/middle/memory.max, and it needs about";
    let enough = with(&ENOUGH);
    let all_but = |missing: &str| -> Vec<&str> {
        ENOUGH.into_iter().filter(|name| *name != missing).collect()
    };
    let without = ENOUGH.map(|missing| with(&all_but(missing)));
    let mut rows = vec![
        ("stage06", NOBODY, "--help", 0, "Usage: "),
        ("stage06", NOBODY, "--help", 0, "--duration"),
        ("stage06", NOBODY, "", 3, "sudo"),
        ("stage06", "mount -t tmpfs none /sys/kernel/btf;", "", 3, "/kernel/btf/vmlinux"),
        ("stage06", "mount -t tmpfs none /sys;", "", 3, "mount -t sysfs"),
        ("stage06", "umount -l /sys;", "", 3, "mount -t sysfs"),
        ("stage12", "umount -l /sys;", "", 3, "mount -t sysfs"),
        ("empty", "umount -l /sys;", "", 3, "mount -t sysfs"),
        ("stage06", NO_PROC, "", 3, "mount -t proc"),
        ("stage08", NO_PROC, "", 3, "mount -t proc"),
        ("stage09", NO_PROC, "1", 2, "mount -t proc"),
        ("stage12", NO_PROC, "", 3, "mount -t proc"),
        ("cachetop", NO_PROC, "", 3, "mount -t proc"),
        ("exporter", NO_PROC, "", 3, "mount -t proc"),
        ("ctracer", NO_PROC, "", 3, "mount -t proc"),
        ("empty", NO_PROC, "", 3, "mount -t proc"),
        ("exporter", "umount -l /proc;", "", 3, "mount -t proc"),
        ("slow_io", "umount -l /proc;", "", 3, "mount -t proc"),
        ("stage03", &small, "", 3, of_small),
        ("exporter", &small, "", 3, of_small),
        ("slow_io", &middle, "", 3, of_middle),
        ("slow_io", &middle, "", 3, "or give a smaller --in-flight or --causes"),
        ("ctracer", &middle, "", 3, of_middle),
        ("empty", &smaller, "", 3, "of the 7 MiB in /sys/fs/cgroup/smaller/memory.max"),
        ("stage06", locked, "", 3, "lockdown=confidentiality"),
        ("stage12", locked, "", 3, "lockdown=confidentiality"),
        ("stage06", untraced, "", 3, "mount -t tracefs"),
        ("stage06", "exec >&-;", "", 1, "stdout is closed"),
        ("syscall_counter", "exec >&-;", "", 1, "stdout is closed"),
        ("syscall_profiler", "exec >&-;", "", 1, "stdout is closed"),
        ("hello_open", "exec >&-;", "", 1, "stdout is closed"),
        ("hello_open", locked, "", 3, "lockdown=confidentiality"),
        ("stage06", "ulimit -n 16;", "", 3, "may have 16 files open at a time, and needs"),
        ("stage06", helpless, "", 3, "CAP_BPF and CAP_PERFMON"),
        ("stage06", &no_stacks, "", 3, "max_stack is 16"),
        ("stage06", unattached, "", 1, "loaded but never attached"),
        ("stage01", &no_kprobes, "", 3, "kprobes/enabled"),
        ("exporter", &no_ftrace, "", 3, "ftrace_enabled"),
        ("stage01", &enough, "", 3, "CAP_DAC_OVERRIDE is missing"),
        ("ctracer", &enough, "", 3, "CAP_SYS_ADMIN is missing"),
        ("empty", NOBODY, "", 3, "only root"),
        ("empty", helpless, "", 3, "CAP_SYS_ADMIN"),
        ("empty", untraced, "", 3, "mount -t tracefs"),
        ("empty", &release, "", 3, "this kernel (5.10.0-32-amd64) is older than 6.1"),
        ("empty", "", "--reject", 1, "R0 !read_ok"),
        ("empty", "", "--verbose", 0, "accepts empty"),
        ("syscall_counter", "", "opnat", 2, " openat,"),
        ("syscall_profiler", "", "../x", 2, "letters"),
        ("bigreads", "", "--min=1X", 2, "--min"),
        ("bitehist", "", "--interval=0s", 2, "--interval"),
        ("cachetop", "", "--interval=1", 2, "--interval"),
        ("cachetop", "", "--interval -1s", 2, "like 1s or 500ms"),
        ("cachetop", "", "--sort=size", 2, "--sort"),
        ("ctracer", "", "--type=nonesuch", 1, "this kernel has no struct nonesuch"),
        ("ctracer", "", "--type=io_cqring_offsets", 1, "takes a struct io_cqring_offsets *"),
        ("ctracer", "", "--type=inode --dev=254:0", 1, "--dev needs bios"),
        ("ctracer", "", "--type=", 2, "--type"),
        ("ctracer", "", "--sample=0", 2, "--sample"),
        ("ctracer", "", "--dev=sda", 2, "lsblk"),
        ("ctracer", "", "--pid=0", 2, "from 1"),
        ("ctracer", "", "--filter=bi_opf", 2, "is no comparison"),
        ("ctracer", "", "--only=submit_bio '--filter=bi_iter == 1'", 1, "like bi_iter.bi_sector"),
        ("ctracer", "", "--only=submit_bio --html=/no/such/x.html", 1, "give another path"),
        ("ctracer", "", "--html=/run/same --folded=/run/../run/./same", 2, "hold two outputs"),
        ("ctracer", "", "report /etc/passwd", 2, "--perfetto"),
        ("ctracer", "", "--json report /etc/passwd --html=/run/x", 2, "cannot be used with"),
        ("ctracer", "", "report /no/such/file --html=/run/x", 1, "/no/such/file cannot be read"),
        ("ctracer", "", "report /dev/null --html=/run/x", 1, "/dev/null: the file is empty"),
        ("ctracer", "", "report /etc/passwd --html=/run/x", 1, "line 1 is damaged"),
        ("stage12", "", "--type no_such_struct", 1, "no_such_struct"),
        ("stage12", "", "--type no_such_struct", 1, "--type request"),
        ("slow_io", "", "--disk nothing", 2, "no such disk"),
        ("slow_io", "", "--min 10", 2, "10ms"),
        ("slow_io", "", "--min -1ms", 2, "10s, 500ms"),
        ("slow_io", "", "--min 100y", 2, "'--min <TIME>': the duration must be at most a year"),
        ("slow_io", "", "--before -1s", 2, "10s, 500ms"),
        ("slow_io", "", "--top -1", 2, "-1 is not in 1..=100000"),
        ("slow_io", "", "--in-flight 10000000", 2, "give a smaller --in-flight or --causes"),
        ("slow_io", "", "--causes -1", 2, "-1 is not in 1..=1000000"),
        ("stage13", "", "--min -1ms", 2, "10s, 500ms"),
        ("ctracer", "", "--sample -1", 2, "-1 is not in 1.."),
        ("ctracer", "", "--memory -1M", 2, "invalid value '-1M'"),
        ("syscall_profiler", "", "--pages -1", 2, "a power of two"),
        ("slow_io", "", "--cgroup ../../..", 2, "there is no such cgroup"),
        ("exporter", "", "--listen 0.0.0.0", 2, "like 127.0.0.1:9435"),
    ];
    // A process has ended; one of this process's threads reads what the shell says, and is none.
    let ended = shell("echo $$")?;
    let _sleep = Running::bash("exec sleep infinity")?;
    let threads = fs::read_dir("/proc/self/task")?.flatten();
    let threads = threads.filter_map(|thread| thread.file_name().to_str()?.parse::<u32>().ok());
    let thread = threads.max().context("no thread")?.to_string();
    let of_process = format!("a thread of process {}", std::process::id());
    let most = fs::read_to_string("/proc/sys/kernel/pid_max")?;
    rows.extend(
        [
            ("0", "from 1 to"),
            ("-1", "from 1 to"),
            (most.trim(), "from 1 to"),
            ("99999999999999999999", "from 1 to"),
            ("sh", "not a number"),
            ("1.5", "not a number"),
            (ended.trim(), "no such process"),
            (&thread, &of_process),
        ]
        .map(|(process, why)| ("stage09", "", process, 2, why)),
    );
    let usages = ["--duration=-5s", "--duration=0s", "--duration=5", "--duration=99999y", "--none"];
    rows.extend(usages.map(|usage| ("stage06", "", usage, 2, &usage[..6])));
    let lacks = ["CAP_BPF is", "CAP_PERFMON is", "CAP_DAC_READ_SEARCH is", "CAP_SYSLOG is"];
    rows.extend(lacks.iter().zip(&without).map(|(word, with)| ("stage10", &**with, "", 3, *word)));
    // Of stage06, no function of a stack would have a name; cachetop would not know io_uring's reads.
    let hidden = ["stage06", "kmalloc_callers", "cachetop"];
    rows.extend(hidden.map(|program| (program, &*without[3], "", 3, "CAP_SYSLOG is")));
    let _paranoid = Setting::new(PARANOID, "2")?;
    for (name, before, arguments, code, word) in rows.into_iter().filter(|row| is_subject(row.0)) {
        let ends = arguments.contains("--duration") || arguments.contains("report ");
        let until = if ends { "" } else { "--duration 100ms" };
        let script = format!("{before} {} {arguments} {until}", program(name).display());
        let unshare = ["-m", "sh", "-c", &script];
        let ended = Running::spawn(Command::new("unshare").args(unshare))?.end()?;
        let said =
            if code == 0 { ended.stdout.clone() + &ended.stderr } else { ended.stderr.clone() };
        let is_said = said.contains(word) && (code == 0 || ended.stdout.is_empty());
        ensure!(ended.code == Some(code) && is_said, "{code}, {word:?}: {script}: {ended:?}");
        let is_false = before.contains("/proc;") && said.contains("was edited");
        ensure!(!is_false, "without /proc, nobody knows: {script}: {ended:?}");
    }
    // Kprobes are switched off while it runs: it shows what it has counted until then.
    let running = Running::stage("stage04", &[])?;
    let _off = Setting::new("/sys/kernel/debug/kprobes/enabled", "0")?;
    running.signal(Signal::INT)?;
    let ended = running.end()?;
    let is_said = ended.stderr.contains("switched off") && ended.stdout.contains("bios completed");
    ensure!(ended.code == Some(3) && is_said, "switched off: {ended:?}");
    Ok(())
}

/// The capabilities that --help names are enough.
fn capabilities_are_enough() -> Result<()> {
    let (disk, before) = (disks::virtio()?, loaded()?);
    let _paranoid = Setting::new(PARANOID, "2")?;
    // Of each kind: a tracepoint with BTF, event lines, stacks, the page cache, a ring buffer.
    let programs = [
        ("stage00", "--text", "requests completed", 20),
        ("stage03", "", "bios completed", 20),
        ("stage06", "", "bios completed", 20),
        ("stage09", "1", "readahead", 0),
        ("slow_io", "--min 1us", "I/Os were measured", 20),
    ];
    let start = |(name, arguments, ..): (&str, &str, &str, u64)| {
        let more = ["stage03", "stage09"].contains(&name).then_some("dac_override");
        let enough: Vec<_> = ENOUGH.into_iter().chain(more).collect();
        Running::bash(&format!("exec {} {} {arguments}", with(&enough), program(name).display()))
    };
    let mut running = programs.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    running.iter_mut().try_for_each(|running| running.wait_for(": tracing "))?;
    disks::read(&disk, 20)?;
    for (running, (name, _, counted, least)) in running.into_iter().zip(programs) {
        running.signal(Signal::INT)?;
        let ended = running.end()?;
        let is_good = ended.code == Some(0) && ended.stderr.lines().count() == 1;
        ensure!(is_good, "{name}: {ended:?}");
        let seen = count(&ended.stdout, counted)?;
        ensure!(seen >= least, "{name} has seen {seen} of {least} reads: {ended:?}");
    }
    wait_until_unloaded(&before)
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

/// Waits until only that is loaded: the kernel frees programs and maps a moment after their last user.
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
    for (running, (name, signal)) in running.into_iter().zip(ends) {
        running.signal(signal)?;
        let ended = running.end()?;
        // Stage 08 has seen bpftool being read.
        let hint = if name == "stage08" { "[Total " } else { "was anything read or written?" };
        let said = ended.stdout.contains(hint) && !ended.stdout.contains("Max latency");
        ensure!(ended.code == Some(0) && said, "{name}: {ended:?}");
    }
    wait_until_unloaded(&before)?;
    ensure!(instances().is_empty(), "left: {:?}", instances());
    Ok(())
}

fn a_killed_run_leaves_an_instance_until_the_next() -> Result<()> {
    let before = loaded()?;
    for (killed, next) in [("stage01", "stage08"), ("hello_open", "hello_open")] {
        let running = Running::stage(killed, &[])?;
        running.signal(Signal::KILL)?;
        running.end()?;
        wait_until_unloaded(&before)?;
        ensure!(instances().len() == 1, "{killed}: {:?}", instances());
        stage(next, &["--duration", "100ms"])?;
        ensure!(instances().is_empty(), "{killed}, after the next one: {:?}", instances());
    }
    Ok(())
}

/// Before the summary, before the first word, in the middle of the lines; the reader of what libbpf says, or of
/// both streams. A disk that is full is no reader that has gone.
fn a_reader_may_go() -> Result<()> {
    let before = loaded()?;
    let read = reads(&disks::virtio()?, 50);
    let load = Running::bash(&format!("while :; do {read}; done"))?;
    let pipes = [
        ("stage03", "--duration 60s | head -n 3", 0),
        ("stage06", "--duration 1s | head -n 1", 0),
        ("stage06", "--verbose --duration 1s 2>&1 | head -n 1", 0),
        ("stage00", "--duration 1s | true", 0),
        ("ctracer", "--only submit_bio --json --duration 1s | true", 0),
        ("stage06", "--duration 1s >/dev/full", 1),
        ("ctracer", "--quiet --only submit_bio --duration 1s >/dev/full", 1),
    ];
    let running = pipes.map(|(name, pipe, _)| {
        let path = program(name);
        let script = format!("{} {pipe}; status=${{PIPESTATUS[0]}}", path.display());
        Running::bash(&format!("{{ {script}; }} >/dev/null; echo $status"))
    });
    for (running, (name, pipe, code)) in running.into_iter().zip(pipes) {
        let ended = running?.end()?;
        let is_full = ended.stderr.contains(&format!("{name}: stdout: No space left on device"));
        let is_good = ended.stdout == format!("{code}\n") && is_full == (code == 1);
        ensure!(is_good && !ended.stderr.contains("panicked"), "{name} {pipe}: {ended:?}");
    }
    drop(load);
    ensure!(instances().is_empty(), "{:?}", instances());
    wait_until_unloaded(&before)
}

/// `stageNN >file 2>&1` and `>>file`: what stdout and stderr get is in the file, whole and in order, behind what
/// was there before. On overlay and on ext4, which lock a file in their own ways.
fn one_file_takes_both_streams() -> Result<()> {
    let _mounted = Mounted::new()?;
    let disk = disks::virtio()?;
    let cached = format!("dd if=/dev/{disk} of=/dev/null bs=4k count=2 status=none");
    let direct = reads(&disk, 5);
    let _load = Running::bash(&format!("while :; do {direct}; {cached}; sleep 0.2; done"))?;
    let mut running = Vec::new();
    // Not /root: where QEMU runs as a user, this is closed to it.
    for (name, directory, kind, redirection, before) in [
        ("stage03", "/var/tmp", "overlayfs", ">", ""),
        ("stage08", "/mnt/data", "ext2/ext3", ">>", "before\n"),
    ] {
        let found = shell(&format!("stat -f -c %T {directory}"))?;
        ensure!(found.trim() == kind, "{directory} is {found:?}, not {kind}");
        let file = format!("{directory}/{name}.log");
        fs::write(&file, "before\n")?;
        let script = format!("exec {} {redirection}{file} 2>&1", program(name).display());
        running.push((name, before, Running::bash(&script)?, file));
    }
    for (name, before, running, file) in running {
        let has_event = || Ok(fs::read_to_string(&file)?.contains("bpf_trace_printk: "));
        wait_until("an event", has_event)?;
        running.signal(Signal::INT)?;
        running.end_well()?;
        let text = fs::read_to_string(&file)?;
        let start = format!("{before}{name}: tracing until Ctrl-C\n");
        let rest = text.strip_prefix(&start).with_context(|| format!("not {start:?}: {text}"))?;
        let is_event = |line: &&str| line.contains(": bpf_trace_printk: ");
        let events = rest.lines().take_while(is_event).count();
        let end = format!("\n{events} trace lines, 0 lost\n");
        let is_whole = rest.contains(&end) && events == rest.lines().filter(is_event).count();
        let ends = rest.lines().next_back().is_some_and(|last| last.contains("skipped"));
        ensure!(events > 0 && is_whole && ends, "not {end:?}, or another end: {text}");
        fs::remove_file(&file)?;
    }
    Ok(())
}

fn lost_lines_are_counted() -> Result<()> {
    let disk = disks::virtio()?;
    let before = disks::bios(&disk)?;
    // The kernel's buffer overflows, 1.4 MB for each CPU.
    let dd = format!("dd if=/dev/{disk} of=/dev/null bs=512 count=20000 iflag=direct status=none");
    let output = beside_a_stopped("stage01", &[], || shell(&format!("taskset -c 0 {dd}")))?;
    let (reads, printed) =
        (disks::bios(&disk)? - before, exercise_loads::calls(&output, "submit_bio(")?.len() as u64);
    let lost: u64 = between(&output, " trace lines, ", " lost")?.parse()?;
    ensure!(lost > 0 && printed + lost == reads, "{printed} printed + {lost} lost, {reads} bios");
    Ok(())
}

/// Two programs of one text and one of another: none shows what only another one writes, and those of the same text
/// say that there is one. Alone, none says so.
fn lines_are_those_of_their_program() -> Result<()> {
    const TOO: &str = " printed trace lines meanwhile, too.";
    const OTHERS: &str = "lines that no bpf_printk() of this program writes, not shown";
    let read = reads(&disks::virtio()?, 20);
    let programs = ["stage01", "stage02", "stage08"];
    let running = Running::stages(programs.map(|name| (name, vec![])))?;
    let ids: Vec<String> = running.iter().map(|one| format!("process {}", one.id())).collect();
    shell(&format!("{read}; cat /etc/passwd"))?;
    let outputs = Running::interrupt_all(running)?;
    let own = [&["submit_bio(bio="][..], &["submit_bio(bio=", "bio_endio (bio="], &["read(inode="]];
    for (((name, output), own), id) in programs.iter().zip(&outputs).zip(own).zip(&ids) {
        let texts: Vec<&str> = output
            .lines()
            .filter_map(|line| Some(line.split_once("bpf_trace_printk: ")?.1))
            .collect();
        let is_own = |text: &&str| own.iter().any(|own| text.starts_with(own));
        let is_all = own.iter().all(|own| texts.iter().any(|text| text.starts_with(own)));
        ensure!(texts.iter().all(is_own) && is_all, "{name}: not only {own:?}: {output}");
        ensure!(output.contains(&format!("\n{} trace lines, 0 lost\n", texts.len())), "{output}");
        ensure!(count(output, OTHERS)? > 0, "{name}: {output}");
        let said = output.lines().find(|line| line.contains(TOO)).context(output.clone())?;
        let is_named = |other: &String| other == id || said.contains(other);
        ensure!(ids.iter().all(is_named) && !said.contains(id), "{name}, {id} of {ids:?}: {said}");
    }
    let (_, alone) = beside("stage02", &[], || shell(&read))?;
    ensure!(!alone.contains(TOO) && !alone.contains(OTHERS), "alone: {alone}");
    // Of two, one inside of the other, the outer one counts what ftrace sees.
    let printed = Ftrace::new(&[Hook::PRINTED])?;
    let (outer, inner) = (Running::stage("stage08", &[])?, Running::stage("stage01", &[])?);
    shell(&format!("{read}; cat /etc/passwd"))?;
    inner.interrupt()?;
    let output = outer.interrupt()?;
    let events = printed.events()?.into_iter();
    let (own, others): (Vec<Event>, Vec<Event>) =
        events.partition(|event| event.text.trim_start().starts_with("read(inode="));
    let theirs = [own.len() as u64, others.len() as u64];
    let ours = [count(&output, "trace lines, ")?, count(&output, OTHERS)?];
    ensure!(ours == theirs && others.len() >= 20, "ftrace: {theirs:?}, stage08: {output}");
    let hellos = Running::stages([("hello_open", vec![]), ("hello_open", vec![])])?;
    for output in Running::interrupt_all(hellos)? {
        ensure!(count(&output, "other hello_open")? == 1, "{output}");
    }
    Ok(())
}

/// Hooks that were off only for a moment have not counted what came then. A switch that is written and does not
/// change is none.
fn a_moment_without_hooks_is_noticed() -> Result<()> {
    const FTRACE: &str = "/proc/sys/kernel/ftrace_enabled";
    let read = reads(&disks::virtio()?, 20);
    for (file, programs) in [
        (FTRACE, &["stage04", "stage08", "slow_io"][..]),
        ("/sys/kernel/debug/kprobes/enabled", &["stage04", "slow_io"]),
    ] {
        for (first, code) in [("1", 0), ("0", 3)] {
            let running = Running::stages(programs.iter().map(|name| (*name, vec![])))?;
            // Else the switch's inode would be another one, which nobody watches.
            fs::write("/proc/sys/vm/drop_caches", "3")?;
            fs::write(file, first)?;
            if first == "0" {
                shell(&read)?;
                fs::write(file, "1")?;
            }
            shell(&read)?;
            for (running, name) in running.into_iter().zip(programs) {
                running.signal(Signal::INT)?;
                let ended = running.end()?;
                let said = "what came meanwhile is not counted: ".to_owned() + file;
                let is_said = ended.stderr.contains(&said) == (code == 3);
                // Its requests end at tracepoints, which run without ftrace.
                let end = match (*name, code, file) {
                    ("slow_io", 0, _) => "0 I/Os were measured.",
                    ("slow_io", _, FTRACE) => "\nNot all was measured:\n",
                    ("slow_io", _, _) => " that were seen were measured.",
                    _ => "skipped",
                };
                let is_whole =
                    ended.stdout.contains(end) && !ended.stdout.contains("Still waiting");
                ensure!(
                    ended.code == Some(code) && is_said && is_whole,
                    "{file}, {name}, not {code}: {ended:?}"
                );
            }
        }
    }
    Ok(())
}
