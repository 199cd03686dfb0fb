//! `ctracer` with other structs than bios, judged by what the load knows of its objects.

use std::{
    collections::{HashMap, HashSet},
    fs,
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    ctracer::{lines, number},
    disks,
    run::{Running, between, not_judged, program, shell, stage, wait_until},
};

tests![
    ctracer_follows_other_structs,
    ctracer_survives_its_own_events,
    ctracer_knows_a_struct_that_no_function_takes,
    ctracer_gives_each_page_a_life,
    ctracer_keeps_to_its_memory,
];

/// A struct, the functions to trace, a load that prints a number, and the field that has to have it in
/// an event of one of the functions.
struct Case {
    name: &'static str,
    only: &'static [&'static str],
    load: String,
    field: &'static str,
}

fn cases() -> Result<Vec<Case>> {
    let disk = disks::virtio()?;
    Ok(vec![
        Case {
            name: "request",
            only: &["blk_mq_start_request", "blk_mq_end_request", "__blk_mq_end_request"],
            load: format!(
                "dd if=/dev/{disk} of=/dev/null bs=64k count=1 skip=16 iflag=direct; echo 65536"
            ),
            field: "__data_len",
        },
        Case {
            name: "folio",
            only: &["folio_add_lru", "filemap_add_folio", "__filemap_add_folio"],
            load: format!("dd if=/dev/{disk} of=/dev/null bs=4k count=1 skip=300; echo 300"),
            field: "index",
        },
        Case {
            name: "inode",
            only: &["inode_init_always*", "inode_permission", "destroy_inode", "__destroy_inode"],
            load: "touch /run/inode; stat -c %i /run/inode; rm /run/inode".to_owned(),
            field: "i_ino",
        },
        Case {
            name: "sk_buff",
            only: &["ip_rcv", "udp_rcv", "__udp4_lib_rcv", "kfree_skb*", "consume_skb"],
            // 20 bytes of IP's header and 8 of UDP's.
            load: "bash -c 'head -c 1234 /dev/zero >/dev/udp/127.0.0.1/9'; echo 1262".to_owned(),
            field: "len",
        },
        Case {
            name: "task_struct",
            only: &["wake_up_new_task", "free_task", "exit_signals"],
            load: "sh -c 'echo $$; exec true'".to_owned(),
            field: "pid",
        },
    ])
}

fn ctracer_follows_other_structs() -> Result<()> {
    for Case { name, only, load, field } in cases()? {
        let only: Vec<String> = only.iter().map(|glob| format!("--only={glob}")).collect();
        let mut arguments = vec!["--json", "--type", name];
        arguments.extend(only.iter().map(String::as_str));
        let running = Running::stage("ctracer", &arguments)?;
        let expected: u64 = shell(&format!("{{ {load}; }} 2>/dev/null"))?.trim().parse()?;
        let output = running.interrupt()?;
        let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        let has_it = |event: &Value| {
            let changes = event["changes"].as_array().into_iter().flatten();
            let changed = changes.filter(|change| change["field"] == field);
            let mut values =
                changed.map(|change| &change["after"]).chain([&event["fields"][field]]);
            values.any(|value| *value == expected)
        };
        ensure!(lines(&all, "event").any(has_it), "{name}: no {field} is {expected}: {output}");
        adds_up(&all).with_context(|| name.to_owned())?;
    }
    Ok(())
}

