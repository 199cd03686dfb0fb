//! The exporter's canary, what it says of a disk that completes nothing, and the alerts that a real Prometheus makes
//! of it, beside disks that hang, that are slow, that are asked for too much, and that are fine.

use regex_lite::Regex;

use crate::{
    exporter::{BIOS_PORT, PORT, PROMETHEUS, get, start, start_prometheus},
    prelude::*,
};

tests![
    exporter_says_what_hangs_and_what_fails,
    exporter_counts_bios_that_are_chained_first,
    exporter_alerts_fire,
];

fn of(metric: &str, disk: &str) -> String {
    format!("storage_{metric}{{disk=\"{disk}\"}}")
}

/// Scrapes until this holds. Each scrape lets the canary read, if a second has passed since.
fn scrape_until(what: &str, holds: impl Fn(&Scrape) -> bool) -> Result<Scrape> {
    let mut last = None;
    wait_until(what, || {
        let scrape = Scrape::now()?;
        let found = holds(&scrape);
        last = Some(scrape);
        Ok(found)
    })?;
    last.context("no scrape")
}

/// A canary whose read waits for a disk that is suspended, and one whose disk gives an error. And a disk that has a
/// request, and does not complete it.
fn exporter_says_what_hangs_and_what_fails() -> Result<()> {
    let below = NullBlk::new("below", "")?;
    let table = format!("0 65536 linear /dev/{} 0", below.name);
    let halting = Mapped::new("halt", &table)?;
    let disk = halting.disk()?;
    let late = NullBlk::timer("late", 1500, "")?; // its partition scan takes ten times as long
    let [pending, wait, latency, made, seen, failed] = [
        "canary_pending_seconds",
        "canary_wait_seconds",
        "canary_latency_seconds",
        "canary_reads_total",
        "canary_reads_seen_total",
        "canary_reads_failed_total",
    ]
    .map(|metric| of(metric, &disk));
    let stalled = of("disk_stalled_seconds", &late.name);
    let running = start(&["--canary", &halting.path()])?;

    let good = scrape_until("a read", |it| it.0.contains_key(&wait) && it.get(&pending) == 0.0)?;
    ensure!(good.get(&stalled) == 0.0 && good.0.contains_key(&stalled), "{:?}", good.0);
    ensure!(good.get(&failed) == 0.0 && good.get(&seen) >= 1.0, "{:?}", good.0);

    let (began, reader) =
        (Instant::now(), Running::bash(&format!("exec {}", reads(&late.name, 4)))?);
    let stalls = scrape_until("a disk that has stalled", |it| it.get(&stalled) >= 0.5)?;
    let other = stalls.get(&of("disk_stalled_seconds", &below.name));
    let most = began.elapsed().as_secs_f64();
    ensure!(stalls.get(&stalled) <= most, "{stalled} is {} after {most} s", stalls.get(&stalled));
    ensure!(other == 0.0, "a disk with nothing to do has stalled for {other} s");
    reader.end_well()?;
    let after = Scrape::now()?.get(&stalled);
    ensure!(after == 0.0, "it has completed, and {stalled} is {after}");

    halting.suspend(true)?;
    let start = Instant::now();
    let looks = scrape_until("a read that waits", |it| it.get(&pending) > 0.0)
        .and_then(|first| Ok((first, scrape_until("its age", |it| it.get(&pending) >= 5.0)?)));
    let most = start.elapsed().as_secs_f64() + 2.0;
    halting.suspend(false)?; // or the exporter cannot be ended
    let (first, hangs) = looks?;
    let is_age = first.get(&pending) < 5.0 && hangs.get(&pending) <= most;
    ensure!(is_age, "{} s, then {} s of {most} s", first.get(&pending), hangs.get(&pending));
    let stale = [&wait, &latency].into_iter().find(|it| hangs.0.contains_key(*it));
    ensure!(stale.is_none(), "{stale:?} is that of an earlier read: {:?}", hangs.0);
    ensure!(hangs.get(&made) - hangs.get(&seen) == 1.0, "{:?}", hangs.0);
    let again = scrape_until("its end", |it| it.0.contains_key(&wait))?;
    ensure!(again.get(&made) == again.get(&seen), "{:?}", again.0);
    ensure!(again.get(&pending) == 0.0 && again.get(&seen) > hangs.get(&seen), "{:?}", again.0);

    // Errors of dm, which no disk has seen: they are not looked for.
    let name = halting.path().rsplit('/').next().context("no name")?.to_owned();
    shell(&format!(
        "export DM_DISABLE_UDEV=1; echo 0 65536 error | dmsetup load {name}; dmsetup resume {name}"
    ))?;
    let fails = scrape_until("errors", |it| it.get(&failed) >= 2.0)?;
    let lost = fails.get(&made) - fails.get(&seen) - fails.get(&failed) - 1.0;
    ensure!((-1.0..=0.0).contains(&lost), "{lost} are lost: {:?}", fails.0);
    ensure!(!fails.0.contains_key(&wait), "a read that failed took {}", fails.get(&wait));
    running.interrupt().map(drop)
}

