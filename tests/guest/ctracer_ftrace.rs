//! `ctracer` beside the kernel's own tracer: what calls what, with which object, and what it returns.

use crate::{
    ctracer::{all_or, lines, number, parse as lines_of, traced},
    prelude::*,
};

tests![ctracer_sees_what_ftrace_sees, ctracer_names_errors,];

/// A call or a return.
#[derive(Clone, Debug, PartialEq)]
struct Step {
    is_return: bool,
    depth: usize,
    function: String,
}

/// The steps of each thread; of each CPU where it is idle.
type Threads = BTreeMap<(u64, u64), Vec<Step>>;

fn thread(tid: u64, cpu: u64) -> (u64, u64) {
    (tid, if tid == 0 { cpu } else { 0 })
}

/// `  62.440322 |   1)     dd-299     |               |  bio_init() {`; a call without calls is one
/// line that ends with `;`, a return is `} /* bio_init */`. Others are about threads and interrupts.
fn parse(text: &str) -> Result<Threads> {
    let mut threads = Threads::new();
    let line = r"[\d.]+ \| +(\d+)\) .*-(\d+) +\|[^|]*\|( +)((?:\} /\* )?)([\w.]+)[ (](.*)$";
    for [cpu, tid, indent, end, function, rest] in rows(text, line) {
        let Some(depth) = (indent.len() / 2).checked_sub(1) else { continue };
        let steps = threads.entry(thread(tid.parse()?, cpu.parse()?)).or_default();
        let step = |is_return| Step { is_return, depth, function: function.to_owned() };
        if end.is_empty() {
            steps.push(step(false));
        }
        if !end.is_empty() || rest.trim_end().ends_with(';') {
            steps.push(step(true));
        }
    }
    Ok(threads)
}

/// The steps of each thread, from `ctracer`'s events.
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
        threads.entry(thread).or_default().push(Step { is_return, depth, function });
    }
    Ok(threads)
}

/// A direct read by one thread, from the call to the completion, beside two tracers of the kernel.
fn ctracer_sees_what_ftrace_sees() -> Result<()> {
    // Where functions are attached one by one (6.1), some of the block layer's.
    let mut few =
        vec!["--only=*submit_bio*", "--only=bio_i*", "--only=bio_endio", "--only=bio_uninit"];
    few.extend(["--only=bio_associate*", "--only=__bio_*", "--only=blk_[am]*", "--only=*rq_qos*"]);
    let arguments = all_or(&few)?;
    let (disk, [known, _]) = (NullBlk::slow()?, listed("ctracer", arguments)?);
    let hooks = hooks(&known);
    let running = Running::stage("ctracer", &[arguments, &["--json"]].concat())?;
    let ftrace = Ftrace::new(&hooks)?;
    let graph = Tracer::graph(&known.keys().map(String::as_str).collect())?;
    let start = now();
    shell(&format!("dd if=/dev/{} of=/dev/null bs=64k count=3 iflag=direct 2>&1", disk.name))?;
    let (end, graph, ftrace) = (now(), graph.text()?, ftrace.events()?);
    let all = lines_of(&running.interrupt()?)?;
    let ledger = || lines(&all, "ledger").next().unwrap_or(&Value::Null).to_string();
    let is_own =
        |event: &&Value| event["time"].as_u64().is_some_and(|at| (start..end).contains(&at));
    let events: Vec<&Value> = lines(&all, "event").filter(is_own).collect();
    nests(&events, &graph).with_context(ledger)?;
    has_the_values(&events, &ftrace, &known).with_context(ledger)
}

/// Every call and every return, of all functions, in the same order and as deep.
fn nests(events: &[&Value], text: &str) -> Result<()> {
    let (expected, found) = (parse(text)?, steps(events.iter().copied())?);
    let calls: usize = expected.values().map(Vec::len).sum();
    ensure!(calls > 40, "{calls} steps: {text}");
    for name in expected.keys().chain(found.keys()) {
        let (theirs, ours) = (expected.get(name), found.get(name));
        let (theirs, ours) = (theirs.context("ftrace: no thread")?, ours.context("no thread")?);
        for (number, (their, our)) in theirs.iter().zip(ours).enumerate() {
            ensure!(our == their, "{name:?} {number}: {our:?}, ftrace: {their:?}: {text}");
        }
        ensure!(theirs.len() == ours.len(), "{name:?}: {} of {}", ours.len(), theirs.len());
    }
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

/// How ftrace calls the type that a function returns, by its declaration; `None`: nothing.
fn in_ftraces_words(name: &str, declaration: &str) -> Option<&'static str> {
    match declaration.split(name).next().unwrap_or_default().trim_end() {
        "void" => None,
        "bool" => Some("u8"),
        "int" => Some("s32"),
        "unsigned int" => Some("u32"),
        "blk_status_t" => Some("u8"),
        _ => Some("x64"),
    }
}

