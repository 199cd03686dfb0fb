//! `ctracer`, judged by bpftool, a disk with a timer and the tables that we give to device mapper.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::{
    commands::{loaded, wait_until_unloaded},
    ctracer_outputs::{FILES, forms, reports},
    disks::{self, Mapped, NullBlk},
    run::{Running, program, shell, stage, wait_until},
};

tests![
    ctracer_finds_the_functions,
    ctracer_follows_a_bio,
    ctracer_leaves_nothing,
    ctracer_says_what_is_wrong,
];

/// No argument, so that all functions are traced; or these, where functions are attached one by one (6.1),
/// and all of them take too long.
pub fn all_or<'a>(few: &'a [&'a str]) -> Result<&'a [&'a str]> {
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    Ok(if symbols.contains(" register_fprobe_ips\n") { &[] } else { few })
}

/// Attaching one probe after the other takes long (6.1): only those that the test looks at.
pub const FEW: [&str; 8] = [
    "--only=submit_bio*",
    "--only=bio_init*",
    "--only=bio_endio",
    "--only=bio_split",
    "--only=bio_chain",
    "--only=bio_alloc_clone",
    "--only=bio_free",
    "--only=bio_uninit",
];

/// The functions that take a `struct bio *`, by what bpftool prints of the BTF of vmlinux and of dm_mod.
fn takers() -> Result<BTreeSet<String>> {
    let each = "for btf in vmlinux dm_mod; do bpftool btf dump file /sys/kernel/btf/$btf; done";
    let dump = shell(each)?;
    // `[7] PTR '(anon)' type_id=6`, and a parameter is an indented line.
    let mut types = HashMap::<u64, (&str, &str, u64)>::new();
    let (mut parameters, mut last) = (HashMap::<u64, Vec<u64>>::new(), 0);
    for line in dump.lines() {
        let target = line.split("type_id=").last().and_then(|id| id.split(' ').next());
        let target = target.and_then(|id| id.parse().ok()).unwrap_or(0);
        let Some((id, rest)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) else {
            parameters.entry(last).or_default().push(target);
            continue;
        };
        let (kind, rest) = rest.split_once(" '").with_context(|| line.to_owned())?;
        last = id.parse()?;
        types.insert(last, (kind, rest.split('\'').next().unwrap_or_default(), target));
    }
    let bare = |mut id: u64| {
        while let Some(("CONST" | "VOLATILE" | "RESTRICT" | "TYPEDEF" | "TYPE_TAG", _, next)) =
            types.get(&id)
        {
            id = *next;
        }
        types.get(&id)
    };
    let is_bio = |id: &u64| {
        let pointer = bare(*id).filter(|(kind, ..)| *kind == "PTR");
        matches!(pointer.and_then(|(.., target)| bare(*target)), Some(("STRUCT", "bio", _)))
    };
    let takes =
        |prototype: &u64| parameters.get(prototype).is_some_and(|all| all.iter().any(is_bio));
    let found = types.values().filter(|(kind, _, target)| *kind == "FUNC" && takes(target));
    Ok(found.map(|(_, name, _)| (*name).to_owned()).collect())
}

/// What `--list` prints, against BTF by bpftool and the kernel's list of functions.
fn ctracer_finds_the_functions() -> Result<()> {
    finds_the_functions("ctracer")
}

/// The same of a stage that has this option.
pub fn finds_the_functions(name: &str) -> Result<()> {
    let expected = takers()?;
    let traceable = shell("cut -d' ' -f1 /sys/kernel/tracing/available_filter_functions")?;
    let traceable: HashSet<&str> = traceable.lines().collect();
    let listed = stage(name, &["--list"])?;
    ensure!(listed.code == Some(0), "{listed:?}");
    let (traced, left_out) = listed.stdout.split_once("\nLeft out:\n").context("no list")?;
    let name = |line: &str| {
        let declaration = line.split('(').next().unwrap_or_default();
        declaration.rsplit([' ', '*']).next().unwrap_or_default().to_owned()
    };
    // Other modules than dm_mod are not part of the comparison.
    let here =
        |line: &&str| line.contains('(') && (!line.contains(" [") || line.contains("[dm_mod]"));
    let traced: BTreeSet<String> = traced.lines().filter(here).map(name).collect();
    let left_out: HashMap<String, &str> =
        left_out.lines().filter(here).map(|line| (name(line), line)).collect();
    let all: BTreeSet<String> = traced.iter().chain(left_out.keys()).cloned().collect();
    ensure!(all == expected, "differ: {:?}", all.symmetric_difference(&expected));
    ensure!(traced.len() > 100, "only {} functions", traced.len());
    for name in &traced {
        ensure!(traceable.contains(name.as_str()), "{name} cannot be traced");
    }
    for (name, line) in &left_out {
        let why = ["part of a tracepoint", "functions have this name"];
        let refused = !traceable.contains(name.as_str());
        ensure!(refused || why.iter().any(|why| line.contains(why)), "left out: {line}");
    }
    Ok(())
}

/// The JSON lines of one kind.
pub fn lines<'a>(all: &'a [Value], kind: &str) -> impl Iterator<Item = &'a Value> {
    all.iter().filter(move |line| line["line"] == kind)
}

