//! `ctracer`'s files beside its JSON lines, and its bounds: samples, a full buffer, a last event.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    io::Read,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    ctracer::{FEW, lines, number},
    ctracer_types::adds_up,
    disks::{self, Mapped, NullBlk},
    run::{Running, count, fio, shell},
};

tests![
    ctracer_writes_one_trace_in_all_forms,
    ctracer_samples_whole_lives,
    ctracer_says_what_it_has_lost,
    ctracer_ends_after_the_last_event,
    ctracer_prints_no_control_characters,
    ctracer_writes_each_output,
    ctracer_has_one_json_type_per_field,
];

/// One run with clones and parts.
fn ctracer_writes_one_trace_in_all_forms() -> Result<()> {
    let (disk, nvme) = (disks::virtio()?, disks::nvme()?);
    let linear = Mapped::new("forms", &format!("0 16384 linear /dev/{disk} 8192"))?;
    let files = ["--json", "--perfetto=/run/perfetto", "--html=/run/html", "--folded=/run/folded"];
    let running = Running::stage("ctracer", &[&FEW[..], &files].concat())?;
    let read = |device: &str, size: &str| {
        shell(&format!("dd if={device} of=/dev/null bs={size} count=3 iflag=direct 2>&1"))
    };
    read(&linear.path(), "16k")?;
    read(&format!("/dev/{nvme}"), "2M")?;
    let output = running.interrupt()?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    adds_up(&all)?;
    let links = lines(&all, "life").filter(|life| !life["parent"].is_null()).count();
    ensure!(links >= 4, "{links} clones and parts: {output}");
    let calls = Calls::new(&all)?;
    perfetto(&fs::read_to_string("/run/perfetto")?, &all, &calls).context("perfetto")?;
    html(&fs::read_to_string("/run/html")?, &all).context("html")?;
    folded(&fs::read_to_string("/run/folded")?, &calls).context("folded")
}

/// What the JSON lines say about calls.
struct Calls {
    /// Function and beginning, once for each object, and once more for the call.
    begins: Vec<(String, u64)>,
    /// Function, beginning and end of those that returned, likewise.
    whole: Vec<(String, u64, u64)>,
    /// The time of all calls that were made by no other one; `None`: one of them did not return.
    outermost: Option<u64>,
}

impl Calls {
    fn new(all: &[Value]) -> Result<Calls> {
        let mut calls = Calls { begins: Vec::new(), whole: Vec::new(), outermost: Some(0) };
        let mut seen = HashSet::new();
        for event in lines(all, "event") {
            let function = event["function"].as_str().context("no function")?.to_owned();
            let time = number(&event["time"])?;
            let key = ["time", "tid", "cpu", "kind", "depth", "function"].map(|key| &event[key]);
            let times = 1 + usize::from(seen.insert(serde_json::to_string(&key)?));
            if event["kind"] == "entry" {
                calls.begins.extend(std::iter::repeat_n((function, time), times));
                continue;
            }
            let Some(duration) = event["duration"].as_u64() else { continue };
            if times == 2 && event["depth"] == 0 {
                calls.outermost = calls.outermost.map(|sum| sum + duration);
            }
            let call = (function, time - duration, time);
            calls.whole.extend(std::iter::repeat_n(call, times));
        }
        calls.begins.sort();
        calls.whole.sort();
        if calls.begins.len() != calls.whole.len() {
            calls.outermost = None;
        }
        Ok(calls)
    }
}

