//! The way to the right answer: commands, what they print in this incident, and a sentence that is chosen by that. The
//! proof runs it, and fails where an output does not show what its sentence has to say.

use std::{fmt::Write as _, fs, process::Command};

use anyhow::{Context, Result, ensure};
use incidents::{
    measured::{Activity, shown},
    plan::{Cure, Distractor, Fault, IncidentPlan, Layer, Service},
    table::{Part, column, largest, part, parts, sum},
};

use crate::{
    machine::{below, disk_of},
    scene::CHECKS,
};

/// Lines of an output that are shown.
const LINES: usize = 14;
/// From which p50 on an I/O is slow, at a disk that is quick by its data sheet, in ms.
const SLOW_MS: f64 = 120.0;

/// What an output says, or why it does not say what it should.
type Said = Result<String, String>;

/// A command, and what its output says.
pub struct Step {
    command: String,
    says: Box<dyn Fn(&str) -> Said>,
}

impl Step {
    fn new(command: impl Into<String>, says: impl Fn(&str) -> Said + 'static) -> Step {
        Step { command: command.into(), says: Box::new(says) }
    }
}

/// What came of a way.
#[derive(Default)]
pub struct Walked {
    /// As it is shown.
    pub text: String,
    /// Where an output and what it should say disagree.
    pub disagreements: Vec<String>,
    /// The parts of the I/Os' time, if the way shows them.
    pub parts: Vec<Part>,
}

impl Walked {
    /// Goes a step.
    fn step(&mut self, step: &Step) -> Result<()> {
        let Step { command, says } = step;
        let output = Command::new("sh").args(["-c", command]).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(!text.trim().is_empty(), "{command} prints nothing here: {output:?}");
        let lines: Vec<&str> = text.lines().collect();
        writeln!(self.text, "\n$ {command}")?;
        for line in lines.iter().take(LINES) {
            writeln!(self.text, "{line}")?;
        }
        if lines.len() > LINES {
            writeln!(self.text, "… {} lines more", lines.len() - LINES)?;
        }
        match says(&text) {
            Ok(says) => writeln!(self.text, "→ {says}")?,
            Err(why) => {
                writeln!(self.text, "→ This time, it does not show: {why}.")?;
                self.disagreements.push(format!("{command}: {why}\n{text}"));
            }
        }
        if self.parts.is_empty() {
            self.parts = parts(&text);
        }
        Ok(())
    }
}

/// Goes the way in this incident, and past what is odd and harmless.
pub fn walk(plan: &IncidentPlan, usual: &Activity, fault: &Activity) -> Result<Walked> {
    let mut walked = Walked { text: "\nThis leads there:\n".to_owned(), ..Walked::default() };
    for step in steps(plan, usual)? {
        walked.step(&step)?;
    }
    if let Some(distractor) = plan.distractor {
        walked.text.push_str("\nWhat looked odd and was not:\n");
        for step in [throttled(), odd(plan, distractor, fault)?] {
            walked.step(&step)?;
        }
    }
    Ok(walked)
}

/// The way to the answer: where the time is lost, then why.
fn steps(plan: &IncidentPlan, usual: &Activity) -> Result<[Step; 2]> {
    let disk = disk_of(plan.service)?;
    let disks = below(&disk)?;
    let cure = plan.answer().cure;
    let why = match cure {
        Cure::IoLimit | Cure::MemoryLimit | Cure::CpuLimit => limit(cure, plan, &disks[0]),
        Cure::QueueDepth | Cure::NrRequests | Cure::Scheduler | Cure::Readahead => {
            setting(cure, plan, &disk, &disks[0])
        }
        Cure::Disk | Cure::Table => device(cure, plan, &disks[0]),
        _ => other_work(cure, plan, &disk, usual),
    };
    Ok([layer(plan, &disk, disks), why])
}

