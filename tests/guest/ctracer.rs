//! `ctracer`, judged by bpftool, fio, stage 04 and the tables that we give to device mapper.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    fs,
};

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    commands::{loaded, wait_until_unloaded},
    disks::{self, Mapped, NullBlk},
    run::{BIO, Gate, Running, count, fio, program, shell, slowest, stage, wait_until},
};

tests![
    ctracer_finds_the_functions,
    ctracer_follows_a_bio,
    ctracer_balances_its_ledger,
    ctracer_filters_objects,
    ctracer_leaves_nothing,
    ctracer_says_what_is_wrong,
];

/// Attaching one probe after the other takes long (6.1): only those that the test looks at.
pub const FEW: [&str; 10] = [
    "--only=submit_bio*",
    "--only=bio_init*",
    "--only=bio_endio",
    "--only=bio_split",
    "--only=bio_chain",
    "--only=bio_alloc_clone",
    "--only=bio_free",
    "--only=bio_uninit",
    "--only=bio_integrity_prep",
    "--only=__rq_qos_throttle",
];

/// The functions that take a `struct bio *`, by what bpftool prints of a BTF.
fn takers(btf: &str, names: &mut BTreeSet<String>) -> Result<()> {
    let dump = shell(&format!("bpftool btf dump file /sys/kernel/btf/vmlinux; {btf}"))?;
    // `[7] PTR '(anon)' type_id=6`, and a parameter is an indented line.
    let mut types: HashMap<u32, (&str, &str, u32)> = HashMap::new();
    let (mut functions, mut parameters) = (Vec::new(), HashMap::<u32, Vec<u32>>::new());
    let mut last = 0;
    for line in dump.lines() {
        let target =
            line.rsplit("type_id=").next().and_then(|id| id.split(' ').next()?.parse().ok());
        let target: u32 = target.unwrap_or(0);
        let Some((id, rest)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) else {
            if line.starts_with('\t') && parameters.contains_key(&last) {
                parameters.entry(last).or_default().push(target);
            }
            continue;
        };
        last = id.parse()?;
        let (kind, rest) = rest.split_once(" '").context(line.to_owned())?;
        let name = rest.split('\'').next().unwrap_or_default();
        match kind {
            "FUNC" => {
                let prototype = line.split("type_id=").nth(1).and_then(|id| id.split(' ').next());
                functions.push((name, prototype.context(line.to_owned())?.parse::<u32>()?));
            }
            "FUNC_PROTO" => drop(parameters.insert(last, Vec::new())),
            _ => drop(types.insert(last, (kind, name, target))),
        }
    }
    let bare = |mut id: u32| {
        while let Some(("CONST" | "VOLATILE" | "RESTRICT" | "TYPEDEF" | "TYPE_TAG", _, next)) =
            types.get(&id)
        {
            id = *next;
        }
        types.get(&id)
    };
    let is_bio = |id: u32| match bare(id) {
        Some(("PTR", _, target)) => matches!(bare(*target), Some(("STRUCT", "bio", _))),
        _ => false,
    };
    let takes =
        |prototype| parameters.get(prototype).is_some_and(|all| all.iter().any(|p| is_bio(*p)));
    let found = functions.iter().filter(|(_, prototype)| takes(prototype));
    names.extend(found.map(|(name, _)| (*name).to_owned()));
    Ok(())
}

/// What `--list` prints, against BTF by bpftool and the kernel's list of functions.
fn ctracer_finds_the_functions() -> Result<()> {
    finds_the_functions("ctracer")
}

/// The same of a stage that has this option.
pub fn finds_the_functions(name: &str) -> Result<()> {
    let mut expected = BTreeSet::new();
    takers("bpftool btf dump file /sys/kernel/btf/dm_mod", &mut expected)?;
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

/// The events of a life that enter a function, and its place among all events.
fn entry<'a>(events: &[&'a Value], life: u64, function: &str) -> Result<(usize, &'a Value)> {
    let wanted = |event: &&Value| {
        event["life"] == life && event["function"] == function && event["kind"] == "entry"
    };
    let at = events.iter().position(wanted).with_context(|| format!("#{life}: no {function}"))?;
    Ok((at, events[at]))
}

/// The value of a field after the event at `at`, by the fields of the first event and the changes.
fn field(events: &[&Value], life: u64, at: usize, name: &str) -> Result<Value> {
    let mut value = None;
    for event in events[..=at].iter().filter(|event| event["life"] == life) {
        value = event["fields"].get(name).cloned().or(value);
        for change in event["changes"].as_array().into_iter().flatten() {
            if change["field"] == name {
                value = Some(change["after"].clone());
            }
        }
    }
    value.with_context(|| format!("#{life} has no field {name}"))
}