/// Chrome's trace event format: events of phase M name the tracks, X are slices, s and f the ends of an
/// arrow. Times are in µs, here from `start` on. Slices of a track nest; an arrow joins the slices
/// that are open on its tracks, where at the same time longer ones come first.
fn perfetto(file: &str, all: &[Value], calls: &Calls) -> Result<()> {
    let trace: Value = serde_json::from_str(file)?;
    let start: u64 = trace["metadata"]["start"].as_str().context("no start")?.parse()?;
    let events = trace["traceEvents"].as_array().context("no events")?;
    let ns = |time: &Value| time.as_f64().map(|time| (time * 1000.0).round() as u64);
    let track = |event: &Value| -> Result<(u64, u64)> {
        Ok((number(&event["pid"])?, number(&event["tid"])?))
    };
    let mut named: HashMap<&str, HashSet<(u64, u64)>> = HashMap::new();
    let mut tracks: HashMap<(u64, u64), Vec<(u64, u64)>> = HashMap::new();
    let (mut begins, mut slices, mut lives) = (Vec::new(), Vec::new(), Vec::new());
    let (mut leave, mut arrive) = (BTreeMap::new(), BTreeMap::new());
    for event in events {
        let (name, track) = (event["name"].as_str().context("no name")?, track(event)?);
        if event["ph"] == "M" {
            named.entry(name).or_default().insert(track);
            continue;
        }
        let begin = start + ns(&event["ts"]).context("no time")?;
        match event["ph"].as_str() {
            Some("X") => {
                let end = begin + ns(&event["dur"]).context("no duration")?;
                tracks.entry(track).or_default().push((begin, end));
                match name {
                    "bio" => lives.push((begin, end)),
                    "clone" | "split" | "chain" => {}
                    _ => {
                        begins.push((name.to_owned(), begin));
                        slices.push((name.to_owned(), begin, end));
                    }
                }
            }
            Some(phase @ ("s" | "f")) => {
                let ends = if phase == "s" { &mut leave } else { &mut arrive };
                ends.insert(number(&event["id"])?, begin);
                let open = |(from, to): &(u64, u64)| (*from..=*to).contains(&begin);
                let found = tracks.get(&track).is_some_and(|slices| slices.iter().any(open));
                ensure!(found, "nothing is open where this ends: {event}");
            }
            _ => bail!("an odd phase: {event}"),
        }
    }
    for (track, slices) in &mut tracks {
        ensure!(named["thread_name"].contains(track), "no name: {track:?}");
        let process = named["process_name"].iter().any(|(pid, _)| *pid == track.0);
        ensure!(process, "no name of a process: {track:?}");
        slices.sort_by_key(|&(begin, end)| (begin, u64::MAX - end));
        let mut open: Vec<u64> = Vec::new();
        for (begin, end) in slices {
            while open.last().is_some_and(|last| *last <= *begin) {
                open.pop();
            }
            ensure!(open.last().is_none_or(|last| *end <= *last), "{track:?} at {begin}");
            open.push(*end);
        }
    }
    begins.sort();
    ensure!(begins == calls.begins, "{} slices, {} calls", begins.len(), calls.begins.len());
    for call in &calls.whole {
        ensure!(slices.contains(call), "no slice for {call:?}");
    }
    let last = lines(all, "event").map(|event| number(&event["time"])).last().context("none")??;
    let expected = lines(all, "life")
        .map(|life| Ok((number(&life["begin"])?, life["end"].as_u64().unwrap_or(last))));
    ensure!(lives == expected.collect::<Result<Vec<_>>>()?, "{lives:?}");
    // An arrow for each life that came from another one.
    let parents = lines(all, "life").filter(|life| !life["parent"].is_null());
    let expected = parents.map(|life| Ok((number(&life["life"])?, number(&life["begin"])?)));
    let expected = expected.collect::<Result<BTreeMap<_, _>>>()?;
    ensure!(leave == expected && arrive == expected, "{leave:?}, {arrive:?}: {expected:?}");
    Ok(())
}

