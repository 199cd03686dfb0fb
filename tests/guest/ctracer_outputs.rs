//! `ctracer`'s files beside its JSON lines, and its bounds: a full buffer, a last event.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Signal;
use serde_json::Value;

use crate::{
    ctracer::{lines, number, parse},
    disks::{self, NullBlk},
    run::{Ended, Running, count, fio, program, shell},
};

tests![ctracer_says_what_it_has_lost, ctracer_writes_each_output,];

/// The arguments for all files, which [`forms`] reads.
pub const FILES: [&str; 3] =
    ["--perfetto=/run/perfetto", "--html=/run/html", "--folded=/run/folded"];

/// The files of a run say the same as its JSON lines.
pub fn forms(all: &[Value]) -> Result<()> {
    let (mut calls, mut returned) = (BTreeSet::new(), BTreeSet::new());
    let mut outermost = BTreeMap::new();
    for event in lines(all, "event") {
        let function = event["function"].as_str().context("no function")?.to_owned();
        let time = number(&event["time"])?;
        if event["kind"] == "entry" {
            calls.insert((function, time));
        } else if let Some(duration) = event["duration"].as_u64() {
            if event["depth"] == 0 {
                outermost.insert((time, event["tid"].to_string()), duration);
            }
            returned.insert((function, time - duration, time));
        }
    }
    let slices = perfetto(&fs::read_to_string("/run/perfetto")?, all).context("perfetto")?;
    let begins: BTreeSet<_> =
        slices.iter().map(|(name, begin, _)| (name.clone(), *begin)).collect();
    let differ: Vec<_> = begins.symmetric_difference(&calls).collect();
    ensure!(differ.is_empty(), "perfetto: slices and calls differ: {differ:?}");
    let missing: Vec<_> = returned.difference(&slices).collect();
    ensure!(missing.is_empty(), "perfetto: no slices for {missing:?}");
    html(&fs::read_to_string("/run/html")?, all).context("html")?;
    // The time of all stacks is that of the calls that nobody made.
    let folded = fs::read_to_string("/run/folded")?;
    let times =
        folded.lines().map(|line| line.rsplit(' ').next().unwrap_or_default().parse::<u64>());
    let (sum, expected) = (times.sum::<Result<u64, _>>()?, outermost.values().sum::<u64>());
    // A call that has not returned lasts until the end.
    ensure!(
        sum == expected || calls.len() > returned.len(),
        "folded: {sum} ns, {expected} in calls that nobody made"
    );
    Ok(())
}

/// Chrome's trace event format: events of phase X are slices, s and f the ends of an arrow. Times are in
/// µs, here from `start` on. That slices nest, and tracks have names, a test of the program judges.
fn perfetto(file: &str, all: &[Value]) -> Result<BTreeSet<(String, u64, u64)>> {
    let trace: Value = serde_json::from_str(file)?;
    let start: u64 = trace["metadata"]["start"].as_str().context("no start")?.parse()?;
    let ns = |time: &Value| time.as_f64().map(|time| (time * 1000.0).round() as u64);
    let (mut slices, mut lives) = (BTreeSet::new(), Vec::new());
    let (mut leave, mut arrive) = (BTreeMap::new(), BTreeMap::new());
    for event in trace["traceEvents"].as_array().context("no events")? {
        let begin = start + ns(&event["ts"]).unwrap_or(0);
        let end = begin + ns(&event["dur"]).unwrap_or(0);
        let name = event["name"].as_str().context("no name")?;
        match (event["ph"].as_str().unwrap_or_default(), name) {
            ("M", _) | ("X", "clone" | "split" | "chain") => {}
            ("X", "bio") => lives.push((begin, end)),
            ("X", _) => drop(slices.insert((name.to_owned(), begin, end))),
            ("s", _) => drop(leave.insert(number(&event["id"])?, begin)),
            ("f", _) => drop(arrive.insert(number(&event["id"])?, begin)),
            _ => bail!("an odd phase: {event}"),
        }
    }
    let last = lines(all, "event").map(|event| number(&event["time"])).last().context("none")??;
    let expected = lines(all, "life")
        .map(|life| Ok((number(&life["begin"])?, life["end"].as_u64().unwrap_or(last))));
    let expected = expected.collect::<Result<Vec<_>>>()?;
    ensure!(lives == expected, "lives: {lives:?}, expected: {expected:?}");
    // An arrow for each life that came from another one.
    let children = lines(all, "life").filter(|life| !life["parent"].is_null());
    let expected = children.map(|life| Ok((number(&life["life"])?, number(&life["begin"])?)));
    let expected = expected.collect::<Result<BTreeMap<_, _>>>()?;
    ensure!(leave == expected && arrive == expected, "{leave:?}, {arrive:?}: {expected:?}");
    Ok(slices)
}