/// Where the time is lost.
fn layer(plan: &IncidentPlan, disk: &str, disks: Vec<String>) -> Step {
    let process = plan.service.process();
    let table = format!("slow_io --min 1h --disk {disk} --duration 5s 2>&1 | grep -v '^$'");
    let sheet = plan.sheet.ms;
    match plan.answer().layer {
        Layer::PageCache => Step::new(
            "cachetop --batch --interval 4s --duration 4s | grep -E 'COMM|shopd|webd|maild'",
            move |text| misses(text, &process),
        ),
        Layer::Cpu => {
            let group = format!("/sys/fs/cgroup/{}", plan.service.name());
            let command = format!("{table}; echo \"io.max: '$(cat {group}/io.max)'\"");
            Step::new(command, move |text| no_cpu(text, sheet as f64))
        }
        Layer::Errors => Step::new(
            format!(
                "grep failed /var/log/{process}.log | tail -n 3; slow_io --min 0 --disk {disk} --duration 5s 2>&1 | grep EIO"
            ),
            |text| match text.contains("EIO") && text.contains("failed") {
                true => Ok("Some I/Os fail, and the service makes them again.".to_owned()),
                false => Err("no I/O has failed, or the log names none".to_owned()),
            },
        ),
        Layer::Device | Layer::End if plan.fault == Fault::SlowLeg => Step::new(
            format!(
                "slow_io --min 1h --duration 5s | awk -v RS= '/^({}): /' | grep -E ': |share|device|total'",
                disks.join("|")
            ),
            move |text| slow_leg(text, &disks),
        ),
        layer => Step::new(table, move |text| of_part(text, layer, sheet as f64)),
    }
}

/// What the table of a disk says of the part that has most of the time: it has to be this one.
fn of_part(text: &str, layer: Layer, sheet: f64) -> Said {
    let parts = parts(text);
    let first = largest(&parts).ok_or("slow_io has printed no table")?;
    let Part { name, share, p50, p99, .. } = first;
    if *name != incidents::plan::name(layer) {
        return Err(format!("{name} has most of the time, {share} %"));
    }
    if *share < 50.0 || *p99 < SLOW_MS {
        return Err(format!("{name} has {share} % of the time, and a p99 of {p99} ms"));
    }
    let some = format!("one I/O in a hundred needs {} ms or longer there", shown(*p99));
    Ok(match layer {
        Layer::Wait => {
            format!("wait has {share} % of the time: it passes before there is a request; {some}.")
        }
        Layer::Queue => format!(
            "queue has {share} % of the time: there is a request, and the driver does not get it; {some}."
        ),
        Layer::Mapper => format!(
            "mapper has {share} % of the time, and the disk below is quick: the time is spent in device \
             mapper; {some}."
        ),
        _ if *p50 >= sheet * 1.5 => format!(
            "device has {share} % of the time: the disk itself has half of the I/Os for {} ms or longer, and \
             its data sheet promises {sheet} ms.",
            shown(*p50)
        ),
        _ => return Err(format!("half of the I/Os are quick at the disk: {p50} ms")),
    })
}

/// What the table of a disk says if the process gets no CPU.
fn no_cpu(text: &str, sheet: f64) -> Said {
    let parts = parts(text);
    let (Some(total), Some(first)) = (part(&parts, "total"), largest(&parts)) else {
        return Err("slow_io has printed no table".to_owned());
    };
    let Part { name, share, p99, .. } = first;
    let (half, most) = (shown(total.p50), shown(*p99));
    if total.p99 < SLOW_MS.max(sheet * 2.0) {
        return Ok("No part is long, and hardly any I/O is slow: it is not the disk.".to_owned());
    }
    if total.p50 >= SLOW_MS.max(sheet * 2.0) {
        return Err(format!("half of the I/Os take {half} ms or longer"));
    }
    let odd = format!(
        "{name} has {share} % of the time, and a p99 of {most} ms, but half of the I/Os take {half} ms or less (by the data sheet: {sheet} ms)"
    );
    match name.as_str() {
        _ if !text.contains("io.max: ''") => Err("its io.max is not empty".to_owned()),
        "wait" | "mapper" => Ok(format!(
            "{odd}, and io.max is empty. A thread that loses its CPU while it submits an I/O looks like that: \
             the disk is quick, the process waits for a CPU."
        )),
        _ => Ok(format!(
            "{odd}. While a CPU is busy, what an I/O needs it for waits: that counts there, and the disk is quick."
        )),
    }
}