/// The page's data are the JSON lines in columns.
fn html(page: &str, all: &[Value]) -> Result<()> {
    let (_, data) = page.split_once("<script id=\"data\"").context("no data")?;
    let data = data.split_once('>').and_then(|(_, data)| data.split_once("</script>"));
    let data: Value = serde_json::from_str(data.context("no data")?.0)?;
    let start: u64 = number(&data["start"])?;
    let (events, lives) = (&data["events"], &data["lives"]);
    let mut rows = 0;
    for (index, line) in lines(all, "event").enumerate() {
        let entry = |list: &str, column: &str| -> Result<&Value> {
            Ok(&data[list][number(&events[column][index])? as usize])
        };
        ensure!(start + number(&events["time"][index])? == number(&line["time"])?, "{line}");
        for column in ["cpu", "life", "depth", "argument"] {
            ensure!(events[column][index] == line[column], "{column}: {line}");
        }
        let is_return = number(&events["isReturn"][index])? == 1;
        ensure!(is_return == (line["kind"] == "return"), "{line}");
        ensure!(entry("functions", "function")?[0] == line["function"], "{line}");
        let thread = format!("{} {}", line["comm"].as_str().unwrap_or_default(), line["tid"]);
        ensure!(*entry("threads", "thread")? == *thread, "{thread}: {line}");
        let value = &data["values"][index.to_string()];
        let expected = match (&line["errno"], &line["value"]) {
            (Value::String(errno), _) => Value::String(format!("-{errno}")),
            (_, Value::Null | Value::String(_)) => line["value"].clone(),
            (_, value) => Value::String(value.to_string()),
        };
        ensure!(*value == expected, "{value}: {line}");
        if let Some(duration) = line["duration"].as_u64() {
            let call = number(&events["call"][index])? as usize;
            let [begin, end] = ["begin", "end"].map(|key| data["calls"][key][call].as_u64());
            ensure!(begin.zip(end).is_some_and(|(begin, end)| end - begin == duration), "{line}");
        }
        let changes = data["changes"][index.to_string()].as_array().map_or(0, Vec::len);
        let expected = line["changes"].as_array().map_or(0, Vec::len);
        ensure!(changes == 2 * expected, "{changes}: {line}");
        rows += 1;
    }
    ensure!(events["time"].as_array().map(Vec::len) == Some(rows), "{rows} events");
    for (index, line) in lines(all, "life").enumerate() {
        for column in ["address", "generation", "parent", "link"] {
            ensure!(lives[column][index] == line[column], "{column}: {line}");
        }
        ensure!(start + number(&lives["begin"][index])? == number(&line["begin"])?, "{line}");
        let end = lives["end"][index].as_u64().map(|end| start + end);
        ensure!(end == line["end"].as_u64(), "{line}");
    }
    ensure!(Some(&data["ledger"]) == lines(all, "ledger").next(), "{}", data["ledger"]);
    Ok(())
}

/// The time of all stacks is that of the calls that nobody made.
fn folded(file: &str, calls: &Calls) -> Result<()> {
    let mut sum = 0;
    for line in file.lines() {
        sum += line.rsplit(' ').next().unwrap_or_default().parse::<u64>()?;
    }
    ensure!(calls.outermost.is_none_or(|expected| sum == expected), "{sum}: {:?}", calls.outermost);
    Ok(())
}

/// One bio in five: so many of them, each with all that happens to a bio.
fn ctracer_samples_whole_lives() -> Result<()> {
    let disk = NullBlk::slow()?;
    let functions = ["submit_bio", "bio_init", "bio_endio", "bio_uninit"];
    let only = functions.map(|function| format!("--only={function}"));
    let only: Vec<&str> = only.iter().map(String::as_str).collect();
    let running = Running::stage("ctracer", &[&only[..], &["--json", "--sample=5"]].concat())?;
    fio(&format!(
        "--filename=/dev/{} --direct=1 --rw=randread --bs=4k --ioengine=psync --number_ios=100",
        disk.name
    ))?;
    let output = running.interrupt()?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    sampled(&all, &functions)
}

fn sampled(all: &[Value], functions: &[&str]) -> Result<()> {
    adds_up(all)?;
    let mut lives: BTreeMap<u64, Vec<(&str, &str)>> = BTreeMap::new();
    for event in lines(all, "event") {
        let text = |key: &str| event[key].as_str().unwrap_or_default();
        lives.entry(number(&event["life"])?).or_default().push((text("function"), text("kind")));
    }
    // Every CPU counts by itself, and the disk was looked at by others too.
    ensure!((20..26).contains(&lives.len()), "{} of 100", lives.len());
    for (life, events) in &lives {
        for function in functions {
            for kind in ["entry", "return"] {
                let times = events.iter().filter(|event| **event == (function, kind)).count();
                // Up to 6.1, bio_endio() calls bio_uninit(), and the owner of the bio does again.
                let most = if *function == "bio_uninit" { 2 } else { 1 };
                ensure!(
                    (1..=most).contains(&times),
                    "#{life}: {times} times {kind} of {function}: {events:?}"
                );
            }
        }
    }
    Ok(())
}