/// One run over four reads: of a disk, beside stage 04; through a partition; through device mapper;
/// and one that is split.
fn ctracer_follows_a_bio() -> Result<()> {
    let slow = NullBlk::slow()?;
    let disk = &slow.name;
    shell(&format!(
        "echo 4096,65536 | sfdisk --quiet --wipe always --label dos /dev/{disk}; partx -u /dev/{disk} || true"
    ))?;
    let linear = Mapped::new("ctracer", &format!("0 16384 linear /dev/{disk} 8192"))?;
    let partition = disks::partition(disk);
    let (output, other) = four_reads(disk, &partition, &linear)?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    follows(&all, &output, &other)
}

/// What `ctracer` says of a read of a disk, a partition, a mapped device, and of a large one; and what
/// stage 04 says of the first.
fn four_reads(disk: &str, partition: &str, linear: &Mapped) -> Result<(String, String)> {
    let arguments: Vec<&str> = FEW.into_iter().chain(["--json"]).collect();
    let running = Running::stage("ctracer", &arguments)?;
    let other = Running::stage("stage04", &[])?;
    let read = |device: &str, count: &str| {
        shell(&format!("dd if={device} of=/dev/null iflag=direct {count} 2>&1"))
    };
    read(&format!("/dev/{disk}"), "bs=64k count=1 skip=16")?;
    let other = other.interrupt()?;
    read(&format!("/dev/{partition}"), "bs=8k count=1 skip=3")?;
    read(&linear.path(), "bs=16k count=1 skip=2")?;
    read(&format!("/dev/{disk}"), "bs=4M count=1")?;
    Ok((running.interrupt()?, other))
}

fn follows(all: &[Value], output: &str, other: &str) -> Result<()> {
    let events: Vec<&Value> = lines(all, "event").collect();
    let lives: Vec<&Value> = lines(all, "life").collect();

    // Every life that was submitted with this size and sector.
    let submitted = |size: u64, sector: u64, comm: &str| -> Result<Vec<u64>> {
        let mut found = Vec::new();
        for (at, event) in events.iter().enumerate() {
            let life = number(&event["life"])?;
            let is_submit = event["function"] == "submit_bio" && event["kind"] == "entry";
            if is_submit
                && event["comm"] == comm
                && number(&field(&events, life, at, "bi_iter.bi_size")?)? == size
                && number(&field(&events, life, at, "bi_iter.bi_sector")?)? == sector
            {
                found.push(life);
            }
        }
        Ok(found)
    };
    let one = |size, sector| -> Result<u64> {
        let found = submitted(size, sector, "dd")?;
        ensure!(found.len() == 1, "{size} bytes at {sector}: lives {found:?} in {output}");
        Ok(found[0])
    };

    // The disk: stage 04's times lie between the events around ours.
    let life = one(64 << 10, 2048)?;
    let (submit, _) = entry(&events, life, "submit_bio")?;
    let (end, _) = entry(&events, life, "bio_endio")?;
    let operation = field(&events, life, submit, "bi_opf")?;
    ensure!(
        operation.as_str().is_some_and(|flags| flags.starts_with("REQ_OP_READ")),
        "{operation}"
    );
    let judge = slowest(other, BIO)?;
    ensure!(judge.io == events[submit]["address"], "stage 04 saw {}", judge.io);
    for (at, time) in [(submit, judge.from), (end, judge.to)] {
        let mine: Vec<&&Value> = events.iter().filter(|event| event["life"] == life).collect();
        let at = mine.iter().position(|event| ***event == *events[at]).context("its place")?;
        let before = number(&mine[at - 1]["time"])?;
        let after = number(&mine[at + 1]["time"])?;
        ensure!((before..after).contains(&time), "{time} is not between {before} and {after}");
    }
    let this = lives.iter().find(|line| line["life"] == life).context("no such life")?;
    ensure!(number(&this["end"])? >= number(&events[end]["time"])?, "{this}");

    // The partition: its sector becomes the disk's, before the call that the README's exercise names.
    let life = one(8 << 10, 48)?;
    let of_call = |event: &&&Value| {
        event["life"] == life
            && event["function"] == "submit_bio_noacct_nocheck"
            && event["kind"] == "entry"
    };
    let remaps = events.iter().filter(of_call).any(|event| {
        event["changes"].as_array().into_iter().flatten().any(|change| {
            change["field"] == "bi_iter.bi_sector"
                && change["before"] == 48
                && change["after"] == 4096 + 48
        })
    });
    ensure!(remaps, "#{life}: the sector does not change: {output}");

    // Device mapper: a clone, for the disk below.
    let life = one(16 << 10, 64)?;
    let clones: Vec<&&Value> = lives.iter().filter(|line| line["parent"] == life).collect();
    ensure!(clones.len() == 1 && clones[0]["link"] == "clone", "{clones:?} in {output}");
    let clone = number(&clones[0]["life"])?;
    let (at, _) = entry(&events, clone, "bio_endio")?;
    let mut sectors = BTreeSet::new();
    for place in 0..at {
        if events[place]["life"] == clone {
            sectors.insert(number(&field(&events, clone, place, "bi_iter.bi_sector")?)?);
        }
    }
    ensure!(sectors.contains(&(8192 + 64)), "the clone has the sectors {sectors:?}");

    // The large read: its parts hang below it.
    let is_split = |line: &&&Value| line["link"] == "split";
    ensure!(lives.iter().filter(is_split).count() >= 1, "nothing was split: {output}");
    for line in lives.iter().filter(is_split) {
        let parent = number(&line["parent"])?;
        ensure!(entry(&events, parent, "submit_bio").is_ok(), "#{parent} was not submitted");
    }
    balanced(&events)
}