pub fn number(value: &Value) -> Result<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok()).with_context(|| value.to_string())
}

/// What `--json` prints.
pub fn parse(output: &str) -> Result<Vec<Value>> {
    output.lines().map(|line| serde_json::from_str(line).context(line.to_owned())).collect()
}

/// The calls of a function.
pub fn calls<'a>(all: &'a [Value], function: &str) -> impl Iterator<Item = &'a Value> {
    lines(all, "event")
        .filter(move |event| event["function"] == function && event["kind"] == "entry")
}

/// What an event says that a field has now: in the first of a life, or where it has changed.
pub fn values<'a>(event: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    let changes = event["changes"].as_array().into_iter().flatten();
    let changed = changes.filter(move |change| change["field"] == field);
    event["fields"].get(field).into_iter().chain(changed.map(|change| &change["after"]))
}

/// Runs each of these jobs of fio on each disk, one I/O after the other, and then `depth` at a time.
pub fn engines(disks: &[&str], depth: u32, jobs: &[&str]) -> Result<()> {
    let mut command = "fio --output-format=terse --direct=1 --bs=4k".to_owned();
    for engine in ["psync", &format!("libaio --iodepth={depth}")] {
        for (disk, job) in disks.iter().flat_map(|disk| jobs.iter().map(move |job| (disk, job))) {
            command +=
                &format!(" --name=t --stonewall --filename=/dev/{disk} --ioengine={engine} {job}");
        }
    }
    shell(&command).map(|_| ())
}

/// The ledger's parts are its hits, and the events that arrived are those that were recorded.
pub fn adds_up(all: &[Value]) -> Result<()> {
    let ledger = lines(all, "ledger").next().context("no ledger")?;
    let parts = ledger.as_object().context("no ledger")?.iter();
    let parts = parts.filter(|(key, _)| !["line", "hits", "objects_lost"].contains(&key.as_str()));
    let sum = parts.map(|(_, value)| number(value)).sum::<Result<u64>>()?;
    ensure!(sum == number(&ledger["hits"])?, "{sum}: {ledger}");
    // Of the events of one call, one is its first object's.
    let mut calls = HashSet::new();
    for event in lines(all, "event") {
        let call = ["time", "cpu", "tid", "kind", "function", "depth"].map(|key| &event[key]);
        calls.insert(serde_json::to_string(&call)?);
    }
    let recorded = number(&ledger["entries"])? + number(&ledger["returns"])?;
    ensure!(calls.len() as u64 == recorded, "{} arrived: {ledger}", calls.len());
    Ok(())
}

/// The place among all events of the first one of a life that enters a function.
fn entry(events: &[&Value], life: u64, function: &str) -> Result<usize> {
    let wanted = |event: &&Value| {
        event["life"] == life && event["function"] == function && event["kind"] == "entry"
    };
    events.iter().position(wanted).with_context(|| format!("#{life}: no {function}"))
}

/// The value of a field after the event at `at`, by the fields of the first event and the changes.
fn field<'a>(events: &[&'a Value], life: u64, at: usize, name: &str) -> Result<&'a Value> {
    let own = events[..=at].iter().filter(|event| event["life"] == life);
    let value = own.flat_map(|event| values(event, name)).last();
    value.with_context(|| format!("#{life} has no field {name}"))
}