/// What cachetop's table says: the process misses more than the others.
fn misses(text: &str, process: &str) -> Said {
    let (hits, misses) = (column(text, "COMM", "HITS"), column(text, "COMM", "MISSES"));
    let share = |name: &str| {
        let (hits, misses) = (sum(&hits, &[name]), sum(&misses, &[name]));
        100.0 * misses / (hits + misses).max(1.0)
    };
    let own = share(process);
    let others = Service::ALL.map(Service::process);
    let others: Vec<f64> =
        others.iter().filter(|name| *name != process).map(|name| share(name)).collect();
    let most = others.into_iter().fold(0.0, f64::max);
    match own > 3.0 && own > most * 1.5 {
        true => Ok(format!(
            "{own:.0} % of the pages that {process} reads are not in memory, and at most {most:.0} % of those of the \
             other services."
        )),
        false => Err(format!("{process} misses {own:.1} % of its pages, others up to {most:.1} %")),
    }
}

/// What the tables of a mirror's legs say.
fn slow_leg(text: &str, disks: &[String]) -> Said {
    let mut p99 = Vec::new();
    for table in disks {
        let from = text.find(&format!("{table}: ")).ok_or(format!("{table} has no table"))?;
        let parts = parts(&text[from..]);
        p99.push(part(&parts, "device").ok_or(format!("{table} has no device's time"))?.p99);
    }
    let slowest = p99.iter().copied().fold(0.0, f64::max);
    let quickest = p99.iter().copied().fold(f64::MAX, f64::min);
    match slowest >= SLOW_MS * 2.0 && quickest * 2.0 < slowest {
        true => Ok(format!(
            "Device mapper makes I/O of its own, for each leg. One leg needs up to {} ms for it, the other one {} ms.",
            shown(slowest),
            shown(quickest)
        )),
        false => Err(format!("the legs need {p99:?} ms")),
    }
}

/// The first number in a text.
fn first_number(text: &str) -> Option<f64> {
    let digits = text.split(|c: char| !c.is_ascii_digit()).find(|word| !word.is_empty());
    digits.and_then(|word| word.parse().ok())
}

/// The value in a line `NAME:VALUE` or `NAME VALUE`, as grep and the kernel print them.
fn value_of<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let line = text.lines().find(|line| line.contains(name))?;
    line.split([':', ' ']).next_back()
}

/// Such a value, which is a number.
fn number_of(text: &str, name: &str) -> Result<f64, String> {
    let value = value_of(text, name).and_then(|value| value.trim().parse().ok());
    value.ok_or(format!("{name} is no number"))
}

/// A limit of the service's cgroup.
fn limit(cure: Cure, plan: &IncidentPlan, lower: &str) -> Step {
    let group = format!("/sys/fs/cgroup/{}", plan.service.name());
    match cure {
        Cure::IoLimit => {
            Step::new(format!("cat /sys/block/{lower}/dev; cat {group}/io.max"), |text| {
                let (disk, limits) = text.split_once('\n').unwrap_or_default();
                let limit = limits.lines().find_map(|line| line.strip_prefix(disk));
                let operations = |limit: &str| {
                    let words = limit.split_whitespace().filter(|word| !word.ends_with("max"));
                    words.collect::<Vec<_>>().join(" ")
                };
                let limit = limit.map(operations).ok_or("io.max has no line for this disk")?;
                Ok(format!(
                    "The cgroup of the service has a limit on this disk, in a second: {limit}."
                ))
            })
        }
        Cure::MemoryLimit => Step::new(
            format!("cd {group}; grep . memory.max /dev/null; grep refault_file memory.stat"),
            |text| {
                let (limit, again) =
                    (number_of(text, "memory.max")?, number_of(text, "refault_file")?);
                if again < 1.0 {
                    return Err("no page was read again".to_owned());
                }
                Ok(format!(
                    "Its cgroup may use {:.0} MiB of memory, less than the files that it reads: {again:.0} pages went, \
                     and were read again.",
                    limit / f64::from(1 << 20)
                ))
            },
        ),
        _ => Step::new(format!("cd {group}; grep . cpu.max; grep throttled cpu.stat"), |text| {
            let quota = text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
            let quota = quota.ok_or("cpu.max has no limit")?;
            let times = number_of(text, "nr_throttled")?;
            match times > 0.0 {
                true => Ok(format!(
                    "Its cgroup may use {:.0} ms of CPU in each period. It has used them up {times:.0} times, and \
                     waited for the next period.",
                    quota / 1000.0
                )),
                false => Err("it was never throttled".to_owned()),
            }
        }),
    }
}