/// What ftrace's probes at the functions above record, as far as the kernel has them.
fn hooks(known: &BTreeMap<String, String>) -> Vec<Hook> {
    let mut hooks = Vec::new();
    for (name, position) in PROBED {
        let Some(declaration) = known.get(name) else { continue };
        hooks.push(Hook::Argument(name, position));
        hooks.extend(in_ftraces_words(name, declaration).map(|kind| Hook::Value(name, kind)));
        let others = OTHERS.iter().filter(|(of, ..)| *of == name);
        hooks.extend(others.map(|(of, number, kind, _)| Hook::Other(of, *number, kind)));
    }
    hooks
}

/// Whether both saw the same objects in the same positions, and the same other arguments and values.
fn has_the_values(
    events: &[&Value],
    judge: &[Event],
    known: &BTreeMap<String, String>,
) -> Result<()> {
    // What ours and theirs say of a function's calls, or returns.
    let compare = |name: &str, kind: &str, theirs: &str, path: &str| {
        let of = events.iter().filter(|event| event["function"] == name && event["kind"] == kind);
        // ftrace prints a bool as a number.
        let text = |event: &&Value| match event.pointer(path).unwrap_or(&Value::Null) {
            Value::Bool(value) => u8::from(*value).to_string(),
            Value::String(value) => value.clone(),
            value => value.to_string(),
        };
        let ours: Vec<String> = of.map(text).collect();
        let expected = judge.iter().filter(|event| event.name == theirs);
        let expected: Vec<String> = expected.map(|event| event.argument.clone()).collect();
        ensure!(ours == expected, "{theirs}: {ours:?}, ftrace: {expected:?}");
        Ok(ours)
    };
    let (mut second, mut values, mut others) = (0, 0, 0);
    for (name, position) in PROBED.into_iter().filter(|(name, _)| known.contains_key(*name)) {
        let objects = compare(name, "entry", name, "/address")?;
        second += if position == 2 { objects.len() } else { 0 };
        if in_ftraces_words(name, &known[name]).is_some() {
            let all = compare(name, "return", &format!("{name}__return"), "/value")?;
            values += all.iter().filter(|value| !["0x0", "0"].contains(&value.as_str())).count();
        }
        for (_, _, _, key) in OTHERS.iter().filter(|(of, ..)| *of == name) {
            let (theirs, path) = (format!("{name}__other"), format!("/arguments/{key}"));
            others += compare(name, "entry", &theirs, &path)?.len();
        }
    }
    ensure!(others >= 6, "only {others} other arguments");
    ensure!(second >= 3, "no function with the bio as its second argument was called");
    ensure!(values >= 3, "all values were 0");
    Ok(())
}

/// A path that does not exist: ENOENT, which one function below returns as a pointer, one as an int.
fn ctracer_names_errors() -> Result<()> {
    let functions = ["--only=do_filp_open", "--only=do_file_open", "--only=filename_lookup"];
    let load = || shell("! cat /no/such/file 2>/dev/null; ! test -e /no/such/file");
    let all = traced(&[&functions[..], &["--type=filename"]].concat(), load)?;
    let returns = |prefix: &str| -> Vec<&Value> {
        let name =
            |event: &Value| event["function"].as_str().unwrap_or_default().starts_with(prefix);
        lines(&all, "event").filter(|event| event["kind"] == "return" && name(event)).collect()
    };
    let (pointers, numbers) = (returns("do_fil"), returns("filename_lookup"));
    ensure!(pointers.iter().any(|event| event["value"] == "-ENOENT"), "{pointers:?}");
    ensure!(pointers.iter().all(|event| event["value"].is_string()), "{pointers:?}");
    let failed = numbers.iter().find(|event| event["value"] == -2).context("nothing failed")?;
    ensure!(failed["errno"] == "ENOENT", "{failed}");
    ensure!(numbers.iter().all(|event| event["value"].is_i64()), "{numbers:?}");
    Ok(())
}