/// One run over four reads: of a disk; through a partition; through device mapper;
/// and one that is split. Its files say the same as its JSON lines, and are made
/// out of these once more.
fn ctracer_follows_a_bio() -> Result<()> {
    let slow = NullBlk::slow()?;
    let disk = &slow.name;
    shell(&format!(
        "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{disk}; partx -u /dev/{disk} || true"
    ))?;
    let linear = Mapped::new("ctracer", &format!("0 16384 linear /dev/{disk} 8192"))?;
    let running = Running::stage("ctracer", &[&FEW[..], &FILES, &["--json"]].concat())?;
    let read = |device: &str, count: &str| {
        shell(&format!("dd if={device} of=/dev/null iflag=direct {count} 2>&1"))
    };
    read(&format!("/dev/{disk}"), "bs=64k count=1 skip=16")?;
    read(&format!("/dev/{}", disks::partition(disk)), "bs=8k count=1 skip=3")?;
    read(&linear.path(), "bs=16k count=1 skip=2")?;
    read(&format!("/dev/{disk}"), "bs=4M count=1")?;
    let output = running.interrupt()?;
    let all = parse(&output)?;
    adds_up(&all)?;
    follows(&all, &output)?;
    forms(&all)?;
    reports(&output)
}

fn follows(all: &[Value], output: &str) -> Result<()> {
    let events: Vec<&Value> = lines(all, "event").collect();
    let lives: Vec<&Value> = lines(all, "life").collect();

    // The life that dd has submitted with this size and sector.
    let one = |size: u64, sector: u64| -> Result<u64> {
        let is_it = |(at, event): &(usize, &&Value)| {
            let has = |name, value: u64| {
                let life = event["life"].as_u64().unwrap_or(0);
                field(&events, life, *at, name).is_ok_and(|found| *found == value)
            };
            let is_submit = event["function"] == "submit_bio" && event["kind"] == "entry";
            let is_own = is_submit && event["comm"] == "dd";
            is_own && has("bi_iter.bi_size", size) && has("bi_iter.bi_sector", sector)
        };
        let found: Vec<_> = events.iter().enumerate().filter(is_it).collect();
        ensure!(found.len() == 1, "{size} bytes at {sector}: {found:?} in {output}");
        number(&found[0].1["life"])
    };

    // The disk: its timer ends a read after 100 ms.
    let life = one(64 << 10, 2048)?;
    let submit = entry(&events, life, "submit_bio")?;
    let end = entry(&events, life, "bio_endio")?;
    let [from, to] = [submit, end].map(|at| number(&events[at]["time"]));
    let took = (to? - from?) / 1_000_000;
    ensure!((100..1000).contains(&took), "{took} ms, and the disk took 100 ms: {output}");
    let operation = field(&events, life, submit, "bi_opf")?;
    let is_read = operation.as_str().is_some_and(|flags| flags.starts_with("REQ_OP_READ"));
    ensure!(is_read, "{operation} is no read");
    let this = lives.iter().find(|line| line["life"] == life).context("no such life")?;
    ensure!(number(&this["end"])? >= number(&events[end]["time"])?, "{this}");

    // The partition: its sector becomes the disk's, before the call that the README's exercise names.
    let life = one(8 << 10, 48)?;
    let call = calls(all, "submit_bio_noacct_nocheck").find(|event| event["life"] == life);
    let mut changes = call.and_then(|call| call["changes"].as_array()).into_iter().flatten();
    let moved = json!({"field": "bi_iter.bi_sector", "before": 48, "after": 4096 + 48});
    let remaps = changes.any(|change| *change == moved);
    ensure!(remaps, "#{life}: the sector does not change: {output}");

    // Device mapper: a clone, for the disk below.
    let life = one(16 << 10, 64)?;
    let clones: Vec<&&Value> = lives.iter().filter(|line| line["parent"] == life).collect();
    ensure!(clones.len() == 1 && clones[0]["link"] == "clone", "{clones:?} in {output}");
    let clone = number(&clones[0]["life"])?;
    let until = entry(&events, clone, "bio_endio")?;
    let own = events[..until].iter().filter(|event| event["life"] == clone);
    let sectors: Vec<_> = own.flat_map(|event| values(event, "bi_iter.bi_sector")).collect();
    ensure!(sectors.iter().any(|at| **at == 8192 + 64), "the clone has the sectors {sectors:?}");

    // The large read: its parts hang below it.
    let is_split = |line: &&&Value| line["link"] == "split";
    ensure!(lives.iter().filter(is_split).count() >= 1, "nothing was split: {output}");
    for line in lives.iter().filter(is_split) {
        let parent = number(&line["parent"])?;
        ensure!(entry(&events, parent, "submit_bio").is_ok(), "#{parent} was not submitted");
    }
    Ok(())
}