/// A setting of a disk's queue.
fn setting(cure: Cure, plan: &IncidentPlan, disk: &str, lower: &str) -> Step {
    let queue = format!("/sys/block/{lower}/queue");
    let sheet = plan.sheet.tags;
    match cure {
        Cure::QueueDepth => Step::new(
            format!("cat /sys/block/{lower}/mq/*/nr_tags; cat {queue}/scheduler"),
            move |text| match (first_number(text), text.contains("[none]")) {
                (Some(1.0), true) if sheet > 1 => Ok(format!(
                    "The device takes one I/O at a time, and by its data sheet {sheet}; and there is no scheduler to \
                     wait in."
                )),
                (tags, _) => Err(format!("it takes {tags:?} of {sheet}, or has a scheduler")),
            },
        ),
        Cure::NrRequests => {
            Step::new(format!("grep . {queue}/nr_requests {queue}/scheduler"), move |text| {
                match number_of(text, "nr_requests")? {
                    few if (few as u64) < sheet => Ok(format!(
                        "The queue holds {few} requests; the device would take {sheet}."
                    )),
                    many => Err(format!("the queue holds {many} requests, the device {sheet}")),
                }
            })
        }
        Cure::Scheduler => Step::new(
            format!("cd {queue}; grep . scheduler iosched/slice_idle iosched/timeout_sync"),
            |text| {
                let (idle, most) =
                    (number_of(text, "slice_idle")?, number_of(text, "timeout_sync")?);
                match text.contains("[bfq]") && idle >= 100.0 {
                    true => Ok(format!(
                        "bfq serves one process at a time, up to {most} ms (timeout_sync), and meanwhile lets the \
                         disk idle, up to {idle} ms (slice_idle), to see whether it reads on."
                    )),
                    false => Err(format!("it is not bfq, or it idles for {idle} ms")),
                }
            },
        ),
        _ => Step::new(format!("grep . /sys/block/{disk}/queue/read_ahead_kb /dev/null"), |text| {
            match number_of(text, "read_ahead_kb")? {
                0.0 => Ok("Without readahead, a file is read page by page.".to_owned()),
                kib => Err(format!("its readahead is {kib} KiB")),
            }
        }),
    }
}

/// The disk itself, or what device mapper makes of it.
fn device(cure: Cure, plan: &IncidentPlan, lower: &str) -> Step {
    let table = format!("dmsetup table {}", plan.service.name());
    let fault = plan.fault;
    match cure {
        Cure::Disk => {
            let command = format!("{table}; grep . /sys/block/{lower}/queue/scheduler");
            Step::new(command, move |text| {
                let target = if fault == Fault::SlowLeg { "mirror" } else { "linear" };
                match text.contains(target) && text.contains("[none]") {
                    true => Ok(format!(
                        "It is `{target}`, without a scheduler: nothing above the disk explains it, and another disk \
                         removes the cause."
                    )),
                    false => Err(format!("it is not {target}, or it has a scheduler")),
                }
            })
        }
        _ => Step::new(table, move |text| {
            let target = if fault == Fault::Errors { "flakey" } else { "delay" };
            let line = text.lines().find(|line| line.contains(target));
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let words = line.map(words).ok_or(format!("no target is {target}"))?;
            // Behind the target stand a disk and a sector. Later kernels print flakey's features, too.
            let place = words.iter().position(|word| word == target).unwrap_or(0);
            let flaky = words.get(place + 4).cloned().unwrap_or_default();
            let last = words.last().cloned().unwrap_or_default();
            let end = first_number(&words[0])
                .zip(first_number(&words[1]))
                .map(|(from, many)| from + many);
            let range = format!("the sectors from {} to {}", words[0], end.unwrap_or_default());
            Ok(match fault {
                Fault::Errors => {
                    format!("`flakey` lets each I/O in {range} fail, for {flaky} s out of two.")
                }
                Fault::SlowWrites => format!("`delay` lets each write wait for {last} ms."),
                _ => format!("`delay` lets each I/O in {range} wait for {last} ms."),
            })
        }),
    }
}

