//! What the owner says, and what the learner is told of an answer.

use std::{fs, io::Write, process::Command};

use anyhow::{Result, ensure};
use incidents::{
    TICKET,
    plan::{Cure, Fault, IncidentPlan, Layer, name},
};

use crate::machine::{below, disk_of};

/// Lines of an output that are shown.
const LINES: usize = 14;

/// Prints the ticket: the service had so many requests a second when all was well.
pub fn show(plan: &IncidentPlan, level: u8, rate: u64) -> Result<()> {
    let (process, directory) = (plan.service.process(), plan.service.directory());
    let (ms, tags) = plan.data_sheet();
    let hint = match level {
        1 => format!("\n  The time is lost in: {}.\n", name(plan.answer().layer)),
        _ => String::new(),
    };
    let ticket = format!(
        "\n  Since this morning, {process} is slow: customers wait, and some of them leave.\n  \
         Nobody has changed anything. Please find out what it is.\n\n  \
         {process} has its files in {directory}, and writes to /var/log/{process}.log what took long;\n  \
         /run/{process}.status counts its requests. Last week there were {rate} a second, and hardly\n  \
         one was slow. By its data sheet, the disk of maild takes {tags} at once, and needs {ms} ms for\n  \
         each I/O; those of the others are quicker. shopd, webd, maild, backupd, reportd, tidyd,\n  \
         sensord and indexd run on this machine, and have always done so.\n{hint}"
    );
    println!(
        "{ticket}\n\
         All stages and tools are here, and `cargo vm shell` in another terminal opens one more shell\n\
         (there, {TICKET} is this ticket). Outside of the virtual machine, `cargo lesson answer` judges\n\
         what you found; `exit` ends the incident."
    );
    Ok(fs::write(TICKET, ticket)?)
}

