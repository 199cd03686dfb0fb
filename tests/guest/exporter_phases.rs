//! How the exporter divides the time of a request, beside ftrace's times of the same requests.

use crate::{
    exporter::{PHASES, Quiet, UNDIVIDED, later},
    prelude::*,
    table,
};

tests![exporter_divides_requests, exporter_divides_what_was_given_back];

/// Loads of which each request takes a millisecond or more. None makes several in a plug: from 6.9 on, the kernel then
/// notes the time of the first one for all that follow.
const LOADS: &str = "one_tag discard partition paced";

/// Loads whose driver gives requests back, with an error, or after a part.
const GIVEN_BACK: &str = "requeue partial";

/// How many requests of a disk and an operation have ended, and how many ns drivers had them: at least, and at most.
type Drivers = HashMap<(String, &'static str), (u64, [u64; 2])>;

fn exporter_divides_requests() -> Result<()> {
    let running = exporter::start(&[])?;
    for case in LOADS.split_whitespace() {
        divides(case).context(case)?;
    }
    counts_what_has_no_stamp()?;
    running.interrupt().map(drop)
}

fn exporter_divides_what_was_given_back() -> Result<()> {
    let running = exporter::start(&[])?;
    for case in GIVEN_BACK.split_whitespace() {
        divides(case).context(case)?;
    }
    // One tag: all have one address, and wait for longer than the driver had the one before.
    let disk = ScsiDebug::new("ndelay=20000000 opts=0x10 every_nth=10 max_queue=1 dev_size_mb=64")?;
    fs::write(format!("/sys/block/{}/queue/scheduler", disk.name), "mq-deadline")?;
    let load = "--bs=64k --iodepth=4 --number_ios=40 --size=4M";
    divides_load(|| fio_direct(&disk.name, load).map(drop))?;
    running.interrupt().map(drop)
}

/// The device had the requests of a load as long as ftrace says, and the rest of their time is the queue's.
fn divides(case: &str) -> Result<()> {
    let mut load = table::set_up(case)?;
    divides_load(|| load().map(drop))
}

fn divides_load(load: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = Quiet::now()?;
    // The kernel takes the time between the first one and the return.
    let events = ["block/block_rq_issue", "block/block_rq_requeue", "block/block_rq_complete"];
    let mut hooks = events.map(|event| Hook::Tracepoint(event, "")).to_vec();
    hooks.push(Hook::Return("blk_mq_start_request"));
    let ftrace = Ftrace::new(&hooks)?;
    load()?;
    let after = Quiet::now()?;
    let drivers = drivers(&ftrace.events()?)?;
    ensure!(!drivers.is_empty(), "ftrace has seen nothing");
    for ((disk, operation), (number, between)) in &drivers {
        let grown = |metric: String| {
            let of = |scrape: &Scrape| scrape.figure(&metric, disk, operation);
            of(&after.scrape) - of(&before.scrape)
        };
        let [count, queues, devices] = PHASES.map(|name| grown(format!("{name}_count")));
        let undivided = grown(format!("{UNDIVIDED}_count"));
        let what = format!("{disk} {operation}: {count}, {queues} {devices} {undivided}");
        ensure!(count == *number as f64 && queues == devices, "{what}; ftrace {number}");
        ensure!(undivided == 0.0 && devices == count, "{what}: of these, the kernel notes all");
        let [all, queue, device] = PHASES.map(|name| grown(format!("{name}_sum")) * 1e3);
        let [least, most] = between.map(|ns| ns as f64 / 1e6);
        let what = format!(
            "{disk} {operation}: {all:.3} ms, {queue:.3} + {device:.3} ms; ftrace {least} to {most} ms"
        );
        ensure!((all - queue - device).abs() < 1e-3, "{what}");
        let (early, late) = (least - later(count, least), most + later(count, most));
        ensure!((early..=late).contains(&device), "{what}");
        compared(&what);
    }
    Ok(())
}

/// As long as a driver had each request, by its issues, requeues and ends. What is given back after a part begins with
/// another sector when it is issued again: the one behind the last is the same.
fn drivers(events: &[Event]) -> Result<Drivers> {
    let (mut started, mut had) = (HashMap::<_, [u64; 2]>::new(), HashMap::<_, [u64; 2]>::new());
    let (mut starting, mut ended) = (HashMap::new(), Drivers::new());
    for event in events {
        if event.name == "blk_mq_start_request__return" {
            let key = starting.remove(&event.place());
            if let Some([_, latest]) = key.and_then(|key| started.get_mut(&key)) {
                *latest = event.time;
            }
            continue;
        }
        let mut words = event.text.split_whitespace();
        let (numbers, rwbs) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let disk = fs::read_link(format!("/sys/dev/block/{}", numbers.replace(',', ":")))?;
        let disk = disk.file_name().context("no disk")?.to_string_lossy().into_owned();
        let sectors = run::between(&event.text, " + ", " ")?.parse::<u64>()?;
        let key = (disk.clone(), event.sector()?.wrapping_add(sectors));
        if event.name == "block_rq_issue" {
            started.insert(key.clone(), [event.time; 2]);
            starting.insert(event.place(), key);
            continue;
        }
        let Some([from, to]) = started.remove(&key) else { continue }; // the end of a part
        let before = had.remove(&key).unwrap_or_default();
        let until = [before[0] + event.time - to, before[1] + event.time - from];
        if event.name == "block_rq_requeue" {
            had.insert(key, until);
            continue;
        }
        let (number, ns) = ended.entry((disk, operation(rwbs)?)).or_default();
        *number += 1;
        ns.iter_mut().zip(until).for_each(|(sum, ns)| *sum += ns);
    }
    Ok(ended)
}

/// `FWS`: a write after a flush; `FF`: a flush.
fn operation(rwbs: &str) -> Result<&'static str> {
    let behind_a_flush = rwbs.strip_prefix('F').filter(|rest| !rest.is_empty());
    Ok(match behind_a_flush.unwrap_or(rwbs).chars().next() {
        Some('R') => "read",
        Some('W') => "write",
        Some('D') => "discard",
        Some('F') => "flush",
        _ => bail!("odd: {rwbs}"),
    })
}