/// Zeroes are written by bios, each of which is chained to the next one before that is submitted, and which the block
/// layer splits. None of them completes before the disk's time has passed, and all of their parts are known: the
/// kernel has no request more.
fn exporter_counts_bios_that_are_chained_first() -> Result<()> {
    // Shorter than it takes to submit the next one: then a bio ends before the one behind it is split.
    const MS: u64 = 1;
    let disk = NullBlk::timer("chained", MS, "memory_backed=1 size=64")?;
    let partition = disks::partitioned(&disk.name)?;
    let name = &disk.name;
    let exporter = start(&["--bios"])?;
    let min = format!("{MS}ms");
    let slow_io = Running::stage("slow_io", &["--min", &min, "--json", "--disk", name])?;
    let before = (Scrape::now()?, disks::stat(name)?);
    shell(&format!("for n in 1 2 3 4; do blkdiscard -z -l 16M /dev/{partition}; done"))?;
    // A bio may complete a little after its requests.
    let figure = |scrape: &Scrape, what: &str| scrape.get(&format!("storage_bio_seconds_{what}"));
    let (count, early) = (
        format!("count{{disk=\"{name}\",op=\"write\"}}"),
        format!("bucket{{disk=\"{name}\",op=\"write\",le=\"0.000786432\"}}"),
    );
    let after =
        scrape_until("the bios", |it| figure(it, &count) - figure(&before.0, &count) >= 64.0)?;
    let requests = disks::stat(name)?[4] - before.1[4];
    let bios = figure(&after, &count) - figure(&before.0, &count);
    let short = figure(&after, &early) - figure(&before.0, &early);
    ensure!(requests as f64 > 2.0 * bios, "{bios} bios in {requests} requests: none is split");
    ensure!(short == 0.0, "{short} of {bios} bios took less than the disk's {MS} ms");
    let missing = after.get(&format!(
        "storage_unaccounted_requests_total{{disk=\"{name}\",missing_in=\"exporter\"}}"
    ));
    ensure!(missing == 0.0, "{missing} of {requests} requests are missing");
    let slow = slow_io.interrupt()?;
    let lines = objects(&slow, "bio")?;
    let seen = lines
        .iter()
        .filter(|line| line["operation"].as_str().is_some_and(|op| op.contains('W')))
        .count();
    ensure!(seen as f64 == bios, "slow_io has {seen} of {bios} bios above {MS} ms");
    exporter.interrupt().map(drop)
}