/// The page's data are the JSON lines in columns. A test of the program judges the other columns.
fn html(page: &str, all: &[Value]) -> Result<()> {
    let (_, data) = page.split_once("<script id=\"data\"").context("no data")?;
    let data = data.split_once('>').and_then(|(_, data)| data.split_once("</script>"));
    let data: Value = serde_json::from_str(data.context("no data")?.0)?;
    let start = number(&data["start"])?;
    let times = |times: Vec<&Value>| {
        times.into_iter().map(|time| Ok(start + number(time)?)).collect::<Result<Vec<_>>>()
    };
    let expected = |kind: &str, time: &str| {
        lines(all, kind).map(|line| number(&line[time])).collect::<Result<Vec<_>>>()
    };
    let events = data["events"].as_array().context("no events")?;
    let events = times(events.iter().map(|event| &event[0][0]).collect())?;
    let expected_events = expected("event", "time")?;
    ensure!(events == expected_events, "events: {events:?}, expected: {expected_events:?}");
    let lives = data["lives"].as_array().context("no lives")?;
    let lives = times(lives.iter().map(|life| &life["begin"]).collect())?;
    let expected = expected("life", "begin")?;
    ensure!(lives == expected, "lives: {lives:?}, expected: {expected:?}");
    let ledger = lines(all, "ledger").next().and_then(Value::as_object).context("no ledger")?;
    let differs =
        ledger.iter().find(|(key, value)| *key != "line" && data["ledger"][key] != **value);
    ensure!(differs.is_none(), "{differs:?} in the lines, in the page {}", data["ledger"]);
    Ok(())
}

/// `ctracer report` of what `--json` has printed, by a user who is not root, gives the same files. Of a
/// file that is cut off, it says where, and what it has read is written.
pub fn reports(output: &str) -> Result<()> {
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
    let whole: String = half.split_inclusive('\n').filter(|line| line.ends_with('\n')).collect();
    let calls = parse(&whole)?.iter().filter(|line| line["kind"] == "entry").count();
    let trace: Value = serde_json::from_str(&written("perfetto")?)?;
    let tracks = trace["traceEvents"].as_array().context("no events")?.iter();
    let on_cpus = |event: &&Value| event["ph"] == "X" && event["pid"].as_u64() < Some(1 << 22);
    let slices = tracks.filter(on_cpus).count();
    ensure!(calls > 10 && slices <= calls && 2 * slices > calls, "{slices} of {calls} calls");
    let page = written("html")?;
    ensure!(page.contains("\"ledger\":null"), "a ledger that is not in the lines: {page}");
    Ok(())
}

/// The reader sleeps until the ring buffer is full. What was written before arrives, the rest is
/// counted.
fn ctracer_says_what_it_has_lost() -> Result<()> {
    let disk = NullBlk::new(&[])?;
    let mut arguments = vec!["--only=submit_bio*", "--only=bio_init", "--only=bio_endio"];
    arguments.extend(["--only=bio_uninit", "--only=bio_associate_blkg*"]);
    arguments.extend(["--quiet", "--max-events=9999999"]);
    let running = Running::stage("ctracer", &arguments)?;
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

/// A full disk takes the first of three files, and no other one. And of
/// --max-events, so many are shown; the ledger counts the others too.
fn ctracer_writes_each_output() -> Result<()> {
    let disk = disks::virtio()?;
    let files = ["--perfetto=/dev/full", "--html=/run/html", "--folded=/run/folded"];
    let size = |file: &str| fs::metadata(file).map_or(0, |data| data.len());
    fs::write("/run/html", "").and(fs::write("/run/folded", ""))?;
    let arguments = ["--json", "--max-events=7", "--only=submit_bio", "--only=bio_endio"];
    let running = Running::stage("ctracer", &[&arguments[..], &files].concat())?;
    fio(&format!(
        "--filename=/dev/{disk} --direct=1 --rw=randread --bs=4k --ioengine=libaio --iodepth=32 \
         --numjobs=2 --number_ios=200 --size=64M"
    ))?;
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