/// After each write of this load, an fsync asks for a flush by a write without data, which no driver gets.
fn counts_what_has_no_stamp() -> Result<()> {
    let mut load = table::set_up("after_flushes")?;
    let disk = disks::virtio()?;
    let ftrace = Ftrace::new(&[Hook::Tracepoint("block/block_bio_queue", "")])?;
    let before = Quiet::now()?;
    load()?;
    let after = Quiet::now()?;
    let is_empty = |event: &&Event| event.text.contains(" FW") && event.text.contains(" + 0 [");
    let empty = ftrace.events()?.iter().filter(is_empty).count() as f64;
    let grown = |metric: &str, operation: &str| {
        let of = |scrape: &Scrape| scrape.figure(metric, &disk, operation);
        of(&after.scrape) - of(&before.scrape)
    };
    let all = [PHASES[0], PHASES[2], UNDIVIDED];
    let [writes, devices, undivided] = all.map(|name| grown(&format!("{name}_count"), "write"));
    let what = format!(
        "{writes} writes, {devices} divided, {undivided} not; ftrace has {empty} without data"
    );
    let is_right = undivided == empty && devices + undivided == writes;
    ensure!(is_right && undivided >= 50.0, "{what}");
    let ms = |name: &str| grown(&format!("{name}_sum"), "write") * 1e3;
    let [sum, queue, device] = PHASES.map(ms);
    let unknown = ms(UNDIVIDED);
    let times = format!("{sum:.3} ms; {queue:.3}, {device:.3}, undivided {unknown:.3}");
    ensure!(unknown > 0.0 && (sum - queue - device - unknown).abs() < 1e-3, "{times}");
    let [flushes, devices, undivided] = all.map(|name| grown(&format!("{name}_count"), "flush"));
    ensure!(
        flushes >= 50.0 && devices == flushes && undivided == 0.0,
        "{flushes} flushes, {devices} divided, {undivided} not"
    );
    compared(&what);
    Ok(())
}
