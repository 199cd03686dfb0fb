//! `ctracer` beside the kernel's own tracer: what calls what, with which object, and what it returns.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    ctracer::{balanced, lines, number},
    disks::NullBlk,
    ftrace::{Ftrace, Hook, TRACEFS},
    run::{Running, now, shell, stage},
};

tests![
    ctracer_nests_as_ftrace_says,
    ctracer_has_ftraces_arguments_and_values,
    ctracer_names_errors,
];

/// The function graph tracer, for some functions. There is one for all: it has no instance.
struct Graph;

impl Graph {
    fn start(functions: &[String]) -> Result<Graph> {
        let graph = Graph;
        write("tracing_on", "0")?;
        write("trace_clock", "mono")?;
        // By their numbers in the list: for each name, the kernel would go through all of it.
        let list = fs::read_to_string(Path::new(TRACEFS).join("available_filter_functions"))?;
        let wanted: HashSet<&str> = functions.iter().map(String::as_str).collect();
        let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        let numbers = (1..).zip(list.lines()).filter(|(_, line)| wanted.contains(&*name(line)));
        let numbers: Vec<String> = numbers.map(|(number, _)| number.to_string()).collect();
        ensure!(numbers.len() >= functions.len(), "{} of {functions:?}", numbers.len());
        write("set_ftrace_filter", &numbers.join("\n"))?;
        write("current_tracer", "function_graph")?;
        for option in ["funcgraph-proc", "funcgraph-abstime", "funcgraph-tail"] {
            write(&format!("options/{option}"), "1")?;
        }
        if has_arguments() {
            write("options/funcgraph-args", "1")?;
        }
        write("trace", "")?;
        write("tracing_on", "1")?;
        Ok(graph)
    }

    fn text(&self) -> Result<String> {
        write("tracing_on", "0")?;
        fs::read_to_string(Path::new(TRACEFS).join("trace")).context("trace")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if has_arguments() {
            write("options/funcgraph-args", "0").ok();
        }
        for option in ["funcgraph-proc", "funcgraph-abstime", "funcgraph-tail"] {
            write(&format!("options/{option}"), "0").ok();
        }
        write("current_tracer", "nop").ok();
        write("set_ftrace_filter", "").ok();
        write("trace_clock", "local").ok();
        write("tracing_on", "1").ok();
    }
}

fn write(file: &str, text: &str) -> Result<()> {
    fs::write(Path::new(TRACEFS).join(file), text).with_context(|| format!("{file}: {text}"))
}

/// Since 6.15.
fn has_arguments() -> bool {
    Path::new(TRACEFS).join("options/funcgraph-args").exists()
}

/// A call or a return.
#[derive(Clone, Debug, PartialEq)]
struct Step {
    is_return: bool,
    depth: usize,
    function: String,
    /// Of a call, where it is known: `bio=0xffff888003a1c000, …`.
    arguments: String,
}

/// The steps of each thread; of each CPU where it is idle.
type Threads = BTreeMap<(u64, u64), Vec<Step>>;

fn thread(tid: u64, cpu: u64) -> (u64, u64) {
    (tid, if tid == 0 { cpu } else { 0 })
}

/// `  62.440322 |   1)     dd-299     |               |  bio_init(bio=0x…) {`, a call without calls
/// is one line that ends with `;`, and a return is `} /* bio_init */`.
fn parse(text: &str) -> Result<Threads> {
    let mut threads = Threads::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let columns: Vec<&str> = line.splitn(4, '|').collect();
        // The other lines are about a switch to another thread, or about an interrupt.
        let [_, task, _, step] = columns[..] else { continue };
        let step = step.trim_end();
        let depth = (step.len() - step.trim_start().len()) / 2;
        let (step, Some(depth)) = (step.trim_start(), depth.checked_sub(1)) else { continue };
        let (cpu, task) = task.split_once(')').with_context(|| line.to_owned())?;
        let tid = task.trim().rsplit('-').next().unwrap_or_default();
        let steps = threads.entry(thread(tid.parse()?, cpu.trim().parse()?)).or_default();
        let mut add = |is_return, function: &str, arguments: &str| {
            let (function, arguments) = (function.to_owned(), arguments.to_owned());
            steps.push(Step { is_return, depth, function, arguments });
        };
        if let Some(rest) = step.strip_prefix("} /* ") {
            add(true, rest.split(' ').next().unwrap_or_default(), "");
            continue;
        }
        let (function, rest) = step.split_once('(').with_context(|| line.to_owned())?;
        let (arguments, end) = rest.rsplit_once(')').with_context(|| line.to_owned())?;
        add(false, function, arguments);
        if end.starts_with(';') {
            add(true, function, "");
        }
    }
    Ok(threads)
}