/// The ledger's parts are its hits, and the events that arrived are those that were recorded.
pub fn adds_up(all: &[Value]) -> Result<()> {
    let ledger = lines(all, "ledger").next().context("no ledger")?;
    let mut sum = 0;
    for (key, value) in ledger.as_object().context("no ledger")? {
        if !["line", "hits", "objects_lost"].contains(&key.as_str()) {
            sum += number(value)?;
        }
    }
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

/// What a trace of folios costs in memory makes events itself. It must see Ctrl-C all the same, and
/// keep to its bounds.
fn ctracer_survives_its_own_events() -> Result<()> {
    // One by one, attaching to all functions takes too long.
    let symbols = fs::read_to_string("/proc/kallsyms")?;
    if !symbols.contains(" register_fprobe_ips\n") {
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
    let functions = ["filemap_add_folio", "filemap_remove_folio", "__folio_put*", "folio_add_lru"];
    let only = functions.map(|function| format!("--only={function}"));
    let mut arguments = vec!["--type=folio", "--json"];
    arguments.extend(only.iter().map(String::as_str));
    let running = Running::stage("ctracer", &arguments)?;
    for _ in 0..4 {
        shell("echo 1 >/proc/sys/vm/drop_caches")?;
        shell(&format!("dd if=/dev/{disk} of=/dev/null bs=64k count=16 2>&1"))?;
    }
    let output = running.interrupt()?;
    let all = output.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let (mut added, mut most) = (HashMap::<u64, u64>::new(), (0, 0));
    for event in lines(&all, "event") {
        if event["function"] == "filemap_add_folio" && event["kind"] == "entry" {
            let life = number(&event["life"])?;
            let times = added.entry(life).or_default();
            *times += 1;
            most = most.max((*times, life));
        }
    }
    // 4 MiB, in folios of at most 2 MiB.
    ensure!(added.len() >= 8, "{} folios were added", added.len());
    ensure!(most.0 == 1, "#{} was added {} times, of {} lives", most.1, most.0, added.len());
    Ok(())
}

/// A page of task_structs, which have 10,000 bytes each: the kernel knows how much memory the stage has
/// had, and a run that keeps one event is what it needs beside the trace.
fn ctracer_keeps_to_its_memory() -> Result<()> {
    const MEMORY: u64 = 32_000;
    // The ring buffer, what was taken out of it when the trace ended, and what waited to be sorted.
    const ON_THE_WAY: u64 = 2 * (16 << 10) + (9 << 10);
    // What malloc() has between the pieces that are in use: eight runs differed by 3.4 MiB.
    const BETWEEN: u64 = (MEMORY + ON_THE_WAY) / 16;
    let run = |bound: &str| -> Result<(u64, String)> {
        let mut command = Command::new(program("ctracer"));
        let functions = ["--only=select_task_rq_*", "--only=wakeup_preempt_*", "--only=set_next_*"];
        command.args(["--type=task_struct", "--quiet", "--html=/run/html", bound]).args(functions);
        let mut running = Running::spawn(&mut command)?;
        running.wait_for(": tracing ")?;
        // Two processes that wake each other up.
        let _load = Running::bash(
            "mkfifo /run/ping /run/pong 2>/dev/null; exec perl -e '
            $SIG{ALRM} = sub { exit }; alarm 100; $| = 1;
            if (fork) { open A, \">/run/ping\"; open B, \"/run/pong\" }
            else { open B, \"/run/ping\"; open A, \">/run/pong\"; }
            while (1) { syswrite A, \"x\"; sysread B, $_, 1 }'",
        )?;
        let (path, mut memory) = (format!("/proc/{}/status", running.id()), 0);
        wait_until("the trace is full", || {
            let status = fs::read_to_string(&path)?;
            let Ok(most) = between(&status, "VmHWM:", "kB") else { return Ok(true) };
            memory = most.trim().parse()?;
            Ok(false)
        })?;
        let ended = running.end()?;
        ensure!(ended.code == Some(0), "{ended:?}");
        Ok((memory, ended.stdout + &ended.stderr))
    };
    let (without, _) = run("--max-events=1")?;
    let (with, output) = run(&format!("--memory={}M", MEMORY / 1000))?;
    println!("{with} KiB at most, {without} KiB for one event");
    ensure!(output.contains("it takes 32 MB (--memory)"), "{output}");
    ensure!(
        with <= without + MEMORY + ON_THE_WAY + BETWEEN,
        "{with} KiB, {without} KiB for one event: {output}"
    );
    // It is used, too.
    ensure!(with >= without + MEMORY / 4, "{with} KiB, {without} KiB for one event: {output}");
    Ok(())
}

/// A struct to which the kernel has no pointer at all.
fn ctracer_knows_a_struct_that_no_function_takes() -> Result<()> {
    let dump = shell("bpftool btf dump file /sys/kernel/btf/vmlinux")?;
    let (mut structs, mut pointed) = (HashMap::<&str, Vec<&str>>::new(), HashSet::new());
    for line in dump.lines() {
        let Some((id, rest)) = line.strip_prefix('[').and_then(|line| line.split_once("] ")) else {
            continue;
        };
        if let Some(name) = rest.strip_prefix("STRUCT '") {
            structs.entry(name.split('\'').next().unwrap_or_default()).or_default().push(id);
        } else if let Some((_, target)) = rest.split_once(" type_id=") {
            // A pointer to it, or to a const one.
            pointed.insert(target.split(' ').next().unwrap_or_default());
        }
    }
    let lonely = |(name, ids): &(&&str, &Vec<&str>)| {
        !["(anon)", ""].contains(*name) && ids.len() == 1 && !pointed.contains(ids[0])
    };
    let (name, _) = structs.iter().find(lonely).context("all structs are pointed to")?;
    let ended = stage("ctracer", &["--type", name])?;
    let said =
        ended.stderr.contains(&format!("no function of this kernel takes a struct {name} *"));
    ensure!(ended.code == Some(1) && said, "{ended:?}");
    wait_until("nothing is attached", || {
        Ok(!fs::read_to_string("/sys/kernel/tracing/kprobe_events")?.contains("ctracer"))
    })
}