/// What a process does, the service or another one.
fn other_work(cure: Cure, plan: &IncidentPlan, disk: &str, usual: &Activity) -> Step {
    let process = plan.service.process();
    let whose = format!(
        "slow_io --min 1h --who --disk {disk} --duration 5s 2>/dev/null | grep -A8 '^ *PID'"
    );
    match cure {
        Cure::Cache => Step::new(
            "cd /sys/kernel/tracing/instances && mkdir -p way && cd way && \
             echo 1 > events/syscalls/sys_enter_fadvise64/enable && sleep 2 && \
             grep -o '[a-z]*-[0-9]* ' trace | sort | uniq -c; cd ..; rmdir way",
            |text| {
                let line = text.lines().find(|line| line.contains("tidyd-"));
                let calls = line.and_then(first_number).unwrap_or(0.0);
                match calls >= 10.0 {
                    true => Ok(format!(
                        "tidyd tells the page cache all the time to forget (posix_fadvise): {calls} times in 2 s."
                    )),
                    false => Err(format!("tidyd has called posix_fadvise {calls} times")),
                }
            },
        ),
        Cure::Load => {
            let rate = usual.rate(plan.service);
            let command =
                format!("for n in 1 2; do cat /run/{process}.status; sleep 5; done; {whose}");
            Step::new(command, move |text| overload(text, &process, rate))
        }
        Cure::Flushes => Step::new(whose, flushes),
        Cure::Copying => Step::new(whose, copying),
        _ => Step::new(
            "top -b -H -n 2 -d 4 | awk '/^top/ { tables++ } tables == 2' | sed -n '7,12p'",
            real_time,
        ),
    }
}

/// What top says of the threads that run before all others.
fn real_time(text: &str) -> Said {
    let used = sum(&column(text, "COMMAND", "%CPU"), &["sensord"]);
    let is_first = |line: &&str| {
        let priority = line.split_whitespace().nth(2).unwrap_or("");
        line.contains("sensord") && (priority.starts_with('-') || priority == "rt")
    };
    // One thread of it has the usual priority, and waits for the others.
    match (used >= 20.0, text.lines().find(is_first)) {
        (true, Some(_)) => Ok(format!(
            "sensord's threads of a real-time priority (PR is negative) run before all others, and take {used:.0} % of \
             a CPU together."
        )),
        (_, first) => Err(format!("sensord uses {used} % of a CPU: {first:?}")),
    }
}

/// What a table of processes says: whose small writes they are.
fn flushes(text: &str) -> Said {
    let ios = column(text, "PROCESS", "I/OS");
    let percent = 100.0 * sum(&ios, &["reportd", "jbd2"]) / sum(&ios, &[""]).max(1.0);
    match percent > 25.0 {
        true => Ok(format!(
            "reportd, and jbd2 for it, make {percent:.0} % of these I/Os, small ones, all the time: fsync."
        )),
        false => Err(format!("reportd and jbd2 make {percent:.0} % of the I/Os")),
    }
}

/// What a table of processes says: whose copy it is.
fn copying(text: &str) -> Said {
    let share = |value: &str| {
        let all = column(text, "PROCESS", value);
        100.0 * sum(&all, &["backupd"]) / sum(&all, &[""]).max(1.0)
    };
    let (ios, kib) = (share("I/OS"), share("KIB"));
    match ios.max(kib) > 25.0 {
        true => Ok(format!(
            "The copy of backupd makes {ios:.0} % of these I/Os, and {kib:.0} % of what is read and written."
        )),
        false => Err(format!("backupd makes {ios:.0} % of the I/Os, and {kib:.0} % of the KiB")),
    }
}

/// What a service's status, twice, and whose I/Os they are, say.
fn overload(text: &str, process: &str, usual: f64) -> Said {
    let requests: Vec<f64> =
        text.lines().filter_map(|line| line.strip_prefix("requests ")?.parse().ok()).collect();
    let [first, second] = requests[..] else { return Err("its status is odd".to_owned()) };
    let rate = (second - first) / 5.0;
    let ios = column(text, "PROCESS", "I/OS");
    let percent = 100.0 * sum(&ios, &[process]) / sum(&ios, &[""]).max(1.0);
    match rate > usual * 1.5 && percent > 60.0 {
        true => Ok(format!(
            "{percent:.0} % of the I/Os are the service's own: it answers {rate:.0} requests a second, and {usual:.0} \
             last week."
        )),
        false => Err(format!(
            "{rate:.0} requests a second, usually {usual:.0}; {percent:.0} % of the I/Os"
        )),
    }
}