/// The same from `ctracer`'s events.
fn steps<'a>(events: impl Iterator<Item = &'a Value>) -> Result<Threads> {
    let mut threads = Threads::new();
    let mut last = BTreeMap::new();
    for event in events {
        let thread = thread(number(&event["tid"])?, number(&event["cpu"])?);
        let is_return = event["kind"] == "return";
        let function = event["function"].as_str().context("no function")?.to_owned();
        let depth = number(&event["depth"])? as usize;
        // A call with two objects has two events, of one time.
        let call = (number(&event["time"])?, is_return, depth, function.clone());
        if last.insert(thread, call.clone()) == Some(call) {
            continue;
        }
        let object = event["address"].as_str().context("no address")?;
        let arguments = match is_return {
            true => String::new(),
            false => format!("{} {object}", event["argument"]),
        };
        let step = Step { is_return, depth, function, arguments };
        threads.entry(thread).or_default().push(step);
    }
    Ok(threads)
}

/// What `ctracer` records while `judged` runs a load, without what comes before and after; and what
/// the judge says.
fn beside<T>(
    arguments: &[&str],
    judged: impl FnOnce() -> Result<T>,
    compare: impl Fn(&[&Value], T) -> Result<()>,
) -> Result<()> {
    let running = Running::stage("ctracer", &[arguments, &["--json"]].concat())?;
    let start = now();
    let judge = judged()?;
    let end = now();
    let output = running.interrupt()?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let ledger = lines(&all, "ledger").next().context("no ledger")?;
    let mut events = Vec::new();
    for event in lines(&all, "event") {
        if (start..end).contains(&number(&event["time"])?) {
            events.push(event);
        }
    }
    compare(&events, judge).with_context(|| ledger.to_string())
}

/// The functions that `ctracer` traces, and what they return: `int`, `struct bio *`.
fn functions() -> Result<BTreeMap<String, String>> {
    let listed = stage("ctracer", &["--list"])?;
    let (traced, _) = listed.stdout.split_once("\nLeft out:\n").context("no list")?;
    let function = |line: &str| {
        let declaration = line.split('(').next().unwrap_or_default();
        let name = declaration.rsplit([' ', '*']).next().unwrap_or_default();
        let returned = declaration.strip_suffix(name).unwrap_or_default().trim_end();
        (name.to_owned(), returned.to_owned())
    };
    Ok(traced.lines().map(function).collect())
}

/// A direct read by one thread, from the call to the completion in an interrupt: every call and every
/// return, of all functions, in the same order and as deep.
fn ctracer_nests_as_ftrace_says() -> Result<()> {
    let disk = NullBlk::slow()?;
    let functions: Vec<String> = functions()?.into_keys().collect();
    let read = format!("dd if=/dev/{} of=/dev/null bs=64k count=2 iflag=direct 2>&1", disk.name);
    let judged = || {
        let graph = Graph::start(&functions)?;
        shell(&read)?;
        graph.text()
    };
    beside(&[], judged, |events, text| {
        balanced(events)?;
        let (expected, found) = (parse(&text)?, steps(events.iter().copied())?);
        let calls: usize = expected.values().map(Vec::len).sum();
        ensure!(calls > 40, "{calls} steps: {text}");
        let names: Vec<_> = expected.keys().chain(found.keys()).collect();
        for name in names {
            let (theirs, ours) = (expected.get(name), found.get(name));
            let (theirs, ours) = (theirs.context("ftrace: no thread")?, ours.context("no thread")?);
            for (number, (their, our)) in theirs.iter().zip(ours).enumerate() {
                let bare = |step: &Step| (step.is_return, step.depth, step.function.clone());
                ensure!(bare(their) == bare(our), "{name:?} {number}: {their:?}, {our:?}: {text}");
                if !their.arguments.is_empty() {
                    same_argument(their, our)?;
                }
            }
            ensure!(theirs.len() == ours.len(), "{name:?}: {} of {}", ours.len(), theirs.len());
        }
        ensure!(!has_arguments() || text.contains("submit_bio(bio=0x"), "no arguments: {text}");
        Ok(())
    })
}