/// Writes the way to the answer: each command, its output in this incident, and what that says.
pub fn walkthrough(plan: &IncidentPlan, to: &mut impl Write) -> Result<()> {
    writeln!(to, "\nThis leads there:")?;
    for (command, meaning) in steps(plan)? {
        writeln!(to, "\n$ {command}")?;
        let output = Command::new("sh").args(["-c", &command]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(!text.trim().is_empty(), "{command} prints nothing here: {output:?}");
        let lines: Vec<&str> = text.lines().collect();
        for line in lines.iter().take(LINES) {
            writeln!(to, "{line}")?;
        }
        if lines.len() > LINES {
            writeln!(to, "… {} lines more", lines.len() - LINES)?;
        }
        writeln!(to, "→ {meaning}")?;
    }
    Ok(())
}

/// A command, and what its output means.
type Step = (String, &'static str);

/// The way to the answer: where the time is lost, then why.
fn steps(plan: &IncidentPlan) -> Result<[Step; 2]> {
    let disk = disk_of(plan.service)?;
    let disks = below(&disk)?;
    let cure = plan.answer().cure;
    let why = match cure {
        Cure::IoLimit | Cure::MemoryLimit | Cure::CpuLimit => limit(cure, plan, &disks[0]),
        Cure::QueueDepth | Cure::NrRequests | Cure::Scheduler | Cure::Readahead => {
            setting(cure, &disk, &disks[0])
        }
        Cure::Disk | Cure::Table => device(cure, plan, &disks[0]),
        _ => other_work(cure, plan, &disk),
    };
    Ok([layer(plan, &disk, &disks), why])
}

/// Where the time is lost.
fn layer(plan: &IncidentPlan, disk: &str, disks: &[String]) -> Step {
    let process = plan.service.process();
    let parts = format!("slow_io --min 1h --disk {disk} --duration 5s 2>&1 | grep -v '^$'");
    let cache = format!("cachetop --batch --interval 4s --duration 4s | grep -E 'COMM|{process}'");
    let is_quick = "No part is long: what is slow is not the I/O.";
    match plan.answer().layer {
        Layer::PageCache => {
            (cache, "Its reads find fewer pages in memory than those of the other services.")
        }
        Layer::Cpu => (parts, is_quick),
        Layer::Errors => (
            format!(
                "tail -n 3 /var/log/{process}.log; slow_io --min 0 --disk {disk} --duration 5s 2>&1 | grep EIO"
            ),
            "Some I/Os fail, and the service makes them again.",
        ),
        Layer::Wait => (parts, "Almost all of the time is spent before there is a request."),
        Layer::Queue => (parts, "It has a request, and the driver does not get it."),
        Layer::Mapper => (parts, "The disk below is quick: the time is spent in device mapper."),
        Layer::Device | Layer::End if plan.fault == Fault::SlowLeg => (
            format!(
                "slow_io --min 1h --duration 5s | awk -v RS= '/^({}): /' | grep -E ': |share|device|total'",
                disks.join("|")
            ),
            "Device mapper makes I/O of its own, and one of the disks below takes long for it.",
        ),
        Layer::Device | Layer::End => (parts, "The disk itself takes that long."),
    }
}

/// A limit of the service's cgroup.
fn limit(cure: Cure, plan: &IncidentPlan, lower: &str) -> Step {
    let service = plan.service.name();
    match cure {
        Cure::IoLimit => (
            format!("cat /sys/block/{lower}/dev; cat /sys/fs/cgroup/{service}/io.max"),
            "The cgroup of the service has a limit on this disk.",
        ),
        Cure::MemoryLimit => (
            format!(
                "cd /sys/fs/cgroup/{service}; grep . memory.max; grep refault_file memory.stat"
            ),
            "Its cgroup has less memory than the files that it reads: pages go, and come again.",
        ),
        _ => (
            format!("cd /sys/fs/cgroup/{service}; grep . cpu.max; grep throttled cpu.stat"),
            "Its cgroup may use so many us of CPU in each period, and waits for the next one.",
        ),
    }
}

/// A setting of a disk's queue.
fn setting(cure: Cure, disk: &str, lower: &str) -> Step {
    let queue = format!("/sys/block/{lower}/queue");
    match cure {
        Cure::QueueDepth => (
            format!("cat /sys/block/{lower}/mq/*/nr_tags; cat {queue}/scheduler"),
            "The device takes one I/O at a time, and there is no scheduler to wait in.",
        ),
        Cure::NrRequests => (
            format!("grep . {queue}/nr_requests {queue}/scheduler"),
            "The queue holds four requests; the device would take more.",
        ),
        Cure::Scheduler => (
            format!("cd {queue}; grep . scheduler iosched/slice_idle iosched/timeout_sync"),
            "bfq serves one process at a time, up to timeout_sync ms, and meanwhile lets the disk idle, up to \
             slice_idle ms, to see whether it reads on.",
        ),
        _ => (
            format!("grep . /sys/block/{disk}/queue/read_ahead_kb"),
            "Without readahead, a file is read page by page.",
        ),
    }
}

/// The disk itself, or what device mapper makes of it.
fn device(cure: Cure, plan: &IncidentPlan, lower: &str) -> Step {
    match cure {
        Cure::Disk => (
            format!("dmsetup table; grep . /sys/block/{lower}/queue/scheduler"),
            "Nothing above the disk explains it, and nothing but another disk removes the cause.",
        ),
        _ if plan.fault == Fault::Errors => (
            "dmsetup table".to_owned(),
            "`flakey` lets each I/O in these sectors fail, for a second out of two.",
        ),
        _ => {
            ("dmsetup table".to_owned(), "`delay` lets the I/O wait, so many ms, in these sectors.")
        }
    }
}

/// What a process does, the service or another one.
fn other_work(cure: Cure, plan: &IncidentPlan, disk: &str) -> Step {
    let process = plan.service.process();
    let whose = format!(
        "slow_io --min 1h --who --disk {disk} --duration 5s 2>/dev/null | grep -A8 '^ *PID'"
    );
    match cure {
        Cure::Cache => (
            "cd /sys/kernel/tracing/instances && mkdir -p way && cd way && \
             echo 1 > events/syscalls/sys_enter_fadvise64/enable && sleep 2 && \
             grep -o '[a-z]*-[0-9]* ' trace | sort | uniq -c; cd ..; rmdir way"
                .to_owned(),
            "tidyd tells the page cache all the time to forget (posix_fadvise).",
        ),
        Cure::Flushes => {
            (whose, "reportd, and jbd2 for it, write small pieces all the time: fsync.")
        }
        Cure::Load => (
            format!("for n in 1 2; do cat /run/{process}.status; sleep 5; done; {whose}"),
            "Nobody else uses the disk much: the service has many more requests than before.",
        ),
        Cure::Copying => {
            (whose, "Others do much more on this disk than the service: the copy of backupd.")
        }
        _ => (
            "top -b -H -n 2 -d 4 | awk '/^top/ { tables++ } tables == 2' | sed -n '7,12p'"
                .to_owned(),
            "sensord has threads of a real-time priority (PR is negative), which take the CPUs.",
        ),
    }
}