/// A cgroup that nobody waits for has a limit that it reaches.
fn throttled() -> Step {
    let command = format!("cd {CHECKS}; grep . io.max; ps -o comm= -p $(cat cgroup.procs)");
    Step::new(command, |text| {
        match text.contains("riops=2 ") && text.contains("checkd") {
        true => Ok("checkd may read twice a second, and waits for that. It is the limit of its cgroup alone, and nobody \
                    waits for checkd."
            .to_owned()),
        false => Err("checkd has no limit".to_owned()),
    }
    })
}

/// What is odd with another service, or with a process.
fn odd(plan: &IncidentPlan, distractor: Distractor, fault: &Activity) -> Result<Step> {
    let other = plan.quick_service();
    let (process, rate) = (other.process(), fault.rate(other));
    Ok(match distractor {
        Distractor::Limit => {
            let group = format!("/sys/fs/cgroup/{}", other.name());
            Step::new(format!("grep . {group}/io.max"), move |text| {
                match text.contains("riops=50000") {
                    true => Ok(format!(
                        "{process} may read 50,000 times a second, and has {rate:.0} requests a second: it never gets there."
                    )),
                    false => Err(format!("{process} has no limit")),
                }
            })
        }
        Distractor::Readahead => {
            let disk = disk_of(other)?;
            Step::new(
                format!("grep . /sys/block/{disk}/queue/read_ahead_kb /dev/null"),
                move |text| match number_of(text, "read_ahead_kb")? {
                    256.0 => Ok(format!(
                        "The disk of {process} reads 256 KiB ahead, twice the usual: its lists are read in larger pieces."
                    )),
                    kib => Err(format!("its readahead is {kib} KiB")),
                },
            )
        }
        Distractor::Nice => Step::new("ps -o comm=,ni=,pcpu= -C indexd", |text| {
            let words: Vec<&str> = text.split_whitespace().collect();
            match words[..] {
                [_, "19", used, ..] => Ok(format!(
                    "indexd uses {used} % of a CPU, at the lowest priority (nice 19): whoever needs the CPU gets it."
                )),
                _ => Err("indexd has the usual priority".to_owned()),
            }
        }),
    })
}