/// `bio=0xffff888003a1c000, nr_segs=0x1` and `0 0xffff888003a1c000`
fn same_argument(theirs: &Step, ours: &Step) -> Result<()> {
    let (position, object) = ours.arguments.split_once(' ').context("no object")?;
    let argument = theirs.arguments.split(", ").nth(position.parse()?);
    let value = argument.and_then(|argument| argument.rsplit('=').next());
    ensure!(value == Some(object), "{theirs:?}, {ours:?}");
    Ok(())
}

/// Functions, and the position of the bio among their arguments. Of each kernel, some.
const PROBED: [(&str, usize); 11] = [
    ("submit_bio", 1),
    ("bio_endio", 1),
    ("bio_init", 1),
    ("__rq_qos_throttle", 2),
    ("blk_attempt_plug_merge", 2),
    ("blk_mq_sched_bio_merge", 2),
    ("bio_iov_iter_get_pages", 1),
    ("bio_integrity_prep", 1),
    ("bio_split_rw", 1),
    ("__bio_split_to_limits", 1),
    ("bio_split_io_at", 1),
];

/// Arguments that are no bio: function, position, ftrace's type, name. Of each kernel, some.
const OTHERS: [(&str, usize, &str, &str); 4] = [
    ("blk_attempt_plug_merge", 3, "u32", "nr_segs"),
    ("blk_mq_sched_bio_merge", 3, "u32", "nr_segs"),
    ("bio_init", 4, "u16", "max_vecs"),
    ("__rq_qos_throttle", 1, "x64", "rqos"),
];

/// How ftrace calls the types that the functions above return; `None`: nothing.
fn in_ftraces_words(returned: &str) -> Option<&'static str> {
    match returned {
        "void" => None,
        "bool" => Some("u8"),
        "int" => Some("s32"),
        "unsigned int" => Some("u32"),
        "blk_status_t" => Some("u8"),
        _ => Some("x64"),
    }
}