fn programs_left() -> Result<bool> {
    let programs = shell("bpftool prog show")?;
    let names = ["name enter", "name leave", "name session"];
    let events = fs::read_to_string("/sys/kernel/tracing/kprobe_events")?;
    Ok(names.iter().any(|name| programs.contains(name)) || events.contains("ctracer"))
}

/// After a signal that ends it, after SIGKILL while attached, and after Ctrl-C before.
fn ctracer_leaves_nothing() -> Result<()> {
    let before = loaded()?;
    let expedited = || fs::read_to_string("/sys/kernel/rcu_expedited");
    let usual = expedited()?;
    let start = || -> Result<Running> {
        let running = Running::stage("ctracer", &["--only=submit_bio"])?;
        ensure!(programs_left()? && !loaded()?.is_subset(&before), "nothing is attached");
        Ok(running)
    };
    let running = start()?;
    running.signal(Signal::TERM)?;
    let ended = running.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    // The programs are freed a moment later, but no probe is left.
    let events = fs::read_to_string("/sys/kernel/tracing/kprobe_events")?;
    ensure!(!events.contains("ctracer"), "{events}");
    ensure!(expedited()? == usual, "grace periods are still expedited");
    wait_until_unloaded(&before)?;

    let running = start()?;
    running.signal(Signal::KILL)?;
    running.end()?;
    wait_until("the kernel forgets the probes", || Ok(!programs_left()?))?;

    let mut command = Command::new(program("ctracer"));
    let running = Running::spawn(command.arg("--duration=100s"))?;
    let fds = format!("/proc/{}/fd", running.id());
    wait_until("a program is loaded", || {
        let fds = fs::read_dir(&fds)?.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        Ok(fds.into_iter().any(|target| target.to_string_lossy().contains("bpf-prog")))
    })?;
    running.interrupt()?;
    wait_until("the kernel forgets the probes", || Ok(!programs_left()?))
}

fn ctracer_says_what_is_wrong() -> Result<()> {
    let wrong: [(&[&str], i32, &str); 16] = [
        (&["--type=nonesuch"], 1, "this kernel has no struct nonesuch"),
        (&["--type=io_cqring_offsets"], 1, "kernel takes a struct io_cqring_offsets *"),
        (&["--type=inode", "--dev=254:0"], 1, "--dev needs bios"),
        (&["--type="], 2, "--type"),
        (&["--sample=0"], 2, "--sample"),
        (&["--dev=sda"], 2, "lsblk"),
        (&["--pid=0"], 2, "from 1"),
        (&["--filter=bi_opf"], 2, "is no comparison"),
        (&["--only=submit_bio", "--filter=bi_iter == 1"], 1, "like bi_iter.bi_sector"),
        (&["--only=submit_bio", "--html=/no/such/x.html"], 1, "give another path"),
        (&["--html=/run/same", "--folded=/run/../run/./same"], 2, "hold two outputs"),
        (&["report", "/etc/passwd"], 2, "--perfetto"),
        (&["--json", "report", "/etc/passwd", "--html=/run/x"], 2, "cannot be used with"),
        (&["report", "/no/such/file", "--html=/run/x"], 1, "/no/such/file cannot be read"),
        (&["report", "/dev/null", "--html=/run/x"], 1, "/dev/null: the file is empty"),
        (&["report", "/etc/passwd", "--html=/run/x"], 1, "no file of ctracer --json: line 1"),
    ];
    for (arguments, code, message) in wrong {
        let ended = stage("ctracer", arguments)?;
        let is_said = ended.code == Some(code) && ended.stderr.contains(message);
        ensure!(is_said, "{arguments:?}: {code} and {message:?} expected: {ended:?}");
    }
    // Without fprobe (6.1), a function is known by its address, which the kernel may hide.
    let restrict = "/proc/sys/kernel/kptr_restrict";
    let usual = fs::read_to_string(restrict)?;
    fs::write(restrict, "2")?;
    let ended = stage("ctracer", &["--quiet", "--only=submit_bio", "--duration=1s"]);
    fs::write(restrict, usual)?;
    let (ended, has_fprobe) = (ended?, all_or(&["few"])?.is_empty());
    let expected = if has_fprobe { (0, "functions traced") } else { (3, "kptr_restrict") };
    let is_it = ended.code == Some(expected.0) && ended.stderr.contains(expected.1);
    ensure!(is_it, "hidden addresses: {expected:?} expected: {ended:?}");
    Ok(())
}