/// The settings that a wrong answer may be about, as they are with the fault.
pub fn settings(plan: &IncidentPlan) -> Result<std::collections::BTreeMap<String, String>> {
    let disk = disk_of(plan.service)?;
    let lower = below(&disk)?.into_iter().next().context("no disk")?;
    let queue = format!("/sys/block/{lower}/queue");
    let files = [
        format!("{queue}/scheduler"),
        format!("{queue}/nr_requests"),
        format!("/sys/block/{disk}/queue/read_ahead_kb"),
    ];
    let read = |file: &String| {
        let name = file.rsplit('/').next().unwrap_or_default().to_owned();
        Some((name, fs::read_to_string(file).ok()?.trim().to_owned()))
    };
    Ok(files.iter().filter_map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const THROTTLED: &str = "\
    wait     6006.934   83 %      0.034   1006.632   4500.472    ####
   queue        6.874    0 %      0.020      0.442      0.467
  device      180.147    2 %      0.589      5.767      6.085    #
  mapper     1046.857   14 %      0.073      9.437   1000.461    ####
   total     7251.167  100 %      0.917   1006.632   4508.023    ##############################
";

    #[test]
    fn a_sentence_is_about_the_table_above_it() {
        let with = |limit: &str| no_cpu(&format!("{THROTTLED}io.max: '{limit}'\n"), 2.0);
        let said = with("").expect("it is quick");
        assert!(
            said.starts_with("wait has 83 % of the time, and a p99 of 1007 ms, but half"),
            "{said}"
        );
        assert!(with("254:0 riops=10").is_err());
        // What takes long for all is the I/O.
        let slow = THROTTLED.replace("      0.917   1006", "    500.917   1006");
        assert!(no_cpu(&format!("{slow}io.max: ''\n"), 2.0).is_err());
        let quick = THROTTLED.replace("1006.632", "6.632");
        let said = no_cpu(&format!("{quick}io.max: ''\n"), 2.0).expect("it is quick");
        assert!(said.starts_with("No part is long"), "{said}");
        assert!(no_cpu("", 2.0).is_err());
    }

    #[test]
    fn a_layer_is_the_one_with_most_of_the_time() {
        assert!(of_part(THROTTLED, Layer::Wait, 2.0).is_ok());
        for layer in [Layer::Queue, Layer::Device, Layer::Mapper] {
            assert!(of_part(THROTTLED, layer, 2.0).is_err(), "{layer:?}");
        }
        let short = THROTTLED.replace("1006.632", "10.632");
        assert!(of_part(&short, Layer::Wait, 2.0).is_err());
        let device = |p50: &str| {
            format!(
                "device 1.0 96 % {p50} 369.098 382.221 ##\ntotal 1.0 100 % {p50} 369.098 382.221 ##\n"
            )
        };
        assert!(of_part(&device("369.098"), Layer::Device, 8.0).is_ok());
        assert!(of_part(&device("8.098"), Layer::Device, 8.0).is_err());
    }

    #[test]
    fn misses_are_compared_with_those_of_others() {
        let table = |own: u64| {
            format!(
                "PID USER COMM READS HITS MISSES\n1 root shopd 5 6280 {own}\n2 root webd 5 6000 300\n\
                 3 root maild 5 6000 300\n"
            )
        };
        assert!(misses(&table(3528), "shopd").is_ok());
        assert!(misses(&table(350), "shopd").is_err());
        assert!(misses("", "shopd").is_err());
    }

    #[test]
    fn one_leg_is_slower_than_the_other_one() {
        let tables = |second: &str| {
            format!(
                "a: 1 I/Os\n sum share p50 p99 max ms\n device 1 9 % 2.1 9.1 9.9\n total 1 9 % 2.1 9.1 9.9\nb: 1 I/Os\n \
                 device 1 9 % 2.1 {second} 9.9\n total 1 9 % 2.1 9.1 9.9\n"
            )
        };
        let legs = ["a".to_owned(), "b".to_owned()];
        assert!(slow_leg(&tables("300.1"), &legs).is_ok());
        assert!(slow_leg(&tables("10.1"), &legs).is_err());
        assert!(slow_leg("a: 1 I/Os\n", &legs).is_err());
    }

    #[test]
    fn a_culprit_does_more_than_a_little() {
        let table = |process: &str, ios: u64, kib: u64| {
            format!(
                " PID PROCESS DISK OP I/OS KIB\n 1 maild dm-0 R 100 400\n 2 {process} dm-0 W {ios} {kib}\n"
            )
        };
        assert!(flushes(&table("jbd2/dm-0-8", 90, 90)).is_ok());
        assert!(flushes(&table("jbd2/dm-0-8", 10, 10)).is_err());
        assert!(flushes("").is_err());
        assert!(copying(&table("backupd", 3, 3072)).is_ok());
        assert!(copying(&table("backupd", 900, 10)).is_ok());
        assert!(copying(&table("backupd", 3, 10)).is_err());
        assert!(copying(&table("reportd", 900, 3072)).is_err());
    }

    #[test]
    fn a_real_time_thread_has_a_priority_and_the_cpu() {
        let top = |priority: &str, used: &str| {
            format!(
                " PID USER PR NI VIRT RES SHR S %CPU %MEM TIME+ COMMAND\n 1 root 20 0 1 1 1 S {used} 0.1 0:01 sensord\n \
                 2 root {priority} 0 1 1 1 R {used} 0.1 0:01 sensord\n"
            )
        };
        assert!(real_time(&top("-51", "40.1")).is_ok());
        assert!(real_time(&top("20", "40.1")).is_err());
        assert!(real_time(&top("-51", "0.3")).is_err());
    }

    #[test]
    fn too_many_requests_are_counted() {
        let text = |requests: u64| {
            format!(
                "requests 100\nslow 1\nrequests {requests}\nslow 1\n PID PROCESS DISK OP I/OS KIB\n 1 maild dm-0 R 900 1\n \
                 2 indexd dm-0 R 90 1\n"
            )
        };
        assert!(overload(&text(2100), "maild", 50.0).is_ok());
        assert!(overload(&text(350), "maild", 50.0).is_err());
        assert!(overload(&text(2100), "indexd", 50.0).is_err());
    }
}