/// The same objects in the same positions, the same other arguments and values, as probes of ftrace see.
fn ctracer_has_ftraces_arguments_and_values() -> Result<()> {
    let (disk, known) = (NullBlk::slow()?, functions()?);
    let probed = PROBED.iter().filter_map(|(name, position)| {
        known.get(*name).map(|returns| (*name, *position, in_ftraces_words(returns)))
    });
    let probed: Vec<_> = probed.collect();
    let only: Vec<String> = probed.iter().map(|(name, ..)| format!("--only={name}")).collect();
    let only: Vec<&str> = only.iter().map(String::as_str).collect();
    let mut hooks = Vec::new();
    for (name, position, returns) in &probed {
        hooks.push(Hook::Argument(name, *position));
        hooks.extend(returns.map(|kind| Hook::Value(name, kind)));
        let others = OTHERS.iter().filter(|(of, ..)| of == name);
        hooks.extend(others.map(|(of, number, kind, _)| Hook::Other(of, *number, kind)));
    }
    let read = format!("dd if=/dev/{} of=/dev/null bs=64k count=3 iflag=direct 2>&1", disk.name);
    let judged = || {
        let ftrace = Ftrace::new(&hooks)?;
        shell(&read)?;
        ftrace.events()
    };
    beside(&only, judged, |events, judge| {
        let (mut second, mut values) = (0, 0);
        for (name, position, returns) in &probed {
            let all = |kind: &str, key: &str| -> Vec<String> {
                let of = |event: &&&Value| event["function"] == **name && event["kind"] == kind;
                // ftrace prints a bool as a number.
                let text = |event: &&Value| match &event[key] {
                    Value::Bool(value) => u8::from(*value).to_string(),
                    Value::String(value) => value.to_owned(),
                    value => value.to_string(),
                };
                events.iter().filter(of).map(text).collect()
            };
            let theirs = |event_name: &str| -> Vec<String> {
                let of = judge.iter().filter(|event| event.name == event_name);
                of.map(|event| event.argument.clone()).collect()
            };
            let (ours, expected) = (all("entry", "address"), theirs(name));
            ensure!(ours == expected, "{name}: {ours:?}, ftrace: {expected:?}");
            second += if *position == 2 { ours.len() } else { 0 };
            if returns.is_some() {
                let (ours, expected) = (all("return", "value"), theirs(&format!("{name}__return")));
                ensure!(ours == expected, "{name}: {ours:?}, ftrace: {expected:?}");
                values +=
                    ours.iter().filter(|value| !["0x0", "0"].contains(&value.as_str())).count();
            }
        }
        let mut others = 0;
        for (name, _, _, argument) in OTHERS {
            let is_call = |event: &&&Value| event["function"] == name && event["kind"] == "entry";
            let text = |event: &&Value| match &event["arguments"][argument] {
                Value::String(value) => value.to_owned(),
                value => value.to_string(),
            };
            let ours: Vec<String> = events.iter().filter(is_call).map(text).collect();
            let theirs = judge.iter().filter(|event| event.name == format!("{name}__other"));
            let expected: Vec<String> = theirs.map(|event| event.argument.clone()).collect();
            ensure!(ours == expected, "{name}, {argument}: {ours:?}, ftrace: {expected:?}");
            others += ours.len();
        }
        ensure!(others >= 6, "only {others} other arguments");
        ensure!(second >= 3, "no function with the bio as its second argument was called");
        ensure!(values >= 3, "all values were 0");
        Ok(())
    })
}

/// A path that does not exist: the system call says ENOENT, and so do the functions below it, one with
/// a pointer and one with an int.
fn ctracer_names_errors() -> Result<()> {
    let functions = ["--only=do_filp_open", "--only=do_file_open", "--only=filename_lookup"];
    let arguments = [&functions[..], &["--type=filename"]].concat();
    let load = || shell("! cat /no/such/file 2>/dev/null; ! test -e /no/such/file");
    let running = Running::stage("ctracer", &[&arguments[..], &["--json"]].concat())?;
    load()?;
    let output = running.interrupt()?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let returns = |prefix: &str| -> Vec<&Value> {
        let of = |event: &&Value| {
            event["kind"] == "return"
                && event["function"].as_str().is_some_and(|name| name.starts_with(prefix))
        };
        lines(&all, "event").filter(of).collect()
    };
    let (pointers, numbers) = (returns("do_fil"), returns("filename_lookup"));
    ensure!(pointers.iter().any(|event| event["value"] == "-ENOENT"), "{output}");
    ensure!(pointers.iter().all(|event| event["value"].is_string()), "{output}");
    let failed = numbers.iter().find(|event| event["value"] == -2).context(output.clone())?;
    ensure!(failed["errno"] == "ENOENT", "{failed}");
    ensure!(numbers.iter().all(|event| event["value"].is_i64()), "{output}");

    let running = Running::stage("ctracer", &arguments)?;
    load()?;
    let output = running.interrupt()?;
    for name in ["do_fil", "filename_lookup"] {
        let is_return = |line: &&str| line.contains(name) && line.contains(" = -ENOENT");
        ensure!(output.lines().any(|line| is_return(&line)), "{name}: {output}");
    }
    Ok(())
}
