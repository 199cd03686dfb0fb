//! `ctracer` with other structs than bios, judged by what the load knows of its objects.

use std::{
    collections::{HashMap, HashSet},
    fs,
    mem::discriminant,
    process::Command,
};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{
    ctracer::{adds_up, all_or, calls, lines, number, parse, values},
    disks,
    run::{Running, between, not_judged, program, shell, wait_until},
};

tests![
    ctracer_survives_its_own_events,
    ctracer_gives_each_page_a_life,
    ctracer_has_one_json_type_per_field,
    ctracer_keeps_to_its_memory,
];

/// What a trace of folios costs in memory makes events itself. It must see Ctrl-C all the same, and
/// keep to its bounds.
fn ctracer_survives_its_own_events() -> Result<()> {
    if !all_or(&["few"])?.is_empty() {
        return not_judged("without fprobe, attaching to all functions takes too long");
    }
    let mut command = Command::new(program("ctracer"));
    let mut running = Running::spawn(command.args(["--type=folio", "--quiet"]))?;
    running.wait_for("tracing")?;
    shell("find /usr/share/doc -maxdepth 1 | wc -l")?;
    let status = fs::read_to_string(format!("/proc/{}/status", running.id()))?;
    let output = running.interrupt()?;
    let memory: u64 = between(&status, "VmHWM:", "kB")?.trim().parse()?;
    ensure!(memory < 500 << 10, "{memory} KiB: {output}");
    ensure!(output.contains("the ledger balances") || output.contains(" off ("), "{output}");
    Ok(())
}

/// The page cache is filled and emptied in turn: a folio that is added to it is not the one that was
/// there before, though they are freed in batches, which no function with a folio tells.
fn ctracer_gives_each_page_a_life() -> Result<()> {
    let disk = disks::virtio()?;
    let mut arguments = vec!["--type=folio", "--json", "--only=filemap_*_folio"];
    arguments.extend(["--only=__folio_put*", "--only=folio_add_lru"]);
    let running = Running::stage("ctracer", &arguments)?;
    let read = format!("dd if=/dev/{disk} of=/dev/null bs=64k count=8 skip=16 2>&1");
    let both = format!("blockdev --flushbufs /dev/{disk}; {read}");
    shell(&[both.as_str(); 3].join(";"))?;
    let all = parse(&running.interrupt()?)?;
    let mut added = HashMap::<u64, u64>::new();
    for event in calls(&all, "filemap_add_folio") {
        *added.entry(number(&event["life"])?).or_default() += 1;
    }
    // 1.5 MiB, in folios of at most 512 KiB.
    ensure!(added.len() >= 3, "{} folios were added", added.len());
    let twice = added.iter().find(|(_, times)| **times > 1);
    ensure!(twice.is_none(), "life and additions: {twice:?}, of {} lives", added.len());
    let index = 16 * (64 << 10) / 4096;
    let has_it = |event: &Value| values(event, "index").any(|value| *value == index);
    ensure!(lines(&all, "event").any(has_it), "no folio has the index {index}");
    adds_up(&all)
}

/// Programs called `true` and `12345`: the name of a thread is a text, whatever it is. And the number of a
/// process is in its task_struct.
fn ctracer_has_one_json_type_per_field() -> Result<()> {
    shell("cp $(command -v sleep) /run/12345; cp $(command -v sleep) /run/true")?;
    let arguments = ["--type=task_struct", "--json", "--only=exit_signals"];
    let running = Running::stage("ctracer", &arguments)?;
    let pid: u64 = shell("/run/12345 0; echo $$; exec /run/true 0")?.trim().parse()?;
    let all = parse(&running.interrupt()?)?;
    let mut types = HashMap::<&str, &Value>::new();
    let (mut names, mut pids) = (HashSet::new(), HashSet::new());
    for event in lines(&all, "event") {
        let changes = event["changes"].as_array().into_iter().flatten();
        let changes = changes.flat_map(|change| {
            let field = change["field"].as_str().unwrap_or_default();
            [(field, &change["before"]), (field, &change["after"])]
        });
        let fields = event["fields"].as_object().into_iter().flatten();
        for (field, value) in fields.map(|(field, value)| (field.as_str(), value)).chain(changes) {
            let known = *types.entry(field).or_insert(value);
            ensure!(discriminant(known) == discriminant(value), "{field} is {known} and {value}");
        }
        names.extend(values(event, "comm"));
        pids.extend(values(event, "pid"));
    }
    for (found, wanted) in
        [(&names, Value::from("true")), (&names, "12345".into()), (&pids, pid.into())]
    {
        ensure!(found.contains(&wanted), "no {wanted}: {found:?}");
    }
    adds_up(&all)
}

/// A page of task_structs, which have 10,000 bytes each: the kernel knows how much memory the stage has
/// had when the trace began, and at most.
fn ctracer_keeps_to_its_memory() -> Result<()> {
    const MEMORY: u64 = 16_000;
    // The ring buffer, what was taken out of it when the trace ended, and what waited to be sorted.
    const ON_THE_WAY: u64 = 2 * (16 << 10) + (9 << 10);
    // What malloc() has between the pieces that are in use: eight runs differed by 3.4 MiB.
    const BETWEEN: u64 = (MEMORY + ON_THE_WAY) / 16;
    let mut command = Command::new(program("ctracer"));
    command.args(["--type=task_struct", "--quiet", "--html=/run/html", "--memory=16M"]);
    command.args(["--only=select_task_rq_*", "--only=wakeup_preempt_*", "--only=set_next_*"]);
    let mut running = Running::spawn(&mut command)?;
    running.wait_for(": tracing ")?;
    let path = format!("/proc/{}/status", running.id());
    let most = || -> Result<u64> {
        Ok(between(&fs::read_to_string(&path)?, "VmHWM:", "kB")?.trim().parse()?)
    };
    let (without, mut with) = (most()?, 0);
    // Two processes that wake each other up.
    let _load = Running::bash(
        "mkfifo /run/ping /run/pong 2>/dev/null; exec perl -e '
        $SIG{ALRM} = sub { exit }; alarm 100; $| = 1;
        if (fork) { open A, \">/run/ping\"; open B, \"/run/pong\" }
        else { open B, \"/run/ping\"; open A, \">/run/pong\"; }
        while (1) { syswrite A, \"x\"; sysread B, $_, 1 }'",
    )?;
    wait_until("the trace is full", || Ok(most().map(|most| with = most).is_err()))?;
    let ended = running.end()?;
    ensure!(ended.code == Some(0), "{ended:?}");
    println!("{with} KiB at most, {without} KiB at the start");
    ensure!(ended.stderr.contains("it takes 16 MB (--memory)"), "{ended:?}");
    let bound = without + MEMORY + ON_THE_WAY + BETWEEN;
    ensure!(with <= bound, "{with} KiB of {bound}, {without} at the start: {ended:?}");
    // It is used, too.
    ensure!(with >= without + MEMORY / 4, "{with} KiB, {without} at the start: {ended:?}");
    Ok(())
}