/// Calls and returns nest, in every thread, as deep as the events say.
pub fn balanced(events: &[&Value]) -> Result<()> {
    let mut threads: HashMap<(u64, u64), Vec<(String, u64)>> = HashMap::new();
    for event in events {
        let tid = number(&event["tid"])?;
        let cpu = if tid == 0 { number(&event["cpu"])? } else { 0 };
        let calls = threads.entry((tid, cpu)).or_default();
        let function = event["function"].as_str().context("no function")?.to_owned();
        let (depth, argument) = (number(&event["depth"])?, number(&event["argument"])?);
        let call = (function, depth);
        if event["kind"] == "entry" {
            if calls.last() != Some(&call) {
                ensure!(depth == calls.len() as u64, "{event}: {calls:?}");
                calls.push(call);
            }
        } else if calls.last() == Some(&call) {
            calls.pop();
        } else {
            // The return of a call's other object.
            ensure!(argument > 0, "{event}: {calls:?}");
        }
    }
    Ok(())
}

/// Every hit of four probes by every I/O that fio reports, to the event.
fn ctracer_balances_its_ledger() -> Result<()> {
    let disk = disks::virtio()?;
    let running = Running::stage("ctracer", &["--quiet", "--only=submit_bio", "--only=bio_endio"])?;
    let report = fio(&format!(
        "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine=libaio --iodepth=16 \
         --numjobs=2 --number_ios=1500"
    ))?;
    let output = running.interrupt()?;
    let ios = number(&report["read"]["total_ios"])?;
    ensure!(output.contains("the ledger balances"), "{output}");
    let hits = count(&output, "hits of the probes")? - count(&output, "before the start")?;
    // With kprobe.session, the kernel skips the return of a call that it has missed.
    let missed = count(&output, "missed (another BPF program")?;
    // fio looks at the disk before it begins.
    ensure!(hits < 4 * ios + 100 && hits + missed >= 4 * ios, "{hits} hits, {ios} I/Os: {output}");
    let events = count(&output, "events")?;
    let recorded = count(&output, "calls recorded")? + count(&output, "returns recorded")?;
    ensure!(events == recorded && recorded > 2 * ios, "{events} events: {output}");
    Ok(())
}