/// The reader sleeps until the ring buffer is full. What was written before arrives, the rest is
/// counted.
fn ctracer_says_what_it_has_lost() -> Result<()> {
    let disk = NullBlk::new(&[])?;
    let functions = ["submit_bio*", "bio_init", "bio_endio", "bio_uninit", "bio_associate_blkg*"];
    let only = functions.map(|function| format!("--only={function}"));
    let only: Vec<&str> = only.iter().map(String::as_str).collect();
    let running =
        Running::stage("ctracer", &[&only[..], &["--quiet", "--max-events=9999999"]].concat())?;
    running.signal(Signal::STOP)?;
    let report = fio(&format!(
        "--filename=/dev/{} --direct=1 --rw=randread --bs=4k --ioengine=psync --norandommap \
         --number_ios=8000",
        disk.name
    ));
    running.signal(Signal::CONT)?;
    let ios = number(&report?["read"]["total_ios"])?;
    let output = running.interrupt()?;
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
    ensure!(recorded + lost + unmatched + missed >= 8 * ios, "{ios} I/Os: {output}");
    Ok(())
}

/// --max-events: so many are shown, and the ledger counts the others too; an end that only an fentry
/// program has seen is no event.
fn ctracer_ends_after_the_last_event() -> Result<()> {
    let disk = disks::virtio()?;
    let arguments = ["--json", "--max-events=7", "--only=submit_bio", "--only=bio_endio"];
    let running = Running::stage("ctracer", &arguments)?;
    fio(&format!(
        "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine=libaio --iodepth=32 \
         --numjobs=4 --number_ios=200 --size=64M"
    ))?;
    let ended = running.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let all = ended.stdout.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    ensure!(lines(&all, "event").count() == 7, "{ended:?}");
    let recorded =
        count(&ended.stderr, "calls recorded")? + count(&ended.stderr, "returns recorded")?;
    let beyond = count(&ended.stderr, "more events, not shown")?;
    ensure!(7 + beyond == recorded, "{ended:?}");
    ensure!(ended.stderr.contains("the ledger balances"), "{ended:?}");
    Ok(())
}

/// Threads with odd names: escape sequences, an end of line, separators, no name at all.
fn ctracer_prints_no_control_characters() -> Result<()> {
    let disk = disks::virtio()?;
    let functions = ["--only=submit_bio", "--only=bio_endio"];
    let run = |arguments: &[&str]| -> Result<String> {
        let running = Running::stage("ctracer", &[&functions[..], arguments].concat())?;
        let name = |name: &std::ffi::CStr| rustix::thread::set_name(name).context("set_name");
        for odd in [c"\x1b[31mred\nline", c"", c"a;b c\x7f", c"\xc2\x9b5n", c"\t"] {
            fs::write("/proc/sys/vm/drop_caches", "1")?;
            name(odd)?;
            let device = fs::File::open(format!("/dev/{disk}"));
            let read = device.and_then(|mut device| device.read_exact(&mut [0; 4096]));
            name(c"guest")?;
            read?;
        }
        running.interrupt()
    };
    let allowed = |text: &str| text.chars().all(|c| c == '\n' || !c.is_control());
    let output = run(&["--folded=/run/names"])?;
    ensure!(allowed(&output), "control characters: {output:?}");
    // Each line is one of an event, or belongs to one.
    let graph = output.lines().skip(1).take_while(|line| !line.starts_with("====="));
    for line in graph {
        ensure!(line.contains(" | ") || line.ends_with(" |"), "half a line: {line:?}");
    }
    ensure!(output.contains("?[31mred?line-"), "{output}");
    let folded = fs::read_to_string("/run/names")?;
    ensure!(allowed(&folded), "control characters: {folded:?}");
    for line in folded.lines() {
        let (stack, time) = line.rsplit_once(' ').context("no time")?;
        ensure!(time.parse::<u64>().is_ok(), "{line:?}");
        ensure!(stack.split(';').all(|frame| !frame.trim().is_empty()), "an empty frame: {line:?}");
    }
    for stack in ["?[31mred?line;submit_bio ", "?;submit_bio ", "a_b c?;submit_bio "] {
        ensure!(folded.lines().any(|line| line.starts_with(stack)), "no {stack:?}: {folded:?}");
    }
    let json = run(&["--json"])?;
    ensure!(allowed(&json), "control characters: {json:?}");
    Ok(())
}