/// The rules as they are, with shorter times: of windows, and of how long a condition has to hold. The limits of
/// what is measured stay.
fn hurried(rules: &str, times: u64) -> Result<String> {
    let mut hurried = String::new();
    let mut rest = rules;
    let time = Regex::new(r"(?:\[|for: )(\d+)([mhd])\b")?;
    while let Some(found) = time.captures(rest) {
        let [whole, number, unit] = [0, 1, 2].map(|n| found.get(n));
        let (whole, number, unit) =
            (whole.context("all")?, number.context("a number")?, unit.context("a unit")?);
        let seconds = match unit.as_str() {
            "m" => 60,
            "h" => 3600,
            _ => 86_400,
        };
        let seconds = number.as_str().parse::<u64>()? * seconds / times;
        hurried += &rest[..number.start()];
        hurried += &format!("{}s", seconds.max(4));
        rest = &rest[whole.end()..];
    }
    ensure!(!hurried.is_empty(), "the rules have no times");
    Ok(hurried + rest)
}

/// An alert that fires: its name, and the exporter's port, disk and operation, as far as it has these.
type Alert = [String; 4];

/// Those that fire now.
fn firing() -> Result<BTreeSet<Alert>> {
    let alerts: Value = serde_json::from_str(&get(PROMETHEUS, "/api/v1/alerts")?)?;
    let alerts = alerts["data"]["alerts"].as_array().context("no alerts")?;
    let firing = alerts.iter().filter(|alert| alert["state"] == "firing");
    Ok(firing
        .map(|alert| {
            let label = |name: &str| alert["labels"][name].as_str().unwrap_or("").to_owned();
            let port = label("instance").trim_start_matches("127.0.0.1:").to_owned();
            [label("alertname"), port, label("disk"), label("op")]
        })
        .collect())
}

/// Waits until these fire of those that count, and looks whether they stay, and no other one comes.
fn fire_and_stay(expected: &BTreeSet<Alert>, counts: impl Fn(&Alert) -> bool) -> Result<()> {
    let now = || -> Result<BTreeSet<Alert>> { Ok(firing()?.into_iter().filter(&counts).collect()) };
    let mut last = BTreeSet::new();
    let fired = wait_until("the alerts", || {
        last = now()?;
        Ok(last == *expected)
    });
    fired.with_context(|| format!("{last:?}, not {expected:?}"))?;
    let fired = Instant::now();
    while fired.elapsed() < Duration::from_secs(10) {
        let now = now()?;
        ensure!(now == *expected, "{now:?}, not {expected:?}");
        thread::sleep(Duration::from_secs(1));
    }
    Ok(())
}

