//! `ctracer`, judged by bpftool, a disk with a timer and the tables that we give to device mapper.

use serde_json::json;

use crate::{prelude::*, slow_io};

tests![
    ctracer_draws_the_parts,
    ctracer_follows_a_bio,
    ctracer_leaves_nothing,
    ctracer_says_that_addresses_are_hidden,
    ctracer_says_what_it_has_lost,
    ctracer_writes_each_output,
];

/// The arguments for all files.
const FILES: [&str; 3] = ["--perfetto=/run/perfetto", "--html=/run/html", "--folded=/run/folded"];

/// No argument, for all functions; or these, where it takes too long to attach all one by one (6.1).
pub fn all_or<'a>(few: &'a [&'a str]) -> Result<&'a [&'a str]> {
    Ok(if has_fprobe()? { &[] } else { few })
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

/// What `--list` prints, of stage 12 and of `ctracer`, against BTF by bpftool and the kernel's list of functions.
pub fn stage12_finds_the_functions() -> Result<()> {
    let expected = takers()?;
    let traceable = shell("cut -d' ' -f1 /sys/kernel/tracing/available_filter_functions")?;
    let traceable: HashSet<&str> = traceable.lines().collect();
    // Other modules than dm_mod are not part of the comparison.
    let here = |line: &str| !line.contains(" [") || line.contains("[dm_mod]");
    for program in ["stage12", "ctracer"].into_iter().filter(|program| is_subject(program)) {
        let [mut traced, mut left_out] = listed(program, &[])?;
        traced.retain(|_, line| here(line));
        left_out.retain(|_, line| here(line));
        let all: BTreeSet<String> = traced.keys().chain(left_out.keys()).cloned().collect();
        ensure!(all == expected, "{program}: {:?}", all.symmetric_difference(&expected));
        ensure!(traced.len() > 100, "{program}: only {} functions", traced.len());
        let odd = traced.keys().find(|name| !traceable.contains(name.as_str()));
        ensure!(odd.is_none(), "{program}: {odd:?} cannot be traced");
        for (name, line) in &left_out {
            let why = ["part of a tracepoint", "functions have this name"];
            let refused = !traceable.contains(name.as_str());
            ensure!(refused || why.iter().any(|why| line.contains(why)), "left out: {line}");
        }
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

/// What it prints beside a load, whose ledger is right.
pub fn traced<T>(arguments: &[&str], load: impl FnOnce() -> Result<T>) -> Result<Vec<Value>> {
    let all = parse(&beside("ctracer", &[arguments, &["--json"]].concat(), load)?.1)?;
    adds_up(&all)?;
    Ok(all)
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
/// and one that is split. Its files are made out of its JSON lines once more.
fn ctracer_follows_a_bio() -> Result<()> {
    let slow = NullBlk::slow()?;
    let disk = &slow.name;
    let partition = disks::partitioned(disk)?;
    let linear = Mapped::new("ctracer", &format!("0 16384 linear /dev/{disk} 8192"))?;
    let running = Running::stage("ctracer", &[&FEW[..], &FILES, &["--json"]].concat())?;
    let read = |device: &str, count: &str| {
        shell(&format!("dd if={device} of=/dev/null iflag=direct {count} 2>&1"))
    };
    read(&format!("/dev/{disk}"), "bs=64k count=1 skip=16")?;
    read(&format!("/dev/{partition}"), "bs=8k count=1 skip=3")?;
    read(&linear.path(), "bs=16k count=1 skip=2")?;
    read(&format!("/dev/{disk}"), "bs=4M count=1")?;
    let output = running.interrupt()?;
    let all = parse(&output)?;
    adds_up(&all)?;
    follows(&all, &output)?;
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

/// After a signal that ends it, after SIGKILL while attached, and after Ctrl-C before.
fn ctracer_leaves_nothing() -> Result<()> {
    let _usual = Setting::new("/sys/kernel/rcu_expedited", "0")?;
    let before = loaded()?;
    let changed = || -> Result<bool> {
        let probes = fs::read_to_string("/sys/kernel/tracing/kprobe_events")?;
        let expedited = fs::read_to_string("/sys/kernel/rcu_expedited")?;
        Ok(probes.contains("ctracer") || expedited.trim() != "0")
    };
    for (argument, is_attached, signal, code) in [
        ("--only=submit_bio", true, Signal::TERM, Some(0)),
        ("--only=submit_bio", true, Signal::KILL, None),
        ("--duration=100s", false, Signal::INT, Some(0)),
    ] {
        let mut running = Running::spawn(Command::new(program("ctracer")).arg(argument))?;
        if is_attached {
            running.wait_for(": tracing ")?;
        }
        wait_until("something is loaded", || Ok(!loaded()?.is_subset(&before)))?;
        running.signal(signal)?;
        let ended = running.end()?;
        ensure!(ended.code == code, "{argument}, {signal:?}: {ended:?}");
        // The programs are freed a moment later, but no probe is left.
        ensure!(signal != Signal::TERM || !changed()?, "probes, or expedited grace periods");
        wait_until("the kernel forgets the probes", || Ok(!changed()?))?;
        wait_until_unloaded(&before)?;
    }
    Ok(())
}

/// Without fprobe (6.1), a function is known by its address, which the kernel may hide.
fn ctracer_says_that_addresses_are_hidden() -> Result<()> {
    let _hidden = Setting::new("/proc/sys/kernel/kptr_restrict", "2")?;
    let ended = stage("ctracer", &["--quiet", "--only=submit_bio", "--duration=1s"])?;
    let expected = if has_fprobe()? { (0, "functions traced") } else { (3, "kptr_restrict") };
    let is_it = ended.code == Some(expected.0) && ended.stderr.contains(expected.1);
    ensure!(is_it, "hidden addresses: {expected:?} expected: {ended:?}");
    Ok(())
}

/// `ctracer report` of what `--json` has printed, by a user who is not root, gives the same files. Of a
/// file that is cut off, it says where, and what it has read is written.
fn reports(output: &str) -> Result<()> {
    let ctracer = program("ctracer").display().to_string();
    let report = |text: &str| -> Result<Ended> {
        shell("rm -rf /run/report; install -d -o 65534 /run/report")?;
        fs::write("/run/report/lines", text)?;
        let files = FILES.map(|option| option.replace("/run/", "/run/report/")).join(" ");
        let user = "exec setpriv --reuid 65534 --clear-groups";
        let line = format!("{user} {ctracer} report /run/report/lines {files}");
        Running::spawn(Command::new("sh").args(["-c", &line]))?.end()
    };
    let written = |name: &str| fs::read_to_string(format!("/run/report/{name}"));
    let ended = report(output)?;
    ensure!(ended.code == Some(0), "{ended:?}");
    for name in ["perfetto", "html", "folded"] {
        let is_same = written(name)? == fs::read_to_string(format!("/run/{name}"))?;
        ensure!(is_same, "{name} of the trace and of the report differ");
    }
    let half = &output[..output.len() / 2];
    let number = half.lines().count();
    let ended = report(half)?;
    let is_said = ended.stderr.contains(&format!("line {number} is damaged"));
    ensure!(ended.code == Some(1) && is_said, "cut off in line {number}: {ended:?}");
    let page = written("html")?;
    ensure!(page.contains("\"ledger\":null"), "a ledger that is not in the lines: {page}");
    Ok(())
}

/// The reader sleeps until the ring buffer is full: what is in it arrives, the rest is counted.
fn ctracer_says_what_it_has_lost() -> Result<()> {
    const READS: u64 = 8000;
    let disk = NullBlk::new("test", "")?;
    let arguments = [&FEW[..], &["--quiet", "--max-events=9999999"]].concat();
    let output = beside_a_stopped("ctracer", &arguments, || disks::read(&disk.name, READS as u32))?;
    let of = |what: &str| count(&output, what);
    ensure!(output.contains("the ledger balances"), "{output}");
    let lost = of("lost (ring buffer")?;
    let recorded = of("calls recorded")? + of("returns recorded")?;
    let unmatched = of("returns of calls that")?;
    ensure!(lost > 1000, "lost {lost} only: {output}");
    ensure!(of("events")? == recorded, "{output}");
    // An event has more than 200 bytes, and the buffer 16 MiB.
    ensure!((20_000..84_000).contains(&recorded), "{output}");
    // Four functions at least, entry and return.
    let missed = of("missed (another BPF")? + of("missed (no room")?;
    ensure!(recorded + lost + unmatched + missed >= 8 * READS, "{output}");
    Ok(())
}

/// A full disk takes the first of three files, and no other one. And of
/// --max-events, so many are shown; the ledger counts the others too.
fn ctracer_writes_each_output() -> Result<()> {
    let disk = disks::virtio()?;
    let files = ["--perfetto=/dev/full", "--html=/run/html", "--folded=/run/folded"];
    let size = |file: &str| fs::metadata(file).map_or(0, |data| data.len());
    fs::write("/run/html", "").and(fs::write("/run/folded", ""))?;
    let arguments = ["--json", "--max-events=7", "--only=submit_bio", "--only=bio_endio"];
    let running = Running::stage("ctracer", &[&arguments[..], &files].concat())?;
    fio_direct(&disk, "--iodepth=32 --numjobs=2 --number_ios=200 --size=64M")?;
    let ended = running.end()?;
    let is_said = ended.stderr.contains("/dev/full is incomplete");
    ensure!(ended.code == Some(1) && is_said, "{ended:?}");
    let sizes = ["/run/html", "/run/folded"].map(size);
    ensure!(!sizes.contains(&0), "sizes beside the file that is incomplete: {sizes:?}");
    let events = lines(&parse(&ended.stdout)?, "event").count() as u64;
    // An end that only an fentry program has seen is no event.
    let of = |what: &str| count(&ended.stderr, what);
    let (recorded, beyond) =
        (of("calls recorded")? + of("returns recorded")?, of("more events, not shown")?);
    ensure!(
        events == 7 && 7 + beyond == recorded,
        "{events} events, {beyond}, {recorded}: {ended:?}"
    );
    ensure!(ended.stderr.contains("the ledger balances"), "{ended:?}");
    Ok(())
}

/// The parts of an I/O's time, in their colours, unless nobody wants them: the limit of a cgroup is a wait, the
/// timer of a disk its time. Of a bio, and of its request.
fn ctracer_draws_the_parts() -> Result<()> {
    const TIMER: u64 = 20;
    const SCREEN: &str = "/run/screen";
    let disk = NullBlk::timer("drawn", TIMER, "")?;
    let numbers = disks::numbers(&disk.name)?;
    let cgroup = slow_io::cgroup("drawn", "io.max", &format!("{numbers} riops=8"))?;
    let screen = || String::from_utf8_lossy(&fs::read(SCREEN).unwrap_or_default()).into_owned();
    let bio = format!("--dev {numbers} --only *rq_qos* --only submit_bio --only bio_endio");
    let request =
        "--type request --only *rq_qos_track --only blk_mq_start_request --only blk_mq_end_request";
    for (environment, options) in
        [("TERM=linux", &*bio), ("NO_COLOR=1", &bio), ("TERM=linux", request)]
    {
        fs::remove_file(SCREEN).ok();
        let command =
            format!("set -f; exec {} {options} --duration 5s", program("ctracer").display());
        let terminal = Running::bash(&format!(
            "export {environment}; exec script -qfc '{command}' {SCREEN} </dev/null >/dev/null"
        ))?;
        wait_until("ctracer", || Ok(screen().contains("tracing for")))?;
        slow_io::read_throttled(&cgroup, &disk.name, 4)?;
        terminal.end_well()?;
        let screen = screen();
        // The longest time in a part, ms; and that it is drawn in its colour alone.
        let longest = |name: &str, colour: u8| -> Result<u64> {
            let plain = environment == "NO_COLOR=1";
            let painted = format!("\x1b[48;5;{colour}m\x1b[38;5;16m{name}\x1b[0m");
            let start = format!("{}: ", if plain { name } else { &painted });
            ensure!(!plain || !screen.contains("\x1b["), "{environment}: {screen}");
            let times =
                screen.split(&start).skip(1).map(|rest| rest.split('.').next().unwrap_or_default());
            let times = times.map(str::parse::<u64>).collect::<Result<Vec<_>, _>>()?;
            Ok(times.into_iter().max().with_context(|| format!("no {name}: {screen:?}"))? / 1000)
        };
        let device = longest("device", 75)?;
        ensure!(device >= TIMER, "device: {device} ms, and its timer {TIMER} ms: {screen}");
        if options == bio {
            let wait = longest("wait", 214)?;
            ensure!(wait >= 60, "wait: {wait} ms, and 8 reads a second are allowed: {screen}");
            let cell = if environment == "NO_COLOR=1" { "device " } else { "device\x1b[0m " };
            let hop = screen.lines().find(|line| line.trim_end().ends_with("-> bio_endio"));
            ensure!(hop.is_some_and(|hop| hop.contains(cell)), "{cell:?}: {screen}");
        } else {
            longest("queue", 141)?;
        }
    }
    shell(&format!("rmdir {cgroup}")).map(drop)
}