/// Of two processes that read two disks, the bios of one process and one disk.
fn ctracer_filters_objects() -> Result<()> {
    // A completion that interrupts a probe is missed: this disk's come long after the submit's probes,
    // when nobody else reads.
    let delayed = NullBlk::new(&[("irqmode", "2"), ("completion_nsec", "20000000")])?;
    let (disk, nvme) = (&delayed.name, disks::nvme()?);
    let read =
        |device: &str| format!("dd if=/dev/{device} of=/dev/null bs=4k count=5 iflag=direct");
    // Until it reads, the process sleeps: an end that interrupts it would be taken for its own. exec keeps
    // its number.
    let gate = Gate::new()?;
    let both = format!(
        "{}
         exec fio --thread --direct=1 --rw=read --bs=4k --number_ios=5 --ioengine=psync \
             --output-format=terse --name=t --filename=/dev/{disk} \
             --name=u --stonewall --filename=/dev/{nvme}",
        Gate::WAIT
    );
    let process = Running::bash(&both)?;
    let (pid, dev) = (process.id().to_string(), disks::numbers(disk)?);
    let functions = ["--only=submit_bio", "--only=bio_endio", "--only=bio_init"];
    let filters = ["--json", "--pid", &pid, "--dev", &dev];
    let mut command = std::process::Command::new(program("ctracer"));
    let mut running = Running::spawn(command.args(functions).args(filters))?;
    running.wait_for("tracing")?;
    shell(&read(disk))?;
    gate.open()?;
    ensure!(process.end()?.code == Some(0), "fio failed");
    shell(&read(&nvme))?;
    running.signal(Signal::INT)?;
    let ended = running.end()?;
    let all = ended.stdout.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let count_of = |function: &str| {
        let is_call = |event: &&Value| event["function"] == function && event["kind"] == "entry";
        lines(&all, "event").filter(is_call).count()
    };
    ensure!(count_of("submit_bio") == 5, "{ended:?}");
    ensure!(count_of("bio_endio") == 5, "{ended:?}");
    let submits = lines(&all, "event").filter(|event| event["function"] == "submit_bio");
    for event in submits {
        ensure!(event["tgid"].as_u64() == pid.parse().ok(), "{event}");
    }
    ensure!(count(&ended.stderr, "filtered")? >= 30, "{ended:?}");
    ensure!(ended.stderr.contains("the ledger balances"), "{ended:?}");
    Ok(())
}

fn programs_left() -> Result<bool> {
    let programs = shell("bpftool prog show")?;
    let names = ["name enter", "name leave", "name session"];
    let events = fs::read_to_string("/sys/kernel/tracing/kprobe_events")?;
    Ok(names.iter().any(|name| programs.contains(name)) || events.contains("ctracer"))
}

/// After the two signals that end it, after SIGKILL while attached, and after Ctrl-C before.
fn ctracer_leaves_nothing() -> Result<()> {
    let before = loaded()?;
    let expedited = || fs::read_to_string("/sys/kernel/rcu_expedited");
    let usual = expedited()?;
    for signal in [Signal::INT, Signal::TERM] {
        let running = Running::stage("ctracer", &["--only=submit_bio*"])?;
        ensure!(programs_left()? && !loaded()?.is_subset(&before), "nothing is loaded");
        running.signal(signal)?;
        let ended = running.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
        // The programs are freed a moment later, but no probe is left.
        let events = fs::read_to_string("/sys/kernel/tracing/kprobe_events")?;
        ensure!(!events.contains("ctracer"), "{events}");
        ensure!(expedited()? == usual, "grace periods are still expedited");
        wait_until_unloaded(&before)?;
    }
    let running = Running::stage("ctracer", &["--only=submit_bio*"])?;
    ensure!(programs_left()?, "nothing is attached");
    running.signal(Signal::KILL)?;
    running.end()?;
    wait_until("the kernel forgets the probes", || Ok(!programs_left()?))?;

    let mut command = std::process::Command::new(program("ctracer"));
    let running = Running::spawn(command.args(["--duration=100s"]))?;
    let fds = format!("/proc/{}/fd", running.id());
    wait_until("a program is loaded", || {
        let fds = fs::read_dir(&fds)?.flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
        Ok(fds.into_iter().any(|target| target.to_string_lossy().contains("bpf-prog")))
    })?;
    running.interrupt()?;
    wait_until("the kernel forgets the probes", || Ok(!programs_left()?))
}

fn ctracer_says_what_is_wrong() -> Result<()> {
    let wrong: [(&[&str], i32, &str); 6] = [
        (&["--type=nonesuch"], 1, "this kernel has no struct nonesuch"),
        (&["--type=inode", "--dev=254:0"], 1, "--dev needs bios"),
        (&["--sample=0"], 2, "--sample"),
        (&["--dev=sda"], 2, "lsblk"),
        (&["--only=submit_bio", "--html=/no/such/x.html"], 1, "give another path"),
        (&["--only=submit_bio", "--max-events=2", "--perfetto=/dev/full"], 1, "incomplete"),
    ];
    for (arguments, code, message) in wrong {
        let running =
            Running::spawn(std::process::Command::new(program("ctracer")).args(arguments))?;
        let disk = disks::virtio()?;
        let mut running = running;
        if message == "incomplete" {
            running.wait_for("tracing")?;
            shell(&format!("dd if=/dev/{disk} of=/dev/null bs=4k count=4 iflag=direct"))?;
        }
        let ended = running.end()?;
        ensure!(ended.code == Some(code) && ended.stderr.contains(message), "{ended:?}");
    }
    Ok(())
}