/// Two exporters, of requests and of bios, and a third that is not there. One disk is slow, one gets more than it can
/// do, one is kept by a cgroup's limit, one hangs, and one is fine. Fires what should, and of these disks and
/// exporters nothing else.
fn exporter_alerts_fire() -> Result<()> {
    needs("prometheus")?;
    let directory = "/run/prometheus-alerts";
    fs::remove_dir_all(directory).ok();
    fs::create_dir_all(directory)?;
    let rules = fs::read_to_string(workspace().join("tools/exporter/rules.yml"))?;
    fs::write(format!("{directory}/rules.yml"), hurried(&rules, 30)?)?;
    shell(&format!("promtool check rules {directory}/rules.yml"))?;
    let config = format!(
        "global: {{scrape_interval: 2s, evaluation_interval: 1s}}\nrule_files: [rules.yml]\n\
         scrape_configs:\n- job_name: storage\n  static_configs:\n  \
         - targets: ['127.0.0.1:{PORT}', '127.0.0.1:{BIOS_PORT}', '127.0.0.1:1']\n"
    );
    fs::write(format!("{directory}/prometheus.yml"), config)?;

    let fine = NullBlk::timer("fine", 1, "")?;
    let slow = NullBlk::timer("slow", 400, "")?;
    let queue = NullBlk::one_tag("queue", 30)?;
    queue.queues()?;
    let limited = NullBlk::timer("limited", 1, "")?;
    let below = NullBlk::new("below", "")?;
    let halting = Mapped::new("halt", &format!("0 65536 linear /dev/{} 0", below.name))?;
    let halt = halting.disk()?;
    // Its driver reads what it lies on: as long as that is suspended, no request completes.
    let hangs =
        shell(&format!("modprobe -qa loop mq-deadline; losetup --find --show {}", halting.path()))?;
    let hangs = hangs.trim().trim_start_matches("/dev/");
    let cgroup = slow_io::cgroup(
        "limited",
        "io.max",
        &format!("{} riops=3", disks::numbers(&limited.name)?),
    )?;
    let listen = format!("127.0.0.1:{BIOS_PORT}");
    let exporters = [
        start(&["--canary", &halting.path()])?,
        Running::stage("exporter", &["--parts", "--listen", &listen])?,
    ];
    let prometheus = start_prometheus(directory)?;

    let load = |disk: &str, options: &str| {
        let fio = fio_direct_command(disk, &format!("--time_based --runtime=600 {options}"));
        Running::bash(&format!("exec {fio} >/dev/null"))
    };
    let loads = [
        load(&fine.name, "--rate_iops=20 --ioengine=psync")?,
        load(&slow.name, "--ioengine=psync")?,
        load(&queue.name, "--iodepth=16")?,
        // A bio waits for the bios before it.
        Running::bash(&format!(
            "echo $$ >{cgroup}/cgroup.procs; exec {} >/dev/null",
            fio_direct_command(&limited.name, "--time_based --runtime=600 --iodepth=4")
        ))?,
    ];
    halting.suspend(true)?;
    let reader = Running::bash(&disks::reads(hangs, 1))?;
    reader.waits_in("] __blkdev_direct_IO_simple+")?;
    // Nobody can read its settings any more; what it has in flight can be read.
    let set =
        |(file, value)| Running::bash(&format!("echo {value} >/sys/block/{hangs}/queue/{file}"));
    let settings = [("scheduler", "mq-deadline"), ("max_sectors_kb", "64")].map(set);

    let (requests, bios) = (PORT.to_string(), BIOS_PORT.to_string());
    let alert =
        |name: &str, port: &str, disk: &str, op: &str| [name, port, disk, op].map(str::to_owned);
    let expected = BTreeSet::from([
        alert("DiskIsSlow", &requests, &slow.name, "read"),
        alert("QueueIsLong", &requests, &queue.name, "read"),
        alert("CanaryHangs", &requests, &halt, ""),
        alert("DiskHangs", &requests, hangs, ""),
        // Of bios, there is one time, and the mean of each part.
        alert("DiskIsSlow", &bios, &slow.name, "read"),
        alert("DiskIsSlow", &bios, &queue.name, "read"),
        alert("DiskIsSlow", &bios, &limited.name, "read"),
        alert("QueueIsLong", &bios, &queue.name, "read"),
        alert("QueueIsLong", &bios, &limited.name, "read"),
        alert("DiskHangs", &bios, hangs, ""),
        alert("ExporterIsDown", "1", "", ""),
    ]);
    let ours = [&fine, &slow, &queue, &limited, &below].map(|disk| &*disk.name);
    let ours = [&ours[..], &[&halt, hangs, ""]].concat();
    // The guest's own disks may be slow: the host is busy. These two may be so, too, if it stops the guest.
    let may_be_slow =
        [&queue.name, &limited.name].map(|it| alert("DiskIsSlow", &requests, it, "read"));
    // These come after a minute or two.
    let is_later = |name: &str| ["DiskIsNotAudited", "LookIsOld"].contains(&name);
    let counts = |alert: &Alert| {
        ours.contains(&&*alert[2]) && !may_be_slow.contains(alert) && !is_later(&alert[0])
    };
    let judged = fire_and_stay(&expected, counts);
    halting.suspend(false)?; // or the exporter cannot be ended
    let ended = reader.end_well();
    for setting in settings {
        setting?.end()?;
    }
    shell(&format!("losetup --detach /dev/{hangs}"))?;
    judged?;
    ended?;
    for load in loads {
        load.signal(Signal::TERM)?;
        load.end()?;
    }
    shell(&format!("rmdir {cgroup}"))?;
    prometheus.signal(Signal::TERM)?;
    prometheus.end()?;
    exporters.into_iter().try_for_each(|exporter| exporter.interrupt().map(drop))
}