/// A full disk takes one of three outputs, or the standard output, and no other one.
fn ctracer_writes_each_output() -> Result<()> {
    let disk = disks::virtio()?;
    let read = format!("dd if=/dev/{disk} of=/dev/null bs=4k count=4 iflag=direct 2>&1");
    let run = |files: &[&str]| -> Result<crate::run::Ended> {
        for file in ["/run/html", "/run/perfetto", "/run/folded"] {
            fs::remove_file(file).ok();
        }
        let arguments = [&["--only=submit_bio", "--quiet"], files].concat();
        let running = Running::stage("ctracer", &arguments)?;
        shell(&read)?;
        running.signal(Signal::INT)?;
        running.end()
    };
    let complete = |html: bool, perfetto: bool, folded: bool| -> Result<()> {
        let size = |file: &str| fs::metadata(file).map_or(0, |data| data.len());
        for (is, file) in
            [(html, "/run/html"), (perfetto, "/run/perfetto"), (folded, "/run/folded")]
        {
            ensure!((size(file) > 0) == is, "{file} has {} bytes", size(file));
        }
        Ok(())
    };
    let ended = run(&["--html=/dev/full", "--perfetto=/run/perfetto", "--folded=/run/folded"])?;
    ensure!(ended.code == Some(1) && ended.stderr.contains("/dev/full is incomplete"), "{ended:?}");
    complete(false, true, true)?;
    let ended = run(&["--html=/run/html", "--perfetto=/dev/full", "--folded=/dev/full"])?;
    ensure!(ended.code == Some(1), "{ended:?}");
    ensure!(ended.stderr.matches("/dev/full is incomplete").count() == 2, "{ended:?}");
    complete(true, false, false)?;
    let arguments = "--only=submit_bio --json --duration=1s --html=/run/html";
    let stage = crate::run::program("ctracer");
    let ended = Running::bash(&format!("{} {arguments} >/dev/full", stage.display()))?.end()?;
    ensure!(ended.code == Some(1) && ended.stderr.contains("No space left"), "{ended:?}");
    complete(true, false, false)?;

    for twice in [
        ["--html=/run/same", "--perfetto=/run/same"],
        ["--html=/run/same", "--folded=/run/../run/./same"],
    ] {
        let ended = crate::run::stage("ctracer", &twice)?;
        ensure!(ended.code == Some(2) && ended.stderr.contains("hold two outputs"), "{ended:?}");
    }
    let ended = crate::run::stage("ctracer", &["--type="])?;
    ensure!(ended.code == Some(2), "{ended:?}");
    Ok(())
}

/// Programs called `true` and `12345`: the name of a thread is a text, whatever it is.
fn ctracer_has_one_json_type_per_field() -> Result<()> {
    shell("cp $(command -v sleep) /run/12345; cp $(command -v sleep) /run/true")?;
    let arguments = ["--type=task_struct", "--json", "--only=exit_signals"];
    let running = Running::stage("ctracer", &arguments)?;
    shell("/run/12345 0; /run/true 0")?;
    let output = running.interrupt()?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let mut types = HashMap::<String, (std::mem::Discriminant<Value>, String)>::new();
    let mut names = HashSet::new();
    for event in lines(&all, "event") {
        let changes = event["changes"].as_array().into_iter().flatten();
        let changes = changes.flat_map(|change| {
            let field = change["field"].as_str().unwrap_or_default();
            [(field, &change["before"]), (field, &change["after"])]
        });
        let fields = event["fields"].as_object().into_iter().flatten();
        for (field, value) in fields.map(|(field, value)| (field.as_str(), value)).chain(changes) {
            let kind = std::mem::discriminant(value);
            let known = types.entry(field.to_owned()).or_insert((kind, value.to_string()));
            ensure!(known.0 == kind, "{field} is {} and {value}", known.1);
            if field == "comm" {
                names.insert(value.clone());
            }
        }
    }
    for name in ["true", "12345"] {
        ensure!(names.contains(&Value::from(name)), "no {name}: {names:?}");
    }
    Ok(())
}
